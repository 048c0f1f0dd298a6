//! rms_norm against the reference.

use super::SIZES;
use crate::common::{Bound, FLOATS, Out, Output, Rng, conform, encode, input, run, subnormals_are_zero};
use kvant::{
    DType, Device, Result, Tensor,
    ops::{self, NextNorm, Residual, RmsNorm},
};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Add {
    None,
    After,
    Normed,
    Before,
}

#[test]
fn rms_norm() {
    let mut rng = Rng::of("rms_norm");
    for size in SIZES {
        for add in [Add::None, Add::After, Add::Normed, Add::Before] {
            for x in FLOATS {
                for out in FLOATS {
                    let weight = rng.pick(&[None, Some(DType::F32), Some(DType::F16), Some(DType::BF16)]);
                    let (other, sum, scale) = (rng.pick(&FLOATS), rng.pick(&FLOATS), rng.pick(&[1.0, 1.0, 0.73]));
                    let eps = [rng.pick(&[1e-6, 1e-5]), rng.pick(&[1e-6, 0.5])];
                    let (next, terms) = (rng.below(4), rng.pick(&[None, None, Some(1), Some(3), Some(9)]));
                    let (gate, in_place) = (rng.pick(&[None, None, Some(x), Some(out)]), None);
                    norm_case(&Norm { size, terms, add, x, out, weight, other, gate, sum, scale, eps, next, in_place });
                }
            }
        }
    }
}

/// Each output may be `x` or the residual.
#[test]
fn rms_norm_in_place() {
    for dtype in FLOATS {
        for add in [Add::None, Add::After, Add::Normed, Add::Before] {
            let overs =
                [Over::OutIsX, Over::OutIsResidual, Over::OutIsGate, Over::SumIsX, Over::SumIsResidual, Over::Swapped];
            for over in overs {
                let needs = match over {
                    Over::OutIsX | Over::OutIsGate => true,
                    Over::OutIsResidual => add != Add::None,
                    _ => add == Add::Before,
                };
                if needs {
                    let (x, out, other, sum, weight) = (dtype, dtype, dtype, dtype, Some(dtype));
                    let size = (9, 131);
                    let in_place = Some(over);
                    let (scale, eps, next) = (1.5, [1e-6; 2], 2);
                    let (terms, gate) = (None, matches!(over, Over::OutIsGate).then_some(dtype));
                    norm_case(&Norm { size, terms, add, x, out, weight, other, gate, sum, scale, eps, next, in_place });
                }
            }
        }
    }
}

/// Rows whose squares overflow or underflow f32: rows of a SIMD-group, of a block, and longer than a block's registers.
#[test]
fn rms_norm_of_extreme_rows() {
    let subnormal = if subnormals_are_zero() { &[][..] } else { &[(3e-38, 0.0), (1e-30, 1e-38)] };
    let normal = [(1e20f32, 1e-6f32), (3e38, 0.0), (1e-21, 0.0), (1e-33, 0.0), (1e-30, 2e-38), (1e-25, 1e-6)];
    for &(size, eps) in normal.iter().chain(subnormal) {
        for (dim, before) in [(1, false), (63, false), (64, true), (1028, false), (1027, true), (17_000, false)] {
            conform(format!("rms_norm of {dim} of {size:e}, eps {eps:e}, a residual before: {before}"), |device| {
                let values = Rng::new(dim as u64).normals(2 * dim);
                let values: Vec<f32> = values.iter().map(|x| x.clamp(-1.0, 1.0) * size).collect();
                let x = input(device, DType::F32, &values, &[2, dim])?;
                // The residual cancels half of x.
                let half: Vec<f32> = values.iter().map(|x| -0.5 * x).collect();
                let residual = input(device, DType::F32, &half, &[2, dim])?;
                let (sum, out) = (Out::new(device, DType::F32, &[2, dim])?, Out::new(device, DType::F32, &[2, dim])?);
                let added = Residual::Before { residual: &residual, sum: &sum.tensor };
                let residual = if before { added } else { Residual::None };
                let args = RmsNorm::new(&x, eps, &out.tensor).residual(residual);
                run(device, |enc| ops::rms_norm(enc, &args))?;
                Ok(vec![out.close("out")?])
            });
        }
    }
}

