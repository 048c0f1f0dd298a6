//! The TurboQuant codec on rows of f32.
//!
//! Encoding: rotate; compute the RMS n of each block of B = min(D, 256) coordinates; for each coordinate y, count the
//! thresholds that y/n exceeds; pack these codes into planes. Decoding: norm × centroid, rotated back unless the caller
//! keeps the rotation.
//!
//! Centred codecs subtract the mean of the page after the rotation, and add it when they decode.

use std::sync::LazyLock;

use half::f16;

use super::{
    hadamard,
    simd::{Simd, Thresholds},
};
use crate::codec::{self, BITS, BLOCK, Norm, TurboQuant};

/// The largest dimension of the codec.
const MAX_DIM: usize = 4096;

/// The squared length below which squares lose precision in f32.
const SMALL: f32 = 1e-24;

/// A codec for vectors of one dimension, with its tables.
#[derive(Clone, Copy)]
pub(super) struct Quantiser {
    tq: TurboQuant,
    signs: &'static [f32],
    centroids: &'static [f32],
    /// The centroids for vector lookups: 16 entries or more.
    lookup: &'static [f32],
    thresholds: &'static [f32],
    /// The thresholds for vector searches.
    search: &'static Thresholds,
}

/// The planes of one vector.
#[derive(Clone, Copy)]
pub(super) struct Vector {
    pub low: *mut u8,
    /// Unused at 2, 4 and 8 bits.
    pub high: *mut u8,
    /// f32 norms; f16 if the codec is centred.
    pub norms: *mut u8,
}

impl Vector {
    /// The part of the planes that holds coordinates from `start` on, a multiple of a block.
    #[inline(always)]
    unsafe fn from(self, start: usize, tq: TurboQuant) -> Vector {
        let (low, high) = plane_bytes(tq.bits, start);
        let norms = start / BLOCK * tq.norm_dtype().size();
        // SAFETY: the caller keeps `start` within the vector.
        unsafe { Vector { low: self.low.add(low), high: self.high.wrapping_add(high), norms: self.norms.add(norms) } }
    }
}

/// Bytes of the low and the high plane for `dim` coordinates.
#[inline(always)]
fn plane_bytes(bits: u32, dim: usize) -> (usize, usize) {
    let (low, high) = codec::plane_bits(bits).unwrap_or((8, 0));
    (dim / 8 * low as usize, dim / 8 * high as usize)
}

impl Quantiser {
    /// A quantiser for vectors of `dim`. Codec and dimension were validated when the layer was made.
    pub(super) fn new(tq: TurboQuant, dim: usize) -> Quantiser {
        static SEARCHES: LazyLock<[Thresholds; BITS.len()]> =
            LazyLock::new(|| BITS.map(|bits| Thresholds::new(codec::thresholds(bits).expect("these codebooks exist"))));
        let valid = "a layer is made only with codecs that exist";
        let search = &SEARCHES[BITS.iter().position(|&bits| bits == tq.bits).expect(valid)];
        Quantiser {
            tq,
            signs: hadamard::signs(dim),
            centroids: codec::centroids(tq.bits).expect(valid),
            lookup: codec::lookup_table(tq.bits).expect(valid),
            thresholds: codec::thresholds(tq.bits).expect(valid),
            search,
        }
    }

    /// Bytes of a vector in the planes `low`, `high` and `norms`.
    pub(super) fn sizes(&self) -> (usize, usize, usize) {
        let (low, high) = plane_bytes(self.tq.bits, self.signs.len());
        (low, high, self.signs.len().div_ceil(BLOCK) * self.tq.norm_dtype().size())
    }

    /// Whether vectors are stored minus the mean of their page.
    #[inline(always)]
    pub(super) fn is_centred(&self) -> bool {
        self.tq.centred
    }

    /// Rotates a row.
    ///
    /// # Safety
    /// The level's instructions are enabled; the row has the quantiser's length.
    #[inline(always)]
    pub(super) unsafe fn rotate<S: Simd>(&self, row: &mut [f32]) {
        // SAFETY: passed on to the caller.
        unsafe { hadamard::rotate::<S>(row, self.signs) }
    }

    /// Stores a block's norm.
    #[inline(always)]
    unsafe fn store_norm<S: Simd>(&self, norm: f32, to: *mut u8) {
        // SAFETY: passed on to the caller; no level has more than 16 lanes.
        unsafe {
            if self.tq.centred {
                let mut halves = [0u16; 16];
                S::store_f16(halves.as_mut_ptr(), S::splat(norm));
                to.cast::<u16>().write(halves[0]);
            } else {
                to.cast::<f32>().write(norm);
            }
        }
    }

