//! Drafts that a model's drafter proposes.

mod common;

use std::path::{Path, PathBuf};

use common::drafters::{Mtp, pairs, with_mtp};
use kvant::{Codec, CpuOptions, DType, Device, KvPool, Sequence, Tensor};
use kvant_models::{BatchDecoder, CacheCodecs, Draft, DraftDecoder, Error, Files, Model, PoolOptions, Sampling};

const VOCAB: u32 = 96;

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn model(path: &Path) -> Model {
    pair(path, path)
}

fn pair(target: &Path, drafter: &Path) -> Model {
    let cpu = CpuOptions { threads: Some(2), batch_invariant: true, ..CpuOptions::default() };
    let model = Model::load(target, &Device::cpu_with(cpu).unwrap()).unwrap();
    model.with_drafter(&Files::at(drafter).unwrap(), None).unwrap()
}

fn pool(model: &Model, codecs: impl Into<CacheCodecs>) -> KvPool {
    let options = PoolOptions { codecs: codecs.into(), sequences: 6, longest: 200, page_tokens: 16, drafts: 8 };
    model.new_pool(&options).unwrap()
}

fn text(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|at| 3 + (at * 7 + seed * 31 + at * at * (seed + 1)) % (VOCAB - 6)).collect()
}

/// Appends tokens to sequences in one pass of the target.
fn feed(model: &Model, drafter: &DraftDecoder, batch: &mut [(&mut Sequence, &[u32])]) {
    let pool = batch[0].0.pool().clone();
    let tokens: Vec<u32> = batch.iter().flat_map(|(_, tokens)| tokens.iter().copied()).collect();
    let mut counts: Vec<(&mut Sequence, usize)> =
        batch.iter_mut().map(|(sequence, tokens)| (&mut **sequence, tokens.len())).collect();
    let step = pool.step(&mut counts).unwrap();
    let rows: Vec<usize> = (0..tokens.len()).collect();
    let logits = Tensor::zeros(model.device(), DType::F32, &[rows.len(), model.vocab_size()]).unwrap();
    let states = Some(drafter.states());
    model.start_with(&pool, &step, &tokens, None, (&rows, &logits), states).unwrap().wait().unwrap();
}

fn samplings() -> [Sampling; 2] {
    [Sampling::default(), Sampling::default().temperature(0.9).top_p(0.95).seed(5)]
}

/// The drafts after each part of a text, which the target computes part by part. Each part ends before the last known
/// token.
fn drafts_of(model: &Model, pool: &KvPool, tokens: &[u32], ends: &[usize], how: &Sampling) -> Vec<Vec<u32>> {
    let mut drafter = DraftDecoder::new(model, pool, 4, 5, 128).unwrap();
    let (mut sequence, mut start, mut all) = (pool.sequence(), 0, Vec::new());
    for &end in ends {
        feed(model, &drafter, &mut [(&mut sequence, &tokens[start..end])]);
        let (rows, next) = (0..end - start, &tokens[start + 1..end + 1]);
        let sequence = &mut sequence;
        let draft = Draft { sequence, position: start, rows, next, fed: None, drafts: 5, sampling: how };
        all.extend(drafter.propose(&mut [draft], None).unwrap());
        start = end;
    }
    all
}

/// Drafts depend on the text alone: not on the passes that computed it, nor on earlier drafts.
#[test]
fn drafts_do_not_depend_on_passes() {
    for (name, target, drafter) in pairs(&golden()) {
        let model = pair(&target, &drafter);
        for codec in [Codec::F32, Codec::tq_centred(4)] {
            let pool = pool(&model, codec);
            for how in samplings() {
                let tokens = text(3, 101);
                let at_once = drafts_of(&model, &pool, &tokens, &[100], &how);
                let ends: Vec<usize> = (1..60).chain([63, 64, 65, 80, 81, 97, 98, 99, 100]).collect();
                let one_by_one = drafts_of(&model, &pool, &tokens, &ends, &how);
                assert!(one_by_one.iter().all(|drafts| drafts.len() == 5), "{name}");
                assert_eq!(one_by_one.last(), at_once.last(), "{name}, {codec}");
                let again = drafts_of(&model, &pool, &tokens, &[7, 20, 48, 100], &how);
                assert_eq!(again[1..3], [one_by_one[19].clone(), one_by_one[47].clone()], "{name}, {codec}");
            }
            assert_eq!(pool.usage().used, 0);
        }
    }
}

