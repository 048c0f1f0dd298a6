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
    fn new(call: &Call, limits: &Limits) -> Shape {
        let spec = call.layer.spec();
        let group = call.heads / spec.kv_heads;
        // Sequences are known to the device alone. With no more tokens than sequences, each is most likely another's.
        let together = if call.tokens <= spec.sequences { 1 } else { call.tokens };
        let size = [64, 128, 256, 512].iter().position(|&d| d == call.head_dim).expect("validation checked D");
        let (source, kernel, threads, tile_rows, why) = if together * group <= FEW_ROWS {
            let rows = together * group;
            let kernel = FEW_KERNELS[size][rows.next_power_of_two().ilog2() as usize];
            (&FEW, kernel, FEW_THREADS, rows, format!("{rows} query rows share a KV head's keys, {FEW_ROWS} at most"))
        } else {
            let Tiles { kernel, threads, rows } = TILE_KERNELS[size];
            let all = call.tokens * group;
            (&TILES, kernel, threads, rows, format!("{all} query rows share a KV head's keys, more than {FEW_ROWS}"))
        };
        let tiles = (call.tokens * group).div_ceil(tile_rows);
        // The longest context that the device may turn out to hold.
        let seen = call.window.saturating_add(together).min(spec.capacity);
        let keys = seen + if call.fresh.is_some() { call.tokens } else { 0 };
        let (splits, why_splits) = match call.splits {
            0 => {
                let busy = limits.busy_groups.div_ceil((tiles * spec.kv_heads).max(1));
                let why = format!(
                    "{} threadgroups a split, {} keep the device busy",
                    tiles * spec.kv_heads,
                    limits.busy_groups
                );
                (busy.min(keys.div_ceil(SPLIT_KEYS)), why)
            }
            forced => (forced.min(keys.div_ceil(LEAST_KEYS)), format!("{forced} splits were asked for")),
        };
        let reason = format!("{why}; {why_splits}; a context of at most {keys} keys");
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
    let Shape { kernel, splits, reason, .. } = Shape::new(call, limits);
    Plan { kernel, reason: reason.into(), splits }
}

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    if call.tokens == 0 {
        return Ok(());
    }
    let shape = Shape::new(call, &b.limits);
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
    let size = call.head_dim.ilog2() as usize - 6;
    b.push(
        specialise(Launch::new(NAME, &FEW, MERGE_KERNELS[size]), call, partial)
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
