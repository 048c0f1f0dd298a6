//! hadamard against the reference, and the properties of a rotation.

use crate::common::{Bound, FLOATS, Out, Rng, conform, devices, input, nmse, run};
use kvant::{
    DType, Device, Result,
    ops::{self, Hadamard},
};

fn shapes(dim: usize) -> [Vec<usize>; 4] {
    [vec![dim], vec![3, dim], vec![2, 3, dim], vec![0, dim]]
}

/// The rotation of a tensor; a tensor of rank 1 is treated as one row.
fn rotate(device: &Device, x: DType, out: DType, shape: &[usize], inverse: bool) -> Result<Vec<crate::common::Output>> {
    let (rank_2, flat) = if shape.len() == 1 { (vec![1, shape[0]], true) } else { (shape.to_vec(), false) };
    let values = Rng::of(format!("{shape:?}")).normals(shape.iter().product());
    let x = input(device, x, &values, &rank_2)?;
    let y = Out::new(device, out, &rank_2)?;
    let view = |t: &kvant::Tensor| if flat { t.reshape(shape) } else { Ok(t.clone()) };
    let (from, to) = (view(&x)?, view(&y.tensor)?);
    run(device, |enc| ops::hadamard(enc, &Hadamard::new(&from, &to).inverse(inverse)))?;
    Ok(vec![y.close("out")?])
}

#[test]
fn every_size_and_dtype() {
    for dim in (1..=12).map(|log| 1usize << log) {
        for shape in shapes(dim) {
            for inverse in [false, true] {
                for (x, out) in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| (a, b))) {
                    conform(format!("hadamard {shape:?}, {x} -> {out}, inverse {inverse}"), |device| {
                        rotate(device, x, out, &shape, inverse)
                    });
                }
            }
        }
    }
}

#[test]
fn in_place_and_back() {
    for dim in [2, 8, 64, 128, 256, 512, 2048, 4096] {
        let values = Rng::new(dim as u64).normals(5 * dim);
        for device in devices() {
            let x = Out::new(device, DType::F32, &[5, dim]).unwrap();
            x.tensor.write(&values).unwrap();
            run(device, |enc| ops::hadamard(enc, &Hadamard::new(&x.tensor, &x.tensor))).unwrap();
            let turned = x.tensor.to_f32().unwrap();
            let length = |v: &[f32]| v.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            for (before, after) in values.chunks(dim).zip(turned.chunks(dim)) {
                let ratio = length(after) / length(before);
                assert!((ratio - 1.0).abs() < 1e-6, "{device}: D {dim}: lengths are kept, not times {ratio}");
            }
            assert!(nmse(&turned, &values) > 0.1, "{device}: D {dim}: it turns");
            run(device, |enc| ops::hadamard(enc, &Hadamard::new(&x.tensor, &x.tensor).inverse(true))).unwrap();
            x.bytes().unwrap();
            crate::common::assert_close(
                format!("{device}: D {dim}"),
                &x.tensor.to_f32().unwrap(),
                &values,
                Bound::of(DType::F32),
            );
        }
    }
}

/// Intermediate sums overflow f32, although the result does not.
#[test]
fn large_numbers() {
    for (dim, x) in [(64, 1e37f32), (1024, 5e36), (4096, 1e36)] {
        for inverse in [false, true] {
            conform(format!("hadamard of {dim} times {x:e}, inverse {inverse}"), |device| {
                let x = input(device, DType::F32, &vec![x; dim], &[1, dim])?;
                let y = Out::new(device, DType::F32, &[1, dim])?;
                run(device, |enc| ops::hadamard(enc, &Hadamard::new(&x, &y.tensor).inverse(inverse)))?;
                Ok(vec![y.close("out")?])
            });
        }
    }
}

/// One-hot vectors: each column of the matrix has entries ±1/√D with Sylvester's signs, times the coordinate's fixed
/// sign.
#[test]
fn the_matrix_is_sylvesters() {
    let dim = 64;
    let identity: Vec<f32> = (0..dim * dim).map(|i| f32::from(u8::from(i % dim == i / dim))).collect();
    for device in devices() {
        let x = input(device, DType::F32, &identity, &[dim, dim]).unwrap();
        let y = Out::new(device, DType::F32, &[dim, dim]).unwrap();
        run(device, |enc| ops::hadamard(enc, &Hadamard::new(&x, &y.tensor))).unwrap();
        let y = y.tensor.to_f32().unwrap();
        for (j, row) in y.chunks(dim).enumerate() {
            // Row 0 of the matrix is all ones, so its entry is the sign.
            let sign = row[0].signum();
            for (i, &value) in row.iter().enumerate() {
                let sylvester = if (i & j).count_ones() % 2 == 0 { 1.0 } else { -1.0 };
                let want = sign * sylvester / (dim as f32).sqrt();
                assert!((value - want).abs() < 1e-6, "{device}: ({i}, {j}) is {value}, not {want}");
            }
        }
    }
}
