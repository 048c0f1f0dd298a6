//! The storage of one layer's keys and values.

use std::sync::{Arc, Mutex, PoisonError};

use crate::{
    DType, Device, Error, KeyBias, Result, Tensor,
    codec::{self, BLOCK, Codec},
    encoder::{
        Access::{self, Read},
        Touch,
    },
    group::{Rank, RankTensors, rank_tensors},
    ops::{attend::Results, check},
    position_share::PositionShare,
};

/// The specification of a [`KvLayer`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerSpec {
    /// Independent sequences, S.
    pub sequences: usize,
    /// KV heads, Hk.
    pub kv_heads: usize,
    /// Slots per sequence and head, cap.
    pub capacity: usize,
    /// Coordinates of a key or value, D.
    pub head_dim: usize,
    /// The codec of keys.
    pub k: Codec,
    /// The codec of values.
    pub v: Codec,
    /// The number of positions that a token sees, itself included; `None` for all that the layer holds. At most
    /// `capacity` on a ring.
    ///
    /// [`attend`](crate::ops::attend()) uses this window if the call names none, and rejects a wider one. On a ring, a
    /// wider window could reach slots of truncated tokens, which have overwritten the oldest positions; lengths do not
    /// record that.
    pub window: Option<usize>,
    /// Whether position p is stored in slot p mod cap (a ring) or in slot p (linear; p < cap).
    pub ring: bool,
    /// The order of vectors in memory.
    pub order: HeadOrder,
}

impl LayerSpec {
    /// A linear layer for one sequence of up to `capacity` tokens, with keys and values in `codec`, head-major.
    pub fn new(kv_heads: usize, head_dim: usize, capacity: usize, codec: Codec) -> LayerSpec {
        let (sequences, window, ring, order) = (1, None, false, HeadOrder::HeadMajor);
        LayerSpec { sequences, kv_heads, capacity, head_dim, k: codec, v: codec, window, ring, order }
    }
}

setters! { LayerSpec {
    sequences: usize,
    kv_heads: usize,
    capacity: usize,
    head_dim: usize,
    k: Codec,
    v: Codec,
    window: Option<usize>,
    ring: bool,
    order: HeadOrder,
} }

/// The order of vectors in memory: contiguous by token or by head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// `[T, Hk, D]`, and in the memory of a layer `[S, cap, Hk, D]`: a token's vectors are contiguous.
    TokenMajor,
    /// `[Hk, T, D]`, and in the memory of a layer `[S, Hk, cap, D]`: a head's vectors are contiguous.
    HeadMajor,
}

impl HeadOrder {
    /// The (tokens, heads, head_dim) of a source.
    pub(crate) fn dims(self, op: &'static str, arg: &'static str, tensor: &Tensor) -> Result<[usize; 3]> {
        Ok(match self {
            HeadOrder::TokenMajor => check::rank(op, arg, tensor, ["T", "heads", "D"])?,
            HeadOrder::HeadMajor => {
                let [heads, tokens, dim] = check::rank(op, arg, tensor, ["heads", "T", "D"])?;
                [tokens, heads, dim]
            }
        })
    }

    /// The row of (token, head) in a source.
    #[inline]
    pub(crate) fn row(self, token: usize, head: usize, tokens: usize, heads: usize) -> usize {
        match self {
            HeadOrder::TokenMajor => token * heads + head,
            HeadOrder::HeadMajor => head * tokens + token,
        }
    }

    /// Checks that a source is `[T, heads, D]` in this order.
    pub(crate) fn check(self, op: &'static str, arg: &'static str, t: &Tensor, dims: [usize; 3]) -> Result<()> {
        let [tokens, heads, dim] = dims;
        match self {
            HeadOrder::TokenMajor => check::shape(op, arg, t, &[("T", tokens), ("heads", heads), ("head_dim", dim)]),
            HeadOrder::HeadMajor => check::shape(op, arg, t, &[("heads", heads), ("T", tokens), ("head_dim", dim)]),
        }
    }
}

