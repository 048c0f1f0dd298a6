//! Matrix products with dense and with affine weights.

use kvant::{
    DType, Result, Tensor,
    ops::{self, Affine, Linear, Weight},
};

use crate::timer::{Timer, copies, noise, random_bits};

pub fn products(timer: &Timer) -> Result<()> {
    timer.head();
    let device = &timer.device;
    for (n, k) in [(4096, 4096), (14336, 4096), (4096, 14336), (2048, 1152)] {
        for bits in [0usize, 4, 6, 8] {
            let bytes = if bits == 0 { n * k * 2 } else { n * k * bits / 8 + n * k / 64 * 4 };
            let copies = copies(bytes);
            let values = random_bits(if bits == 0 { n * k * 2 } else { n * k * bits / 8 });
            let scales = random_bits(n * k / 64 * 2);
            let weights: Vec<[Tensor; 3]> = (0..copies)
                .map(|_| {
                    let scales = || Tensor::from_bytes(device, DType::BF16, &[n, k / 64], &scales);
                    let codes = if bits == 0 {
                        Tensor::from_bytes(device, DType::BF16, &[n, k], &values)?
                    } else {
                        Tensor::from_bytes(device, DType::U32, &[n, k * bits / 32], &values)?
                    };
                    Ok([codes, scales()?, scales()?])
                })
                .collect::<Result<_>>()?;
            for rows in [1, 4, 8, 1024] {
                if rows >= 8 && (n, k) != (4096, 4096) {
                    continue;
                }
                let x = noise(device, DType::BF16, &[rows, k])?;
                let out = Tensor::zeros(device, DType::BF16, &[rows, n])?;
                let kind = if bits == 0 { "bf16".to_string() } else { format!("{bits} bit") };
                timer.line(&format!("linear {rows} × {n} × {k}, {kind}"), bytes, copies, |enc, i| {
                    let [codes, scales, biases] = &weights[i];
                    let weight = if bits == 0 {
                        Weight::Dense(codes)
                    } else {
                        Weight::Affine(Affine { codes, scales, biases, bits: bits as u32, group: 64 })
                    };
                    ops::linear(enc, &Linear::new(&x, weight, &out))
                })?;
            }
        }
    }
    Ok(())
}

/// Many rows, in cases that cuBLASLt does not compute: f32 results, and activations of three dtypes.
pub fn many_rows(timer: &Timer) -> Result<()> {
    timer.head();
    let device = &timer.device;
    let (n, k) = (4096, 4096);
    for (bits, group) in [(0, 64), (4, 64), (6, 64), (8, 64), (4, 32), (6, 32), (8, 32), (3, 64), (5, 32)] {
        let values = random_bits(n * k * bits / 8);
        let scales = noise(device, DType::BF16, &[n, k / group])?;
        let codes = if bits == 0 {
            noise(device, DType::BF16, &[n, k])?
        } else {
            Tensor::from_bytes(device, DType::U32, &[n, k * bits / 32], &values)?
        };
        let affine = Affine { codes: &codes, scales: &scales, biases: &scales, bits: bits as u32, group };
        let weight = if bits == 0 { Weight::Dense(&codes) } else { Weight::Affine(affine) };
        let of_group = if group == 64 { String::new() } else { format!(" in groups of {group}") };
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            if bits == 0 && dtype == DType::BF16 {
                continue;
            }
            for rows in [64, 128, 512, 1024, 4096] {
                let x = noise(device, dtype, &[rows, k])?;
                let out = Tensor::zeros(device, DType::F32, &[rows, n])?;
                let name = format!("linear {rows} × {n} × {k}, {dtype}, {bits} bit{of_group}");
                timer.line(&name, codes.bytes(), 1, |enc, _| ops::linear(enc, &Linear::new(&x, weight, &out)))?;
            }
        }
    }
    Ok(())
}

/// Few rows by dense weights. Gemma 4 E4B: gate and up, down, q, k and v, the attention's output, the two products of
/// the per-layer input, logits. Llama 3 8B: gate and up, down, the attention's output. Qwen 2.5 0.5B: gate and up,
/// down.
pub fn dense_batches(timer: &Timer) -> Result<()> {
    timer.head();
    let device = &timer.device;
    for (widths, k, out) in [
        (vec![10_240, 10_240], 2560, DType::BF16),
        (vec![2560], 10_240, DType::BF16),
        (vec![2048, 512, 512], 2560, DType::BF16),
        (vec![2560], 2048, DType::BF16),
        (vec![256], 2560, DType::BF16),
        (vec![2560], 256, DType::BF16),
        (vec![262_144], 2560, DType::F32),
        (vec![28_672], 4096, DType::BF16),
        (vec![4096], 14_336, DType::BF16),
        (vec![4096], 4096, DType::BF16),
        (vec![9728], 896, DType::BF16),
        (vec![896], 4864, DType::BF16),
    ] {
        let n: usize = widths.iter().sum();
        let bytes = n * k * 2;
        let values = random_bits(bytes);
        let weights = (0..copies(bytes)).map(|_| Tensor::from_bytes(device, DType::BF16, &[n, k], &values));
        let weights: Vec<Tensor> = weights.collect::<Result<_>>()?;
        for rows in [1, 2, 8, 9, 16, 17, 32, 33] {
            let x = noise(device, DType::BF16, &[rows, k])?;
            let out = Tensor::zeros(device, out, &[rows, n])?;
            timer.line(&format!("linear {rows} × {widths:?} × {k}, bf16"), bytes, weights.len(), |enc, i| {
                let args = Linear::new(&x, Weight::Dense(&weights[i]), &out);
                ops::linear(enc, &if widths.len() > 1 { args.parts(&widths) } else { args })
            })?;
        }
    }
    Ok(())
}
