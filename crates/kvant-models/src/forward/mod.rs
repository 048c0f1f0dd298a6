//! The forward pass of a decoder: interprets its description.
//!
//! Every line of a block ([`spec`](crate::spec)) is one or a few operations. One encoder records the whole pass.
//!
//! Without post norms, an output y stays in its buffer: the next norm adds it to the residual stream h. With post
//! norms, the norm of y adds it, and the same operation writes the next norms of h.

mod attention;
mod by_position;
mod delta_net;
mod entered;
mod feed_forward;
mod per_layer;
mod rope;
mod short_conv;
mod taps;
mod workspace;

use half::{bf16, f16};
use kvant::{
    DType, Encoder, KvPool, Step, Tensor,
    ops::{self, AllGather, NextNorm, Residual, RmsNorm, Rope, StateRuns},
};

use crate::{
    Config, Error, Result,
    source::Matrix,
    spec::{DecoderSpec, MixerSpec},
    weights::{Mixer, Projection, Stack, StackMatrices, Weights},
};
pub(crate) use entered::Entered;
use rope::BlockRope;
pub(crate) use taps::Features;
pub use taps::Taps;
use workspace::MixerViews;
pub(crate) use workspace::{Views, Workspace, workspace_bytes};

/// A description with its tensors.
pub(crate) struct Network {
    pub config: Config,
    /// The decoder that each rank of the device runs.
    local: DecoderSpec,
    /// Devices that share the work.
    ranks: usize,
    pub weights: Weights,
    /// The rotary embedding of each block.
    ropes: Vec<Option<BlockRope>>,
    /// The cache layer of each block, or the first of its states.
    stored: Vec<usize>,
    /// The factor of the queries at each position, f32 `[P, 1]`.
    query_factors: Option<Tensor>,
    /// Maximum tokens of a text.
    max_length: Option<usize>,
    /// The factor of the embedding, rounded to the dtype of activations.
    embedding_scale: f32,
    activations: DType,
}

impl Network {
    /// `context` is the maximum length of a text. Without it, LongRoPE is configured for its original context.
    /// `local` is the part of the decoder that each rank of the device has.
    pub(crate) fn new(
        config: Config,
        local: DecoderSpec,
        weights: Weights,
        activations: DType,
        context: Option<usize>,
    ) -> Result<Network> {
        let spec = &config.decoder;
        let device = weights.norm.device();
        let original = spec.original_context();
        let context = original.map(|original| original.max(context.unwrap_or(0)));
        let ropes = rope::of_blocks(spec, device, context)?;
        let max_length = context.into_iter().chain(spec.query_scaling.map(|scaling| scaling.positions)).min();
        let embedding_scale = rounded(spec.embedding_scale, activations);
        let query_factors = match spec.query_scaling {
            Some(scaling) => {
                let factors: Vec<f32> = (0..scaling.positions).map(|position| scaling.factor(position)).collect();
                Some(Tensor::from_slice(device, &factors, &[scaling.positions, 1])?)
            }
            None => None,
        };
        let (ranks, stored) = (device.ranks(), stored_indices(spec));
        Ok(Network {
            config,
            local,
            ranks,
            weights,
            ropes,
            stored,
            query_factors,
            max_length,
            embedding_scale,
            activations,
        })
    }

    /// The network with other layers of the pool for its blocks.
    pub(crate) fn with_layers(self, stored: Vec<usize>) -> Network {
        Network { stored, ..self }
    }

    /// The factor of the embedding, rounded to the dtype of activations.
    pub(crate) fn embedding_scale(&self) -> f32 {
        self.embedding_scale
    }

