//! The launches of attention: [`route`] selects the kernel and the splits.

mod route;

use route::{AttendKernel, AttendRoute, AttendSize, by_head_dim, select};

use crate::{
    HeadOrder, Planes, Result, Tensor,
    gpu::{Builder, Constant, Launch, Limits, Params, Source, Use, attend, key_bias, params},
    metal::{
        headers::HEADERS,
        planes::{self, codec_code, page_shift},
    },
    ops::attend::{Call, Explanation, NAME, Results},
};

params! {
    pub(crate) struct MetalAttendParams {
        pub tokens: u32,
        pub sequences: u32,
        pub heads: u32,
        pub kv_heads: u32,
        pub group: u32,
        pub capacity: u32,
        pub window: u32,
        pub tile_rows: u32,
        pub splits: u32,
        pub min_keys: u32,
        pub scale: f32,
        pub softcap: f32,
        pub page_width: u32,
        pub page_entries: u32,
    }
}

static FEW_ROWS: Source = Source {
    name: "attend/few_rows.metal",
    text: include_str!("few_rows.metal"),
    headers: HEADERS,
    layouts: &[MetalAttendParams::layout],
};

static TILES: Source = Source {
    name: "attend/tiles.metal",
    text: include_str!("tiles.metal"),
    headers: HEADERS,
    layouts: &[MetalAttendParams::layout],
};

static MERGE: Source = Source {
    name: "attend/merge.metal",
    text: include_str!("merge.metal"),
    headers: HEADERS,
    layouts: &[MetalAttendParams::layout],
};

/// Threads of `attend_merge`.
const MERGE_THREADS: usize = 64;
/// Minimum keys of a split, except the last one; kernels round up to their tiles.
const MIN_KEYS: usize = 64;

/// Kernels by head size.
const MERGE_ENTRIES: [&str; 8] = [
    "attend_merge_64",
    "attend_merge_80",
    "attend_merge_96",
    "attend_merge_112",
    "attend_merge_128",
    "attend_merge_192",
    "attend_merge_256",
    "attend_merge_512",
];

pub(crate) fn explain(call: &Call, limits: &Limits) -> Explanation {
    attend::explain(call, |part| {
        let AttendRoute { entry, reason, .. } = select(AttendSize::of(part), limits);
        Explanation { kernel: entry, reason: reason.into() }
    })
}

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    match attend::parts(call)? {
        Some(parts) => parts.iter().try_for_each(|part| build_part(part, b)),
        None => build_part(call, b),
    }
}

fn build_part(call: &Call, b: &mut Builder) -> Result<()> {
    if call.tokens == 0 {
        return Ok(());
    }
    let mut route = select(AttendSize::of(call), &b.limits);
    if route.kernel == AttendKernel::Tiles && b.refuses(&kernel_of(call, &route)) {
        route = select(AttendSize::of(call).without_tiles(), &b.limits);
    }
    let spec = call.layer.spec();
    let table = call.step.table_of(&call.layer);
    let uint = |arg, value| Launch::uint(NAME, arg, value);
    let params = MetalAttendParams {
        tokens: uint("T", call.tokens)?,
        sequences: uint("S", call.step.sequences())?,
        heads: uint("H", call.heads)?,
        kv_heads: uint("Hk", spec.kv_heads)?,
        group: uint("H", call.heads / spec.kv_heads)?,
        capacity: uint("capacity", capacity(call))?,
        window: u32::try_from(call.window).unwrap_or(u32::MAX),
        tile_rows: route.tile_rows as u32,
        splits: route.splits as u32,
        min_keys: MIN_KEYS as u32,
        scale: call.scale,
        softcap: call.softcap.unwrap_or(1.0),
        page_width: uint("step.page_tables", table.map_or(0, |table| table.shape()[1]))?,
        page_entries: call.layer.pages().map_or(0, |pages| pages.entries),
    };
    let partial = route.splits > 1;
    let rows = call.tokens * call.heads;
    uint("T·H", rows)?;
    let mut launch = kernel_of(call, &route)
        .read(0, &call.q)
        .read(2, &call.step.positions)
        .read(3, &call.step.sequence)
        .read(4, &call.step.lens)
        .read_if(16, table);
    for (index, side) in [(5, &call.layer.k), (8, &call.layer.v)] {
        launch = launch
            .read(index, &side.low)
            .read_if(index + 1, side.high.as_ref())
            .read_if(index + 2, side.norms.as_ref());
    }
    let launch = planes::bind_means(launch, [17, 18], &call.layer, Use::Read);
    let launch = key_bias::bind_tensors(launch, 21, call.layer.key_bias()).params(15, &params);
    if !partial {
        return b.push(bind_results(launch, call));
    }
    let o = b.scratch(route.splits * rows * call.head_dim * size_of::<f32>())?;
    let states = b.scratch(route.splits * rows * 2 * size_of::<f32>())?;
    b.push(launch.scratch(13, &o, Use::Write).scratch(14, &states, Use::Write))?;
    let merge = specialise(Launch::new(NAME, &MERGE, MERGE_ENTRIES[by_head_dim(call.head_dim)]), call, partial);
    b.push(
        bind_results(merge, call)
            .scratch(13, &o, Use::Read)
            .scratch(14, &states, Use::Read)
            .params(15, &params)
            .grid([rows, 1, 1], [MERGE_THREADS, 1, 1]),
    )
}

