//! The rows of the keys or values of a cache layer, loaded and stored by kernels, for every codec.

use std::cell::RefCell;

use super::{
    convert, scratch,
    seal::StoredMean,
    simd::{Simd, SimdKernel},
    turboquant::{Quantiser, Vector},
};
use crate::{
    Codec, DType, KvLayer, Planes, Step,
    layer::{PageTable, RowPlace},
    ops::kv_write::is_kept,
};

/// Keys or values of a layer in memory.
#[derive(Clone, Copy)]
pub(super) struct PlaneRows {
    format: Format,
    low: *mut u8,
    high: *mut u8,
    norms: *mut u8,
    /// The means of the page, one per KV head.
    means: *mut u8,
    dim: usize,
    /// Rows of a KV head in a page.
    page_tokens: usize,
}

#[derive(Clone, Copy)]
enum Format {
    Dense(DType),
    TurboQuant(Quantiser),
}

// SAFETY: tasks that store touch disjoint rows, and the device's lock excludes everyone else.
unsafe impl Send for PlaneRows {}
// SAFETY: as above.
unsafe impl Sync for PlaneRows {}

impl PlaneRows {
    pub(super) fn new(layer: &KvLayer, planes: &Planes) -> PlaneRows {
        let (dim, page_tokens) = (layer.spec().head_dim, layer.pages().map_or(usize::MAX, |pages| pages.page_tokens));
        let pointer = |tensor: &Option<crate::Tensor>| tensor.as_ref().map_or(std::ptr::null_mut(), |t| t.host_ptr());
        let format = match planes.codec() {
            Codec::Dense(dtype) => Format::Dense(dtype),
            Codec::TurboQuant(tq) => Format::TurboQuant(Quantiser::new(tq, dim)),
        };
        let (low, high, norms) = (planes.low.host_ptr(), pointer(&planes.high), pointer(&planes.norms));
        PlaneRows { format, low, high, norms, means: pointer(&planes.means), dim, page_tokens }
    }

    /// This side in another page, whose planes begin `bytes` bytes later.
    #[inline(always)]
    pub(super) fn shifted(&self, bytes: usize) -> PlaneRows {
        PlaneRows {
            low: self.low.wrapping_add(bytes),
            high: self.high.wrapping_add(bytes),
            norms: self.norms.wrapping_add(bytes),
            means: self.means.wrapping_add(bytes),
            ..*self
        }
    }

    /// The dtype of a dense side.
    pub(super) fn dense(&self) -> Option<DType> {
        match self.format {
            Format::Dense(dtype) => Some(dtype),
            Format::TurboQuant(_) => None,
        }
    }

