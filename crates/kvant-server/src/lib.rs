//! An HTTP server for [`kvant_engine`] that clients of OpenAI use unchanged.
//!
//! | task | item |
//! |---|---|
//! | serve an engine until a signal | [`Server::run`] |
//! | serve in an async program | [`Server::serve`], [`Server::router`] |
//! | compute prompts on one worker and continue them on another | [`Server::transfer`] |
//! | names, keys, limits | [`ServerOptions`], [`ApiKeys`] |
//!
//! An unsupported field that would change the answer gets a 400 that names it. A client that disconnects cancels its
//! request. Logs contain no user text.

#![forbid(unsafe_code)]

mod answer;
mod anthropic;
mod app;
mod blocking;
mod blocks;
mod body;
mod calls;
mod chat;
mod completions;
mod connections;
mod conversation;
mod documents;
mod embeddings;
mod error;
mod fields;
mod gemma_calls;
mod generation;
mod harmony_calls;
mod hosts;
mod ids;
mod keys;
mod logprobs;
mod metrics;
mod models;
mod named_calls;
mod ollama;
mod options;
mod prompts;
mod responses;
mod routes;
mod sampling;
mod server;
mod serving;
mod statuses;
mod store;
mod stream_options;
mod structured;
mod tokens;
mod tools;
mod transfer;
mod workers;

pub use keys::ApiKeys;
pub use kvant_transfer::{TransferOptions, Transfers};
pub use models::{ModelError, ModelFacts, Models, ServedModel};
pub use options::ServerOptions;
pub use server::{ServeError, Server};

/// The crate's README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
