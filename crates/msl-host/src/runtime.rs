//! The loaded C++ runtime. `runtime/abi.h` declares the same types; change both together.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::sync::Mutex;

use crate::count::Traffic;
use crate::error::{Error, Result};

pub(crate) const READ: u32 = 1;
pub(crate) const WRITE: u32 = 2;
pub(crate) const CONSTANT: u32 = 4;

/// A block of memory between guard pages.
#[repr(C)]
pub(crate) struct Region {
    _private: [u8; 0],
}

#[repr(C)]
pub(crate) struct RawExtent {
    pub region: *mut Region,
    pub offset: u64,
    pub bytes: u64,
    pub access: u32,
    pub index: u32,
}

#[repr(C)]
pub(crate) struct RawLaunch {
    pub entry: *const c_void,
    pub kernel: *const c_char,
    pub extents: *const RawExtent,
    pub extent_count: u64,
    pub threadgroup_bytes: [u64; 31],
    pub groups: [u32; 3],
    pub threads: [u32; 3],
    pub total: [u32; 3],
    pub schedule: u32,
    pub allow_divergence: u32,
    pub flush: u32,
    pub sum_order: u32,
    pub lockstep: u32,
    pub same_values: u32,
    pub reads_end: u32,
    pub seed: u64,
    pub counts: *mut RawNumbers,
    pub time_limit_ms: u32,
}

#[repr(C)]
pub(crate) struct RawFinding {
    pub kind: u32,
    pub line: u32,
    pub pc: u64,
    pub other_pc: u64,
    pub group: [u32; 3],
    pub thread: u32,
    pub simdgroup: u32,
    pub lane: u32,
    pub has_thread: u32,
    pub count: u64,
    text: [c_char; 500],
}

impl RawFinding {
    pub fn message(&self) -> String {
        // SAFETY: the runtime writes the text with snprintf, which ends it within the array.
        unsafe { CStr::from_ptr(self.text.as_ptr()) }.to_string_lossy().into_owned()
    }
}

#[repr(C)]
#[derive(Default)]
pub(crate) struct RawStats {
    pub threads: u64,
    pub switches: u64,
    pub rendezvous: u64,
}

/// Counts of a launch; the pointers are set while it runs.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawNumbers {
    pub blocks: u32,
    pub sites: u32,
    block_issues: *mut u64,
    block_lanes: *mut u64,
    by_site: *mut [Traffic; 4],
    pub simdgroups: u64,
    pub barriers: u64,
    pub simdgroup_barriers: u64,
    pub reductions: u64,
    pub scans: u64,
    pub shuffles: u64,
    pub quads: u64,
    pub votes: u64,
    pub matrix_loads: u64,
    pub matrix_stores: u64,
    pub matrix_products: u64,
    pub footprint_read: u64,
    pub footprint_written: u64,
    pub threadgroup_bytes: u64,
}

/// Counts with the memory that they point to.
#[derive(Debug)]
pub(crate) struct RawCounts {
    pub numbers: Box<RawNumbers>,
    pub block_issues: Vec<u64>,
    pub block_lanes: Vec<u64>,
    /// By site; the last one is the library's own.
    pub sites: Vec<[Traffic; 4]>,
}

impl RawCounts {
    pub fn new(blocks: usize, sites: usize) -> RawCounts {
        let (mut block_issues, mut block_lanes) = (vec![0; blocks + 1], vec![0; blocks + 1]);
        let mut by_site = vec![[Traffic::default(); 4]; sites + 1];
        let numbers = Box::new(RawNumbers {
            blocks: blocks as u32,
            sites: sites as u32,
            block_issues: block_issues.as_mut_ptr(),
            block_lanes: block_lanes.as_mut_ptr(),
            by_site: by_site.as_mut_ptr(),
            simdgroups: 0,
            barriers: 0,
            simdgroup_barriers: 0,
            reductions: 0,
            scans: 0,
            shuffles: 0,
            quads: 0,
            votes: 0,
            matrix_loads: 0,
            matrix_stores: 0,
            matrix_products: 0,
            footprint_read: 0,
            footprint_written: 0,
            threadgroup_bytes: 0,
        });
        RawCounts { numbers, block_issues, block_lanes, sites: by_site }
    }
}

