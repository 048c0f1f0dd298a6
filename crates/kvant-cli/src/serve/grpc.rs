//! `--grpc`: vLLM's gRPC protocol for the model of the command.

use std::net::TcpListener;

use kvant_engine::Engine;
use kvant_grpc::{GrpcOptions, GrpcServer};
use kvant_server::{ServerOptions, Transfers};

use super::args::ServeArgs;
use crate::{Result, output};

/// Starts a gRPC server, if the command asks for one.
pub fn start(
    args: &ServeArgs,
    engine: &Engine,
    http: &ServerOptions,
    transfers: Option<Transfers>,
) -> Result<Option<GrpcServer>> {
    let Some(port) = args.grpc else { return Ok(None) };
    let listener = TcpListener::bind((args.host.as_str(), port))
        .map_err(|error| format!("--grpc: cannot listen on {}:{port}: {error}", args.host))?;
    let address = listener.local_addr()?;
    let options = GrpcOptions::new("").names(http.names.clone()).sampling(http.sampling.clone());
    let options = match args.models.first() {
        // Routers may run in other directories.
        Some(model) => options.source(std::fs::canonicalize(model).unwrap_or_else(|_| model.clone()).to_string_lossy()),
        None => options,
    };
    let options = transfers.into_iter().fold(options, GrpcOptions::transfers);
    let server = GrpcServer::start(engine.clone(), with_events(options, args), listener)?;
    let _ = output::note(&format!("gRPC on {address}\n"));
    Ok(Some(server))
}

#[cfg(feature = "events")]
fn with_events(options: GrpcOptions, args: &ServeArgs) -> GrpcOptions {
    let Some(endpoint) = args.kv_events.clone() else { return options };
    let (topic, replay) = (args.kv_events_topic.clone(), args.kv_events_replay.clone());
    options.events(kvant_grpc::KvEventSource { endpoint, topic, replay })
}

#[cfg(not(feature = "events"))]
fn with_events(options: GrpcOptions, _: &ServeArgs) -> GrpcOptions {
    options
}
