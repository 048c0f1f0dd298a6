//! ggml's CPU operators, through the bindings of llama-cpp-sys-2.
//!
//! A [`Graph`] holds one operation several times, each over other memory: ggml's threads start once for all of them, as
//! in a whole model.

use std::{cell::UnsafeCell, ptr::null_mut, rc::Rc};

use kvant_bench::{Result, Shape, data};
use llama_cpp_sys_2 as sys;

use crate::memory;

/// The mode of RoPE that pairs coordinate i with i + D/2. It is a macro in ggml's header, so the bindings lack it.
const ROPE_NEOX: i32 = 2;

/// The measured types of ggml.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    F32,
    F16,
    Q8_0,
    Q4_0,
    I32,
    I64,
}

impl Type {
    fn raw(self) -> sys::ggml_type {
        match self {
            Type::F32 => sys::GGML_TYPE_F32,
            Type::F16 => sys::GGML_TYPE_F16,
            Type::Q8_0 => sys::GGML_TYPE_Q8_0,
            Type::Q4_0 => sys::GGML_TYPE_Q4_0,
            Type::I32 => sys::GGML_TYPE_I32,
            Type::I64 => sys::GGML_TYPE_I64,
        }
    }

    /// ggml's name.
    pub fn name(self) -> &'static str {
        match self {
            Type::F32 => "f32",
            Type::F16 => "f16",
            Type::Q8_0 => "q8_0",
            Type::Q4_0 => "q4_0",
            Type::I32 => "i32",
            Type::I64 => "i64",
        }
    }

    /// Bytes of a row of `elements` elements.
    pub fn row_bytes(self, elements: usize) -> usize {
        // SAFETY: a pure function of a valid type.
        unsafe { sys::ggml_row_size(self.raw(), elements as i64) }
    }
}

/// The order of vectors in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// llama.cpp's order: a token's heads are contiguous.
    Interleaved,
    /// A head's tokens are contiguous.
    Contiguous,
}

/// Memory of a tensor, aligned to a cache line. Operators write into it through pointers.
pub struct Memory(Vec<UnsafeCell<Line>>);

#[derive(Clone, Copy)]
#[repr(align(64))]
#[expect(dead_code, reason = "read and written through pointers")]
struct Line([u8; 64]);

impl Memory {
    fn zeros(bytes: usize) -> Rc<Memory> {
        let lines = bytes.div_ceil(64);
        let mut memory = Vec::with_capacity(lines);
        memory::huge_pages(memory.spare_capacity_mut());
        memory.resize_with(lines, || UnsafeCell::new(Line([0; 64])));
        Rc::new(Memory(memory))
    }

