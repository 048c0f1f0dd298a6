//! Times of recorded operations, and data that no cache of the device holds.

use std::time::{Duration, Instant};

use kvant::{DType, Device, Encoder, Graph, Result, Tensor};
use kvant_bench::data::SplitMix;

/// Bytes that all buffers together exceed.
pub const CACHE: usize = 256 << 20;

/// A device, and the lines to measure on it.
pub struct Timer {
    pub device: Device,
    only: Option<String>,
}

impl Timer {
    /// Measures lines whose names contain `only`.
    pub fn new(device: Device, only: Option<String>) -> Timer {
        Timer { device, only }
    }

    /// Whether to measure this line.
    pub fn is_wanted(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|part| name.contains(part))
    }

    /// Prints the head of a table of [`line`](Timer::line)s.
    pub fn head(&self) {
        println!("| operation on {} | µs | GB/s |\n|---|---|---|", self.device.name());
    }

    /// Times `record`, whose argument counts from 0 to `copies`, and prints a line.
    pub fn line(
        &self,
        name: &str,
        bytes: usize,
        copies: usize,
        record: impl Fn(&mut Encoder, usize) -> Result<()>,
    ) -> Result<()> {
        if !self.is_wanted(name) {
            return Ok(());
        }
        let calls = copies.max(60).next_multiple_of(copies);
        let graph = Encoder::capture(&self.device, |enc| (0..calls).try_for_each(|i| record(enc, i % copies)))?;
        wake(&graph, Duration::from_millis(150))?;
        let seconds = median((0..15).map(|_| replay(&graph)).collect::<Result<_>>()?) / calls as f64;
        println!("| {name} | {:.2} | {:.0} |", seconds * 1e6, bytes as f64 / seconds / 1e9);
        Ok(())
    }
}

/// Replays for this time: a device sleeps while the host generates data, and wakes slowly.
fn wake(graph: &Graph, time: Duration) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < time {
        graph.replay()?.wait()?;
    }
    Ok(())
}

/// Seconds of a replay.
fn replay(graph: &Graph) -> Result<f64> {
    let start = Instant::now();
    graph.replay()?.wait()?;
    Ok(start.elapsed().as_secs_f64())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The median of each graph's replays, in turns, in µs per call.
pub fn in_turns(graphs: &[Graph], calls: usize) -> Result<Vec<f64>> {
    let mut times = vec![Vec::new(); graphs.len()];
    wake(&graphs[0], Duration::from_millis(60))?;
    for _ in 0..13 {
        for (graph, times) in graphs.iter().zip(&mut times) {
            times.push(replay(graph)? * 1e6 / calls as f64);
        }
    }
    Ok(times.into_iter().map(median).collect())
}

/// The number of copies of `bytes` bytes that together have [`CACHE`], 64 at most.
pub fn copies(bytes: usize) -> usize {
    CACHE.div_ceil(bytes).min(64)
}

/// Random numbers that are not zero.
pub fn noise(device: &Device, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let mut words = SplitMix(1);
    let mut next = || (words.next_word() >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
    let bytes: Vec<u8> = match dtype {
        DType::F32 => (0..n).flat_map(|_| next().to_le_bytes()).collect(),
        DType::F16 => (0..n).flat_map(|_| kvant::f16::from_f32(next()).to_le_bytes()).collect(),
        DType::BF16 => (0..n).flat_map(|_| kvant::bf16::from_f32(next()).to_le_bytes()).collect(),
        DType::U32 => (0..n).flat_map(|_| next().to_bits().to_le_bytes()).collect(),
        DType::U8 => (0..n).map(|_| next().to_bits() as u8).collect(),
    };
    Tensor::from_bytes(device, dtype, shape, &bytes)
}

/// Random bits that are finite numbers below 2 as bf16.
pub fn random_bits(bytes: usize) -> Vec<u8> {
    let mut words = SplitMix(1);
    let words = (0..bytes.div_ceil(8)).map(|_| words.next_word() & 0xBFFF_BFFF_BFFF_BFFF);
    let mut all: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    all.truncate(bytes);
    all
}
