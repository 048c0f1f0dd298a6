//! The rate of plain reads and copies of large buffers.

use std::time::Duration;

use kvant::{DType, Device, Encoder, Tensor, ops};

use super::super::timing::{self, Timing};
use crate::Result;

/// Bytes of each of two buffers: together more than the caches of processors.
const BYTES: usize = 384 << 20;
/// How often a buffer is read or copied in a submission, so that starting it takes no part of the time.
const REPEATS: usize = 4;
/// Submissions before the measurement, and in it at least and at most.
const CALLS: (usize, usize, usize) = (1, 3, 1000);

/// The times of one submission, and the bytes that it moves.
pub struct Rates {
    pub read: Timing,
    pub read_bytes: usize,
    pub copy: Timing,
    pub copy_bytes: usize,
}

/// Reads are a search for the largest number; a copy reads and writes.
pub fn measure(device: &Device, budget: Duration) -> Result<Rates> {
    let free = device.memory().map_or(usize::MAX, |memory| memory.free);
    // Rows of floats.
    let floats = BYTES.min(free / 4) / size_of::<f32>();
    let zeros = || Tensor::zeros(device, DType::F32, &[1, floats]);
    let (a, b, out) = (zeros()?, zeros()?, Tensor::zeros(device, DType::U32, &[1])?);
    // A system may give all zeros from one page until they are written.
    let ones = vec![1f32; floats];
    a.write(&ones)?;
    b.write(&ones)?;
    drop(ones);
    let read = Encoder::capture(device, |enc| {
        for index in 0..REPEATS {
            ops::argmax(enc, &ops::Argmax::new(if index % 2 == 0 { &a } else { &b }, &out))?;
        }
        Ok(())
    })?;
    let copy = Encoder::capture(device, |enc| {
        for index in 0..REPEATS {
            let (from, to) = if index % 2 == 0 { (&a, &b) } else { (&b, &a) };
            ops::copy(enc, from, to)?;
        }
        Ok(())
    })?;
    let rates = Rates {
        read: timing::repeat_within(budget, CALLS, |_| Ok(read.replay()?.wait()?))?,
        read_bytes: REPEATS * a.bytes(),
        copy: timing::repeat_within(budget, CALLS, |_| Ok(copy.replay()?.wait()?))?,
        copy_bytes: REPEATS * 2 * a.bytes(),
    };
    drop((read, copy, a, b));
    device.trim()?;
    Ok(rates)
}
