//! MLX's kernels over rows: softmax, logsumexp, scans, sorting, Hadamard transforms.

use msl_host::Kind;

use crate::case::{Case, Dispatch};
use crate::corpus::Unit;
use crate::data::{Random, Struct, Type};

pub fn cases() -> Vec<Case> {
    vec![
        softmax("softmax_single_row", Type::F32, false, 131, 64),
        softmax("softmax_single_row", Type::F16, true, 256, 64),
        softmax("softmax_single_row", Type::BF16, false, 100, 32),
        softmax("softmax_looped", Type::F32, false, 4101, 1024),
        softmax("softmax_looped", Type::BF16, true, 5000, 1024),
        log_sum_exp(Type::F32),
        log_sum_exp(Type::F16),
        scan(false),
        scan(true),
        sort(false, Type::F32),
        sort(true, Type::F32),
        sort(true, Type::F16),
        hadamard(Type::F32, 128, 4),
        hadamard(Type::F16, 512, 8),
        hadamard(Type::BF16, 128, 2),
    ]
}

/// The name of a type in MLX.
pub fn type_name(kind: Type) -> &'static str {
    match kind {
        Type::F32 => "float",
        Type::F16 => "half",
        Type::BF16 => "bfloat16_t",
        Type::U32 => "uint",
    }
}

pub fn precision(kind: Type) -> f64 {
    match kind {
        Type::F32 => 4e-6,
        Type::F16 => 2e-3,
        Type::BF16 => 1.6e-2,
        Type::U32 => 0.0,
    }
}

fn ints(values: &[usize]) -> Vec<u8> {
    Struct::new().i32s(values).done()
}

fn softmax(function: &str, kind: Type, precise: bool, n: usize, threads: usize) -> Case {
    let rows = if n > 1000 { 1 } else { 3 };
    let (x, xs) = kind.encode(&Random::new(31).units(n * rows));
    let expected = xs.chunks(n).flat_map(|x| {
        let sum: f64 = x.iter().map(|v| v.exp()).sum();
        x.iter().map(move |v| v.exp() / sum)
    });
    let name = type_name(kind);
    let function_name = format!("{function}<{name}, {}>", if precise { "float" } else { name });
    Case {
        name: format!("mlx softmax: {function_name}, {n} columns"),
        expected: expected.collect(),
        units: vec![Unit::mlx(&["utils.h", "softmax.h"], &[("k", &function_name)])],
        memory: vec![x, vec![0xFF; n * rows * kind.bytes()], ints(&[n])],
        dispatches: vec![Dispatch::new("k", [rows, 1, 1], [threads, 1, 1]).read(0, 0).write(1, 1).read(2, 2)],
        result: 1,
        kind,
        tolerance: precision(kind),
        chosen: kind == Type::F32,
        lockstep: false,
        fault: None,
    }
}

fn log_sum_exp(kind: Type) -> Case {
    let (n, rows) = (200, 3);
    let (x, xs) = kind.encode(&Random::new(32).units(n * rows));
    let expected = xs.chunks(n).map(|x| x.iter().map(|v| v.exp()).sum::<f64>().ln()).collect();
    let function = format!("logsumexp<{}>", type_name(kind));
    Case {
        name: format!("mlx logsumexp: {function}"),
        units: vec![Unit::mlx(&["utils.h", "logsumexp.h"], &[("k", &function)])],
        memory: vec![x, vec![0xFF; rows * kind.bytes()], ints(&[n])],
        dispatches: vec![Dispatch::new("k", [rows, 1, 1], [64, 1, 1]).read(0, 0).write(1, 1).read(2, 2)],
        result: 1,
        kind,
        expected,
        tolerance: precision(kind),
        chosen: false,
        lockstep: false,
        fault: None,
    }
}

