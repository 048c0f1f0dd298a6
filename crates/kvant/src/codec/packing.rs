use crate::{Error, Result};

/// Bytes of the two planes that hold `dim` indices: the low plane, and the high plane (0 at 4 and 8 bits).
///
/// # Errors
/// `Value` unless `bits` is 4, 5, 6 or 8 and `dim` is a multiple of 8.
pub fn plane_bytes(bits: u32, dim: usize) -> Result<(usize, usize)> {
    if !dim.is_multiple_of(8) {
        return Err(refuse("dim", "a multiple of 8", dim));
    }
    match bits {
        4 => Ok((dim / 2, 0)),
        5 => Ok((dim / 2, dim / 8)),
        6 => Ok((dim / 2, dim / 4)),
        8 => Ok((dim, 0)),
        _ => Err(refuse("bits", "4, 5, 6 or 8", bits)),
    }
}

/// Packs indices, one per byte, into planes. Each plane has the length that [`plane_bytes`] returns.
///
/// - 8 bits: `low[j]` is index j.
/// - 4 bits: `low[j/2]` holds index j, in its low half for an even j and in its high half for an odd j.
/// - 5 and 6 bits: the low plane holds the low 4 bits of each index, as at 4 bits. The upper w = 1 or 2 bits of index
///   j are in `high[j·w/8]`, from bit (j·w mod 8) upwards.
///
/// Bits of an index beyond `bits` are dropped.
///
/// # Errors
/// `Value` for lengths that do not fit together.
pub fn pack(bits: u32, indices: &[u8], low: &mut [u8], high: &mut [u8]) -> Result<()> {
    check(bits, indices.len(), low.len(), high.len())?;
    if bits == 8 {
        low.copy_from_slice(indices);
        return Ok(());
    }
    for (byte, pair) in low.iter_mut().zip(indices.chunks_exact(2)) {
        *byte = pair[0] & 15 | pair[1] << 4;
    }
    if bits == 4 {
        return Ok(());
    }
    let (width, mask) = high_bits(bits);
    for (byte, group) in high.iter_mut().zip(indices.chunks_exact(8 / width)) {
        *byte = group.iter().rev().fold(0, |byte, index| byte << width | index >> 4 & mask);
    }
    Ok(())
}

/// The inverse of [`pack`].
///
/// # Errors
/// `Value` for lengths that do not fit together.
pub fn unpack(bits: u32, low: &[u8], high: &[u8], indices: &mut [u8]) -> Result<()> {
    check(bits, indices.len(), low.len(), high.len())?;
    if bits == 8 {
        indices.copy_from_slice(low);
        return Ok(());
    }
    for (byte, pair) in low.iter().zip(indices.chunks_exact_mut(2)) {
        pair[0] = byte & 15;
        pair[1] = byte >> 4;
    }
    if bits == 4 {
        return Ok(());
    }
    let (width, mask) = high_bits(bits);
    for (byte, group) in high.iter().zip(indices.chunks_exact_mut(8 / width)) {
        for (i, index) in group.iter_mut().enumerate() {
            *index |= (byte >> (i * width) & mask) << 4;
        }
    }
    Ok(())
}

/// The number of bits of an index in the high plane, and a mask of as many ones.
fn high_bits(bits: u32) -> (usize, u8) {
    if bits == 5 { (1, 1) } else { (2, 3) }
}

fn check(bits: u32, indices: usize, low: usize, high: usize) -> Result<()> {
    let expected = plane_bytes(bits, indices)?;
    if low != expected.0 {
        return Err(refuse("low", &format!("{} bytes", expected.0), low));
    }
    if high != expected.1 {
        return Err(refuse("high", &format!("{} bytes", expected.1), high));
    }
    Ok(())
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
    }

    #[test]
    fn wrong_lengths_are_refused() {
        let mut high = [0; 2];
        assert!(pack(4, &[0; 8], &mut [0; 3], &mut []).is_err());
        assert!(pack(4, &[0; 8], &mut [0; 4], &mut high).is_err());
        assert!(pack(6, &[0; 8], &mut [0; 4], &mut high[..1]).is_err());
        assert!(pack(4, &[0; 6], &mut [0; 3], &mut []).is_err());
        assert!(pack(7, &[0; 8], &mut [0; 7], &mut []).is_err());
        assert!(unpack(8, &[0; 8], &[], &mut [0; 16]).is_err());
    }

    proptest! {
        #[test]
        fn unpack_undoes_pack(
            bits in prop::sample::select(vec![4u32, 5, 6, 8]),
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
