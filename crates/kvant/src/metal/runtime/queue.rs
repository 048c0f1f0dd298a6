//! Encodes and commits passes, and tracks them until they are done.

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
    /// The launch, which holds the memory that it uses.
    pub launch: Launch,
    pub pipeline: Arc<Pipeline>,
    /// Whether it must wait for earlier launches.
    pub barrier: bool,
}

/// Launches of a command buffer. Fewer launches: a command buffer has a fixed cost. More: macOS aborts a command buffer
/// that occupies the GPU for too long, and a pass may be a long prompt through a whole model. Neither has been measured
/// on a Mac.
const LAUNCHES: usize = 32;

/// The queue that passes are committed to.
pub(super) struct Queue {
    device: Retained<ProtocolObject<dyn MTLDevice>>,
    name: Arc<str>,
    pool: SharedPool,
    /// Locked while a pass is encoded and committed, so that passes are committed in the order of their numbers; and
    /// during transfers.
    state: Mutex<QueueState>,
}

struct QueueState {
    line: Line,
    in_flight: InFlight<CommittedPass>,
}

/// A command queue, and the fence that orders its command buffers: each waits for the previous one, and updates the
/// fence when it is done.
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

    /// Encodes a part of a pass and commits it. `first`: the queue is empty.
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

/// A committed pass: one command buffer for every [`LAUNCHES`] steps. Command buffers do not retain their resources, so
/// this keeps them alive.
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

    /// The fault of the first command buffer that failed: later ones may have failed because of it.
    fn fault(&self) -> Option<Error> {
        let mut pieces = self.pieces.iter().zip(self.steps.chunks(LAUNCHES));
        let (why, steps) = pieces.find_map(|(commands, steps)| Some((commands.fault()?, steps)))?;
        Some(Error::DeviceFault { device: self.device.to_string(), reason: format!("in {}: {why}", label(steps)) })
    }
}

/// A committed pass to wait for.
pub(super) struct Running {
    pass: u64,
    work: CommittedPass,
}

impl Running {
    pub(super) fn is_done(&self) -> bool {
        self.work.is_done()
    }
}

/// A committed command buffer.
struct Commands(Retained<ProtocolObject<dyn MTLCommandBuffer>>);

// SAFETY: after its commit, a command buffer is only waited for, queried for its status and error, and released; Metal
// allows this on any thread.
unsafe impl Send for Commands {}
// SAFETY: as above.
unsafe impl Sync for Commands {}

impl Commands {
    fn is_done(&self) -> bool {
        matches!(self.0.status(), MTLCommandBufferStatus::Completed | MTLCommandBufferStatus::Error)
    }

