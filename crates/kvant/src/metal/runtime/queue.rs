//! Encodes passes, and watches them until they are done.

use std::{
    collections::VecDeque,
    ffi::c_void,
    ptr::NonNull,
    sync::{Arc, Mutex},
};

use objc2::{
    rc::{Retained, autoreleasepool},
    runtime::ProtocolObject,
};
use objc2_foundation::NSString;
use objc2_metal::{
    MTLBarrierScope, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandEncoder, MTLCommandQueue,
    MTLComputeCommandEncoder, MTLDevice, MTLDispatchType, MTLFence, MTLSize,
};

use super::{Buffer, BufferPool, SharedBuffer, lock, pipelines::Pipeline};
use crate::{Error, Result, gpu::Launch};

/// A launch with all that encoding it takes.
pub(super) struct Step {
    /// Holds the memory that the launch uses.
    pub launch: Launch,
    pub pipeline: Arc<Pipeline>,
    /// Whether it must wait for the ones before it.
    pub barrier: bool,
}

/// The command queue.
pub(super) struct Queue {
    device: String,
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    /// Each pass waits for the one before it, and updates the fence when it is done.
    fence: Retained<ProtocolObject<dyn MTLFence>>,
    pool: BufferPool,
    /// Held while a pass is encoded and committed, so that passes are committed in the order of their numbers; and
    /// during transfers.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Committed, not known to be done; in order.
    flights: VecDeque<Flight>,
    /// Faults of passes that nobody waited for yet, by number.
    faults: Vec<(u64, Error)>,
}

/// A committed pass. Command buffers do not retain what they use: this does.
struct Flight {
    pass: u64,
    commands: Commands,
    steps: Arc<[Step]>,
}

/// What waiting for a pass takes.
pub(super) struct Running {
    pass: u64,
    commands: Commands,
    steps: Arc<[Step]>,
}

/// A committed command buffer.
#[derive(Clone)]
struct Commands(Retained<ProtocolObject<dyn MTLCommandBuffer>>);

// SAFETY: after its commit, a command buffer is only asked for its status and its error, waited for, and released: all
// of which Metal allows on any thread.
unsafe impl Send for Commands {}
// SAFETY: as above.
unsafe impl Sync for Commands {}

impl Commands {
    fn is_done(&self) -> bool {
        matches!(self.0.status(), MTLCommandBufferStatus::Completed | MTLCommandBufferStatus::Error)
    }

    /// What went wrong, once it is done.
    fn fault(&self, device: &str, steps: &[Step]) -> Result<()> {
        if self.0.status() != MTLCommandBufferStatus::Error {
            return Ok(());
        }
        let why = autoreleasepool(|_| match self.0.error() {
            Some(error) => format!("{} (code {})", error.localizedDescription(), error.code()),
            None => "no reason given".to_string(),
        });
        Err(Error::DeviceFault { device: device.to_string(), reason: format!("in {}: {why}", label(steps)) })
    }
}

/// The operations of a pass, for captures and messages.
fn label(steps: &[Step]) -> String {
    let mut ops: Vec<&str> = Vec::new();
    for step in steps {
        if !ops.contains(&step.launch.op) {
            ops.push(step.launch.op);
        }
    }
    format!("kvant: {} of {} launches", ops.join(", "), steps.len())
}

impl Queue {
    pub(super) fn new(device: &ProtocolObject<dyn MTLDevice>, name: &str, pool: BufferPool) -> Option<Queue> {
        let queue = device.newCommandQueue()?;
        queue.setLabel(Some(&NSString::from_str("kvant")));
        let fence = device.newFence()?;
        fence.setLabel(Some(&NSString::from_str("kvant: from pass to pass")));
        Some(Queue { device: name.to_string(), queue, fence, pool, state: Mutex::default() })
    }

