//! GGUF files: blocks compared with the PyPI package `gguf`, tensors on devices, split models, tokenizers.

mod blocks;
mod files;
mod hybrids;
mod rope;
mod tokenizers;
mod vocabularies;
