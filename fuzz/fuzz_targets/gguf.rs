//! Arbitrary bytes as a GGUF file: an error, or readable metadata and tensors, a tokenizer and a model.
#![cfg_attr(fuzzing, no_main)]

use kvant::Device;
use kvant_models::{Config, Model, Tokenizer, gguf::Gguf};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    kvant_fuzz::allow_caught_panics();
    let mut file = tempfile::Builder::new().suffix(".gguf").tempfile().expect("a temporary file");
    std::io::Write::write_all(&mut file, bytes).expect("room for it");
    let Ok(gguf) = Gguf::open(file.path()) else { return };
    for (_, value) in gguf.metadata().iter() {
        let _ = value.to_string();
    }
    let _ = gguf.metadata().generation_defaults();
    if let Ok(tokenizer) = Tokenizer::from_gguf(gguf.metadata())
        && let Ok(ids) = tokenizer.encode("fn main() { 42 } é 🦀", true)
    {
        let _ = tokenizer.decode(&ids);
    }
    let device = Device::reference();
    if Config::load(file.path()).is_ok() {
        let _ = Model::load(file.path(), &device);
    }
    for (name, info) in gguf.tensors() {
        if let Ok(tensor) = gguf.read(name, &device) {
            assert_eq!(tensor.shape(), info.shape);
        }
        if let Ok(matrix) = gguf.read_affine(name, &device) {
            assert!(Gguf::is_affine(info.kind));
            assert_eq!(matrix.scales.elements() * matrix.group, info.shape.iter().product::<usize>());
        }
    }
});

/// Without cargo-fuzz, a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
