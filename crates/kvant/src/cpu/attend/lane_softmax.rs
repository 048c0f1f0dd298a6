//! The softmax of a tile with one query row per lane: no maximum or sum is taken across lanes.

use std::ops::Range;

use crate::cpu::simd::Simd;

/// Maximum lanes of any level: rows are padded to a multiple.
pub(super) const LANES: usize = 16;
/// The minimum weight, and the minimum factor of sums, as log2. The largest weight is 1, so smaller weights would be
/// lost in rounding; but their products would be subnormal and take a hundred cycles each.
pub(super) const MIN_LOG2: f32 = -100.0;

/// Limits of scores for [`limit`]: −∞ for rows that do not see a key, ∞ for rows that do.
const LIMITS: [f32; 3 * LANES] = {
    let mut limits = [f32::NEG_INFINITY; 3 * LANES];
    let mut i = LANES;
    while i < 2 * LANES {
        limits[i] = f32::INFINITY;
        i += 1;
    }
    limits
};

/// Scores of a tile for a vector of rows.
#[derive(Clone)]
pub(super) struct ScoreLanes<'a> {
    /// The vector of key 0.
    pub scores: *mut f32,
    /// Floats from a key to the next.
    pub stride: usize,
    /// The keys that any of the rows sees.
    pub keys: Range<usize>,
    /// The rows that see each key; `None` if all rows see all keys.
    pub seen: Option<&'a [Range<usize>]>,
    /// The row of the first lane.
    pub row: usize,
    /// The softcap, in base 2.
    pub softcap: Option<f32>,
}

impl ScoreLanes<'_> {
    /// Caps and masks the scores. Returns the larger of `m` and each row's largest score.
    ///
    /// # Safety
    /// The level's instructions are enabled; `scores` has all the keys.
    #[inline(always)]
    pub unsafe fn largest<S: Simd>(&self, m: S::F) -> S::F {
        let &ScoreLanes { scores, stride, ref keys, seen, row, softcap } = self;
        // SAFETY: passed on to the caller.
        unsafe {
            if let Some(cap) = softcap {
                for key in keys.clone() {
                    let score = scores.add(key * stride);
                    let t = S::tanh(S::mul(S::load(score), S::splat(1.0 / cap)));
                    S::store(score, S::mul(t, S::splat(cap)));
                }
            }
            // For a row that sees a key, the largest score is at least `lowest`: see `SoftmaxState`.
            let (mut largest, lowest) = (m, S::splat(f32::MIN));
            if let Some(seen) = seen {
                // `min` returns the limit for NaN. Therefore unseen scores become −∞, whatever they are. Seen scores
                // are unchanged, except that NaN becomes ∞, which the softmax turns into NaN again.
                for key in keys.clone() {
                    let (score, limit) = (scores.add(key * stride), limit::<S>(&seen[key], row));
                    S::store(score, S::min(S::load(score), limit));
                    largest = S::max(S::min(limit, lowest), largest);
                }
            } else {
                largest = S::max(largest, lowest);
            }
            // Four independent maxima, to hide latency.
            let mut maxima = [largest; 4];
            for key in keys.clone().step_by(maxima.len()) {
                for (i, largest) in maxima.iter_mut().enumerate() {
                    let key = (key + i).min(keys.end - 1);
                    *largest = S::max(S::load(scores.add(key * stride)), *largest);
                }
            }
            let [a, b, c, d] = maxima;
            S::max(S::max(a, b), S::max(c, d))
        }
    }

    /// Turns scores into weights 2^(s − m), zero where a key is not seen, and stores them. Returns their sum.
    ///
    /// # Safety
    /// As for [`ScoreLanes::largest`], and for `to`; the first key is even.
    #[inline(always)]
    pub unsafe fn weigh<S: Simd, W: StoreWeights<S>>(&self, m: S::F, to: W) -> S::F {
        let &ScoreLanes { scores, stride, ref keys, seen, row, .. } = self;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [S::zero(); 2];
            for key in keys.clone().step_by(2) {
                let mut weights = [S::zero(); 2];
                for (i, weight) in weights.iter_mut().enumerate().take(keys.end - key) {
                    *weight = W::exp2(S::sub(S::load(scores.add((key + i) * stride)), m));
                    if let Some(seen) = seen {
                        // Zero, or the weight. A NaN becomes ∞; the sum is then ∞, too, and the division makes it NaN
                        // again.
                        *weight = S::min(*weight, S::max(limit::<S>(&seen[key + i], row), S::zero()));
                    }
                    sums[i] = S::add(sums[i], *weight);
                }
                to.store(key, weights);
            }
            S::add(sums[0], sums[1])
        }
    }
}

/// Stores weights in the layout of a kernel.
pub(super) trait StoreWeights<S: Simd> {
    /// 2ˣ for x up to 0, as [`Simd::exp2`].
    ///
    /// # Safety
    /// The level's instructions are enabled.
    #[inline(always)]
    unsafe fn exp2(x: S::F) -> S::F {
        // SAFETY: passed on to the caller. `max` returns its second operand if one is NaN.
        unsafe { S::exp2(S::max(S::splat(MIN_LOG2), x)) }
    }

    /// Stores the weights of an even key and of the next one; the latter are zero if no key follows.
    ///
    /// # Safety
    /// The level's instructions are enabled, and the destination has room for both.
    unsafe fn store(&self, key: usize, weights: [S::F; 2]);
}

/// ∞ in the lanes of rows that see a key, −∞ in others; the first lane is row `first`.
#[inline(always)]
unsafe fn limit<S: Simd>(seen: &Range<usize>, first: usize) -> S::F {
    let lane = |row: usize| row.saturating_sub(first).min(S::LANES);
    // ∞ in lanes from the start on, and ∞ in lanes before the end.
    let (from, to) = (LANES - lane(seen.start), 2 * LANES - lane(seen.end));
    // SAFETY: a whole vector follows both indices; the caller enables the instructions.
    unsafe { S::min(S::load(LIMITS.as_ptr().add(from)), S::load(LIMITS.as_ptr().add(to))) }
}
