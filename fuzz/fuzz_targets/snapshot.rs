//! Any bytes as a snapshot of a cache: an error, or a cache that can be used and saved again.
#![cfg_attr(fuzzing, no_main)]

use kvant::{Device, KvCache};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("cache");
    std::fs::write(&path, bytes).expect("room for it");
    let Ok(mut cache) = KvCache::load_within(&Device::cpu(), &path, 1 << 24) else { return };
    for sequence in 0..cache.spec().sequences.min(4) {
        let len = cache.len(sequence).expect("the sequence exists");
        let _ = cache.append(&[(sequence, 1)]);
        let _ = cache.truncate(sequence, len.saturating_sub(1));
    }
    cache.save(&path).expect("a cache can be saved");
});

/// Outside cargo-fuzz a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
