//! The receiver's side of a transfer.

use std::{
    cell::Cell,
    io::{self, BufReader},
    net::{TcpStream, ToSocketAddrs},
    time::{Duration, Instant},
};

use kvant_engine::{Engine, EngineRequest, PrefixPage};

use crate::{
    PageReader, Received, TransferError, TransferOptions,
    params::Source,
    send::CHUNK,
    timed::Timed,
    transfers::{CONNECT_TIME, cached_part, hash},
    wire::Greeting,
};

/// Maximum time in which the other worker can compute the prompt.
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// Fetches the pages of a prompt into the prefix cache. Returns their number.
pub fn fetch(
    options: &TransferOptions,
    source: &Source,
    engine: &Engine,
    request: &EngineRequest,
) -> Result<usize, TransferError> {
    let is_peer = |peer: &String| peer == "*" || peer.eq_ignore_ascii_case(&source.host);
    if !options.peers.iter().any(is_peer) {
        return Err(TransferError::Invalid("`remote_host` is not among the peers"));
    }
    let started = Instant::now();
    let until = Cell::new(started + options.transfer_time);
    let stream = connect(source)?;
    stream.set_nodelay(true)?;
    let tokens = cached_part(&request.prompt);
    // Pages that are evicted before the others arrive are computed again.
    let held = engine.held_pages(&request.cache, tokens);
    let first = held.into_iter().map(|pages| pages.try_into().unwrap_or(0)).collect();
    let greeting = Greeting { token: source.token, format: engine.page_identity(), prompt: hash(tokens), first };
    greeting.write(&mut Timed { stream: &stream, until: &until })?;
    let from = BufReader::with_capacity(1 << 16, Timed { stream: &stream, until: &until });
    let max_pages = tokens.len() / engine.options().page_tokens;
    let mut reader = PageReader::start(from, source.token, engine.page_bytes().to_vec(), max_pages)?;
    let mut pages = Pages { engine, request, waiting: Vec::new(), bytes: 0, kept: 0 };
    loop {
        match reader.next_frame() {
            Ok(Some(Received::Page(page))) => pages.add(page)?,
            Ok(Some(Received::Waiting)) => {
                pages.keep()?;
                // The prompt is still being computed.
                until.set((Instant::now() + options.transfer_time).min(started + MAX_WAIT));
            }
            end => {
                // The pages before an error are complete, and of use.
                pages.keep()?;
                return end.map(|_| pages.kept);
            }
        }
    }
}

/// Received pages.
struct Pages<'a> {
    engine: &'a Engine,
    request: &'a EngineRequest,
    /// Pages that are not in the cache yet, and their bytes.
    waiting: Vec<PrefixPage>,
    bytes: usize,
    kept: usize,
}

impl Pages<'_> {
    fn add(&mut self, page: PrefixPage) -> Result<(), TransferError> {
        self.bytes += page.bytes.len();
        self.waiting.push(page);
        if self.bytes < CHUNK { Ok(()) } else { self.keep() }
    }

    /// Moves pages to the cache.
    fn keep(&mut self) -> Result<(), TransferError> {
        let pages = std::mem::take(&mut self.waiting);
        self.bytes = 0;
        if pages.is_empty() {
            return Ok(());
        }
        let (scope, tokens) = (&self.request.cache, cached_part(&self.request.prompt));
        let all = pages.len();
        let kept = self.engine.import_pages(scope, tokens, pages);
        self.kept += kept;
        if kept < all { Err(TransferError::Invalid("more pages than the cache has room for")) } else { Ok(()) }
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
