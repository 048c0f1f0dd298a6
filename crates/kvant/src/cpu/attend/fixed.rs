//! Quantised keys and values in fixed point, where the processor multiplies pairs of 16-bit integers (AVX-512 VNNI).
//!
//! Codes become centroids of 14 bits and a sign by one or two permutes of 32, half of what f32 needs, and an instruction
//! adds 32 products to 16 sums, twice what f32 does; the sums are exact. What is multiplied is rounded: a query relative
//! to its block's largest lane sum, the weights of a tile relative to their sum, such that no sum of 32 bits overflows.
//! The weights' unit is such that rounding them loses nothing of their sum. What errors that leaves is said at
//! [`Attend`](crate::ops::Attend).
//!
//! Packed codes come 64 coordinates at a time as 16 words of four nibbles: word i holds coordinates 4i, 4i + 1, 4i + 2 and
//! 4i + 3. Queries and sums meanwhile have the sixteen coordinates 4i first, then the sixteen 4i + 1, and so on. A vector of
//! keys holds two of these four sets, one after the other, a vector of values one set of two keys in turn. Bytes have
//! an order of their own in queries, that of the instruction which puts their centroids together, and none in sums.

use std::{arch::x86_64::*, sync::OnceLock};

use super::{
    ahead::Ahead,
    rows::{Bytes, Loader, Packed, Side},
    score,
    tile::{Queries, TILE},
};
use crate::{
    codec,
    cpu::simd::{Avx512, dot_pairs},
};

/// The outermost centroid.
const LARGEST: f32 = 16383.0;
/// What the magnitudes that meet in one 32-bit sum may add up to: i32::MAX / LARGEST, less half for each that is rounded.
const SUM: f32 = 131_000.0;
/// Coordinates that are taken at a time.
const CHUNK: usize = 64;

/// Centroids of a number of bits, and what one unit is.
struct Table {
    centroids: [i16; 256],
    /// The bytes of the centroids, lower and upper ones.
    bytes: [[u8; 256]; 2],
    unit: f32,
}

fn table(bits: u32) -> &'static Table {
    static TABLES: [OnceLock<Table>; 9] = [const { OnceLock::new() }; 9];
    TABLES[bits as usize].get_or_init(|| {
        let all = codec::centroids(bits).expect("a layer's codec has been checked");
        let unit = all[all.len() - 1] / LARGEST;
        // Shorter tables repeat: permutes look at as many bits as they have entries for.
        let centroids: [i16; 256] = std::array::from_fn(|i| (all[i % all.len()] / unit).round() as i16);
        Table { centroids, bytes: [0, 1].map(|byte| centroids.map(|c| c.to_le_bytes()[byte])), unit }
    })
}

/// Rounds a query: its blocks of `side.block` coordinates to `to`, and what a unit of each block's products is to `units`.
pub(super) fn round_query(side: &Side, q: &[f32], to: &mut [i16], units: &mut [f32]) {
    let unit = table(side.bits()).unit;
    let blocks = q.chunks_exact(side.block).zip(to.chunks_exact_mut(side.block));
    for ((q, to), to_unit) in blocks.zip(units) {
        // SAFETY: a side is in fixed point only where the processor has the instructions.
        *to_unit = unit * unsafe { round_block(q, side.interleaved, to) };
    }
}

/// Rounds a block of a query, and returns what a unit is.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn round_block(q: &[f32], packed: bool, to: &mut [i16]) -> f32 {
    let mut vectors = [_mm512_setzero_ps(); codec::BLOCK / 16];
    let count = q.len() / 16;
    let fours = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
    let (mut largest, mut sums) = (_mm512_setzero_ps(), [_mm512_setzero_ps(); 2]);
    // SAFETY: vectors of whole chunks of q, and of as many of `to`.
    unsafe {
        for (i, x) in vectors[..count].iter_mut().enumerate() {
            let chunk = q.as_ptr().add(i / 4 * CHUNK);
            *x = if packed {
                _mm512_i32gather_ps::<4>(fours, chunk.add(i % 4))
            } else {
                let from = chunk.add(i % 2 * 32 + i % 4 / 2 * 8);
                _mm512_insertf32x8::<1>(_mm512_castps256_ps512(_mm256_loadu_ps(from)), _mm256_loadu_ps(from.add(16)))
            };
            largest = _mm512_max_ps(_mm512_abs_ps(*x), largest);
            sums[i % 2] = _mm512_add_ps(_mm512_abs_ps(*x), sums[i % 2]);
        }
        // Two neighbours meet in a sum.
        let [a, b] = sums;
        let a = _mm512_add_ps(a, _mm512_permute_ps::<0b10_11_00_01>(a));
        let b = _mm512_add_ps(b, _mm512_permute_ps::<0b10_11_00_01>(b));
        // A NaN is not in the maximum, but in the sum of all.
        let finite = _mm512_reduce_add_ps(_mm512_add_ps(a, b)).is_finite();
        let (factor, unit) = factor(_mm512_reduce_max_ps(largest), _mm512_reduce_max_ps(_mm512_max_ps(a, b)), finite);
        for (i, &x) in vectors[..count].iter().enumerate() {
            let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(factor)));
            _mm256_storeu_si256(to.as_mut_ptr().add(16 * i).cast(), _mm512_cvtepi32_epi16(rounded));
        }
        unit
    }
}