/// Sequences of a batch have the drafts that they have alone, with different numbers of rows and drafts, in recorded
/// passes and in others.
#[test]
fn batches_draft_what_sequences_draft_alone() {
    for (name, target, drafter) in pairs(&golden()) {
        check_batches(name, &pair(&target, &drafter));
    }
}

fn check_batches(name: &str, model: &Model) {
    let pool = pool(model, Codec::F32);
    let all = samplings();
    for scale in [1, 25] {
        let texts: Vec<Vec<u32>> = (0..4).map(|seed| text(seed, 20 + seed as usize)).collect();
        let more: Vec<Vec<u32>> = (0..4).map(|seed| text(9 + seed, 1 + seed as usize * scale)).collect();
        let drafts = [3, 0, 5, 1];
        let mut drafter = DraftDecoder::new(model, &pool, 4, 5, 256).unwrap();
        let mut sequences: Vec<Sequence> = (0..4).map(|_| pool.sequence()).collect();
        let mut got = Vec::new();
        for (parts, next) in [(&texts, more.iter().map(|more| more[0]).collect::<Vec<_>>()), (&more, vec![5; 4])] {
            let starts: Vec<usize> = sequences.iter().map(Sequence::len).collect();
            let mut batch: Vec<_> = sequences.iter_mut().zip(parts.iter().map(Vec::as_slice)).collect();
            feed(model, &drafter, &mut batch);
            let next: Vec<Vec<u32>> =
                parts.iter().zip(next).map(|(part, last)| [&part[1..], &[last]].concat()).collect();
            let (mut batch, mut row) = (Vec::new(), 0);
            for (index, sequence) in sequences.iter_mut().enumerate() {
                let rows = row..row + parts[index].len();
                row = rows.end;
                let (position, next, sampling) = (starts[index], &next[index][..], &all[index % 2]);
                batch.push(Draft { sequence, position, rows, next, fed: None, drafts: drafts[index], sampling });
            }
            got = drafter.propose(&mut batch, None).unwrap();
        }
        for index in 0..4 {
            let whole = [&texts[index][..], &more[index], &[5]].concat();
            let ends = [texts[index].len(), whole.len() - 1];
            let alone = drafts_of(model, &pool, &whole, &ends, &all[index % 2]);
            assert_eq!(got[index], alone[1][..drafts[index]], "{name}: sequence {index}, scale {scale}");
        }
    }
}

/// A drafter that agrees with its target drafts what the target draws, also with sampling: both have the random numbers
/// of the position.
#[test]
fn an_agreeing_drafter_drafts_the_targets_draws() {
    let model = model(&with_mtp(&golden(), Mtp::Agrees));
    let pool = pool(&model, Codec::F32);
    for (index, how) in samplings().iter().enumerate() {
        let mut drafter = DraftDecoder::new(&model, &pool, 1, 5, 64).unwrap();
        let mut decoder = BatchDecoder::new(&model, &pool, 4).unwrap();
        decoder.leave_states(drafter.states()).unwrap();
        let (mut sequence, mut tokens) = (pool.sequence(), text(1, 20));
        feed(&model, &drafter, &mut [(&mut sequence, &tokens[..19])]);
        let mut drafts: Vec<Vec<u32>> = vec![Vec::new(); 19];
        for _ in 0..40 {
            decoder.append(&mut [(&mut sequence, 1)]).unwrap();
            decoder.run(&tokens[tokens.len() - 1..], &[how]).unwrap().wait().unwrap();
            // The last token is still on the device.
            let drawn = decoder.drawn().unwrap();
            let position = tokens.len() - 1;
            let draft = Draft {
                sequence: &mut sequence,
                position,
                rows: 0..1,
                next: &[0],
                fed: Some(0),
                drafts: 5,
                sampling: how,
            };
            drafts.extend(drafter.propose(&mut [draft], Some(&drawn)).unwrap());
            tokens.extend(drawn.to_vec::<u32>().unwrap());
        }
        let (mut right, mut all) = (0, 0);
        for (position, drafts) in drafts.iter().enumerate() {
            let actual = tokens.get(position + 2..).unwrap_or(&[]);
            all += drafts.len().min(actual.len());
            right += drafts.iter().zip(actual).take_while(|(draft, actual)| draft == actual).count();
        }
        assert!(all > 180 && right * 100 >= all * 98, "sampling {index}: {right} of {all}");
    }
}

