//! Rows of keys and values as vectors: one loader per codec, and the source that holds both sides.

use std::ops::Range;

use half::{bf16, f16};

use super::{
    fixed_point,
    prefetch::{PLANES, Plane},
    task::deinterleave,
};
use crate::{
    DType, KvLayer, Planes,
    codec::{self, BLOCK, Codec},
    cpu::{key_bias::HeadBias, seal::StoredMean, simd::Simd},
    layer::{LayerPages, PageTable},
};

/// Reads vectors of a cache, in chunks of 2·`LANES` coordinates.
pub(super) trait LoadRows: Copy {
    /// # Safety
    /// The level's instructions are enabled; the row exists and has the chunk.
    unsafe fn chunk<S: Simd>(&self, row: usize, chunk: usize) -> (S::F, S::F);
}

/// Dense elements; a chunk's vectors are its first and second half.
#[derive(Clone, Copy)]
pub(super) struct DenseRows<E> {
    pub start: *const E,
    /// Elements between rows.
    pub stride: usize,
}

pub(super) trait DenseElement: Copy {
    /// # Safety
    /// The level's instructions are enabled; `from` is valid for a vector.
    unsafe fn load<S: Simd>(from: *const Self) -> S::F;
}

macro_rules! dense_element {
    ($($type:ty: $load:ident),*) => { $(
        impl DenseElement for $type {
            #[inline(always)]
            unsafe fn load<S: Simd>(from: *const Self) -> S::F {
                // SAFETY: passed on to the caller.
                unsafe { S::$load(from.cast()) }
            }
        }
    )* };
}
dense_element!(f32: load, f16: load_f16, bf16: load_bf16);

impl<E: DenseElement> LoadRows for DenseRows<E> {
    #[inline(always)]
    unsafe fn chunk<S: Simd>(&self, row: usize, chunk: usize) -> (S::F, S::F) {
        // SAFETY: passed on to the caller.
        unsafe {
            let at = self.start.add(row * self.stride + chunk * 2 * S::LANES);
            (E::load::<S>(at), E::load::<S>(at.add(S::LANES)))
        }
    }
}

/// TurboQuant of 2 to 6 bits without its norms; a chunk's vectors are its even and its odd coordinates.
#[derive(Clone, Copy)]
pub(super) struct PackedRows<const BITS: u32> {
    low: *const u8,
    high: *const u8,
    /// Bytes between rows, in each plane.
    low_stride: usize,
    high_stride: usize,
    table: *const f32,
}

impl<const BITS: u32> PackedRows<BITS> {
    /// Bits of a code in each plane.
    pub const PLANE_BITS: (usize, usize) = match codec::plane_bits(BITS) {
        Some((low, high)) => (low as usize, high as usize),
        None => panic!("a codec has this number of bits"),
    };

    #[inline(always)]
    fn shifted(self, bytes: usize) -> Self {
        PackedRows { low: self.low.wrapping_add(bytes), high: self.high.wrapping_add(bytes), ..self }
    }

    /// The low bits of a row's codes: four, or two for codes of 2 and 3 bits.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn low(&self, row: usize) -> *const u8 {
        self.low.wrapping_add(row * self.low_stride)
    }

    /// The high bits of a row's codes.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn high(&self, row: usize) -> *const u8 {
        self.high.wrapping_add(row * self.high_stride)
    }
}

