use crate::ops::softcap::Call;

pub(crate) fn run(_call: &Call) {
    unimplemented!()
}
