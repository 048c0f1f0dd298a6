//! Decoders described as data. One interpreter runs all descriptions; a family only creates one from a file's metadata.
//!
//! A block computes
//!
//! ```text
//! h += post_norm(mixer(norm(h)))
//! h += post_norm(feed_forward(norm(h)))
//! h += norm(projection(gelu(gate(h)) · input of this block))     with per-layer inputs
//! h *= scalar
//! ```
//!
//! where the norms before or after both halves, per-layer inputs and the scalar are optional. The mixer is attention,
//! or has a recurrent state: a gated delta net or a short convolution.

use kvant::{
    DType, StateLayer,
    ops::{Activation, DeltaRuleShape, ExpertGroups, ExpertScores, PairLayout, attend::HEAD_DIMS},
};

use crate::{Error, Result};

/// A decoder: embedding, blocks, norm, output matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Multiplies the embedding, after rounding to the dtype of activations. Transformers also rounds Gemma's √H this
    /// way.
    pub embedding_scale: f32,
    /// Whether the embedding is normed, without weights.
    pub embedding_norm: bool,
    /// Per-layer input embeddings.
    pub per_layer_input: Option<PerLayerInputSpec>,
    /// The blocks, first to last.
    pub blocks: Vec<BlockSpec>,
    /// The epsilon of every norm, except those of the halves' outputs.
    pub norm_eps: f32,
    /// The epsilon of the norms of the halves' outputs.
    pub post_norm_eps: f32,
    /// Added to the weights of the norms of blocks when they are loaded: 1 for families that multiply by 1 + w.
    pub norm_offset: f32,
    /// Added to the weights of the final norm.
    pub final_norm_offset: f32,
    /// Multiplies the outputs of both halves of a block without post norms.
    pub residual_scale: f32,
    /// Multiplies the logits, before the cap.
    pub logit_scale: f32,
    /// The cap c of the final c·tanh(logit/c).
    pub final_softcap: Option<f32>,
    /// The matrix from the residual stream to logits.
    pub output: OutputMatrix,
    /// Scales the queries by position.
    pub query_scaling: Option<QueryScaling>,
}

/// The matrix from the residual stream to logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputMatrix {
    /// A separate matrix.
    Own,
    /// The embedding.
    Embedding,
    /// A separate matrix if the checkpoint has one, otherwise the embedding.
    OwnIfStored,
}

/// Queries at position p are multiplied by 1 + beta · ln(1 + ⌊p / period⌋).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScaling {
    /// The weight of the logarithm.
    pub beta: f64,
    /// Number of consecutive positions with an equal factor.
    pub period: usize,
    /// Number of positions with a stored factor; later positions cannot be fed.
    pub positions: usize,
}

impl QueryScaling {
    /// The factor of a position.
    pub fn factor(&self, position: usize) -> f32 {
        (1.0 + self.beta * ((position / self.period.max(1)) as f64).ln_1p()) as f32
    }
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSpec {
    /// The first half.
    pub mixer: MixerSpec,
    /// The second half.
    pub feed_forward: FeedForwardSpec,
    /// Whether the inputs of both halves are normed. Without these norms, a half reads the residual stream.
    pub pre_norms: bool,
    /// Whether the outputs of both halves are normed before they are added to the residual stream.
    pub post_norms: bool,
    /// Whether a stored scalar multiplies the block's output. Requires `post_norms`.
    pub scalar: bool,
}

/// The first half of a block, which mixes tokens.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)] // Each layer has one: a box would save little.
pub enum MixerSpec {
    /// Attention to keys and values in a cache.
    Attention(AttentionSpec),
    /// A linear attention whose state is a matrix for each head (Qwen3-Next, Qwen 3.5).
    DeltaNet(DeltaNetSpec),
    /// A convolution over the last positions between two products (LFM2).
    ShortConv(ShortConvSpec),
}

impl From<AttentionSpec> for MixerSpec {
    fn from(attention: AttentionSpec) -> MixerSpec {
        MixerSpec::Attention(attention)
    }
}

/// A gated delta net ([`kvant::ops::DeltaRule`]): out(norm(delta_rule(conv(qkv(x)), a(x), b(x))) · silu(z(x))).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaNetSpec {
    /// Heads of queries and keys; a divisor of `value_heads`.
    pub key_heads: usize,
    /// Heads of values, and of the state.
    pub value_heads: usize,
    /// Coordinates of a query or key.
    pub key_dim: usize,
    /// Coordinates of a value.
    pub value_dim: usize,
    /// Taps of the convolution over queries, keys and values.
    pub taps: usize,
    /// Whether the value heads that share a key head are `key_heads` apart, as in GGUF files, instead of adjacent.
    pub tiled: bool,
}

