//! The order in which the rows of a matrix are read, and the outputs that are computed together.
//!
//! The hardware prefetches along streams of addresses, and handles several short streams at once badly. If rows are
//! long, the outputs of a task therefore form four streams of consecutive rows, a quarter of the task apart, and rows
//! of all four are multiplied together. Short rows are processed one after the other. Lines are also prefetched in
//! software, because the hardware stops at the end of a page.

use std::ops::Range;

use super::super::simd::Simd;

/// Outputs that are collected before they are rounded and stored.
pub(super) const OUTPUTS: usize = 32;
/// The number of streams, and the number of consecutive outputs that a block has in each stream.
const STREAMS: usize = 4;
const RUN: usize = OUTPUTS / STREAMS;
/// Minimum bytes of a row for streams.
const LONG: usize = 1 << 10;

/// Bytes to prefetch ahead, into the second-level cache: for a stream, and for consecutive rows.
const PREFETCH_STREAM: usize = 2 << 10;
const PREFETCH_ROWS: usize = 48 << 10;

/// Outputs that are computed together.
#[derive(Clone, Copy)]
pub(super) struct OutputBlock<'a> {
    first: usize,
    pub count: usize,
    /// The distance between the outputs of neighbouring streams; 0 if outputs are consecutive.
    apart: usize,
    /// For affine rows, in f32: [`OutputBlock::count`] rows of scales, then equally many rows of biases, in the order
    /// of [`OutputBlock::runs`].
    pub scales: &'a [f32],
}

impl<'a> OutputBlock<'a> {
    /// Divides `outputs` into blocks.
    #[inline(always)]
    pub fn all(outputs: Range<usize>, row_bytes: usize) -> impl Iterator<Item = OutputBlock<'a>> {
        let whole = outputs.len() / OUTPUTS;
        let streams = whole > 1 && row_bytes >= LONG;
        (0..outputs.len().div_ceil(OUTPUTS)).map(move |i| {
            let (apart, step) = if streams && i < whole { (whole * RUN, RUN) } else { (0, OUTPUTS) };
            let first = outputs.start + i * step;
            OutputBlock { first, count: (outputs.len() - i * OUTPUTS).min(OUTPUTS), apart, scales: &[] }
        })
    }

    pub fn streams(&self) -> bool {
        self.apart > 0
    }

    /// Runs of consecutive outputs, and the indices of their results.
    #[inline(always)]
    pub fn runs(&self) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let OutputBlock { first, count, apart, .. } = *self;
        let len = if apart > 0 { RUN } else { count };
        (0..count.div_ceil(len)).map(move |run| (first + run * apart, run * len..(run + 1) * len))
    }

    /// The outputs of the block to compute together after the first `n`, and the new `n`. Some outputs may be computed
    /// twice.
    #[inline(always)]
    pub fn next<const R: usize>(&self, n: usize) -> (Together, usize) {
        let OutputBlock { first, count, apart, .. } = *self;
        if apart > 0 {
            let (place, output) = (n % STREAMS * RUN + n / STREAMS, first + n % STREAMS * apart + n / STREAMS);
            return (Together { place, places_apart: RUN, output, apart }, n + R);
        }
        // Fewer than R outputs are computed one by one, R times each.
        let (n, apart) = if count < R { (n, 0) } else { (n.min(count - R), 1) };
        (Together { place: n, places_apart: apart, output: first + n, apart }, n + if apart == 0 { 1 } else { R })
    }

    /// The prefetches while rows of `row_bytes` are read, starting at `row`.
    #[inline(always)]
    pub fn prefetch(&self, row: *const u8, row_bytes: usize) -> WeightPrefetch {
        let ahead = if self.streams() { PREFETCH_STREAM } else { PREFETCH_ROWS };
        WeightPrefetch { start: row.wrapping_add(ahead), apart: self.apart * row_bytes }
    }

    /// As [`OutputBlock::prefetch`], for rows that are read twice, where the first pass reads the beginning of each
    /// block: prefetches the lines after it.
    #[inline(always)]
    pub fn prefetch_rows(&self, row: *const u8, row_bytes: usize) -> WeightPrefetch {
        let start = row.wrapping_add(self.prefetch_distance(row_bytes) + 64);
        WeightPrefetch { start, apart: self.apart * row_bytes }
    }

    /// Bytes to prefetch ahead in rows that are read twice: one row.
    #[inline(always)]
    pub fn prefetch_distance(&self, row_bytes: usize) -> usize {
        if self.streams() { row_bytes.max(PREFETCH_STREAM) } else { PREFETCH_ROWS }
    }
}

