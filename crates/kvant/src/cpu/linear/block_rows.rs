//! A few rows of activations times rows in blocks.
//!
//! The scales and biases of rows that are multiplied together are computed first, which also loads the rows into the
//! nearest cache. Byte products unpack codes in registers. In f32, codes are first unpacked to bytes, and then
//! processed as 8-bit affine rows.

use super::{
    super::simd::Simd,
    block::{OutputBlock, RowFactors, Together},
    blocks::BlockMatrix,
    few_rows::{LANES, PreparedRow, WeightRows, sums},
    integers::{IntegerLayout, block_codes::BlockCodes, byte_products},
};

/// Maximum rows that are multiplied together.
const TOGETHER: usize = 8;

/// Rows in blocks, and scratch for the scales and biases of [`TOGETHER`] of them.
#[derive(Clone, Copy)]
pub(super) struct FactorRows {
    blocks: BlockMatrix,
    inputs: usize,
    factors: *mut f32,
}

impl FactorRows {
    /// Floats of scratch.
    pub(super) fn room(groups: usize) -> usize {
        TOGETHER * 2 * groups
    }

    /// Nothing else may use `room` while the result lives.
    pub(super) fn new(blocks: BlockMatrix, inputs: usize, room: &mut [f32]) -> FactorRows {
        debug_assert!(room.len() >= FactorRows::room(inputs / blocks.group()));
        FactorRows { blocks, inputs, factors: room.as_mut_ptr() }
    }

    fn row_bytes(&self) -> usize {
        self.blocks.row_bytes(self.inputs)
    }

    fn groups(&self) -> usize {
        self.inputs / self.blocks.group()
    }

    /// Computes the scales and biases of R rows.
    ///
    /// # Safety
    /// The rows exist, the scratch has room for them, and the level's instructions are enabled.
    #[inline(always)]
    unsafe fn compute<S: Simd, const R: usize>(&self, block: &OutputBlock, rows: &Together) -> RowFactors {
        const { assert!(R <= TOGETHER) };
        let groups = self.groups();
        for r in 0..R {
            // SAFETY: the caller's promise; nothing else refers to this room.
            unsafe {
                let room = std::slice::from_raw_parts_mut(self.factors.add(r * 2 * groups), 2 * groups);
                let (scales, biases) = room.split_at_mut(groups);
                let (row, ahead) = (rows.output + r * rows.apart, block.prefetch_distance(self.row_bytes()));
                self.blocks.factors::<S>(row, self.inputs, ahead, scales, biases);
            }
        }
        RowFactors { scales: self.factors, biases: self.factors.wrapping_add(groups), apart: 2 * groups }
    }
}

/// Rows in blocks, processed in f32, and scratch for the codes of [`TOGETHER`] of them.
#[derive(Clone, Copy)]
pub(super) struct BlockWeights {
    rows: FactorRows,
    codes: *mut u8,
}

impl BlockWeights {
    /// Floats of scratch.
    pub(super) fn room(blocks: BlockMatrix, inputs: usize) -> usize {
        FactorRows::room(inputs / blocks.group()) + TOGETHER * Self::apart(inputs) / 4
    }

    /// Nothing else may use `room` while the result lives.
    pub(super) fn new(blocks: BlockMatrix, inputs: usize, room: &mut [f32]) -> BlockWeights {
        let (factors, codes) = room.split_at_mut(FactorRows::room(inputs / blocks.group()));
        debug_assert!(codes.len() * 4 >= TOGETHER * Self::apart(inputs));
        BlockWeights { rows: FactorRows::new(blocks, inputs, factors), codes: codes.as_mut_ptr().cast() }
    }

    /// Bytes between the unpacked codes of two rows, chosen so that rows do not share a few sets of the caches.
    fn apart(inputs: usize) -> usize {
        inputs.next_multiple_of(64) + 64
    }
}

impl WeightRows for BlockWeights {
    fn row_bytes(&self) -> usize {
        self.rows.row_bytes()
    }

    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const T: usize>(
        &self,
        block: &OutputBlock,
        rows: Together,
        x: &[PreparedRow; T],
    ) -> [[f32; T]; R] {
        let FactorRows { blocks, inputs, .. } = self.rows;
        let (groups, group, apart) = (self.rows.groups(), blocks.group(), Self::apart(inputs));
        // SAFETY: the caller's promise; nothing else refers to the room.
        unsafe {
            let factors = self.rows.compute::<S, R>(block, &rows);
            for r in 0..R {
                let to = std::slice::from_raw_parts_mut(self.codes.add(r * apart), inputs);
                let ahead = block.prefetch_distance(self.row_bytes());
                blocks.codes::<S>(rows.output + r * rows.apart, ahead, to);
            }
            let mut total = [[S::zero(); T]; R];
            for g in 0..groups {
                let mut dot = [[S::zero(); T]; R];
                for at in (g * group..(g + 1) * group).step_by(S::LANES) {
                    for (r, dot) in dot.iter_mut().enumerate() {
                        let q = S::load_u8(self.codes.add(r * apart + at));
                        for (dot, x) in dot.iter_mut().zip(x) {
                            *dot = S::fma(q, S::load(x.0.as_ptr().add(at)), *dot);
                        }
                    }
                }
                for r in 0..R {
                    let scale = S::splat(factors.scales.add(r * factors.apart + g).read());
                    let bias = S::splat(factors.biases.add(r * factors.apart + g).read());
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

/// Rows in blocks of one packing, processed by byte products.
#[derive(Clone, Copy)]
pub(super) struct BlockByteProducts<const PACKING: usize> {
    pub rows: FactorRows,
    pub layout: IntegerLayout,
}

impl<const PACKING: usize> WeightRows for BlockByteProducts<PACKING> {
    fn row_bytes(&self) -> usize {
        self.rows.row_bytes()
    }

    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const T: usize>(
        &self,
        block: &OutputBlock,
        rows: Together,
        x: &[PreparedRow; T],
    ) -> [[f32; T]; R] {
        // SAFETY: the caller's promise; the rows are within the block.
        unsafe {
            let factors = self.rows.compute::<S, R>(block, &rows);
            let start = self.rows.blocks.row(rows.output, self.rows.inputs);
            let prefetch = block.prefetch_rows(start, self.row_bytes());
            let codes = BlockCodes::<PACKING>::new(&self.rows.blocks, start, rows.apart * self.row_bytes(), prefetch);
            byte_products::dots::<_, R, T>(self.layout, codes, &factors, x.map(|x| x.0.as_ptr()))
        }
    }
}
