//! A GPU that reports lower limits than it has, to test kernels as on smaller GPUs.

use std::sync::Arc;

use kvant::{
    Device, Result,
    gpu::{self, Executor, Launch, LaunchPass, Limits, Memory, Replay},
};

use super::without_gpu::Model;

struct Limited {
    gpu: Arc<dyn Executor>,
    limits: Limits,
}

/// This machine's NVIDIA GPU with the limits of a smaller one; `None` without a GPU.
pub fn cuda_like(model: Model) -> Option<Device> {
    Some(gpu::cuda_device(Limited { gpu: gpu::cuda_executor()?, limits: model.limits() }))
}

impl Executor for Limited {
    fn name(&self) -> String {
        format!("{} with {} KiB", self.gpu.name(), self.limits.threadgroup_bytes >> 10)
    }
    fn limits(&self) -> Limits {
        self.limits
    }
    fn in_order(&self) -> bool {
        self.gpu.in_order()
    }
    fn allocate(&self, bytes: usize, zeroed: bool) -> Result<Box<dyn Memory>> {
        self.gpu.allocate(bytes, zeroed)
    }
    fn upload(&self, memory: &dyn Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        self.gpu.upload(memory, offset, bytes)
    }
    fn download(&self, memory: &dyn Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        self.gpu.download(memory, offset, out)
    }
    fn begin(&self) -> Result<Box<dyn LaunchPass>> {
        self.gpu.begin()
    }
    fn capture(self: Arc<Self>, launches: Vec<Launch>) -> Result<Box<dyn Replay>> {
        self.gpu.clone().capture(launches)
    }
}
