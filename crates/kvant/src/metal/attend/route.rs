//! Selects the attention kernel and divides a call among threadgroups, both for running and for explaining it.

use super::{MIN_KEYS, capacity};
use crate::{
    Codec,
    codec::TurboQuant,
    gpu::Limits,
    ops::attend::{Call, HEAD_DIMS, PageSpan},
};

/// Maximum query rows of a threadgroup of `attend_few`.
const FEW_ROWS: usize = 8;
const FEW_THREADS: usize = 128;
/// Minimum keys of a split if the route chooses the number of splits. With fewer keys, the merge costs more than the
/// split saves.
const SPLIT_KEYS: usize = 256;
/// Floats of a codebook in threadgroup memory.
const TABLE: usize = 256;
/// Maximum splits.
const MAX_SPLITS: usize = 256;

/// A kernel of attention. Entry points are named after it, the head size and the rows of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttendKernel {
    /// `few_rows.metal`: decode and verification.
    FewRows,
    /// `tiles.metal`: prompts.
    Tiles,
}

/// The input of the selection, which is known before the step's positions.
#[derive(Clone, Copy)]
pub(super) struct AttendSize {
    tokens: usize,
    /// Maximum tokens of one sequence.
    max_new: usize,
    kv_heads: usize,
    /// Query heads of a KV head.
    group: usize,
    head_dim: usize,
    /// Maximum positions of a sequence in the cache.
    capacity: usize,
    window: usize,
    /// 0 to let the route choose.
    splits: usize,
    /// The codecs of keys and of values.
    codecs: [Codec; 2],
    /// Whether the device rejects the kernel of tiles.
    no_tiles: bool,
}

impl AttendSize {
    pub(super) fn of(call: &Call) -> AttendSize {
        let spec = call.layer.spec();
        let capacity =
            if call.layer.is_paged() { capacity(call).min(call.step.batch().longest) } else { spec.capacity };
        let page_tokens = call.layer.page_tokens();
        // The first and recent pages are few, for any length of the sequence.
        let (capacity, window) = match call.span {
            PageSpan::First => (capacity.min(page_tokens), call.window),
            PageSpan::Recent => (capacity, call.window.min(page_tokens.saturating_mul(2))),
            PageSpan::All | PageSpan::Sealed | PageSpan::Exact => (capacity, call.window),
        };
        AttendSize {
            tokens: call.tokens,
            max_new: call.step.batch().max_new,
            kv_heads: spec.kv_heads,
            group: call.heads / spec.kv_heads,
            head_dim: call.head_dim,
            capacity,
            window,
            splits: call.splits,
            codecs: [call.layer.k.codec(), call.layer.v.codec()],
            no_tiles: false,
        }
    }

    /// The input for a device that rejects the kernel of tiles.
    pub(super) fn without_tiles(self) -> AttendSize {
        AttendSize { no_tiles: true, ..self }
    }
}

/// The kernel, and the division of the call among threadgroups.
pub(super) struct AttendRoute {
    pub kernel: AttendKernel,
    pub entry: &'static str,
    pub threads: usize,
    /// Threadgroup memory in addition to what the kernel declares.
    pub threadgroup_bytes: usize,
    /// Query rows of a tile, and tiles of a KV head.
    pub tile_rows: usize,
    pub tiles: usize,
    pub splits: usize,
    pub reason: String,
}

/// Selects the kernel.
pub(super) fn select(size: AttendSize, limits: &Limits) -> AttendRoute {
    let together = size.max_new.max(1);
    let rows = together * size.group;
    let (kernel, than) = match (rows <= FEW_ROWS, size.no_tiles) {
        (true, _) => (AttendKernel::FewRows, "at most"),
        (_, true) => (AttendKernel::FewRows, "by a device without tiles, more than"),
        _ => (AttendKernel::Tiles, "more than"),
    };
    let head_dim = by_head_dim(size.head_dim);
    let (entry, threads, tile_rows, threadgroup_bytes) = match kernel {
        AttendKernel::FewRows => {
            let rows = rows.min(FEW_ROWS);
            (FEW_ROWS_ENTRIES[head_dim][rows.next_power_of_two().ilog2() as usize], FEW_THREADS, rows, 0)
        }
        AttendKernel::Tiles => {
            let (entry, threads, tile_rows, keys) = TILES_ENTRIES[head_dim];
            (entry, threads, tile_rows, tiles_bytes(size.head_dim, keys, size.codecs))
        }
    };
    let tiles = (size.tokens * size.group).div_ceil(tile_rows);
    // Maximum keys that a token may see: a captured launch serves any length.
    let max_keys = size.window.saturating_add(together).min(size.capacity);
    let groups = tiles * size.kv_heads;
    let (splits, why) = match size.splits {
        0 => {
            let busy = limits.busy_groups;
            let splits = busy.div_ceil(groups.max(1)).min(max_keys.div_ceil(SPLIT_KEYS));
            (splits, format!("{groups} threadgroups per split, {busy} keep the device busy"))
        }
        forced => (forced.min(max_keys.div_ceil(MIN_KEYS)), format!("{forced} splits requested")),
    };
    let reason = format!(
        "{rows} query rows read the same keys, {than} {FEW_ROWS}; {why}; at most {max_keys} keys; tiles of {tile_rows} rows"
    );
    AttendRoute {
        kernel,
        entry,
        threads,
        threadgroup_bytes,
        tile_rows,
        tiles,
        splits: splits.clamp(1, MAX_SPLITS),
        reason,
    }
}

