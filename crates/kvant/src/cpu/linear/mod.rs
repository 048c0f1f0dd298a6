//! out\[r\] = alpha · x\[r / rows_per_input\] · Wᵀ, with one matrix, or with one of E per row.
//!
//! The activations are prepared once for all parts of an output: widened to f32 in the kernel's order of inputs, or
//! converted to integers or tiles. The output rows are listed by matrix, so that each chosen matrix is read once. A
//! task is a range of outputs of one matrix and one part. [`route`] selects the kernel by the number of rows of a
//! matrix: with few rows, reading weights is the bottleneck; with many, arithmetic.

#[cfg(test)]
pub(super) mod accuracy;
#[cfg_attr(not(target_arch = "x86_64"), path = "amx_stub.rs")]
mod amx;
mod block;
mod block_rows;
mod blocks;
mod few_rows;
mod floats;
#[cfg_attr(not(target_arch = "x86_64"), path = "integers_stub.rs")]
mod integers;
mod many_rows;
pub(super) mod matrix;
mod route;

use std::sync::{Mutex, PoisonError};

use amx::AmxLayout;
use few_rows::{FewRows, FewRowsByBytes, Integers, Prepare, PrepareAs, Prepared};
use integers::panel_products::{self, PanelLayout};
use many_rows::{ManyRows, ManyRowsBy};
use matrix::Matrix;
use route::{LinearKernel, WeightClass, select, select_f32};

use super::{
    Cpu,
    elements::{Elements, SliceParts},
    scratch,
};
use crate::ops::linear::Call;

/// Maximum rows of activations prepared at a time, which bounds the scratch memory.
const X_ROWS: usize = 1024;
/// Outputs of a task that widens weights.
const MANY_TILE: usize = 128;
/// Multiply-adds below which sharing tasks among threads costs more than it saves.
const ALONE: usize = 1 << 15;
/// Elements below which preparing activations is not shared among threads.
const ALONE_PREPARE: usize = 1 << 14;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    if call.dims.inputs == 0 {
        // Empty sums are zero, for any number of empty matrices.
        // SAFETY: calls run under the device's lock, and the output overlaps no other argument.
        return unsafe { call.out.host_ptr().write_bytes(0, call.out.bytes()) };
    }
    let x_rows = call.rows.div_ceil(call.rows_per_input.max(1));
    for first in (0..x_rows).step_by(X_ROWS) {
        run_rows(cpu, call, first, (x_rows - first).min(X_ROWS));
    }
}

/// Computes the outputs of `x_rows` rows of activations from `first` on.
fn run_rows(cpu: &Cpu, call: &Call, first: usize, x_rows: usize) {
    let matrix = Matrix::new(&call.weight, call.dims.inputs);
    let out_rows = x_rows * call.rows_per_input;
    let experts = if call.experts.is_some() { call.dims.experts } else { 1 };
    let list = &mut *scratch::take(2 * out_rows + 2 * experts + 1);
    let list: &mut [u32] = bytemuck::cast_slice_mut(list);
    let (rows, list) = list.split_at_mut(2 * out_rows);
    let (bounds, chosen) = list.split_at_mut(experts + 1);
    let rows = bytemuck::cast_slice_mut(rows);
    list_rows(call, first, rows, bounds);
    let (chosen, max_rows) = choose(bounds, chosen);
    let list = RowList { rows, bounds, chosen };
    let x = Elements::of(&call.x);
    let (mean, eight_bits) = (out_rows / list.chosen.len().max(1), cpu.eight_bit_activations);
    let [selecting, mean] = [max_rows, mean].map(|rows| cpu.selecting_rows(rows));
    let kernel = select(cpu.level, WeightClass::of(&matrix), selecting, mean, eight_bits);
    let form = match (kernel, matrix.layout()) {
        (LinearKernel::ByteProducts, Some(layout)) => Form::Integers(Integers::Bytes(layout)),
        (LinearKernel::PanelProducts, Some(rows)) => {
            let per_word = if eight_bits { panel_products::BYTES } else { panel_products::WORDS };
            Form::Integers(Integers::Panels(PanelLayout { rows, per_word }))
        }
        (LinearKernel::AmxProducts, _) => Form::Amx(AmxLayout::new(matrix.inputs, x.dtype, eight_bits)),
        _ => Form::Floats,
    };
    let stride = few_rows::stride(&matrix);
    // The floats of one row, or of the rows that are prepared together.
    let (unit, at_once) = match form {
        Form::Floats => (stride, 1),
        Form::Integers(integers) => (integers.stride(), 1),
        Form::Amx(layout) => (layout.tile(), amx::ROWS),
    };
    let len = x_rows.div_ceil(at_once) * unit;
    let prepared = &mut *scratch::take_lines(len.max(x_rows * stride));
    let in_floats = |prepared: &mut [f32], list: RowList<'_>, max_rows: usize| {
        prepare(cpu, stride, &mut prepared[..x_rows * stride], |row, to| {
            cpu.level.dispatch(Prepare { matrix, x, first: first + row, to });
        });
        LinearJob { call, matrix, prepared, form: Form::Floats, list }
            .run(cpu, select_f32(cpu.selecting_rows(max_rows)));
    };
    if let Form::Floats = form {
        return in_floats(prepared, list, max_rows);
    }
    let odd = &Mutex::default();
    prepare(cpu, unit, &mut prepared[..len], |number, to| {
        let (number, first) = (number * at_once, first + number * at_once);
        let rows = x_rows - number;
        match form {
            Form::Floats => {}
            Form::Integers(form) => cpu.level.dispatch_vnni(PrepareAs { form, x, first, rows, to, odd, number }),
            Form::Amx(form) => cpu.level.dispatch_vbmi(PrepareAs { form, x, first, rows, to, odd, number }),
        }
    });
    let in_form =
        |prepared: &[f32], list: RowList<'_>| LinearJob { call, matrix, prepared, form, list }.run(cpu, kernel);
    let odd: Vec<u32> = std::mem::take(&mut odd.lock().unwrap_or_else(PoisonError::into_inner));
    if odd.is_empty() {
        return in_form(prepared, list);
    }
    // The form cannot represent some rows. They are computed in f32, and do not affect the others.
    for is_odd in [false, true] {
        let (rows, bounds) = list.filter(|row| odd.contains(&row) == is_odd);
        let mut chosen = vec![0; experts];
        let (chosen, max_rows) = choose(&bounds, &mut chosen);
        let list = RowList { rows: &rows, bounds: &bounds, chosen };
        if is_odd { in_floats(prepared, list, max_rows) } else { in_form(prepared, list) }
    }
}

