//! The intermediate tensors of a pass, allocated once and reused by every step.

use kvant::{DType, Device, Tensor};

use crate::{
    Result,
    cut::output_rows,
    spec::{AttentionSpec, BlockSpec, DecoderSpec, DeltaNetSpec, MixerSpec, MoeSpec, ParallelSum, QkNorm},
};

/// Rows whose logits the ranks of a group gather at once.
const GATHERED_LOGITS: usize = 64;

/// Scratch for passes of up to `rows` tokens, with views for the current number of tokens.
pub(crate) struct Workspace {
    rows: usize,
    buffers: Buffers,
    pub views: Views,
}

/// One-dimensional buffers. Each pass uses their first elements, in its own shapes, so that views are contiguous.
struct Buffers {
    ids: Tensor,
    query_factors: Tensor,
    hidden: [Tensor; 3],
    local_logits: Option<Tensor>,
    parallel: Option<[Tensor; 3]>,
    gathered: Option<[Tensor; 2]>,
    shared_router: Option<[Tensor; 3]>,
    projected: Tensor,
    attended: Tensor,
    by_position: Option<[Tensor; 3]>,
    output_gate: Tensor,
    convolved: Tensor,
    gate_up: Tensor,
    per_layer: Option<[Tensor; 3]>,
    moe: Option<[Tensor; 6]>,
}

/// The buffers in the shapes of a pass of `tokens` tokens.
pub(crate) struct Views {
    pub tokens: usize,
    /// u32 `[T]`.
    pub ids: Tensor,
    /// The factors of the queries, f32 `[T, 1]`.
    pub query_factors: Tensor,
    /// The residual stream, `[T, H]`.
    pub h: Tensor,
    /// The input of half a block, `[T, H]`.
    pub x: Tensor,
    /// The output of half a block, `[T, H]`.
    pub y: Tensor,
    /// The logits that a rank of a group computes, f32 `[rows, vocabulary / ranks]`, for some rows at a time.
    pub local_logits: Option<Tensor>,
    pub parallel: Option<ParallelViews>,
    pub shared_router: Option<SharedRouterViews>,
    pub blocks: Vec<BlockViews>,
    pub per_layer: Option<PerLayerViews>,
}

/// For a dense branch with norms that runs in parallel with the experts; `[T, H]` each.
pub(crate) struct ParallelViews {
    pub dense_output: Tensor,
    pub router_input: Tensor,
    pub experts_input: Tensor,
    /// On a group, the weighted sum of the experts' outputs.
    pub experts_output: Tensor,
    /// On a group, the outputs of both branches: `[2T, H]`.
    pub sums: Option<Tensor>,
}

/// On a group, the heads of all ranks, for a norm that covers them together.
pub(crate) struct GatheredViews {
    /// `[T, ranks·N]`.
    pub rows: Tensor,
    /// The rows by rank: `[T·ranks, N]`.
    pub parts: Tensor,
    /// The indices of a rank's parts, u32 `[T]`.
    pub ids: Tensor,
}

/// For a dense branch with its own weight; `[T, 1]` each.
pub(crate) struct SharedRouterViews {
    pub logits: Tensor,
    /// u32: zeros.
    pub ids: Tensor,
    /// f32.
    pub weights: Tensor,
}

pub(crate) struct BlockViews {
    pub mixer: MixerViews,
    pub dense: Option<DenseViews>,
    pub moe: Option<MoeViews>,
}

/// The tensors of a block's first half.
#[allow(clippy::large_enum_variant)] // Each layer has one: a box would save little.
pub(crate) enum MixerViews {
    Attention(AttentionViews),
    DeltaNet(DeltaNetViews),
    ShortConv(ShortConvViews),
}

