//! Whole models, tokenizers, chat templates and GGUF files, in one binary.

mod batch_invariance;
mod chat_encode;
mod chat_templates;

#[path = "../common/mod.rs"]
mod common;
mod configs;
mod gguf;
mod golden;
mod groups;
mod hidden;
mod planted;
mod rustdoc;
mod special_tokens;
mod text_stream;
