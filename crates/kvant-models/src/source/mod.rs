//! Sources of weights.
//!
//! A [`Source`] provides tensors by their [`Role`] in a decoder: matrices in the file's quantisation, and vectors. The
//! loader ([`Weights::load`](crate::weights::Weights::load)) requests the tensors that the description requires,
//! independent of names and formats.
//!
//! # Add a source
//!
//! 1. Convert the file's metadata to a [`Config`](crate::Config): a [`DecoderSpec`](crate::DecoderSpec) and facts about
//!    tokens. Conventions that differ between formats are values of the description:
//!
//!    | difference | value |
//!    |---|---|
//!    | the 1 of 1 + w is already part of the norms | `DecoderSpec::norm_offset` and `final_norm_offset` are 0 |
//!    | rows of Q and K are permuted for adjacent pairs | `RopeSpec::layout` is `Interleaved` |
//!    | the file has factors of frequencies as a tensor | `RopeSpec::factors` |
//!    | the output matrix is absent | `DecoderSpec::output` is `Embedding` |
//! 2. Implement [`Source`]: map every [`Role`] to a name, and every stored type to a [`Form`]. A type that no kernel
//!    supports is an error that names the tensor.
//! 3. Pass both to [`Model`](crate::Model)'s `assemble`.

pub(crate) mod converted;
mod destination;
mod experts;
mod fp8;
pub(crate) mod hf;
pub(crate) mod matrix;
mod packed;
pub(crate) mod quantization;

use kvant::{Device, Tensor};

use crate::{
    Result,
    families::Names,
    spec::{FeedForwardSpec, ParallelSum},
};
pub(crate) use destination::Destination;
pub(crate) use matrix::{Form, Matrix};

/// The tensors of a checkpoint.
///
/// Shapes follow the description, outermost dimension first: `[outputs, inputs]` for a matrix, `[E, outputs, inputs]`
/// for the matrices of all experts. If a format stores experts separately, the source joins them.
pub(crate) trait Source {
    /// The name of a tensor in this checkpoint, even if it is missing; `None` if the layout never has it.
    fn name(&self, role: Role) -> Option<String>;

    /// Whether the checkpoint has the tensor.
    fn has(&self, role: Role) -> bool;

    /// The storage format of a matrix. Checks existence, shape and dtypes of all its parts before any allocation.
    ///
    /// # Errors
    /// `MissingTensor`, `TensorShape`, `TensorDType` with the tensor's name.
    fn form(&self, role: Role, shape: &[usize]) -> Result<Form>;

    /// Reads a matrix into `to`, which has the form returned by [`Source::form`]. `to` may be part of a larger matrix.
    fn read(&self, role: Role, to: &Matrix<Destination>) -> Result<()>;

    /// A vector of `len` floats, in the file's dtype.
    ///
    /// # Errors
    /// As [`Source::form`].
    fn vector(&self, role: Role, len: usize, device: &Device) -> Result<Tensor>;

    /// The bias of a matrix in the file's dtype, with the shape of its outputs: `[outputs]` or `[E, outputs]`.
    ///
    /// # Errors
    /// As [`Source::form`].
    fn bias(&self, role: Role, shape: &[usize], device: &Device) -> Result<Tensor>;

    /// The taps of a convolution, `[channels, taps]`, in the file's dtype.
    ///
    /// # Errors
    /// As [`Source::form`].
    fn taps(&self, role: Role, shape: [usize; 2], device: &Device) -> Result<Tensor>;

    /// Whether rates of decay are stored as logarithms (A_log), instead of −exp(A_log).
    fn has_log_rates(&self) -> bool;

    /// Whether two matrices have equal bytes.
    fn same(&self, a: Role, b: Role) -> Result<bool>;
}

/// The role of a tensor in a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// `[V, H]`.
    Embedding,
    /// `[H]`.
    FinalNorm,
    /// `[V, H]`.
    Output,
    /// The table of per-layer inputs, `[Vp, L·P]`.
    PerLayerTable,
    /// The projection of the embedding to per-layer inputs, `[L·P, H]`.
    PerLayerProjection,
    /// The norm of that projection, `[P]`.
    PerLayerProjectionNorm,
    /// A tensor of a block.
    Block(usize, Part),
    /// A tensor of a drafter, outside of its blocks.
    Draft(DraftPart),
}

/// The role of a tensor in a drafter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DraftPart {
    /// From the embedding and the target's hidden states, or from these alone, to the residual stream.
    Input,
    /// The norm of the embedding, `[H]`.
    EmbeddingNorm,
    /// The norm of the target's hidden state, `[H]`.
    HiddenNorm,
    /// The norm of all of the target's hidden states together, `[3·H]`.
    FeaturesNorm,
    /// From the last norm to the target's hidden state.
    Output,
    /// The matrix that selects groups of tokens, `[C, H]`.
    Centroids,
}

/// The names of a drafter's tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftNames {
    /// Precedes the names of a block's tensors; `{l}` is replaced by the block's number.
    pub block: &'static str,
    /// The first block's number.
    pub first_block: usize,
    /// Names of a block's tensors that differ from its family's.
    pub parts: Names,
    /// The names of other tensors. `{l}` is replaced by the first block's number, `{block}` by the start of its names.
    pub others: &'static [(Role, &'static str)],
}