/// The vectors of one side (keys or values) of a layer, in one or more planes: `rows` vectors of `head_dim`
/// coordinates.
#[derive(Clone, Debug)]
pub struct Planes {
    codec: Codec,
    /// Dense: `[rows, D]`. TurboQuant: u8 `[rows, D/4]` with four 2-bit parts per byte (2, 3 bits), u8 `[rows, D/2]`
    /// with two 4-bit parts per byte (4, 5, 6 bits), or u8 `[rows, D]` (8 bits).
    pub(crate) low: Tensor,
    /// The upper bits of indices. 3 and 5 bits: u8 `[rows, D/8]`; 6 bits: u8 `[rows, D/4]`.
    pub(crate) high: Option<Tensor>,
    /// TurboQuant: f32 `[rows, D/B]`, one per block of B coordinates; f16 if the codec is centred.
    pub(crate) norms: Option<Tensor>,
    /// Centred: u8 `[Hk, D + 4]` of each page, the codes of a mean and its f32 scale
    /// ([`PageMean`](codec::PageMean)).
    pub(crate) means: Option<Tensor>,
}

rank_tensors! { Planes { low, high, norms, means } }

/// Byte offsets of one side's planes within a page, or the bytes of each plane.
pub(crate) type PlaneBytes = [Option<usize>; 4];

impl Planes {
    /// The dtype and elements per row of each plane of a valid codec: `low`, `high` and `norms` have a row for each
    /// vector of `dim` coordinates, `means` has a row for each page and KV head.
    fn row_sizes(codec: Codec, dim: usize) -> [Option<(DType, usize)>; 4] {
        match codec {
            Codec::Dense(dtype) => [Some((dtype, dim)), None, None, None],
            Codec::TurboQuant(tq) => {
                let (low, high) = codec::plane_bytes(tq.bits, dim).expect("the codec has been checked");
                let high = (high > 0).then_some((DType::U8, high));
                let mean = tq.centred.then(|| (DType::U8, codec.bytes_per_mean(dim)));
                [Some((DType::U8, low)), high, Some((tq.norm_dtype(), dim.div_ceil(BLOCK))), mean]
            }
        }
    }

    /// The bytes of each plane in a page; `None` if a number overflows.
    pub(crate) fn page_bytes(codec: Codec, dim: usize, kv_heads: usize, page_tokens: usize) -> Option<PlaneBytes> {
        let vectors = kv_heads.checked_mul(page_tokens)?;
        let mut planes = [None; 4];
        for (index, (bytes, size)) in planes.iter_mut().zip(Planes::row_sizes(codec, dim)).enumerate() {
            let Some((dtype, elements)) = size else { continue };
            let rows = if index == Planes::MEANS { kv_heads } else { vectors };
            *bytes = Some(elements.checked_mul(dtype.size())?.checked_mul(rows)?);
        }
        Some(planes)
    }

    /// The index of `means` among the planes.
    const MEANS: usize = 3;

    fn zeros(device: &Device, codec: Codec, rows: usize, dim: usize) -> Result<Planes> {
        let plane = |size: Option<(DType, usize)>| {
            size.map(|(dtype, elements)| Tensor::zeros(device, dtype, &[rows, elements])).transpose()
        };
        // Layers with memory of their own have no pages, and therefore no means.
        let [low, high, norms, _] = Planes::row_sizes(codec, dim);
        let low = plane(low)?.expect("every codec has a low plane");
        Ok(Planes { codec, low, high: plane(high)?, norms: plane(norms)?, means: None })
    }

    /// The planes of a layer of a pool. They begin at byte offsets `starts` of its memory and extend to its end.
    pub(crate) fn of_pages(memory: &Tensor, codec: Codec, dim: usize, starts: PlaneBytes) -> Result<Planes> {
        let [low, high, norms, means] = Planes::row_sizes(codec, dim);
        let plane = |size: Option<(DType, usize)>, start: Option<usize>| {
            size.zip(start).map(|((dtype, _), start)| memory.typed_from(start, dtype)).transpose()
        };
        let low = plane(low, starts[0])?.expect("every codec has a low plane");
        let (high, norms) = (plane(high, starts[1])?, plane(norms, starts[2])?);
        Ok(Planes { codec, low, high, norms, means: plane(means, starts[Planes::MEANS])? })
    }

