use super::Cpu;
use crate::ops::norm_rope_write::Call;

pub(crate) fn run(cpu: &Cpu, _call: &Call) {
    let _ = cpu;
    unimplemented!()
}
