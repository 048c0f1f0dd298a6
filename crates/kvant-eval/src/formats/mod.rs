//! Cache formats of other software as f64 references: they return the numbers that are read after a vector was stored.
//!
//! `tools/codec_study.py` implements these formats too, and checks them against the packages `gguf` and `mlx`. A test
//! here compares with its output.

mod blocks;
mod floats;
mod rotation;
mod segments;

use std::{fmt, str::FromStr};

use kvant::ops::KvSide;
use rayon::prelude::*;

/// A format for the vectors of a cache. Vectors are divided into blocks, which are stored independently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    kind: Kind,
    /// Whether vectors are rotated first, as llama.cpp does: keys by a Hadamard matrix of all coordinates, values by
    /// one of 64.
    rotated: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// llama.cpp: 32 8-bit numbers with an f16 scale.
    Q8_0,
    /// llama.cpp: 32 4-bit numbers with an f16 scale.
    Q4_0,
    /// llama.cpp: 32 indices into a table of 16 numbers, with an f16 scale.
    Iq4Nl,
    /// MLX's affine format: 64 4-bit numbers with scale and bias in f16.
    Mlx4,
    /// 8-bit floats (e4m3) without a scale, which saturate at 448.
    Fp8,
    /// 16 4-bit floats (e2m1) with an fp8 (e4m3) scale, without a scale of the tensor.
    Nvfp4,
    /// KIVI with this number of bits: 32 numbers of a channel (keys) or of a token (values) with scale and zero point.
    Kivi(u32),
    /// KVarN with this number of bits: a rotated segment of 128 tokens with row and column factors.
    Kvarn(u32),
}

/// The formats by name, and whether the suffix `-rot` is allowed.
const NAMES: [(&str, Kind, bool); 10] = [
    ("q8_0", Kind::Q8_0, true),
    ("q4_0", Kind::Q4_0, true),
    ("iq4_nl", Kind::Iq4Nl, true),
    ("mlx4", Kind::Mlx4, false),
    ("fp8", Kind::Fp8, false),
    ("nvfp4", Kind::Nvfp4, false),
    ("kivi4", Kind::Kivi(4), false),
    ("kivi2", Kind::Kivi(2), false),
    ("kvarn4", Kind::Kvarn(4), false),
    ("kvarn2", Kind::Kvarn(2), false),
];

impl Format {
    /// The formats in the comparison of a report.
    pub const PEERS: [Format; 8] = [
        Format { kind: Kind::Q8_0, rotated: true },
        Format { kind: Kind::Fp8, rotated: false },
        Format { kind: Kind::Q4_0, rotated: true },
        Format { kind: Kind::Iq4Nl, rotated: true },
        Format { kind: Kind::Mlx4, rotated: false },
        Format { kind: Kind::Nvfp4, rotated: false },
        Format { kind: Kind::Kivi(4), rotated: false },
        Format { kind: Kind::Kvarn(4), rotated: false },
    ];

    /// Bits per number of a stored vector, including all scales.
    pub fn bits(self, side: KvSide, head_dim: usize) -> f64 {
        // KVarN's segment stores 16-bit numbers for each row and column.
        let (of_row, of_column) = (2.0 * 16.0, 16.0);
        let (segment, dim) = (segments::SEGMENT as f64, head_dim as f64);
        match (self.kind, side) {
            (Kind::Q8_0, _) => 8.5,
            (Kind::Fp8, _) => 8.0,
            (Kind::Q4_0 | Kind::Iq4Nl | Kind::Mlx4 | Kind::Nvfp4, _) => 4.5,
            (Kind::Kivi(bits), _) => f64::from(bits) + 1.0,
            (Kind::Kvarn(bits), KvSide::K) => f64::from(bits) + of_row / segment + of_column / dim,
            (Kind::Kvarn(bits), KvSide::V) => f64::from(bits) + of_row / dim + of_column / segment,
        }
    }

    /// Positions of a segment, for formats with segments. A token sees its own segment exactly.
    pub fn segment(self) -> Option<usize> {
        matches!(self.kind, Kind::Kivi(_) | Kind::Kvarn(_)).then_some(segments::SEGMENT)
    }

    /// Numbers of a vector per block.
    fn block(self) -> usize {
        match self.kind {
            Kind::Q8_0 | Kind::Q4_0 | Kind::Iq4Nl | Kind::Kivi(_) => 32,
            Kind::Mlx4 => 64,
            Kind::Fp8 | Kind::Kvarn(_) => 1,
            Kind::Nvfp4 => 16,
        }
    }

    /// Whether the format supports vectors of this size: whole blocks.
    pub fn supports(self, head_dim: usize) -> bool {
        head_dim.is_multiple_of(self.block())
    }

    /// Replaces vectors, `[positions, heads, head_dim]`, by their stored values. A format with segments stores only
    /// complete segments; the remaining positions are unchanged. NaN stays NaN.
    pub fn store(self, side: KvSide, heads: usize, head_dim: usize, vectors: &mut [f64]) {
        match self.segment() {
            None => vectors
                .par_chunks_exact_mut(head_dim)
                .with_min_len(16)
                .for_each(|vector| self.store_vector(side, vector)),
            Some(segment) => vectors
                .par_chunks_exact_mut(segment * heads * head_dim)
                .for_each(|segment| self.store_segment(side, heads, head_dim, segment)),
        }
    }

