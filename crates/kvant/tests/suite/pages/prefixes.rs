//! Prefixes that a pool keeps: finding, eviction, and equal bits.

use super::tokens::{DIM, WINDOW, feed, prompt_token, two_layers};
use crate::common::{devices, layers::CODECS};
use kvant::{CacheLayer, Codec, Device, Error, KvPool, PoolSpec, PrefixCache, Sequence};

/// A prompt whose beginning is found gives the same bits as one that is computed whole, in the same pieces: for every
/// length modulo the page, over full and sliding layers, in a pool that has just enough pages.
#[test]
fn a_found_prefix_gives_the_same_bits() {
    const PAGE: usize = 16;
    for codec in CODECS {
        for device in devices() {
            let lengths =
                if device.kind() == kvant::DeviceKind::Metal { vec![17, 40, 63] } else { (17..=64).collect() };
            for len in lengths {
                let full = CacheLayer::new(1, DIM, codec);
                let sliding = full.window(Some(WINDOW));
                let spec = PoolSpec::new(vec![sliding, full], 0).page_tokens(PAGE);
                // Room for the kept prefix and one sequence.
                let pool = KvPool::new(device, &spec.room_for(2, len + 1, len).unwrap()).unwrap();
                let cache = PrefixCache::new(&pool, b"bits");
                let tokens: Vec<u32> = (0..=len).map(|at| prompt_token(0, at)).collect();
                let whole = (len - 1) / PAGE * PAGE;
                // The rest of the prompt, then a token; the attention of both layers over each.
                let finish = |sequence: &mut Sequence| -> Vec<Vec<u8>> {
                    let mut outs = Vec::new();
                    for end in [len, len + 1] {
                        outs.extend(feed(&pool, sequence, &tokens[..end]));
                    }
                    outs
                };
                let mut miss = pool.sequence();
                feed(&pool, &mut miss, &tokens[..whole]);
                cache.keep(&miss, &tokens[..whole]).unwrap();
                let want = finish(&mut miss);
                drop(miss);
                let mut hit = cache.find(&tokens[..len - 1]).unwrap();
                assert_eq!(hit.len(), whole, "{device}: {len} tokens");
                assert!(finish(&mut hit) == want, "{device}: {codec}, {len} tokens");
            }
        }
    }
}

/// A prefix ends only where all windows have their positions.
#[test]
fn prefixes_need_their_windows() {
    let pool = KvPool::new(&Device::cpu(), &PoolSpec::new(two_layers(), 1 << 20).page_tokens(16)).unwrap();
    let cache = PrefixCache::new(&pool, b"windows");
    let tokens: Vec<u32> = (0..70).collect();
    let mut sequence = pool.sequence();
    // The full layer has all pages; the sliding layer the last pages of each kept prefix.
    for end in [33, 70] {
        feed(&pool, &mut sequence, &tokens[..end]);
        cache.keep(&sequence, &tokens[..end]).unwrap();
    }
    // Windows of 21: the pages kept for the two ends also serve length 48.
    for (asked, found) in [(70, 64), (64, 64), (63, 48), (50, 48), (47, 32), (32, 32), (31, 16), (15, 0)] {
        assert_eq!(cache.find(&tokens[..asked]).unwrap().len(), found, "{asked} tokens");
    }
    let mut other = tokens.clone();
    other[5] = 1000;
    assert!(cache.find(&other).unwrap().is_empty());
    assert!(PrefixCache::new(&pool, b"another model").find(&tokens).unwrap().is_empty());
}

