//! delta_rule against the reference.

use super::{KEPT_RUNS, KEPT_SLOTS, check_refused_runs, runs_that_keep};
use crate::common::{Bound, FLOATS, Out, Output, Rng, assert_close, conform, encode, input, run};
use kvant::{
    CpuOptions, DType, Device, DeviceKind, Result, Tensor,
    ops::{self, DeltaRule, StateRuns, StateSlots},
};

/// Runs of a call: (slot, tokens before, rows).
type Runs = &'static [(u32, u32, u32)];

const RUNS: [Runs; 5] = [
    &[(1, 0, 1)],
    &[(0, 4, 1), (2, 9, 1)],
    &[(0, 3, 17), (StateRuns::INACTIVE, 0, 2), (2, 0, 1)],
    &[(2, 0, 64), (1, 1, 65)],
    &[(0, 0, 300)],
];
const SLOTS: usize = 3;

#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    key_heads: usize,
    key_dim: usize,
    value_dim: usize,
    tiled: bool,
}

const SHAPES: [Shape; 6] = [
    Shape { heads: 1, key_heads: 1, key_dim: 32, value_dim: 16, tiled: false },
    Shape { heads: 4, key_heads: 2, key_dim: 64, value_dim: 64, tiled: false },
    Shape { heads: 6, key_heads: 2, key_dim: 32, value_dim: 32, tiled: true },
    Shape { heads: 2, key_heads: 1, key_dim: 128, value_dim: 128, tiled: false },
    Shape { heads: 3, key_heads: 3, key_dim: 96, value_dim: 48, tiled: false },
    Shape { heads: 1, key_heads: 1, key_dim: 256, value_dim: 208, tiled: false },
];

/// Inputs on a device. `gates` shifts the logits of beta and of the decay.
struct Inputs {
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    a_bias: Tensor,
    state: Out,
    slots: StateSlots,
    out: Out,
    tiled: bool,
}

impl Inputs {
    fn new(
        device: &Device,
        rng: &mut Rng,
        shape: Shape,
        rows: usize,
        dtypes: [DType; 3],
        gates: [f32; 2],
    ) -> Result<Inputs> {
        Inputs::with_slots(device, rng, shape, [rows, SLOTS], dtypes, gates)
    }

    fn with_slots(
        device: &Device,
        rng: &mut Rng,
        shape: Shape,
        [rows, slots]: [usize; 2],
        dtypes: [DType; 3],
        gates: [f32; 2],
    ) -> Result<Inputs> {
        let Shape { heads, key_heads, key_dim, value_dim, tiled } = shape;
        let width = 2 * key_heads * key_dim + heads * value_dim;
        let shifted = |values: Vec<f32>, by: f32| values.into_iter().map(|x| x + by).collect::<Vec<_>>();
        let qkv = input(device, dtypes[0], &rng.normals(rows * width), &[rows, width])?;
        let a = input(device, dtypes[1], &shifted(rng.normals(rows * heads), gates[0]), &[rows, heads])?;
        let b = input(device, dtypes[1], &shifted(rng.normals(rows * heads), gates[1]), &[rows, heads])?;
        let rates: Vec<f32> = (0..heads).map(|_| -(0.01 + 2.0 * rng.uniform() as f32)).collect();
        let rate = input(device, DType::F32, &rates, &[heads])?;
        let a_bias = input(device, DType::F32, &rng.normals(heads), &[heads])?;
        let state = Out::new(device, DType::F32, &[slots, heads, key_dim, value_dim])?;
        state.tensor.write_bytes(&encode(DType::F32, &rng.normals(state.tensor.elements())))?;
        let out = Out::new(device, dtypes[2], &[rows, heads, value_dim])?;
        out.tensor.write_bytes(&vec![0; out.tensor.bytes()])?;
        let slots = StateSlots::new(&state.tensor)?;
        Ok(Inputs { qkv, a, b, rate, a_bias, state, slots, out, tiled })
    }

