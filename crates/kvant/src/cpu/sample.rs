use super::Cpu;
use crate::ops::sample::Call;

pub(crate) fn run(cpu: &Cpu, _call: &Call) {
    let _ = cpu;
    unimplemented!()
}
