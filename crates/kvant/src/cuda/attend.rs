//! The launches of attention: how operands are split, which rows share a block, how much shared memory a block has.

use crate::{
    Codec, DType, Planes, Result, SlotOrder, Tensor,
    codec::BLOCK,
    cuda::{
        attend_decode::Decode, attend_prefill::Prefill, attend_quantised::Quantised, attend_short::Short,
        attend_short_quantised::ShortQuantised, blocks_beside_each_other, headers, planes,
    },
    gpu::{Builder, Launch, Limits, Params, Scratch, Source, Use, params},
    ops::{
        SourceOrder,
        attend::{Call, FreshCall, NAME, Plan},
    },
};

params! {
    pub(crate) struct AttendParams {
        pub row_sequence: u64,
        pub row_head: u64,
        pub row_slot: u32,
        pub tokens: u32,
        pub sequences: u32,
        pub kv_heads: u32,
        pub group: u32,
        pub capacity: u32,
        pub window: u32,
        pub item_rows: u32,
        pub items: u32,
        pub splits: u32,
        pub scale: f32,
        pub softcap: f32,
    }
}

static SOURCE: Source = Source {
    name: "attend.cu",
    text: include_str!("attend.cu"),
    headers: headers::ATTEND,
    layouts: &[AttendParams::layout],
};

/// As `attend_plan.h` has it: the most items that blocks share evenly.
pub(super) const MAX_SHARED_ITEMS: usize = 256;
/// More parts of an item are never made.
pub(super) const MAX_SPLITS: usize = 512;
/// Blocks of a cluster, at most.
pub(super) const MAX_CLUSTER: usize = 8;
/// Query rows of a block: tiles of 8, as many as registers allow.
const ROW_TILES: [usize; 4] = [1, 2, 4, 8];
/// Buffers, and copies of each table of centroids: the best ones first, then what fits into less shared memory. GPUs of
/// compute capability 8.6, 8.9 and 12.0 have 99 KiB.
const ROOMS: [[usize; 2]; 4] = [[4, 32], [2, 32], [2, 8], [2, 4]];

/// One side (keys or values) as the kernel works on it: `Side` of `attend_side.h`.
#[derive(Clone, Copy)]
struct Side {
    codec: Codec,
    head_dim: usize,
    /// 16-bit numbers that make a coordinate.
    parts: usize,
    /// 16-bit numbers that make what it is multiplied by.
    terms: usize,
}

impl Side {
    /// `factor`: the dtype of what it is multiplied by. With `precise` products have the precision of f32. Otherwise they
    /// have what a 16-bit output can show, but for centroids, which are rounded to f16 once.
    fn new(codec: Codec, head_dim: usize, factor: DType, precise: bool) -> Side {
        let (parts, terms) = match codec {
            Codec::TurboQuant(_) => (1 + usize::from(precise), 1 + usize::from(precise)),
            Codec::Dense(dtype) if dtype == factor && dtype != DType::F32 => (1, 1),
            Codec::Dense(DType::F16) => (1, 2),
            Codec::Dense(DType::F32) => (2 + usize::from(precise), 2 + usize::from(precise)),
            Codec::Dense(_) => (1, 2 + usize::from(precise)),
        };
        Side { codec, head_dim, parts, terms }
    }

    /// Bytes of a row in the planes `low` and `high`, and its norms.
    fn row(&self) -> [usize; 3] {
        let dim = self.head_dim;
        match self.codec {
            Codec::Dense(dtype) => [dim * dtype.size(), 0, 0],
            Codec::TurboQuant(tq) => {
                let low = if tq.bits == 8 { dim } else { dim / 2 };
                let high = if tq.bits == 8 { 0 } else { dim * (tq.bits as usize - 4) / 8 };
                [low, high, 4 * dim.div_ceil(BLOCK)]
            }
        }
    }

    /// Bytes of a row in shared memory, without its norms.
    fn shared_row(&self) -> usize {
        let [low, high, _] = self.row();
        low + 16 + high + high.min(16)
    }

    /// Bytes of one copy of the table.
    fn table_bytes(&self) -> usize {
        match self.codec {
            Codec::TurboQuant(tq) if tq.bits == 4 && self.parts == 1 => 256 * 4,
            Codec::TurboQuant(tq) => 4 << tq.bits,
            Codec::Dense(_) => 0,
        }
    }
}

