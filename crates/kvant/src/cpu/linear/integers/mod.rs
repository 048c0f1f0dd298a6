//! Integer products of affine rows, for processors with VNNI.
//!
//! Activations become multiples of a unit per group: three bytes each for a few rows ([`byte_products`]), two bytes or
//! one for many ([`panel_products`]).

use crate::cpu::simd::Simd;

pub mod block_codes;
pub mod byte_products;
pub mod panel_codes;
pub mod panel_products;

/// The layout of a matrix's affine rows.
#[derive(Clone, Copy)]
pub struct IntegerLayout {
    inputs: usize,
    /// Byte products process alternating runs of this many inputs in two vectors; 0 for natural order.
    run: usize,
    /// Log2 of the inputs that share a scale, because divisions take time for short rows.
    group: u32,
    /// A code in the middle of the range.
    middle: i16,
}

impl IntegerLayout {
    pub fn new(inputs: usize, run: usize, group: usize, middle: i16) -> IntegerLayout {
        IntegerLayout { inputs, run, group: group.ilog2(), middle }
    }

    pub fn middle(&self) -> i16 {
        self.middle
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub fn groups(&self) -> usize {
        self.inputs >> self.group
    }
}

/// The largest magnitude and the sum of a group. `None` if integers cannot represent the group: a number is not finite,
/// or all numbers are tiny.
///
/// # Safety
/// The level's instructions are enabled; the group is a whole number of vectors.
#[inline(always)]
unsafe fn measure<S: Simd>(group: &[f32]) -> Option<(f32, f32)> {
    // SAFETY: the caller's promise.
    let (largest, sum) = unsafe {
        let (mut largest, mut sum) = (S::zero(), S::zero());
        for x in group.chunks_exact(S::LANES) {
            let x = S::load(x.as_ptr());
            largest = S::max(largest, S::max(x, S::sub(S::zero(), x)));
            sum = S::add(sum, x);
        }
        (S::max_lane(largest), S::sum(sum))
    };
    // `max` may drop NaN; the sum propagates it.
    let is_representable = sum.is_finite() && largest <= 1e38 && (largest >= 1e-20 || group.iter().all(|&x| x == 0.0));
    is_representable.then_some((largest, sum))
}
