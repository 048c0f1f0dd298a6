//! Drafters in GGUF files as llama.cpp writes them.

#[allow(dead_code, reason = "integration tests use the rest")]
#[path = "../../../tests/common/gguf.rs"]
mod writer;

use kvant::Device;
use writer::{Value, Writer, array, f32, flag, text, u32};

use super::{assistant, mtp, *};
use crate::safetensors::SafetensorsFile;

const F32: u32 = 0;

fn tensor(writer: Writer, name: &str, shape: &[usize], values: &[f32]) -> Writer {
    let dims: Vec<u64> = shape.iter().rev().map(|&size| size as u64).collect();
    writer.tensor(name, &dims, F32, values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

/// The name in a GGUF file of a block's tensor.
fn of_block(name: &str) -> Option<&'static str> {
    let names = [
        ("input_layernorm.weight", "attn_norm.weight"),
        ("self_attn.q_proj.weight", "attn_q.weight"),
        ("self_attn.k_proj.weight", "attn_k.weight"),
        ("self_attn.v_proj.weight", "attn_v.weight"),
        ("self_attn.q_norm.weight", "attn_q_norm.weight"),
        ("self_attn.k_norm.weight", "attn_k_norm.weight"),
        ("self_attn.o_proj.weight", "attn_output.weight"),
        ("post_attention_layernorm.weight", "post_attention_norm.weight"),
        ("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
        ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
        ("mlp.gate_proj.weight", "ffn_gate.weight"),
        ("mlp.up_proj.weight", "ffn_up.weight"),
        ("mlp.down_proj.weight", "ffn_down.weight"),
        ("layer_scalar", "layer_output_scale.weight"),
    ];
    names.into_iter().find(|(of, _)| *of == name).map(|(_, name)| name)
}

fn write(writer: &Writer) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.gguf"), writer.bytes()).unwrap();
    dir
}

#[test]
fn assistants_match_transformers() {
    let (name, target) = assistant::PAIRS[0];
    let config = mtp::config(name);
    let of = |key: &str| config["text_config"][key].as_f64().unwrap();
    let size = |key: &str| u32(of(key) as u32);
    let kinds: Vec<Value> = config["text_config"]["layer_types"]
        .as_array()
        .unwrap()
        .iter()
        .map(|kind| flag(kind == "sliding_attention"))
        .collect();
    let heads: Vec<Value> = [2, 2, 2, 1].map(u32).into();
    let (key, rope) = (|key: &str| format!("gemma4-assistant.{key}"), &config["text_config"]["rope_parameters"]);
    let theta = |kind: &str| f32(rope[kind]["rope_theta"].as_f64().unwrap() as f32);
    let mut writer = Writer::default().pair("general.architecture", text("gemma4-assistant"));
    for (name, value) in [
        ("embedding_length", size("hidden_size")),
        ("embedding_length_out", u32(config["backbone_hidden_size"].as_u64().unwrap() as u32)),
        ("block_count", size("num_hidden_layers")),
        ("nextn_predict_layers", size("num_hidden_layers")),
        ("context_length", size("max_position_embeddings")),
        ("feed_forward_length", size("intermediate_size")),
        ("attention.head_count", size("num_attention_heads")),
        ("attention.head_count_kv", array(&heads)),
        ("attention.key_length", size("global_head_dim")),
        ("attention.value_length", size("global_head_dim")),
        ("attention.key_length_swa", size("head_dim")),
        ("attention.value_length_swa", size("head_dim")),
        ("attention.layer_norm_rms_epsilon", f32(of("rms_norm_eps") as f32)),
        ("attention.sliding_window", size("sliding_window")),
        ("attention.sliding_window_pattern", array(&kinds)),
        ("attention.shared_kv_layers", size("num_hidden_layers")),
        ("rope.freq_base", theta("full_attention")),
        ("rope.freq_base_swa", theta("sliding_attention")),
        ("rope.dimension_count", size("global_head_dim")),
        ("rope.dimension_count_swa", size("head_dim")),
    ] {
        writer = writer.pair(&key(name), value);
    }
    // A quarter of the pairs rotates.
    let pairs = of("global_head_dim") as usize / 2;
    let factors: Vec<f32> = (0..pairs).map(|i| if i < pairs / 4 { 1.0 } else { 1e30 }).collect();
    writer = tensor(writer, "rope_freqs.weight", &[pairs], &factors);
    let file = SafetensorsFile::open(&golden(name).join("model.safetensors")).unwrap();
    for name in file.header().tensors().keys() {
        let in_gguf = match name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) {
            Some((layer, part)) => format!("blk.{layer}.{}", of_block(part).unwrap()),
            None => match name.as_str() {
                "model.embed_tokens.weight" => "token_embd.weight".into(),
                "model.norm.weight" => "output_norm.weight".into(),
                other => format!("nextn.{other}"),
            },
        };
        let values = file.read(name, &Device::cpu()).unwrap();
        writer = tensor(writer, &in_gguf, values.shape(), &values.to_f32().unwrap());
    }
    let dir = write(&writer);
    assistant::check(&dir.path().join("model.gguf"), name, target, &Device::cpu());
}

