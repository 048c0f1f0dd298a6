//! The cache types of an evaluation: kvant's, and formats of other software.

use std::{fmt, str::FromStr};

use kvant::{Codec, PoolSpec, ops::KvSide};
use kvant_models::Model;

use crate::{Result, formats::Format, kv::Kv};

/// A cache type.
#[derive(Clone, Debug, PartialEq)]
pub enum CacheType {
    /// One of kvant's codecs.
    Kv(Kv),
    /// A format of other software, simulated with an f32 cache that stores the values the format would return.
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
    /// The codecs of the memory that simulates this type.
    pub fn codecs(&self) -> kvant_models::CacheCodecs {
        match self {
            CacheType::Kv(kv) => kv.codecs.clone(),
            CacheType::Format(_) => Codec::F32.into(),
        }
    }

    /// The format, if it belongs to other software.
    pub fn format(&self) -> Option<Format> {
        match self {
            CacheType::Kv(_) => None,
            CacheType::Format(format) => Some(*format),
        }
    }

    /// Mean bytes of keys and values of a token in all layers of a sequence of `longest` tokens. Includes the means of
    /// sealed pages, and dense pages or segments.
    pub fn bytes_per_token(&self, spec: &PoolSpec, longest: usize) -> usize {
        let stored = |codec: Codec, dim: usize| {
            codec.bytes_per_vector(dim) as f64 + codec.bytes_per_mean(dim) as f64 / spec.page_tokens as f64
        };
        // Mean bytes of a token if `dense` tokens take `of_dense` bytes and the rest `stored`.
        let mean = |stored: f64, dense: usize, of_dense: f64| {
            let (all, dense) = (longest.max(1) as f64, dense.min(longest.max(1)) as f64);
            ((all - dense) * stored + dense * of_dense) / all
        };
        let bytes = spec.layers.iter().map(|layer| {
            let dim = layer.head_dim;
            let vectors = match self {
                CacheType::Kv(_) => {
                    let dense = if layer.seals() { 3 * spec.page_tokens } else { 0 };
                    let of_dense = 2 * Codec::Dense(layer.dense).bytes_per_vector(dim);
                    mean(stored(layer.k, dim) + stored(layer.v, dim), dense, of_dense as f64)
                }
                // An open segment is half full on average.
                CacheType::Format(format) => {
                    let stored = dim as f64 * (format.bits(KvSide::K, dim) + format.bits(KvSide::V, dim)) / 8.0;
                    mean(stored, format.segment().map_or(0, |segment| segment / 2), 4.0 * dim as f64)
                }
            };
            layer.kv_heads as f64 * vectors
        });
        bytes.sum::<f64>().round() as usize
    }

    /// Checks that the model's keys and values support the type.
    pub fn check(&self, model: &Model) -> Result {
        let CacheType::Format(format) = self else { return Ok(()) };
        if format.segment().is_some() && !model.state_layers().is_empty() {
            let reason = "its open segments are computed twice, and states of recurrent layers only advance";
            return Err(format!("--kv: {format} needs a model without recurrent layers: {reason}").into());
        }
        match model.decoder().cache_blocks().map(|(_, attention)| attention.head_dim).find(|&dim| !format.supports(dim))
        {
            Some(dim) => Err(format!("--kv: {format} cannot store vectors of {dim}").into()),
            None => Ok(()),
        }
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
