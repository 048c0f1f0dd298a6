//! Any bytes as config.json: an error, or a configuration within the documented limits.
#![cfg_attr(fuzzing, no_main)]

use kvant_models::Config;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(json) = serde_json::from_slice(bytes) else { return };
    let Ok(config) = Config::parse(&json) else { return };
    assert!((1..=1024).contains(&config.layers.len()));
    assert!(config.cache_layers() >= 1);
    for (l, layer) in config.layers.iter().enumerate() {
        assert!(matches!(layer.head_dim, 64 | 128 | 256 | 512));
        assert!(config.heads.is_multiple_of(layer.kv_heads));
        assert!(layer.rope.rotated_pairs <= layer.head_dim / 2);
        assert!(layer.kv_source.is_none_or(|source| source < l && config.layers[source].kv_source.is_none()));
    }
});

/// Outside cargo-fuzz a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
