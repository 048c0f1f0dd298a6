//! The options of `kvant serve`, and the options of the engine and the server that follow from them.

use std::{
    net::{IpAddr, Ipv6Addr, TcpListener},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use clap::builder::{NonEmptyStringValueParser, RangedU64ValueParser};
use kvant::Device;
use kvant_engine::{EngineOptions, PageFiles};
use kvant_models::{Config, Files, LoadOptions, PoolOptions, Pooling};
use kvant_server::{ApiKeys, ServerOptions, TransferOptions, Transfers};

use crate::{
    Result,
    args::{ActivationArgs, Kv, ModelDeviceArgs},
    drafts::DraftArgs,
    heap, log,
    memory::{self, Demand},
    output,
};

/// Maximum tokens of a step, unless more requests decode.
const MAX_STEP: usize = 2048;

/// Maximum of `--max-sequences`. Larger values are probably typing errors.
const MAX_SEQUENCES: u64 = 65536;

/// Serve models over HTTP, for clients of OpenAI and Anthropic
///
/// GET / is a chat page, GET /openapi.json describes all routes. On SIGTERM or Ctrl-C, running requests finish first.
#[derive(Clone, clap::Args)]
pub struct ServeArgs {
    /// Directory of a checkpoint in Hugging Face or MLX layout, a GGUF file, or a name on the Hugging Face Hub such as
    /// openai/gpt-oss-20b. Several models are loaded together, and requests name one of them [default: the model that
    /// ships with kvant]
    #[arg(value_name = "MODEL")]
    pub(super) models: Vec<PathBuf>,
    /// A directory with models, which are loaded when requests name them. New ones are found while the server runs.
    /// When --memory is full, the least recently used ones are unloaded
    #[arg(long, value_name = "DIR")]
    pub(super) models_dir: Option<PathBuf>,
    /// Maximum time that a request waits for its model to be loaded
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub(super) load_time: u64,
    /// The address to listen on; 0.0.0.0 for all interfaces
    #[arg(long, default_value = "127.0.0.1")]
    pub(super) host: String,
    /// The port; 0 selects a free one
    #[arg(long, default_value_t = 8080)]
    pub(super) port: u16,
    /// The name of the first MODEL in requests and responses; further names are aliases, and `*` as the last one
    /// accepts every name [default: the name of the directory or file]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub(super) name: Vec<String>,
    /// A key that clients must send; can be repeated. Other users of this machine can see it in the process list
    #[arg(long, value_name = "KEY")]
    pub(super) api_key: Vec<String>,
    /// A file with API keys, one per line; SIGHUP reloads it
    #[arg(long, value_name = "FILE")]
    pub(super) api_key_file: Option<PathBuf>,
    /// Also serve vLLM's gRPC protocol on this port of the same address; 0 selects a free one. It has no keys
    #[cfg(feature = "grpc")]
    #[arg(long, value_name = "PORT", conflicts_with_all = ["api_key", "api_key_file"])]
    pub(super) grpc: Option<u16>,
    /// Publish which prefixes are cached, as vLLM's KV events over ZeroMQ, for routers: tcp://*:5557 or an address of
    /// this machine alone listens for subscribers, any other is that of a subscriber. Events contain the tokens of
    /// requests
    #[cfg(feature = "events")]
    #[arg(long, value_name = "ADDRESS")]
    pub(super) kv_events: Option<String>,
    /// The topic of the events
    #[cfg(feature = "events")]
    #[arg(long, value_name = "TOPIC", default_value = "", requires = "kv_events")]
    pub(super) kv_events_topic: String,
    /// Listen here for requests of subscribers for events that they missed
    #[cfg(feature = "events")]
    #[arg(long, value_name = "ADDRESS", requires = "kv_events")]
    pub(super) kv_events_replay: Option<String>,
    /// Give each API key a prefix cache of its own
    #[arg(long)]
    pub(super) cache_per_key: bool,
    /// A Jinja template that renders conversations; with several models NAME=FILE, for the model of that name, can be
    /// repeated [default: the checkpoint's]
    #[arg(long, value_name = "[NAME=]FILE")]
    pub(super) chat_template: Vec<PathBuf>,
    /// Cache type [default: bf16 on CUDA, f16 elsewhere]: f32, f16, bf16, tq8, tq6, tq5, tq4, tq3, tq2, these with
    /// sealed pages (tq4c), K:V as in f16:tq4, or @FILE with types per layer
    #[arg(long, value_name = "KV")]
    pub(super) kv: Option<Kv>,
    /// The pooling of /v1/embeddings: the last token, or the mean of all tokens [default: the checkpoint's, if it was
    /// trained to embed; other models have no embeddings]
    #[arg(long, value_name = "POOLING", value_enum)]
    pub(super) pooling: Option<PoolingChoice>,
    /// Maximum tokens of a text, including the prompt [default: the model's]
    #[arg(long, value_name = "TOKENS", value_parser = RangedU64ValueParser::<usize>::new().range(2..))]
    pub(super) context: Option<usize>,
    /// Maximum running requests
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = RangedU64ValueParser::<usize>::new().range(1..=MAX_SEQUENCES))]
    pub(super) max_sequences: usize,
    /// Memory for KV pages, as in 4GiB; requests wait while it is full [default: enough for all sequences at full
    /// context, or nine tenths of the free memory minus weights and activations, if that suffices for one]. With
    /// several models, it is the memory of all loaded ones: weights, pages and activations [default: nine tenths of the
    /// free memory]
    #[arg(long, value_name = "BYTES")]
    pub(super) memory: Option<Bytes>,
    /// Host memory for pages that do not fit on the device
    #[arg(long, value_name = "BYTES", default_value = "0")]
    pub(super) host_cache: Bytes,
    /// A directory where prefixes outlive the process. It holds the prompts' keys and values, readable by its owner
    #[arg(long, value_name = "DIR")]
    pub(super) prefix_dir: Option<PathBuf>,
    /// Maximum bytes of --prefix-dir; the least recently used pages are removed
    #[arg(long, value_name = "BYTES", default_value = "16GiB", requires = "prefix_dir")]
    pub(super) prefix_disk: Bytes,
    /// Let other workers continue prompts that this one has computed, and the reverse (`kv_transfer_params`). HOST is
    /// the name or address under which they reach this worker
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    pub(super) kv_transfer: Option<(String, u16)>,
    /// A host from which pages are fetched, as the other worker's --kv-transfer names it, or `*`; can be repeated.
    /// Requests select among them
    #[arg(long, value_name = "HOST", requires = "kv_transfer")]
    pub(super) kv_peer: Vec<String>,
    /// The opened --prefix-dir.
    #[arg(skip)]
    pub(super) page_files: Option<PageFiles>,
    /// For models with recurrent states: keep the states of prompts every N tokens, so that other prompts can continue
    /// there [default: where prompts, steps and common prefixes end]
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(super) state_interval: Option<usize>,
    #[command(flatten)]
    pub(super) drafts: DraftArgs,
    /// Maximum time at start to compile kernels and record passes for all batch sizes, on a GPU; 0 defers this until
    /// they are needed
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub(super) warm_up: u64,
    /// Wait for the result of each step before the next one starts, even on a GPU
    #[arg(long)]
    pub(super) no_overlap: bool,
    /// Maximum waiting requests; further ones get 429
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(super) queue: usize,
    /// Maximum tokens of any answer [default: the rest of the context]
    #[arg(long, value_name = "TOKENS", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(super) max_tokens: Option<usize>,
    /// Maximum tokens of an answer if the request sets none [default: 16 in /v1/completions, as in OpenAI's API,
    /// otherwise the rest of the context]
    #[arg(long, value_name = "TOKENS", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(super) default_max_tokens: Option<usize>,
    /// Reject request fields without effect, such as hints
    #[arg(long)]
    pub(super) strict_fields: bool,
    /// The format of log lines
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = log::LogFormat::Text)]
    pub log_format: log::LogFormat,
    /// The minimum level of log lines
    #[arg(long, value_name = "LEVEL", value_enum, default_value_t = log::LogLevel::Info)]
    pub log_level: log::LogLevel,
    /// Maximum time that a shutdown waits for running requests
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(super) drain: u64,
    /// A host name by which clients can reach a server that listens on localhost, for example behind a proxy; can be
    /// repeated. localhost and addresses are always accepted
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    pub(super) allowed_host: Vec<String>,
    /// Maximum open connections; further ones wait
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(super) max_connections: usize,
    /// The origin whose web pages can use the server, as in https://example.com:8080, or `*`
    #[arg(long, value_name = "ORIGIN", value_parser = origin)]
    pub(super) cors: Option<String>,
    #[command(flatten)]
    pub(super) activations: ActivationArgs,
    #[command(flatten)]
    pub(super) device: ModelDeviceArgs,
}

