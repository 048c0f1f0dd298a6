//! Tests the cache against a model that remembers every token, and its files against damage.

use proptest::prelude::*;

use super::*;
use crate::{
    codec::{Norm, TurboQuant},
    ops::{KvRead, KvSide, KvWrite, SourceOrder},
};

const HEADS: usize = 2;

fn layer(window: Option<usize>) -> CacheLayer {
    CacheLayer { kv_heads: HEADS, head_dim: 1, window, k: Codec::F32, v: Codec::F32 }
}

fn cache(layers: Vec<CacheLayer>, capacity: usize, slack: usize) -> KvCache {
    KvCache::new(&Device::cpu(), &CacheSpec { layers, sequences: 3, capacity, slack }).unwrap()
}

/// The tokens of a sequence, and the contents of each slot of each layer.
#[derive(Clone, Default)]
struct Model {
    tokens: Vec<u32>,
    slots: Vec<Vec<u32>>,
}

impl Model {
    fn new(cache: &KvCache) -> Model {
        Model { tokens: Vec::new(), slots: cache.layers.iter().map(|l| vec![0; l.spec().capacity]).collect() }
    }

    fn append(&mut self, ids: &[u32]) {
        for &id in ids {
            for slots in &mut self.slots {
                let slot = self.tokens.len() % slots.len();
                slots[slot] = id;
            }
            self.tokens.push(id);
        }
    }

    /// Whether every token from `first` on, and the next one, finds all positions that it sees in every layer.
    fn serves(&self, first: usize, cache: &KvCache) -> bool {
        self.slots.iter().zip(&cache.spec.layers).all(|(slots, layer)| {
            (first..=self.tokens.len()).all(|position| {
                let start = layer.window.map_or(0, |window| (position + 1).saturating_sub(window));
                let end = self.tokens.len().min(position + 1);
                (start..end).all(|seen| slots[seen % slots.len()] == self.tokens[seen])
            })
        })
    }
}

#[derive(Clone, Debug)]
enum Op {
    Append(Vec<(usize, usize)>),
    Fresh(usize, usize),
    /// Keeps this many 256ths.
    Truncate(usize, usize),
    TakeBack(usize, usize),
    Fork(usize, usize),
    Clear(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        5 => prop::collection::vec((0usize..3, 0usize..8), 0..4).prop_map(Op::Append),
        2 => (0usize..3, 0usize..20).prop_map(|(s, n)| Op::Fresh(s, n)),
        1 => (0usize..3, 0usize..=256).prop_map(|(s, n)| Op::Truncate(s, n)),
        3 => (0usize..3, 0usize..6).prop_map(|(s, n)| Op::TakeBack(s, n)),
        1 => (0usize..3, 0usize..3).prop_map(|(a, b)| Op::Fork(a, b)),
        1 => (0usize..3).prop_map(Op::Clear),
    ];
    prop::collection::vec(op, 1..30)
}

/// Writes the tokens of a step to every layer: keys are id and head, values their negatives.
fn write(cache: &KvCache, step: &Step, ids: &[u32]) {
    let k: Vec<f32> = ids.iter().flat_map(|id| (0..HEADS).map(move |h| (id * 4) as f32 + h as f32)).collect();
    let v: Vec<f32> = k.iter().map(|x| -x).collect();
    let tensor = |x: &[f32]| Tensor::from_slice(cache.device(), x, &[ids.len(), HEADS, 1]).unwrap();
    let (k, v) = (&tensor(&k), &tensor(&v));
    let mut enc = cache.device().encoder().unwrap();
    for layer in &cache.layers {
        let order = SourceOrder::TokenMajor;
        crate::ops::kv_write(&mut enc, &KvWrite { k, v, order, first_token: 0, step, layer }).unwrap();
    }
    enc.commit().unwrap().wait().unwrap();
}