/// The block follows those of the model, and its norms include the 1 of 1 + w.
#[test]
fn predicting_blocks_match_their_definition() {
    let config = mtp::config("qwen3_5");
    let tensors = mtp::tensors(&config);
    let size = |key: &str| u32(config[key].as_u64().unwrap() as u32);
    let blocks = config["num_hidden_layers"].as_u64().unwrap() as usize;
    let kinds: Vec<Value> = config["layer_types"]
        .as_array()
        .unwrap()
        .iter()
        .map(|kind| flag(kind == "linear_attention"))
        .chain([flag(false)])
        .collect();
    let inner = 4 * config["linear_value_head_dim"].as_u64().unwrap() as u32;
    let mut writer = Writer::default().pair("general.architecture", text("qwen35"));
    for (name, value) in [
        ("embedding_length", size("hidden_size")),
        ("block_count", u32(blocks as u32 + 1)),
        ("nextn_predict_layers", u32(1)),
        ("context_length", size("max_position_embeddings")),
        ("feed_forward_length", size("intermediate_size")),
        ("attention.head_count", size("num_attention_heads")),
        ("attention.head_count_kv", size("num_key_value_heads")),
        ("attention.key_length", size("head_dim")),
        ("attention.value_length", size("head_dim")),
        ("attention.layer_norm_rms_epsilon", f32(1e-5)),
        ("attention.recurrent_layers", array(&kinds)),
        ("rope.freq_base", f32(1e6)),
        ("rope.dimension_count", u32(16)),
        ("ssm.conv_kernel", size("linear_conv_kernel_dim")),
        ("ssm.state_size", size("linear_key_head_dim")),
        ("ssm.group_count", size("linear_num_key_heads")),
        ("ssm.time_step_rank", size("linear_num_value_heads")),
        ("ssm.inner_size", u32(inner)),
    ] {
        writer = writer.pair(&format!("qwen35.{name}"), value);
    }
    let embed = tensor_of(&golden("qwen3_5"), "model.embed_tokens.weight");
    writer = tensor(writer, "token_embd.weight", &[96, 64], &embed);
    writer = tensor(writer, "output.weight", &[96, 64], &tensor_of(&golden("qwen3_5"), "lm_head.weight"));
    for name in tensors.names() {
        let in_block = match name.strip_prefix("mtp.layers.0.") {
            Some("post_attention_layernorm.weight") => "post_attention_norm.weight".into(),
            Some(part) => of_block(part).unwrap().to_string(),
            None => match name {
                "mtp.fc.weight" => "nextn.eh_proj.weight".into(),
                "mtp.norm.weight" => "nextn.shared_head_norm.weight".into(),
                "mtp.pre_fc_norm_embedding.weight" => "nextn.enorm.weight".into(),
                other => other.replace("mtp.pre_fc_norm_hidden", "nextn.hnorm"),
            },
        };
        let (shape, mut values) = (tensors.shape(name), tensors.values(name).to_vec());
        if shape.len() == 1 {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        writer = tensor(writer, &format!("blk.{blocks}.{in_block}"), shape, &values);
    }
    let dir = write(&writer);
    let golden = golden("qwen3_5");
    mtp::check(&golden, &dir.path().join("model.gguf"), &tensors, &Device::cpu(), &golden);
}
