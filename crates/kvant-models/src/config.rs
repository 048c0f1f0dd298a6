//! `config.json` of Gemma 4, in Hugging Face's and MLX's forms, with every number checked.

mod fields;
mod quantization;

use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

use serde_json::Value;

use crate::{Error, Files, Result};
use fields::Fields;
pub use quantization::{Quantization, Scheme};

/// The configuration of a Gemma 4 text model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads of every layer.
    pub heads: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// The layers, first to last.
    pub layers: Vec<LayerConfig>,
    /// The epsilon of every norm.
    pub rms_norm_eps: f32,
    /// The cap c of the final c·tanh(logit/c).
    pub final_softcap: Option<f32>,
    /// Whether the embedding is also the output matrix.
    pub tie_word_embeddings: bool,
    /// Per-layer input embeddings.
    pub per_layer_input: Option<PerLayerInput>,
    /// The mixture of experts that runs in parallel with every layer's MLP.
    pub moe: Option<Moe>,
    /// The formats of quantised tensors.
    pub quantization: Quantization,
    /// The longest context that the model was made for.
    pub max_position_embeddings: Option<usize>,
    /// The id that starts a text, if the file has one.
    pub bos_token_id: Option<u32>,
    /// The ids that end a text, in the file's order.
    pub eos_token_ids: Vec<u32>,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Coordinates of a head: 64, 128, 256 or 512.
    pub head_dim: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// How many positions a token sees, itself included; `None` for all.
    pub window: Option<usize>,
    /// The rotary embedding.
    pub rope: RopeConfig,
    /// Whether values are the raw keys, so that there is no v_proj.
    pub k_eq_v: bool,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// The earlier layer whose keys and values this layer attends to; `None` if it has its own.
    pub kv_source: Option<usize>,
}

impl LayerConfig {
    /// The number of key and value projections of this layer: none if it attends to an earlier layer's keys and
    /// values, one if values are keys.
    pub(crate) fn kv_projections(&self) -> usize {
        match (self.kv_source, self.k_eq_v) {
            (Some(_), _) => 0,
            (None, true) => 1,
            (None, false) => 2,
        }
    }
}

/// The rotary embedding of a layer: pairs (i, i + D/2), frequency theta^(−2i/D) / factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base.
    pub theta: f64,
    /// The number of rotated pairs.
    pub rotated_pairs: usize,
    /// Divides every frequency.
    pub factor: f32,
}

/// Per-layer input embeddings (PLE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerLayerInput {
    /// Coordinates per layer, P.
    pub size: usize,
    /// Rows of the table.
    pub vocab_size: usize,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moe {
    /// Experts, E.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Width of an expert.
    pub intermediate_size: usize,
}

// Limits of a configuration: several times the size of existing models, and small enough that no product of two
// overflows.
const MAX_WIDTH: usize = 1 << 18;
const MAX_LAYERS: usize = 1024;
const MAX_HEADS: usize = 1024;
const MAX_VOCAB: usize = 1 << 24;
const MAX_EXPERTS: usize = 4096;
const MAX_POSITIONS: usize = u32::MAX as usize;

/// Without `layer_types`, every sixth layer is full.
const PATTERN: usize = 6;

impl Config {
    /// Reads `config.json`, and the end-of-text ids of `generation_config.json` if that file exists.
    ///
    /// # Errors
    /// As [`Config::parse`]; `File` if a file cannot be read; `Config` for a token id outside the vocabulary.
    pub fn load(dir: &Path) -> Result<Config> {
        Config::load_files(&Files::directory(dir))
    }

    pub(crate) fn load_files(files: &Files) -> Result<Config> {
        let mut config = Config::parse(&files.read_json("config.json")?)?;
        if let Some(generation) = files.read_json_if_there("generation_config.json")? {
            let path = files.path("generation_config.json");
            let ids = Fields::new(&generation)?.token_ids("eos_token_id").map_err(|error| match error {
                // The message of `Error::Config` names config.json, but the key is in another file.
                Error::Config { key, expected, got } => {
                    Error::file(&path, format_args!("`{key}` must be {expected}, got {got}"))
                }
                other => other,
            });
            config.eos_token_ids.extend(ids?);
            config.eos_token_ids = once_each(config.eos_token_ids);
        }
        config.check_token_ids()?;
        Ok(config)
    }

