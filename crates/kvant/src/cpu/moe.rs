//! Routing and combining of a mixture of experts. Threads share the tokens.
//!
//! Route: the top_k largest logits of each token, and the softmax over them, or over all; or the largest corrected
//! scores among chosen groups. Combine: out\[t\] = Σⱼ weights\[t, j\] · x\[t·top_k + j\] + added_weights\[t\] ·
//! added\[t\].

use super::{
    Cpu,
    elements::{Elements, PIECE, Padded, SliceParts},
    scratch,
    simd::{Simd, SimdKernel},
};
use crate::ops::{
    ExpertGroups, ExpertScores,
    moe::{combine, route},
};

/// Minimum elements of a task.
const TASK: usize = 8 * 1024;

pub(crate) fn run_route(cpu: &Cpu, call: &route::Call) {
    let logits = Elements::of(&call.logits);
    // SAFETY: calls run under the device's lock, scales and biases are inputs, and the outputs overlap no other
    // argument.
    let (scale, bias, ids, weights) = unsafe {
        let scale = call.expert_scale.as_ref().map(|scale| scale.host_slice::<f32>());
        let bias = call.bias.as_ref().map(|bias| bias.host_slice::<f32>());
        (scale, bias, call.ids.host_slice_mut::<u32>(), call.weights.host_slice_mut::<f32>())
    };
    let rule = Rule { rule: call.rule, is_plain: call.is_plain(), bias, scale };
    // Each choice scans all experts.
    let tokens = (TASK / call.experts / call.top_k).max(1);
    let (ids, weights) = (SliceParts::new(ids, tokens * call.top_k), SliceParts::new(weights, tokens * call.top_k));
    cpu.threads.run(ids.count(), |task| {
        // SAFETY: each task takes its own parts.
        let (ids, weights) = unsafe { (ids.part(task), weights.part(task)) };
        let (experts, top_k) = (call.experts, call.top_k);
        cpu.level.dispatch(Route { logits, first: task * tokens, experts, top_k, rule, ids, weights });
    });
}

/// The options of a call.
#[derive(Clone, Copy)]
struct Rule<'a> {
    rule: route::RouteRule,
    is_plain: bool,
    bias: Option<&'a [f32]>,
    scale: Option<&'a [f32]>,
}

/// Routes the tokens from `first` on; the lengths of `ids` and `weights` give their number.
struct Route<'a> {
    logits: Elements,
    first: usize,
    experts: usize,
    top_k: usize,
    rule: Rule<'a>,
    ids: &'a mut [u32],
    weights: &'a mut [f32],
}

impl SimdKernel for Route<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let tokens = self.ids.chunks_exact_mut(self.top_k).zip(self.weights.chunks_exact_mut(self.top_k));
        let logits = &mut *scratch::take(self.experts);
        let corrected = &mut *scratch::take(if self.rule.is_plain { 0 } else { self.experts });
        for (i, (ids, weights)) in tokens.enumerate() {
            // SAFETY: `dispatch` enables the instructions, and the token's logits exist.
            unsafe { self.logits.load::<S>((self.first + i) * self.experts, logits) };
            if self.rule.is_plain {
                by_logits(logits, &self.rule, ids, weights);
            } else {
                by_scores(logits, &self.rule, corrected, ids, weights);
            }
        }
    }
}

/// Selects the largest logits. Their weights are the softmax over them (or over all logits), times the scale.
fn by_logits(logits: &[f32], rule: &Rule, ids: &mut [u32], weights: &mut [f32]) {
    choose(logits, |_| true, ids);
    let logit = |id: u32| f64::from(logits[id as usize]);
    let exp = |id: u32| (logit(id) - logit(ids[0])).exp();
    let sum: f64 = match rule.rule.normalise {
        true => ids.iter().map(|&id| exp(id)).sum(),
        false => (0..logits.len() as u32).map(exp).sum(),
    };
    for (&id, weight) in ids.iter().zip(weights) {
        *weight = (exp(id) / sum * rule.scale_of(id)) as f32;
    }
}

