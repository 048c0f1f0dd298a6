//! Converts a GGUF file's metadata to a model configuration.
//!
//! The metadata are first converted to the family's `config.json`, which the family checks and describes. The
//! description is then completed with facts that `config.json` cannot express: rows of Q and K permuted for adjacent
//! pairs, frequency factors as a tensor, norm weights that already include 1, and head counts and widths per layer.

use kvant::{Device, ops::PairLayout};
use serde_json::{Map, Value, json};

use super::{
    Gguf, Metadata,
    metadata::{MetadataValue, Scalar, error},
};
use crate::{
    Config, Error, Result,
    config::once_each,
    families,
    spec::{
        AttentionSpec, BlockSpec, DecoderSpec, FeedForwardSpec, KeysValues, MixerSpec, ParallelSum, QkNorm, ScoreBias,
    },
};

mod hybrids;

use hybrids::{lfm2, lfm2_moe, qwen3_5, qwen3_next};

const ASSISTANT: &str = "gemma4-assistant";
const PREDICTING: &str = "nextn_predict_layers";
const ARCHITECTURE: &str = "general.architecture";
/// Minimum divisor of a frequency at which the pair counts as not rotating.
const STILL: f32 = 1e20;
/// Values of `expert_gating_func`.
const SOFTMAX: u64 = 1;
const SIGMOID: u64 = 2;
/// Maximum layers, above any family's limit.
const MAX_LAYERS: u64 = 1024;
/// Maximum of every width, so that products of two do not overflow.
const MAX_SIZE: u64 = 1 << 18;

/// An architecture and its special properties.
struct Architecture {
    name: &'static str,
    write: fn(&Keys) -> Result<Value>,
    /// Whether the rows of Q and K are permuted so that adjacent coordinates form a pair.
    adjacent_pairs: bool,
    /// Whether the tensors of the first block determine the biases. Otherwise the description does.
    optional_biases: bool,
    /// Whether heads may be partially rotated: `rope.dimension_count`.
    partial_rotation: bool,
}

impl Architecture {
    const fn new(name: &'static str, write: fn(&Keys) -> Result<Value>) -> Architecture {
        Architecture { name, write, adjacent_pairs: false, optional_biases: false, partial_rotation: false }
    }

    const fn adjacent_pairs(self) -> Architecture {
        Architecture { adjacent_pairs: true, ..self }
    }

    const fn optional_biases(self) -> Architecture {
        Architecture { optional_biases: true, ..self }
    }

    const fn partial_rotation(self) -> Architecture {
        Architecture { partial_rotation: true, ..self }
    }
}

static ARCHITECTURES: [Architecture; 27] = [
    Architecture::new("llama", llama).adjacent_pairs().optional_biases(),
    Architecture::new("mistral3", mistral3).adjacent_pairs().optional_biases(),
    Architecture::new("qwen2", qwen2),
    Architecture::new("qwen2moe", qwen2_moe),
    Architecture::new("qwen3", qwen3).optional_biases(),
    Architecture::new("qwen3moe", qwen3_moe).optional_biases(),
    Architecture::new("gemma3", gemma3).optional_biases(),
    Architecture::new("gemma4", gemma4),
    Architecture::new("gpt-oss", gpt_oss),
    Architecture::new("smollm3", smollm3).adjacent_pairs().optional_biases(),
    Architecture::new("seed_oss", seed_oss).optional_biases(),
    Architecture::new("granite", granite).adjacent_pairs().optional_biases(),
    Architecture::new("olmo2", olmo2),
    Architecture::new("exaone4", exaone4),
    Architecture::new("phi3", phi3).partial_rotation(),
    Architecture::new("ernie4_5", ernie4_5).optional_biases(),
    Architecture::new("hunyuan-dense", hunyuan).optional_biases(),
    Architecture::new("glm4moe", glm4_moe).optional_biases().partial_rotation(),
    Architecture::new("ernie4_5-moe", ernie4_5_moe),
    Architecture::new("hunyuan-moe", hunyuan_moe).optional_biases(),
    Architecture::new("minimax-m2", minimax_m2).partial_rotation(),
    Architecture::new("muse-glimmer", muse_glimmer).adjacent_pairs(),
    Architecture::new("qwen3next", qwen3_next).partial_rotation(),
    Architecture::new("qwen35", qwen3_5).partial_rotation(),
    Architecture::new("qwen35moe", qwen3_5).partial_rotation(),
    Architecture::new("lfm2", lfm2),
    Architecture::new("lfm2moe", lfm2_moe),
];

