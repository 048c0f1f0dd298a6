// attend_quantised: attend (attend.cu) for decode over quantised keys and values, one query token at a time, up to 8 query
// heads of a KV head. q [T, H, D] -> out [T, H, D].
//
// A block takes pieces of items (attend_plan.h); an item is a token, with the heads of one KV head. Within a piece every
// warp goes its own way, without a barrier: it takes every WARPS-th group of 16 keys, with its own maxima and sums, and
// the warps' states are merged at the end. For each group:
//
//   scores   S^T = K q^T on tensor cores: rows are keys, columns are heads. A lane holds coordinates of 2 keys;
//   softmax  in registers; sums are scaled back only when a maximum has grown;
//   values   O^T += V^T P^T: rows are coordinates, columns are heads. A lane holds coordinates of 4 keys.
//
// With 512 coordinates a row, a group of keys belongs to two warps: each takes one block of the coordinates, and they add up
// their scores through shared memory.
//
// Codes come by asynchronous copies into the warp's box in shared memory, and from there into the registers of the lane that
// looks them up (attend_codes.h): the order of coordinates within a product is free, so that a lane's operands are neighbours
// in a row. As soon as a group's keys, or values, are in registers, those of the next are on their way.
//
// Shared memory limits it: a lookup for every two codes of 4 or 5 bits, and for every code of 6 or 8, is most of what that is
// asked for (docs/benchmarks). So queries of heads that do not exist are not read.
//
// Tables are filled before the launch in front of this one has ended (ahead.h).
//
// Operands are f16: centroids, queries (rotated, scaled into range) and weights, which carry the norm of their value relative
// to the largest so far. Products are summed in float. The output is rotated back once.
//
// Where contexts are short and the device has clusters, the eight blocks of one share an item and add up their states through
// one another's shared memory (attend_cluster.h).
#include "ahead.h"
#include "attend_quantised_gather.h"
#include "attend_quantised_way.h"

// Merges the warps' states into the block's.
inline void merge_warps(const AttendParams &p, Work &work, const State &state) {
    const uint thread = threadIdx.x, warp = thread / 32, lane = thread % 32, t = lane % 4;
    float *warps = shared_at<float>(AT_WARPS);
#pragma unroll
    for (uint c = 0; c < 2; c++) {
#pragma unroll
        for (uint step = 4; step < 32; step *= 2) {
            work.l[c] += __shfl_xor_sync(0xFFFFFFFF, work.l[c], step);
        }
        if (lane < 4) {
            warps[warp * WARP_FLOATS + 2 * t + c] = work.m[c];
            warps[warp * WARP_FLOATS + ROWS + 2 * t + c] = work.l[c];
        }
    }
    __syncthreads();
    float m[2] = {LOWEST, LOWEST};
#pragma unroll
    for (uint w = 0; w < WARPS; w++) {
        m[0] = fmaxf(m[0], warps[w * WARP_FLOATS + 2 * t]);
        m[1] = fmaxf(m[1], warps[w * WARP_FLOATS + 2 * t + 1]);
    }
    if (thread < ROWS) {
        float most = LOWEST, l = 0;
#pragma unroll
        for (uint w = 0; w < WARPS; w++) {
            most = fmaxf(most, warps[w * WARP_FLOATS + thread]);
        }
#pragma unroll
        for (uint w = 0; w < WARPS; w += TEAM) {
            l += warps[w * WARP_FLOATS + ROWS + thread] * factor_of(warps[w * WARP_FLOATS + thread], most);
        }
        state.set_end(thread, most == LOWEST ? nothing() : most, l);
    }
    const float unscale = work.norm * (1 / WEIGHT_SCALE / Table<V_CODEC>::SCALE);
    const float factor[2] = {factor_of(work.m[0], m[0]) * unscale, factor_of(work.m[1], m[1]) * unscale};
    float4 *sums = sums_of_warps();
#pragma unroll
    for (uint round = 0; round < PRODUCTS / MERGED; round++) {
        if (round > 0) {
            __syncthreads();
        }
        if (2 * t < p.group) {
#pragma unroll
            for (uint i = 0; i < MERGED; i++) {
                const float(&o)[4] = work.o[round * MERGED + i];
                sums[(warp * MERGED + i) * 32 + lane] =
                    make_float4(o[0] * factor[0], o[1] * factor[1], o[2] * factor[0], o[3] * factor[1]);
            }
        }
        __syncthreads();
#pragma unroll 1
        for (uint at = thread; at < TEAM * MERGED * 32; at += THREADS) {
            if (2 * t >= p.group) {
                continue;
            }
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
            for (uint w = 0; w < WARPS; w += TEAM) {
                const float4 x = sums[w * MERGED * 32 + at];
                sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
            }
            const uint product = round * MERGED + at / 32 % MERGED;
            const uint coord = at / (MERGED * 32) * CHUNK + ValueCodes::coord(lane / 4, product * 2);
            float *o = state.o() + 2 * t * HEAD_DIM + coord;
            o[0] = sum.x;
            o[1] = sum.z;
            o[HEAD_DIM] = sum.y;
            o[HEAD_DIM + 1] = sum.w;
        }
    }
    __syncthreads();
}

