//! Every operation on every device against the f64 reference.

mod add;
mod add_bias;
mod attend;
mod causal_conv;
mod codec;
mod collectives;
mod delta_rule;
mod gate;
mod gated;
mod hadamard;
mod kv;
mod linear;
mod moe;
mod norm_rope;
mod rms_norm;
mod sample;
mod softcap;
mod spread;

use kvant::{Device, Error, Result, Tensor, ops::StateRuns};

/// Rows and columns of element-wise operations: none, one, not a multiple of a vector, more than a threadgroup.
const SIZES: [(usize, usize); 8] = [(0, 5), (1, 1), (1, 256), (3, 7), (5, 65), (2, 1023), (2, 1028), (33, 64)];

/// Runs of four rows beyond the rows, not in order, of slot `count`, which does not exist, and of one slot twice: host
/// devices refuse them, and GPUs skip what they cannot compute.
fn check_refused_runs(device: &Device, count: u32, attempt: impl Fn(&StateRuns) -> Result<()>) {
    let upload = |words: &[u32]| Tensor::from_slice(device, words, &[words.len()]).unwrap();
    let attempt = |starts: &[u32], slots: &[u32]| {
        attempt(&StateRuns::from_tensors(upload(starts), upload(slots), upload(&vec![0; slots.len()]), 4))
    };
    attempt(&[0, 2, 4], &[1, 0]).unwrap();
    let wrong = [attempt(&[0, 2, 5], &[1, 0]), attempt(&[0, 3, 2], &[1, 0]), attempt(&[0, 2, 4], &[1, count])];
    let twice = attempt(&[0, 2, 4], &[1, 1]);
    if crate::common::sees_indices(device) {
        assert!(wrong.iter().all(|result| matches!(result, Err(Error::OutOfRange { .. }))), "{device}: {wrong:?}");
        assert!(matches!(twice, Err(Error::Value { arg: "runs.slots", .. })), "{device}: {twice:?}");
    } else {
        wrong.into_iter().chain([twice]).for_each(|result| result.unwrap());
    }
}
