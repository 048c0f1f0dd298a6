//! ggml's quantised blocks: random ones, and their values.

use half::f16;

use crate::data::{Random, Type};

/// A format of ggml's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Plain(Type),
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q6K,
}

impl Format {
    /// The format as in the names of kernels.
    pub fn name(self) -> &'static str {
        match self {
            Format::Plain(Type::F32) => "f32",
            Format::Plain(Type::F16) => "f16",
            Format::Plain(Type::BF16) => "bf16",
            Format::Plain(Type::U32) => "i32",
            Format::Q4_0 => "q4_0",
            Format::Q4_1 => "q4_1",
            Format::Q5_0 => "q5_0",
            Format::Q5_1 => "q5_1",
            Format::Q8_0 => "q8_0",
            Format::Q4K => "q4_K",
            Format::Q6K => "q6_K",
        }
    }

    /// Elements and bytes of a block.
    pub fn block(self) -> (usize, usize) {
        match self {
            Format::Plain(kind) => (1, kind.bytes()),
            Format::Q4_0 => (32, 18),
            Format::Q4_1 => (32, 20),
            Format::Q5_0 => (32, 22),
            Format::Q5_1 => (32, 24),
            Format::Q8_0 => (32, 34),
            Format::Q4K => (256, 144),
            Format::Q6K => (256, 210),
        }
    }

    pub fn row_bytes(self, n: usize) -> usize {
        let (elements, bytes) = self.block();
        n / elements * bytes
    }

    /// `n` random elements: their bytes and their values, up to about 1.
    pub fn random(self, seed: u64, n: usize) -> (Vec<u8>, Vec<f64>) {
        let mut random = Random::new(seed);
        if let Format::Plain(kind) = self {
            return kind.encode(&random.units(n));
        }
        let (elements, size) = self.block();
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for _ in 0..n / elements {
            let mut block: Vec<u8> = (0..size).map(|_| random.bits() as u8).collect();
            let mut set = |at: usize, scale: f32| {
                let value = f16::from_f32((random.unit() * 0.4 + 0.6) * scale);
                block[at..at + 2].copy_from_slice(&value.to_le_bytes());
            };
            match self {
                Format::Q4_0 => set(0, 1.0 / 8.0),
                Format::Q5_0 => set(0, 1.0 / 16.0),
                Format::Q8_0 => set(0, 1.0 / 128.0),
                Format::Q4_1 | Format::Q5_1 => (set(0, 1.0 / 16.0), set(2, -0.5)).0,
                Format::Q4K => (set(0, 1.0 / 200.0), set(2, 1.0 / 50.0)).0,
                Format::Q6K => set(208, 1.0 / 4000.0),
                Format::Plain(_) => {}
            }
            self.values(&block, &mut values);
            bytes.extend(block);
        }
        (bytes, values)
    }

    fn values(self, b: &[u8], out: &mut Vec<f64>) {
        let float = |at: usize| f64::from(f16::from_le_bytes([b[at], b[at + 1]]));
        // Low nibbles, then high ones, with a fifth bit from the 32 bits before them.
        let nibbles = |at: usize, fifth: Option<usize>, out: &mut Vec<f64>, value: &dyn Fn(i32) -> f64| {
            let high = fifth.map_or(0, |f| u32::from_le_bytes([b[f], b[f + 1], b[f + 2], b[f + 3]]));
            for i in 0..32 {
                let low = if i < 16 { b[at + i] & 15 } else { b[at + i - 16] >> 4 };
                out.push(value(i32::from(low) | (((high >> i) & 1) << 4) as i32));
            }
        };
        match self {
            Format::Plain(_) => {}
            Format::Q4_0 => nibbles(2, None, out, &|q| float(0) * f64::from(q - 8)),
            Format::Q4_1 => nibbles(4, None, out, &|q| float(0) * f64::from(q) + float(2)),
            Format::Q5_0 => nibbles(6, Some(2), out, &|q| float(0) * f64::from(q - 16)),
            Format::Q5_1 => nibbles(8, Some(4), out, &|q| float(0) * f64::from(q) + float(2)),
            Format::Q8_0 => out.extend(b[2..34].iter().map(|q| float(0) * f64::from(*q as i8))),
            Format::Q4K => {
                let s = &b[4..16];
                for j in 0..8 {
                    let (scale, min) = if j < 4 {
                        (s[j] & 63, s[j + 4] & 63)
                    } else {
                        ((s[j + 4] & 15) | (s[j - 4] >> 6 << 4), (s[j + 4] >> 4) | (s[j] >> 6 << 4))
                    };
                    for i in 0..32 {
                        let q = b[16 + j / 2 * 32 + i] >> (4 * (j % 2)) & 15;
                        out.push(float(0) * f64::from(scale) * f64::from(q) - float(2) * f64::from(min));
                    }
                }
            }
            Format::Q6K => {
                for i in 0..256 {
                    let (half, part, l) = (i / 128, i % 128 / 32, i % 32);
                    let low = b[half * 64 + part % 2 * 32 + l] >> (4 * (part / 2)) & 15;
                    let high = b[128 + half * 32 + l] >> (2 * part) & 3;
                    let scale = b[192 + half * 8 + part * 2 + l / 16] as i8;
                    out.push(float(208) * f64::from(scale) * (f64::from(low | high << 4) - 32.0));
                }
            }
        }
    }
}