    /// The rotary embedding of a block; `None` if nothing rotates.
    pub(crate) fn rope(&self, l: usize) -> Option<Rope<'_>> {
        Some(self.ropes[l].as_ref()?.operand(&self.spec().blocks[l].attention()?.rope))
    }

    /// The decoder that each rank runs.
    pub(crate) fn spec(&self) -> &DecoderSpec {
        &self.local
    }

    pub(crate) fn activations(&self) -> DType {
        self.activations
    }

    /// Maximum tokens of a text, if limited by more than memory.
    pub(crate) fn max_length(&self) -> Option<usize> {
        self.max_length
    }

    /// Encodes the pass over the tokens of a step, whose ids are in `views`. `wanted` selects the rows that get logits,
    /// and where these are written. `features` receives hidden states for a drafter.
    pub(crate) fn encode(
        &self,
        enc: &mut Encoder,
        views: &Views,
        pool: &KvPool,
        step: &Step,
        wanted: &Wanted,
        features: Option<&Features>,
    ) -> Result<()> {
        self.encode_with(enc, views, pool, step, wanted, features, None)
    }

    /// Like [`Network::encode`]. With `stored`, the encoder is committed and replaced in each layer.
    #[allow(clippy::too_many_arguments, reason = "as `encode`")]
    pub(crate) fn encode_with(
        &self,
        enc: &mut Encoder,
        views: &Views,
        pool: &KvPool,
        step: &Step,
        wanted: &Wanted,
        features: Option<&Features>,
        stored: Option<&mut OnStored>,
    ) -> Result<()> {
        let stored = stored.map(|stored| stored as &mut OnStored);
        let mut pass = Pass { features, stored, ..Pass::new(self, enc, views, step) };
        pass.embed()?;
        // The remaining blocks store nothing, so they run only for the wanted rows.
        let blocks = self.spec().blocks.len();
        let of_every_row = features.map_or(0, |features| features.blocks_of_every_row(blocks));
        let own = self.spec().storing_blocks().max(of_every_row);
        for l in 0..own {
            pass.block(l, pool)?;
        }
        pass.tap_end()?;
        let (Wanted::Every { logits } | Wanted::Some { logits, .. }) = *wanted else { return Ok(()) };
        pass.keep(wanted)?;
        for l in own..blocks {
            pass.block(l, pool)?;
        }
        pass.finish(logits)
    }
}

impl Network {
    /// The logits of rows after the last norm. A rank of a group may compute some of them, and gets the others.
    pub(crate) fn logits(&self, enc: &mut Encoder, views: &Views, x: &Tensor, out: &Tensor) -> Result<()> {
        let Some(local) = &views.local_logits else { return self.local_logits(enc, x, out) };
        let local = if local.dtype() == out.dtype() {
            local.clone()
        } else {
            Tensor::zeros(out.device(), out.dtype(), local.shape())?
        };
        let rows = x.shape()[0];
        for first in (0..rows).step_by(local.shape()[0].max(1)) {
            let piece = first..rows.min(first + local.shape()[0]);
            let local = local.rows(0..piece.len())?;
            self.local_logits(enc, &x.rows(piece.clone())?, &local)?;
            ops::all_gather(enc, &AllGather::new(&local, &out.rows(piece)?))?;
        }
        Ok(())
    }

    /// The logits that a rank computes.
    fn local_logits(&self, enc: &mut Encoder, x: &Tensor, out: &Tensor) -> Result<()> {
        let matrix = self.weights.output.as_ref().unwrap_or(&self.weights.embed);
        let spec = self.spec();
        ops::linear(enc, &ops::Linear::new(x, matrix.weight(), out).alpha(spec.logit_scale))?;
        if let Some(cap) = spec.final_softcap {
            ops::softcap(enc, &ops::Softcap::new(out, cap, out))?;
        }
        Ok(())
    }
}

/// The runs of a step, for blocks with states.
fn runs(step: &Step) -> Result<&StateRuns> {
    step.runs()?.ok_or_else(|| Error::argument("step", "one of all tokens, from a pool with states", "another"))
}

/// The cache layer that each block writes or reads, or the first of its states.
fn stored_indices(spec: &DecoderSpec) -> Vec<usize> {
    let (mut layers, mut states) = (0, 0);
    let mut indices: Vec<usize> = Vec::with_capacity(spec.blocks.len());
    for block in &spec.blocks {
        indices.push(match (block.attention(), block.source()) {
            (_, Some(source)) => indices[source],
            (Some(_), None) => {
                layers += 1;
                layers - 1
            }
            (None, _) => {
                states += block.mixer.states(DType::F32).len();
                states - block.mixer.states(DType::F32).len()
            }
        });
    }
    indices
}

/// Rounds a factor to the dtype of activations.
fn rounded(factor: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(factor).to_f32(),
        DType::F16 => f16::from_f32(factor).to_f32(),
        _ => factor,
    }
}

