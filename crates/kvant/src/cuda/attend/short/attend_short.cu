// attend_short: attend_decode for short contexts: decode over dense 16-bit keys and values that fit into the shared
// memory of a cluster.
//
// q [T, H, D] -> out [T, H, D]; q, K and V have one 16-bit dtype, out any dtype.
//
// Every token and KV head has a cluster of blocks, which divide its keys evenly. A block copies all of its keys and
// values at once. Then
//
//   a warp computes the scores of 16 keys, S^T = K q^T, and, after a barrier, their weights relative to the block's
//     maximum;
//   after another barrier it computes some of the output's coordinates, O = P V, over all keys of the block.
//
// So no sums are added within a block. A warp sends its coordinates to the shared memory of the cluster's block with
// its number, which merges the states of all blocks.
//
// Over pages (work.h) a warp copies its keys from the one or two pages that hold them. A key that no page holds is
// masked, and its value is zeros.
//
// Positions, sequences, lengths and page tables are read before the previous kernel has ended
// (device/dependent_launch.h).
#include "attend/dense.h"
#include "attend/merge_quads.h"
#include "attend/work.h"
#include "device/cluster.h"
#include "device/convert.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "device/mbarrier.h"

static_assert(WARPS == CLUSTER, "attend: a warp's coordinates go to the block of its number");
static_assert(TILE == 16, "attend: a product takes two keys of eight stretches");

// A block's keys are in one stretch per warp, which one copy brings. A product takes two keys of every stretch.
// Stretches are padded by 16 bytes, so that loads of keys and of values have no bank conflicts.
constexpr uint STRETCH = TILE * ROW + 16;
// Whether two blocks fit on a multiprocessor. Then the next kernel may begin at once. Otherwise its blocks would share
// the few multiprocessors that this one leaves free while keys are still being copied.
constexpr bool TWO_FIT = HEAD_DIM <= 128;
// Coordinates of a warp, and how many products of values these take.
constexpr uint SLICE = HEAD_DIM / WARPS;
constexpr uint PRODUCTS = SLICE / 8;

// short/mod.rs computes the same size.
struct Shared {
    uchar k[WARPS * STRETCH];
    uchar v[WARPS * STRETCH];
    // A operands of the products with values: leading terms of weights in rows 0 to 7, the rest in rows 8 to 15.
    uint4 weights[WARPS][32];
    // The largest score of each query row, by warps.
    float maxima[8][WARPS];
    // The states that the cluster's blocks have sent.
    float m[CLUSTER][GROUP];
    float l[CLUSTER][GROUP];
    float o[CLUSTER][GROUP][SLICE];
    // Barriers: for keys, values, maxima, and the rest of what is sent.
    ulong keys;
    ulong values;
    ulong all_m;
    ulong all_o;
};
static_assert((sizeof(Shared) + 15) / 16 * 16 == SHARED_BYTES, "attend: the shared memory that Rust asks for");

// Copies `rows` keys or values, from a slot on, to consecutive rows in shared memory.
inline void copy(const AttendParams &p, const uchar *plane, uint slot, uint rows, uint to, uint barrier) {
#pragma unroll 1
    for (uint row = 0; row < rows;) {
        // Up to the end of a ring, and from its beginning on; row by row where other heads' are in between.
        const uint at = RING && slot + row >= p.capacity ? slot + row - p.capacity : slot + row;
        const uint run = !IN_ORDER ? 1 : RING ? min(rows - row, p.capacity - at) : rows;
        copy_bulk(to + row * ROW, plane + ulong(at) * p.row_slot * ROW, run * ROW, barrier);
        row += run;
    }
}

// The same over pages.
inline void copy_from_pages(const RowsInPages &rows, const uchar *plane, uint to, uint barrier) {
    rows.each_page([&](uint row, uint page, uint slot, uint count) {
        copy_bulk(to + row * ROW, plane + page_bytes(page) + slot * ROW, count * ROW, barrier);
    });
}

// Prefetches what copy() will copy to L2. The previous kernel may still write some of it; L2 is coherent, and nothing
// is read.
inline void prefetch_rows(const AttendParams &p, const uchar *plane, uint slot, uint rows) {
    if (IN_ORDER && (!RING || slot + rows <= p.capacity)) {
        prefetch_bulk(plane + ulong(slot) * ROW, rows * ROW);
    }
}

