//! Encodes passes, and watches them until they are done.

use std::{
    ffi::c_void,
    ops::Range,
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

use super::{
    MetalBuffer, SharedBuffer, SharedPool, lock,
    pipelines::{Pipeline, requested_bytes},
};
use crate::{
    Error, Result,
    gpu::{Binding, Launch, Memory},
    metal::in_flight::{CommittedWork, InFlight},
};

/// A launch with its pipeline, ready to encode.
pub(super) struct PreparedLaunch {
    /// Holds the memory that the launch uses.
    pub launch: Launch,
    pub pipeline: Arc<Pipeline>,
    /// Whether it must wait for the ones before it.
    pub barrier: bool,
}

/// Launches of a command buffer. macOS aborts one that occupies the GPU for too long, and a pass may be a long
/// prompt's way through a whole model; every command buffer costs time of its own, though. No Mac has measured either.
const LAUNCHES: usize = 32;

/// Where passes are committed.
pub(super) struct Queue {
    device: Retained<ProtocolObject<dyn MTLDevice>>,
    name: Arc<str>,
    pool: SharedPool,
    /// Held while a pass is encoded and committed, so that passes are committed in the order of their numbers; and
    /// during transfers.
    state: Mutex<QueueState>,
}

struct QueueState {
    line: Line,
    flights: InFlight<CommittedPass>,
}

/// A command queue, and the fence that orders what is in it: each command buffer waits for the one before it, and
/// updates the fence when it is done.
struct Line {
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    fence: Retained<ProtocolObject<dyn MTLFence>>,
}

impl Line {
    fn new(device: &ProtocolObject<dyn MTLDevice>) -> Option<Line> {
        let queue = device.newCommandQueue()?;
        queue.setLabel(Some(&NSString::from_str("kvant")));
        let fence = device.newFence()?;
        fence.setLabel(Some(&NSString::from_str("kvant: from command buffer to command buffer")));
        Some(Line { queue, fence })
    }

    /// Encodes some steps of a pass and commits them. `first`: nothing is in the queue before them.
    fn commit(&self, steps: &[PreparedLaunch], first: bool) -> std::result::Result<Commands, &'static str> {
        let commands = self.queue.commandBufferWithUnretainedReferences().ok_or("command buffer")?;
        let encoder =
            commands.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent).ok_or("compute encoder")?;
        let label = NSString::from_str(&label(steps));
        commands.setLabel(Some(&label));
        encoder.setLabel(Some(&label));
        if !first {
            encoder.waitForFence(&self.fence);
        }
        steps.iter().for_each(|step| encode(&encoder, step));
        encoder.updateFence(&self.fence);
        encoder.endEncoding();
        commands.commit();
        Ok(Commands(commands))
    }
}

/// A committed pass: a command buffer for every [`LAUNCHES`] steps. They do not retain what they use: this does.
#[derive(Clone)]
struct CommittedPass {
    device: Arc<str>,
    pieces: Arc<[Commands]>,
    steps: Arc<[PreparedLaunch]>,
}

impl CommittedPass {
    /// Whether a launch reads or writes one of the bytes of a buffer.
    fn uses(&self, memory: &dyn Memory, bytes: &Range<usize>) -> bool {
        let wanted = std::ptr::from_ref(memory).cast::<()>() as usize;
        let meets = |binding: &Binding| {
            let range = binding.range();
            binding.allocation() == wanted && range.start < bytes.end && bytes.start < range.end
        };
        self.steps.iter().any(|step| step.launch.bindings.iter().any(meets))
    }
}

impl CommittedWork for CommittedPass {
    fn is_done(&self) -> bool {
        self.pieces.iter().all(Commands::is_done)
    }

    fn wait(&self) {
        self.pieces.iter().for_each(|commands| commands.0.waitUntilCompleted());
    }

    /// Of the first command buffer that failed: those behind it may have failed because it did.
    fn fault(&self) -> Option<Error> {
        let mut pieces = self.pieces.iter().zip(self.steps.chunks(LAUNCHES));
        let (why, steps) = pieces.find_map(|(commands, steps)| Some((commands.fault()?, steps)))?;
        Some(Error::DeviceFault { device: self.device.to_string(), reason: format!("in {}: {why}", label(steps)) })
    }
}

/// A committed pass to wait for.
pub(super) struct Running {
    pass: u64,
    flight: CommittedPass,
}

impl Running {
    pub(super) fn is_done(&self) -> bool {
        self.flight.is_done()
    }
}

/// A committed command buffer.
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
    fn fault(&self) -> Option<String> {
        if self.0.status() != MTLCommandBufferStatus::Error {
            return None;
        }
        Some(autoreleasepool(|_| match self.0.error() {
            Some(error) => format!("{} (code {})", error.localizedDescription(), error.code()),
            None => "no reason given".to_string(),
        }))
    }
}

/// The operations of some steps, for captures and messages.
fn label(steps: &[PreparedLaunch]) -> String {
    let mut ops: Vec<&str> = Vec::new();
    for step in steps {
        if !ops.contains(&step.launch.op) {
            ops.push(step.launch.op);
        }
    }
    format!("kvant: {} of {} launches", ops.join(", "), steps.len())
}

impl Queue {
    pub(super) fn new(device: Retained<ProtocolObject<dyn MTLDevice>>, name: &str, pool: SharedPool) -> Option<Queue> {
        let state = QueueState { line: Line::new(&device)?, flights: InFlight::new() };
        Some(Queue { device, name: name.into(), pool, state: Mutex::new(state) })
    }