/// Called in each layer that stores keys and values, before its tokens attend to them.
pub(crate) type OnStored<'a> = dyn FnMut(usize, &Step) -> Result<()> + 'a;

/// The rows of a pass whose logits are wanted. Without a tensor for logits, the pass ends with the final norm, whose
/// result is in x.
pub(crate) enum Wanted<'a> {
    Nothing,
    Every {
        logits: Option<&'a Tensor>,
    },
    /// Some rows, given by their indices (u32 `[n]`), with tensors and a step for only these.
    Some {
        rows: &'a Tensor,
        views: &'a Views,
        step: &'a Step,
        logits: Option<&'a Tensor>,
    },
}

/// The state of the residual stream between two halves of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    /// h is complete.
    Complete,
    /// y is not yet added to h.
    Pending,
    /// h is complete, and the norms for the next half are written.
    Normed,
}

/// The norms of h that half a block reads, stored inline because a decode step must not allocate. A half without norms
/// reads h.
struct HalfNorms<'a> {
    norms: [NextNorm<'a>; 3],
    count: usize,
}

impl<'a> HalfNorms<'a> {
    /// The norm with this weight, if any, into x.
    fn new(x: &'a Tensor, weight: Option<&'a Tensor>) -> Self {
        HalfNorms { norms: [NextNorm::new(x).weight(weight); 3], count: usize::from(weight.is_some()) }
    }

    fn push(&mut self, next: NextNorm<'a>) {
        self.norms[self.count] = next;
        self.count += 1;
    }
}

impl<'a> std::ops::Deref for HalfNorms<'a> {
    type Target = [NextNorm<'a>];
    fn deref(&self) -> &[NextNorm<'a>] {
        &self.norms[..self.count]
    }
}

/// One forward pass during encoding.
struct Pass<'a> {
    network: &'a Network,
    enc: &'a mut Encoder,
    views: &'a Views,
    step: &'a Step,
    stream: Stream,
    /// Whether y has the result of one rank: the next norm sums it over the ranks first.
    is_partial: bool,
    features: Option<&'a Features<'a>>,
    stored: Option<&'a mut OnStored<'a>>,
    /// The input of the first block's mixer, if it is not a norm of the residual stream.
    first_input: Option<&'a Tensor>,
    /// The positions by which queries rotate, if they are not the step's.
    query_positions: Option<&'a Tensor>,
}