#[derive(Clone, Copy, clap::ValueEnum)]
pub(super) enum PoolingChoice {
    Last,
    Mean,
}

/// The name of a model: the name of its directory or file.
pub(super) fn name_of(path: &Path) -> String {
    // A name on the hub is not a path.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.strip_suffix(".gguf").unwrap_or(&name).to_string()
}

impl ServeArgs {
    /// Whether requests select one of several models.
    pub(super) fn has_several(&self) -> bool {
        self.models.len() > 1 || self.models_dir.is_some()
    }

    /// Rejects incompatible options.
    pub(super) fn check(&self) -> Result {
        if self.models_dir.is_some() && self.models.is_empty() && !self.name.is_empty() {
            return Err("--name is the name of the first MODEL, and there is none".into());
        }
        if self.has_several() && self.drafts.has_drafter() {
            return Err("--drafter: only for one MODEL".into());
        }
        if !self.has_several() && self.chat_template.len() > 1 {
            return Err("--chat-template: one model has one template".into());
        }
        #[cfg(feature = "grpc")]
        if self.has_several() && self.grpc.is_some() {
            return Err("--grpc: only for one MODEL".into());
        }
        #[cfg(feature = "events")]
        if self.has_several() && self.kv_events.is_some() {
            return Err("--kv-events: only for one MODEL, as events do not name the model".into());
        }
        Ok(())
    }