/// Threadgroup memory of `attend_tiles`, in the layout of `tiles.metal`: keys and values of a step, then codebooks of
/// more than 32 centroids. With floats and more than 128 coordinates, keys and values share one buffer: keys first,
/// then values.
fn tiles_bytes(head_dim: usize, keys: usize, codecs: [Codec; 2]) -> usize {
    let table = |codec| usize::from(matches!(codec, Codec::TurboQuant(TurboQuant { bits: 6.., .. })));
    let halves = codecs == [Codec::F16; 2];
    let rows = if halves {
        2 * keys * (head_dim + 8) * size_of::<u16>()
    } else {
        keys * (head_dim + 4) * size_of::<f32>() * if head_dim > 128 { 1 } else { 2 }
    };
    rows + codecs.map(table).iter().sum::<usize>() * TABLE * size_of::<f32>()
}

/// The index of a head size in the tables of entry points.
pub(super) fn by_head_dim(head_dim: usize) -> usize {
    HEAD_DIMS.iter().position(|&dim| dim == head_dim).expect("the call's head size is one of HEAD_DIMS")
}

/// Entry points by head size, then by rows: 1, 2, 4, 8. The less common head sizes have two kernels: for one row, and
/// for up to eight.
const FEW_ROWS_ENTRIES: [[&str; 4]; 8] = [
    ["attend_few_64_1", "attend_few_64_2", "attend_few_64_4", "attend_few_64_8"],
    ["attend_few_80_1", "attend_few_80_8", "attend_few_80_8", "attend_few_80_8"],
    ["attend_few_96_1", "attend_few_96_8", "attend_few_96_8", "attend_few_96_8"],
    ["attend_few_112_1", "attend_few_112_8", "attend_few_112_8", "attend_few_112_8"],
    ["attend_few_128_1", "attend_few_128_2", "attend_few_128_4", "attend_few_128_8"],
    ["attend_few_192_1", "attend_few_192_8", "attend_few_192_8", "attend_few_192_8"],
    ["attend_few_256_1", "attend_few_256_2", "attend_few_256_4", "attend_few_256_8"],
    ["attend_few_512_1", "attend_few_512_2", "attend_few_512_4", "attend_few_512_8"],
];

