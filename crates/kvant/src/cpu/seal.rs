//! Seals pages: encodes their dense rows, each page around its own mean.
//!
//! A task is a (page, side, KV head): its vectors stay in the first- or second-level cache while their mean is computed
//! and they are encoded around it.

use super::{
    Cpu,
    key_bias::HeadBias,
    planes::PlaneRows,
    scratch,
    simd::{Simd, SimdKernel},
    turboquant::dot,
};
use crate::{codec::MEAN_LEVELS, ops::seal::Call};

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    // SAFETY: the device's lock is held while a call runs, and the call does not write to `pages`.
    let entries: &[u32] = unsafe { call.pages.host_slice() };
    let sides = [(&call.dense.k, &call.sealed.k), (&call.dense.v, &call.sealed.v)];
    let sides = sides.map(|(dense, sealed)| SealedSide {
        dense: PlaneRows::new(&call.dense, dense),
        sealed: PlaneRows::new(&call.sealed, sealed),
    });
    let heads = call.sealed.spec().kv_heads;
    cpu.threads.run(call.count() * 2 * heads, |task| {
        let (page, side, head) = (task / (2 * heads), task / heads % 2, task % heads);
        let start = |layer: &crate::KvLayer, entry| layer.pages().and_then(|pages| pages.start(entry));
        let from = start(&call.dense, entries[3 * page]);
        let to = start(&call.sealed, entries[3 * page + 1]);
        if let (Some(from), Some(to)) = (from, to) {
            let SealedSide { dense, sealed } = &sides[side];
            let rows = head * call.sealed.page_tokens()..(head + 1) * call.sealed.page_tokens();
            let dim = call.sealed.spec().head_dim;
            // SAFETY: as above.
            let bias = call.sealed.key_bias().filter(|_| side == 0).map(|bias| unsafe { HeadBias::new(bias, head) });
            let bias = bias.map(|bias| (bias, entries[3 * page + 2] as usize));
            cpu.level.dispatch(SealTask { dense: dense.shifted(from), sealed: sealed.shifted(to), rows, dim, bias });
        }
    });
}

struct SealedSide {
    dense: PlaneRows,
    sealed: PlaneRows,
}

/// The rows of one side and KV head of a page.
struct SealTask<'a> {
    dense: PlaneRows,
    sealed: PlaneRows,
    rows: std::ops::Range<usize>,
    dim: usize,
    /// The key bias, which is subtracted from the vectors before they are stored, and the page's index in its sequence.
    bias: Option<(HeadBias<'a>, usize)>,
}

impl SimdKernel for SealTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let SealTask { dense, sealed, rows, dim, bias } = self;
        let (count, first) = (rows.len(), rows.start);
        let vectors = &mut *scratch::take(count * dim);
        let mean = &mut *scratch::take(dim);
        // SAFETY: `dispatch` enables the instructions; both pages have the rows, and no other task uses them.
        unsafe {
            for (row, x) in rows.clone().zip(vectors.chunks_exact_mut(dim)) {
                dense.load::<S>(row, x, false);
            }
            if let Some((bias, page)) = bias {
                let room = &mut *scratch::take(3 * dim);
                let (at_page, room) = room.split_at_mut(dim);
                let (pairs, at_slot) = room.split_at_mut(dim);
                bias.at_page(page, at_page);
                for (slot, x) in vectors.chunks_exact_mut(dim).enumerate() {
                    bias.at_slot(at_page, slot, pairs, at_slot);
                    x.iter_mut().zip(&*at_slot).for_each(|(x, bias)| *x -= bias);
                }
            }
            let stored = sealed.centred(first);
            if let Some((quantiser, stored)) = stored {
                SumOfVectors::new(mean).mean_of::<S>(vectors);
                quantiser.rotate::<S>(mean);
                stored.store(mean);
                stored.load(mean);
            }
            let mean: &[f32] = if stored.is_some() { mean } else { &[] };
            for (row, x) in rows.zip(vectors.chunks_exact_mut(dim)) {
                sealed.store::<S>(row, x, mean);
            }
        }
    }
}

/// A mean in a page: codes, then their scale.
#[derive(Clone, Copy)]
pub(super) struct StoredMean {
    pub start: *mut u8,
}

impl StoredMean {
    /// The scale of a mean of `dim` coordinates.
    ///
    /// # Safety
    /// As for [`StoredMean::load`].
    #[inline(always)]
    pub(super) unsafe fn scale(self, dim: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { self.start.add(dim).cast::<f32>().read_unaligned() }
    }

