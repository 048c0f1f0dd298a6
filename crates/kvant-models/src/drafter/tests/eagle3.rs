//! EAGLE-3 heads against their definition in vLLM's `llama_eagle3.py`.

use kvant::{Codec, Device};
use serde_json::{Value, json};

use super::{
    checkpoint::Tensors,
    reference::{Cache, add, mlp, narrow, norm, product, rotate, wide},
    *,
};
use crate::Taps;

const DIM: usize = 64;
const HEADS: usize = 2;
const VOCAB: usize = 96;
/// Tokens that heads draft.
const DRAFTED: usize = 40;
const WIDTH: usize = 48;
const THETA: f64 = 5e4;
const EPS: f64 = 1e-5;

/// A random head, and its options.
pub struct Head {
    pub config: Value,
    pub tensors: Tensors,
    hidden: usize,
    layer: &'static str,
    norm_before_residual: bool,
    norm_before_fc: bool,
    norm_output: bool,
    has_head_norms: bool,
}

impl Head {
    pub fn directory(&self) -> tempfile::TempDir {
        self.tensors.directory(&self.config)
    }
}

fn layer_config(hidden: usize, model_type: &str) -> Value {
    json!({
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": WIDTH, "num_attention_heads": HEADS,
        "num_key_value_heads": 1, "head_dim": DIM, "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": EPS,
        "rope_theta": THETA, "hidden_act": "silu", "attention_bias": false, "max_position_embeddings": 512,
    })
}

fn tensors(hidden: usize, target_width: usize, layer: &str) -> Tensors {
    let mut tensors = Tensors::default();
    tensors.matrix("fc.weight", &[hidden, 3 * target_width]).matrix("lm_head.weight", &[DRAFTED, hidden]);
    for (name, shape) in [
        ("self_attn.q_proj", [HEADS * DIM, 2 * hidden]),
        ("self_attn.k_proj", [DIM, 2 * hidden]),
        ("self_attn.v_proj", [DIM, 2 * hidden]),
        ("self_attn.o_proj", [hidden, HEADS * DIM]),
        ("mlp.gate_proj", [WIDTH, hidden]),
        ("mlp.up_proj", [WIDTH, hidden]),
        ("mlp.down_proj", [hidden, WIDTH]),
    ] {
        tensors.matrix(&format!("{layer}{name}.weight"), &shape);
    }
    for name in ["input_layernorm", "hidden_norm", "post_attention_layernorm"] {
        tensors.norm(&format!("{layer}{name}.weight"), hidden, 1.0);
    }
    // Draft token i is target token 2·i + 3.
    tensors.norm("norm.weight", hidden, 1.0).integers("d2t", (0..DRAFTED as i64).map(|i| i + 3).collect());
    tensors
}

/// In the form of speculators, with an embedding of its own.
fn speculator(hidden: usize, target_width: usize, layers: Option<[usize; 3]>, model_type: &str) -> Head {
    let layer = "layers.0.";
    let mut tensors = tensors(hidden, target_width, layer);
    tensors.matrix("embed_tokens.weight", &[VOCAB, hidden]);
    let has_head_norms = model_type == "qwen3";
    if has_head_norms {
        for name in ["q_norm", "k_norm"] {
            tensors.norm(&format!("{layer}self_attn.{name}.weight"), DIM, 1.0);
        }
    }
    let config = json!({
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFTED,
        "norm_before_residual": true, "target_hidden_size": target_width,
        "eagle_aux_hidden_state_layer_ids": layers, "transformer_layer_config": layer_config(hidden, model_type),
    });
    let (norm_before_fc, norm_output) = (false, false);
    Head { config, tensors, hidden, layer, norm_before_residual: true, norm_before_fc, norm_output, has_head_norms }
}

/// In the form of NVIDIA's heads, with the target's embedding, and norms of the hidden states.
pub fn middle(hidden: usize, layers: [usize; 3]) -> Head {
    let layer = "midlayer.";
    let mut tensors = tensors(hidden, hidden, layer);
    tensors.norm("input_norm.weight", 3 * hidden, 1.0);
    let mut config = layer_config(hidden, "llama");
    config["architectures"] = json!(["LlamaForCausalLMEagle3"]);
    config["draft_vocab_size"] = DRAFTED.into();
    config["eagle_config"] = json!({
        "eagle_aux_hidden_state_layer_ids": layers.map(|layer| layer - 1), "use_aux_hidden_state": true,
        "norm_before_fc": true, "norm_output": true,
    });
    let (norm_before_residual, has_head_norms) = (false, false);
    Head {
        config,
        tensors,
        hidden,
        layer,
        norm_before_residual,
        norm_before_fc: true,
        norm_output: true,
        has_head_norms,
    }
}

