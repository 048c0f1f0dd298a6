//! Arbitrary bytes as an index: an error, or plain file names.
#![cfg_attr(fuzzing, no_main)]

use kvant_models::safetensors::parse_index;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(entries) = parse_index(bytes) else { return };
    for (_, shard) in entries {
        let path = std::path::Path::new(&shard);
        assert_eq!(path.file_name().and_then(|name| name.to_str()), Some(shard.as_str()));
    }
});

/// Without cargo-fuzz, a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
