//! Prefixes in a store outside of the pool: found by other pools, after damage, and after eviction.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
};

use super::{
    states,
    tokens::{DIM, WINDOW, feed, prompt_token, two_layers},
};
use crate::common::{Rng, devices};
use kvant::{
    CacheLayer, Codec, DType, Device, DeviceKind, Error, Fetched, KvPool, PageKey, PageStore, PoolSpec, PrefixCache,
    PrefixPage, Sequence, StateLayer,
};

const PAGE: usize = 16;

/// A store in memory, which outlives its pools.
#[derive(Clone, Default)]
struct Shelf(Arc<Mutex<Pages>>);

#[derive(Default)]
struct Pages {
    pages: HashMap<(PageKey, usize), Vec<u8>>,
    /// Pages that cannot be read, which `has` does not know.
    damaged: HashSet<(PageKey, usize)>,
    /// The pages that were marked as used last.
    touched: Vec<(PageKey, usize)>,
    /// Pages that are read in the background: the second fetch returns them. `None` to read at once.
    fetched: Option<HashSet<(PageKey, usize)>>,
    /// Number of reads that a lookup waited for.
    waits: usize,
}

impl Shelf {
    fn len(&self) -> usize {
        self.0.lock().unwrap().pages.len()
    }

    /// Damages each page with a probability of one in `n`.
    fn damage(&self, rng: &mut Rng, n: usize) {
        let pages = &mut *self.0.lock().unwrap();
        let mut keys: Vec<(PageKey, usize)> = pages.pages.keys().copied().collect();
        keys.sort_unstable();
        pages.damaged.extend(keys.into_iter().filter(|_| rng.below(n) == 0));
    }
}

impl PageStore for Shelf {
    fn root(&self, salt: &[u8]) -> PageKey {
        let mut key = [0; 32];
        key[..salt.len()].copy_from_slice(salt);
        key
    }

    fn child(&self, parent: &PageKey, tokens: &[u32]) -> PageKey {
        let mut words = [0u64; 4];
        for (word, bytes) in words.iter_mut().zip(parent.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap());
            for &token in tokens {
                *word = (*word ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
            }
        }
        let mut key = [0; 32];
        key.chunks_exact_mut(8).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        key
    }

    fn has(&self, key: &PageKey, group: usize) -> bool {
        self.0.lock().unwrap().pages.contains_key(&(*key, group))
    }

    fn read(&mut self, key: &PageKey, group: usize, bytes: usize) -> Option<Vec<u8>> {
        let pages = &mut *self.0.lock().unwrap();
        pages.waits += 1;
        if pages.damaged.remove(&(*key, group)) {
            pages.pages.remove(&(*key, group));
        }
        pages.pages.get(&(*key, group)).filter(|page| page.len() == bytes).cloned()
    }

    fn fetch(&mut self, key: &PageKey, group: usize, bytes: usize) -> Fetched {
        if let Some(fetched) = &mut self.0.lock().unwrap().fetched
            && fetched.insert((*key, group))
        {
            return Fetched::Reading;
        }
        let read = self.read(key, group, bytes).map_or(Fetched::Missing, Fetched::Page);
        self.0.lock().unwrap().waits -= 1;
        read
    }

    fn has_room(&self) -> bool {
        true
    }

    fn write(&mut self, key: &PageKey, group: usize, page: Vec<u8>) {
        self.0.lock().unwrap().pages.insert((*key, group), page);
    }

    fn touch(&mut self, pages: &[(PageKey, usize)]) {
        self.0.lock().unwrap().touched = pages.to_vec();
    }

    fn clear(&mut self) {
        *self.0.lock().unwrap() = Pages::default();
    }
}

fn pool(device: &Device, spec: &PoolSpec, shelf: &Shelf) -> (KvPool, PrefixCache) {
    let pool = KvPool::new(device, spec).unwrap();
    pool.set_page_store(Box::new(shelf.clone()));
    let cache = PrefixCache::new(&pool, b"stored");
    (pool, cache)
}

fn prompt(prompt: u32, len: usize) -> Vec<u32> {
    (0..len).map(|at| prompt_token(prompt, at)).collect()
}