/// Calls `run` for the rows of `stride` floats, in groups: with the number of the first row and the space for the
/// group.
fn prepare(cpu: &Cpu, stride: usize, prepared: &mut [f32], run: impl Fn(usize, &mut [f32]) + Sync) {
    if stride == 0 {
        return;
    }
    if prepared.len() < ALONE_PREPARE {
        return run(0, prepared);
    }
    let rows = (prepared.len() / stride).div_ceil(4 * cpu.threads.threads());
    let parts = SliceParts::new(prepared, rows * stride);
    cpu.threads.run(parts.count(), |task| {
        // SAFETY: each task takes its own part.
        run(task * rows, unsafe { parts.part(task) });
    });
}

/// Lists (row of prepared activations, row of the output) by matrix, in ascending order; the rows of matrix e become
/// `bounds[e]..bounds[e + 1]` of the list.
fn list_rows(call: &Call, first: usize, list: &mut [[u32; 2]], bounds: &mut [u32]) {
    let per_input = call.rows_per_input;
    let pair = |i: usize| [(i / per_input) as u32, (first * per_input + i) as u32];
    bounds.fill(0);
    let Some(ids) = &call.experts else {
        list.iter_mut().enumerate().for_each(|(i, entry)| *entry = pair(i));
        bounds[1] = list.len() as u32;
        return;
    };
    // SAFETY: calls run under the device's lock; validation checked that the ids are below E.
    let ids = &unsafe { ids.host_slice::<u32>() }[first * per_input..][..list.len()];
    // A counting sort. `bounds[e + 1]` is first the number of rows of e, then the index of its next row, and finally
    // the end of its rows.
    ids.iter().for_each(|&id| bounds[id as usize + 1] += 1);
    let mut start = 0;
    for bound in &mut bounds[1..] {
        (*bound, start) = (start, start + *bound);
    }
    for (i, &id) in ids.iter().enumerate() {
        let next = &mut bounds[id as usize + 1];
        list[*next as usize] = pair(i);
        *next += 1;
    }
}

/// Lists the matrices that have rows. Returns them and the maximum rows of a matrix.
fn choose<'a>(bounds: &[u32], chosen: &'a mut [u32]) -> (&'a [u32], usize) {
    let (mut count, mut max_rows) = (0, 0);
    for (expert, bound) in bounds.windows(2).enumerate() {
        if bound[0] < bound[1] {
            chosen[count] = expert as u32;
            count += 1;
            max_rows = max_rows.max((bound[1] - bound[0]) as usize);
        }
    }
    (&chosen[..count], max_rows)
}

/// Pairs of rows by matrix, made by `list_rows`.
#[derive(Clone, Copy)]
struct RowList<'a> {
    rows: &'a [[u32; 2]],
    bounds: &'a [u32],
    /// The matrices that have rows.
    chosen: &'a [u32],
}

