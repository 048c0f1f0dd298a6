//! Which outputs are computed together, and in which order a matrix is read.
//!
//! The hardware reads ahead along streams of addresses, as long as they go on: several rows side by side, each of which
//! ends soon, are the worst that it can be given. So where rows are long the outputs of a task are four streams of
//! consecutive rows, a quarter of the task apart, and rows of all four are multiplied together. Short rows are taken as
//! they follow one another. Either way lines are asked for ahead, because the hardware stops at the end of a page.

use std::ops::Range;

use super::super::simd::Simd;

/// Outputs that are collected before they are rounded and stored.
pub(super) const OUTPUTS: usize = 32;
/// Streams, and the consecutive outputs of a block that each of them has.
const STREAMS: usize = 4;
const RUN: usize = OUTPUTS / STREAMS;
/// Bytes of a row from which on there are streams.
const LONG: usize = 1 << 10;

/// Bytes that are asked for ahead, into the second cache: of a stream, and of rows that follow one another.
const AHEAD_STREAM: usize = 2 << 10;
const AHEAD: usize = 48 << 10;

/// Outputs that are computed together.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    first: usize,
    pub count: usize,
    /// From an output of one stream to that of the next; 0 where outputs follow one another.
    apart: usize,
    /// Of affine rows, widened: as many rows of scales as [`Block::count`], then as many of biases; in the order of [`Block::runs`].
    pub scales: &'a [f32],
}

impl<'a> Block<'a> {
    /// The blocks that `outputs` consist of.
    #[inline(always)]
    pub fn all(outputs: Range<usize>, row_bytes: usize) -> impl Iterator<Item = Block<'a>> {
        let whole = outputs.len() / OUTPUTS;
        let streams = whole > 1 && row_bytes >= LONG;
        (0..outputs.len().div_ceil(OUTPUTS)).map(move |i| {
            let (apart, step) = if streams && i < whole { (whole * RUN, RUN) } else { (0, OUTPUTS) };
            let first = outputs.start + i * step;
            Block { first, count: (outputs.len() - i * OUTPUTS).min(OUTPUTS), apart, scales: &[] }
        })
    }

    pub fn streams(&self) -> bool {
        self.apart > 0
    }

    /// Consecutive outputs, of which as many results stand together.
    #[inline(always)]
    pub fn runs(&self) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let Block { first, count, apart, .. } = *self;
        let len = if apart > 0 { RUN } else { count };
        (0..count.div_ceil(len)).map(move |run| (first + run * apart, run * len..(run + 1) * len))
    }

    /// The next of the block's outputs to be computed together, after the first `n`; and how many have been computed then. Some
    /// may be computed once more.
    #[inline(always)]
    pub fn next<const R: usize>(&self, n: usize) -> (Together, usize) {
        let Block { first, count, apart, .. } = *self;
        if apart > 0 {
            let (place, output) = (n % STREAMS * RUN + n / STREAMS, first + n % STREAMS * apart + n / STREAMS);
            return (Together { place, places_apart: RUN, output, apart }, n + R);
        }
        // Fewer than R are computed one by one, R times each.
        let (n, apart) = if count < R { (n, 0) } else { (n.min(count - R), 1) };
        (Together { place: n, places_apart: apart, output: first + n, apart }, n + if apart == 0 { 1 } else { R })
    }

    /// What is asked for while rows of `row_bytes` are read, the first of which stands at `row`.
    #[inline(always)]
    pub fn ahead(&self, row: *const u8, row_bytes: usize) -> Ahead {
        let distance = if self.streams() { AHEAD_STREAM } else { AHEAD };
        Ahead { start: row.wrapping_add(distance), apart: self.apart * row_bytes }
    }
}

/// Outputs at equal distances.
#[derive(Clone, Copy)]
pub(super) struct Together {
    /// Where the first of them has its result among those of the block, and how much further each of the others.
    pub place: usize,
    pub places_apart: usize,
    /// The first of them, and from one to the next.
    pub output: usize,
    pub apart: usize,
}

/// What is asked for while R rows are read side by side.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    start: *const u8,
    /// From a row to the next; 0 where rows follow one another.
    apart: usize,
}

impl Ahead {
    /// Where to ask while `bytes` bytes of each row are read, those with number `index`: for the first row, and how much
    /// further for each of the others.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "`bytes` asks"))]
    pub fn at<const R: usize>(&self, index: usize, bytes: usize) -> (*const u8, usize) {
        match self.apart {
            // In the order of addresses, whichever row this is.
            0 => (self.start.wrapping_add(index * R * bytes), bytes),
            apart => (self.start.wrapping_add(index * bytes), apart),
        }
    }

    /// Asks for as many lines as there are in so many bytes of all rows, which are of streams or follow one another.
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

/// Affine rows of a matrix at equal distances: the first one's codes, scales and biases, how many bytes of codes and how many
/// scales (and biases) further each of the others has its own, and what to ask for meanwhile.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "`bytes` reads them"))]
pub(super) struct Rows {
    pub codes: *const u8,
    pub codes_apart: usize,
    pub scales: *const f32,
    pub biases: *const f32,
    pub scales_apart: usize,
    pub ahead: Ahead,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The place of every output that blocks of R rows compute is the one from which it is stored, and all are there.
    fn check<const R: usize>(outputs: Range<usize>, row_bytes: usize) {
        let mut computed = vec![0; outputs.end];
        for block in Block::all(outputs.clone(), row_bytes) {
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
    fn every_output_has_its_place() {
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
