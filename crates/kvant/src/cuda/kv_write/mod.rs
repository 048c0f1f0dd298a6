use super::{THREADS, blocks_per_multiprocessor, codec::threshold_cells as cells, headers};
use crate::{
    Codec, KvLayer, Result, Tensor,
    gpu::{
        Builder, LANES, Launch, Limits, Source,
        kv_write::{LAYOUTS, Vectors, WritePass, WrittenVectors, launch, pass_launch},
    },
    ops::kv_write::{Call, NAME},
};

static SOURCE: Source =
    Source { name: "kv_write.cu", text: include_str!("kv_write.cu"), headers: headers::ALL, layouts: LAYOUTS };

static PAGES: Source =
    Source { name: "write_pages.cu", text: include_str!("write_pages.cu"), headers: headers::ALL, layouts: LAYOUTS };

static OPENED: Source =
    Source { name: "open_pages.cu", text: include_str!("open_pages.cu"), headers: headers::ALL, layouts: LAYOUTS };

/// Threads of a block that encodes.
const ENCODERS: usize = 128;
/// Threads of a block whose warps encode eight rows at a time.
const EIGHTS: usize = 256;
/// The most threads of a block that takes a page, and the most sums of coordinates that its warps have.
const MOST_THREADS: usize = 512;
const MOST_SUMS: usize = 4096;
/// Static shared memory of write_pages.cu for each position of a page, about.
const WINDOW_BYTES: usize = 32;
/// Windows of tokens that blocks of open_pages.cu look at side by side.
const WINDOWS_AT_ONCE: usize = 8;
/// Copies of the lookup tables, as many as there is room for: one for each lane, or fewer of the long tables of 8 bits,
/// which take longer to fill.
const COPIES: [usize; 5] = [32, 16, 8, 4, 2];
const COPIES_OF_8: usize = 8;

/// Coordinates of a row that a lane encodes; up to 32 lanes share a row.
fn per_lane(dim: usize) -> usize {
    dim.min(32).max(dim / LANES)
}

/// Coordinates of a row that a lane encodes where few rows have to be done soon.
fn per_lane_of_few(dim: usize) -> usize {
    dim.min(8).max(dim / LANES)
}

fn bits(codec: Codec) -> u32 {
    match codec {
        Codec::Dense(_) => 0,
        Codec::TurboQuant(tq) => tq.bits,
    }
}

/// Whether warps encode eight rows at a time (`codec/encode_tiles.h`): many rows of 16-bit numbers that begin at
/// multiples of 16 bytes.
fn by_eights(vectors: &WrittenVectors, all: usize, busy_groups: usize) -> bool {
    let (spec, layer) = (vectors.layer.spec(), vectors.layer);
    let aligned16 = |t: &Tensor| t.byte_offset().is_multiple_of(16);
    let encodes = |source: Vectors, codec: Codec, low: &Tensor| {
        let Vectors::Tensor(source) = source else { return false };
        let moves = codec == Codec::Dense(source.dtype());
        source.dtype().size() == 2 && aligned16(source) && aligned16(low) && (codec.is_quantised() || moves)
    };
    let sides = encodes(vectors.k, spec.k, &layer.k.low) && encodes(vectors.v, spec.v, &layer.v.low);
    let quantised = spec.k.is_quantised() || spec.v.is_quantised();
    // Enough for all warps, and few enough that 32-bit row numbers do not overflow.
    let many = (EIGHTS / 8 * busy_groups..1 << 31).contains(&all);
    sides && quantised && many && matches!(spec.head_dim, 128 | 256 | 512)
}

/// Copies of the lookup tables, of which `at_once` blocks of a multiprocessor have `bytes` of shared memory in all.
fn table_copies(layer: &KvLayer, at_once: usize, bytes: impl Fn(usize) -> usize, limits: &Limits) -> usize {
    let most = if bits(layer.spec().k).max(bits(layer.spec().v)) == 8 { COPIES_OF_8 } else { COPIES[0] };
    let fits = |&copies: &usize| copies <= most && blocks_per_multiprocessor(bytes(copies), limits) >= at_once;
    COPIES.into_iter().find(fits).unwrap_or(1)
}

/// Bytes of the tables of either side, of which a block has one.
fn table_bytes(layer: &KvLayer, copies: usize) -> usize {
    let of = |codec| cells::table_bytes(bits(codec), copies);
    of(layer.spec().k).max(of(layer.spec().v))
}

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    push(&WrittenVectors::of(call), b)
}

/// The launches that write the vectors of a step.
pub(super) fn push(vectors: &WrittenVectors, b: &mut Builder) -> Result<()> {
    let page_tokens = vectors.layer.pages().map_or(1, |pages| pages.page_tokens);
    let windows = vectors.tokens.div_ceil(page_tokens);
    // A mark for each token, and for each window of tokens.
    let Some([first, second]) = WritePass::around_means(vectors, vectors.tokens + windows, b)? else {
        return push_write(vectors, b);
    };
    push_pages(vectors, &first, page_tokens, b)?;
    let spec = vectors.layer.spec();
    b.push(
        pass_launch(vectors, &second, &OPENED, "open_pages")?
            .constant("HEAD_DIM", spec.head_dim as u32)
            .constant("PER", per_lane_of_few(spec.head_dim) as u32)
            .constant("TABLE_COPIES", 1)
            .constant("THREADS", THREADS as u32)
            .grid([windows.min(WINDOWS_AT_ONCE), spec.kv_heads, 2], [THREADS, 1, 1]),
    )
}

