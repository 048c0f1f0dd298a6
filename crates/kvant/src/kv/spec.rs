//! The specifications of pools and steps.

use super::{
    layout::{LayerGroup, layer_groups},
    pool::NAME,
};
use crate::{Codec, DType, Error, Result, layer::PAGE_UNIT};

/// One layer of a [`PoolSpec`].
///
/// If a codec is centred (`tq4c`), the layer **seals** pages. A token sees exactly, as dense rows, the first page of
/// its sequence, its own page and the page before; the other pages are encoded, each as a whole and around its own
/// mean. The choice depends on positions alone. Equal tokens therefore give equal caches, for any batches and chunks,
/// and whether a prefix was found or computed. `docs/codec.md` has the reasons.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct CacheLayer {
    /// KV heads, Hk.
    pub kv_heads: usize,
    /// Coordinates of a key or value, D.
    pub head_dim: usize,
    /// The number of positions that a token sees, itself included; `None` for all. [`attend`](crate::ops::attend())
    /// applies it.
    pub window: Option<usize>,
    /// The codec of keys.
    pub k: Codec,
    /// The codec of values.
    pub v: Codec,
    /// The dtype of dense pages, if a codec is centred.
    pub dense: DType,
    /// The number of ranks that divide the positions of each page among them: 1 (the default) if every rank stores all,
    /// otherwise the [ranks](crate::Device::ranks) of the device. Rank r of N stores the r-th of N equal parts of each
    /// page, of all `kv_heads`, at least 16 positions. For layers without a window.
    ///
    /// If the layer seals pages, each rank seals its part of a page, around a mean of its own. The first page and the
    /// two last pages of the rank's rows are dense.
    ///
    /// Operations write and see the rank's rows. [`Attend::ends`](crate::ops::Attend::ends) and
    /// [`merge_attention`](crate::ops::merge_attention()) give the result over all positions.
    pub position_ranks: usize,
}

impl CacheLayer {
    /// A layer whose tokens see all positions, with keys and values in `codec`.
    pub fn new(kv_heads: usize, head_dim: usize, codec: Codec) -> CacheLayer {
        let (window, dense, position_ranks) = (None, DType::F16, 1);
        CacheLayer { kv_heads, head_dim, window, k: codec, v: codec, dense, position_ranks }
    }

    /// Whether the layer seals pages.
    pub fn seals(&self) -> bool {
        self.k.is_centred() || self.v.is_centred()
    }
}

setters! { CacheLayer {
    window: Option<usize>,
    k: Codec,
    v: Codec,
    dense: DType,
    position_ranks: usize,
} }

/// A state that each sequence of a pool has in one recurrent layer, such as the inputs of a convolution or the matrix
/// of a linear attention.
///
/// A sequence overwrites its state with each token. Operations that take [`StateSlots`](crate::ops::StateSlots) read
/// and write it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StateLayer {
    /// The dtype of its elements.
    pub dtype: DType,
    /// The shape of the state of one sequence.
    pub shape: Vec<usize>,
}

impl StateLayer {
    /// A state of this shape for each sequence.
    pub fn new(dtype: DType, shape: &[usize]) -> StateLayer {
        StateLayer { dtype, shape: shape.to_vec() }
    }
}

/// The specification of a [`KvPool`](crate::KvPool).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PoolSpec {
    /// One entry per layer.
    pub layers: Vec<CacheLayer>,
    /// The states of recurrent layers; empty (the default) if a model has none.
    pub states: Vec<StateLayer>,
    /// Whether a sequence keeps a copy of its states at the last page boundary at which a step ended (the default).
    /// Prefixes can be continued, and sequences truncated, only at positions whose states are kept. With this option, a
    /// sequence has up to two copies of all states instead of one.
    pub keeps_boundaries: bool,
    /// The tokens that [`PoolSpec::room_for`] expects each sequence to [hold](crate::Sequence::hold): more states. 0 by
    /// default.
    pub drafts: usize,
    /// Bytes of all pages and states together.
    pub bytes: usize,
    /// Positions of a page: 16, 32, 64, 128 or 256.
    pub page_tokens: usize,
    /// Bytes of host memory for prefixes that do not fit on the device.
    pub host_bytes: usize,
}