impl<'a> Pass<'a> {
    fn new(network: &'a Network, enc: &'a mut Encoder, views: &'a Views, step: &'a Step) -> Pass<'a> {
        let (stream, is_partial) = (Stream::Complete, false);
        let (features, stored, first_input, query_positions) = (None, None, None, None);
        Pass { network, enc, views, step, stream, is_partial, features, stored, first_input, query_positions }
    }

    fn embed(&mut self) -> Result<()> {
        let table = self.network.weights.embed.weight();
        let scale = self.network.embedding_scale;
        let h = &self.views.h;
        ops::embed(self.enc, &ops::Embed::new(table, &self.views.ids, h).scale(scale))?;
        if self.spec().embedding_norm {
            ops::rms_norm(self.enc, &RmsNorm::new(h, self.spec().norm_eps, h))?;
        }
        self.query_factors()?;
        self.per_layer_inputs()
    }

    /// Looks up the factors of this step's queries.
    fn query_factors(&mut self) -> Result<()> {
        if let Some(table) = &self.network.query_factors {
            ops::embed(self.enc, &ops::Embed::new(table, self.step.positions(), &self.views.query_factors))?;
        }
        Ok(())
    }

    /// Goes on with the wanted rows alone.
    fn keep(&mut self, wanted: &Wanted<'a>) -> Result<()> {
        if let Wanted::Some { rows, views, step, .. } = *wanted {
            self.gather(rows, views)?;
            (self.views, self.step) = (views, step);
            self.query_factors()?;
        }
        Ok(())
    }

    /// Gathers `rows` of the residual stream and of the per-layer inputs. The next half is attention.
    fn gather(&mut self, rows: &Tensor, to: &Views) -> Result<()> {
        let mut copy = |from: &Tensor, out: &Tensor| ops::embed(self.enc, &ops::Embed::new(from, rows, out));
        copy(&self.views.h, &to.h)?;
        match self.stream {
            Stream::Complete => {}
            Stream::Pending => copy(&self.views.y, &to.y)?,
            Stream::Normed => copy(&self.views.x, &to.x)?,
        }
        if let (Some(from), Some(to)) = (&self.views.per_layer, &to.per_layer) {
            copy(&from.input[0], &to.input[0])?;
        }
        Ok(())
    }

    fn block(&mut self, l: usize, pool: &KvPool) -> Result<()> {
        self.first_half(l, pool)?;
        self.second_half(l)
    }

    fn first_half(&mut self, l: usize, pool: &KvPool) -> Result<()> {
        let weights = &self.network.weights.blocks[l];
        self.enter(&self.mixer_norms(l))?;
        self.tap_residual(l)?;
        self.mixer(l, pool)?;
        let at_feed_forward = self.feed_forward_norms(l);
        self.leave(weights.mixer_post_norm.as_ref(), 1.0, &at_feed_forward)
    }

    fn second_half(&mut self, l: usize) -> Result<()> {
        let weights = &self.network.weights.blocks[l];
        // The last addition to the residual stream applies the scalar.
        let at_next = if l + 1 < self.spec().blocks.len() { self.mixer_norms(l + 1) } else { self.final_norm() };
        self.enter(&self.feed_forward_norms(l))?;
        self.feed_forward(l)?;
        match &weights.per_layer {
            None => self.leave(weights.feed_forward.post_norm.as_ref(), weights.scalar, &at_next),
            Some(input) => {
                self.leave(weights.feed_forward.post_norm.as_ref(), 1.0, &[])?;
                self.add_layer_input(l, input, weights.scalar, &at_next)
            }
        }
    }

    fn spec(&self) -> &'a DecoderSpec {
        self.network.spec()
    }

    /// y = mixer(x).
    fn mixer(&mut self, l: usize, pool: &KvPool) -> Result<()> {
        let network = self.network;
        let (block, views) = (&network.spec().blocks[l], &self.views.blocks[l].mixer);
        match (&block.mixer, &network.weights.blocks[l].mixer, views) {
            (MixerSpec::Attention(spec), Mixer::Attention(weights), MixerViews::Attention(own)) => {
                self.attention(l, pool, (spec, weights, own))
            }
            (MixerSpec::DeltaNet(spec), Mixer::DeltaNet(weights), MixerViews::DeltaNet(own)) => {
                self.delta_net(l, pool, (spec, weights, own))
            }
            (MixerSpec::ShortConv(spec), Mixer::ShortConv(weights), MixerViews::ShortConv(own)) => {
                self.short_conv(l, pool, (spec, weights, own))
            }
            _ => unreachable!("weights and views are made for the block's description"),
        }
    }

    /// The norms of h that the mixer reads.
    fn mixer_norms(&self, l: usize) -> HalfNorms<'a> {
        HalfNorms::new(&self.views.x, self.network.weights.blocks[l].mixer_norm.as_ref())
    }

    /// The norm of h that the output matrix reads.
    fn final_norm(&self) -> HalfNorms<'a> {
        HalfNorms::new(&self.views.x, Some(&self.network.weights.norm))
    }

    /// The input of a block's first half.
    fn mixer_input(&self, l: usize) -> &'a Tensor {
        self.first_input.filter(|_| l == 0).unwrap_or_else(|| self.input(l))
    }

    /// The norm of the residual stream, or the stream itself: the input of both halves of most blocks.
    fn input(&self, l: usize) -> &'a Tensor {
        if self.spec().blocks[l].pre_norms { &self.views.x } else { &self.views.h }
    }

    /// Writes the norms of h that a half reads, after a pending addition.
    fn enter(&mut self, norms: &[NextNorm<'a>]) -> Result<()> {
        let Views { h, y, .. } = self.views;
        let residual = match std::mem::replace(&mut self.stream, Stream::Complete) {
            Stream::Normed => return Ok(()),
            Stream::Complete => None,
            Stream::Pending => Some(Residual::Before { residual: h, sum: h }),
        };
        for (i, norm) in norms.iter().enumerate() {
            let (x, residual) = match residual {
                Some(residual) if i == 0 => (y, residual),
                _ => (h, Residual::None),
            };
            let args = RmsNorm::new(x, self.spec().norm_eps, norm.out).weight(norm.weight);
            // Only y can be partial, and it is the first.
            let args = args.sum_ranks(std::mem::take(&mut self.is_partial));
            ops::rms_norm(self.enc, &args.scale(norm.scale).residual(residual))?;
        }
        Ok(())
    }

    /// h = scale · (h + norm(y)) and the next norms of h. Without a post norm, the next norm computes h + y.
    fn leave(&mut self, post_norm: Option<&Tensor>, scale: f32, next: &[NextNorm]) -> Result<()> {
        match post_norm {
            Some(weight) => self.add_normed(&self.views.y, weight, scale, next),
            None => {
                self.stream = Stream::Pending;
                Ok(())
            }
        }
    }

    /// The final norm of all rows, and their logits if wanted.
    fn finish(&mut self, logits: Option<&Tensor>) -> Result<()> {
        self.enter(&self.final_norm())?;
        self.tap_wanted()?;
        logits.map_or(Ok(()), |out| self.network.logits(self.enc, self.views, &self.views.x, out))
    }

    /// Marks y as the result of one rank, whose matrices have some of the inputs.
    fn leave_partial(&mut self) {
        self.is_partial = self.network.ranks > 1;
    }

    fn linear(&mut self, x: &Tensor, weight: &Matrix, out: &Tensor) -> Result<()> {
        let args = ops::Linear::new(x, weight.weight(), out);
        Ok(ops::linear(self.enc, &args)?)
    }

    fn biased_linear(&mut self, x: &Tensor, weights: &Projection, out: &Tensor) -> Result<()> {
        self.linear(x, &weights.matrix, out)?;
        self.add_bias(weights.bias.as_ref(), out)
    }

    /// The output projection of half a block.
    fn output_linear(&mut self, x: &Tensor, weights: &Projection, out: &Tensor) -> Result<()> {
        let args = ops::Linear::new(x, weights.matrix.weight(), out).alpha(self.spec().residual_scale);
        ops::linear(self.enc, &args)?;
        self.add_bias(weights.bias.as_ref(), out)
    }

    fn add_bias(&mut self, bias: Option<&Tensor>, out: &Tensor) -> Result<()> {
        match bias {
            Some(bias) => Ok(ops::add_bias(self.enc, &ops::AddBias::new(out, bias, out))?),
            None => Ok(()),
        }
    }

    /// Multiplies x by a stack of matrices, into `outs`, which are adjacent in the memory of `all`.
    fn project(&mut self, x: &Tensor, stack: &Stack, all: &Tensor, outs: &[&Tensor]) -> Result<()> {
        match &stack.matrices {
            StackMatrices::Joined(matrix, parts) => {
                ops::linear(self.enc, &ops::Linear::new(x, matrix.weight(), all).parts(parts))?;
            }
            StackMatrices::Separate(matrices) => {
                for (matrix, out) in matrices.iter().zip(outs) {
                    self.linear(x, matrix, out)?;
                }
            }
        }
        match &stack.biases {
            // For a single row, the parts are contiguous.
            Some(biases) if self.views.tokens == 1 => self.add_bias(Some(&biases.whole), all),
            Some(biases) => biases.parts.iter().zip(outs).try_for_each(|(bias, out)| self.add_bias(Some(bias), out)),
            None => Ok(()),
        }
    }

    /// h = scale · (h + norm(x)), and norms of h.
    fn add_normed(&mut self, x: &Tensor, weight: &Tensor, scale: f32, next: &[NextNorm]) -> Result<()> {
        let h = &self.views.h;
        let args = RmsNorm::new(x, self.spec().post_norm_eps, h).weight(Some(weight)).residual(Residual::After(h));
        let args = args.sum_ranks(std::mem::take(&mut self.is_partial));
        ops::rms_norm(self.enc, &args.scale(scale).next(next).next_eps(self.spec().norm_eps))?;
        self.stream = if next.is_empty() { Stream::Complete } else { Stream::Normed };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedding_scales_round_as_activations_do() {
        let scale = 2560f32.sqrt();
        assert_eq!(rounded(scale, DType::F32), scale);
        assert_eq!(rounded(scale, DType::BF16), 50.5);
        assert_eq!(rounded(scale, DType::F16), 50.59375);
    }
}
