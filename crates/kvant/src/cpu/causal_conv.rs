//! A depthwise convolution over the last positions of each sequence. A task has up to [`PIECE`] channels of one run,
//! and keeps their last inputs in a ring while it goes through the rows.

use super::{
    Cpu,
    elements::{Elements, PIECE, Padded},
    gate::silu,
    simd::{Simd, SimdKernel},
};
use crate::ops::{
    causal_conv::{Call, MAX_TAPS},
    state_runs::Run,
};

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    // SAFETY: the device's lock is held while a call runs, and the indices have been checked.
    let runs = unsafe { call.runs.active() };
    let pieces = call.channels.div_ceil(PIECE);
    let tensors = ConvTensors {
        x: Elements::of(&call.x),
        weight: Elements::of(&call.weight),
        bias: call.bias.as_ref().map(Elements::of),
        state: Elements::of(call.state.memory()),
        out: Elements::of(&call.out),
    };
    cpu.threads.run(runs.len() * pieces, |task| {
        let start = task % pieces * PIECE;
        let channels = start..call.channels.min(start + PIECE);
        cpu.level.dispatch(ConvTask { call, tensors, run: &runs[task / pieces], channels });
    });
}

#[derive(Clone, Copy)]
struct ConvTensors {
    x: Elements,
    weight: Elements,
    bias: Option<Elements>,
    state: Elements,
    out: Elements,
}

/// Some channels of one run.
struct ConvTask<'a> {
    call: &'a Call,
    tensors: ConvTensors,
    run: &'a Run<'a>,
    channels: std::ops::Range<usize>,
}

impl SimdKernel for ConvTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let ConvTask { call, tensors, run, channels } = self;
        let (taps, len) = (call.taps, channels.len());
        let (weights, bias) = self::weights::<S>(call, tensors, &channels);
        let row_at = |row: usize| row * call.channels + channels.start;
        let state_at = |slot: usize, input: usize| slot * call.state.stride() + row_at(input);
        // Input j of the sequence, counted from the state's oldest, is in `inputs[j % taps]`.
        let mut inputs: [Padded; MAX_TAPS] = std::array::from_fn(|_| Padded::new(len));
        let mut sum = Padded::new(len);
        // SAFETY: `dispatch` enables the instructions; rows and slots have been checked, and no other task has these
        // channels of them.
        unsafe {
            if !run.is_fresh {
                for (input, to) in inputs[..taps - 1].iter_mut().enumerate() {
                    tensors.state.load::<S>(state_at(run.slot, input), to);
                }
            }
            for (index, row) in run.rows.clone().enumerate() {
                tensors.x.load::<S>(row_at(row), &mut inputs[(index + taps - 1) % taps]);
                sum.copy_from_slice(&bias);
                for (tap, weight) in weights[..taps].iter().enumerate() {
                    add_product::<S>(&mut sum, &inputs[(index + tap) % taps], weight);
                }
                if call.silu {
                    for at in sum.vectors::<S>() {
                        S::store(at, silu::<S>(S::load(at)));
                    }
                }
                tensors.out.store::<S>(row_at(row), &sum);
                for (slot, input) in
                    run.slot_after(row).into_iter().flat_map(|slot| (0..taps - 1).map(move |i| (slot, i)))
                {
                    tensors.state.store::<S>(state_at(slot, input), &inputs[(index + 1 + input) % taps]);
                }
            }
        }
    }
}

/// The weights of each tap, and the bias.
#[inline(always)]
fn weights<S: Simd>(
    call: &Call,
    tensors: ConvTensors,
    channels: &std::ops::Range<usize>,
) -> ([Padded; MAX_TAPS], Padded) {
    let (taps, len) = (call.taps, channels.len());
    let mut weights: [Padded; MAX_TAPS] = std::array::from_fn(|_| Padded::new(len));
    let mut bias = Padded::new(len);
    let mut of_channel = [0f32; MAX_TAPS];
    // SAFETY: `dispatch` enables the instructions; the channels exist, and nothing writes weights.
    unsafe {
        for (at, channel) in channels.clone().enumerate() {
            tensors.weight.load::<S>(channel * taps, &mut of_channel[..taps]);
            for (weight, &value) in weights.iter_mut().zip(&of_channel[..taps]) {
                weight[at] = value;
            }
        }
        if let Some(elements) = tensors.bias {
            elements.load::<S>(channels.start, &mut bias);
        }
    }
    (weights, bias)
}

/// sum += x · weight.
///
/// # Safety
/// The level's instructions are enabled; all have one length.
#[inline(always)]
unsafe fn add_product<S: Simd>(sum: &mut Padded, x: &Padded, weight: &Padded) {
    // SAFETY: whole vectors of arrays of PIECE floats, which LANES divides.
    unsafe {
        for (i, to) in sum.vectors::<S>().enumerate() {
            let at = i * S::LANES;
            S::store(to, S::fma(S::load(x.as_ptr().add(at)), S::load(weight.as_ptr().add(at)), S::load(to)));
        }
    }
}
