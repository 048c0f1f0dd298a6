use crate::ops::gate::Call;

pub(crate) fn run(_call: &Call) {
    unimplemented!()
}
