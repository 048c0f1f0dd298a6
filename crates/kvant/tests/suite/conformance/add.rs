//! add against the reference.

use super::SIZES;
use crate::common::{FLOATS, Out, Rng, bytes_of, conform, input, run};
use kvant::{
    DType, Device, Result, Tensor,
    ops::{self, Add},
};

/// Which arguments are the output.
#[derive(Clone, Copy, Debug, PartialEq)]
enum InPlace {
    None,
    X,
    Y,
    Both,
}

#[test]
fn add() {
    for (rows, dim) in SIZES {
        for x_type in FLOATS {
            for y_type in FLOATS {
                for out_type in FLOATS {
                    for in_place in pairs(x_type, y_type, out_type) {
                        let case =
                            format!("add [{rows}, {dim}] {x_type} + {y_type} -> {out_type}, in place {in_place:?}");
                        conform(&case, |device| {
                            let mut rng = Rng::of(&case);
                            let x = input(device, x_type, &rng.normals(rows * dim), &[rows, dim])?;
                            let y = input(device, y_type, &rng.normals(rows * dim), &[rows, dim])?;
                            let out = Out::new(device, out_type, &[rows, dim])?;
                            sum(&x, &y, &out.tensor, in_place)?;
                            Ok(vec![out.close("out")?])
                        });
                    }
                }
            }
        }
    }
}

/// The in-place pairs that the dtypes allow.
fn pairs(x: DType, y: DType, out: DType) -> Vec<InPlace> {
    let mut pairs = vec![InPlace::None];
    pairs.extend((x == out).then_some(InPlace::X));
    pairs.extend((y == out).then_some(InPlace::Y));
    pairs.extend((x == out && y == out).then_some(InPlace::Both));
    pairs
}

/// Runs the operation. An argument that is in place is copied to `out` first; if both are, x is.
fn sum(x: &Tensor, y: &Tensor, out: &Tensor, in_place: InPlace) -> Result<()> {
    let (x_is_out, y_is_out) =
        (matches!(in_place, InPlace::X | InPlace::Both), matches!(in_place, InPlace::Y | InPlace::Both));
    if in_place != InPlace::None {
        out.write_bytes(&bytes_of(if x_is_out { x } else { y })?)?;
    }
    let args = Add::new(if x_is_out { out } else { x }, if y_is_out { out } else { y }, out);
    run(out.device(), |enc| ops::add(enc, &args))
}

/// Views whose rows have a multiple of four elements, and begin at an odd one.
#[test]
fn odd_offsets() {
    for dtype in FLOATS {
        for (x_shift, y_shift, out_shift) in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (3, 1, 2)] {
            let case = format!("add of {dtype} at {x_shift}, {y_shift} -> {out_shift}");
            conform(&case, |device| {
                let view = |shift: usize, seed| -> Result<Tensor> {
                    let flat = input(device, dtype, &Rng::new(seed).normals(204), &[1, 204])?;
                    flat.reshape(&[204])?.rows(shift..shift + 200)?.reshape(&[5, 40])
                };
                let out = Out::new(device, dtype, &[1, 204])?;
                let part = out.tensor.reshape(&[204])?.rows(out_shift..out_shift + 200)?.reshape(&[5, 40])?;
                run(device, |enc| ops::add(enc, &Add::new(&view(x_shift, 1)?, &view(y_shift, 2)?, &part)))?;
                // The rest keeps its pattern.
                Ok(vec![out.close("out")?])
            });
        }
    }
}

/// Sums of infinities, NaN, and numbers beyond the largest of the output.
#[test]
fn beyond_finite_numbers() {
    let (inf, nan, most) = (f32::INFINITY, f32::NAN, 60000.0);
    let x = [inf, inf, -inf, nan, 1.0, nan, most, -most, -0.0, 0.0, 1.0];
    let y = [inf, -inf, 1.0, 1.0, nan, inf, most, -most, -0.0, -0.0, -1.0];
    for dtype in FLOATS {
        let sums = |device: &Device| -> Result<Vec<f32>> {
            let (x, y) = (input(device, dtype, &x, &[1, x.len()])?, input(device, dtype, &y, &[1, y.len()])?);
            let out = Out::new(device, dtype, &[1, x.elements()])?;
            run(device, |enc| ops::add(enc, &Add::new(&x, &y, &out.tensor)))?;
            out.bytes()?;
            out.tensor.to_f32()
        };
        let want = sums(&Device::reference()).unwrap();
        assert!(want[1].is_nan() && want[0] == inf && (want[6] == inf) == (dtype == DType::F16), "{want:?}");
        for device in crate::common::devices() {
            let got = sums(device).unwrap();
            let same = |(got, want): (&f32, &f32)| got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(got.iter().zip(&want).all(same), "{device}, {dtype}: {got:?}, not {want:?}");
        }
    }
}