    /// The error of a finished command buffer, if it failed.
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

/// The names of the steps' operations, for GPU captures and messages.
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
        let state = QueueState { line: Line::new(&device)?, in_flight: InFlight::new() };
        Some(Queue { device, name: name.into(), pool, state: Mutex::new(state) })
    }

    /// Encodes the steps as one pass and commits it. Returns `None` without steps.
    pub(super) fn commit(&self, steps: Arc<[PreparedLaunch]>) -> Result<Option<Running>> {
        if steps.is_empty() {
            return Ok(None);
        }
        let mut state = lock(&self.state);
        let mut finished = self.finish(&mut state);
        let result = autoreleasepool(|_| -> Result<Option<Running>> {
            finished.extend(self.renew(&mut state)?);
            let pass = lock(&self.pool).commit();
            // Each buffer is committed before the next is requested: a queue has at most 64.
            let mut pieces = Vec::with_capacity(steps.len().div_ceil(LAUNCHES));
            let committed = steps.chunks(LAUNCHES).try_for_each(|piece| {
                let first = pieces.is_empty() && state.in_flight.is_empty();
                pieces.push(state.line.commit(piece, first).map_err(|what| self.refused(what, &label(piece)))?);
                Ok(())
            });
            // Recorded even if a later piece failed to commit, because the earlier pieces are committed.
            let work = CommittedPass { device: self.name.clone(), pieces: pieces.into(), steps };
            state.in_flight.add(pass, work.clone());
            committed.map(|()| Some(Running { pass, work }))
        });
        drop(state);
        drop(finished);
        result
    }

    /// Replaces the command queue after a failure: macOS may ignore commits to a queue whose pass took too long.
    fn renew(&self, state: &mut QueueState) -> Result<Finished> {
        if !state.in_flight.have_failed() {
            return Ok(Finished::default());
        }
        state.in_flight.wait();
        let finished = self.finish(state);
        state.line = Line::new(&self.device).ok_or_else(|| self.refused("command queue", "passes after a failure"))?;
        state.in_flight.clear_failure();
        Ok(finished)
    }

    fn refused(&self, what: &str, purpose: &str) -> Error {
        Error::DeviceFault { device: self.name.to_string(), reason: format!("Metal gives no {what} for {purpose}") }
    }

    /// Waits for a pass, and returns its error if it failed.
    pub(super) fn wait(&self, running: Running) -> Result<()> {
        running.work.wait();
        let mut state = lock(&self.state);
        let finished = self.finish(&mut state);
        state.in_flight.reported(running.pass);
        drop(state);
        drop(finished);
        running.work.fault().map_or(Ok(()), Err)
    }

    /// Waits for the committed passes that use the bytes of a buffer, and calls `access` while no pass can be
    /// committed. Returns an unreported fault instead, if there was one: the memory then does not hold the results.
    pub(super) fn exclusively(&self, memory: &dyn Memory, bytes: Range<usize>, access: impl FnOnce()) -> Result<()> {
        let mut state = lock(&self.state);
        state.in_flight.wait_for(|pass| pass.uses(memory, &bytes));
        let finished = self.finish(&mut state);
        let result = match state.in_flight.take_fault() {
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
        lock(&self.state).in_flight.wait();
        self.reap();
    }

    /// Releases the memory of finished passes.
    pub(super) fn reap(&self) {
        let mut state = lock(&self.state);
        let finished = self.finish(&mut state);
        drop(state);
        drop(finished);
    }

    /// Removes the finished passes, and the memory that the pool returns to the system. Drop them after the lock:
    /// dropping memory and its holders may take any time.
    #[must_use]
    fn finish(&self, state: &mut QueueState) -> Finished {
        let passes = state.in_flight.take_finished();
        let surplus = passes.iter().flat_map(|(pass, _)| lock(&self.pool).complete(*pass)).collect();
        Finished { passes, surplus }
    }
}

/// Finished passes and unused memory, to be dropped.
#[derive(Default)]
struct Finished {
    passes: Vec<(u64, CommittedPass)>,
    surplus: Vec<SharedBuffer>,
}

impl Finished {
    fn extend(&mut self, other: Finished) {
        self.passes.extend(other.passes);
        self.surplus.extend(other.surplus);
    }
}

impl Drop for Queue {
    /// Waits for unfinished passes, whose memory must outlive them.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.in_flight.wait();
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
        // SAFETY: the binding is within the buffer, and the committed pass keeps the launch, which keeps the buffer.
        // Tests check launch by launch that the kernel's layout is the binding's.
        unsafe { encoder.setBuffer_offset_atIndex(Some(buffer.metal()), binding.offset, binding.index as usize) };
    }
    if let Some((index, bytes)) = &launch.params {
        debug_assert!(bytes.len() <= 4096, "setBytes takes no more");
        let start = NonNull::from(bytes.as_slice()).cast::<c_void>();
        // SAFETY: Metal copies these bytes now.
        unsafe { encoder.setBytes_length_atIndex(start, bytes.len(), *index as usize) };
    }
    // Set for every launch, because a value set by an earlier launch would add to this one's memory.
    // SAFETY: a multiple of 16 within the device's limit: `Builder::push` and `Pipelines::get` checked it.
    unsafe { encoder.setThreadgroupMemoryLength_atIndex(requested_bytes(launch), 0) };
    let size = |[width, height, depth]: [u32; 3]| MTLSize {
        width: width as usize,
        height: height as usize,
        depth: depth as usize,
    };
    encoder.dispatchThreadgroups_threadsPerThreadgroup(size(launch.grid.groups), size(launch.grid.threads));
}
