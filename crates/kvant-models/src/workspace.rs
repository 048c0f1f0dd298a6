//! The tensors between the operations of a pass, allocated once and used by every step.

use kvant::{DType, Device, Tensor};

use crate::{Result, config::Config};

/// Scratch for passes of up to `rows` tokens, with views for the latest number of tokens.
pub(crate) struct Workspace {
    rows: usize,
    buffers: Buffers,
    pub views: Views,
}

/// One-dimensional buffers. Each pass uses the first elements in the shapes that it needs, so that views are
/// contiguous.
struct Buffers {
    ids: Tensor,
    hidden: [Tensor; 4],
    qkv: Tensor,
    attended: Tensor,
    gate_up: Tensor,
    per_layer: Option<[Tensor; 3]>,
    moe: Option<[Tensor; 6]>,
}

/// The buffers in the shapes of a pass of `tokens` tokens.
pub(crate) struct Views {
    pub tokens: usize,
    /// u32 `[T]`.
    pub ids: Tensor,
    /// The residual stream, `[T, H]`.
    pub h: Tensor,
    /// The input of a block, `[T, H]`.
    pub x: Tensor,
    /// The output of a block, `[T, H]`.
    pub y: Tensor,
    /// The output of the dense branch that runs in parallel with the experts, `[T, H]`.
    pub y1: Tensor,
    pub layers: Vec<LayerViews>,
    pub per_layer: Option<PerLayerViews>,
    pub moe: Option<MoeViews>,
}

/// A pair is one buffer in two shapes: `[T, heads·D]` for the projections, `[T, heads, D]` for the rest. Queries,
/// keys and values are adjacent in memory, and so are gate and up.
pub(crate) struct LayerViews {
    /// In a pass of one token: the projected ones of q, k and v in one row.
    pub qkv: Option<Tensor>,
    pub q: [Tensor; 2],
    pub k: [Tensor; 2],
    pub v: [Tensor; 2],
    pub attended: [Tensor; 2],
    pub gate: Tensor,
    pub up: Tensor,
    /// In a pass of one token: gate and up in one row.
    pub gate_up: Option<Tensor>,
}

pub(crate) struct PerLayerViews {
    /// The embedded ids, `[T, L·P]` and `[T·L, P]`.
    pub embedded: [Tensor; 2],
    /// The projected embedding, then its sum with `embedded`; the same shapes.
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
    pub(crate) fn new(config: &Config, device: &Device, dtype: DType, rows: usize) -> Result<Workspace> {
        let buffers = Buffers::new(config, device, dtype, rows)?;
        let views = buffers.views(config, rows)?;
        Ok(Workspace { rows, buffers, views })
    }

    /// The largest number of tokens in a pass.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Adapts the views to a pass of `tokens` tokens, at most [`Workspace::rows`].
    pub(crate) fn fit(&mut self, config: &Config, tokens: usize) -> Result<()> {
        if self.views.tokens != tokens {
            self.views = self.buffers.views(config, tokens)?;
        }
        Ok(())
    }
}

impl Buffers {
    fn new(config: &Config, device: &Device, dtype: DType, rows: usize) -> Result<Buffers> {
        let flat = |dtype: DType, width: usize| {
            let elements = rows.checked_mul(width).ok_or(kvant::Error::Overflow { op: "workspace", arg: "rows" })?;
            Tensor::zeros(device, dtype, &[elements])
        };
        let most = |width: &dyn Fn(&crate::LayerConfig) -> usize| config.layers.iter().map(width).max().unwrap_or(0);
        let hidden = config.hidden_size;
        let q = most(&|l| config.heads * l.head_dim);
        let kv = most(&|l| l.kv_heads * l.head_dim);
        let inner = most(&|l| l.intermediate_size);
        let float = |width| flat(dtype, width);
        let per_layer = match config.per_layer_input {
            Some(ple) => {
                let width = config.layers.len() * ple.size;
                Some([float(width)?, float(width)?, float(ple.size)?])
            }
            None => None,
        };
        let moe = match config.moe {
            Some(moe) => Some([
                float(moe.experts)?,
                flat(DType::U32, moe.top_k)?,
                flat(DType::F32, moe.top_k)?,
                float(moe.top_k * 2 * moe.intermediate_size)?,
                float(moe.top_k * moe.intermediate_size)?,
                float(moe.top_k * hidden)?,
            ]),
            None => None,
        };
        Ok(Buffers {
            ids: flat(DType::U32, 1)?,
            hidden: [float(hidden)?, float(hidden)?, float(hidden)?, float(hidden)?],
            qkv: float(q + 2 * kv)?,
            attended: float(q)?,
            gate_up: float(2 * inner)?,
            per_layer,
            moe,
        })
    }