impl DraftNames {
    /// The name of a tensor outside of the blocks.
    pub(crate) fn other(&self, role: Role) -> Option<String> {
        let (_, name) = self.others.iter().find(|(of, _)| *of == role)?;
        Some(name.replace("{block}", self.block).replace("{l}", &self.first_block.to_string()))
    }

    /// The start of the names of a block's tensors.
    pub(crate) fn of_block(&self, l: usize) -> String {
        self.block.replace("{l}", &(self.first_block + l).to_string())
    }
}

/// The role of a tensor in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The norm of the attention's input, `[H]`.
    AttentionNorm,
    /// `[heads·D, H]`.
    Query,
    /// `[kv_heads·D, H]`.
    Key,
    /// `[kv_heads·D, H]`.
    Value,
    /// Queries, keys and values in one matrix, in this order: `[(heads + 2·kv_heads)·D, H]`. A layout has either this
    /// or three matrices.
    QueryKeyValue,
    /// `[D]`, or `[heads·D]` if it covers all heads.
    QueryNorm,
    /// `[D]`, or `[kv_heads·D]` if it covers all heads.
    KeyNorm,
    /// For each head the rows of its query, then the rows of its gate: `[2·heads·D, H]`. A layout has either this
    /// matrix or separate queries and gate.
    QueryGateJoint,
    /// Queries, keys and values of a delta net, `[channels, H]`.
    DeltaQkv,
    /// The gate of a delta net's output, `[value_heads·Dv, H]`.
    DeltaZ,
    /// The logits of beta, `[value_heads, H]`.
    DeltaB,
    /// The decay before its bias, `[value_heads, H]`.
    DeltaA,
    /// For each key head its query, its key, its values and its z: `[channels + value_heads·Dv, H]`. A layout has
    /// either this or two matrices.
    DeltaJoint,
    /// For each key head its b and its a: `[2·value_heads, H]`.
    DeltaGatesJoint,
    /// `[channels, taps]`; the last tap multiplies the token itself.
    ConvTaps,
    /// The negative rate of decay, or its logarithm, `[value_heads]`.
    DeltaRate,
    /// The bias of a, `[value_heads]`.
    DeltaABias,
    /// The norm of a delta net's output, `[Dv]`.
    DeltaNorm,
    /// `[H, value_heads·Dv]`.
    DeltaOutput,
    /// The projection before a short convolution, `[3·H, H]`.
    ConvInput,
    /// The projection after a short convolution, `[H, H]`.
    ConvOutput,
    /// A score of each query head, `[heads]`.
    Sinks,
    /// The gate of the attention's output, `[heads·D, H]`.
    AttentionGate,
    /// `[H, heads·D]`.
    AttentionOutput,
    /// The norm of the attention's output, `[H]`.
    AttentionPostNorm,
    /// The norm of the feed-forward's input, `[H]`.
    FeedForwardNorm,
    /// Gate and up in one matrix, the gate's rows first: `[2I, H]`. A layout has either this or the next two.
    GateUp,
    /// `[I, H]`.
    Gate,
    /// `[I, H]`.
    Up,
    /// `[H, I]`.
    Down,
    /// The norm of the feed-forward's output, `[H]`.
    FeedForwardPostNorm,
    /// `[E, H]`.
    Router,
    /// The weights of the router's own norm, `[H]`.
    RouterNorm,
    /// Factors of the experts' weights, `[E]`.
    ExpertScale,
    /// Gate and up of every expert in one matrix, the gate's rows first: `[E, 2I, H]`. A layout has either this or the
    /// next two.
    ExpertGateUp,
    /// `[E, I, H]`.
    ExpertGate,
    /// `[E, I, H]`.
    ExpertUp,
    /// `[E, H, I]`.
    ExpertDown,
    /// Added to the scores for the selection of experts, `[E]`.
    RouterBias,
    /// The shared experts as one MLP, gate and up in one matrix: `[2I, H]`.
    SharedGateUp,
    /// `[I, H]`.
    SharedGate,
    /// `[I, H]`.
    SharedUp,
    /// `[H, I]`.
    SharedDown,
    /// The logit of the shared experts' weight, `[1, H]`.
    SharedRouter,
    /// In a parallel feed-forward: the norm of the dense output, `[H]`.
    DensePostNorm,
    /// In a parallel feed-forward: the norm of the experts' input, `[H]`.
    ExpertsNorm,
    /// In a parallel feed-forward: the norm of the experts' output, `[H]`.
    ExpertsPostNorm,
    /// `[P, H]`.
    PerLayerGate,
    /// `[H, P]`.
    PerLayerOutput,
    /// `[H]`.
    PerLayerPostNorm,
    /// Multiplies the block's output, `[1]`.
    Scalar,
}

impl Part {
    /// Gate and up in one matrix or two, and down of a dense feed-forward.
    pub(crate) fn of_dense(spec: &FeedForwardSpec) -> [Part; 4] {
        match spec.parallel_sum() {
            Some(ParallelSum::Plain | ParallelSum::Gated) => {
                [Part::SharedGateUp, Part::SharedGate, Part::SharedUp, Part::SharedDown]
            }
            None | Some(ParallelSum::Normed) => [Part::GateUp, Part::Gate, Part::Up, Part::Down],
        }
    }
}
