//! ggml's kernels over rows: norms, softmax, rotary embeddings, sorting.

use crate::case::{Case, Dispatch};
use crate::corpus::Unit;
use crate::data::{Random, Struct, Type};
use msl_host::{Constant, Kind};

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for (width, threads) in [(1, 32), (4, 64), (4, 128)] {
        for rms in [false, true] {
            for fused in [1, 2, 3] {
                all.push(norm(rms, fused, width, threads));
            }
        }
    }
    all.push(l2_norm());
    all.extend([32, 64].map(group_norm));
    for (width, mask, threads) in [(1, None, 64), (1, Some(Type::F16), 32), (4, Some(Type::F32), 128)] {
        all.push(soft_max(width, mask, threads));
    }
    for neox in [false, true] {
        for kind in [Type::F32, Type::F16] {
            all.push(rope(neox, kind));
        }
    }
    all.push(argsort(true));
    all.push(argsort(false));
    all
}

fn input(seed: u64, n: usize) -> (Vec<u8>, Vec<f64>) {
    Type::F32.encode(&Random::new(seed).units(n))
}

/// `kernel_norm` and `kernel_rms_norm`, alone or with a factor and a summand for each channel.
fn norm(rms: bool, fused: usize, width: usize, threads: usize) -> Case {
    let (n, rows, batch) = (328usize, 3usize, 2usize);
    let (x, xs) = input(1, n * rows * batch);
    let (f, fs) = input(2, n);
    let (g, gs) = input(3, n);
    let eps = 1e-5f32;
    let row = n * 4;
    let name = format!(
        "kernel_{}norm{}_f32{}",
        if rms { "rms_" } else { "" },
        ["", "_mul", "_mul_add"][fused - 1],
        if width == 4 { "_4" } else { "" }
    );
    let arguments = Struct::new()
        .i32s(&[n, n / width])
        .u64s(&[row, row * rows, row * rows * batch])
        .f32s(&[eps])
        .i32s(&[rows, 1, 1, batch, 1, 1, 1, 1, 1])
        .u64s(&[row, row, row, row * rows, row, row, row * rows * batch, row, row])
        .f32s(&[1.0])
        .done();
    let expected = xs.chunks(n).flat_map(|x| {
        let mean = if rms { 0.0 } else { x.iter().sum::<f64>() / n as f64 };
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
        let scale = 1.0 / (variance + f64::from(eps)).sqrt();
        let (fs, gs) = (&fs, &gs);
        (0..n).map(move |i| {
            let y = (x[i] - mean) * scale;
            let y = if fused > 1 { y * fs[i] } else { y };
            if fused > 2 { y + gs[i] } else { y }
        })
    });
    let expected = expected.collect();
    let dispatch = Dispatch::new(&name, [rows, batch, 1], [threads, 1, 1])
        .reads(&[0, 1, 2, 3])
        .write(4, 4)
        .threadgroup(0, 32 * 4)
        .constant(1700, Constant::Bool(false));
    Case {
        name: format!("ggml norm: {name}, {threads} threads"),
        units: vec![Unit::ggml(&["norm.metal"], &[&name])],
        memory: vec![arguments, x, f, g, vec![0xFF; n * rows * batch * 4]],
        dispatches: vec![dispatch],
        result: 4,
        kind: Type::F32,
        expected,
        tolerance: 2e-6,
        chosen: width == 4 && threads == 64 && fused != 1,
        lockstep: false,
        fault: None,
    }
}

fn l2_norm() -> Case {
    let (n, rows) = (96usize, 5usize);
    let (x, xs) = input(4, n * rows);
    let row = n * 4;
    let strides = [4, row, row * rows, row * rows];
    let arguments = Struct::new()
        .i32s(&[n / 4, rows, 1, 1])
        .u64s(&strides)
        .i32s(&[n, rows, 1, 1])
        .u64s(&strides)
        .f32s(&[1e-6])
        .done();
    let expected = xs.chunks(n).flat_map(|x| {
        let scale = 1.0 / x.iter().map(|v| v * v).sum::<f64>().sqrt().max(1e-6);
        x.iter().map(move |v| v * scale)
    });
    let expected = expected.collect();
    let name = "kernel_l2_norm_f32_f32_4";
    Case {
        name: format!("ggml norm: {name}"),
        units: vec![Unit::ggml(&["norm.metal"], &[name])],
        memory: vec![arguments, x, vec![0xFF; n * rows * 4]],
        dispatches: vec![
            Dispatch::new(name, [rows, 1, 1], [32, 1, 1]).reads(&[0, 1]).write(2, 2).threadgroup(0, 32 * 4),
        ],
        result: 2,
        kind: Type::F32,
        expected,
        tolerance: 2e-6,
        chosen: false,
        lockstep: false,
        fault: None,
    }
}