/// What a kernel is compiled for.
struct Kernel {
    k: Side,
    v: Side,
    row_tiles: usize,
    warps: usize,
    tile: usize,
    buffers: usize,
    lane_copies: usize,
    shared_bytes: usize,
    /// Blocks that share a multiprocessor.
    together: usize,
}

impl Kernel {
    fn new(k: Side, v: Side, rows: usize, limits: &Limits) -> Option<Kernel> {
        let dim = k.head_dim;
        let quantised = k.codec.is_quantised() || v.codec.is_quantised();
        // In each room most query rows first; for each, warps and keys of a tile from the best to what needs the least memory.
        let most = ROW_TILES.into_iter().rev().skip_while(move |&tiles| tiles > 1 && tiles * 4 >= rows);
        let rooms = ROOMS.into_iter().flat_map(|room| most.clone().map(move |row_tiles| (room, row_tiles)));
        rooms
            .flat_map(|(room, row_tiles)| {
                let shapes: &[[usize; 2]] = match (dim, row_tiles) {
                    (512, 1) if quantised => &[[16, 128], [8, 64], [4, 64], [4, 32], [4, 16]],
                    (512, 1..=2) => &[[8, 32], [4, 32], [4, 16]],
                    (128.., 4..) => &[[8, 128], [8, 64], [8, 32]],
                    _ => &[[4, 64], [4, 32], [4, 16]],
                };
                shapes.iter().map(move |&shape| (room, row_tiles, shape))
            })
            .find_map(|([buffers, lane_copies], row_tiles, [warps, tile])| {
                let mut kernel =
                    Kernel { k, v, row_tiles, warps, tile, buffers, lane_copies, shared_bytes: 0, together: 1 };
                kernel.shared_bytes = kernel.shared();
                kernel.together = blocks_beside_each_other(kernel.shared_bytes, limits).min(12 / warps).clamp(1, 3);
                (kernel.shared_bytes <= limits.threadgroup_bytes).then_some(kernel)
            })
    }

    fn rows(&self) -> usize {
        8 * self.row_tiles
    }

    /// Bytes of shared memory: the sum that `attend.cu` computes.
    fn shared(&self) -> usize {
        let Kernel { k, v, row_tiles, warps, tile, .. } = *self;
        let dim = k.head_dim;
        let [k_norms, v_norms] = [k.row()[2], v.row()[2]];
        let buffer = tile * (k.shared_row() + k_norms + v_norms).max(v.shared_row());
        let one_table = planes::codec_code(k.codec) == planes::codec_code(v.codec);
        let tables = self.lane_copies * (v.table_bytes() + if one_table { 0 } else { k.table_bytes() });
        let variants = if v_norms == 8 { 2 } else { 1 };
        let operands = k.terms * (dim / 16) + variants * v.terms * (tile / 16);
        (self.buffers * buffer).max(self.rows() * dim * 4)
            + tables
            + operands * row_tiles * 256
            + warps * (self.rows() + 4) * 4
            + self.rows() * 32
            + (MAX_SHARED_ITEMS + 8) * 4
    }
}

/// How a call is cut into blocks.
struct Shape {
    kernel: Kernel,
    item_rows: usize,
    items: usize,
    /// 0: the blocks share all tiles evenly.
    splits: usize,
    blocks: usize,
}