// Adds up the states of a cluster's blocks, in their order; of the rows of an item each block gets every CLUSTER-th.
inline void merge_blocks(const State &state, const Merged &merged, uint rows) {
    const uint rank = blockIdx.x % CLUSTER;
#pragma unroll 1
    for (uint at = threadIdx.x; at < rows * ROW_QUADS; at += THREADS) {
        const uint r = at / ROW_QUADS * CLUSTER + rank;
        float2 ends[CLUSTER];
        float4 x[CLUSTER];
        float m = nothing(), l = 0;
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
        for (uint b = 0; b < CLUSTER; b++) {
            ends[b] = load2_in(shared_at<float2>(AT_ENDS) + r, b);
            x[b] = load4_in(reinterpret_cast<const float4 *>(state.o() + r * HEAD_DIM) + at % ROW_QUADS, b);
            m = fmaxf(m, ends[b].x);
        }
#pragma unroll
        for (uint b = 0; b < CLUSTER; b++) {
            const float f = factor_of(ends[b].x, m);
            l += ends[b].y * f;
            o = make_float4(o.x + x[b].x * f, o.y + x[b].y * f, o.z + x[b].z * f, o.w + x[b].w * f);
        }
        reinterpret_cast<float4 *>(merged.o())[at] = o;
        if (at % ROW_QUADS == 0) {
            merged.set_end(at / ROW_QUADS, m, l);
        }
    }
}

// What outlives a piece.
struct Standing {
    // Other blocks of the cluster may still read this one's state.
    bool read_by_others;
    // Of the barriers of teams.
    uint turn;

    void wait_for_others() {
        if (read_by_others) {
            cluster_wait();
        }
        read_by_others = false;
    }
};

// Of all tokens.
struct Places {
    const uint *positions;
    const uint *sequence;
    const uint *lens;
};

// From the block's state to the output, or the partial state. A function of its own, so that it does not share registers with
// the loop over the keys.
__noinline__ void finish(const AttendParams &p, const Partials to, const Places places, const Piece piece) {
    const State state = {};
    const ulong first_row = ulong(piece.item) * p.kv_heads * p.group + piece.head * p.group;
    const auto sees = [&](uint) {
        return sees_any(p, load_token(p, places.positions, places.sequence, places.lens, piece.item));
    };
    if constexpr (CLUSTER > 1) {
        const Merged merged = {};
        const uint rank = blockIdx.x % CLUSTER, rows = (p.group + CLUSTER - 1 - rank) / CLUSTER;
        cluster_arrive();
        cluster_wait();
        merge_blocks(state, merged, rows);
        cluster_arrive();
        if (rows == 0) {
            return;
        }
        __syncthreads();
        if (piece.parts > 1 && !merge(p, to, merged, piece, rows)) {
            return;
        }
        finish_rows<true>(to, merged, rows, [&](uint r) { return first_row + r * CLUSTER + rank; }, sees);
        return;
    }
    if constexpr (GATHER) {
        if (piece.parts > 1) {
            gather(p, to, state, piece, first_row, sees);
            return;
        }
    }
    if (piece.parts > 1 && !merge(p, to, state, piece, p.group)) {
        return;
    }
    finish_rows<true>(to, state, p.group, [&](uint r) { return first_row + r; }, sees);
}

