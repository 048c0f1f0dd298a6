//! The operations with a state per sequence, in the shapes of Qwen 3.5 27B. A copy of the states is the floor of
//! decoding.

use kvant::{
    DType, Device, Result, Tensor,
    ops::{self, CausalConv, DeltaRule, StateRuns, StateSlots},
};

use crate::timer::{Timer, copies, noise};

const KEY_HEADS: usize = 16;
const HEADS: usize = 48;
const DIM: usize = 128;
const CHANNELS: usize = (2 * KEY_HEADS + HEADS) * DIM;
const TAPS: usize = 4;

/// The inputs of a layer for `rows` tokens.
struct Layer {
    qkv: Tensor,
    gates: [Tensor; 2],
    decay: [Tensor; 2],
    weight: Tensor,
    out: Tensor,
}

impl Layer {
    fn new(device: &Device, rows: usize) -> Result<Layer> {
        let gate = || noise(device, DType::BF16, &[rows, HEADS]);
        let rate = Tensor::from_slice(device, &[-0.5f32; HEADS], &[HEADS])?;
        Ok(Layer {
            qkv: noise(device, DType::BF16, &[rows, CHANNELS])?,
            gates: [gate()?, gate()?],
            decay: [rate, Tensor::zeros(device, DType::F32, &[HEADS])?],
            weight: noise(device, DType::BF16, &[CHANNELS, TAPS])?,
            out: Tensor::zeros(device, DType::BF16, &[rows, HEADS, DIM])?,
        })
    }

    fn rule<'a>(&'a self, slots: &'a StateSlots, runs: &'a StateRuns) -> DeltaRule<'a> {
        DeltaRule::new(&self.qkv, self.gates.each_ref(), self.decay.each_ref(), slots, runs, &self.out)
    }
}

/// `count` groups of `sequences` runs. Each run has `rows` tokens, continues a sequence, and has its own slot.
fn groups(device: &Device, count: usize, sequences: usize, rows: u32) -> Result<Vec<StateRuns>> {
    let runs = |group: usize| {
        let of_group: Vec<_> = (0..sequences).map(|i| ((group * sequences + i) as u32, 1, rows)).collect();
        StateRuns::new(device, &of_group)
    };
    (0..count).map(runs).collect()
}

/// Decode steps of several sequences, without and with drafts, then prompts.
pub fn all(timer: &Timer) -> Result<()> {
    timer.head();
    decode(timer)?;
    drafts(timer)?;
    prompts(timer)
}

/// Steps that read a state and write one after each row.
fn drafts(timer: &Timer) -> Result<()> {
    let device = &timer.device;
    for (sequences, rows) in [(1, 2), (1, 5), (1, 9), (1, 16), (16, 2), (16, 3), (16, 5), (16, 9)] {
        let (layer, total) = (Layer::new(device, sequences * rows)?, sequences * rows);
        let bytes = sequences * (1 + rows) * HEADS * DIM * DIM * 4;
        let count = copies(bytes).max(2);
        let states = Tensor::zeros(device, DType::F32, &[count * total, HEADS, DIM, DIM])?;
        let runs = |group: usize| {
            let after: Vec<u32> = (group * total..(group + 1) * total).map(|slot| slot as u32).collect();
            let runs: Vec<_> = after.iter().step_by(rows).map(|&slot| (slot, 1, rows as u32)).collect();
            StateRuns::with_after(device, &runs, Tensor::from_slice(device, &after, &[total])?)
        };
        let (slots, runs) = (StateSlots::new(&states)?, (0..count).map(runs).collect::<Result<Vec<_>>>()?);
        timer.line(
            &format!("delta_rule, {sequences} sequences of {rows} rows that stay"),
            bytes,
            count,
            |enc, i| ops::delta_rule(enc, &layer.rule(&slots, &runs[i])),
        )?;
        let inputs = Tensor::zeros(device, DType::BF16, &[count * total, TAPS - 1, CHANNELS])?;
        let (slots, out) = (StateSlots::new(&inputs)?, noise(device, DType::BF16, &[total, CHANNELS])?);
        let bytes = 2 * out.bytes() + sequences * (1 + rows) * (TAPS - 1) * CHANNELS * 2 + layer.weight.bytes();
        timer.line(
            &format!("causal_conv, {sequences} sequences of {rows} rows that stay"),
            bytes,
            count,
            |enc, i| {
                let conv = CausalConv::new(&layer.qkv, &layer.weight, &slots, &runs[i], &out).silu(true);
                ops::causal_conv(enc, &conv)
            },
        )?;
    }
    Ok(())
}