    #[inline(always)]
    unsafe fn load_norm(&self, from: *const u8) -> f32 {
        // SAFETY: passed on to the caller.
        unsafe { if self.tq.centred { from.cast::<f16>().read().to_f32() } else { from.cast::<f32>().read() } }
    }

    /// Encodes a row minus the mean of its page, and leaves the row rotated. The mean is empty unless the codec is
    /// centred.
    ///
    /// A row that is not finite, or whose squared length overflows f32, is stored as zeros with NaN norms.
    ///
    /// # Safety
    /// The level's instructions are enabled; the planes have room for a vector of the row's length, which is that
    /// of the quantiser.
    #[inline(always)]
    pub(super) unsafe fn encode<S: Simd>(&self, row: &mut [f32], mean: &[f32], to: Vector) {
        // SAFETY: passed on to the caller.
        unsafe {
            hadamard::rotate::<S>(row, self.signs);
            let mut energies = [0f32; MAX_DIM / BLOCK];
            for (index, (energy, block)) in energies.iter_mut().zip(row.chunks_mut(BLOCK)).enumerate() {
                *energy = match mean.get(index * BLOCK..index * BLOCK + block.len()) {
                    Some(mean) => subtract::<S>(block, mean),
                    None => dot::<S>(block, block),
                };
            }
            if !energies[..row.len().div_ceil(BLOCK)].iter().sum::<f32>().is_finite() {
                return self.store_nan::<S>(to);
            }
            match self.tq.bits {
                2 => self.encode_rotated::<S, 2>(row, &energies, to),
                3 => self.encode_rotated::<S, 3>(row, &energies, to),
                4 => self.encode_rotated::<S, 4>(row, &energies, to),
                5 => self.encode_rotated::<S, 5>(row, &energies, to),
                6 => self.encode_rotated::<S, 6>(row, &energies, to),
                _ => self.encode_rotated::<S, 8>(row, &energies, to),
            }
        }
    }

    /// Stores zeros with NaN norms.
    #[inline(always)]
    unsafe fn store_nan<S: Simd>(&self, to: Vector) {
        let (low, high, norms) = self.sizes();
        // SAFETY: passed on to the caller.
        unsafe {
            to.low.write_bytes(0, low);
            if high > 0 {
                to.high.write_bytes(0, high);
            }
            let size = self.tq.norm_dtype().size();
            (0..norms).step_by(size).for_each(|at| self.store_norm::<S>(f32::NAN, to.norms.add(at)));
        }
    }

    /// Encodes a rotated row; `squares` has the squared lengths of its blocks.
    #[inline(always)]
    unsafe fn encode_rotated<S: Simd, const BITS: usize>(&self, row: &[f32], energies: &[f32], to: Vector) {
        for (index, (block, &energy)) in row.chunks(BLOCK).zip(energies).enumerate() {
            let mut codes = [0u8; BLOCK];
            let codes = &mut codes[..block.len()];
            // SAFETY: passed on to the caller; the block's part of the planes is within the vector's.
            unsafe {
                let n = (energy / block.len() as f32).sqrt() / self.tq.scale;
                let factor = 1.0 / n;
                let norm = if energy > SMALL && factor.is_finite() {
                    let (yc, cc) = self.find_codes::<S, BITS>(block, factor, codes);
                    match self.tq.norm {
                        Norm::Rms => n,
                        Norm::LeastSquares => yc / cc,
                        Norm::Unbiased => energy / yc,
                    }
                } else {
                    self.encode_small(block, codes)
                };
                let to = to.from(index * BLOCK, self.tq);
                self.store_norm::<S>(norm, to.norms);
                pack::<BITS>(codes, to);
            }
        }
    }

    /// codes ← the number of thresholds that block · factor exceeds. Returns ⟨y, c⟩ and ⟨c, c⟩ for the block y and its
    /// centroids c.
    #[inline(always)]
    unsafe fn find_codes<S: Simd, const BITS: usize>(
        &self,
        block: &[f32],
        factor: f32,
        codes: &mut [u8],
    ) -> (f32, f32) {
        let whole = block.len() - block.len() % S::LANES;
        // SAFETY: whole vectors of both slices, which are equally long; the tables have 2^BITS entries, at least 16.
        let (mut yc, mut cc) = unsafe {
            let table = self.lookup.as_ptr();
            // Two independent chains of additions for each sum.
            let (mut yc, mut cc) = ([S::zero(); 2], [S::zero(); 2]);
            let factor = S::splat(factor);
            for at in (0..whole).step_by(S::LANES) {
                let y = S::load(block.as_ptr().add(at));
                let index = S::search::<BITS>(S::mul(y, factor), self.search, codes.as_mut_ptr().add(at));
                let c = match BITS {
                    2..=4 => S::lookup16(&*table.cast(), index),
                    5 => S::lookup32(&*table.cast(), index),
                    6 => S::lookup64(&*table.cast(), index),
                    _ => S::lookup256(&*table.cast(), index),
                };
                yc = [yc[1], S::fma(y, c, yc[0])];
                cc = [cc[1], S::fma(c, c, cc[0])];
            }
            (S::sum(S::add(yc[0], yc[1])), S::sum(S::add(cc[0], cc[1])))
        };
        for (&y, code) in block[whole..].iter().zip(&mut codes[whole..]) {
            *code = codec::nearest(y * factor, self.thresholds);
            let c = self.centroids[usize::from(*code)];
            yc += y * c;
            cc += c * c;
        }
        (yc, cc)
    }