    /// The results, within the bounds of the contract. `dtypes`: of inputs and results.
    fn close(&self, device: &Device, shape: Shape, dtypes: [DType; 2]) -> Result<Vec<Output>> {
        let chunks = device.kind() == DeviceKind::Cuda
            && dtypes == [DType::BF16; 2]
            && matches!(shape.key_dim, 64 | 128)
            && shape.value_dim.is_multiple_of(64);
        let rounding = if chunks { ROUNDING_OF_CHUNKS } else { 0.0 };
        let bound = |dtype| Bound { rounding, ..Bound::of(dtype).times(GAIN) };
        let out = self.out.close_within("out", bound(dtypes[1]))?;
        Ok(vec![out, self.state.close_within("state", bound(DType::F32))?])
    }

    fn args<'a>(&'a self, runs: &'a StateRuns) -> DeltaRule<'a> {
        let (gates, decay) = ([&self.a, &self.b], [&self.rate, &self.a_bias]);
        DeltaRule::new(&self.qkv, gates, decay, &self.slots, runs, &self.out.tensor).tiled(self.tiled)
    }
}

#[test]
fn delta_rule() {
    let mut rng = Rng::of("delta_rule");
    // Decays near 1 and near 0; betas near 1 and near 0.
    let gates = [[0.0, 0.0], [-12.0, 6.0], [8.0, -20.0]];
    for runs in RUNS {
        let rows = runs.iter().map(|run| run.2 as usize).sum::<usize>();
        for shape in SHAPES {
            let dtypes = std::array::from_fn(|_| rng.pick(&FLOATS));
            let gates = rng.pick(&gates);
            let case = format!("delta_rule {runs:?} {shape:?} {dtypes:?} gates {gates:?}");
            conform(&case, |device| {
                let inputs = Inputs::new(device, &mut Rng::of(&case), shape, rows, dtypes, gates)?;
                let runs = StateRuns::new(device, runs)?;
                run(device, |enc| ops::delta_rule(enc, &inputs.args(&runs)))?;
                inputs.close(device, shape, [dtypes[0], dtypes[2]])
            });
        }
    }
}

/// States after several rows of a run.
#[test]
fn kept_states() {
    let shapes = SHAPES.iter().enumerate().chain([(0, &SHAPES[3]), (1, &SHAPES[1])]);
    for (index, shape) in shapes {
        for runs in KEPT_RUNS {
            let rows = runs.iter().map(|run| run.2 as usize).sum::<usize>();
            let dtypes = if index % 2 == 0 { [DType::BF16; 3] } else { [DType::F32; 3] };
            let case = format!("delta_rule {runs:?} {shape:?} {dtypes:?}");
            conform(&case, |device| {
                let (rng, size) = (&mut Rng::of(&case), [rows, KEPT_SLOTS]);
                let inputs = Inputs::with_slots(device, rng, *shape, size, dtypes, [-3.0, 0.0])?;
                let runs = runs_that_keep(device, runs)?;
                run(device, |enc| ops::delta_rule(enc, &inputs.args(&runs)))?;
                inputs.close(device, *shape, [dtypes[0], dtypes[2]])
            });
        }
    }
}

/// The gain that the contract states, and the rounding of a device that computes chunks in bf16.
const GAIN: f64 = 4.0;
const ROUNDING_OF_CHUNKS: f64 = 1.0 / 128.0;