/// Every layer holds all positions that the next token of each sequence sees.
fn check_contents(cache: &KvCache, models: &[Model]) {
    for (sequence, model) in models.iter().enumerate() {
        assert_eq!(cache.len(sequence).unwrap(), model.tokens.len());
        for (layer, spec) in cache.layers.iter().zip(&cache.spec.layers) {
            let start = spec.window.map_or(0, |window| (model.tokens.len() + 1).saturating_sub(window));
            let seen = &model.tokens[start..];
            for (side, sign) in [(KvSide::K, 1.0), (KvSide::V, -1.0)] {
                let out = Tensor::zeros(cache.device(), DType::F32, &[seen.len(), HEADS, 1]).unwrap();
                let mut enc = cache.device().encoder().unwrap();
                let (order, keep_rotated) = (SourceOrder::TokenMajor, false);
                let read = KvRead { layer, side, sequence, start, keep_rotated, order, out: &out };
                crate::ops::kv_read(&mut enc, &read).unwrap();
                enc.commit().unwrap().wait().unwrap();
                let want: Vec<f32> =
                    seen.iter().flat_map(|id| (0..HEADS).map(move |h| sign * ((id * 4) as f32 + h as f32))).collect();
                assert_eq!(out.to_f32().unwrap(), want);
            }
        }
    }
}

/// Applies an operation to the cache and the models; they must agree on whether and why it fails.
fn apply(cache: &mut KvCache, models: &mut [Model], op: &Op, next_id: &mut u32) {
    let before = cache.sequences.clone();
    let has_linear = cache.spec.layers.iter().any(|layer| layer.window.is_none());
    let limit = if has_linear { cache.spec.capacity } else { usize::MAX };
    let result = match *op {
        Op::Append(_) | Op::Fresh(..) => {
            let one;
            let tokens: &[(usize, usize)] = match op {
                Op::Append(tokens) => tokens,
                Op::Fresh(sequence, count) => {
                    one = [(*sequence, *count)];
                    &one
                }
                _ => unreachable!(),
            };
            let total: usize = tokens.iter().map(|t| t.1).sum();
            let ids: Vec<u32> = (0..total as u32).map(|i| *next_id + i).collect();
            *next_id += total as u32;
            let mut after = models.to_vec();
            let mut rest = &ids[..];
            for &(sequence, count) in tokens {
                let (now, later) = rest.split_at(count);
                after[sequence].append(now);
                rest = later;
            }
            let full = after.iter().any(|model| model.tokens.len() > limit);
            let lost = after.iter().zip(models.iter()).any(|(after, before)| {
                after.tokens.len() > before.tokens.len() && !after.serves(before.tokens.len(), cache)
            });
            let fresh = matches!(op, Op::Fresh(..));
            for &(sequence, _) in tokens {
                let added = after[sequence].tokens.len() - models[sequence].tokens.len();
                let fits = added <= cache.room(sequence).unwrap();
                let alone = after[sequence].serves(models[sequence].tokens.len(), cache);
                let within = after[sequence].tokens.len() <= limit;
                assert_eq!(fits, added == 0 || alone && within);
                assert!(added > cache.max_batch() || alone || !within, "max_batch always fits");
            }
            let step = if fresh {
                cache.append_fresh(tokens).map(|(step, past)| {
                    let lens: Vec<u32> = models.iter().map(|model| model.tokens.len() as u32).collect();
                    assert_eq!(past.to_vec::<u32>().unwrap(), lens);
                    step
                })
            } else {
                cache.append(tokens)
            };
            match &step {
                Ok(step) => {
                    assert!(!full && (fresh || !lost), "{op:?} should have been refused");
                    let starts: Vec<usize> = models.iter().map(|model| model.tokens.len()).collect();
                    models.clone_from_slice(&after);
                    check_step(step, tokens, starts, models);
                    write(cache, step, &ids);
                }
                Err(Error::CacheFull { .. }) => assert!(full, "{op:?}: not full"),
                Err(Error::Value { arg: "tokens", .. }) => assert!(lost && !fresh, "{op:?}: nothing would be lost"),
                Err(other) => panic!("{op:?}: {other}"),
            }
            step.map(|_| ())
        }
        Op::Truncate(..) | Op::TakeBack(..) => {
            let (sequence, len) = match *op {
                Op::Truncate(sequence, part) => (sequence, models[sequence].tokens.len() * part / 256),
                Op::TakeBack(sequence, count) => (sequence, models[sequence].tokens.len().saturating_sub(count)),
                _ => unreachable!(),
            };
            let mut after = models[sequence].clone();
            after.tokens.truncate(len);
            let result = cache.truncate(sequence, len);
            match &result {
                Ok(()) => {
                    assert!(after.serves(len, cache), "{op:?} should have been refused");
                    models[sequence] = after;
                }
                Err(Error::RingOverwritten { layer, needed, oldest, .. }) => {
                    assert!(!after.serves(len, cache), "{op:?}: nothing was lost");
                    assert!(needed < oldest && cache.spec.layers[*layer].window.is_some());
                }
                Err(other) => panic!("{op:?}: {other}"),
            }
            result
        }
        Op::Fork(from, to) => {
            let result = cache.fork(from, to);
            match &result {
                Ok(()) => models[to] = models[from].clone(),
                Err(_) => assert!(!models[to].tokens.is_empty()),
            }
            result
        }
        Op::Clear(sequence) => {
            models[sequence] = Model::new(cache);
            cache.clear(sequence)
        }
    };
    if result.is_err() {
        assert_eq!(cache.sequences, before, "an error must change nothing");
    }
}

