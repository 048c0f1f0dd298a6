use crate::ops::embed::Call;

pub(crate) fn run(_call: &Call) {
    unimplemented!()
}
