//! Arbitrary bytes as a checkpoint file: an error, or readable tensors.
#![cfg_attr(fuzzing, no_main)]

use kvant::Device;
use kvant_models::safetensors::SafetensorsFile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::io::Write::write_all(&mut file, bytes).expect("room for it");
    let Ok(checkpoint) = SafetensorsFile::open(file.path()) else { return };
    for (name, info) in checkpoint.header().tensors() {
        if let Ok(tensor) = checkpoint.read(name, &Device::cpu()) {
            assert_eq!(tensor.bytes() as u64, info.end - info.start);
        }
    }
});

/// Without cargo-fuzz, a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