/// Selects the largest corrected scores among the experts of the chosen groups, and computes their weights.
fn by_scores(logits: &[f32], rule: &Rule, corrected: &mut [f32], ids: &mut [u32], weights: &mut [f32]) {
    let Rule { rule: options, bias, .. } = *rule;
    let scores = Scores::new(options.scores, logits);
    for (id, to) in corrected.iter_mut().enumerate() {
        *to = (scores.of(logits[id]) + bias.map_or(0.0, |bias| f64::from(bias[id]))) as f32;
    }
    let (mask, size) = match options.groups {
        Some(groups) => (chosen_groups(corrected, groups), logits.len() / groups.count),
        None => (1, logits.len()),
    };
    // Scores increase with logits, but rounding can give different logits equal scores.
    choose(if bias.is_some() { corrected } else { logits }, |id| mask >> (id / size) & 1 == 1, ids);
    let score = |id: u32| scores.of(logits[id as usize]);
    let sum: f64 = ids.iter().map(|&id| score(id)).sum();
    let min_sum = f64::from(options.min_sum);
    // The comparison leaves a NaN unchanged.
    let sum = if sum < min_sum { min_sum } else { sum };
    let divisor = if options.normalise { sum + f64::from(options.epsilon) } else { 1.0 };
    for (&id, weight) in ids.iter().zip(weights) {
        *weight = (score(id) / divisor * f64::from(options.scale) * rule.scale_of(id)) as f32;
    }
}

impl Rule<'_> {
    fn scale_of(&self, id: u32) -> f64 {
        self.scale.map_or(1.0, |scale| f64::from(scale[id as usize]))
    }
}

/// The function from the logits of a token to its scores.
#[derive(Clone, Copy)]
enum Scores {
    Softmax { largest: f64, sum: f64 },
    Sigmoid,
}

impl Scores {
    fn new(kind: ExpertScores, logits: &[f32]) -> Scores {
        match kind {
            ExpertScores::Sigmoid => Scores::Sigmoid,
            ExpertScores::Softmax => {
                let largest: f64 = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max).into();
                let sum = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
                Scores::Softmax { largest, sum }
            }
        }
    }

    fn of(self, logit: f32) -> f64 {
        let logit = f64::from(logit);
        match self {
            Scores::Softmax { largest, sum } => (logit - largest).exp() / sum,
            Scores::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
        }
    }
}

/// A bit for each group that a token chooses.
fn chosen_groups(corrected: &[f32], groups: ExpertGroups) -> u32 {
    let (mut values, mut chosen) = ([0.0; ExpertGroups::MAX], [0; ExpertGroups::MAX]);
    let (values, chosen) = (&mut values[..groups.count], &mut chosen[..groups.chosen]);
    for (value, group) in values.iter_mut().zip(corrected.chunks_exact(corrected.len() / groups.count)) {
        let mut best = [0; 2];
        choose(group, |_| true, &mut best);
        *value = best.iter().map(|&id| group[id as usize]).sum();
    }
    choose(values, |_| true, chosen);
    chosen.iter().fold(0, |mask, group| mask | 1 << group)
}

/// The candidates with the largest values in descending order; among equals the lower id is first, and NaN is last.
#[inline]
fn choose(values: &[f32], is_candidate: impl Fn(usize) -> bool, ids: &mut [u32]) {
    // NaN ranks below everything. Among equal values, a candidate after the previous choice has a larger id.
    let key = |id: usize| (!values[id].is_nan(), if values[id].is_nan() { 0.0 } else { values[id] });
    let comes_before = |a: usize, b: usize| key(a) > key(b) || key(a) == key(b) && a < b;
    for j in 0..ids.len() {
        let last = j.checked_sub(1).map(|j| ids[j] as usize);
        let left = (0..values.len()).filter(|&id| is_candidate(id) && last.is_none_or(|last| comes_before(last, id)));
        let best = left.reduce(|best, id| if comes_before(id, best) { id } else { best });
        ids[j] = best.unwrap_or(0) as u32;
    }
}

pub(crate) fn run_combine(cpu: &Cpu, call: &combine::Call) {
    let (x, out) = (Elements::of(&call.x), Elements::of(&call.out));
    // SAFETY: calls run under the device's lock, and the weights are inputs only.
    let (weights, added_weights) = unsafe {
        (call.weights.host_slice::<f32>(), call.added_weights.as_ref().map(|weights| weights.host_slice::<f32>()))
    };
    let added = call.added.as_ref().map(Elements::of);
    let (dim, top_k) = (call.dim, call.top_k);
    let tokens = TASK / (dim * top_k).max(1) + 1;
    cpu.threads.run(call.tokens.div_ceil(tokens), |task| {
        let tokens = task * tokens..call.tokens.min((task + 1) * tokens);
        cpu.level.dispatch(Combine { x, weights, added, added_weights, tokens, top_k, dim, out });
    });
}

