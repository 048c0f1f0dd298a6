//! One dispatch of one kernel, as data.

use std::{ops::Range, sync::Arc};

use super::{
    headers::{Header, included, included_name},
    params::{Layout, Params},
};
use crate::{DType, Error, Result, Tensor, backend::Memory, tensor::Storage};

/// A kernel file: its text, the headers it includes, and the parameter structs that Rust fills for it.
#[derive(Debug)]
pub struct Source {
    /// The file name, for reports: `softcap.metal`.
    pub name: &'static str,
    /// The text of the file.
    pub text: &'static str,
    /// All headers of the backend. [`Source::included`] selects those that the text includes.
    pub headers: &'static [Header],
    /// The structs whose layout the compiler checks.
    pub layouts: &'static [fn() -> Layout],
}

impl Source {
    /// The headers that the text includes, directly or through another: name and text, each once, in order of
    /// inclusion.
    pub fn included(&self) -> Vec<(&'static str, String)> {
        included(self.text, self.headers, &|header| (header.text)())
    }

    /// As [`Source::included`], with `text` instead of this file's text, and headers' texts from `text_of`.
    pub fn included_by(&self, text: &str, text_of: &dyn Fn(&Header) -> String) -> Vec<(&'static str, String)> {
        included(text, self.headers, text_of)
    }

    /// The text with its headers in place, each once: for compilers that take one string.
    pub fn expand(&self) -> String {
        self.inline(self.text, &mut Vec::new())
    }

    /// `static_assert`s of the size and offsets of every parameter struct. Apple's compiler does not get them: it may
    /// lack `__builtin_offsetof`.
    pub fn assertions(&self) -> String {
        self.layouts.iter().map(|layout| layout().assertions()).collect()
    }

    fn inline(&self, text: &str, seen: &mut Vec<&'static str>) -> String {
        let mut out = String::with_capacity(text.len());
        for line in text.lines() {
            let name = included_name(line);
            match self.headers.iter().find(|header| Some(header.name) == name) {
                Some(header) if seen.contains(&header.name) => {}
                Some(header) => {
                    seen.push(header.name);
                    out += &self.inline(&(header.text)(), seen);
                }
                None => {
                    out += line;
                    out.push('\n');
                }
            }
        }
        out
    }
}

/// How a kernel uses a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// Only reads it.
    Read,
    /// Only writes it; perhaps only a part.
    Write,
    /// Reads the old contents, and writes.
    ReadWrite,
}

impl Use {
    /// Whether it writes.
    pub fn writes(self) -> bool {
        self != Use::Read
    }
}

/// The value of a function constant, for which a pipeline is specialised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Constant {
    /// `bool`.
    Bool(bool),
    /// `uint`.
    UInt(u32),
}

/// The number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Threadgroups (CUDA: blocks).
    pub groups: [u32; 3],
    /// Threads in each.
    pub threads: [u32; 3],
}

/// A buffer of a launch.
#[derive(Clone)]
pub struct Binding {
    /// The kernel's `[[buffer(index)]]`, or the number of its argument.
    pub index: u32,
    /// Bytes from the start of the memory.
    pub offset: usize,
    /// Bytes that the kernel may touch from the offset on.
    pub bytes: usize,
    /// How the launch uses them.
    pub access: Use,
    memory: Held,
}

/// Memory that a launch keeps alive.
#[derive(Clone)]
pub(crate) enum Held {
    Tensor(Arc<Storage>),
    Scratch(Arc<dyn Memory>),
}

impl Binding {
    /// The allocation.
    pub fn memory(&self) -> &dyn Memory {
        match &self.memory {
            Held::Tensor(storage) => &*storage.memory,
            Held::Scratch(memory) => &**memory,
        }
    }

    /// Identifies an allocation.
    pub fn allocation(&self) -> usize {
        std::ptr::from_ref(self.memory()).cast::<()>() as usize
    }

    /// The bytes of the allocation that the kernel may touch.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.bytes
    }

    /// Whether two bindings overlap.
    fn meets(&self, other: &Binding) -> bool {
        let (own, others) = (self.range(), other.range());
        self.allocation() == other.allocation() && own.start < others.end && others.start < own.end
    }
}

/// Memory of one sequence of launches, for partial results. Uninitialised, or zeroed on request
/// ([`Builder::zeroed_scratch`](super::Builder::zeroed_scratch)).
#[derive(Clone)]
pub(crate) struct Scratch {
    pub memory: Arc<dyn Memory>,
    pub bytes: usize,
}