/// Binds the results, and the earlier results that are merged, for the kernel that finishes rows.
fn bind_results(launch: Launch, call: &Call) -> Launch {
    let (earlier_out, earlier_ends) = call.earlier.as_ref().map(|Results { out, ends }| (out, ends)).unzip();
    launch
        .write(1, &call.out)
        .read_if(11, call.sinks.as_ref())
        .read_if(12, earlier_out)
        .read_if(19, earlier_ends)
        .write_if(20, call.ends.as_ref())
}

/// The launch of a route's kernel, with constants and grid, without buffers.
fn kernel_of(call: &Call, route: &AttendRoute) -> Launch {
    let source = match route.kernel {
        AttendKernel::FewRows => &FEW_ROWS,
        AttendKernel::Tiles => &TILES,
    };
    specialise(Launch::new(NAME, source, route.entry), call, route.splits > 1)
        .threadgroup_memory(route.threadgroup_bytes)
        .grid([route.tiles, call.layer.spec().kv_heads, route.splits], [route.threads, 1, 1])
}

/// The maximum positions of a sequence in the cache: with pages, the positions for which the page table has entries.
fn capacity(call: &Call) -> usize {
    let of_table = |table: &Tensor| table.shape()[1] << page_shift(&call.layer);
    call.step.table_of(&call.layer).map_or(usize::MAX, of_table).min(call.layer.spec().capacity)
}

/// Whether a tensor is aligned for loads of four elements.
fn aligned(tensor: &Tensor) -> bool {
    tensor.byte_offset().is_multiple_of(4 * tensor.dtype().size())
}

/// Sets the function constants.
fn specialise(launch: Launch, call: &Call, partial: bool) -> Launch {
    let spec = call.layer.spec();
    let side = |side: &Planes| (Constant::UInt(codec_code(side.codec())), aligned(&side.low));
    let ((k_codec, k_aligned), (v_codec, v_aligned)) = (side(&call.layer.k), side(&call.layer.v));
    launch
        .constant("Q_DTYPE", call.q.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("K_CODEC", k_codec)
        .constant("V_CODEC", v_codec)
        .constant("K_ALIGNED", k_aligned)
        .constant("V_ALIGNED", v_aligned)
        .constant("Q_ALIGNED", aligned(&call.q))
        .constant("RING", spec.ring)
        .constant("TOKEN_MAJOR", spec.order == HeadOrder::TokenMajor)
        .constant("SOFTCAP", call.softcap.is_some())
        .constant("Q_ROTATED", call.q_rotated)
        .constant("PARTIAL", partial)
        .constant("SINKS", call.sinks.is_some())
        .constant("SPAN", call.span.code())
        .constant("EARLIER", call.earlier.is_some())
        .constant("ENDS", call.ends.is_some())
        .constant("PAGE_SHIFT", page_shift(&call.layer))
        .constant("KEY_BIAS", call.layer.key_bias().is_some())
}
