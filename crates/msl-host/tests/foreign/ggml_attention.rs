//! ggml's attention: one query at a time (`fa_vec`), in one threadgroup or in 32 whose results are merged, and tiles
//! (`fa`).

use msl_host::Constant;

use crate::attention::Attention;
use crate::blocks::Format;
use crate::case::{Case, Dispatch};
use crate::corpus::Unit;
use crate::data::{Random, Struct, Type};

const F16: Format = Format::Plain(Type::F16);
const BF16: Format = Format::Plain(Type::BF16);

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for (format, d) in [(F16, 64), (F16, 128), (F16, 256), (BF16, 64), (Format::Q8_0, 128), (Format::Q4_0, 64)] {
        all.push(vector(format, d, false));
    }
    all.push(vector(F16, 128, true));
    all.push(vector(Format::Q8_0, 64, true));
    for (format, d) in [(F16, 64), (F16, 128), (BF16, 64), (Format::Q8_0, 64), (Format::Q4_0, 128)] {
        all.push(tiles(format, d, 128));
    }
    all.push(tiles(F16, 64, 100));
    all
}

/// The inputs of both kinds of kernels: memory 0 to 5 are the struct, queries, keys, values, mask and sinks.
struct Inputs {
    attention: Attention,
    memory: Vec<Vec<u8>>,
    /// \[query\]\[head\]\[d\]
    expected: Vec<f64>,
    /// Bytes of a row of keys, and of the mask.
    row: usize,
    mask_row: usize,
}

fn inputs(format: Format, d: usize, queries: usize, keys: usize) -> Inputs {
    let (heads, kv_heads) = (4, 2);
    let (q, qs) = Type::F32.encode(&Random::new(61).units(heads * queries * d));
    let (k, ks) = format.random(62, kv_heads * keys * d);
    let (v, vs) = format.random(63, kv_heads * keys * d);
    let mut random = Random::new(64);
    let values = (0..queries * keys).map(|i| {
        let seen = i % keys <= keys - queries + i / keys;
        if seen { random.unit() } else { f32::NEG_INFINITY }
    });
    let (mask, mask_seen) = Type::F16.encode(&values.collect::<Vec<f32>>());
    let (sinks, sinks_seen) = Type::F32.encode(&[0.5, -1.0, 1.5, 0.0]);
    let attention = Attention {
        heads,
        kv_heads,
        queries,
        keys,
        d,
        scale: f64::from(0.1f32),
        causal: false,
        mask: Some(mask_seen),
        sinks: Some(sinks_seen),
    };
    let by_head = attention.run(&qs, &ks, &vs);
    let expected = (0..queries * heads * d).map(|i| {
        let (query, head) = (i / d / heads, i / d % heads);
        by_head[(head * queries + query) * d + i % d]
    });
    let expected = expected.collect();
    let row = format.row_bytes(d);
    Inputs { attention, memory: vec![Vec::new(), q, k, v, mask, sinks], expected, row, mask_row: keys * 2 }
}

impl Inputs {
    fn arguments(&self, format: Format) -> Struct {
        let a = &self.attention;
        let (q, kv) = (a.d * 4, self.row);
        let blocks = a.d / format.block().0;
        Struct::new()
            .i32s(&[a.queries, a.heads, 1])
            .u64s(&[q, q * a.queries, q * a.queries * a.heads])
            .i32s(&[a.keys, a.kv_heads, 1, blocks])
            .u64s(&[kv, kv * a.keys, kv * a.keys * a.kv_heads])
            .i32s(&[blocks])
            .u64s(&[kv, kv * a.keys, kv * a.keys * a.kv_heads])
            .i32s(&[a.queries, 1, 1])
            .u64s(&[self.mask_row, self.mask_row * a.queries, self.mask_row * a.queries])
            .i32s(&[a.heads, a.queries, 1])
            .f32s(&[0.1, 0.0, 1.0, 1.0])
            .i32s(&[a.heads])
            .f32s(&[0.0])
    }
}

/// Mask, sinks, ALiBi, softcap, padded keys.
fn booleans(dispatch: Dispatch, from: u32, padded: bool) -> Dispatch {
    let values = [true, true, false, false, padded];
    values.iter().enumerate().fold(dispatch, |d, (i, v)| d.constant(from + i as u32, Constant::Bool(*v)))
}

fn ints(dispatch: Dispatch, from: u32, values: &[usize]) -> Dispatch {
    values.iter().enumerate().fold(dispatch, |d, (i, v)| d.constant(from + i as u32, Constant::Int(*v as i32)))
}

fn tolerance(format: Format) -> f64 {
    match format {
        Format::Plain(Type::BF16) => 2e-2,
        _ => 2e-3,
    }
}

