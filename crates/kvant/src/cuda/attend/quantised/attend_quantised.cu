// attend_quantised: attention (attend_generic.cu) for decode over quantised keys and values: one query token at a time,
// up to 8 query heads of a KV head.
//
// q [T, H, D] -> out [T, H, D].
//
// A block has parts of work items (work.h); an item is a token, with the heads of one KV head. Within a part the warps
// work independently, without a barrier: each takes every WARPS-th group of 16 keys and has its own softmax state
// (state.h). The states are merged at the end. For each group:
//
//   scores   S^T = K q^T on tensor cores: rows are keys, columns are heads. A lane holds coordinates of 2 keys;
//   softmax  in registers; sums are rescaled only when a maximum has grown;
//   values   O^T += V^T P^T: rows are coordinates, columns are heads. A lane holds coordinates of 4 keys.
//
// At 512 coordinates a row, a group of keys belongs to two warps: each has one block of the coordinates, and they add
// up their scores through shared memory.
//
// Asynchronous copies bring codes into the warp's buffer in shared memory; from there they go to registers of the lane
// that looks them up (codes.h). The order of coordinates within a product is free, so a lane's operands are neighbours
// in a row. When the keys or values of a group are in registers, the copies of the next group begin.
//
// The bandwidth of shared memory is the limit (docs/notes/cuda-decode.md). Most of the traffic is lookups: one for
// every two codes of 4 or 5 bits, one for every code of 6 or 8 bits. Therefore queries of missing heads are not read.
//
// Operands are f16: centroids, queries (rotated, scaled into range) and weights, which include the norm of their value
// relative to the largest so far. Products are summed in float. The output is rotated back once.
//
// With many items, a block has one item, and a multiprocessor runs two blocks with compact tables if these fit
// (BLOCKS_PER_MULTIPROCESSOR): one block reads while the other begins or ends.
//
// With short contexts, on a device with clusters, the eight blocks of a cluster share an item and merge their states
// through distributed shared memory (device/cluster.h).
//
// Over pages (work.h) a group is in one page, which is looked up while the previous group is processed. A key that no
// page holds is zeros, and masked. Around page means (means.h) the groups of a warp follow one another; the scores of a
// page's keys get the product of query and mean, and o gets the mean of values times the sum of the weights.
//
// Tables are filled, and positions, sequences and lengths are read, before the previous kernel has ended
// (device/dependent_launch.h).
#include "attend/division.h"
#include "attend/quantised/gather.h"
#include "attend/quantised/key_loop.h"
#include "device/dependent_launch.h"

