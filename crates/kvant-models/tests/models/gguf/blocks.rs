//! Every block format against `golden/gguf/blocks.gguf` (`tools/golden_gguf.py`).

use kvant::{DType, Device, Tensor, ops};
use kvant_models::gguf::{AffineTensors, Gguf, GgufType, dequantise};

use crate::common::golden;

const EXACT: [&str; 3] = ["F32", "F16", "BF16"];
const BLOCKS: [&str; 10] = ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"];
/// Name, bits, and the zero point if the bias is scale · zero.
const AFFINE: [(&str, u32, f32); 3] = [("Q4_0", 4, 8.0), ("Q4_1", 4, 0.0), ("Q8_0", 8, 128.0)];

fn open() -> Gguf {
    Gguf::open(&golden("gguf").join("blocks.gguf")).unwrap()
}

/// The values computed by `gguf` for the tensor with realistic scales and for the one with random bytes.
fn expected(gguf: &Gguf, kind: &str) -> [Vec<f32>; 2] {
    let values = gguf.read(&format!("{kind}.values"), &Device::cpu()).unwrap().to_f32().unwrap();
    let (usual, any) = values.split_at(values.len() / 2);
    [usual.to_vec(), any.to_vec()]
}

/// The package rounds each product and sum; K-quants then lose digits if a minimum nearly cancels a product.
fn close(kind: &str, a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let exact = !BLOCKS.contains(&kind);
    for (block, (a, b)) in a.chunks(256).zip(b.chunks(256)).enumerate() {
        let max = b.iter().fold(0f32, |max, x| max.max(x.abs()));
        let bound = if exact { 0.0 } else { max * 1e-6 };
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            let same = a.to_bits() == b.to_bits() || (a - b).abs() <= bound;
            assert!(same, "{what}: element {i} of block {block} is {a}, expected {b}");
        }
    }
}

#[test]
fn every_type_is_decoded() {
    let gguf = open();
    let kinds: Vec<_> = EXACT.into_iter().chain(BLOCKS).chain(AFFINE.map(|row| row.0)).collect();
    for kind in &kinds {
        for (name, expected) in [kind.to_string(), format!("{kind}.any")].iter().zip(expected(&gguf, kind)) {
            assert_eq!(gguf.tensor(name).unwrap().kind.to_string(), *kind);
            close(kind, &gguf.read(name, &Device::cpu()).unwrap().to_f32().unwrap(), &expected, name);
        }
    }
    // All tensors of the file are checked.
    for (name, tensor) in gguf.tensors() {
        assert!(name.ends_with(".values") || kinds.contains(&tensor.kind.to_string().as_str()), "{name}");
        assert!(tensor.kind.is_supported());
    }
}

/// scale · code + bias in f32, with codes read as the operations' contract specifies: a bit stream in each row.
fn values(matrix: &AffineTensors) -> Vec<f32> {
    let words = matrix.codes.to_vec::<u32>().unwrap();
    let [scales, biases] = [&matrix.scales, &matrix.biases].map(|tensor| tensor.to_f32().unwrap());
    let bits = matrix.bits as usize;
    let code = |i: usize| {
        let (word, shift) = (i * bits / 32, i * bits % 32);
        let next = words.get(word + 1).copied().unwrap_or(0);
        let both = u64::from(words[word]) | u64::from(next) << 32;
        (both >> shift & ((1 << bits) - 1)) as f32
    };
    (0..words.len() * 32 / bits).map(|i| scales[i / matrix.group] * code(i) + biases[i / matrix.group]).collect()
}

#[test]
fn affine_matrices_have_the_values_of_the_blocks() {
    let gguf = open();
    let mut overflows = 0;
    for (kind, bits, zero) in AFFINE {
        for (name, expected) in [kind.to_string(), format!("{kind}.any")].iter().zip(expected(&gguf, kind)) {
            let matrix = gguf.read_affine(name, &Device::cpu()).unwrap();
            assert_eq!((matrix.bits, matrix.group), (bits, 32), "{name}");
            // The bias is scale · zero, which overflows f16 if random bytes give a large scale.
            let scales = matrix.scales.to_f32().unwrap();
            let max = scales.iter().fold(0f32, |max, scale| max.max(scale.abs())) * zero;
            let dtype = if max > 65504.0 { DType::F32 } else { DType::F16 };
            overflows += usize::from(max > 65504.0);
            assert_eq!((matrix.scales.dtype(), matrix.biases.dtype()), (dtype, dtype), "{name}");
            for (i, (got, expected)) in values(&matrix).iter().zip(&expected).enumerate() {
                // Numerically equal: zeros may differ in sign.
                assert!(got == expected, "{name}: element {i} is {got}, expected {expected}");
            }
        }
    }
    assert!(overflows > 0, "no case has scales in f32 for want of range");
}

/// kvant defines the contract of codes itself: the reference device must multiply with equal values.
#[test]
fn operations_read_affine_matrices() {
    let (gguf, device) = (open(), Device::reference());
    for (kind, ..) in AFFINE {
        let matrix = gguf.read_affine(kind, &device).unwrap();
        let inputs = matrix.scales.shape()[1] * matrix.group;
        let rows = matrix.scales.shape()[0];
        let mut unit = vec![0f32; inputs * inputs];
        (0..inputs).for_each(|i| unit[i * inputs + i] = 1.0);
        let x = Tensor::from_slice(&device, &unit, &[inputs, inputs]).unwrap();
        let out = Tensor::zeros(&device, DType::F32, &[inputs, rows]).unwrap();
        let mut enc = device.encoder().unwrap();
        let weight = ops::Weight::Affine(ops::Affine {
            codes: &matrix.codes,
            scales: &matrix.scales,
            biases: &matrix.biases,
            bits: matrix.bits,
            group: matrix.group,
        });
        ops::linear(&mut enc, &ops::Linear::new(&x, weight, &out)).unwrap();
        enc.commit().unwrap().wait().unwrap();
        let (got, expected) = (out.to_f32().unwrap(), expected(&gguf, kind)[0].clone());
        for row in 0..rows {
            for i in 0..inputs {
                assert!(got[i * rows + row] == expected[row * inputs + i], "{kind}: row {row}, input {i}");
            }
        }
    }
}

#[test]
fn sizes_that_do_not_match_are_refused() {
    let mut out = [7f32; 64];
    assert!(!dequantise(GgufType::Q4_0, &[0; 18], &mut out));
    assert!(!dequantise(GgufType::Q4_0, &[0; 35], &mut out));
    assert!(!dequantise(GgufType::IQ2_XXS, &[0; 66], &mut [0.0; 256]));
    assert_eq!(out, [7.0; 64]);
    assert!(dequantise(GgufType::Q4_0, &[0; 36], &mut out));
    let gguf = open();
    for kind in EXACT.into_iter().chain(BLOCKS) {
        assert!(!Gguf::is_affine(gguf.tensor(kind).unwrap().kind));
        assert!(gguf.read_affine(kind, &Device::cpu()).unwrap_err().to_string().contains("affine codes"));
    }
}
