//! Inputs, parameter structs, and results as numbers.

use half::{bf16, f16};

/// A generator of test data (xorshift).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Between -1 and 1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() & 0xFF_FFFF) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

/// An element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    F32,
    F16,
    BF16,
    U32,
}

impl Type {
    pub fn bytes(self) -> usize {
        match self {
            Type::F32 | Type::U32 => 4,
            Type::F16 | Type::BF16 => 2,
        }
    }

    /// The values as bytes, and rounded as the kernel sees them.
    pub fn encode(self, values: &[f32]) -> (Vec<u8>, Vec<f64>) {
        let bytes: Vec<u8> = match self {
            Type::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Type::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            Type::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            Type::U32 => values.iter().flat_map(|v| (*v as u32).to_le_bytes()).collect(),
        };
        let seen = self.decode(&bytes);
        (bytes, seen)
    }

    pub fn decode(self, bytes: &[u8]) -> Vec<f64> {
        let pair = |b: &[u8]| [b[0], b[1]];
        let four = |b: &[u8]| [b[0], b[1], b[2], b[3]];
        match self {
            Type::F32 => bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(four(b)))).collect(),
            Type::U32 => bytes.chunks_exact(4).map(|b| f64::from(u32::from_le_bytes(four(b)))).collect(),
            Type::F16 => bytes.chunks_exact(2).map(|b| f64::from(f16::from_le_bytes(pair(b)))).collect(),
            Type::BF16 => bytes.chunks_exact(2).map(|b| f64::from(bf16::from_le_bytes(pair(b)))).collect(),
        }
    }
}

/// The bytes of a struct in C's layout.
#[derive(Default)]
pub struct Struct {
    bytes: Vec<u8>,
    align: usize,
}

impl Struct {
    pub fn new() -> Struct {
        Struct::default()
    }

    fn field(mut self, bytes: &[u8]) -> Struct {
        self.bytes.resize(self.bytes.len().next_multiple_of(bytes.len()), 0);
        self.bytes.extend(bytes);
        self.align = self.align.max(bytes.len());
        self
    }

    pub fn i32s(self, values: &[usize]) -> Struct {
        values.iter().fold(self, |s, v| s.field(&(*v as i32).to_le_bytes()))
    }

    pub fn u64s(self, values: &[usize]) -> Struct {
        values.iter().fold(self, |s, v| s.field(&(*v as u64).to_le_bytes()))
    }

    pub fn i16s(self, values: &[usize]) -> Struct {
        values.iter().fold(self, |s, v| s.field(&(*v as i16).to_le_bytes()))
    }

    pub fn f32s(self, values: &[f32]) -> Struct {
        values.iter().fold(self, |s, v| s.field(&v.to_le_bytes()))
    }

    pub fn bools(self, values: &[bool]) -> Struct {
        values.iter().fold(self, |s, v| s.field(&[u8::from(*v)]))
    }

    pub fn done(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len().next_multiple_of(self.align.max(1)), 0);
        self.bytes
    }
}