/// What numbers are multiplied by before they are rounded, given the largest magnitude and the largest sum of those that
/// meet, and what a unit then is: NaN, which shows in the result, where one of them is not finite.
fn factor(largest: f32, sum: f32, finite: bool) -> (f32, f32) {
    let factor = (32767.0 / largest).min(SUM / sum);
    match () {
        () if !finite => (0.0, f32::NAN),
        // Zeros, or next to nothing.
        () if !factor.is_finite() => (0.0, 0.0),
        () => (factor, factor.recip()),
    }
}

/// Brings a sum into the order of coordinates.
pub(super) fn order_sum(side: &Side, o: &mut [f32]) {
    if side.interleaved {
        for chunk in o.chunks_exact_mut(CHUNK) {
            let mut copy = [0.0; CHUNK];
            copy.copy_from_slice(chunk);
            for (at, &x) in copy.iter().enumerate() {
                chunk[4 * (at % 16) + at / 16] = x;
            }
        }
    }
}

/// What is worked on: keys of a tile, and a block of coordinates that share a norm.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub row: usize,
    pub keys: usize,
    pub block: usize,
    pub queries: Queries,
    /// Lines to ask for meanwhile.
    pub lines: usize,
}

/// Scores without norms into `scores`, `[rows, TILE]`.
///
/// # Safety
/// The processor has the instructions of `Avx512Vnni`; everything that `part` names exists.
pub(super) unsafe fn score(side: &Side, part: Part, scores: *mut f32, ahead: &mut Ahead) {
    // SAFETY: passed on to the caller.
    unsafe {
        match side.loader {
            Loader::Tq4(rows) => score_all(rows, side.block, part, scores, ahead),
            Loader::Tq5(rows) => score_all(rows, side.block, part, scores, ahead),
            Loader::Tq6(rows) => score_all(rows, side.block, part, scores, ahead),
            Loader::Tq8(rows) => score_all(rows, side.block, part, scores, ahead),
            _ => unreachable!("only quantised sides are in fixed point"),
        }
    }
}

/// Adds the values, by `weights` (`[rows, TILE]`), to the queries' sums. `rounded` has room for as many i16.
///
/// # Safety
/// As for [`score`].
pub(super) unsafe fn add_values(side: &Side, part: Part, weights: *const f32, rounded: *mut i16, ahead: &mut Ahead) {
    // SAFETY: passed on to the caller.
    unsafe {
        match side.loader {
            Loader::Tq4(rows) => add_all(rows, side.block, part, weights, rounded, ahead),
            Loader::Tq5(rows) => add_all(rows, side.block, part, weights, rounded, ahead),
            Loader::Tq6(rows) => add_all(rows, side.block, part, weights, rounded, ahead),
            Loader::Tq8(rows) => add_all(rows, side.block, part, weights, rounded, ahead),
            _ => unreachable!("only quantised sides are in fixed point"),
        }
    }
}

/// Rows as centroids of 16 bits.
///
/// # Safety
/// Of all functions: the instructions are enabled, the rows and coordinates exist.
trait Codes: Copy {
    const BITS: u32;
    /// The centroids, in registers.
    type Table: Copy;
    unsafe fn table() -> Self::Table;
    /// Coordinates `64 · chunk ..` of a key.
    unsafe fn key(&self, table: Self::Table, row: usize, chunk: usize) -> [__m512i; 2];
    /// `SETS` sets of 16 coordinates of a chunk, from set `FIRST` on, of two values in turn.
    unsafe fn pair<const SETS: usize, const FIRST: usize>(
        &self,
        table: Self::Table,
        rows: [usize; 2],
        chunk: usize,
    ) -> [__m512i; SETS];
}

