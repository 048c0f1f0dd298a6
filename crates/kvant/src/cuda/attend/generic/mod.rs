//! Attention over any codec, dtype and number of tokens, and over the step's own keys.

use crate::{
    Codec, DType, Error, Result,
    codec::{self, BLOCK},
    cuda::{
        attend::{
            AttendParams, HeadShares, MAX_SHARED_ITEMS, MAX_SPLITS, PartialStates, bind_result, is_aligned,
            keys_of_tokens, params, precision, reads_ahead,
        },
        blocks_per_multiprocessor, headers, planes,
    },
    gpu::{Builder, Launch, Limits, Params, Source, Use, key_bias},
    ops::attend::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "attend_generic.cu",
    text: include_str!("attend_generic.cu"),
    headers: headers::ALL,
    layouts: &[AttendParams::layout],
};

/// Possible numbers of tiles of 8 query rows in a block; registers limit them.
const ROW_TILES: [usize; 4] = [1, 2, 4, 8];
/// Buffers, and copies of each table of centroids, from the fastest to the smallest. GPUs of compute capability 8.6,
/// 8.9 and 12.0 have 99 KiB.
const MEMORY_LEVELS: [[usize; 2]; 4] = [[4, 32], [2, 32], [2, 8], [2, 4]];
/// Pages whose means are multiplied by the queries at a time: the rows of a product.
const PAGES_AT_ONCE: usize = 16;

/// Keys or values as operands of products: `Operand` of `operands.h`.
#[derive(Clone, Copy)]
struct GenericOperand {
    codec: Codec,
    head_dim: usize,
    /// 16-bit numbers whose sum is a coordinate.
    parts: usize,
    /// 16-bit numbers whose sum is the other factor, a query or a weight.
    terms: usize,
}

impl GenericOperand {
    /// `factor` is the dtype of the other factor. With `precise`, products have the precision of f32. Otherwise
    /// centroids are rounded to f16 once, and every other factor keeps at least the precision of a 16-bit output.
    fn new(codec: Codec, head_dim: usize, factor: DType, precise: bool) -> GenericOperand {
        let (parts, terms) = match codec {
            Codec::TurboQuant(_) => (1 + usize::from(precise), 1 + usize::from(precise)),
            Codec::Dense(dtype) if dtype == factor && dtype != DType::F32 => (1, 1),
            Codec::Dense(DType::F16) => (1, 2),
            Codec::Dense(DType::F32) => (2 + usize::from(precise), 2 + usize::from(precise)),
            Codec::Dense(_) => (1, 2 + usize::from(precise)),
        };
        GenericOperand { codec, head_dim, parts, terms }
    }

    /// Bytes of a row in the planes `low` and `high`, and of its norms.
    fn row(&self) -> [usize; 3] {
        let dim = self.head_dim;
        match self.codec {
            Codec::Dense(dtype) => [dim * dtype.size(), 0, 0],
            Codec::TurboQuant(tq) => {
                let (low, high) = codec::plane_bytes(tq.bits, dim).expect("the layer's codec has been checked");
                [low, high, tq.norm_dtype().size() * dim.div_ceil(BLOCK)]
            }
        }
    }

    /// Bytes of a row in shared memory, without its norms.
    fn shared_row(&self) -> usize {
        let [low, high, _] = self.row();
        low + 16 + high + high.min(16)
    }

    /// Bytes of one copy of the table of centroids.
    fn table_bytes(&self) -> usize {
        match self.codec {
            Codec::TurboQuant(tq) if tq.bits == 4 && self.parts == 1 => 256 * 4,
            Codec::TurboQuant(tq) => 4 << tq.bits,
            Codec::Dense(_) => 0,
        }
    }
}

/// The constants of the compiled kernel.
struct GenericTiling {
    k: GenericOperand,
    v: GenericOperand,
    row_tiles: usize,
    warps: usize,
    tile: usize,
    buffers: usize,
    lane_copies: usize,
    /// Positions of a page; 1 without pages.
    page_tokens: usize,
    /// Keys are stored without a bias.
    has_bias: bool,
    shared_bytes: usize,
    blocks_per_multiprocessor: usize,
}