/// Prefix sums, inclusive or exclusive.
fn scan(inclusive: bool) -> Case {
    let (n, rows) = (300, 2);
    let (x, xs) = Type::F32.encode(&Random::new(33).units(n * rows));
    let expected = xs.chunks(n).flat_map(|x| {
        let before = |i: usize| x[..i + usize::from(inclusive)].iter().sum::<f64>();
        (0..n).map(before).collect::<Vec<f64>>()
    });
    let expected = expected.collect();
    let function = format!("contiguous_scan<float, float, CumSum<float>, 4, {inclusive}, false>");
    Case {
        name: format!("mlx scan: {function}"),
        units: vec![Unit::mlx(&["utils.h", "binary_ops.h", "scan.h"], &[("k", &function)])],
        memory: vec![x, vec![0xFF; n * rows * 4], Struct::new().u64s(&[n]).done()],
        dispatches: vec![Dispatch::new("k", [1, rows, 1], [64, 1, 1]).read(0, 0).write(1, 1).read(2, 2)],
        result: 1,
        kind: Type::F32,
        expected,
        tolerance: 2e-5,
        chosen: inclusive,
        // Each lane reads the sum of a SIMD-group. Lanes beyond the number of SIMD-groups read unwritten memory, and do
        // not use it.
        lockstep: false,
        fault: Some(Kind::UninitialisedRead),
    }
}

/// A merge sort of values, or of their indices.
fn sort(indices: bool, kind: Type) -> Case {
    let (n, rows) = (500, 2);
    let mut random = Random::new(34);
    // Distinct values that every type represents: an order without ties.
    let mut values: Vec<f32> = (0..n * rows).map(|i| (i % n) as f32 - 250.0).collect();
    for row in values.chunks_mut(n) {
        for i in (1..n).rev() {
            row.swap(i, random.below(i + 1));
        }
    }
    let (x, xs) = kind.encode(&values);
    let mut expected = Vec::new();
    for x in xs.chunks(n) {
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| x[*a].total_cmp(&x[*b]));
        expected.extend(order.iter().map(|i| if indices { *i as f64 } else { x[*i] }));
    }
    let to = if indices { Type::U32 } else { kind };
    let function = format!("block_sort<{}, {}, {indices}, 64, 8>", type_name(kind), type_name(to));
    let mut dispatch = Dispatch::new("k", [1, rows, 1], [64, 1, 1]).read(0, 0).write(1, 1);
    // The length, the strides along the sorted axis, the strides between rows.
    let mut memory = vec![x, vec![0xFF; n * rows * to.bytes()]];
    for (i, value) in [n, 1, 1, n, n].into_iter().enumerate() {
        dispatch = dispatch.read(2 + i as u32, memory.len());
        memory.push(ints(&[value]));
    }
    Case {
        name: format!("mlx sort: {function}"),
        units: vec![Unit::mlx(&["utils.h", "sort.h"], &[("k", &function)])],
        memory,
        dispatches: vec![dispatch],
        result: 1,
        kind: to,
        expected,
        tolerance: 0.0,
        chosen: kind == Type::F16,
        lockstep: false,
        fault: None,
    }
}

fn hadamard(kind: Type, n: usize, radix: usize) -> Case {
    let rows = 2;
    let scale = 0.125f32;
    let (x, xs) = kind.encode(&Random::new(35).units(n * rows));
    let expected = xs.chunks(n).flat_map(|x| {
        let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        (0..n).map(move |i| (0..n).map(|j| sign(i, j) * x[j]).sum::<f64>() * f64::from(scale))
    });
    let function = format!("hadamard_n<{}, {n}, {radix}, {}>", type_name(kind), radix.min(4));
    Case {
        name: format!("mlx hadamard: {function}"),
        expected: expected.collect(),
        units: vec![Unit::mlx(&["utils.h", "hadamard.h"], &[("k", &function)])],
        memory: vec![x, vec![0xFF; n * rows * kind.bytes()], Struct::new().f32s(&[scale]).done()],
        dispatches: vec![Dispatch::new("k", [1, rows, 1], [n / radix, 1, 1]).read(0, 0).write(1, 1).read(2, 2)],
        result: 1,
        kind,
        tolerance: 2.0 * precision(kind),
        chosen: kind == Type::F32,
        lockstep: false,
        fault: None,
    }
}
