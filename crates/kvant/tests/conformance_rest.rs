//! rms_norm, gate, softcap, argmax, sample, moe_route and moe_combine against the reference.

mod common;

use common::{Bound, FLOATS, Out, Output, Rng, conform, devices, indices, input, run};
use kvant::{
    DType, Device, Result, Tensor,
    ops::{self, Activation, Argmax, Columns, Gate, MoeCombine, MoeRoute, Residual, RmsNorm, Sample, Softcap},
};

/// Rows and columns: none, one, no multiple of a vector, more than a block of threads.
const SIZES: [(usize, usize); 8] = [(0, 5), (1, 1), (1, 256), (3, 7), (5, 65), (2, 1023), (2, 1028), (33, 64)];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Add {
    None,
    After,
    Before,
}

#[test]
fn rms_norm() {
    let mut rng = Rng::of("rms_norm");
    for size in SIZES {
        for add in [Add::None, Add::After, Add::Before] {
            for x in FLOATS {
                for out in FLOATS {
                    let weight = rng.pick(&[None, Some(DType::F32), Some(DType::F16), Some(DType::BF16)]);
                    let (other, sum, scale) = (rng.pick(&FLOATS), rng.pick(&FLOATS), rng.pick(&[1.0, 1.0, 0.73]));
                    let eps = rng.pick(&[1e-6, 1e-5]);
                    norm_case(&Norm { size, add, x, out, weight, other, sum, scale, eps, in_place: None });
                }
            }
        }
    }
}

/// Each output may be `x` or the residual.
#[test]
fn rms_norm_in_place() {
    for dtype in FLOATS {
        for add in [Add::None, Add::After, Add::Before] {
            for over in [Over::OutIsX, Over::OutIsResidual, Over::SumIsX, Over::SumIsResidual, Over::Swapped] {
                let needs = match over {
                    Over::OutIsX => true,
                    Over::OutIsResidual => add != Add::None,
                    _ => add == Add::Before,
                };
                if needs {
                    let (x, out, other, sum, weight) = (dtype, dtype, dtype, dtype, Some(dtype));
                    let size = (9, 131);
                    let in_place = Some(over);
                    norm_case(&Norm { size, add, x, out, weight, other, sum, scale: 1.5, eps: 1e-6, in_place });
                }
            }
        }
    }
}

/// Rows whose squares f32 cannot hold, or only as zero: rows of a SIMD-group, of a block, and longer than its registers.
#[test]
fn rms_norm_of_extreme_rows() {
    // Apple's GPUs take numbers below 1.2e-38 for zero.
    let subnormal = if cfg!(target_os = "macos") { &[][..] } else { &[(3e-38, 0.0), (1e-30, 1e-38)] };
    let normal = [(1e20f32, 1e-6f32), (3e38, 0.0), (1e-21, 0.0), (1e-33, 0.0), (1e-30, 2e-38), (1e-25, 1e-6)];
    for &(size, eps) in normal.iter().chain(subnormal) {
        for (dim, before) in [(1, false), (63, false), (64, true), (1028, false), (1027, true), (17_000, false)] {
            conform(format!("rms_norm of {dim} of {size:e}, eps {eps:e}, a residual before: {before}"), |device| {
                let values = Rng::new(dim as u64).normals(2 * dim);
                let values: Vec<f32> = values.iter().map(|x| x.clamp(-1.0, 1.0) * size).collect();
                let x = input(device, DType::F32, &values, &[2, dim])?;
                // It does away with half of what it is added to.
                let half: Vec<f32> = values.iter().map(|x| -0.5 * x).collect();
                let residual = input(device, DType::F32, &half, &[2, dim])?;
                let (sum, out) = (Out::new(device, DType::F32, &[2, dim])?, Out::new(device, DType::F32, &[2, dim])?);
                let added = Residual::Before { residual: &residual, sum: &sum.tensor };
                let residual = if before { added } else { Residual::None };
                let args = RmsNorm { x: &x, weight: None, eps, residual, scale: 1.0, out: &out.tensor };
                run(device, |enc| ops::rms_norm(enc, &args))?;
                Ok(vec![out.close("out")?])
            });
        }
    }
}

/// What is no number, or has no norm (eps 0), stays in its row.
#[test]
fn rms_norm_of_what_is_not_finite() {
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
            let args = RmsNorm { x: &x, weight: None, eps: 0.0, residual, scale: 1.0, out: &out.tensor };
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
    SumIsX,
    SumIsResidual,
    /// The sum goes over the residual and the result over x.
    Swapped,
}

