//! The storage formats of cached vectors. `docs/codec.md` specifies the bytes.

use std::{fmt, str::FromStr};

use crate::{DType, Error, Result};

mod codebook;
mod codebook_table;
mod packing;
mod page_mean;
mod signs;
mod stats;
mod turboquant;

pub(crate) use codebook::lookup_table;
pub use codebook::{centroids, nearest, thresholds};
pub(crate) use packing::plane_bits;
pub use packing::{pack, plane_bytes, unpack};

pub(crate) use page_mean::MEAN_LEVELS;
pub use page_mean::PageMean;
pub use signs::{sign_is_negative, signs};
pub use stats::{HeadStats, indices, stats};
pub use turboquant::{Encoded, decode, decode_around, decode_rotated, encode, encode_around};

/// Coordinates that share one TurboQuant norm.
pub const BLOCK: usize = 256;

/// The widths of TurboQuant: bits of an index.
pub const BITS: [u32; 6] = [2, 3, 4, 5, 6, 8];

/// [`BITS`] in error messages.
const BITS_TEXT: &str = "2, 3, 4, 5, 6 or 8";

/// The storage format of the vectors of a cache.
///
/// ```
/// use kvant::Codec;
/// let codec: Codec = "tq4".parse()?;
/// assert_eq!(codec, Codec::tq(4));
/// assert_eq!(codec.bytes_per_vector(128), 68); // f16: 256
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Codec {
    /// Unquantised, in f32, f16 or bf16.
    Dense(DType),
    /// Rotated and quantised to 2, 3, 4, 5, 6 or 8 bits per coordinate.
    TurboQuant(TurboQuant),
}

/// Parameters of the TurboQuant codec (Zandieh et al. 2025, the MSE variant).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TurboQuant {
    /// One of [`BITS`].
    pub bits: u32,
    /// Multiplies the normalised coordinates before they are quantised; the stored norm compensates. Between 0.001
    /// and 1000; use 1 except in experiments. The name of a codec does not contain it.
    pub scale: f32,
    /// The number that is stored as a block's norm.
    pub norm: Norm,
    /// Whether vectors are stored minus the mean of their page ([`PageMean`]), with norms in f16. `norm` is then
    /// [`Norm::Unbiased`]. Only the layers of a [`KvPool`](crate::KvPool) have pages.
    pub centred: bool,
}

/// The number that a TurboQuant block stores with its indices. Decoding is the same for all: norm × centroid.
///
/// In the formulas, y is the rotated block of B coordinates and c are the chosen centroids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// ‖y‖/(√B·scale): the norm with which the indices were chosen.
    Rms,
    /// ⟨y,c⟩/⟨c,c⟩: the least squared error for these indices. The default.
    LeastSquares,
    /// ‖y‖²/⟨y,c⟩: unbiased inner products (EDEN).
    Unbiased,
}

impl Norm {
    /// [`Norm::default`] as a constant. `docs/codec.md` gives the reason for the choice.
    const DEFAULT: Norm = Norm::LeastSquares;

    /// The norm's part of a codec's name; empty for the default.
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
    /// 16-bit floats (half precision).
    pub const F16: Codec = Codec::Dense(DType::F16);
    /// bfloat16.
    pub const BF16: Codec = Codec::Dense(DType::BF16);

    /// TurboQuant with default parameters. `bits` must be one of [`BITS`]; this is checked when a cache is made.
    pub const fn tq(bits: u32) -> Codec {
        Codec::TurboQuant(TurboQuant { bits, scale: 1.0, norm: Norm::DEFAULT, centred: false })
    }

    /// TurboQuant around the mean of each page, for the layers of a [`KvPool`](crate::KvPool). `bits` must be one of
    /// [`BITS`]; this is checked when a pool is made.
    pub const fn tq_centred(bits: u32) -> Codec {
        Codec::TurboQuant(TurboQuant { bits, scale: 1.0, norm: Norm::Unbiased, centred: true })
    }

    /// Whether the stored vectors are quantised, and therefore rotated.
    pub const fn is_quantised(self) -> bool {
        matches!(self, Codec::TurboQuant(_))
    }

    /// Whether vectors are stored minus the mean of their page.
    pub const fn is_centred(self) -> bool {
        matches!(self, Codec::TurboQuant(TurboQuant { centred: true, .. }))
    }

    /// Bytes of the mean of a page, for each KV head of a side: 0 for codecs that are not centred. `usize::MAX` if the
    /// number overflows.
    pub const fn bytes_per_mean(self, head_dim: usize) -> usize {
        if self.is_centred() { head_dim.saturating_add(size_of::<f32>()) } else { 0 }
    }

    /// Bytes of one vector of `head_dim` coordinates in all planes; `usize::MAX` if the number overflows. Means of
    /// pages are not included ([`Codec::bytes_per_mean`]).
    pub fn bytes_per_vector(self, head_dim: usize) -> usize {
        match self {
            Codec::Dense(dtype) => head_dim.saturating_mul(dtype.size()),
            Codec::TurboQuant(tq) => {
                let norm = tq.norm_dtype().size() as u128;
                let bytes = head_dim as u128 * u128::from(tq.bits) / 8 + norm * head_dim.div_ceil(BLOCK) as u128;
                usize::try_from(bytes).unwrap_or(usize::MAX)
            }
        }
    }

