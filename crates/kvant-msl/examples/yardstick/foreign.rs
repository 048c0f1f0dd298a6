//! Launches of foreign kernels, counted.

use msl_host::{Access, Buffer, Counts, Launch};

use crate::case::{Dispatch, host};
use crate::corpus::Unit;

/// The summed counts of a sequence of launches.
pub fn count(units: &[Unit], memory: &mut [Vec<u8>], dispatches: &[Dispatch]) -> Result<Counts, msl_host::Error> {
    let mut total: Option<Counts> = None;
    for d in dispatches {
        let mut launch = Launch::new(&d.kernel, d.grid);
        for &(index, number, writes) in &d.buffers {
            let access = if writes { Access::ReadWrite } else { Access::Read };
            let (pointer, len) = (memory[number].as_mut_ptr(), memory[number].len());
            // SAFETY: the vector outlives the run, and nobody else uses it.
            launch = launch.buffer(index, unsafe { Buffer::raw(pointer, len, access) });
        }
        launch = launch.time_limit(std::time::Duration::from_secs(3600)).allow_divergence();
        launch = d.threadgroup.iter().fold(launch, |l, &(index, bytes)| l.threadgroup_memory(index, bytes));
        launch = d.constants.iter().fold(launch, |l, &(index, value)| l.constant(index, value));
        // These kernels read floats in eights, at multiples of 16 bytes.
        let counts = host().count(&units[d.unit].source(None).unaligned(), &launch)?;
        total = Some(total.map_or(counts.clone(), |t| t.and(&counts)));
    }
    Ok(total.unwrap_or_default())
}
