//! Checkpoints with drafters, made of golden ones.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use serde_json::{Value, json};

/// A multi-token prediction, added to a golden Qwen 3.5.
#[derive(Clone, Copy, Debug)]
pub enum Mtp {
    /// A copy of the model's attention block with random projections. The model only writes its first four tokens, so
    /// that some guesses are right.
    Random,
    /// The next token depends on the last one alone, in the model and in the drafter, which agree.
    Agrees,
    /// As above, with noise of this size from the token before the last.
    Differs(f32),
    /// As [`Mtp::Random`], with logits that are not numbers.
    NotANumber,
}

const FEW: usize = 4;
const HIDDEN: usize = 64;

/// The tensors of a safetensors file in bf16.
struct Tensors {
    header: serde_json::Map<String, Value>,
    data: Vec<u8>,
}

impl Tensors {
    fn read(path: &Path) -> Tensors {
        let bytes = std::fs::read(path).unwrap();
        let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
        let Value::Object(header) = header else { panic!("no header") };
        Tensors { header, data: bytes[start..].to_vec() }
    }

    fn write(&self, path: &Path) {
        let header = serde_json::to_vec(&self.header).unwrap();
        let parts = [&(header.len() as u64).to_le_bytes(), &header[..], &self.data];
        std::fs::write(path, parts.concat()).unwrap();
    }

    fn range(&self, name: &str) -> std::ops::Range<usize> {
        let [start, end] = [0, 1].map(|at| self.header[name]["data_offsets"][at].as_u64().unwrap() as usize);
        start..end
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        self.header[name]["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
    }

    fn add(&mut self, name: &str, shape: &[usize], values: impl Iterator<Item = f32>) {
        let start = self.data.len();
        self.data.extend(values.flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()));
        let range = [start, self.data.len()];
        self.header.insert(name.to_string(), json!({"dtype": "BF16", "shape": shape, "data_offsets": range}));
    }

    fn add_integers(&mut self, name: &str, values: impl Iterator<Item = i64>) {
        let start = self.data.len();
        self.data.extend(values.flat_map(i64::to_le_bytes));
        let range = [start, self.data.len()];
        self.header.insert(
            name.to_string(),
            json!({"dtype": "I64", "shape": [range[1] / 8 - start / 8], "data_offsets": range}),
        );
    }

    /// Zeroes the rows of a matrix from `first` on.
    fn keep_rows(&mut self, name: &str, first: usize) {
        let (rows, bytes) = (self.shape(name)[0], self.range(name).len());
        self.fill(name, bytes / rows * first..bytes);
    }

    fn copy(&mut self, from: &str, to: &str) {
        let (bytes, shape) = (self.data[self.range(from)].to_vec(), self.shape(from));
        let values = bytes.chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16));
        self.add(to, &shape, values.collect::<Vec<_>>().into_iter());
    }

    fn fill(&mut self, name: &str, bytes: std::ops::Range<usize>) {
        let range = self.range(name);
        self.data[range.start + bytes.start..range.start + bytes.end.min(range.len())].fill(0);
    }
}

/// Pseudo-random numbers from −1 to 1.
fn noise(seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    })
}