/// Prompts in bf16, which CUDA computes in chunks of 64 tokens and Metal of 32, and runs of few tokens.
#[test]
fn chunks() {
    let shapes = [
        Shape { heads: 2, key_heads: 1, key_dim: 128, value_dim: 128, tiled: false },
        Shape { heads: 4, key_heads: 2, key_dim: 64, value_dim: 64, tiled: true },
        Shape { heads: 1, key_heads: 1, key_dim: 128, value_dim: 192, tiled: false },
        Shape { heads: 2, key_heads: 2, key_dim: 64, value_dim: 128, tiled: false },
    ];
    let runs: [Runs; 9] = [
        &[(1, 1, 9)],
        &[(0, 0, 63), (1, 3, 1), (2, 7, 64)],
        &[(2, 1, 65), (StateRuns::INACTIVE, 0, 70), (0, 0, 8)],
        &[(0, 0, 300)],
        &[(1, 5, 127), (2, 0, 129)],
        &[(1, 5, 128)],
        &[(0, 2, 1), (1, 2, 1), (2, 0, 193)],
        &[(0, 0, 17), (1, 0, 31), (2, 1, 33)],
        &[(2, 9, 257)],
    ];
    let gates = [[0.0, 0.0], [-12.0, 6.0], [8.0, -20.0], [-100.0, 3.0], [100.0, 100.0], [-6.0, 0.0]];
    for i in 0..2 * runs.len() {
        let (runs, shape) = (runs[i / 2], shapes[(i + i / 4) % shapes.len()]);
        let (rows, gates) = (runs.iter().map(|run| run.2 as usize).sum::<usize>(), gates[i % gates.len()]);
        let case = format!("delta_rule in chunks, {runs:?} {shape:?} gates {gates:?}");
        let dtypes = [DType::BF16, if i % 2 == 0 { DType::BF16 } else { DType::F32 }, DType::BF16];
        conform(&case, |device| {
            let inputs = Inputs::new(device, &mut Rng::of(&case), shape, rows, dtypes, gates)?;
            let runs = StateRuns::new(device, runs)?;
            run(device, |enc| ops::delta_rule(enc, &inputs.args(&runs)))?;
            inputs.close(device, shape, [DType::BF16; 2])
        });
    }
}

/// More chunks than are computed at once.
#[test]
fn many_chunks() {
    let shape = Shape { heads: 1, key_heads: 1, key_dim: 64, value_dim: 64, tiled: false };
    let rows = [40, 4100, 9, 700];
    let case = "delta_rule of thousands of tokens in bf16";
    conform(case, |device| {
        let total = rows.iter().sum::<u32>() as usize;
        let inputs = Inputs::new(device, &mut Rng::of(case), shape, total, [DType::BF16; 3], [-6.0, 0.0])?;
        let slots = [1, 0, StateRuns::INACTIVE, 2];
        let runs: Vec<_> = rows.iter().zip(slots).map(|(&rows, slot)| (slot, 1, rows)).collect();
        run(device, |enc| ops::delta_rule(enc, &inputs.args(&StateRuns::new(device, &runs)?)))?;
        inputs.close(device, shape, [DType::BF16; 2])
    });
    // The state moves from slot 0 to slot 3.
    let case = "delta_rule of thousands of tokens from one slot to another";
    conform(case, |device| {
        let inputs = Inputs::with_slots(device, &mut Rng::of(case), shape, [4200, 4], [DType::BF16; 3], [-6.0, 0.0])?;
        let runs = runs_that_keep(device, &[(0, 1, 4200, 1, false)])?;
        run(device, |enc| ops::delta_rule(enc, &inputs.args(&runs)))?;
        inputs.close(device, shape, [DType::BF16; 2])
    });
}

/// Equal keys with betas of 1: the products of chunks cancel each other as far as they can.
#[test]
fn repeated_keys() {
    let shape = Shape { heads: 2, key_heads: 1, key_dim: 64, value_dim: 64, tiled: false };
    let rows = 200;
    conform("delta_rule of repeated keys", |device| {
        let inputs = Inputs::new(device, &mut Rng::of("keys"), shape, rows, [DType::BF16; 3], [-12.0, 10.0])?;
        let row = inputs.qkv.rows(0..1)?.to_f32()?;
        let values = inputs.qkv.to_f32()?;
        let repeated: Vec<f32> =
            values.chunks_exact(row.len()).flat_map(|of_row| [&row[..128], &of_row[128..]].concat()).collect();
        inputs.qkv.write_bytes(&encode(DType::BF16, &repeated))?;
        run(device, |enc| ops::delta_rule(enc, &inputs.args(&StateRuns::new(device, &[(0, 4, 200)])?)))?;
        inputs.close(device, shape, [DType::BF16; 2])
    });
}

