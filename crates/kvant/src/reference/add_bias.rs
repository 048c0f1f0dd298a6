use super::io;
use crate::ops::add_bias::{BiasRow, Call};

pub(crate) fn run(call: &Call) {
    let (mut x, bias) = (io::load(&call.x), io::load(&call.bias));
    let ids = match &call.bias_row {
        BiasRow::Expert { ids, .. } => Some(io::load_u32(ids)),
        BiasRow::Only | BiasRow::Own => None,
    };
    for row in 0..call.rows {
        let expert = ids.as_ref().map_or(0, |ids| ids[row] as usize);
        for column in 0..call.dim {
            x[row * call.dim + column] += bias[expert * call.dim + column];
        }
    }
    io::store(&call.out, &x);
}
