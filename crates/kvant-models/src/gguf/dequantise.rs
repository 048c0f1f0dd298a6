//! Decodes every supported type to f32.

use kvant::{bf16, f16, reference};

use super::{
    GgufType,
    affine::{self, GROUP},
};

/// Decodes whole blocks. Each weight is computed exactly and rounded to f32 once.
///
/// Returns false, with `out` unchanged, if the type is not supported or the sizes do not match: `out` must have
/// [`block_elements`](GgufType::block_elements) elements for every [`block_bytes`](GgufType::block_bytes) bytes.
///
/// ```
/// use kvant_models::gguf::{GgufType, dequantise};
/// let mut block = [0x88u8; 18]; // d and 32 codes, all 8
/// block[..2].copy_from_slice(&kvant::f16::from_f32(0.5).to_le_bytes());
/// block[2] = 0x39; // element 0 has code 9, element 16 has code 3
/// let mut out = [0f32; 32];
/// assert!(dequantise(GgufType::Q4_0, &block, &mut out));
/// assert_eq!((out[0], out[16], out[31]), (0.5, -2.5, 0.0));
/// ```
#[must_use]
pub fn dequantise(kind: GgufType, blocks: &[u8], out: &mut [f32]) -> bool {
    let (elements, size) = (kind.block_elements() as usize, kind.block_bytes() as usize);
    if !kind.is_supported() || !blocks.len().is_multiple_of(size) || blocks.len() / size * elements != out.len() {
        return false;
    }
    for (block, out) in blocks.chunks_exact(size).zip(out.chunks_exact_mut(elements)) {
        decode(kind, block, out);
    }
    true
}

/// Decodes one block of a supported type.
fn decode(kind: GgufType, block: &[u8], out: &mut [f32]) {
    if let Some(format) = kind.block_format() {
        let weights = reference::dequantise_blocks(format, block).expect("a whole block");
        out.iter_mut().zip(weights).for_each(|(out, weight)| *out = weight as f32);
        return;
    }
    match kind {
        GgufType::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
        GgufType::F16 => out[0] = f16::from_le_bytes([block[0], block[1]]).to_f32(),
        GgufType::BF16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
        _ => {
            let mut codes = [0; GROUP];
            let (scale, bias) = affine::read_block(kind, block, &mut codes);
            out.iter_mut().zip(codes).for_each(|(out, code)| *out = scale * f32::from(code) + bias);
        }
    }
}
