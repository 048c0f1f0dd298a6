//! A few rows of activations times rows in blocks. The codes of the rows that are multiplied together are unpacked to
//! bytes first, which stay in the nearest cache; then they are 8-bit affine rows.

use super::{
    super::simd::Simd,
    block::{self, OutputBlock, Together},
    blocks::BlockMatrix,
    few_rows::{LANES, PreparedRow, WeightRows, sums},
    integers::{IntegerLayout, byte_products},
};

/// Rows in blocks that are multiplied together, at most.
const TOGETHER: usize = 8;

/// Bytes between the unpacked codes of two rows, lest rows fall into the same few sets of the caches.
fn unpacked_stride(inputs: usize) -> usize {
    inputs.next_multiple_of(64) + 64
}

/// Rows in blocks, and room for the codes of [`TOGETHER`] of them.
#[derive(Clone, Copy)]
pub(super) struct UnpackedRows {
    blocks: BlockMatrix,
    inputs: usize,
    codes: *mut u8,
}

impl UnpackedRows {
    /// Floats of the room that rows take.
    pub(super) fn room(inputs: usize) -> usize {
        TOGETHER * unpacked_stride(inputs) / 4
    }

    /// Nothing else uses the room as long as the result lives.
    pub(super) fn new(blocks: BlockMatrix, inputs: usize, room: &mut [f32]) -> UnpackedRows {
        debug_assert!(room.len() >= UnpackedRows::room(inputs));
        UnpackedRows { blocks, inputs, codes: room.as_mut_ptr().cast() }
    }

    fn row_bytes(&self) -> usize {
        self.blocks.row_bytes(self.inputs)
    }

    fn groups(&self) -> usize {
        self.inputs / self.blocks.group()
    }

    /// Unpacks the codes of R rows; returns those of the first, `unpacked_stride` before those of the next.
    ///
    /// # Safety
    /// The rows exist, there is room for them, and the level's instructions are enabled.
    #[inline(always)]
    unsafe fn unpack<S: Simd, const R: usize>(&self, block: &OutputBlock, rows: &Together) -> *const u8 {
        const { assert!(R <= TOGETHER) };
        for r in 0..R {
            // SAFETY: the caller's promise; nothing else refers to this room.
            unsafe {
                let to = self.codes.add(r * unpacked_stride(self.inputs));
                let to = std::slice::from_raw_parts_mut(to, self.inputs);
                self.blocks.codes::<S>(rows.output + r * rows.apart, block.prefetch_distance(), to);
            }
        }
        self.codes
    }
}

/// Rows in blocks, in f32.
#[derive(Clone, Copy)]
pub(super) struct BlockWeights {
    pub unpacked: UnpackedRows,
}

impl WeightRows for BlockWeights {
    fn row_bytes(&self) -> usize {
        self.unpacked.row_bytes()
    }

    fn groups(&self) -> usize {
        self.unpacked.groups()
    }

    #[inline(always)]
    unsafe fn scales<S: Simd>(&self, first: usize, scales: &mut [f32], biases: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { self.unpacked.blocks.factors::<S>(first, self.unpacked.inputs, scales, biases) };
    }

    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const T: usize>(
        &self,
        block: &OutputBlock,
        rows: Together,
        x: &[PreparedRow; T],
    ) -> [[f32; T]; R] {
        let (groups, group) = (self.groups(), self.unpacked.blocks.group());
        let stride = unpacked_stride(self.unpacked.inputs);
        // SAFETY: the caller's promise; the rows lie within the block.
        unsafe {
            let codes = self.unpacked.unpack::<S, R>(block, &rows);
            let scales: [_; R] =
                std::array::from_fn(|r| block.scales.as_ptr().add((rows.place + r * rows.places_apart) * groups));
            let biases = block.count * groups;
            let mut total = [[S::zero(); T]; R];
            for g in 0..groups {
                let mut dot = [[S::zero(); T]; R];
                for at in (g * group..(g + 1) * group).step_by(S::LANES) {
                    for (r, dot) in dot.iter_mut().enumerate() {
                        let q = S::load_u8(codes.add(r * stride + at));
                        for (dot, x) in dot.iter_mut().zip(x) {
                            *dot = S::fma(q, S::load(x.0.as_ptr().add(at)), *dot);
                        }
                    }
                }
                for r in 0..R {
                    let scale = S::splat(scales[r].add(g).read());
                    let bias = S::splat(scales[r].add(biases + g).read());
                    for t in 0..T {
                        let sum = S::load(x[t].1.as_ptr().add(g * LANES));
                        total[r][t] = S::fma(scale, dot[r][t], S::fma(bias, sum, total[r][t]));
                    }
                }
            }
            sums::<S, R, T>(total)
        }
    }
}

/// Rows in blocks, by products of bytes; codes have BITS bits, or more than 6 where it is 8.
#[derive(Clone, Copy)]
pub(super) struct BlockByteProducts<const BITS: usize> {
    pub unpacked: UnpackedRows,
    pub layout: IntegerLayout,
}

impl<const BITS: usize> WeightRows for BlockByteProducts<BITS> {
    fn row_bytes(&self) -> usize {
        self.unpacked.row_bytes()
    }

    fn groups(&self) -> usize {
        self.unpacked.groups()
    }

    #[inline(always)]
    unsafe fn scales<S: Simd>(&self, first: usize, scales: &mut [f32], biases: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { self.unpacked.blocks.factors::<S>(first, self.unpacked.inputs, scales, biases) };
    }

    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const T: usize>(
        &self,
        block: &OutputBlock,
        rows: Together,
        x: &[PreparedRow; T],
    ) -> [[f32; T]; R] {
        let (groups, scales) = (self.groups(), block.scales.as_ptr());
        // SAFETY: the caller's promise; the rows lie within the block.
        unsafe {
            let codes = self.unpacked.unpack::<S, R>(block, &rows);
            let rows = block::AffineRows {
                codes,
                codes_apart: unpacked_stride(self.unpacked.inputs),
                scales: scales.add(rows.place * groups),
                biases: scales.add((block.count + rows.place) * groups),
                scales_apart: rows.places_apart * groups,
                prefetch: block::WeightPrefetch::none(codes),
            };
            byte_products::dots::<BITS, 8, R, T>(self.layout, &rows, x.map(|x| x.0.as_ptr()))
        }
    }
}