#[inline(always)]
unsafe fn vector<T, const N: usize>(of: &[T; N]) -> __m512i {
    const { assert!(N * size_of::<T>() == 64) };
    // SAFETY: as long as a vector; AVX-512 is enabled.
    unsafe { _mm512_loadu_si512(of.as_ptr().cast()) }
}

/// The centroids by the low bits of each word: 32, or 64 from two vectors.
#[inline(always)]
unsafe fn look_up<const BITS: u32>(table: [__m512i; 2], index: __m512i) -> __m512i {
    // SAFETY: AVX-512 BW is enabled.
    unsafe {
        if BITS == 6 {
            _mm512_permutex2var_epi16(table[0], index, table[1])
        } else {
            _mm512_permutexvar_epi16(index, table[0])
        }
    }
}

/// The low four bits of each word of `low`, the others from `high`.
#[inline(always)]
unsafe fn join(low: __m512i, high: __m512i) -> __m512i {
    // SAFETY: AVX-512 is enabled. 0xCA: where the first operand has a one, the second, elsewhere the third.
    unsafe { _mm512_ternarylogic_epi32::<0xCA>(_mm512_set1_epi16(15), low, high) }
}

impl<const BITS: u32> Codes for Packed<BITS> {
    const BITS: u32 = BITS;
    type Table = [__m512i; 2];

    #[inline(always)]
    unsafe fn table() -> [__m512i; 2] {
        let centroids = table(BITS).centroids.as_ptr();
        // SAFETY: the table has 256 entries.
        unsafe { [_mm512_loadu_si512(centroids.cast()), _mm512_loadu_si512(centroids.add(32).cast())] }
    }

    #[inline(always)]
    unsafe fn key(&self, table: [__m512i; 2], row: usize, chunk: usize) -> [__m512i; 2] {
        // SAFETY: passed on to the caller.
        unsafe {
            let low = _mm512_broadcast_i64x4(_mm256_loadu_si256(self.low(row).add(chunk * 32).cast()));
            let high = self.high(row).wrapping_add(chunk * 8 * (BITS as usize - 4));
            // The further bits of a word's four coordinates, from bit 4 on.
            let high = match BITS {
                4 => _mm512_setzero_si512(),
                5 => {
                    // Nibble i of 64 bits: byte i/2 in word i, whose upper half is taken where i is odd.
                    let bytes = _mm512_set1_epi64(high.cast::<i64>().read_unaligned());
                    _mm512_slli_epi16::<4>(_mm512_shuffle_epi8(bytes, vector(&const { nibbles(false) })))
                }
                _ => {
                    let bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(high.cast()));
                    _mm512_slli_epi16::<4>(_mm512_broadcast_i64x4(bytes))
                }
            };
            let mut keys = [_mm512_setzero_si512(); 2];
            for (i, key) in keys.iter_mut().enumerate() {
                let low = _mm512_srlv_epi16(low, vector(&const { shifts(4, 0) }[i]));
                let index = match BITS {
                    4 => low,
                    5 => join(low, _mm512_srlv_epi16(high, vector(&const { shifts(1, 4) }[i]))),
                    _ => join(low, _mm512_srlv_epi16(high, vector(&const { shifts(2, 0) }[i]))),
                };
                *key = look_up::<BITS>(table, index);
            }
            keys
        }
    }

    #[inline(always)]
    unsafe fn pair<const SETS: usize, const FIRST: usize>(
        &self,
        table: [__m512i; 2],
        [a, b]: [usize; 2],
        chunk: usize,
    ) -> [__m512i; SETS] {
        let at = chunk * 8 * (BITS as usize - 4);
        // SAFETY: passed on to the caller.
        unsafe {
            let low_a = _mm256_loadu_si256(self.low(a).add(chunk * 32).cast());
            let low_b = _mm256_loadu_si256(self.low(b).add(chunk * 32).cast());
            let (low_a, low_b) = (_mm512_castsi256_si512(low_a), _mm512_castsi256_si512(low_b));
            let low = _mm512_permutex2var_epi16(low_a, vector(&const { in_turn() }), low_b);
            let (a, b) = (self.high(a).wrapping_add(at), self.high(b).wrapping_add(at));
            let high = match BITS {
                4 => _mm512_setzero_si512(),
                5 => {
                    let (a, b) = (a.cast::<i64>().read_unaligned(), b.cast::<i64>().read_unaligned());
                    let bytes = _mm512_broadcast_i32x4(_mm_set_epi64x(b, a));
                    let bytes = _mm512_shuffle_epi8(bytes, vector(&const { nibbles(true) }));
                    _mm512_srlv_epi16(_mm512_slli_epi16::<4>(bytes), vector(&const { odd_fours() }))
                }
                _ => {
                    let a = _mm512_cvtepu8_epi32(_mm_loadu_si128(a.cast()));
                    let b = _mm512_cvtepu8_epi32(_mm_loadu_si128(b.cast()));
                    _mm512_slli_epi16::<4>(_mm512_or_si512(a, _mm512_slli_epi32::<16>(b)))
                }
            };
            let mut values = [_mm512_setzero_si512(); SETS];
            for (i, value) in values.iter_mut().enumerate() {
                let low = by_fours(low, FIRST + i);
                let index = match BITS {
                    4 => low,
                    5 => join(low, by_ones(high, FIRST + i)),
                    _ => join(low, by_twos(high, FIRST + i)),
                };
                *value = look_up::<BITS>(table, index);
            }
            values
        }
    }
}

