//! Arbitrary bytes as config.json: an error, or a configuration within the documented limits.
#![cfg_attr(fuzzing, no_main)]

use kvant_models::Config;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(json) = serde_json::from_slice(bytes) else { return };
    let Ok(config) = Config::parse(&json) else { return };
    let decoder = &config.decoder;
    assert!((1..=1024).contains(&decoder.blocks.len()));
    assert!(decoder.cache_layers() >= 1);
    for (l, block) in decoder.blocks.iter().enumerate() {
        let Some(attention) = block.attention() else { continue };
        assert!(kvant::ops::attend::HEAD_DIMS.contains(&attention.head_dim));
        assert!(attention.heads.is_multiple_of(attention.kv_heads));
        assert!(attention.rope.rotated_pairs <= attention.head_dim / 2);
        let of_source = |source: usize| decoder.blocks[source].attention().is_some_and(|of| of.source().is_none());
        assert!(attention.source().is_none_or(|source| source < l && of_source(source)));
    }
});

/// Without cargo-fuzz, a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
