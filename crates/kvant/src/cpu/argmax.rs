use super::Cpu;
use crate::ops::argmax::Call;

pub(crate) fn run(cpu: &Cpu, _call: &Call) {
    let _ = cpu;
    unimplemented!()
}