    /// Checks that vectors of `head_dim` can be stored: any size for dense codecs, powers of two from 8 to 4096 for
    /// TurboQuant.
    pub(crate) fn validate(self, op: &'static str, arg: &'static str, head_dim: usize) -> Result<()> {
        match self {
            Codec::Dense(dtype) if dtype.is_float() => Ok(()),
            Codec::Dense(got) => Err(Error::DType { op, arg, expected: "f32, f16 or bf16", got }),
            Codec::TurboQuant(tq) => {
                let fail =
                    |expected: &str, got: String| Err(Error::Value { op, arg, expected: expected.to_string(), got });
                if !BITS.contains(&tq.bits) {
                    return fail(&format!("a TurboQuant codec of {BITS_TEXT} bits"), tq.bits.to_string());
                }
                // Beyond this range, a norm divided by the scale could overflow f32 although the vector does not.
                if !(1e-3..=1e3).contains(&tq.scale) {
                    return fail("a TurboQuant codec with a scale from 0.001 to 1000", tq.scale.to_string());
                }
                if tq.centred && tq.norm != Norm::Unbiased {
                    return fail("a centred codec with unbiased norms", format!("{:?}", tq.norm));
                }
                if !head_dim.is_power_of_two() || !(8..=4096).contains(&head_dim) {
                    return fail(
                        "a TurboQuant codec with a head_dim that is a power of two from 8 to 4096",
                        head_dim.to_string(),
                    );
                }
                Ok(())
            }
        }
    }
}

impl TurboQuant {
    /// The dtype of stored norms.
    pub(crate) const fn norm_dtype(self) -> DType {
        if self.centred { DType::F16 } else { DType::F32 }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::Dense(dtype) => fmt::Display::fmt(dtype, f),
            Codec::TurboQuant(TurboQuant { bits, centred: true, .. }) => write!(f, "tq{bits}c"),
            Codec::TurboQuant(tq) => write!(f, "tq{}{}", tq.bits, tq.norm.suffix()),
        }
    }
}

/// Parses `f32`, `f16`, `bf16`, `tq8`, `tq6`, `tq5`, `tq4`, `tq3` or `tq2`. A TurboQuant name can end with `c` for a
/// centred codec (`tq4c`), or with a choice of norm: `tq4-rms`, `tq4-least-squares`, `tq4-unbiased`.
impl FromStr for Codec {
    type Err = Error;

    fn from_str(name: &str) -> Result<Codec> {
        let unknown = || Error::Value {
            op: "codec",
            arg: "name",
            expected:
                "f32, f16, bf16, tq8, tq6, tq5, tq4, tq3 or tq2 (tq also with c, -rms, -least-squares or -unbiased)"
                    .to_string(),
            got: format!("{name:?}"),
        };
        match name {
            "f32" => return Ok(Codec::F32),
            "f16" => return Ok(Codec::F16),
            "bf16" => return Ok(Codec::BF16),
            _ => {}
        }
        let rest = name.strip_prefix("tq").ok_or_else(unknown)?;
        let bits = BITS.into_iter().find(|bits| rest.starts_with(&bits.to_string())).ok_or_else(unknown)?;
        let norm = match &rest[1..] {
            "" => Norm::DEFAULT,
            "c" => return Ok(Codec::tq_centred(bits)),
            "-rms" => Norm::Rms,
            "-least-squares" => Norm::LeastSquares,
            "-unbiased" => Norm::Unbiased,
            _ => return Err(unknown()),
        };
        Ok(Codec::TurboQuant(TurboQuant { bits, scale: 1.0, norm, centred: false }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsing_a_name_inverts_display() {
        for bits in BITS {
            assert_eq!(format!("tq{bits}").parse::<Codec>().unwrap(), Codec::tq(bits));
            for norm in [Norm::Rms, Norm::LeastSquares, Norm::Unbiased] {
                let codec = Codec::TurboQuant(TurboQuant { bits, scale: 1.0, norm, centred: false });
                assert_eq!(codec.to_string().parse::<Codec>().unwrap(), codec);
            }
        }
        for bits in BITS {
            assert_eq!(format!("tq{bits}c").parse::<Codec>().unwrap(), Codec::tq_centred(bits));
            assert_eq!(Codec::tq_centred(bits).to_string(), format!("tq{bits}c"));
        }
        for codec in [Codec::F32, Codec::F16, Codec::BF16] {
            assert_eq!(codec.to_string().parse::<Codec>().unwrap(), codec);
        }
        for name in [
            "", "tq", "tq7", "tq1", "f16-rms", "tq4-", "tq4-best", "TQ4", "tq4c-rms", "tq7c", "tqc", "f16c", "tq4cc",
            "tq44",
        ] {
            assert!(name.parse::<Codec>().is_err(), "{name:?}");
        }
    }
}