impl<const BITS: u32> LoadRows for PackedRows<BITS> {
    #[inline(always)]
    unsafe fn chunk<S: Simd>(&self, row: usize, chunk: usize) -> (S::F, S::F) {
        // SAFETY: passed on to the caller; the table has 2^BITS entries, at least 16.
        unsafe {
            // 2·LANES coordinates.
            let (low_bits, high_bits) = Self::PLANE_BITS;
            let low = self.low.add(row * self.low_stride + chunk * S::LANES / 4 * low_bits);
            let high = self.high.wrapping_add(row * self.high_stride + chunk * S::LANES / 4 * high_bits);
            match BITS {
                2 => {
                    let (even, odd) = S::codes2(low);
                    let table = &*self.table.cast();
                    (S::lookup16(table, even), S::lookup16(table, odd))
                }
                3 => {
                    let (even, odd) = S::codes3(low, high);
                    let table = &*self.table.cast();
                    (S::lookup16(table, even), S::lookup16(table, odd))
                }
                4 => {
                    let (even, odd) = S::codes4(low);
                    let table = &*self.table.cast();
                    (S::lookup16(table, even), S::lookup16(table, odd))
                }
                5 => {
                    let (even, odd) = S::codes5(low, high);
                    let table = &*self.table.cast();
                    (S::lookup32(table, even), S::lookup32(table, odd))
                }
                _ => {
                    let (even, odd) = S::codes6(low, high);
                    let table = &*self.table.cast();
                    (S::lookup64(table, even), S::lookup64(table, odd))
                }
            }
        }
    }
}

/// TurboQuant of 8 bits without its norms; a chunk's vectors are its first and second half.
#[derive(Clone, Copy)]
pub(super) struct ByteRows {
    low: *const u8,
    stride: usize,
    table: *const f32,
}

impl ByteRows {
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn row(&self, row: usize) -> *const u8 {
        self.low.wrapping_add(row * self.stride)
    }
}

impl LoadRows for ByteRows {
    #[inline(always)]
    unsafe fn chunk<S: Simd>(&self, row: usize, chunk: usize) -> (S::F, S::F) {
        // SAFETY: passed on to the caller; the table has 256 entries.
        unsafe {
            let at = self.low.add(row * self.stride + chunk * 2 * S::LANES);
            let table = &*self.table.cast();
            (S::lookup256(table, S::codes8(at)), S::lookup256(table, S::codes8(at.add(S::LANES))))
        }
    }
}

/// A loader for any codec.
#[derive(Clone, Copy)]
pub(super) enum RowLoader {
    F32(DenseRows<f32>),
    F16(DenseRows<f16>),
    Bf16(DenseRows<bf16>),
    Tq2(PackedRows<2>),
    Tq3(PackedRows<3>),
    Tq4(PackedRows<4>),
    Tq5(PackedRows<5>),
    Tq6(PackedRows<6>),
    Tq8(ByteRows),
}

/// Runs `$body` with the loader inside a [`RowLoader`].
macro_rules! with_loader {
    ($loader:expr, $rows:ident => $body:expr) => {
        match $loader {
            RowLoader::F32($rows) => $body,
            RowLoader::F16($rows) => $body,
            RowLoader::Bf16($rows) => $body,
            RowLoader::Tq2($rows) => $body,
            RowLoader::Tq3($rows) => $body,
            RowLoader::Tq4($rows) => $body,
            RowLoader::Tq5($rows) => $body,
            RowLoader::Tq6($rows) => $body,
            RowLoader::Tq8($rows) => $body,
        }
    };
}
pub(super) use with_loader;

/// The keys or the values of one KV head.
#[derive(Clone, Copy)]
pub(super) struct KvRows {
    pub loader: RowLoader,
    /// Whether chunks are split into even and odd coordinates.
    pub interleaved: bool,
    /// Whether the vectors are rotated and have norms.
    pub quantised: bool,
    /// Whether they are processed in fixed point.
    pub fixed: bool,
    /// f32 or f16 norms, `blocks` for each row.
    norms: *const u8,
    half_norms: bool,
    norm_stride: usize,
    /// The mean of the page, if vectors are stored relative to it.
    mean: Option<StoredMean>,
    /// Coordinates that share a norm; all coordinates if there are no norms.
    pub block: usize,
    /// The memory of the rows, for prefetching.
    pub planes: [Plane; PLANES],
}

