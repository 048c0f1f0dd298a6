//! Sealing of pages, and the means of sealed pages.

use super::{io, key_bias};
use crate::{KeyBias, KvLayer, Planes, Tensor, codec::PageMean, layer::RowPlace, ops::seal::Call};

pub(crate) fn run(call: &Call) {
    let entries = io::load_u32(&call.pages);
    for row in entries.chunks_exact(3) {
        let place = |layer: &KvLayer, entry| layer.pages().and_then(|pages| pages.start(entry));
        let (Some(from), Some(to)) = (place(&call.dense, row[0]), place(&call.sealed, row[1])) else { continue };
        let first = row[2] as usize * call.sealed.page_tokens();
        let bias = call.sealed.key_bias().map(|bias| (bias, first));
        seal_side(call, &call.dense.k, &call.sealed.k, [from, to], bias);
        seal_side(call, &call.dense.v, &call.sealed.v, [from, to], None);
    }
}

/// Encodes one side of a page. `from` and `to` are the byte offsets of the dense and the sealed page. `bias` is the key
/// bias, which is subtracted from the vectors, and the position of the first vector.
fn seal_side(call: &Call, dense: &Planes, sealed: &Planes, [from, to]: [usize; 2], bias: Option<(&KeyBias, usize)>) {
    let (layer, page_tokens) = (&call.sealed, call.sealed.page_tokens());
    let dim = layer.spec().head_dim;
    for head in 0..layer.spec().kv_heads {
        let rows = head * page_tokens..(head + 1) * page_tokens;
        let vector = |row: usize| {
            let mut x = io::load_vector(&call.dense, dense, RowPlace { bytes: from, row }, false);
            if let Some((bias, first)) = bias {
                let bias = key_bias::at(bias, head, first + row % page_tokens);
                x.iter_mut().zip(bias).for_each(|(x, bias)| *x -= bias);
            }
            x
        };
        let vectors: Vec<Vec<f64>> = rows.clone().map(vector).collect();
        if sealed.codec().is_centred() {
            let mean = PageMean::of(dim, vectors.iter().map(Vec::as_slice)).expect("the layer checked its codec");
            store(layer, sealed, RowPlace { bytes: to, row: rows.start }, &mean);
        }
        for (row, vector) in rows.zip(&vectors) {
            io::store_vector(layer, sealed, RowPlace { bytes: to, row }, vector);
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
