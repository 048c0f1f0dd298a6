//! A CUDA device that runs nothing. It records the launches of operations, and compiles their kernels on request.

use std::{
    any::Any,
    collections::HashSet,
    ptr::NonNull,
    sync::{Arc, Mutex},
};

use kvant::{
    Device, Error, Result,
    gpu::{self, Executor, Launch, LaunchPass, Limits, Memory, Replay, Wait, compile_cuda},
};

/// The GPU that launches are built for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Model {
    #[default]
    H200,
    /// Before Hopper.
    A100,
    /// Before Hopper, with little shared memory, as A10, L4, L40 and other GeForce cards.
    Rtx4090,
    /// After Hopper, with as little shared memory as the RTX 4090.
    Rtx5090,
}

impl Model {
    /// The architecture of its kernels.
    pub fn arch(self) -> &'static str {
        match self {
            Model::H200 => "sm_90a",
            Model::A100 => "sm_80",
            Model::Rtx4090 => "sm_89",
            Model::Rtx5090 => "sm_120a",
        }
    }

    pub fn limits(self) -> Limits {
        let (kib, busy_groups) = match self {
            Model::H200 => (227, 132),
            Model::A100 => (163, 108),
            Model::Rtx4090 => (99, 128),
            Model::Rtx5090 => (99, 170),
        };
        let clusters = matches!(self, Model::H200 | Model::Rtx5090);
        let warpgroup_products = self == Model::H200;
        Limits {
            threads: 1024,
            threadgroup_bytes: kib << 10,
            busy_groups,
            warpgroup_products,
            library_products: true,
            clusters,
        }
    }
}

/// Records launches instead of running them.
#[derive(Clone, Default)]
pub struct Launches {
    pub model: Model,
    /// Whether to compile each kernel, once.
    pub compiles: bool,
    /// File, kernel and constants of the launches.
    pub kernels: Arc<Mutex<HashSet<String>>>,
    /// File, kernel, constants and grid of every launch, in order.
    pub all: Arc<Mutex<Vec<String>>>,
}

/// A device whose launches are discarded.
pub fn device() -> Device {
    gpu::cuda_device(Launches::default())
}

struct Nothing;

impl Memory for Nothing {
    fn host(&self) -> Option<NonNull<u8>> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Executor for Launches {
    fn name(&self) -> String {
        "no GPU".to_string()
    }
    fn limits(&self) -> Limits {
        self.model.limits()
    }
    fn number(&self) -> Option<usize> {
        Some(0)
    }
    fn share_with(&self, _others: &[usize]) -> Result<()> {
        Ok(())
    }
    fn allocate_host(&self, _bytes: usize) -> Result<Box<dyn Memory>> {
        Ok(Box::new(Nothing))
    }
    fn allocate(&self, _bytes: usize, _zeroed: bool) -> Result<Box<dyn Memory>> {
        Ok(Box::new(Nothing))
    }
    fn upload(&self, _memory: &dyn Memory, _offset: usize, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }
    fn download(&self, _memory: &dyn Memory, _offset: usize, _out: &mut [u8]) -> Result<()> {
        Ok(())
    }
    fn begin(&self) -> Result<Box<dyn LaunchPass>> {
        Ok(Box::new(self.clone()))
    }
    fn capture(self: Arc<Self>, launches: Vec<Launch>) -> Result<Box<dyn Replay>> {
        let mut pass = (*self).clone();
        launches.into_iter().try_for_each(|launch| pass.launch(launch))?;
        Ok(Box::new(pass))
    }
}

impl Replay for Launches {
    fn replay(&self) -> Result<Option<Box<dyn Wait>>> {
        Ok(None)
    }
}

impl LaunchPass for Launches {
    fn launch(&mut self, launch: Launch) -> Result<()> {
        let [x, y, z] = launch.grid.groups;
        assert!(x <= i32::MAX as u32 && y <= 65535 && z <= 65535, "{launch:?}: CUDA has no such grid");
        let key = format!("{}/{} {:?}", launch.source.name, launch.kernel, launch.constants);
        self.all.lock().unwrap().push(format!("{key} {:?}", launch.grid));
        let new = self.kernels.lock().unwrap().insert(key);
        if !(self.compiles && new) {
            return Ok(());
        }
        let fault = |reason| Error::DeviceFault { device: "nvrtc".to_string(), reason };
        let code = compile_cuda(&launch, self.model.arch()).map_err(fault)?;
        assert!(code.starts_with(b"\x7fELF"), "{launch:?}: not a cubin");
        Ok(())
    }
    fn commit(self: Box<Self>) -> Result<Box<dyn Wait>> {
        Ok(Box::new(Launches::default()))
    }
}

impl Wait for Launches {
    fn wait(self: Box<Self>) -> Result<()> {
        Ok(())
    }
    fn is_done(&self) -> bool {
        true
    }
}
