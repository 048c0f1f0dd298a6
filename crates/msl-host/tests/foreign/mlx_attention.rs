//! MLX's attention: one query over all keys, in one pass or two, and prompts.

use msl_host::Constant;

use crate::attention::Attention;
use crate::case::{Case, Dispatch};
use crate::corpus::Unit;
use crate::data::{Random, Struct, Type};
use crate::mlx_rows::{precision, type_name};

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for (kind, d) in [(Type::F16, 64), (Type::F16, 128), (Type::BF16, 64), (Type::F32, 96), (Type::F32, 256)] {
        all.push(vector(kind, d, d == 128));
        all.push(two_passes(kind, d));
    }
    for (kind, d, aligned) in
        [(Type::F16, 64, true), (Type::F16, 128, false), (Type::BF16, 80, false), (Type::F32, 64, false)]
    {
        all.push(prompt(kind, d, aligned));
    }
    all
}

struct Inputs {
    bytes: [Vec<u8>; 3],
    seen: [Vec<f64>; 3],
}

fn inputs(a: &Attention, kind: Type) -> Inputs {
    let mut random = Random::new(51);
    let mut one = |n: usize| kind.encode(&random.units(n));
    let (q, k, v) = (one(a.heads * a.queries * a.d), one(a.kv_heads * a.keys * a.d), one(a.kv_heads * a.keys * a.d));
    Inputs { bytes: [q.0, k.0, v.0], seen: [q.1, k.1, v.1] }
}

fn push(memory: &mut Vec<Vec<u8>>, bytes: Vec<u8>) -> usize {
    memory.push(bytes);
    memory.len() - 1
}

fn booleans(dispatch: Dispatch, from: u32, values: &[bool]) -> Dispatch {
    values.iter().enumerate().fold(dispatch, |d, (i, v)| d.constant(from + i as u32, Constant::Bool(*v)))
}

fn vector(kind: Type, d: usize, with_sinks: bool) -> Case {
    let mut a = Attention {
        heads: 4,
        kv_heads: 2,
        queries: 2,
        keys: 75,
        d,
        scale: f64::from(0.1f32),
        causal: true,
        mask: None,
        sinks: None,
    };
    let (sinks, sinks_seen) = kind.encode(&[0.5, -1.0, 1.5, 0.0]);
    a.sinks = with_sinks.then_some(sinks_seen);
    let Inputs { bytes, seen } = inputs(&a, kind);
    let expected = a.run(&seen[0], &seen[1], &seen[2]);
    let [q, k, v] = bytes;
    let mut memory = vec![q, k, v, vec![0xFF; expected.len() * kind.bytes()]];
    let mut dispatch = Dispatch::new("k", [a.heads, a.queries, 1], [1024, 1, 1]).reads(&[0, 1, 2]).write(3, 3);
    for (i, n) in [a.heads / a.kv_heads, a.keys].into_iter().enumerate() {
        dispatch = dispatch.read(4 + i as u32, push(&mut memory, Struct::new().i32s(&[n]).done()));
    }
    for (i, n) in [a.keys * d, d, a.keys * d, d].into_iter().enumerate() {
        dispatch = dispatch.read(6 + i as u32, push(&mut memory, Struct::new().u64s(&[n]).done()));
    }
    dispatch = dispatch.read(10, push(&mut memory, Struct::new().f32s(&[0.1]).done()));
    if with_sinks {
        let heads = Struct::new().i32s(&[a.heads]).done();
        dispatch = dispatch.read(16, push(&mut memory, sinks)).read(17, push(&mut memory, heads));
    }
    // has_mask, query_transposed, do_causal, bool_mask, float_mask, has_sinks
    dispatch = booleans(dispatch, 20, &[false, false, true, false, false, with_sinks]);
    let function = format!("sdpa_vector<{}, {d}, {d}>", type_name(kind));
    Case {
        name: format!("mlx attention: {function}"),
        units: vec![Unit::mlx(&["utils.h", "sdpa_vector.h"], &[("k", &function)])],
        memory,
        dispatches: vec![dispatch],
        result: 3,
        kind,
        expected,
        tolerance: precision(kind),
        chosen: d == 128,
        lockstep: false,
        fault: None,
    }
}

