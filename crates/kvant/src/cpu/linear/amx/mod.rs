//! Many rows of activations times a matrix, with AMX tiles of bf16.
//!
//! out\[t\]\[n\] = alpha · Σₖ x\[t\]\[k\] · w\[n\]\[k\] for the outputs n of one task. Numbers are split into hi + lo
//! bf16 ([`amx_product`]). bf16 numbers, and all numbers with 8-bit activations, have hi only. An instruction adds the
//! products of 16 rows with 16 outputs over 32 inputs to sums of f32.
//!
//! | operand | layout, in words of the bf16 of two neighbouring inputs |
//! |---|---|
//! | a tile of activations | `[inputs / 32, digits, 16 rows, 16 words]` |
//! | a tile of weights | `[inputs / 32, digits, 16 words, 16 outputs]` |
//!
//! `digits` is the number of terms, hi and lo. A task unpacks the weights of a panel of outputs for [`DEPTH`] inputs
//! ([`weights`]), multiplies them by all rows of a block, and continues with the next inputs. Sums stay in memory in
//! between.

mod weights;

use std::{ops::Range, sync::PoisonError};

use super::{few_rows::PrepareAs, many_rows::ManyRowsBy};
use crate::{
    DType,
    cpu::{
        amx_product::{self, AmxProduct},
        scratch,
        simd::{
            Simd, SimdKernel,
            amx::{AMX_ROW_BYTES, AMX_ROWS, AmxRegisters},
        },
    },
};
use weights::PanelWeights;

/// Rows of activations of a tile.
pub(super) const ROWS: usize = AMX_ROWS;
/// Outputs of a tile.
const OUTPUTS: usize = 16;
/// Inputs of a tile.
const STEP: usize = 32;
/// Words of hi or lo in a tile: 16 rows of 64 bytes.
const WORDS: usize = AMX_ROWS * AMX_ROW_BYTES / size_of::<f32>();
/// Maximum outputs of a panel, 32 tiles: activations are read from the third-level cache once per panel.
pub(super) const PANEL: usize = 512;
/// Floats between rows of sums: rows a power of two apart would share a few sets of the caches.
const APART: usize = PANEL + 16;
/// Inputs that are unpacked at a time. Sums are loaded and stored once for them.
const DEPTH: usize = 256;
/// Maximum rows of a block: their sums stay in the second-level cache.
const BLOCK: usize = 256;

/// The layout of prepared activations.
#[derive(Clone, Copy)]
pub(super) struct AmxLayout {
    inputs: usize,
    /// Terms (hi, lo) of an activation.
    digits: usize,
    /// Terms of a weight, unless it is bf16.
    weight_digits: usize,
}

impl AmxLayout {
    /// The layout for activations of a dtype. `eight_bits`: hi suffices.
    pub(super) fn new(inputs: usize, x: DType, eight_bits: bool) -> AmxLayout {
        let digits = |is_bf16: bool| if is_bf16 || eight_bits { 1 } else { 2 };
        AmxLayout { inputs, digits: digits(x == DType::BF16), weight_digits: digits(false) }
    }

    fn steps(&self) -> usize {
        self.inputs.div_ceil(STEP)
    }

    /// Floats of a tile of rows.
    pub(super) fn tile(&self) -> usize {
        self.steps() * self.digits * WORDS
    }
}

/// Prepares tiles of rows, and lists tiles with a number that is not finite.
impl SimdKernel for PrepareAs<'_, AmxLayout> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let AmxLayout { inputs, digits, .. } = self.form;
        let row = &mut *scratch::take(self.form.steps() * STEP);
        row[inputs..].fill(0.0);
        for (tile, to) in self.to.chunks_exact_mut(self.form.tile()).enumerate() {
            for t in 0..ROWS.min(self.rows.saturating_sub(tile * ROWS)) {
                let index = tile * ROWS + t;
                // SAFETY: `dispatch` enables the instructions; the activations have these rows, which nobody writes.
                let is_finite = unsafe {
                    self.x.load::<S>((self.first + index) * inputs, &mut row[..inputs]);
                    weights::split_row(row, digits, &mut to[t * OUTPUTS..])
                };
                if !is_finite {
                    self.odd.lock().unwrap_or_else(PoisonError::into_inner).push((self.number + index) as u32);
                }
            }
        }
    }
}

impl SimdKernel for ManyRowsBy<'_, AmxLayout> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let first_outputs = self.outputs.clone().step_by(PANEL);
        let tile = self.layout.tile();
        let tiles = self.rows.len().min(BLOCK).div_ceil(ROWS);
        let totals = &mut *scratch::take_lines(tiles * ROWS * APART);
        let apart = self.rows.chunks(BLOCK).flat_map(|rows| rows.chunks(ROWS)).any(|rows| !is_tile(rows));
        let mut gathered = scratch::take_lines(if apart { tiles * tile } else { 0 });
        let gathered = gathered.as_mut_ptr();
        let mut x = [std::ptr::null(); BLOCK / ROWS];
        for rows in self.rows.chunks(BLOCK) {
            for (i, rows) in rows.chunks(ROWS).enumerate() {
                x[i] = if is_tile(rows) {
                    self.x[rows[0][0] as usize / ROWS * tile..][..tile].as_ptr()
                } else {
                    let to = gathered.wrapping_add(i * tile);
                    // SAFETY: each is a tile; nobody else has a reference to any of them.
                    self.gather(rows, unsafe { std::slice::from_raw_parts_mut(to, tile) });
                    to
                };
            }
            let x = &x[..rows.len().div_ceil(ROWS)];
            for first in first_outputs.clone() {
                let count = PANEL.min(self.outputs.end - first);
                // SAFETY: `dispatch_vbmi` enables the instructions; the rows and outputs exist, and no other task
                // writes these outputs.
                unsafe {
                    let mut odd = self.panel::<S>(x, first, count, totals);
                    while odd != 0 {
                        let output = odd.trailing_zeros() as usize * OUTPUTS;
                        let outputs = first + output..first + count.min(output + OUTPUTS);
                        self.tile_in_floats::<S>(x, rows.len(), outputs, &mut totals[output..]);
                        odd &= odd - 1;
                    }
                    for (&[_, out], row) in rows.iter().zip(totals.chunks_exact_mut(APART)) {
                        let row = &mut row[..count];
                        if self.alpha != 1.0 {
                            row.iter_mut().for_each(|x| *x *= self.alpha);
                        }
                        self.out.store::<S>(out as usize * self.width + first, row);
                    }
                }
            }
        }
    }
}

