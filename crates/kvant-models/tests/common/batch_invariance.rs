//! On a batch-invariant device, the logits of a token have equal bits whichever tokens are processed with it.

use std::ops::Range;

use kvant::{Codec, KvPool, Sequence};
use kvant_models::{Logits, Model, PoolOptions};

/// A text longer than four pages, and its logits.
struct Expected<'a> {
    model: &'a Model,
    page: usize,
    text: Vec<u32>,
    logits: Vec<u32>,
    what: &'a str,
}

/// Pseudo-random ids.
fn text(model: &Model, seed: u64, tokens: usize) -> Vec<u32> {
    let next =
        |state: &u64| Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
    let states = std::iter::successors(Some(seed), next).skip(1);
    states.map(|state| ((state >> 33) % model.vocab_size() as u64) as u32).take(tokens).collect()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Feeds a text of four and a half pages at once, in chunks, token by token, after a prefix of whole pages, and in
/// batches with others. Returns the bits of its logits.
pub fn check(model: &Model, codec: Codec, page: usize, what: &str) -> Vec<u32> {
    let tokens = 9 * page / 2;
    let options = PoolOptions { codecs: codec.into(), sequences: 3, longest: 5 * page, page_tokens: page, drafts: 0 };
    let pool = model.new_pool(&options).unwrap();
    let text = text(model, 1, tokens);
    let logits = bits(&model.feed(&mut pool.sequence(), &text, Logits::All).unwrap().to_f32().unwrap());
    let expected = Expected { model, page, text, logits, what };
    for step in [7, page + 6, 1] {
        expected.feed(&mut pool.sequence(), 0..tokens, step, "chunks");
    }
    for prefix in [page, 2 * page] {
        let mut sequence = pool.sequence();
        expected.feed(&mut sequence, 0..prefix, prefix, "a prefix");
        expected.feed(&mut sequence.fork(), prefix..tokens, tokens, "after a prefix");
    }
    expected.batches(&pool);
    expected.logits
}

impl Expected<'_> {
    /// Feeds `places` in pieces of `step` to a sequence that contains the preceding tokens.
    fn feed(&self, sequence: &mut Sequence, places: Range<usize>, step: usize, how: &str) {
        assert_eq!(sequence.len(), places.start);
        let mut at = places.start;
        for piece in self.text[places].chunks(step) {
            let logits = self.model.feed(sequence, piece, Logits::All).unwrap().to_f32().unwrap();
            self.compare(at..at + piece.len(), &logits, &format!("{how} of {step}"));
            at += piece.len();
        }
    }

    /// The text as the second of three sequences.
    fn batches(&self, pool: &KvPool) {
        let texts = [text(self.model, 2, self.text.len()), self.text.clone(), text(self.model, 3, self.text.len())];
        let mut sequences = [pool.sequence(), pool.sequence(), pool.sequence()];
        let page = self.page;
        let half = page / 2;
        for counts in
            [[half, half, 0], [1, 1, 1], [0, half, page], [1, 2 * page, 1], [3, half + 3, 1], [1, page - 4, 1]]
        {
            let starts = sequences.each_ref().map(|sequence| sequence.len());
            let mut batch: Vec<_> = sequences.iter_mut().zip(counts).filter(|(_, count)| *count > 0).collect();
            let step = pool.step(&mut batch).unwrap();
            let ids: Vec<u32> = (0..3).flat_map(|i| texts[i][starts[i]..starts[i] + counts[i]].to_vec()).collect();
            let rows: Vec<usize> = (counts[0]..counts[0] + counts[1]).collect();
            let logits = self.model.forward(pool, &step, &ids, &rows).unwrap().to_f32().unwrap();
            self.compare(starts[1]..starts[1] + counts[1], &logits, &format!("a batch of {counts:?}"));
        }
        assert_eq!(sequences[1].len(), self.text.len());
    }

    fn compare(&self, places: Range<usize>, logits: &[f32], how: &str) {
        let (vocab, what) = (self.model.vocab_size(), self.what);
        assert_eq!(logits.len(), places.len() * vocab);
        for (place, row) in places.zip(logits.chunks_exact(vocab)) {
            let expected = &self.logits[place * vocab..(place + 1) * vocab];
            assert!(row.iter().all(|logit| logit.is_finite()), "{what}, {how}: token {place}");
            let differ = bits(row).iter().zip(expected).filter(|(a, b)| a != b).count();
            assert_eq!(differ, 0, "{what}, {how}: {differ} of {vocab} logits of token {place} differ");
        }
    }
}
