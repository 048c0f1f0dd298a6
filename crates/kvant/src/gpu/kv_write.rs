//! The launches of `kv_write` except their grids.

use super::{
    Builder, Launch, Layout, Params, Scratch, Source, Use, dtype_code, params,
    planes::{self, LayerParams, codec_code, norm_code, page_shift},
    rows_aligned4,
};
use crate::{
    DType, HeadOrder, KvLayer, Result, Step, Tensor,
    ops::kv_write::{Call, NAME},
};

params! {
    pub(crate) struct KvWriteParams {
        pub first_token: u64,
        pub source_tokens: u64,
        pub tokens: u32,
        /// Tokens from this position on are skipped; with passes alone.
        pub position_limit: u32,
        pub layer: LayerParams,
        pub k_scale: f32,
        pub v_scale: f32,
        pub head_dim: u32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[KvWriteParams::layout, LayerParams::layout];

/// Which tokens of a step a launch writes: `page_means.h`.
pub(crate) enum WritePass {
    /// All.
    Alone,
    /// Those of pages whose means need no vectors of another page. `second` marks the others: numbers.
    First { second: Scratch },
    /// The others.
    Second { second: Scratch },
}

impl WritePass {
    /// The passes over a step whose pages have means and in which a sequence may have several tokens; nothing for other
    /// steps, which take one launch. `marks`: how many there are.
    pub(crate) fn around_means(vectors: &WrittenVectors, marks: usize, b: &Builder) -> Result<Option<[WritePass; 2]>> {
        if !takes_passes(vectors.layer, vectors.step) {
            return Ok(None);
        }
        let second = b.scratch(marks * size_of::<u32>())?;
        Ok(Some([WritePass::First { second: second.clone() }, WritePass::Second { second }]))
    }

    /// Its number in the kernels.
    fn number(&self) -> u32 {
        match self {
            WritePass::Alone => 0,
            WritePass::First { .. } => 1,
            WritePass::Second { .. } => 2,
        }
    }

    fn marks(&self) -> Option<&Scratch> {
        match self {
            WritePass::Alone => None,
            WritePass::First { second } | WritePass::Second { second } => Some(second),
        }
    }
}

/// Whether a step is written in two passes.
pub(crate) fn takes_passes(layer: &KvLayer, step: &Step) -> bool {
    layer.is_centred() && step.batch().most_new > 1
}

/// Vectors that a launch reads.
#[derive(Clone, Copy)]
pub(crate) enum Vectors<'a> {
    Tensor(&'a Tensor),
    /// Rows of f32.
    Scratch(&'a Scratch),
}

impl Vectors<'_> {
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Vectors::Tensor(tensor) => tensor.dtype(),
            Vectors::Scratch(_) => DType::F32,
        }
    }

    fn bind(&self, launch: Launch, index: u32) -> Launch {
        match self {
            Vectors::Tensor(tensor) => launch.read(index, tensor),
            Vectors::Scratch(scratch) => launch.scratch(index, scratch, Use::Read),
        }
    }
}

/// The keys and values of a step, and the layer that stores them.
#[derive(Clone, Copy)]
pub(crate) struct WrittenVectors<'a> {
    pub k: Vectors<'a>,
    pub v: Vectors<'a>,
    pub order: HeadOrder,
    pub source_tokens: usize,
    pub first_token: usize,
    pub tokens: usize,
    pub step: &'a Step,
    pub layer: &'a KvLayer,
    pub position_limit: u32,
}