#[derive(Debug)]
struct Norm {
    size: (usize, usize),
    add: Add,
    x: DType,
    out: DType,
    weight: Option<DType>,
    other: DType,
    sum: DType,
    scale: f32,
    eps: f32,
    in_place: Option<Over>,
}

fn norm_case(case: &Norm) {
    conform(format!("rms_norm {case:?}"), |device| {
        let mut rng = Rng::of(format!("{case:?}"));
        let (rows, dim) = case.size;
        let shape = [rows, dim];
        let upload = |rng: &mut Rng, dtype| -> Result<Out> {
            let values: Vec<f32> = rng.normals(rows * dim).iter().map(|x| x * 3.0).collect();
            let t = Out::new(device, dtype, &shape)?;
            t.tensor.write_bytes(&common::encode(dtype, &values))?;
            Ok(t)
        };
        let (x, residual) = (upload(&mut rng, case.x)?, upload(&mut rng, case.other)?);
        let weight = match case.weight {
            Some(dtype) => Some(input(device, dtype, &rng.normals(dim), &[dim])?),
            None => None,
        };
        let (out, sum) = (Out::new(device, case.out, &shape)?, Out::new(device, case.sum, &shape)?);
        let (out, sum) = match case.in_place {
            None => (&out, &sum),
            Some(Over::OutIsX) => (&x, &sum),
            Some(Over::OutIsResidual) => (&residual, &sum),
            Some(Over::SumIsX) => (&out, &x),
            Some(Over::SumIsResidual) => (&out, &residual),
            Some(Over::Swapped) => (&x, &residual),
        };
        let args = RmsNorm {
            x: &x.tensor,
            weight: weight.as_ref(),
            eps: case.eps,
            residual: match case.add {
                Add::None => Residual::None,
                Add::After => Residual::After(&residual.tensor),
                Add::Before => Residual::Before { residual: &residual.tensor, sum: &sum.tensor },
            },
            scale: case.scale,
            out: &out.tensor,
        };
        run(device, |enc| ops::rms_norm(enc, &args))?;
        let mut outputs = vec![out.close("out")?];
        if case.add == Add::Before {
            outputs.push(sum.close("sum")?);
        }
        Ok(outputs)
    });
}

#[test]
fn gate() {
    let mut rng = Rng::of("gate");
    for activation in [Activation::GeluTanh, Activation::Silu] {
        for (rows, dim) in SIZES {
            for x in FLOATS {
                for out_type in FLOATS {
                    let up_type = rng.pick(&FLOATS);
                    // One fused tensor (gate first, or up first), or two; with columns before and behind.
                    let (fused, before, behind) = (rng.below(3), rng.pick(&[0, 3]), rng.pick(&[0, 2]));
                    let case = format!(
                        "gate {activation:?} [{rows}, {dim}] {x} {up_type} -> {out_type}, fused {fused} +{before} +{behind}"
                    );
                    conform(&case, |device| {
                        let mut rng = Rng::of(&case);
                        let width = before + dim + behind;
                        let mut upload = |dtype, width: usize| {
                            let values: Vec<f32> = rng.normals(rows * width).iter().map(|x| x * 4.0).collect();
                            input(device, dtype, &values, &[rows, width])
                        };
                        let (one, two) = (upload(x, width)?, upload(up_type, width)?);
                        let both = upload(x, 2 * dim + before)?;
                        let (gate, up) = match fused {
                            0 => (Columns { tensor: &one, start: before }, Columns { tensor: &two, start: behind }),
                            1 => (
                                Columns { tensor: &both, start: before },
                                Columns { tensor: &both, start: before + dim },
                            ),
                            _ => (Columns { tensor: &both, start: dim }, Columns::all(&both)),
                        };
                        let out = Out::new(device, out_type, &[rows, dim])?;
                        run(device, |enc| ops::gate(enc, &Gate { gate, up, activation, out: &out.tensor }))?;
                        // GELU's tail is a difference of nearly equal numbers.
                        Ok(vec![out.close_within("out", common::Bound::of(out_type).times(8.0))?])
                    });
                }
            }
        }
    }
}

