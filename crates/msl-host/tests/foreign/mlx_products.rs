//! MLX's products: gemv, and the quantised products of one row and of many.

use crate::case::{Case, Dispatch};
use crate::corpus::Unit;
use crate::data::{Random, Struct, Type};
use crate::mlx_rows::{precision, type_name};

pub fn cases() -> Vec<Case> {
    vec![
        gemv(Type::F32, false),
        gemv(Type::F16, false),
        gemv(Type::BF16, true),
        gemv(Type::F32, true),
        affine(Product::Fast, Type::F16, 4, 64),
        affine(Product::Fast, Type::BF16, 8, 32),
        affine(Product::Fast, Type::F32, 2, 128),
        affine(Product::Fast, Type::F16, 6, 64),
        affine(Product::Any, Type::F16, 4, 32),
        affine(Product::Any, Type::F32, 3, 64),
        affine(Product::Quad, Type::F32, 4, 64),
        affine(Product::Transposed, Type::F32, 4, 64),
        affine(Product::Transposed, Type::F16, 8, 64),
        affine(Product::Many, Type::F16, 4, 64),
        affine(Product::Many, Type::F32, 8, 32),
        affine(Product::Many, Type::BF16, 5, 64),
        affine(Product::ManyTransposed, Type::F16, 4, 64),
    ]
}

/// Appends memory of integers to a list; returns its index.
fn push(memory: &mut Vec<Vec<u8>>, bytes: Vec<u8>) -> usize {
    memory.push(bytes);
    memory.len() - 1
}