/// One dispatch of one kernel: all that a GPU needs to know.
#[derive(Clone)]
pub struct Launch {
    /// The operation, for labels and messages.
    pub op: &'static str,
    /// The file that holds the kernel.
    pub source: &'static Source,
    /// The kernel's name in it.
    pub kernel: &'static str,
    /// Function constants by name (CUDA: macros).
    pub constants: Vec<(&'static str, Constant)>,
    /// The buffers.
    pub bindings: Vec<Binding>,
    /// The bytes of the parameter struct, and the index at which it is bound.
    pub params: Option<(u32, Vec<u8>)>,
    /// Threadgroups and threads.
    pub grid: Grid,
    /// Bytes of `[[threadgroup(0)]]` memory, a multiple of 16; 0 if the kernel has none.
    pub threadgroup_bytes: u32,
    /// Indices of buffers that the kernel may read before the previous launches have ended, unless the last of these
    /// launches writes to the buffers. Most kernels read nothing early. Ignored if launches never overlap.
    pub ahead: &'static [u32],
    /// Whether the kernel waits for the previous one only at its end, and lets the next one begin earlier.
    pub late: bool,
    /// Whether blocks wait for the kernels of other ranks, which run collectives in one order.
    pub collective: bool,
    /// The product, if the kernel computes a plain product of matrices. An executor may let a library compute it.
    pub product: Option<Product>,
}

/// out = alpha · x · Wᵀ, of row-major matrices. Matrices and rows begin at multiples of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    /// Rows of x and of out.
    pub rows: usize,
    /// Rows of W, columns of out.
    pub outputs: usize,
    /// Columns of x and of W.
    pub inputs: usize,
    /// The factor.
    pub alpha: f32,
    /// The dtype of x and of W.
    pub dtype: DType,
    /// The dtype of out.
    pub out_dtype: DType,
    /// The indices at which x, W and out are bound.
    pub bindings: [u32; 3],
}

impl Launch {
    /// A launch of one thread without bindings.
    pub(crate) fn new(op: &'static str, source: &'static Source, kernel: &'static str) -> Launch {
        let grid = Grid { groups: [1; 3], threads: [1; 3] };
        let (constants, bindings) = (Vec::new(), Vec::new());
        Launch {
            op,
            source,
            kernel,
            constants,
            bindings,
            params: None,
            grid,
            threadgroup_bytes: 0,
            ahead: &[],
            late: false,
            collective: false,
            product: None,
        }
    }

    /// Sets a function constant.
    pub(crate) fn constant(mut self, name: &'static str, value: impl Into<Constant>) -> Launch {
        self.constants.push((name, value.into()));
        self
    }

    /// Binds a tensor that the kernel reads.
    pub(crate) fn read(self, index: u32, tensor: &Tensor) -> Launch {
        self.tensor(index, tensor, Use::Read)
    }

    /// Binds a tensor that the kernel reads from element `first` on.
    pub(crate) fn read_from(self, index: u32, tensor: &Tensor, first: usize) -> Launch {
        let mut launch = self.read(index, tensor);
        if let Some(binding) = launch.bindings.last_mut() {
            let skipped = (first * tensor.dtype().size()).min(binding.bytes);
            binding.offset += skipped;
            binding.bytes -= skipped;
        }
        launch
    }

    /// Binds a tensor that the kernel writes, wholly or partly.
    pub(crate) fn write(self, index: u32, tensor: &Tensor) -> Launch {
        self.tensor(index, tensor, Use::Write)
    }

    /// Binds a tensor if there is one. A kernel declares an optional buffer `[[function_constant(HAS_…)]]`, so that it
    /// needs no binding.
    pub(crate) fn read_if(self, index: u32, tensor: Option<&Tensor>) -> Launch {
        match tensor {
            Some(tensor) => self.read(index, tensor),
            None => self,
        }
    }

    /// As [`Launch::read_if`].
    pub(crate) fn write_if(self, index: u32, tensor: Option<&Tensor>) -> Launch {
        match tensor {
            Some(tensor) => self.write(index, tensor),
            None => self,
        }
    }

    /// Binds a tensor.
    pub(crate) fn tensor(mut self, index: u32, tensor: &Tensor, access: Use) -> Launch {
        let memory = Held::Tensor(tensor.storage().clone());
        self.bindings.push(Binding { index, offset: tensor.byte_offset(), bytes: tensor.bytes(), access, memory });
        self
    }

    /// Binds scratch memory.
    pub(crate) fn scratch(mut self, index: u32, scratch: &Scratch, access: Use) -> Launch {
        let memory = Held::Scratch(scratch.memory.clone());
        self.bindings.push(Binding { index, offset: 0, bytes: scratch.bytes, access, memory });
        self
    }

    /// Binds the parameter struct.
    pub(crate) fn params<P: Params>(mut self, index: u32, params: &P) -> Launch {
        debug_assert!(
            self.source.layouts.iter().any(|layout| layout().name == P::layout().name),
            "{} is not among the layouts of {}",
            P::layout().name,
            self.source.name
        );
        self.params = Some((index, bytemuck::bytes_of(params).to_vec()));
        self
    }

    /// Sets dynamic threadgroup memory, rounded up to 16 bytes.
    pub(crate) fn threadgroup_memory(mut self, bytes: usize) -> Launch {
        self.threadgroup_bytes = u32::try_from(bytes.next_multiple_of(16)).unwrap_or(u32::MAX);
        self
    }