fn check_step(step: &Step, tokens: &[(usize, usize)], mut starts: Vec<usize>, models: &[Model]) {
    let (mut positions, mut sequences) = (Vec::new(), Vec::new());
    for &(sequence, count) in tokens {
        for _ in 0..count {
            positions.push(starts[sequence] as u32);
            sequences.push(sequence as u32);
            starts[sequence] += 1;
        }
    }
    assert_eq!(step.positions.to_vec::<u32>().unwrap(), positions);
    assert_eq!(step.sequence.to_vec::<u32>().unwrap(), sequences);
    let lens: Vec<u32> = models.iter().map(|model| model.tokens.len() as u32).collect();
    assert_eq!(step.lens.to_vec::<u32>().unwrap(), lens);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_history_equals_the_model(
        ops in ops(),
        windows in prop::sample::select(vec![
            vec![Some(4)], vec![Some(1)], vec![Some(3), Some(7)], vec![Some(4), None], vec![None], vec![None, Some(40)],
        ]),
        slack in 0usize..5,
    ) {
        let mut cache = cache(windows.into_iter().map(layer).collect(), 23, slack);
        let mut models = vec![Model::new(&cache); 3];
        let mut next_id = 1;
        for op in &ops {
            apply(&mut cache, &mut models, op, &mut next_id);
            check_contents(&cache, &models);
        }
        // A copy from a file behaves like the original.
        let file = TempFile::new();
        cache.save(&file.0).unwrap();
        let loaded = KvCache::load(cache.device(), &file.0).unwrap();
        prop_assert_eq!(&loaded.spec, &cache.spec);
        prop_assert_eq!(&loaded.sequences, &cache.sequences);
        check_contents(&loaded, &models);
    }
}