/// A sequence with numbers that are not finite leaves those beside it alone.
#[test]
fn runs_are_apart() {
    let shape = Shape { heads: 2, key_heads: 1, key_dim: 64, value_dim: 64, tiled: false };
    for device in crate::common::devices() {
        let result = |filler: f32| {
            let inputs = Inputs::new(device, &mut Rng::of("apart"), shape, 170, [DType::BF16; 3], [0.0; 2]).unwrap();
            for (from, to) in [(0, 5), (75, 170)] {
                let part = inputs.qkv.rows(from..to).unwrap();
                part.write_bytes(&encode(DType::BF16, &vec![filler; part.elements()])).unwrap();
            }
            let runs = StateRuns::new(device, &[(0, 0, 5), (1, 3, 70), (2, 3, 95)]).unwrap();
            run(device, |enc| ops::delta_rule(enc, &inputs.args(&runs))).unwrap();
            let state = inputs.state.tensor.rows(1..2).unwrap();
            (inputs.out.tensor.rows(5..75).unwrap().to_f32().unwrap(), state.to_f32().unwrap())
        };
        let (out, state) = result(0.5);
        assert_eq!(result(f32::NAN), (out, state), "{device}");
    }
}

/// Thousands of steps with little decay: rounding errors do not grow.
#[test]
fn long_runs() {
    let rows = 20_000;
    let shape = SHAPES[0];
    conform("delta_rule of 20000 tokens", |device| {
        let inputs = Inputs::new(device, &mut Rng::of("long runs"), shape, rows, [DType::F32; 3], [-9.0, 0.0])?;
        let runs = StateRuns::new(device, &[(0, 0, rows as u32)])?;
        run(device, |enc| ops::delta_rule(enc, &inputs.args(&runs)))?;
        let bound = Bound::of(DType::F32).times(GAIN);
        Ok(vec![inputs.out.close_within("out", bound)?, inputs.state.close_within("state", bound)?])
    });
}

/// The results and states of a prompt of bf16 in parts.
fn of_parts(device: &Device, shape: Shape, parts: &[usize]) -> [Vec<f32>; 2] {
    let (dtypes, rows) = ([DType::BF16, DType::F32, DType::F32], parts.iter().sum());
    let inputs = Inputs::new(device, &mut Rng::of("parts"), shape, rows, dtypes, [0.0; 2]).unwrap();
    let mut at = 0;
    for &part in parts {
        let runs = StateRuns::new(device, &[(1, at as u32, part as u32)]).unwrap();
        let of = |tensor: &Tensor| tensor.rows(at..at + part).unwrap();
        let (qkv, a, b, out) = (of(&inputs.qkv), of(&inputs.a), of(&inputs.b), of(&inputs.out.tensor));
        let decay = [&inputs.rate, &inputs.a_bias];
        let args = DeltaRule::new(&qkv, [&a, &b], decay, &inputs.slots, &runs, &out).tiled(shape.tiled);
        run(device, |enc| ops::delta_rule(enc, &args)).unwrap();
        at += part;
    }
    [inputs.out.tensor.to_f32().unwrap(), inputs.state.tensor.to_f32().unwrap()]
}

/// A prompt at once and in parts: equal states and results within rounding.
#[test]
fn parts_of_a_prompt_give_its_results() {
    for device in crate::common::devices() {
        let whole = of_parts(device, SHAPES[1], &[70]);
        for parts in [&[1, 69][..], &[33, 1, 36], &[64, 6]] {
            let got = of_parts(device, SHAPES[1], parts);
            let bound = Bound::of(DType::F32).times(GAIN);
            assert_close(format!("{device}: out in {parts:?}"), &got[0], &whole[0], bound);
            assert_close(format!("{device}: state in {parts:?}"), &got[1], &whole[1], bound);
        }
    }
}

/// On a batch-invariant device, steps may end anywhere: the parts of a prompt give its bits.
#[test]
fn parts_of_a_prompt_give_its_bits() {
    let device = Device::cpu_with(CpuOptions { batch_invariant: true, ..CpuOptions::default() }).unwrap();
    for shape in SHAPES {
        let whole = of_parts(&device, shape, &[70]);
        for parts in [&[1, 69][..], &[33, 1, 36], &[64, 6]] {
            assert!(of_parts(&device, shape, parts) == whole, "{shape:?}: other bits in {parts:?}");
        }
    }
}

