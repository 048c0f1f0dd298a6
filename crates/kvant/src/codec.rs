//! How a vector is stored in the cache. The format, byte by byte: `docs/codec.md`.

use std::{fmt, str::FromStr};

use crate::{DType, Error, Result};

mod codebook;
mod codebook_table;
mod packing;
mod signs;
mod stats;
mod turboquant;

pub use codebook::{centroids, nearest, thresholds};
pub use packing::{pack, plane_bytes, unpack};
pub use signs::{sign_is_negative, signs};
pub use stats::{HeadStats, indices, stats};
pub use turboquant::{Encoded, decode, decode_rotated, encode};

/// Coordinates that share one TurboQuant norm.
pub const BLOCK: usize = 256;

/// How the vectors of a cache are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Codec {
    /// As they are, in f32, f16 or bf16.
    Dense(DType),
    /// Rotated and quantised to 4, 5, 6 or 8 bits a coordinate.
    TurboQuant(TurboQuant),
}

/// Parameters of the TurboQuant codec (Zandieh et al. 2025, the MSE variant).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TurboQuant {
    /// 4, 5, 6 or 8.
    pub bits: u32,
    /// Multiplies the normalised coordinates before the nearest centroid is sought, and is undone in the stored norm;
    /// 1 but for experiments; 0.001 to 1000. The name of a codec does not tell it.
    pub scale: f32,
    /// Which number is stored as a block's norm.
    pub norm: Norm,
}

/// Which number a TurboQuant block stores beside its indices. Decoding is the same for all: norm × centroid.
///
/// With y the rotated block of B coordinates and c the chosen centroids:
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// ‖y‖/(√B·scale): the one that the indices were chosen with.
    Rms,
    /// ⟨y,c⟩/⟨c,c⟩: the least squared error for these indices.
    LeastSquares,
    /// ‖y‖²/⟨y,c⟩: unbiased inner products (EDEN).
    Unbiased,
}

impl Norm {
    /// [`Norm::default`], where a constant is needed. Why this one: `docs/codec.md`.
    const DEFAULT: Norm = Norm::LeastSquares;

    /// What a codec's name says of it: nothing for the default.
    fn suffix(self) -> &'static str {
        if self == Norm::DEFAULT {
            return "";
        }
        match self {
            Norm::Rms => "-rms",
            Norm::LeastSquares => "-least-squares",
            Norm::Unbiased => "-unbiased",
        }
    }
}

impl Default for Norm {
    fn default() -> Self {
        Norm::DEFAULT
    }
}

impl Codec {
    /// 32-bit floats.
    pub const F32: Codec = Codec::Dense(DType::F32);
    /// Half precision.
    pub const F16: Codec = Codec::Dense(DType::F16);
    /// bfloat16.
    pub const BF16: Codec = Codec::Dense(DType::BF16);

    /// TurboQuant with its usual parameters; `bits` must be 4, 5, 6 or 8 (checked where a cache is made).
    pub const fn tq(bits: u32) -> Codec {
        Codec::TurboQuant(TurboQuant { bits, scale: 1.0, norm: Norm::DEFAULT })
    }

    /// Whether the stored vectors are rotated.
    pub const fn is_quantised(self) -> bool {
        matches!(self, Codec::TurboQuant(_))
    }

    /// Bytes that one vector of `head_dim` takes, all planes together; `usize::MAX` when they are more.
    pub fn bytes_per_vector(self, head_dim: usize) -> usize {
        match self {
            Codec::Dense(dtype) => head_dim.saturating_mul(dtype.size()),
            Codec::TurboQuant(tq) => {
                let bytes = head_dim as u128 * u128::from(tq.bits) / 8 + 4 * head_dim.div_ceil(BLOCK) as u128;
                usize::try_from(bytes).unwrap_or(usize::MAX)
            }
        }
    }

