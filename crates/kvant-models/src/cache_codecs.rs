//! The codecs of a model's cache: one pair for all layers, or one per layer.

use std::{fmt, str::FromStr, sync::Arc};

use kvant::Codec;

use crate::{Error, Result};

/// The codecs of the keys and the values of a layer. Written as one codec, or two as in `f16:tq4`.
///
/// ```
/// use kvant::Codec;
/// use kvant_models::KvCodec;
/// let kv: KvCodec = "f16:tq4".parse()?;
/// assert_eq!((kv.k, kv.v), (Codec::F16, Codec::tq(4)));
/// assert_eq!(KvCodec::from(Codec::tq(4)).to_string(), "tq4");
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvCodec {
    /// The codec of keys.
    pub k: Codec,
    /// The codec of values.
    pub v: Codec,
}

impl From<Codec> for KvCodec {
    fn from(codec: Codec) -> KvCodec {
        KvCodec { k: codec, v: codec }
    }
}

impl FromStr for KvCodec {
    type Err = kvant::Error;

    fn from_str(name: &str) -> kvant::Result<KvCodec> {
        let (k, v) = name.split_once(':').unwrap_or((name, name));
        if v.contains(':') {
            let (expected, got) = ("one codec, or two as in f16:tq4".to_string(), format!("{name:?}"));
            return Err(kvant::Error::Value { op: "codec", arg: "kv", expected, got });
        }
        Ok(KvCodec { k: k.parse()?, v: v.parse()? })
    }
}

impl fmt::Display for KvCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.k == self.v { self.k.fmt(f) } else { write!(f, "{}:{}", self.k, self.v) }
    }
}

/// The codecs of all layers of a cache.
#[derive(Clone, Debug, PartialEq)]
pub enum CacheCodecs {
    /// One entry for all layers.
    Same(KvCodec),
    /// One entry for each layer that has its own keys and values.
    PerLayer(Arc<[KvCodec]>),
}

impl CacheCodecs {
    /// Returns the entries of `layers` layers.
    ///
    /// # Errors
    /// `Argument` if the number of entries differs from `layers`.
    pub fn of_layers(&self, layers: usize) -> Result<Vec<KvCodec>> {
        match self {
            CacheCodecs::Same(kv) => Ok(vec![*kv; layers]),
            CacheCodecs::PerLayer(all) if all.len() == layers => Ok(all.to_vec()),
            CacheCodecs::PerLayer(all) => Err(Error::argument(
                "codecs",
                format_args!("codecs of {layers} layers"),
                format_args!("of {}", all.len()),
            )),
        }
    }
}

/// The type of all layers, or the distinct types, as in `f16, tq4 by layer`.
impl fmt::Display for CacheCodecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = match self {
            CacheCodecs::Same(kv) => return kv.fmt(f),
            CacheCodecs::PerLayer(all) => all,
        };
        let mut names: Vec<String> = all.iter().map(KvCodec::to_string).collect();
        names.sort();
        names.dedup();
        write!(f, "{} by layer", names.join(", "))
    }
}

impl<T: Into<KvCodec>> From<T> for CacheCodecs {
    fn from(kv: T) -> CacheCodecs {
        CacheCodecs::Same(kv.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_is_one_codec_or_two() {
        assert_eq!("f16".parse::<KvCodec>().unwrap(), Codec::F16.into());
        let mixed: KvCodec = "bf16:tq6".parse().unwrap();
        assert_eq!((mixed.k, mixed.v), (Codec::BF16, Codec::tq(6)));
        assert_eq!(mixed.to_string(), "bf16:tq6");
        assert_eq!("tq3:tq2".parse::<KvCodec>().unwrap().to_string(), "tq3:tq2");
        assert_eq!("tq4:tq4".parse::<KvCodec>().unwrap().to_string(), "tq4");
        assert_eq!("f16:tq4c".parse::<KvCodec>().unwrap(), KvCodec { k: Codec::F16, v: Codec::tq_centred(4) });
        for bad in ["", "f8", "tq7", ":", "f16:", ":f16", "f16:f16:f16", "F16"] {
            assert!(bad.parse::<KvCodec>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn entries_are_of_as_many_layers() {
        let kv = KvCodec::from(Codec::tq(4));
        assert_eq!(CacheCodecs::from(Codec::tq(4)).of_layers(3).unwrap(), [kv; 3]);
        let two = CacheCodecs::PerLayer([kv, Codec::F16.into()].into());
        assert_eq!(two.of_layers(2).unwrap(), [kv, Codec::F16.into()]);
        assert_eq!(two.to_string(), "f16, tq4 by layer");
        assert_eq!(CacheCodecs::from(Codec::tq(4)).to_string(), "tq4");
        let error = two.of_layers(3).unwrap_err().to_string();
        assert!(error.contains("3 layers") && error.contains("of 2"), "{error}");
    }
}
