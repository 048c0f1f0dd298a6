use crate::{Error, Result};

/// Divides the bits of an index: the number in the low plane, and the number of upper bits in the high plane. `None`
/// unless `bits` is one of [`BITS`](super::BITS).
pub(crate) const fn plane_bits(bits: u32) -> Option<(u32, u32)> {
    match bits {
        2 | 3 => Some((2, bits - 2)),
        4..=6 => Some((4, bits - 4)),
        8 => Some((8, 0)),
        _ => None,
    }
}

/// Bytes of the two planes that hold `dim` indices: the low plane, and the high plane (0 at 2, 4 and 8 bits).
///
/// # Errors
/// `Value` unless `bits` is one of [`BITS`](super::BITS) and `dim` is a multiple of 8.
pub fn plane_bytes(bits: u32, dim: usize) -> Result<(usize, usize)> {
    if !dim.is_multiple_of(8) {
        return Err(refuse("dim", "a multiple of 8", dim));
    }
    let (low, high) = plane_bits(bits).ok_or_else(|| refuse("bits", super::BITS_TEXT, bits))?;
    Ok((dim / 8 * low as usize, dim / 8 * high as usize))
}

/// Packs indices, one per byte, into planes. Each plane has the length that [`plane_bytes`] returns.
///
/// A plane holds w bits of each index: those of index j are in byte j·w/8, from bit (j·w mod 8) upwards.
///
/// | bits of an index | in the low plane | in the high plane |
/// |---|---|---|
/// | 2, 3 | the lowest 2 | the rest |
/// | 4, 5, 6 | the lowest 4 | the rest |
/// | 8 | all | – |
///
/// Bits of an index beyond `bits` are dropped.
///
/// # Errors
/// `Value` for lengths that do not match.
pub fn pack(bits: u32, indices: &[u8], low: &mut [u8], high: &mut [u8]) -> Result<()> {
    let (low_bits, high_bits) = check(bits, indices.len(), low.len(), high.len())?;
    pack_plane(low_bits, 0, indices, low);
    pack_plane(high_bits, low_bits, indices, high);
    Ok(())
}

/// The inverse of [`pack`].
///
/// # Errors
/// `Value` for lengths that do not match.
pub fn unpack(bits: u32, low: &[u8], high: &[u8], indices: &mut [u8]) -> Result<()> {
    let (low_bits, high_bits) = check(bits, indices.len(), low.len(), high.len())?;
    indices.fill(0);
    unpack_plane(low_bits, 0, low, indices);
    unpack_plane(high_bits, low_bits, high, indices);
    Ok(())
}

/// `width` bits of each index, from bit `from` on; none if `width` is 0.
fn pack_plane(width: u32, from: u32, indices: &[u8], plane: &mut [u8]) {
    let per_byte = 8usize.checked_div(width as usize).unwrap_or(1);
    for (byte, group) in plane.iter_mut().zip(indices.chunks_exact(per_byte)) {
        let fields = group.iter().map(|&index| u32::from(index) >> from & ((1 << width) - 1));
        *byte = fields.rev().fold(0, |byte, field| byte << width | field) as u8;
    }
}

/// The inverse of [`pack_plane`], for indices whose bits are still zero.
fn unpack_plane(width: u32, from: u32, plane: &[u8], indices: &mut [u8]) {
    let per_byte = 8usize.checked_div(width as usize).unwrap_or(1);
    for (&byte, group) in plane.iter().zip(indices.chunks_exact_mut(per_byte)) {
        for (i, index) in (0..).zip(group) {
            *index |= ((u32::from(byte) >> (i * width) & ((1 << width) - 1)) << from) as u8;
        }
    }
}

/// Checks the lengths; returns the bits of an index in each plane.
fn check(bits: u32, indices: usize, low: usize, high: usize) -> Result<(u32, u32)> {
    let expected = plane_bytes(bits, indices)?;
    if low != expected.0 {
        return Err(refuse("low", &format!("{} bytes", expected.0), low));
    }
    if high != expected.1 {
        return Err(refuse("high", &format!("{} bytes", expected.1), high));
    }
    plane_bits(bits).ok_or_else(|| refuse("bits", super::BITS_TEXT, bits))
}