impl<'a> WrittenVectors<'a> {
    pub(crate) fn of(call: &'a Call) -> WrittenVectors<'a> {
        WrittenVectors {
            k: Vectors::Tensor(&call.k),
            v: Vectors::Tensor(&call.v),
            order: call.order,
            source_tokens: call.source_tokens,
            first_token: call.first_token,
            tokens: call.tokens,
            step: &call.step,
            layer: &call.layer,
            position_limit: u32::MAX,
        }
    }

    /// Rows of f32, `[T, Hk, D]`, that a previous launch leaves.
    pub(crate) fn of_rows([k, v]: [&'a Scratch; 2], tokens: usize, step: &'a Step, layer: &'a KvLayer) -> Self {
        let (k, v, order) = (Vectors::Scratch(k), Vectors::Scratch(v), HeadOrder::TokenMajor);
        let (source_tokens, first_token, position_limit) = (tokens, 0, u32::MAX);
        WrittenVectors { k, v, order, source_tokens, first_token, tokens, step, layer, position_limit }
    }

    /// Scratch memory for one side of them.
    pub(crate) fn scratch(b: &Builder, tokens: usize, layer: &KvLayer) -> Result<Scratch> {
        let spec = layer.spec();
        b.scratch(tokens * spec.kv_heads * spec.head_dim * size_of::<f32>())
    }
}

/// A launch of the entry `kv_write`. It has no threadgroup memory yet.
pub(crate) fn launch(vectors: &WrittenVectors, pass: &WritePass, source: &'static Source) -> Result<Launch> {
    launch_of(vectors, pass, source, "kv_write", Use::Read)
}

/// A launch of the entry that chooses the means of the pages that are opened in a pass. The first makes the marks.
pub(crate) fn pass_launch(
    vectors: &WrittenVectors,
    pass: &WritePass,
    source: &'static Source,
    entry: &'static str,
) -> Result<Launch> {
    let marks = if matches!(pass, WritePass::First { .. }) { Use::Write } else { Use::Read };
    launch_of(vectors, pass, source, entry, marks)
}

fn launch_of(
    vectors: &WrittenVectors,
    pass: &WritePass,
    source: &'static Source,
    entry: &'static str,
    marks: Use,
) -> Result<Launch> {
    let (spec, layer) = (vectors.layer.spec(), vectors.layer);
    let ((k_norm, k_scale), (v_norm, v_scale)) = (norm_code(spec.k), norm_code(spec.v));
    let params = KvWriteParams {
        first_token: vectors.first_token as u64,
        source_tokens: vectors.source_tokens as u64,
        tokens: Launch::uint(NAME, "T", vectors.tokens)?,
        position_limit: vectors.position_limit,
        layer: LayerParams::new(NAME, layer, Some(vectors.step))?,
        k_scale,
        v_scale,
        head_dim: Launch::uint(NAME, "D", spec.head_dim)?,
    };
    let sources = [vectors.k, vectors.v].into_iter().filter_map(|side| match side {
        Vectors::Tensor(tensor) => Some(tensor),
        Vectors::Scratch(_) => None,
    });
    let aligned = rows_aligned4(spec.head_dim, sources.chain([&layer.k.low, &layer.v.low]));
    let launch = Launch::new(NAME, source, entry)
        .constant("K_DTYPE", dtype_code(vectors.k.dtype()))
        .constant("V_DTYPE", dtype_code(vectors.v.dtype()))
        .constant("K_CODEC", codec_code(spec.k))
        .constant("V_CODEC", codec_code(spec.v))
        .constant("K_NORM", k_norm)
        .constant("V_NORM", v_norm)
        .constant("HEAD_MAJOR", vectors.order == HeadOrder::HeadMajor)
        .constant("PAGE_SHIFT", page_shift(layer))
        .constant("ALIGNED", aligned)
        .constant("PASS", pass.number())
        .read(2, &vectors.step.positions)
        .read(3, &vectors.step.sequence)
        .read(4, &vectors.step.lens)
        .read_if(12, vectors.step.table_of(layer));
    let launch = vectors.v.bind(vectors.k.bind(launch, 0), 1);
    // A page opened in a step may get the mean of what another page stores.
    let access = if layer.is_centred() { Use::ReadWrite } else { Use::Write };
    let launch = planes::bind(launch, 5, layer.k(), access);
    let launch = planes::bind(launch, 8, layer.v(), access);
    let launch = planes::bind_means(launch, [13, 14], layer, access);
    let launch = pass.marks().map_or(launch.clone(), |second| launch.scratch(15, second, marks));
    Ok(launch.params(11, &params))
}