/// Keys of `config.json`, and the corresponding metadata keys after the architecture's name.
const KEYS: [(&str, &str); 37] = [
    ("hidden_size", "embedding_length"),
    ("num_hidden_layers", "block_count"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("intermediate_size", "feed_forward_length"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("max_position_embeddings", "context_length"),
    ("rope_theta", "rope.freq_base"),
    ("head_dim", "attention.key_length"),
    ("sliding_window", "attention.sliding_window"),
    ("num_kv_shared_layers", "attention.shared_kv_layers"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("output_multiplier", "logit_scale"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
    ("rope_scaling.factor", "rope.scaling.factor"),
    ("rope_scaling.original_max_position_embeddings", "rope.scaling.original_context_length"),
    ("rope_scaling.beta_fast", "rope.scaling.yarn_beta_fast"),
    ("rope_scaling.beta_slow", "rope.scaling.yarn_beta_slow"),
    ("rope_scaling.attention_factor", "rope.scaling.yarn_attn_factor"),
    ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_k", "expert_used_count"),
    ("num_experts", "expert_count"),
    ("n_routed_experts", "expert_count"),
    ("moe_num_experts", "expert_count"),
    ("n_group", "expert_group_count"),
    ("topk_group", "expert_group_used_count"),
    ("routed_scaling_factor", "expert_weights_scale"),
    ("partial_rotary_factor", "rope.dimension_count"),
    ("norm_eps", "attention.layer_norm_rms_epsilon"),
    ("full_attention_interval", "full_attention_interval"),
    ("linear_num_key_heads", "ssm.group_count"),
    ("linear_num_value_heads", "ssm.time_step_rank"),
    ("linear_key_head_dim", "ssm.state_size"),
    ("linear_value_head_dim", "ssm.inner_size"),
    ("linear_conv_kernel_dim", "ssm.conv_kernel"),
    ("conv_L_cache", "shortconv.l_cache"),
];

/// The configuration of a model.
pub(crate) fn config(gguf: &Gguf) -> Result<Config> {
    let metadata = gguf.metadata();
    let name = metadata.text(ARCHITECTURE)?.ok_or_else(|| error(ARCHITECTURE, "a string", "nothing"))?;
    let Some(architecture) = ARCHITECTURES.iter().find(|known| known.name == name) else {
        let known: Vec<_> = ARCHITECTURES.iter().map(|known| known.name).collect();
        let shown: String = name.chars().take(80).collect();
        return Err(Error::Unsupported {
            what: format!("{ARCHITECTURE} {shown:?}"),
            reason: format!("the supported ones are {}", known.join(", ")),
        });
    };
    let keys = Keys { gguf, metadata, architecture: architecture.name };
    keys.check_lengths()?;
    if !architecture.partial_rotation {
        keys.refuse_partial_rotation()?;
    }
    let json = (architecture.write)(&keys)?;
    let mut config = families::parse(&json).map_err(|error| keys.rename(error))?;
    keys.adjust(&mut config.decoder, architecture)?;
    keys.refuse_other_biases(&config.decoder)?;
    config.decoder.check()?;
    let id = |name: &str| {
        let id = metadata.whole(&format!("tokenizer.ggml.{name}_token_id"))?;
        Ok::<_, Error>(id.filter(|&id| id < config.decoder.vocab_size as u64).map(|id| id as u32))
    };
    config.bos_token_id = id("bos")?;
    let ends = ["eos", "eot", "eom"].into_iter().map(id).collect::<Result<Vec<_>>>()?;
    config.eos_token_ids = once_each(ends.into_iter().flatten().collect());
    Ok(config)
}

/// The number of blocks for multi-token prediction, which follow the model's.
pub(crate) fn predicting_blocks(gguf: &Gguf) -> Result<u64> {
    let Some(architecture) = gguf.metadata().text(ARCHITECTURE)? else { return Ok(0) };
    Ok(gguf.metadata().whole(&format!("{architecture}.{PREDICTING}"))?.unwrap_or(0))
}

/// The configuration of a Gemma 4 assistant, as a model that has keys and values of its own, and its target's hidden
/// size.
pub(crate) fn assistant(gguf: &Gguf) -> Result<(Config, usize)> {
    let keys = Keys { gguf, metadata: gguf.metadata(), architecture: ASSISTANT };
    keys.check_lengths()?;
    keys.refuse_experts()?;
    let mut json = gemma4(&keys)?;
    json["num_kv_shared_layers"] = json!(0);
    let mut config = families::parse(&json).map_err(|error| keys.rename(error))?;
    keys.adjust(&mut config.decoder, &Architecture::new(ASSISTANT, gemma4))?;
    keys.refuse_other_biases(&config.decoder)?;
    config.decoder.check()?;
    const WIDTH: &str = "embedding_length_out";
    let width = keys.required(WIDTH)?;
    let fits = (1..=MAX_SIZE).contains(&width);
    if !fits {
        return Err(error(&keys.full(WIDTH), format_args!("from 1 to {MAX_SIZE}"), width));
    }
    Ok((config, width as usize))
}

/// Llama and Mistral. With a window, it is Mistral.
fn llama(keys: &Keys) -> Result<Value> {
    let window = keys.window()?;
    let mut json = keys.common(if window.is_some() { "mistral" } else { "llama" })?;
    json.insert("sliding_window".into(), json!(window));
    keys.refuse_experts()?;
    Ok(json.into())
}

fn mistral3(keys: &Keys) -> Result<Value> {
    let mut json = keys.common("ministral3")?;
    let mut rope = keys.scaling()?.unwrap_or_default();
    rope.insert("llama_4_scaling_beta".into(), json!(keys.number("attention.temperature_scale")?.unwrap_or(0.0)));
    rope.entry("rope_type").or_insert("default".into());
    rope.entry("original_max_position_embeddings").or_insert(json["max_position_embeddings"].clone());
    json.insert("rope_scaling".into(), rope.into());
    keys.refuse_experts()?;
    Ok(json.into())
}

fn qwen2(keys: &Keys) -> Result<Value> {
    keys.refuse_experts()?;
    Ok(keys.common("qwen2")?.into())
}

fn qwen2_moe(keys: &Keys) -> Result<Value> {
    keys.check_gating(SOFTMAX)?;
    let mut json = keys.common("qwen2_moe")?;
    json.extend([
        ("qkv_bias".into(), json!(keys.has_bias("attn_q"))),
        ("num_experts".into(), json!(keys.required("expert_count")?)),
        ("num_experts_per_tok".into(), json!(keys.required("expert_used_count")?)),
        ("moe_intermediate_size".into(), json!(keys.required("expert_feed_forward_length")?)),
        ("shared_expert_intermediate_size".into(), json!(keys.required("expert_shared_feed_forward_length")?)),
        ("norm_topk_prob".into(), json!(false)),
    ]);
    Ok(json.into())
}

fn qwen3(keys: &Keys) -> Result<Value> {
    keys.refuse_experts()?;
    Ok(keys.common("qwen3")?.into())
}

fn qwen3_moe(keys: &Keys) -> Result<Value> {
    let mut json = keys.common("qwen3_moe")?;
    json.extend([
        ("num_experts".into(), json!(keys.required("expert_count")?)),
        ("num_experts_per_tok".into(), json!(keys.required("expert_used_count")?)),
        ("moe_intermediate_size".into(), json!(keys.required("expert_feed_forward_length")?)),
        ("norm_topk_prob".into(), json!(true)),
    ]);
    Ok(json.into())
}

fn gemma3(keys: &Keys) -> Result<Value> {
    /// The number of layers of the 27B, whose score scale is based on H / heads coordinates.
    const LAYERS_27B: u64 = 62;
    let mut json = keys.common("gemma3_text")?;
    // llama.cpp would also apply it to sliding layers.
    keys.refuse_number("rope.scaling.attn_factor", 1.0)?;
    let layers = keys.required("block_count")?;
    let scalar =
        if layers == LAYERS_27B { keys.required("embedding_length")? / keys.heads()?.max(1) } else { keys.head_dim()? };
    json.insert("query_pre_attn_scalar".into(), json!(scalar));
    json.insert("hidden_activation".into(), json!("gelu_pytorch_tanh"));
    json.insert("final_logit_softcapping".into(), json!(keys.softcap()?));
    json.insert("rope_local_base_freq".into(), json!(keys.number("rope.freq_base_swa")?.unwrap_or(1e4)));
    match keys.window()? {
        None => {
            json.insert("sliding_window_pattern".into(), json!(1));
        }
        Some(window) => {
            json.insert("sliding_window".into(), json!(window));
            keys.insert_layer_types(&mut json)?;
        }
    }
    Ok(json.into())
}

fn gemma4(keys: &Keys) -> Result<Value> {
    let mut json = keys.common("gemma4_text")?;
    if let Some(scaling) = json.remove("rope_scaling") {
        let key = keys.full("rope.scaling.type");
        return Err(error(&key, "absent: Gemma 4 has no scaling", &scaling["rope_type"]));
    }
    let experts = keys.whole("expert_count")?.unwrap_or(0);
    let per_layer = keys.gguf.tensor("per_layer_token_embd.weight").and_then(|table| table.shape.first().copied());
    let theta = |key: &str, default: f64| Ok::<_, Error>(keys.number(key)?.unwrap_or(default));
    let head_dim = keys.head_dim()?;
    json.extend([
        ("global_head_dim".into(), json!(head_dim)),
        ("head_dim".into(), json!(keys.whole("attention.key_length_swa")?.unwrap_or(head_dim))),
        ("layer_types".into(), keys.layer_types()?),
        ("sliding_window".into(), json!(keys.required("attention.sliding_window")?)),
        ("num_kv_shared_layers".into(), json!(keys.whole("attention.shared_kv_layers")?.unwrap_or(0))),
        ("hidden_size_per_layer_input".into(), json!(keys.whole("embedding_length_per_layer_input")?.unwrap_or(0))),
        ("vocab_size_per_layer_input".into(), json!(per_layer)),
        ("final_logit_softcapping".into(), json!(keys.softcap()?)),
        (
            "rope_parameters".into(),
            json!({
                "sliding_attention": {"rope_type": "default", "rope_theta": theta("rope.freq_base_swa", 1e4)?},
                // `rope_freqs.weight` has a factor for pairs that do not rotate.
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": theta("rope.freq_base", 1e6)?,
                    "partial_rotary_factor": 1.0,
                },
            }),
        ),
    ]);
    if experts > 0 {
        json.extend([
            ("enable_moe_block".into(), json!(true)),
            ("num_experts".into(), json!(experts)),
            ("top_k_experts".into(), json!(keys.required("expert_used_count")?)),
            ("moe_intermediate_size".into(), json!(keys.required("expert_feed_forward_length")?)),
        ]);
    }
    Ok(json.into())
}

fn gpt_oss(keys: &Keys) -> Result<Value> {
    let mut json = keys.common("gpt_oss")?;
    json.extend([
        ("num_local_experts".into(), json!(keys.required("expert_count")?)),
        ("num_experts_per_tok".into(), json!(keys.required("expert_used_count")?)),
        // The width of experts; dense layers do not exist.
        ("intermediate_size".into(), json!(keys.required("expert_feed_forward_length")?)),
        ("sliding_window".into(), json!(keys.required("attention.sliding_window")?)),
    ]);
    if let Some(MetadataValue::Scalars(_)) = keys.get("attention.sliding_window_pattern") {
        json.insert("layer_types".into(), keys.layer_types()?);
    }
    // Files do not record that the ends of the ramp are not rounded. They do not record an absent scaling, either.
    let rope = json.entry("rope_scaling").or_insert(json!({"rope_type": "default"}));
    rope["truncate"] = json!(false);
    Ok(json.into())
}

/// Files do not record which layers have no rotary embedding: it is every fourth one.
fn smollm3(keys: &Keys) -> Result<Value> {
    keys.common("smollm3").map(Value::from)
}

fn seed_oss(keys: &Keys) -> Result<Value> {
    keys.common("seed_oss").map(Value::from)
}

fn granite(keys: &Keys) -> Result<Value> {
    keys.refuse_experts()?;
    let mut json = keys.common("granite")?;
    let names = [
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("attention_multiplier", "attention.scale"),
        ("logits_scaling", "logit_scale"),
    ];
    for (config, name) in names {
        // 0 means none.
        json.insert(config.into(), json!(keys.number(name)?.filter(|&scale| scale != 0.0)));
    }
    if json["attention_multiplier"].is_null() {
        json.insert("attention_multiplier".into(), json!((keys.head_dim()? as f64).powf(-0.5)));
    }
    Ok(json.into())
}

/// OLMo 2 and 3. With a window, it is OLMo 3.
fn olmo2(keys: &Keys) -> Result<Value> {
    let Some(window) = keys.window()? else { return keys.common("olmo2").map(Value::from) };
    let mut json = keys.common("olmo3")?;
    let theta = json.remove("rope_theta").unwrap_or_default();
    let mut full = json.remove("rope_scaling").unwrap_or(json!({"rope_type": "default"}));
    full["rope_theta"] = theta.clone();
    json.insert(
        "rope_parameters".into(),
        json!({"sliding_attention": {"rope_type": "default", "rope_theta": theta}, "full_attention": full}),
    );
    json.insert("sliding_window".into(), json!(window));
    keys.insert_layer_types(&mut json)?;
    Ok(json.into())
}

fn exaone4(keys: &Keys) -> Result<Value> {
    let mut json = keys.common("exaone4")?;
    json.insert("sliding_window".into(), json!(keys.window()?));
    keys.insert_layer_types(&mut json)?;
    Ok(json.into())
}

fn phi3(keys: &Keys) -> Result<Value> {
    keys.refuse_experts()?;
    let mut json = keys.common("phi3")?;
    json.insert("sliding_window".into(), json!(keys.window()?));
    json.insert("partial_rotary_factor".into(), json!(keys.rotated_share()?));
    if keys.gguf.tensor("rope_factors_short.weight").is_some() {
        let original = keys.required("rope.scaling.original_context_length")?;
        json.insert("original_max_position_embeddings".into(), json!(original));
        json.insert(
            "rope_scaling".into(),
            json!({
                "rope_type": "longrope",
                "short_factor": keys.factors("rope_factors_short.weight")?,
                "long_factor": keys.factors("rope_factors_long.weight")?,
                "attention_factor": keys.number("rope.scaling.attn_factor")?,
            }),
        );
    }
    Ok(json.into())
}

fn ernie4_5(keys: &Keys) -> Result<Value> {
    keys.refuse_experts()?;
    keys.common("ernie4_5").map(Value::from)
}

/// The base in the file is already raised.
fn hunyuan(keys: &Keys) -> Result<Value> {
    keys.common("hunyuan_v1_dense").map(Value::from)
}

/// The last layers are for multi-token prediction, and are not read.
fn glm4_moe(keys: &Keys) -> Result<Value> {
    keys.check_gating(SIGMOID)?;
    let mut json = keys.common("glm4_moe")?;
    let predicting = keys.whole("nextn_predict_layers")?.unwrap_or(0);
    let layers = keys.required("block_count")?.saturating_sub(predicting);
    json.extend([
        ("num_hidden_layers".into(), json!(layers)),
        ("partial_rotary_factor".into(), json!(keys.rotated_share()?)),
        ("use_qk_norm".into(), json!(keys.gguf.tensor("blk.0.attn_q_norm.weight").is_some())),
        ("first_k_dense_replace".into(), json!(keys.whole("leading_dense_block_count")?.unwrap_or(0))),
        ("n_routed_experts".into(), json!(keys.required("expert_count")?)),
        ("num_experts_per_tok".into(), json!(keys.required("expert_used_count")?)),
        ("moe_intermediate_size".into(), json!(keys.required("expert_feed_forward_length")?)),
        ("n_shared_experts".into(), json!(keys.shared_experts()?)),
        ("n_group".into(), json!(keys.whole("expert_group_count")?.filter(|&count| count > 0))),
        ("topk_group".into(), json!(keys.whole("expert_group_used_count")?.filter(|&count| count > 0))),
        ("norm_topk_prob".into(), json!(keys.flag("expert_weights_norm")?)),
        // 0 means none.
        ("routed_scaling_factor".into(), json!(keys.number("expert_weights_scale")?.filter(|&scale| scale != 0.0))),
    ]);
    Ok(json.into())
}

fn ernie4_5_moe(keys: &Keys) -> Result<Value> {
    keys.check_gating(SOFTMAX)?;
    let mut json = keys.common("ernie4_5_moe")?;
    json.extend([
        ("moe_num_experts".into(), json!(keys.required("expert_count")?)),
        ("moe_k".into(), json!(keys.required("expert_used_count")?)),
        ("moe_intermediate_size".into(), json!(keys.required("expert_feed_forward_length")?)),
        ("moe_num_shared_experts".into(), json!(keys.shared_experts()?)),
        ("moe_layer_start_index".into(), json!(keys.whole("leading_dense_block_count")?.unwrap_or(0))),
        ("moe_layer_interval".into(), json!(keys.whole("interleave_moe_layer_step")?.unwrap_or(1))),
    ]);
    Ok(json.into())
}

/// The base in the file is already raised.
fn hunyuan_moe(keys: &Keys) -> Result<Value> {
    keys.check_gating(SOFTMAX)?;
    let mut json = keys.common("hunyuan_v1_moe")?;
    let shared = keys.shared_experts()?;
    if shared != 1 {
        return Err(error(&keys.full("expert_shared_count"), "1, as wide as the others", shared));
    }
    json.extend([
        ("num_experts".into(), json!(keys.required("expert_count")?)),
        ("moe_topk".into(), json!(keys.required("expert_used_count")?)),
        ("intermediate_size".into(), json!(keys.required("expert_feed_forward_length")?)),
    ]);
    Ok(json.into())
}

fn minimax_m2(keys: &Keys) -> Result<Value> {
    keys.check_gating(SIGMOID)?;
    let mut json = keys.common("minimax_m2")?;
    json.extend([
        ("partial_rotary_factor".into(), json!(keys.rotated_share()?)),
        ("num_local_experts".into(), json!(keys.required("expert_count")?)),
        ("num_experts_per_tok".into(), json!(keys.required("expert_used_count")?)),
        ("intermediate_size".into(), json!(keys.required("expert_feed_forward_length")?)),
    ]);
    Ok(json.into())
}

/// The norm weight of queries contains their factor. The layers with a window have a rotary embedding.
fn muse_glimmer(keys: &Keys) -> Result<Value> {
    let mut json = keys.common("muse_glimmer_text")?;
    let scale = keys.required_number("logit_scale")?;
    let kinds = keys.layer_types()?;
    let theta = keys.number("rope.freq_base_swa")?.map_or_else(|| json["rope_theta"].clone(), Value::from);
    let of_kind = |kind: &Value| if kind == "full_attention" { json!(0) } else { theta.clone() };
    let thetas: Vec<Value> = kinds.as_array().into_iter().flatten().map(of_kind).collect();
    json.extend([
        ("layer_rope_theta".into(), thetas.into()),
        ("layer_types".into(), kinds),
        ("rope_theta".into(), theta),
        ("sliding_window".into(), json!(keys.required("attention.sliding_window")?)),
        ("output_multiplier".into(), json!(scale)),
        ("final_logit_softcapping".into(), json!(keys.softcap()?)),
        ("qk_scale_factor".into(), json!(1.0)),
        // As in llama.cpp.
        ("post_norm_eps".into(), json!(1e-8)),
    ]);
    Ok(json.into())
}

/// The metadata of an architecture.
struct Keys<'a> {
    gguf: &'a Gguf,
    metadata: &'a Metadata,
    architecture: &'static str,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn get(&self, key: &str) -> Option<&MetadataValue> {
        self.metadata.get(&self.full(key))
    }

    /// A number, or the first element of an array that is not 0.
    fn whole(&self, key: &str) -> Result<Option<u64>> {
        match self.get(key) {
            // 0 in an array belongs to a layer without this property.
            Some(MetadataValue::Scalars(_)) => {
                let all = self.of_layers(key)?.unwrap_or_default();
                Ok(all.iter().find(|&&n| n > 0).or(all.first()).copied())
            }
            _ => self.metadata.whole(&self.full(key)),
        }
    }

    fn required(&self, key: &str) -> Result<u64> {
        self.whole(key)?.ok_or_else(|| error(&self.full(key), "an integer", "nothing"))
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.metadata.number(&self.full(key))
    }

    /// Checks sizes before other sizes are derived from them, so that errors name the key in the file.
    fn check_lengths(&self) -> Result<()> {
        const SIZES: [&str; 7] = [
            "embedding_length",
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
            "attention.key_length_swa",
            "attention.value_length_swa",
        ];
        let size = |key: &str, max: u64| match self.whole(key)? {
            Some(size) if !(1..=max).contains(&size) => {
                Err(error(&self.full(key), format_args!("from 1 to {max}"), size))
            }
            _ => Ok(()),
        };
        size("block_count", MAX_LAYERS)?;
        SIZES.iter().try_for_each(|key| size(key, MAX_SIZE))
    }

    fn required_number(&self, key: &str) -> Result<f64> {
        self.number(key)?.ok_or_else(|| error(&self.full(key), "a number", "nothing"))
    }

    fn heads(&self) -> Result<u64> {
        self.required("attention.head_count")
    }

    fn head_dim(&self) -> Result<u64> {
        match self.whole("attention.key_length")? {
            Some(width) => Ok(width),
            None => Ok(self.required("embedding_length")? / self.heads()?.max(1)),
        }
    }

    /// The fraction of a head's coordinates that rotate.
    fn rotated_share(&self) -> Result<f64> {
        let head_dim = self.head_dim()?;
        let rotated = self.whole("rope.dimension_count")?.unwrap_or(head_dim);
        Ok(rotated as f64 / head_dim.max(1) as f64)
    }

    fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(MetadataValue::Scalar(Scalar::Bool(is_set))) => Ok(*is_set),
            Some(_) => Err(error(&self.full(key), "true or false", "another value")),
        }
    }

    /// The number of shared experts, which have the width of the others.
    fn shared_experts(&self) -> Result<u64> {
        const WIDTH: &str = "expert_shared_feed_forward_length";
        let width = self.required("expert_feed_forward_length")?.max(1);
        match self.whole(WIDTH)? {
            None => Ok(self.whole("expert_shared_count")?.unwrap_or(0)),
            Some(shared) if shared.is_multiple_of(width) => Ok(shared / width),
            Some(other) => Err(error(&self.full(WIDTH), format_args!("a multiple of the experts' {width}"), other)),
        }
    }

    /// Checks that the function from logits to scores is the architecture's.
    fn check_gating(&self, expected: u64) -> Result<()> {
        const KEY: &str = "expert_gating_func";
        match self.whole(KEY)?.filter(|&function| function != expected) {
            Some(other) => Err(error(&self.full(KEY), format_args!("absent or {expected}"), other)),
            None => Ok(()),
        }
    }

    /// 0 means none.
    fn softcap(&self) -> Result<Option<f64>> {
        Ok(self.number("final_logit_softcapping")?.filter(|&cap| cap != 0.0))
    }

    /// One number per layer, if the value is an array.
    fn of_layers(&self, key: &str) -> Result<Option<Vec<u64>>> {
        let Some(MetadataValue::Scalars(array)) = self.get(key) else { return Ok(None) };
        let layers = self.required("block_count")?;
        let wrong = |got: &dyn std::fmt::Display| error(&self.full(key), format!("{layers} integers"), got);
        if layers > MAX_LAYERS || array.len() as u64 != layers {
            return Err(wrong(&format_args!("an array of {array:?}")));
        }
        let whole = |scalar| match scalar {
            Scalar::Integer(n) => u64::try_from(n).map_err(|_| wrong(&n)),
            other => Err(wrong(&other)),
        };
        array.iter().map(whole).collect::<Result<_>>().map(Some)
    }

    /// 0 means none.
    fn window(&self) -> Result<Option<u64>> {
        Ok(self.whole("attention.sliding_window")?.filter(|&window| window > 0))
    }

    /// Inserts `layer_types` if the file has a pattern with an entry per layer, or the interval of full layers.
    fn insert_layer_types(&self, json: &mut Map<String, Value>) -> Result<()> {
        const KEY: &str = "attention.sliding_window_pattern";
        match self.get(KEY) {
            None => None,
            Some(MetadataValue::Scalar(_)) => json.insert("sliding_window_pattern".into(), json!(self.required(KEY)?)),
            Some(_) => json.insert("layer_types".into(), self.layer_types()?),
        };
        Ok(())
    }

    /// Marked layers of the pattern are sliding.
    fn layer_types(&self) -> Result<Value> {
        self.flags("attention.sliding_window_pattern", ["full_attention", "sliding_attention"]).map(Value::from)
    }

    /// The names of an array of booleans: the second name for true.
    fn flags(&self, key: &str, [unset, set]: [&'static str; 2]) -> Result<Vec<&'static str>> {
        let key = self.full(key);
        let array = self.metadata.scalars(&key)?.ok_or_else(|| error(&key, "an array of booleans", "nothing"))?;
        let name = |scalar| match scalar {
            Scalar::Bool(true) | Scalar::Integer(1) => Ok(set),
            Scalar::Bool(false) | Scalar::Integer(0) => Ok(unset),
            other => Err(error(&key, "an array of booleans", other)),
        };
        if array.len() as u64 > MAX_LAYERS {
            return Err(error(&key, format_args!("at most {MAX_LAYERS} booleans"), array.len()));
        }
        array.iter().map(name).collect()
    }

    /// Rejects biases that the description does not have, which would be ignored otherwise.
    fn refuse_other_biases(&self, decoder: &DecoderSpec) -> Result<()> {
        let unknown = |name: &&str| {
            let Some((block, module)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
                return false;
            };
            let block = block.parse().ok().and_then(|l: usize| decoder.blocks.get(l));
            module.strip_suffix(".bias").is_some_and(|module| !block.is_some_and(|block| has_bias(block, module)))
        };
        let Some(name) = self.gguf.tensors().map(|(name, _)| name).filter(unknown).min() else { return Ok(()) };
        let shown: String = name.chars().take(80).collect();
        Err(Error::Unsupported {
            what: format!("tensor `{shown}`"),
            reason: format!("{} has no such bias", self.architecture),
        })
    }

    /// Rejects partially rotated heads, which cannot be expressed.
    fn refuse_partial_rotation(&self) -> Result<()> {
        // Gemma 4 has this key per layer kind, and factors for pairs that do not rotate.
        let rotated = self.whole("rope.dimension_count")?.filter(|_| !self.is_gemma4());
        match rotated {
            Some(rotated) if rotated != self.head_dim()? => Err(error(
                &self.full("rope.dimension_count"),
                format_args!("{}, all of a head", self.head_dim()?),
                rotated,
            )),
            _ => Ok(()),
        }
    }

    fn refuse_experts(&self) -> Result<()> {
        match self.whole("expert_count")? {
            None | Some(0) => Ok(()),
            Some(experts) => Err(error(&self.full("expert_count"), "absent or 0", experts)),
        }
    }

    /// The keys shared by most families.
    fn common(&self, model_type: &str) -> Result<Map<String, Value>> {
        let heads = self.heads()?;
        let embedding = "token_embd.weight";
        let embedding = self.gguf.tensor(embedding).ok_or_else(|| Error::MissingTensor { name: embedding.into() })?;
        let value_length = self.whole("attention.value_length")?;
        if let Some(other) = value_length.filter(|&length| Ok(length) != self.head_dim().map_err(drop)) {
            return Err(error(&self.full("attention.value_length"), "the same as attention.key_length", other));
        }
        let mut json = Map::from_iter([
            ("model_type".into(), json!(model_type)),
            ("hidden_size".into(), json!(self.required("embedding_length")?)),
            ("num_hidden_layers".into(), json!(self.required("block_count")?)),
            ("num_attention_heads".into(), json!(heads)),
            ("num_key_value_heads".into(), json!(self.whole("attention.head_count_kv")?.unwrap_or(heads))),
            ("head_dim".into(), json!(self.head_dim()?)),
            ("rms_norm_eps".into(), json!(self.required_number("attention.layer_norm_rms_epsilon")?)),
            ("max_position_embeddings".into(), json!(self.required("context_length")?)),
            ("rope_theta".into(), json!(self.number("rope.freq_base")?.unwrap_or(1e4))),
            ("vocab_size".into(), json!(embedding.shape.first())),
            ("tie_word_embeddings".into(), json!(self.gguf.tensor("output.weight").is_none())),
        ]);
        // Qwen's files with experts have no dense layers, and may lack their width.
        let width = self.whole("feed_forward_length")?.filter(|&width| width > 0);
        json.insert("intermediate_size".into(), json!(width.unwrap_or(1)));
        if let Some(scaling) = self.scaling()? {
            json.insert("rope_scaling".into(), scaling.into());
        }
        Ok(json)
    }

    /// `rope_scaling`, if the file has a scaling other than the factors in `rope_freqs.weight`. Keys and defaults are
    /// llama.cpp's.
    fn scaling(&self) -> Result<Option<Map<String, Value>>> {
        let key = self.full("rope.scaling.type");
        let kind = match self.metadata.text(&key)? {
            // The factor tensors contain the scaling.
            _ if self.is("phi3") && self.gguf.tensor("rope_factors_short.weight").is_some() => return Ok(None),
            None => "linear",
            Some(kind @ ("none" | "linear" | "yarn")) => kind,
            Some(other) => {
                let shown: String = other.chars().take(80).collect();
                return Err(error(&key, "\"none\", \"linear\" or \"yarn\"", format_args!("{shown:?}")));
            }
        };
        let number = |name: &str| self.number(&format!("rope.scaling.{name}"));
        if kind != "yarn" {
            self.refuse_number("rope.scaling.attn_factor", 1.0)?;
        }
        // Old files use another name for the factor. 0 means none.
        let factor = match number("factor")? {
            None => self.number("rope.scale_linear")?,
            factor => factor,
        };
        let factor = factor.filter(|&factor| factor != 0.0).unwrap_or(1.0);
        match kind {
            "yarn" => Ok(Some(self.yarn(factor)?)),
            "linear" if factor != 1.0 => {
                Ok(Some(Map::from_iter([("rope_type".into(), json!("linear")), ("factor".into(), json!(factor))])))
            }
            _ => Ok(None),
        }
    }

    fn yarn(&self, factor: f64) -> Result<Map<String, Value>> {
        let number = |name: &str| self.number(&format!("rope.scaling.{name}"));
        self.refuse_number("rope.scaling.yarn_ext_factor", 1.0)?;
        let mscale = |weight: f64| if factor > 1.0 { 0.1 * weight * factor.ln() + 1.0 } else { 1.0 };
        let weight = number("yarn_log_multiplier")?.unwrap_or(0.0);
        let usual = if weight == 0.0 { mscale(1.0) } else { mscale(1.0) / mscale(weight) };
        // The converter writes the factor of cosines and sines to one key; another key multiplies it.
        let attention = number("yarn_attn_factor")?.unwrap_or(usual) * number("attn_factor")?.unwrap_or(1.0);
        Ok(Map::from_iter([
            ("rope_type".into(), json!("yarn")),
            ("factor".into(), json!(factor)),
            ("original_max_position_embeddings".into(), json!(self.whole("rope.scaling.original_context_length")?)),
            ("beta_fast".into(), json!(number("yarn_beta_fast")?)),
            ("beta_slow".into(), json!(number("yarn_beta_slow")?)),
            ("attention_factor".into(), json!(attention)),
        ]))
    }

    /// Rejects a factor that the description cannot express unless it has no effect.
    fn refuse_number(&self, key: &str, neutral: f64) -> Result<()> {
        match self.number(key)?.filter(|&number| number != neutral) {
            None => Ok(()),
            Some(number) => Err(error(&self.full(key), format_args!("absent or {neutral}"), number)),
        }
    }

    /// Applies facts that `config.json` cannot express.
    fn adjust(&self, decoder: &mut DecoderSpec, architecture: &Architecture) -> Result<()> {
        // The 1 of 1 + w is included in the weights.
        (decoder.norm_offset, decoder.final_norm_offset) = (0.0, 0.0);
        let heads = self.of_layers("attention.head_count")?;
        let kv_heads = self.of_layers("attention.head_count_kv")?;
        let widths = self.of_layers("feed_forward_length")?;
        let factors = self.frequency_factors()?;
        for (l, block) in decoder.blocks.iter_mut().enumerate() {
            let set = |number: &mut usize, all: &Option<Vec<u64>>| {
                if let Some(all) = all {
                    *number = usize::try_from(all[l]).unwrap_or(usize::MAX);
                }
            };
            // Shared experts have their own width.
            if let FeedForwardSpec::Dense(dense) | FeedForwardSpec::Parallel(dense, _, ParallelSum::Normed) =
                &mut block.feed_forward
            {
                set(&mut dense.width, &widths);
                if architecture.optional_biases {
                    dense.biases = self.has_bias("ffn_gate");
                }
            }
            if let Some(net) = block.delta_net_mut() {
                // The converter reorders value heads, except those of Qwen3-Next.
                net.tiled = !self.is("qwen3next");
            }
            let Some(attention) = block.attention_mut() else { continue };
            if architecture.optional_biases {
                attention.qkv_bias = self.has_bias("attn_q") || self.has_bias("attn_qkv");
                attention.output_bias = self.has_bias("attn_output");
            }
            if architecture.adjacent_pairs {
                attention.rope.layout = PairLayout::Interleaved;
            }
            set(&mut attention.heads, &heads);
            set(&mut attention.kv_heads, &kv_heads);
            // Files have weights for these norms: the factor of queries, and ones.
            if attention.qk_norm == Some(QkNorm::Unweighted) {
                attention.qk_norm = Some(QkNorm::Heads);
            }
            // Without a value projection, values are the keys.
            let value = format!("blk.{l}.attn_v.weight");
            if attention.keys_values == KeysValues::Own && self.gguf.tensor(&value).is_none() && self.is("gemma4") {
                attention.keys_values = KeysValues::KeysAreValues;
            }
            // Gemma's sliding layers rotate all pairs.
            let is_rotated = attention.rope.rotated_pairs > 0 && !(self.is_gemma4() && attention.window.is_some());
            if let Some(factors) = factors.as_ref().filter(|_| is_rotated) {
                rotate(attention, factors)?;
            }
        }
        for block in &decoder.blocks {
            if let Some(attention) = block.attention() {
                self.check_sizes(attention.heads, "attention.head_count")?;
                self.check_sizes(attention.kv_heads, "attention.head_count_kv")?;
            }
            if let Some(dense) = block.feed_forward.dense() {
                self.check_sizes(dense.width, "feed_forward_length")?;
            }
        }
        Ok(())
    }

    fn check_sizes(&self, size: usize, key: &str) -> Result<()> {
        if (1..=MAX_SIZE).contains(&(size as u64)) {
            return Ok(());
        }
        Err(error(&self.full(key), format_args!("from 1 to {MAX_SIZE}"), size))
    }

    /// Whether the module of the first block has a bias.
    fn has_bias(&self, module: &str) -> bool {
        self.gguf.tensor(&format!("blk.0.{module}.bias")).is_some()
    }

    fn is(&self, architecture: &str) -> bool {
        self.architecture == architecture
    }

    fn is_gemma4(&self) -> bool {
        self.is("gemma4") || self.is(ASSISTANT)
    }

    /// The factors that divide the frequency of each pair.
    fn frequency_factors(&self) -> Result<Option<Vec<f32>>> {
        const NAME: &str = "rope_freqs.weight";
        self.gguf.tensor(NAME).map(|_| self.factors(NAME)).transpose()
    }

    /// A tensor of factors.
    fn factors(&self, name: &str) -> Result<Vec<f32>> {
        let tensor = self.gguf.tensor(name).ok_or_else(|| Error::MissingTensor { name: name.to_string() })?;
        if tensor.shape.len() != 1 || tensor.shape[0] > 1 << 12 {
            let (expected, got) = (vec![self.head_dim()? as usize / 2], tensor.shape.clone());
            return Err(Error::TensorShape { name: name.to_string(), expected, got });
        }
        let factors = self.gguf.read(name, &Device::cpu())?.to_f32()?;
        if let Some(wrong) = factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
            let (expected, got) = ("positive numbers", wrong.to_string());
            return Err(Error::TensorValue { name: name.to_string(), expected, got });
        }
        Ok(factors)
    }

    /// Replaces the key of `config.json` in an error by the metadata key.
    fn rename(&self, error: Error) -> Error {
        let Error::Config { key, expected, got } = error else { return error };
        let known = KEYS.iter().find(|(config, _)| *config == key).map(|(_, name)| self.full(name));
        Error::Metadata { key: known.unwrap_or(key), expected, got }
    }
}

