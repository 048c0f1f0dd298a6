//! The pools of decoders.

use kvant::{CacheLayer, Codec, DType, PoolSpec, StateLayer};

use crate::{AttentionSpec, CacheCodecs, DecoderSpec, KvCodec, Result};

/// Options of [`Model::new_pool`](crate::Model::new_pool).
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// The codecs of keys and values.
    pub codecs: CacheCodecs,
    /// Number of sequences that the pool has room for.
    pub sequences: usize,
    /// Maximum tokens of a sequence. A larger number of shorter sequences also fits.
    pub longest: usize,
    /// Positions per page: 16, 32, 64, 128 or 256.
    pub page_tokens: usize,
    /// Drafts that each sequence verifies in a step: recurrent states then need more room.
    pub drafts: usize,
}

impl Default for PoolOptions {
    /// f16, one sequence of 4096 tokens, pages of 64, no drafts.
    fn default() -> Self {
        PoolOptions { codecs: Codec::F16.into(), sequences: 1, longest: 4096, page_tokens: 64, drafts: 0 }
    }
}

/// How the ranks of a group divide the cache of a layer without a window. A layer with a window is always divided by
/// heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheDivision {
    /// By heads, or by positions if the ranks do not divide the KV heads: 2 or 4 ranks, which divide pages of 64.
    #[default]
    Auto,
    /// By heads. If there are more ranks than KV heads, several ranks have copies of a head.
    Heads,
    /// By positions: each rank has all KV heads of a part of each page. For 2, 4, 8 or 16 ranks, and pages of at least
    /// 16 positions for each of them.
    Positions,
}

/// The specification of a decoder's pool. `draft`: the layer of its drafter.
pub(crate) fn pool_spec(
    spec: &DecoderSpec,
    options: &PoolOptions,
    pass_tokens: usize,
    activations: DType,
    draft: Option<CacheLayer>,
) -> Result<PoolSpec> {
    pool_spec_with(spec, options, pass_tokens, activations, (draft, spec.states(activations)))
}

/// The specification of a decoder's pool with these states, and a layer of a drafter.
pub(crate) fn pool_spec_with(
    spec: &DecoderSpec,
    options: &PoolOptions,
    pass_tokens: usize,
    activations: DType,
    (draft, states): (Option<CacheLayer>, Vec<StateLayer>),
) -> Result<PoolSpec> {
    let mut layers = cache_layers(spec, &options.codecs, activations)?;
    layers.extend(draft);
    let pool = PoolSpec::new(layers, 0).page_tokens(options.page_tokens).states(states).drafts(options.drafts);
    Ok(pool.room_for_steps(options.sequences, options.longest, pass_tokens)?)
}

/// The layers of a pool: the blocks with their own keys and values. In layers that seal pages, dense pages have the
/// activations' dtype, or f16 if activations are f32.
pub(crate) fn cache_layers(spec: &DecoderSpec, codecs: &CacheCodecs, activations: DType) -> Result<Vec<CacheLayer>> {
    let dense = if activations == DType::BF16 { DType::BF16 } else { DType::F16 };
    let layer = |((_, attention), kv): ((usize, &AttentionSpec), KvCodec)| {
        let layer = CacheLayer::new(attention.kv_heads, attention.head_dim, kv.k).v(kv.v).dense(dense);
        layer.window(attention.window).position_ranks(attention.position_ranks)
    };
    Ok(spec.cache_blocks().zip(codecs.of_layers(spec.cache_layers())?).map(layer).collect())
}

/// The layer of a drafter with its own keys and values: dense, in the dtype of activations.
pub(crate) fn draft_layer(spec: &DecoderSpec, activations: DType) -> Option<CacheLayer> {
    let codec = match activations {
        DType::BF16 => Codec::BF16,
        DType::F16 => Codec::F16,
        _ => Codec::F32,
    };
    spec.cache_blocks().next().map(|(_, attention)| {
        let layer = CacheLayer::new(attention.kv_heads, attention.head_dim, codec);
        layer.window(attention.window).position_ranks(attention.position_ranks)
    })
}