    /// Codes and norm of a block whose squares lost precision in f32, or of a zero block.
    #[inline(never)]
    fn encode_small(&self, block: &[f32], codes: &mut [u8]) -> f32 {
        let energy: f64 = block.iter().map(|&y| f64::from(y).powi(2)).sum();
        let n = (energy / block.len() as f64).sqrt() / f64::from(self.tq.scale);
        let (mut yc, mut cc) = (0f64, 0f64);
        for (&y, code) in block.iter().zip(codes) {
            let y = f64::from(y);
            let z = if n > 0.0 { (y / n) as f32 } else { 0.0 };
            *code = codec::nearest(z, self.thresholds);
            let c = f64::from(self.centroids[usize::from(*code)]);
            yc += y * c;
            cc += c * c;
        }
        let norm = match self.tq.norm {
            _ if n == 0.0 => 0.0,
            Norm::Rms => n,
            Norm::LeastSquares => yc / cc,
            Norm::Unbiased => energy / yc,
        };
        norm as f32
    }

    /// Decodes a vector, plus the mean of its page, and undoes its rotation unless `keep_rotated`. The mean is empty
    /// unless the codec is centred.
    ///
    /// # Safety
    /// As for [`Quantiser::encode`].
    #[inline(always)]
    pub(super) unsafe fn decode<S: Simd>(&self, from: Vector, mean: &[f32], row: &mut [f32], keep_rotated: bool) {
        for (index, block) in row.chunks_mut(BLOCK).enumerate() {
            let mut codes = [0u8; BLOCK];
            let codes = &mut codes[..block.len()];
            // SAFETY: passed on to the caller; the block's part of the planes is within the vector's.
            let norm = unsafe {
                let from = from.from(index * BLOCK, self.tq);
                match self.tq.bits {
                    2 => unpack::<2>(from, codes),
                    3 => unpack::<3>(from, codes),
                    4 => unpack::<4>(from, codes),
                    5 => unpack::<5>(from, codes),
                    6 => unpack::<6>(from, codes),
                    _ => unpack::<8>(from, codes),
                }
                self.load_norm(from.norms)
            };
            // The tables have 2^bits entries, and codes are below that.
            block.iter_mut().zip(codes).for_each(|(y, code)| *y = norm * self.centroids[usize::from(*code)]);
        }
        row.iter_mut().zip(mean).for_each(|(y, mean)| *y += mean);
        if !keep_rotated {
            // SAFETY: passed on to the caller.
            unsafe { hadamard::unrotate::<S>(row, self.signs) }
        }
    }
}

/// a ← a − b, for two slices of one length; returns ⟨a, a⟩.
///
/// # Safety
/// The level's instructions are enabled.
#[inline(always)]
unsafe fn subtract<S: Simd>(a: &mut [f32], b: &[f32]) -> f32 {
    let n = a.len().min(b.len());
    let whole = n - n % S::LANES;
    // SAFETY: whole vectors of both; the rest is the caller's promise.
    let mut sum = unsafe {
        let (mut even, mut odd) = (S::zero(), S::zero());
        for i in (0..whole).step_by(S::LANES) {
            let y = S::sub(S::load(a.as_ptr().add(i)), S::load(b.as_ptr().add(i)));
            S::store(a.as_mut_ptr().add(i), y);
            even = S::fma(y, y, even);
            (even, odd) = (odd, even);
        }
        S::sum(S::add(even, odd))
    };
    for (a, b) in a[whole..].iter_mut().zip(&b[whole..]) {
        *a -= b;
        sum += *a * *a;
    }
    sum
}

