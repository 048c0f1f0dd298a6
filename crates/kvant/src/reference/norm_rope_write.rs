use super::{io, kv_write, norm_rope::Head};
use crate::{Tensor, ops::norm_rope_write::Call};

pub(crate) fn run(call: &Call) {
    let positions = io::load_u32(&call.positions);
    let all_heads = |x: &Tensor, heads: usize, head: Head| -> Vec<f64> {
        let rows = io::load(x);
        let rows = rows.chunks(call.head_dim).enumerate();
        rows.flat_map(|(row, x)| head.apply(x, positions[row / heads])).collect()
    };
    let kv_heads = call.layer.spec().kv_heads;
    let rope = call.rope.as_ref();
    let q = all_heads(&call.q, call.heads, Head::new(call.q_norm.as_ref(), rope, call.rotate_q));
    let k = all_heads(&call.k, kv_heads, Head::new(call.k_norm.as_ref(), rope, false));
    let v = all_heads(&call.v, kv_heads, Head::new(call.v_norm.as_ref(), None, false));
    for (planes, rows) in [(&call.layer.k, &k), (&call.layer.v, &v)] {
        let vector = |token, head| {
            let from = (token * kv_heads + head) * call.head_dim;
            &rows[from..from + call.head_dim]
        };
        for (token, head, place) in kv_write::destinations(&call.step, &call.layer) {
            io::store_vector(&call.layer, planes, place, vector(token, head));
        }
    }
    io::store(&call.q_out, &q);
}