/// Where the functions saturate, and where they are small.
#[test]
fn gate_far_out() {
    let x = vec![-1e30, -1e4, -100.0, -20.0, -10.0, -5.0, -1e-3, -1e-20, 0.0, 1e-20, 1e-3, 5.0, 10.0, 100.0, 1e4, 1e30];
    for activation in [Activation::GeluTanh, Activation::Silu] {
        for out_type in FLOATS {
            conform(format!("gate {activation:?} far out -> {out_type}"), |device| {
                let n = x.len();
                // Element by element: large ones must not hide the small ones.
                let mut outputs = Vec::new();
                let (g, up) =
                    (input(device, DType::F32, &x, &[n, 1])?, input(device, DType::F32, &vec![1.0; n], &[n, 1])?);
                let out = Out::new(device, out_type, &[n, 1])?;
                let (gate, up) = (Columns::all(&g), Columns::all(&up));
                run(device, |enc| ops::gate(enc, &Gate { gate, up, activation, out: &out.tensor }))?;
                for (x, y) in x.iter().zip(out.tensor.to_f32()?) {
                    // Below 1e-6 of the input the tails are noise of 1 + tanh.
                    let y = if y.abs() < 1e-6 * x.abs() { 0.0 } else { y };
                    outputs.push(common::Output::Close(
                        format!("f({x})"),
                        vec![y],
                        common::Bound::of(out_type).times(100.0),
                    ));
                }
                Ok(outputs)
            });
        }
    }
}

/// What is not finite is as the formula says, not a large finite number: −∞ / (1 + ∞) is no number.
#[test]
fn gate_of_what_is_not_finite() {
    let x = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -f32::NAN, f32::MIN, f32::MAX, -1e30, -65504.0, 1.0];
    let n = x.len();
    for activation in [Activation::GeluTanh, Activation::Silu] {
        for dtype in FLOATS {
            conform(format!("{activation:?} of what is not finite, {dtype}"), |device| {
                let (g, up) = (input(device, dtype, &x, &[n, 1])?, input(device, dtype, &vec![1.0; n], &[n, 1])?);
                let out = Out::new(device, DType::F32, &[n, 1])?;
                let (gate, up) = (Columns::all(&g), Columns::all(&up));
                run(device, |enc| ops::gate(enc, &Gate { gate, up, activation, out: &out.tensor }))?;
                let y = out.tensor.to_f32()?;
                let bound = common::Bound::of(DType::F32).times(100.0);
                let each = x.iter().zip(y).map(|(x, y)| {
                    // As far out as this the tails are nothing.
                    let y = if x.is_finite() && y.abs() < 1e-6 * x.abs() { 0.0 } else { y };
                    common::Output::Close(format!("f({x})"), vec![y], bound)
                });
                Ok(each.collect())
            });
        }
    }
}

#[test]
fn gate_in_place() {
    for dtype in FLOATS {
        conform(format!("gate in place, {dtype}"), |device| {
            let mut rng = Rng::of(dtype);
            let out = Out::new(device, dtype, &[5, 67])?;
            out.tensor.write_bytes(&common::encode(dtype, &rng.normals(5 * 67)))?;
            let up = input(device, dtype, &rng.normals(5 * 67), &[5, 67])?;
            let (gate, up) = (Columns::all(&out.tensor), Columns::all(&up));
            run(device, |enc| ops::gate(enc, &Gate { gate, up, activation: Activation::GeluTanh, out: &out.tensor }))?;
            Ok(vec![out.close("out")?])
        });
    }
}

#[test]
fn softcap() {
    for (rows, dim) in SIZES {
        for x_type in FLOATS {
            for out_type in FLOATS {
                for (cap, in_place) in [(30.0, false), (0.5, false), (1e30, false), (5.0, x_type == out_type)] {
                    conform(format!("softcap {cap} [{rows}, {dim}] {x_type} -> {out_type}, {in_place}"), |device| {
                        let values: Vec<f32> = Rng::new(3).normals(rows * dim).iter().map(|x| x * 20.0).collect();
                        let x = input(device, x_type, &values, &[rows, dim])?;
                        let out = Out::new(device, out_type, &[rows, dim])?;
                        if in_place {
                            out.tensor.write_bytes(&common::bytes_of(&x)?)?;
                        }
                        let x = if in_place { &out.tensor } else { &x };
                        run(device, |enc| ops::softcap(enc, &Softcap { x, cap, out: &out.tensor }))?;
                        Ok(vec![out.close("out")?])
                    });
                }
            }
        }
    }
}

