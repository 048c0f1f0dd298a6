//! Prompts that one worker computes and another continues: the pages travel over TCP.
//!
//! The worker that computed a prompt offers its pages under a one-time token, in the field `kv_transfer_params` of its
//! answer. A request with this field makes another worker fetch them into its prefix cache before it submits the
//! request. Whatever fails there, the request is only computed like any other: from the pages that arrived, or from
//! none.

mod params;
mod wire;

use std::{
    collections::HashMap,
    io::{self, BufWriter, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kvant_engine::{CacheScope, Engine, EngineRequest};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{ids::random_id, serving::Serving};
pub(crate) use params::{Source, TransferParams};
use wire::{Greeting, PageWriter, write_answer};
pub use wire::{PageReader, Refusal, TransferError};

/// Maximum prompts that are offered at the same time. Further ones are not offered.
const MAX_OFFERS: usize = 1024;
/// Maximum connections that receive pages. Further ones are closed.
const MAX_RECEIVERS: usize = 32;
/// Bytes of pages that are in memory at a time, per connection.
const CHUNK: usize = 8 << 20;
/// Maximum time to connect.
const CONNECT_TIME: Duration = Duration::from_secs(2);
/// Maximum time to receive a greeting.
const GREETING_TIME: Duration = Duration::from_secs(10);

/// Options of [`Server::transfer`](crate::Server::transfer).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TransferOptions {
    /// The name or address under which other workers reach the listener.
    pub host: String,
    /// The names and addresses from which pages are fetched, as `remote_host` has them; `*` for any. Requests name a
    /// host and a port to connect to: allow only workers. The pages of a host are trusted. Default: none.
    pub peers: Vec<String>,
    /// Maximum time between the end of a prompt and the fetch of its pages. Default: 60 s.
    pub offer_time: Duration,
    /// Maximum time of a transfer. Default: 60 s.
    pub transfer_time: Duration,
}

impl TransferOptions {
    /// Options of a worker that others reach under this name or address.
    pub fn new(host: impl Into<String>) -> TransferOptions {
        let (offer_time, transfer_time) = (Duration::from_secs(60), Duration::from_secs(60));
        TransferOptions { host: host.into(), peers: Vec::new(), offer_time, transfer_time }
    }

    /// Adds a host to [`TransferOptions::peers`].
    #[must_use]
    pub fn peer(mut self, host: impl Into<String>) -> Self {
        self.peers.push(host.into());
        self
    }

    /// Sets [`TransferOptions::offer_time`].
    #[must_use]
    pub fn offer_time(self, offer_time: Duration) -> Self {
        TransferOptions { offer_time, ..self }
    }

    /// Sets [`TransferOptions::transfer_time`].
    #[must_use]
    pub fn transfer_time(self, transfer_time: Duration) -> Self {
        TransferOptions { transfer_time, ..self }
    }
}

/// The transfers of a server.
pub(crate) struct Transfers {
    options: TransferOptions,
    /// The address of the listener.
    address: SocketAddr,
    engine_id: String,
    offers: Mutex<HashMap<[u8; 32], Offer>>,
    receivers: AtomicUsize,
}

/// A prompt whose pages can be fetched once.
struct Offer {
    /// Keeps the model loaded.
    serving: Arc<Serving>,
    scope: CacheScope,
    tokens: Vec<u32>,
}

/// A connection with a limit for all its reads and writes together.
struct Timed<'a> {
    stream: &'a TcpStream,
    until: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(bytes)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A hash of a prompt.
fn hash(tokens: &[u32]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
    hasher.finalize().into()
}

/// The part of a prompt that is found in a cache: at least one token is computed, as its logits are needed.
fn cached_part(prompt: &[u32]) -> &[u32] {
    &prompt[..prompt.len().saturating_sub(1)]
}

impl Transfers {
    /// Accepts receivers on a thread of its own, until the last handle is dropped.
    pub fn start(listener: TcpListener, options: TransferOptions) -> io::Result<Arc<Transfers>> {
        let (address, offers, receivers) = (listener.local_addr()?, Mutex::default(), AtomicUsize::new(0));
        let transfers = Transfers { options, address, engine_id: random_id("kvant-"), offers, receivers };
        let transfers = Arc::new(transfers);
        let weak = Arc::downgrade(&transfers);
        thread::Builder::new().name("kvant-transfers".to_string()).spawn(move || accept(&listener, &weak))?;
        Ok(transfers)
    }

    /// Offers the pages of a request's prompt, and returns `kv_transfer_params` of the answer. `None` if the prompt has
    /// no full page, or if there are too many offers.
    pub fn offer(self: &Arc<Self>, serving: &Arc<Serving>, request: &EngineRequest) -> Option<Value> {
        let pages = cached_part(&request.prompt).len() / serving.model.engine.options().page_tokens;
        let mut token = [0; 32];
        getrandom::fill(&mut token).ok()?;
        let tokens = cached_part(&request.prompt).to_vec();
        let offer = Offer { serving: Arc::clone(serving), scope: request.cache.clone(), tokens };
        {
            let mut offers = self.offers.lock().unwrap_or_else(PoisonError::into_inner);
            if pages == 0 || offers.len() >= MAX_OFFERS {
                return None;
            }
            offers.insert(token, offer);
        }
        let (weak, time) = (Arc::downgrade(self), self.options.offer_time);
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            drop(weak.upgrade().and_then(|transfers| transfers.take(&token)));
        });
        let source = Source { host: self.options.host.clone(), port: self.address.port(), token };
        Some(params::offered(&self.engine_id, &source, pages))
    }

    /// Withdraws all offers.
    pub fn clear(&self) {
        self.offers.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Takes an offer: a token is good for one connection.
    fn take(&self, token: &[u8; 32]) -> Option<Offer> {
        self.offers.lock().unwrap_or_else(PoisonError::into_inner).remove(token)
    }

    /// Sends the pages that a receiver has a token for. Returns their number.
    fn send(&self, stream: &TcpStream) -> Result<usize, TransferError> {
        stream.set_nodelay(true)?;
        let greeting = Greeting::read(&mut Timed { stream, until: Instant::now() + GREETING_TIME })?;
        let until = Instant::now() + self.options.transfer_time;
        let mut to = BufWriter::with_capacity(1 << 16, Timed { stream, until });
        let offer = match self.take(&greeting.token) {
            None => Err(Refusal::Token),
            Some(offer) if offer.serving.model.engine.page_identity() != greeting.format => Err(Refusal::Format),
            Some(offer) if hash(&offer.tokens) != greeting.prompt => Err(Refusal::Prompt),
            Some(offer) => Ok(offer),
        };
        write_answer(&mut to, offer.as_ref().err().copied())?;
        let Offer { serving, scope, tokens } = match offer {
            Ok(offer) => offer,
            Err(refusal) => {
                to.flush()?;
                return Err(TransferError::Refused(refusal));
            }
        };
        let (mut writer, mut sent) = (PageWriter::new(to, greeting.token), 0);
        loop {
            let pages = serving.model.engine.export_pages(&scope, &tokens, sent, CHUNK);
            if pages.is_empty() {
                writer.end()?;
                return Ok(sent);
            }
            pages.iter().try_for_each(|page| writer.write(page))?;
            sent += pages.len();
        }
    }

    /// Fetches the pages of a prompt from another worker into the prefix cache. Returns their number.
    fn fetch(&self, source: &Source, engine: &Engine, request: &EngineRequest) -> Result<usize, TransferError> {
        let is_peer = |peer: &String| peer == "*" || peer.eq_ignore_ascii_case(&source.host);
        if !self.options.peers.iter().any(is_peer) {
            return Err(TransferError::Invalid("`remote_host` is not among the peers"));
        }
        let until = Instant::now() + self.options.transfer_time;
        let stream = connect(source)?;
        stream.set_nodelay(true)?;
        let tokens = cached_part(&request.prompt);
        let greeting = Greeting { token: source.token, format: engine.page_identity(), prompt: hash(tokens) };
        greeting.write(&mut Timed { stream: &stream, until })?;
        let from = io::BufReader::with_capacity(1 << 16, Timed { stream: &stream, until });
        let max_pages = tokens.len() / engine.options().page_tokens;
        let mut reader = PageReader::start(from, source.token, engine.page_bytes().to_vec(), max_pages)?;
        let (mut pages, mut bytes, mut count) = (Vec::new(), 0, 0);
        loop {
            let next = reader.next_page();
            if let Ok(Some(page)) = next {
                bytes += page.bytes.len();
                pages.push(page);
                if bytes < CHUNK {
                    continue;
                }
            } else {
                // The pages before an error are complete, and of use.
                count += engine.import_pages(&request.cache, tokens, std::mem::take(&mut pages));
                return next.map(|_| count);
            }
            let all = pages.len();
            let kept = engine.import_pages(&request.cache, tokens, std::mem::take(&mut pages));
            (bytes, count) = (0, count + kept);
            if kept < all {
                return Err(TransferError::Invalid("more pages than the cache has room for"));
            }
        }
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        // Wakes the thread that accepts receivers.
        let mut address = self.address;
        if address.ip().is_unspecified() {
            let is_v4 = address.is_ipv4();
            address.set_ip(if is_v4 {
                std::net::Ipv4Addr::LOCALHOST.into()
            } else {
                std::net::Ipv6Addr::LOCALHOST.into()
            });
        }
        let _ = TcpStream::connect_timeout(&address, CONNECT_TIME);
    }
}

