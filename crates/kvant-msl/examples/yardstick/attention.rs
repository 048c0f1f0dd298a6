//! Attention: one token, and prompts.

use kvant::Codec;
use msl_host::Constant;

use crate::case::Dispatch;
use crate::corpus::Unit;
use crate::data::Struct;
use crate::foreign::count;
use crate::ours::{self, Shape};
use crate::table::{Row, print};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// The unit: a key of a KV head, with all of its query heads.
const UNIT: &str = "key of a KV head";

fn push(memory: &mut Vec<Vec<u8>>, bytes: Vec<u8>) -> usize {
    memory.push(bytes);
    memory.len() - 1
}

fn numbers(dispatch: Dispatch, memory: &mut Vec<Vec<u8>>, from: u32, structs: Vec<Struct>) -> Dispatch {
    structs.into_iter().enumerate().fold(dispatch, |d, (i, s)| d.read(from + i as u32, push(memory, s.done())))
}

fn booleans(dispatch: Dispatch, from: u32, values: &[bool]) -> Dispatch {
    values.iter().enumerate().fold(dispatch, |d, (i, v)| d.constant(from + i as u32, Constant::Bool(*v)))
}

fn ints(dispatch: Dispatch, from: u32, values: &[usize]) -> Dispatch {
    values.iter().enumerate().fold(dispatch, |d, (i, v)| d.constant(from + i as u32, Constant::Int(*v as i32)))
}

/// MLX runs one pass for few keys, and two passes with several blocks for many.
fn mlx_vector(shape: Shape) -> Result<Row, msl_host::Error> {
    let Shape { heads, kv_heads, d, keys, .. } = shape;
    let blocks = if keys <= 8192 { 1 } else { 128 };
    let group = heads / kv_heads;
    let cache = || vec![0u8; kv_heads * keys * d * 2];
    let mut memory = vec![vec![0; heads * d * 2], cache(), cache(), vec![0; heads * d * 2]];
    let one = |n: usize| Struct::new().i32s(&[n]);
    let long = |n: usize| Struct::new().u64s(&[n]);
    let strides = || vec![long(keys * d), long(d), long(keys * d), long(d)];
    let scale = || Struct::new().f32s(&[0.01]);
    let files: &[&str] = &["utils.h", "sdpa_vector.h"];
    if blocks == 1 {
        let mut k = Dispatch::new("k", [heads, 1, 1], [1024, 1, 1]).reads(&[0, 1, 2]).write(3, 3);
        k = numbers(k, &mut memory, 4, vec![one(group), one(keys)]);
        k = numbers(k, &mut memory, 6, strides());
        k = numbers(k, &mut memory, 10, vec![scale()]);
        let function = format!("sdpa_vector<half, {d}, {d}>");
        let counts = count(&[Unit::mlx(files, &[("k", &function)])], &mut memory, &[booleans(k, 20, &[false; 6])])?;
        return Ok(Row { name: "MLX `sdpa_vector`".into(), counts });
    }
    let parts = heads * blocks;
    let (o, sums, maxima) = (
        push(&mut memory, vec![0; parts * d * 2]),
        push(&mut memory, vec![0; parts * 4]),
        push(&mut memory, vec![0; parts * 4]),
    );
    let mut first = Dispatch::new("first", [kv_heads, 1, blocks], [32, group, 1]).reads(&[0, 1, 2]);
    first = first.write(3, o).write(4, sums).write(5, maxima);
    first = numbers(first, &mut memory, 7, vec![one(keys)]);
    first = numbers(first, &mut memory, 8, strides());
    first = numbers(first, &mut memory, 12, vec![scale()]);
    first = booleans(first, 20, &[false; 6]).constant(26, Constant::Int(blocks as i32));
    let mut second = Dispatch::new("second", [heads, 1, 1], [1024, 1, 1]).read(0, o).read(1, sums).read(2, maxima);
    second = numbers(second.write(3, 3), &mut memory, 4, vec![one(blocks)]);
    second = booleans(second, 20, &[false; 6]).constant(26, Constant::Int(blocks as i32));
    let names = [format!("sdpa_vector_2pass_1<half, {d}, {d}>"), format!("sdpa_vector_2pass_2<half, {d}>")];
    let units = [Unit::mlx(files, &[("first", &names[0]), ("second", &names[1])])];
    let counts = count(&units, &mut memory, &[first, second])?;
    Ok(Row { name: format!("MLX `sdpa_vector_2pass`, {blocks} blocks"), counts })
}

