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

/// Runs of four rows beyond the rows, not in order, of slot `count`, which does not exist, and two runs that write one
/// slot, or the slot that the other one reads: host devices refuse them, and GPUs skip what they cannot compute.
fn check_refused_runs(device: &Device, count: u32, attempt: impl Fn(&StateRuns) -> Result<()>) {
    let upload = |words: &[u32]| Tensor::from_slice(device, words, &[words.len()]).unwrap();
    let attempt = |starts: &[u32], slots: &[u32], [first, last]: [u32; 2]| {
        let after = upload(&[StateRuns::INACTIVE, first, StateRuns::INACTIVE, last]);
        attempt(&StateRuns::from_tensors(upload(starts), upload(slots), upload(&vec![0; slots.len()]), after, 4))
    };
    attempt(&[0, 2, 4], &[1, 0], [1, 0]).unwrap();
    let wrong = [
        attempt(&[0, 2, 5], &[1, 0], [1, 0]),
        attempt(&[0, 3, 2], &[1, 0], [1, 0]),
        attempt(&[0, 2, 4], &[1, count], [1, 0]),
        attempt(&[0, 2, 4], &[1, 0], [1, count]),
    ];
    let twice = [attempt(&[0, 2, 4], &[1, 0], [1, 1]), attempt(&[0, 2, 4], &[1, 0], [0, 1])];
    if crate::common::sees_indices(device) {
        assert!(wrong.iter().all(|result| matches!(result, Err(Error::OutOfRange { .. }))), "{device}: {wrong:?}");
        assert!(matches!(twice[0], Err(Error::Value { arg: "runs.after", .. })), "{device}: {twice:?}");
        assert!(matches!(twice[1], Err(Error::Value { arg: "runs.slots", .. })), "{device}: {twice:?}");
    } else {
        wrong.into_iter().chain(twice).for_each(|result| result.unwrap());
    }
}

/// A run that keeps states after its last rows: (slot, tokens before, rows, rows that are kept, whether the first of
/// these states replaces that of the slot).
type KeptRun = (u32, u32, u32, u32, bool);

/// Runs that keep all states or some, in place or not, beside runs that read the same state, and long ones.
const KEPT_RUNS: [&[KeptRun]; 6] = [
    &[(0, 3, 3, 3, true)],
    &[(0, 3, 5, 5, true), (1, 0, 4, 3, false), (2, 9, 1, 1, false)],
    &[(0, 2, 16, 16, false), (0, 2, 9, 4, false)],
    &[(1, 4, 40, 1, false), (0, 1, 7, 7, true), (2, 0, 100, 1, false)],
    &[(2, 0, 2, 2, true), (StateRuns::INACTIVE, 0, 3, 3, false), (1, 5, 3, 1, true)],
    &[(1, 4, 70, 1, false)],
];
/// Slots for these runs.
const KEPT_SLOTS: usize = 24;

/// Uploads runs. States that replace no other are in the slots from 3 on.
fn runs_that_keep(device: &Device, runs: &[KeptRun]) -> Result<StateRuns> {
    let (mut after, mut free) = (Vec::new(), 3..);
    for &(slot, _, rows, kept, in_place) in runs {
        after.extend((kept..rows).map(|_| StateRuns::INACTIVE));
        let own = in_place.then_some(slot).into_iter().chain(&mut free);
        after.extend(own.take(kept as usize));
    }
    let rows: Vec<_> = runs.iter().map(|&(slot, past, rows, ..)| (slot, past, rows)).collect();
    StateRuns::with_after(device, &rows, Tensor::from_slice(device, &after, &[after.len()])?)
}