    fn from_bytes(bytes: &[u8]) -> Rc<Memory> {
        let memory = Memory::zeros(bytes.len());
        // SAFETY: the memory has room for `bytes`, and nobody else has it yet.
        unsafe { memory.pointer().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        memory
    }

    /// Copies the memory.
    fn copy(&self) -> Rc<Memory> {
        let copy = Memory::zeros(self.0.len() * 64);
        // SAFETY: both have equally many bytes, and no graph is running: graphs run only in `Graph::run`, on this
        // thread.
        unsafe { copy.pointer().copy_from_nonoverlapping(self.pointer(), self.0.len() * 64) };
        copy
    }

    fn pointer(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }

    fn floats(&self, count: usize) -> Vec<f32> {
        assert!(count * 4 <= self.0.len() * 64);
        // SAFETY: in bounds; any bits are an f32; no graph is running, as above.
        (0..count).map(|i| unsafe { self.pointer().cast::<f32>().add(i).read() }).collect()
    }
}

/// Converts `rows` rows of f32 numbers to another type of ggml.
pub fn quantise(kind: Type, numbers: &[f32], row: usize) -> Vec<u8> {
    let rows = numbers.len() / row;
    let mut bytes = vec![0u8; rows * kind.row_bytes(row)];
    let to = bytes.as_mut_ptr().cast();
    // SAFETY: `bytes` has room for `rows` rows of the type, and `numbers` holds as many rows.
    let written = unsafe {
        sys::ggml_quantize_chunk(kind.raw(), numbers.as_ptr(), to, 0, rows as i64, row as i64, std::ptr::null())
    };
    assert_eq!(written, bytes.len());
    bytes
}

/// Some operations, ready to run.
pub struct Graph {
    context: *mut sys::ggml_context,
    graph: *mut sys::ggml_cgraph,
    plan: sys::ggml_cplan,
    nodes: usize,
    /// The memory that the tensors point to.
    memory: Vec<Rc<Memory>>,
}

/// Maximum tensors of one operation.
const TENSORS: usize = 16;

impl Graph {
    /// `make` makes the i-th of `nodes` operations and returns its last tensor.
    fn new(
        threads: usize,
        nodes: usize,
        mut make: impl FnMut(&mut Graph, usize) -> *mut sys::ggml_tensor,
    ) -> Result<Graph> {
        let size = nodes * TENSORS;
        // SAFETY: plain calls. With `no_alloc`, the context holds only descriptions; this graph owns the memory that
        // they point to.
        let mut graph = unsafe {
            sys::ggml_cpu_init();
            let bytes = sys::ggml_tensor_overhead() * size + sys::ggml_graph_overhead_custom(size, false);
            let context =
                sys::ggml_init(sys::ggml_init_params { mem_size: bytes, mem_buffer: null_mut(), no_alloc: true });
            if context.is_null() {
                return Err("ggml has no memory for a graph".into());
            }
            let graph = sys::ggml_new_graph_custom(context, size, false);
            Graph { context, graph, plan: std::mem::zeroed(), nodes, memory: Vec::new() }
        };
        for i in 0..nodes {
            let last = make(&mut graph, i);
            // SAFETY: a tensor of this context, whose sources have memory.
            unsafe { sys::ggml_build_forward_expand(graph.graph, last) };
        }
        // SAFETY: the graph is complete; the work memory that the plan asks for is kept with it.
        graph.plan = unsafe { sys::ggml_graph_plan(graph.graph, i32::try_from(threads)?, null_mut()) };
        let work = Memory::zeros(graph.plan.work_size);
        graph.plan.work_data = work.pointer();
        graph.memory.push(work);
        Ok(graph)
    }

    /// A tensor over memory; dimensions from the innermost.
    fn tensor(&mut self, kind: Type, dims: [usize; 3], memory: &Rc<Memory>) -> *mut sys::ggml_tensor {
        let [a, b, c] = dims.map(|n| n as i64);
        self.memory.push(memory.clone());
        assert!(kind.row_bytes(dims[0]) * dims[1] * dims[2] <= memory.0.len() * 64);
        // SAFETY: the context has room for `TENSORS` tensors per operation, and the memory is large enough.
        unsafe {
            let tensor = sys::ggml_new_tensor_3d(self.context, kind.raw(), a, b, c);
            (*tensor).data = memory.pointer().cast();
            tensor
        }
    }

    /// Gives the result of an operation its memory.
    fn place(&mut self, tensor: *mut sys::ggml_tensor, memory: &Rc<Memory>) -> *mut sys::ggml_tensor {
        self.memory.push(memory.clone());
        // SAFETY: a tensor of this context that has no memory yet.
        unsafe {
            assert!(sys::ggml_nbytes(tensor) <= memory.0.len() * 64);
            (*tensor).data = memory.pointer().cast();
        }
        tensor
    }

    /// Runs all operations, and returns their number.
    pub fn run(&mut self) -> Result<usize> {
        // SAFETY: every tensor has memory, and so has the plan.
        let status = unsafe { sys::ggml_graph_compute(self.graph, &mut self.plan) };
        if status != sys::GGML_STATUS_SUCCESS { Err("ggml failed".into()) } else { Ok(self.nodes) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `ggml_init`, and not used afterwards.
        unsafe { sys::ggml_free(self.context) };
    }
}

/// Graphs that run in turns, each over its part of a rotation.
pub struct Rotation {
    graphs: Vec<Graph>,
    next: usize,
    out: Rc<Memory>,
}

impl Rotation {
    fn new(graphs: impl Iterator<Item = Result<Graph>>, out: Rc<Memory>) -> Result<Rotation> {
        Ok(Rotation { graphs: graphs.collect::<Result<_>>()?, next: 0, out })
    }