impl DeltaNetSpec {
    /// Columns of queries, keys and values together: the channels of the convolution.
    pub(crate) fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_width()
    }

    /// Columns of the values of all heads.
    pub(crate) fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// The shapes of the delta rule.
    pub(crate) fn rule_shape(&self, dtype: DType) -> DeltaRuleShape {
        let DeltaNetSpec { key_heads, value_heads: heads, key_dim, value_dim, .. } = *self;
        DeltaRuleShape { key_heads, heads, key_dim, value_dim, dtype }
    }

    /// The outputs of the projections of the input: queries, keys and values; the gate z; b; a.
    pub(crate) fn projections(&self) -> [usize; 4] {
        [self.channels(), self.value_width(), self.value_heads, self.value_heads]
    }

    fn check(&self) -> std::result::Result<(), String> {
        let DeltaNetSpec { key_heads, value_heads, key_dim, value_dim, taps, .. } = *self;
        if key_heads == 0 || value_heads == 0 || !value_heads.is_multiple_of(key_heads) {
            return Err(format!("{value_heads} value heads are no multiple of {key_heads} key heads"));
        }
        let fits = |dim: usize, unit: usize| (unit..=256).contains(&dim) && dim.is_multiple_of(unit);
        if !fits(key_dim, 32) || !fits(value_dim, 16) {
            let expected = "key heads have a multiple of 32 coordinates, value heads one of 16, up to 256";
            return Err(format!("{expected}, not {key_dim} and {value_dim}"));
        }
        check_taps(taps)
    }
}

/// A short convolution: out(c · conv(b · u)), where b, c and u are the parts of one projection of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortConvSpec {
    /// Channels: the width of the residual stream.
    pub channels: usize,
    /// Taps of the convolution.
    pub taps: usize,
    /// Whether the projections and the convolution have biases.
    pub biases: bool,
}

/// Checks the requirement of [`kvant::ops::causal_conv()`].
fn check_taps(taps: usize) -> std::result::Result<(), String> {
    if (2..=8).contains(&taps) { Ok(()) } else { Err(format!("a convolution has from 2 to 8 taps, not {taps}")) }
}

impl MixerSpec {
    /// The states that each sequence has in the block. `activations` is the dtype of activations.
    pub(crate) fn states(&self, activations: DType) -> Vec<StateLayer> {
        let inputs = |taps: usize, channels| StateLayer::new(activations, &[taps - 1, channels]);
        match self {
            MixerSpec::Attention(_) => Vec::new(),
            MixerSpec::DeltaNet(net) => {
                let DeltaNetSpec { value_heads, key_dim, value_dim, taps, .. } = *net;
                let matrices = StateLayer::new(DType::F32, &[value_heads, key_dim, value_dim]);
                vec![inputs(taps, net.channels()), matrices]
            }
            MixerSpec::ShortConv(conv) => vec![inputs(conv.taps, conv.channels)],
        }
    }
}

impl BlockSpec {
    /// The attention of the block, if its mixer is one.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        match &self.mixer {
            MixerSpec::Attention(attention) => Some(attention),
            MixerSpec::DeltaNet(_) | MixerSpec::ShortConv(_) => None,
        }
    }

    /// The attention of the block, if its mixer is one.
    pub(crate) fn attention_mut(&mut self) -> Option<&mut AttentionSpec> {
        match &mut self.mixer {
            MixerSpec::Attention(attention) => Some(attention),
            MixerSpec::DeltaNet(_) | MixerSpec::ShortConv(_) => None,
        }
    }

    /// The delta net of the block, if its mixer is one.
    pub(crate) fn delta_net_mut(&mut self) -> Option<&mut DeltaNetSpec> {
        match &mut self.mixer {
            MixerSpec::DeltaNet(net) => Some(net),
            MixerSpec::Attention(_) | MixerSpec::ShortConv(_) => None,
        }
    }

    /// The earlier block whose keys and values this block uses.
    pub(crate) fn source(&self) -> Option<usize> {
        self.attention()?.source()
    }

    /// Whether the block stores keys and values, or states, for later tokens.
    pub(crate) fn is_storing(&self) -> bool {
        self.attention().is_none_or(AttentionSpec::stores_keys)
    }
}