impl GenericTiling {
    /// The best tiling for `rows` rows that fits into shared memory.
    fn new(
        k: GenericOperand,
        v: GenericOperand,
        page_tokens: usize,
        has_bias: bool,
        rows: usize,
        limits: &Limits,
    ) -> Option<GenericTiling> {
        let dim = k.head_dim;
        let quantised = k.codec.is_quantised() || v.codec.is_quantised();
        // At each memory level, the largest number of query rows comes first; for each number of rows, warps and keys
        // of a tile from the fastest to the smallest.
        let most = ROW_TILES.into_iter().rev().skip_while(move |&tiles| tiles > 1 && tiles * 4 >= rows);
        let levels = MEMORY_LEVELS.into_iter().flat_map(|level| most.clone().map(move |row_tiles| (level, row_tiles)));
        levels
            .flat_map(|(level, row_tiles)| {
                let shapes: &[[usize; 2]] = match (dim, row_tiles) {
                    // Slices are multiples of 16 coordinates; lanes load powers of two of them.
                    (80, _) => &[[5, 80], [5, 32]],
                    (96, _) => &[[6, 96], [6, 32]],
                    (112, _) => &[[7, 112], [7, 32]],
                    (192, _) => &[[6, 96], [6, 48], [6, 32]],
                    (512, 1) if quantised => &[[16, 128], [8, 64], [4, 64], [4, 32], [4, 16]],
                    (512, 1..=2) => &[[8, 32], [4, 32], [4, 16]],
                    (128.., 4..) => &[[8, 128], [8, 64], [8, 32]],
                    _ => &[[4, 64], [4, 32], [4, 16]],
                };
                shapes.iter().map(move |&shape| (level, row_tiles, shape))
            })
            .find_map(|([buffers, lane_copies], row_tiles, [warps, tile])| {
                let mut tiling = GenericTiling {
                    k,
                    v,
                    row_tiles,
                    warps,
                    tile,
                    buffers,
                    lane_copies,
                    page_tokens,
                    has_bias,
                    shared_bytes: 0,
                    blocks_per_multiprocessor: 1,
                };
                tiling.shared_bytes = tiling.shared();
                tiling.blocks_per_multiprocessor =
                    blocks_per_multiprocessor(tiling.shared_bytes, limits).min(12 / warps).clamp(1, 3);
                (tiling.shared_bytes <= limits.threadgroup_bytes).then_some(tiling)
            })
    }

    fn rows(&self) -> usize {
        8 * self.row_tiles
    }

    /// Bytes of shared memory, computed as in `layout.h`.
    fn shared(&self) -> usize {
        let GenericTiling { k, v, row_tiles, warps, tile, page_tokens, has_bias, .. } = *self;
        let dim = k.head_dim;
        let [k_norms, v_norms] = [k.row()[2], v.row()[2]];
        let means_of_values = v.codec.bytes_per_mean(dim) * (tile / page_tokens).max(1);
        let rows_of_values = tile * v.shared_row() + means_of_values;
        let buffer = (tile * (k.shared_row() + k_norms + v_norms)).max(rows_of_values).next_multiple_of(16);
        let one_table = planes::plain_code(k.codec) == planes::plain_code(v.codec);
        let tables = self.lane_copies * (v.table_bytes() + if one_table { 0 } else { k.table_bytes() });
        let variants = if v.codec.is_quantised() && dim > BLOCK { 2 } else { 1 };
        let products = if k.codec.is_centred() { PAGES_AT_ONCE * self.rows() } else { 0 };
        let masses = if v.codec.is_centred() { PAGES_AT_ONCE + tile / 16 * self.rows() } else { 0 };
        let biased = if has_bias { self.rows() * (dim + 5) } else { 0 };
        let operands = k.terms * (dim / 16) + variants * v.terms * (tile / 16);
        (self.buffers * buffer).max(self.rows() * dim * 4)
            + tables
            + operands * row_tiles * 256
            + warps * (self.rows() + 4) * 4
            + self.rows() * 32
            + (MAX_SHARED_ITEMS + 8) * 4
            + (products + masses + biased) * 4
    }
}

/// Division of the work among blocks.
pub(super) struct AttendGeneric {
    tiling: GenericTiling,
    item_rows: usize,
    items: usize,
    /// 0: the blocks share all tiles evenly.
    splits: usize,
    blocks: usize,
}