/// Outputs at equal distances.
#[derive(Clone, Copy)]
pub(super) struct Together {
    /// The index of the first output's result in the block, and the distance between results.
    pub place: usize,
    pub places_apart: usize,
    /// The first output, and the distance between outputs.
    pub output: usize,
    pub apart: usize,
}

/// Prefetches for R rows that are read together.
#[derive(Clone, Copy)]
pub(super) struct WeightPrefetch {
    start: *const u8,
    /// The distance between rows; 0 if rows are consecutive.
    apart: usize,
}

impl WeightPrefetch {
    /// The addresses to prefetch while the `index`th `bytes` bytes of each row are read: the address for the first row,
    /// and the distance between the addresses for neighbouring rows.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only `integers` calls it"))]
    pub fn at<const R: usize>(&self, index: usize, bytes: usize) -> (*const u8, usize) {
        match self.apart {
            // Consecutive rows: prefetches in the order of addresses, regardless of rows.
            0 => (self.start.wrapping_add(index * R * bytes), bytes),
            apart => (self.start.wrapping_add(index * bytes), apart),
        }
    }

    /// Prefetches `bytes` bytes of all rows, which are in streams or consecutive.
    ///
    /// # Safety
    /// The level's instructions are enabled.
    #[inline(always)]
    pub unsafe fn fetch<S: Simd, const R: usize, const STREAMS: bool>(&self, index: usize, bytes: usize) {
        const LINE: usize = 64;
        if !STREAMS {
            for at in (index * R * bytes..(index + 1) * R * bytes).step_by(LINE) {
                // SAFETY: the caller's promise.
                unsafe { S::prefetch(self.start.wrapping_add(at)) };
            }
            return;
        }
        for at in ((index * bytes).next_multiple_of(LINE)..(index + 1) * bytes).step_by(LINE) {
            for row in 0..R {
                // SAFETY: the caller's promise.
                unsafe { S::prefetch(self.start.wrapping_add(row * self.apart + at)) };
            }
        }
    }
}

/// The scales and biases of rows at equal distances: the scales and biases of the first row, and the number of scales
/// (and biases) between rows.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only `integers` reads them"))]
pub(super) struct RowFactors {
    pub scales: *const f32,
    pub biases: *const f32,
    pub apart: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that blocks of R rows compute every output, and store it at its own index.
    fn check<const R: usize>(outputs: Range<usize>, row_bytes: usize) {
        let mut computed = vec![0; outputs.end];
        for block in OutputBlock::all(outputs.clone(), row_bytes) {
            let mut stored = [usize::MAX; OUTPUTS];
            for (first, run) in block.runs() {
                run.clone().for_each(|place| stored[place] = first + place - run.start);
            }
            if R > STREAMS && block.streams() {
                continue;
            }
            let mut n = 0;
            while n < block.count {
                let (rows, done) = block.next::<R>(n);
                assert!(done > n);
                n = done;
                for r in 0..R {
                    let output = rows.output + r * rows.apart;
                    assert_eq!(stored[rows.place + r * rows.places_apart], output, "{outputs:?} {row_bytes} {R}");
                    computed[output] += 1;
                }
            }
        }
        if R <= STREAMS || row_bytes < LONG {
            assert!(computed[outputs.clone()].iter().all(|&count| count > 0), "{outputs:?} {row_bytes} {R}");
            let once = outputs.len().is_multiple_of(OUTPUTS);
            assert!(!once || computed[outputs.clone()].iter().all(|&count| count == 1), "{outputs:?} {row_bytes} {R}");
        }
    }

    #[test]
    fn every_output_is_stored_at_its_index() {
        for len in [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 64, 65, 96, 100, 128, 131] {
            for first in [0, 1, 96] {
                for row_bytes in [64, LONG - 1, LONG, 1 << 20] {
                    check::<2>(first..first + len, row_bytes);
                    check::<4>(first..first + len, row_bytes);
                    check::<8>(first..first + len, row_bytes);
                }
            }
        }
    }
}
