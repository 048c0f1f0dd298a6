use super::{io, linear::load_rows};
use crate::ops::embed::Call;

/// scale · row.
pub fn embed(row: &[f64], scale: f64) -> Vec<f64> {
    row.iter().map(|x| scale * x).collect()
}

pub(crate) fn run(call: &Call) {
    let inputs = call.dims.inputs;
    let rows = io::load_u32(&call.ids).into_iter().flat_map(|id| {
        let row = load_rows(&call.table, inputs, id as usize, 1);
        embed(&row, call.scale.into())
    });
    let out: Vec<f64> = rows.collect();
    io::store(&call.out, &out);
}
