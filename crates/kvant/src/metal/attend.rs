//! The launches of attention: which kernel, how many splits.

use crate::{
    DType, Planes, Result, SlotOrder, Tensor,
    gpu::{Builder, Constant, Launch, Limits, Params, Source, Use, dtype_code, params},
    metal::{headers, planes::codec_code},
    ops::{
        SourceOrder,
        attend::{Call, NAME, Plan},
    },
};

params! {
    pub(crate) struct AttendParams {
        pub tokens: u32,
        pub sequences: u32,
        pub heads: u32,
        pub kv_heads: u32,
        pub group: u32,
        pub capacity: u32,
        pub window: u32,
        pub tile_rows: u32,
        pub splits: u32,
        pub least_keys: u32,
        pub scale: f32,
        pub softcap: f32,
    }
}

static FEW: Source = Source {
    name: "attend.metal",
    text: include_str!("attend.metal"),
    headers: headers::ATTEND,
    layouts: &[AttendParams::layout],
};

static TILES: Source = Source {
    name: "attend_tiles.metal",
    text: include_str!("attend_tiles.metal"),
    headers: headers::ATTEND,
    layouts: &[AttendParams::layout],
};

/// Query rows that a threadgroup of `attend_few` takes at most.
const FEW_ROWS: usize = 8;
/// Threads of `attend_few`, and of `attend_merge`.
const FEW_THREADS: usize = 128;
const MERGE_THREADS: usize = 64;

/// Keys that a split takes at least, but for the last one; the kernels round up to their tiles.
const LEAST_KEYS: usize = 64;
/// Keys for which another split is worth its merge, where the choice is ours.
const SPLIT_KEYS: usize = 256;
/// More splits are never made.
const MAX_SPLITS: usize = 256;

/// What the choice of a kernel and of splits depends on: all of it known before the step's positions are.
#[derive(Clone, Copy)]
struct Size {
    tokens: usize,
    sequences: usize,
    kv_heads: usize,
    /// Query heads of a KV head.
    group: usize,
    head_dim: usize,
    capacity: usize,
    window: usize,
    fresh: bool,
    /// 0: ours to choose.
    splits: usize,
}

impl Size {
    fn of(call: &Call) -> Size {
        let spec = call.layer.spec();
        Size {
            tokens: call.tokens,
            sequences: spec.sequences,
            kv_heads: spec.kv_heads,
            group: call.heads / spec.kv_heads,
            head_dim: call.head_dim,
            capacity: spec.capacity,
            window: call.window,
            fresh: call.fresh.is_some(),
            splits: call.splits,
        }
    }
}

/// How a call is cut into threadgroups.
struct Shape {
    source: &'static Source,
    kernel: &'static str,
    threads: usize,
    tile_rows: usize,
    tiles: usize,
    splits: usize,
    reason: String,
}

impl Shape {
    fn new(size: Size, limits: &Limits) -> Shape {
        let Size { tokens, kv_heads, group, .. } = size;
        // Which token is whose, the device alone knows. No more tokens than sequences: most likely one of each.
        let together = if tokens <= size.sequences { 1 } else { tokens };
        let rows = together * group;
        let by_size = size.head_dim.ilog2() as usize - 6;
        let (source, kernel, threads, tile_rows, than) = if rows <= FEW_ROWS {
            let kernel = FEW_KERNELS[by_size][rows.next_power_of_two().ilog2() as usize];
            (&FEW, kernel, FEW_THREADS, rows, "at most")
        } else {
            let Tiles { kernel, threads, rows } = TILE_KERNELS[by_size];
            (&TILES, kernel, threads, rows, "more than")
        };
        let tiles = (tokens * group).div_ceil(tile_rows);
        // The most keys that a token may turn out to see: the captured launch serves any length.
        let most = size.window.saturating_add(together).min(size.capacity) + if size.fresh { tokens } else { 0 };
        let groups = tiles * kv_heads;
        let (splits, why) = match size.splits {
            0 => {
                let busy = limits.busy_groups;
                let splits = busy.div_ceil(groups.max(1)).min(most.div_ceil(SPLIT_KEYS));
                (splits, format!("{groups} threadgroups a split where {busy} keep the device busy"))
            }
            forced => (forced.min(most.div_ceil(LEAST_KEYS)), format!("{forced} splits asked for")),
        };
        let reason = format!(
            "{rows} query rows read the same keys, {than} {FEW_ROWS}; {why}, over at most {most} keys: tiles of {tile_rows} rows"
        );
        Shape { source, kernel, threads, tile_rows, tiles, splits: splits.clamp(1, MAX_SPLITS), reason }
    }
}

