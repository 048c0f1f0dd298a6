//! Keys shared by most families.

use std::fmt::Display;

use kvant::ops::{Activation, PairLayout, attend::HEAD_DIMS};

use super::{defaults, rope::Scaling};
pub(super) use super::{kind::Kind, limits::*};
use crate::{
    Result,
    config::fields::Fields,
    spec::{
        AttentionSpec, BlockSpec, DecoderSpec, DenseSpec, FeedForwardSpec, KeysValues, MixerSpec, OutputMatrix,
        RopeSpec,
    },
};

/// A `config.json` whose type is known.
#[derive(Debug)]
pub(crate) struct ConfigJson<'a> {
    /// The `model_type` of the text model.
    pub model_type: String,
    /// The keys of the text model, completed with defaults.
    pub text: Fields<'a>,
    /// The whole file, without defaults. Equal to the text model's keys unless the text model is in `text_config`.
    pub outer: Fields<'a>,
    /// Whether no key specifies the output matrix, the text model's default is a separate matrix, and the whole model's
    /// default is the embedding. Transformers then uses the embedding unless the checkpoint has both.
    pub is_tied_outside: bool,
}

impl ConfigJson<'_> {
    pub(super) fn vocab_size(&self) -> Result<usize> {
        match self.text.size_or_null("vocab_size", MAX_VOCAB)? {
            Some(vocab_size) => Ok(vocab_size),
            None => self.outer.size("vocab_size", None, MAX_VOCAB),
        }
    }

    pub(super) fn layers(&self) -> Result<usize> {
        self.text.size("num_hidden_layers", None, MAX_LAYERS)
    }

    pub(super) fn norm_eps(&self, key: &str) -> Result<f32> {
        let expected = "a small number, 0 or more";
        let eps = self.text.float(key, None, expected, |eps| (0.0..1.0).contains(&eps))?;
        Ok(eps as f32)
    }

    /// The cap of c·tanh(x/c).
    pub(super) fn softcap(&self, key: &str) -> Result<Option<f32>> {
        let fits = |c: f64| c as f32 >= f32::MIN_POSITIVE && c < 1e6;
        Ok(self.text.float_or_null(key, "at least 1.2e-38", fits)?.map(|c| c as f32))
    }

    /// The output matrix by `tie_word_embeddings`; `is_tied` is the default. If the file has two keys, transformers
    /// reads the outer and MLX the inner one: they must agree.
    pub(super) fn output(&self, is_tied: bool) -> Result<OutputMatrix> {
        const KEY: &str = defaults::TIED;
        let of = |is_tied| if is_tied { OutputMatrix::Embedding } else { OutputMatrix::Own };
        match (self.text.bool_or_null(KEY)?, self.outer.bool_or_null(KEY)?) {
            (Some(inner), Some(tie)) if inner != tie => {
                Err(self.outer.error(KEY, format_args!("the same as in text_config, {inner}"), tie))
            }
            (None, None) if self.is_tied_outside => Ok(OutputMatrix::OwnIfStored),
            (inner, tie) => Ok(of(inner.or(tie).unwrap_or(is_tied))),
        }
    }

    /// Rejects flags that would change the arithmetic in unimplemented ways.
    pub(super) fn refuse_true(&self, keys: &[&str]) -> Result<()> {
        match keys
            .iter()
            .find_map(|key| self.text.bool_or_null(key).map(|on| (on == Some(true)).then_some(key)).transpose())
        {
            Some(key) => Err(self.text.error(key?, "false", "true")),
            None => Ok(()),
        }
    }

    pub(super) fn activation(&self, key: &str, default: &str) -> Result<Activation> {
        match self.text.string(key)?.unwrap_or(default) {
            "silu" | "swish" => Ok(Activation::Silu),
            "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
            other => Err(self.text.error(key, "\"silu\" or \"gelu_pytorch_tanh\"", format_args!("{other:?}"))),
        }
    }

    /// The gated MLP of `intermediate_size`, without biases.
    pub(super) fn dense(&self) -> Result<DenseSpec> {
        let width = self.text.size("intermediate_size", None, MAX_WIDTH)?;
        Ok(DenseSpec { width, activation: self.activation("hidden_act", "silu")?, biases: false })
    }

    /// The window of each layer. `kinds` has the kinds of all layers.
    pub(super) fn windows(&self, kinds: &[Kind], window: Option<usize>) -> Result<Vec<Option<usize>>> {
        if window.is_none() && kinds.contains(&Kind::Sliding) {
            return Err(self
                .text
                .missing("sliding_window", "a number of positions, because layer_types has sliding ones"));
        }
        Ok(kinds.iter().map(|kind| window.filter(|_| *kind == Kind::Sliding)).collect())
    }

    /// A factor; 1 if it is absent.
    pub(super) fn multiplier(&self, key: &str) -> Result<f64> {
        self.text.float(key, Some(1.0), "above 0, at most 1e6", |factor| factor > 0.0 && factor <= 1e6)
    }

    /// Whether the query, key and value projections have biases, and whether the output projection has one: in most
    /// families `attention_bias` sets both.
    pub(super) fn attention_bias(&self, default: bool) -> Result<(bool, bool)> {
        let is_biased = self.text.bool_or_null("attention_bias")?.unwrap_or(default);
        Ok((is_biased, is_biased))
    }

    /// Attention to all positions with a scale of D^-½, as in Llama. Without `head_dim`, D is hidden_size /
    /// num_attention_heads.
    pub(super) fn attention(&self, scaling: &Scaling) -> Result<AttentionSpec> {
        let heads = self.text.size("num_attention_heads", None, MAX_HEADS)?;
        let hidden = self.text.size("hidden_size", None, MAX_WIDTH)?;
        let head_dim = self.text.size_or_null("head_dim", MAX_WIDTH)?.unwrap_or(hidden / heads);
        let kv_heads = self.text.size_or_null("num_key_value_heads", MAX_HEADS)?.unwrap_or(heads);
        self.check_heads(heads, kv_heads, head_dim, "every layer")?;
        let rotated_pairs = scaling.rotated_pairs(head_dim);
        if rotated_pairs == 0 {
            let expected = format_args!("a share of {head_dim} coordinates that is an even number of them");
            return Err(self.text.error("partial_rotary_factor", expected, "another one"));
        }
        Ok(AttentionSpec {
            heads,
            kv_heads,
            head_dim,
            window: None,
            rope: RopeSpec {
                theta: scaling.theta(),
                rotated_pairs,
                layout: if rotated_pairs < head_dim / 2 { PairLayout::LeadingHalves } else { PairLayout::Halves },
                factors: scaling.factors(2 * rotated_pairs),
                long: None,
            },
            scale: scaling.score_scale((head_dim as f64).powf(-0.5)),
            softcap: None,
            qk_norm: None,
            v_norm: false,
            qkv_bias: false,
            output_bias: false,
            sinks: false,
            output_gate: false,
            keys_values: KeysValues::Own,
            position_ranks: 1,
        })
    }

    /// `layer` names the layer in error messages.
    pub(super) fn check_heads(
        &self,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        layer: impl Display,
    ) -> Result<()> {
        if !heads.is_multiple_of(kv_heads) {
            let expected = format_args!("a multiple of the {kv_heads} KV heads of {layer}");
            return Err(self.text.error("num_attention_heads", expected, heads));
        }
        if !HEAD_DIMS.contains(&head_dim) {
            return Err(self.text.error("head_dim", format_args!("one of {HEAD_DIMS:?} ({layer})"), head_dim));
        }
        Ok(())
    }

    /// A decoder whose blocks norm only the inputs of their halves, like Llama's.
    pub(super) fn pre_norm<M: Into<MixerSpec>>(
        &self,
        block: impl Fn(usize) -> Result<(M, FeedForwardSpec)>,
    ) -> Result<DecoderSpec> {
        self.pre_norm_with("rms_norm_eps", block)
    }

    /// As [`ConfigJson::pre_norm`], with the key of the norms' epsilon.
    pub(super) fn pre_norm_with<M: Into<MixerSpec>>(
        &self,
        eps: &str,
        block: impl Fn(usize) -> Result<(M, FeedForwardSpec)>,
    ) -> Result<DecoderSpec> {
        let blocks = (0..self.layers()?).map(|l| {
            let (mixer, feed_forward) = block(l)?;
            Ok(BlockSpec { mixer: mixer.into(), feed_forward, pre_norms: true, post_norms: false, scalar: false })
        });
        Ok(DecoderSpec {
            hidden_size: self.text.size("hidden_size", None, MAX_WIDTH)?,
            vocab_size: self.vocab_size()?,
            embedding_scale: 1.0,
            embedding_norm: false,
            per_layer_input: None,
            blocks: blocks.collect::<Result<_>>()?,
            norm_eps: self.norm_eps(eps)?,
            post_norm_eps: self.norm_eps(eps)?,
            norm_offset: 0.0,
            final_norm_offset: 0.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            final_softcap: None,
            output: self.output(false)?,
            query_scaling: None,
        })
    }

    /// A decoder whose blocks norm only the outputs of their halves, like OLMo 2's.
    pub(super) fn post_norm(
        &self,
        block: impl Fn(usize) -> Result<(AttentionSpec, FeedForwardSpec)>,
    ) -> Result<DecoderSpec> {
        let mut decoder = self.pre_norm(block)?;
        for block in &mut decoder.blocks {
            (block.pre_norms, block.post_norms) = (false, true);
        }
        Ok(decoder)
    }

    /// The kinds in `layer_types` of attention layers.
    pub(super) fn layer_types(&self, count: usize) -> Result<Option<Vec<Kind>>> {
        self.layer_kinds(count, &[Kind::Sliding, Kind::Full].map(|kind| (kind.name(), kind)))
    }

    /// The kinds in `layer_types`, by their names.
    pub(super) fn layer_kinds<K: Copy>(&self, count: usize, kinds: &[(&str, K)]) -> Result<Option<Vec<K>>> {
        let names = match self.text.get("layer_types") {
            None | Some(serde_json::Value::Null) => return Ok(None),
            Some(serde_json::Value::Array(names)) => names,
            Some(other) => return Err(self.text.error("layer_types", "an array", other)),
        };
        if names.len() != count {
            let expected = format_args!("{count} names, like num_hidden_layers");
            return Err(self.text.error("layer_types", expected, names.len()));
        }
        let kind = |(l, name): (usize, &serde_json::Value)| {
            let known = kinds.iter().find(|(known, _)| name.as_str() == Some(known));
            let expected = || kinds.iter().map(|(known, _)| format!("{known:?}")).collect::<Vec<_>>().join(" or ");
            known.map(|(_, kind)| *kind).ok_or_else(|| {
                let key = format!("layer_types[{l}]");
                self.text.error(&key, expected(), name)
            })
        };
        names.iter().enumerate().map(kind).collect::<Result<Vec<_>>>().map(Some)
    }
}
