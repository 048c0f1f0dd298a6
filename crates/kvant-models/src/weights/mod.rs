//! The tensors of a decoder.

use kvant::Tensor;

use crate::{
    source::{Matrix, Role, Source},
    spec::{DecoderSpec, OutputMatrix, ScoreBias},
};

mod load;

pub(crate) use load::{DELTA_PROJECTIONS, SharedMatrices, shifted, whole_matrix};

/// Matrices with common inputs.
#[derive(Debug)]
pub(crate) struct Stack {
    pub matrices: StackMatrices,
    pub biases: Option<StackBiases>,
}

#[derive(Debug)]
pub(crate) enum StackMatrices {
    /// The matrices of one format, one below the other, and the outputs of each.
    Joined(Box<Matrix>, Vec<usize>),
    Separate(Vec<Matrix>),
}

/// The biases of a [`Stack`], f32.
#[derive(Debug)]
pub(crate) struct StackBiases {
    pub whole: Tensor,
    /// Views of `whole`.
    pub parts: Vec<Tensor>,
}

/// A matrix with a bias, or the matrices `[E, outputs, inputs]` of all experts with biases `[E, outputs]`.
#[derive(Debug)]
pub(crate) struct Projection {
    pub matrix: Matrix,
    pub bias: Option<Tensor>,
}

/// All tensors of a decoder.
#[derive(Debug)]
pub(crate) struct Weights {
    pub embed: Matrix,
    pub norm: Tensor,
    /// Absent if the whole embedding is the output matrix. On a group of devices each rank may have some of its rows.
    pub output: Option<Matrix>,
    pub per_layer: Option<PerLayerWeights>,
    pub blocks: Vec<BlockWeights>,
    /// Bytes of the matrices on one rank.
    pub bytes: usize,
}

/// The weights that compute per-layer inputs.
#[derive(Debug)]
pub(crate) struct PerLayerWeights {
    pub embed: Matrix,
    pub projection: Matrix,
    pub norm: Tensor,
}

#[derive(Debug)]
pub(crate) struct BlockWeights {
    /// The norm of the first half's input.
    pub mixer_norm: Option<Tensor>,
    pub mixer: Mixer,
    /// The norm of the first half's output.
    pub mixer_post_norm: Option<Tensor>,
    pub feed_forward: FeedForwardWeights,
    pub per_layer: Option<LayerInputWeights>,
    /// Multiplies the block's output; 1 if absent.
    pub scalar: f32,
}

/// The weights of a block's first half.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // Each layer has one: a box would save little.
pub(crate) enum Mixer {
    Attention(AttentionWeights),
    DeltaNet(DeltaNetWeights),
    ShortConv(ShortConvWeights),
}

#[derive(Debug)]
pub(crate) struct DeltaNetWeights {
    /// Queries, keys and values in one matrix; z; b; a.
    pub projections: Stack,
    /// `[channels, taps]`.
    pub conv: Tensor,
    /// The negative rate of decay, f32 `[value_heads]`.
    pub rate: Tensor,
    /// The bias of a, f32 `[value_heads]`.
    pub a_bias: Tensor,
    /// `[Dv]`.
    pub norm: Tensor,
    pub output: Projection,
}

#[derive(Debug)]
pub(crate) struct ShortConvWeights {
    pub input: Projection,
    /// `[channels, taps]`.
    pub conv: Tensor,
    pub conv_bias: Option<Tensor>,
    pub output: Projection,
}

#[derive(Debug)]
pub(crate) struct AttentionWeights {
    /// Queries, keys and values. No keys and values if the block uses another block's; no values if they are the raw
    /// keys.
    pub qkv: Stack,
    pub q_norm: Option<Tensor>,
    pub k_norm: Option<Tensor>,
    /// f32 `[heads]`.
    pub sinks: Option<Tensor>,
    pub output_gate: Option<Matrix>,
    pub output: Projection,
}

#[derive(Debug)]
pub(crate) struct FeedForwardWeights {
    pub norm: Option<Tensor>,
    pub dense: Option<DenseWeights>,
    pub moe: Option<MoeWeights>,
    pub parallel: Option<ParallelWeights>,
    pub post_norm: Option<Tensor>,
}

#[derive(Debug)]
pub(crate) struct DenseWeights {
    /// The gate and up projections.
    pub gate_up: Stack,
    pub down: Projection,
}

#[derive(Debug)]
pub(crate) struct MoeWeights {
    pub router: Projection,
    /// The router's own norm, and the factors of the experts' weights, f32 `[E]`.
    pub router_scales: Option<(Tensor, Tensor)>,
    /// f32 `[E]`: added to the scores for the selection.
    pub router_bias: Option<Tensor>,
    pub gate_up: GateUp,
    pub down: Projection,
}

/// The weights that combine a dense feed-forward with experts.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // Each layer has one: a box would save little.
pub(crate) enum ParallelWeights {
    Plain,
    /// `[1, H]`.
    Gated(Matrix),
    Normed(ParallelNorms),
}

/// The norms of a dense feed-forward and experts that run in parallel.
#[derive(Debug)]
pub(crate) struct ParallelNorms {
    pub after_dense: Tensor,
    pub before_experts: Tensor,
    pub after_experts: Tensor,
}

/// The gate and up matrices of every expert.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // Each layer has one: a box would save little.
pub(crate) enum GateUp {
    /// `[E, 2I, H]`, with the gate's rows first.
    Fused(Projection),
    /// `[E, I, H]` each, because their formats differ.
    Split { gate: Projection, up: Projection },
}

/// The weights that add a block's per-layer input.
#[derive(Debug)]
pub(crate) struct LayerInputWeights {
    pub gate: Matrix,
    pub output: Matrix,
    pub norm: Tensor,
}

impl Weights {
    /// Bytes of the matrices that a pass of one token reads.
    pub(crate) fn bytes_per_token(&self, spec: &DecoderSpec) -> usize {
        // Bytes that are not read if only `read` of `count` equal parts of a matrix are.
        let skipped = |matrix: &Matrix, read: usize, count: usize| matrix.bytes() / count * (count - read);
        let mut bytes = self.bytes;
        if self.output.is_some() {
            bytes -= skipped(&self.embed, 1, spec.vocab_size);
        }
        if let (Some(weights), Some(inputs)) = (&self.per_layer, spec.per_layer_input) {
            bytes -= skipped(&weights.embed, 1, inputs.vocab_size);
        }
        for (weights, block) in self.blocks.iter().zip(&spec.blocks) {
            let (Some(weights), Some(moe)) = (&weights.feed_forward.moe, block.feed_forward.moe()) else { continue };
            let skipped = |of: &Projection| skipped(&of.matrix, moe.top_k, moe.experts);
            bytes -= skipped(&weights.down);
            bytes -= match &weights.gate_up {
                GateUp::Fused(both) => skipped(both),
                GateUp::Split { gate, up } => skipped(gate) + skipped(up),
            };
        }
        bytes
    }
}

/// Whether a model of this checkpoint has a separate output matrix.
pub(crate) fn has_output(output: OutputMatrix, source: &dyn Source) -> bool {
    match output {
        OutputMatrix::Own => true,
        OutputMatrix::Embedding => false,
        OutputMatrix::OwnIfStored => source.has(Role::Output),
    }
}

/// Whether the scores have a bias in this checkpoint.
pub(crate) fn has_router_bias(bias: ScoreBias, role: Role, source: &dyn Source) -> bool {
    match bias {
        ScoreBias::None => false,
        ScoreBias::Stored => true,
        ScoreBias::IfStored => source.has(role),
    }
}