/// The attention of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// KV heads; a divisor of `heads`.
    pub kv_heads: usize,
    /// Coordinates of a head: one of [`HEAD_DIMS`].
    pub head_dim: usize,
    /// Number of positions that a token sees, including itself; `None` for all.
    pub window: Option<usize>,
    /// The rotary embedding of queries and keys.
    pub rope: RopeSpec,
    /// Multiplies the scores.
    pub scale: f32,
    /// The cap c of c·tanh(score/c).
    pub softcap: Option<f32>,
    /// The norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Whether values are normed per head, without weights.
    pub v_norm: bool,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the projection of the output has a bias.
    pub output_bias: bool,
    /// Whether each query head has a sink ([`kvant::ops::Attend::sinks`]).
    pub sinks: bool,
    /// Whether the output of the heads is multiplied by sigmoid(gate(x)) before its projection.
    pub output_gate: bool,
    /// The source of keys and values.
    pub keys_values: KeysValues,
    /// The number of ranks that divide the positions of the block's cache; each of them has all KV heads. 1 except in
    /// [`Model::rank_decoder`](crate::Model::rank_decoder).
    pub position_ranks: usize,
}

/// The extent of the norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head, before the rotary embedding.
    Heads,
    /// Each head, after the rotary embedding.
    RotatedHeads,
    /// All heads of a token together, before the rotary embedding.
    Rows,
    /// Each head without weights, before the rotary embedding.
    Unweighted,
}

/// The source of a block's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeysValues {
    /// Projections of both.
    Own,
    /// One projection: values are the keys before norm and rotary embedding.
    KeysAreValues,
    /// None: the block attends to the keys and values of an earlier block. After the first such block, all blocks
    /// share.
    SharedWith(usize),
    /// None: the block attends to keys and values that another decoder stores (Gemma 4's assistants).
    External,
}

/// A rotary embedding with frequencies theta^(−2i/n) / factorᵢ; n is given in [`kvant::ops::Angles::Theta`].
///
/// Scalings (linear, llama3, YaRN) are factors. A common factor of cosines and sines, as in YaRN, is folded into
/// [`AttentionSpec::scale`], unless some coordinates do not rotate.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// The base.
    pub theta: f64,
    /// The number of rotated pairs, at most D/2. 0 disables the embedding.
    pub rotated_pairs: usize,
    /// The coordinates that form a pair.
    pub layout: PairLayout,
    /// Divides the frequency of each pair; `None` for 1.
    pub factors: Option<Vec<f32>>,
    /// Other factors for long texts.
    pub long: Option<LongRope>,
}

impl RopeSpec {
    /// Disables the embedding: the block ignores positions.
    pub(crate) fn stop(&mut self) {
        *self = RopeSpec { rotated_pairs: 0, factors: None, long: None, ..self.clone() };
    }
}

/// LongRoPE: a rotary embedding whose factors depend on the length of the text.
///
/// A cached key has been rotated with one set of factors, so a text cannot switch to the other. The context with which
/// the model is loaded ([`LoadOptions::context`](crate::LoadOptions::context)) determines the set.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Maximum tokens of a text for which [`RopeSpec::factors`] apply.
    pub original: usize,
    /// Divides the frequency of each pair, for longer texts.
    pub factors: Vec<f32>,
    /// Multiplies cosines and sines.
    pub magnitude: f32,
}

/// The second half of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForwardSpec {
    /// A gated MLP.
    Dense(DenseSpec),
    /// A mixture of experts.
    Moe(MoeSpec),
    /// Both; their outputs are added.
    Parallel(DenseSpec, MoeSpec, ParallelSum),
}