impl Shape {
    /// For the cached keys, or (`fresh`) for the step's own.
    fn new(call: &Call, fresh: Option<&Tensor>, limits: &Limits) -> Result<Shape> {
        let spec = call.layer.spec();
        let precise = call.out.dtype() == DType::F32;
        let [k, v] = match fresh {
            Some(tensor) => [Codec::Dense(tensor.dtype()); 2],
            None => [spec.k, spec.v],
        };
        let v = match (fresh, &call.fresh) {
            (Some(_), Some(fresh)) => Codec::Dense(fresh.v.dtype()),
            _ => v,
        };
        let group = call.heads / spec.kv_heads;
        // Sequences are known to the device alone. With no more tokens than sequences, each is most likely another's.
        let together = call.tokens.div_ceil(spec.sequences);
        let wanted = together.saturating_mul(group).max(1);
        // Weights are f32.
        let [k, v] =
            [Side::new(k, call.head_dim, call.q.dtype(), precise), Side::new(v, call.head_dim, DType::F32, precise)];
        // Precise sums take three times the registers.
        let most = if call.head_dim == 512 { 32 } else { 64 } / if precise { 2 } else { 1 };
        let kernel = Kernel::new(k, v, wanted.min(most), limits).ok_or_else(|| crate::Error::Unsupported {
            op: NAME,
            device: "cuda",
            reason: format!("the kernel needs more shared memory than {} bytes a block", limits.threadgroup_bytes),
        })?;
        let item_rows = wanted.min(kernel.rows());
        let items = (call.tokens * group).div_ceil(item_rows);
        let pairs = items * spec.kv_heads;
        // No more parts of an item than are merged.
        let busy = (limits.busy_groups * kernel.together).min(MAX_SPLITS);
        let splits = match call.splits {
            _ if fresh.is_some() => 1,
            0 if items > MAX_SHARED_ITEMS || pairs >= 2 * busy => 1,
            splits => splits.min(MAX_SPLITS),
        };
        // The longest context that the device may turn out to hold.
        let seen = call.window.saturating_add(together).min(spec.capacity);
        let blocks = if splits == 0 {
            busy.min(pairs.saturating_mul(seen.div_ceil(kernel.tile) + 1))
        } else {
            pairs.saturating_mul(splits)
        };
        Ok(Shape { kernel, item_rows, items, splits, blocks })
    }
}

/// Passed on, a plan must lead to the launch that it describes. Splits are only a part of what was chosen, beside clusters and
/// even shares: so the plan has those that were asked for.
pub(crate) fn plan(call: &Call, limits: &Limits) -> Plan {
    Plan { splits: call.splits, ..chosen(call, limits) }
}

fn chosen(call: &Call, limits: &Limits) -> Plan {
    if let Some(short) = ShortQuantised::new(call, limits) {
        return short.plan();
    }
    if let Some(quantised) = Quantised::new(call, limits) {
        return quantised.plan();
    }
    if let Some(short) = Short::new(call, limits) {
        return short.plan();
    }
    if let Some(decode) = Decode::new(call, limits) {
        return decode.plan();
    }
    if let Some(prefill) = Prefill::new(call, None, limits) {
        return prefill.plan();
    }
    match Shape::new(call, None, limits) {
        Ok(Shape { kernel, item_rows, items, splits, blocks }) => {
            let how = if splits == 0 { "share the tiles of all evenly" } else { "take one each" };
            let reason = format!(
                "{items} items of up to {item_rows} query rows for each KV head; {blocks} blocks of {} warps {how}, {} keys \
                 at a time",
                kernel.warps, kernel.tile
            );
            Plan { kernel: "attend", reason: reason.into(), splits }
        }
        Err(e) => Plan { kernel: "none", reason: e.to_string().into(), splits: 0 },
    }
}

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    if call.tokens == 0 {
        return Ok(());
    }
    let spec = call.layer.spec();
    let (sequences, kv_heads, capacity) = (spec.sequences as u64, spec.kv_heads as u64, spec.capacity as u64);
    let (row_head, row_slot) = match spec.order {
        SlotOrder::HeadMajor => (capacity, 1),
        SlotOrder::TokenMajor => (1, kv_heads),
    };
    debug_assert!(sequences > 0);
    let rows = Rows { sequence: kv_heads * capacity, head: row_head, slot: row_slot, capacity };
    // The state of the cached keys, o, m and l of every query row, for the fresh ones to be added to.
    let state =
        call.fresh.as_ref().map(|_| b.scratch(call.tokens * call.heads * (call.head_dim + 2) * 4)).transpose()?;
    if let Some(short) = ShortQuantised::new(call, &b.limits) {
        b.push(short.launch(call, &rows, state.as_ref())?)?;
    } else if let Some(quantised) = Quantised::new(call, &b.limits) {
        b.push(quantised.launch(call, b, &rows, state.as_ref())?)?;
    } else if let Some(short) = Short::new(call, &b.limits) {
        b.push(short.launch(call, &rows, state.as_ref())?)?;
    } else if let Some(decode) = Decode::new(call, &b.limits) {
        b.push(decode.launch(call, b, &rows, state.as_ref())?)?;
    } else if let Some(prefill) = Prefill::new(call, None, &b.limits) {
        b.push(prefill.launch(call, &rows, state.as_ref())?)?;
    } else {
        b.push(cached(call, b, &rows, state.as_ref())?)?;
    }
    let (Some(fresh), Some(state)) = (&call.fresh, &state) else { return Ok(()) };
    b.push(own(call, b, fresh, state)?)
}

