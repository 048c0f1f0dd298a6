//! Compiles kernels when they are first used, and keeps them.

use std::{
    collections::{HashMap, hash_map::Entry},
    ffi::c_void,
    ptr::NonNull,
    sync::{Arc, Mutex},
};

use objc2::{
    available,
    rc::{Retained, autoreleasepool},
    runtime::ProtocolObject,
};
use objc2_foundation::{NSError, NSString};
use objc2_metal::{
    MTLCompileOptions, MTLComputePipelineDescriptor, MTLComputePipelineState, MTLDataType, MTLDevice,
    MTLFunctionConstantValues, MTLLanguageVersion, MTLLibrary, MTLMathFloatingPointFunctions, MTLMathMode,
    MTLPipelineOption,
};

use super::lock;
use crate::{
    DeviceKind, Error, KernelReport, Result,
    gpu::{Constant, Launch, Limits, Source},
    metal::SIMD,
};

/// A specialised kernel, ready to run.
pub(super) struct Pipeline {
    pub state: Retained<ProtocolObject<dyn MTLComputePipelineState>>,
    threads: usize,
    /// Threadgroup memory that the kernel declares.
    static_bytes: usize,
}

/// The kernels compiled so far.
pub(super) struct Pipelines {
    device: Retained<ProtocolObject<dyn MTLDevice>>,
    name: String,
    limits: Limits,
    cache: Mutex<PipelineCache>,
}

#[derive(Default)]
struct PipelineCache {
    /// Libraries by the address of their source.
    libraries: HashMap<usize, Library>,
    /// Pipelines by source and kernel.
    kernels: HashMap<(usize, &'static str), Variants>,
    /// Rejected kernels that a simpler one replaces. They are not compiled again.
    refused: Vec<KernelReport>,
}

/// The pipelines of a kernel.
type Variants = Vec<(Variant, Arc<Pipeline>)>;

/// A compiled kernel file.
type Library = Retained<ProtocolObject<dyn MTLLibrary>>;

/// The properties that distinguish pipelines of one kernel.
struct Variant {
    source: &'static str,
    constants: Vec<(&'static str, Constant)>,
    /// Threads of a threadgroup, which determine the registers that the compiler gives each thread.
    threads: u32,
}

impl Variant {
    fn fits(&self, launch: &Launch) -> bool {
        self.threads == threads_of(launch) && self.constants == launch.constants
    }
}

/// Bytes of threadgroup memory that are set for a launch: the minimum if its kernel uses none.
pub(super) fn requested_bytes(launch: &Launch) -> usize {
    (launch.threadgroup_bytes as usize).max(16)
}

fn threads_of(launch: &Launch) -> u32 {
    launch.grid.threads.iter().product()
}

impl Pipelines {
    pub(super) fn new(device: Retained<ProtocolObject<dyn MTLDevice>>, name: &str, limits: Limits) -> Pipelines {
        Pipelines { device, name: name.to_string(), limits, cache: Mutex::default() }
    }

    /// The pipeline of a launch.
    ///
    /// # Errors
    /// `Compile` if Metal rejects the kernel, `Unsupported` if the launch exceeds the pipeline's limits.
    pub(super) fn get(&self, launch: &Launch) -> Result<Arc<Pipeline>> {
        let mut cache = lock(&self.cache);
        let PipelineCache { libraries, kernels, .. } = &mut *cache;
        let source = std::ptr::from_ref(launch.source) as usize;
        let variants = kernels.entry((source, launch.kernel)).or_default();
        if let Some((_, pipeline)) = variants.iter().find(|(variant, _)| variant.fits(launch)) {
            self.check(launch, pipeline)?;
            return Ok(pipeline.clone());
        }
        let pipeline = autoreleasepool(|_| {
            let library = match libraries.entry(source) {
                Entry::Occupied(entry) => &*entry.into_mut(),
                Entry::Vacant(entry) => &*entry.insert(self.library(launch.source)?),
            };
            self.pipeline(launch, library)
        })?;
        self.check(launch, &pipeline)?;
        let pipeline = Arc::new(pipeline);
        let variant =
            Variant { source: launch.source.name, constants: launch.constants.clone(), threads: threads_of(launch) };
        variants.push((variant, pipeline.clone()));
        Ok(pipeline)
    }

    /// Whether Metal rejects the launch's kernel. The first rejection of a kernel is logged as a warning.
    pub(super) fn refuses(&self, launch: &Launch) -> bool {
        let name = || name_of(launch.source.name, launch.kernel);
        let constants = || format!("{:?}", launch.constants);
        if lock(&self.cache).refused.iter().any(|known| known.name == name() && known.constants == constants()) {
            return true;
        }
        let Err(error) = self.get(launch) else { return false };
        tracing::warn!(%error, "{} is replaced by a slower kernel", name());
        let refusal = Some(error.to_string());
        let report = KernelReport { name: name(), constants: constants(), threads: 0, threadgroup_bytes: 0, refusal };
        lock(&self.cache).refused.push(report);
        true
    }

    /// All compiled and rejected kernels, by name.
    pub(super) fn reports(&self) -> Vec<KernelReport> {
        let cache = lock(&self.cache);
        let mut reports = cache.refused.clone();
        for ((_, kernel), variants) in &cache.kernels {
            reports.extend(variants.iter().map(|(variant, pipeline)| KernelReport {
                name: name_of(variant.source, kernel),
                constants: format!("{:?}", variant.constants),
                threads: pipeline.threads,
                threadgroup_bytes: pipeline.static_bytes,
                refusal: None,
            }));
        }
        reports.sort_by(|a, b| (&a.name, &a.constants).cmp(&(&b.name, &b.constants)));
        reports
    }

