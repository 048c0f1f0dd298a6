use super::io;
use crate::{
    KvLayer, Step,
    layer::RowPlace,
    ops::kv_write::{Call, is_kept},
};

/// The destinations of a step's vectors: (entry of the step, KV head, place in the layer) for each that is kept.
///
/// A token is kept if its position is among the last `capacity` ones below its sequence's length, and has a page if the
/// layer has pages. Without pages its slot is the position, modulo the capacity on a ring.
pub(super) fn destinations(step: &Step, layer: &KvLayer) -> Vec<(usize, usize, RowPlace)> {
    let spec = layer.spec();
    let (positions, sequences) = (io::load_u32(&step.positions), io::load_u32(&step.sequence));
    let lens = io::load_u32(&step.lens);
    // SAFETY: the device's lock is held, and nothing writes to the step.
    let table = unsafe { step.page_table(layer) };
    let mut rows = Vec::new();
    for (token, (&position, &sequence)) in positions.iter().zip(&sequences).enumerate() {
        let (position, sequence) = (position as usize, sequence as usize);
        if lens.get(sequence).is_some_and(|&len| is_kept(position, len as usize, spec.capacity)) {
            let place = |head| Some((token, head, layer.place(table, sequence, head, position)?));
            rows.extend((0..spec.kv_heads).filter_map(place));
        }
    }
    rows
}

pub(crate) fn run(call: &Call) {
    let spec = call.layer.spec();
    let dim = spec.head_dim;
    for (source, planes) in [(&call.k, &call.layer.k), (&call.v, &call.layer.v)] {
        let first =
            |token, head| call.order.row(call.first_token + token, head, call.source_tokens, spec.kv_heads) * dim;
        for (token, head, place) in destinations(&call.step, &call.layer) {
            let from = first(token, head);
            if source.dtype() == planes.low.dtype() {
                io::copy_elements(source, from, &planes.low, io::first_element(&planes.low, place, dim), dim);
            } else {
                io::store_vector(&call.layer, planes, place, &io::load_range(source, from..from + dim));
            }
        }
    }
}