macro_rules! shift_right {
    ($($name:ident: $bits:literal),*) => { $(
        /// Moves words right by so many times a number of bits, which the compiler knows.
        #[inline(always)]
        unsafe fn $name(x: __m512i, times: usize) -> __m512i {
            // SAFETY: AVX-512 BW is enabled.
            unsafe {
                match times {
                    0 => x,
                    1 => _mm512_srli_epi16::<$bits>(x),
                    2 => _mm512_srli_epi16::<{ 2 * $bits }>(x),
                    _ => _mm512_srli_epi16::<{ 3 * $bits }>(x),
                }
            }
        }
    )* };
}
shift_right!(by_ones: 1, by_twos: 2, by_fours: 4);

/// For keys: what moves each coordinate's `bits` bits to where word 4i's are; words of odd i begin `odd` bits higher.
const fn shifts(bits: u16, odd: u16) -> [[u16; 32]; 2] {
    let mut shifts = [[0; 32]; 2];
    let mut at = 0;
    while at < 64 {
        let (vector, lane) = (at / 32, at % 32);
        shifts[vector][lane] = bits * (2 * vector + lane / 16) as u16 + odd * (lane % 2) as u16;
        at += 1;
    }
    shifts
}

/// For values: words of odd coordinates begin four bits higher.
const fn odd_fours() -> [u16; 32] {
    let mut shifts = [0; 32];
    let mut lane = 0;
    while lane < 32 {
        shifts[lane] = 4 * (lane / 2 % 2) as u16;
        lane += 1;
    }
    shifts
}

/// Words of two vectors in turn.
const fn in_turn() -> [u16; 32] {
    let mut order = [0; 32];
    let mut lane = 0;
    while lane < 32 {
        order[lane] = (lane / 2 + lane % 2 * 32) as u16;
        lane += 1;
    }
    order
}

/// Byte i/2 for word i, 0x80 (zero) above it; `pairs`: of two strings of 8 bytes in turn.
const fn nibbles(pairs: bool) -> [u8; 64] {
    let mut order = [0x80; 64];
    let mut lane = 0;
    while lane < 32 {
        order[2 * lane] = if pairs { lane / 4 + lane % 2 * 8 } else { lane % 16 / 2 } as u8;
        lane += 1;
    }
    order
}