    /// The codec of the vectors.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// The planes that exist, with their names: `low`, `high`, `norms`, `means`.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let (high, norms, means) = (self.high.as_ref(), self.norms.as_ref(), self.means.as_ref());
        [("low", Some(&self.low)), ("high", high), ("norms", norms), ("means", means)]
            .into_iter()
            .filter_map(|(name, tensor)| Some((name, tensor?)))
    }

    /// Bytes of all planes.
    pub fn bytes(&self) -> usize {
        self.tensors().map(|(_, t)| t.bytes()).sum()
    }
}

/// Keys and values of one layer for several sequences: linear or a ring, dense or quantised.
///
/// Cloning is cheap and shares the memory. [`KvPool`](crate::KvPool) makes layers in pages, for many sequences. An
/// engine with its own cache manager can make layers itself, also over existing [`Tensor`]s
/// ([`KvLayer::from_dense`]). Memory that kvant did not allocate cannot be wrapped.
///
/// ```
/// use kvant::{Codec, Device, KvLayer, LayerSpec};
/// let spec = LayerSpec::new(2, 128, 1024, Codec::F16).sequences(4).v(Codec::tq(8)).window(Some(1000)).ring(true);
/// let layer = KvLayer::new(&Device::cpu(), spec)?;
/// assert_eq!(layer.slot(1030), 6);
/// assert_eq!(layer.bytes(), 4 * 2 * 1024 * (256 + 132));
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct KvLayer {
    spec: LayerSpec,
    pub(crate) k: Planes,
    pub(crate) v: Planes,
    pages: Option<LayerPages>,
    /// The dense pages, if the layer seals pages. The planes above are then those of sealed pages.
    dense: Option<Arc<DensePages>>,
    /// The key bias, which sealed keys do not include.
    key_bias: Option<KeyBias>,
}

impl RankTensors for KvLayer {
    fn move_to(&mut self, rank: &Rank) {
        self.k.move_to(rank);
        self.v.move_to(rank);
        self.key_bias.move_to(rank);
        self.dense = self.dense.take().map(|dense| {
            let mut layer = dense.layer.clone();
            layer.move_to(rank);
            // Memory for results exists before any call.
            Arc::new(DensePages { layer, results: Arc::default() })
        });
    }
}

/// The dense pages of a layer that seals pages.
#[derive(Debug)]
struct DensePages {
    layer: KvLayer,
    /// Scratch for results of attention over some of the pages. All layers of the pool share it: a pass runs its
    /// operations in order.
    results: Arc<Mutex<Option<Results>>>,
}

/// The unit of page tables in bytes: an entry is the distance of a page from the start of the pool's memory, in these
/// units.
pub(crate) const PAGE_UNIT: usize = 256;

/// Locates positions in a layer of a [`KvPool`](crate::KvPool), through the page table of the layer's group.
///
/// A page holds `page_tokens` consecutive positions of every layer of the group. Within a page each plane of a layer is
/// `[Hk, page_tokens]` rows. The planes of the layer begin at their offsets in a page at the start of the pool's
/// memory. The address of a row is therefore the start of its plane, plus `PAGE_UNIT` times the entry, plus the row
/// within the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerPages {
    /// The number of the pool. A step of another pool is rejected.
    pub pool: u64,
    /// The index of the layer group and of its page table in a [`Step`](crate::Step).
    pub group: usize,
    /// Positions of a page that a rank stores: a power of two.
    pub page_tokens: usize,
    /// The ranks that divide the positions of a page; 1 if every rank stores all.
    pub position_ranks: usize,
    /// The smallest value that is not a page.
    pub entries: u32,
}

/// A page table in host memory: `[S, width]` entries. Empty for a contiguous layer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PageTable<'a> {
    pub entries: &'a [u32],
    pub width: usize,
}

/// The location of a vector: its row in each plane, counted from `bytes` bytes after the start of the plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowPlace {
    pub bytes: usize,
    pub row: usize,
}

impl KvLayer {
    /// Allocates an empty layer.
    ///
    /// # Errors
    /// `Value`, `DType` or `Overflow` for an invalid specification: a centred codec needs the pages of a
    /// [`KvPool`](crate::KvPool). `OutOfMemory`.
    pub fn new(device: &Device, spec: LayerSpec) -> Result<KvLayer> {
        let rows = validate(&spec)?;
        Ok(KvLayer {
            spec,
            k: Planes::zeros(device, spec.k, rows, spec.head_dim)?,
            v: Planes::zeros(device, spec.v, rows, spec.head_dim)?,
            pages: None,
            dense: None,
            key_bias: None,
        })
    }