fn connect(source: &Source) -> io::Result<TcpStream> {
    let mut error = io::Error::from(io::ErrorKind::NotFound);
    for address in (source.host.as_str(), source.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_TIME) {
            Ok(stream) => return Ok(stream),
            Err(failed) => error = failed,
        }
    }
    Err(error)
}

/// Accepts receivers until the transfers are dropped.
fn accept(listener: &TcpListener, transfers: &Weak<Transfers>) {
    loop {
        let accepted = listener.accept();
        let Some(transfers) = transfers.upgrade() else { return };
        let Ok((stream, peer)) = accepted else {
            // There may be too many open files.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if transfers.receivers.fetch_add(1, Ordering::AcqRel) >= MAX_RECEIVERS {
            transfers.receivers.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let receiver = Receiver(transfers);
        // Without a thread, the connection closes.
        let _ =
            thread::Builder::new().name("kvant-transfer".to_string()).spawn(move || match receiver.0.send(&stream) {
                Ok(pages) => tracing::info!(%peer, pages, "sent the pages of a prompt"),
                Err(error) => tracing::warn!(%peer, %error, "pages of a prompt were not sent"),
            });
    }
}

/// Counts a connection.
struct Receiver(Arc<Transfers>);

impl Drop for Receiver {
    fn drop(&mut self) {
        self.0.receivers.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Serving {
    /// Fetches the pages of a prompt that another worker has computed. If this fails, the prompt is computed here.
    pub async fn fetch_prompt(self: &Arc<Self>, params: Option<&TransferParams>, requests: &[EngineRequest]) {
        let (Some(source), Some(request)) = (params.and_then(TransferParams::source), requests.first().cloned()) else {
            return;
        };
        let fetched = match (source, self.transfers.get().cloned()) {
            (Err(reason), _) => Err(reason.to_string()),
            (_, None) => Err("this server does not transfer pages".to_string()),
            (Ok(source), Some(transfers)) => {
                let started = Instant::now();
                let fetched = self.blocking(move |serving| transfers.fetch(&source, &serving.model.engine, &request));
                match fetched.await {
                    Ok(Ok(pages)) => Ok((pages, started.elapsed())),
                    Ok(Err(error)) => Err(error.to_string()),
                    Err(error) => Err(error.message),
                }
            }
        };
        match fetched {
            Ok((pages, time)) => tracing::info!(pages, ms = time.as_millis() as u64, "fetched the pages of a prompt"),
            Err(reason) => tracing::warn!(reason, "`kv_transfer_params` is of no use: the prompt is computed here"),
        }
    }

    /// `kv_transfer_params` of an answer to requests that asked for it, all with one prompt.
    pub fn offer_prompt(self: &Arc<Self>, request: Option<&EngineRequest>) -> Option<Value> {
        self.transfers.get()?.offer(self, request?)
    }
}