/// A new directory.
fn directory() -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let to = std::env::temp_dir().join(format!("kvant-drafters-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&to).unwrap();
    to
}

/// Small random models with drafters of each kind: a name, the model, and the drafter.
pub fn pairs(golden: &Path) -> Vec<(&'static str, PathBuf, PathBuf)> {
    let mtp = with_mtp(golden, Mtp::Random);
    let (target, head) = with_eagle3(golden);
    vec![
        ("mtp", mtp.clone(), mtp),
        ("eagle3", target, head),
        ("assistant", golden.join("dense"), golden.join("assistant")),
        ("assistant with groups of tokens", golden.join("ple_shared"), golden.join("assistant_centroids")),
    ]
}

/// A copy of the golden `llama` that mostly writes its first tokens, and a random EAGLE-3 head that drafts some of
/// them.
pub fn with_eagle3(golden: &Path) -> (PathBuf, PathBuf) {
    const DRAFTED: usize = 40;
    const WIDTH: usize = 48;
    let (from, target, head) = (golden.join("llama"), directory(), directory());
    std::fs::copy(from.join("config.json"), target.join("config.json")).unwrap();
    let mut tensors = Tensors::read(&from.join("model.safetensors"));
    tensors.keep_rows("lm_head.weight", 2 * FEW);
    tensors.write(&target.join("model.safetensors"));
    let mut tensors = Tensors { header: serde_json::Map::new(), data: Vec::new() };
    let matrices = [
        ("fc.weight", [HIDDEN, 3 * HIDDEN]),
        ("lm_head.weight", [DRAFTED, HIDDEN]),
        ("midlayer.self_attn.q_proj.weight", [2 * HIDDEN, 2 * HIDDEN]),
        ("midlayer.self_attn.k_proj.weight", [HIDDEN, 2 * HIDDEN]),
        ("midlayer.self_attn.v_proj.weight", [HIDDEN, 2 * HIDDEN]),
        ("midlayer.self_attn.o_proj.weight", [HIDDEN, 2 * HIDDEN]),
        ("midlayer.mlp.gate_proj.weight", [WIDTH, HIDDEN]),
        ("midlayer.mlp.up_proj.weight", [WIDTH, HIDDEN]),
        ("midlayer.mlp.down_proj.weight", [HIDDEN, WIDTH]),
    ];
    // Draft token i is target token 2·i + 3.
    tensors.add_integers("d2t", (0..DRAFTED as i64).map(|token| token + 3));
    for (seed, (name, shape)) in matrices.into_iter().enumerate() {
        let scale = (3.0 / shape[1] as f32).sqrt();
        tensors.add(name, &shape, noise(10 + seed as u64).take(shape[0] * shape[1]).map(|x| scale * x));
    }
    tensors.keep_rows("lm_head.weight", FEW);
    for name in ["midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"] {
        tensors.add(&format!("{name}.weight"), &[HIDDEN], noise(30).take(HIDDEN).map(|x| 1.0 + 0.3 * x));
    }
    tensors.write(&head.join("model.safetensors"));
    let config = json!({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
        "num_hidden_layers": 1, "vocab_size": 96, "rms_norm_eps": 1e-5, "rope_theta": 5e4, "hidden_act": "silu",
        "attention_bias": false, "max_position_embeddings": 512, "draft_vocab_size": DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    });
    std::fs::write(head.join("config.json"), config.to_string()).unwrap();
    (target, head)
}

/// A copy of the golden `qwen3_5` with a drafter.
pub fn with_mtp(golden: &Path, mtp: Mtp) -> PathBuf {
    let (to, from) = (directory(), golden.join("qwen3_5"));
    std::fs::copy(from.join("config.json"), to.join("config.json")).unwrap();
    let mut tensors = Tensors::read(&from.join("model.safetensors"));
    let block = "model.layers.1.";
    let names: Vec<String> = tensors.header.keys().filter(|name| name.starts_with(block)).cloned().collect();
    for name in &names {
        tensors.copy(name, &name.replace(block, "mtp.layers.0."));
    }
    tensors.copy("model.norm.weight", "mtp.norm.weight");
    let size = match mtp {
        Mtp::Random | Mtp::NotANumber => {
            tensors.keep_rows("lm_head.weight", FEW);
            if matches!(mtp, Mtp::Random) { 0.2 } else { f32::NAN }
        }
        Mtp::Agrees => 0.0,
        Mtp::Differs(size) => size,
    };
    let is_random = matches!(mtp, Mtp::Random | Mtp::NotANumber);
    for norm in ["mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"] {
        let scale = if is_random { 0.3 } else { 0.0 };
        tensors.add(norm, &[HIDDEN], noise(1).take(HIDDEN).map(|x| scale * x));
    }
    let values = noise(2).take(HIDDEN * 2 * HIDDEN).enumerate().map(|(at, x)| {
        let (row, column) = (at / (2 * HIDDEN), at % (2 * HIDDEN));
        match column < HIDDEN && !is_random {
            true => f32::from(row == column),
            false => size * x,
        }
    });
    tensors.add("mtp.fc.weight", &[HIDDEN, 2 * HIDDEN], values);
    if !is_random {
        // The residual stream is the embedding of the last token.
        let outputs = ["o_proj.weight", "out_proj.weight", "down_proj.weight"];
        let names: Vec<String> = tensors.header.keys().cloned().collect();
        for name in names.iter().filter(|name| outputs.iter().any(|output| name.ends_with(output))) {
            let len = tensors.range(name).len();
            tensors.fill(name, 0..len);
        }
    }
    tensors.write(&to.join("model.safetensors"));
    to
}
