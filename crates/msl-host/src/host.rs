//! The host that simulates the GPU: compiler, runtime, and memory.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::library::Library;
use crate::runtime::{Region, Runtime};
use crate::source::Source;
use crate::toolchain::{Build, Toolchain};

pub(crate) struct Shared {
    pub toolchain: Toolchain,
    pub runtime: Runtime,
    pub runtime_path: PathBuf,
    /// Allocated memory, by its first address.
    memories: Mutex<BTreeMap<usize, Given>>,
}

#[derive(Clone, Copy)]
struct Given {
    len: usize,
    region: *mut Region,
}
// SAFETY: the map only stores the pointer; its users hold a `Memory` or a binding of one.
unsafe impl Send for Given {}

impl Shared {
    /// The memory that contains `address..address + len`: its region, and the offset in it.
    pub fn find(&self, address: usize, len: usize) -> Option<(*mut Region, usize)> {
        let memories = self.memories.lock().unwrap_or_else(|e| e.into_inner());
        let (start, given) = memories.range(..=address).next_back()?;
        let offset = address - start;
        (offset <= given.len && len <= given.len - offset).then_some((given.region, offset))
    }
}

/// Compiles kernels and allocates memory for them. Cloning is cheap.
#[derive(Clone)]
pub struct Host {
    shared: Arc<Shared>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("toolchain", &self.shared.toolchain).finish_non_exhaustive()
    }
}

impl Host {
    /// Finds clang and loads the runtime, which is compiled on first use.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless the machine is Linux on x86-64 with AVX2, or on 64-bit ARM with FP16;
    /// [`Error::NoClang`] without the compiler.
    pub fn new() -> Result<Host> {
        supported()?;
        let toolchain = Toolchain::find()?;
        let runtime_path = toolchain.runtime()?;
        let runtime = Runtime::load(&runtime_path)?;
        Ok(Host { shared: Arc::new(Shared { toolchain, runtime, runtime_path, memories: Mutex::default() }) })
    }

    /// Compiles a source, or loads the cached result. The cache key is the hash of the preprocessed text and the
    /// options.
    ///
    /// The lint and the typed pass run first. A pointer without an address space, a mix of address spaces, or a
    /// warning is therefore an error in every build.
    pub fn compile(&self, source: &Source, build: Build) -> Result<Library> {
        Library::compile(Arc::clone(&self.shared), source, build)
    }

    /// Allocates memory that launches use in place. It ends at a guard page and is filled with 0xFF.
    pub fn memory(&self, len: usize) -> Result<Memory> {
        self.new_memory(len, false)
    }

    /// As [`Host::memory`], filled with zeros. Untouched pages use no memory.
    pub fn zeroed_memory(&self, len: usize) -> Result<Memory> {
        self.new_memory(len, true)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn new_memory(&self, len: usize, zeroed: bool) -> Result<Memory> {
        let region = self.shared.runtime.allocate(len, zeroed)?;
        // SAFETY: the region is fresh.
        let pointer = unsafe { self.shared.runtime.base(region) };
        self.shared.memories.lock().unwrap_or_else(|e| e.into_inner()).insert(pointer as usize, Given { len, region });
        Ok(Memory { shared: Arc::clone(&self.shared), region, pointer, len })
    }
}

fn supported() -> Result<()> {
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    {
        let there = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi2");
        if there { Ok(()) } else { Err(Error::Unsupported("a processor without these".into())) }
    }
    #[cfg(all(target_os = "linux", target_arch = "aarch64"))]
    {
        let there = std::arch::is_aarch64_feature_detected!("fp16");
        if there { Ok(()) } else { Err(Error::Unsupported("a processor without it".into())) }
    }
    #[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
    Err(Error::Unsupported(format!("{} on {}", std::env::consts::OS, std::env::consts::ARCH)))
}

/// Memory between guard pages. A kernel works in place on it through any binding of a pointer into it.
pub struct Memory {
    shared: Arc<Shared>,
    region: *mut Region,
    pointer: *mut u8,
    len: usize,
}

// SAFETY: a Memory owns its bytes as a Box<[u8]> does.
unsafe impl Send for Memory {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Memory {}

impl Memory {
    /// A pointer to the first byte.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.pointer
    }
}

impl Deref for Memory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the region holds `len` initialised bytes until it is dropped.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes at {:p})", self.len, self.pointer)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.shared.memories.lock().unwrap_or_else(|e| e.into_inner()).remove(&(self.pointer as usize));
        // SAFETY: this Memory owns the region, and the map no longer lists it.
        unsafe { self.shared.runtime.free(self.region) }
    }
}