    /// Makes a layer of a pool. The planes begin at their offsets in a page at the start of `memory`, and extend to its
    /// end.
    pub(crate) fn paged(spec: LayerSpec, pages: LayerPages, k: Planes, v: Planes) -> KvLayer {
        KvLayer { spec, k, v, pages: Some(pages), dense: None, key_bias: None }
    }

    /// Adds dense pages, which tokens are written to until their page is sealed. The layers of a pool share `results`.
    pub(crate) fn with_dense_pages(self, layer: KvLayer, results: &Arc<Mutex<Option<Results>>>) -> KvLayer {
        KvLayer { dense: Some(Arc::new(DensePages { layer, results: Arc::clone(results) })), ..self }
    }

    /// Sets the key bias, which sealed keys do not include; ignored for a dense key codec.
    pub(crate) fn with_key_bias(self, bias: Option<KeyBias>) -> KvLayer {
        let key_bias = bias.filter(|_| self.spec.k.is_quantised());
        KvLayer { key_bias, ..self }
    }

    /// The key bias, which sealed keys do not include.
    pub(crate) fn key_bias(&self) -> Option<&KeyBias> {
        self.key_bias.as_ref()
    }

    /// The dense pages of a layer that seals pages, as a layer of its own.
    pub(crate) fn dense(&self) -> Option<&KvLayer> {
        self.dense.as_ref().map(|dense| &dense.layer)
    }

    /// The sealed pages as a layer without dense pages.
    pub(crate) fn sealed(&self) -> KvLayer {
        KvLayer { dense: None, ..self.clone() }
    }

    /// The layer that new tokens are written to.
    pub(crate) fn written(&self) -> &KvLayer {
        self.dense().unwrap_or(self)
    }

    /// Whether attention expects queries with the Hadamard rotation: all keys are quantised.
    pub fn rotates_queries(&self) -> bool {
        self.written().spec.k.is_quantised()
    }

    /// Scratch for results of attention over some of the pages: f32 `[T, H, D]` and `[T, H]`.
    pub(crate) fn results(&self, tokens: usize, heads: usize) -> Result<Results> {
        let dim = self.spec.head_dim;
        let rows = crate::tensor::element_count(&[tokens, heads])?;
        let elements = crate::tensor::element_count(&[rows, dim])?;
        let shared = self.dense.as_ref().map(|dense| dense.results.lock().unwrap_or_else(PoisonError::into_inner));
        let kept = shared.as_deref().and_then(Option::as_ref);
        let room = match kept.filter(|kept| kept.out.elements() >= elements && kept.ends.elements() >= rows) {
            Some(kept) => kept.clone(),
            None => {
                let zeros = |elements| Tensor::zeros(self.device(), DType::F32, &[elements]);
                Results { out: zeros(elements)?, ends: zeros(rows)? }
            }
        };
        if let Some(mut shared) = shared {
            *shared = Some(room.clone());
        }
        let out = room.out.rows(0..elements)?.reshape(&[tokens, heads, dim])?;
        Ok(Results { out, ends: room.ends.rows(0..rows)?.reshape(&[tokens, heads])? })
    }