impl Bytes {
    /// The centroids of 64 codes, as words: in each quarter of a vector eight of the first eight of 16 codes, then of the
    /// other eight.
    #[inline(always)]
    unsafe fn look_up(table: [__m512i; 8], codes: __m512i) -> [__m512i; 2] {
        // SAFETY: AVX-512 BW and VBMI are enabled.
        unsafe {
            let upper = _mm512_movepi8_mask(codes);
            // By the low seven bits of each code; the table's quarters are lower bytes, then upper bytes.
            let low = _mm512_permutex2var_epi8(table[0], codes, table[1]);
            let low = _mm512_mask_blend_epi8(upper, low, _mm512_permutex2var_epi8(table[2], codes, table[3]));
            let high = _mm512_permutex2var_epi8(table[4], codes, table[5]);
            let high = _mm512_mask_blend_epi8(upper, high, _mm512_permutex2var_epi8(table[6], codes, table[7]));
            [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
        }
    }
}

/// Sixteen coordinates of two values in turn, from words as [`Bytes::look_up`] leaves those of 32 codes of either.
const fn bytes_in_turn(set: usize) -> [u16; 32] {
    let mut order = [0; 32];
    let mut lane = 0;
    while lane < 32 {
        let (coordinate, value) = (lane / 2, lane % 2);
        let within = 16 * value + 8 * set + coordinate % 8;
        order[lane] = (within + coordinate / 8 * 32) as u16;
        lane += 1;
    }
    order
}

impl Codes for Bytes {
    const BITS: u32 = 8;
    type Table = [__m512i; 8];

    #[inline(always)]
    unsafe fn table() -> [__m512i; 8] {
        let bytes = &table(8).bytes;
        // SAFETY: the level's instructions are enabled.
        let mut vectors = [unsafe { _mm512_setzero_si512() }; 8];
        for (i, vector) in vectors.iter_mut().enumerate() {
            // SAFETY: four vectors of each.
            *vector = unsafe { _mm512_loadu_si512(bytes[i / 4].as_ptr().add(i % 4 * 64).cast()) };
        }
        vectors
    }

    #[inline(always)]
    unsafe fn key(&self, table: [__m512i; 8], row: usize, chunk: usize) -> [__m512i; 2] {
        // SAFETY: passed on to the caller.
        unsafe { Self::look_up(table, _mm512_loadu_si512(self.row(row).add(chunk * CHUNK).cast())) }
    }

