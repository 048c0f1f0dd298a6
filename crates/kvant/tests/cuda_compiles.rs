//! Every CUDA kernel compiles for an H200, on any machine that has libnvrtc: the launches that the operations build
//! are handed to the compiler instead of a GPU. Whether the kernels are right is for the conformance tests to say, on
//! a GPU.

use std::{
    any::Any,
    collections::HashSet,
    ptr::NonNull,
    sync::{Arc, Mutex},
};

use kvant::{
    DType, Device, Error, Result, Tensor,
    gpu::{self, Executor, Launch, LaunchPass, Limits, Memory, Replay, Wait, compile_cuda},
    ops::{self, Softcap},
};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Compiles what it is asked to run, each kernel once.
#[derive(Clone, Default)]
struct Compiler {
    seen: Arc<Mutex<HashSet<String>>>,
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
        Limits { threads: 1024, threadgroup_bytes: 227 << 10, busy_groups: 132 }
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

fn device() -> Option<(Device, Compiler)> {
    if !gpu::has_cuda_compiler() {
        eprintln!("libnvrtc cannot be loaded: the CUDA kernels are not compiled on this machine");
        return None;
    }
    let compiler = Compiler::default();
    Some((gpu::cuda_device(compiler.clone()), compiler))
}

#[test]
fn every_kernel_compiles() {
    let Some((device, compiler)) = device() else { return };
    for x in FLOATS {
        for out in FLOATS {
            let (x, out) = (zeros(&device, x, &[2, 3]), zeros(&device, out, &[2, 3]));
            let mut enc = device.encoder().unwrap();
            ops::softcap(&mut enc, &Softcap { x: &x, cap: 30.0, out: &out }).unwrap();
            enc.commit().unwrap().wait().unwrap();
        }
    }
    let count = compiler.seen.lock().unwrap().len();
    assert!(count >= 9, "{count} kernels were compiled");
}

fn zeros(device: &Device, dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(device, dtype, shape).unwrap()
}
