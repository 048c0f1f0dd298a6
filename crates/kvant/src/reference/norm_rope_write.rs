use crate::ops::norm_rope_write::Call;

pub(crate) fn run(_call: &Call) {
    unimplemented!()
}
