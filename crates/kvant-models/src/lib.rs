//! Runs Gemma 4 text models on [kvant], from Hugging Face and MLX checkpoints; of multimodal ones (`gemma4`, `gemma4_unified`) the
//! text part.
//!
//! | what | where |
//! |---|---|
//! | a directory of files becomes a model on a device | [`Model::load`] |
//! | the same with 16-bit activations, which the fastest attention on CUDA wants | [`Model::load_with`], [`LoadOptions`] |
//! | what the model is, with every number checked | [`Config`] |
//! | its keys and values, in any codec | [`Model::new_cache`] |
//! | tokens in, logits out | [`Model::forward`] |
//! | text to tokens and back, also as a stream | [`Tokenizer`], [`TextStream`] |
//! | token by token, the pass recorded once (a CUDA graph) | [`Decoder`] |
//! | a prompt in, tokens out | [`generate()`] |
//!
//! ```no_run
//! use std::ops::ControlFlow;
//! use kvant::Device;
//! use kvant_models::{CacheOptions, Model, Request, Sampling, Tokenizer, generate};
//! let dir = "models/rustdoc-11m-4bit".as_ref();
//! let (model, tokenizer) = (Model::load(dir, &Device::default())?, Tokenizer::load(dir)?);
//! let mut cache = model.new_cache(&CacheOptions::default())?;
//! let prompt = tokenizer.encode("# Fearless Concurrency", true)?;
//! let sampling = Sampling { temperature: 0.7, top_p: 0.9, ..Sampling::default() };
//! let request = Request { max_tokens: 100, sampling, stop: tokenizer.eos(), ..Request::new(&prompt) };
//! let mut text = tokenizer.stream();
//! generate(&model, &mut cache, &request, |token| {
//!     if let Ok(piece) = text.push(token) {
//!         print!("{piece}");
//!     }
//!     ControlFlow::Continue(())
//! })?;
//! print!("{}", text.finish()?);
//! # Ok::<(), kvant_models::Error>(())
//! ```
//!
//! Files are untrusted: each reader checks sizes before it allocates, and what it refuses it names ([`Error`]).

pub mod config;
mod decoder;
mod error;
mod files;
mod gemma4;
mod generate;
mod model;
pub mod safetensors;
mod tokenizer;
mod weights;
mod workspace;

pub use config::{Config, LayerConfig};
pub use decoder::Decoder;
pub use error::{Error, Result};
pub use generate::{Finish, GenerateStats, Request, Sampling, generate};
pub use model::{CacheOptions, LoadOptions, Logits, Model};
pub use tokenizer::{TextStream, Tokenizer};
