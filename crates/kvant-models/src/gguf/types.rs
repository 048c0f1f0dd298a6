//! The tensor types of GGUF files: names, ids and block sizes.

use std::fmt;

use kvant::{DType, ops::BlockFormat};

/// The element type of a tensor in a GGUF file. Quantised types store rows as blocks of a fixed size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, missing_docs)] // The format's own names.
#[non_exhaustive]
pub enum GgufType {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    I8,
    I16,
    I32,
    I64,
    F64,
    IQ1_M,
    BF16,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
}

use GgufType::*;

/// The id in the file, the type, elements per block, bytes per block.
const TYPES: [(u32, GgufType, u64, u64); 34] = [
    (0, F32, 1, 4),
    (1, F16, 1, 2),
    (2, Q4_0, 32, 18),
    (3, Q4_1, 32, 20),
    (6, Q5_0, 32, 22),
    (7, Q5_1, 32, 24),
    (8, Q8_0, 32, 34),
    (9, Q8_1, 32, 40),
    (10, Q2_K, 256, 84),
    (11, Q3_K, 256, 110),
    (12, Q4_K, 256, 144),
    (13, Q5_K, 256, 176),
    (14, Q6_K, 256, 210),
    (15, Q8_K, 256, 292),
    (16, IQ2_XXS, 256, 66),
    (17, IQ2_XS, 256, 74),
    (18, IQ3_XXS, 256, 98),
    (19, IQ1_S, 256, 50),
    (20, IQ4_NL, 32, 18),
    (21, IQ3_S, 256, 110),
    (22, IQ2_S, 256, 82),
    (23, IQ4_XS, 256, 136),
    (24, I8, 1, 1),
    (25, I16, 1, 2),
    (26, I32, 1, 4),
    (27, I64, 1, 8),
    (28, F64, 1, 8),
    (29, IQ1_M, 256, 56),
    (30, BF16, 1, 2),
    (34, TQ1_0, 256, 54),
    (35, TQ2_0, 256, 66),
    (39, MXFP4, 32, 17),
    (40, NVFP4, 64, 36),
    (41, Q1_0, 128, 18),
];

impl GgufType {
    /// The type with an id; `None` for an unknown or obsolete id.
    pub fn from_id(id: u32) -> Option<GgufType> {
        TYPES.iter().find(|row| row.0 == id).map(|row| row.1)
    }

    fn sizes(self) -> (u64, u64) {
        let row = TYPES.iter().find(|row| row.1 == self).expect("the table has every type");
        (row.2, row.3)
    }

    /// Elements per block, which are consecutive in a row and share scales.
    pub fn block_elements(self) -> u64 {
        self.sizes().0
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> u64 {
        self.sizes().1
    }

    /// Whether [`dequantise`](super::dequantise()) and models support the type.
    pub fn is_supported(self) -> bool {
        matches!(self, F32 | F16 | BF16 | Q4_0 | Q4_1 | Q8_0) || self.block_format().is_some()
    }

    /// The block format that operations read directly; `None` for floats, affine and unsupported types.
    pub fn block_format(self) -> Option<BlockFormat> {
        Some(match self {
            Q5_0 => BlockFormat::Q5_0,
            Q5_1 => BlockFormat::Q5_1,
            Q2_K => BlockFormat::Q2_K,
            Q3_K => BlockFormat::Q3_K,
            Q4_K => BlockFormat::Q4_K,
            Q5_K => BlockFormat::Q5_K,
            Q6_K => BlockFormat::Q6_K,
            IQ4_NL => BlockFormat::IQ4_NL,
            IQ4_XS => BlockFormat::IQ4_XS,
            MXFP4 => BlockFormat::MXFP4,
            _ => return None,
        })
    }
}

impl fmt::Display for GgufType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The dtype of a tensor without codes.
pub(super) fn dense_dtype(kind: GgufType) -> Option<DType> {
    match kind {
        GgufType::F16 => Some(DType::F16),
        GgufType::BF16 => Some(DType::BF16),
        kind => kind.is_supported().then_some(DType::F32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_type_once() {
        for (i, row) in TYPES.iter().enumerate() {
            assert_eq!(GgufType::from_id(row.0), Some(row.1));
            assert!(TYPES[..i].iter().all(|other| other.1 != row.1 && other.0 < row.0));
        }
        assert_eq!(Q1_0 as usize + 1, TYPES.len());
        assert_eq!(GgufType::from_id(4), None);
        assert_eq!(GgufType::from_id(u32::MAX), None);
    }

    #[test]
    fn blocks_have_the_sizes_of_operations() {
        let mut formats = Vec::new();
        for (kind, format) in TYPES.iter().filter_map(|row| Some((row.1, row.1.block_format()?))) {
            assert_eq!(kind.block_elements(), format.block_inputs() as u64, "{kind}");
            assert_eq!(kind.block_bytes(), format.block_bytes() as u64, "{kind}");
            assert_eq!(kind.to_string(), format.to_string());
            formats.push(format);
        }
        assert!(BlockFormat::ALL.iter().all(|format| formats.contains(format)));
    }
}