    #[inline(always)]
    unsafe fn pair<const SETS: usize, const FIRST: usize>(
        &self,
        table: [__m512i; 8],
        [a, b]: [usize; 2],
        chunk: usize,
    ) -> [__m512i; SETS] {
        // SAFETY: passed on to the caller.
        unsafe {
            let mut values = [_mm512_setzero_si512(); SETS];
            for (i, two) in values.chunks_exact_mut(2).enumerate() {
                let at = chunk * CHUNK + (FIRST + 2 * i) * 16;
                let a = _mm512_castsi256_si512(_mm256_loadu_si256(self.row(a).add(at).cast()));
                let b = _mm256_loadu_si256(self.row(b).add(at).cast());
                let [first, second] = Self::look_up(table, _mm512_inserti64x4::<1>(a, b));
                two[0] = _mm512_permutex2var_epi16(first, vector(&const { bytes_in_turn(0) }), second);
                two[1] = _mm512_permutex2var_epi16(first, vector(&const { bytes_in_turn(1) }), second);
            }
            values
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
unsafe fn score_all<R: Codes>(codes: R, block: usize, part: Part, scores: *mut f32, ahead: &mut Ahead) {
    let mut local = *ahead;
    let rows = part.queries.rows;
    let mut query = 0;
    // SAFETY: passed on to the caller of `score`.
    unsafe {
        let work = Score { codes, block, part, scores };
        while query + 8 <= rows {
            work.keys::<2, 8>(query, &mut local);
            query += 8;
        }
        if query + 4 <= rows {
            work.keys::<4, 4>(query, &mut local);
            query += 4;
        }
        if query + 2 <= rows {
            work.keys::<8, 2>(query, &mut local);
            query += 2;
        }
        if query < rows {
            work.keys::<8, 1>(query, &mut local);
        }
    }
    *ahead = local;
}

struct Score<R> {
    codes: R,
    /// Coordinates that share a norm.
    block: usize,
    part: Part,
    scores: *mut f32,
}

impl<R: Codes> Score<R> {
    /// All keys with `Q` queries, `K` at a time while as many are left.
    #[inline(always)]
    unsafe fn keys<const K: usize, const Q: usize>(&self, query: usize, ahead: &mut Ahead) {
        let keys = self.part.keys;
        let whole = keys - keys % K;
        // The first queries ask for every line once.
        let steps = (keys / K).max(1) * self.block / CHUNK;
        let pace = if query == 0 { self.part.lines.div_ceil(steps) } else { 0 };
        // SAFETY: passed on to the caller.
        unsafe {
            let table = R::table();
            for key in (0..whole).step_by(K) {
                self.few::<K, Q>(table, key, query, pace, ahead);
            }
            for key in whole..keys {
                self.few::<1, Q>(table, key, query, 0, ahead);
            }
            let blocks = self.part.queries.head_dim / self.block;
            for query in query..query + Q {
                let unit = _mm512_set1_ps(*self.part.queries.units.add(query * blocks + self.part.block));
                for key in (0..TILE).step_by(16) {
                    let score = self.scores.add(query * TILE + key);
                    _mm512_storeu_ps(score, _mm512_mul_ps(_mm512_loadu_ps(score), unit));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn few<const K: usize, const Q: usize>(
        &self,
        table: R::Table,
        key: usize,
        query: usize,
        pace: usize,
        ahead: &mut Ahead,
    ) {
        let Part { row, block, queries, .. } = self.part;
        let dim = queries.head_dim;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); K]; Q];
            for chunk in block * self.block / CHUNK..(block + 1) * self.block / CHUNK {
                ahead.fetch::<Avx512>(pace);
                let q = queries.rounded.add(query * dim + chunk * CHUNK);
                if Q > K {
                    let mut k = [[_mm512_setzero_si512(); 2]; K];
                    for (i, k) in k.iter_mut().enumerate() {
                        *k = self.codes.key(table, row + key + i, chunk);
                    }
                    for (i, sums) in sums.iter_mut().enumerate() {
                        for half in 0..2 {
                            let q = _mm512_loadu_si512(q.add(i * dim + half * 32).cast());
                            for (sum, k) in sums.iter_mut().zip(&k) {
                                *sum = dot_pairs(*sum, k[half], q);
                            }
                        }
                    }
                } else {
                    for j in 0..K {
                        let k = self.codes.key(table, row + key + j, chunk);
                        for (i, sums) in sums.iter_mut().enumerate() {
                            for (half, &k) in k.iter().enumerate() {
                                let q = _mm512_loadu_si512(q.add(i * dim + half * 32).cast());
                                sums[j] = dot_pairs(sums[j], k, q);
                            }
                        }
                    }
                }
            }
            let mut products = [[_mm512_setzero_ps(); K]; Q];
            for (products, sums) in products.iter_mut().zip(&sums) {
                for (product, &sum) in products.iter_mut().zip(sums) {
                    *product = _mm512_cvtepi32_ps(sum);
                }
            }
            score::store::<Avx512, K, Q>(&products, self.scores.add(query * TILE + key));
        }
    }
}

/// Rounds the weights of a tile's keys, `[TILE]`, and returns what a unit is.
#[inline(always)]
unsafe fn round_weights(keys: usize, weights: *const f32, to: *mut i16) -> f32 {
    // SAFETY: AVX-512 is enabled; the caller has both rows, of TILE elements.
    unsafe {
        let mut w = [_mm512_setzero_ps(); TILE / 16];
        let (mut largest, mut sum) = (_mm512_setzero_ps(), _mm512_setzero_ps());
        for (i, w) in w.iter_mut().enumerate() {
            let there = ((1u64 << (keys - 1) << 1).wrapping_sub(1) >> (16 * i)) as u16;
            *w = _mm512_maskz_loadu_ps(there, weights.add(16 * i));
            largest = _mm512_max_ps(_mm512_abs_ps(*w), largest);
            sum = _mm512_add_ps(_mm512_abs_ps(*w), sum);
        }
        // A NaN is not in the maximum, but in the sum.
        let (largest, sum) = (_mm512_reduce_max_ps(largest), _mm512_reduce_add_ps(sum));
        let (factor, unit) = factor(largest, sum, sum.is_finite());
        let mut total = _mm512_setzero_si512();
        for (i, &w) in w.iter().enumerate() {
            let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(w, _mm512_set1_ps(factor)));
            _mm256_storeu_si256(to.add(16 * i).cast(), _mm512_cvtepi32_epi16(rounded));
            total = _mm512_add_epi32(total, _mm512_abs_epi32(rounded));
        }
        // Many small weights may all be rounded to the same side: together they keep their sum.
        let total = _mm512_reduce_add_epi32(total);
        if total == 0 { unit } else { sum / total as f32 }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
unsafe fn add_all<R: Codes>(
    codes: R,
    block: usize,
    part: Part,
    weights: *const f32,
    rounded: *mut i16,
    ahead: &mut Ahead,
) {
    let mut local = *ahead;
    let rows = part.queries.rows;
    let unit = table(R::BITS).unit;
    let mut query = 0;
    // SAFETY: passed on to the caller of `add_values`.
    unsafe {
        for first in (0..rows).step_by(8) {
            let mut units = [0.0; 8];
            for (i, to) in units.iter_mut().enumerate().take(rows - first) {
                let row = (first + i) * TILE;
                *to = unit * round_weights(part.keys, weights.add(row), rounded.add(row));
            }
            let work = Add { codes, block, part, weights: rounded, units };
            let end = rows.min(first + 8);
            if query + 8 <= end {
                work.coordinates::<8, 1, 2>(query, &mut local);
                query += 8;
            }
            if query + 4 <= end {
                work.coordinates::<4, 1, 4>(query, &mut local);
                query += 4;
            }
            if query + 2 <= end {
                work.coordinates::<2, 2, 4>(query, &mut local);
                query += 2;
            }
            if query < end {
                work.coordinates::<1, 2, 4>(query, &mut local);
                query += 1;
            }
        }
    }
    *ahead = local;
}

struct Add<R> {
    codes: R,
    /// Coordinates that share a norm.
    block: usize,
    part: Part,
    /// `[rows, TILE]`.
    weights: *const i16,
    /// Of eight queries, from a multiple of eight on.
    units: [f32; 8],
}

impl<R: Codes> Add<R> {
    /// All coordinates of `Q` queries: `SETS` sets of each chunk, `C` chunks at a time while as many are left.
    #[inline(always)]
    unsafe fn coordinates<const Q: usize, const C: usize, const SETS: usize>(&self, query: usize, ahead: &mut Ahead) {
        let Part { keys, block, lines, .. } = self.part;
        let chunks = self.block / CHUNK;
        let first = block * chunks;
        // The first queries ask for every line once.
        let steps = (chunks / C).max(1) * (4 / SETS) * keys.div_ceil(2);
        let pace = if query == 0 { lines.div_ceil(steps) } else { 0 };
        // SAFETY: passed on to the caller.
        unsafe {
            let table = R::table();
            let whole = chunks - chunks % C;
            for chunk in (first..first + whole).step_by(C) {
                self.few::<Q, C, SETS, 0>(table, query, chunk, pace, ahead);
                if SETS == 2 {
                    self.few::<Q, C, SETS, 2>(table, query, chunk, pace, ahead);
                }
            }
            for chunk in first + whole..first + chunks {
                self.few::<Q, 1, SETS, 0>(table, query, chunk, pace, ahead);
                if SETS == 2 {
                    self.few::<Q, 1, SETS, 2>(table, query, chunk, pace, ahead);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn few<const Q: usize, const C: usize, const SETS: usize, const FIRST: usize>(
        &self,
        table: R::Table,
        query: usize,
        chunk: usize,
        pace: usize,
        ahead: &mut Ahead,
    ) {
        let Part { row, keys, queries, .. } = self.part;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [[[_mm512_setzero_si512(); SETS]; C]; Q];
            let weights = self.weights.add(query * TILE).cast::<i32>();
            for pair in 0..keys.div_ceil(2) {
                ahead.fetch::<Avx512>(pace);
                // A last key without a second one is taken twice, the second time by a weight of zero.
                let rows = [row + 2 * pair, row + (2 * pair + 1).min(keys - 1)];
                let mut v = [[_mm512_setzero_si512(); SETS]; C];
                for (i, v) in v.iter_mut().enumerate() {
                    *v = self.codes.pair::<SETS, FIRST>(table, rows, chunk + i);
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let weight = _mm512_set1_epi32(weights.add(i * TILE / 2 + pair).read_unaligned());
                    for (sums, v) in sums.iter_mut().zip(&v) {
                        for (sum, &v) in sums.iter_mut().zip(v) {
                            *sum = dot_pairs(*sum, v, weight);
                        }
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                let unit = _mm512_set1_ps(self.units[(query + i) % 8]);
                let o = queries.o.add((query + i) * queries.head_dim + chunk * CHUNK + FIRST * 16);
                for (j, sums) in sums.iter().enumerate() {
                    for (set, &sum) in sums.iter().enumerate() {
                        let o = o.add(j * CHUNK + set * 16);
                        _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), unit, _mm512_loadu_ps(o)));
                    }
                }
            }
        }
    }
}
