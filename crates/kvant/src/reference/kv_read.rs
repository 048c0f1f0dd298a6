use super::io;
use crate::ops::kv_read::Call;

pub(crate) fn run(call: &Call) {
    let spec = call.layer.spec();
    let (planes, dim) = (call.planes(), spec.head_dim);
    for token in 0..call.tokens {
        for head in 0..spec.kv_heads {
            let row = call.layer.row(call.sequence, head, call.layer.slot(call.start + token));
            let to = call.order.row(token, head, call.tokens, spec.kv_heads) * dim;
            if call.out.dtype() == planes.low.dtype() {
                io::copy_elements(&planes.low, row * dim, &call.out, to, dim);
            } else {
                io::store_range(&call.out, to, &io::load_vector(planes, row, dim, call.keep_rotated));
            }
        }
    }
}
