//! The description of a family, and the names of tensors that families share.

use super::common::ConfigJson;
use crate::{Result, source::Part, spec::DecoderSpec};

/// A family of models.
#[derive(Debug)]
pub(crate) struct Family {
    pub name: &'static str,
    /// The `model_type` of its text models.
    pub model_types: &'static [&'static str],
    /// The `model_type` of models whose text model is in `text_config`, with the text model's type if the file has
    /// none. If the type is also in `model_types`, the text model's keys may be at the top level.
    pub wrappers: &'static [(&'static str, &'static str)],
    /// The entries of `architectures` for files without `model_type`, with the type that each implies.
    pub architectures: &'static [(&'static str, &'static str)],
    pub describe: fn(&ConfigJson) -> Result<DecoderSpec>,
    /// The names of a block's tensors after `layers.N.`. The first table that contains a part applies.
    pub names: &'static [Names],
    /// The names of experts in each layout. `{}` is replaced by the index of an expert.
    pub experts: &'static [ExpertNames],
}

/// The names of experts in one layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertNames {
    pub names: Names,
    pub layout: ExpertLayout,
}

impl ExpertNames {
    pub const fn plain(names: Names) -> ExpertNames {
        ExpertNames { names, layout: ExpertLayout::Plain }
    }
}

/// The storage layout of expert matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertLayout {
    /// The loader's layout: `[E, outputs, inputs]`, with the gate's rows before up's.
    Plain,
    /// gpt-oss in MXFP4: `_blocks` and `_scales`, with alternating rows of gate and up.
    InterleavedMxfp4,
    /// Dense gpt-oss: `[E, inputs, outputs]`, with alternating columns of gate and up.
    InterleavedTransposed,
}

/// A table of tensor names.
pub(crate) type Names = &'static [(Part, &'static str)];

/// The names of a block that norms the inputs of its halves (Llama, Qwen).
pub(super) const PRE_NORM: Names = &[
    (Part::AttentionNorm, "input_layernorm.weight"),
    (Part::Query, "self_attn.q_proj.weight"),
    (Part::Key, "self_attn.k_proj.weight"),
    (Part::Value, "self_attn.v_proj.weight"),
    (Part::QueryNorm, "self_attn.q_norm.weight"),
    (Part::KeyNorm, "self_attn.k_norm.weight"),
    (Part::AttentionOutput, "self_attn.o_proj.weight"),
    (Part::FeedForwardNorm, "post_attention_layernorm.weight"),
    (Part::Gate, "mlp.gate_proj.weight"),
    (Part::Up, "mlp.up_proj.weight"),
    (Part::Down, "mlp.down_proj.weight"),
];

/// Names that differ from [`PRE_NORM`] in blocks that also norm the outputs of their halves (Gemma).
pub(super) const SANDWICH: Names = &[
    (Part::AttentionPostNorm, "post_attention_layernorm.weight"),
    (Part::FeedForwardNorm, "pre_feedforward_layernorm.weight"),
    (Part::FeedForwardPostNorm, "post_feedforward_layernorm.weight"),
];