    /// Sets the buffers that are read ahead.
    pub(crate) fn reads_ahead(self, indices: &'static [u32]) -> Launch {
        Launch { ahead: indices, ..self }
    }

    /// Declares that the kernel waits for the previous one only at its end, and lets the next one begin earlier.
    pub(crate) fn waits_late(self, late: bool) -> Launch {
        Launch { late, ..self }
    }

    /// Declares that blocks wait for the kernels of other ranks.
    pub(crate) fn collective(self) -> Launch {
        Launch { collective: true, ..self }
    }

    /// Whether one of two launches writes bytes that the other reads or writes.
    #[cfg(feature = "cuda")]
    pub(crate) fn conflicts(&self, other: &Launch) -> bool {
        let meet = |a: &Binding, b: &Binding| (a.access.writes() || b.access.writes()) && a.meets(b);
        self.bindings.iter().any(|a| other.bindings.iter().any(|b| meet(a, b)))
    }

    /// Whether the kernel may begin to read ahead while `previous` still runs.
    pub fn may_read_beside(&self, previous: &Launch) -> bool {
        let mut ahead = self.bindings.iter().filter(|b| self.ahead.contains(&b.index));
        !ahead.any(|a| previous.bindings.iter().any(|b| b.access.writes() && a.meets(b)))
    }

    /// Sets the grid: threadgroups, and threads of each. [`Builder::push`](super::Builder::push) checks it.
    pub(crate) fn grid(self, groups: [usize; 3], threads: [usize; 3]) -> Launch {
        let narrow = |dims: [usize; 3]| dims.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        Launch { grid: Grid { groups: narrow(groups), threads: narrow(threads) }, ..self }
    }

    /// Whether the grid has no threads.
    pub fn is_empty(&self) -> bool {
        self.grid.groups.contains(&0) || self.grid.threads.contains(&0)
    }

    /// Converts a size to a kernel's `uint`, or returns an error.
    pub(crate) fn uint(op: &'static str, arg: &'static str, value: usize) -> Result<u32> {
        u32::try_from(value).map_err(|_| Error::Value {
            op,
            arg,
            expected: "below 2^32 on a GPU".to_string(),
            got: value.to_string(),
        })
    }
}

impl std::fmt::Debug for Launch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}/{} {:?} {:?}", self.op, self.source.name, self.kernel, self.constants, self.grid)
    }
}

impl From<bool> for Constant {
    fn from(value: bool) -> Constant {
        Constant::Bool(value)
    }
}

impl From<u32> for Constant {
    fn from(value: u32) -> Constant {
        Constant::UInt(value)
    }
}

impl From<DType> for Constant {
    fn from(dtype: DType) -> Constant {
        Constant::UInt(dtype_code(dtype))
    }
}

/// The number of a dtype in kernels; `elements.h` must agree.
pub(crate) fn dtype_code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::U32 => 3,
        DType::U8 => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::params;

    params! {
        pub(crate) struct OneParams {
            pub n: u32,
        }
    }

    fn header(name: &'static str, text: fn() -> String) -> Header {
        Header { name, text }
    }

    fn source(text: &'static str) -> Source {
        let headers = Box::leak(Box::new([
            header("types.h", || "struct Types {};\n".to_string()),
            header("math.h", || "#include \"types.h\"\nint math;\n".to_string()),
            header("unused.h", || "int unused;\n".to_string()),
            header("itself.h", || "#include \"itself.h\"\nint itself;\n".to_string()),
        ]));
        Source { name: "test.metal", text, headers, layouts: &[OneParams::layout] }
    }

    #[test]
    fn expansion_puts_each_header_in_place_once() {
        let source = source(
            "#include <metal_stdlib>\n#include \"math.h\"\n#include \"types.h\"\n#include \"math.h\"\nint last;\n",
        );
        assert_eq!(source.expand(), "#include <metal_stdlib>\nstruct Types {};\nint math;\nint last;\n");
        assert_eq!(source.assertions(), OneParams::layout().assertions());
    }

    #[test]
    fn expansion_ends_for_a_header_that_includes_itself() {
        let text = source("#include \"itself.h\"\n").expand();
        assert_eq!(text.matches("int itself;").count(), 1);
    }

    #[test]
    fn an_unknown_header_is_left_to_the_compiler() {
        assert!(source("#include \"missing.h\"\n").expand().starts_with("#include \"missing.h\"\n"));
    }

    #[test]
    fn threadgroup_memory_comes_in_16_bytes_and_does_not_wrap() {
        let source: &'static Source = Box::leak(Box::new(source("")));
        let bytes = |n| Launch::new("test", source, "kernel").threadgroup_memory(n).threadgroup_bytes;
        assert_eq!([0, 1, 16, 17].map(bytes), [0, 16, 16, 32]);
        assert_eq!(bytes(1 << 40), u32::MAX);
    }
}