/// For a gated delta net. The projections are adjacent in memory.
pub(crate) struct DeltaNetViews {
    /// The buffer of all projections: `[T, sum of their widths]`. Each of them is a contiguous matrix.
    pub all: Tensor,
    /// Queries, keys and values of all heads: `[T, channels]`.
    pub qkv: Tensor,
    /// The gate of the output, then the gated output: `[T, value_heads·Dv]`.
    pub z: Tensor,
    /// As rows of heads, `[T·value_heads, Dv]`.
    pub z_heads: Tensor,
    /// `[T, value_heads]` each.
    pub b: Tensor,
    pub a: Tensor,
    /// `[T, channels]`.
    pub convolved: Tensor,
    /// `[T, value_heads, Dv]`.
    pub out: Tensor,
    /// As rows of heads, `[T·value_heads, Dv]`.
    pub out_heads: Tensor,
}

/// For a short convolution.
pub(crate) struct ShortConvViews {
    /// `[T, 3·channels]`.
    pub projected: Tensor,
    /// `[T, channels]` each.
    pub product: Tensor,
    pub convolved: Tensor,
}

/// A pair is one buffer in two shapes: `[T, heads·D]` for the projections, `[T, heads, D]` for the rest. Queries, keys
/// and values are adjacent in memory, and so are gate and up.
pub(crate) struct AttentionViews {
    /// The buffer of the projections q, k and v: `[T, sum of their widths]`. Each of them is a contiguous matrix.
    pub qkv: Tensor,
    pub q: [Tensor; 2],
    pub k: [Tensor; 2],
    pub v: [Tensor; 2],
    /// For queries and keys.
    pub gathered: [Option<GatheredViews>; 2],
    pub attended: [Tensor; 2],
    /// The gate of the heads' output, then the gated output: `[T, heads·D]`.
    pub output_gate: Option<Tensor>,
    /// If the ranks of a group divide the positions of the cache.
    pub by_position: Option<PositionViews>,
}

/// The query heads of all ranks. Each rank computes their attention to its part of the keys.
pub(crate) struct PositionViews {
    /// The queries, `[T, ranks·heads·D]` and `[T, ranks·heads, D]`.
    pub q: [Tensor; 2],
    /// The results, f32 `[T, ranks·heads, D]`.
    pub out: Tensor,
    /// Their ends, f32 `[T, ranks·heads]`.
    pub ends: Tensor,
}

pub(crate) struct DenseViews {
    pub gate: Tensor,
    pub up: Tensor,
    /// The buffer of gate and up: `[T, 2I]`. Each of them is a contiguous matrix.
    pub gate_up: Tensor,
}

pub(crate) struct PerLayerViews {
    /// The embedded ids, `[T, L·P]` and `[T·L, P]`.
    pub embedded: [Tensor; 2],
    /// The projected embedding, then its sum with `embedded`, in these shapes.
    pub input: [Tensor; 2],
    /// `[T, P]`.
    pub gate: Tensor,
}

pub(crate) struct MoeViews {
    /// `[T, E]`.
    pub logits: Tensor,
    /// u32 `[T, top_k]`.
    pub ids: Tensor,
    /// f32 `[T, top_k]`.
    pub weights: Tensor,
    /// `[T·top_k, 2I]` for the fused projection.
    pub gate_up: Tensor,
    /// `[T·top_k, I]`, in the memory of `gate_up`, for separate projections.
    pub up: Tensor,
    /// `[T·top_k, I]`.
    pub gate: Tensor,
    /// `[T·top_k, H]`.
    pub out: Tensor,
}

impl Workspace {
    /// Allocates scratch for passes of up to `rows` tokens.
    pub(crate) fn new(spec: &DecoderSpec, device: &Device, dtype: DType, rows: usize) -> Result<Workspace> {
        let buffers = Buffers::new(spec, device, dtype, rows)?;
        let views = buffers.views(spec, rows)?;
        Ok(Workspace { rows, buffers, views })
    }

    /// Maximum tokens of a pass.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Adapts the views to a pass of `tokens` tokens, at most [`Workspace::rows`].
    pub(crate) fn fit(&mut self, spec: &DecoderSpec, tokens: usize) -> Result<()> {
        if self.views.tokens != tokens {
            self.views = self.buffers.views(spec, tokens)?;
        }
        Ok(())
    }
}

