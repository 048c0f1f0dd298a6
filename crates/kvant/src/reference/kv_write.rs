use crate::ops::kv_write::Call;

pub(crate) fn run(_call: &Call) {
    unimplemented!()
}