/// On a batch-invariant device, a state after a row has the bits of the state of a run that ends there.
#[test]
fn kept_states_have_the_bits_of_shorter_runs() {
    let device = Device::cpu_with(CpuOptions { batch_invariant: true, ..CpuOptions::default() }).unwrap();
    for shape in SHAPES {
        let inputs = || {
            let rng = &mut Rng::of("bits of kept states");
            Inputs::with_slots(&device, rng, shape, [9, KEPT_SLOTS], [DType::F32; 3], [0.0; 2]).unwrap()
        };
        let state = |inputs: &Inputs, slot: usize| inputs.slots.to_f32(slot).unwrap();
        let kept = inputs();
        let runs = runs_that_keep(&device, &[(1, 4, 9, 9, false)]).unwrap();
        run(&device, |enc| ops::delta_rule(enc, &kept.args(&runs))).unwrap();
        for rows in 1..=9 {
            let short = inputs();
            let runs = StateRuns::new(&device, &[(1, 4, rows)]).unwrap();
            run(&device, |enc| ops::delta_rule(enc, &short.args(&runs))).unwrap();
            assert!(state(&kept, 2 + rows as usize) == state(&short, 1), "{shape:?}: other bits after {rows} rows");
        }
    }
}

#[test]
fn runs_out_of_range() {
    for device in crate::common::devices() {
        let attempt = |runs: &StateRuns| {
            let dtypes = [DType::F32; 3];
            let inputs = Inputs::new(device, &mut Rng::of("range"), SHAPES[0], 4, dtypes, [0.0; 2]).unwrap();
            let result = run(device, |enc| ops::delta_rule(enc, &inputs.args(runs)));
            inputs.out.bytes().unwrap();
            inputs.state.bytes().unwrap();
            result
        };
        check_refused_runs(device, 3, attempt);
    }
}

/// Lengths around multiples of 16, 32 and 64, from a state; decays and betas of 0 and 1 to the last bit among them.
#[test]
fn lengths() {
    let lengths =
        [1u32, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300];
    for gates in [[0.0, 0.0], [-100.0, 3.0], [100.0, 100.0], [-3.0, -200.0]] {
        for lengths in lengths.chunks(SLOTS) {
            let runs: Vec<_> = lengths.iter().zip(0..).map(|(&rows, slot)| (slot, 1, rows)).collect();
            let rows = lengths.iter().sum::<u32>() as usize;
            let case = format!("delta_rule of {lengths:?} tokens, gates {gates:?}");
            conform(&case, |device| {
                let inputs = Inputs::new(device, &mut Rng::of(&case), SHAPES[0], rows, [DType::F32; 3], gates)?;
                let runs = StateRuns::new(device, &runs)?;
                run(device, |enc| ops::delta_rule(enc, &inputs.args(&runs)))?;
                let bound = Bound::of(DType::F32).times(GAIN);
                Ok(vec![inputs.out.close_within("out", bound)?, inputs.state.close_within("state", bound)?])
            });
        }
    }
}

/// A state whose rows are at no multiples of a vector, and keys, queries and values of zeros.
#[test]
fn odd_offsets() {
    let Shape { heads, key_dim, value_dim, .. } = SHAPES[1];
    for rows in [1, 9] {
        conform(format!("delta_rule of {rows} tokens at an odd offset"), |device| {
            let mut rng = Rng::of("odd offsets");
            let inputs = Inputs::new(device, &mut rng, SHAPES[1], rows, [DType::F32; 3], [0.0; 2])?;
            inputs.qkv.rows(rows - 1..rows)?.write_bytes(&vec![0; inputs.qkv.bytes() / rows])?;
            let elements = heads * key_dim * value_dim;
            let memory = Tensor::from_slice(device, &rng.normals(elements + 1), &[elements + 1])?;
            let state = memory.rows(1..elements + 1)?.reshape(&[1, heads, key_dim, value_dim])?;
            let (slots, runs) = (StateSlots::new(&state)?, StateRuns::new(device, &[(0, 1, rows as u32)])?);
            let Inputs { qkv, a, b, rate, a_bias, out, .. } = &inputs;
            let args = DeltaRule::new(qkv, [a, b], [rate, a_bias], &slots, &runs, &out.tensor);
            run(device, |enc| ops::delta_rule(enc, &args))?;
            let bound = Bound::of(DType::F32).times(GAIN);
            Ok(vec![
                inputs.out.close_within("out", bound)?,
                Output::Close("state".to_string(), memory.to_f32()?, bound),
            ])
        });
    }
}