/// With several SIMD-groups, the kernel clears the partial sums while another SIMD-group may still read them.
fn group_norm(threads: usize) -> Case {
    let (width, height, channels, groups) = (6usize, 5usize, 8usize, 3usize);
    let n = width * height * channels;
    let (x, xs) = input(5, n);
    let per = width * height * channels.div_ceil(groups);
    let arguments = Struct::new()
        .u64s(&[width, height, channels, 4, 4 * width, 4 * width * height])
        .i32s(&[groups])
        .f32s(&[1e-5])
        .done();
    let expected = xs.chunks(per).flat_map(|x| {
        // The last group is shorter; ggml divides by the length of a whole one.
        let mean = x.iter().sum::<f64>() / per as f64;
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / per as f64;
        let scale = 1.0 / (variance + 1e-5f64).sqrt();
        x.iter().map(move |v| (v - mean) * scale)
    });
    let expected = expected.collect();
    let name = "kernel_group_norm_f32";
    Case {
        name: format!("ggml norm: {name}, {threads} threads"),
        units: vec![Unit::ggml(&["norm.metal"], &[name])],
        memory: vec![arguments, x, vec![0xFF; n * 4]],
        dispatches: vec![
            Dispatch::new(name, [groups, 1, 1], [threads, 1, 1]).reads(&[0, 1]).write(2, 2).threadgroup(0, 32 * 4),
        ],
        result: 2,
        kind: Type::F32,
        expected,
        tolerance: 4e-6,
        chosen: true,
        lockstep: false,
        fault: (threads > 32).then_some(Kind::Race),
    }
}

/// With a mask, ALiBi slopes and a sink per head.
fn soft_max(width: usize, mask: Option<Type>, threads: usize) -> Case {
    let (n, rows, heads) = (136usize, 3usize, 4usize);
    let (x, xs) = input(6, n * rows * heads);
    let kind = mask.unwrap_or(Type::F32);
    let (m, ms) = kind.encode(&Random::new(7).units(n * rows));
    let (sinks, sinks_seen) = input(8, heads);
    let (scale, max_bias) = (0.7f32, 8.0f32);
    let (m0, m1) = (2f32.powf(-max_bias / heads as f32), 2f32.powf(-max_bias / 2.0 / heads as f32));
    let row = n * 4;
    let mask_row = n * kind.bytes();
    let arguments = Struct::new()
        .i32s(&[n, rows, heads])
        .u64s(&[row, row * rows, row * rows * heads])
        .i32s(&[rows, 1, 1])
        .u64s(&[mask_row, mask_row * rows, mask_row * rows])
        .u64s(&[row, row * rows, row * rows * heads])
        .f32s(&[scale, if mask.is_some() { max_bias } else { 0.0 }, m0, m1])
        .i32s(&[heads])
        .done();
    let mut expected = Vec::new();
    for head in 0..heads {
        let slope = f64::from(m0).powi(head as i32 + 1);
        for r in 0..rows {
            let score = |i: usize| {
                let bias = if mask.is_some() { slope * ms[r * n + i] } else { 0.0 };
                xs[(head * rows + r) * n + i] * f64::from(scale) + bias
            };
            let sink = if mask.is_some() { sinks_seen[head].exp() } else { 0.0 };
            let sum = (0..n).map(|i| score(i).exp()).sum::<f64>() + sink;
            expected.extend((0..n).map(|i| score(i).exp() / sum));
        }
    }
    let name = format!(
        "kernel_soft_max_{}{}",
        if kind == Type::F16 { "f16" } else { "f32" },
        if width == 4 { "_4" } else { "" }
    );
    // Equal addresses mean to the kernel that it has no mask and no sink.
    let bound = if mask.is_some() { [0, 1, 2, 3] } else { [0, 1, 1, 1] };
    Case {
        name: format!("ggml softmax: {name}, mask {mask:?}, {threads} threads"),
        units: vec![Unit::ggml(&["softmax.metal"], &[&name])],
        memory: vec![arguments, x, m, sinks, vec![0xFF; n * rows * heads * 4]],
        dispatches: vec![
            Dispatch::new(&name, [rows, heads, 1], [threads, 1, 1]).reads(&bound).write(4, 4).threadgroup(0, 32 * 4),
        ],
        result: 4,
        kind: Type::F32,
        expected,
        tolerance: 2e-6,
        chosen: width == 4 || mask.is_none(),
        lockstep: false,
        fault: None,
    }
}

