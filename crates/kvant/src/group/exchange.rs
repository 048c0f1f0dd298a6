//! Memory through which the GPUs of a group exchange data: each GPU has some, which the kernels of all GPUs access
//! (`cuda/device/peers.h`).

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use crate::{Device, Error, Result, backend::Memory, gpu::Scratch};

/// Maximum ranks of the kernels.
const MAX_GPUS: usize = 8;
/// Bytes before the packets of an exchange: `struct Exchange` of `peers.h`.
const HEAD: usize = 128 + 2 * MAX_GPUS * 128 * size_of::<u32>();
/// A packet, which has 8 bytes of a message.
const PACKET: usize = 16;
/// Packets that a rank sends at a time, to all other ranks together. Between two ranks, this is a message of 256 KiB.
const PACKETS: usize = 32 << 10;

/// The exchanges of all ranks.
pub(crate) struct Exchange {
    ranks: Vec<Scratch>,
    /// A word in host memory, which all GPUs access: not zero once a rank has failed, or was late.
    failed: Scratch,
}

impl Exchange {
    /// Connects GPUs with one another.
    ///
    /// # Errors
    /// `Unsupported` if a GPU cannot access the memory of another one, or for more than 8; `OutOfMemory`;
    /// `DeviceFault`.
    pub(super) fn open(devices: &[Device]) -> Result<Exchange> {
        let unsupported = |reason: String| Error::Unsupported { op: "group", device: "cuda", reason };
        if devices.len() > MAX_GPUS {
            return Err(unsupported(format!("{} GPUs; a group has at most {MAX_GPUS}", devices.len())));
        }
        let numbers: Option<Vec<usize>> = devices.iter().map(|device| device.backend().number()).collect();
        let numbers = numbers.ok_or_else(|| unsupported("the devices are no GPUs of this machine".to_string()))?;
        for (device, own) in devices.iter().zip(&numbers) {
            let others: Vec<usize> = numbers.iter().copied().filter(|number| number != own).collect();
            device.backend().share_with(&others)?;
        }
        let bytes = HEAD + 2 * devices.len() * capacity(devices.len()) * PACKET;
        let exchange = |device: &Device| {
            let memory: Arc<dyn Memory> = device.backend().allocate(bytes)?.into();
            // Waits until the memory is zeroed; other ranks may write to it only then.
            device.backend().download(&*memory, 0, &mut [0; 4])?;
            Ok(Scratch { memory, bytes })
        };
        let ranks = devices.iter().map(exchange).collect::<Result<_>>()?;
        let bytes = size_of::<u32>();
        let failed = Scratch { memory: devices[0].backend().allocate_host(bytes)?.into(), bytes };
        Ok(Exchange { ranks, failed })
    }

    /// The exchange of each rank.
    pub(crate) fn ranks(&self) -> &[Scratch] {
        &self.ranks
    }

    /// The word in host memory.
    pub(crate) fn failed(&self) -> &Scratch {
        &self.failed
    }

    /// Packets that an exchange has for the message of a rank.
    pub(crate) fn capacity(&self) -> usize {
        capacity(self.ranks.len())
    }

    /// Ends all kernels that wait for other ranks, now or later.
    pub(super) fn fail(&self) {
        if let Some(word) = self.word() {
            word.store(1, Ordering::SeqCst);
        }
    }

    /// # Errors
    /// `DeviceFault` once a rank has failed.
    pub(super) fn check(&self) -> Result<()> {
        if self.word().is_none_or(|word| word.load(Ordering::SeqCst) == 0) {
            return Ok(());
        }
        let reason = "a rank of the group has failed, or did not reach a collective; the group cannot be used again";
        Err(Error::DeviceFault { device: "cuda".to_string(), reason: reason.to_string() })
    }

    fn word(&self) -> Option<&AtomicU32> {
        // SAFETY: the address is that of a word, aligned, which lives as long as this; the host and kernels access it
        // atomically.
        self.failed.memory.host().map(|word| unsafe { word.cast::<AtomicU32>().as_ref() })
    }
}

fn capacity(ranks: usize) -> usize {
    PACKETS / (ranks - 1).max(1)
}