/// Rows of logits with every corner: equals, infinities, NaN, nothing but NaN.
fn logits(rng: &mut Rng, rows: usize, dim: usize) -> Vec<f32> {
    let mut values = rng.normals(rows * dim);
    for (r, row) in values.chunks_mut(dim).enumerate() {
        let at = rng.below(dim);
        match r % 6 {
            0 => {}
            1 => row.fill(-2.5),
            2 => row[at] = f32::NAN,
            3 => row.fill(f32::NAN),
            4 => {
                row.fill(f32::NEG_INFINITY);
                row[at] = -1e30;
            }
            _ => {
                let other = rng.below(dim);
                row[at] = 9.0;
                row[other] = 9.0;
            }
        }
    }
    values
}

#[test]
fn argmax() {
    for dim in [1, 2, 7, 64, 65, 1000, 5003] {
        for dtype in FLOATS {
            conform(format!("argmax of {dim} {dtype}"), |device| {
                let x = input(device, dtype, &logits(&mut Rng::new(dim as u64), 13, dim), &[13, dim])?;
                let out = Out::new(device, DType::U32, &[13])?;
                run(device, |enc| ops::argmax(enc, &Argmax { x: &x, out: &out.tensor }))?;
                Ok(vec![out.same("out")?])
            });
        }
    }
}

/// Infinities are numbers like others, NaN is none: a row of nothing else has no largest.
#[test]
fn argmax_of_what_is_not_finite() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let rows =
        [1.0, inf, inf, 2.0, -inf, nan, -inf, nan, nan, nan, nan, nan, nan, -inf, 3.0, -inf, -nan, inf, nan, 0.0];
    for dtype in FLOATS {
        conform(format!("argmax of what is not finite, {dtype}"), |device| {
            let x = input(device, dtype, &rows, &[5, 4])?;
            let out = Out::new(device, DType::U32, &[5])?;
            run(device, |enc| ops::argmax(enc, &Argmax { x: &x, out: &out.tensor }))?;
            assert_eq!(out.tensor.to_vec::<u32>()?, [1, 0, u32::MAX, 2, 1], "{device}");
            Ok(vec![out.same("out")?])
        });
    }
}

/// Rows of nothing but NaN, short ones and such as several blocks share, have no token whatever the cuts.
#[test]
fn nan_is_never_drawn() {
    for device in devices() {
        for (vocab, dtype) in [(1, DType::F32), (7, DType::BF16), (300, DType::F16), (9001, DType::F32)] {
            let logits = input(device, dtype, &vec![f32::NAN; 2 * vocab], &[2, vocab]).unwrap();
            for how in &DRAWS {
                let drawn = draw(device, &logits, how, 1, &[0, 7]).unwrap();
                assert_eq!(drawn, [u32::MAX; 2], "{device}: {vocab} of {dtype} at temperature {}", how.temperature);
            }
        }
    }
}

/// Zeros are equal whatever their signs, in all three orders.
#[test]
fn signed_zeros() {
    for dtype in FLOATS {
        conform(format!("signed zeros, {dtype}"), |device| {
            let rows = [-1.0, -0.0, 0.0, -0.0, -0.0, 0.0, -2.0, 0.0, 0.0, -0.0, -0.0, -3.0];
            let x = input(device, dtype, &rows, &[3, 4])?;
            let largest = Out::new(device, DType::U32, &[3])?;
            let ids = Out::new(device, DType::U32, &[3, 3])?;
            let weights = Out::new(device, DType::F32, &[3, 3])?;
            run(device, |enc| {
                ops::argmax(enc, &Argmax { x: &x, out: &largest.tensor })?;
                let (ids, weights) = (&ids.tensor, &weights.tensor);
                ops::moe_route(enc, &MoeRoute { logits: &x, expert_scale: None, ids, weights })
            })?;
            let how = Draw { temperature: 1.0, top_k: 2, top_p: 1.0, min_p: 0.0 };
            let drawn = draw(device, &x, &how, 3, &[1, 2, 3])?;
            let drawn = common::Output::Same("drawn".into(), bytemuck::cast_slice(&drawn).to_vec());
            Ok(vec![largest.same("argmax")?, ids.same("ids")?, weights.close("weights")?, drawn])
        });
    }
}

struct Draw {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
}

fn draw(device: &Device, logits: &Tensor, how: &Draw, seed: u64, counters: &[u32]) -> Result<Vec<u32>> {
    let &Draw { temperature, top_k, top_p, min_p } = how;
    let counter = indices(device, counters, &[counters.len()])?;
    let out = Out::new(device, DType::U32, &[counters.len()])?;
    let args = Sample { logits, temperature, top_k, top_p, min_p, seed, counter: &counter, out: &out.tensor };
    run(device, |enc| ops::sample(enc, &args))?;
    out.bytes()?;
    out.tensor.to_vec::<u32>()
}