    /// Compiles a kernel file.
    fn library(&self, source: &'static Source) -> Result<Library> {
        let library = self
            .device
            .newLibraryWithSource_options_error(&NSString::from_str(&source.expand()), Some(&options()))
            .map_err(|error| self.refused(source.name, &error))?;
        library.setLabel(Some(&NSString::from_str(source.name)));
        Ok(library)
    }

    /// Compiles a kernel for a launch.
    fn pipeline(&self, launch: &Launch, library: &Library) -> Result<Pipeline> {
        let kernel = name_of(launch.source.name, launch.kernel);
        let values = MTLFunctionConstantValues::new();
        for &(name, value) in &launch.constants {
            let (value, kind) = match &value {
                Constant::Bool(value) => (NonNull::from(value).cast::<c_void>(), MTLDataType::Bool),
                Constant::UInt(value) => (NonNull::from(value).cast::<c_void>(), MTLDataType::UInt),
            };
            // SAFETY: Metal copies the value now; it has the type that `kind` names.
            unsafe { values.setConstantValue_type_withName(value, kind, &NSString::from_str(name)) };
        }
        let function = library
            .newFunctionWithName_constantValues_error(&NSString::from_str(launch.kernel), &values)
            .map_err(|error| self.refused(&kernel, &error))?;
        let descriptor = MTLComputePipelineDescriptor::new();
        let label = format!("{}: {kernel} {:?}", launch.op, launch.constants);
        descriptor.setLabel(Some(&NSString::from_str(&label)));
        descriptor.setComputeFunction(Some(&function));
        // Never a single SIMD-group: with that limit, Apple's compiler has been seen to misplace barriers.
        descriptor.setMaxTotalThreadsPerThreadgroup((threads_of(launch) as usize).max(2 * SIMD));
        let state = self
            .device
            .newComputePipelineStateWithDescriptor_options_reflection_error(&descriptor, MTLPipelineOption::None, None)
            .map_err(|error| self.refused(&kernel, &error))?;
        let width = state.threadExecutionWidth();
        if width != SIMD {
            return Err(unsupported(launch, format!("its SIMD-groups have {width} threads, the kernels take {SIMD}")));
        }
        tracing::debug!("{label}: compiled");
        let threads = state.maxTotalThreadsPerThreadgroup();
        let static_bytes = state.staticThreadgroupMemoryLength();
        Ok(Pipeline { state, threads, static_bytes })
    }

    /// Checks that the pipeline's limits allow the launch.
    fn check(&self, launch: &Launch, pipeline: &Pipeline) -> Result<()> {
        let (threads, bytes) = (threads_of(launch) as usize, pipeline.static_bytes + requested_bytes(launch));
        let (max_threads, max_bytes) = (pipeline.threads, self.limits.threadgroup_bytes);
        if threads <= max_threads && bytes <= max_bytes {
            return Ok(());
        }
        Err(unsupported(
            launch,
            format!(
                "{}/{} in threadgroups of {threads} threads and {bytes} bytes; here it may have {max_threads} threads \
                 and {max_bytes} bytes",
                launch.source.name, launch.kernel
            ),
        ))
    }

    fn refused(&self, kernel: &str, error: &NSError) -> Error {
        let message = error.localizedDescription().to_string();
        Error::Compile { device: self.name.clone(), kernel: kernel.to_string(), message }
    }
}

fn name_of(source: &str, kernel: &str) -> String {
    format!("{source}/{kernel}")
}

/// The compiler options of kernel files.
fn options() -> Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    options.setLanguageVersion(MTLLanguageVersion::Version3_0);
    // These kernels use NaN and infinity.
    if available!(macos = 15.0) {
        options.setMathMode(MTLMathMode::Safe);
        options.setMathFloatingPointFunctions(MTLMathFloatingPointFunctions::Precise);
    } else {
        #[expect(deprecated, reason = "its successor is not there before macOS 15")]
        options.setFastMathEnabled(false);
    }
    options
}

/// A kernel with the matrix operations that all kernels of tiles need.
const TILE: &str = "
#include <metal_stdlib>
using namespace metal;
kernel void tile(device float *x [[buffer(0)]]) {
    simdgroup_float8x8 a;
    simdgroup_load(a, x, 8);
    simdgroup_multiply_accumulate(a, a, a, a);
    simdgroup_store(a, x, 8);
}
";

/// Checks that the device supports SIMD-group matrices, which no family before Apple7 guarantees.
pub(super) fn check_simdgroup_matrices(device: &ProtocolObject<dyn MTLDevice>) -> std::result::Result<(), String> {
    let refused = |error: Retained<NSError>| error.localizedDescription().to_string();
    let library = device.newLibraryWithSource_options_error(&NSString::from_str(TILE), Some(&options()));
    let function = library.map_err(refused)?.newFunctionWithName(&NSString::from_str("tile"));
    let function = function.ok_or("its library lacks the kernel")?;
    device.newComputePipelineStateWithFunction_error(&function).map_err(refused)?;
    Ok(())
}

fn unsupported(launch: &Launch, reason: String) -> Error {
    Error::Unsupported { op: launch.op, device: DeviceKind::Metal.name(), reason }
}