impl Buffers {
    fn new(spec: &DecoderSpec, device: &Device, dtype: DType, rows: usize) -> Result<Buffers> {
        let flat = |dtype: DType, width: usize| {
            let elements = rows.checked_mul(width).ok_or(kvant::Error::Overflow { op: "workspace", arg: "rows" })?;
            Tensor::zeros(device, dtype, &[elements])
        };
        let most = |width: &dyn Fn(&BlockSpec) -> usize| spec.blocks.iter().map(width).max().unwrap_or(0);
        let max_moe =
            |width: &dyn Fn(&MoeSpec) -> usize| most(&|block| block.feed_forward.moe().map_or(0, |moe| width(&moe)));
        let hidden = spec.hidden_size;
        let float = |width| flat(dtype, width);
        let ranks = device.ranks();
        let per_layer = match spec.per_layer_input {
            Some(inputs) => {
                let width = spec.blocks.len() * inputs.size;
                Some([float(width)?, float(width)?, float(inputs.size)?])
            }
            None => None,
        };
        let moe = match max_moe(&|moe| moe.top_k) {
            0 => None,
            top_k => Some([
                flat(logits_dtype(spec, dtype), max_moe(&|moe| moe.experts))?,
                flat(DType::U32, top_k)?,
                flat(DType::F32, top_k)?,
                float(max_moe(&|moe| moe.top_k * 2 * moe.width))?,
                float(max_moe(&|moe| moe.top_k * moe.width))?,
                float(top_k * hidden)?,
            ]),
        };
        Ok(Buffers {
            ids: flat(DType::U32, 1)?,
            query_factors: flat(DType::F32, 1)?,
            hidden: [float(hidden)?, float(hidden)?, float(hidden)?],
            local_logits: match output_rows(spec.vocab_size, ranks) {
                all if all == spec.vocab_size => None,
                some => Some(Tensor::zeros(device, DType::F32, &[rows.min(GATHERED_LOGITS), some])?),
            },
            gathered: match gathered_width(spec, ranks) {
                0 => None,
                width => Some([float(width)?, rank_rows(device, rows)?]),
            },
            parallel: if has(spec, ParallelSum::Normed) {
                let outputs = if ranks == 1 { hidden } else { 2 * hidden };
                Some([float(outputs)?, float(hidden)?, float(hidden)?])
            } else {
                None
            },
            shared_router: if has(spec, ParallelSum::Gated) {
                Some([flat(DType::F32, 1)?, flat(DType::U32, 1)?, flat(DType::F32, 1)?])
            } else {
                None
            },
            projected: float(most(&|block| MixerWidths::of(&block.mixer).projected))?,
            attended: float(most(&|block| MixerWidths::of(&block.mixer).attended))?,
            by_position: match position_widths(spec) {
                [0, _] => None,
                [width, heads] => Some([float(width)?, flat(DType::F32, width)?, flat(DType::F32, heads)?]),
            },
            output_gate: float(most(&|block| MixerWidths::of(&block.mixer).gate))?,
            convolved: float(most(&|block| MixerWidths::of(&block.mixer).convolved))?,
            gate_up: float(most(&|block| block.feed_forward.dense().map_or(0, |dense| 2 * dense.width)))?,
            per_layer,
            moe,
        })
    }