/// A head that reads the residual stream before these layers.
pub fn head(target_width: usize, layers: [usize; 3]) -> Head {
    speculator(32, target_width, Some(layers), "llama")
}

/// One row, after those of the cache. Returns logits and the hidden state.
fn row(head: &Head, embed: &[f32], cache: &mut Cache, hidden: &[f32], is_features: bool, token: u32) -> [Vec<f32>; 2] {
    let (of, h) = (|name: &str| head.tensors.values(&format!("{name}.weight")), head.hidden);
    let layer = |name: &str| of(&format!("{}{name}", head.layer));
    let normed = |x: &[f64], weights: &[f32]| norm(x, weights, 0.0, EPS);
    let mut x = wide(hidden);
    if is_features {
        let features = if head.norm_before_fc { normed(&x, of("input_norm")) } else { x };
        x = product(of("fc"), &features);
    }
    let embedding = normed(&wide(&embed[token as usize * h..][..h]), layer("input_layernorm"));
    let normed_x = normed(&x, layer("hidden_norm"));
    if head.norm_before_residual {
        x.clone_from(&normed_x);
    }
    let input = [embedding, normed_x].concat();
    let position = cache.keys.len();
    let of_heads = |name: &str, of_norm: &str| -> Vec<f64> {
        let of_head = |values: &[f64]| {
            let mut values = values.to_vec();
            if head.has_head_norms {
                values = normed(&values, layer(of_norm));
            }
            rotate(&mut values, position, DIM / 2, THETA);
            values
        };
        product(layer(name), &input).chunks(DIM).flat_map(of_head).collect()
    };
    let q = of_heads("self_attn.q_proj", "self_attn.q_norm");
    cache.keys.push(of_heads("self_attn.k_proj", "self_attn.k_norm"));
    cache.values.push(product(layer("self_attn.v_proj"), &input));
    add(&mut x, &product(layer("self_attn.o_proj"), &cache.attend(&q, DIM)));
    let input = normed(&x, layer("post_attention_layernorm"));
    add(&mut x, &mlp(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"].map(layer), &input));
    let last = normed(&x, of("norm"));
    let mut logits = vec![f32::NEG_INFINITY; VOCAB];
    for (i, logit) in product(of("lm_head"), &last).into_iter().enumerate() {
        logits[2 * i + 3] = logit as f32;
    }
    [logits, narrow(if head.norm_output { &last } else { &x })]
}

fn check(target: &str, head: &Head, layers: [usize; 3], device: &Device) {
    let dir = head.directory();
    let model = load(&golden(target), device);
    let drafter = load_drafter(&files(dir.path()), &model);
    assert_eq!((drafter.taps(), drafter.hidden_width()), (Taps::Residual(layers), head.hidden));
    let mut pair = Pair::new(model, drafter, &Codec::F32.into());
    let embed = match head.tensors.has("embed_tokens.weight") {
        true => head.tensors.values("embed_tokens.weight").to_vec(),
        false => tensor_of(&golden(target), "model.embed_tokens.weight"),
    };
    let mut cache = Cache::default();
    check_chain(&mut pair, &super::mtp::prompt(), |hidden, is_features, token| {
        row(head, &embed, &mut cache, hidden, is_features, token)
    });
}

#[test]
fn heads_match_their_definition() {
    for device in devices() {
        println!("on {device}");
        // Without layers in the file: 2, half, and all but 3.
        check("llama", &speculator(32, 64, None, "llama"), [2, 1, 0], &device);
        check("qwen3", &speculator(64, 64, Some([0, 1, 2]), "qwen3"), [0, 1, 2], &device);
        check("gpt_oss", &middle(64, [1, 2, 2]), [1, 2, 2], &device);
    }
}

/// A head with the target's vocabulary may lack an output matrix, and then has the target's.
#[test]
fn a_whole_vocabulary_needs_no_map() {
    let mut head = middle(64, [1, 2, 2]);
    head.config["draft_vocab_size"] = VOCAB.into();
    head.tensors.remove("d2t");
    head.tensors.remove("lm_head.weight");
    let model = load(&golden("llama"), &Device::cpu());
    let dir = head.directory();
    let drafter = load_drafter(&files(dir.path()), &model);
    let mut pair = Pair::new(model, drafter, &Codec::F32.into());
    let mut sequence = pair.pool.sequence();
    let tokens = super::mtp::prompt();
    let step = pair.feed(&mut sequence, &tokens[..9], 8);
    let (logits, hidden) = pair.draft(&step, &tokens[1..10], Hidden::Features(&(0..9).collect::<Vec<_>>()), 8);
    let output = tensor_of(&golden("llama"), "lm_head.weight");
    let want = product(&output, &wide(&hidden.to_f32().unwrap()));
    assert!(max_difference(&logits, &narrow(&want)) < 1e-4);
}