/// By head size: the entry point, its threads, the query rows of a tile, the keys of a step.
const TILES_ENTRIES: [(&str, usize, usize, usize); 8] = [
    ("attend_tiles_64", 128, 32, 32),
    ("attend_tiles_80", 128, 32, 16),
    ("attend_tiles_96", 128, 32, 16),
    ("attend_tiles_112", 128, 32, 16),
    ("attend_tiles_128", 128, 32, 16),
    ("attend_tiles_192", 256, 32, 16),
    ("attend_tiles_256", 256, 32, 16),
    ("attend_tiles_512", 256, 16, 8),
];

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        threads: 1024,
        threadgroup_bytes: 32 << 10,
        busy_groups: 64,
        warpgroup_products: false,
        library_products: false,
        clusters: false,
    };
    /// A decode step of one sequence.
    const DECODE: AttendSize = AttendSize {
        tokens: 1,
        max_new: 1,
        kv_heads: 4,
        group: 2,
        head_dim: 256,
        capacity: 1 << 20,
        window: usize::MAX,
        splits: 0,
        codecs: [Codec::F16; 2],
        no_tiles: false,
    };

    fn routed(size: AttendSize) -> (&'static str, [usize; 3]) {
        let AttendRoute { kernel, entry, tile_rows, tiles, splits, .. } = select(size, &LIMITS);
        assert_eq!(kernel == AttendKernel::FewRows, entry.starts_with("attend_few_"));
        (entry, [tile_rows, tiles, splits])
    }

    #[test]
    fn few_rows_split_the_context_until_the_device_is_busy() {
        assert_eq!(routed(DECODE), ("attend_few_256_2", [2, 1, 16]));
        assert_eq!(routed(AttendSize { kv_heads: 64, ..DECODE }), ("attend_few_256_2", [2, 1, 1]));
        assert_eq!(routed(AttendSize { tokens: 4, max_new: 4, ..DECODE }), ("attend_few_256_8", [8, 1, 16]));
        assert_eq!(routed(AttendSize { group: 3, head_dim: 64, ..DECODE }), ("attend_few_64_4", [3, 1, 16]));
        assert_eq!(routed(AttendSize { group: 1, head_dim: 96, ..DECODE }), ("attend_few_96_1", [1, 1, 16]));
        assert_eq!(routed(AttendSize { group: 3, head_dim: 96, ..DECODE }), ("attend_few_96_8", [3, 1, 16]));
        // Eight drafts of four tokens: four rows share keys.
        assert_eq!(routed(AttendSize { tokens: 32, max_new: 4, ..DECODE }), ("attend_few_256_8", [8, 8, 2]));
        // One token of each sequence: one tile each.
        assert_eq!(routed(AttendSize { tokens: 8, ..DECODE }), ("attend_few_256_2", [2, 8, 2]));
    }

    #[test]
    fn capacity_and_window_bound_the_splits() {
        assert_eq!(routed(AttendSize { capacity: 1000, ..DECODE }).1, [2, 1, 4]);
        assert_eq!(routed(AttendSize { window: 500, ..DECODE }).1, [2, 1, 2]);
        assert_eq!(routed(AttendSize { capacity: 64, ..DECODE }).1, [2, 1, 1]);
        assert_eq!(routed(AttendSize { splits: 7, ..DECODE }).1, [2, 1, 7]);
        assert_eq!(routed(AttendSize { splits: 7, capacity: 100, ..DECODE }).1, [2, 1, 2]);
        assert_eq!(routed(AttendSize { splits: usize::MAX, ..DECODE }).1, [2, 1, MAX_SPLITS]);
    }

    #[test]
    fn every_head_size_has_entry_points_of_its_own() {
        for head_dim in HEAD_DIMS {
            let i = by_head_dim(head_dim);
            let (_, threads, rows, keys) = TILES_ENTRIES[i];
            let parts = threads / 32 * 8 / rows;
            // The template arguments, as tiles.metal has them.
            let template = format!("attend_tiles<{head_dim}, {rows}, {}, {keys}>", threads / 32);
            assert!(super::super::TILES.text.contains(&template), "no {template}");
            // In addition to the memory that the kernel declares: products of SIMD-groups that share rows, and a word
            // of each.
            let declared = if parts > 1 { threads * keys } else { 8 } + threads / 32 * 4;
            for codecs in [[Codec::F16; 2], [Codec::F16, Codec::F32], [Codec::tq(8); 2]] {
                let bytes = tiles_bytes(head_dim, keys, codecs) + declared;
                assert!(bytes <= LIMITS.threadgroup_bytes, "{head_dim}: {bytes} bytes for {codecs:?}");
            }
            assert_eq!(super::super::MERGE_ENTRIES[i], format!("attend_merge_{head_dim}"));
            assert_eq!(TILES_ENTRIES[i].0, format!("attend_tiles_{head_dim}"));
            for (entry, rows) in FEW_ROWS_ENTRIES[i].iter().zip([1, 2, 4, 8]) {
                let max_rows =
                    entry.strip_prefix(&format!("attend_few_{head_dim}_")).and_then(|rows| rows.parse().ok());
                assert!(max_rows.is_some_and(|max: usize| max >= rows), "{entry} for {rows} rows");
            }
        }
    }

    #[test]
    fn many_rows_use_tiles() {
        assert_eq!(routed(AttendSize { tokens: 5, max_new: 5, ..DECODE }), ("attend_tiles_256", [32, 1, 16]));
        assert_eq!(routed(AttendSize { group: 16, head_dim: 512, ..DECODE }), ("attend_tiles_512", [16, 1, 16]));
        let prompt = AttendSize { tokens: 1000, max_new: 1000, ..DECODE };
        assert_eq!(routed(prompt), ("attend_tiles_256", [32, 63, 1]));
        assert_eq!(routed(prompt.without_tiles()), ("attend_few_256_8", [8, 250, 1]));
    }
}