    fn views(&self, spec: &DecoderSpec, tokens: usize) -> Result<Views> {
        let hidden = spec.hidden_size;
        let per_layer = match (&self.per_layer, spec.per_layer_input) {
            (Some([embedded, input, gate]), Some(inputs)) => {
                let count = spec.blocks.len();
                let both = |buffer: &Tensor| -> Result<[Tensor; 2]> {
                    Ok([front(buffer, &[tokens, count * inputs.size])?, front(buffer, &[tokens * count, inputs.size])?])
                };
                let gate = front(gate, &[tokens, inputs.size])?;
                Some(PerLayerViews { embedded: both(embedded)?, input: both(input)?, gate })
            }
            _ => None,
        };
        let [h, x, y] = &self.hidden;
        let stream = |buffer: &Tensor| front(buffer, &[tokens, hidden]);
        Ok(Views {
            tokens,
            ids: front(&self.ids, &[tokens])?,
            query_factors: front(&self.query_factors, &[tokens, 1])?,
            h: stream(h)?,
            x: stream(x)?,
            y: stream(y)?,
            local_logits: self.local_logits.clone(),
            parallel: match &self.parallel {
                Some([outputs, router_input, experts_input]) => {
                    let is_group = outputs.device().ranks() > 1;
                    let experts_output = if is_group { tokens * hidden } else { 0 };
                    Some(ParallelViews {
                        dense_output: stream(outputs)?,
                        router_input: stream(router_input)?,
                        experts_input: stream(experts_input)?,
                        experts_output: span(outputs, experts_output, &[tokens, hidden])?,
                        sums: if is_group { Some(front(outputs, &[2 * tokens, hidden])?) } else { None },
                    })
                }
                None => None,
            },
            shared_router: match &self.shared_router {
                Some([logits, ids, weights]) => Some(SharedRouterViews {
                    logits: front(logits, &[tokens, 1])?,
                    ids: front(ids, &[tokens, 1])?,
                    weights: front(weights, &[tokens, 1])?,
                }),
                None => None,
            },
            blocks: spec.blocks.iter().map(|block| self.block(block, tokens, hidden)).collect::<Result<_>>()?,
            per_layer,
        })
    }

    fn block(&self, block: &BlockSpec, tokens: usize, hidden: usize) -> Result<BlockViews> {
        Ok(BlockViews {
            mixer: match &block.mixer {
                MixerSpec::Attention(attention) => MixerViews::Attention(self.attention(attention, tokens)?),
                MixerSpec::DeltaNet(net) => MixerViews::DeltaNet(self.delta_net(net, tokens)?),
                MixerSpec::ShortConv(conv) => MixerViews::ShortConv(ShortConvViews {
                    projected: front(&self.projected, &[tokens, 3 * conv.channels])?,
                    product: front(&self.attended, &[tokens, conv.channels])?,
                    convolved: front(&self.convolved, &[tokens, conv.channels])?,
                }),
            },
            dense: match block.feed_forward.dense() {
                Some(dense) => Some(DenseViews {
                    gate: front(&self.gate_up, &[tokens, dense.width])?,
                    up: span(&self.gate_up, tokens * dense.width, &[tokens, dense.width])?,
                    gate_up: front(&self.gate_up, &[tokens, 2 * dense.width])?,
                }),
                None => None,
            },
            moe: match (block.feed_forward.moe(), &self.moe) {
                (Some(moe), Some(buffers)) => Some(MoeViews::new(buffers, &moe, tokens, hidden)?),
                _ => None,
            },
        })
    }

    fn delta_net(&self, net: &DeltaNetSpec, tokens: usize) -> Result<DeltaNetViews> {
        let (widths, heads, dim) = (net.projections(), net.value_heads, net.value_dim);
        let mut end = 0;
        let mut part = |width: usize| {
            end += tokens * width;
            span(&self.projected, end - tokens * width, &[tokens, width])
        };
        let [qkv, z, b, a] = widths.map(&mut part);
        let z = z?;
        Ok(DeltaNetViews {
            all: front(&self.projected, &[tokens, widths.iter().sum()])?,
            qkv: qkv?,
            z_heads: z.reshape(&[tokens * heads, dim])?,
            z,
            b: b?,
            a: a?,
            convolved: front(&self.convolved, &[tokens, net.channels()])?,
            out: front(&self.attended, &[tokens, heads, dim])?,
            out_heads: front(&self.attended, &[tokens * heads, dim])?,
        })
    }