impl KvRows {
    /// Every `stride`-th vector of `planes` from row `first` on. For centred codecs, row `mean` of `means` is their
    /// mean.
    pub fn new(planes: &Planes, first: usize, stride: usize, head_dim: usize, mean: usize) -> KvRows {
        let tq = match planes.codec() {
            Codec::Dense(dtype) => return KvRows::dense(planes.low.host_ptr(), dtype, first, stride, head_dim),
            Codec::TurboQuant(tq) => tq,
        };
        let table = codec::lookup_table(tq.bits).expect("a layer's codec has been checked").as_ptr();
        let (low_bytes, high_bytes) =
            codec::plane_bytes(tq.bits, head_dim).expect("a layer's codec and head size have been checked");
        let blocks = head_dim.div_ceil(BLOCK);
        let low = planes.low.host_ptr().cast_const().wrapping_add(first * low_bytes);
        let high = planes.high.as_ref().map_or(low, |t| t.host_ptr().cast_const().wrapping_add(first * high_bytes));
        let norms = planes.norms.as_ref().expect("TurboQuant has norms").host_ptr().cast_const();
        let norm_bytes = tq.norm_dtype().size() * blocks;
        let norms = norms.wrapping_add(first * norm_bytes);
        let mean_bytes = Codec::TurboQuant(tq).bytes_per_mean(head_dim);
        let mean = planes.means.as_ref().map(|t| StoredMean { start: t.host_ptr().wrapping_add(mean * mean_bytes) });
        let (low_stride, high_stride) = (low_bytes * stride, high_bytes * stride);
        KvRows {
            loader: match tq.bits {
                2 => RowLoader::Tq2(PackedRows { low, high, low_stride, high_stride, table }),
                3 => RowLoader::Tq3(PackedRows { low, high, low_stride, high_stride, table }),
                4 => RowLoader::Tq4(PackedRows { low, high, low_stride, high_stride, table }),
                5 => RowLoader::Tq5(PackedRows { low, high, low_stride, high_stride, table }),
                6 => RowLoader::Tq6(PackedRows { low, high, low_stride, high_stride, table }),
                _ => RowLoader::Tq8(ByteRows { low, stride: low_stride, table }),
            },
            interleaved: tq.bits != 8,
            quantised: true,
            fixed: false,
            norms,
            half_norms: tq.centred,
            norm_stride: blocks * stride,
            mean,
            block: head_dim.min(BLOCK),
            planes: [
                Plane { start: low, stride: low_stride, bytes: low_bytes },
                Plane { start: high, stride: high_stride, bytes: high_bytes },
                Plane { start: norms, stride: norm_bytes * stride, bytes: norm_bytes },
                Plane { start: mean.map_or(low, |mean| mean.start), stride: 0, bytes: mean_bytes },
            ],
        }
    }

    /// These rows in another page, whose planes begin `bytes` bytes later.
    #[inline(always)]
    fn shifted(&self, bytes: usize) -> KvRows {
        let moved = |start: *const u8| start.wrapping_add(bytes);
        let loader = match self.loader {
            RowLoader::F32(DenseRows { start, stride }) => {
                RowLoader::F32(DenseRows { start: start.wrapping_byte_add(bytes), stride })
            }
            RowLoader::F16(DenseRows { start, stride }) => {
                RowLoader::F16(DenseRows { start: start.wrapping_byte_add(bytes), stride })
            }
            RowLoader::Bf16(DenseRows { start, stride }) => {
                RowLoader::Bf16(DenseRows { start: start.wrapping_byte_add(bytes), stride })
            }
            RowLoader::Tq2(rows) => RowLoader::Tq2(rows.shifted(bytes)),
            RowLoader::Tq3(rows) => RowLoader::Tq3(rows.shifted(bytes)),
            RowLoader::Tq4(rows) => RowLoader::Tq4(rows.shifted(bytes)),
            RowLoader::Tq5(rows) => RowLoader::Tq5(rows.shifted(bytes)),
            RowLoader::Tq6(rows) => RowLoader::Tq6(rows.shifted(bytes)),
            RowLoader::Tq8(rows) => RowLoader::Tq8(ByteRows { low: moved(rows.low), ..rows }),
        };
        let norms = moved(self.norms);
        let mean = self.mean.map(|StoredMean { start }| StoredMean { start: start.wrapping_add(bytes) });
        KvRows {
            loader,
            norms,
            mean,
            planes: self.planes.map(|plane| Plane { start: moved(plane.start), ..plane }),
            ..*self
        }
    }