#[derive(Clone, Copy)]
struct State(*mut c_void);
// SAFETY: a state is plain memory that one thread uses at a time; the pool gives it to one thread only.
unsafe impl Send for State {}

pub(crate) struct Runtime {
    region_new: unsafe extern "C" fn(u64, bool) -> *mut Region,
    region_free: unsafe extern "C" fn(*mut Region),
    region_base: unsafe extern "C" fn(*mut Region) -> *mut u8,
    state_new: unsafe extern "C" fn() -> *mut c_void,
    state_free: unsafe extern "C" fn(*mut c_void),
    dispatch: unsafe extern "C" fn(*mut c_void, *const RawLaunch, *mut RawStats) -> u64,
    finding: unsafe extern "C" fn(*mut c_void, u64) -> *const RawFinding,
    idle: Mutex<Vec<State>>,
    // Never unloaded: its signal handlers stay installed.
    _library: std::mem::ManuallyDrop<libloading::Library>,
}

impl Runtime {
    pub fn load(path: &Path) -> Result<Runtime> {
        let failed = |source| Error::Load { path: path.into(), source };
        // SAFETY: this is the library that the toolchain has just compiled from the sources of this crate; its
        // initialisers are those of the C++ standard library, and the symbols have the types that runtime/abi.h
        // declares.
        unsafe {
            let library = libloading::Library::new(path).map_err(failed)?;
            Ok(Runtime {
                region_new: *library.get(b"msl_region_new\0").map_err(failed)?,
                region_free: *library.get(b"msl_region_free\0").map_err(failed)?,
                region_base: *library.get(b"msl_region_base\0").map_err(failed)?,
                state_new: *library.get(b"msl_state_new\0").map_err(failed)?,
                state_free: *library.get(b"msl_state_free\0").map_err(failed)?,
                dispatch: *library.get(b"msl_dispatch\0").map_err(failed)?,
                finding: *library.get(b"msl_finding\0").map_err(failed)?,
                idle: Mutex::new(Vec::new()),
                _library: std::mem::ManuallyDrop::new(library),
            })
        }
    }

    /// Allocates guarded and poisoned memory, which the caller frees.
    pub fn allocate(&self, bytes: usize, zeroed: bool) -> Result<*mut Region> {
        // SAFETY: any size is allowed; null means failure.
        let region = unsafe { (self.region_new)(bytes as u64, zeroed) };
        if region.is_null() { Err(Error::NoMemory("a guarded buffer")) } else { Ok(region) }
    }

    /// # Safety
    /// `region` came from [`Runtime::allocate`] and was not freed.
    pub unsafe fn free(&self, region: *mut Region) {
        // SAFETY: as promised by the caller.
        unsafe { (self.region_free)(region) }
    }

    /// # Safety
    /// `region` came from [`Runtime::allocate`] and was not freed.
    pub unsafe fn base(&self, region: *mut Region) -> *mut u8 {
        // SAFETY: as promised by the caller.
        unsafe { (self.region_base)(region) }
    }

    /// Runs a launch and passes each finding to `each`.
    ///
    /// # Safety
    /// The launch's pointers are valid, and nobody else writes to its regions.
    pub unsafe fn dispatch(&self, launch: &RawLaunch, mut each: impl FnMut(&RawFinding)) -> Result<RawStats> {
        let pooled = self.idle.lock().unwrap_or_else(|e| e.into_inner()).pop();
        // SAFETY: takes no arguments.
        let state = pooled.unwrap_or_else(|| State(unsafe { (self.state_new)() }));
        if state.0.is_null() {
            return Err(Error::NoMemory("the stacks of 1024 threads"));
        }
        let mut stats = RawStats::default();
        // SAFETY: nobody else uses the state, the caller guarantees a valid launch, and findings below the count exist.
        unsafe {
            let count = (self.dispatch)(state.0, launch, &mut stats);
            for i in 0..count {
                if let Some(finding) = (self.finding)(state.0, i).as_ref() {
                    each(finding);
                }
            }
        }
        self.idle.lock().unwrap_or_else(|e| e.into_inner()).push(state);
        Ok(stats)
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        for state in self.idle.lock().unwrap_or_else(|e| e.into_inner()).drain(..) {
            // SAFETY: nobody uses an idle state.
            unsafe { (self.state_free)(state.0) }
        }
    }
}