    fn attention(&self, attention: &AttentionSpec, tokens: usize) -> Result<AttentionViews> {
        // `heads` heads of a buffer, starting at element `at`.
        let heads = |buffer: &Tensor, at: usize, heads: usize, dim: usize| -> Result<[Tensor; 2]> {
            let flat = span(buffer, at, &[tokens, heads * dim])?;
            let split = flat.reshape(&[tokens, heads, dim])?;
            Ok([flat, split])
        };
        let (q, kv, dim) = (attention.heads, attention.kv_heads, attention.head_dim);
        let (q_width, kv_width) = (attention.q_width(), attention.kv_width());
        Ok(AttentionViews {
            qkv: front(&self.projected, &[tokens, q_width + attention.kv_projections() * kv_width])?,
            q: heads(&self.projected, 0, q, dim)?,
            k: heads(&self.projected, tokens * q_width, kv, dim)?,
            v: heads(&self.projected, tokens * (q_width + kv_width), kv, dim)?,
            gathered: match &self.gathered {
                Some(buffers) if attention.qk_norm == Some(QkNorm::Rows) => [
                    Some(GatheredViews::new(buffers, tokens, q_width)?),
                    // Each rank has all keys of a cache that is divided by positions.
                    match attention.position_ranks {
                        1 => Some(GatheredViews::new(buffers, tokens, kv_width)?),
                        _ => None,
                    },
                ],
                _ => [None, None],
            },
            attended: heads(&self.attended, 0, q, dim)?,
            output_gate: match attention.gate_width() {
                0 => None,
                width => Some(front(&self.output_gate, &[tokens, width])?),
            },
            by_position: match &self.by_position {
                Some([q, out, ends]) if attention.position_ranks > 1 => {
                    let all = attention.position_ranks * attention.heads;
                    Some(PositionViews {
                        q: heads(q, 0, all, dim)?,
                        out: front(out, &[tokens, all, dim])?,
                        ends: front(ends, &[tokens, all])?,
                    })
                }
                _ => None,
            },
        })
    }
}

impl GatheredViews {
    fn new([rows, ids]: &[Tensor; 2], tokens: usize, width: usize) -> Result<GatheredViews> {
        let ranks = rows.device().ranks();
        let parts = front(rows, &[tokens * ranks, width])?;
        Ok(GatheredViews { rows: parts.reshape(&[tokens, ranks * width])?, parts, ids: front(ids, &[tokens])? })
    }
}

/// The width of rows of all ranks' heads; 0 if no norm needs them.
fn gathered_width(spec: &DecoderSpec, ranks: usize) -> usize {
    let attention = spec.blocks.iter().filter_map(BlockSpec::attention);
    let gathered = attention.filter(|attention| ranks > 1 && attention.qk_norm == Some(QkNorm::Rows));
    gathered.map(|attention| ranks * attention.q_width()).max().unwrap_or(0)
}

/// The query elements and heads of all ranks, for caches that are divided by positions; 0 without any.
fn position_widths(spec: &DecoderSpec) -> [usize; 2] {
    let attention = || spec.blocks.iter().filter_map(BlockSpec::attention).filter(|spec| spec.position_ranks > 1);
    let max =
        |of: fn(&AttentionSpec) -> usize| attention().map(|spec| spec.position_ranks * of(spec)).max().unwrap_or(0);
    [max(AttentionSpec::q_width), max(|spec| spec.heads)]
}

/// For each token the index of the rank's part of its gathered row.
fn rank_rows(device: &Device, rows: usize) -> Result<Tensor> {
    let ranks = device.ranks();
    Tensor::from_rank_bytes(device, DType::U32, &[rows], |rank| {
        let ids = (0..rows).map(|row| (row * ranks + rank) as u32);
        Ok(ids.flat_map(u32::to_le_bytes).collect::<Vec<u8>>())
    })
}

/// Whether a dense branch is added to experts by this kind of sum.
fn has(spec: &DecoderSpec, sum: ParallelSum) -> bool {
    spec.blocks.iter().any(|block| block.feed_forward.parallel_sum() == Some(sum))
}

/// The dtype of router logits. Scores with a bias are close to each other, so rounding the logits would change the
/// selection.
fn logits_dtype(spec: &DecoderSpec, activations: DType) -> DType {
    let has_scores = |block: &BlockSpec| block.feed_forward.moe().is_some_and(|moe| moe.routing.has_scores());
    if spec.blocks.iter().any(has_scores) { DType::F32 } else { activations }
}

