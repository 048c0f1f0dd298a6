use crate::ops::kv_read::Call;

pub(crate) fn run(_call: &Call) {
    unimplemented!()
}
