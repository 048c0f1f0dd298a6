//! Models with recurrent layers: Qwen3-Next, Qwen 3.5, LFM2.

use serde_json::{Map, Value, json};

use super::{Keys, MAX_LAYERS, SIGMOID, SOFTMAX, error};
use crate::Result;

/// All layers have experts.
pub(super) fn qwen3_next(keys: &Keys) -> Result<Value> {
    let mut json = keys.hybrid("qwen3_next")?;
    keys.insert_experts(&mut json)?;
    Ok(json.into())
}

/// Dense, and with experts in all layers.
pub(super) fn qwen3_5(keys: &Keys) -> Result<Value> {
    if !keys.is("qwen35moe") {
        keys.refuse_experts()?;
        return keys.hybrid("qwen3_5_text").map(Value::from);
    }
    let mut json = keys.hybrid("qwen3_5_moe_text")?;
    keys.insert_experts(&mut json)?;
    Ok(json.into())
}

pub(super) fn lfm2(keys: &Keys) -> Result<Value> {
    keys.refuse_experts()?;
    keys.short_convs("lfm2").map(Value::from)
}

pub(super) fn lfm2_moe(keys: &Keys) -> Result<Value> {
    keys.check_gating(SIGMOID)?;
    let mut json = keys.short_convs("lfm2_moe")?;
    let dense = keys.whole("leading_dense_block_count")?.unwrap_or(0);
    json.extend([
        ("num_dense_layers".into(), json!(dense)),
        ("num_experts".into(), json!(keys.required("expert_count")?)),
        ("num_experts_per_tok".into(), json!(keys.required("expert_used_count")?)),
        ("moe_intermediate_size".into(), json!(keys.required("expert_feed_forward_length")?)),
        ("use_expert_bias".into(), json!(keys.gguf.tensor(&format!("blk.{dense}.exp_probs_b.bias")).is_some())),
        ("norm_topk_prob".into(), json!(true)),
        // Files do not record this factor.
        ("routed_scaling_factor".into(), json!(1.0)),
    ]);
    Ok(json.into())
}

impl Keys<'_> {
    /// The keys of a model whose layers are delta nets and attention. The last layers are for multi-token prediction,
    /// and are not read.
    fn hybrid(&self, model_type: &str) -> Result<Map<String, Value>> {
        let mut json = self.common(model_type)?;
        let predicting = self.whole("nextn_predict_layers")?.unwrap_or(0);
        let layers = self.required("block_count")?.saturating_sub(predicting);
        let heads = self.required("ssm.time_step_rank")?;
        let inner = self.required("ssm.inner_size")?;
        if !inner.is_multiple_of(heads.max(1)) {
            return Err(error(&self.full("ssm.inner_size"), format_args!("a multiple of the {heads} heads"), inner));
        }
        json.extend([
            ("num_hidden_layers".into(), json!(layers)),
            ("partial_rotary_factor".into(), json!(self.rotated_share()?)),
            ("linear_conv_kernel_dim".into(), json!(self.required("ssm.conv_kernel")?)),
            ("linear_key_head_dim".into(), json!(self.required("ssm.state_size")?)),
            ("linear_num_key_heads".into(), json!(self.required("ssm.group_count")?)),
            ("linear_num_value_heads".into(), json!(heads)),
            ("linear_value_head_dim".into(), json!(inner / heads.max(1))),
            ("full_attention_interval".into(), json!(self.whole("full_attention_interval")?.unwrap_or(4))),
        ]);
        const RECURRENT: &str = "attention.recurrent_layers";
        if self.get(RECURRENT).is_some() {
            let kinds = self.flags(RECURRENT, ["full_attention", "linear_attention"])?;
            json.insert("layer_types".into(), json!(kinds.get(..layers as usize).unwrap_or(&kinds)));
        }
        Ok(json)
    }

    /// Experts in all layers, with weights that add up to 1, and a shared one with a gate.
    fn insert_experts(&self, json: &mut Map<String, Value>) -> Result<()> {
        self.check_gating(SOFTMAX)?;
        self.refuse_number("expert_weights_scale", 1.0)?;
        let width = self.required("expert_feed_forward_length")?;
        json.extend([
            ("num_experts".into(), json!(self.required("expert_count")?)),
            ("num_experts_per_tok".into(), json!(self.required("expert_used_count")?)),
            ("moe_intermediate_size".into(), json!(width)),
            (
                "shared_expert_intermediate_size".into(),
                json!(self.whole("expert_shared_feed_forward_length")?.unwrap_or(width)),
            ),
            ("norm_topk_prob".into(), json!(true)),
            ("decoder_sparse_step".into(), json!(1)),
            ("mlp_only_layers".into(), json!([])),
        ]);
        Ok(())
    }

    /// The keys of LFM2: layers without KV heads are short convolutions.
    fn short_convs(&self, model_type: &str) -> Result<Map<String, Value>> {
        const KV_HEADS: &str = "attention.head_count_kv";
        let layers = self.required("block_count")?;
        let kv_heads = match self.of_layers(KV_HEADS)? {
            Some(kv_heads) => kv_heads,
            None => vec![self.required(KV_HEADS)?; layers.min(MAX_LAYERS) as usize],
        };
        let kind = |&heads: &u64| if heads == 0 { "conv" } else { "full_attention" };
        let mut json = self.common(model_type)?;
        let max = kv_heads.iter().max().filter(|&&max| max > 0);
        json.extend([
            ("norm_eps".into(), json["rms_norm_eps"].clone()),
            ("num_key_value_heads".into(), json!(max.unwrap_or(&1))),
            ("layer_types".into(), kv_heads.iter().map(kind).collect()),
            ("conv_L_cache".into(), json!(self.required("shortconv.l_cache")?)),
            ("conv_bias".into(), json!(false)),
            // The width in the file is already adjusted.
            ("block_auto_adjust_ff_dim".into(), json!(false)),
        ]);
        Ok(json)
    }
}