fn two_passes(kind: Type, d: usize) -> Case {
    let (blocks, keys) = (32usize, 100usize);
    let a = Attention {
        heads: 4,
        kv_heads: 2,
        queries: 1,
        keys,
        d,
        scale: f64::from(0.1f32),
        causal: false,
        mask: None,
        sinks: None,
    };
    let Inputs { bytes, seen } = inputs(&a, kind);
    let expected = a.run(&seen[0], &seen[1], &seen[2]);
    let [q, k, v] = bytes;
    let parts = a.heads * blocks;
    let mut memory = vec![
        q,
        k,
        v,
        vec![0xFF; parts * d * kind.bytes()],
        vec![0xFF; parts * 4],
        vec![0xFF; parts * 4],
        vec![0xFF; expected.len() * kind.bytes()],
    ];
    let mut first = Dispatch::new("first", [a.kv_heads, 1, blocks], [32, a.heads / a.kv_heads, 1])
        .reads(&[0, 1, 2])
        .write(3, 3)
        .write(4, 4)
        .write(5, 5)
        .read(7, push(&mut memory, Struct::new().i32s(&[keys]).done()));
    for (i, n) in [keys * d, d, keys * d, d].into_iter().enumerate() {
        first = first.read(8 + i as u32, push(&mut memory, Struct::new().u64s(&[n]).done()));
    }
    first = first.read(12, push(&mut memory, Struct::new().f32s(&[0.1]).done()));
    first = booleans(first, 20, &[false; 6]).constant(26, Constant::Int(blocks as i32));
    let count = push(&mut memory, Struct::new().i32s(&[blocks]).done());
    let second = Dispatch::new("second", [a.heads, 1, 1], [1024, 1, 1]).reads(&[3, 4, 5]).write(3, 6).read(4, count);
    let name = type_name(kind);
    let (one, two) = (format!("sdpa_vector_2pass_1<{name}, {d}, {d}>"), format!("sdpa_vector_2pass_2<{name}, {d}>"));
    Case {
        name: format!("mlx attention: {one}, {two}"),
        units: vec![Unit::mlx(&["utils.h", "sdpa_vector.h"], &[("first", &one), ("second", &two)])],
        memory,
        dispatches: vec![first, booleans(second, 20, &[false; 6]).constant(26, Constant::Int(blocks as i32))],
        result: 6,
        kind,
        expected,
        tolerance: precision(kind),
        chosen: kind == Type::BF16,
        lockstep: false,
        fault: None,
    }
}

/// Tiles of 32 queries and 32 or 16 keys, causal.
fn prompt(kind: Type, d: usize, aligned: bool) -> Case {
    let (queries, keys) = if aligned { (64, 96) } else { (45, 77) };
    let a = Attention {
        heads: 2,
        kv_heads: 1,
        queries,
        keys,
        d,
        scale: f64::from(0.1f32),
        causal: true,
        mask: None,
        sinks: None,
    };
    let Inputs { bytes, seen } = inputs(&a, kind);
    let expected = a.run(&seen[0], &seen[1], &seen[2]);
    let [q, k, v] = bytes;
    let (bq, bk) = (32, if d < 128 { 32 } else { 16 });
    let strides = |heads: usize, n: usize| [heads * n * d, n * d, d];
    let arguments = Struct::new()
        .i32s(&[1, a.heads, d, queries, keys, a.heads / a.kv_heads])
        .f32s(&[0.1])
        .i32s(&[
            queries.div_ceil(bq),
            keys.div_ceil(bk),
            queries / bq,
            keys / bk,
            queries % bq,
            keys % bk,
            keys - queries,
        ])
        .u64s(&strides(a.heads, queries))
        .u64s(&strides(a.kv_heads, keys))
        .u64s(&strides(a.kv_heads, keys))
        .u64s(&strides(a.heads, queries))
        .done();
    let dispatch =
        Dispatch::new("k", [queries.div_ceil(bq), a.heads, 1], [32, 4, 1]).reads(&[0, 1, 2]).write(3, 3).read(4, 4);
    let dispatch = booleans(dispatch, 200, &[aligned, aligned]);
    let dispatch = booleans(dispatch, 300, &[false, true, false, false]);
    let function = format!("attention<{}, {bq}, {bk}, {d}, {d}, 4, 1, bool, float>", type_name(kind));
    Case {
        name: format!("mlx attention: steel {function}, {queries} queries, {keys} keys"),
        units: vec![Unit::mlx(&["utils.h", "steel/attn/kernels/steel_attention.h"], &[("k", &function)])],
        memory: vec![q, k, v, vec![0xFF; expected.len() * kind.bytes()], arguments],
        dispatches: vec![dispatch],
        result: 3,
        kind,
        expected,
        tolerance: 2.0 * precision(kind),
        chosen: d == 128,
        lockstep: false,
        fault: None,
    }
}