    /// Decodes the mean of vectors of the length of `to`.
    ///
    /// # Safety
    /// The page has the mean, and nobody writes to it.
    #[inline(always)]
    pub(super) unsafe fn load(self, to: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            let scale = self.scale(to.len());
            let codes = std::slice::from_raw_parts(self.start.cast::<i8>(), to.len());
            to.iter_mut().zip(codes).for_each(|(to, &code)| *to = f32::from(code) * scale);
        }
    }

    /// Stores a rotated mean, rounded to its codes.
    ///
    /// # Safety
    /// The page has room for the mean, and nobody else uses it.
    #[inline(always)]
    unsafe fn store(self, mean: &[f32]) {
        let largest = mean.iter().fold(0f32, |largest, m| largest.max(m.abs()));
        let scale = largest / MEAN_LEVELS;
        // SAFETY: the caller's promise.
        unsafe {
            let codes = std::slice::from_raw_parts_mut(self.start.cast::<i8>(), mean.len());
            if scale > 0.0 {
                let code = |m: f32| (m / scale).round_ties_even().clamp(-MEAN_LEVELS, MEAN_LEVELS) as i8;
                codes.iter_mut().zip(mean).for_each(|(to, &m)| *to = code(m));
            } else {
                codes.fill(0);
            }
            self.start.add(mean.len()).cast::<f32>().write_unaligned(scale);
        }
    }
}

/// The sum of vectors, except vectors that are not finite or whose squared length overflows.
struct SumOfVectors<'a> {
    sum: &'a mut [f32],
    count: u32,
}

impl<'a> SumOfVectors<'a> {
    fn new(sum: &'a mut [f32]) -> Self {
        sum.fill(0.0);
        SumOfVectors { sum, count: 0 }
    }

    /// The mean of vectors of the length of `sum`.
    ///
    /// # Safety
    /// The level's instructions are enabled.
    #[inline(always)]
    unsafe fn mean_of<S: Simd>(mut self, vectors: &[f32]) {
        let dim = self.sum.len();
        // SAFETY: passed on to the caller.
        unsafe {
            let mut squares = [S::zero(); 2];
            vectors.chunks_exact(dim).for_each(|x| self.add_unchecked::<S>(x, &mut squares));
            // A vector that must be skipped makes the sum of all squares infinite or NaN.
            if !S::sum(S::add(squares[0], squares[1])).is_finite() {
                self = SumOfVectors::new(self.sum);
                vectors.chunks_exact(dim).for_each(|x| self.add::<S>(x));
            }
        }
        self.finish();
    }

    /// # Safety
    /// The level's instructions are enabled.
    #[inline(always)]
    unsafe fn add<S: Simd>(&mut self, x: &[f32]) {
        // SAFETY: passed on to the caller.
        unsafe {
            if dot::<S>(x, x).is_finite() {
                add::<S>(self.sum, x);
                self.count += 1;
            }
        }
    }

    /// Adds a vector, finite or not, and its squares to `squares`.
    ///
    /// # Safety
    /// The level's instructions are enabled.
    #[inline(always)]
    unsafe fn add_unchecked<S: Simd>(&mut self, x: &[f32], squares: &mut [S::F; 2]) {
        let [mut even, mut odd] = *squares;
        let n = self.sum.len().min(x.len());
        let whole = n - n % S::LANES;
        let sum = self.sum.as_mut_ptr();
        for i in (0..whole).step_by(S::LANES) {
            // SAFETY: whole vectors of both; the rest is the caller's promise.
            unsafe {
                let x = S::load(x.as_ptr().add(i));
                S::store(sum.add(i), S::add(S::load(sum.add(i)), x));
                // Two independent chains of additions take half the time of one.
                (even, odd) = (odd, S::fma(x, x, even));
            }
        }
        for (sum, &x) in self.sum[whole..].iter_mut().zip(&x[whole..n]) {
            *sum += x;
            // SAFETY: the caller's promise. The square is counted once per lane, which does not matter: only finiteness
            // is tested.
            unsafe { even = S::fma(S::splat(x), S::splat(x), even) };
        }
        *squares = [even, odd];
        self.count += 1;
    }

    /// Divides the sum by the number of vectors.
    fn finish(self) {
        let count = self.count.max(1) as f32;
        self.sum.iter_mut().for_each(|sum| *sum /= count);
    }
}

/// sum ← sum + x, for two slices of one length.
///
/// # Safety
/// The level's instructions are enabled.
#[inline(always)]
unsafe fn add<S: Simd>(sum: &mut [f32], x: &[f32]) {
    let n = sum.len().min(x.len());
    let whole = n - n % S::LANES;
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: whole vectors of both; the rest is the caller's promise.
        unsafe { S::store(sum.as_mut_ptr().add(i), S::add(S::load(sum.as_ptr().add(i)), S::load(x.as_ptr().add(i)))) }
    }
    sum[whole..n].iter_mut().zip(&x[whole..n]).for_each(|(sum, x)| *sum += x);
}
