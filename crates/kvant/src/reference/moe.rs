use crate::ops::moe::{combine, route};

pub(crate) fn run_route(_call: &route::Call) {
    unimplemented!()
}

pub(crate) fn run_combine(_call: &combine::Call) {
    unimplemented!()
}
