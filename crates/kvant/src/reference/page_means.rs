//! The means of pages, for centred codecs. A step opens a page if it writes the page's first position; it then chooses
//! the page's mean, which all vectors of the page are stored around until the page is opened again.

use std::collections::BTreeMap;

use super::io;
use crate::{KvLayer, Planes, Step, Tensor, codec::PageMean, layer::RowPlace, ops::kv_write::is_kept};

/// The tokens that a step writes to each page, by (sequence, page of the sequence) and position.
fn tokens_of_pages(
    step: &Step,
    layer: &KvLayer,
    page_tokens: usize,
) -> BTreeMap<(usize, usize), BTreeMap<usize, usize>> {
    let (positions, sequences) = (io::load_u32(&step.positions), io::load_u32(&step.sequence));
    let lens = io::load_u32(&step.lens);
    let mut pages: BTreeMap<_, BTreeMap<usize, usize>> = BTreeMap::new();
    for (token, (&position, &sequence)) in positions.iter().zip(&sequences).enumerate() {
        let (position, sequence) = (position as usize, sequence as usize);
        let kept = |&len: &u32| is_kept(position, len as usize, layer.spec().capacity);
        if lens.get(sequence).is_some_and(kept) {
            pages.entry((sequence, position / page_tokens)).or_default().insert(position, token);
        }
    }
    pages
}

/// Writes the vectors of a step to a centred side, and the means of the pages that it opens. `vector` gives the vector
/// of a token and KV head.
///
/// | case | mean |
/// |---|---|
/// | the step fills the page | of the page's vectors |
/// | the step fills a part, and the sequence holds the previous page | of the vectors that the previous page stores |
/// | the step fills a part, and there is no previous page | of the vectors of this step |
pub(super) fn write(step: &Step, layer: &KvLayer, planes: &Planes, vector: impl Fn(usize, usize) -> Vec<f64>) {
    let Some(page_tokens) = layer.pages().map(|pages| pages.page_tokens) else { return };
    let dim = layer.spec().head_dim;
    // SAFETY: the device's lock is held, and nothing writes to the step.
    let table = unsafe { step.page_table(layer) };
    // In the order of positions: a page may get the mean of one that the same step has filled.
    for ((sequence, page), tokens) in tokens_of_pages(step, layer, page_tokens) {
        for head in 0..layer.spec().kv_heads {
            let place = |position: usize| layer.place(table, sequence, head, position);
            let first = page * page_tokens;
            let Some(to) = place(first) else { continue };
            if tokens.contains_key(&first) {
                let previous = first.checked_sub(page_tokens).filter(|&position| place(position).is_some());
                let mean = match previous {
                    Some(start) if tokens.len() < page_tokens => {
                        let load = |place| io::load_vector(layer, planes, place, true);
                        let stored: Vec<Vec<f64>> = (start..first).filter_map(place).map(load).collect();
                        PageMean::of_rotated(dim, stored.iter().map(Vec::as_slice))
                    }
                    _ => {
                        let vectors: Vec<Vec<f64>> = tokens.values().map(|&token| vector(token, head)).collect();
                        PageMean::of(dim, vectors.iter().map(Vec::as_slice))
                    }
                };
                let mean = mean.expect("the layer checked its codec");
                store(layer, planes, to, &mean);
            }
            for (&position, &token) in &tokens {
                if let Some(to) = place(position) {
                    io::store_vector(layer, planes, to, &vector(token, head));
                }
            }
        }
    }
}

/// The mean around which the vector at `place` is stored; `None` if the codec is not centred.
pub(super) fn of_vector(layer: &KvLayer, planes: &Planes, place: RowPlace) -> Option<PageMean> {
    planes.codec().is_centred().then(|| load(layer, planes, place))
}

/// The first byte of a mean, and the number of its codes.
fn first_byte(layer: &KvLayer, planes: &Planes, place: RowPlace) -> (usize, usize) {
    let dim = layer.spec().head_dim;
    (place.bytes + layer.mean_row(place.row) * planes.codec().bytes_per_mean(dim), dim)
}

fn plane(planes: &Planes) -> &Tensor {
    planes.means.as_ref().expect("centred planes have means")
}

fn load(layer: &KvLayer, planes: &Planes, place: RowPlace) -> PageMean {
    let (first, dim) = first_byte(layer, planes, place);
    let codes = io::load_u8(plane(planes), first..first + dim).into_iter().map(|byte| i8::from_le_bytes([byte]));
    let scale = io::load_u8(plane(planes), first + dim..first + dim + size_of::<f32>());
    PageMean { codes: codes.collect(), scale: f32::from_le_bytes(scale.try_into().expect("four bytes")) }
}

fn store(layer: &KvLayer, planes: &Planes, place: RowPlace, mean: &PageMean) {
    let codes = mean.codes.iter().map(|code| code.to_le_bytes()[0]);
    let bytes: Vec<u8> = codes.chain(mean.scale.to_le_bytes()).collect();
    io::store_raw(plane(planes), first_byte(layer, planes, place).0, &bytes);
}
