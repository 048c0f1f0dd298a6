//! Sealed and dense pages that several sequences share, or that are rolled back.

use super::{PAGE, reference_and_devices};
use crate::{
    common::{
        devices,
        layers::{self, CENTRED_CODECS},
    },
    pages::tokens::{DIM, WINDOW, feed, prompt_token},
};
use kvant::{CacheLayer, Codec, Device, DeviceKind, Error, KvPool, PoolSpec, PrefixCache, Sequence, ops::KvSide};

/// The stored vectors of the positions that a layer holds.
fn stored(pool: &KvPool, sequence: &mut Sequence) -> Vec<f32> {
    let step = pool.step(&mut [(sequence, 0)]).unwrap();
    let layers = 0..pool.spec().layers.len();
    let read = |index: usize| {
        let (layer, held) = (pool.layer(index).unwrap(), sequence.held(index).unwrap());
        let side = |side| layers::read_paged(layer, side, &step, 0, held.clone()).unwrap();
        [side(KvSide::K), side(KvSide::V)].concat()
    };
    layers.flat_map(read).collect()
}

/// A prompt whose beginning is found gives the same bits as one that is computed whole: for every length modulo the
/// page and every end of the found prefix, over full and sliding layers.
#[test]
fn a_found_prefix_gives_the_same_bits() {
    for device in devices() {
        let lengths = if device.kind() == DeviceKind::Metal { vec![70, 97] } else { (64..=100).collect() };
        for len in lengths {
            let codec = |at: usize| CENTRED_CODECS[(len + at) % CENTRED_CODECS.len()];
            let full = CacheLayer::new(1, DIM, codec(0)).v(codec(2));
            let layers = vec![full.window(Some(WINDOW)), full, full.window(Some(4 * PAGE))];
            let spec = PoolSpec::new(layers, 0).page_tokens(PAGE);
            let pool = KvPool::new(device, &spec.room_for(4, len + 1, len).unwrap()).unwrap();
            let cache = PrefixCache::new(&pool, b"bits");
            let tokens: Vec<u32> = (0..=len).map(|at| prompt_token(0, at)).collect();
            // The rest of the prompt, then a token; the attention of the last tokens, and the stored vectors.
            let finish = |sequence: &mut Sequence| {
                feed(&pool, sequence, &tokens[..len - 1]);
                let outs = [len, len + 1].map(|end| feed(&pool, sequence, &tokens[..end]));
                (outs, stored(&pool, sequence))
            };
            let mut miss = pool.sequence();
            for end in (PAGE..len - 1).step_by(PAGE) {
                feed(&pool, &mut miss, &tokens[..end]);
                cache.keep(&miss, &tokens[..end]).unwrap();
            }
            let want = finish(&mut miss);
            drop(miss);
            for pages in 1..=(len - 2) / PAGE {
                let mut hit = cache.find(&tokens[..pages * PAGE + (len - 2) % PAGE]).unwrap();
                assert_eq!(hit.len(), pages * PAGE, "{device}: {len} tokens");
                assert!(finish(&mut hit) == want, "{device}: {}, {len} tokens, {pages} pages", codec(0));
            }
        }
    }
}

/// Roll-backs to every held length, after which the same tokens give the same bits as before; other roll-backs are
/// rejected, and change nothing.
#[test]
fn roll_backs_give_the_same_bits_or_are_refused() {
    let codec = Codec::tq_centred(4);
    for device in reference_and_devices() {
        let len = 5 * PAGE + 7;
        let tokens: Vec<u32> = (0..len + 2).map(|at| prompt_token(0, at)).collect();
        let full = CacheLayer::new(1, DIM, codec);
        let layers = vec![full, full.window(Some(WINDOW)), full.window(Some(5 * PAGE))];
        let spec = PoolSpec::new(layers, 0).page_tokens(PAGE).room_for(2, len + 2, len).unwrap();
        let pool = KvPool::new(&device, &spec).unwrap();
        let mut whole = pool.sequence();
        feed(&pool, &mut whole, &tokens[..len - 1]);
        feed(&pool, &mut whole, &tokens[..len]);
        let want = feed(&pool, &mut whole.fork(), &tokens[..len + 1]);
        let mut refused = 0;
        for end in 0..=len {
            let mut sequence = whole.fork();
            match sequence.truncate(end) {
                Ok(()) => {
                    feed(&pool, &mut sequence, &tokens[..len]);
                    assert!(feed(&pool, &mut sequence, &tokens[..len + 1]) == want, "{device}: {end}");
                }
                Err(Error::NotHeld { needed, oldest }) => {
                    // The token of the latest step can always be removed.
                    assert!(end < len - 1 && needed < oldest && sequence.len() == len, "{device}: {end}");
                    refused += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        assert!((1..len).contains(&refused), "{device}: {refused}");
    }
}

/// A sequence that holds tokens can be rolled back by as many.
#[test]
fn held_tokens_can_be_removed() {
    let pool = super::pool(&Device::cpu(), 1, DIM, Codec::tq_centred(4));
    let mut sequence = pool.sequence();
    sequence.hold(2 * PAGE);
    for end in 1..10 * PAGE {
        feed(&pool, &mut sequence, &(0..end as u32).collect::<Vec<_>>());
        let mut fork = sequence.fork();
        fork.truncate(end.saturating_sub(2 * PAGE)).unwrap();
    }
}

/// When memory is short, dense pages inside a kept prefix are evicted first. The prefix is then still found up to its
/// end, or to a branch.
#[test]
fn dense_pages_within_prefixes_go_first() {
    let layer = CacheLayer::new(1, DIM, Codec::tq_centred(4));
    let spec = PoolSpec::new(vec![layer], 0).page_tokens(PAGE);
    let pool = KvPool::new(&Device::cpu(), &spec.room_for(2, 12 * PAGE, PAGE).unwrap()).unwrap();
    let cache = PrefixCache::new(&pool, b"dense");
    let tokens: Vec<u32> = (0..8 * PAGE as u32 + 1).collect();
    let mut sequence = pool.sequence();
    for end in (PAGE..=8 * PAGE).step_by(PAGE).chain([8 * PAGE + 1]) {
        feed(&pool, &mut sequence, &tokens[..end]);
        // Every page is kept while it is dense.
        cache.keep(&sequence, &tokens[..end]).unwrap();
    }
    drop(sequence);
    for end in 1..=8 {
        assert_eq!(cache.find(&tokens[..end * PAGE]).unwrap().len(), end * PAGE);
    }
    // Other sequences take the free pages, and then dense ones.
    let mut others = Vec::new();
    while cache.find(&tokens[..3 * PAGE]).unwrap().len() == 3 * PAGE {
        let mut other = pool.sequence();
        feed(&pool, &mut other, &[7; PAGE]);
        others.push(other);
    }
    assert_eq!(cache.find(&tokens).unwrap().len(), 8 * PAGE, "the whole prefix is there");
}
