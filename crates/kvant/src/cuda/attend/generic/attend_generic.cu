// attend_generic: softmax(scale * q K^T [softcap] + mask) V over a cache layer of any codec:
// decode, verification and prompts.
//
// q [T, H, D] -> out [T, H, D].
//
// A block has parts of work items (work.h): up to 8 NT query rows that share a KV head, over some tiles of TILE keys.
// Each key and value is therefore read once for all heads of the group. Tiles of keys and tiles of values alternate in
// a ring of BUFFERS in shared memory. Asynchronous copies fill the ring some tiles ahead. For each tile:
//
//   scores   each warp has 16 keys: S^T = K q^T on tensor cores, rows are keys, columns are queries;
//   softmax  the rows' maxima over all warps; P = exp2(S - max), stored in shared memory as B operands;
//   values   each warp has a slice of the coordinates: O^T += V^T P^T, over all keys of the tile.
//
// Operands are f16 (for f16 and quantised planes) or bf16 (for bf16 and f32 planes). A float that does not fit into one
// is split into a sum of several: Q_TERMS for queries, P_TERMS for weights, K_PARTS and V_PARTS for stored coordinates.
// All products of these are computed, and summed in float. Over quantised planes P includes the norm of its value,
// relative to the largest so far; o is scaled back at the end. Scores are in units of log 2.
//
// Over quantised keys the queries are rotated when they are loaded; over quantised values the output is rotated back
// once.
//
// Over pages (work.h) a row's page is looked up when the row is copied. A key that no page holds is zeros, and masked.
// Around page means (generic/means.h) the scores of a page's keys get the product of the query and the mean of keys,
// one for each page; o gets the mean of values times the sum of the weights, once for each page of a tile. If stored
// keys do not include their bias, scores get the product of bias and query (generic/key_bias.h).
//
// Positions, sequences and lengths are read before the previous kernel has ended (device/dependent_launch.h). If the
// call merges that kernel's results, everything except these results is read before.
#include "attend/division.h"
#include "attend/generic/means.h"
#include "attend/generic/queries.h"
#include "attend/generic/tiles.h"
#include "attend/generic/values.h"
#include "device/dependent_launch.h"

// The thread among the block's warps, and the row g and pair of columns t of its lane in products.
struct WarpLane {
    uint warp, g, t;

    WarpLane() {
        const uint lane = threadIdx.x % 32;
        warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    }
};

// The largest score of each column of a lane's products, and the largest norm of a value.
struct Largest {
    float scores[NT][2];
    float norm;
};

// Computes the scores of a warp's keys of a tile, and the largest of this lane.
inline void score_tile(const AttendParams &p, const Buffers &b, const Shared &shared, const Segment &segment, Range all,
                       uint tile, const WarpLane &at, float (&s)[WARP_GROUPS][NT][4], Largest &largest) {
    const uchar *buffer = shared.buffer(2 * tile);
    const uint first = segment.keys.first + tile * TILE;
    const bool whole = first >= all.first && first < all.end && all.end - first >= TILE;
    largest.norm = 0;
#pragma unroll
    for (uint n = 0; n < NT; n++) {
        largest.scores[n][0] = largest.scores[n][1] = nothing();
    }
#pragma unroll
    for (uint j = 0; j < WARP_GROUPS; j++) {
        const uint group = at.warp + j * WARPS;
        if (group >= KEY_GROUPS) {
            break;
        }
        uint position[2];
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            position[i] = segment.position(b, first, group * 16 + at.g + 8 * i);
        }
        const bool held = PAGE_SHIFT == 0 || (position[0] != NONE && position[1] != NONE);
        scores(shared, buffer, group, s[j]);
        if constexpr (K_CENTRED) {
            add_products(shared, first + group * 16, s[j]);
        }
        // The table of turns ends at the last visible position.
        if (KEY_BIAS && first + group * 16 < segment.keys.end) {
            add_bias(b, shared, first + group * 16, s[j]);
        }
        shape_scores(p, shared, position[0], position[1], whole && held, s[j]);
        if (V::QUANTISED) {
            const bool seen[2] = {position[0] != NONE && position[0] >= segment.seen_first,
                                  position[1] != NONE && position[1] >= segment.seen_first};
            largest.norm = fmaxf(largest.norm, largest_norm(buffer, group, seen));
            if (V_CENTRED) {
                largest.norm = fmaxf(largest.norm, norm_of_mean(shared, first + group * 16));
            }
        }
#pragma unroll
        for (uint n = 0; n < NT; n++) {
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                largest.scores[n][c % 2] = fmaxf(largest.scores[n][c % 2], s[j][n][c]);
            }
        }
    }
}

