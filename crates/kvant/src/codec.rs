//! The storage formats of cached vectors. `docs/codec.md` specifies the bytes.

use std::{fmt, str::FromStr};

use crate::{DType, Error, Result};

mod codebook;
mod codebook_table;
mod packing;
mod signs;
mod stats;
mod turboquant;

pub(crate) use codebook::lookup_table;
pub use codebook::{centroids, nearest, thresholds};
pub(crate) use packing::plane_bits;
pub use packing::{pack, plane_bytes, unpack};
pub use signs::{sign_is_negative, signs};
pub use stats::{HeadStats, indices, stats};
pub use turboquant::{Encoded, decode, decode_rotated, encode};

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
}

/// The number that a TurboQuant block stores with its indices. Decoding is the same for all: norm × centroid.
///
/// In the formulas, y is the rotated block of B coordinates and c are the chosen centroids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// ‖y‖/(√B·scale): the norm that the indices were chosen with.
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
        Codec::TurboQuant(TurboQuant { bits, scale: 1.0, norm: Norm::DEFAULT })
    }

    /// Whether the stored vectors are quantised, and therefore rotated.
    pub const fn is_quantised(self) -> bool {
        matches!(self, Codec::TurboQuant(_))
    }

    /// Bytes of one vector of `head_dim` coordinates in all planes; `usize::MAX` if the number overflows.
    pub fn bytes_per_vector(self, head_dim: usize) -> usize {
        match self {
            Codec::Dense(dtype) => head_dim.saturating_mul(dtype.size()),
            Codec::TurboQuant(tq) => {
                let bytes = head_dim as u128 * u128::from(tq.bits) / 8 + 4 * head_dim.div_ceil(BLOCK) as u128;
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
                // Beyond this range, norms divided by the scale could leave the range of f32 where the vectors do
                // not.
                if !(1e-3..=1e3).contains(&tq.scale) {
                    return fail("a TurboQuant codec with a scale from 0.001 to 1000", tq.scale.to_string());
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

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::Dense(dtype) => fmt::Display::fmt(dtype, f),
            Codec::TurboQuant(tq) => write!(f, "tq{}{}", tq.bits, tq.norm.suffix()),
        }
    }
}

/// Parses `f32`, `f16`, `bf16`, `tq8`, `tq6`, `tq5`, `tq4`, `tq3` or `tq2`. A TurboQuant name can end with a choice of
/// norm: `tq4-rms`, `tq4-least-squares`, `tq4-unbiased`.
impl FromStr for Codec {
    type Err = Error;

    fn from_str(name: &str) -> Result<Codec> {
        let unknown = || Error::Value {
            op: "codec",
            arg: "name",
            expected: "f32, f16, bf16, tq8, tq6, tq5, tq4, tq3 or tq2 (tq also with -rms, -least-squares or -unbiased)"
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
            "tq3" => Codec::tq(3),
            "tq2" => Codec::tq(2),
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
        for bits in BITS {
            assert_eq!(format!("tq{bits}").parse::<Codec>().unwrap(), Codec::tq(bits));
            for norm in [Norm::Rms, Norm::LeastSquares, Norm::Unbiased] {
                let codec = Codec::TurboQuant(TurboQuant { bits, scale: 1.0, norm });
                assert_eq!(codec.to_string().parse::<Codec>().unwrap(), codec);
            }
        }
        for codec in [Codec::F32, Codec::F16, Codec::BF16] {
            assert_eq!(codec.to_string().parse::<Codec>().unwrap(), codec);
        }
        for name in ["", "tq", "tq7", "tq1", "f16-rms", "tq4-", "tq4-best", "TQ4"] {
            assert!(name.parse::<Codec>().is_err(), "{name:?}");
        }
    }
}
