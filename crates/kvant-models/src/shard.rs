//! Tensor parallelism: the part of a decoder that each rank of a group of devices has.
//!
//! | tensor | a rank has |
//! |---|---|
//! | queries, keys, values, gates of heads, with their biases; sinks | its heads |
//! | projections, taps, decays and states of delta nets | its key heads, with their value heads |
//! | input projection, taps and states of short convolutions | its channels |
//! | gate and up of MLPs and experts, with their biases | some of the outputs |
//! | the output of attention, delta nets and convolutions; down | the inputs that it computes: the ranks' results are summed |
//! | biases of these outputs and of down | rank 0 has them, other ranks have zeros, because the results are summed |
//! | the output matrix | some rows of the vocabulary: the ranks' logits are gathered |
//! | embeddings, routers, norms, per-layer inputs | all |
//!
//! A cache that is divided by positions ([`CacheDivision`]) has all KV heads on each rank. The projections of keys and
//! values are then whole.
//!
//! Inputs are cut between groups of a quantised matrix. The last rank may have fewer groups of an MLP. Its matrices
//! then end with zeros, because all ranks have tensors of one shape.

use kvant::CacheLayer;

use crate::{
    CacheDivision, DecoderSpec, Error, Result,
    source::{Form, Part, Role, Source},
    spec::{AttentionSpec, BlockSpec, DeltaNetSpec, FeedForwardSpec, MixerSpec, ShortConvSpec},
};

/// Maximum group size that messages propose.
const MAX_PROPOSED: usize = 16;
/// Positions of the largest page; minimum positions of a page on a rank.
const MAX_PAGE_TOKENS: usize = 256;
const MIN_PAGE_SHARE: usize = 16;
/// Widths of dense matrices are cut at multiples of this number, because kernels are fast for them.
const DENSE_STEP: usize = 8;
/// Inputs that the kernels of many rows multiply at once. Others get slow kernels, for example the halves of gpt-oss'
/// 2880.
const CHUNK: usize = 64;
/// Minimum width of an MLP on a rank for which whole chunks are worth their padding, at most 64 columns.
const MIN_CHUNKED_WIDTH: usize = 1024;

/// The decoder that each of `ranks` ranks runs: fewer heads and narrower MLPs, and the whole vocabulary.
///
/// # Errors
/// `Indivisible`; those of the source.
pub(crate) fn local_spec(
    spec: &DecoderSpec,
    ranks: usize,
    division: CacheDivision,
    source: &dyn Source,
) -> Result<DecoderSpec> {
    if ranks == 1 {
        return Ok(spec.clone());
    }
    spec.check()?;
    let blocks = spec.blocks.iter().enumerate();
    let steps: Vec<Steps> =
        blocks.map(|(l, block)| Steps::new(l, block, spec.hidden_size, source)).collect::<Result<_>>()?;
    let blocks = |ranks| {
        let local = |(l, (block, steps)): (usize, (&BlockSpec, &Steps))| {
            let by_position = is_by_position(spec, l, division, ranks);
            steps.local_block(block, ranks, by_position).map_err(|misfit| (l, misfit))
        };
        spec.blocks.iter().zip(&steps).enumerate().map(local).collect()
    };
    let divided: std::result::Result<Vec<BlockSpec>, (usize, Misfit)> = blocks(ranks);
    match divided {
        Ok(blocks) => Ok(DecoderSpec { blocks, ..spec.clone() }),
        Err((layer, Misfit { what, count })) => {
            let fits = |ranks: &usize| blocks(*ranks).is_ok();
            Err(Error::Indivisible { what, count, layer, ranks, fits: (2..=MAX_PROPOSED).filter(fits).collect() })
        }
    }
}