// Stores the largest numbers of each warp in shared memory, for all warps.
inline void share_largest(const Shared &shared, const WarpLane &at, Largest &largest) {
    float *maxima = shared.maxima();
#pragma unroll
    for (uint step = 4; step < 32; step *= 2) {
#pragma unroll
        for (uint n = 0; n < NT; n++) {
            float(&two)[2] = largest.scores[n];
            two[0] = fmaxf(two[0], __shfl_xor_sync(0xFFFFFFFF, two[0], step));
            two[1] = fmaxf(two[1], __shfl_xor_sync(0xFFFFFFFF, two[1], step));
        }
        if (V::QUANTISED) {
            largest.norm = fmaxf(largest.norm, __shfl_xor_sync(0xFFFFFFFF, largest.norm, step));
        }
    }
    if (at.g == 0) {
#pragma unroll
        for (uint n = 0; n < NT; n++) {
            *reinterpret_cast<float2 *>(maxima + at.warp * (ROWS + 4) + n * 8 + 2 * at.t) =
                make_float2(largest.scores[n][0], largest.scores[n][1]);
        }
        if (at.t == 0) {
            maxima[at.warp * (ROWS + 4) + ROWS] = largest.norm;
        }
    }
    __syncthreads();
}

// Raises the maxima of the rows to the maxima over all warps, and rescales the sums.
inline void raise_maxima(const Shared &shared, const WarpLane &at, float norm, Accumulators &acc) {
    const float *maxima = shared.maxima();
    float decay = 1;
    if (V::QUANTISED) {
#pragma unroll
        for (uint w = 0; w < WARPS; w++) {
            norm = fmaxf(norm, maxima[w * (ROWS + 4) + ROWS]);
        }
        const float grown = fmaxf(acc.norm, power_above(norm));
        decay = acc.norm / grown;
        acc.norm = grown;
    }
#pragma unroll
    for (uint n = 0; n < NT; n++) {
        float2 m = make_float2(acc.m[n][0], acc.m[n][1]);
#pragma unroll
        for (uint w = 0; w < WARPS; w++) {
            const float2 of_warp = *reinterpret_cast<const float2 *>(maxima + w * (ROWS + 4) + n * 8 + 2 * at.t);
            m = make_float2(fmaxf(m.x, of_warp.x), fmaxf(m.y, of_warp.y));
        }
        const float f[2] = {factor_of(acc.m[n][0], m.x), factor_of(acc.m[n][1], m.y)};
        acc.m[n][0] = m.x;
        acc.m[n][1] = m.y;
        acc.l[n][0] *= f[0];
        acc.l[n][1] *= f[1];
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                acc.o[i][n][c] *= f[c % 2] * decay;
            }
        }
    }
}

// The scores of a tile, the new maxima, and the weights.
inline void attend_to(const AttendParams &p, const Buffers &b, const Shared &shared, const Segment &segment, Range all,
                      uint tile, Accumulators &acc) {
    const WarpLane at;
    const uchar *buffer = shared.buffer(2 * tile);
    float s[WARP_GROUPS][NT][4];
    Largest largest;
    score_tile(p, b, shared, segment, all, tile, at, s, largest);
    share_largest(shared, at, largest);
    raise_maxima(shared, at, largest.norm, acc);
#pragma unroll
    for (uint j = 0; j < WARP_GROUPS; j++) {
        const uint group = at.warp + j * WARPS;
        if (group < KEY_GROUPS) {
            weights(shared, buffer, group, s[j], acc);
        }
    }
}

// Computes the tiles of a segment. `all` are the positions that every row sees. `prepare` runs while the first tiles
// are copied.
template <typename Prepare>
inline void go_through(const AttendParams &p, const Buffers &b, const Shared &shared, const Segment &segment, Range all,
                       Accumulators &acc, Prepare prepare) {
    const uint tiles = tiles_of(segment.keys);
    constexpr int AHEAD = BUFFERS / 2;
    // With two buffers, one is for keys and one for values: values arrive while scores are computed, the next keys
    // arrive while values are added.
    constexpr bool TWO_BUFFERS = BUFFERS == 2;
    static_assert(TWO_BUFFERS || BUFFERS == 4, "attend: two buffers or four");
    // All threads have finished reading the buffers.
    __syncthreads();
#pragma unroll 1
    for (int tile = -AHEAD; tile < int(tiles); tile++) {
        if (TWO_BUFFERS) {
            // This tile's keys have arrived, and no thread reads the previous tile's values.
            copies_wait<0>();
            __syncthreads();
            copy_values(p, b, shared, segment, tiles, tile);
        }
        if (tile >= 0) {
            const uint key = segment.keys.first + tile * TILE;
            if (HAS_MEANS && tile > 0 && lot_of(key) != lot_of(key - TILE)) {
                multiply_means(b, shared, segment, lot_of(key));
                __syncthreads();
            }
            attend_to(p, b, shared, segment, all, tile, acc);
        }
        if (!TWO_BUFFERS) {
            // No thread reads this tile's keys and the previous tile's values: their buffers are free.
            copy_values(p, b, shared, segment, tiles, tile + AHEAD - 1);
        }
        if (tile >= 0) {
            // This tile's values and all weights have arrived; with four buffers, the next tile's keys as well.
            copies_wait<TWO_BUFFERS ? 0 : BUFFERS - 3>();
            __syncthreads();
        }
        copy_keys(p, b, shared, segment, tiles, tile + AHEAD);
        if (tile == -1) {
            prepare();
            if (HAS_MEANS) {
                // The queries have arrived.
                __syncthreads();
                multiply_means(b, shared, segment, lot_of(segment.keys.first));
            }
            copies_wait<BUFFERS - 2>();
            __syncthreads();
        }
        if (tile >= 0) {
            add_values(b, shared, shared.buffer(2 * tile + 1), segment, segment.keys.first + tile * TILE, acc);
            if constexpr (V_CENTRED) {
                add_means(shared, shared.buffer(2 * tile + 1), acc);
            }
        }
    }
}