// One piece, from the queries to the output or the partial state.
inline void work_on(const AttendParams &p, const Buffers &b, const Piece &piece, Standing &standing) {
    const uint thread = threadIdx.x, lane = thread % 32;
    const Token token = b.alone ? b.only : load_token(p, b.positions, b.sequence, b.lens, piece.item);
    Range keys = {0, 0};
    if (token.sequence != NONE) {
        const Range seen = visible(p, token);
        keys = {seen.first + min(piece.tiles.first * TILE, seen.len()), seen.first + min(piece.tiles.end * TILE, seen.len())};
        if (CLUSTER > 1) {
            const Line blocks((keys.len() + KEYS - 1) / KEYS, CLUSTER);
            const uint rank = blockIdx.x % CLUSTER;
            keys = {keys.first + min(blocks.first(rank) * KEYS, keys.len()),
                    keys.first + min(blocks.first(rank + 1) * KEYS, keys.len())};
        }
    }
    // The last piece is done with shared memory.
    standing.wait_for_others();
    __syncthreads();
    Way way;
    way.first = way.end = 0;
    if (keys.first < keys.end) {
        const ulong row = token.sequence * p.row_sequence + piece.head * p.row_head;
        const uint part = thread / 32 % TEAM;
        const auto plane = [&](const uchar *of, uint row_bytes, uint bytes) {
            return of + row * row_bytes + part * bytes + lane % (bytes / 16) * 16;
        };
        const Sources from = {plane(b.k.low, KeyCodes::LOW_ROW, KeyCodes::LOW_BYTES),
                              plane(b.k.high, KeyCodes::HIGH_ROW, max(KeyCodes::HIGH_BYTES, 16u)),
                              plane(b.v.low, ValueCodes::LOW_ROW, ValueCodes::LOW_BYTES),
                              plane(b.v.high, ValueCodes::HIGH_ROW, max(ValueCodes::HIGH_BYTES, 16u)),
                              reinterpret_cast<const uchar *>((lane < KEYS ? b.k : b.v).norms + row * BLOCKS + part),
                              p.row_slot};
        way.begin(p, from, keys);
    }
    load_queries(p, b, piece.item, piece.head);
    __syncthreads();

    Work work = {};
    work.m[0] = work.m[1] = LOWEST;
    work.norm = SMALLEST_NORM;
    work.turn = standing.turn;
    way.go(p, work);
    standing.turn = work.turn;
    const State state = {};
    merge_warps(p, work, state);
    finish(p, b.to, {b.positions, b.sequence, b.lens}, piece);
    standing.read_by_others = CLUSTER > 1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTERED
    attend_quantised(const uchar *q, uchar *out, const uchar *k_low, const uchar *k_high, const float *k_norms,
                     const uchar *v_low, const uchar *v_high, const float *v_norms, const uint *positions,
                     const uint *sequence, const uint *lens, float *partials, uint *counters, float *state,
                     const __grid_constant__ AttendParams p) {
    const uint thread = threadIdx.x, block = blockIdx.x / CLUSTER, all_blocks = gridDim.x / CLUSTER;
    // The line of all tiles: items in order, within an item its heads. prefix[i]: tiles of one head before item i. With
    // splits, the line of the block's own item and head.
    const bool shared_evenly = p.splits == 0;
    const uint splits = max(p.splits, 1u);
    const uint pair = block / splits;
    const uint items = shared_evenly ? p.items : 1, heads = shared_evenly ? p.kv_heads : 1;
    const uint first_item = shared_evenly ? 0 : pair / p.kv_heads;
    Token only = {0, NONE, 0};
    if (items == 1) {
        // The length is most likely that of sequence 0: no need to wait for the sequence's number.
        only = {positions[first_item], sequence[first_item], lens[0]};
    }
    // While that comes.
    Table<K_CODEC>::fill(k_table(), thread, THREADS);
    if (!ONE_TABLE) {
        Table<V_CODEC>::fill(v_table(), thread, THREADS);
    }
    if (TEAM > 1 && thread == 0) {
        for (uint team = 0; team < TEAMS; team++) {
            barrier_init(team_barrier(team), 32 * TEAM);
        }
    }
    if (items == 1 && only.sequence > 0) {
        only = load_token(p, positions, sequence, lens, first_item);
    }
    // Until here only that has been read which the launch in front does not write (gpu/launch.rs: `reads_ahead`).
    take_turn();
    const Buffers b = {q,         {k_low, k_high, k_norms}, {v_low, v_high, v_norms}, positions, sequence, lens,
                       {partials, counters, state, out},    items == 1,               only};
    Standing standing = {false, 0};
    // To begin and end a piece takes as long as so many tiles: those of a head are followed by as many that are none.
    const uint ends = items > 1 ? END_TILES : 0;
    uint *prefix = shared_at<uint>(AT_PREFIX) + 7;
    for (uint i = thread; i < items; i += THREADS) {
        const Token token = b.alone ? only : load_token(p, positions, sequence, lens, first_item + i);
        // At least one, so that somebody writes its output.
        prefix[i + 1] = (token.sequence == NONE ? 1 : max(tiles_of(visible(p, token)), 1u)) + ends;
    }
    if (thread == 0) {
        prefix[0] = 0;
    }
    __syncthreads();
    if (items > 1) {
        if (thread == 0) {
#pragma unroll 1
            for (uint i = 1; i < items; i++) {
                prefix[i + 1] += prefix[i];
            }
        }
        __syncthreads();
    }
    const uint tiles = prefix[items] * heads;
    const uint blocks = min(shared_evenly ? all_blocks : splits, tiles);
    const uint own = shared_evenly ? block : block % splits;
    if (own >= blocks) {
        return;
    }
    const Line line(tiles, blocks);
    uint at = line.first(own);
    const uint end = line.first(own + 1);
    uint item = 0;
#pragma unroll 1
    while (at < end) {
        while (prefix[item + 1] * heads <= at) {
            item++;
        }
        const uint length = prefix[item + 1] - prefix[item], of_item = length - ends;
        const uint head = (at - prefix[item] * heads) / length;
        const uint first = prefix[item] * heads + head * length;
        if (at - first >= of_item) {
            at = first + length;
            continue;
        }
        const uint first_block = line.part_of(first), last_block = line.part_of(first + of_item - 1);
        const uint of_head = shared_evenly ? head : pair % p.kv_heads;
        const Piece piece = {first_item + item,
                             of_head,
                             {at - first, min(end - first, of_item)},
                             last_block - first_block + 1,
                             own - first_block,
                             // Of all items and heads before this one, and of all blocks: no two pieces have the same sum.
                             block - own + first_block + (first_item + item) * p.kv_heads + of_head};
        work_on(p, b, piece, standing);
        at = first + length;
    }
    standing.wait_for_others();
}