    fn store_vector(self, side: KvSide, vector: &mut [f64]) {
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
            Kind::Kivi(_) | Kind::Kvarn(_) => unreachable!("they store segments"),
        };
        vector.chunks_exact_mut(self.block()).for_each(block);
        if self.rotated {
            rotation::rotate(vector, head_dim, rotation);
        }
    }

    fn store_segment(self, side: KvSide, heads: usize, head_dim: usize, vectors: &mut [f64]) {
        let is_keys = matches!(side, KvSide::K);
        for head in 0..heads {
            let of_head = || (0..segments::SEGMENT).map(move |position| (position * heads + head) * head_dim);
            let mut segment: Vec<f64> = of_head().flat_map(|at| vectors[at..][..head_dim].to_vec()).collect();
            match self.kind {
                Kind::Kivi(bits) => segments::kivi(&mut segment, head_dim, bits, is_keys),
                Kind::Kvarn(bits) => segments::kvarn(&mut segment, head_dim, bits, is_keys),
                _ => unreachable!("the others store vectors"),
            }
            for (at, vector) in of_head().zip(segment.chunks_exact(head_dim)) {
                vectors[at..][..head_dim].copy_from_slice(vector);
            }
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

    /// Compares with vectors that `tools/codec_study.py --golden` stored with `gguf` and `mlx` if they support the
    /// format.
    #[test]
    fn formats_equal_their_software() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/formats.json");
        let golden: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let numbers = |value: &serde_json::Value| -> Vec<f64> {
            value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
        };
        let (x, dim) = (numbers(&golden["x"]), golden["head_dim"].as_u64().unwrap() as usize);
        let stored = golden["stored"].as_object().unwrap();
        for (name, _, can_rotate) in NAMES {
            let sides = [("K", KvSide::K), ("V", KvSide::V)];
            if name.parse::<Format>().unwrap().segment().is_some() {
                continue;
            }
            let plain = [(name.to_string(), KvSide::K)];
            let rotated = sides.map(|(letter, side)| (format!("{name}-rot {letter}"), side));
            for (key, side) in plain.into_iter().chain(rotated.into_iter().filter(|_| can_rotate)) {
                let format: Format = key.split(' ').next().unwrap().parse().unwrap();
                let mut got = x.clone();
                format.store(side, 1, dim, &mut got);
                let want = numbers(&stored[&key]);
                let largest = want.iter().fold(0f64, |max, x| max.max(x.abs()));
                for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                    // The packages compute in f32: the tolerance covers rounding of sums.
                    assert!((got - want).abs() <= 2e-6 * largest, "{key}: {got}, not {want}, at {at}");
                }
            }
        }
        assert_eq!(stored.len(), 12);
    }

    /// Segments as stored by `tools/codec_study.py`; the file has every 41st number. Heads are independent.
    #[test]
    fn segments_equal_the_study() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/segments.json");
        let golden: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let (heads, dim, positions) = (2, 64, 256);
        // Equals `segment_numbers` in the study.
        let x = |position: usize, head: usize, i: usize| {
            let (p, h, i) = (position as f64, head as f64, i as f64);
            (1.0 + p * 0.7 + i * i * 0.3 + h).sin() * (1.0 + i % 5.0) + (i % 7.0 - 3.0) + (p / 19.0).cos()
        };
        let place = |at: usize| (at / dim / heads, at / dim % heads, at % dim);
        let exact = |at| x(place(at).0, place(at).1, place(at).2);
        for (name, ..) in NAMES.iter().filter(|(_, kind, _)| matches!(kind, Kind::Kivi(_) | Kind::Kvarn(_))) {
            let format: Format = name.parse().unwrap();
            for (letter, side) in [("K", KvSide::K), ("V", KvSide::V)] {
                let mut got: Vec<f64> = (0..positions * heads * dim + 5).map(exact).collect();
                format.store(side, heads, dim, &mut got);
                let want = golden[format!("{name} {letter}")].as_array().unwrap();
                assert_eq!(want.len(), (positions * heads * dim).div_ceil(41));
                for (at, want) in (0..).step_by(41).zip(want) {
                    let want = want.as_f64().unwrap();
                    assert!((got[at] - want).abs() < 1e-6, "{name} {letter}: {}, not {want}, at {at}", got[at]);
                }
                // An incomplete segment is exact.
                let rest = positions * heads * dim;
                assert!((rest..rest + 5).all(|at| got[at] == exact(at)));
            }
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        for (name, ..) in NAMES {
            for side in [KvSide::K, KvSide::V] {
                let mut x = [0.0; 128 * 64];
                name.parse::<Format>().unwrap().store(side, 2, 32, &mut x);
                assert_eq!(x, [0.0; 128 * 64], "{name}");
            }
        }
    }

    #[test]
    fn vectors_are_whole_blocks() {
        let supports = |name: &str, dim| name.parse::<Format>().unwrap().supports(dim);
        assert!(
            supports("q8_0", 96)
                && !supports("q8_0", 80)
                && !supports("mlx4", 96)
                && supports("fp8", 7)
                && supports("nvfp4", 80)
        );
    }
}
