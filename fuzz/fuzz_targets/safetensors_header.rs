//! Arbitrary bytes as a header: an error, or tensors that cover the data exactly.
#![cfg_attr(fuzzing, no_main)]

use kvant_models::safetensors::Header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u16, &[u8])| {
    let (data_bytes, json) = input;
    let Ok(header) = Header::parse(json, data_bytes.into()) else { return };
    let covered: u64 = header.tensors().values().map(|tensor| tensor.end - tensor.start).sum();
    assert_eq!(covered, u64::from(data_bytes));
});

/// Without cargo-fuzz, a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
