//! Events of a pool, read by a ZeroMQ subscriber.

use std::{net::TcpListener, time::Duration};

use kvant::{CacheLayer, Codec, Device, KvPool, PoolSpec, PrefixCache};
use kvant_events::{Publisher, Salt};
use rmp_serde::from_slice;
use serde::Deserialize;
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// An event as a consumer of vLLM's events declares it.
#[derive(Debug, Deserialize)]
#[serde(tag = "type")]
enum Event {
    BlockStored {
        block_hashes: Vec<u64>,
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: usize,
        medium: String,
        #[serde(default)]
        extra_keys: Option<Vec<Option<Vec<String>>>>,
        kv_cache_spec_kind: String,
    },
    BlockRemoved {
        block_hashes: Vec<u64>,
        medium: String,
    },
    AllBlocksCleared {},
}

type Batch = (f64, Vec<Event>, u32);

/// A port that was free a moment ago.
fn address() -> String {
    format!("tcp://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
}

fn pool() -> KvPool {
    KvPool::new(&Device::cpu(), &PoolSpec::new(vec![CacheLayer::new(1, 64, Codec::F16)], 1 << 20).page_tokens(16))
        .unwrap()
}

fn keep(pool: &KvPool, salt: &[u8], tokens: std::ops::Range<u32>) {
    let tokens: Vec<u32> = tokens.collect();
    let mut sequence = pool.sequence();
    pool.step(&mut [(&mut sequence, tokens.len())]).unwrap();
    PrefixCache::new(pool, salt).keep(&sequence, &tokens).unwrap();
}

/// A subscriber, once its subscription has arrived.
async fn subscriber(address: &str, topic: &str) -> SubSocket {
    let mut socket = SubSocket::new();
    socket.connect(address).await.unwrap();
    socket.subscribe(topic).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    socket
}

async fn next<S: SocketRecv>(socket: &mut S) -> ZmqMessage {
    timeout(Duration::from_secs(20), socket.recv()).await.expect("a message in time").unwrap()
}

/// A request to the replay socket, after the empty frame of a REQ socket.
fn replay_request(frame: Vec<u8>) -> ZmqMessage {
    let mut message = ZmqMessage::from(Vec::new());
    message.push_back(frame.into());
    message
}

/// A block of an event.
struct Block {
    hash: u64,
    parent: Option<u64>,
    tokens: Vec<u32>,
    keys: Option<Vec<String>>,
}

/// The next blocks that are stored. The pages of a prompt may come in several messages.
async fn stored(socket: &mut SubSocket, count: usize) -> Vec<Block> {
    let mut blocks = Vec::new();
    while blocks.len() < count {
        let message = next(socket).await;
        assert_eq!(message.get(0).unwrap()[..], b"kv@pod@model"[..]);
        let (seconds, events, rank): Batch = from_slice(message.get(2).unwrap()).unwrap();
        assert!(seconds > 1.7e9 && rank == 0);
        for event in events {
            let Event::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                medium,
                extra_keys,
                kv_cache_spec_kind,
            } = event
            else {
                panic!("{event:?}")
            };
            assert_eq!((block_size, medium.as_str(), kv_cache_spec_kind.as_str()), (16, "GPU", "full_attention"));
            assert_eq!(token_ids.len(), 16 * block_hashes.len());
            let mut parent = parent_block_hash;
            for (index, (hash, tokens)) in block_hashes.into_iter().zip(token_ids.chunks(16)).enumerate() {
                let keys = extra_keys.as_ref().and_then(|keys| keys[index].clone());
                blocks.push(Block { hash, parent: parent.replace(hash), tokens: tokens.to_vec(), keys });
            }
        }
    }
    assert_eq!(blocks.len(), count);
    blocks
}

fn number(frame: &[u8]) -> i64 {
    i64::from_be_bytes(frame.try_into().unwrap())
}