/// A prefix that another pool has stored gives the bits of a prefix that was computed: with windows, and with layers
/// that seal pages.
#[test]
fn a_new_pool_finds_stored_prefixes() {
    let codecs = [Codec::F32, Codec::tq(4), Codec::tq_centred(4)];
    for device in devices() {
        for codec in codecs {
            let lengths = if device.kind() == DeviceKind::Metal { vec![70] } else { (17..=97).step_by(5).collect() };
            for len in lengths {
                let full = CacheLayer::new(1, DIM, codec);
                let layers = vec![full.window(Some(WINDOW)), full];
                let spec = PoolSpec::new(layers, 0).page_tokens(PAGE).room_for(3, len + 2, len).unwrap();
                let (tokens, whole) = (prompt(0, len + 1), (len - 1) / PAGE * PAGE);
                let finish = |pool: &KvPool, sequence: &mut Sequence| {
                    [len, len + 1].map(|end| feed(pool, sequence, &tokens[..end]))
                };
                let shelf = Shelf::default();
                let want = {
                    let (pool, cache) = pool(device, &spec, &shelf);
                    let mut sequence = pool.sequence();
                    feed(&pool, &mut sequence, &tokens[..whole]);
                    cache.keep(&sequence, &tokens[..whole]).unwrap();
                    let want = finish(&pool, &mut sequence);
                    drop(sequence);
                    pool.store_all_pages();
                    want
                };
                let (pool, cache) = pool(device, &spec, &shelf);
                assert_eq!(cache.matched(&tokens), whole, "{device}: {codec}, {len} tokens");
                let mut found = cache.find(&tokens[..len - 1]).unwrap();
                assert_eq!(found.len(), whole, "{device}: {codec}, {len} tokens");
                assert!(finish(&pool, &mut found) == want, "{device}: {codec}, {len} tokens");
                let touched: HashSet<PageKey> = shelf.0.lock().unwrap().touched.iter().map(|(key, _)| *key).collect();
                assert_eq!(touched.len(), whole / PAGE, "all pages of the prefix were used");
                drop(found);
                cache.clear();
                assert_eq!((pool.usage().used, shelf.len()), (0, 0));
                assert!(cache.find(&tokens).unwrap().is_empty());
            }
        }
    }
}

/// Recurrent states are stored with the pages where they can be continued.
#[test]
fn states_are_stored() {
    for device in devices() {
        let spec = PoolSpec::new(vec![CacheLayer::new(1, DIM, Codec::F32)], 1 << 20).page_tokens(PAGE);
        let spec = spec.states([states::STATE; 2].map(|shape| StateLayer::new(DType::F32, &shape)).to_vec());
        let (shelf, tokens) = (Shelf::default(), prompt(0, 70));
        {
            let (pool, cache) = pool(device, &spec, &shelf);
            let mut sequence = pool.sequence();
            for end in [32, 64, 70] {
                states::feed(&pool, &mut sequence, &tokens[..end]);
                cache.keep(&sequence, &tokens[..end]).unwrap();
            }
            drop(sequence);
            while pool.store_next_page() {}
        }
        let (pool, cache) = pool(device, &spec, &shelf);
        let mut found = cache.find(&tokens).unwrap();
        assert_eq!(found.len(), 64, "{device}");
        // Compares with a convolution over all tokens.
        states::feed(&pool, &mut found, &tokens);
    }
}

/// Dense pages and states within a text are stored where a lookup ended: an equal prompt is found again, even if its
/// text went on.
#[test]
fn ends_of_lookups_are_stored() {
    let layers = [CacheLayer::new(1, DIM, Codec::tq_centred(4)), CacheLayer::new(1, DIM, Codec::F32)];
    for (layer, has_states) in layers.into_iter().zip([false, true]) {
        let spec = PoolSpec::new(vec![layer], 1 << 20).page_tokens(PAGE);
        let states = [states::STATE; 2].map(|shape| StateLayer::new(DType::F32, &shape)).to_vec();
        let spec = if has_states { spec.states(states) } else { spec };
        let (shelf, tokens) = (Shelf::default(), prompt(0, 150));
        let run = |pool: &KvPool, sequence: &mut Sequence, end: usize| {
            if has_states {
                states::feed(pool, sequence, &tokens[..end])
            } else {
                drop(feed(pool, sequence, &tokens[..end]))
            }
        };
        {
            let (pool, cache) = pool(&Device::cpu(), &spec, &shelf);
            let mut sequence = cache.find(&tokens[..100]).unwrap();
            for end in [48, 96, 101, 144, 150] {
                run(&pool, &mut sequence, end);
                cache.keep(&sequence, &tokens[..end]).unwrap();
            }
            drop(sequence);
            pool.store_all_pages();
        }
        let (pool, cache) = pool(&Device::cpu(), &spec, &shelf);
        for (asked, found) in [(100, 96), (150, 144), (60, if has_states { 0 } else { PAGE })] {
            let mut sequence = cache.find(&tokens[..asked]).unwrap();
            assert_eq!(sequence.len(), found, "{asked} tokens, states: {has_states}");
            run(&pool, &mut sequence, asked);
        }
    }
}

