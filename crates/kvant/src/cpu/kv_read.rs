use super::Cpu;
use crate::ops::kv_read::Call;

pub(crate) fn run(cpu: &Cpu, _call: &Call) {
    let _ = cpu;
    unimplemented!()
}