/// Whether ranks divide the cache of a block by positions. Blocks that share a cache agree.
fn is_by_position(spec: &DecoderSpec, l: usize, division: CacheDivision, ranks: usize) -> bool {
    let owner = spec.blocks[l].source().unwrap_or(l);
    let Some(attention) = spec.blocks.get(owner).and_then(BlockSpec::attention) else { return false };
    let reads = |(reader, block): (usize, &BlockSpec)| block.source().unwrap_or(reader) == owner;
    let mut readers = spec.blocks.iter().enumerate().filter(|reader| reads(*reader)).map(|(_, block)| block);
    let sees_all = readers.all(|block| block.attention().is_some_and(|attention| attention.window.is_none()));
    sees_all && prefers_positions(attention.kv_heads, division, ranks)
}

/// Whether ranks divide the cache of a layer without a window by positions.
fn prefers_positions(kv_heads: usize, division: CacheDivision, ranks: usize) -> bool {
    match division {
        CacheDivision::Auto => [2, 4].contains(&ranks) && !kv_heads.is_multiple_of(ranks),
        CacheDivision::Heads => false,
        CacheDivision::Positions => true,
    }
}

/// A rank's part of a layer in a pool.
pub(crate) fn divided_layer(mut layer: CacheLayer, ranks: usize, division: CacheDivision) -> CacheLayer {
    match layer.window.is_none() && prefers_positions(layer.kv_heads, division, ranks) {
        true => layer.position_ranks(ranks),
        false => {
            layer.kv_heads = layer.kv_heads.div_ceil(ranks.max(1));
            layer
        }
    }
}

/// A number that the ranks cannot share.
struct Misfit {
    what: &'static str,
    count: usize,
}

/// The inputs between which the matrices of a block may be cut.
struct Steps {
    mixer: usize,
    dense: usize,
    moe: usize,
}

impl Steps {
    fn new(l: usize, block: &BlockSpec, h: usize, source: &dyn Source) -> Result<Steps> {
        let step = |part, shape: &[usize]| Ok::<_, Error>(step_of(source.form(Role::Block(l, part), shape)?));
        let feed_forward = &block.feed_forward;
        let [.., down] = Part::of_dense(feed_forward);
        Ok(Steps {
            mixer: match &block.mixer {
                MixerSpec::Attention(attention) => step(Part::AttentionOutput, &[h, attention.q_width()])?,
                MixerSpec::DeltaNet(net) => step(Part::DeltaOutput, &[h, net.value_width()])?,
                MixerSpec::ShortConv(conv) => step(Part::ConvOutput, &[h, conv.channels])?,
            },
            dense: feed_forward.dense().map_or(Ok(1), |dense| step(down, &[h, dense.width]))?,
            moe: feed_forward.moe().map_or(Ok(1), |moe| step(Part::ExpertDown, &[moe.experts, h, moe.width]))?,
        })
    }

    fn local_block(
        &self,
        block: &BlockSpec,
        ranks: usize,
        by_position: bool,
    ) -> std::result::Result<BlockSpec, Misfit> {
        let mut local = block.clone();
        match &mut local.mixer {
            MixerSpec::Attention(attention) => self.divide_heads(attention, ranks, by_position)?,
            MixerSpec::DeltaNet(net) => self.divide_delta_heads(net, ranks)?,
            MixerSpec::ShortConv(conv) => self.divide_channels(conv, ranks)?,
        }
        match &mut local.feed_forward {
            FeedForwardSpec::Dense(dense) => divide_width(&mut dense.width, self.dense, ranks)?,
            FeedForwardSpec::Moe(moe) => divide_width(&mut moe.width, self.moe, ranks)?,
            FeedForwardSpec::Parallel(dense, moe, _) => {
                divide_width(&mut dense.width, self.dense, ranks)?;
                divide_width(&mut moe.width, self.moe, ranks)?;
            }
        }
        Ok(local)
    }