// The scores of 16 keys in units of log 2: of a key of stretch g and the next one, both at `k` in stretch 0, by query
// rows 2t and 2t + 1.
inline void scores(const AttendParams &p, const uchar *k, const uint4 (&q)[LOADS], float (&s)[4]) {
    const uint lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr uint CHAINS = 4;
    float sums[CHAINS][4] = {};
    const uchar *row = k + g * STRETCH + t * 32;
#pragma unroll
    for (uint i = 0; i < LOADS; i++) {
        const uint at = i / 2 * 128 + i % 2 * 16;
        const uint4 x = *reinterpret_cast<const uint4 *>(row + at);
        const uint4 y = *reinterpret_cast<const uint4 *>(row + ROW + at);
        const uint first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
        mma<HALF>(sums[2 * i % CHAINS], first, make_uint2(q[i].x, q[i].y));
        mma<HALF>(sums[(2 * i + 1) % CHAINS], second, make_uint2(q[i].z, q[i].w));
    }
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        s[c] = score_of(p, (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTERED
    KVANT_KERNEL(const uchar *q, uchar *out, const uchar *k, const uchar *, const float *, const uchar *v, const uchar *,
           const float *, const uint *positions, const uint *sequence, const uint *lens, float *, uint *, const float *sinks,
           const AttendParams p, const uint *table, const uchar *, const uchar *, const float *earlier,
           const float *earlier_ends, float *new_ends) {
    extern __shared__ __align__(128) uchar memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const uint thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const uint rank = blockIdx.x % CLUSTER, pair = blockIdx.x / CLUSTER;
    const uint item = pair / p.kv_heads, head = pair % p.kv_heads;
    const uint keys = shared_address(&shared.keys), values = shared_address(&shared.values);
    const uint all_m = shared_address(&shared.all_m), all_o = shared_address(&shared.all_o);
    if (thread == 0) {
        barrier_init(keys, WARPS);
        barrier_init(values, WARPS);
        barrier_init(all_m, 1);
        barrier_init(all_o, 1);
    }
    show_barriers_to_copies();
    __syncthreads();
    cluster_arrive_early();

    EarlyPages<CLUSTER * WARPS * TILE> early;
    const Token token = load_token_and_pages(p, positions, sequence, lens, table, item, early);
    const bool exists = token.sequence != NONE;
    const Range seen = exists ? visible(p, token) : Range{0, 0};
    const ulong plane = exists ? (token.sequence * p.row_sequence + rows_of_head(p, head)) * ROW : 0;
    const EvenSplit line(tiles_of(seen), CLUSTER);
    // Keys before the block's, its own, those of a stretch, an even number, and the warp's.
    const uint first = min(line.first(rank) * TILE, seen.len());
    const uint count = min(line.first(rank + 1) * TILE, seen.len()) - first, length = (count + TILE - 1) / TILE * 2;
    const uint before = warp * length, rows = before < count ? min(count - before, length) : 0;
    const uint slot = RING ? (seen.first + first + before) % p.capacity : seen.first + first + before;
    const uint own_k = shared_address(shared.k + warp * STRETCH), own_v = shared_address(shared.v + warp * STRETCH);
    // Over pages: those of the warp's stretch.
    const RowsInPages own(early, slot, PAGE_SHIFT > 0 ? rows : 0);
    const uint held = PAGE_SHIFT > 0 ? own.held() : rows;
    // Zeros for values that do not exist: their weights are multiplied, too.
    for (uint at = (held == TILE || PAGE_SHIFT == 0 ? rows * ROW : 0) + lane * 16; at < TILE * ROW; at += 512) {
        if (PAGE_SHIFT == 0 || !own.hold(at / ROW)) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(own_v + at), "r"(0) : "memory");
        }
    }
    if (lane == 0) {
        barrier_expect(keys, held * ROW);
        barrier_expect(values, held * ROW);
        // Not values: they arrive while scores are computed, and prefetching them delays the keys of other blocks.
        if (PAGE_SHIFT > 0) {
            own.each_page([&](uint, uint page, uint slot, uint count) {
                prefetch_bulk(k + plane + page_bytes(page) + slot * ROW, count * ROW);
            });
        } else if (rows > 0) {
            prefetch_rows(p, k + plane, slot, rows);
        }
    }
    // Not next to barrier_init: racecheck would report a race.
    if (thread == 0) {
        barrier_expect(all_m, sizeof(shared.m));
        barrier_expect(all_o, sizeof(shared.l) + sizeof(shared.o));
    }

    wait_unless_late<EARLIER>();
    if (TWO_FIT) {
        let_next_begin();
    }
    if (lane == 0) {
        if (PAGE_SHIFT > 0) {
            copy_from_pages(own, k + plane, own_k, keys);
            copy_from_pages(own, v + plane, own_v, values);
        } else {
            copy(p, k + plane, slot, rows, own_k, keys);
            copy(p, v + plane, slot, rows, own_v, values);
        }
    }
    __syncwarp();

    // Over pages: the entries of the two keys whose scores the lane has. A key that is not the block's is masked
    // anyway.
    uint entries[2] = {NONE, NONE};
    if (PAGE_SHIFT > 0) {
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            entries[i] = early.entry(seen.first + first + g * length + warp * 2 + i);
        }
    }
    const QueryRows query_rows(p, item, head);
    uint4 queries[LOADS];
    load_queries(q, query_rows, queries);
    float s[4] = {nothing(), nothing(), nothing(), nothing()};
    if (warp * 2 < length) {
        barrier_wait(keys, 0);
        scores(p, shared.k + warp * (2 * ROW), queries, s);
        const uint key = g * length + warp * 2;
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            const bool is_held = PAGE_SHIFT == 0 || entries[c / 2] < p.page_entries;
            s[c] = key + c / 2 < count && is_held ? s[c] : nothing();
        }
    }
    // Of query rows 2t and 2t + 1.
    float m[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
    for (uint step = 4; step < 32; step *= 2) {
        m[0] = fmaxf(m[0], __shfl_xor_sync(0xFFFFFFFF, m[0], step));
        m[1] = fmaxf(m[1], __shfl_xor_sync(0xFFFFFFFF, m[1], step));
    }
    if (g == 0) {
        shared.maxima[2 * t][warp] = m[0];
        shared.maxima[2 * t + 1][warp] = m[1];
    }
    __syncthreads();
    m[0] = largest(shared.maxima[2 * t]);
    m[1] = largest(shared.maxima[2 * t + 1]);
    bool is_seen[4];
    float weights[4];
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        is_seen[c] = s[c] != nothing();
        weights[c] = is_seen[c] ? exp2_fast(s[c] - m[c % 2]) : 0;
    }
    const Weights terms = two_terms(weights, is_seen);
    shared.weights[warp][lane] = make_uint4(terms.leading.x, terms.rest.x, terms.leading.y, terms.rest.y);
    __syncthreads();

    // All blocks of the cluster have begun. The maxima are sent before the outputs, so that factors are known when
    // these arrive.
    cluster_wait();
    if (g == 0) {
#pragma unroll
        for (uint c = 0; c < 2; c++) {
            if (2 * t + c < GROUP) {
                send(address_in(&shared.m[rank][2 * t + c], warp), m[c], address_in(&shared.all_m, warp));
            }
        }
    }
    if (!TWO_FIT) {
        let_next_begin();
    }
    barrier_wait(values, 0);
    // Values as B operands: of two units' first keys and second keys.
    uint2 b[WARPS][PRODUCTS];
    const uint own_coordinates = shared_address(shared.v) + lane % 8 * STRETCH + lane / 8 * ROW + warp * (SLICE * 2);
