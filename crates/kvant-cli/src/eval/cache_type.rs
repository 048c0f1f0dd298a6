//! The cache types that an evaluation knows: those of kvant, and formats of other software.

use std::{fmt, str::FromStr};

use kvant::{Codec, PoolSpec, Sequence, Tensor, ops::KvSide};
use kvant_models::{Logits, Model};

use super::{formats::Format, vectors};
use crate::{Result, args::Kv};

/// A cache type.
#[derive(Clone, Debug, PartialEq)]
pub enum CacheType {
    /// One of kvant's.
    Kv(Kv),
    /// A format of other software: an f32 cache whose keys and values become what this would store.
    Format(Format),
}

impl FromStr for CacheType {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<CacheType, String> {
        if let Ok(format) = name.parse() {
            return Ok(CacheType::Format(format));
        }
        Ok(CacheType::Kv(name.parse()?))
    }
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CacheType::Kv(kv) => kv.fmt(f),
            CacheType::Format(format) => f.pad(&format.to_string()),
        }
    }
}

impl<T: Into<Kv>> From<T> for CacheType {
    fn from(kv: T) -> CacheType {
        CacheType::Kv(kv.into())
    }
}

impl CacheType {
    /// The codecs of the memory that plays this type.
    pub fn codecs(&self) -> kvant_models::CacheCodecs {
        match self {
            CacheType::Kv(kv) => kv.codecs.clone(),
            CacheType::Format(_) => Codec::F32.into(),
        }
    }

    /// Bytes of keys and values of a token in all layers, on average over a sequence of `longest` tokens: with the
    /// means of sealed pages, and three dense pages.
    pub fn bytes_per_token(&self, spec: &PoolSpec, longest: usize) -> usize {
        let stored = |codec: Codec, dim: usize| {
            codec.bytes_per_vector(dim) as f64 + codec.bytes_per_mean(dim) as f64 / spec.page_tokens as f64
        };
        let bytes = spec.layers.iter().map(|layer| {
            let dim = layer.head_dim;
            let vectors = match self {
                CacheType::Kv(_) if layer.seals() => {
                    let (all, dense) = (longest.max(1), (3 * spec.page_tokens).min(longest.max(1)));
                    let sealed = (all - dense) as f64 * (stored(layer.k, dim) + stored(layer.v, dim));
                    let dense = (dense * 2 * Codec::Dense(layer.dense).bytes_per_vector(dim)) as f64;
                    (sealed + dense) / all as f64
                }
                CacheType::Kv(_) => stored(layer.k, dim) + stored(layer.v, dim),
                CacheType::Format(format) => 2.0 * dim as f64 * format.bits() / 8.0,
            };
            layer.kv_heads as f64 * vectors
        });
        bytes.sum::<f64>().round() as usize
    }

    /// Whether the model's keys and values can have the type.
    pub fn check(&self, model: &Model) -> Result {
        let CacheType::Format(format) = self else { return Ok(()) };
        let own = &model.decoder().blocks[..model.decoder().cache_layers()];
        match own.iter().map(|block| block.attention.head_dim).find(|&dim| !format.takes(dim)) {
            Some(dim) => Err(format!("--kv: {format} cannot store vectors of {dim}").into()),
            None => Ok(()),
        }
    }

    /// Feeds tokens to a sequence of a pool with [`CacheType::codecs`].
    pub fn feed(&self, model: &Model, sequence: &mut Sequence, tokens: &[u32], logits: Logits) -> Result<Tensor> {
        let pool = sequence.pool().clone();
        Ok(match self {
            CacheType::Kv(_) => model.feed(sequence, tokens, logits)?,
            CacheType::Format(format) => model.feed_with(sequence, tokens, logits, &mut |layer, step| {
                let (positions, dim) = (vectors::positions(step)?, pool.layer(layer)?.spec().head_dim);
                let stored = |side| -> kvant::Result<Vec<f64>> {
                    let mut stored = vectors::read(&pool, layer, side, step, positions.clone())?;
                    format.store(side, dim, &mut stored);
                    Ok(stored)
                };
                Ok(vectors::write(&pool, layer, step, &[stored(KvSide::K)?, stored(KvSide::V)?])?)
            })?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for name in ["tq4", "f16:tq4c", "q8_0", "iq4_nl-rot", "nvfp4"] {
            assert_eq!(name.parse::<CacheType>().unwrap().to_string(), name);
        }
        for bad in ["tq4-open", "q4_0:tq4", "tq7c"] {
            assert!(bad.parse::<CacheType>().is_err(), "{bad:?}");
        }
    }
}
