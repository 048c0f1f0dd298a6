//! Formats of other software, as references in f64: the numbers that are read after a vector was stored.
//!
//! `tools/codec_study.py` has the same formats and checks them against the packages `gguf` and `mlx`; a test here
//! compares with what it wrote.

mod blocks;
mod floats;
mod rotation;

use std::{fmt, str::FromStr};

use kvant::ops::KvSide;
use rayon::prelude::*;

/// A format for the vectors of a cache. Vectors are cut into blocks, each of which is stored alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    kind: Kind,
    /// Whether vectors are rotated before, as llama.cpp does: keys by a Hadamard matrix of all coordinates, values by
    /// one of 64.
    rotated: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// llama.cpp's: 32 numbers of 8 bits with a scale in f16.
    Q8_0,
    /// llama.cpp's: 32 numbers of 4 bits with a scale in f16.
    Q4_0,
    /// llama.cpp's: 32 indices of a table of 16 numbers, with a scale in f16.
    Iq4Nl,
    /// MLX's affine format: 64 numbers of 4 bits with scale and bias in f16.
    Mlx4,
    /// Floats of 8 bits (e4m3), without a scale: beyond 448 they saturate.
    Fp8,
    /// 16 floats of 4 bits (e2m1) with a scale in fp8 (e4m3), without a scale of the tensor.
    Nvfp4,
}

/// The formats by name, with those that the name can have `-rot` after.
const NAMES: [(&str, Kind, bool); 6] = [
    ("q8_0", Kind::Q8_0, true),
    ("q4_0", Kind::Q4_0, true),
    ("iq4_nl", Kind::Iq4Nl, true),
    ("mlx4", Kind::Mlx4, false),
    ("fp8", Kind::Fp8, false),
    ("nvfp4", Kind::Nvfp4, false),
];

impl Format {
    /// Those that a report compares with.
    pub const PEERS: [Format; 6] = [
        Format { kind: Kind::Q8_0, rotated: true },
        Format { kind: Kind::Fp8, rotated: false },
        Format { kind: Kind::Q4_0, rotated: true },
        Format { kind: Kind::Iq4Nl, rotated: true },
        Format { kind: Kind::Mlx4, rotated: false },
        Format { kind: Kind::Nvfp4, rotated: false },
    ];

    /// Bits of a number, with all scales.
    pub fn bits(self) -> f64 {
        match self.kind {
            Kind::Q8_0 => 8.5,
            Kind::Fp8 => 8.0,
            Kind::Q4_0 | Kind::Iq4Nl | Kind::Mlx4 | Kind::Nvfp4 => 4.5,
        }
    }

    /// Numbers that a block has.
    fn block(self) -> usize {
        match self.kind {
            Kind::Q8_0 | Kind::Q4_0 | Kind::Iq4Nl => 32,
            Kind::Mlx4 => 64,
            Kind::Fp8 => 1,
            Kind::Nvfp4 => 16,
        }
    }

    /// Whether the format stores vectors of this size: whole blocks.
    pub fn takes(self, head_dim: usize) -> bool {
        head_dim.is_multiple_of(self.block())
    }

    /// Replaces vectors of `head_dim` coordinates by their stored form. A block with a number that is not finite
    /// becomes anything but finite numbers of others.
    pub fn store(self, side: KvSide, head_dim: usize, vectors: &mut [f64]) {
        vectors.par_chunks_exact_mut(head_dim).with_min_len(16).for_each(|vector| self.store_one(side, vector));
    }

    fn store_one(self, side: KvSide, vector: &mut [f64]) {
        let head_dim = vector.len();
        let rotation = match side {
            KvSide::K => head_dim,
            KvSide::V => 64,
        };
        if self.rotated {
            rotation::rotate(vector, head_dim, rotation);
        }
        let block = match self.kind {
            Kind::Q8_0 => blocks::q8_0,
            Kind::Q4_0 => blocks::q4_0,
            Kind::Iq4Nl => blocks::iq4_nl,
            Kind::Mlx4 => blocks::mlx4,
            Kind::Fp8 => blocks::fp8,
            Kind::Nvfp4 => blocks::nvfp4,
        };
        vector.chunks_exact_mut(self.block()).for_each(block);
        if self.rotated {
            rotation::rotate(vector, head_dim, rotation);
        }
    }
}

impl FromStr for Format {
    type Err = ();

    fn from_str(name: &str) -> Result<Format, ()> {
        let (base, rotated) = name.strip_suffix("-rot").map_or((name, false), |base| (base, true));
        let known = NAMES.iter().find(|&&(known, _, can_rotate)| known == base && (can_rotate || !rotated));
        known.map(|&(_, kind, _)| Format { kind, rotated }).ok_or(())
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|&&(_, kind, _)| kind == self.kind).map_or("", |&(name, ..)| name);
        write!(f, "{name}{}", if self.rotated { "-rot" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for (name, _, can_rotate) in NAMES {
            assert_eq!(name.parse::<Format>().unwrap().to_string(), name);
            let rotated = format!("{name}-rot");
            assert_eq!(rotated.parse::<Format>().map(|format| format.to_string()).ok(), can_rotate.then_some(rotated));
        }
        for bad in ["", "-rot", "q4_0-rot-rot", "Q4_0", "q4", "tq4"] {
            assert!(bad.parse::<Format>().is_err(), "{bad:?}");
        }
    }

    /// Vectors that `tools/codec_study.py --golden` stored with `gguf` and `mlx` where these have the format.
    #[test]
    fn formats_store_what_their_software_stores() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/formats.json");
        let golden: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let numbers = |value: &serde_json::Value| -> Vec<f64> {
            value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
        };
        let (x, dim) = (numbers(&golden["x"]), golden["head_dim"].as_u64().unwrap() as usize);
        let stored = golden["stored"].as_object().unwrap();
        for (name, _, can_rotate) in NAMES {
            let sides = [("K", KvSide::K), ("V", KvSide::V)];
            let plain = [(name.to_string(), KvSide::K)];
            let rotated = sides.map(|(letter, side)| (format!("{name}-rot {letter}"), side));
            for (key, side) in plain.into_iter().chain(rotated.into_iter().filter(|_| can_rotate)) {
                let format: Format = key.split(' ').next().unwrap().parse().unwrap();
                let mut got = x.clone();
                format.store(side, dim, &mut got);
                let want = numbers(&stored[&key]);
                let largest = want.iter().fold(0f64, |most, x| most.max(x.abs()));
                for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                    // The packages compute in f32: rounding of sums.
                    assert!((got - want).abs() <= 2e-6 * largest, "{key}: {got}, not {want}, at {at}");
                }
            }
        }
        assert_eq!(stored.len(), 12);
    }

    #[test]
    fn zeros_stay_zeros() {
        for (name, ..) in NAMES {
            let mut x = [0.0; 64];
            name.parse::<Format>().unwrap().store(KvSide::K, 64, &mut x);
            assert_eq!(x, [0.0; 64], "{name}");
        }
    }

    #[test]
    fn vectors_are_whole_blocks() {
        let takes = |name: &str, dim| name.parse::<Format>().unwrap().takes(dim);
        assert!(takes("q8_0", 96) && !takes("q8_0", 80) && !takes("mlx4", 96) && takes("fp8", 7) && takes("nvfp4", 80));
    }
}
