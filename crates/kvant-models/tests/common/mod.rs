//! Helpers of the integration tests.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod batch_invariance;
pub mod drafters;
pub mod gguf;

use std::path::{Path, PathBuf};

use kvant::{Codec, Device};
use kvant_models::{PoolOptions, safetensors::SafetensorsFile};
use serde_json::{Map, Value};

/// The folders with a `model.gguf` (`tools/golden_gguf_models.py`).
pub const GGUF_MODELS: [&str; 34] = [
    "llama_gguf",
    "llama_bias_gguf",
    "llama_yarn_gguf",
    "mistral_gguf",
    "ministral3_gguf",
    "qwen2_gguf",
    "qwen3_gguf",
    "qwen3_moe_gguf",
    "qwen2_moe_gguf",
    "glm4_moe_gguf",
    "ernie4_5_moe_gguf",
    "hunyuan_moe_gguf",
    "minimax_m2_gguf",
    "gemma3_gguf",
    "gemma4_gguf",
    "gemma4_shared_gguf",
    "gemma4_moe_gguf",
    "gpt_oss_gguf",
    "smollm3_gguf",
    "seed_oss_gguf",
    "granite_gguf",
    "olmo2_gguf",
    "olmo3_gguf",
    "exaone4_gguf",
    "phi3_gguf",
    "ernie4_5_gguf",
    "hunyuan_gguf",
    "muse_glimmer_gguf",
    "qwen3_next_gguf",
    "qwen3_5_gguf",
    "qwen3_5_moe_gguf",
    "lfm2_gguf",
    "lfm2_moe_gguf",
    "k_quants_gguf",
];

/// The folders of random checkpoints of families other than Gemma 4.
pub const FAMILIES: [&str; 49] = [
    "llama",
    "llama_bias",
    "llama_mlx",
    "llama_mxfp8",
    "llama_w4a16",
    "llama_fp8",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen2_window",
    "qwen3",
    "qwen3_bias",
    "qwen3_window",
    "qwen3_moe",
    "qwen3_moe_mlx",
    "qwen3_moe_nvfp4",
    "qwen3_moe_window",
    "qwen2_moe",
    "qwen2_moe_mlx",
    "glm4_moe",
    "glm4_moe_mlx",
    "ernie4_5_moe",
    "ernie4_5_moe_mlx",
    "hunyuan_moe",
    "minimax_m2",
    "minimax_m2_mlx",
    "gemma3",
    "gemma3_bias",
    "gemma3_yarn",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "gpt_oss_mlx",
    "smollm3",
    "seed_oss",
    "granite",
    "granite_hybrid",
    "olmo2",
    "olmo2_three",
    "olmo3",
    "exaone4",
    "phi3",
    "ernie4_5",
    "hunyuan",
    "muse_glimmer",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "lfm2",
    "lfm2_moe",
];

/// The folders of random checkpoints that differ from the ones in [`FAMILIES`] only in the format of weights.
pub const MLX_FAMILIES: [&str; 13] = [
    "qwen2_mlx",
    "smollm3_mlx",
    "seed_oss_mlx",
    "granite_mlx",
    "granite_hybrid_mlx",
    "olmo2_mlx",
    "exaone4_mlx",
    "phi3_mlx",
    "ernie4_5_mlx",
    "hunyuan_mlx",
    "muse_glimmer_mlx",
    "qwen3_next_mlx",
    "lfm2_mlx",
];

/// The folders of random checkpoints of Gemma 4.
pub const VARIANTS: [&str; 7] = ["dense", "wide", "ple_shared", "moe", "dense_mlx", "ple_shared_mlx", "moe_mlx"];

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The shipped model.
pub fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvant-cli/model")
}

/// A tensor of a golden file.
pub fn floats(file: &Path, name: &str) -> Vec<f32> {
    SafetensorsFile::open(file).unwrap().read(name, &Device::cpu()).unwrap().to_f32().unwrap()
}

pub fn ids(file: &Path, name: &str) -> Vec<u32> {
    SafetensorsFile::open(file).unwrap().read(name, &Device::cpu()).unwrap().to_vec().unwrap()
}

/// An f32 cache.
pub fn exact(longest: usize) -> PoolOptions {
    PoolOptions { codecs: Codec::F32.into(), longest, ..PoolOptions::default() }
}

pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // NaN must not be lost in a maximum.
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |max, d| if d <= max { max } else { d })
}

/// −ln p of each next token.
pub fn nats(logits: &[f32], vocab: usize, tokens: &[u32]) -> Vec<f64> {
    let of = |(row, &next): (&[f32], &u32)| {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&x| f64::from(x - top).exp()).sum();
        sum.ln() - f64::from(row[next as usize] - top)
    };
    logits.chunks(vocab).zip(&tokens[1..]).map(of).collect()
}

/// The parts of a safetensors file, to be recombined incorrectly.
#[derive(Clone)]
pub struct Parts {
    pub header: Map<String, Value>,
    pub data: Vec<u8>,
}

impl Parts {
    pub fn read(path: &Path) -> Parts {
        let bytes = std::fs::read(path).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        Parts { header: serde_json::from_slice(&bytes[8..8 + n]).unwrap(), data: bytes[8 + n..].to_vec() }
    }

    pub fn bytes(&self) -> Vec<u8> {
        with_header(serde_json::to_string(&self.header).unwrap().as_bytes(), &self.data)
    }

    /// Removes a tensor and its bytes, so that the file stays well formed.
    pub fn remove(&mut self, name: &str) {
        let entry = self.header.remove(name).unwrap();
        let offset = |entry: &Value, i: usize| entry["data_offsets"][i].as_u64().unwrap();
        let (start, end) = (offset(&entry, 0), offset(&entry, 1));
        self.data.drain(start as usize..end as usize);
        for (name, entry) in &mut self.header {
            if name != "__metadata__" && offset(entry, 0) >= end {
                let moved = [offset(entry, 0) - (end - start), offset(entry, 1) - (end - start)];
                entry["data_offsets"] = moved.to_vec().into();
            }
        }
    }

    pub fn names(&self) -> Vec<String> {
        self.header.keys().filter(|name| *name != "__metadata__").cloned().collect()
    }
}

pub fn with_header(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, data].concat()
}

/// A model directory with a configuration and a checkpoint.
pub fn model_dir(config: &[u8], checkpoint: &[u8]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), checkpoint).unwrap();
    dir
}