/// A matrix times a vector, or its transpose times a vector.
fn gemv(kind: Type, transposed: bool) -> Case {
    let (inputs, outputs) = (300usize, 96usize);
    let (m, ms) = kind.encode(&Random::new(41).units(inputs * outputs));
    let (x, xs) = kind.encode(&Random::new(42).units(inputs));
    let at = |i: usize, o: usize| if transposed { ms[i * outputs + o] } else { ms[o * inputs + i] };
    let expected = (0..outputs).map(|o| (0..inputs).map(|i| at(i, o) * xs[i]).sum()).collect();
    let name = type_name(kind);
    // SIMD-groups of a threadgroup, threads of a SIMD-group, elements of a thread: rows and columns of each.
    let (function, groups, simdgroups) = if transposed {
        (format!("gemv_t<{name}, 1, 2, 8, 4, 4, 4, false, false>"), outputs / (2 * 4 * 4), 2)
    } else {
        (format!("gemv<{name}, 4, 1, 1, 32, 4, 4, false, false>"), outputs / (4 * 4), 4)
    };
    let mut memory = vec![m, x, vec![0xFF; outputs * kind.bytes()]];
    let mut dispatch = Dispatch::new("k", [groups, 1, 1], [32, simdgroups, 1]).reads(&[0, 1, 1]).write(3, 2);
    for (i, value) in [inputs, outputs, if transposed { outputs } else { inputs }].into_iter().enumerate() {
        dispatch = dispatch.read(4 + i as u32, push(&mut memory, Struct::new().i32s(&[value]).done()));
    }
    let (one, zero) = (
        push(&mut memory, Struct::new().f32s(&[1.0, 0.0]).done()),
        push(&mut memory, Struct::new().u64s(&[0, 0]).done()),
    );
    dispatch = dispatch.read(7, one).read(8, zero).read(9, zero).read(10, zero);
    dispatch = (11..15).fold(dispatch, |d, i| d.read(i, zero));
    Case {
        name: format!("mlx gemv: {function}"),
        units: vec![Unit::mlx(&["utils.h", "steel/utils.h", "gemv.h"], &[("k", &function)])],
        memory,
        dispatches: vec![dispatch],
        result: 2,
        kind,
        expected,
        tolerance: 2.0 * precision(kind),
        chosen: kind == Type::BF16 || (kind == Type::F32 && !transposed),
        lockstep: false,
        fault: None,
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Product {
    /// One row at a time, inputs in multiples of 512.
    Fast,
    /// One row at a time.
    Any,
    /// One row at a time, 64 inputs.
    Quad,
    /// One row at a time, with the weights of an input in a row.
    Transposed,
    Many,
    ManyTransposed,
}

fn affine(product: Product, kind: Type, bits: usize, group: usize) -> Case {
    let (inputs, outputs, rows) = match product {
        Product::Fast => (1024, 16, 2),
        Product::Any => (576, 24, 2),
        Product::Quad => (64, 64, 3),
        Product::Transposed => (192, 128, 2),
        Product::Many => (128, 64, 40),
        Product::ManyTransposed => (128, 64, 40),
    };
    let transposed = matches!(product, Product::Transposed | Product::ManyTransposed);
    let (lines, columns) = if transposed { (inputs, outputs) } else { (outputs, inputs) };
    let mut random = Random::new(43 + bits as u64);
    let codes: Vec<u8> = (0..lines * columns).map(|_| random.below(1 << bits) as u8).collect();
    // Codes are a bit stream from the lowest bit of the first byte on.
    let mut weights = vec![0u8; lines * columns * bits / 8];
    for (i, code) in codes.iter().enumerate() {
        for b in 0..bits {
            weights[(i * bits + b) / 8] |= (code >> b & 1) << ((i * bits + b) % 8);
        }
    }
    let step = 2.0 / (1 << bits) as f32;
    let scale_values: Vec<f32> = (0..lines * columns / group).map(|_| step * (1.0 + 0.3 * random.unit())).collect();
    let bias_values: Vec<f32> = (0..lines * columns / group).map(|_| -1.0 + 0.3 * random.unit()).collect();
    let (scales, scales_seen) = kind.encode(&scale_values);
    let (biases, biases_seen) = kind.encode(&bias_values);
    let (x, xs) = kind.encode(&random.units(rows * inputs));
    let weight = |line: usize, column: usize| {
        let (i, g) = (line * columns + column, line * (columns / group) + column / group);
        f64::from(codes[i]) * scales_seen[g] + biases_seen[g]
    };
    let mut expected = Vec::new();
    for row in xs.chunks(inputs) {
        expected.extend(
            (0..outputs).map(|o| {
                (0..inputs).map(|i| row[i] * if transposed { weight(i, o) } else { weight(o, i) }).sum::<f64>()
            }),
        );
    }
    let name = type_name(kind);
    let (function, groups, threads) = match product {
        Product::Fast => {
            (format!("affine_qmv_fast<{name}, {group}, {bits}, false>"), [rows, outputs / 8, 1], [32, 2, 1])
        }
        Product::Any => (format!("affine_qmv<{name}, {group}, {bits}, false>"), [rows, outputs / 8, 1], [32, 2, 1]),
        Product::Quad => (
            format!("affine_qmv_quad<{name}, {group}, {bits}, 64, false>"),
            [rows, outputs.div_ceil(64), 1],
            [32, 1, 1],
        ),
        Product::Transposed => {
            (format!("affine_qvm<{name}, {group}, {bits}, false>"), [rows, outputs / 64, 1], [32, 2, 1])
        }
        Product::Many => {
            let function = format!("affine_qmm_t<{name}, {group}, {bits}, true, false>");
            (function, [outputs / 32, rows.div_ceil(32), 1], [32, 2, 2])
        }
        Product::ManyTransposed => {
            let function = format!("affine_qmm_n<{name}, {group}, {bits}, false>");
            (function, [outputs / 32, rows.div_ceil(32), 1], [32, 2, 2])
        }
    };
    let mut memory = vec![weights, scales, biases, x, vec![0xFF; rows * outputs * kind.bytes()]];
    let many = matches!(product, Product::Many | Product::ManyTransposed);
    let sizes = if many { vec![inputs, outputs, rows] } else { vec![inputs, outputs] };
    let mut dispatch = Dispatch::new("k", groups, threads).reads(&[0, 1, 2, 3]).write(4, 4);
    for (i, value) in sizes.iter().enumerate() {
        dispatch = dispatch.read(5 + i as u32, push(&mut memory, Struct::new().i32s(&[*value]).done()));
    }
    let zero = push(&mut memory, vec![0; 16]);
    let from = 5 + sizes.len() as u32;
    dispatch = (from..from + 8).fold(dispatch, |d, i| d.read(i, zero));
    // Inputs of products of many rows are rounded to the type, like the weights.
    let size = (inputs as f64).sqrt();
    Case {
        name: format!("mlx quantized: {function}"),
        units: vec![Unit::mlx(
            &["utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"],
            &[("k", &function)],
        )],
        memory,
        dispatches: vec![dispatch],
        result: 4,
        kind,
        expected,
        tolerance: precision(kind) * if many { size / 2.0 } else { 3.0 },
        chosen: bits == 4 && kind == Type::F16,
        lockstep: false,
        fault: None,
    }
}