    fn views(&self, config: &Config, tokens: usize) -> Result<Views> {
        let hidden = config.hidden_size;
        // `heads` heads of a buffer, from its element `at` on.
        let heads = |buffer: &Tensor, at: usize, heads: usize, dim: usize| -> Result<[Tensor; 2]> {
            let flat = span(buffer, at, &[tokens, heads * dim])?;
            let split = flat.reshape(&[tokens, heads, dim])?;
            Ok([flat, split])
        };
        let row =
            |buffer: &Tensor, width: usize| if tokens == 1 { front(buffer, &[1, width]).map(Some) } else { Ok(None) };
        let mut layers = Vec::with_capacity(config.layers.len());
        for layer in &config.layers {
            let (q, kv, inner) = (config.heads, layer.kv_heads, layer.intermediate_size);
            let (q_width, kv_width) = (q * layer.head_dim, kv * layer.head_dim);
            layers.push(LayerViews {
                qkv: row(&self.qkv, q_width + layer.kv_projections() * kv_width)?,
                q: heads(&self.qkv, 0, q, layer.head_dim)?,
                k: heads(&self.qkv, tokens * q_width, kv, layer.head_dim)?,
                v: heads(&self.qkv, tokens * (q_width + kv_width), kv, layer.head_dim)?,
                attended: heads(&self.attended, 0, q, layer.head_dim)?,
                gate: front(&self.gate_up, &[tokens, inner])?,
                up: span(&self.gate_up, tokens * inner, &[tokens, inner])?,
                gate_up: row(&self.gate_up, 2 * inner)?,
            });
        }
        let per_layer = match (&self.per_layer, config.per_layer_input) {
            (Some([embedded, input, gate]), Some(ple)) => {
                let count = config.layers.len();
                let both = |buffer: &Tensor| -> Result<[Tensor; 2]> {
                    Ok([front(buffer, &[tokens, count * ple.size])?, front(buffer, &[tokens * count, ple.size])?])
                };
                let gate = front(gate, &[tokens, ple.size])?;
                Some(PerLayerViews { embedded: both(embedded)?, input: both(input)?, gate })
            }
            _ => None,
        };
        let moe = match (&self.moe, config.moe) {
            (Some([logits, ids, weights, gate_up, gate, out]), Some(moe)) => {
                let (rows, inner) = (tokens * moe.top_k, moe.intermediate_size);
                Some(MoeViews {
                    logits: front(logits, &[tokens, moe.experts])?,
                    ids: front(ids, &[tokens, moe.top_k])?,
                    weights: front(weights, &[tokens, moe.top_k])?,
                    gate_up: front(gate_up, &[rows, 2 * inner])?,
                    up: front(gate_up, &[rows, inner])?,
                    gate: front(gate, &[rows, inner])?,
                    out: front(out, &[rows, hidden])?,
                })
            }
            _ => None,
        };
        let [h, x, y, y1] = &self.hidden;
        let stream = |buffer: &Tensor| front(buffer, &[tokens, hidden]);
        Ok(Views {
            tokens,
            ids: front(&self.ids, &[tokens])?,
            h: stream(h)?,
            x: stream(x)?,
            y: stream(y)?,
            y1: stream(y1)?,
            layers,
            per_layer,
            moe,
        })
    }
}

/// The first elements of a buffer, in a shape.
fn front(buffer: &Tensor, shape: &[usize]) -> Result<Tensor> {
    span(buffer, 0, shape)
}

/// The elements of a buffer from `at` on, in a shape.
fn span(buffer: &Tensor, at: usize, shape: &[usize]) -> Result<Tensor> {
    Ok(buffer.rows(at..at + shape.iter().product::<usize>())?.reshape(shape)?)
}
