//! A CUDA device that runs nothing: the launches that the operations build are noted, and compiled if that is wanted.

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

/// Notes what it is asked to run.
#[derive(Clone, Default)]
pub struct Launches {
    /// What each kernel is compiled for, once: `sm_80` for GPUs before Hopper.
    pub compiles: Option<&'static str>,
    /// Whether launches are those of a GPU before Hopper, with the shared memory of an A100.
    pub before_hopper: bool,
    /// File, kernel and constants of what has been launched.
    pub kernels: Arc<Mutex<HashSet<String>>>,
    /// The same of every launch, in order, and its grid.
    pub all: Arc<Mutex<Vec<String>>>,
}

/// A device whose launches nobody looks at.
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
        let hopper = !self.before_hopper;
        Limits {
            threads: 1024,
            threadgroup_bytes: if hopper { 227 << 10 } else { 163 << 10 },
            busy_groups: if hopper { 132 } else { 108 },
            warpgroup_products: hopper,
            clusters: hopper,
        }
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
    fn capture(self: Arc<Self>, _launches: Vec<Launch>) -> Result<Box<dyn Replay>> {
        unreachable!("nothing is captured here")
    }
}

impl LaunchPass for Launches {
    fn launch(&mut self, launch: Launch) -> Result<()> {
        let [x, y, z] = launch.grid.groups;
        assert!(x <= i32::MAX as u32 && y <= 65535 && z <= 65535, "{launch:?}: CUDA has no such grid");
        let key = format!("{}/{} {:?}", launch.source.name, launch.kernel, launch.constants);
        self.all.lock().unwrap().push(format!("{key} {:?}", launch.grid));
        let new = self.kernels.lock().unwrap().insert(key);
        let Some(arch) = self.compiles.filter(|_| new) else { return Ok(()) };
        let fault = |reason| Error::DeviceFault { device: "nvrtc".to_string(), reason };
        let code = compile_cuda(&launch, arch).map_err(fault)?;
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
}