/// ggml uses 32 threadgroups, with more SIMD-groups for more keys.
fn ggml_vector(shape: Shape, format: &str) -> Result<Row, msl_host::Error> {
    let Shape { heads, kv_heads, d, keys, .. } = shape;
    let (groups, mut simdgroups) = (32, 1);
    while 2 * groups * simdgroups * 32 < keys && simdgroups < 4 {
        simdgroups *= 2;
    }
    let (block, row) = match format {
        "q8_0" => (32, d / 32 * 34),
        "q4_0" => (32, d / 32 * 18),
        _ => (1, d * 2),
    };
    let file: &[&str] = match format {
        "q8_0" => &["fa_vec_q8_0.metal"],
        "q4_0" => &["fa_vec_q4_0.metal"],
        _ => &["fa_vec_f16.metal"],
    };
    let (q, blocks) = (d * 4, d / block);
    let arguments = Struct::new()
        .i32s(&[1, heads, 1])
        .u64s(&[q, q, q * heads])
        .i32s(&[keys, kv_heads, 1, blocks])
        .u64s(&[row, row * keys, row * keys * kv_heads])
        .i32s(&[blocks])
        .u64s(&[row, row * keys, row * keys * kv_heads])
        .i32s(&[1, 1, 1])
        .u64s(&[keys * 2, keys * 2, keys * 2])
        .i32s(&[heads, 1, 1])
        .f32s(&[0.01, 0.0, 1.0, 1.0])
        .i32s(&[heads])
        .f32s(&[0.0])
        .i32s(&[0])
        .done();
    let cache = || vec![0u8; kv_heads * keys * row];
    let mut memory = vec![arguments, vec![0; heads * q], cache(), cache(), vec![0; keys * 2], vec![0; heads * 4]];
    let parts = push(&mut memory, vec![0; heads * groups * (d + 2) * 4]);
    let out = push(&mut memory, vec![0; heads * d * 4]);
    let rows = push(&mut memory, Struct::new().i32s(&[heads]).done());
    let kernel = format!("kernel_flash_attn_ext_vec_{format}_dk{d}_dv{d}");
    let padded = d.next_multiple_of(128);
    let first = Dispatch::new(&kernel, [1, heads, groups], [32, simdgroups, 1])
        .reads(&[0, 1, 2, 3, 4, 5, 1])
        .write(7, parts)
        .read(8, 1)
        .threadgroup(0, (padded + 4 * 32 + 2 * padded) * simdgroups * 2)
        .constant(405, Constant::Bool(false));
    // With a mask, as llama.cpp calls it.
    let first = ints(booleans(first, 400, &[true, false, false, false, false]), 420, &[d, d, simdgroups, groups]);
    let second = Dispatch::new("kernel_flash_attn_ext_vec_reduce", [heads, 1, 1], [32 * groups, 1, 1]).of(1);
    let second = ints(second.read(0, rows).read(1, parts).write(2, out), 500, &[d, groups]);
    let units = [Unit::ggml(file, &[&kernel]), Unit::ggml(&["fa_aux.metal"], &["kernel_flash_attn_ext_vec_reduce"])];
    let counts = count(&units, &mut memory, &[first, second])?;
    Ok(Row { name: format!("ggml `fa_vec` {format}, {groups} × {simdgroups}"), counts })
}

/// One token.
pub fn decode(lines: bool) -> Outcome {
    for (group, keys) in [(4, 1024), (4, 32768), (1, 1024)] {
        for d in [64, 128, 256, 512] {
            let shape = Shape { heads: group, kv_heads: 1, d, tokens: 1, keys };
            let mut rows = Vec::new();
            for (name, codec) in [("f16", Codec::F16), ("tq8", Codec::tq(8)), ("tq4", Codec::tq(4))] {
                let (kernels, counts) = ours::attend(shape, codec, 0)?;
                rows.push(Row { name: format!("{name}, `{kernels}`"), counts });
            }
            if d <= 256 {
                rows.push(mlx_vector(shape)?);
            }
            for format in ["f16", "q8_0", "q4_0"] {
                rows.push(ggml_vector(shape, format)?);
            }
            print(&format!("One token, {group} query heads, {keys} keys, D = {d}"), keys as f64, UNIT, &rows, lines);
        }
    }
    Ok(())
}

fn mlx_tiles(shape: Shape) -> Result<Row, msl_host::Error> {
    let Shape { heads, kv_heads, d, tokens, keys } = shape;
    let (bq, bk) = (32, if d < 128 { 32 } else { 16 });
    let strides = |heads: usize, n: usize| [heads * n * d, n * d, d];
    let arguments = Struct::new()
        .i32s(&[1, heads, d, tokens, keys, heads / kv_heads])
        .f32s(&[0.01])
        .i32s(&[tokens.div_ceil(bq), keys.div_ceil(bk), tokens / bq, keys / bk, tokens % bq, keys % bk, keys - tokens])
        .u64s(&strides(heads, tokens))
        .u64s(&strides(kv_heads, keys))
        .u64s(&strides(kv_heads, keys))
        .u64s(&strides(heads, tokens))
        .done();
    let (rows, cache) = (vec![0u8; heads * tokens * d * 2], vec![0u8; kv_heads * keys * d * 2]);
    let mut memory = vec![rows.clone(), cache.clone(), cache, rows, arguments];
    let dispatch = Dispatch::new("k", [tokens.div_ceil(bq), heads, 1], [32, 4, 1]);
    let dispatch = booleans(dispatch.reads(&[0, 1, 2]).write(3, 3).read(4, 4), 200, &[true, true]);
    // Causal, without mask and sinks.
    let dispatch = booleans(dispatch, 300, &[false, true, false, false]);
    let function = format!("attention<half, {bq}, {bk}, {d}, {d}, 4, 1, bool, float>");
    let unit = Unit::mlx(&["utils.h", "steel/attn/kernels/steel_attention.h"], &[("k", &function)]);
    Ok(Row { name: "MLX `steel_attention`".into(), counts: count(&[unit], &mut memory, &[dispatch])? })
}

