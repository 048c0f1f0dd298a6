//! Runs many requests concurrently on one device: continuous batching over the pages of a [`kvant::KvPool`].
//!
//! | task | item |
//! |---|---|
//! | start an engine for a model | [`Engine::start`], [`EngineOptions`] |
//! | generate text | [`Engine::submit`], [`EngineRequest`], [`Responses`], [`Event`] |
//! | embed a text | [`EngineRequest::embed`], [`Event::Embedding`] |
//! | make a text follow a JSON schema, a regular expression or a grammar | [`Engine::compile`], [`Grammar`] |
//! | watch it | [`Engine::stats`], [`Engine::is_healthy`] |
//! | move prefixes to another engine | [`Engine::export_pages`], [`Engine::import_pages`] |
//! | keep prefixes for later processes | [`PageFiles`], [`EngineOptions::page_files`] |
//! | stop it | [`Engine::drain`] |
//!
//! ```no_run
//! use std::sync::Arc;
//! use kvant::Device;
//! use kvant_engine::{Engine, EngineOptions, EngineRequest, Event};
//! use kvant_models::{Model, Sampling, Tokenizer};
//! let dir = "path/to/a/model".as_ref();
//! let (model, tokenizer) = (Model::load(dir, &Device::default())?, Tokenizer::load(dir)?);
//! let engine = Engine::start(model, Arc::new(tokenizer), EngineOptions::default())?;
//!
//! let prompt = engine.tokenizer().encode_prompt("# Fearless Concurrency")?;
//! let sampling = Sampling::default().temperature(0.7).seed(1);
//! let responses = engine.submit(EngineRequest::new(prompt).max_tokens(100).sampling(sampling))?;
//! for event in responses {
//!     match event {
//!         Event::Token(token) => print!("{}", token.text),
//!         Event::Finished(finished) => println!("{}\n{:?}", finished.text, finished.reason),
//!         Event::Failed(failure) => eprintln!("{failure}"),
//!         _ => {}
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! One thread owns the model and its pages, and runs steps. A second thread converts tokens to text and finds stop
//! strings. A request pauses while its events are not read. A request whose [`Responses`] are dropped ends within a
//! step.

#![forbid(unsafe_code)]

mod commands;
mod engine;
mod error;
mod event;
mod grammar;
#[doc(hidden)]
pub mod hex;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
mod lock;
mod options;
mod page_files;
mod request;
mod responses;
pub mod scheduler;
mod shared;
mod stats;
mod stop;
mod text;
mod worker;

pub use engine::Engine;
pub use error::SubmitError;
pub use event::{Event, Failure, FinishReason, Finished, TextToken, Usage};
pub use grammar::{CompiledGrammar, Grammar, InexactNumber};
pub use kvant::PrefixPage;
pub use options::EngineOptions;
pub use page_files::{PageFileStore, PageFiles, PageFilesError};
pub use request::{CacheScope, EngineRequest};
pub use responses::{NoEvent, Responses};
pub use stats::{DraftCounts, EngineStats, Histogram, Seconds, Tokens, Unit};
