//! GGUF files, the format of llama.cpp: metadata and tensors in one file, or in several.
//!
//! | task | item |
//! |---|---|
//! | run the model | [`Model::load`](crate::Model::load) |
//! | open a file, or all files of a split model | [`Gguf::open`] |
//! | read metadata | [`Gguf::metadata`], [`Metadata`] |
//! | read a tensor as floats | [`Gguf::read`] |
//! | read a quantised matrix as affine codes without loss | [`Gguf::read_affine`] |
//! | make the tokenizer that the metadata describe | [`Tokenizer::from_gguf`](crate::Tokenizer::from_gguf) |
//! | read the chat template and sampling parameters | [`Metadata::chat_template`], [`Metadata::generation_defaults`] |
//! | decode blocks | [`dequantise()`] |
//! | check a header | [`GgufHeader::read`] |
//!
//! Versions 2 and 3, little endian. Files are untrusted: everything is checked before any allocation.

mod affine;
mod dequantise;
pub(crate) mod describe;
mod file;
mod generation;
mod header;
mod merges;
mod metadata;
mod pre_tokenizer;
pub(crate) mod source;
mod tokenizer;
mod types;
mod vocabulary;

pub use dequantise::dequantise;
pub use file::{AffineTensors, Gguf};
pub use header::{GgufHeader, GgufTensor};
pub use metadata::{Metadata, MetadataValue, Scalar, Scalars, Texts, ValueType};
pub use types::GgufType;
