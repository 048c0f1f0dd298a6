use super::io;
use crate::ops::softcap::Call;

/// cap · tanh(x / cap).
pub fn softcap(x: f64, cap: f64) -> f64 {
    cap * (x / cap).tanh()
}

pub(crate) fn run(call: &Call) {
    let out: Vec<f64> = io::load(&call.x).iter().map(|&x| softcap(x, call.cap.into())).collect();
    io::store(&call.out, &out);
}
