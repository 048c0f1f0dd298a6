//! A gRPC server for [`kvant_engine`] with vLLM's protocol, the crate `vllm_proto`.
//!
//! | task | item |
//! |---|---|
//! | serve an engine | [`GrpcServer`], [`GrpcOptions`] |
//! | name the publisher of KV events | [`KvEventSource`] |
//!
//! | service | methods |
//! |---|---|
//! | `vllm.Inference` | `Generate`, `GenerateStream` |
//! | `vllm.Control` | `GetServerInfo`, `GetModelInfo`, `GetKvEventSources`, `Abort`, `ListLoras`, `IsPaused`, `IsSleeping`, `GetWeightVersion` |
//! | `grpc.health.v1.Health` | `Check`, `Watch`, `List` |
//!
//! All other methods answer `UNIMPLEMENTED`. A field that would change the answer and is not supported is refused with
//! `INVALID_ARGUMENT` and its name. A client that disconnects cancels its requests.

#![forbid(unsafe_code)]

mod abort;
mod control;
mod inference;
#[doc(hidden)]
pub mod internals;
mod output;
mod request;
mod server;
mod transfer;

pub use server::{GrpcOptions, GrpcServer, KvEventSource};

/// The crate's README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
