//! Both ends of a mixture of experts. Threads share the tokens.
//!
//! Route: the top_k largest logits of each token, and the softmax over them, or over all.
//! Combine: out\[t\] = Σⱼ weights\[t, j\] · x\[t·top_k + j\].

use super::{
    Cpu,
    elements::{Elements, PIECE, Padded, SliceParts},
    scratch,
    simd::{Simd, SimdKernel},
};
use crate::ops::moe::{combine, route};

/// Elements that make a task worth a thread.
const TASK: usize = 8 * 1024;

pub(crate) fn run_route(cpu: &Cpu, call: &route::Call) {
    let logits = Elements::of(&call.logits);
    // SAFETY: calls run under the device's lock, the scales are an input, and the outputs overlap no other argument.
    let (scale, ids, weights) = unsafe {
        let scale = call.expert_scale.as_ref().map(|scale| scale.host_slice::<f32>());
        (scale, call.ids.host_slice_mut::<u32>(), call.weights.host_slice_mut::<f32>())
    };
    // Each choice looks at all experts.
    let tokens = (TASK / call.experts / call.top_k).max(1);
    let (ids, weights) = (SliceParts::new(ids, tokens * call.top_k), SliceParts::new(weights, tokens * call.top_k));
    cpu.threads.run(ids.count(), |task| {
        // SAFETY: each task takes its own parts.
        let (ids, weights) = unsafe { (ids.part(task), weights.part(task)) };
        let (first, normalise) = (task * tokens, call.normalise);
        let (experts, top_k) = (call.experts, call.top_k);
        cpu.level.dispatch(Route { logits, first, experts, top_k, scale, normalise, ids, weights });
    });
}

/// The choices of the tokens from `first` on, as many as `ids` and `weights` hold.
struct Route<'a> {
    logits: Elements,
    first: usize,
    experts: usize,
    top_k: usize,
    scale: Option<&'a [f32]>,
    normalise: bool,
    ids: &'a mut [u32],
    weights: &'a mut [f32],
}

impl SimdKernel for Route<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let tokens = self.ids.chunks_exact_mut(self.top_k).zip(self.weights.chunks_exact_mut(self.top_k));
        let logits = &mut *scratch::take(self.experts);
        for (i, (ids, weights)) in tokens.enumerate() {
            // SAFETY: `dispatch` enables the instructions, and the token's logits exist.
            unsafe { self.logits.load::<S>((self.first + i) * self.experts, logits) };
            choose(logits, self.scale, self.normalise, ids, weights);
        }
    }
}

/// The largest logits in falling order, the lower id first among equals, NaN last; their softmax (or that of all
/// logits), times the scale.
fn choose(logits: &[f32], scale: Option<&[f32]>, normalise: bool, ids: &mut [u32], weights: &mut [f32]) {
    // NaN ranks below everything; what is equal and has been passed over ranks by id.
    let key = |id: usize| (!logits[id].is_nan(), if logits[id].is_nan() { 0.0 } else { logits[id] });
    let comes_before = |a: usize, b: usize| key(a) > key(b) || key(a) == key(b) && a < b;
    for j in 0..ids.len() {
        let last = j.checked_sub(1).map(|j| ids[j] as usize);
        let left = (0..logits.len()).filter(|&id| last.is_none_or(|last| comes_before(last, id)));
        let best = left.reduce(|best, id| if comes_before(id, best) { id } else { best });
        ids[j] = best.unwrap_or(0) as u32;
    }
    let logit = |id: u32| f64::from(logits[id as usize]);
    let exp = |id: u32| (logit(id) - logit(ids[0])).exp();
    let sum: f64 =
        if normalise { ids.iter().map(|&id| exp(id)).sum() } else { (0..logits.len() as u32).map(exp).sum() };
    for (&id, weight) in ids.iter().zip(weights) {
        *weight = (exp(id) / sum * scale.map_or(1.0, |scale| f64::from(scale[id as usize]))) as f32;
    }
}

pub(crate) fn run_combine(cpu: &Cpu, call: &combine::Call) {
    let (x, out) = (Elements::of(&call.x), Elements::of(&call.out));
    // SAFETY: calls run under the device's lock, and the weights are an input only.
    let weights = unsafe { call.weights.host_slice::<f32>() };
    let (dim, top_k) = (call.dim, call.top_k);
    let tokens = TASK / (dim * top_k).max(1) + 1;
    cpu.threads.run(call.tokens.div_ceil(tokens), |task| {
        let tokens = task * tokens..call.tokens.min((task + 1) * tokens);
        cpu.level.dispatch(Combine { x, weights, tokens, top_k, dim, out });
    });
}