    /// The pooling of embeddings. A model whose pooling is not supported has none, and can still generate text.
    pub(super) fn pooling(&self, files: &Files) -> Option<Pooling> {
        match self.pooling {
            Some(PoolingChoice::Last) => Some(Pooling::Last),
            Some(PoolingChoice::Mean) => Some(Pooling::Mean),
            None => Pooling::load_files(files).unwrap_or_else(|error| {
                let _ = output::note(&format!("warning: no embeddings: {error}\n"));
                None
            }),
        }
    }

    pub(super) fn server_options(&self) -> Result<ServerOptions> {
        let name = self.models.first().map_or_else(|| "rustdoc-11m".to_string(), |path| name_of(path));
        let mut names = self.name.iter().cloned();
        let mut options = ServerOptions::new(names.next().unwrap_or(name));
        for name in names {
            options = options.alias(name);
        }
        let keys = ApiKeys::new(self.api_key.iter().cloned()).and(self.keys_of_file()?);
        if keys.is_empty() && !self.api_key.is_empty() {
            return Err("--api-key: a key must not be empty".into());
        }
        if let Some(origin) = &self.cors {
            options = options.cors(origin);
        }
        let options = options.connections(self.max_connections).reclaim(heap::reclaim);
        let options = options.load_time(Duration::from_secs(self.load_time));
        let options = options.strict_fields(self.strict_fields);
        let options = self.max_tokens.map_or(options.clone(), |max| options.max_tokens(max));
        let options = self.default_max_tokens.map_or(options.clone(), |tokens| options.default_max_tokens(tokens));
        Ok(options.keys(keys).salt_per_key(self.cache_per_key).drain(Duration::from_secs(self.drain)))
    }

    fn keys_of_file(&self) -> Result<ApiKeys> {
        let Some(path) = &self.api_key_file else { return Ok(ApiKeys::default()) };
        let keys = ApiKeys::file(path).map_err(|error| format!("{}: {error}", path.display()))?;
        // A server without keys is open to everyone.
        if keys.is_empty() { Err(format!("{}: no key", path.display()).into()) } else { Ok(keys) }
    }