/// The sum of a gated MLP and experts in parallel, where x = norm(h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParallelSum {
    /// dense(x) + experts(x): shared experts.
    Plain,
    /// sigmoid(g·x) · dense(x) + experts(x), with a stored g (Qwen 2).
    Gated,
    /// norm₁(dense(x)) + norm₂(experts(norm₃(h))) (Gemma 4).
    Normed,
}

impl FeedForwardSpec {
    /// The gated MLP.
    pub fn dense(&self) -> Option<DenseSpec> {
        match *self {
            FeedForwardSpec::Dense(dense) | FeedForwardSpec::Parallel(dense, ..) => Some(dense),
            FeedForwardSpec::Moe(_) => None,
        }
    }

    /// The mixture of experts.
    pub fn moe(&self) -> Option<MoeSpec> {
        match *self {
            FeedForwardSpec::Moe(moe) | FeedForwardSpec::Parallel(_, moe, _) => Some(moe),
            FeedForwardSpec::Dense(_) => None,
        }
    }

    /// The sum of both.
    pub fn parallel_sum(&self) -> Option<ParallelSum> {
        match *self {
            FeedForwardSpec::Parallel(_, _, sum) => Some(sum),
            FeedForwardSpec::Dense(_) | FeedForwardSpec::Moe(_) => None,
        }
    }
}

impl From<DenseSpec> for FeedForwardSpec {
    fn from(dense: DenseSpec) -> FeedForwardSpec {
        FeedForwardSpec::Dense(dense)
    }
}

/// A gated MLP: down(activation(gate(x)) · up(x)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseSpec {
    /// Outputs of gate and up.
    pub width: usize,
    /// The activation function.
    pub activation: Activation,
    /// Whether gate, up and down have biases.
    pub biases: bool,
}

/// A mixture of experts, each a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeSpec {
    /// Number of experts, E.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Outputs of an expert's gate and up.
    pub width: usize,
    /// The activation function.
    pub activation: Activation,
    /// How experts are selected and weighted.
    pub routing: RoutingSpec,
    /// Whether the router and the experts' projections have biases.
    pub biases: bool,
    /// The input of the router.
    pub router: RouterSpec,
}

/// How a token's experts are selected and weighted: the options of [`kvant::ops::MoeRoute`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingSpec {
    /// The function from logits to scores.
    pub scores: ExpertScores,
    /// Added to the scores for the selection, but not for the weights.
    pub bias: ScoreBias,
    /// The groups that are selected before the experts.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights are divided by their sum.
    pub normalise: bool,
    /// The minimum of that sum.
    pub min_sum: f32,
    /// Added to that sum.
    pub epsilon: f32,
    /// Multiplies the weights.
    pub scale: f32,
}

/// Whether the scores have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreBias {
    /// No.
    None,
    /// Yes.
    Stored,
    /// If the checkpoint contains one.
    IfStored,
}

impl RoutingSpec {
    /// The softmax over the logits of the selected experts (`normalise`), or of all experts.
    pub const fn softmax(normalise: bool) -> RoutingSpec {
        RoutingSpec {
            scores: ExpertScores::Softmax,
            bias: ScoreBias::None,
            groups: None,
            normalise,
            min_sum: 0.0,
            epsilon: 0.0,
            scale: 1.0,
        }
    }

    /// Whether the selection or the weights need more than the softmax over logits.
    pub(crate) fn has_scores(&self) -> bool {
        *self != RoutingSpec::softmax(self.normalise)
    }

    /// Checks the requirements of [`kvant::ops::moe_route()`].
    fn check(&self, experts: usize, top_k: usize) -> std::result::Result<(), String> {
        if let Some(ExpertGroups { count, chosen }) = self.groups {
            let max = ExpertGroups::MAX.min(experts / 2);
            if !(1..=max).contains(&count) || !experts.is_multiple_of(count) {
                return Err(format!("{experts} experts have from 1 to {max} groups of the same size, not {count}"));
            }
            if !(1..=count).contains(&chosen) || top_k > chosen * (experts / count) {
                return Err(format!("{chosen} of {count} groups of {experts} experts do not have {top_k}"));
            }
        }
        let is_sum = |value: f32| value.is_finite() && value >= 0.0;
        if !(is_sum(self.min_sum) && is_sum(self.epsilon) && self.scale.is_finite()) {
            return Err("the weights of experts are not finite".to_string());
        }
        Ok(())
    }
}