    /// Divides the heads. If there are more ranks than KV heads, several ranks have one KV head. With a cache that is
    /// divided by positions, each rank has all KV heads.
    fn divide_heads(
        &self,
        attention: &mut AttentionSpec,
        ranks: usize,
        by_position: bool,
    ) -> std::result::Result<(), Misfit> {
        let AttentionSpec { heads, kv_heads, .. } = *attention;
        if !heads.is_multiple_of(ranks) {
            return Err(Misfit { what: "heads", count: heads });
        }
        attention.heads = heads / ranks;
        if by_position {
            if !ranks.is_power_of_two() || ranks > MAX_PAGE_TOKENS / MIN_PAGE_SHARE {
                return Err(Misfit { what: "positions of a page", count: MAX_PAGE_TOKENS });
            }
            attention.position_ranks = ranks;
        } else {
            if !kv_heads.is_multiple_of(ranks) && !ranks.is_multiple_of(kv_heads) {
                return Err(Misfit { what: "KV heads", count: kv_heads });
            }
            attention.kv_heads = (kv_heads / ranks).max(1);
        }
        // A dense matrix may be cut anywhere.
        let is_cut = attention.q_width().is_multiple_of(self.mixer) || self.mixer == DENSE_STEP;
        if !is_cut {
            let count = heads * attention.head_dim / self.mixer;
            return Err(Misfit { what: "groups of inputs of the attention's output", count });
        }
        Ok(())
    }

    /// Divides the key heads of a delta net, each with its value heads.
    fn divide_delta_heads(&self, net: &mut DeltaNetSpec, ranks: usize) -> std::result::Result<(), Misfit> {
        let DeltaNetSpec { key_heads, value_heads, value_dim, tiled, .. } = *net;
        if !key_heads.is_multiple_of(ranks) {
            return Err(Misfit { what: "key heads of the delta net", count: key_heads });
        }
        (net.key_heads, net.value_heads) = (key_heads / ranks, value_heads / ranks);
        let adjacent = if tiled { net.key_heads } else { net.value_heads } * value_dim;
        if !adjacent.is_multiple_of(self.mixer) {
            let count = value_heads * value_dim / self.mixer;
            return Err(Misfit { what: "groups of inputs of the delta net's output", count });
        }
        Ok(())
    }

    /// Divides the channels of a short convolution.
    fn divide_channels(&self, conv: &mut ShortConvSpec, ranks: usize) -> std::result::Result<(), Misfit> {
        if !conv.channels.is_multiple_of(ranks * self.mixer) {
            let count = conv.channels / self.mixer;
            return Err(Misfit { what: "groups of inputs of the convolution's output", count });
        }
        conv.channels /= ranks;
        Ok(())
    }
}

/// Each rank gets a whole number of steps, the last one may get fewer. If the width allows, they are whole chunks.
fn divide_width(width: &mut usize, step: usize, ranks: usize) -> std::result::Result<(), Misfit> {
    let is_chunked = CHUNK.is_multiple_of(step) && *width / ranks >= MIN_CHUNKED_WIDTH;
    let step = if is_chunked { CHUNK } else { step };
    let steps = width.div_ceil(step);
    let of_rank = steps.div_ceil(ranks);
    if of_rank.saturating_mul(ranks - 1) >= steps {
        return Err(Misfit { what: "groups of inputs of an MLP's down projection", count: steps });
    }
    *width = of_rank * step;
    Ok(())
}

/// The inputs between which a matrix of this form may be cut.
fn step_of(form: Form) -> usize {
    match form {
        Form::Dense(_) => DENSE_STEP,
        Form::Affine { group, .. } => group,
        Form::Blocks(format) => format.block_inputs(),
        // A multiple of all groups, as kernels require.
        Form::Floats { .. } => 32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn width_of_rank(mut width: usize, step: usize, ranks: usize) -> Option<usize> {
        divide_width(&mut width, step, ranks).is_ok().then_some(width)
    }

    #[test]
    fn wide_mlps_are_cut_between_chunks() {
        // gpt-oss: 45 chunks of 64, the last rank has 22.
        assert_eq!(width_of_rank(2880, 32, 2), Some(1472));
        assert_eq!(width_of_rank(21_504, 64, 2), Some(10_752));
        assert_eq!(width_of_rank(4100, DENSE_STEP, 2), Some(2112));
        assert_eq!(width_of_rank(1408, 32, 2), Some(704));
        assert_eq!(width_of_rank(720, 32, 2), Some(384));
        assert_eq!(width_of_rank(4096, 256, 3), Some(1536));
        assert_eq!(width_of_rank(64, 32, 4), None);
    }
}