/// As above, for the norm of the residual and for a norm of the result.
#[test]
fn rms_norm_of_an_extreme_residual_and_result() {
    for (size, dim) in [1e20f32, 1e-21].into_iter().flat_map(|size| [1, 64, 1028, 1027, 17_000].map(|dim| (size, dim)))
    {
        conform(format!("rms_norm with {dim} of {size:e} for the residual, and a next norm"), |device| {
            let values = Rng::new(dim as u64).normals(2 * dim);
            let values: Vec<f32> = values.iter().map(|x| x.clamp(-1.0, 1.0)).collect();
            let x = input(device, DType::F32, &values, &[2, dim])?;
            let extreme: Vec<f32> = values.iter().rev().map(|x| x * size).collect();
            let residual = input(device, DType::F32, &extreme, &[2, dim])?;
            let (out, next) = (Out::new(device, DType::F32, &[2, dim])?, Out::new(device, DType::F32, &[2, dim])?);
            let (residual, nexts) =
                (Residual::Normed { residual: &residual, weight: None }, [NextNorm::new(&next.tensor)]);
            let args = RmsNorm::new(&x, 0.0, &out.tensor).residual(residual).scale(size).next(&nexts);
            run(device, |enc| ops::rms_norm(enc, &args))?;
            Ok(vec![out.close("out")?, next.close_within("next", Bound::of(DType::F32).times(2.0))?])
        });
    }
}

/// A sum of no rows is zero; rows longer than the registers are summed, too.
#[test]
fn rms_norm_of_sums() {
    for (rows, terms, dim) in [(2, 0, 70), (3, 8, 17_000), (2, 5, 1027), (1, 8, 2816)] {
        conform(format!("rms_norm of sums of {terms} rows of {dim}"), |device| {
            let mut rng = Rng::new(dim as u64);
            let x = input(device, DType::BF16, &rng.normals(rows * terms * dim), &[rows * terms, dim])?;
            let combine = input(device, DType::F32, &rng.normals(rows * terms), &[rows, terms])?;
            let residual = input(device, DType::F32, &rng.normals(rows * dim), &[rows, dim])?;
            let (out, next) =
                (Out::new(device, DType::F32, &[rows, dim])?, Out::new(device, DType::F32, &[rows, dim])?);
            let (residual, nexts) =
                (Residual::Normed { residual: &residual, weight: None }, [NextNorm::new(&next.tensor)]);
            let args = RmsNorm::new(&x, 1e-6, &out.tensor).combine(Some(&combine)).residual(residual).next(&nexts);
            run(device, |enc| ops::rms_norm(enc, &args))?;
            Ok(vec![out.close("out")?, next.close_within("next", Bound::of(DType::F32).times(2.0))?])
        });
    }
}

/// The only large element of a row is its last, so that each thread must search all its elements for the largest.
#[test]
fn rms_norm_of_one_extreme_element() {
    for dim in [1028, 17_000] {
        conform(format!("rms_norm of {dim}, the last of 3e38"), |device| {
            let mut values = Rng::new(dim as u64).normals(dim);
            values[dim - 1] = 3e38;
            let x = input(device, DType::F32, &values, &[1, dim])?;
            let out = Out::new(device, DType::F32, &[1, dim])?;
            let (residual, scale) = (Residual::None, 1.0);
            let args = RmsNorm::new(&x, 0.0, &out.tensor).residual(residual).scale(scale);
            run(device, |enc| ops::rms_norm(enc, &args))?;
            Ok(vec![out.close("out")?])
        });
    }
}

