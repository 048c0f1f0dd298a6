//! The transfers of a worker.

use std::{
    any::Any,
    fmt, io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use kvant_engine::{Engine, EngineRequest};
use sha2::{Digest, Sha256};

use crate::{
    Offered, TransferError, TransferOptions, TransferParams, fetch,
    offers::{Offer, Offers, Progress, RunningOffer},
    params::{self, Source},
    send,
};

/// Maximum connections that receive pages. Further ones are closed.
const MAX_RECEIVERS: usize = 32;
/// Maximum time to connect.
pub const CONNECT_TIME: Duration = Duration::from_secs(2);

/// Offers prompts to other workers, and fetches prompts that these offer. Clones are handles; the last one stops the
/// listener.
#[derive(Clone)]
pub struct Transfers(Arc<Listening>);

struct Listening {
    options: TransferOptions,
    /// The address of the listener.
    address: SocketAddr,
    engine_id: String,
    offers: Arc<Offers>,
}

/// A hash of a prompt.
pub fn hash(tokens: &[u32]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
    hasher.finalize().into()
}

/// The part of a prompt that is found in a cache: at least one token is computed, as its logits are needed.
pub fn cached_part(prompt: &[u32]) -> &[u32] {
    &prompt[..prompt.len().saturating_sub(1)]
}

fn random() -> Option<[u8; 32]> {
    let mut token = [0; 32];
    getrandom::fill(&mut token).ok()?;
    Some(token)
}

impl Transfers {
    /// Accepts receivers on a thread of its own.
    ///
    /// # Errors
    /// The system refuses the listener, random numbers or a thread.
    pub fn start(listener: TcpListener, options: TransferOptions) -> io::Result<Transfers> {
        let (address, offers) = (listener.local_addr()?, Arc::<Offers>::default());
        let id = random().ok_or_else(|| io::Error::other("the system has no random numbers"))?;
        let engine_id = format!("kvant-{}", &kvant_engine::hex::of(&id)[..16]);
        let expiring = Arc::clone(&offers);
        thread::Builder::new().name("kvant-offers".to_string()).spawn(move || expiring.expire())?;
        let listening = Listening { options, address, engine_id, offers };
        let (offers, time) = (Arc::clone(&listening.offers), listening.options.transfer_time);
        let transfers = Transfers(Arc::new(listening));
        thread::Builder::new().name("kvant-transfers".to_string()).spawn(move || accept(&listener, &offers, time))?;
        Ok(transfers)
    }

    /// Offers the pages of a request's prompt if `params` asks for it, otherwise returns `None`. Call it before the
    /// request is submitted: the pages can be fetched while the prompt is computed. `keep` is dropped after the pages
    /// are fetched or the offer has expired.
    ///
    /// Nothing is offered if the prompt has no full page, if there are too many offers, or if the client's token is
    /// invalid or in use: the other worker then computes the prompt.
    pub fn offer(
        &self,
        engine: &Engine,
        request: &EngineRequest,
        params: &TransferParams,
        keep: impl Any + Send + Sync,
    ) -> Option<Offered> {
        if !params.is_offer_asked() {
            return None;
        }
        let token = params.token().unwrap_or_else(random);
        let offered = token.and_then(|token| self.offer_under(token, engine, request, Arc::new(keep)));
        Some(offered.unwrap_or_else(|| Offered { params: params::not_offered(&self.0.engine_id), _offer: None }))
    }

    fn offer_under(
        &self,
        token: [u8; 32],
        engine: &Engine,
        request: &EngineRequest,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Option<Offered> {
        let Listening { options, address, engine_id, offers } = &*self.0;
        let pages = cached_part(&request.prompt).len() / engine.options().page_tokens;
        let progress = Arc::<Progress>::default();
        let (tokens, scope) = (cached_part(&request.prompt).to_vec(), request.cache.clone());
        let offer = Offer { engine: engine.clone(), scope, tokens, progress: Arc::clone(&progress), _keep: keep };
        if pages == 0 || !offers.add(token, offer) {
            return None;
        }
        let source = Source { host: options.host.clone(), port: address.port(), token };
        let params = params::offered(engine_id, &source, pages);
        let running = RunningOffer { token, time: options.offer_time, progress, offers: Arc::clone(offers) };
        Some(Offered { params, _offer: Some(running) })
    }

    /// Fetches the pages of a request's prompt from the worker that `params` names into the prefix cache. Returns their
    /// number; `None` if `params` names none. Blocks while the other worker computes the prompt.
    ///
    /// # Errors
    /// The pages that arrived before an error are kept.
    pub fn fetch(
        &self,
        engine: &Engine,
        request: &EngineRequest,
        params: &TransferParams,
    ) -> Result<Option<usize>, TransferError> {
        let Some(source) = params.source() else { return Ok(None) };
        fetch::fetch(&self.0.options, &source.map_err(TransferError::Invalid)?, engine, request).map(Some)
    }

    /// Withdraws all offers.
    pub fn clear(&self) {
        self.0.offers.clear();
    }
}

impl fmt::Debug for Transfers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Transfers").field(&self.0.address).finish()
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.offers.close();
        // Wakes the thread that accepts receivers.
        let mut address = self.address;
        if address.ip().is_unspecified() {
            let is_v4 = address.is_ipv4();
            address.set_ip(if is_v4 { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
        }
        let _ = TcpStream::connect_timeout(&address, CONNECT_TIME);
    }
}

/// Accepts receivers until the offers are closed.
fn accept(listener: &TcpListener, offers: &Arc<Offers>, time: Duration) {
    let receivers = Arc::new(AtomicUsize::new(0));
    loop {
        let accepted = listener.accept();
        if offers.is_closed() {
            return;
        }
        let Ok((stream, peer)) = accepted else {
            // There may be too many open files.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        let receiver = Receiver::new(&receivers);
        if receivers.load(Ordering::Acquire) > MAX_RECEIVERS {
            continue;
        }
        let offers = Arc::clone(offers);
        // Without a thread, the connection closes.
        let _ = thread::Builder::new().name("kvant-transfer".to_string()).spawn(move || {
            let _receiver = receiver;
            match send::send(&offers, &stream, time) {
                Ok(pages) => tracing::info!(%peer, pages, "sent the pages of a prompt"),
                Err(error) => tracing::warn!(%peer, %error, "pages of a prompt were not sent"),
            }
        });
    }
}

/// Counts a connection.
struct Receiver(Arc<AtomicUsize>);

impl Receiver {
    fn new(count: &Arc<AtomicUsize>) -> Receiver {
        count.fetch_add(1, Ordering::AcqRel);
        Receiver(Arc::clone(count))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