impl AttendGeneric {
    /// # Errors
    /// A block has too little shared memory.
    pub(super) fn new(call: &Call, limits: &Limits) -> Result<AttendGeneric> {
        let spec = call.layer.spec();
        let precise = precision(call) == DType::F32;
        let group = call.heads / spec.kv_heads;
        let tokens_of_sequence = call.step.batch().max_new;
        let wanted = tokens_of_sequence.saturating_mul(group).max(1);
        // Weights are f32.
        let k = GenericOperand::new(spec.k, call.head_dim, call.q.dtype(), precise);
        let v = GenericOperand::new(spec.v, call.head_dim, DType::F32, precise);
        // Precise sums take three times the registers.
        let page_tokens = call.layer.pages().map_or(1, |pages| pages.page_tokens);
        let most = if call.head_dim == 512 { 32 } else { 64 } / if precise { 2 } else { 1 };
        let has_bias = call.layer.key_bias().is_some();
        let tiling = GenericTiling::new(k, v, page_tokens, has_bias, wanted.min(most), limits).ok_or_else(|| {
            Error::Unsupported {
                op: NAME,
                device: "cuda",
                reason: format!(
                    "attend_generic needs more than {} bytes of shared memory per block",
                    limits.threadgroup_bytes
                ),
            }
        })?;
        let item_rows = wanted.min(tiling.rows());
        let items = (call.tokens * group).div_ceil(item_rows);
        let pairs = items * spec.kv_heads;
        // The merge limits the parts of a work item.
        let busy = (limits.busy_groups * tiling.blocks_per_multiprocessor).min(MAX_SPLITS);
        let splits = match call.splits {
            0 if items > MAX_SHARED_ITEMS || pairs >= 2 * busy => 1,
            splits => splits.min(MAX_SPLITS),
        };
        // Maximum keys that a work item sees.
        let seen = keys_of_tokens(call, tokens_of_sequence.max(1));
        let blocks = if splits == 0 {
            busy.min(pairs.saturating_mul(seen.div_ceil(tiling.tile) + 1))
        } else {
            pairs.saturating_mul(splits)
        };
        Ok(AttendGeneric { tiling, item_rows, items, splits, blocks })
    }

    pub(super) fn reason(&self) -> String {
        let AttendGeneric { tiling: GenericTiling { warps, tile, .. }, item_rows, items, splits, blocks } = *self;
        let how = if splits == 0 { "share all tiles evenly" } else { "take one item each" };
        format!(
            "{items} work items of up to {item_rows} query rows per KV head; {blocks} blocks of {warps} warps {how}; {tile} keys \
             a tile"
        )
    }

    /// The launch.
    pub(super) fn launch(&self, name: &'static str, call: &Call, b: &Builder) -> Result<Launch> {
        let sides = [&call.layer.k, &call.layer.v];
        let rotate = sides[0].codec().is_quantised() && !call.q_rotated;
        let GenericTiling {
            k,
            v,
            row_tiles,
            warps,
            tile,
            buffers,
            lane_copies,
            page_tokens: _,
            has_bias: _,
            shared_bytes,
            blocks_per_multiprocessor,
        } = self.tiling;
        let params = params(call, HeadShares::whole(call), self.item_rows, self.items, self.splits)?;
        let constant = |value: usize| value as u32;
        let launch = Launch::new(NAME, &SOURCE, name)
            .constant("HEAD_DIM", constant(call.head_dim))
            .constant("Q_DTYPE", call.q.dtype())
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("K_CODEC", planes::plain_code(k.codec))
            .constant("V_CODEC", planes::plain_code(v.codec))
            .constant("K_CENTRED", k.codec.is_centred())
            .constant("V_CENTRED", v.codec.is_centred())
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
            .constant("BLOCKS_PER_MULTIPROCESSOR", constant(blocks_per_multiprocessor))
            .constant("SOFTCAP", call.softcap.is_some())
            .constant("SHARED_BYTES", constant(shared_bytes))
            .constant("RING", call.layer.spec().ring)
            .constant("ALIGNED", sides.into_iter().all(is_aligned))
            .constant("ROTATE_Q", rotate)
            .read(0, &call.q)
            .read(8, &call.step.positions)
            .read(9, &call.step.sequence)
            .read(10, &call.step.lens)
            .params(14, &params)
            .grid([self.blocks, 1, 1], [32 * warps, 1, 1])
            .threadgroup_memory(shared_bytes)
            // Positions, sequences and lengths.
            .reads_ahead(reads_ahead(call, &[8, 9, 10]))
            .waits_late(call.earlier.is_some());
        let launch = planes::bind(planes::bind(launch, 2, sides[0], Use::Read), 5, sides[1], Use::Read);
        let launch = planes::bind_means(launch, [16, 17], &call.layer, Use::Read);
        let launch = key_bias::bind(launch, 21, call.layer.key_bias());
        let launch = bind_result(launch, call, HeadShares::whole(call));
        if self.splits == 1 {
            return Ok(launch);
        }
        let (heads, rows) = (HeadShares::whole(call), self.item_rows);
        PartialStates { blocks: self.blocks, heads, rows, items: self.items, cluster: 1 }.bind(launch, call, b)
    }
}
