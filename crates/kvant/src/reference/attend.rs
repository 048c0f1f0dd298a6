use crate::ops::attend::Call;

pub(crate) fn run(_call: &Call) {
    unimplemented!()
}