    /// Makes a layer over existing dense tensors of S·Hk·cap·D elements each, in the order of `spec.order`. Their
    /// dtypes must be those of `spec.k` and `spec.v`.
    ///
    /// # Errors
    /// As [`KvLayer::new`]; `Shape` or `DType` for tensors that do not match, `Value` for a quantised codec.
    pub fn from_dense(spec: LayerSpec, k: &Tensor, v: &Tensor) -> Result<KvLayer> {
        let op = "kv_layer";
        let rows = validate(&spec)?;
        let side = |arg, codec: Codec, tensor: &Tensor| {
            match codec {
                Codec::Dense(dtype) if dtype == tensor.dtype() => {}
                Codec::Dense(dtype) => {
                    return Err(Error::DType { op, arg, expected: dtype.name(), got: tensor.dtype() });
                }
                Codec::TurboQuant(_) => {
                    return Err(Error::Value {
                        op,
                        arg,
                        expected: "a dense codec".to_string(),
                        got: codec.to_string(),
                    });
                }
            }
            if tensor.elements() != rows * spec.head_dim {
                let (s, h, c, d) = (spec.sequences, spec.kv_heads, spec.capacity, spec.head_dim);
                let expected = match spec.order {
                    HeadOrder::HeadMajor => format!("[sequences {s}, kv_heads {h}, capacity {c}, head_dim {d}]"),
                    HeadOrder::TokenMajor => format!("[sequences {s}, capacity {c}, kv_heads {h}, head_dim {d}]"),
                };
                return Err(Error::Shape { op, arg, expected, got: tensor.shape().to_vec() });
            }
            let low = tensor.reshape(&[rows, spec.head_dim])?;
            Ok(Planes { codec, low, high: None, norms: None, means: None })
        };
        Ok(KvLayer {
            spec,
            k: side("k", spec.k, k)?,
            v: side("v", spec.v, v)?,
            pages: None,
            dense: None,
            key_bias: None,
        })
    }

    /// The specification.
    pub fn spec(&self) -> &LayerSpec {
        &self.spec
    }

    /// The stored keys.
    pub fn k(&self) -> &Planes {
        &self.k
    }

    /// The stored values.
    pub fn v(&self) -> &Planes {
        &self.v
    }

    /// Bytes of all planes.
    pub fn bytes(&self) -> usize {
        self.k.bytes() + self.v.bytes()
    }

    /// The device that holds the layer.
    pub fn device(&self) -> &Device {
        self.k.low.device()
    }

    /// The row of a vector within each plane, for an existing sequence, head and slot. Other arguments return a row
    /// that does not exist or belongs to another vector; they never panic.
    #[inline]
    pub fn row(&self, sequence: usize, head: usize, slot: usize) -> usize {
        let s = &self.spec;
        match s.order {
            HeadOrder::HeadMajor => {
                sequence.saturating_mul(s.kv_heads).saturating_add(head).saturating_mul(s.capacity).saturating_add(slot)
            }
            HeadOrder::TokenMajor => {
                sequence.saturating_mul(s.capacity).saturating_add(slot).saturating_mul(s.kv_heads).saturating_add(head)
            }
        }
    }

    /// The page geometry, if the layer belongs to a pool.
    pub(crate) fn pages(&self) -> Option<&LayerPages> {
        self.pages.as_ref()
    }

    /// Whether the layer is part of a [`KvPool`](crate::KvPool), so that positions are found through a page table.
    pub fn is_paged(&self) -> bool {
        self.pages.is_some()
    }

    /// Positions of a page; `usize::MAX` without pages.
    pub(crate) fn page_tokens(&self) -> usize {
        self.pages.map_or(usize::MAX, |pages| pages.page_tokens)
    }

    /// The ranks that divide the positions of a page; 1 if every rank stores all.
    pub(crate) fn position_ranks(&self) -> usize {
        self.pages.map_or(1, |pages| pages.position_ranks)
    }

    /// Maximum rows that a rank has of the first `len` positions of a sequence: those of rank 0.
    pub(crate) fn max_rows(&self, len: usize) -> usize {
        self.pages.filter(|pages| pages.position_ranks > 1).map_or(
            len,
            |LayerPages { page_tokens, position_ranks: ranks, .. }| {
                PositionShare { page_tokens: page_tokens * ranks, ranks, rank: 0 }.rows(len)
            },
        )
    }

    /// The maximum length of a sequence, for a linear layer: its slots.
    pub(crate) fn limit(&self) -> Option<usize> {
        (!self.spec.ring && self.pages.is_none()).then_some(self.spec.capacity)
    }

    /// Locates the vector of a position, for an existing head. `None` if the table has no page for the position, or its
    /// entry is not a page.
    #[inline]
    pub(crate) fn place(&self, table: PageTable, sequence: usize, head: usize, position: usize) -> Option<RowPlace> {
        let Some(pages) = &self.pages else {
            return Some(RowPlace { bytes: 0, row: self.row(sequence, head, self.slot(position)) });
        };
        let bytes = pages.page(table, sequence, position / pages.page_tokens)?;
        Some(RowPlace { bytes, row: head * pages.page_tokens + position % pages.page_tokens })
    }