    /// Whether vectors of `head_dim` can be stored: dense ones always, TurboQuant at powers of two from 8 to 4096.
    pub(crate) fn validate(self, op: &'static str, arg: &'static str, head_dim: usize) -> Result<()> {
        match self {
            Codec::Dense(dtype) if dtype.is_float() => Ok(()),
            Codec::Dense(got) => Err(Error::DType { op, arg, expected: "f32, f16 or bf16", got }),
            Codec::TurboQuant(tq) => {
                let fail =
                    |expected: &str, got: String| Err(Error::Value { op, arg, expected: expected.to_string(), got });
                if !matches!(tq.bits, 4 | 5 | 6 | 8) {
                    return fail("a TurboQuant codec of 4, 5, 6 or 8 bits", tq.bits.to_string());
                }
                // Beyond that, norms divided by it would leave f32 where vectors do not.
                if !(1e-3..=1e3).contains(&tq.scale) {
                    return fail("a TurboQuant codec with a scale from 0.001 to 1000", tq.scale.to_string());
                }
                if !head_dim.is_power_of_two() || !(8..=4096).contains(&head_dim) {
                    return fail(
                        "a TurboQuant codec over a head_dim that is a power of two, 8 to 4096",
                        head_dim.to_string(),
                    );
                }
                Ok(())
            }
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::Dense(dtype) => fmt::Display::fmt(dtype, f),
            Codec::TurboQuant(tq) => write!(f, "tq{}{}", tq.bits, tq.norm.suffix()),
        }
    }
}

/// `f32`, `f16`, `bf16`, or `tq8`, `tq6`, `tq5`, `tq4` with an optional choice of norm: `tq4-rms`,
/// `tq4-least-squares`, `tq4-unbiased`.
impl FromStr for Codec {
    type Err = Error;

    fn from_str(name: &str) -> Result<Codec> {
        let unknown = || Error::Value {
            op: "codec",
            arg: "name",
            expected: "f32, f16, bf16, tq8, tq6, tq5 or tq4 (these four also with -rms, -least-squares or -unbiased)"
                .to_string(),
            got: format!("{name:?}"),
        };
        let (kind, norm) = match name.split_once('-') {
            Some((kind, "rms")) => (kind, Some(Norm::Rms)),
            Some((kind, "least-squares")) => (kind, Some(Norm::LeastSquares)),
            Some((kind, "unbiased")) => (kind, Some(Norm::Unbiased)),
            Some(_) => return Err(unknown()),
            None => (name, None),
        };
        let codec = match kind {
            "f32" => Codec::F32,
            "f16" => Codec::F16,
            "bf16" => Codec::BF16,
            "tq8" => Codec::tq(8),
            "tq6" => Codec::tq(6),
            "tq5" => Codec::tq(5),
            "tq4" => Codec::tq(4),
            _ => return Err(unknown()),
        };
        match (codec, norm) {
            (codec, None) => Ok(codec),
            (Codec::TurboQuant(tq), Some(norm)) => Ok(Codec::TurboQuant(TurboQuant { norm, ..tq })),
            (Codec::Dense(_), Some(_)) => Err(unknown()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for bits in [4, 5, 6, 8] {
            assert_eq!(format!("tq{bits}").parse::<Codec>().unwrap(), Codec::tq(bits));
            for norm in [Norm::Rms, Norm::LeastSquares, Norm::Unbiased] {
                let codec = Codec::TurboQuant(TurboQuant { bits, scale: 1.0, norm });
                assert_eq!(codec.to_string().parse::<Codec>().unwrap(), codec);
            }
        }
        for codec in [Codec::F32, Codec::F16, Codec::BF16] {
            assert_eq!(codec.to_string().parse::<Codec>().unwrap(), codec);
        }
        for name in ["", "tq", "tq7", "f16-rms", "tq4-", "tq4-best", "TQ4"] {
            assert!(name.parse::<Codec>().is_err(), "{name:?}");
        }
    }
}