fn refuse(arg: &'static str, expected: &str, got: impl ToString) -> Error {
    Error::Value { op: "packing", arg, expected: expected.to_string(), got: got.to_string() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn layout_is_the_documented_one() {
        let indices = [0x21, 0x32, 0x03, 0x14, 0x25, 0x36, 0x07, 0x18];
        let mut low = [0; 4];
        pack(4, &indices, &mut low, &mut []).unwrap();
        assert_eq!(low, [0x21, 0x43, 0x65, 0x87]);
        let mut high = [0; 1];
        pack(5, &indices, &mut low, &mut high).unwrap();
        // Bit 4 of each index, coordinate 0 lowest: 0, 1, 0, 1, 0, 1, 0, 1.
        assert_eq!((low, high), ([0x21, 0x43, 0x65, 0x87], [0b1010_1010]));
        let mut high = [0; 2];
        pack(6, &indices, &mut low, &mut high).unwrap();
        // Bits 4 and 5: 2, 3, 0, 1, then 2, 3, 0, 1.
        assert_eq!((low, high), ([0x21, 0x43, 0x65, 0x87], [0b01_00_11_10; 2]));
        let mut low = [0; 8];
        pack(8, &indices, &mut low, &mut []).unwrap();
        assert_eq!(low, indices);
        let indices = [1, 6, 3, 4, 5, 2, 7, 0];
        let mut low = [0; 2];
        pack(2, &indices, &mut low, &mut []).unwrap();
        // Bits 0 and 1, coordinate 0 lowest: 1, 2, 3, 0, then 1, 2, 3, 0.
        assert_eq!(low, [0b00_11_10_01; 2]);
        let mut high = [0; 1];
        pack(3, &indices, &mut low, &mut high).unwrap();
        // Bit 2 of each index: 0, 1, 0, 1, 1, 0, 1, 0.
        assert_eq!((low, high), ([0b00_11_10_01; 2], [0b0101_1010]));
    }

    #[test]
    fn wrong_lengths_are_refused() {
        let mut high = [0; 2];
        assert!(pack(4, &[0; 8], &mut [0; 3], &mut []).is_err());
        assert!(pack(4, &[0; 8], &mut [0; 4], &mut high).is_err());
        assert!(pack(6, &[0; 8], &mut [0; 4], &mut high[..1]).is_err());
        assert!(pack(4, &[0; 6], &mut [0; 3], &mut []).is_err());
        assert!(pack(7, &[0; 8], &mut [0; 7], &mut []).is_err());
        assert!(pack(1, &[0; 8], &mut [0; 1], &mut []).is_err());
        assert!(pack(2, &[0; 8], &mut [0; 4], &mut []).is_err());
        assert!(pack(3, &[0; 8], &mut [0; 2], &mut []).is_err());
        assert!(unpack(8, &[0; 8], &[], &mut [0; 16]).is_err());
    }

    proptest! {
        #[test]
        fn unpack_undoes_pack(
            bits in prop::sample::select(crate::codec::BITS.to_vec()),
            bytes in prop::collection::vec(any::<u8>(), 1..40),
        ) {
            let mask = ((1u32 << bits) - 1) as u8;
            let indices: Vec<u8> = bytes.iter().cycle().take(bytes.len() * 8).map(|b| b & mask).collect();
            let (low, high) = plane_bytes(bits, indices.len()).unwrap();
            let (mut low, mut high) = (vec![0xAA; low], vec![0xAA; high]);
            pack(bits, &indices, &mut low, &mut high).unwrap();
            let mut back = vec![0xAA; indices.len()];
            unpack(bits, &low, &high, &mut back).unwrap();
            prop_assert_eq!(back, indices);
        }
    }
}
