use crate::ops::sample::Call;

pub(crate) fn run(_call: &Call) {
    unimplemented!()
}