    /// A pass of the model is a step of the engine. Steps longer than [`MAX_STEP`] would delay decoding requests.
    pub(super) fn load_options(&self, device: &Device, context: usize) -> LoadOptions {
        let cache_division = self.device.cache_division();
        let options = LoadOptions { cache_division, ..self.activations.options(device) };
        let decoding = self.max_sequences.saturating_mul(2 + self.drafts.count());
        LoadOptions { pass_tokens: decoding.max(options.pass_tokens.min(MAX_STEP)), context: Some(context), ..options }
    }

    /// Maximum tokens of a text.
    pub(super) fn context(&self, files: &Files) -> Result<usize> {
        match self.context {
            Some(context) => {
                memory::warn_of_context(files, context)?;
                Ok(context)
            }
            None => Ok(Config::load_files(files)?.max_position_embeddings.unwrap_or(4096)),
        }
    }

    /// Bytes for the engine's pages, or `None` for enough for all sequences. Rejects a model that does not fit.
    pub(super) fn pages(
        &self,
        files: &Files,
        device: &Device,
        kv: &Kv,
        load: LoadOptions,
        longest: usize,
        drafter: Option<&Files>,
    ) -> Result<Option<usize>> {
        let (codecs, sequences) = (kv.codecs.clone(), self.max_sequences);
        let pool = PoolOptions { codecs, sequences, longest, drafts: self.drafts.count(), ..PoolOptions::default() };
        let bytes = self.memory.map(|bytes| bytes.0);
        let demand = Demand { ranks: device.ranks(), pool, load, bytes, drafter, shorter: "--context" };
        if let Some(bytes) = bytes {
            memory::check(files, device, &demand)?;
            memory::check_pages(files, &demand, bytes)?;
            return Ok(Some(bytes));
        }
        let pages = memory::pages(files, device, &demand)?;
        if let Some(bytes) = pages {
            let bytes = output::bytes(bytes);
            let _ = output::note(&format!(
                "{sequences} requests of {longest} tokens do not fit at the same time: they share {bytes} of pages\n"
            ));
        }
        Ok(pages)
    }

    /// The options of a model's engine. `load`: how the model is loaded.
    pub(super) fn engine_options(
        &self,
        files: &Files,
        kv: Kv,
        load: &LoadOptions,
        pages: Option<usize>,
    ) -> Result<EngineOptions> {
        let options = EngineOptions::default()
            .codecs(kv.codecs)
            .sequences(self.max_sequences)
            .step_tokens(load.pass_tokens)
            .drafts(self.drafts.count())
            .warm_up(Duration::from_secs(self.warm_up))
            .queue(self.queue)
            .host_memory(self.host_cache.0);
        let options = self.state_interval.map_or(options.clone(), |tokens| options.state_interval(tokens));
        let options = if self.no_overlap { options.overlap(false) } else { options };
        let options = self.context.map_or(options.clone(), |tokens| options.context(tokens));
        let options = pages.map_or(options.clone(), |bytes| options.memory(bytes));
        if self.page_files.is_none() && self.kv_transfer.is_none() {
            return Ok(options);
        }
        let options = options.model_identity(files.samples()?);
        let Some(page_files) = &self.page_files else { return Ok(options) };
        let loaded = [files.modification_times()?, self.device.numerics(load).into_bytes()].concat();
        Ok(options.page_files(page_files.clone()).load_identity(loaded))
    }