/// Whether a block's description has a bias of the module.
fn has_bias(block: &BlockSpec, module: &str) -> bool {
    match module {
        "attn_q" | "attn_k" | "attn_v" | "attn_qkv" => block.attention().is_some_and(|attention| attention.qkv_bias),
        "attn_output" => block.attention().is_some_and(|attention| attention.output_bias),
        "ffn_gate" | "ffn_up" | "ffn_down" => block.feed_forward.dense().is_some_and(|dense| dense.biases),
        "ffn_gate_inp" | "ffn_gate_exps" | "ffn_up_exps" | "ffn_down_exps" | "ffn_gate_up_exps" => {
            block.feed_forward.moe().is_some_and(|moe| moe.biases)
        }
        "ssm_dt" => matches!(block.mixer, MixerSpec::DeltaNet(_)),
        "exp_probs_b" => block.feed_forward.moe().is_some_and(|moe| moe.routing.bias != ScoreBias::None),
        _ => false,
    }
}

/// Applies factors. Trailing pairs whose frequency becomes zero do not rotate.
fn rotate(attention: &mut AttentionSpec, factors: &[f32]) -> Result<()> {
    let pairs = attention.head_dim / 2;
    if factors.len() != pairs {
        let (expected, got) = (vec![pairs], vec![factors.len()]);
        return Err(Error::TensorShape { name: "rope_freqs.weight".to_string(), expected, got });
    }
    let rotated = pairs - factors.iter().rev().take_while(|&&factor| factor >= STILL).count();
    attention.rope.rotated_pairs = rotated;
    let factors = &factors[..rotated];
    attention.rope.factors = factors.iter().any(|&factor| factor != 1.0).then(|| factors.to_vec());
    Ok(())
}
