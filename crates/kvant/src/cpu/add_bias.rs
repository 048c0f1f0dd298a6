//! out = x + bias, row by row, for `add_bias` and `add`. Threads share the rows.

use super::{
    Cpu,
    elements::{Elements, PIECE, Padded},
    simd::{Simd, SimdKernel},
};
use crate::ops::add_bias::{BiasRow, Call};

/// Minimum elements of a task.
const TASK: usize = 8 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let (x, bias, out) = (Elements::of(&call.x), Elements::of(&call.bias), Elements::of(&call.out));
    let bias_row = |row: usize| match &call.bias_row {
        BiasRow::Only => 0,
        BiasRow::Own => row,
        // SAFETY: the device's lock is held while a call runs, and the call writes only to `out`.
        BiasRow::Expert { ids, .. } => (unsafe { ids.host_slice::<u32>() })[row] as usize,
    };
    let rows = (TASK / call.dim.max(1)).max(1);
    cpu.threads.run(call.rows.div_ceil(rows), |task| {
        for row in task * rows..call.rows.min((task + 1) * rows) {
            let bias_row = bias_row(row);
            for column in (0..call.dim).step_by(PIECE) {
                let (at, of_bias) = (row * call.dim + column, bias_row * call.dim + column);
                let len = PIECE.min(call.dim - column);
                cpu.level.dispatch(BiasPiece { x: (x, at), bias: (bias, of_bias), out: (out, at), len });
            }
        }
    });
}

/// `len` elements, at most [`PIECE`], from an index on.
struct BiasPiece {
    x: (Elements, usize),
    bias: (Elements, usize),
    out: (Elements, usize),
    len: usize,
}

impl SimdKernel for BiasPiece {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let (mut x, mut bias) = (Padded::new(self.len), Padded::new(self.len));
        // SAFETY: `dispatch` enables the instructions; the elements are within the tensors and belong to this task.
        // They are read before any is written, so `out` may be an input.
        unsafe {
            self.x.0.load::<S>(self.x.1, &mut x);
            self.bias.0.load::<S>(self.bias.1, &mut bias);
            for (x, bias) in x.vectors::<S>().zip(bias.vectors::<S>()) {
                S::store(x, S::add(S::load(x), S::load(bias)));
            }
            self.out.0.store::<S>(self.out.1, &x);
        }
    }
}
