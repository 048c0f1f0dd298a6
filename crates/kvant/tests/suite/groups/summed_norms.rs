//! Norms of sums over ranks: the bits of `all_reduce` and a norm.

use super::{cpus, groups, reference_groups};
use crate::common::{FLOATS, Rng, bytes_of, encode, run};
use kvant::{
    DType, Device, Encoder, Error, Tensor,
    ops::{self, AllReduce, NextNorm, Residual, RmsNorm},
};

/// Rows and columns: of a warp and of a block, with and without a rest, small and large messages.
const SIZES: [(usize, usize); 9] =
    [(0, 8), (1, 1), (3, 7), (1, 64), (5, 256), (1, 2880), (9, 5376), (2, 8196), (64, 5376)];

fn tensor(group: &Device, name: &str, dtype: DType, shape: &[usize]) -> Tensor {
    let values = |rank| Rng::of(format!("{name} of rank {rank}")).normals(shape.iter().product());
    Tensor::from_rank_bytes(group, dtype, shape, |rank| Ok::<_, Error>(encode(dtype, &values(rank)))).unwrap()
}

/// A tensor that is equal on all ranks.
fn equal(group: &Device, name: &str, dtype: DType, shape: &[usize]) -> Tensor {
    let values = encode(dtype, &Rng::of(name).normals(shape.iter().product()));
    Tensor::from_rank_bytes(group, dtype, shape, |_| Ok::<_, Error>(values.clone())).unwrap()
}

/// The tensors of a norm.
struct Case {
    x: Tensor,
    h: Tensor,
    weight: Tensor,
    out: Tensor,
    next: Tensor,
}

impl Case {
    fn new(group: &Device, dtype: DType, shape: [usize; 2]) -> Case {
        Case {
            x: tensor(group, "x", dtype, &shape),
            h: equal(group, "h", dtype, &shape),
            weight: equal(group, "weight", dtype, &shape[1..]),
            out: Tensor::zeros(group, dtype, &shape).unwrap(),
            next: Tensor::zeros(group, dtype, &shape).unwrap(),
        }
    }

    /// The norm with a kind of residual; in one operation, or in two.
    fn norm(&self, enc: &mut Encoder, kind: usize, at_once: bool) -> kvant::Result<()> {
        let residual = match kind {
            0 => Residual::None,
            1 => Residual::After(&self.h),
            2 => Residual::Normed { residual: &self.h, weight: None },
            _ => Residual::Before { residual: &self.h, sum: &self.h },
        };
        if !at_once {
            ops::all_reduce(enc, &AllReduce::new(&self.x, &self.x))?;
        }
        let next = [NextNorm::new(&self.next).weight(Some(&self.weight))];
        let args = RmsNorm::new(&self.x, 1e-6, &self.out).weight(Some(&self.weight)).residual(residual);
        ops::rms_norm(enc, &args.next(if kind == 1 { &next } else { &[] }).sum_ranks(at_once))
    }

    /// The bytes of all results on all ranks.
    fn results(&self) -> Vec<Vec<u8>> {
        let of_rank = |rank| [&self.h, &self.out, &self.next].map(|of| bytes_of(&of.on_rank(rank).unwrap()).unwrap());
        (0..self.x.device().ranks()).flat_map(of_rank).collect()
    }
}

#[test]
fn norms_of_sums_have_the_bits_of_the_parts() {
    for group in groups().into_iter().chain(reference_groups()) {
        for dtype in FLOATS {
            for (rows, columns) in SIZES {
                for kind in 0..4 {
                    let results = |at_once| {
                        let case = Case::new(&group, dtype, [rows, columns]);
                        run(&group, |enc| case.norm(enc, kind, at_once)).unwrap();
                        case.results()
                    };
                    assert!(results(true) == results(false), "{group}: [{rows}, {columns}] {dtype}, residual {kind}");
                }
            }
        }
    }
}

/// Fused and plain collectives follow one another, in graphs that are replayed.
#[test]
fn recorded_norms_of_sums() {
    for group in groups() {
        let results = |at_once: bool| {
            let [a, b] = [[1, 2880], [4, 256]].map(|shape| Case::new(&group, DType::BF16, shape));
            let fresh = [&a, &b].map(|case| tensor(&group, "fresh", DType::BF16, case.x.shape()));
            let graph = Encoder::capture(&group, |enc| {
                for (case, fresh) in [&a, &b].into_iter().zip(&fresh) {
                    ops::copy(enc, fresh, &case.x)?;
                    case.norm(enc, 3, at_once)?;
                    ops::copy(enc, fresh, &case.x)?;
                    ops::all_reduce(enc, &AllReduce::new(&case.x, &case.x))?;
                    case.norm(enc, 1, at_once)?;
                }
                Ok(())
            })
            .unwrap();
            (0..20).for_each(|_| graph.replay().unwrap().wait().unwrap());
            [a.results(), b.results()].concat()
        };
        assert!(results(true) == results(false), "{group}");
    }
}

#[test]
fn arguments_of_norms_of_sums() {
    let group = cpus(2, 1);
    let Case { x, h, out, .. } = Case::new(&group, DType::F32, [2, 8]);
    let refused = |args: RmsNorm| run(&group, |enc| ops::rms_norm(enc, &args.sum_ranks(true))).unwrap_err();
    let in_place = refused(RmsNorm::new(&x, 1e-6, &x));
    assert!(matches!(in_place, Error::Overlap { .. }), "{in_place}");
    let sum = refused(RmsNorm::new(&x, 1e-6, &out).residual(Residual::Before { residual: &h, sum: &x }));
    assert!(matches!(sum, Error::Overlap { .. }), "{sum}");
    let factors = Tensor::zeros(&group, DType::F32, &[1, 2]).unwrap();
    let row = out.rows(0..1).unwrap();
    let combined = refused(RmsNorm::new(&x, 1e-6, &row).combine(Some(&factors)));
    assert!(matches!(combined, Error::Value { arg: "sum_ranks", .. }), "{combined}");
    // A device that is no group has nothing to add.
    let device = Device::cpu();
    let x = Tensor::from_slice(&device, &[3f32, 4.0], &[1, 2]).unwrap();
    run(&device, |enc| ops::rms_norm(enc, &RmsNorm::new(&x, 0.0, &x).sum_ranks(true))).unwrap();
    let want = [3.0, 4.0].map(|x: f32| x / 12.5f32.sqrt());
    assert!(x.to_vec::<f32>().unwrap().iter().zip(want).all(|(x, want)| (x - want).abs() < 1e-6));
}