/// The keys of the cache.
fn cached(call: &Call, b: &Builder, rows: &Rows, state: Option<&Scratch>) -> Result<Launch> {
    let [k, v] = [&call.layer.k, &call.layer.v];
    let rotate = k.codec().is_quantised() && !call.q_rotated;
    let launch = launch(call, b, &Shape::new(call, None, &b.limits)?, rows)?
        .constant("RING", call.layer.spec().ring)
        .constant("FRESH", false)
        .constant("ALIGNED", is_aligned(k) && is_aligned(v))
        .constant("ROTATE_Q", rotate);
    let launch = planes::bind(planes::bind(launch, 2, k, Use::Read), 5, v, Use::Read).read(10, call.cached_lens());
    Ok(write(launch, call, state))
}

/// Whether each token and KV head of a decode launch gets a cluster of blocks, which add up their states through one another's
/// shared memory. Who asks for splits gets those.
pub(super) fn in_clusters(call: &Call, limits: &Limits) -> bool {
    let pairs = call.tokens * call.layer.spec().kv_heads;
    // Not all multiprocessors are in groups of eight that could be a cluster.
    limits.clusters && call.splits == 0 && pairs * MAX_CLUSTER <= limits.busy_groups / 4 * 3
}

/// Clusters of [`MAX_CLUSTER`] blocks that run at a time, if each block has a multiprocessor to itself.
pub(super) fn most_clusters(limits: &Limits) -> usize {
    // Not all multiprocessors are in groups of eight: an H200 with 132 runs 15.
    limits.busy_groups * 7 / 8 / MAX_CLUSTER
}

/// Of these, how many each token and KV head may have; none where there are no clusters or not enough.
pub(super) fn clusters_of_pair(call: &Call, limits: &Limits) -> usize {
    if !in_clusters(call, limits) {
        return 0;
    }
    // A batch may be empty; that has a plan, too.
    (most_clusters(limits) / (call.tokens * call.layer.spec().kv_heads).max(1)).max(1)
}

/// Where a launch over cached keys writes: the state of them where that is wanted, or else the output.
pub(super) fn write(launch: Launch, call: &Call, state: Option<&Scratch>) -> Launch {
    match state {
        Some(state) => launch.scratch(13, state, Use::Write),
        None => launch.write(1, &call.out),
    }
}

/// What the blocks of a launch leave for one another where several have parts of an item.
pub(super) struct Shares {
    pub blocks: usize,
    /// Query rows of an item, and items of a KV head.
    pub rows: usize,
    pub items: usize,
    /// Blocks of a cluster, each of which has a share of its state.
    pub cluster: usize,
}

impl Shares {
    /// Gives the launch room for them.
    pub(super) fn bind(self, launch: Launch, call: &Call, b: &Builder) -> Result<Launch> {
        // A piece of work begins where a cluster's share of the keys does, or an item of a head. Each has a slot for its
        // state; each slot, and each item of a head, has a counter for each block of a cluster.
        let pairs = self.items * call.layer.spec().kv_heads;
        let slots = self.blocks / self.cluster + pairs;
        // Rows are divided among the blocks of a cluster, or their coordinates are.
        let rows = self.rows.next_multiple_of(self.cluster);
        let state = rows * call.head_dim + self.cluster * (2 * self.rows).next_multiple_of(4);
        let partials = b.scratch(slots * state * 4)?;
        let counters = b.zeroed_scratch((slots + pairs) * self.cluster * 4)?;
        Ok(launch.scratch(11, &partials, Use::ReadWrite).scratch(12, &counters, Use::ReadWrite))
    }
}

