//! The description of a launch: the same information that a Metal compute encoder receives.

use std::marker::PhantomData;
use std::time::Duration;

use crate::runtime::{READ, WRITE};

/// How a kernel accesses a buffer. The checker enforces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads only.
    Read,
    /// Writes only. A read of a byte that the launch has not written is a finding.
    Write,
    /// Reads and writes.
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

/// A buffer binding: an allocation, the offset of the kernel's pointer, and the range that the kernel may access.
///
/// Memory from [`crate::Host::memory`] is used in place. Other memory is copied between guard pages before the run
/// and, if it is writable, copied back afterwards. Bindings of overlapping memory share one copy.
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
    /// `pointer..pointer + len` is allocated while `'a` lasts. During a run, nobody else writes it, and nobody else
    /// reads it if `access` includes writing.
    pub unsafe fn raw(pointer: *mut u8, len: usize, access: Access) -> Buffer<'a> {
        Buffer { pointer, len, offset: 0, extent: None, access, memory: PhantomData }
    }

    /// Sets the kernel's pointer to `bytes` after the start of the allocation.
    pub fn offset(self, bytes: usize) -> Buffer<'a> {
        Buffer { offset: bytes, ..self }
    }

    /// Limits the kernel to `bytes` from the offset on. The default is the rest of the allocation.
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
    /// The value's bits.
    Half(u16),
    Float(f32),
}

impl Constant {
    /// The value as a C++ literal.
    pub(crate) fn literal(self) -> String {
        match self {
            Constant::Bool(v) => v.to_string(),
            Constant::Char(v) => v.to_string(),
            Constant::UChar(v) => v.to_string(),
            Constant::Short(v) => v.to_string(),
            Constant::UShort(v) => v.to_string(),
            Constant::Int(v) => format!("(int){v}l"),
            Constant::UInt(v) => format!("{v}u"),
            Constant::Long(v) => format!("(long){}ul", v as u64),
            Constant::ULong(v) => format!("{v}ul"),
            Constant::Half(v) => format!("__builtin_bit_cast(half, (unsigned short){v})"),
            Constant::Float(v) => format!("__builtin_bit_cast(float, {}u)", v.to_bits()),
        }
    }

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

/// The number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grid {
    /// `dispatchThreadgroups`: whole threadgroups.
    Threadgroups {
        /// Threadgroups in the grid.
        groups: [u32; 3],
        /// Threads per threadgroup.
        threads: [u32; 3],
    },
    /// `dispatchThreads`: threadgroups at the edge of the grid are truncated to fit.
    Threads {
        /// Threads in the grid.
        total: [u32; 3],
        /// Threads in a whole threadgroup.
        threads: [u32; 3],
    },
}

/// The order in which threads and threadgroups run. Each run is reproducible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// The first thread first, until it waits.
    Forward,
    /// The last thread first.
    Reverse,
    /// A random order from a seed.
    Random(u64),
}

/// The order in which SIMD-group reductions such as `simd_sum` combine the values of a full SIMD-group. A product of
/// matrices adds in the order of its inner index with [`SumOrder::Halves`], and in reverse otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SumOrder {
    /// Lanes 0 and 16, 1 and 17, ..., then these sums.
    #[default]
    Halves = 0,
    /// Lane after lane.
    Lanes = 1,
    /// Lanes 0 and 1, 2 and 3, ..., then these sums.
    Neighbours = 2,
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
    pub(crate) reads_end: bool,
    pub(crate) flush: bool,
    pub(crate) sum_order: SumOrder,
    pub(crate) lockstep: bool,
    pub(crate) same_values: bool,
    pub(crate) time_limit: Duration,
}

impl<'a> Launch<'a> {
    /// A launch of `kernel` without bindings, with a limit of 60 seconds of CPU time.
    pub fn new(kernel: &'a str, grid: Grid) -> Launch<'a> {
        Launch {
            kernel,
            grid,
            buffers: Vec::new(),
            threadgroup_bytes: Vec::new(),
            constants: Vec::new(),
            allow_divergence: false,
            reads_end: false,
            flush: false,
            sum_order: SumOrder::Halves,
            lockstep: false,
            same_values: false,
            time_limit: Duration::from_secs(60),
        }
    }

    /// `setBuffer`: binds `[[buffer(index)]]`.
    pub fn buffer(mut self, index: u32, buffer: Buffer<'a>) -> Launch<'a> {
        self.buffers.push((index, buffer));
        self
    }

    /// `setBytes`: binds `[[buffer(index)]]` to constant bytes.
    pub fn bytes(self, index: u32, bytes: &'a [u8]) -> Launch<'a> {
        self.buffer(index, Buffer::read(bytes))
    }

    /// `setThreadgroupMemoryLength`: sets the size of `[[threadgroup(index)]]`.
    pub fn threadgroup_memory(mut self, index: u32, bytes: usize) -> Launch<'a> {
        self.threadgroup_bytes.push((index, bytes));
        self
    }

    /// Sets the value of the constant with `[[function_constant(index)]]`.
    pub fn constant(mut self, index: u32, value: Constant) -> Launch<'a> {
        self.constants.push((index, value));
        self
    }

    /// Allows SIMD-group functions that not all lanes reach; they operate on the lanes that do. By default, divergent
    /// calls are findings.
    pub fn allow_divergence(mut self) -> Launch<'a> {
        self.allow_divergence = true;
        self
    }

    /// Lets a barrier without a memory flag order earlier reads before later writes, as on Apple's GPUs, where a value
    /// that was used before the barrier has been read. By default, it orders no memory, as in the specification, and
    /// the launch has races.
    pub fn reads_end_at_barriers(mut self) -> Launch<'a> {
        self.reads_end = true;
        self
    }

    /// Runs the lanes of a SIMD-group in lockstep, as GPUs do: no lane continues to its next access of memory before
    /// the others have done this one. Accesses of one SIMD-group then do not race. The specification requires
    /// `simdgroup_barrier`; without it, kernels are wrong under other schedules. Only in [`crate::Build::Checker`].
    pub fn lockstep(mut self) -> Launch<'a> {
        self.lockstep = true;
        self
    }

    /// Lets two threads write equal values to one place. By default this is a race, as in the language.
    pub fn same_values(mut self) -> Launch<'a> {
        self.same_values = true;
        self
    }

    /// Flushes subnormal floats to zero, as operands and as results, which GPUs may do.
    pub fn flush_subnormals(mut self) -> Launch<'a> {
        self.flush = true;
        self
    }

    /// Sets the order in which SIMD-group functions add. Metal does not define it.
    pub fn sum_order(mut self, order: SumOrder) -> Launch<'a> {
        self.sum_order = order;
        self
    }

    /// The CPU time after which the kernel is reported as endless.
    pub fn time_limit(mut self, limit: Duration) -> Launch<'a> {
        self.time_limit = limit;
        self
    }
}

/// Statistics of a run without findings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Threads that ran.
    pub threads: u64,
    /// Switches from one thread to another.
    pub switches: u64,
    /// Arrivals at barriers and SIMD-group functions.
    pub rendezvous: u64,
}