/// Tokens beyond its windows that each sequence of [`PoolSpec::room_for_steps`] may hold.
const HELD: usize = 128;

impl PoolSpec {
    /// Specifies layers and a budget in bytes for the pages of all of them. A page has 64 positions, and no host memory
    /// is used.
    pub fn new(layers: Vec<CacheLayer>, bytes: usize) -> PoolSpec {
        let (states, keeps_boundaries) = (Vec::new(), true);
        PoolSpec { layers, states, keeps_boundaries, drafts: 0, bytes, page_tokens: 64, host_bytes: 0 }
    }

    /// Sets the budget so that `sequences` sequences of up to `longest` tokens fit at once, each fed with up to
    /// `max_new` tokens at a time. Set the other fields before.
    ///
    /// # Errors
    /// As [`KvPool::new`](crate::KvPool::new).
    pub fn room_for(self, sequences: usize, longest: usize, max_new: usize) -> Result<PoolSpec> {
        let (groups, ..) = layer_groups(&self)?;
        let slab = groups.iter().map(|group| group.page_bytes).max().unwrap_or(PAGE_UNIT);
        let of_group = |group: &LayerGroup| {
            let pages = group.max_pages(longest, max_new, self.page_tokens).max(1) + group.held_states(self.drafts);
            pages.checked_mul(sequences.max(1))?.div_ceil(slab / group.page_bytes).checked_mul(slab)
        };
        let bytes = groups.iter().map(of_group).try_fold(0usize, |sum, bytes| sum.checked_add(bytes?));
        Ok(PoolSpec { bytes: bytes.ok_or(Error::Overflow { op: NAME, arg: "longest" })?, ..self })
    }

    /// As [`PoolSpec::room_for`], for steps of up to `step_tokens` tokens of all sequences together. Each sequence may
    /// also [hold](crate::Sequence::hold) 128 tokens that its windows have passed.
    ///
    /// # Errors
    /// As [`KvPool::new`](crate::KvPool::new).
    pub fn room_for_steps(self, sequences: usize, longest: usize, step_tokens: usize) -> Result<PoolSpec> {
        self.room_for(sequences, longest, PoolSpec::step_share(sequences, step_tokens))
    }

    /// The tokens of a step that [`PoolSpec::room_for_steps`] counts for each sequence.
    pub fn step_share(sequences: usize, step_tokens: usize) -> usize {
        step_tokens.div_ceil(sequences.max(1)).max(HELD)
    }
}

setters! { PoolSpec {
    states: Vec<StateLayer>,
    keeps_boundaries: bool,
    drafts: usize,
    page_tokens: usize,
    host_bytes: usize,
} }

/// Maximum dimensions of a step for a captured [`Graph`](crate::Graph)
/// ([`KvPool::reserve_step`](crate::KvPool::reserve_step)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepSize {
    /// Maximum sequences.
    pub sequences: usize,
    /// Maximum tokens of all sequences together.
    pub tokens: usize,
    /// Maximum length of a sequence.
    pub longest: usize,
    /// Maximum tokens of one sequence.
    pub max_new: usize,
    /// The number of leading tokens that are the only ones of their sequences.
    pub alone: usize,
}

impl StepSize {
    /// A decode step: one token for each of `sequences` sequences of at most `longest` tokens.
    pub fn decode(sequences: usize, longest: usize) -> StepSize {
        StepSize { sequences, tokens: sequences, longest, max_new: 1, alone: sequences }
    }

    /// Sets the number of tokens, and the maximum of one sequence. `alone` becomes all tokens if that maximum is 1,
    /// otherwise 0.
    #[must_use]
    pub fn tokens(self, tokens: usize, max_new: usize) -> StepSize {
        StepSize { tokens, max_new, alone: if max_new <= 1 { tokens } else { 0 }, ..self }
    }

    /// Sets the number of leading tokens that are the only ones of their sequences.
    #[must_use]
    pub fn alone(self, tokens: usize) -> StepSize {
        StepSize { alone: tokens.min(self.tokens), ..self }
    }
}