// Merges the states of the warps into the block's.
inline void merge_warps(const AttendParams &p, Accumulators &acc, const State &state) {
    const uint thread = threadIdx.x, warp = thread / 32, lane = thread % 32, t = lane % 4;
    float *warps = shared_at<float>(AT_WARPS);
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        acc.l[c] = column_sum(acc.l[c]);
        if (lane < 4) {
            warps[warp * WARP_FLOATS + 2 * t + c] = acc.m[c];
            warps[warp * WARP_FLOATS + ROWS + 2 * t + c] = acc.l[c];
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
    const float unscale = acc.norm * (1 / WEIGHT_SCALE / Table<V_CODEC>::SCALE);
    const float factor[2] = {factor_of(acc.m[0], m[0]) * unscale, factor_of(acc.m[1], m[1]) * unscale};
    float4 *sums = sums_of_warps();
#pragma unroll
    for (uint round = 0; round < PRODUCTS / MERGED; round++) {
        if (round > 0) {
            __syncthreads();
        }
        if (2 * t < p.group) {
#pragma unroll
            for (uint i = 0; i < MERGED; i++) {
                const float(&o)[4] = acc.o[round * MERGED + i];
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

// Merges the states of a cluster's blocks, in their order. Each block merges every CLUSTER-th row of the item.
inline void merge_blocks(const State &state, const Merged &merged, uint rows) {
    const uint rank = blockIdx.x % CLUSTER;
#pragma unroll 1
    for (uint at = threadIdx.x; at < rows * ROW_QUADS; at += THREADS) {
        const uint r = at / ROW_QUADS * CLUSTER + rank;
        float2 ends[CLUSTER];
        float4 x[CLUSTER];
        SoftmaxState sum;
#pragma unroll
        for (uint b = 0; b < CLUSTER; b++) {
            ends[b] = load2_in(shared_at<float2>(AT_ENDS) + r, b);
            x[b] = load4_in(reinterpret_cast<const float4 *>(state.o() + r * HEAD_DIM) + at % ROW_QUADS, b);
            sum.merge_max(ends[b].x);
        }
#pragma unroll
        for (uint b = 0; b < CLUSTER; b++) {
            sum.merge(ends[b], x[b]);
        }
        reinterpret_cast<float4 *>(merged.o())[at] = sum.o;
        if (at % ROW_QUADS == 0) {
            merged.set_end(at / ROW_QUADS, sum.m, sum.l);
        }
    }
}

// State of a block across parts.
struct BlockState {
    // Other blocks of the cluster may still read this block's state.
    bool read_by_others;
    // Phases of the teams' barriers so far.
    uint turn;

    void wait_for_others() {
        if (read_by_others) {
            cluster_wait();
        }
        read_by_others = false;
    }
};

// Positions and sequences of all tokens, lengths and pages of all sequences.
struct TokenPlaces {
    const uint *positions;
    const uint *sequence;
    const uint *lens;
#if PAGE_SHIFT > 0
    const uint *table;
#else
    static constexpr const uint *table = nullptr;
#endif
};

// From the block's state to the output, or to a state in device memory. Not inlined, so that it does not share
// registers with the loop over the keys.
__noinline__ void finish(const AttendParams &p, const Partials to, const TokenPlaces places, const ItemPart part) {
    wait_if_late<EARLIER>();
    const State state = {};
    const QueryRows of_share(p, part.item, part.head);
    const auto sees = [&](uint) {
        return sees_any(p, places.table, load_token(p, places.positions, places.sequence, places.lens, part.item));
    };
    if constexpr (CLUSTER > 1) {
        const Merged merged = {};
        const uint rank = blockIdx.x % CLUSTER, rows = (of_share.count + CLUSTER - 1 - rank) / CLUSTER;
        cluster_arrive();
        cluster_wait();
        merge_blocks(state, merged, rows);
        cluster_arrive();
        if (rows == 0) {
            return;
        }
        __syncthreads();
        if (part.parts > 1 && !merge(p, to, merged, part, rows)) {
            return;
        }
        finish_rows<true>(p, to, merged, rows, [&](uint r) { return of_share.first + r * CLUSTER + rank; }, sees);
        return;
    }
    if constexpr (GATHER) {
        if (part.parts > 1) {
            gather(p, to, state, part, of_share, sees);
            return;
        }
    }
    if (part.parts > 1 && !merge(p, to, state, part, of_share.count)) {
        return;
    }
    finish_rows<true>(p, to, state, of_share.count, [&](uint r) { return of_share.first + r; }, sees);
}

// The address of a row's norms: the norm of block `part`, or, if norms are halves, the norms of all blocks.
inline const uchar *norms_of_row(const Planes &planes, bool halves, ulong row, uint part) {
    const uchar *norms = reinterpret_cast<const uchar *>(planes.norms);
    return halves ? norms + row * (2 * BLOCKS) : norms + (row * BLOCKS + part) * 4;
}

// One part of a work item, from the queries to the output or the state.
inline void work_on(const AttendParams &p, const Buffers &b, const ItemPart &part_of_item, BlockState &block) {
    const uint thread = threadIdx.x, lane = thread % 32;
    const Token token = b.alone ? b.only : load_token(p, b.positions, b.sequence, b.lens, part_of_item.item);
    Range keys = {0, 0};
    uint first_seen = 0;
    if (token.sequence != NONE) {
        const Range seen_keys = visible(p, token), seen = in_units(seen_keys);
        first_seen = seen_keys.first;
        keys = {seen.first + min(part_of_item.tiles.first * TILE, seen.len()), seen.first + min(part_of_item.tiles.end * TILE, seen.len())};
        if (CLUSTER > 1) {
            const EvenSplit blocks((keys.len() + KEYS - 1) / KEYS, CLUSTER);
            const uint rank = blockIdx.x % CLUSTER;
            keys = {keys.first + min(blocks.first(rank) * KEYS, keys.len()),
                    keys.first + min(blocks.first(rank + 1) * KEYS, keys.len())};
        }
    }
    // The previous part no longer uses shared memory.
    block.wait_for_others();
    __syncthreads();
    KeyLoop loop;
    loop.first = loop.end = 0;
    if (keys.first < keys.end) {
        const ulong row = token.sequence * p.row_sequence + rows_of_head(p, part_of_item.head);
        const uint part = thread / 32 % TEAM;
        const auto plane = [&](const uchar *of, uint row_bytes, uint bytes) {
            return of + row * row_bytes + part * bytes + lane % (bytes / 16) * 16;
        };
        const Sources from = {plane(b.k.low, KeyCodes::LOW_ROW, KeyCodes::LOW_BYTES),
                              plane(b.k.high, KeyCodes::HIGH_ROW, max(KeyCodes::HIGH_BYTES, 16u)),
                              plane(b.v.low, ValueCodes::LOW_ROW, ValueCodes::LOW_BYTES),
                              plane(b.v.high, ValueCodes::HIGH_ROW, max(ValueCodes::HIGH_BYTES, 16u)),
                              norms_of_row(lane < KEYS ? b.k : b.v, lane < KEYS ? K_CENTRED : V_CENTRED, row, part),
                              p.row_slot};
        // The offset of the warp's block of coordinates.
        const uint mean = part_of_item.head / SHARES * mean_bytes(HEAD_DIM) + part * CHUNK;
        loop.begin(p, from, keys, pages_of(p, b.table, token.sequence), first_seen, b.k.means + mean, b.v.means + mean);
    }
    load_queries(p, b, part_of_item.item, part_of_item.head);
    __syncthreads();

    Accumulators acc = {};
    acc.m[0] = acc.m[1] = LOWEST;
    acc.norm = SMALLEST_NORM;
    acc.turn = block.turn;
    loop.run(p, acc);
    block.turn = acc.turn;
    const State state = {};
    merge_warps(p, acc, state);
#if PAGE_SHIFT > 0
    finish(p, b.to, {b.positions, b.sequence, b.lens, b.table}, part_of_item);
#else
    finish(p, b.to, {b.positions, b.sequence, b.lens}, part_of_item);
#endif
    block.read_by_others = CLUSTER > 1;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR) CLUSTERED
    KVANT_KERNEL(const uchar *q, uchar *out, const uchar *k_low, const uchar *k_high, const float *k_norms,
                     const uchar *v_low, const uchar *v_high, const float *v_norms, const uint *positions,
                     const uint *sequence, const uint *lens, float *partials, uint *counters, const float *sinks,
                     const __grid_constant__ AttendParams p, const uint *table, const uchar *k_means,
                     const uchar *v_means, const float *earlier, const float *earlier_ends, float *new_ends) {
    const uint thread = threadIdx.x;
    const Division division(p);
    const uint items = division.items, first_item = division.first_item;
    Token only = {0, NONE, 0};
    if (items == 1) {
        // The length is most likely that of sequence 0, which needs no other load first.
        only = {positions[first_item], sequence[first_item], lens[0]};
    }
    // The tables are filled while these loads are in flight.
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
    // So far the kernel has read only buffers that the previous kernel does not write (gpu/launch.rs: `reads_ahead`).
    // If this kernel merges the previous kernel's results, the previous kernel writes nothing else that is read here.
    take_turn_unless_late<EARLIER>();
    const Buffers b = {q,         {k_low, k_high, k_norms, k_means}, {v_low, v_high, v_norms, v_means},
                       positions, sequence,                          lens,
                       {partials, counters, RowEnds(sinks, earlier, earlier_ends, new_ends), out}, items == 1,
                       only,      table};
    BlockState block_state = {false, 0};
    // Empty tiles after the tiles of each head: the cost of beginning and ending a part.
    const uint ends = items > 1 ? END_TILES : 0;
    uint *prefix = shared_at<uint>(AT_PREFIX) + 7;
    for (uint i = thread; i < items; i += THREADS) {
        const Token token = b.alone ? only : load_token(p, positions, sequence, lens, first_item + i);
        // At least one tile, so that a block writes the output.
        prefix[i + 1] = (token.sequence == NONE ? 1 : max(tiles_of(in_units(visible(p, token))), 1u)) + ends;
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
    each_part<true>(p, division, prefix, ends, [&](const ItemPart &part) { work_on(p, b, part, block_state); });
    block_state.wait_for_others();
}