    /// Runs the next graph, and returns its number of operations.
    pub fn run(&mut self) -> Result<usize> {
        let turn = self.next % self.graphs.len();
        self.next += 1;
        self.graphs[turn].run()
    }

    /// The first numbers of the last result.
    pub fn output(&self, count: usize) -> Vec<f32> {
        self.out.floats(count)
    }
}

/// Flash attention of one query over keys and values, each `[kv_heads, tokens, head_dim]` in `kind`.
pub struct GgmlAttention<'a> {
    pub shape: Shape,
    pub kind: Type,
    pub layout: Layout,
    pub tokens: usize,
    pub query: &'a [f32],
    pub sides: &'a [Vec<u8>; 2],
    pub threads: usize,
    pub copies: usize,
}

impl GgmlAttention<'_> {
    /// Operations of a graph: several if they are short.
    fn nodes(&self) -> usize {
        (16 * 1024 / self.tokens).clamp(1, 16).min(self.copies)
    }

    /// Lays out `copies` layers, and the graphs over them.
    pub fn build(&self) -> Result<Rotation> {
        let Shape { head_dim, heads, kv_heads } = self.shape;
        let row = self.kind.row_bytes(head_dim);
        let [k, v] = self.sides.each_ref().map(|side| match self.layout {
            Layout::Contiguous => Memory::from_bytes(side),
            Layout::Interleaved => {
                let vectors = (0..self.tokens).flat_map(|t| (0..kv_heads).map(move |h| h * self.tokens + t));
                Memory::from_bytes(&vectors.flat_map(|i| side[i * row..][..row].iter().copied()).collect::<Vec<_>>())
            }
        });
        let mut layers = vec![[k, v]];
        for _ in 1..self.copies {
            let [k, v] = &layers[0];
            layers.push([k.copy(), v.copy()]);
        }
        let bytes: Vec<u8> = self.query.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let query = Memory::from_bytes(&bytes);
        let out = Memory::zeros(bytes.len());
        let nodes = self.nodes();
        let graphs = layers.chunks_exact(nodes).map(|layers| {
            Graph::new(self.threads, nodes, |graph, i| {
                let q = graph.tensor(Type::F32, [head_dim, 1, heads], &query);
                let side = |graph: &mut Graph, memory| {
                    let tensor = graph.tensor(self.kind, [head_dim, self.tokens, kv_heads], memory);
                    if self.layout == Layout::Interleaved {
                        // SAFETY: this graph's tensor; the strides stay within its memory.
                        unsafe { ((*tensor).nb[1], (*tensor).nb[2]) = (row * kv_heads, row) };
                    }
                    tensor
                };
                let (k, v) = (side(graph, &layers[i][0]), side(graph, &layers[i][1]));
                // SAFETY: tensors of this context, with the operator's shapes. Without a mask, all keys are visible.
                let node = unsafe {
                    sys::ggml_flash_attn_ext(graph.context, q, k, v, null_mut(), self.shape.scale(), 0.0, 0.0)
                };
                graph.place(node, &out)
            })
        });
        Rotation::new(graphs, out.clone())
    }
}

/// Writes rows of f32 numbers into a cache of another type, at given rows: keys, then values.
///
/// `rows` rows of `row` numbers each; the rows of the cache rotate.
pub fn set_rows(kind: Type, (rows, row): (usize, usize), threads: usize, copies: usize) -> Result<Rotation> {
    let floats = |seed| -> Vec<u8> { data::normal(rows * row, seed).iter().flat_map(|x| x.to_ne_bytes()).collect() };
    let sources = [Memory::from_bytes(&floats(1)), Memory::from_bytes(&floats(2))];
    let indices: Vec<u8> = (0..rows as i64).flat_map(i64::to_ne_bytes).collect();
    let indices = Memory::from_bytes(&indices);
    let bytes = rows * kind.row_bytes(row);
    let targets: Vec<_> = (0..copies).map(|_| [Memory::zeros(bytes), Memory::zeros(bytes)]).collect();
    let out = targets[0][0].clone();
    let graphs = targets.iter().map(|target| {
        // Two nodes are one unit of work.
        let mut graph = Graph::new(threads, 2, |graph, side| {
            let to = graph.tensor(kind, [row, rows, 1], &target[side]);
            let from = graph.tensor(Type::F32, [row, rows, 1], &sources[side]);
            let at = graph.tensor(Type::I64, [rows, 1, 1], &indices);
            // SAFETY: tensors of this context, with the operator's shapes; every index is a row of `to`.
            unsafe { sys::ggml_set_rows(graph.context, to, from, at) }
        })?;
        graph.nodes = 1;
        Ok(graph)
    });
    Rotation::new(graphs, out)
}

