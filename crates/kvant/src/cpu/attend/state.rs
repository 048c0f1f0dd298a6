//! The softmax over part of the keys, and the merge of two parts.

use crate::cpu::simd::Simd;

/// A partial softmax of one query: with s the scores in base 2 and v the values of some keys, m = max(s, `f32::MIN`), l
/// = Σ 2^(s − m) and o = Σ 2^(s − m)·v. Without keys: m = −∞, l = 0, o = 0.
///
/// Scores of −∞ have a weight of at most 2⁻¹²⁶ if another score is finite. If all scores are −∞, l is close to 0, while
/// finite scores give at least 1; m is finite, while it is −∞ without keys.
pub(super) struct SoftmaxState<'a> {
    pub o: &'a mut [f32],
    pub m: &'a mut f32,
    pub l: &'a mut f32,
}

impl SoftmaxState<'_> {
    /// The state without keys.
    pub fn clear(&mut self) {
        self.o.fill(0.0);
        (*self.m, *self.l) = (f32::NEG_INFINITY, 0.0);
    }

    /// Merges another part's state into this one. Merging an empty state changes nothing; the order of merges affects
    /// only rounding.
    ///
    /// # Safety
    /// The level's instructions are enabled; both `o` have the same length, a multiple of `LANES`.
    #[inline(always)]
    pub unsafe fn merge<S: Simd>(&mut self, other: &SoftmaxState) {
        let m = self.m.max(*other.m);
        // Equal maxima, infinite ones included, need no factor. A NaN stays in l and o.
        let factor = |part: f32| if part == m { 1.0 } else { (part - m).exp2() };
        let (a, b) = (factor(*self.m), factor(*other.m));
        *self.l = *self.l * a + *other.l * b;
        *self.m = m;
        let (to, from) = (self.o.as_mut_ptr(), other.o.as_ptr());
        for i in (0..self.o.len().min(other.o.len())).step_by(S::LANES) {
            // SAFETY: within both slices; the rest is the caller's promise.
            unsafe {
                let scaled = S::mul(S::load(from.add(i)), S::splat(b));
                S::store(to.add(i), S::fma(S::load(to.add(i)), S::splat(a), scaled));
            }
        }
    }

    /// Adds a score in base 2 without a value.
    ///
    /// # Safety
    /// As for [`SoftmaxState::merge`].
    #[inline(always)]
    pub unsafe fn add_sink<S: Simd>(&mut self, score: f32) {
        let m = self.m.max(score);
        let factor = |part: f32| if part == m { 1.0 } else { (part - m).exp2() };
        let of_keys = factor(*self.m);
        *self.l = *self.l * of_keys + factor(score);
        *self.m = m;
        let o = self.o.as_mut_ptr();
        for i in (0..self.o.len()).step_by(S::LANES) {
            // SAFETY: as in `merge`.
            unsafe { S::store(o.add(i), S::mul(S::load(o.add(i)), S::splat(of_keys))) }
        }
    }

    /// log2 Σ 2^s, which is needed to merge the result with results over other keys; −∞ without keys, or if all scores
    /// are −∞.
    pub fn end(&self) -> f32 {
        if *self.l < 0.5 { f32::NEG_INFINITY } else { *self.m + self.l.log2() }
    }

    /// o/l, the result of attention; zeros without keys, NaN if all scores are −∞.
    ///
    /// # Safety
    /// As for [`SoftmaxState::merge`].
    #[inline(always)]
    pub unsafe fn finish<S: Simd>(&mut self) {
        let inverse = match (*self.m, *self.l) {
            (f32::NEG_INFINITY, 0.0) => 0.0,
            (_, l) if l < 0.5 => f32::NAN,
            (_, l) => 1.0 / l,
        };
        let o = self.o.as_mut_ptr();
        for i in (0..self.o.len()).step_by(S::LANES) {
            // SAFETY: as in `merge`.
            unsafe { S::store(o.add(i), S::mul(S::load(o.add(i)), S::splat(inverse))) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{SimdKernel, SimdLevel};

    #[derive(Clone, Debug)]
    struct OwnedState {
        o: Vec<f32>,
        m: f32,
        l: f32,
    }

    impl OwnedState {
        fn new(m: f32, l: f32, o: f32) -> OwnedState {
            OwnedState { o: (0..16).map(|i| o * (i as f32 - 7.0)).collect(), m, l }
        }
        fn empty() -> OwnedState {
            let mut empty = OwnedState::new(1.0, 2.0, 3.0);
            empty.as_state().clear();
            empty
        }
        fn as_state(&mut self) -> SoftmaxState<'_> {
            SoftmaxState { o: &mut self.o, m: &mut self.m, l: &mut self.l }
        }
        /// The result.
        fn finished(mut self, level: SimdLevel) -> Vec<f32> {
            struct FinishState<'a>(SoftmaxState<'a>);
            impl SimdKernel for FinishState<'_> {
                type Output = ();
                #[inline(always)]
                fn run<S: Simd>(mut self) {
                    // SAFETY: `dispatch` enables the instructions; 16 is a multiple of any level's lanes.
                    unsafe { self.0.finish::<S>() }
                }
            }
            level.dispatch(FinishState(self.as_state()));
            self.o
        }
    }

    fn merged(level: SimdLevel, a: &OwnedState, b: &OwnedState) -> OwnedState {
        struct MergePair<'a>(SoftmaxState<'a>, SoftmaxState<'a>);
        impl SimdKernel for MergePair<'_> {
            type Output = ();
            #[inline(always)]
            fn run<S: Simd>(mut self) {
                // SAFETY: `dispatch` enables the instructions; 16 is a multiple of any level's lanes.
                unsafe { self.0.merge::<S>(&self.1) }
            }
        }
        let (mut a, mut b) = (a.clone(), b.clone());
        level.dispatch(MergePair(a.as_state(), b.as_state()));
        a
    }

    fn levels() -> impl Iterator<Item = SimdLevel> {
        SimdLevel::ALL.into_iter().filter(|level| level.is_supported())
    }

    #[test]
    fn merging_is_associative_and_commutative() {
        let parts =
            [OwnedState::new(3.0, 1.5, 2.0), OwnedState::new(-20.0, 7.0, -1.0), OwnedState::new(5.5, 1.0, 0.25)];
        for level in levels() {
            let [a, b, c] = &parts;
            let left = merged(level, &merged(level, a, b), c);
            for other in [merged(level, a, &merged(level, b, c)), merged(level, c, &merged(level, b, a))] {
                assert_eq!(left.m, other.m);
                assert!((left.l / other.l - 1.0).abs() < 1e-6);
                assert!(left.o.iter().zip(&other.o).all(|(x, y)| (x - y).abs() <= 1e-6 * x.abs()), "{level}");
            }
            let l: f64 = parts.iter().map(|p| f64::from(p.l) * f64::from(p.m - 5.5).exp2()).sum();
            assert!((f64::from(left.l) / l - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn the_empty_state_is_neutral() {
        for level in levels() {
            let full = OwnedState::new(-3.0, 2.0, 1.0);
            for got in [merged(level, &full, &OwnedState::empty()), merged(level, &OwnedState::empty(), &full)] {
                assert_eq!((&got.o, got.m, got.l), (&full.o, full.m, full.l));
            }
            let none = merged(level, &OwnedState::empty(), &OwnedState::empty());
            assert_eq!((none.m, none.l), (f32::NEG_INFINITY, 0.0));
            assert_eq!(none.finished(level), vec![0.0; 16]);
        }
    }

    #[test]
    fn far_scores_do_not_overflow_and_nan_stays() {
        for level in levels() {
            let (high, low) = (OwnedState::new(14427.0, 1.0, 1.0), OwnedState::new(-14427.0, 1.0, 1.0));
            let got = merged(level, &low, &high);
            assert_eq!((&got.o, got.m, got.l), (&high.o, high.m, high.l));
            // If all scores are NaN, m has its minimum.
            let nan = OwnedState::new(f32::MIN, f32::NAN, f32::NAN);
            for got in [merged(level, &nan, &high), merged(level, &high, &nan)] {
                assert!(got.finished(level).iter().all(|x| x.is_nan()));
            }
        }
    }

    #[test]
    fn scores_of_minus_infinity_have_no_weight() {
        for level in levels() {
            let (lost, full) = (OwnedState::new(f32::MIN, 1e-37, 1e-37), OwnedState::new(-3.0, 2.0, 1.0));
            for got in [merged(level, &lost, &full), merged(level, &full, &lost)] {
                assert_eq!((&got.o, got.m, got.l), (&full.o, full.m, full.l));
            }
            for alone in [merged(level, &lost, &OwnedState::empty()), merged(level, &lost, &lost), lost] {
                assert!(alone.finished(level).iter().all(|x| x.is_nan()));
            }
        }
    }
}
