//! Matrix products with weights in blocks of GGUF files and in small floats, and with experts.

use kvant::{
    DType, Device, Result, Tensor,
    ops::{self, Affine, BlockFormat, Blocks, Experts, FloatFormat, Linear, ScaledFloats, Weight},
};

use crate::timer::{Timer, copies, noise, random_bits};

/// The format of a weight.
#[derive(Clone, Copy, PartialEq)]
enum Quantised {
    Affine(u32),
    Blocks(BlockFormat),
    Floats(FloatFormat),
}

impl std::fmt::Display for Quantised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Quantised::Affine(bits) => write!(f, "affine {bits} bit"),
            Quantised::Blocks(format) => write!(f, "{format}"),
            Quantised::Floats(format) => write!(f, "{format} (scales apart)"),
        }
    }
}

impl Quantised {
    /// Bytes of the codes and of the scales of a row.
    fn row_bytes(self, k: usize) -> [usize; 2] {
        match self {
            Quantised::Affine(bits) => [k * bits as usize / 8, k / 64 * 2],
            Quantised::Blocks(format) => [format.row_bytes(k).expect("whole blocks"), 0],
            Quantised::Floats(format) => [k * format.bits() / 8, k / format.group()],
        }
    }

    /// Matrices `[lead, k]` with random codes.
    fn matrices(self, device: &Device, lead: &[usize], k: usize, count: usize) -> Result<Vec<[Tensor; 2]>> {
        let (rows, [codes, scales]) = (lead.iter().product::<usize>(), self.row_bytes(k));
        // Scales without infinities and subnormals.
        let all: Vec<u8> = random_bits(rows * codes).into_iter().map(|byte| byte & 0x7B | 0x08).collect();
        let shape = |last: usize| [lead, &[last]].concat();
        let matrix = |_| {
            let (dtype, size) = if matches!(self, Quantised::Affine(_)) { (DType::U32, 4) } else { (DType::U8, 1) };
            let (of_scales, size_of_scale) = if size == 4 { (DType::BF16, 2) } else { (DType::U8, 1) };
            let weight = Tensor::from_bytes(device, dtype, &shape(codes / size), &all)?;
            let bytes = &random_bits(rows * scales);
            Ok([weight, Tensor::from_bytes(device, of_scales, &shape(scales / size_of_scale), bytes)?])
        };
        (0..count).map(matrix).collect()
    }

    fn weight([codes, scales]: &[Tensor; 2], kind: Quantised) -> Weight<'_> {
        match kind {
            Quantised::Affine(bits) => Weight::Affine(Affine { codes, scales, biases: scales, bits, group: 64 }),
            Quantised::Blocks(format) => Blocks::new(codes, format).into(),
            Quantised::Floats(format) => ScaledFloats::new(codes, scales, format).into(),
        }
    }
}

/// Blocks and small floats, in one run with affine 4-bit weights.
pub fn products(timer: &Timer) -> Result<()> {
    timer.head();
    let main = [
        Quantised::Affine(4),
        Quantised::Blocks(BlockFormat::Q4_K),
        Quantised::Floats(FloatFormat::Mxfp4),
        Quantised::Blocks(BlockFormat::Q6_K),
        Quantised::Blocks(BlockFormat::MXFP4),
    ];
    let others = BlockFormat::ALL.map(Quantised::Blocks).into_iter().chain(FloatFormat::ALL.map(Quantised::Floats));
    let others = others.chain([2, 3, 5].map(Quantised::Affine)).filter(|kind| !main.contains(kind));
    main.into_iter().try_for_each(|kind| rows_of(timer, kind, &[1, 2, 4, 8, 16, 32, 64]))?;
    experts(timer)?;
    others.into_iter().try_for_each(|kind| rows_of(timer, kind, &[1, 8]))
}

/// Few rows by matrices of several shapes.
fn rows_of(timer: &Timer, kind: Quantised, all_rows: &[usize]) -> Result<()> {
    let device = &timer.device;
    for (n, k) in [(14_336, 4096), (4096, 4096), (4096, 14_336)] {
        let bytes = n * kind.row_bytes(k).iter().sum::<usize>();
        let weights = kind.matrices(device, &[n], k, copies(bytes))?;
        for &rows in all_rows.iter().filter(|rows| n > k || [1, 8].contains(*rows)) {
            let x = noise(device, DType::BF16, &[rows, k])?;
            let out = Tensor::zeros(device, DType::BF16, &[rows, n])?;
            timer.line(&format!("linear {rows} × {n} × {k}, {kind}"), bytes, weights.len(), |enc, i| {
                ops::linear(enc, &Linear::new(&x, Quantised::weight(&weights[i], kind), &out))
            })?;
        }
    }
    Ok(())
}

/// Experts of gpt-oss 20B and of Qwen 3 30B-A3B.
fn experts(timer: &Timer) -> Result<()> {
    let device = &timer.device;
    for (kind, [experts, n, k], top_k) in [
        (Quantised::Affine(4), [128, 1536, 2048], 8),
        (Quantised::Blocks(BlockFormat::Q4_K), [128, 1536, 2048], 8),
        (Quantised::Floats(FloatFormat::Mxfp4), [32, 5760, 2880], 4),
        (Quantised::Blocks(BlockFormat::MXFP4), [32, 5760, 2880], 4),
    ] {
        let of_expert = n * kind.row_bytes(k).iter().sum::<usize>();
        let weights = kind.matrices(device, &[experts, n], k, 2)?;
        for tokens in [1, 4, 16, 64, 128, 512, 2048] {
            let x = noise(device, DType::BF16, &[tokens, k])?;
            let out = Tensor::zeros(device, DType::BF16, &[tokens * top_k, n])?;
            // Other experts for every token, and in every call.
            let ids: Vec<Tensor> = (0..60)
                .map(|call| {
                    let ids: Vec<u32> = (0..tokens * top_k).map(|i| ((call * 37 + i * 11) % experts) as u32).collect();
                    Tensor::from_slice(device, &ids, &[tokens, top_k])
                })
                .collect::<Result<_>>()?;
            let bytes = of_expert * experts.min(tokens * top_k);
            let name = format!("linear {tokens} × {top_k} of {experts} experts {n} × {k}, {kind}");
            timer.line(&name, bytes, 60, |enc, i| {
                let experts = Some(Experts::new(&ids[i]));
                ops::linear(enc, &Linear::new(&x, Quantised::weight(&weights[i % 2], kind), &out).experts(experts))
            })?;
        }
    }
    Ok(())
}
