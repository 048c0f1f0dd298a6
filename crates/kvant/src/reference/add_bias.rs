use super::io;
use crate::ops::add_bias::Call;

pub(crate) fn run(call: &Call) {
    let (mut x, bias) = (io::load(&call.x), io::load(&call.bias));
    let ids = call.ids.as_ref().map(io::load_u32);
    for row in 0..call.rows {
        let expert = ids.as_ref().map_or(0, |ids| ids[row] as usize);
        for column in 0..call.dim {
            x[row * call.dim + column] += bias[expert * call.dim + column];
        }
    }
    io::store(&call.out, &x);
}
