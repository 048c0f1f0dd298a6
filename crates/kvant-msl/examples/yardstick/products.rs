//! Products with affine weights, and sampling.

use kvant::{DType, Tensor, ops};
use msl_host::{Constant, Counts};

use crate::case::Dispatch;
use crate::corpus::Unit;
use crate::data::Struct;
use crate::foreign::count;
use crate::ours;
use crate::table::{Row, print};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const INPUTS: usize = 4096;
const OUTPUTS: usize = 1024;
const GROUP: usize = 64;

fn ours_affine(rows: usize) -> Result<(String, Counts), kvant::Error> {
    let (device, counter) = ours::device()?;
    let tensor = |dtype, shape: &[usize]| {
        let tensor = Tensor::zeros(&device, dtype, shape)?;
        ours::fill(&tensor).map(|()| tensor)
    };
    let x = tensor(DType::F16, &[rows, INPUTS])?;
    let codes = tensor(DType::U32, &[OUTPUTS, INPUTS / 8])?;
    let scales = tensor(DType::F16, &[OUTPUTS, INPUTS / GROUP])?;
    let biases = tensor(DType::F16, &[OUTPUTS, INPUTS / GROUP])?;
    let out = tensor(DType::F16, &[rows, OUTPUTS])?;
    let weight = ops::Affine { codes: &codes, scales: &scales, biases: &biases, bits: 4, group: GROUP };
    ours::count(&device, &counter, |enc| ops::linear(enc, &ops::Linear::new(&x, weight, &out)))
}

fn mlx(rows: usize) -> Result<Row, msl_host::Error> {
    let groups = OUTPUTS * INPUTS / GROUP * 2;
    let mut memory = vec![
        vec![0; OUTPUTS * INPUTS / 2],
        vec![0; groups],
        vec![0; groups],
        vec![0; rows * INPUTS * 2],
        vec![0; rows * OUTPUTS * 2],
    ];
    let many = rows > 8;
    let (function, grid, threads) = if many {
        let function = format!("affine_qmm_t<half, {GROUP}, 4, true, false>");
        (function, [OUTPUTS / 32, rows.div_ceil(32), 1], [32, 2, 2])
    } else {
        (format!("affine_qmv_fast<half, {GROUP}, 4, false>"), [rows, OUTPUTS / 8, 1], [32, 2, 1])
    };
    let sizes = if many { vec![INPUTS, OUTPUTS, rows] } else { vec![INPUTS, OUTPUTS] };
    let mut dispatch = Dispatch::new("k", grid, threads).reads(&[0, 1, 2, 3]).write(4, 4);
    for (i, value) in sizes.iter().enumerate() {
        memory.push(Struct::new().i32s(&[*value]).done());
        dispatch = dispatch.read(5 + i as u32, memory.len() - 1);
    }
    memory.push(vec![0; 16]);
    let (zero, from) = (memory.len() - 1, 5 + sizes.len() as u32);
    dispatch = (from..from + 8).fold(dispatch, |d, i| d.read(i, zero));
    let files = &["utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"];
    let name = function.split('<').next().unwrap_or("").to_string();
    let counts = count(&[Unit::mlx(files, &[("k", &function)])], &mut memory, &[dispatch])?;
    Ok(Row { name: format!("MLX `{name}`, groups of {GROUP}"), counts })
}

fn ggml(rows: usize) -> Result<Row, msl_host::Error> {
    let (a, b) = (INPUTS / 32 * 18, INPUTS * 4);
    let mut memory = vec![Vec::new(), vec![0; a * OUTPUTS], vec![0; b * rows], vec![0; rows * OUTPUTS * 4]];
    let many = rows > 8;
    let (unit, dispatch) = if many {
        memory[0] = Struct::new()
            .i32s(&[INPUTS, 1])
            .u64s(&[a, a * OUTPUTS, a * OUTPUTS])
            .i32s(&[1])
            .u64s(&[4, b, b * rows, b * rows])
            .i32s(&[OUTPUTS, rows])
            .i16s(&[1, 1])
            .done();
        let dispatch =
            Dispatch::new("kernel_mul_mm_q4_0_f32", [rows.div_ceil(32), OUTPUTS.div_ceil(64), 1], [32, 4, 1])
                .threadgroup(0, 6144)
                .constant(700, Constant::Bool(false))
                .constant(701, Constant::Bool(false));
        let dispatch = (702..706).fold(dispatch, |d, i| d.constant(i, Constant::Short(1)));
        (Unit::ggml(&["mul_mm.metal"], &["kernel_mul_mm_q4_0_f32"]), dispatch)
    } else {
        memory[0] = Struct::new()
            .i32s(&[INPUTS, OUTPUTS, 1])
            .u64s(&[18, a, a * OUTPUTS, a * OUTPUTS])
            .i32s(&[INPUTS, rows, 1])
            .u64s(&[4, b, b * rows, b * rows])
            .i32s(&[OUTPUTS, rows, 4])
            .i16s(&[1, 1])
            .done();
        let dispatch = Dispatch::new("kernel_mul_mv_q4_0_f32", [OUTPUTS / 8, rows, 1], [32, 2, 1]).threadgroup(0, 512);
        let dispatch = [2, 1, 1, 1, 1]
            .iter()
            .enumerate()
            .fold(dispatch, |d, (i, v)| d.constant(600 + i as u32, Constant::Short(*v)))
            .constant(605, Constant::Bool(false));
        (Unit::ggml(&["mul_mv.metal"], &["kernel_mul_mv_q4_0_f32"]), dispatch)
    };
    let dispatch = dispatch.reads(&[0, 1, 2]).write(3, 3);
    let name = dispatch.kernel.clone();
    Ok(Row { name: format!("ggml `{name}`, groups of 32"), counts: count(&[unit], &mut memory, &[dispatch])? })
}

/// Affine products: one row, few, and many.
pub fn linear(lines: bool) -> Outcome {
    for rows in [1, 4, 128] {
        let (kernels, counts) = ours_affine(rows)?;
        let list = [Row { name: format!("`{kernels}`, groups of {GROUP}"), counts }, mlx(rows)?, ggml(rows)?];
        let title = format!("Product of {rows} × {INPUTS} and {INPUTS} × {OUTPUTS} codes of 4 bits");
        print(&title, (rows * OUTPUTS) as f64, "result", &list, lines);
    }
    Ok(())
}

/// Sampling from a vocabulary.
pub fn sample(lines: bool) -> Outcome {
    let vocab = 128 << 10;
    let (device, counter) = ours::device()?;
    let logits: Vec<f32> = (0..vocab).map(|i| ((i * 7919) % 10007) as f32 / 500.0).collect();
    let logits = Tensor::from_slice(&device, &logits, &[1, vocab])?;
    let counter_tensor = Tensor::from_slice(&device, &[1u32], &[1])?;
    let out = Tensor::zeros(&device, DType::U32, &[1])?;
    let mut list = Vec::new();
    for (name, top_k, top_p) in [("temperature", 0, 1.0), ("top_k 40, top_p 0.9", 40, 0.9f32)] {
        let (kernels, counts) = ours::count(&device, &counter, |enc| {
            let mut sample = ops::Sample::new(&logits, &counter_tensor, &out).temperature(0.8).seed(1);
            if top_k > 0 {
                sample = sample.top_k(top_k).top_p(top_p);
            }
            ops::sample(enc, &sample)
        })?;
        list.push(Row { name: format!("{name}: `{kernels}`"), counts });
    }
    print(&format!("A token of {vocab}"), vocab as f64, "entry", &list, lines);
    Ok(())
}