/// Between steps, a pool stores pages that are followed by others, and the rest when there is time.
#[test]
fn the_ends_of_prefixes_are_stored_last() {
    let spec = PoolSpec::new(vec![CacheLayer::new(1, DIM, Codec::F32)], 1 << 20).page_tokens(PAGE);
    let (shelf, tokens) = (Shelf::default(), prompt(0, 100));
    let (pool, cache) = pool(&Device::cpu(), &spec, &shelf);
    let mut sequence = pool.sequence();
    feed(&pool, &mut sequence, &tokens[..70]);
    cache.keep(&sequence, &tokens[..70]).unwrap();
    assert_eq!((pool.store_pages(2), shelf.len()), (2, 2));
    assert_eq!((pool.store_pages(9), shelf.len()), (1, 3), "the fourth page is an end");
    feed(&pool, &mut sequence, &tokens);
    cache.keep(&sequence, &tokens).unwrap();
    assert_eq!((pool.store_pages(9), shelf.len()), (2, 5));
    assert!(pool.store_next_page() && !pool.store_next_page());
    assert_eq!(shelf.len(), 6);
}

/// Random prompts in pools that are too small for them, with a store that loses pages, and restarts: a found sequence
/// always has the pages of its tokens.
#[test]
fn damaged_pages_are_computed_again() {
    for host in [0, 1 << 14, 1 << 20] {
        let mut rng = Rng::of(format!("damage {host}"));
        let layers = [two_layers(), vec![CacheLayer::new(1, DIM, Codec::F32).window(Some(WINDOW))]];
        for layers in layers {
            let spec = PoolSpec::new(layers, 0).page_tokens(PAGE).room_for(2, 130, 130).unwrap().host_bytes(host);
            let plain = KvPool::new(&Device::cpu(), &spec).unwrap();
            let shelf = Shelf::default();
            let (mut all, mut hits) = (0, 0);
            for _ in 0..6 {
                let (pool, cache) = pool(&Device::cpu(), &spec, &shelf);
                for _ in 0..25 {
                    let tokens = prompt(rng.below(5) as u32, 20 + rng.below(110));
                    let mut sequence = cache.find(&tokens[..tokens.len() - 1]).unwrap();
                    let mut same = plain.sequence();
                    if !sequence.is_empty() {
                        feed(&plain, &mut same, &tokens[..sequence.len()]);
                    }
                    (all, hits) = (all + 1, hits + usize::from(!sequence.is_empty()));
                    let outs = feed(&pool, &mut sequence, &tokens);
                    assert!(outs == feed(&plain, &mut same, &tokens));
                    cache.keep(&sequence, &tokens).unwrap();
                    drop(sequence);
                    match rng.below(4) {
                        0 => shelf.damage(&mut rng, 6),
                        1 => pool.store_all_pages(),
                        2 => assert!(pool.store_pages(3) <= 3),
                        _ => assert!(cache.matched(&tokens) > 0),
                    }
                }
                cache_is_consistent(&pool);
            }
            assert!(hits > all / 3 && hits < all, "{hits} of {all}");
        }
    }
}

/// Without sequences, all pages can be taken.
fn cache_is_consistent(pool: &KvPool) {
    let mut sequence = pool.sequence();
    pool.step(&mut [(&mut sequence, 130)]).unwrap();
    drop(sequence);
    assert!(pool.usage().used <= pool.usage().bytes);
}

/// Pools that store other bytes for the same tokens have other descriptions.
#[test]
fn page_formats_differ() {
    let layer = CacheLayer::new(1, DIM, Codec::F16);
    let spec = |layer: CacheLayer| PoolSpec::new(vec![layer], 1 << 20);
    let state = StateLayer::new(DType::F32, &[2, 8]);
    let specs = [
        spec(layer),
        spec(layer).page_tokens(32),
        spec(layer.v(Codec::tq(4))),
        spec(layer.k(Codec::tq_centred(4))),
        spec(layer.window(Some(20))),
        spec(CacheLayer::new(2, DIM, Codec::F16)),
        spec(layer).states(vec![state]),
    ];
    let format = |spec: &PoolSpec| KvPool::new(&Device::cpu(), spec).unwrap().page_format();
    let formats: HashSet<String> = specs.iter().map(format).collect();
    assert_eq!(formats.len(), specs.len());
    assert_eq!(format(&specs[0]), format(&specs[0].clone().host_bytes(5)), "memory does not matter");
}

