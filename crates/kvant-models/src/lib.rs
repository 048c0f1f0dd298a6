//! Runs text models of the families Llama, Mistral, Ministral 3, Qwen 2, 3, Next and 3.5, LFM2, Phi, SmolLM 3, Granite,
//! OLMo 2 and 3, EXAONE 4, ERNIE 4.5, Hunyuan, GLM 4.5, MiniMax M2, Seed-OSS, Muse Glimmer, Gemma 3, Gemma 4 and
//! gpt-oss on [kvant], from Hugging Face, MLX and GGUF checkpoints. Multimodal checkpoints run as text models.
//!
//! A model is data: a family converts `config.json` to a [`DecoderSpec`], and one interpreter runs all descriptions.
//!
//! | task | item |
//! |---|---|
//! | load a model from a directory or a GGUF file | [`Model::load`] |
//! | load a model that is embedded in the program | [`Model::load_files`], [`Files`] |
//! | load it with 16-bit activations, for the fastest attention on CUDA | [`Model::load_with`], [`LoadOptions`] |
//! | read and check its configuration | [`Config`] |
//! | determine its sizes and the memory that it needs before it is loaded | [`Inspection`] |
//! | make a pool for its keys and values, in any codec | [`Model::new_pool`] |
//! | compute logits of one sequence's tokens | [`Model::feed`] |
//! | compute logits of a batch of sequences | [`Model::forward`] |
//! | convert text to tokens and back, also as a stream | [`Tokenizer`], [`TextStream`] |
//! | decode token by token with a recorded pass (a CUDA graph) | [`Decoder`]; for a batch [`BatchDecoder`] |
//! | choose sampling parameters | [`Sampling`] |
//! | generate tokens from a prompt | [`generate()`] |
//! | sample for many texts at once; log probabilities | [`Sampler`], [`DeviceSampler`], [`TokenLogprobs`] |
//!
//! ```no_run
//! use std::ops::ControlFlow;
//! use kvant::Device;
//! use kvant_models::{PoolOptions, Model, Request, Sampling, Tokenizer, generate};
//! let dir = "path/to/a/model".as_ref();
//! let (model, tokenizer) = (Model::load(dir, &Device::default())?, Tokenizer::load(dir)?);
//! let mut sequence = model.new_pool(&PoolOptions::default())?.sequence();
//! let prompt = tokenizer.encode("# Fearless Concurrency", true)?;
//! let sampling = Sampling::default().temperature(0.7).top_p(0.9);
//! let request = Request { max_tokens: 100, sampling, stop: tokenizer.eos(), ..Request::new(&prompt) };
//! let mut text = tokenizer.stream().after(&prompt)?;
//! generate(&model, &mut sequence, &request, |token| {
//!     if let Ok(piece) = text.push(token) {
//!         print!("{piece}");
//!     }
//!     ControlFlow::Continue(())
//! })?;
//! print!("{}", text.finish()?);
//! # Ok::<(), kvant_models::Error>(())
//! ```
//!
//! Files are untrusted: each reader checks sizes before it allocates, and every [`Error`] names the file, key or
//! tensor.

mod batch_decoder;
mod cache_codecs;
pub mod chat;
mod config;
mod cut;
mod decoder;
mod device_tokens;
mod drafter;
mod error;
mod families;
mod files;
mod fingerprint;
mod forward;
mod generate;
pub mod gguf;
mod hidden;
mod inspect;
mod key_bias;
mod model;
mod open;
mod open_file;
mod panics;
mod parallel;
mod pass_rows;
mod pooling;
mod pools;
mod prepare;
pub mod safetensors;
mod sampling;
mod shard;
mod source;
pub mod spec;
mod tokenizer;
pub mod untrusted;
mod weights;

pub use batch_decoder::{BatchDecoder, PassSize};
pub use cache_codecs::{CacheCodecs, KvCodec};
pub use config::Config;
pub use decoder::Decoder;
pub use device_tokens::DeviceTokens;
pub use drafter::{Draft, DraftDecoder, DraftSize, Drafter, TargetStates};
pub use error::{Error, Result};
pub use files::Files;
pub use forward::Taps;
pub use generate::{Finish, GenerateStats, Request, generate};
pub use inspect::{Inspection, MemoryEstimate, StoredFormat};
pub use model::{LoadOptions, Logits, Model};
pub use pooling::Pooling;
pub use pools::{CacheDivision, PoolOptions};
pub use prepare::MixedSize;
pub use sampling::{DeviceSampler, Sampler, Sampling, TokenLogprobs};
pub use spec::{AttentionSpec, BlockSpec, DecoderSpec, MixerSpec};
pub use tokenizer::{TextStream, TokenPiece, Tokenizer};

/// The crate's README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