// The part of a segment's tiles that lies within `tiles`, where `before` tiles come before the segment.
inline Range part_of(Range keys, uint before, Range tiles) {
    const uint all = tiles_of(keys);
    const uint from = min(max(tiles.first, before) - before, all);
    const uint to = min(max(tiles.end, before) - before, all);
    return {keys.first + min(from * TILE, keys.len()), keys.first + min(to * TILE, keys.len())};
}

// Loads the tokens of an item's rows.
inline void load_rows(const AttendParams &p, const Buffers &b, const Shared &shared, Range item) {
    Row *rows = shared.rows();
    // The previous part no longer uses shared memory.
    __syncthreads();
    for (uint r = threadIdx.x; r < ROWS; r += THREADS) {
        Token token = {0, NONE, 0};
        if (r < item.len()) {
            token = p.tokens == 1 ? b.only
                                  : load_token(p, b.positions, b.sequence, b.lens, (item.first + r) / p.group);
        }
        rows[r].token = token;
    }
    __syncthreads();
}

inline void clear(Accumulators &acc) {
    acc.norm = 0;
#pragma unroll
    for (uint n = 0; n < NT; n++) {
        acc.m[n][0] = acc.m[n][1] = nothing();
        acc.l[n][0] = acc.l[n][1] = 0;
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                acc.o[i][n][c] = 0;
            }
        }
    }
}

// Stores m, l and o of all rows in shared memory; l is summed over all lanes and warps.
inline void store_state(const Shared &shared, const WarpLane &at, const Accumulators &acc) {
    Row *rows = shared.rows();
    float *sums = shared.maxima();
#pragma unroll
    for (uint n = 0; n < NT; n++) {
#pragma unroll
        for (uint c = 0; c < 2; c++) {
            const float l = column_sum(acc.l[n][c]);
            if (at.g == 0) {
                sums[at.warp * (ROWS + 4) + n * 8 + 2 * at.t + c] = l;
                if (at.warp == 0) {
                    rows[n * 8 + 2 * at.t + c].m = acc.m[n][c];
                }
            }
        }
    }
    const float unscale = (V::QUANTISED ? acc.norm : 1.0f) * (1 / WEIGHT_SCALE);
    float *output = shared.output();
#pragma unroll
    for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
        for (uint n = 0; n < NT; n++) {
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                const uint coord = at.warp * SLICE + Values::coord(2 * i + c / 2, at.g);
                output[(n * 8 + 2 * at.t + c % 2) * HEAD_DIM + coord] = acc.o[i][n][c] * unscale;
            }
        }
    }
    __syncthreads();
    for (uint r = threadIdx.x; r < ROWS; r += THREADS) {
        float l = 0;
#pragma unroll
        for (uint w = 0; w < WARPS; w++) {
            l += sums[w * (ROWS + 4) + r];
        }
        rows[r].l = l;
    }
    __syncthreads();
}

