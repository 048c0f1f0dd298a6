use crate::ops::norm_rope::Call;

pub(crate) fn run(_call: &Call) {
    unimplemented!()
}
