use super::io;
use crate::{
    KvLayer, Step,
    ops::kv_write::{Call, is_kept},
};

/// Where the vectors of a step go: (entry of the step, KV head, row of the layer) for each that is kept.
///
/// A token is kept when its position is among the last `capacity` ones below its sequence's length; its slot is the
/// position, modulo the capacity on a ring.
pub(super) fn destinations(step: &Step, layer: &KvLayer) -> Vec<(usize, usize, usize)> {
    let spec = layer.spec();
    let (positions, sequences) = (io::load_u32(&step.positions), io::load_u32(&step.sequence));
    let lens = io::load_u32(&step.lens);
    let mut rows = Vec::new();
    for (token, (&position, &sequence)) in positions.iter().zip(&sequences).enumerate() {
        let (position, sequence) = (position as usize, sequence as usize);
        if is_kept(position, lens[sequence] as usize, spec.capacity) {
            let slot = layer.slot(position);
            rows.extend((0..spec.kv_heads).map(|head| (token, head, layer.row(sequence, head, slot))));
        }
    }
    rows
}

pub(crate) fn run(call: &Call) {
    let spec = call.layer.spec();
    let dim = spec.head_dim;
    for (source, planes) in [(&call.k, &call.layer.k), (&call.v, &call.layer.v)] {
        for (token, head, row) in destinations(&call.step, &call.layer) {
            let from = call.order.row(call.first_token + token, head, call.source_tokens, spec.kv_heads) * dim;
            if source.dtype() == planes.low.dtype() {
                io::copy_elements(source, from, &planes.low, row * dim, dim);
            } else {
                io::store_vector(planes, row, &io::load_range(source, from..from + dim));
            }
        }
    }
}