    /// Checks that token ids are in the vocabulary. Otherwise, a text would fail at its first token, or never end.
    fn check_token_ids(&self) -> Result<()> {
        let ids = self.eos_token_ids.iter().map(|&id| ("eos_token_id", id));
        let mut all = ids.chain(self.bos_token_id.map(|id| ("bos_token_id", id)));
        match all.find(|&(_, id)| id as usize >= self.vocab_size) {
            Some((key, id)) => Err(Error::Config {
                key: key.to_string(),
                expected: format!("below the vocabulary's {}", self.vocab_size),
                got: id.to_string(),
            }),
            None => Ok(()),
        }
    }

    /// Checks a parsed `config.json`.
    ///
    /// # Errors
    /// `Config` with the key, the accepted and the actual value; `Unsupported` for another architecture.
    pub fn parse(json: &Value) -> Result<Config> {
        let outer = Fields::new(json)?;
        let mut text = outer.clone();
        let mut name = model_type(&outer)?;
        if matches!(name.as_str(), "gemma4" | "gemma4_unified") {
            text = outer.object("text_config")?.ok_or_else(|| outer.missing("text_config", "an object"))?;
            name = model_type(&text)?;
        }
        let unified = match name.as_str() {
            "gemma4_text" => false,
            "gemma4_unified_text" => true,
            other => return Err(unsupported(format!("model_type {other:?}"))),
        };
        refuse_variants(&text)?;
        if unified {
            refuse_in_unified(&text)?;
        }
        let hidden_size = text.size("hidden_size", None, MAX_WIDTH)?;
        let heads = text.size("num_attention_heads", None, MAX_HEADS)?;
        let eps =
            text.float("rms_norm_eps", Some(1e-6), "a small number, 0 or more", |eps| (0.0..1.0).contains(&eps))?;
        let quantization = match outer.first_of(&["quantization", "quantization_config"])? {
            Some(fields) => Quantization::parse(&fields)?,
            None => Quantization::default(),
        };
        Ok(Config {
            hidden_size,
            heads,
            vocab_size: match text.size_or_null("vocab_size", MAX_VOCAB)? {
                Some(vocab_size) => vocab_size,
                None => outer.size("vocab_size", None, MAX_VOCAB)?,
            },
            layers: layers(&text, heads)?,
            rms_norm_eps: eps as f32,
            final_softcap: text
                .float_or_null("final_logit_softcapping", "at least 1.2e-38", |c| {
                    c as f32 >= f32::MIN_POSITIVE && c < 1e6
                })?
                .map(|c| c as f32),
            tie_word_embeddings: tie_word_embeddings(&text, &outer)?,
            per_layer_input: if unified { None } else { per_layer_input(&text)? },
            moe: moe(&text)?,
            quantization,
            max_position_embeddings: text.size_or_null("max_position_embeddings", MAX_POSITIONS)?,
            bos_token_id: match text.token_ids("bos_token_id")?.first() {
                Some(&id) => Some(id),
                None => outer.token_ids("bos_token_id")?.first().copied(),
            },
            eos_token_ids: {
                let mut ids = outer.token_ids("eos_token_id")?;
                ids.extend(text.token_ids("eos_token_id")?);
                once_each(ids)
            },
        })
    }

    /// The number of layers with their own keys and values. These come first.
    pub fn cache_layers(&self) -> usize {
        self.layers.iter().filter(|layer| layer.kv_source.is_none()).count()
    }
}

/// Removes ids that occurred before.
fn once_each(mut ids: Vec<u32>) -> Vec<u32> {
    let mut seen = HashSet::new();
    ids.retain(|&id| seen.insert(id));
    ids
}

/// The supported model types, for messages.
const TYPES: &str = "\"gemma4\", \"gemma4_text\", \"gemma4_unified\" or \"gemma4_unified_text\"";

/// The `model_type`, or for files without one the type of their `architectures` entry.
fn model_type(fields: &Fields) -> Result<String> {
    if let Some(name) = fields.string("model_type")? {
        return Ok(name.to_string());
    }
    match fields.get("architectures").and_then(|names| names.get(0)).and_then(Value::as_str) {
        Some("Gemma4ForCausalLM") => Ok("gemma4_text".to_string()),
        Some("Gemma4ForConditionalGeneration") => Ok("gemma4".to_string()),
        Some("Gemma4UnifiedForCausalLM") => Ok("gemma4_unified_text".to_string()),
        Some("Gemma4UnifiedForConditionalGeneration") => Ok("gemma4_unified".to_string()),
        Some(other) => Err(unsupported(format!("architecture {other:?}"))),
        None => Err(fields.missing("model_type", TYPES)),
    }
}