    /// Every `stride`-th vector of `dtype` from row `first` on.
    fn dense(start: *const u8, dtype: DType, first: usize, stride: usize, head_dim: usize) -> KvRows {
        let start = start.wrapping_add(first * head_dim * dtype.size());
        let stride = stride * head_dim;
        KvRows {
            loader: match dtype {
                DType::F32 => RowLoader::F32(DenseRows { start: start.cast(), stride }),
                DType::F16 => RowLoader::F16(DenseRows { start: start.cast(), stride }),
                _ => RowLoader::Bf16(DenseRows { start: start.cast(), stride }),
            },
            interleaved: false,
            quantised: false,
            fixed: false,
            norms: std::ptr::null(),
            half_norms: false,
            norm_stride: 0,
            mean: None,
            block: head_dim,
            planes: [
                Plane { start, stride: stride * dtype.size(), bytes: head_dim * dtype.size() },
                Plane::NONE,
                Plane::NONE,
                Plane::NONE,
            ],
        }
    }

    /// The norm of a block of a row.
    ///
    /// # Safety
    /// As for [`KvRows::norms`].
    #[inline(always)]
    pub unsafe fn norm(&self, row: usize, block: usize) -> f32 {
        let index = row * self.norm_stride + block;
        // SAFETY: the caller's promise.
        unsafe {
            if self.half_norms {
                widen(*self.norms.cast::<u16>().add(index))
            } else {
                *self.norms.cast::<f32>().add(index)
            }
        }
    }

    /// Decodes the mean of the page, in the coordinate order of queries, or of sums if `values`. Returns false if the
    /// side has no mean.
    ///
    /// # Safety
    /// The level's instructions are enabled; the page exists; `to` has the length of a vector.
    #[inline(always)]
    pub unsafe fn mean<S: Simd>(&self, values: bool, to: &mut [f32]) -> bool {
        let Some(mean) = self.mean else { return false };
        // SAFETY: passed on to the caller.
        unsafe {
            if self.fixed {
                fixed_point::load_mean(self, mean, values, to);
                return true;
            }
            mean.load(to);
        }
        if self.interleaved {
            to.chunks_exact_mut(2 * S::LANES).for_each(deinterleave);
        }
        true
    }

    /// Copies the norms of block `block` of `out.len()` rows.
    ///
    /// # Safety
    /// The level's instructions are enabled; the side is quantised and has the rows and the block.
    #[inline(always)]
    pub unsafe fn norms<S: Simd>(&self, first: usize, block: usize, out: &mut [f32]) {
        let index = first * self.norm_stride + block;
        // SAFETY: passed on to the caller.
        unsafe {
            if self.half_norms {
                let from = self.norms.cast::<u16>().add(index);
                let whole = if self.norm_stride == 1 { out.len() - out.len() % S::LANES } else { 0 };
                for i in (0..whole).step_by(S::LANES) {
                    S::store(out.as_mut_ptr().add(i), S::load_f16(from.add(i)));
                }
                for (i, n) in out.iter_mut().enumerate().skip(whole) {
                    *n = widen(*from.add(i * self.norm_stride));
                }
                return;
            }
            let from = self.norms.cast::<f32>().add(index);
            if self.norm_stride == 1 {
                std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len());
            } else {
                out.iter_mut().enumerate().for_each(|(i, n)| *n = *from.add(i * self.norm_stride));
            }
        }
    }
}