/// The launch of write_pages.cu.
fn push_pages(vectors: &WrittenVectors, pass: &WritePass, page_tokens: usize, b: &mut Builder) -> Result<()> {
    let (spec, layer) = (vectors.layer.spec(), vectors.layer);
    let dim = spec.head_dim;
    let all = Launch::uint(NAME, "T", vectors.tokens.saturating_mul(spec.kv_heads))? as usize;
    let tiles = by_eights(vectors, all, b.limits.busy_groups);
    let (per, threads) = if tiles {
        (per_lane_of_few(dim), EIGHTS.min(page_tokens * 4))
    } else {
        let per = per_lane(dim);
        // Threads for all rows of a page, and room for their sums.
        let most = (LANES * MOST_SUMS / dim).clamp(LANES, MOST_THREADS);
        (per, (page_tokens * (dim / per)).clamp(LANES, most))
    };
    let warps = threads / LANES;
    // PageSums of page_sums.h: two sums and counts of each warp, and a mean.
    let sums = (warps * (3 * dim + 2) * size_of::<f32>()).next_multiple_of(16);
    let signs = if tiles { 2 * dim } else { 0 };
    let shared = |copies| (signs + table_bytes(layer, copies)).next_multiple_of(16) + sums;
    // Registers allow for so many threads; long rows take more of them.
    let at_once = match (tiles, dim) {
        (true, 512) => EIGHTS / threads,
        (false, 1024..) => 1,
        _ => (2 * EIGHTS / threads).max(1),
    };
    let copies = if tiles {
        table_copies(layer, at_once, |copies| shared(copies) + WINDOW_BYTES * page_tokens, &b.limits)
    } else {
        1
    };
    // Half of the blocks for keys, and half for values. A block has heads of one window if there are enough windows.
    let items = vectors.tokens.div_ceil(page_tokens) * spec.kv_heads;
    let each = items.div_ceil((b.limits.busy_groups * at_once).div_ceil(2)).max(1);
    b.push(
        pass_launch(vectors, pass, &PAGES, "write_pages")?
            .constant("TILES", tiles)
            .constant("HEAD_DIM", dim as u32)
            .constant("PER", per as u32)
            .constant("THREADS", threads as u32)
            .constant("MINBLOCKS", at_once as u32)
            .constant("TABLE_COPIES", copies as u32)
            .constant("SHARED_BYTES", shared(copies) as u32)
            .threadgroup_memory(shared(copies))
            .grid([items.div_ceil(each), 2, 1], [threads, 1, 1]),
    )
}

fn push_write(vectors: &WrittenVectors, b: &mut Builder) -> Result<()> {
    let (spec, layer) = (vectors.layer.spec(), vectors.layer);
    let launch = || launch(vectors, &WritePass::Alone, &SOURCE);
    let dim = spec.head_dim;
    let all = Launch::uint(NAME, "T", vectors.tokens.saturating_mul(spec.kv_heads))? as usize;
    if !layer.is_centred() && by_eights(vectors, all, b.limits.busy_groups) {
        // One block per multiprocessor for keys, and one for values. Eight rows of 512 coordinates fill its registers.
        let blocks = all.div_ceil(EIGHTS / 4).min(b.limits.busy_groups);
        let at_once = if dim == 512 { 1 } else { 2 };
        let tables = |copies| 2 * dim + table_bytes(layer, copies);
        let copies = table_copies(layer, at_once, tables, &b.limits);
        return b.push(
            launch()?
                .constant("TILES", true)
                .constant("HEAD_DIM", dim as u32)
                .constant("THREADS", EIGHTS as u32)
                .constant("MINBLOCKS", at_once as u32)
                .constant("TABLE_COPIES", copies as u32)
                .constant("SHARED_BYTES", tables(copies) as u32)
                .threadgroup_memory(tables(copies))
                .grid([blocks, 2, 1], [EIGHTS, 1, 1]),
        );
    }
    if spec.k.is_quantised() || spec.v.is_quantised() {
        // Around page means a warp has one row.
        let (per, row_threads) =
            if layer.is_centred() { (per_lane_of_few(dim), LANES) } else { (per_lane(dim), dim / per_lane(dim)) };
        return b.push(
            launch()?
                .constant("TILES", false)
                .constant("ENCODE", true)
                .constant("TABLE_COPIES", 1)
                .constant("MINBLOCKS", 1)
                .constant("THREADS", ENCODERS as u32)
                .constant("HEAD_DIM", dim as u32)
                .constant("PER", per as u32)
                .threadgroup_memory(0)
                .grid([all.div_ceil(ENCODERS / row_threads), 2, 1], [ENCODERS, 1, 1]),
        );
    }
    let aligned16 = |t: &Tensor| t.byte_offset().is_multiple_of(16) && (dim * t.dtype().size()).is_multiple_of(16);
    // Only sides of a centred layer are written from scratch memory.
    let (Vectors::Tensor(k), Vectors::Tensor(v)) = (vectors.k, vectors.v) else { return Ok(()) };
    let wide = [k, v, &layer.k.low, &layer.v.low].into_iter().all(aligned16);
    // Four elements a thread, or 16 bytes.
    let across = dim.div_ceil(if wide && k.dtype().size() == 2 { 8 } else { 4 }).clamp(1, THREADS);
    let down = (THREADS / across).min(all.max(1));
    b.push(
        launch()?
            .constant("TILES", false)
            .constant("ENCODE", false)
            .constant("MINBLOCKS", 1)
            .constant("THREADS", THREADS as u32)
            .constant("ALIGNED16", wide)
            .constant("ROWS", 1)
            .threadgroup_memory(0)
            .grid([all.div_ceil(down), 2, 1], [across, down, 1]),
    )
}
