//! ggml's products: a matrix and a vector, a few vectors, a matrix.

use msl_host::{Constant, Kind};

use crate::blocks::Format;
use crate::case::{Case, Dispatch};
use crate::corpus::Unit;
use crate::data::{Struct, Type};

pub fn cases() -> Vec<Case> {
    use Format::*;
    let mut all = Vec::new();
    for kind in [Type::F32, Type::F16, Type::BF16] {
        for name in ["", "_4", "_short"] {
            all.push(plain_vector(kind, name));
        }
    }
    // Rows of a SIMD-group, SIMD-groups, and whether they share rows.
    for (format, rows, simdgroups, shared) in [
        (Q4_0, 4, 2, false),
        (Q4_1, 4, 2, false),
        (Q5_0, 4, 2, false),
        (Q5_1, 4, 2, false),
        (Q8_0, 2, 4, true),
        (Q4K, 2, 2, false),
        (Q6K, 2, 2, false),
    ] {
        all.push(vector(format, rows, simdgroups, shared));
    }
    for format in [Plain(Type::F16), Plain(Type::BF16), Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4K, Q6K] {
        all.push(few_vectors(format));
    }
    for format in [Plain(Type::F32), Plain(Type::F16), Plain(Type::BF16), Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4K, Q6K] {
        all.push(matrix(format, 72, 40));
    }
    all.push(matrix(Q8_0, 70, 40));
    all.push(matrix(Plain(Type::F16), 64, 64));
    all
}

/// (input columns, matrix rows, vectors)
type Shape = (usize, usize, usize);

/// The bytes of both factors, and their product, vector by vector.
fn factors(format: Format, (n, rows, vectors): Shape) -> (Vec<u8>, Vec<u8>, Vec<f64>) {
    let (a, values) = format.random(21, n * rows);
    let (b, others) = Format::Plain(Type::F32).random(22, n * vectors);
    let product = others.chunks(n).flat_map(|y| {
        let values = &values;
        (0..rows).map(move |r| (0..n).map(|i| values[r * n + i] * y[i]).sum())
    });
    let product = product.collect();
    (a, b, product)
}

/// The struct of `mul_mv` and, without `per_group`, of `mul_mv_ext`.
fn vector_arguments(format: Format, (n, rows, vectors): Shape, per_group: Option<usize>) -> Vec<u8> {
    let (a, b) = (format.row_bytes(n), n * 4);
    Struct::new()
        .i32s(&[n, rows, 1])
        .u64s(&[format.block().1, a, a * rows, a * rows])
        .i32s(&[n, vectors, 1])
        .u64s(&[4, b, b * vectors, b * vectors])
        .i32s(&[rows, vectors])
        .i32s(per_group.as_slice())
        .i16s(&[1, 1])
        .done()
}

fn vector_constants(dispatch: Dispatch, simdgroups: usize, across: usize) -> Dispatch {
    [simdgroups, across, 1, 1, 1]
        .iter()
        .enumerate()
        .fold(dispatch, |d, (i, v)| d.constant(600 + i as u32, Constant::Short(*v as i16)))
        .constant(605, Constant::Bool(false))
}

fn case(name: String, kernel: &str, file: &'static str, factors: (Vec<u8>, Vec<u8>, Vec<f64>)) -> Case {
    let (a, b, expected) = factors;
    let result = vec![0xFF; expected.len() * 4];
    Case {
        name,
        units: vec![Unit::ggml(if file == "mul_mm.metal" { &["mul_mm.metal"] } else { &["mul_mv.metal"] }, &[kernel])],
        memory: vec![Vec::new(), a, b, result],
        dispatches: Vec::new(),
        result: 3,
        kind: Type::F32,
        expected,
        tolerance: 2e-5,
        chosen: false,
        lockstep: false,
        fault: None,
    }
}

fn plain_vector(kind: Type, suffix: &str) -> Case {
    let format = Format::Plain(kind);
    let shape = if suffix == "_short" { (24, 66, 2) } else { (300, 6, 2) };
    let kernel = format!("kernel_mul_mv_{}_f32{suffix}", format.name());
    let mut case = case(format!("ggml mul_mv: {kernel}"), &kernel, "mul_mv.metal", factors(format, shape));
    let simdgroups = if suffix == "_short" { 1 } else { 2 };
    case.memory[0] = vector_arguments(format, shape, Some(2));
    let groups = if suffix == "_short" { shape.1.div_ceil(32) } else { shape.1 / 2 };
    let dispatch = Dispatch::new(&kernel, [groups, shape.2, 1], [32, simdgroups, 1]).reads(&[0, 1, 2]).write(3, 3);
    let dispatch = if suffix == "_short" { dispatch } else { dispatch.threadgroup(0, 32 * 4 * 2) };
    case.dispatches.push(vector_constants(dispatch, simdgroups, 1));
    case.chosen = kind == Type::BF16 && suffix == "_4";
    case
}

