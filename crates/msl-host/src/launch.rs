//! What a launch consists of: the same things that a Metal compute encoder is told.

use std::marker::PhantomData;
use std::time::Duration;

use crate::runtime::{READ, WRITE};

/// What a kernel does with a buffer. The checker holds it to that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Only read.
    Read,
    /// Only written; a read of a byte that the launch has not written itself is a finding.
    Write,
    /// Both.
    ReadWrite,
}

impl Access {
    pub(crate) fn bits(self) -> u32 {
        match self {
            Access::Read => READ,
            Access::Write => WRITE,
            Access::ReadWrite => READ | WRITE,
        }
    }
}

/// A buffer binding: an allocation, where in it the kernel's pointer points, and how much of it the kernel may touch.
///
/// Memory of [`crate::Host::memory`] is used in place. Other memory is copied between guard pages before the run and, if it may be
/// written, back after it; bindings of overlapping memory share one copy.
#[derive(Clone, Copy, Debug)]
pub struct Buffer<'a> {
    pub(crate) pointer: *mut u8,
    pub(crate) len: usize,
    pub(crate) offset: usize,
    pub(crate) extent: Option<usize>,
    pub(crate) access: Access,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Buffer<'a> {
    /// A buffer that the kernel reads.
    pub fn read(bytes: &'a [u8]) -> Buffer<'a> {
        Buffer {
            pointer: bytes.as_ptr().cast_mut(),
            len: bytes.len(),
            offset: 0,
            extent: None,
            access: Access::Read,
            memory: PhantomData,
        }
    }

    /// A buffer that the kernel writes and does not read.
    pub fn write(bytes: &'a mut [u8]) -> Buffer<'a> {
        Buffer {
            pointer: bytes.as_mut_ptr(),
            len: bytes.len(),
            offset: 0,
            extent: None,
            access: Access::Write,
            memory: PhantomData,
        }
    }

    /// A buffer that the kernel reads and writes.
    pub fn read_write(bytes: &'a mut [u8]) -> Buffer<'a> {
        Buffer { access: Access::ReadWrite, ..Buffer::write(bytes) }
    }

    /// A buffer by its address.
    ///
    /// # Safety
    /// `pointer..pointer + len` is allocated while `'a` lasts; nobody writes it during a run, and nobody reads it if `access` includes
    /// writing.
    pub unsafe fn raw(pointer: *mut u8, len: usize, access: Access) -> Buffer<'a> {
        Buffer { pointer, len, offset: 0, extent: None, access, memory: PhantomData }
    }

    /// The kernel's pointer points `bytes` into the allocation.
    pub fn offset(self, bytes: usize) -> Buffer<'a> {
        Buffer { offset: bytes, ..self }
    }

    /// The kernel may touch `bytes` from the offset on. Without this, all up to the end of the allocation.
    pub fn extent(self, bytes: usize) -> Buffer<'a> {
        Buffer { extent: Some(bytes), ..self }
    }
}

/// The value of a function constant.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // each variant is the MSL type of its name
pub enum Constant {
    Bool(bool),
    Char(i8),
    UChar(u8),
    Short(i16),
    UShort(u16),
    Int(i32),
    UInt(u32),
    Long(i64),
    ULong(u64),
    /// By its bits.
    Half(u16),
    Float(f32),
}

impl Constant {
    /// The MSL type, and the value's bytes.
    pub(crate) fn parts(self) -> (&'static str, [u8; 8], usize) {
        fn pad<const N: usize>(name: &'static str, bytes: [u8; N]) -> (&'static str, [u8; 8], usize) {
            let mut padded = [0; 8];
            padded[..N].copy_from_slice(&bytes);
            (name, padded, N)
        }
        match self {
            Constant::Bool(v) => pad("bool", [u8::from(v)]),
            Constant::Char(v) => pad("char", v.to_le_bytes()),
            Constant::UChar(v) => pad("uchar", v.to_le_bytes()),
            Constant::Short(v) => pad("short", v.to_le_bytes()),
            Constant::UShort(v) => pad("ushort", v.to_le_bytes()),
            Constant::Int(v) => pad("int", v.to_le_bytes()),
            Constant::UInt(v) => pad("uint", v.to_le_bytes()),
            Constant::Long(v) => pad("long", v.to_le_bytes()),
            Constant::ULong(v) => pad("ulong", v.to_le_bytes()),
            Constant::Half(v) => pad("half", v.to_le_bytes()),
            Constant::Float(v) => pad("float", v.to_le_bytes()),
        }
    }
}

/// How many threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grid {
    /// `dispatchThreadgroups`: whole threadgroups.
    Threadgroups {
        /// Threadgroups in the grid.
        groups: [u32; 3],
        /// Threads in each.
        threads: [u32; 3],
    },
    /// `dispatchThreads`: threadgroups at the edge of the grid are cut to fit.
    Threads {
        /// Threads in the grid.
        total: [u32; 3],
        /// Threads in a threadgroup that is not cut.
        threads: [u32; 3],
    },
}

/// In which order threads and threadgroups run. Each run is reproducible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// The first thread first, until it waits.
    Forward,
    /// The last thread first.
    Reverse,
    /// Drawn from a seed.
    Random(u64),
}

/// One dispatch of one kernel.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    pub(crate) kernel: &'a str,
    pub(crate) grid: Grid,
    pub(crate) buffers: Vec<(u32, Buffer<'a>)>,
    pub(crate) threadgroup_bytes: Vec<(u32, usize)>,
    pub(crate) constants: Vec<(u32, Constant)>,
    pub(crate) allow_divergence: bool,
    pub(crate) time_limit: Duration,
}

impl<'a> Launch<'a> {
    /// A launch of `kernel` that binds nothing yet. It may take 60 seconds of CPU time.
    pub fn new(kernel: &'a str, grid: Grid) -> Launch<'a> {
        Launch {
            kernel,
            grid,
            buffers: Vec::new(),
            threadgroup_bytes: Vec::new(),
            constants: Vec::new(),
            allow_divergence: false,
            time_limit: Duration::from_secs(60),
        }
    }

    /// `setBuffer`: binds `[[buffer(index)]]`.
    pub fn buffer(mut self, index: u32, buffer: Buffer<'a>) -> Launch<'a> {
        self.buffers.push((index, buffer));
        self
    }

    /// `setBytes`: binds `[[buffer(index)]]` to a few constant bytes.
    pub fn bytes(self, index: u32, bytes: &'a [u8]) -> Launch<'a> {
        self.buffer(index, Buffer::read(bytes))
    }

    /// `setThreadgroupMemoryLength`: gives `[[threadgroup(index)]]` its room.
    pub fn threadgroup_memory(mut self, index: u32, bytes: usize) -> Launch<'a> {
        self.threadgroup_bytes.push((index, bytes));
        self
    }

    /// Gives the constant with `[[function_constant(index)]]` its value.
    pub fn constant(mut self, index: u32, value: Constant) -> Launch<'a> {
        self.constants.push((index, value));
        self
    }

    /// SIMD-group functions that not all lanes reach are allowed, and work over the lanes that do. Without this they are findings.
    pub fn allow_divergence(mut self) -> Launch<'a> {
        self.allow_divergence = true;
        self
    }

    /// CPU time after which the kernel is taken to run forever.
    pub fn time_limit(mut self, limit: Duration) -> Launch<'a> {
        self.time_limit = limit;
        self
    }
}

/// What a clean run tells of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Threads that ran.
    pub threads: u64,
    /// Times that one thread had to make room for another.
    pub switches: u64,
    /// Arrivals at barriers and SIMD-group functions.
    pub rendezvous: u64,
}
