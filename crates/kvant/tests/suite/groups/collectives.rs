//! Collectives against the reference: bits, in place, in graphs, one after the other.

use super::{cpus, groups};
use crate::common::{Bound, FLOATS, Out, Rng, assert_close, bytes_of, encode, rounded, run};
use kvant::{
    DType, Device, Encoder, Result, Tensor,
    ops::{self, AllGather, AllReduce},
    reference,
};

/// Rows and columns: none, one, no multiple of a vector, small and large messages.
const SIZES: [(usize, usize); 8] = [(0, 5), (1, 1), (3, 7), (1, 256), (2, 1023), (5, 4096), (17, 2880), (64, 5376)];

/// The numbers of a rank.
fn values(rank: usize, elements: usize) -> Vec<f32> {
    Rng::of(format!("rank {rank} of {elements}")).normals(elements)
}

/// A tensor with numbers of its own on each rank, between rows of NaN.
fn inputs(group: &Device, dtype: DType, [rows, columns]: [usize; 2]) -> Result<Tensor> {
    let whole = Tensor::from_rank_bytes(group, dtype, &[rows + 2, columns], |rank| {
        let nan = vec![f32::NAN; columns];
        Ok::<_, kvant::Error>(encode(dtype, &[&nan[..], &values(rank, rows * columns), &nan].concat()))
    })?;
    whole.rows(1..rows + 1)
}

/// The result of every rank: f32 sums in the order of ranks, rounded once.
fn sums(ranks: usize, dtype: DType, out: DType, elements: usize) -> Vec<u8> {
    let mut sums = rounded(dtype, &values(0, elements));
    for rank in 1..ranks {
        let x = rounded(dtype, &values(rank, elements));
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
    }
    encode(out, &sums)
}

#[test]
fn all_reduce() {
    for group in groups() {
        for (rows, columns) in SIZES {
            for x_type in FLOATS {
                for out_type in FLOATS {
                    let case = format!("{group}: [{rows}, {columns}] {x_type} -> {out_type}");
                    let x = inputs(&group, x_type, [rows, columns]).unwrap();
                    let out = Out::new(&group, out_type, &[rows, columns]).unwrap();
                    run(&group, |enc| ops::all_reduce(enc, &AllReduce::new(&x, &out.tensor))).unwrap();
                    let want = sums(group.ranks(), x_type, out_type, rows * columns);
                    for rank in 0..group.ranks() {
                        assert!(out.on_rank(rank).bytes().unwrap() == want, "{case}: rank {rank}");
                        let kept = encode(x_type, &values(rank, rows * columns));
                        assert!(bytes_of(&x.on_rank(rank).unwrap()).unwrap() == kept, "{case}: x of rank {rank}");
                    }
                }
            }
        }
    }
}

/// The bits above are right: the reference, in f64, agrees.
#[test]
fn all_reduce_is_the_sum_of_the_reference() {
    let group = cpus(3, 1);
    let (x, out) = (inputs(&group, DType::F32, [5, 100]).unwrap(), Out::new(&group, DType::BF16, &[5, 100]).unwrap());
    run(&group, |enc| ops::all_reduce(enc, &AllReduce::new(&x, &out.tensor))).unwrap();
    let ranks: Vec<Vec<f64>> = (0..3).map(|rank| values(rank, 500).iter().map(|&x| x.into()).collect()).collect();
    let ranks: Vec<&[f64]> = ranks.iter().map(Vec::as_slice).collect();
    let want: Vec<f32> = reference::all_reduce(&ranks).unwrap().iter().map(|&x| x as f32).collect();
    assert_close("all_reduce", &out.tensor.to_f32().unwrap(), &want, Bound::of(DType::BF16));
    assert!(reference::all_reduce(&[&[1.0], &[1.0, 2.0]]).is_err());
    assert!(reference::all_reduce(&[]).unwrap().is_empty());
}

