//! Multi-token prediction against its definition in vLLM's `qwen3_5_mtp.py`.

use std::path::Path;

use kvant::{Codec, Device};
use serde_json::Value;

use super::{
    checkpoint::Tensors,
    reference::{Cache, add, experts, mlp, narrow, norm, product, rotate, wide},
    *,
};

/// Sizes of the golden targets.
const H: usize = 64;
const DIM: usize = 64;
const PAIRS: usize = 8;
const EPS: f64 = 1e-5;

pub fn config(target: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(target).join("config.json")).unwrap()).unwrap()
}

/// Random tensors of the block.
pub fn tensors(config: &Value) -> Tensors {
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let (q, kv) = (size("num_attention_heads") * DIM, size("num_key_value_heads") * DIM);
    let mut tensors = Tensors::default();
    tensors.matrix("mtp.fc.weight", &[H, 2 * H]).matrix("mtp.layers.0.self_attn.q_proj.weight", &[2 * q, H]);
    for name in ["k_proj", "v_proj"] {
        tensors.matrix(&format!("mtp.layers.0.self_attn.{name}.weight"), &[kv, H]);
    }
    tensors.matrix("mtp.layers.0.self_attn.o_proj.weight", &[H, q]);
    for name in ["q_norm", "k_norm"] {
        tensors.norm(&format!("mtp.layers.0.self_attn.{name}.weight"), DIM, 0.0);
    }
    for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
        tensors.norm(&format!("mtp.{name}.weight"), H, 0.0);
    }
    for name in ["input_layernorm", "post_attention_layernorm"] {
        tensors.norm(&format!("mtp.layers.0.{name}.weight"), H, 0.0);
    }
    let mut dense = |prefix: &str, width: usize| {
        for (name, shape) in [("gate_proj", [width, H]), ("up_proj", [width, H]), ("down_proj", [H, width])] {
            tensors.matrix(&format!("mtp.layers.0.mlp.{prefix}{name}.weight"), &shape);
        }
    };
    if config.get("num_experts").is_none() {
        dense("", size("intermediate_size"));
        return tensors;
    }
    dense("shared_expert.", size("shared_expert_intermediate_size"));
    let (count, width) = (size("num_experts"), size("moe_intermediate_size"));
    tensors
        .matrix("mtp.layers.0.mlp.gate.weight", &[count, H])
        .matrix("mtp.layers.0.mlp.shared_expert_gate.weight", &[1, H])
        .matrix("mtp.layers.0.mlp.experts.gate_up_proj", &[count, 2 * width, H])
        .matrix("mtp.layers.0.mlp.experts.down_proj", &[count, H, width]);
    tensors
}

/// One row, after those of the cache. Returns logits and the hidden state.
fn row(
    tensors: &Tensors,
    [embed, output]: [&[f32]; 2],
    cache: &mut Cache,
    hidden: &[f32],
    token: u32,
) -> [Vec<f32>; 2] {
    let of = |name: &str| tensors.values(&format!("mtp.{name}.weight"));
    let layer = |name: &str| of(&format!("layers.0.{name}"));
    let normed = |x: &[f64], weights: &[f32]| norm(x, weights, 1.0, EPS);
    let embedding = wide(&embed[token as usize * H..][..H]);
    let both = [normed(&embedding, of("pre_fc_norm_embedding")), normed(&wide(hidden), of("pre_fc_norm_hidden"))];
    let mut x = product(of("fc"), &both.concat());
    let input = normed(&x, layer("input_layernorm"));
    let position = cache.keys.len();
    let of_heads = |heads: Vec<f64>, weights: &[f32]| -> Vec<f64> {
        let head = |head: &[f64]| {
            let mut head = normed(head, weights);
            rotate(&mut head, position, PAIRS, 1e6);
            head
        };
        heads.chunks(DIM).flat_map(head).collect()
    };
    // Queries and gates alternate by head.
    let joint = product(layer("self_attn.q_proj"), &input);
    let part = |first: usize| joint.chunks(2 * DIM).flat_map(|head| head[first..first + DIM].to_vec()).collect();
    let (q, gate): (Vec<f64>, Vec<f64>) = (part(0), part(DIM));
    cache.keys.push(of_heads(product(layer("self_attn.k_proj"), &input), layer("self_attn.k_norm")));
    cache.values.push(product(layer("self_attn.v_proj"), &input));
    let mut attended = cache.attend(&of_heads(q, layer("self_attn.q_norm")), DIM);
    attended.iter_mut().zip(gate).for_each(|(y, gate)| *y /= 1.0 + (-gate).exp());
    add(&mut x, &product(layer("self_attn.o_proj"), &attended));
    let input = normed(&x, layer("post_attention_layernorm"));
    add(
        &mut x,
        &match tensors.has("mtp.layers.0.mlp.gate.weight") {
            true => experts(tensors, "mtp.layers.0.mlp.", 2, &input),
            false => mlp(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"].map(layer), &input),
        },
    );
    let last = normed(&x, of("norm"));
    [narrow(&product(output, &last)), narrow(&last)]
}

/// Checks the drafter of a directory for a golden target, whose block has these tensors.
pub fn check(target: &Path, drafter: &Path, tensors: &Tensors, device: &Device, source: &Path) {
    let model = load(target, device);
    let drafter = load_drafter(&files(drafter), &model);
    assert_eq!((drafter.taps(), drafter.hidden_width()), (crate::Taps::FinalOfEvery, H));
    let mut pair = Pair::new(model, drafter, &Codec::F32.into());
    let embed = tensor_of(source, "model.embed_tokens.weight");
    let is_tied = !Checkpoint::open(source).unwrap().contains("lm_head.weight");
    let output = if is_tied { embed.clone() } else { tensor_of(source, "lm_head.weight") };
    let (mut cache, tokens) = (Cache::default(), prompt());
    check_chain(&mut pair, &tokens, |hidden, _, token| row(tensors, [&embed, &output], &mut cache, hidden, token));
}

/// 37 tokens.
pub fn prompt() -> Vec<u32> {
    (0..37u32).map(|i| (i * i * 31 + 7 * i + 5) % 96).collect()
}

#[test]
fn the_block_matches_its_definition() {
    for target in ["qwen3_5", "qwen3_5_moe"] {
        let config = config(target);
        let tensors = tensors(&config);
        let dir = tensors.directory(&config);
        for device in devices() {
            println!("{target} on {device}");
            check(&golden(target), dir.path(), &tensors, &device, &golden(target));
        }
    }
}