// One part of a work item, from the queries to the output or the state.
inline void work_on(const AttendParams &p, const Buffers &b, const Shared &shared, const ItemPart &part,
                    bool &tables_filled) {
    const WarpLane at;
    const Range item = rows_of(p, part.item);
    Row *rows = shared.rows();
    load_rows(p, b, shared, item);
    Accumulators acc;
    clear(acc);
    bool queries_loaded = false;
    const auto prepare = [&] {
        if (!tables_filled) {
            tables_filled = true;
            K::fill_table(shared.k_table(), threadIdx.x, THREADS);
            if (!ONE_TABLE) {
                V::fill_table(shared.v_table(), threadIdx.x, THREADS);
            }
        }
        if (!queries_loaded) {
            queries_loaded = true;
            load_queries(p, b, shared, item, part.head);
        }
    };
    // Loops over sequences, by the first row of each.
    uint before = 0;
#pragma unroll 1
    for (uint lead = 0; lead < item.len(); lead++) {
        const uint sequence = rows[lead].token.sequence;
        bool leads = sequence != NONE && (p.tokens > 1 || lead == 0);
        for (uint r = 0; p.tokens > 1 && leads && r < lead; r++) {
            leads = rows[r].token.sequence != sequence;
        }
        if (!leads) {
            continue;
        }
        Range any = {0, 0}, all = {0, NONE};
        if (p.tokens == 1) {
            any = all = visible(p, b.only);
        }
        for (uint r = 0; p.tokens > 1 && r < item.len(); r++) {
            const Token token = rows[r].token;
            const Range seen = token.sequence == sequence ? visible(p, token) : Range{0, 0};
            any = join(any, seen);
            all = {max(all.first, seen.first), min(all.end, seen.end)};
        }
        __syncthreads();
        for (uint r = threadIdx.x; r < ROWS; r += THREADS) {
            rows[r].seen = rows[r].token.sequence == sequence ? visible(p, rows[r].token) : Range{0, 0};
        }
        const uint mean = part.head / SHARES * MEAN_BYTES;
        const Pages pages = pages_of(p, b.table, sequence, gap_of(rows[lead].token));
        Segment segment = {any, sequence, 0, pages, mean, any.first};
        any = in_tiles(any);
        segment.keys = part_of(any, before, part.tiles);
        before += tiles_of(any);
        segment.first_row = sequence * p.row_sequence + rows_of_head(p, part.head);
        if (segment.keys.first < segment.keys.end) {
            go_through(p, b, shared, segment, all, acc, prepare);
        }
    }
    copies_wait<0>();
    __syncthreads();
    store_state(shared, at, acc);
    wait_if_late<EARLIER>();
    if (part.parts > 1 && !merge(p, b.to, shared, part, item.len())) {
        return;
    }
    const auto row_of = [&](uint r) {
        const uint row = item.first + r;
        return ulong(row / p.group) * p.kv_heads * p.group + part.head * p.group + row % p.group;
    };
    finish_rows<V::QUANTISED>(p, b.to, shared, item.len(), row_of, [&](uint r) { return sees_any(p, b.table, rows[r].token); });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    KVANT_KERNEL(const uchar *q, uchar *out, const uchar *k_low, const uchar *k_high, const float *k_norms, const uchar *v_low,
           const uchar *v_high, const float *v_norms, const uint *positions, const uint *sequence, const uint *lens,
           float *partials, uint *counters, const float *sinks, const AttendParams p, const uint *table,
           const uchar *k_means, const uchar *v_means, const float *earlier, const float *earlier_ends, float *new_ends,
           const float *bias_pairs, const uint *bias_places, const float *bias_starts, const float *bias_steps) {
    extern __shared__ __align__(128) uchar memory[];
    const Shared shared = {memory};
    Token only = {0, NONE, 0};
    if (p.tokens == 1) {
        only = load_token(p, positions, sequence, lens, 0);
    }
    const Buffers b = {only,      q,        {k_low, k_high, k_norms, k_means}, {v_low, v_high, v_norms, v_means},
                       positions, sequence, lens,  {partials, counters, RowEnds(sinks, earlier, earlier_ends, new_ends), out}, table,
                       {bias_pairs, bias_places, bias_starts, bias_steps}};
    const uint thread = threadIdx.x;
    bool tables_filled = false;

    const Division division(p);
    const uint items = division.items;
    uint *prefix = shared.prefix();
#pragma unroll 1
    for (uint i = thread; i < items; i += THREADS) {
        prefix[i + 1] = item_tiles(p, b, division.first_item + i);
    }
    if (thread == 0) {
        prefix[0] = 0;
    }
    __syncthreads();
    if (thread == 0) {
#pragma unroll 1
        for (uint i = 1; i < items; i++) {
            prefix[i + 1] += prefix[i];
        }
    }
    __syncthreads();
    take_turn_unless_late<EARLIER>();
    // Prefetches the queries.
    constexpr uint Q_LINE = 128 / size_of(Q_DTYPE);
    if (threadIdx.x * ulong(Q_LINE) < ulong(p.tokens) * p.kv_heads * p.group * HEAD_DIM) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(q + threadIdx.x * 128));
    }
    each_part<false>(p, division, prefix, 0, [&](const ItemPart &part) { work_on(p, b, shared, part, tables_filled); });
}