#[test]
fn all_reduce_in_place() {
    for group in groups() {
        for (rows, columns) in SIZES {
            for dtype in FLOATS {
                let x = inputs(&group, dtype, [rows, columns]).unwrap();
                run(&group, |enc| ops::all_reduce(enc, &AllReduce::new(&x, &x))).unwrap();
                let want = sums(group.ranks(), dtype, dtype, rows * columns);
                for rank in 0..group.ranks() {
                    let got = bytes_of(&x.on_rank(rank).unwrap()).unwrap();
                    assert!(got == want, "{group}: [{rows}, {columns}] {dtype}, rank {rank}");
                }
            }
        }
    }
}

/// Views that begin anywhere, and numbers without a value.
#[test]
fn all_reduce_of_any_alignment() {
    for group in groups() {
        for dtype in FLOATS {
            for start in [0, 1, 3, 8] {
                let all = Tensor::from_rank_bytes(&group, dtype, &[3000], |rank| {
                    let mut values = values(rank, 3000);
                    values[40..44].copy_from_slice(&[f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-30]);
                    Ok::<_, kvant::Error>(encode(dtype, &values))
                });
                let x = all.unwrap().rows(start..2999).unwrap();
                let out = Out::new(&group, dtype, &[2999 - start]).unwrap();
                run(&group, |enc| ops::all_reduce(enc, &AllReduce::new(&x, &out.tensor))).unwrap();
                let first = out.on_rank(0).bytes().unwrap();
                let got = out.tensor.to_f32().unwrap();
                assert_eq!(got[40 - start], f32::INFINITY, "{group}: {dtype} from {start}");
                assert_eq!(got[41 - start], f32::NEG_INFINITY);
                assert_eq!(got[42 - start].to_bits(), (-0.0f32).to_bits());
                for rank in 1..group.ranks() {
                    assert!(out.on_rank(rank).bytes().unwrap() == first, "{group}: {dtype} from {start}, rank {rank}");
                }
            }
        }
    }
}

#[test]
fn all_gather() {
    for group in groups() {
        let ranks = group.ranks();
        for (rows, columns) in SIZES {
            for dtype in [DType::F32, DType::BF16, DType::U32, DType::U8] {
                let bytes: Vec<Vec<u8>> = (0..ranks)
                    .map(|rank| {
                        let mut rng = Rng::of(format!("{rank} {rows} {columns}"));
                        (0..rows * columns * dtype.size()).map(|_| rng.bits() as u8).collect()
                    })
                    .collect();
                let of_rank = |rank: usize| Ok::<_, kvant::Error>(&bytes[rank]);
                let x = Tensor::from_rank_bytes(&group, dtype, &[rows, columns], of_rank);
                let out = Out::new(&group, dtype, &[rows, ranks * columns]).unwrap();
                run(&group, |enc| ops::all_gather(enc, &AllGather::new(&x?, &out.tensor))).unwrap();
                let width = columns * dtype.size();
                let want: Vec<u8> = (0..rows)
                    .flat_map(|row| (0..ranks).map(move |rank| (row, rank)))
                    .flat_map(|(row, rank)| &bytes[rank][row * width..(row + 1) * width])
                    .copied()
                    .collect();
                for rank in 0..ranks {
                    let got = out.on_rank(rank).bytes().unwrap();
                    assert!(got == want, "{group}: [{rows}, {columns}] {dtype}, rank {rank}");
                }
            }
        }
    }
}

/// Each replay adds the current values, and chains of collectives see one another's results.
#[test]
fn graphs_of_collectives() {
    for group in groups() {
        let ranks = group.ranks() as f32;
        let (rows, columns) = (4, 1500);
        let zeros = |shape: &[usize]| Tensor::zeros(&group, DType::F32, shape).unwrap();
        let (x, sum, twice) = (zeros(&[rows, columns]), zeros(&[rows, columns]), zeros(&[rows, columns]));
        let all = zeros(&[rows, columns * group.ranks()]);
        let graph = Encoder::capture(&group, |enc| {
            ops::all_reduce(enc, &AllReduce::new(&x, &sum))?;
            ops::all_reduce(enc, &AllReduce::new(&sum, &twice))?;
            ops::all_gather(enc, &AllGather::new(&twice, &all))?;
            ops::all_reduce(enc, &AllReduce::new(&x, &x))
        })
        .unwrap();
        for round in 1..20 {
            for rank in 0..group.ranks() {
                let values = vec![(round * (rank + 1)) as f32; rows * columns];
                x.on_rank(rank).unwrap().write(&values).unwrap();
            }
            graph.replay().unwrap().wait().unwrap();
            let want = round as f32 * ranks * (ranks + 1.0) / 2.0;
            for rank in 0..group.ranks() {
                let values = |tensor: &Tensor| tensor.on_rank(rank).unwrap().to_vec::<f32>().unwrap();
                for (tensor, want) in [(&x, want), (&sum, want), (&twice, want * ranks), (&all, want * ranks)] {
                    assert!(values(tensor).iter().all(|&got| got == want), "{group}: round {round}, rank {rank}");
                }
            }
        }
    }
}