/// Copies a prefix from one pool to another, in parts of at most `max_bytes` bytes.
fn transfer(from: &PrefixCache, to: &PrefixCache, tokens: &[u32], max_bytes: usize) -> usize {
    let (mut next, mut count) = (Vec::new(), 0);
    loop {
        let pages = from.export_pages(tokens, &next, false, max_bytes).unwrap();
        if pages.is_empty() {
            return count;
        }
        after(&mut next, &pages);
        assert!(pages.len() == 1 || pages.iter().map(|page| page.bytes.len()).sum::<usize>() <= max_bytes);
        assert_eq!(to.import_pages(tokens, &pages).unwrap(), pages.len());
        count += pages.len();
    }
}

/// Sets the indices after exported pages, by group.
fn after(next: &mut Vec<usize>, pages: &[PrefixPage]) {
    for page in pages {
        next.resize(next.len().max(page.group + 1), 0);
        next[page.group] = page.index + 1;
    }
}

/// A prefix that moved to another pool gives the bits of one that was computed there.
#[test]
fn prefixes_move_to_another_pool() {
    for device in devices() {
        for codec in [Codec::F32, Codec::tq(4), Codec::tq_centred(4)] {
            let len = 100;
            let full = CacheLayer::new(1, DIM, codec);
            let spec = PoolSpec::new(vec![full.window(Some(WINDOW)), full], 0).page_tokens(PAGE);
            let spec = spec.room_for(3, len + 2, len).unwrap();
            let (tokens, whole) = (prompt(0, len + 1), (len - 1) / PAGE * PAGE);
            let finish =
                |pool: &KvPool, sequence: &mut Sequence| [len, len + 1].map(|end| feed(pool, sequence, &tokens[..end]));
            let [(from, source), (to, target)] = [0, 1]
                .map(|_| KvPool::new(device, &spec).unwrap())
                .map(|pool| (pool.clone(), PrefixCache::new(&pool, b"")));
            let mut sequence = from.sequence();
            feed(&from, &mut sequence, &tokens[..whole]);
            source.keep(&sequence, &tokens[..whole]).unwrap();
            let want = finish(&from, &mut sequence);
            let pages = transfer(&source, &target, &tokens[..len - 1], 3 * spec.bytes / 20);
            assert!(pages >= whole / PAGE, "{device}: {codec}");
            let mut found = target.find(&tokens[..len - 1]).unwrap();
            assert_eq!(found.len(), whole, "{device}: {codec}");
            assert!(finish(&to, &mut found) == want, "{device}: {codec}");
            drop(found);
            target.clear();
            assert_eq!(to.usage().used, 0);
        }
    }
}

/// Pages move while their prompt is computed. At its end few are left: those of the last step, of windows, and of the
/// dense ends of layers that seal pages.
#[test]
fn a_prefix_moves_while_it_grows() {
    let device = Device::cpu();
    for codec in [Codec::F32, Codec::tq_centred(4)] {
        let (len, step) = (260, 2 * PAGE);
        let full = CacheLayer::new(1, DIM, codec);
        let spec = PoolSpec::new(vec![full.window(Some(WINDOW)), full], 0).page_tokens(PAGE);
        let spec = spec.room_for(3, len + 2, len).unwrap();
        let (tokens, whole) = (prompt(0, len + 1), (len - 1) / PAGE * PAGE);
        let [(from, source), (to, target)] = [0, 1]
            .map(|_| KvPool::new(&device, &spec).unwrap())
            .map(|pool| (pool.clone(), PrefixCache::new(&pool, b"")));
        let (mut sequence, mut next, mut early) = (from.sequence(), Vec::new(), 0);
        for end in (step..=whole).step_by(step) {
            feed(&from, &mut sequence, &tokens[..end]);
            source.keep(&sequence, &tokens[..end]).unwrap();
            let pages = source.export_pages(&tokens[..len - 1], &next, true, usize::MAX).unwrap();
            after(&mut next, &pages);
            early += pages.len();
            assert_eq!(target.import_pages(&tokens[..len - 1], &pages).unwrap(), pages.len());
        }
        assert!(early >= (whole - step) / PAGE - 2, "{codec}: {early} pages");
        let pages = source.export_pages(&tokens[..len - 1], &next, false, usize::MAX).unwrap();
        assert!(pages.len() <= WINDOW.div_ceil(PAGE) + 6, "{codec}: {} pages", pages.len());
        target.import_pages(&tokens[..len - 1], &pages).unwrap();
        let mut found = target.find(&tokens[..len - 1]).unwrap();
        assert_eq!(found.len(), whole, "{codec}");
        let want = feed(&from, &mut sequence, &tokens[..len]);
        assert!(feed(&to, &mut found, &tokens[..len]) == want, "{codec}");
    }
}