#[tokio::test]
async fn stored_removed_and_cleared() {
    let (pool, address, replay) = (pool(), address(), address());
    let cache = PrefixCache::new(&pool, b"");
    let salts = |salt: &[u8]| match salt {
        b"" => Salt::None,
        b"key" => Salt::Secret,
        salt => Salt::Known(String::from_utf8(salt.to_vec()).unwrap()),
    };
    let publisher = Publisher::new(&address, 16).topic("kv@pod@model").replay(&replay).salts(salts);
    tokio::task::spawn_blocking(move || publisher.start(move |report| cache.watch(report))).await.unwrap().unwrap();
    let mut socket = subscriber(&address, "kv@").await;

    keep(&pool, b"", 0..40);
    let first = stored(&mut socket, 2).await;
    assert_eq!(first.iter().map(|block| block.parent).collect::<Vec<_>>(), [None, Some(first[0].hash)]);
    assert_eq!(
        first.iter().flat_map(|block| block.tokens.clone()).collect::<Vec<u32>>(),
        (0..32).collect::<Vec<u32>>()
    );
    assert!(first.iter().all(|block| block.keys.is_none()));

    // A longer text with an equal start: its new page has the last page as parent.
    keep(&pool, b"", 0..48);
    assert_eq!(stored(&mut socket, 1).await[0].parent, Some(first[1].hash));

    // A secret salt is not published; a known one is.
    keep(&pool, b"key", 100..132);
    keep(&pool, b"salt", 100..132);
    let salted = stored(&mut socket, 2).await;
    assert_eq!(
        salted.iter().map(|block| block.keys.as_deref()).collect::<Vec<_>>(),
        [Some(&["salt".to_string()][..]), None]
    );

    // A text that fills the pool evicts the others. The pool has 1 MiB, a page of 16 positions 4 KiB.
    let mut removed = Vec::new();
    keep(&pool, b"", 1000..1000 + 16 * 254);
    while removed.len() < 3 {
        let (_, events, _): Batch = from_slice(next(&mut socket).await.get(2).unwrap()).unwrap();
        for event in events {
            if let Event::BlockRemoved { block_hashes, medium } = event {
                assert_eq!(medium, "GPU");
                removed.extend(block_hashes);
            }
        }
    }
    PrefixCache::new(&pool, b"").clear();
    let cleared = loop {
        let message = next(&mut socket).await;
        let (_, events, _): Batch = from_slice(message.get(2).unwrap()).unwrap();
        if events.iter().any(|event| matches!(event, Event::AllBlocksCleared {})) {
            break number(message.get(1).unwrap());
        }
    };

    // The replay from message 1 has all later ones, then the end.
    let mut dealer = DealerSocket::new();
    dealer.connect(&replay).await.unwrap();
    dealer.send(replay_request(1_u64.to_be_bytes().to_vec())).await.unwrap();
    let mut numbers = Vec::new();
    while numbers.last() != Some(&-1) {
        numbers.push(number(next(&mut dealer).await.get(2).unwrap()));
    }
    assert_eq!(numbers, (1..=cleared).chain([-1]).collect::<Vec<i64>>());
}

/// A publisher that starts late reports the pages that are stored already.
#[tokio::test]
async fn earlier_prefixes_are_in_the_replay() {
    let (pool, address, replay) = (pool(), address(), address());
    keep(&pool, b"", 0..64);
    let cache = PrefixCache::new(&pool, b"");
    let publisher = Publisher::new(&address, 16).replay(&replay);
    tokio::task::spawn_blocking(move || publisher.start(move |report| cache.watch(report))).await.unwrap().unwrap();
    let mut dealer = DealerSocket::new();
    dealer.connect(&replay).await.unwrap();
    // An invalid request is not answered, and does not disturb others.
    for request in [vec![7_u8], 0_u64.to_be_bytes().to_vec()] {
        dealer.send(replay_request(request)).await.unwrap();
    }
    let message = next(&mut dealer).await;
    let (_, events, _): Batch = from_slice(message.get(3).unwrap()).unwrap();
    let [Event::BlockStored { token_ids, .. }] = &events[..] else { panic!("{events:?}") };
    assert_eq!(token_ids.len(), 64);
    assert_eq!(number(next(&mut dealer).await.get(2).unwrap()), -1);
}

#[test]
fn addresses_that_cannot_be_used() {
    let start = |address: &str| Publisher::new(address, 16).start(|_| panic!("it must not start")).unwrap_err();
    assert_eq!(start("udp://x").kind(), std::io::ErrorKind::InvalidInput);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    start(&format!("tcp://{}", taken.local_addr().unwrap()));
}