/// ggml's quantiser without operator and threads, for rows of `row` numbers.
pub fn quantiser(kind: Type, row: usize) -> Result<impl FnMut(&[f32], &mut [u8])> {
    // SAFETY: a table of functions that lives as long as the program.
    let convert = unsafe { (*sys::ggml_get_type_traits_cpu(kind.raw())).from_float }.ok_or("no such conversion")?;
    let row_bytes = kind.row_bytes(row);
    Ok(move |from: &[f32], to: &mut [u8]| {
        assert_eq!(from.len() / row * row_bytes, to.len());
        for (from, to) in from.chunks_exact(row).zip(to.chunks_exact_mut(row_bytes)) {
            // SAFETY: `from` has a row's numbers, and `to` has room for a row of the type.
            unsafe { convert(from.as_ptr(), to.as_mut_ptr().cast(), row as i64) };
        }
    })
}

/// The RMS norm of each head, its weight, and RoPE: three operators of ggml.
pub fn norm_rope(values: &[Vec<f32>; 3], tokens: usize, heads: usize, threads: usize) -> Result<Rotation> {
    let [x, weight, _] = values;
    let head_dim = weight.len();
    let bytes = |x: &[f32]| x.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>();
    let (source, factors) = (Memory::from_bytes(&bytes(x)), Memory::from_bytes(&bytes(weight)));
    let positions: Vec<u8> = (0..tokens as i32).flat_map(|i| (1000 + i).to_ne_bytes()).collect();
    let positions = Memory::from_bytes(&positions);
    let [normed, scaled, out] = [(); 3].map(|()| Memory::zeros(x.len() * 4));
    let nodes = (256 / tokens).max(1);
    let graph = Graph::new(threads, nodes, |graph, _| {
        let x = graph.tensor(Type::F32, [head_dim, heads, tokens], &source);
        let w = graph.tensor(Type::F32, [head_dim, 1, 1], &factors);
        let at = graph.tensor(Type::I32, [tokens, 1, 1], &positions);
        // SAFETY: tensors of this context, with the operators' shapes; each result gets its memory before the next
        // operator uses it.
        unsafe {
            let x = sys::ggml_rms_norm(graph.context, x, 1e-6);
            graph.place(x, &normed);
            let x = sys::ggml_mul(graph.context, x, w);
            graph.place(x, &scaled);
            let (dim, neox) = (head_dim as i32, ROPE_NEOX);
            let x = sys::ggml_rope_ext(graph.context, x, at, null_mut(), dim, neox, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0);
            graph.place(x, &out)
        }
    });
    Rotation::new([graph].into_iter(), out)
}

/// One row of `inputs` numbers by `copies` matrices of `outputs` rows.
pub fn mul_mat(kind: Type, (outputs, inputs): (usize, usize), threads: usize, copies: usize) -> Result<Rotation> {
    let matrix = Memory::from_bytes(&quantise(kind, &data::normal(outputs * inputs, 2), inputs));
    let matrices: Vec<_> = (0..copies).map(|i| if i == 0 { matrix.clone() } else { matrix.copy() }).collect();
    let x: Vec<u8> = data::normal(inputs, 1).iter().flat_map(|x| x.to_ne_bytes()).collect();
    let (x, out) = (Memory::from_bytes(&x), Memory::zeros(outputs * 4));
    let nodes = copies.min(8);
    let graphs = matrices.chunks_exact(nodes).map(|matrices| {
        Graph::new(threads, nodes, |graph, i| {
            let w = graph.tensor(kind, [inputs, outputs, 1], &matrices[i]);
            let x = graph.tensor(Type::F32, [inputs, 1, 1], &x);
            // SAFETY: tensors of this context, with the operator's shapes.
            let node = unsafe { sys::ggml_mul_mat(graph.context, w, x) };
            graph.place(node, &out)
        })
    });
    Rotation::new(graphs, out.clone())
}