/// A lookup after a prefetch reads nothing, also if a page is damaged.
#[test]
fn a_lookup_need_not_wait_for_the_store() {
    let spec = PoolSpec::new(two_layers(), 0).page_tokens(PAGE).room_for(3, 200, 200).unwrap();
    let (shelf, tokens) = (Shelf::default(), prompt(0, 161));
    let (first, kept) = pool(&Device::cpu(), &spec, &shelf);
    let mut sequence = first.sequence();
    for end in [80, 160] {
        feed(&first, &mut sequence, &tokens[..end]);
        kept.keep(&sequence, &tokens[..end]).unwrap();
    }
    first.store_all_pages();
    for is_damaged in [false, true] {
        shelf.0.lock().unwrap().fetched = Some(HashSet::new());
        let (second, cache) = pool(&Device::cpu(), &spec, &shelf);
        let fetched = cache.prefetch(&tokens[..160]).unwrap();
        assert_eq!((fetched.pages, fetched.is_reading, second.usage().used), (0, true, 0));
        if is_damaged {
            shelf.damage(&mut Rng::new(1), 8);
            assert!(!shelf.0.lock().unwrap().damaged.is_empty());
        }
        let mut pages = 0;
        loop {
            let fetched = cache.prefetch(&tokens[..160]).unwrap();
            pages += fetched.pages;
            if !fetched.is_reading {
                break;
            }
        }
        shelf.0.lock().unwrap().waits = 0;
        let found = cache.find(&tokens[..160]).unwrap();
        assert_eq!(shelf.0.lock().unwrap().waits, 0, "damaged: {is_damaged}");
        assert_eq!(found.len() == 160, !is_damaged);
        assert!(pages >= found.len() / PAGE && second.usage().used > 0, "{pages} pages");
    }
    // Without a store there is nothing to wait for.
    let plain = KvPool::new(&Device::cpu(), &spec).unwrap();
    assert!(!PrefixCache::new(&plain, b"").prefetch(&tokens).unwrap().is_reading);
}

/// States move with the pages where they can be continued.
#[test]
fn states_move_to_another_pool() {
    let spec = PoolSpec::new(vec![CacheLayer::new(1, DIM, Codec::F32)], 1 << 20).page_tokens(PAGE);
    let spec = spec.states([states::STATE; 2].map(|shape| StateLayer::new(DType::F32, &shape)).to_vec());
    let tokens = prompt(0, 70);
    let [from, to] = [0, 1].map(|_| KvPool::new(&Device::cpu(), &spec).unwrap());
    let (source, target) = (PrefixCache::new(&from, b""), PrefixCache::new(&to, b"other"));
    let mut sequence = from.sequence();
    for end in [64, 70] {
        states::feed(&from, &mut sequence, &tokens[..end]);
        source.keep(&sequence, &tokens[..end]).unwrap();
    }
    transfer(&source, &target, &tokens, usize::MAX);
    let mut found = target.find(&tokens).unwrap();
    assert_eq!(found.len(), 64);
    states::feed(&to, &mut found, &tokens);
}

/// Pages that do not fit are refused; a pool without room keeps the first ones.
#[test]
fn only_pages_that_fit_are_imported() {
    let spec = PoolSpec::new(two_layers(), 0).page_tokens(PAGE).room_for(1, 64, 64).unwrap();
    let pool = KvPool::new(&Device::cpu(), &spec).unwrap();
    let (cache, tokens, sizes) = (PrefixCache::new(&pool, b""), prompt(0, 200), pool.page_bytes());
    let page = |index, group: usize, bytes| PrefixPage::new(index, group, vec![1; bytes]);
    for bad in [page(12, 0, sizes[0]), page(0, 2, sizes[1]), page(usize::MAX, 0, sizes[0]), page(0, 0, sizes[0] - 1)] {
        assert!(matches!(cache.import_pages(&tokens, &[bad]), Err(Error::Value { .. })));
    }
    assert_eq!((pool.usage().used, cache.import_pages(&tokens, &[]).unwrap()), (0, 0));
    // A sequence takes the pool's memory.
    let mut sequence = pool.sequence();
    pool.step(&mut [(&mut sequence, 48)]).unwrap();
    let pages: Vec<PrefixPage> = (0..12).map(|index| page(index, 1, sizes[1])).collect();
    assert!(cache.import_pages(&tokens, &pages).unwrap() < 12);
    pool.step(&mut [(&mut sequence, 16)]).unwrap();
    drop(sequence);
    cache.clear();
    assert_eq!(pool.usage().used, 0);
}