/// The step's own keys, added to the state of the cached ones.
fn own(call: &Call, b: &Builder, fresh: &FreshCall, state: &Scratch) -> Result<Launch> {
    let (tokens, kv_heads) = (call.tokens as u64, call.layer.spec().kv_heads as u64);
    let (head, slot) = match fresh.order {
        SourceOrder::TokenMajor => (1, kv_heads),
        SourceOrder::HeadMajor => (tokens, 1),
    };
    let rows = Rows { sequence: 0, head, slot, capacity: tokens };
    if let Some(prefill) = Prefill::new(call, Some(fresh), &b.limits) {
        return prefill.launch_own(call, &rows, fresh, state);
    }
    let own = Shape::new(call, Some(&fresh.k), &b.limits)?;
    let aligned = |tensor: &Tensor| tensor.byte_offset().is_multiple_of(16);
    Ok(launch(call, b, &own, &rows)?
        .constant("RING", false)
        .constant("FRESH", true)
        .constant("ALIGNED", aligned(&fresh.k) && aligned(&fresh.v))
        .constant("ROTATE_Q", false)
        .write(1, &call.out)
        .read(2, &fresh.k)
        .read(5, &fresh.v)
        .read(10, call.cached_lens())
        .scratch(13, state, Use::Read))
}

/// Rows of the planes between sequences, KV heads and slots, and the number of slots.
pub(super) struct Rows {
    sequence: u64,
    head: u64,
    slot: u64,
    capacity: u64,
}

pub(super) fn params(call: &Call, rows: &Rows, item_rows: usize, items: usize, splits: usize) -> Result<AttendParams> {
    let spec = call.layer.spec();
    let uint = |arg, value: usize| Launch::uint(NAME, arg, value);
    Ok(AttendParams {
        row_sequence: rows.sequence,
        row_head: rows.head,
        row_slot: uint("layer.kv_heads", rows.slot as usize)?,
        tokens: uint("q", call.tokens)?,
        sequences: uint("layer.sequences", spec.sequences)?,
        kv_heads: uint("layer.kv_heads", spec.kv_heads)?,
        group: uint("q", call.heads / spec.kv_heads)?,
        capacity: uint("layer.capacity", rows.capacity as usize)?,
        window: u32::try_from(call.window).unwrap_or(u32::MAX),
        item_rows: uint("q", item_rows)?,
        items: uint("q", items)?,
        splits: splits as u32,
        scale: call.scale,
        softcap: call.softcap.unwrap_or(0.0),
    })
}

/// What both launches of `attend.cu` have in common.
fn launch(call: &Call, b: &Builder, shape: &Shape, rows: &Rows) -> Result<Launch> {
    let Kernel { k, v, row_tiles, warps, tile, buffers, lane_copies, shared_bytes, together } = shape.kernel;
    let params = params(call, rows, shape.item_rows, shape.items, shape.splits)?;
    let constant = |value: usize| value as u32;
    let launch = Launch::new(NAME, &SOURCE, "attend")
        .constant("HEAD_DIM", constant(call.head_dim))
        .constant("Q_DTYPE", call.q.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("K_CODEC", planes::codec_code(k.codec))
        .constant("V_CODEC", planes::codec_code(v.codec))
        .constant("K_PARTS", constant(k.parts))
        .constant("V_PARTS", constant(v.parts))
        .constant("Q_TERMS", constant(k.terms))
        .constant("P_TERMS", constant(v.terms))
        .constant("NT", constant(row_tiles))
        .constant("WARPS", constant(warps))
        .constant("TILE", constant(tile))
        .constant("BUFFERS", constant(buffers))
        .constant("LANE_COPIES", constant(lane_copies))
        .constant("CLUSTER", 1u32)
        .constant("BLOCKS_PER_MULTIPROCESSOR", constant(together))
        .constant("SOFTCAP", call.softcap.is_some())
        .constant("SHARED_BYTES", constant(shared_bytes))
        .read(0, &call.q)
        .read(8, &call.step.positions)
        .read(9, &call.step.sequence)
        .params(14, &params)
        .grid([shape.blocks, 1, 1], [32 * warps, 1, 1])
        .threadgroup_memory(shared_bytes)
        // Where tokens stand.
        .reads_ahead(&[8, 9, 10]);
    if shape.splits == 1 {
        return Ok(launch);
    }
    Shares { blocks: shape.blocks, rows: shape.item_rows, items: shape.items, cluster: 1 }.bind(launch, call, b)
}

/// Whether rows can be read 16 bytes at a time.
pub(super) fn is_aligned(planes: &Planes) -> bool {
    planes.tensors().all(|(_, tensor)| tensor.byte_offset().is_multiple_of(16))
}