/// Passes of collectives from several threads do not mix, and none waits for ever.
#[test]
fn passes_of_many_threads() {
    for group in groups() {
        std::thread::scope(|scope| {
            for thread in 0..3usize {
                let group = &group;
                scope.spawn(move || {
                    let mut rng = Rng::of(format!("thread {thread}"));
                    for _ in 0..60 {
                        let elements = 1 + rng.below(3000);
                        let x = inputs(group, DType::BF16, [1, elements]).unwrap();
                        let out = Tensor::zeros(group, DType::F32, &[elements]).unwrap();
                        run(group, |enc| ops::all_reduce(enc, &AllReduce::new(&x, &out))).unwrap();
                        let want = sums(group.ranks(), DType::BF16, DType::F32, elements);
                        let rank = rng.below(group.ranks());
                        assert!(bytes_of(&out.on_rank(rank).unwrap()).unwrap() == want, "{group}: {elements}");
                    }
                });
            }
        });
    }
}

/// A million sums of random sizes, in graphs, each checked bit for bit on every rank. `KVANT_ALL_REDUCES` is another
/// number.
#[test]
#[ignore = "minutes on GPUs, hours on a CPU"]
fn a_million_sums() {
    const MAX_LEN: usize = 1 << 20;
    let count: usize = std::env::var("KVANT_ALL_REDUCES").map_or(1_000_000, |count| count.parse().expect("a number"));
    let group = super::gpus().unwrap_or_else(|| cpus(2, 1));
    let x = inputs(&group, DType::BF16, [1, MAX_LEN]).unwrap().reshape(&[MAX_LEN]).unwrap();
    let out = Tensor::zeros(&group, DType::BF16, &[MAX_LEN]).unwrap();
    let (want, mut rng, mut done) = (sums(group.ranks(), DType::BF16, DType::BF16, MAX_LEN), Rng::of("a million"), 0);
    while done < count {
        // Small ones are most of them, as in decode; starts are multiples of 8 elements or any.
        let sums: Vec<(usize, usize)> = (0..100)
            .map(|_| {
                let bits = 3 + rng.below(17);
                let len = 1 + rng.below(1 << bits);
                let start = rng.below(MAX_LEN - len) / 8 * 8 + if rng.below(8) == 0 { rng.below(8) } else { 0 };
                (start.min(MAX_LEN - len), len)
            })
            .collect();
        let graph = Encoder::capture(&group, |enc| {
            sums.iter().try_for_each(|&(start, len)| {
                let range = start..start + len;
                ops::all_reduce(enc, &AllReduce::new(&x.rows(range.clone())?, &out.rows(range)?))
            })
        })
        .unwrap();
        for _ in 0..100 {
            graph.replay().unwrap().wait().unwrap();
            done += sums.len();
        }
        for rank in 0..group.ranks() {
            let got = bytes_of(&out.on_rank(rank).unwrap()).unwrap();
            for &(start, len) in &sums {
                let bytes = 2 * start..2 * (start + len);
                assert!(got[bytes.clone()] == want[bytes], "{group}: rank {rank}, {len} elements from {start}");
            }
            out.on_rank(rank).unwrap().write_bytes(&vec![0xA5; 2 * MAX_LEN]).unwrap();
        }
    }
    println!("{group}: {done} sums");
}