const DRAWS: [Draw; 8] = [
    Draw { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
    Draw { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
    Draw { temperature: 0.7, top_k: 40, top_p: 1.0, min_p: 0.0 },
    Draw { temperature: 1.0, top_k: 0, top_p: 0.9, min_p: 0.0 },
    Draw { temperature: 1.3, top_k: 0, top_p: 1.0, min_p: 0.05 },
    Draw { temperature: 0.8, top_k: 20, top_p: 0.8, min_p: 0.02 },
    Draw { temperature: 2.0, top_k: 1, top_p: 0.5, min_p: 0.5 },
    Draw { temperature: 100.0, top_k: 1_000_000, top_p: 1e-6, min_p: 0.999 },
];

/// The same tokens as the reference draws. A number that falls within rounding of the border between two candidates
/// may pick either, so one row in 500 is allowed to differ.
#[test]
fn samples() {
    for (case, how) in DRAWS.iter().enumerate() {
        for vocab in [1, 5, 300, 4001] {
            for dtype in FLOATS {
                let rows = 97;
                let values = Rng::new(vocab as u64).normals(rows * vocab);
                let spread: Vec<f32> = values.iter().map(|x| x * 2.0).collect();
                let counters: Vec<u32> = (0..rows as u32).map(|r| r * 31 + 5).collect();
                let drawn = |device: &Device| {
                    let logits = input(device, dtype, &spread, &[rows, vocab]).unwrap();
                    draw(device, &logits, how, 42, &counters).unwrap_or_else(|e| panic!("{device}: {e}"))
                };
                let want = drawn(&Device::reference());
                for device in devices() {
                    let got = drawn(device);
                    let changed = got.iter().zip(&want).filter(|(a, b)| a != b).count();
                    assert!(changed <= 1, "{device}: draw {case}, {vocab} {dtype}: {changed} of {rows} tokens differ");
                }
            }
        }
    }
}

/// As many tokens as models have. Over all draws one may fall within rounding of a border.
#[test]
fn samples_of_a_large_vocabulary() {
    let cases = DRAWS[1..].iter().enumerate().map(|(i, how)| (how, FLOATS[i % 3], 20_001, 5));
    let cases: Vec<_> = cases.chain([(&DRAWS[5], DType::BF16, 262_144, 2)]).collect();
    let drawn = |device: &Device| -> Vec<u32> {
        let tokens = cases.iter().flat_map(|&(how, dtype, vocab, rows)| {
            let values = Rng::new(vocab as u64).normals(rows * vocab);
            let spread: Vec<f32> = values.iter().map(|x| x * 3.0).collect();
            let counters: Vec<u32> = (0..rows as u32).map(|r| r * 1000).collect();
            let logits = input(device, dtype, &spread, &[rows, vocab]).unwrap();
            draw(device, &logits, how, 7, &counters).unwrap_or_else(|e| panic!("{device}: {e}"))
        });
        tokens.collect()
    };
    let want = drawn(&Device::reference());
    for device in devices() {
        let changed = drawn(device).iter().zip(&want).filter(|(a, b)| a != b).count();
        assert!(changed <= 1, "{device}: {changed} of {} tokens differ", want.len());
    }
}

/// More tokens than probabilities of 44 bits can be added up for in 64; all are equal, so that the sums are exact.
#[test]
fn samples_of_a_million_equals() {
    let vocab = 1 << 20;
    let drawn = |device: &Device| {
        let logits = input(device, DType::BF16, &vec![0.0; vocab], &[1, vocab]).unwrap();
        draw(device, &logits, &DRAWS[1], 42, &[3]).unwrap_or_else(|e| panic!("{device}: {e}"))
    };
    let want = drawn(&Device::reference());
    devices().iter().for_each(|device| assert_eq!(drawn(device), want, "{device}"));
}

/// Shares and uniform numbers that lie on a border exactly: equals have exact sums. A share reached is enough, a uniform
/// number has to be exceeded.
#[test]
fn samples_on_the_border() {
    const ZERO: u32 = 34_260_546;
    const HALF: u32 = 7_954_382;
    assert_eq!([ZERO, HALF].map(|counter| Sample::uniform(42, counter)), [0.0, 0.5]);
    let all = Draw { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
    let half = Draw { top_p: 0.5, ..all };
    let tiny = Draw { top_p: 1e-30, ..all };
    for device in devices() {
        let logits = input(device, DType::F32, &[-9.0, 1.5, 1.5, f32::NEG_INFINITY], &[1, 4]).unwrap();
        for (how, counter, want) in [(&all, HALF, 2), (&half, HALF, 1), (&tiny, HALF, 1), (&all, ZERO, 1)] {
            // Of two equal candidates each has half.
            let how = Draw { top_k: 2, ..*how };
            let got = draw(device, &logits, &how, 42, &[counter]).unwrap();
            assert_eq!(got, [want], "{device}: top_p {}, counter {counter}", how.top_p);
        }
    }
}

#[test]
fn samples_of_odd_rows() {
    for how in &DRAWS[..6] {
        for vocab in [1, 7, 300] {
            conform(format!("sample of odd rows of {vocab} at temperature {}", how.temperature), |device| {
                let logits = input(device, DType::F32, &logits(&mut Rng::new(5), 12, vocab), &[12, vocab])?;
                let drawn = draw(device, &logits, how, 1, &[7; 12])?;
                Ok(vec![common::Output::Same("out".into(), bytemuck::cast_slice(&drawn).to_vec())])
            });
        }
    }
}

/// Frequencies follow the distribution.
#[test]
fn samples_follow_the_distribution() {
    let p = [0.5f64, 0.25, 0.125, 0.0625, 0.0625];
    let rows = 4096;
    let row: Vec<f32> = p.iter().map(|p| p.ln() as f32).collect();
    let counters: Vec<u32> = (0..rows as u32).collect();
    for device in devices() {
        let logits = input(device, DType::F32, &row.repeat(rows), &[rows, 5]).unwrap();
        let how = Draw { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
        let drawn = draw(device, &logits, &how, 99, &counters).unwrap();
        for (id, p) in p.iter().enumerate() {
            let share = drawn.iter().filter(|&&t| t as usize == id).count() as f64 / rows as f64;
            let deviation = (p * (1.0 - p) / rows as f64).sqrt();
            assert!((share - p).abs() < 4.0 * deviation, "{device}: token {id}: {share}, not {p}");
        }
    }
}

#[test]
fn moe_route() {
    for (tokens, experts, top_k) in [(0, 4, 2), (1, 1, 1), (5, 4, 4), (9, 8, 2), (33, 128, 8), (3, 65, 7), (2, 50, 37)]
    {
        for dtype in FLOATS {
            for scaled in [false, true] {
                conform(
                    format!("moe_route T {tokens}, E {experts}, top {top_k}, {dtype}, scaled {scaled}"),
                    |device| {
                        let mut rng = Rng::new(experts as u64);
                        // In the coarse dtypes there are equals, and then the lower id comes first.
                        let logits = input(device, dtype, &rng.normals(tokens * experts), &[tokens, experts])?;
                        let scale = input(device, DType::F32, &rng.normals(experts), &[experts])?;
                        let ids = Out::new(device, DType::U32, &[tokens, top_k])?;
                        let weights = Out::new(device, DType::F32, &[tokens, top_k])?;
                        let args = MoeRoute {
                            logits: &logits,
                            expert_scale: scaled.then_some(&scale),
                            ids: &ids.tensor,
                            weights: &weights.tensor,
                        };
                        run(device, |enc| ops::moe_route(enc, &args))?;
                        Ok(vec![ids.same("ids")?, weights.close("weights")?])
                    },
                );
            }
        }
    }
}

#[test]
fn moe_combine() {
    for (tokens, top_k, dim) in [(0, 2, 3), (1, 1, 1), (1, 8, 65), (5, 2, 130), (33, 4, 64)] {
        for x_type in FLOATS {
            for out_type in FLOATS {
                conform(format!("moe_combine T {tokens}, top {top_k}, N {dim}, {x_type} -> {out_type}"), |device| {
                    let mut rng = Rng::new(dim as u64);
                    let rows = tokens * top_k;
                    let x = input(device, x_type, &rng.normals(rows * dim), &[rows, dim])?;
                    let weights = input(device, DType::F32, &rng.normals(rows), &[tokens, top_k])?;
                    let out = Out::new(device, out_type, &[tokens, dim])?;
                    run(device, |enc| {
                        ops::moe_combine(enc, &MoeCombine { x: &x, weights: &weights, out: &out.tensor })
                    })?;
                    Ok(vec![out.close("out")?])
                });
            }
        }
    }
}