    /// Encodes the steps as one pass and commits it. Without steps there is nothing to wait for.
    pub(super) fn commit(&self, steps: Arc<[Step]>) -> Result<Option<Running>> {
        if steps.is_empty() {
            return Ok(None);
        }
        let mut state = lock(&self.state);
        let finished = self.finish(&mut state);
        let (pass, commands) = autoreleasepool(|_| -> Result<_> {
            let refused = |what: &str| Error::DeviceFault {
                device: self.device.clone(),
                reason: format!("Metal gives no {what} for {}", label(&steps)),
            };
            let commands =
                self.queue.commandBufferWithUnretainedReferences().ok_or_else(|| refused("command buffer"))?;
            let encoder = commands
                .computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent)
                .ok_or_else(|| refused("compute encoder"))?;
            let label = NSString::from_str(&label(&steps));
            commands.setLabel(Some(&label));
            encoder.setLabel(Some(&label));
            if !state.flights.is_empty() {
                encoder.waitForFence(&self.fence);
            }
            steps.iter().for_each(|step| encode(&encoder, step));
            encoder.updateFence(&self.fence);
            encoder.endEncoding();
            let pass = lock(&self.pool).commit();
            commands.commit();
            Ok((pass, Commands(commands)))
        })?;
        state.flights.push_back(Flight { pass, commands: commands.clone(), steps: steps.clone() });
        drop(state);
        drop(finished);
        Ok(Some(Running { pass, commands, steps }))
    }

    /// Waits for a pass; what went wrong in it.
    pub(super) fn wait(&self, running: Running) -> Result<()> {
        running.commands.0.waitUntilCompleted();
        let mut state = lock(&self.state);
        let finished = self.finish(&mut state);
        state.faults.retain(|(pass, _)| *pass != running.pass);
        drop(state);
        drop(finished);
        running.commands.fault(&self.device, &running.steps)
    }

    /// Waits for all committed passes and calls `access` while none can be committed. A fault that nobody has been told
    /// of is returned instead: what would be read is not what was to be computed.
    pub(super) fn exclusively(&self, access: impl FnOnce()) -> Result<()> {
        let mut state = lock(&self.state);
        state.flights.iter().for_each(|flight| flight.commands.0.waitUntilCompleted());
        let finished = self.finish(&mut state);
        let result = match state.faults.is_empty() {
            true => {
                access();
                Ok(())
            }
            false => Err(state.faults.remove(0).1),
        };
        drop(state);
        drop(finished);
        result
    }

    /// Lets go of the memory of finished passes.
    pub(super) fn reap(&self) {
        let mut state = lock(&self.state);
        let finished = self.finish(&mut state);
        drop(state);
        drop(finished);
    }

    /// Takes the finished passes off the list, with the memory that the pool gives back to the system. They are to be
    /// dropped after the lock: dropping memory, and what holds it, may take any time.
    #[must_use]
    fn finish(&self, state: &mut State) -> Finished {
        let mut finished = Finished::default();
        while state.flights.front().is_some_and(|flight| flight.commands.is_done()) {
            let flight = state.flights.pop_front().expect("there is a front");
            if let Err(error) = flight.commands.fault(&self.device, &flight.steps) {
                tracing::error!("{error}");
                state.faults.push((flight.pass, error));
            }
            finished.surplus.extend(lock(&self.pool).complete(flight.pass));
            finished.flights.push(flight);
        }
        finished
    }
}

/// Finished passes, and memory that nothing uses, until they are dropped.
#[derive(Default)]
struct Finished {
    flights: Vec<Flight>,
    surplus: Vec<SharedBuffer>,
}

impl Drop for Queue {
    /// What unfinished passes use must outlive them.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.flights.iter().for_each(|flight| flight.commands.0.waitUntilCompleted());
    }
}

/// Adds a launch to the pass.
fn encode(encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>, step: &Step) {
    let Step { launch, pipeline, barrier } = step;
    if *barrier {
        encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
    }
    encoder.setComputePipelineState(&pipeline.state);
    for binding in &launch.bindings {
        let buffer = Buffer::of(binding.memory());
        // SAFETY: the binding lies within the buffer, and the flight keeps the launch, which keeps the buffer. The
        // kernel takes it for what it is: layouts and kernels are tested launch by launch.
        unsafe { encoder.setBuffer_offset_atIndex(Some(buffer.metal()), binding.offset, binding.index as usize) };
    }
    if let Some((index, bytes)) = &launch.params {
        debug_assert!(bytes.len() <= 4096, "setBytes takes no more");
        let start = NonNull::from(bytes.as_slice()).cast::<c_void>();
        // SAFETY: Metal copies these bytes now.
        unsafe { encoder.setBytes_length_atIndex(start, bytes.len(), *index as usize) };
    }
    if launch.threadgroup_bytes > 0 {
        // SAFETY: a multiple of 16 within the device's limit: `Builder::push` and `Pipelines::get` checked it.
        unsafe { encoder.setThreadgroupMemoryLength_atIndex(launch.threadgroup_bytes as usize, 0) };
    }
    let size = |[width, height, depth]: [u32; 3]| MTLSize {
        width: width as usize,
        height: height as usize,
        depth: depth as usize,
    };
    encoder.dispatchThreadgroups_threadsPerThreadgroup(size(launch.grid.groups), size(launch.grid.threads));
}