#pragma unroll
    for (uint u = 0; u < WARPS; u += 2) {
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i++) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(b[u][i].x), "=r"(b[u][i].y), "=r"(b[u + 1][i].x), "=r"(b[u + 1][i].y)
                         : "r"(own_coordinates + u * (2 * ROW) + i * 16)
                         : "memory");
        }
    }
    // Of query row g (and, by the rest of the weights, in o[i][.][2] and o[i][.][3]) coordinates 2t and 2t + 1 of
    // eight; and the sum of the weights, which is what they make of ones. Two of each, for products wait for their
    // sums.
    float o[PRODUCTS][2][4] = {}, l[2][4] = {};
#pragma unroll
    for (uint u = 0; u < WARPS; u++) {
        const uint4 w = shared.weights[u][lane];
        const uint a[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i++) {
            mma<HALF>(o[i][u % 2], a, b[u][i]);
        }
        constexpr uint ONES = HALF ? 0x3C003C00 : 0x3F803F80;
        mma<HALF>(l[u % 2], a, make_uint2(ONES, ONES));
    }
    const auto whole = [](const float (&x)[2][4], uint c) {
        return ((x[0][c] + x[1][c]) + (x[0][c + 2] + x[1][c + 2])) * (1 / WEIGHT_SCALE);
    };
    if (g < GROUP) {
        const uint to = address_in(&shared.o[rank][g][2 * t], warp), barrier = address_in(&shared.all_o, warp);
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i++) {
            send(to + i * 32, make_float2(whole(o[i], 0), whole(o[i], 1)), barrier);
        }
        if (t == 0) {
            send(address_in(&shared.l[rank][g], warp), whole(l, 0), barrier);
        }
    }

    wait_if_late<EARLIER>();
    // Merges the states that the blocks have sent, in their order. No block writes to one that has ended: it has waited
    // for all.
    constexpr uint ROW_QUADS = SLICE / 4;
    if (thread < GROUP * ROW_QUADS) {
        const uint r = thread / ROW_QUADS, column = thread % ROW_QUADS;
        barrier_wait(all_m, 0);
        SoftmaxState sum;
        float f[CLUSTER];
#pragma unroll
        for (uint b = 0; b < CLUSTER; b++) {
            sum.cover(shared.m[b][r]);
        }
#pragma unroll
        for (uint b = 0; b < CLUSTER; b++) {
            f[b] = factor_of(shared.m[b][r], sum.m);
        }
        barrier_wait(all_o, 0);
#pragma unroll
        for (uint b = 0; b < CLUSTER; b++) {
            const float4 x = *reinterpret_cast<const float4 *>(&shared.o[b][r][column * 4]);
            sum.add(shared.l[b][r], x, f[b]);
        }
        const Pages pages = pages_of(p, table, exists ? token.sequence : 0, gap_of(token));
        const RowEnds row_ends(sinks, earlier, earlier_ends, new_ends);
        const Output output = {p, out, row_ends, query_rows, seen.len() > 0, seen, pages};
        output.finish(r * (HEAD_DIM / 4) + rank * ROW_QUADS + column, sum);
    }
}
