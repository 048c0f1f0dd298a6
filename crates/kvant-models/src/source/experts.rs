//! Reads gpt-oss' experts in Hugging Face's layout: alternating rows (or columns) of gate and up. The loader gets the
//! gate's rows first.

use super::Destination;
use crate::{
    Result,
    parallel::{self, PIECE},
    safetensors::Checkpoint,
};

/// Rows and columns transposed at once: both sides stay in the L1 cache.
const TILE: usize = 32;

/// Reads tensors with alternating rows.
pub(super) struct Interleaved<'a> {
    pub checkpoint: &'a Checkpoint,
    /// Whether rows of gate and up alternate. Other tensors are read in order.
    pub alternates: bool,
}

impl Interleaved<'_> {
    /// Reads a tensor `[E, rows, …]` into one of shape `[E, rows]` or `[E, rows, n]` with equal size in bytes.
    pub(super) fn read_rows(&self, name: &str, to: &Destination) -> Result<()> {
        let (experts, rows) = (to.shape()[0], to.shape()[1]);
        if to.elements() == 0 {
            return Ok(());
        }
        let row_bytes = to.bytes() / (experts * rows);
        // With alternating rows, pairs of rows are read; otherwise one matrix.
        let (pairs, parts) = if self.alternates { (rows / 2, 2) } else { (rows, 1) };
        let step = (PIECE / (parts * row_bytes)).clamp(1, pairs);
        let pieces = pairs.div_ceil(step);
        parallel::for_each(
            experts * pieces,
            to.devices(),
            Default::default,
            |(piece, part): &mut (Vec<u8>, Vec<u8>), number| {
                let (expert, first) = (number / pieces, number % pieces * step);
                let count = step.min(pairs - first);
                piece.resize(count * parts * row_bytes, 0);
                part.resize(count * row_bytes, 0);
                let start = (expert * rows + first * parts) * row_bytes;
                self.checkpoint.read_bytes(name, start as u64, piece)?;
                for side in 0..parts {
                    let found = piece.chunks_exact(row_bytes).skip(side).step_by(parts);
                    part.chunks_exact_mut(row_bytes).zip(found).for_each(|(to, from)| to.copy_from_slice(from));
                    let at = expert * rows + side * pairs + first;
                    to.write_at(at * row_bytes, part)?;
                }
                Ok(())
            },
        )
    }

    /// Reads a tensor `[E, inputs, outputs]` into one of shape `[E, outputs, inputs]`.
    pub(super) fn read_transposed(&self, name: &str, to: &Destination) -> Result<()> {
        let &[experts, outputs, inputs] = to.shape() else { unreachable!("matrices of experts have three dimensions") };
        let size = to.dtype().size();
        let bytes = outputs * inputs * size;
        let buffers = || (vec![0; bytes], vec![0; bytes]);
        parallel::for_each(experts, to.devices(), buffers, |(from, transposed), expert| {
            self.checkpoint.read_bytes(name, (expert * bytes) as u64, from)?;
            self.transpose(from, transposed, [inputs, outputs], size);
            to.write_at(expert * bytes, transposed)
        })
    }

    /// Transposes `[inputs, outputs]` to `[outputs, inputs]`, in elements of `size` bytes.
    fn transpose(&self, from: &[u8], to: &mut [u8], [inputs, outputs]: [usize; 2], size: usize) {
        let row_of = |output: usize| match self.alternates {
            true => output % 2 * (outputs / 2) + output / 2,
            false => output,
        };
        for first_input in (0..inputs).step_by(TILE) {
            for first_output in (0..outputs).step_by(TILE) {
                for input in first_input..inputs.min(first_input + TILE) {
                    for output in first_output..outputs.min(first_output + TILE) {
                        let (at, place) = ((input * outputs + output) * size, (row_of(output) * inputs + input) * size);
                        to[place..place + size].copy_from_slice(&from[at..at + size]);
                    }
                }
            }
        }
    }
}