    /// Encodes the steps as one pass and commits it. Without steps there is nothing to wait for.
    pub(super) fn commit(&self, steps: Arc<[PreparedLaunch]>) -> Result<Option<Running>> {
        if steps.is_empty() {
            return Ok(None);
        }
        let mut state = lock(&self.state);
        let mut finished = self.finish(&mut state);
        let result = autoreleasepool(|_| -> Result<Option<Running>> {
            finished.extend(self.renew(&mut state)?);
            let pass = lock(&self.pool).commit();
            // Each is committed before the next is requested: a queue has at most 64.
            let mut pieces = Vec::with_capacity(steps.len().div_ceil(LAUNCHES));
            let committed = steps.chunks(LAUNCHES).try_for_each(|piece| {
                let first = pieces.is_empty() && state.flights.is_empty();
                pieces.push(state.line.commit(piece, first).map_err(|what| self.refused(what, &label(piece)))?);
                Ok(())
            });
            // Also when a later piece was refused: the previous ones are committed.
            let flight = CommittedPass { device: self.name.clone(), pieces: pieces.into(), steps };
            state.flights.add(pass, flight.clone());
            committed.map(|()| Some(Running { pass, flight }))
        });
        drop(state);
        drop(finished);
        result
    }

    /// Another command queue, when a pass has failed: macOS may ignore what is committed to one that took too long.
    fn renew(&self, state: &mut QueueState) -> Result<Finished> {
        if !state.flights.have_failed() {
            return Ok(Finished::default());
        }
        state.flights.wait();
        let finished = self.finish(state);
        state.line = Line::new(&self.device).ok_or_else(|| self.refused("command queue", "passes after a failure"))?;
        state.flights.forgive();
        Ok(finished)
    }

    fn refused(&self, what: &str, purpose: &str) -> Error {
        Error::DeviceFault { device: self.name.to_string(), reason: format!("Metal gives no {what} for {purpose}") }
    }

    /// Waits for a pass; what went wrong in it.
    pub(super) fn wait(&self, running: Running) -> Result<()> {
        running.flight.wait();
        let mut state = lock(&self.state);
        let finished = self.finish(&mut state);
        state.flights.reported(running.pass);
        drop(state);
        drop(finished);
        running.flight.fault().map_or(Ok(()), Err)
    }

    /// Waits for the committed passes that use the bytes of a buffer, and calls `access` while none can be committed.
    /// If a fault has not been reported, it is returned instead: the memory does not hold the results.
    pub(super) fn exclusively(&self, memory: &dyn Memory, bytes: Range<usize>, access: impl FnOnce()) -> Result<()> {
        let mut state = lock(&self.state);
        state.flights.wait_for(|pass| pass.uses(memory, &bytes));
        let finished = self.finish(&mut state);
        let result = match state.flights.take_fault() {
            Some(error) => Err(error),
            None => {
                access();
                Ok(())
            }
        };
        drop(state);
        drop(finished);
        result
    }

    /// Waits for all committed passes and releases their memory. The next transfer reports their faults.
    pub(super) fn settle(&self) {
        lock(&self.state).flights.wait();
        self.reap();
    }

    /// Releases the memory of finished passes.
    pub(super) fn reap(&self) {
        let mut state = lock(&self.state);
        let finished = self.finish(&mut state);
        drop(state);
        drop(finished);
    }

    /// Takes the finished passes off the list, with the memory that the pool gives back to the system. They are to be
    /// dropped after the lock: dropping memory, and what holds it, may take any time.
    #[must_use]
    fn finish(&self, state: &mut QueueState) -> Finished {
        let flights = state.flights.land();
        let surplus = flights.iter().flat_map(|(pass, _)| lock(&self.pool).complete(*pass)).collect();
        Finished { flights, surplus }
    }
}

/// Finished passes, and memory that nothing uses, until they are dropped.
#[derive(Default)]
struct Finished {
    flights: Vec<(u64, CommittedPass)>,
    surplus: Vec<SharedBuffer>,
}

impl Finished {
    fn extend(&mut self, other: Finished) {
        self.flights.extend(other.flights);
        self.surplus.extend(other.surplus);
    }
}

impl Drop for Queue {
    /// What unfinished passes use must outlive them.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.flights.wait();
    }
}

/// Adds a launch to a command buffer.
fn encode(encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>, step: &PreparedLaunch) {
    let PreparedLaunch { launch, pipeline, barrier } = step;
    if *barrier {
        encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
    }
    encoder.setComputePipelineState(&pipeline.state);
    for binding in &launch.bindings {
        let buffer = MetalBuffer::of(binding.memory());
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
    // For every launch: what an earlier one of the encoder has set would count with this one's own memory.
    // SAFETY: a multiple of 16 within the device's limit: `Builder::push` and `Pipelines::get` checked it.
    unsafe { encoder.setThreadgroupMemoryLength_atIndex(requested_bytes(launch), 0) };
    let size = |[width, height, depth]: [u32; 3]| MTLSize {
        width: width as usize,
        height: height as usize,
        depth: depth as usize,
    };
    encoder.dispatchThreadgroups_threadsPerThreadgroup(size(launch.grid.groups), size(launch.grid.threads));
}
