//! causal_conv against the reference.

use super::{KEPT_RUNS, KEPT_SLOTS, check_refused_runs, runs_that_keep};
use crate::common::{Bound, FLOATS, Out, Rng, conform, input, run};
use kvant::{
    DType, Device, Tensor,
    ops::{self, CausalConv, StateRuns, StateSlots},
};

/// Runs of a call: (slot, tokens before, rows).
type Runs = &'static [(u32, u32, u32)];

/// Prompts and single tokens, shorter and longer than the taps and than the rows of a GPU's thread; an inactive run.
const RUNS: [Runs; 6] = [
    &[(0, 0, 1)],
    &[(1, 5, 1)],
    &[(2, 0, 5), (0, 9, 1)],
    &[(0, 3, 31), (StateRuns::INACTIVE, 0, 4), (3, 0, 2)],
    &[(1, 0, 33), (2, 7, 64), (0, 1, 65)],
    &[(0, 0, 300)],
];
const SLOTS: usize = 4;

/// A state that is written in place, between rows of a pattern.
fn state(device: &Device, dtype: DType, values: &[f32], shape: &[usize]) -> kvant::Result<Out> {
    let out = Out::new(device, dtype, shape)?;
    out.tensor.write_bytes(&crate::common::encode(dtype, values))?;
    Ok(out)
}

#[test]
fn causal_conv() {
    let mut rng = Rng::of("causal_conv");
    for runs in RUNS {
        let rows = runs.iter().map(|run| run.2 as usize).sum::<usize>();
        for (channels, taps) in [(1, 2), (7, 4), (65, 3), (515, 4), (24, 8)] {
            for x_type in FLOATS {
                let [weight_type, state_type, out_type] = std::array::from_fn(|_| rng.pick(&FLOATS));
                let (has_bias, silu) = (rng.below(2) == 0, rng.below(2) == 0);
                let case = format!(
                    "causal_conv {runs:?} of {channels} channels, {taps} taps, {x_type}, weight {weight_type}, state \
                     {state_type}, out {out_type}, bias {has_bias}, silu {silu}"
                );
                conform(&case, |device| {
                    let mut rng = Rng::of(&case);
                    let x = input(device, x_type, &rng.normals(rows * channels), &[rows, channels])?;
                    let weight = input(device, weight_type, &rng.normals(channels * taps), &[channels, taps])?;
                    let bias = input(device, DType::F32, &rng.normals(channels), &[channels])?;
                    let shape = [SLOTS, taps - 1, channels];
                    let state = state(device, state_type, &rng.normals(shape.iter().product()), &shape)?;
                    let out = Out::new(device, out_type, &[rows, channels])?;
                    out.tensor.write_bytes(&vec![0; out.tensor.bytes()])?;
                    let runs = StateRuns::new(device, runs)?;
                    let slots = StateSlots::new(&state.tensor)?;
                    let args = CausalConv::new(&x, &weight, &slots, &runs, &out.tensor)
                        .bias(has_bias.then_some(&bias))
                        .silu(silu);
                    run(device, |enc| ops::causal_conv(enc, &args))?;
                    Ok(vec![out.close_within("out", Bound::of(out_type).times(4.0))?, state.same("state")?])
                });
            }
        }
    }
}

/// States after several rows of a run.
#[test]
fn kept_states() {
    for (index, runs) in KEPT_RUNS.iter().enumerate() {
        let rows = runs.iter().map(|run| run.2 as usize).sum::<usize>();
        for (channels, taps) in [(1, 2), (70, 4), (9, 3), (24, 8)] {
            let state_type = FLOATS[(index + taps) % FLOATS.len()];
            let case = format!("causal_conv {runs:?} of {channels} channels, {taps} taps, state {state_type}");
            conform(&case, |device| {
                let mut rng = Rng::of(&case);
                let x = input(device, DType::BF16, &rng.normals(rows * channels), &[rows, channels])?;
                let weight = input(device, DType::F32, &rng.normals(channels * taps), &[channels, taps])?;
                let shape = [KEPT_SLOTS, taps - 1, channels];
                let state = state(device, state_type, &rng.normals(shape.iter().product()), &shape)?;
                let out = Out::new(device, DType::F32, &[rows, channels])?;
                out.tensor.write_bytes(&vec![0; out.tensor.bytes()])?;
                let (slots, runs) = (StateSlots::new(&state.tensor)?, runs_that_keep(device, runs)?);
                run(device, |enc| ops::causal_conv(enc, &CausalConv::new(&x, &weight, &slots, &runs, &out.tensor)))?;
                Ok(vec![out.close_within("out", Bound::of(DType::F32).times(4.0))?, state.same("state")?])
            });
        }
    }
}

/// A prompt at once and in parts of any lengths: the same bits.
#[test]
fn parts_of_a_prompt_give_its_bits() {
    let (rows, channels, taps) = (70, 33, 4);
    let mut rng = Rng::of("parts of a convolution");
    let (values, weights) = (rng.normals(rows * channels), rng.normals(channels * taps));
    for device in crate::common::devices() {
        let x = input(device, DType::BF16, &values, &[rows, channels]).unwrap();
        let weight = input(device, DType::F32, &weights, &[channels, taps]).unwrap();
        let result = |parts: &[usize]| {
            let state = Tensor::zeros(device, DType::BF16, &[1, taps - 1, channels]).unwrap();
            let slots = StateSlots::new(&state).unwrap();
            let out = Tensor::zeros(device, DType::F32, &[rows, channels]).unwrap();
            let mut at = 0;
            for &part in parts {
                let runs = StateRuns::new(device, &[(0, at as u32, part as u32)]).unwrap();
                let (x, out) = (x.rows(at..at + part).unwrap(), out.rows(at..at + part).unwrap());
                run(device, |enc| ops::causal_conv(enc, &CausalConv::new(&x, &weight, &slots, &runs, &out))).unwrap();
                at += part;
            }
            (out.to_vec::<f32>().unwrap(), state.to_f32().unwrap())
        };
        let whole = result(&[rows]);
        for parts in [&[1, 1, 1, 67][..], &[2, 33, 35], &[40, 1, 29]] {
            assert!(result(parts) == whole, "{device}: {parts:?}");
        }
    }
}

/// The host refuses runs beyond the rows, states that do not exist, and a state of two runs. A GPU computes the rest.
#[test]
fn runs_out_of_range() {
    for device in crate::common::devices() {
        let x = input(device, DType::F32, &[1.0; 8], &[4, 2]).unwrap();
        let weight = input(device, DType::F32, &[1.0; 4], &[2, 2]).unwrap();
        let attempt = |runs: &StateRuns| {
            let state = state(device, DType::F32, &[0.0; 4], &[2, 1, 2]).unwrap();
            let slots = StateSlots::new(&state.tensor).unwrap();
            let out = Out::new(device, DType::F32, &[4, 2]).unwrap();
            let args = CausalConv::new(&x, &weight, &slots, runs, &out.tensor);
            let result = run(device, |enc| ops::causal_conv(enc, &args));
            out.bytes().unwrap();
            state.bytes().unwrap();
            result
        };
        check_refused_runs(device, 2, attempt);
    }
}