#[test]
fn a_step_can_be_rewritten() {
    let mut cache = cache(vec![layer(Some(4)), layer(None)], 20, 3);
    cache.append(&[(1, 4)]).unwrap();
    let step = cache.append(&[(0, 1), (2, 2)]).unwrap();
    let kept = step.clone();
    cache.append_into(&[(2, 1), (1, 2)], &step).unwrap();
    assert_eq!(kept.positions.to_vec::<u32>().unwrap(), [2, 4, 5]);
    assert_eq!(kept.sequence.to_vec::<u32>().unwrap(), [2, 1, 1]);
    assert_eq!(kept.lens.to_vec::<u32>().unwrap(), [1, 6, 3]);
    let before = cache.sequences.clone();
    assert!(matches!(cache.append_into(&[(2, 2)], &step), Err(Error::Shape { arg: "step.positions", .. })));
    let elsewhere = Step::new(&Device::reference(), 3, &[(0, 0)]).unwrap();
    assert!(matches!(cache.append_into(&[(2, 1)], &elsewhere), Err(Error::WrongDevice { .. })));
    assert_eq!(cache.sequences, before);
}

#[test]
fn bad_arguments_are_refused() {
    let mut cache = cache(vec![layer(Some(4)), layer(None)], 20, 3);
    assert!(matches!(cache.layer(2), Err(Error::Value { arg: "layer", .. })));
    assert!(matches!(cache.len(3), Err(Error::Value { arg: "sequence", .. })));
    assert!(matches!(cache.append(&[(0, 1), (3, 1)]), Err(Error::Value { arg: "sequence", .. })));
    assert_eq!(cache.len(0).unwrap(), 0);
    assert!(matches!(cache.truncate(0, 1), Err(Error::Value { arg: "len", .. })));
    assert!(matches!(cache.append_fresh(&[(0, 21)]), Err(Error::CacheFull { capacity: 20, tokens: 21, .. })));
    assert!(cache.append(&[(0, usize::MAX), (0, usize::MAX)]).is_err());
    cache.append_fresh(&[(0, 15)]).unwrap();
    let message = cache.append(&[(0, 5)]).unwrap_err().to_string();
    assert!(message.contains("`tokens` must be at most 4"), "{message}");
    assert!(matches!(cache.fork(1, 0), Err(Error::Value { arg: "to", .. })));
    for bad in [
        CacheSpec { layers: vec![], sequences: 1, capacity: 1, slack: 0 },
        CacheSpec { layers: vec![layer(Some(0))], sequences: 1, capacity: 1, slack: 0 },
        CacheSpec { layers: vec![layer(Some(4))], sequences: 1, capacity: 1, slack: usize::MAX },
        CacheSpec { layers: vec![layer(None)], sequences: 1, capacity: usize::MAX, slack: 0 },
        CacheSpec { layers: vec![layer(None)], sequences: 0, capacity: 1, slack: 0 },
        CacheSpec { layers: vec![CacheLayer { k: Codec::tq(4), ..layer(None) }], sequences: 1, capacity: 1, slack: 0 },
    ] {
        assert!(KvCache::new(&Device::cpu(), &bad).is_err(), "{bad:?}");
    }
}

#[test]
fn bytes_by_layer_and_codec() {
    let global = CacheLayer { kv_heads: 2, head_dim: 256, window: None, k: Codec::tq(6), v: Codec::tq(4) };
    let sliding = CacheLayer { window: Some(10), k: Codec::F16, v: Codec::F32, ..global };
    let spec = CacheSpec { layers: vec![sliding, global], sequences: 3, capacity: 100, slack: 6 };
    let cache = KvCache::new(&Device::cpu(), &spec).unwrap();
    let (ring, linear) = (3 * 2 * 16, 3 * 2 * 100);
    let layers = cache.layer_bytes();
    assert_eq!((layers[0].k_bytes, layers[0].v_bytes), (ring * 512, ring * 1024));
    assert_eq!((layers[1].k_bytes, layers[1].v_bytes), (linear * 196, linear * 132));
    assert_eq!(layers[1].k, Codec::tq(6));
    assert_eq!(cache.bytes(), ring * 1536 + linear * 328);
    assert_eq!(cache.bytes_as(Codec::F16), (ring + linear) * 1024);
    assert_eq!((cache.max_batch(), cache.room(0).unwrap()), (7, 16));
}