/// The input of a router, and factors of its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterSpec {
    /// The router reads the input of the experts.
    Plain,
    /// The router reads H^-½ · norm(h) with its own norm weights, and a stored factor multiplies the weight of each
    /// expert (Gemma 4).
    Scaled,
}

/// Per-layer input embeddings (PLE): P additional inputs of each token for each block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerLayerInputSpec {
    /// Coordinates per block, P.
    pub size: usize,
    /// Rows of the table.
    pub vocab_size: usize,
}

impl DecoderSpec {
    /// The number of blocks with their own keys and values.
    pub fn cache_layers(&self) -> usize {
        self.cache_blocks().count()
    }

    /// The blocks with their own keys and values: their indices and their attention.
    pub fn cache_blocks(&self) -> impl Iterator<Item = (usize, &AttentionSpec)> {
        self.blocks.iter().enumerate().filter_map(|(l, block)| {
            let attention = block.attention().filter(|attention| attention.stores_keys())?;
            Some((l, attention))
        })
    }

    /// The number of blocks that store keys and values or states for later tokens. They come first.
    pub(crate) fn storing_blocks(&self) -> usize {
        self.blocks.iter().filter(|block| block.is_storing()).count()
    }

    /// The states that each sequence has, in the order of the blocks.
    pub(crate) fn states(&self, activations: DType) -> Vec<StateLayer> {
        self.blocks.iter().flat_map(|block| block.mixer.states(activations)).collect()
    }

    /// The number of ids that can be fed: every table has a row for them.
    pub fn fed_vocab(&self) -> usize {
        self.vocab_size.min(self.per_layer_input.map_or(usize::MAX, |inputs| inputs.vocab_size))
    }

    /// Maximum tokens of a text for which the factors of all rotary embeddings apply; `None` without LongRoPE.
    pub(crate) fn original_context(&self) -> Option<usize> {
        self.blocks.iter().filter_map(|block| Some(block.attention()?.rope.long.as_ref()?.original)).min()
    }

    /// Checks that the interpreter can run the description. Families report invalid values by key; this function checks
    /// relations that hold in every format.
    ///
    /// # Errors
    /// `Unsupported` with the block and the reason.
    pub fn check(&self) -> Result<()> {
        let own = self.storing_blocks();
        let is_external = |block: &BlockSpec| block.attention().is_some_and(AttentionSpec::is_external);
        if self.cache_layers() == 0 && !self.blocks.iter().any(is_external) {
            let reason = "at least one layer has keys and values of its own".to_string();
            return Err(Error::Unsupported { what: format!("{} layers", self.blocks.len()), reason });
        }
        for (l, block) in self.blocks.iter().enumerate() {
            let unsupported = |reason| Error::Unsupported { what: format!("layer {l}"), reason };
            self.check_block(l, own).map_err(unsupported)?;
            if !block.pre_norms && self.blocks.iter().any(|block| !block.post_norms) {
                return Err(unsupported("inputs without norms require norms of the outputs, in every layer".into()));
            }
            if self.residual_scale != 1.0 && block.post_norms {
                return Err(unsupported("outputs with norms have no factor".into()));
            }
            if self.per_layer_input.is_some() && self.post_norm_eps != self.norm_eps {
                return Err(unsupported("with per-layer inputs all norms have one epsilon".into()));
            }
            if (block.scalar || self.per_layer_input.is_some()) && !block.post_norms {
                return Err(unsupported("a scalar and per-layer inputs require norms of the block's outputs".into()));
            }
            if self.query_scaling.is_some() && block.attention().is_some_and(|attention| attention.qk_norm.is_some()) {
                return Err(unsupported("queries that are scaled by position have no norm".into()));
            }
            let Some(moe) = block.feed_forward.moe() else { continue };
            moe.routing.check(moe.experts, moe.top_k).map_err(unsupported)?;
            if moe.router == RouterSpec::Scaled && block.feed_forward.parallel_sum() != Some(ParallelSum::Normed) {
                return Err(unsupported("a router with a norm of its own requires a parallel MLP with norms".into()));
            }
        }
        Ok(())
    }