/// The SiLU of a gate multiplies rows of heads and of whole layers; large gates among them.
#[test]
fn rms_norm_with_a_gate() {
    for (rows, dim) in [(96, 128), (5, 64), (3, 17), (2, 1028), (1, 17_000)] {
        for dtype in FLOATS {
            conform(format!("rms_norm of {rows} rows of {dim} {dtype} with a gate"), |device| {
                let mut rng = Rng::new(dim as u64);
                let x = input(device, dtype, &rng.normals(rows * dim), &[rows, dim])?;
                let mut gates: Vec<f32> = rng.normals(rows * dim).iter().map(|x| x * 5.0).collect();
                gates[..4].copy_from_slice(&[-200.0, 200.0, -1e4, 0.0]);
                let gate = input(device, dtype, &gates, &[rows, dim])?;
                let weight = input(device, dtype, &rng.normals(dim), &[dim])?;
                let out = Out::new(device, dtype, &[rows, dim])?;
                let args = RmsNorm::new(&x, 1e-6, &out.tensor).weight(Some(&weight)).gate(Some(&gate));
                run(device, |enc| ops::rms_norm(enc, &args))?;
                Ok(vec![out.close_within("out", Bound::of(dtype).times(8.0))?])
            });
        }
    }
}

/// A row with NaN, or without a norm (eps 0), does not affect other rows.
#[test]
fn rms_norm_of_rows_that_are_not_finite() {
    for (dim, before) in [1usize, 3, 17, 65, 1028, 1027].into_iter().flat_map(|dim| [(dim, false), (dim, true)]) {
        conform(format!("rms_norm of {dim} that are not finite, a residual before: {before}"), |device| {
            let mut rows: Vec<Vec<f32>> = (0..9).map(|i| Rng::new(i).normals(dim)).collect();
            rows[0][dim - 1] = f32::NAN;
            rows[2].fill(0.0);
            rows[4][dim / 2] = f32::INFINITY;
            rows[6].fill(0.0);
            let x = input(device, DType::F32, &rows.concat(), &[9, dim])?;
            let residual = input(device, DType::F32, &vec![0.0; 9 * dim], &[9, dim])?;
            let (sum, out) = (Out::new(device, DType::F32, &[9, dim])?, Out::new(device, DType::F32, &[9, dim])?);
            let added = Residual::Before { residual: &residual, sum: &sum.tensor };
            let residual = if before { added } else { Residual::None };
            let args = RmsNorm::new(&x, 0.0, &out.tensor).residual(residual);
            run(device, |enc| ops::rms_norm(enc, &args))?;
            let all = out.tensor.to_f32()?;
            let row =
                |(r, row): (usize, &[f32])| Output::Close(format!("row {r}"), row.to_vec(), Bound::of(DType::F32));
            Ok(all.chunks(dim).enumerate().map(row).collect())
        });
    }
}

#[derive(Clone, Copy, Debug)]
enum Over {
    OutIsX,
    OutIsResidual,
    OutIsGate,
    SumIsX,
    SumIsResidual,
    /// The sum overwrites the residual, and the result overwrites x.
    Swapped,
}

#[derive(Debug)]
struct Norm {
    size: (usize, usize),
    /// Rows of x that are summed into one.
    terms: Option<usize>,
    add: Add,
    x: DType,
    out: DType,
    weight: Option<DType>,
    other: DType,
    gate: Option<DType>,
    sum: DType,
    scale: f32,
    /// The eps of the norm, and that of the norms of out.
    eps: [f32; 2],
    /// Norms of out.
    next: usize,
    in_place: Option<Over>,
}

