use super::Cpu;
use crate::ops::kv_write::Call;

pub(crate) fn run(cpu: &Cpu, _call: &Call) {
    let _ = cpu;
    unimplemented!()
}