fn decode(timer: &Timer) -> Result<()> {
    let device = &timer.device;
    for sequences in [1, 2, 4, 8, 16, 32, 64] {
        let layer = Layer::new(device, sequences)?;
        let bytes = sequences * HEADS * DIM * DIM * 4;
        let count = copies(2 * bytes).max(2);
        let states = Tensor::zeros(device, DType::F32, &[count * sequences, HEADS, DIM, DIM])?;
        let (slots, runs) = (StateSlots::new(&states)?, groups(device, count, sequences, 1)?);
        timer.line(&format!("delta_rule, {sequences} sequences"), 2 * bytes, count, |enc, i| {
            ops::delta_rule(enc, &layer.rule(&slots, &runs[i]))
        })?;
        let half = states.rows(0..count / 2 * sequences)?;
        let other = states.rows(count / 2 * sequences..count / 2 * 2 * sequences)?;
        timer.line(&format!("copy of {sequences} states"), 2 * bytes, count / 2, |enc, i| {
            let of = |tensor: &Tensor| tensor.rows(i * sequences..(i + 1) * sequences);
            ops::copy(enc, &of(&half)?, &of(&other)?)
        })?;
        let inputs = Tensor::zeros(device, DType::BF16, &[count * sequences, TAPS - 1, CHANNELS])?;
        let (slots, out) = (StateSlots::new(&inputs)?, noise(device, DType::BF16, &[sequences, CHANNELS])?);
        let bytes = 2 * out.bytes() + 2 * inputs.bytes() / count + layer.weight.bytes();
        timer.line(&format!("causal_conv, {sequences} sequences"), bytes, count, |enc, i| {
            let conv = CausalConv::new(&layer.qkv, &layer.weight, &slots, &runs[i], &out).silu(true);
            ops::causal_conv(enc, &conv)
        })?;
    }
    Ok(())
}

fn prompts(timer: &Timer) -> Result<()> {
    let device = &timer.device;
    for (sequences, rows) in [(1, 4), (1, 8), (1, 16), (1, 64), (1, 512), (1, 4096), (4, 1024)] {
        let layer = Layer::new(device, sequences * rows)?;
        let states = Tensor::zeros(device, DType::F32, &[sequences, HEADS, DIM, DIM])?;
        let (slots, runs) = (StateSlots::new(&states)?, groups(device, 1, sequences, rows as u32)?);
        let bytes = layer.qkv.bytes() + layer.out.bytes() + 2 * states.bytes();
        timer.line(&format!("delta_rule, {sequences} prompts of {rows}"), bytes, 1, |enc, _| {
            ops::delta_rule(enc, &layer.rule(&slots, &runs[0]))
        })?;
        let inputs = Tensor::zeros(device, DType::BF16, &[sequences, TAPS - 1, CHANNELS])?;
        let (slots, out) = (StateSlots::new(&inputs)?, noise(device, DType::BF16, &[sequences * rows, CHANNELS])?);
        timer.line(&format!("causal_conv, {sequences} prompts of {rows}"), 2 * out.bytes(), 1, |enc, _| {
            let conv = CausalConv::new(&layer.qkv, &layer.weight, &slots, &runs[0], &out).silu(true);
            ops::causal_conv(enc, &conv)
        })?;
    }
    Ok(())
}