fn unsupported(what: String) -> Error {
    Error::Unsupported {
        what,
        reason: format!("kvant-models runs the text part of Gemma 4 models (model_type {TYPES})"),
    }
}

/// The text part of a unified model (Gemma 4 12B) is Gemma 4's without per-layer inputs and experts. For the keys
/// that enable these, transformers and MLX differ: transformers ignores them, MLX does not. Such a file is ambiguous,
/// and an error.
fn refuse_in_unified(text: &Fields) -> Result<()> {
    if text.count("hidden_size_per_layer_input", Some(0), MAX_WIDTH)? != 0 {
        let expected = "absent, null or 0 in a gemma4_unified model";
        return Err(text.error("hidden_size_per_layer_input", expected, "another number"));
    }
    if text.bool_or_null("enable_moe_block")? == Some(true) {
        return Err(text.error("enable_moe_block", "absent, null or false in a gemma4_unified model", "true"));
    }
    Ok(())
}

/// Rejects switches that would change the arithmetic in ways that are not implemented.
fn refuse_variants(text: &Fields) -> Result<()> {
    if text.bool_or_null("attention_bias")? == Some(true) {
        return Err(text.error("attention_bias", "false", "true"));
    }
    let activation = text.string("hidden_activation")?.unwrap_or("gelu_pytorch_tanh");
    if activation != "gelu_pytorch_tanh" {
        return Err(text.error("hidden_activation", "\"gelu_pytorch_tanh\"", format_args!("{activation:?}")));
    }
    match text.get("use_bidirectional_attention") {
        // "vision" concerns images only: text stays causal.
        None | Some(Value::Null | Value::Bool(false)) => Ok(()),
        Some(Value::String(s)) if s == "vision" => Ok(()),
        Some(other) => Err(text.error("use_bidirectional_attention", "null or \"vision\"", other)),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Sliding,
    Full,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Kind::Sliding => "sliding_attention",
            Kind::Full => "full_attention",
        }
    }
}

fn layers(text: &Fields, heads: usize) -> Result<Vec<LayerConfig>> {
    let count = text.size("num_hidden_layers", None, MAX_LAYERS)?;
    let kinds = layer_kinds(text, count)?;
    let shapes = head_shapes(text, &kinds)?;
    let shared = text.count("num_kv_shared_layers", Some(0), count - 1)?;
    let double_wide = text.bool_or_null("use_double_wide_mlp")?.unwrap_or(false);
    let k_eq_v = text.bool_or_null("attention_k_eq_v")?.unwrap_or(false);
    let intermediate = text.size("intermediate_size", None, MAX_WIDTH)?;
    let has = |kind| kinds.contains(&kind);
    let window = if has(Kind::Sliding) { text.size("sliding_window", None, MAX_POSITIONS)? } else { 1 };
    let own = count - shared;
    let mut layers: Vec<LayerConfig> = Vec::with_capacity(count);
    for (l, (&kind, &(head_dim, kv_heads))) in kinds.iter().zip(&shapes).enumerate() {
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a multiple of layer {l}'s {kv_heads} KV heads");
            return Err(text.error("num_attention_heads", expected, heads));
        }
        let kv_source = if l < own { None } else { Some(kv_source(text, &kinds[..own], kind, l)?) };
        if let Some(source) = kv_source
            && shapes[source] != shapes[l]
        {
            let expected =
                format!("a number for which layer {l} has the KV shape of layer {source}, whose KV it shares");
            return Err(text.error("num_kv_shared_layers", expected, shared));
        }
        layers.push(LayerConfig {
            head_dim,
            kv_heads,
            window: (kind == Kind::Sliding).then_some(window),
            rope: rope(text, kind, head_dim)?,
            k_eq_v: k_eq_v && kind == Kind::Full,
            intermediate_size: if double_wide && kv_source.is_some() { 2 * intermediate } else { intermediate },
            kv_source,
        });
    }
    Ok(layers)
}