/// Invalid batches are refused with typed errors, and missing pages only cost drafts.
#[test]
fn invalid_batches_are_refused() {
    let path = with_mtp(&golden(), Mtp::Random);
    let model = model(&path);
    let pool = pool(&model, Codec::F32);
    let plain = Model::load(&path, model.device()).unwrap();
    assert!(plain.drafter().is_none() && model.drafter().is_some());
    let of_plain = plain.new_pool(&PoolOptions::default()).unwrap();
    assert_eq!(pool.spec().layers.len(), of_plain.spec().layers.len() + 1);
    assert!(DraftDecoder::new(&plain, &of_plain, 1, 1, 8).is_err());
    for (model, pool) in [(&model, &of_plain), (&plain, &pool)] {
        assert!(BatchDecoder::new(model, pool, 1).is_err(), "a pool of another model");
    }
    for [sequences, drafts] in [[0, 1], [1, 0]] {
        assert!(DraftDecoder::new(&model, &pool, sequences, drafts, 8).is_err());
    }
    let mut drafter = DraftDecoder::new(&model, &pool, 1, 2, 8).unwrap();
    let tokens = text(1, 9);
    let mut sequence = pool.sequence();
    feed(&model, &drafter, &mut [(&mut sequence, &tokens[..8])]);
    let how = Sampling::default();
    let mut propose = |position, rows, next: &[u32], fed, drafts| {
        let draft = Draft { sequence: &mut sequence, position, rows, next, fed, drafts, sampling: &how };
        drafter.propose(&mut [draft], None)
    };
    assert!(matches!(propose(0, 0..8, &tokens[1..], None, 3), Err(Error::Argument { arg: "drafts", .. })));
    assert!(matches!(propose(0, 0..7, &tokens[1..], None, 2), Err(Error::Argument { arg: "next", .. })));
    assert!(matches!(propose(0, 1..500, &tokens[1..], None, 2), Err(Error::Argument { arg: "rows", .. })));
    assert!(matches!(propose(0, 0..1, &[VOCAB], None, 2), Err(Error::Argument { arg: "tokens", .. })));
    assert!(matches!(propose(0, 0..1, &[1], Some(0), 2), Err(Error::Argument { arg: "fed", .. })));
    assert!(matches!(propose(usize::MAX, 0..1, &[1], None, 2), Err(Error::Argument { arg: "position", .. })));
    assert!(propose(0, 0..0, &[], None, 2).unwrap()[0].is_empty());
    assert_eq!(propose(0, 0..8, &tokens[1..], None, 2).unwrap()[0].len(), 2);
    // Room for one page per sequence.
    let few = PoolOptions { codecs: Codec::F32.into(), sequences: 1, longest: 16, page_tokens: 16, drafts: 0 };
    let small = model.new_pool(&few).unwrap();
    let mut drafter = DraftDecoder::new(&model, &small, 1, 5, 16).unwrap();
    let mut others: Vec<Sequence> = Vec::new();
    let mut sequence = small.sequence();
    let tokens = text(1, 16);
    feed(&model, &drafter, &mut [(&mut sequence, &tokens[..15])]);
    loop {
        let mut other = small.sequence();
        if small.step(&mut [(&mut other, 1)]).is_err() {
            break;
        }
        others.push(other);
    }
    let (rows, next, sampling) = (0..15, &tokens[1..], &how);
    let draft = Draft { sequence: &mut sequence, position: 0, rows, next, fed: None, drafts: 5, sampling };
    assert_eq!(drafter.propose(&mut [draft], None).unwrap()[0].len(), 2, "the page has one more position");
}