struct Combine<'a> {
    x: Elements,
    weights: &'a [f32],
    added: Option<Elements>,
    added_weights: Option<&'a [f32]>,
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
                let chosen = rows.clone().map(|row| (self.x, row, self.weights[row]));
                let weight = self.added_weights.map_or(1.0, |weights| weights[token]);
                for (from, row, weight) in chosen.chain(self.added.map(|added| (added, token, weight))) {
                    // SAFETY: `dispatch` enables the instructions, the row exists, and both pieces hold whole vectors.
                    unsafe {
                        let weight = S::splat(weight);
                        from.load::<S>(row * self.dim + start, &mut x);
                        for (to, x) in sum.vectors::<S>().zip(x.vectors::<S>()) {
                            S::store(to, S::fma(weight, S::load(x), S::load(to)));
                        }
                    }
                }
                // SAFETY: as above; only this task writes the output's row.
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
        ops::{self, ExpertGroups, ExpertScores, MoeCombine, MoeRoute},
    };

    const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    const EXPERTS: usize = 12;

    fn route(
        device: &Device,
        dtype: DType,
        logits: &[f32],
        top_k: usize,
        how: impl for<'a> Fn(MoeRoute<'a>, &'a Tensor, &'a Tensor) -> MoeRoute<'a>,
    ) -> (Vec<u32>, Tensor) {
        let tokens = logits.len() / EXPERTS;
        let logits = tensor(device, dtype, logits, &[tokens, EXPERTS]);
        let scale = tensor(device, DType::F32, &Numbers(8).floats(EXPERTS), &[EXPERTS]);
        let bias = tensor(device, DType::F32, &Numbers(9).floats(EXPERTS), &[EXPERTS]);
        let ids = Tensor::zeros(device, DType::U32, &[tokens, top_k]).unwrap();
        let weights = Tensor::zeros(device, DType::F32, &[tokens, top_k]).unwrap();
        let mut enc = device.encoder().unwrap();
        ops::moe_route(&mut enc, &how(MoeRoute::new(&logits, &ids, &weights), &scale, &bias)).unwrap();
        enc.commit().unwrap().wait().unwrap();
        (ids.to_vec().unwrap(), weights)
    }

    /// Checks that every level chooses as the reference does.
    fn check(
        what: &str,
        top_k: usize,
        how: impl for<'a> Fn(MoeRoute<'a>, &'a Tensor, &'a Tensor) -> MoeRoute<'a> + Copy,
    ) {
        let devices = devices();
        let mut logits = Numbers(7).floats(EXPERTS * 400);
        // Equal values in every token, some NaN, and one token of NaN only.
        logits.iter_mut().step_by(5).for_each(|x| *x = 0.25);
        logits.iter_mut().step_by(37).for_each(|x| *x = f32::NAN);
        logits[EXPERTS..2 * EXPERTS].fill(f32::NAN);
        for dtype in FLOATS {
            for count in [0, 1, 400] {
                let go = |device: &Device| route(device, dtype, &logits[..EXPERTS * count], top_k, how);
                let (want_ids, want) = go(&Device::reference());
                for device in &devices {
                    let (ids, weights) = go(device);
                    assert_eq!(ids, want_ids, "{device} {dtype} {what} top {top_k}");
                    assert_close(&weights, &want, 1e-6, &(device, dtype, what, top_k));
                }
            }
        }
    }

    #[test]
    fn routes_as_the_reference() {
        for (top_k, normalise) in [(1, true), (4, true), (12, true), (1, false), (4, false)] {
            check("plain", top_k, |args, _, _| args.normalise(normalise));
        }
        check("scaled", 4, |args, scale, _| args.expert_scale(Some(scale)));
    }

    #[test]
    fn routes_by_scores_as_the_reference() {
        let groups = |count, chosen| Some(ExpertGroups { count, chosen });
        for scores in [ExpertScores::Softmax, ExpertScores::Sigmoid] {
            check("scored", 12, |args, _, _| args.scores(scores).scale(2.5).normalise(false));
            check("corrected", 4, |args, _, bias| args.scores(scores).bias(Some(bias)).min_sum(0.3).epsilon(1e-20));
            check("grouped", 4, |args, _, _| args.scores(scores).groups(groups(6, 2)));
            check("grouped and corrected", 5, |args, scale, bias| {
                args.scores(scores).bias(Some(bias)).groups(groups(3, 2)).expert_scale(Some(scale)).scale(0.5)
            });
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