fn norm_case(case: &Norm) {
    conform(format!("rms_norm {case:?}"), |device| {
        let mut rng = Rng::of(format!("{case:?}"));
        let (rows, dim) = case.size;
        let shape = [rows, dim];
        let upload = |rng: &mut Rng, dtype, terms| -> Result<Out> {
            let shape = [rows * terms, dim];
            let values: Vec<f32> = rng.normals(rows * terms * dim).iter().map(|x| x * 3.0).collect();
            let t = Out::new(device, dtype, &shape)?;
            t.tensor.write_bytes(&encode(dtype, &values))?;
            Ok(t)
        };
        let (x, residual) = (upload(&mut rng, case.x, case.terms.unwrap_or(1))?, upload(&mut rng, case.other, 1)?);
        let gate = upload(&mut rng, case.gate.unwrap_or(DType::F32), 1)?;
        let combine = case
            .terms
            .map(|terms| input(device, DType::F32, &rng.normals(rows * terms), &[rows, terms]))
            .transpose()?;
        let of_dtype = |rng: &mut Rng, dtype: Option<DType>| {
            dtype.map(|dtype| input(device, dtype, &rng.normals(dim), &[dim])).transpose()
        };
        let weight = of_dtype(&mut rng, case.weight)?;
        let mut any_weight = |dtypes: &[Option<DType>]| {
            let dtype = rng.pick(dtypes);
            of_dtype(&mut rng, dtype)
        };
        let some = FLOATS.map(Some);
        // With a weight, the norms of single elements, 1 and -1, do not cancel.
        let other_weight = any_weight(&some)?;
        let next_weights =
            (0..case.next).map(|_| any_weight(&[None, some[0], some[1], some[2]])).collect::<Result<Vec<_>>>()?;
        let next_outs = (0..case.next).map(|i| Out::new(device, FLOATS[i], &shape)).collect::<Result<Vec<_>>>()?;
        let next_scales = [1.0, 0.73, -2.0];
        let next: Vec<NextNorm> = (0..case.next)
            .map(|i| NextNorm::new(&next_outs[i].tensor).weight(next_weights[i].as_ref()).scale(next_scales[i]))
            .collect();
        let (out, sum) = (Out::new(device, case.out, &shape)?, Out::new(device, case.sum, &shape)?);
        let (out, sum) = match case.in_place {
            None => (&out, &sum),
            Some(Over::OutIsX) => (&x, &sum),
            Some(Over::OutIsResidual) => (&residual, &sum),
            Some(Over::OutIsGate) => (&gate, &sum),
            Some(Over::SumIsX) => (&out, &x),
            Some(Over::SumIsResidual) => (&out, &residual),
            Some(Over::Swapped) => (&x, &residual),
        };
        let args = RmsNorm::new(&x.tensor, case.eps[0], &out.tensor)
            .combine(combine.as_ref())
            .weight(weight.as_ref())
            .residual(match case.add {
                Add::None => Residual::None,
                Add::After => Residual::After(&residual.tensor),
                Add::Normed => Residual::Normed { residual: &residual.tensor, weight: other_weight.as_ref() },
                Add::Before => Residual::Before { residual: &residual.tensor, sum: &sum.tensor },
            })
            .scale(case.scale)
            .gate(case.gate.map(|_| &gate.tensor))
            .next(&next)
            .next_eps(case.eps[1]);
        run(device, |enc| ops::rms_norm(enc, &args))?;
        // The gain of a gate.
        let gain = if case.gate.is_some() { 8.0 } else { 1.0 };
        let mut outputs = vec![out.close_within("out", Bound::of(case.out).times(gain))?];
        for (i, next) in next_outs.iter().enumerate() {
            // An element of `out` at a tie may be rounded the other way.
            let bound = Bound::of(next.tensor.dtype());
            let bound = Bound { unit: bound.unit.max(Bound::of(case.out).unit), ..bound };
            outputs.push(next.close_within(&format!("next {i}"), bound.times(2.0 * gain))?);
            let weight = next_weights[i].as_ref();
            separate(device, case, &out.tensor, weight, next_scales[i], &next.tensor)?;
        }
        if case.add == Add::Before {
            outputs.push(sum.close("sum")?);
        }
        Ok(outputs)
    });
}

/// A next norm equals a separate norm of the stored `out`, except for f32 rounding.
fn separate(
    device: &Device,
    case: &Norm,
    x: &Tensor,
    weight: Option<&Tensor>,
    scale: f32,
    next: &Tensor,
) -> Result<()> {
    let out = Out::new(device, next.dtype(), next.shape())?;
    let args = RmsNorm::new(x, case.eps[1], &out.tensor).weight(weight).scale(scale);
    run(device, |enc| ops::rms_norm(enc, &args))?;
    let (got, want) = (next.to_f32()?, out.tensor.to_f32()?);
    let bound = 2.0 * Bound::of(next.dtype()).unit as f32 + 1e-6;
    let is_close = |(got, want): (&f32, &f32)| (got - want).abs() <= bound * want.abs();
    assert!(got.iter().zip(&want).all(is_close), "{case:?} on {device}: a next norm differs from a separate one");
    Ok(())
}
