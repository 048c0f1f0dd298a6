//! `kvant serve`: an HTTP server for one or more models.

mod args;
mod checkpoint;
#[cfg(feature = "events")]
mod events;
#[cfg(feature = "grpc")]
mod grpc;
mod models;

pub use args::ServeArgs;

use std::{net::TcpListener, path::PathBuf, sync::Arc, time::Duration};

use kvant::Device;
use kvant_engine::Engine;
#[cfg(feature = "grpc")]
use kvant_grpc::GrpcServer;
use kvant_models::{Files, Model, Sampling, Tokenizer, chat::ChatTemplate};
use kvant_server::{Server, ServerOptions, Transfers};

use crate::{output, result::Result, shipped, suggest};

/// Maximum time after the last request to store prefixes.
const CLOSE: Duration = Duration::from_secs(60);
/// A build without gRPC has no such server.
#[cfg(not(feature = "grpc"))]
type GrpcServer = ();

pub fn run(args: &ServeArgs) -> Result {
    args.check()?;
    let options = args.server_options()?;
    // Bound before the model is loaded, which can take long.
    let listener = TcpListener::bind((args.host.as_str(), args.port))
        .map_err(|error| format!("cannot listen on {}:{}: {error}", args.host, args.port))?;
    let address = listener.local_addr()?;
    let is_checked = address.ip().is_loopback() || !args.allowed_host.is_empty();
    let options = if is_checked { options.hosts(&args.allowed_host) } else { options };
    let device = args.device.open()?;
    let page_files = args.open_page_files()?;
    let served = {
        // Only the servers keep the directory open; that of gRPC runs until it is dropped.
        let args = &ServeArgs { page_files: page_files.clone(), ..args.clone() };
        let transfers = args.start_transfers()?;
        let (server, _grpc) = match args.has_several() {
            true => (models::server(args, &device, options)?, None),
            false => one_model(args, &device, options, transfers.clone())?,
        };
        transfers.into_iter().for_each(|transfers| server.transfer(transfers));
        // A closed standard error is ignored.
        let _ = output::note(&format!("listening on http://{address}\n"));
        server.run(listener)
    };
    // The engines store the rest of their prefixes.
    if page_files.is_some_and(|files| !files.close(CLOSE)) {
        let _ = output::note("warning: not all prefixes were stored\n");
    }
    Ok(served?)
}

/// A running model, and the defaults of its requests.
pub struct Loaded {
    /// The engine.
    pub engine: Engine,
    /// The checkpoint's chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// The checkpoint's sampling parameters.
    pub sampling: Sampling,
}

fn one_model(
    args: &ServeArgs,
    device: &Device,
    options: ServerOptions,
    transfers: Option<Transfers>,
) -> Result<(Server, Option<GrpcServer>)> {
    let files = shipped::files(args.models.first().map(PathBuf::as_path))?;
    let Loaded { engine, template, sampling } = load(args, &files, device)?;
    let options = options.sampling(sampling).pooling(args.pooling(&files));
    #[cfg(feature = "events")]
    events::publish(args, &engine)?;
    if template.is_none() && args.models.is_empty() {
        let advice = suggest::text("serve");
        let _ = output::note(&format!("note: the shipped model continues texts and cannot chat. {advice}\n"));
    }
    #[cfg(feature = "grpc")]
    let grpc = grpc::start(args, &engine, &options, transfers)?;
    #[cfg(not(feature = "grpc"))]
    let (grpc, _) = (None, transfers);
    Ok((Server::new(engine, template, options), grpc))
}

/// Loads the first model and starts its engine, for callers without HTTP.
pub fn engine(args: &ServeArgs) -> Result<Loaded> {
    args.check()?;
    let device = args.device.open()?;
    load(args, &shipped::files(args.models.first().map(PathBuf::as_path))?, &device)
}

fn load(args: &ServeArgs, files: &Files, device: &Device) -> Result<Loaded> {
    let sampling = checkpoint::sampling(files)?;
    let tokenizer = Arc::new(Tokenizer::load_files(files)?);
    let template = checkpoint::template(args.chat_template.first().map(PathBuf::as_path), files, &tokenizer)?;
    let kv = args.activations.kv(device, args.kv.as_ref());
    let context = args.context(files)?;
    let load = args.load_options(device, context);
    let drafter = args.drafts.files(args.models.first().map(PathBuf::as_path), files)?;
    let pages = args.pages(files, device, &kv, load, context, drafter.as_ref())?;
    let model = Model::load_files(files, device, &load)?;
    let model = args.drafts.attach(model, drafter.as_ref(), load.dense_weights)?;
    let engine = Engine::start(model, tokenizer, args.engine_options(files, kv, &load, pages)?)?;
    Ok(Loaded { engine, template, sampling })
}
