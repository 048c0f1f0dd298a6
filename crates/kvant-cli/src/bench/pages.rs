//! Test data of the benches that use the pages of a pool.

use kvant::{CacheLayer, Device, KvLayer, KvPool, PoolSpec, Sequence, Step, ops};

use super::{buffers, case::Case};
use crate::result::Result;

/// Tokens per write while filling. A multiple of every page size, so that whole pages are written at once.
const CHUNK: usize = 1024;

/// Sequences in pages, in several layers of one kind.
pub struct PagedCache {
    pub layers: Vec<KvLayer>,
    /// A step of the newest tokens for each sequence.
    pub steps: Vec<Step>,
    /// Keeps the pages allocated.
    _sequences: Vec<Sequence>,
}

impl PagedCache {
    /// One sequence of `tokens` tokens, written to every layer, and the step of the last token.
    pub fn filled(device: &Device, case: &Case, tokens: usize) -> Result<PagedCache> {
        PagedCache::new(device, case, 1, (tokens - 1, 1), true)
    }

    /// `sequences` sequences of `past` unwritten tokens, and steps that append `new` tokens to each.
    pub fn to_write(device: &Device, case: &Case, sequences: usize, past: usize, new: usize) -> Result<PagedCache> {
        PagedCache::new(device, case, sequences, (past, new), false)
    }

    /// Runs every step once in every layer. The `past` tokens are written only if they are read.
    fn new(
        device: &Device,
        case: &Case,
        sequences: usize,
        (past, new): (usize, usize),
        is_read: bool,
    ) -> Result<PagedCache> {
        let layer = CacheLayer::new(case.shape.kv_heads, case.shape.head_dim, case.kv.k).v(case.kv.v);
        let page_tokens = case.page_tokens();
        let spec = |layers| PoolSpec::new(vec![layer; layers], 0).page_tokens(page_tokens);
        let one = spec(1).room_for(sequences, past + new, past + new)?;
        let count = buffers::copies(device, one.bytes)?;
        let pool = KvPool::new(device, &spec(count).room_for(sequences, past + new, past + new)?)?;
        let layers = (0..count).map(|index| Ok(pool.layer(index)?.clone())).collect::<Result<Vec<_>>>()?;
        let source = buffers::Source::new(device, case, CHUNK.max(new))?;
        let write = |step: &Step| -> Result {
            for layer in &layers {
                let mut enc = device.encoder()?;
                ops::kv_write(&mut enc, &ops::KvWrite::new(&source.k, &source.v, step, layer))?;
                enc.commit()?.wait()?;
            }
            Ok(())
        };
        let (mut all, mut steps) = (Vec::new(), Vec::new());
        for _ in 0..sequences {
            let mut sequence = pool.sequence();
            while sequence.len() < past {
                let count = CHUNK.min(past - sequence.len());
                let step = pool.step(&mut [(&mut sequence, count)])?;
                if is_read {
                    write(&step)?;
                }
            }
            let step = pool.step(&mut [(&mut sequence, new)])?;
            write(&step)?;
            steps.push(step);
            all.push(sequence);
        }
        Ok(PagedCache { layers, steps, _sequences: all })
    }
}