/// The last layer of the same kind among those with their own keys and values.
fn kv_source(text: &Fields, own: &[Kind], kind: Kind, layer: usize) -> Result<usize> {
    own.iter().rposition(|&k| k == kind).ok_or_else(|| {
        let expected = format!("small enough that layer {layer} has a {} layer to share KV with", kind.name());
        text.error("num_kv_shared_layers", expected, text.get("num_kv_shared_layers").unwrap_or(&Value::Null))
    })
}

fn layer_kinds(text: &Fields, count: usize) -> Result<Vec<Kind>> {
    let names = match text.get("layer_types") {
        None | Some(Value::Null) => {
            // Transformers ignores the key, MLX reads it: with another number, the file is ambiguous.
            if let Some(pattern) = text.size_or_null("sliding_window_pattern", MAX_LAYERS)?.filter(|&n| n != PATTERN) {
                let expected = format!("absent or {PATTERN} where layer_types is absent");
                return Err(text.error("sliding_window_pattern", expected, pattern));
            }
            let full = |l: usize| (l + 1).is_multiple_of(PATTERN) || l + 1 == count;
            return Ok((0..count).map(|l| if full(l) { Kind::Full } else { Kind::Sliding }).collect());
        }
        Some(Value::Array(names)) => names,
        Some(other) => return Err(text.error("layer_types", "an array", other)),
    };
    if names.len() != count {
        return Err(text.error("layer_types", format_args!("{count} names, like num_hidden_layers"), names.len()));
    }
    let mut kinds = Vec::with_capacity(count);
    for (l, name) in names.iter().enumerate() {
        kinds.push(match name.as_str() {
            Some("sliding_attention") => Kind::Sliding,
            Some("full_attention") => Kind::Full,
            _ => {
                let key = format!("layer_types[{l}]");
                return Err(text.error(&key, "\"sliding_attention\" or \"full_attention\"", name));
            }
        });
    }
    // Transformers always makes the last layer full, MLX does not: such a file is ambiguous.
    if kinds.last() == Some(&Kind::Sliding) {
        let key = format!("layer_types[{}]", count - 1);
        return Err(text.error(&key, "\"full_attention\" in the last layer", "\"sliding_attention\""));
    }
    Ok(kinds)
}

/// (head_dim, kv_heads) of every layer, from `per_layer_config` if present, or else from the `global_` keys.
fn head_shapes(text: &Fields, kinds: &[Kind]) -> Result<Vec<(usize, usize)>> {
    let head_dim = text.size("head_dim", Some(256), MAX_WIDTH)?;
    let kv_heads = text.size("num_key_value_heads", None, MAX_HEADS)?;
    let mut shapes = vec![(head_dim, kv_heads); kinds.len()];
    if let Some(overrides) = text.object("per_layer_config")? {
        let mut seen = vec![false; kinds.len()];
        for key in overrides.keys() {
            // Indices are strings, possibly with leading zeros.
            let layer = key.parse::<usize>().ok().filter(|&l| l < kinds.len() && !seen[l]);
            let Some(layer) = layer else {
                let expected = format!("an index below {}, at most once per layer", kinds.len());
                return Err(overrides.error(key, expected, format_args!("{key:?}")));
            };
            seen[layer] = true;
            let fields = overrides.object(key)?.ok_or_else(|| overrides.missing(key, "an object"))?;
            if let Some(other) = fields.keys().find(|k| !matches!(*k, "head_dim" | "num_key_value_heads")) {
                return Err(fields.error(
                    other,
                    "absent: only head_dim and num_key_value_heads can vary by layer",
                    "present",
                ));
            }
            shapes[layer] = (
                fields.size("head_dim", Some(head_dim), MAX_WIDTH)?,
                fields.size("num_key_value_heads", Some(kv_heads), MAX_HEADS)?,
            );
        }
    } else {
        let global_dim = text.size("global_head_dim", Some(512), MAX_WIDTH)?;
        let global_heads = match text.bool_or_null("attention_k_eq_v")? {
            Some(true) => text.size_or_null("num_global_key_value_heads", MAX_HEADS)?.unwrap_or(kv_heads),
            // Without K = V, the key has no effect.
            _ => kv_heads,
        };
        for (shape, _) in shapes.iter_mut().zip(kinds).filter(|(_, kind)| **kind == Kind::Full) {
            *shape = (global_dim, global_heads);
        }
    }
    for (l, &(dim, _)) in shapes.iter().enumerate() {
        if !kvant::ops::attend::HEAD_DIMS.contains(&dim) {
            return Err(text.error("head_dim", format_args!("64, 128, 256 or 512 (layer {l})"), dim));
        }
    }
    Ok(shapes)
}

