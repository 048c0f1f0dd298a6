use super::Cpu;
use crate::ops::moe::{combine, route};

pub(crate) fn run_route(cpu: &Cpu, _call: &route::Call) {
    let _ = cpu;
    unimplemented!()
}

pub(crate) fn run_combine(cpu: &Cpu, _call: &combine::Call) {
    let _ = cpu;
    unimplemented!()
}
