//! The thread that publishes.

use std::{
    collections::VecDeque,
    io,
    sync::mpsc as sync_mpsc,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kvant::PrefixChange;
use tokio::{sync::mpsc, time};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::{
    address::{Address, AddressError},
    events::{Converter, Salt, Salts, batch},
};

/// The function that gets the changes of a pool, for [`PrefixCache::watch`](kvant::PrefixCache::watch).
pub type Report = Box<dyn FnMut(PrefixChange) + Send>;

/// Maximum changes of a batch.
const MAX_CHANGES: usize = 4096;
/// The time in which changes become one message.
const GATHER: Duration = Duration::from_millis(1);
/// Maximum messages, and bytes of messages, that are kept for the replay.
const MAX_KEPT: usize = 10_000;
const MAX_KEPT_BYTES: usize = 64 << 20;
/// The sequence number that ends a replay.
const END: i64 = -1;

/// Publishes the prefixes of a pool on a thread of its own.
pub struct Publisher {
    address: String,
    replay: Option<String>,
    topic: String,
    page_tokens: usize,
    salts: Salts,
}

impl Publisher {
    /// A publisher with an empty topic. `address`: `tcp://*:5557`, or an address of this machine alone, listens for
    /// subscribers; any other address is that of a subscriber. `page_tokens`: positions per page of the pool.
    pub fn new(address: impl Into<String>, page_tokens: usize) -> Publisher {
        let salts = |salt: &[u8]| if salt.is_empty() { Salt::None } else { Salt::Secret };
        Publisher { address: address.into(), replay: None, topic: String::new(), page_tokens, salts: Box::new(salts) }
    }

    /// Sets the topic, which subscribers can select by its beginning.
    #[must_use]
    pub fn topic(self, topic: impl Into<String>) -> Self {
        Publisher { topic: topic.into(), ..self }
    }

    /// Sets an address on which subscribers can request messages that they missed.
    #[must_use]
    pub fn replay(self, address: impl Into<String>) -> Self {
        Publisher { replay: Some(address.into()), ..self }
    }

    /// Sets how routers see the salt of a cache. Default: caches with a salt are secret.
    #[must_use]
    pub fn salts(self, salts: impl Fn(&[u8]) -> Salt + Send + 'static) -> Self {
        Publisher { salts: Box::new(salts), ..self }
    }

    /// Listens or connects, then calls `watch` with the function that gets the changes. The thread ends when this
    /// function is dropped. Returns when the sockets listen; a connection to a subscriber is made later.
    ///
    /// # Errors
    /// `InvalidInput` for an address of another form; any other kind if the system refuses the address.
    pub fn start(self, watch: impl FnOnce(Report) + Send + 'static) -> io::Result<()> {
        let invalid = |error: AddressError| io::Error::new(io::ErrorKind::InvalidInput, error);
        let address = Address::parse(&self.address).map_err(invalid)?;
        let replay = self.replay.as_deref().map(Address::parse).transpose().map_err(invalid)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (started, has_started) = sync_mpsc::channel();
        let run = move || runtime.block_on(self.run(address, replay, started, watch));
        thread::Builder::new().name("kvant-events".to_string()).spawn(run)?;
        let ended = |_| io::Error::other("the publisher's thread has ended");
        has_started.recv().map_err(ended)?
    }

    async fn run(
        self,
        address: Address,
        replay: Option<Address>,
        started: sync_mpsc::Sender<io::Result<()>>,
        watch: impl FnOnce(Report),
    ) {
        let sockets = Sockets::bind(&address, replay.as_ref()).await;
        let mut sockets = match sockets {
            Ok(sockets) => {
                let _ = started.send(Ok(()));
                sockets
            }
            Err(error) => {
                let _ = started.send(Err(error));
                return;
            }
        };
        if let Address::Connect(address) = &address
            && let Err(error) = sockets.events.connect(address).await
        {
            tracing::error!(address, %error, "KV events are not published");
            return;
        }
        // Changes are reported from now on, with all pages that are stored already.
        let (report, mut changes) = mpsc::unbounded_channel();
        watch(Box::new(move |change| {
            let _ = report.send(change);
        }));
        let mut converter = Converter::new(self.page_tokens, self.salts);
        let mut messages = Messages::new(self.topic);
        let mut received = Vec::new();
        loop {
            tokio::select! {
                count = changes.recv_many(&mut received, MAX_CHANGES) => {
                    if count == 0 {
                        return;
                    }
                    // The pages of one prompt become one message.
                    time::sleep(GATHER).await;
                    while received.len() < MAX_CHANGES && let Ok(change) = changes.try_recv() {
                        received.push(change);
                    }
                    received.drain(..).for_each(|change| converter.add(change));
                    if let Some(message) = messages.next(&mut converter) {
                        // A slow subscriber misses messages, which it can request again.
                        let _ = sockets.events.send(message).await;
                    }
                }
                request = receive(&mut sockets.replay) => {
                    if let (Some(request), Some(socket)) = (request, &mut sockets.replay) {
                        messages.replay(socket, request).await;
                    }
                }
            }
        }
    }
}

struct Sockets {
    events: PubSocket,
    replay: Option<RouterSocket>,
}

impl Sockets {
    async fn bind(address: &Address, replay: Option<&Address>) -> io::Result<Sockets> {
        let mut sockets = Sockets { events: PubSocket::new(), replay: replay.map(|_| RouterSocket::new()) };
        let refused = |error: zeromq::ZmqError| io::Error::other(error.to_string());
        if let Address::Bind(address) = address {
            sockets.events.bind(address).await.map_err(refused)?;
        }
        if let (Some(socket), Some(address)) = (&mut sockets.replay, replay) {
            let Address::Bind(address) = address else {
                let message = "the address for replays must be one of this machine, as in tcp://*:5558";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
            };
            socket.bind(address).await.map_err(refused)?;
        }
        Ok(sockets)
    }
}

/// The next request for a replay. Never ready without a socket.
async fn receive(socket: &mut Option<RouterSocket>) -> Option<ZmqMessage> {
    match socket {
        Some(socket) => socket.recv().await.ok(),
        None => std::future::pending().await,
    }
}

/// The messages so far.
struct Messages {
    topic: Vec<u8>,
    next: u64,
    /// The latest batches with their sequence numbers.
    kept: VecDeque<(u64, Vec<u8>)>,
    kept_bytes: usize,
}

impl Messages {
    fn new(topic: String) -> Messages {
        Messages { topic: topic.into_bytes(), next: 0, kept: VecDeque::new(), kept_bytes: 0 }
    }

    /// The message with all new events, if there are any.
    fn next(&mut self, converter: &mut Converter) -> Option<ZmqMessage> {
        let events = converter.take();
        if events.is_empty() {
            return None;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        // Writing to memory cannot fail.
        let batch = batch(now, &events, 0).ok()?;
        let number = self.next;
        self.next += 1;
        self.kept_bytes += batch.len();
        self.kept.push_back((number, batch.clone()));
        while self.kept.len() > MAX_KEPT || self.kept_bytes > MAX_KEPT_BYTES {
            let oldest = self.kept.pop_front();
            self.kept_bytes -= oldest.map_or(0, |(_, batch)| batch.len());
        }
        Some(message(self.topic.clone(), [number.to_be_bytes().to_vec(), batch]))
    }

    /// Answers a request for all messages from a sequence number.
    async fn replay(&self, socket: &mut RouterSocket, request: ZmqMessage) {
        let frames = request.into_vec();
        let [peer, empty, first] = frames.as_slice() else { return };
        let Ok(first) = <[u8; 8]>::try_from(&first[..]) else { return };
        let first = u64::from_be_bytes(first);
        let later = self.kept.iter().filter(|(number, _)| *number >= first);
        let later = later.map(|(number, batch)| (&self.topic[..], number.to_be_bytes(), &batch[..]));
        for (topic, number, batch) in later.chain([(&[][..], END.to_be_bytes(), &[][..])]) {
            let frames = [empty.to_vec(), topic.to_vec(), number.to_vec(), batch.to_vec()];
            let message = message(peer.to_vec(), frames);
            // The peer may be gone.
            if socket.send(message).await.is_err() {
                return;
            }
        }
    }
}

fn message<const N: usize>(first: Vec<u8>, others: [Vec<u8>; N]) -> ZmqMessage {
    let mut message = ZmqMessage::from(first);
    others.into_iter().for_each(|frame| message.push_back(frame.into()));
    message
}