/// Whether the rows of activations are a whole tile, from its first row on.
fn is_tile(rows: &[[u32; 2]]) -> bool {
    let first = rows[0][0] as usize / ROWS * ROWS;
    rows.iter().enumerate().all(|(t, row)| row[0] as usize == first + t)
}

impl ManyRowsBy<'_, AmxLayout> {
    /// Gathers rows of activations into a tile.
    fn gather(&self, rows: &[[u32; 2]], gathered: &mut [f32]) {
        for (t, row) in rows.iter().enumerate() {
            let (tile, within) = (row[0] as usize / ROWS, row[0] as usize % ROWS * OUTPUTS);
            let from = self.x[tile * gathered.len()..][..gathered.len()].chunks_exact(WORDS);
            for (to, from) in gathered.chunks_exact_mut(WORDS).zip(from) {
                to[t * OUTPUTS..][..OUTPUTS].copy_from_slice(&from[within..][..OUTPUTS]);
            }
        }
    }

    /// Computes the sums of a panel of `count` outputs from `first` on. Returns a bit for each tile of outputs with a
    /// weight that is not finite: its sums are invalid.
    ///
    /// # Safety
    /// The level's instructions are enabled; the outputs exist, and `totals` has [`APART`] floats for each row of the
    /// tiles `x`.
    #[inline(always)]
    unsafe fn panel<S: Simd>(&self, x: &[*const f32], first: usize, count: usize, totals: &mut [f32]) -> u32 {
        let mut odd = 0;
        // SAFETY: the caller's promise.
        unsafe {
            let weights = PanelWeights::new::<S>(&self.matrix, self.base + first, count, self.layout.weight_digits);
            let digits = [self.layout.digits, weights.digits];
            let pairs = count.div_ceil(2 * OUTPUTS);
            let tile = DEPTH / STEP * digits[1] * WORDS;
            let panel = &mut *scratch::take_lines(2 * pairs * tile);
            let _registers = AmxRegisters::new();
            for start in (0..self.layout.steps()).step_by(DEPTH / STEP) {
                let steps = (DEPTH / STEP).min(self.layout.steps() - start);
                for (n, to) in panel.chunks_exact_mut(tile).enumerate() {
                    odd |= u32::from(!weights.unpack::<S>(n * OUTPUTS, start * STEP, steps, to)) << n;
                }
                for (i, rows) in x.chunks(2).enumerate() {
                    let at = start * digits[0] * WORDS;
                    let rows = [rows[0].add(at).cast(), rows[rows.len() - 1].add(at).cast()];
                    for (n, weights) in panel.chunks_exact(2 * tile).enumerate() {
                        AmxProduct {
                            sums: totals[i * 2 * ROWS * APART + n * 2 * OUTPUTS..].as_mut_ptr(),
                            apart: APART * size_of::<f32>(),
                            clears: start == 0,
                            a: rows,
                            both: 2 * i + 1 < x.len(),
                            b: [weights.as_ptr().cast(), weights[tile..].as_ptr().cast()],
                            digits,
                            step_bytes: digits.map(|digits| digits * amx_product::AMX_TILE),
                            steps,
                        }
                        .add();
                    }
                }
            }
        }
        odd
    }

    /// Computes a tile of outputs with plain f32 sums, for weights that are not finite.
    ///
    /// # Safety
    /// As for [`ManyRowsBy::panel`]; the tiles have `rows` rows.
    #[inline(always)]
    unsafe fn tile_in_floats<S: Simd>(&self, x: &[*const f32], rows: usize, outputs: Range<usize>, totals: &mut [f32]) {
        let AmxLayout { inputs, digits, .. } = self.layout;
        let weights = &mut *scratch::take(outputs.len() * inputs);
        let numbers = &mut *scratch::take(inputs);
        for (output, weights) in outputs.zip(weights.chunks_exact_mut(inputs)) {
            // SAFETY: the caller's promise.
            unsafe { self.matrix.natural_row::<S>(self.base + output, 1.0, weights) };
        }
        for t in 0..rows {
            for (k, number) in numbers.iter_mut().enumerate() {
                let digit = |digit: usize| {
                    let word = (k / STEP * digits + digit) * WORDS + t % ROWS * OUTPUTS + k % STEP / 2;
                    // SAFETY: a tile has these words.
                    let word = unsafe { x[t / ROWS].add(word).read() }.to_bits();
                    f32::from_bits(if k.is_multiple_of(2) { word << 16 } else { word & 0xFFFF_0000 })
                };
                *number = digit(0) + if digits == 2 { digit(1) } else { 0.0 };
            }
            for (total, weights) in totals[t * APART..].iter_mut().zip(weights.chunks_exact(inputs)) {
                *total = numbers.iter().zip(weights).map(|(x, w)| x * w).sum();
            }
        }
    }
}
