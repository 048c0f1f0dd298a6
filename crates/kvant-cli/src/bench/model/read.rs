//! Measures the rate of plain reads and copies of large buffers.

use std::time::Duration;

use kvant::{DType, Device, DeviceKind, Encoder, Tensor, ops};

use super::super::timing::{self, Timing};
use crate::result::Result;

/// Bytes of each of two buffers. Together they exceed the caches of processors.
const BYTES: usize = 384 << 20;
/// Reads or copies in a submission: enough to make the launch time negligible.
const REPEATS: usize = 4;
/// Submissions before the measurement, and minimum and maximum during it.
const CALLS: (usize, usize, usize) = (1, 3, 1000);

/// The times of one submission, and the bytes that it moves.
pub struct Rates {
    pub read: Timing,
    pub read_bytes: usize,
    pub copy: Timing,
    pub copy_bytes: usize,
}

/// Columns of the matrix to read.
const COLUMNS: usize = 4096;

/// Measures reads as products of one row with a dense matrix, and copies.
pub fn measure(device: &Device, budget: Duration) -> Result<Rates> {
    let free = device.memory().map_or(usize::MAX, |memory| memory.free);
    // A dtype that the device multiplies at the rate of its memory.
    let dtype = if device.kind() == DeviceKind::Cpu { DType::F32 } else { DType::BF16 };
    let rows = (BYTES.min(free / 4) / dtype.size() / COLUMNS).max(1);
    let zeros = || Tensor::zeros(device, dtype, &[rows, COLUMNS]);
    let (a, b) = (zeros()?, zeros()?);
    let (x, out) = (Tensor::zeros(device, dtype, &[1, COLUMNS])?, Tensor::zeros(device, dtype, &[1, rows])?);
    // The system may map all pages of zeros to one page until they are written.
    let bytes = vec![0x3e; a.bytes()];
    a.write_bytes(&bytes)?;
    b.write_bytes(&bytes)?;
    drop(bytes);
    let read = Encoder::capture(device, |enc| {
        for index in 0..REPEATS {
            ops::linear(enc, &ops::Linear::new(&x, if index % 2 == 0 { &a } else { &b }, &out))?;
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