/// True by default. Transformers reads the outer of two keys, MLX the inner one: they must agree.
fn tie_word_embeddings(text: &Fields, outer: &Fields) -> Result<bool> {
    const KEY: &str = "tie_word_embeddings";
    match (text.bool_or_null(KEY)?, outer.bool_or_null(KEY)?) {
        (Some(inner), Some(tie)) if inner != tie => {
            Err(outer.error(KEY, format_args!("the same as in text_config, {inner}"), tie))
        }
        (inner, tie) => Ok(inner.or(tie).unwrap_or(true)),
    }
}

fn rope(text: &Fields, kind: Kind, head_dim: usize) -> Result<RopeConfig> {
    let half = head_dim / 2;
    let quarter = head_dim / 8;
    let Some(all) = text.object("rope_parameters")? else {
        return Ok(match kind {
            Kind::Sliding => RopeConfig { theta: 1e4, rotated_pairs: half, factor: 1.0 },
            Kind::Full => RopeConfig { theta: 1e6, rotated_pairs: quarter, factor: 1.0 },
        });
    };
    let fields = all.object(kind.name())?.ok_or_else(|| all.missing(kind.name(), "an object"))?;
    let theta = fields.float("rope_theta", None, "a number from 1 to 1e12", |t| (1.0..=1e12).contains(&t))?;
    let rope_type = fields.string("rope_type")?.unwrap_or("default");
    // The key's old name, which MLX reads first.
    if let Some(old) = fields.string("type")?.filter(|old| *old != rope_type) {
        return Err(fields.error(
            "type",
            format_args!("absent or the same as rope_type, {rope_type:?}"),
            format_args!("{old:?}"),
        ));
    }
    match rope_type {
        "default" => {
            // Transformers rotates all pairs regardless, MLX only this share: such a file is ambiguous.
            let whole = "absent or 1 where rope_type is \"default\"";
            fields.float("partial_rotary_factor", Some(1.0), whole, |part| part == 1.0)?;
            Ok(RopeConfig { theta, rotated_pairs: half, factor: 1.0 })
        }
        "proportional" => {
            let part = "above 0, at most 1";
            let partial = fields.float("partial_rotary_factor", Some(1.0), part, |p| p > 0.0 && p <= 1.0)?;
            let factor =
                fields.float("factor", Some(1.0), "a number from 1e-3 to 1e6", |f| (1e-3..=1e6).contains(&f))?;
            let rotated_pairs = (partial * head_dim as f64 / 2.0).floor() as usize;
            Ok(RopeConfig { theta, rotated_pairs: rotated_pairs.min(half), factor: factor as f32 })
        }
        other => Err(fields.error("rope_type", "\"default\" or \"proportional\"", format_args!("{other:?}"))),
    }
}

fn per_layer_input(text: &Fields) -> Result<Option<PerLayerInput>> {
    // Absent means 256; null and 0 mean none.
    let size = match text.get("hidden_size_per_layer_input") {
        Some(Value::Null) => 0,
        _ => text.count("hidden_size_per_layer_input", Some(256), MAX_WIDTH)?,
    };
    if size == 0 {
        return Ok(None);
    }
    let vocab_size = text.size("vocab_size_per_layer_input", Some(262_144), MAX_VOCAB)?;
    Ok(Some(PerLayerInput { size, vocab_size }))
}

fn moe(text: &Fields) -> Result<Option<Moe>> {
    if text.bool_or_null("enable_moe_block")? != Some(true) {
        return Ok(None);
    }
    let experts = text.size("num_experts", None, MAX_EXPERTS)?;
    Ok(Some(Moe {
        experts,
        top_k: text.size("top_k_experts", None, experts)?,
        intermediate_size: text.size("moe_intermediate_size", None, MAX_WIDTH)?,
    }))
}

/// Removes the prefixes that checkpoints add to a text model's tensor names.
pub(crate) fn canonical(name: &str) -> &str {
    ["model.language_model.", "language_model.model.", "language_model.", "model."]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(name)
}

/// The overrides by canonical module name.
type Overrides = HashMap<String, Option<Scheme>>;