fn rope(neox: bool, kind: Type) -> Case {
    let (n, turned, heads, tokens) = (48usize, 32usize, 3usize, 4usize);
    let (x, xs) = kind.encode(&Random::new(9).units(n * heads * tokens));
    let positions = [0u32, 3, 17, 900];
    let size = kind.bytes();
    let strides = [size, size * n, size * n * heads, size * n * heads * tokens];
    let base = 10000f32;
    let arguments = Struct::new()
        .i32s(&[n, heads, tokens, 1])
        .u64s(&strides)
        .i32s(&[n, heads, tokens, 1])
        .u64s(&strides)
        .i32s(&[0, turned, 0, 4096])
        .f32s(&[base, 1.0, 0.0, 1.0, 32.0, 1.0])
        .i32s(&[0, 0, 0, 0])
        .bools(&[false, false])
        .done();
    let mut expected = xs.clone();
    for (row, x) in expected.chunks_mut(n).enumerate() {
        let position = f64::from(positions[row / heads]);
        for i in 0..turned / 2 {
            let angle = position * f64::from(base).powf(-2.0 * i as f64 / turned as f64);
            let (a, b) = if neox { (i, i + turned / 2) } else { (2 * i, 2 * i + 1) };
            (x[a], x[b]) = (x[a] * angle.cos() - x[b] * angle.sin(), x[a] * angle.sin() + x[b] * angle.cos());
        }
    }
    let name = format!("kernel_rope_{}_f{}", if neox { "neox" } else { "norm" }, size * 8);
    let dispatch = Dispatch::new(&name, [heads, tokens, 1], [16, 1, 1])
        .reads(&[0, 1, 2, 2])
        .write(4, 3)
        .constant(800, Constant::Bool(false))
        .constant(801, Constant::Bool(false));
    Case {
        name: format!("ggml rope: {name}"),
        units: vec![Unit::ggml(&["rope.metal"], &[&name])],
        memory: vec![
            arguments,
            x,
            positions.iter().flat_map(|p| p.to_le_bytes()).collect(),
            vec![0xFF; n * heads * tokens * size],
        ],
        dispatches: vec![dispatch],
        result: 3,
        kind,
        expected,
        // In float, an angle near 900 has an error of 1e-4.
        tolerance: if kind == Type::F32 { 2e-4 } else { 2e-3 },
        chosen: neox && kind == Type::F16,
        lockstep: false,
        fault: None,
    }
}

/// Bitonic sorts of parts of 64, merged in two passes; ties are unlikely.
fn argsort(ascending: bool) -> Case {
    let (n, rows, part) = (150usize, 2usize, 64usize);
    let (x, xs) = input(10, n * rows);
    let row = n * 4;
    let strides = [4, row, row * rows, row * rows];
    let sort = Struct::new().i32s(&[n, rows, 1, 1]).u64s(&strides).i32s(&[n, rows, 1, 1, part]).done();
    let merge =
        |length: usize| Struct::new().u64s(&[n, rows, 1, 1]).u64s(&strides).i32s(&[n, rows, 1, 1, n, length]).done();
    let mut expected = Vec::new();
    for x in xs.chunks(n) {
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| if ascending { x[*a].total_cmp(&x[*b]) } else { x[*b].total_cmp(&x[*a]) });
        expected.extend(order.iter().map(|i| *i as f64));
    }
    let suffix = if ascending { "asc" } else { "desc" };
    let (first, second) =
        (format!("kernel_argsort_f32_i32_{suffix}"), format!("kernel_argsort_merge_f32_i32_{suffix}"));
    let parts = n.div_ceil(part);
    let merging = |arguments: usize, from: usize, to: usize, parts: usize| {
        Dispatch::new(&second, [parts.div_ceil(2) * rows, 1, 1], [32, 1, 1])
            .read(0, arguments)
            .read(1, 3)
            .read(2, from)
            .write(3, to)
    };
    Case {
        name: format!("ggml argsort: {suffix}ending, with merges"),
        units: vec![Unit::ggml(&["argsort.metal"], &[&first, &second])],
        memory: vec![sort, merge(part), merge(2 * part), x, vec![0xFF; n * rows * 4], vec![0xFF; n * rows * 4]],
        dispatches: vec![
            Dispatch::new(&first, [parts * rows, 1, 1], [part, 1, 1])
                .read(0, 0)
                .read(1, 3)
                .write(2, 4)
                .threadgroup(0, part * 4),
            merging(1, 4, 5, parts),
            merging(2, 5, 4, parts.div_ceil(2)),
        ],
        result: 4,
        kind: Type::U32,
        expected,
        tolerance: 0.0,
        chosen: ascending,
        lockstep: false,
        fault: None,
    }
}