/// By head size, then by rows: 1, 2, 4, 8.
const FEW_KERNELS: [[&str; 4]; 4] = [
    ["attend_few_64_1", "attend_few_64_2", "attend_few_64_4", "attend_few_64_8"],
    ["attend_few_128_1", "attend_few_128_2", "attend_few_128_4", "attend_few_128_8"],
    ["attend_few_256_1", "attend_few_256_2", "attend_few_256_4", "attend_few_256_8"],
    ["attend_few_512_1", "attend_few_512_2", "attend_few_512_4", "attend_few_512_8"],
];

#[derive(Clone, Copy)]
struct Tiles {
    kernel: &'static str,
    threads: usize,
    rows: usize,
}

/// By head size.
const TILE_KERNELS: [Tiles; 4] = [
    Tiles { kernel: "attend_tiles_64", threads: 128, rows: 32 },
    Tiles { kernel: "attend_tiles_128", threads: 128, rows: 32 },
    Tiles { kernel: "attend_tiles_256", threads: 256, rows: 32 },
    Tiles { kernel: "attend_tiles_512", threads: 256, rows: 16 },
];

const MERGE_KERNELS: [&str; 4] = ["attend_merge_64", "attend_merge_128", "attend_merge_256", "attend_merge_512"];

pub(crate) fn plan(call: &Call, limits: &Limits) -> Plan {
    let Shape { kernel, splits, reason, .. } = Shape::new(Size::of(call), limits);
    Plan { kernel, reason: reason.into(), splits }
}

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    if call.tokens == 0 {
        return Ok(());
    }
    let shape = Shape::new(Size::of(call), &b.limits);
    let spec = call.layer.spec();
    let uint = |arg, value| Launch::uint(NAME, arg, value);
    let params = AttendParams {
        tokens: uint("T", call.tokens)?,
        sequences: uint("S", spec.sequences)?,
        heads: uint("H", call.heads)?,
        kv_heads: uint("Hk", spec.kv_heads)?,
        group: uint("H", call.heads / spec.kv_heads)?,
        capacity: uint("capacity", spec.capacity)?,
        window: u32::try_from(call.window).unwrap_or(u32::MAX),
        tile_rows: shape.tile_rows as u32,
        splits: shape.splits as u32,
        least_keys: LEAST_KEYS as u32,
        scale: call.scale,
        softcap: call.softcap.unwrap_or(1.0),
    };
    let partial = shape.splits > 1;
    let rows = call.tokens * call.heads;
    uint("T·H", rows)?;
    let mut launch = specialise(Launch::new(NAME, shape.source, shape.kernel), call, partial)
        .read(0, &call.q)
        .read(2, &call.step.positions)
        .read(3, &call.step.sequence)
        .read(4, call.cached_lens());
    for (index, side) in [(5, &call.layer.k), (8, &call.layer.v)] {
        launch = launch
            .read(index, &side.low)
            .read_if(index + 1, side.high.as_ref())
            .read_if(index + 2, side.norms.as_ref());
    }
    if let Some(fresh) = &call.fresh {
        launch = launch.read(11, &fresh.k).read(12, &fresh.v);
    }
    launch = launch.params(15, &params).grid([shape.tiles, spec.kv_heads, shape.splits], [shape.threads, 1, 1]);
    if !partial {
        return b.push(launch.write(1, &call.out));
    }
    let o = b.scratch(shape.splits * rows * call.head_dim * size_of::<f32>())?;
    let states = b.scratch(shape.splits * rows * 2 * size_of::<f32>())?;
    b.push(launch.scratch(13, &o, Use::Write).scratch(14, &states, Use::Write))?;
    let by_size = call.head_dim.ilog2() as usize - 6;
    b.push(
        specialise(Launch::new(NAME, &FEW, MERGE_KERNELS[by_size]), call, partial)
            .write(1, &call.out)
            .scratch(13, &o, Use::Read)
            .scratch(14, &states, Use::Read)
            .params(15, &params)
            .grid([rows, 1, 1], [MERGE_THREADS, 1, 1]),
    )
}

/// Whether a tensor begins where four elements may be loaded at once.
fn aligned(tensor: &Tensor) -> bool {
    tensor.byte_offset().is_multiple_of(4 * tensor.dtype().size())
}