/// Bytes of the scratch of each of `ranks` ranks for passes of up to `rows` tokens.
pub(crate) fn workspace_bytes(spec: &DecoderSpec, ranks: usize, dtype: DType, rows: usize) -> usize {
    let most = |width: &dyn Fn(&BlockSpec) -> usize| spec.blocks.iter().map(width).max().unwrap_or(0);
    let mixer = [
        most(&|block| MixerWidths::of(&block.mixer).projected),
        most(&|block| MixerWidths::of(&block.mixer).attended),
        most(&|block| MixerWidths::of(&block.mixer).gate),
        most(&|block| MixerWidths::of(&block.mixer).convolved),
    ];
    let mixer: usize = mixer.iter().sum();
    let dense = most(&|block| block.feed_forward.dense().map_or(0, |dense| 2 * dense.width));
    let moe = most(&|block| {
        let hidden = spec.hidden_size;
        block.feed_forward.moe().map_or(0, |moe| moe.experts + moe.top_k * (3 * moe.width + hidden + 2))
    });
    let per_layer = spec.per_layer_input.map_or(0, |inputs| (2 * spec.blocks.len() + 1) * inputs.size);
    let streams = if has(spec, ParallelSum::Normed) { 6 + usize::from(ranks > 1) } else { 3 };
    let gathered = gathered_width(spec, ranks);
    let width = streams * spec.hidden_size + mixer + dense + moe + per_layer + gathered;
    let [positions, heads] = position_widths(spec);
    let width = width + positions;
    let results = rows.saturating_mul(positions + heads);
    let local = output_rows(spec.vocab_size, ranks);
    let logits = if local == spec.vocab_size { 0 } else { rows.min(GATHERED_LOGITS).saturating_mul(local) };
    rows.saturating_mul(width)
        .saturating_mul(dtype.size())
        .saturating_add(logits.saturating_add(results).saturating_mul(DType::F32.size()))
}

/// The elements for a token in the buffers of a block's first half.
struct MixerWidths {
    projected: usize,
    attended: usize,
    gate: usize,
    convolved: usize,
}

impl MixerWidths {
    fn of(mixer: &MixerSpec) -> MixerWidths {
        let (projected, attended, gate, convolved) = match mixer {
            MixerSpec::Attention(attention) => {
                let (q, kv) = (attention.q_width(), attention.kv_width());
                (q + 2 * kv, q, attention.gate_width(), 0)
            }
            MixerSpec::DeltaNet(net) => (net.projections().iter().sum(), net.value_width(), 0, net.channels()),
            MixerSpec::ShortConv(conv) => (3 * conv.channels, conv.channels, 0, conv.channels),
        };
        MixerWidths { projected, attended, gate, convolved }
    }
}

impl MoeViews {
    fn new(buffers: &[Tensor; 6], moe: &MoeSpec, tokens: usize, hidden: usize) -> Result<MoeViews> {
        let [logits, ids, weights, gate_up, gate, out] = buffers;
        let (rows, width) = (tokens * moe.top_k, moe.width);
        Ok(MoeViews {
            logits: front(logits, &[tokens, moe.experts])?,
            ids: front(ids, &[tokens, moe.top_k])?,
            weights: front(weights, &[tokens, moe.top_k])?,
            gate_up: front(gate_up, &[rows, 2 * width])?,
            up: front(gate_up, &[rows, width])?,
            gate: front(gate, &[rows, width])?,
            out: front(out, &[rows, hidden])?,
        })
    }
}

/// The first elements of a buffer, in a shape.
fn front(buffer: &Tensor, shape: &[usize]) -> Result<Tensor> {
    span(buffer, 0, shape)
}

/// The elements of a buffer starting at `at`, in a shape.
fn span(buffer: &Tensor, at: usize, shape: &[usize]) -> Result<Tensor> {
    Ok(buffer.rows(at..at + shape.iter().product::<usize>())?.reshape(shape)?)
}