    /// The number of rows between a head's first row and the next head's, within a page if the layer has pages.
    #[inline]
    pub(crate) fn head_stride(&self) -> usize {
        match (&self.pages, self.spec.order) {
            (Some(pages), _) => pages.page_tokens,
            (None, HeadOrder::HeadMajor) => self.spec.capacity,
            (None, HeadOrder::TokenMajor) => 1,
        }
    }

    /// The number of consecutive slots from this position to the end of the ring or page.
    #[inline]
    pub(crate) fn contiguous_from(&self, position: usize) -> usize {
        match &self.pages {
            Some(pages) => pages.page_tokens - position % pages.page_tokens,
            None => self.spec.capacity - self.slot(position),
        }
    }

    /// The row of the means of a KV head in a page, for the row of one of its vectors.
    #[inline]
    pub(crate) fn mean_row(&self, row: usize) -> usize {
        self.pages.map_or(0, |pages| row / pages.page_tokens)
    }

    /// The number of rows between a head's slot and its next slot.
    #[inline]
    pub fn slot_stride(&self) -> usize {
        match self.spec.order {
            HeadOrder::HeadMajor => 1,
            HeadOrder::TokenMajor => self.spec.kv_heads,
        }
    }

    /// The slot of a position. The position must be below the capacity if the layer is linear.
    #[inline]
    pub fn slot(&self, position: usize) -> usize {
        if self.spec.ring { position % self.spec.capacity } else { position }
    }

    /// Calls `visit` with every plane.
    pub(crate) fn touches(&self, access: Access, visit: &mut dyn FnMut(Touch)) {
        if let Some(bias) = &self.key_bias {
            bias.tensors().into_iter().for_each(|tensor| visit(Touch { arg: "layer.key_bias", tensor, access: Read }));
        }
        if self.pages.is_some() {
            // The planes of all pages: one range of the pool's memory, which contains both sides.
            visit(Touch { arg: "layer", tensor: &self.k.low, access });
            return;
        }
        for (arg, planes) in [("layer.k", &self.k), ("layer.v", &self.v)] {
            planes.tensors().for_each(|(_, tensor)| visit(Touch { arg, tensor, access }));
        }
    }
}

impl LayerPages {
    /// The distance in bytes of page `index` of a sequence from the start of the pool's memory.
    #[inline]
    pub(crate) fn page(&self, table: PageTable, sequence: usize, index: usize) -> Option<usize> {
        if index >= table.width {
            return None;
        }
        self.start(*table.entries.get(sequence * table.width + index)?)
    }

    /// The distance in bytes from the start of the pool's memory to the page of an entry.
    #[inline]
    pub(crate) fn start(&self, entry: u32) -> Option<usize> {
        (entry < self.entries).then_some(entry as usize * PAGE_UNIT)
    }
}

/// Checks a specification and returns its number of rows.
fn validate(spec: &LayerSpec) -> Result<usize> {
    let op = "kv_layer";
    check::positive(op, "sequences", spec.sequences)?;
    check::positive(op, "kv_heads", spec.kv_heads)?;
    check::positive(op, "capacity", spec.capacity)?;
    check::positive(op, "head_dim", spec.head_dim)?;
    if let Some(window) = spec.window {
        check::positive(op, "window", window)?;
        let fits = !spec.ring || window <= spec.capacity;
        check::value_is(op, "window", fits, format_args!("at most the {} slots of the ring", spec.capacity), window)?;
    }
    // Positions are u32 on the device.
    check::at_most(op, "capacity", spec.capacity, u32::MAX as usize)?;
    check::at_most(op, "sequences", spec.sequences, u32::MAX as usize)?;
    for (arg, codec) in [("k", spec.k), ("v", spec.v)] {
        codec.validate(op, arg, spec.head_dim)?;
        check::value_is(op, arg, !codec.is_centred(), "a codec without page means, outside of a pool", codec)?;
    }
    let rows = crate::tensor::element_count(&[spec.sequences, spec.kv_heads, spec.capacity])?;
    crate::tensor::element_count(&[rows, spec.head_dim, 4])?;
    Ok(rows)
}
