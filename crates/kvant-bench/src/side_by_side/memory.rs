//! The memory's read rate, which limits every operation that reads each byte once.

use std::hint::black_box;

use kvant_bench::{Result, data::ROTATION};

use crate::race::Contender;

/// Bytes of the buffer that is read.
pub const READ: usize = ROTATION;

/// Requests huge pages, as kvant does for its tensors. Must be called before the memory is written, because the system
/// allocates pages at the first write.
pub fn huge_pages<T>(memory: &mut [std::mem::MaybeUninit<T>]) {
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4096;
        let skip = memory.as_ptr().addr().wrapping_neg() % PAGE;
        let bytes = size_of_val(memory).saturating_sub(skip) / PAGE * PAGE;
        if bytes == 0 {
            return;
        }
        // SAFETY: whole pages within the memory. The request may be ignored.
        unsafe { libc::madvise(memory.as_mut_ptr().cast::<u8>().add(skip).cast(), bytes, libc::MADV_HUGEPAGE) };
    }
}

/// `count` copies of a number, in huge pages.
pub fn filled<T: Copy>(value: T, count: usize) -> Vec<T> {
    let mut memory = Vec::with_capacity(count);
    huge_pages(memory.spare_capacity_mut());
    memory.resize(count, value);
    memory
}

/// Reads a buffer from memory with plain vector loads, each thread its part.
pub fn reader<'a>(threads: usize) -> Contender<'a> {
    let buffer = filled(1u64, READ / 8);
    Contender::each("memory read", READ, move || {
        std::thread::scope(|scope| {
            for part in buffer.chunks(buffer.len().div_ceil(threads)) {
                scope.spawn(move || black_box(sum(part)));
            }
        });
        Ok(())
    })
}

/// Consecutive copies of one block without synchronisation of the threads.
const COPIES: usize = 16;

/// Copies one block repeatedly to different addresses. Each thread copies a part of it. This is the minimum work of
/// writing dense rows.
pub fn copier<'a>(bytes: usize, threads: usize) -> Contender<'a> {
    let source = vec![1u8; bytes];
    // Not zeros, which the system would allocate page by page during the measurement.
    let mut target = filled(1u8, ROTATION / bytes / COPIES * COPIES * bytes);
    let (mut at, turns) = (0, target.len() / bytes / COPIES);
    let part = bytes.div_ceil(threads);
    Contender::new("memory copy", 0, move || {
        let blocks = &mut target[at % turns * COPIES * bytes..][..COPIES * bytes];
        at += 1;
        let mut shares: Vec<Vec<(&mut [u8], &[u8])>> = (0..threads).map(|_| Vec::new()).collect();
        for block in blocks.chunks_exact_mut(bytes) {
            for (share, parts) in shares.iter_mut().zip(block.chunks_mut(part).zip(source.chunks(part))) {
                share.push(parts);
            }
        }
        let copy = |share: Vec<(&mut [u8], &[u8])>| share.into_iter().for_each(|(to, from)| to.copy_from_slice(from));
        std::thread::scope(|scope| {
            let mine = shares.pop();
            shares.into_iter().for_each(|share| {
                scope.spawn(move || copy(share));
            });
            mine.into_iter().for_each(copy);
        });
        Ok(COPIES)
    })
}

/// Sums in many lanes, so that enough loads are in flight for any vector width.
fn sum(numbers: &[u64]) -> u64 {
    let mut lanes = [0u64; 64];
    for chunk in numbers.chunks_exact(64) {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = lane.wrapping_add(*x);
        }
    }
    lanes.iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// Billions of bytes per second.
pub fn gigabytes(bytes: usize, micros: f64) -> f64 {
    bytes as f64 / micros / 1e3
}

/// Microseconds that `bytes` bytes take at the ceiling.
pub fn floor(bytes: usize, ceiling: f64) -> f64 {
    bytes as f64 / ceiling / 1e3
}

/// Describes machine and program. Returns an error unless the program was built for this processor's instructions,
/// which the peers need, too.
pub fn describe() -> Result<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split(':').nth(1));
    let cores = std::thread::available_parallelism()?;
    #[cfg(target_arch = "x86_64")]
    for (name, has, built) in [
        ("AVX2", is_x86_feature_detected!("avx2"), cfg!(target_feature = "avx2")),
        ("AVX-512", is_x86_feature_detected!("avx512f"), cfg!(target_feature = "avx512f")),
    ] {
        if has && !built {
            return Err(format!("built without {name}, which ggml and candle take from the compiler: set RUSTFLAGS='-C target-cpu=native'").into());
        }
    }
    Ok(format!("{}, {cores} cores", model.unwrap_or(std::env::consts::ARCH).trim()))
}
