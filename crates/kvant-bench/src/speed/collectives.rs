//! Collectives on a group of this machine's NVIDIA GPUs, in graphs.

use std::time::Instant;

use kvant::{
    DType, Device, Encoder, Result, Tensor,
    ops::{self, AllGather, AllReduce, Residual, RmsNorm},
};

/// Collectives of a graph. Each depends on the previous one.
const CHAIN: usize = 200;

/// The first `max_ranks` GPUs, or all if the machine has fewer.
fn gpus(max_ranks: usize) -> Result<Device> {
    let first = Device::cuda(0)?;
    let rest = (1..max_ranks).map_while(|index| Device::cuda(index).ok());
    Device::group(&std::iter::once(first).chain(rest).collect::<Vec<_>>())
}

/// Microseconds of a collective.
fn time(group: &Device, record: impl Fn(&mut Encoder, usize) -> Result<()>) -> Result<f64> {
    let graph = Encoder::capture(group, |enc| (0..CHAIN).try_for_each(|index| record(enc, index)))?;
    let replays = |count: usize| -> Result<f64> {
        let start = Instant::now();
        let mut last = None;
        for _ in 0..count {
            last = Some(graph.replay()?);
        }
        last.map_or(Ok(()), |last| last.wait())?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / (count * CHAIN) as f64)
    };
    replays(5)?;
    let times: Result<Vec<f64>> = (0..5).map(|_| replays(20)).collect();
    Ok(times?.into_iter().fold(f64::INFINITY, f64::min))
}

/// Sums of messages of 1 KiB to 64 MiB.
pub fn all_reduces(max_ranks: usize) -> Result<()> {
    let group = gpus(max_ranks)?;
    println!("| all_reduce, {} ranks, bf16 | µs | GB/s of messages |", group.ranks());
    println!("|---|---|---|");
    for kib in [1, 4, 8, 10, 16, 21, 32, 64, 128, 192, 256, 320, 512, 1024, 2048, 4096, 16384, 65536] {
        let new = || Tensor::zeros(&group, DType::BF16, &[kib * 512]);
        let (a, b) = (new()?, new()?);
        let us = time(&group, |enc, index| {
            let (x, out) = if index % 2 == 0 { (&a, &b) } else { (&b, &a) };
            ops::all_reduce(enc, &AllReduce::new(x, out))
        })?;
        println!("| {kib} KiB | {us:.2} | {:.1} |", (kib << 10) as f64 / us / 1e3);
    }
    Ok(())
}

/// Concatenations of parts of logits.
pub fn all_gathers(max_ranks: usize) -> Result<()> {
    let group = gpus(max_ranks)?;
    println!("| all_gather, {} ranks, f32 | µs | GB/s of each rank's part |", group.ranks());
    println!("|---|---|---|");
    for (rows, columns) in [(1, 64), (64, 64), (1, 131_072), (8, 131_072), (64, 131_072)] {
        let x = Tensor::zeros(&group, DType::F32, &[rows, columns])?;
        let out = Tensor::zeros(&group, DType::F32, &[rows, columns * group.ranks()])?;
        let us = time(&group, |enc, _| ops::all_gather(enc, &AllGather::new(&x, &out)))?;
        println!("| [{rows}, {columns}] | {us:.2} | {:.1} |", x.bytes() as f64 / us / 1e3);
    }
    Ok(())
}

/// The end of half a block on a group: the sum of the ranks' outputs, the residual addition and the next norm, as one
/// operation and as two.
pub fn summed_norms(max_ranks: usize) -> Result<()> {
    let group = gpus(max_ranks)?;
    println!("| sum of {} ranks, residual, norm; bf16 | one operation, µs | two | ratio |", group.ranks());
    println!("|---|---|---|---|");
    for (rows, width) in [(1, 2816), (1, 5376), (1, 8192), (8, 5376), (8, 8192), (64, 5376), (64, 8192), (4096, 5376)] {
        let new = |shape: &[usize]| Tensor::zeros(&group, DType::BF16, shape);
        let [x, h, out] = [new(&[rows, width])?, new(&[rows, width])?, new(&[rows, width])?];
        let weight = new(&[width])?;
        let norm = |enc: &mut Encoder, sum_ranks| {
            let residual = Residual::Before { residual: &h, sum: &h };
            let args = RmsNorm::new(&x, 1e-6, &out).weight(Some(&weight)).residual(residual);
            ops::rms_norm(enc, &args.sum_ranks(sum_ranks))
        };
        let one = time(&group, |enc, _| norm(enc, true))?;
        let two = time(&group, |enc, _| {
            ops::all_reduce(enc, &AllReduce::new(&x, &x))?;
            norm(enc, false)
        })?;
        println!("| [{rows}, {width}] | {one:.2} | {two:.2} | {:.2} |", two / one);
    }
    Ok(())
}
