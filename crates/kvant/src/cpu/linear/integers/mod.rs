//! Products of affine rows in integers, where the processor multiplies those (AVX-512 VNNI).
//!
//! Activations become multiples of a unit per group: three bytes each for a few rows ([`byte_products`]), two bytes
//! each for many ([`word_products`]).

use std::arch::x86_64::*;

pub mod block_codes;
pub mod byte_products;
pub mod word_products;

/// The layout of a matrix's affine rows.
#[derive(Clone, Copy)]
pub struct IntegerLayout {
    inputs: usize,
    /// Products of bytes take this many inputs from every other run of as many, then those between; 0: as they are.
    run: usize,
    /// Log2 of the inputs that share a scale: divisions take time where rows are short.
    group: u32,
}

impl IntegerLayout {
    pub fn new(inputs: usize, run: usize, group: usize) -> IntegerLayout {
        IntegerLayout { inputs, run, group: group.ilog2() }
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub fn groups(&self) -> usize {
        self.inputs >> self.group
    }
}

/// The largest magnitude and the sum of a group. None if integers cannot represent it: one is not finite, or all are
/// tiny.
///
/// # Safety
/// The instructions of `Avx512Vnni` are there; the group is a whole number of vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn measure(group: &[f32]) -> Option<(f32, f32)> {
    let (mut largest, mut sum) = (_mm512_setzero_ps(), _mm512_setzero_ps());
    for x in group.chunks_exact(16) {
        // SAFETY: a vector of floats.
        let x = unsafe { _mm512_loadu_ps(x.as_ptr()) };
        largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
        sum = _mm512_add_ps(sum, x);
    }
    let (largest, sum) = (_mm512_reduce_max_ps(largest), _mm512_reduce_add_ps(sum));
    // Of a NaN the maximum may lose sight, but the sum does not.
    let holds = sum.is_finite() && largest <= 1e38 && (largest >= 1e-20 || group.iter().all(|&x| x == 0.0));
    holds.then_some((largest, sum))
}
