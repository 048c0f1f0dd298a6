//! Measures prompts, a single decoding sequence, and a decoding batch.

use std::time::Duration;

use kvant::{
    CacheLayer, Sequence, Tensor,
    ops::{self, KvWrite},
};
use kvant_models::{AttentionSpec, BatchDecoder, Decoder, Logits, Model, PoolOptions, Sampling};

use super::{
    super::timing,
    printout::{ModelLine, Printout},
};
use crate::{args::Kv, memory, output, result::Result};

/// Steps of a batch before its sequences are truncated to their first length.
pub const BATCH_STEPS: usize = 64;
/// Maximum tokens that are computed before decoding. Keys and values of further ones are zero.
const MAX_COMPUTED: usize = 1 << 17;
/// Maximum warm runs of a prompt.
const MAX_PROMPTS: usize = 100;

pub struct Parts<'a> {
    pub model: &'a Model,
    pub report: &'a Printout,
    pub budget: Duration,
}

impl Parts<'_> {
    /// Feeds a prompt to an empty sequence, cold and warm.
    pub fn prompt(&self, kv: &Kv, tokens: usize) -> Result {
        let options = pool_options(kv, 1, tokens);
        if !self.has_room(&options)? {
            return Ok(());
        }
        let pool = self.model.new_pool(&options)?;
        let ids = Ids(1).take(self.model, tokens);
        let feed = |_| Ok(self.model.feed(&mut pool.sequence(), &ids, Logits::Last).map(drop)?);
        let us_first = timing::once(|| feed(0))?;
        let timing = timing::repeat_within(self.budget, (0, 1, MAX_PROMPTS), feed)?;
        let line = self.report.line("prompt", &timing);
        self.report.print(ModelLine {
            kv: Some(kv.to_string()),
            sequences: Some(1),
            context: Some(tokens),
            us_first: Some(us_first),
            tokens_per_second: Some(output::round3(tokens as f64 / timing.median_us * 1e6)),
            ..line
        })
    }

    /// Decodes tokens of one sequence with the recorded pass that `kvant generate` uses.
    pub fn decode(&self, kv: &Kv, context: usize, sampling: &Sampling) -> Result {
        let has_states = !self.model.state_layers().is_empty();
        // Recurrent states can be rolled back only to a page boundary.
        let past = if has_states { boundary(context) } else { context - 1 };
        let options = pool_options(kv, 1, past + if has_states { BATCH_STEPS } else { 1 });
        if !self.has_room(&options)? {
            return Ok(());
        }
        let mut sequence = self.model.new_pool(&options)?.sequence();
        let mut ids = Ids(2);
        let computed = if has_states { past } else { past.min(MAX_COMPUTED) };
        if computed > 0 {
            self.model.feed(&mut sequence, &ids.take(self.model, computed), Logits::Last)?;
        }
        self.append_zeros(&mut sequence, past)?;
        let mut decoder = Decoder::new(self.model, &mut sequence, sampling.clone())?;
        let mut step = |_| {
            decoder.next(&[ids.next(self.model)])?;
            let is_at_end = decoder.len() == past + BATCH_STEPS;
            if has_states && !is_at_end { Ok(()) } else { Ok(decoder.truncate(past)?) }
        };
        let us_first = timing::once(|| step(0))?;
        let timing = timing::repeat(self.budget, step)?;
        let bytes = self.model.weight_bytes_per_token() + self.cached_bytes(kv, context)?;
        let line = self.report.line("decode", &timing);
        self.report.print(ModelLine {
            kv: Some(kv.to_string()),
            sequences: Some(1),
            context: Some(context),
            temperature: Some(sampling.temperature),
            us_first: Some(us_first),
            tokens_per_second: Some(output::round3(1e6 / timing.median_us)),
            bytes: Some(bytes),
            ..line
        })
    }

    /// Appends tokens with keys and values of zero: the time of a step depends on their number alone, and a prompt of a
    /// million tokens takes minutes.
    fn append_zeros(&self, sequence: &mut Sequence, len: usize) -> Result<()> {
        let (pool, pass_tokens) = (sequence.pool().clone(), self.model.pass_tokens());
        let zeros = |layer: &CacheLayer| {
            let shape = [pass_tokens, layer.kv_heads, layer.head_dim];
            Ok(Tensor::zeros(self.model.device(), self.model.activations(), &shape)?)
        };
        let zeros: Vec<Tensor> = match sequence.len() < len {
            true => pool.spec().layers.iter().map(zeros).collect::<Result<_>>()?,
            false => Vec::new(),
        };
        while sequence.len() < len {
            let count = (len - sequence.len()).min(pass_tokens);
            let step = pool.step(&mut [(&mut *sequence, count)])?;
            let mut enc = self.model.device().encoder()?;
            for (index, zeros) in zeros.iter().enumerate() {
                ops::kv_write(&mut enc, &KvWrite::new(zeros, zeros, &step, pool.layer(index)?))?;
            }
            enc.commit()?.wait()?;
        }
        Ok(())
    }

    /// Decodes tokens of many sequences together. Each has its own pages.
    pub fn batch(&self, kv: &Kv, count: usize, context: usize, sampling: &Sampling) -> Result {
        let has_states = !self.model.state_layers().is_empty();
        let context = if has_states { boundary(context) } else { context };
        // Keeps the positions that windows have passed, so that truncation finds them. Recurrent states are kept at the
        // page boundary instead, because holding would copy them in every step.
        let held = if has_states { 0 } else { BATCH_STEPS };
        let options = pool_options(kv, count, context + BATCH_STEPS);
        if !self.has_room(&options)? {
            return Ok(());
        }
        let (pool, mut ids) = (self.model.new_pool(&options)?, Ids(3));
        let mut sequences = vec![pool.sequence()];
        sequences[0].hold(held);
        // The last token is fed separately: the next step releases the pages that windows have passed.
        let prompt = ids.take(self.model, context);
        for tokens in [&prompt[..context - 1], &prompt[context - 1..]].into_iter().filter(|tokens| !tokens.is_empty()) {
            self.model.feed(&mut sequences[0], tokens, Logits::Last)?;
        }
        let pages = sequences[0].export()?;
        for _ in 1..count {
            sequences.push(pool.import(&pages)?);
        }
        sequences.iter_mut().for_each(|sequence| sequence.hold(held));
        let mut decoder = BatchDecoder::new(self.model, &pool, count)?;
        let mut batch: Vec<(&mut Sequence, usize)> = sequences.iter_mut().map(|sequence| (sequence, 1)).collect();
        let draws = vec![sampling; count];
        let mut step = |batch: &mut [(&mut Sequence, usize)], tokens: &[u32]| {
            decoder.append(batch)?;
            let submission = decoder.run(tokens, &draws)?;
            decoder.drawn()?.to_vec::<u32>()?;
            Ok(submission.wait()?)
        };
        let us_first = timing::once(|| step(&mut batch, &ids.take(self.model, count)))?;
        let mut times = timing::Times::default();
        while times.go_on(self.budget) {
            for (sequence, _) in &mut batch {
                sequence.truncate(context)?;
            }
            for _ in 0..BATCH_STEPS {
                let tokens = ids.take(self.model, count);
                times.add(|| step(&mut batch, &tokens))?;
            }
        }
        let timing = times.timing();
        // The number of experts that a batch reads depends on its tokens.
        let is_dense = self.model.decoder().blocks.iter().all(|block| block.feed_forward.moe().is_none());
        let cached = self.cached_bytes(kv, context + BATCH_STEPS / 2)?;
        let bytes = self.model.weight_bytes_per_token().saturating_add(count.saturating_mul(cached));
        let line = self.report.line("batch", &timing);
        self.report.print(ModelLine {
            kv: Some(kv.to_string()),
            sequences: Some(count),
            context: Some(context),
            temperature: Some(sampling.temperature),
            us_first: Some(us_first),
            tokens_per_second: Some(output::round3(count as f64 / timing.median_us * 1e6)),
            bytes: is_dense.then_some(bytes),
            ..line
        })
    }

    /// Bytes of keys and values that the token at position `context - 1` reads.
    fn cached_bytes(&self, kv: &Kv, context: usize) -> Result<usize> {
        let own = self.model.cache_layers(&kv.codecs)?;
        let decoder = self.model.rank_decoder();
        let index = |block: usize| decoder.cache_blocks().take_while(|(own, _)| *own < block).count();
        let read = |(block, attention): (usize, &AttentionSpec)| {
            let layer = &own[index(attention.source().unwrap_or(block))];
            let vector = layer.k.bytes_per_vector(layer.head_dim) + layer.v.bytes_per_vector(layer.head_dim);
            let positions = context.min(attention.window.unwrap_or(usize::MAX));
            positions.div_ceil(attention.position_ranks) * attention.kv_heads * vector
        };
        let blocks = decoder.blocks.iter().enumerate();
        Ok(blocks.filter_map(|(l, block)| Some((l, block.attention()?))).map(read).sum())
    }

    /// Whether the device has memory for a pool. If not, prints a note that the case is skipped.
    pub fn has_room(&self, options: &PoolOptions) -> Result<bool> {
        let device = self.model.device();
        device.trim()?;
        let (need, Some(free)) = (self.model.pool_spec(options)?.bytes, memory::free(device)) else { return Ok(true) };
        if need <= free {
            return Ok(true);
        }
        let (sequences, longest) = (options.sequences, options.longest);
        let [need, free] = [need, free].map(output::bytes);
        output::note(&format!(
            "skipped: the cache of {sequences} × {longest} tokens needs {need}, and {free} are free\n"
        ))?;
        Ok(false)
    }
}

/// Random token ids, which select various experts.
pub struct Ids(pub u64);

impl Ids {
    fn next(&mut self, model: &Model) -> u32 {
        // splitmix64 (Steele et al. 2014)
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % model.decoder().fed_vocab().max(1) as u64) as u32
    }

    pub fn take(&mut self, model: &Model, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.next(model)).collect()
    }
}

/// The first page boundary at which a sequence has at least this many tokens.
fn boundary(tokens: usize) -> usize {
    tokens.next_multiple_of(PoolOptions::default().page_tokens)
}

/// Options of a pool for `sequences` sequences of up to `longest` tokens.
pub fn pool_options(kv: &Kv, sequences: usize, longest: usize) -> PoolOptions {
    PoolOptions { codecs: kv.codecs.clone(), sequences, longest, ..PoolOptions::default() }
}
