//! A CUDA device that is a compiler: the launches that the operations build are compiled, and nothing runs.

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

/// Compiles what it is asked to run, each kernel once.
#[derive(Clone, Default)]
pub struct Compiler {
    /// File, kernel and constants of what has been compiled.
    pub seen: Arc<Mutex<HashSet<String>>>,
}

/// A device with a compiler that nobody looks at.
pub fn device() -> Device {
    gpu::cuda_device(Compiler::default())
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

impl Executor for Compiler {
    fn name(&self) -> String {
        "a compiler without a GPU".to_string()
    }
    fn limits(&self) -> Limits {
        Limits {
            threads: 1024,
            threadgroup_bytes: 227 << 10,
            busy_groups: 132,
            warpgroup_products: true,
            clusters: true,
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

impl LaunchPass for Compiler {
    fn launch(&mut self, launch: Launch) -> Result<()> {
        let key = format!("{}/{} {:?}", launch.source.name, launch.kernel, launch.constants);
        if !self.seen.lock().unwrap().insert(key) {
            return Ok(());
        }
        let fault = |reason| Error::DeviceFault { device: "nvrtc".to_string(), reason };
        let code = compile_cuda(&launch, "sm_90a").map_err(fault)?;
        assert!(code.starts_with(b"\x7fELF"), "{launch:?}: not a cubin");
        Ok(())
    }
    fn commit(self: Box<Self>) -> Result<Box<dyn Wait>> {
        Ok(Box::new(Compiler::default()))
    }
}

impl Wait for Compiler {
    fn wait(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