fn vector(format: Format, per_group: usize, simdgroups: usize, shared: bool) -> Case {
    let shape = (512, 16, 2);
    let kernel = format!("kernel_mul_mv_{}_f32", format.name());
    let mut case = case(format!("ggml mul_mv: {kernel}"), &kernel, "mul_mv.metal", factors(format, shape));
    case.memory[0] = vector_arguments(format, shape, Some(per_group));
    let rows = if shared { per_group } else { per_group * simdgroups };
    let dispatch = Dispatch::new(&kernel, [shape.1.div_ceil(rows), shape.2, 1], [32, simdgroups, 1])
        .reads(&[0, 1, 2])
        .write(3, 3)
        .threadgroup(0, 32 * 4 * per_group);
    case.dispatches.push(vector_constants(dispatch, simdgroups, 1));
    if matches!(format, Format::Q4K | Format::Q6K) {
        case.dispatches[0].threadgroup.clear();
        case.tolerance = 5e-4;
    }
    case.fault = misaligned(format);
    case.chosen = matches!(format, Format::Q4_0 | Format::Q8_0 | Format::Q6K);
    case
}

/// Blocks of 22 bytes, whose four bytes of fifth bits are read as one word.
fn misaligned(format: Format) -> Option<Kind> {
    (format == Format::Q5_0).then_some(Kind::Misaligned)
}

fn few_vectors(format: Format) -> Case {
    let shape = (512, 20, 5);
    let kernel = format!("kernel_mul_mv_ext_{}_f32_r1_5", format.name());
    let mut case = case(format!("ggml mul_mv: {kernel}"), &kernel, "mul_mv.metal", factors(format, shape));
    case.memory[0] = vector_arguments(format, shape, None);
    let (simdgroups, across) = (2, 8);
    let rows = 32 / across * simdgroups;
    let dispatch =
        Dispatch::new(&kernel, [shape.1.div_ceil(rows), 1, 1], [32, simdgroups, 1]).reads(&[0, 1, 2]).write(3, 3);
    case.dispatches.push(vector_constants(dispatch, simdgroups, across));
    case.tolerance = 5e-4;
    case.fault = misaligned(format);
    case.chosen = matches!(format, Format::Q4K | Format::Plain(Type::F16));
    case
}

/// Tiles of 64 rows and 32 vectors; both factors are first rounded to half.
fn matrix(format: Format, rows: usize, vectors: usize) -> Case {
    let n = 256;
    let kernel = format!("kernel_mul_mm_{}_f32", format.name());
    let name = format!("ggml mul_mm: {kernel}, {rows} rows, {vectors} vectors");
    let mut case = case(name, &kernel, "mul_mm.metal", factors(format, (n, rows, vectors)));
    let (a, b) = (format.row_bytes(n), n * 4);
    case.memory[0] = Struct::new()
        .i32s(&[n, 1])
        .u64s(&[a, a * rows, a * rows])
        .i32s(&[1])
        .u64s(&[4, b, b * vectors, b * vectors])
        .i32s(&[rows, vectors])
        .i16s(&[1, 1])
        .done();
    let partial = !rows.is_multiple_of(64) || !vectors.is_multiple_of(32);
    let mut dispatch = Dispatch::new(&kernel, [vectors.div_ceil(32), rows.div_ceil(64), 1], [32, 4, 1])
        .reads(&[0, 1, 2])
        .write(3, 3)
        .threadgroup(0, if partial { 8192 } else { 6144 })
        .constant(700, Constant::Bool(false))
        .constant(701, Constant::Bool(partial));
    for i in 2..6 {
        dispatch = dispatch.constant(700 + i, Constant::Short(1));
    }
    case.dispatches.push(dispatch);
    // Rows of the result are written as float4, which requires a multiple of 4 of them.
    case.fault = if rows.is_multiple_of(4) { misaligned(format) } else { Some(Kind::Misaligned) };
    case.tolerance = if format == Format::Plain(Type::BF16) { 4e-2 } else { 1e-2 };
    case.chosen = matches!(format, Format::Q4_0) || rows == 64;
    case
}