    fn check_block(&self, l: usize, own: usize) -> std::result::Result<(), String> {
        let attention = match &self.blocks[l].mixer {
            MixerSpec::Attention(attention) => attention,
            MixerSpec::DeltaNet(net) => return net.check(),
            MixerSpec::ShortConv(conv) if conv.channels == self.hidden_size => return check_taps(conv.taps),
            MixerSpec::ShortConv(conv) => return Err(format!("a convolution of {} channels", conv.channels)),
        };
        let AttentionSpec { heads, kv_heads, head_dim, ref rope, .. } = *attention;
        if !HEAD_DIMS.contains(&head_dim) {
            return Err(format!("the number of a head's coordinates is one of {HEAD_DIMS:?}, not {head_dim}"));
        }
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "the number of heads is a multiple of that of KV heads, and {heads} is not of {kv_heads}"
            ));
        }
        if rope.rotated_pairs > head_dim / 2 {
            return Err(format!("{} pairs of {head_dim} coordinates rotate", rope.rotated_pairs));
        }
        if rope.factors.as_ref().is_some_and(|factors| factors.len() != rope.rotated_pairs) {
            return Err(format!("the rotary embedding needs {} factors", rope.rotated_pairs));
        }
        if rope.long.as_ref().is_some_and(|long| long.factors.len() != rope.rotated_pairs) {
            return Err(format!("the rotary embedding needs {} factors for long texts", rope.rotated_pairs));
        }
        match attention.source() {
            None if attention.is_external() => Ok(()),
            None if l >= own => Err("layers that share keys and values are the last ones".to_string()),
            None => Ok(()),
            Some(source) => {
                let shape = |attention: &AttentionSpec| (attention.kv_heads, attention.head_dim);
                let of_source = self.blocks.get(source).filter(|_| source < own).and_then(BlockSpec::attention);
                let fits = of_source.is_some_and(|of_source| shape(of_source) == shape(attention));
                if fits { Ok(()) } else { Err(format!("keys and values of layer {source} do not fit")) }
            }
        }
    }
}

impl AttentionSpec {
    /// The earlier block whose keys and values this block uses.
    pub fn source(&self) -> Option<usize> {
        match self.keys_values {
            KeysValues::SharedWith(source) => Some(source),
            KeysValues::Own | KeysValues::KeysAreValues | KeysValues::External => None,
        }
    }

    /// Whether another decoder stores the keys and values.
    pub fn is_external(&self) -> bool {
        self.keys_values == KeysValues::External
    }

    /// Whether the block stores keys and values of its own.
    pub fn stores_keys(&self) -> bool {
        matches!(self.keys_values, KeysValues::Own | KeysValues::KeysAreValues)
    }

    /// Folds the factor of cosines and sines into the scale, if all coordinates rotate.
    pub(crate) fn fold_magnitude(&mut self) {
        if let Some(long) = self.rope.long.as_mut().filter(|_| self.rope.rotated_pairs == self.head_dim / 2) {
            self.scale *= std::mem::replace(&mut long.magnitude, 1.0).powi(2);
        }
    }

    /// The number of key and value projections.
    pub(crate) fn kv_projections(&self) -> usize {
        match self.keys_values {
            KeysValues::Own => 2,
            KeysValues::KeysAreValues => 1,
            KeysValues::SharedWith(_) | KeysValues::External => 0,
        }
    }

    /// The widths of the block's query and key norms, if it has them.
    pub(crate) fn qk_norm_widths(&self) -> [Option<usize>; 2] {
        let [q, k] = match self.qk_norm {
            None | Some(QkNorm::Unweighted) => return [None, None],
            Some(QkNorm::Heads | QkNorm::RotatedHeads) => [self.head_dim, self.head_dim],
            Some(QkNorm::Rows) => [self.q_width(), self.kv_width()],
        };
        [Some(q), self.stores_keys().then_some(k)]
    }

    /// Outputs of the query projection.
    pub(crate) fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Outputs of the gate of the heads' output; 0 without a gate.
    pub(crate) fn gate_width(&self) -> usize {
        if self.output_gate { self.q_width() } else { 0 }
    }

    /// Outputs of the key projection.
    pub(crate) fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}