/// A unique path, removed on drop.
struct TempFile(std::path::PathBuf);

impl TempFile {
    fn new() -> TempFile {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("kvant-cache-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        TempFile(std::env::temp_dir().join(name))
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A file of a cache with every kind of plane, and the cache.
fn saved() -> (TempFile, KvCache) {
    let k = Codec::TurboQuant(TurboQuant { bits: 5, scale: 1.1, norm: Norm::LeastSquares });
    let linear = CacheLayer { kv_heads: 2, head_dim: 8, window: None, k, v: Codec::tq(6) };
    let ring = CacheLayer { window: Some(4), k: Codec::BF16, v: Codec::tq(8), ..linear };
    let spec = CacheSpec { layers: vec![linear, ring], sequences: 2, capacity: 16, slack: 2 };
    let mut cache = KvCache::new(&Device::cpu(), &spec).unwrap();
    let (step, _) = cache.append_fresh(&[(1, 9)]).unwrap();
    let x: Vec<f32> = (0..9 * 2 * 8).map(|i| (i * 37 % 101) as f32 / 50. - 1.).collect();
    let x = Tensor::from_slice(cache.device(), &x, &[9, 2, 8]).unwrap();
    let mut enc = cache.device().encoder().unwrap();
    for layer in &cache.layers {
        let order = SourceOrder::TokenMajor;
        crate::ops::kv_write(&mut enc, &KvWrite { k: &x, v: &x, order, first_token: 0, step: &step, layer }).unwrap();
    }
    enc.commit().unwrap().wait().unwrap();
    cache.truncate(1, 7).unwrap();
    let file = TempFile::new();
    cache.save(&file.0).unwrap();
    (file, cache)
}

#[test]
fn a_file_brings_back_every_plane() {
    let (file, cache) = saved();
    let loaded = KvCache::load(&Device::cpu(), &file.0).unwrap();
    assert_eq!((&loaded.spec, &loaded.sequences), (&cache.spec, &cache.sequences));
    for (a, b) in cache.layers.iter().zip(&loaded.layers) {
        let used = used_slots(a, cache.sequences[1]);
        for (a_planes, b_planes) in [(&a.k, &b.k), (&a.v, &b.v)] {
            for ((_, a_plane), (_, b_plane)) in a_planes.tensors().zip(b_planes.tensors()) {
                for rows in used_rows(a, 1, used) {
                    let bytes = |plane: &Tensor| {
                        let rows = plane.rows(rows.clone()).unwrap();
                        let mut bytes = vec![0; rows.bytes()];
                        rows.read_bytes(&mut bytes).unwrap();
                        bytes
                    };
                    assert_eq!(bytes(a_plane), bytes(b_plane));
                }
            }
        }
    }
    // Only slots in use are stored.
    let stored = std::fs::metadata(&file.0).unwrap().len();
    assert!(stored < cache.bytes() as u64 + 3000, "{stored}");
}

#[test]
fn truncated_and_padded_files_are_refused() {
    let (file, _) = saved();
    let bytes = std::fs::read(&file.0).unwrap();
    for len in (0..bytes.len()).step_by(7).chain([bytes.len() - 1]) {
        std::fs::write(&file.0, &bytes[..len]).unwrap();
        assert!(KvCache::load(&Device::cpu(), &file.0).is_err(), "{len} of {}", bytes.len());
    }
    std::fs::write(&file.0, [&bytes[..], &[0]].concat()).unwrap();
    assert!(KvCache::load(&Device::cpu(), &file.0).is_err());
}

#[test]
fn lies_are_refused_before_memory_is_taken() {
    let (file, _) = saved();
    let bytes = std::fs::read(&file.0).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..8 + header_len].to_vec()).unwrap();
    for (from, to) in [
        (r#""capacity":"16""#, r#""capacity":"4000000000""#),
        (r#""capacity":"16""#, r#""capacity":"18446744073709551615""#),
        (r#""capacity":"16""#, r#""capacity":"6""#),
        (r#""capacity":"16""#, r#""capacity":"-1""#),
        (r#""sequences":"2""#, r#""sequences":"4000000000""#),
        (r#""slack":"2""#, r#""slack":"18446744073709551615""#),
        (r#""slack":"2""#, r#""slack":"1""#),
        ("2:8:all:", "2:18446744073709551615:all:"),
        ("2:8:all:", "4611686018427387904:8:all:"),
        ("2:8:all:", "0:8:all:"),
        ("2:8:all:", "2:8:all:f32:"),
        ("tq5/1.1/least-squares", "tq5/inf/least-squares"),
        ("tq5/1.1/least-squares", "tq7/1/rms"),
        ("tq5/1.1/least-squares", "tq4/1/rms"),
        ("tq5/1.1/least-squares", "tq5/1.1"),
        ("bf16", "f16"),
        ("0/0;7/9", "0/0;7/6"),
        ("0/0;7/9", "0/0;17/17"),
        ("0/0;7/9", "0/0;3/9"),
        ("0/0;7/9", "0/5;7/9"),
        ("0/0;7/9", "0/0"),
        ("0/0;7/9", "7/9;7/9"),
        (r#""version":"1""#, r#""version":"2""#),
        (r#""kvant-cache""#, r#""pt""#),
    ] {
        let lie = header.replace(from, to);
        assert_ne!(lie, header, "{from}");
        let file_bytes = [&(lie.len() as u64).to_le_bytes()[..], lie.as_bytes(), &bytes[8 + header_len..]].concat();
        std::fs::write(&file.0, file_bytes).unwrap();
        let error = KvCache::load(&Device::cpu(), &file.0).err().unwrap_or_else(|| panic!("{from} -> {to} was loaded"));
        assert!(matches!(error, Error::File { .. }), "{from} -> {to}: {error}");
    }
    let layers = header.split_once(r#""layers":""#).and_then(|(_, rest)| rest.split_once('"')).unwrap().0;
    let lie = header.replace(layers, &[layers; 4096].join(";"));
    let file_bytes = [&(lie.len() as u64).to_le_bytes()[..], lie.as_bytes(), &bytes[8 + header_len..]].concat();
    std::fs::write(&file.0, file_bytes).unwrap();
    let error = KvCache::load(&Device::cpu(), &file.0).err().unwrap();
    assert!(error.to_string().contains("more than 4096 layers"), "{error}");
    std::fs::write(&file.0, &bytes).unwrap();
    let limit = KvCache::load(&Device::cpu(), &file.0).unwrap().bytes() as u64;
    assert!(KvCache::load_within(&Device::cpu(), &file.0, limit).is_ok());
    assert!(KvCache::load_within(&Device::cpu(), &file.0, limit - 1).is_err());
    std::fs::write(&file.0, [&u64::MAX.to_le_bytes()[..], &bytes[8..]].concat()).unwrap();
    assert!(matches!(KvCache::load(&Device::cpu(), &file.0), Err(Error::File { .. })));
    // For example, the weights of a model.
    let other = br#"{"__metadata__":{"format":"pt"}}"#;
    std::fs::write(&file.0, [&(other.len() as u64).to_le_bytes()[..], other].concat()).unwrap();
    let error = KvCache::load(&Device::cpu(), &file.0).err().unwrap();
    assert!(error.to_string().contains("not a snapshot"), "{error}");
    assert!(matches!(KvCache::load(&Device::cpu(), std::env::temp_dir()), Err(Error::File { .. })));
}

#[test]
fn a_failed_save_leaves_nothing() {
    let (file, cache) = saved();
    let missing = file.0.with_extension("missing").join("cache");
    assert!(matches!(cache.save(&missing), Err(Error::Io { .. })));
    // A directory cannot be replaced by a file: the temporary one is removed.
    let directory = TempFile::new();
    std::fs::create_dir(&directory.0).unwrap();
    std::fs::write(directory.0.join("kept"), "").unwrap();
    assert!(cache.save(&directory.0).is_err());
    assert_eq!(beside(&directory), 1, "the directory itself");
    std::fs::remove_dir_all(&directory.0).unwrap();
}

/// The number of files whose names start with this one's.
fn beside(file: &TempFile) -> usize {
    let name = file.0.file_name().unwrap().to_str().unwrap();
    let entries = std::fs::read_dir(file.0.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name());
    entries
        .filter(|entry| entry.to_str().is_some_and(|entry| entry == name || entry.starts_with(&format!("{name}."))))
        .count()
}

#[test]
fn a_file_is_whole_whoever_saves_to_it() {
    let (file, cache) = saved();
    let (_, mut other) = saved();
    other.truncate(1, 0).unwrap();
    std::thread::scope(|scope| {
        for cache in [&cache, &other, &cache] {
            scope.spawn(|| (0..30).for_each(|_| cache.save(&file.0).unwrap()));
        }
        for _ in 0..60 {
            let len = KvCache::load(&Device::cpu(), &file.0).unwrap().len(1).unwrap();
            assert!([0, 7].contains(&len), "{len}");
        }
    });
    assert_eq!(beside(&file), 1);
    // A file that another process with the same id left behind neither blocks a save nor is destroyed.
    let stale: Vec<_> = (0..500).map(|n| format!("{}.{}.{n}.tmp", file.0.display(), std::process::id())).collect();
    stale.iter().for_each(|stale| std::fs::write(stale, "kept").unwrap());
    cache.save(&file.0).unwrap();
    assert!(KvCache::load(&Device::cpu(), &file.0).is_ok());
    for stale in stale {
        assert_eq!(std::fs::read_to_string(&stale).unwrap(), "kept");
        std::fs::remove_file(stale).unwrap();
    }
}

/// A small file can describe a cache with little memory and more tensors than any memory can list.
#[test]
fn a_file_without_its_tensors_is_refused_before_they_are_listed() {
    let layer = CacheLayer { kv_heads: 1, head_dim: 8, window: None, k: Codec::BF16, v: Codec::BF16 };
    let spec = CacheSpec { layers: vec![layer; 2000], sequences: 20_000, capacity: 1, slack: 0 };
    let mut cache = KvCache::new(&Device::cpu(), &spec).unwrap();
    let file = TempFile::new();
    cache.save(&file.0).unwrap();
    let bytes = std::fs::read(&file.0).unwrap();
    let header = String::from_utf8(bytes[8..].to_vec()).unwrap();
    let lie = header.replace("0/0", "1/1");
    std::fs::write(&file.0, [&(lie.len() as u64).to_le_bytes()[..], lie.as_bytes()].concat()).unwrap();
    // Listing 80 million tensors takes minutes and 13 GB.
    let start = std::time::Instant::now();
    let error = KvCache::load(&Device::cpu(), &file.0).err().unwrap();
    assert!(matches!(&error, Error::File { reason, .. } if reason.contains("0 tensors, expected 80000000")), "{error}");
    cache.sequences.fill(Sequence { len: 1, written: 1 });
    let error = cache.save(&file.0).err().unwrap();
    assert!(matches!(&error, Error::File { reason, .. } if reason.contains("too many layers")), "{error}");
    assert!(start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
    assert_eq!(beside(&file), 1);
}

proptest! {
    #[test]
    fn damaged_files_never_panic(damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let (file, _) = saved();
        let mut bytes = std::fs::read(&file.0).unwrap();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        std::fs::write(&file.0, bytes).unwrap();
        // Damage to the vectors themselves is undetectable; any other damage is an error.
        if let Ok(cache) = KvCache::load(&Device::cpu(), &file.0) {
            prop_assert!(cache.bytes() < 1 << 20);
        }
    }
}