fn ggml_tiles(shape: Shape) -> Result<Row, msl_host::Error> {
    let Shape { heads, kv_heads, d, tokens, keys } = shape;
    let (tile, span, simdgroups) = (8, 64, 4);
    let (q, row, mask_row) = (d * 4, d * 2, keys * 2);
    let arguments = Struct::new()
        .i32s(&[tokens, heads, 1])
        .u64s(&[q, q * tokens, q * tokens * heads])
        .i32s(&[keys, kv_heads, 1, d])
        .u64s(&[row, row * keys, row * keys * kv_heads])
        .i32s(&[d])
        .u64s(&[row, row * keys, row * keys * kv_heads])
        .i32s(&[tokens, 1, 1])
        .u64s(&[mask_row, mask_row * tokens, mask_row * tokens])
        .i32s(&[heads, tokens, 1])
        .f32s(&[0.01, 0.0, 1.0, 1.0])
        .i32s(&[heads])
        .f32s(&[0.0])
        .done();
    // The mask of a causal prompt, in halves.
    let seen = |i: usize| i % keys <= keys - tokens + i / keys;
    let mask = (0..tokens * keys).flat_map(|i| if seen(i) { [0, 0] } else { [0, 0xFC] }).collect();
    let cache = || vec![0u8; kv_heads * keys * row];
    let mut memory = vec![arguments, vec![0; tokens * heads * q], cache(), cache(), mask, vec![0; heads * 4]];
    let out = push(&mut memory, vec![0; tokens * heads * q]);
    let blocks = push(&mut memory, vec![0; tokens.div_ceil(tile) * keys.div_ceil(span)]);
    let strides = [mask_row, mask_row * tokens, mask_row * tokens];
    let masked = push(&mut memory, Struct::new().i32s(&[tokens, keys, tokens, 1, 1]).u64s(&strides).done());
    let masking = "kernel_flash_attn_ext_blk";
    let first = Dispatch::new(masking, [keys.div_ceil(span), tokens.div_ceil(tile), 1], [32, 1, 1]).of(1);
    let first = ints(first.read(0, masked).read(1, 4).write(2, blocks), 224, &[tile, span]);
    let kernel = format!("kernel_flash_attn_ext_f16_dk{d}_dv{d}");
    let second = Dispatch::new(&kernel, [tokens.div_ceil(tile), heads, 1], [32, simdgroups, 1])
        .reads(&[0, 1, 2, 3, 4, 5, 1, blocks])
        .write(8, out)
        .threadgroup(0, (tile * (d + 2 * d.next_multiple_of(64) + 4 * span)) * 2)
        .constant(310, Constant::Bool(false));
    let second = ints(booleans(second, 300, &[true, false, false, false, false]), 320, &[d, d, simdgroups]);
    let units = [Unit::ggml(&["fa_f16.metal"], &[&kernel]), Unit::ggml(&["fa_aux.metal"], &[masking])];
    Ok(Row { name: "ggml `fa`".into(), counts: count(&units, &mut memory, &[first, second])? })
}

/// Prompts of 256 tokens after 256 others. A prompt this short is split to fill 38 cores; as one split, it has the
/// counts of a long one.
pub fn prompts(lines: bool) -> Outcome {
    for d in [64, 128, 256, 512] {
        let shape = Shape { heads: 2, kv_heads: 1, d, tokens: 256, keys: 512 };
        let mut rows = Vec::new();
        for (name, codec, splits) in [
            ("f16", Codec::F16, 1),
            ("f16, split", Codec::F16, 0),
            ("bf16", Codec::BF16, 1),
            ("tq8", Codec::tq(8), 1),
            ("tq4", Codec::tq(4), 1),
        ] {
            let (kernels, counts) = ours::attend(shape, codec, splits)?;
            rows.push(Row { name: format!("{name}, `{kernels}`"), counts });
        }
        if d <= 128 {
            rows.push(mlx_tiles(shape)?);
        }
        rows.push(ggml_tiles(shape)?);
        // Pairs of a query row and a key that it sees.
        let pairs = shape.heads * (shape.tokens * (shape.keys - shape.tokens) + shape.tokens * (shape.tokens + 1) / 2);
        print(
            &format!("Prompt of 256 tokens, 512 keys, 2 query heads, D = {d}"),
            pairs as f64 / 1000.0,
            "1000 pairs",
            &rows,
            lines,
        );
    }
    Ok(())
}