/// Converts an f16 to f32 exactly, subnormals included.
#[inline(always)]
fn widen(bits: u16) -> f32 {
    let (magnitude, sign) = (u32::from(bits & 0x7fff) << 13, u32::from(bits & 0x8000) << 16);
    // Infinities and NaN have the largest exponent in both formats.
    let finite = f32::from_bits(magnitude) * f32::from_bits((254 - 15) << 23);
    let special = f32::from_bits(magnitude | 0x7f80_0000);
    f32::from_bits(if magnitude >= 0x0f80_0000 { special } else { finite }.to_bits() | sign)
}

/// Keys and values of one KV head of one sequence.
#[derive(Clone, Copy)]
pub(super) struct KvSource<'a> {
    pub k: KvRows,
    pub v: KvRows,
    /// The number of rows after which a ring wraps, or the positions of a page.
    capacity: usize,
    /// The pages of the sequence; `None` if its rows are contiguous.
    pages: Option<PagesOfSequence<'a>>,
    /// The key bias, which stored keys do not include.
    pub bias: Option<HeadBias<'a>>,
}

/// The page table of a sequence.
#[derive(Clone, Copy)]
struct PagesOfSequence<'a> {
    layer: &'a LayerPages,
    table: PageTable<'a>,
    sequence: usize,
}

/// Keys and values at consecutive positions, in consecutive rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvRun {
    pub position: usize,
    /// The first row, counted from `bytes` bytes after the start of each plane.
    pub bytes: usize,
    pub row: usize,
    pub keys: usize,
}

impl KvRun {
    pub const NONE: KvRun = KvRun { position: 0, bytes: 0, row: 0, keys: 0 };
}

impl<'a> KvSource<'a> {
    /// `fixed`: quantised rows are processed in fixed point.
    pub fn new(layer: &'a KvLayer, table: PageTable<'a>, sequence: usize, head: usize, fixed: bool) -> KvSource<'a> {
        let spec = layer.spec();
        let (pages, capacity, first) = match layer.pages() {
            Some(pages) => {
                (Some(PagesOfSequence { layer: pages, table, sequence }), pages.page_tokens, head * pages.page_tokens)
            }
            None => (None, spec.capacity, layer.row(sequence, head, 0)),
        };
        let side = |planes| {
            let side = KvRows::new(planes, first, layer.slot_stride(), spec.head_dim, head);
            KvRows { fixed: fixed && side.quantised, ..side }
        };
        // SAFETY: the device's lock is held while a call runs.
        let bias = layer.key_bias().map(|bias| unsafe { HeadBias::new(bias, head) });
        KvSource { k: side(&layer.k), v: side(&layer.v), capacity, pages, bias }
    }

    /// This source in another page, whose planes begin `bytes` bytes later.
    #[inline(always)]
    pub fn shifted(&self, bytes: usize) -> KvSource<'a> {
        KvSource { k: self.k.shifted(bytes), v: self.v.shifted(bytes), ..*self }
    }

    /// The runs of `positions`, in order: they end where a ring wraps or a page ends. Positions without a page are
    /// skipped.
    pub fn runs(&self, positions: Range<usize>) -> impl Iterator<Item = KvRun> + use<'a> {
        let (KvSource { capacity, pages, .. }, mut next) = (*self, positions.start);
        std::iter::from_fn(move || {
            while next < positions.end {
                let (position, row) = (next, next % capacity);
                let keys = (capacity - row).min(positions.end - position);
                next += keys;
                let bytes = match pages {
                    None => Some(0),
                    Some(pages) => pages.layer.page(pages.table, pages.sequence, position / capacity),
                };
                if let Some(bytes) = bytes {
                    return Some(KvRun { position, bytes, row, keys });
                }
            }
            None
        })
    }
}
