//! A text in a cache of some type.

use kvant::{KvPool, Sequence, Tensor, ops::KvSide};
use kvant_models::{Logits, Model, PoolOptions};

use crate::{Result, cache_type::CacheType, formats::Format, vectors};

/// A text in a cache of some type.
pub struct CacheSequence {
    format: Option<Format>,
    /// All tokens as stored. For a format with segments, only the tokens of full segments.
    stored: Sequence,
    /// For formats with segments: the text with exact tokens of its last segment.
    open: Option<Sequence>,
}

/// Creates a pool for `sequences` texts of up to `longest` tokens in caches of a type.
pub fn pool(kv: &CacheType, model: &Model, sequences: usize, longest: usize, page_tokens: usize) -> Result<KvPool> {
    kv.check(model)?;
    // Formats with segments use two sequences per text.
    let sequences = if kv.format().and_then(Format::segment).is_some() { 2 * sequences } else { sequences };
    Ok(model.new_pool(&PoolOptions { codecs: kv.codecs(), sequences, longest, page_tokens, drafts: 0 })?)
}

impl CacheSequence {
    /// An empty text in a pool from [`pool`] for this type.
    pub fn new(kv: &CacheType, pool: &KvPool) -> CacheSequence {
        CacheSequence { format: kv.format(), stored: pool.sequence(), open: None }
    }

    /// Removes all tokens.
    pub fn clear(&mut self) -> Result {
        self.open = None;
        Ok(self.stored.truncate(0)?)
    }

    /// Copies the text, so that both can continue.
    pub fn fork(&self) -> CacheSequence {
        let open = self.open.as_ref().map(Sequence::fork);
        CacheSequence { format: self.format, stored: self.stored.fork(), open }
    }

    /// Feeds tokens and reads the logits of all, row by row. `out` has room for them on the device. `out` and `rows`
    /// are reused: allocating hundreds of megabytes per step would take as long as comparing the logits.
    pub fn feed_all(&mut self, model: &Model, tokens: &[u32], out: &Tensor, rows: &mut Vec<f32>) -> Result {
        if self.format.is_some() {
            *rows = self.feed(model, tokens, Logits::All)?;
            return Ok(());
        }
        let out = out.rows(0..tokens.len())?;
        model.feed_into(&mut self.stored, tokens, &out)?;
        rows.resize(out.elements(), 0.0);
        Ok(out.read_bytes(bytemuck::cast_slice_mut(rows))?)
    }

    /// Feeds tokens, and returns the logits of all or of the last one, row by row.
    pub fn feed(&mut self, model: &Model, tokens: &[u32], logits: Logits) -> Result<Vec<f32>> {
        match self.format {
            None => Ok(model.feed(&mut self.stored, tokens, logits)?.to_f32()?),
            Some(format) => match format.segment() {
                None => self.feed_vectors(format, model, tokens, logits),
                Some(segment) => self.feed_segments(format, segment, model, tokens, logits),
            },
        }
    }

    /// Every token sees all vectors as stored, including its own.
    fn feed_vectors(&mut self, format: Format, model: &Model, tokens: &[u32], logits: Logits) -> Result<Vec<f32>> {
        let pool = self.stored.pool().clone();
        let out = model.feed_with(&mut self.stored, tokens, logits, &mut |layer, step| {
            let positions = vectors::positions(step)?;
            let stored = |side| stored(format, &pool, layer, side, step, positions.clone());
            Ok(vectors::write(&pool, layer, step, &[stored(KvSide::K)?, stored(KvSide::V)?])?)
        })?;
        Ok(out.to_f32()?)
    }

    /// Every token sees its own segment exactly, and earlier segments as stored.
    fn feed_segments(
        &mut self,
        format: Format,
        segment: usize,
        model: &Model,
        mut tokens: &[u32],
        logits: Logits,
    ) -> Result<Vec<f32>> {
        let mut rows = Vec::new();
        while !tokens.is_empty() {
            let open = self.open.get_or_insert_with(|| self.stored.fork());
            let (piece, rest) = tokens.split_at((segment - open.len() % segment).min(tokens.len()));
            let piece_rows = model.feed(open, piece, logits)?.to_f32()?;
            match logits {
                Logits::All => rows.extend(piece_rows),
                Logits::Last => rows = piece_rows,
            }
            if open.len().is_multiple_of(segment) {
                self.store_segment(format, segment)?;
            }
            tokens = rest;
        }
        Ok(rows)
    }

    /// Stores a full segment.
    fn store_segment(&mut self, format: Format, segment: usize) -> Result {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        let pool = open.pool().clone();
        let positions = self.stored.len()..open.len();
        let from = pool.step(&mut [(&mut open, 0)])?;
        let mut layers = Vec::new();
        for layer in 0..pool.spec().layers.len() {
            let stored = |side| stored(format, &pool, layer, side, &from, positions.clone());
            layers.push([stored(KvSide::K)?, stored(KvSide::V)?]);
        }
        let to = pool.step(&mut [(&mut self.stored, segment)])?;
        for (layer, sides) in layers.iter().enumerate() {
            vectors::write(&pool, layer, &to, sides)?;
        }
        Ok(())
    }
}

/// The keys or values at `positions` as a format stores them.
fn stored(
    format: Format,
    pool: &KvPool,
    layer: usize,
    side: KvSide,
    step: &kvant::Step,
    positions: std::ops::Range<usize>,
) -> kvant::Result<Vec<f64>> {
    let mut stored = vectors::read(pool, layer, side, step, positions)?;
    let spec = pool.layer(layer)?.spec();
    format.store(side, spec.kv_heads, spec.head_dim, &mut stored);
    Ok(stored)
}

/// Feeds one token to each of several texts in one pool. Returns the logits, text by text.
pub fn feed_each(model: &Model, texts: &mut [CacheSequence], tokens: &[u32]) -> Result<Vec<f32>> {
    let pool = match texts.first() {
        Some(first) if first.format.is_none() => first.stored.pool().clone(),
        _ => {
            let each = texts.iter_mut().zip(tokens);
            let rows: Result<Vec<Vec<f32>>> =
                each.map(|(text, &token)| text.feed(model, &[token], Logits::Last)).collect();
            return Ok(rows?.concat());
        }
    };
    let mut batch: Vec<(&mut Sequence, usize)> = texts.iter_mut().map(|text| (&mut text.stored, 1)).collect();
    let step = pool.step(&mut batch)?;
    let rows: Vec<usize> = (0..tokens.len()).collect();
    Ok(model.forward(&pool, &step, tokens, &rows)?.to_f32()?)
}