/// ⟨a, b⟩ of two slices of equal length.
#[inline(always)]
pub(super) unsafe fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    let n = a.len();
    let whole = n - n % S::LANES;
    // SAFETY: whole vectors of both; the caller guarantees the instructions.
    let sum = unsafe {
        let (mut even, mut odd) = (S::zero(), S::zero());
        for i in (0..whole).step_by(S::LANES) {
            even = S::fma(S::load(a.as_ptr().add(i)), S::load(b.as_ptr().add(i)), even);
            // Two independent chains of additions take half the time of one.
            (even, odd) = (odd, even);
        }
        S::sum(S::add(even, odd))
    };
    a[whole..].iter().zip(&b[whole..]).fold(sum, |sum, (a, b)| sum + a * b)
}

/// Packs the codes of a block, a multiple of 8 of them, as `codec::pack` does.
///
/// # Safety
/// The planes have room for them.
#[inline(always)]
unsafe fn pack<const BITS: usize>(codes: &[u8], to: Vector) {
    let n = codes.len();
    // SAFETY: the caller's promise; the lengths are those of `plane_bytes`.
    unsafe {
        if BITS == 8 {
            return std::ptr::copy_nonoverlapping(codes.as_ptr(), to.low, n);
        }
        if BITS <= 3 {
            pack_pairs(codes, 0, std::slice::from_raw_parts_mut(to.low, n / 4));
        } else {
            let low = std::slice::from_raw_parts_mut(to.low, n / 2);
            for (byte, pair) in low.iter_mut().zip(codes.as_chunks::<2>().0) {
                *byte = pair[0] & 15 | pair[1] << 4;
            }
        }
        match BITS {
            3 => pack_singles(codes, 2, std::slice::from_raw_parts_mut(to.high, n / 8)),
            5 => pack_singles(codes, 4, std::slice::from_raw_parts_mut(to.high, n / 8)),
            6 => pack_pairs(codes, 4, std::slice::from_raw_parts_mut(to.high, n / 4)),
            _ => {}
        }
    }
}

/// Bit `from` of each code.
#[inline(always)]
fn pack_singles(codes: &[u8], from: u32, plane: &mut [u8]) {
    for (byte, group) in plane.iter_mut().zip(codes.as_chunks::<8>().0) {
        // The product moves the bit of byte i to bit 56 + i.
        let bits = u64::from_le_bytes(*group) >> from & 0x0101_0101_0101_0101;
        *byte = (bits.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
    }
}

/// Bits `from` and `from + 1` of each code.
#[inline(always)]
fn pack_pairs(codes: &[u8], from: u32, plane: &mut [u8]) {
    for (byte, group) in plane.iter_mut().zip(codes.as_chunks::<4>().0) {
        let bits = u32::from_le_bytes(*group) >> from & 0x0303_0303;
        *byte = (bits | bits >> 6 | bits >> 12 | bits >> 18) as u8;
    }
}

/// The inverse of [`pack`].
///
/// # Safety
/// The planes have a code for each element of `codes`.
#[inline(always)]
unsafe fn unpack<const BITS: usize>(from: Vector, codes: &mut [u8]) {
    let n = codes.len();
    // SAFETY: as in `pack`.
    unsafe {
        if BITS == 8 {
            return std::ptr::copy_nonoverlapping(from.low, codes.as_mut_ptr(), n);
        }
        if BITS <= 3 {
            codes.fill(0);
            unpack_pairs(std::slice::from_raw_parts(from.low, n / 4), 0, codes);
        } else {
            let low = std::slice::from_raw_parts(from.low, n / 2);
            for (byte, pair) in low.iter().zip(codes.as_chunks_mut::<2>().0) {
                *pair = [byte & 15, byte >> 4];
            }
        }
        match BITS {
            3 => unpack_singles(std::slice::from_raw_parts(from.high, n / 8), 2, codes),
            5 => unpack_singles(std::slice::from_raw_parts(from.high, n / 8), 4, codes),
            6 => unpack_pairs(std::slice::from_raw_parts(from.high, n / 4), 4, codes),
            _ => {}
        }
    }
}

/// The inverse of [`pack_singles`], for codes in which these bits are zero.
#[inline(always)]
fn unpack_singles(plane: &[u8], from: u32, codes: &mut [u8]) {
    for (byte, group) in plane.iter().zip(codes.as_chunks_mut::<8>().0) {
        group.iter_mut().enumerate().for_each(|(i, code)| *code |= (byte >> i & 1) << from);
    }
}

/// The inverse of [`pack_pairs`], for codes in which these bits are zero.
#[inline(always)]
fn unpack_pairs(plane: &[u8], from: u32, codes: &mut [u8]) {
    for (byte, group) in plane.iter().zip(codes.as_chunks_mut::<4>().0) {
        group.iter_mut().enumerate().for_each(|(i, code)| *code |= (byte >> (2 * i) & 3) << from);
    }
}