fn vector(format: Format, d: usize, merged: bool) -> Case {
    let (queries, keys) = (2, 96);
    let mut inputs = inputs(format, d, queries, keys);
    inputs.memory[0] = inputs.arguments(format).i32s(&[0]).done();
    let heads = inputs.attention.heads;
    let rows = queries * heads;
    let (simdgroups, groups) = if merged { (1, 32) } else { (2, 1) };
    let kernel = format!("kernel_flash_attn_ext_vec_{}_dk{d}_dv{d}", format.name());
    let file: &[&str] = match format {
        Format::Q8_0 => &["fa_vec_q8_0.metal"],
        Format::Q4_0 => &["fa_vec_q4_0.metal"],
        _ => &["fa_vec_f16.metal"],
    };
    let padded = d.next_multiple_of(128);
    let (result, parts) = (6, 7);
    let mut memory = inputs.memory;
    memory.push(vec![0xFF; rows * d * 4]);
    // Results of each threadgroup, then their sums and maxima.
    memory.push(vec![0xFF; rows * groups * (d + 2) * 4]);
    memory.push(Struct::new().i32s(&[rows]).done());
    let dispatch = Dispatch::new(&kernel, [queries, heads, groups], [32, simdgroups, 1])
        .reads(&[0, 1, 2, 3, 4, 5, 1])
        .write(7, if merged { parts } else { result })
        .read(8, 1)
        .threadgroup(0, (padded + 4 * 32 + 2 * padded) * simdgroups * 2)
        .constant(405, Constant::Bool(false));
    let blocks = d / format.block().0;
    let mut dispatches = vec![ints(booleans(dispatch, 400, false), 420, &[blocks, blocks, simdgroups, groups])];
    let mut units = vec![Unit::ggml(file, &[&kernel])];
    if merged {
        let second = "kernel_flash_attn_ext_vec_reduce";
        units.push(Unit::ggml(&["fa_aux.metal"], &[second]));
        let dispatch = Dispatch::new(second, [rows, 1, 1], [32 * groups, 1, 1]).of(1).read(0, 8).read(1, parts);
        dispatches.push(ints(dispatch.write(2, result), 500, &[d, groups]));
    }
    Case {
        name: format!("ggml fa_vec: {kernel}, {groups} threadgroups"),
        units,
        memory,
        dispatches,
        result,
        kind: Type::F32,
        expected: inputs.expected,
        tolerance: tolerance(format),
        chosen: (format == F16 && d == 128) || (format == Format::Q8_0 && !merged),
        lockstep: true,
        fault: None,
    }
}

/// Eight queries of a threadgroup, 64 keys of a SIMD-group. Earlier kernels find the parts of the mask that hide all
/// keys, and copy the last keys to a buffer with room for 64.
fn tiles(format: Format, d: usize, keys: usize) -> Case {
    let (queries, tile, span, simdgroups) = (20, 8, 64, 4);
    let mut inputs = inputs(format, d, queries, keys);
    inputs.memory[0] = inputs.arguments(format).done();
    let (heads, kv_heads) = (inputs.attention.heads, inputs.attention.kv_heads);
    let kernel = format!("kernel_flash_attn_ext_{}_dk{d}_dv{d}", format.name());
    let file: &[&str] = match format {
        Format::Q8_0 => &["fa_q8_0.metal"],
        Format::Q4_0 => &["fa_q4_0.metal"],
        _ => &["fa_f16.metal"],
    };
    let (kv, mask_row) = (inputs.row, inputs.mask_row);
    let padded = !keys.is_multiple_of(span);
    let (result, pad, blocks_of_mask) = (6, 7, 8);
    let mut memory = inputs.memory;
    memory.push(vec![0xFF; queries * heads * d * 4]);
    memory.push(vec![0xFF; span * kv_heads * kv * 2 + span * queries * 2]);
    memory.push(vec![0xFF; queries.div_ceil(tile) * keys.div_ceil(span)]);
    let mask_strides = [mask_row, mask_row * queries, mask_row * queries];
    memory.push(Struct::new().i32s(&[queries, keys, queries, 1, 1]).u64s(&mask_strides).done());
    let kv_strides = [kv, kv * keys, kv * keys * kv_heads];
    let arguments = Struct::new().i32s(&[keys, kv_heads, 1]).u64s(&kv_strides).u64s(&kv_strides);
    memory.push(arguments.i32s(&[queries, 1, 1]).u64s(&mask_strides).done());
    let (padding, masking) = ("kernel_flash_attn_ext_pad", "kernel_flash_attn_ext_blk");
    let mut dispatches = Vec::new();
    if padded {
        let dispatch = Dispatch::new(padding, [span, kv_heads, 1], [32, 1, 1]).of(1);
        let dispatch = dispatch.read(0, 10).read(1, 2).read(2, 3).read(3, 4).write(4, pad);
        dispatches.push(ints(dispatch.constant(100, Constant::Bool(true)), 125, &[span]));
    }
    let dispatch = Dispatch::new(masking, [keys.div_ceil(span), queries.div_ceil(tile), 1], [32, 1, 1]).of(1);
    dispatches.push(ints(dispatch.read(0, 9).read(1, 4).write(2, blocks_of_mask), 224, &[tile, span]));
    let scratch = if matches!(format, Format::Plain(_)) { 0 } else { 16 * 32 * simdgroups };
    let dispatch = Dispatch::new(&kernel, [queries.div_ceil(tile), heads, 1], [32, simdgroups, 1])
        .reads(&[0, 1, 2, 3, 4, 5, pad, blocks_of_mask])
        .write(8, result)
        .threadgroup(0, (tile * (d + 2 * d.next_multiple_of(64) + 4 * span) + scratch) * 2)
        .constant(310, Constant::Bool(!queries.is_multiple_of(tile)));
    let blocks = d / format.block().0;
    dispatches.push(ints(booleans(dispatch, 300, padded), 320, &[blocks, blocks, simdgroups]));
    Case {
        name: format!("ggml fa: {kernel}, {keys} keys"),
        units: vec![Unit::ggml(file, &[&kernel]), Unit::ggml(&["fa_aux.metal"], &[padding, masking])],
        memory,
        dispatches,
        result,
        kind: Type::F32,
        expected: inputs.expected,
        tolerance: 2.0 * tolerance(format),
        chosen: format == F16 && d == 64 && padded,
        // The scratch memory of quantised blocks.
        lockstep: !matches!(format, Format::Plain(_)),
        fault: None,
    }
}