impl RowList<'_> {
    fn of(&self, expert: usize) -> &[[u32; 2]] {
        &self.rows[self.bounds[expert] as usize..self.bounds[expert + 1] as usize]
    }

    /// The pairs whose row of activations satisfies `wanted`, and their bounds.
    fn filter(&self, wanted: impl Fn(u32) -> bool) -> (Vec<[u32; 2]>, Vec<u32>) {
        let (mut rows, mut bounds) = (Vec::new(), vec![0]);
        for expert in 0..self.bounds.len() - 1 {
            rows.extend(self.of(expert).iter().filter(|pair| wanted(pair[0])));
            bounds.push(rows.len() as u32);
        }
        (rows, bounds)
    }
}

/// A product: the call, its matrix, and the prepared activations.
struct LinearJob<'a> {
    call: &'a Call,
    matrix: Matrix,
    /// The prepared activations.
    prepared: &'a [f32],
    form: Form,
    list: RowList<'a>,
}

/// The form of prepared activations.
#[derive(Clone, Copy)]
enum Form {
    Floats,
    Integers(Integers),
    Amx(AmxLayout),
}

/// One matrix of the output: some of the outputs of all rows.
#[derive(Clone, Copy)]
struct Part {
    /// The first row of the weight.
    first: usize,
    /// Outputs.
    width: usize,
    out: Elements,
}

impl LinearJob<'_> {
    /// Runs the product. `kernel` was selected by the maximum rows of a matrix.
    fn run(&self, cpu: &Cpu, kernel: LinearKernel) {
        let (outputs, threads) = (self.call.dims.outputs, cpu.threads.threads());
        let work = self.list.rows.len().saturating_mul(outputs).saturating_mul(self.matrix.inputs);
        if work < ALONE {
            for index in 0..self.list.chosen.len() {
                self.parts().for_each(|part| self.tile(cpu, index, part, 0..part.width));
            }
            return;
        }
        // AMX reads activations once for all outputs of a task.
        let (max_pieces, max_tile) = match kernel {
            LinearKernel::FewRows | LinearKernel::ByteProducts => (4 * threads, usize::MAX),
            LinearKernel::ManyRows | LinearKernel::PanelProducts => (4 * threads, MANY_TILE),
            LinearKernel::AmxProducts => (2 * threads, amx::PANEL),
        };
        let pieces = (work / ALONE).clamp(threads, max_pieces).div_ceil(self.list.chosen.len());
        let tile = outputs.div_ceil(pieces).next_multiple_of(32).min(max_tile);
        let tiles: usize = self.parts().map(|part| part.width.div_ceil(tile)).sum();
        cpu.threads.run(self.list.chosen.len() * tiles, |task| {
            let mut number = task % tiles;
            for part in self.parts() {
                let of_part = part.width.div_ceil(tile);
                if number < of_part {
                    let start = number * tile;
                    return self.tile(cpu, task / tiles, part, start..(start + tile).min(part.width));
                }
                number -= of_part;
            }
        });
    }

    /// The parts of the output.
    fn parts(&self) -> impl Iterator<Item = Part> {
        let (call, out) = (self.call, Elements::of(&self.call.out));
        let whole = call.parts.is_empty().then_some(call.dims.outputs);
        let mut next = 0;
        call.parts.iter().copied().chain(whole).map(move |width| {
            let first = next;
            next += width;
            // SAFETY: validation checked that the output has the elements of all parts.
            Part { first, width, out: unsafe { out.skip(call.rows * first) } }
        })
    }

    /// Computes some outputs of a part, for the `index`th chosen matrix.
    fn tile(&self, cpu: &Cpu, index: usize, part: Part, outputs: std::ops::Range<usize>) {
        let expert = self.list.chosen[index] as usize;
        let rows = self.list.of(expert);
        let Part { first, width, out } = part;
        let (matrix, alpha, base) = (self.matrix, self.call.alpha, expert * self.call.dims.outputs + first);
        let (x, stride) = (self.prepared, few_rows::stride(&matrix));
        match self.form {
            Form::Amx(layout) => {
                let tiles = ManyRowsBy { matrix, layout, base, outputs, x, rows, alpha, out, width };
                return cpu.level.dispatch_vbmi(tiles);
            }
            Form::Integers(Integers::Panels(layout)) => {
                let panels = ManyRowsBy { matrix, layout, base, outputs, x, rows, alpha, out, width };
                return cpu.level.dispatch_vnni(panels);
            }
            Form::Integers(Integers::Bytes(layout)) => {
                let x = Prepared::bytes(layout, x);
                let rows = FewRows { matrix, base, outputs, x, rows, alpha, out, width };
                return cpu.level.dispatch_vbmi(FewRowsByBytes { rows, layout });
            }
            Form::Floats => {}
        }
        if select_f32(cpu.selecting_rows(rows.len())) == LinearKernel::FewRows {
            let x = Prepared::new(&matrix, x);
            return cpu.level.dispatch(FewRows { matrix, base, outputs, x, rows, alpha, out, width });
        }
        let in_order = self.call.experts.is_none();
        cpu.level.dispatch(ManyRows { matrix, base, outputs, x, stride, rows, in_order, alpha, out, width });
    }
}

#[cfg(test)]
mod tests;