    /// Starts the listener of `--kv-transfer`.
    pub(super) fn start_transfers(&self) -> Result<Option<Transfers>> {
        let Some((host, port)) = &self.kv_transfer else { return Ok(None) };
        let failed = |error| format!("--kv-transfer: cannot listen on {host}:{port}: {error}");
        let listener = TcpListener::bind((host.as_str(), *port)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let options = self.kv_peer.iter().fold(TransferOptions::new(host), |options, peer| options.peer(peer));
        let transfers = Transfers::start(listener, options).map_err(failed)?;
        let _ = output::note(&format!("pages of prompts on {address}\n"));
        Ok(Some(transfers))
    }

    /// Opens the directory of `--prefix-dir`.
    pub(super) fn open_page_files(&self) -> Result<Option<PageFiles>> {
        let open = |path: &PathBuf| PageFiles::open(path, self.prefix_disk.0 as u64);
        self.prefix_dir.as_ref().map(open).transpose().map_err(|error| format!("--prefix-dir: {error}").into())
    }
}

/// A host and a port. The host of an IPv6 address is in brackets.
fn host_and_port(text: &str) -> std::result::Result<(String, u16), String> {
    let parsed = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    let (host, port) = parsed.ok_or("expected HOST:PORT, as in 10.0.0.1:5600")?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if host.is_empty() {
        Err("expected a host that other workers can reach".to_string())
    } else {
        Ok((host.into(), port))
    }
}

/// An origin in the format of browsers, or `*`. Any other format would never match.
fn origin(text: &str) -> std::result::Result<String, String> {
    let is_scheme = |scheme: &str| {
        let rest = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.".contains(&b);
        scheme.starts_with(|c: char| c.is_ascii_lowercase()) && scheme.bytes().all(rest)
    };
    let is_host = |host: &str| match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(v6) => v6.parse::<Ipv6Addr>().is_ok(),
        None => host_name(host).is_ok() && !host.contains(|c: char| c == ':' || c.is_ascii_uppercase()),
    };
    let is_port = |port: &str| port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok();
    let is_origin = text.split_once("://").is_some_and(|(scheme, place)| {
        let (host, port) = match place.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
            _ => (place, None),
        };
        is_scheme(scheme) && is_host(host) && port.is_none_or(is_port)
    });
    let expected = "expected an origin in lower case and without a path, as in https://example.com:8080, or *";
    if text == "*" || is_origin { Ok(text.to_string()) } else { Err(expected.to_string()) }
}

/// A host name in the format of the header `Host`, without the port.
fn host_name(text: &str) -> std::result::Result<String, String> {
    let is_label =
        |label: &str| !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
    let is_name = text.split('.').all(is_label) || text.parse::<IpAddr>().is_ok();
    let expected = "expected the name of a host, without scheme and port, as in box.example";
    if is_name { Ok(text.to_string()) } else { Err(expected.to_string()) }
}

/// A number of bytes: `4GiB`, `512M`, `1000000`. All units are powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Bytes(pub(super) usize);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Bytes, String> {
        let invalid = || format!("expected bytes as in 4GiB, 512M or 1000000, got {text:?}");
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let shift = match text[digits..].trim().trim_end_matches("iB").trim_end_matches('B') {
            "" => 0,
            "k" | "K" => 10,
            "M" => 20,
            "G" => 30,
            "T" => 40,
            _ => return Err(invalid()),
        };
        let number: usize = text[..digits].parse().map_err(|_| invalid())?;
        number.checked_mul(1 << shift).map(Bytes).ok_or_else(invalid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_as_browsers_send_them() {
        for good in [
            "*",
            "http://localhost",
            "https://example.com:8443",
            "http://127.0.0.1:3000",
            "http://[::1]",
            "http://[::1]:3000",
            "chrome-extension://abcdefgh",
        ] {
            assert_eq!(origin(good).as_deref(), Ok(good));
        }
        for bad in [
            "",
            "nonsense",
            "example.com",
            "https://",
            "https://example.com/",
            "https://example.com/page",
            "https://Example.com",
            "HTTPS://example.com",
            "https://a.example, https://b.example",
            "http://localhost:",
            "http://localhost:70000",
            "http://localhost:+80",
            "http://[x]",
            "://example.com",
        ] {
            assert!(origin(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_without_ports() {
        for good in ["box", "box.example", "Box-1.example", "my_service", "10.0.0.7", "::1"] {
            assert_eq!(host_name(good).as_deref(), Ok(good));
        }
        for bad in ["", " ", "*", "box.example:8080", "http://box.example", "box.example.", ".example", "a,b", "a b"] {
            assert!(host_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bytes_with_units() {
        for (text, bytes) in [("0", 0), ("7B", 7), ("3K", 3 << 10), ("512MiB", 512 << 20), ("4 GB", 4 << 30)] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for text in ["", "G", "-1", "1.5G", "4X", "99999999999T", "4GiBB x"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }
}
