//! GGUF files: blocks against the PyPI package `gguf`, tensors on devices, split models, tokenizers.

#[path = "../common/mod.rs"]
mod common;

mod blocks;
mod files;
mod tokenizers;
mod vocabularies;