struct Combine<'a> {
    x: Elements,
    weights: &'a [f32],
    tokens: std::ops::Range<usize>,
    top_k: usize,
    dim: usize,
    out: Elements,
}

impl SimdKernel for Combine<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let (mut sum, mut x) = (Padded::new(PIECE), Padded::new(PIECE));
        for token in self.tokens.clone() {
            let rows = token * self.top_k..(token + 1) * self.top_k;
            for start in (0..self.dim).step_by(PIECE) {
                let len = PIECE.min(self.dim - start);
                sum.set_len(len);
                x.set_len(len);
                sum.fill(0.0);
                for row in rows.clone() {
                    // SAFETY: `dispatch` enables the instructions, the row exists, and both pieces hold whole vectors.
                    unsafe {
                        let weight = S::splat(self.weights[row]);
                        self.x.load::<S>(row * self.dim + start, &mut x);
                        for (to, x) in sum.vectors::<S>().zip(x.vectors::<S>()) {
                            S::store(to, S::fma(weight, S::load(x), S::load(to)));
                        }
                    }
                }
                // SAFETY: as above; the output's row is this task's alone.
                unsafe { self.out.store::<S>(token * self.dim + start, &sum) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        DType, Device, Tensor,
        cpu::testing::{Numbers, assert_close, devices, tensor},
        ops::{self, MoeCombine, MoeRoute},
    };

    const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    fn route(
        device: &Device,
        dtype: DType,
        logits: &[f32],
        (top_k, scaled, normalise): (usize, bool, bool),
    ) -> (Vec<u32>, Tensor) {
        const EXPERTS: usize = 13;
        let tokens = logits.len() / EXPERTS;
        let logits = tensor(device, dtype, logits, &[tokens, EXPERTS]);
        let scale = tensor(device, DType::F32, &Numbers(8).floats(EXPERTS), &[EXPERTS]);
        let ids = Tensor::zeros(device, DType::U32, &[tokens, top_k]).unwrap();
        let weights = Tensor::zeros(device, DType::F32, &[tokens, top_k]).unwrap();
        let mut enc = device.encoder().unwrap();
        let expert_scale = scaled.then_some(&scale);
        let args = MoeRoute::new(&logits, &ids, &weights).expert_scale(expert_scale).normalise(normalise);
        ops::moe_route(&mut enc, &args).unwrap();
        enc.commit().unwrap().wait().unwrap();
        (ids.to_vec().unwrap(), weights)
    }

    #[test]
    fn routes_as_the_reference() {
        let devices = devices();
        let mut logits = Numbers(7).floats(13 * 400);
        // Equals in every token, some NaN, one token of nothing else.
        logits.iter_mut().step_by(5).for_each(|x| *x = 0.25);
        logits.iter_mut().step_by(37).for_each(|x| *x = f32::NAN);
        logits[13..26].fill(f32::NAN);
        for dtype in FLOATS {
            for how in [(1, false, true), (4, true, true), (4, true, false), (13, false, true), (1, false, false)] {
                for count in [0, 1, 400] {
                    let go = |device: &Device| route(device, dtype, &logits[..13 * count], how);
                    let (want_ids, want) = go(&Device::reference());
                    for device in &devices {
                        let (ids, weights) = go(device);
                        assert_eq!(ids, want_ids, "{device} {dtype} {how:?}");
                        assert_close(&weights, &want, 1e-6, &(device, dtype, how));
                    }
                }
            }
        }
    }

    #[test]
    fn combines_as_the_reference() {
        let devices = devices();
        for (tokens, top_k, dim) in [(1, 1, 1), (1, 8, 700), (300, 2, 65), (0, 2, 5), (2, 0, 5), (2, 3, 0)] {
            for (dtype, out) in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| (a, b))) {
                let go = |device: &Device| {
                    let mut numbers = Numbers(9);
                    let x = tensor(device, dtype, &numbers.floats(tokens * top_k * dim), &[tokens * top_k, dim]);
                    let weights = tensor(device, DType::F32, &numbers.floats(tokens * top_k), &[tokens, top_k]);
                    let out = tensor(device, out, &vec![7.0; tokens * dim], &[tokens, dim]);
                    let mut enc = device.encoder().unwrap();
                    ops::moe_combine(&mut enc, &MoeCombine::new(&x, &weights, &out)).unwrap();
                    enc.commit().unwrap().wait().unwrap();
                    out
                };
                let want = go(&Device::reference());
                devices.iter().for_each(|d| assert_close(&go(d), &want, 2e-6, &(d, dtype, tokens, top_k, dim)));
            }
        }
    }
}
