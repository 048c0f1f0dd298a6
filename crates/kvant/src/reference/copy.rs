use crate::ops::copy::Call;

pub(crate) fn run(_call: &Call) {
    unimplemented!()
}