/// The function constants.
fn specialise(launch: Launch, call: &Call, partial: bool) -> Launch {
    let spec = call.layer.spec();
    let side = |side: &Planes| (Constant::UInt(codec_code(side.codec())), aligned(&side.low));
    let ((k_codec, k_aligned), (v_codec, v_aligned)) = (side(&call.layer.k), side(&call.layer.v));
    let fresh = call.fresh.as_ref();
    let fresh_dtype = |of: fn(&crate::ops::attend::FreshCall) -> DType| fresh.map_or(0, |fresh| dtype_code(of(fresh)));
    launch
        .constant("Q_DTYPE", call.q.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("K_CODEC", k_codec)
        .constant("V_CODEC", v_codec)
        .constant("K_ALIGNED", k_aligned)
        .constant("V_ALIGNED", v_aligned)
        .constant("Q_ALIGNED", aligned(&call.q))
        .constant("RING", spec.ring)
        .constant("TOKEN_MAJOR", spec.order == SlotOrder::TokenMajor)
        .constant("SOFTCAP", call.softcap.is_some())
        .constant("Q_ROTATED", call.q_rotated)
        .constant("FRESH", fresh.is_some())
        .constant("FRESH_K_DTYPE", fresh_dtype(|fresh| fresh.k.dtype()))
        .constant("FRESH_V_DTYPE", fresh_dtype(|fresh| fresh.v.dtype()))
        .constant("FRESH_TOKEN_MAJOR", fresh.is_some_and(|fresh| fresh.order == SourceOrder::TokenMajor))
        .constant("FRESH_ALIGNED", fresh.is_some_and(|fresh| aligned(&fresh.k) && aligned(&fresh.v)))
        .constant("PARTIAL", partial)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        threads: 1024,
        threadgroup_bytes: 32 << 10,
        busy_groups: 64,
        warpgroup_products: false,
        clusters: false,
    };
    /// A decode step of one sequence.
    const DECODE: Size = Size {
        tokens: 1,
        sequences: 1,
        kv_heads: 4,
        group: 2,
        head_dim: 256,
        capacity: 1 << 20,
        window: usize::MAX,
        fresh: false,
        splits: 0,
    };

    fn shape(size: Size) -> (&'static str, [usize; 3]) {
        let Shape { kernel, tile_rows, tiles, splits, .. } = Shape::new(size, &LIMITS);
        (kernel, [tile_rows, tiles, splits])
    }

    #[test]
    fn few_rows_split_the_context_until_the_device_is_busy() {
        assert_eq!(shape(DECODE), ("attend_few_256_2", [2, 1, 16]));
        assert_eq!(shape(Size { kv_heads: 64, ..DECODE }), ("attend_few_256_2", [2, 1, 1]));
        assert_eq!(shape(Size { tokens: 4, ..DECODE }), ("attend_few_256_8", [8, 1, 16]));
        assert_eq!(shape(Size { group: 3, head_dim: 64, ..DECODE }), ("attend_few_64_4", [3, 1, 16]));
        // A token of each sequence: a tile each.
        assert_eq!(shape(Size { tokens: 8, sequences: 8, ..DECODE }), ("attend_few_256_2", [2, 8, 2]));
    }

    #[test]
    fn capacity_and_window_bound_the_splits() {
        assert_eq!(shape(Size { capacity: 1000, ..DECODE }).1, [2, 1, 4]);
        assert_eq!(shape(Size { window: 500, ..DECODE }).1, [2, 1, 2]);
        assert_eq!(shape(Size { capacity: 64, ..DECODE }).1, [2, 1, 1]);
        assert_eq!(shape(Size { splits: 7, ..DECODE }).1, [2, 1, 7]);
        assert_eq!(shape(Size { splits: 7, capacity: 100, ..DECODE }).1, [2, 1, 2]);
        assert_eq!(shape(Size { splits: usize::MAX, ..DECODE }).1, [2, 1, MAX_SPLITS]);
    }

    #[test]
    fn many_rows_go_by_tiles() {
        assert_eq!(shape(Size { tokens: 5, ..DECODE }), ("attend_tiles_256", [32, 1, 16]));
        assert_eq!(shape(Size { group: 16, head_dim: 512, ..DECODE }), ("attend_tiles_512", [16, 1, 16]));
        assert_eq!(shape(Size { tokens: 1000, ..DECODE }), ("attend_tiles_256", [32, 63, 1]));
    }
}