    /// The address of a row of a dense side.
    ///
    /// # Safety
    /// The side is dense and has that row.
    #[inline(always)]
    pub(super) unsafe fn dense_row(&self, row: usize, dtype: DType) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.low.add(row * self.dim * dtype.size()) }
    }

    /// # Safety
    /// The side has that row.
    #[inline(always)]
    unsafe fn vector(&self, row: usize, quantiser: &Quantiser) -> Vector {
        let (low, high, norms) = quantiser.sizes();
        // SAFETY: the caller's promise.
        unsafe {
            Vector {
                low: self.low.add(row * low),
                high: self.high.wrapping_add(row * high),
                norms: self.norms.add(row * norms),
            }
        }
    }

    /// The quantiser of a centred side, and the mean of a row's page.
    #[inline(always)]
    pub(super) fn centred(&self, row: usize) -> Option<(&Quantiser, StoredMean)> {
        match &self.format {
            Format::TurboQuant(quantiser) if quantiser.is_centred() => {
                let start = self.means.wrapping_add(row / self.page_tokens * (self.dim + size_of::<f32>()));
                Some((quantiser, StoredMean { start }))
            }
            _ => None,
        }
    }

    /// Encodes a vector into a row; `x` may be changed. `mean` is the decoded mean of the row's page; empty unless the
    /// side is centred.
    ///
    /// # Safety
    /// The level's instructions are enabled; the side has that row, of the length of `x`; nobody else uses the row.
    #[inline(always)]
    pub(super) unsafe fn store<S: Simd>(&self, row: usize, x: &mut [f32], mean: &[f32]) {
        // SAFETY: passed on to the caller.
        unsafe {
            match &self.format {
                &Format::Dense(dtype) => convert::store_row::<S>(x, self.dense_row(row, dtype), dtype),
                // A separate function, so that encoding is compiled once per level and not into every operation that
                // stores rows.
                Format::TurboQuant(quantiser) => {
                    S::call(EncodeRow { quantiser, x, mean, to: self.vector(row, quantiser) });
                }
            }
        }
    }

    /// Decodes a row.
    ///
    /// # Safety
    /// As for [`PlaneRows::store`], except that others may read the row.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(&self, row: usize, x: &mut [f32], keep_rotated: bool) {
        // SAFETY: passed on to the caller.
        unsafe {
            match &self.format {
                &Format::Dense(dtype) => convert::load_row::<S>(self.dense_row(row, dtype), dtype, x),
                Format::TurboQuant(quantiser) => {
                    let stored = self.centred(row);
                    let mean = &mut *scratch::take(if stored.is_some() { self.dim } else { 0 });
                    if let Some((_, stored)) = stored {
                        stored.load(mean);
                    }
                    quantiser.decode::<S>(self.vector(row, quantiser), mean, x, keep_rotated);
                }
            }
        }
    }
}

/// Calls [`Quantiser::encode`].
struct EncodeRow<'a> {
    quantiser: &'a Quantiser,
    x: &'a mut [f32],
    mean: &'a [f32],
    to: Vector,
}

impl SimdKernel for EncodeRow<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: `dispatch` enables the instructions; the caller of `store` guarantees the row.
        unsafe { self.quantiser.encode::<S>(self.x, self.mean, self.to) }
    }
}

thread_local! {
    /// Places of tokens, kept so that a step allocates nothing after warm-up.
    static PLACES: RefCell<Vec<(u32, u32)>> = const { RefCell::new(Vec::new()) };
}

/// The contents of a step's buffers.
#[derive(Clone, Copy)]
pub(super) struct Tokens<'a> {
    pub positions: &'a [u32],
    pub sequence: &'a [u32],
    pub lens: &'a [u32],
    pub table: PageTable<'a>,
}

impl<'a> Tokens<'a> {
    /// # Safety
    /// The device's lock is held and nothing writes to the buffers while this lives.
    pub(super) unsafe fn new(step: &'a Step, layer: &KvLayer) -> Tokens<'a> {
        // SAFETY: passed on to the caller.
        unsafe {
            Tokens {
                positions: step.positions.host_slice(),
                sequence: step.sequence.host_slice(),
                lens: step.lens.host_slice(),
                table: step.page_table(layer),
            }
        }
    }

    /// The place of a token's vectors of head 0; `None` if the layer does not keep the token, or the row is inactive.
    #[inline(always)]
    pub(super) fn place(&self, layer: &KvLayer, token: usize) -> Option<RowPlace> {
        let (sequence, position) = (self.sequence[token] as usize, self.positions[token] as usize);
        let len = *self.lens.get(sequence)? as usize;
        if is_kept(position, len, layer.spec().capacity) {
            layer.place(self.table, sequence, 0, position)
        } else {
            None
        }
    }

    /// Whether no two tokens have the same place, so that threads can store them in any order. If a caller's own step
    /// repeats a place, the last token must win, so one thread stores them in order.
    pub(super) fn are_distinct(&self) -> bool {
        let tokens = || self.sequence.iter().copied().zip(self.positions.iter().copied());
        let places = || tokens().filter(|&(sequence, _)| sequence != Step::INACTIVE);
        if places().is_sorted_by(|a, b| a < b) {
            return true;
        }
        PLACES.with_borrow_mut(|sorted| {
            sorted.clear();
            sorted.extend(places());
            sorted.sort_unstable();
            sorted.is_sorted_by(|a, b| a < b)
        })
    }
}