/// Eviction removes only prefixes that nobody uses, the least recently used first.
#[test]
fn prefixes_in_use_stay() {
    let spec = PoolSpec::new(two_layers(), 0).page_tokens(16).room_for(3, 48, 48).unwrap();
    let pool = KvPool::new(&Device::cpu(), &spec).unwrap();
    let cache = PrefixCache::new(&pool, b"use");
    let prompts = [0u32, 1, 2].map(|prompt| (0..33).map(|at| 100 * prompt + at).collect::<Vec<u32>>());
    for tokens in &prompts {
        let mut sequence = pool.sequence();
        feed(&pool, &mut sequence, &tokens[..32]);
        cache.keep(&sequence, &tokens[..32]).unwrap();
    }
    // The first one is in use, the second one is older than the third.
    let mut held = cache.find(&prompts[0][..32]).unwrap();
    assert_eq!(cache.find(&prompts[2][..32]).unwrap().len(), 32);
    let mut others: Vec<Sequence> = Vec::new();
    loop {
        let mut other = pool.sequence();
        match pool.step(&mut [(&mut other, 1)]) {
            Ok(_) => others.push(other),
            Err(Error::OutOfPages { missing }) => break assert!(missing > 0),
            Err(error) => panic!("{error}"),
        }
    }
    assert!(cache.find(&prompts[1][..32]).unwrap().is_empty() && cache.find(&prompts[2][..32]).unwrap().is_empty());
    assert_eq!(cache.find(&prompts[0][..32]).unwrap().len(), 32, "the prefix in use is still there");
    drop(others);
    let got = feed(&pool, &mut held, &prompts[0]);
    cache.clear();
    let mut again = pool.sequence();
    feed(&pool, &mut again, &prompts[0][..32]);
    assert!(feed(&pool, &mut again, &prompts[0]) == got, "pages in use have not changed");
}

/// A sequence whose prefixes are kept while it grows gets as long as one whose prefixes are not: kept pages that its
/// windows have passed are evicted, although it uses other pages of the same positions.
#[test]
fn kept_pages_that_windows_have_passed_are_evicted() {
    let tokens: Vec<u32> = (0..160).map(|at| prompt_token(0, at)).collect();
    for host in [0, 1 << 20] {
        let spec = PoolSpec::new(two_layers(), 0).page_tokens(16).room_for(1, 160, 16).unwrap().host_bytes(host);
        let run = |keeps: bool| {
            let pool = KvPool::new(&Device::cpu(), &spec).unwrap();
            let (cache, mut sequence) = (PrefixCache::new(&pool, b"passed"), pool.sequence());
            let mut outs = Vec::new();
            for end in (16..=160).step_by(16) {
                outs.extend(feed(&pool, &mut sequence, &tokens[..end]));
                if keeps {
                    cache.keep(&sequence, &tokens[..end]).unwrap();
                }
            }
            assert!(!keeps || cache.find(&tokens).unwrap().len() == 160);
            drop(sequence);
            let mut other = pool.sequence();
            outs.extend(feed(&pool, &mut other, &tokens[..16]));
            cache.clear();
            drop(other);
            assert_eq!((pool.usage().used, pool.usage().host), (0, 0));
            outs
        };
        assert!(run(true) == run(false), "{host} bytes in host memory");
    }
}

/// Evicted prefixes move to host memory, and come back unchanged.
#[test]
fn prefixes_come_back_from_host_memory() {
    for device in devices() {
        let layer = CacheLayer::new(1, DIM, Codec::F32);
        let layers = vec![layer, layer.window(Some(WINDOW))];
        let spec = PoolSpec::new(layers, 0).page_tokens(16).room_for(1, 64, 64).unwrap().host_bytes(1 << 20);
        let pool = KvPool::new(device, &spec).unwrap();
        let cache = PrefixCache::new(&pool, b"host");
        let prompts = [0, 1].map(|prompt| (0..49).map(|at| prompt_token(prompt, at + 40)).collect::<Vec<u32>>());
        let mut outs = Vec::new();
        for tokens in &prompts {
            let mut sequence = pool.sequence();
            feed(&pool, &mut sequence, &tokens[..48]);
            cache.keep(&sequence, &tokens[..48]).unwrap();
            outs.push(feed(&pool, &mut sequence, tokens));
        }
        assert!(pool.usage().host > 0, "{device}: the first prompt has left the device");
        for _ in 0..3 {
            for (tokens, want) in prompts.iter().zip(&outs) {
                let mut sequence = cache.find(&tokens[..48]).unwrap();
                assert_eq!(sequence.len(), 48, "{device}");
                assert!(feed(&pool, &mut sequence, tokens) == *want, "{device}");
            }
        }
        cache.clear();
        assert_eq!((pool.usage().used, pool.usage().host), (0, 0));
    }
}
