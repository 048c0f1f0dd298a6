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
// Therefore a block adds no partial sums of its warps. Warp w sends its coordinates to the shared memory of the
// cluster's block w, which merges the states of all blocks.
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
static_assert(TILE == 16, "attend: a product takes two keys of eight ranges");

// A block's keys are in one range per warp, which one copy brings. A product takes two keys of every range.
// Stretches are padded by 16 bytes, so that loads of keys and of values have no bank conflicts.
constexpr uint STRETCH = TILE * ROW + 16;
// Whether two blocks fit on a multiprocessor. Then the next kernel may begin at once. Otherwise its blocks would share
// the few multiprocessors that this one leaves free while keys are still being copied.
constexpr bool TWO_FIT = HEAD_DIM <= 128;
// Coordinates of a warp, and the number of products of values for them.
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
    // Barriers: for keys, for values, for received maxima, for the other received numbers.
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
        // A copy ends at the end of a ring, and the next begins at its beginning. If rows of other heads are in
        // between, each row is copied alone.
        const uint at = RING && slot + row >= p.capacity ? slot + row - p.capacity : slot + row;
        const uint run = !IN_ORDER ? 1 : RING ? min(rows - row, p.capacity - at) : rows;
        copy_bulk(to + row * ROW, plane + ulong(at) * p.row_slot * ROW, run * ROW, barrier);
        row += run;
    }
}

// As above, over pages.
inline void copy_from_pages(const RowsInPages &rows, const uchar *plane, uint to, uint barrier) {
    rows.each_page([&](uint row, uint page, uint slot, uint count) {
        copy_bulk(to + row * ROW, plane + page_bytes_or_zero(page) + slot * ROW, count * ROW, barrier);
    });
}

// Prefetches what copy() will copy to L2. The previous kernel may still write some of it; L2 is coherent, and nothing
// is read.
inline void prefetch_rows(const AttendParams &p, const uchar *plane, uint slot, uint rows) {
    if (IN_ORDER && (!RING || slot + rows <= p.capacity)) {
        prefetch_bulk(plane + ulong(slot) * ROW, rows * ROW);
    }
}

// The scores of 16 keys in units of log 2: of a key of range g and the next one, both at `k` in range 0, by query
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

// Context of all phases: the thread, and the block's rank in its cluster.
struct Lane {
    uint warp;
    uint lane;
    uint g;
    uint t;
    uint rank;
};

// The block's keys, divided among warps in ranges of an even number of keys.
struct KeyRange {
    // The number of the cluster's keys before the block's keys, of the block's keys, and of keys in a full range.
    uint first;
    uint count;
    uint length;
    // The warp's rows, and the slot of the first.
    uint rows;
    uint slot;
};

inline KeyRange key_range_of(const AttendParams &p, const Lane &self, Range seen) {
    const EvenSplit line(tiles_of(seen), CLUSTER);
    const uint first = min(line.first(self.rank) * TILE, seen.len());
    const uint count = min(line.first(self.rank + 1) * TILE, seen.len()) - first, length = (count + TILE - 1) / TILE * 2;
    const uint before = self.warp * length, rows = before < count ? min(count - before, length) : 0;
    const uint slot = RING ? (seen.first + first + before) % p.capacity : seen.first + first + before;
    return {first, count, length, rows, slot};
}

// All blocks of the cluster call it before cluster_wait().
inline void init_barriers(uint thread, uint keys, uint values, uint all_m, uint all_o) {
    if (thread == 0) {
        barrier_init(keys, WARPS);
        barrier_init(values, WARPS);
        barrier_init(all_m, 1);
        barrier_init(all_o, 1);
    }
    show_barriers_to_copies();
    __syncthreads();
    cluster_arrive_early();
}

// The bytes that the cluster's blocks send. Not next to barrier_init: racecheck would report a race.
inline void expect_states(uint thread, uint all_m, uint all_o) {
    if (thread == 0) {
        barrier_expect(all_m, sizeof(Shared::m));
        barrier_expect(all_o, sizeof(Shared::l) + sizeof(Shared::o));
    }
}

// Fills the values of missing keys with zeros, since their weights are multiplied, too. Announces the bytes of all
// copies to the barriers, and prefetches keys.
template <typename Own>
inline void prepare_copies(const AttendParams &p, const Lane &self, const KeyRange &range, const Own &own, uint held, uint own_v,
                           const uchar *k_plane, uint keys, uint values) {
    for (uint at = (held == TILE || PAGE_SHIFT == 0 ? range.rows * ROW : 0) + self.lane * 16; at < TILE * ROW; at += 512) {
        if (PAGE_SHIFT == 0 || !own.hold(at / ROW)) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(own_v + at), "r"(0) : "memory");
        }
    }
    if (self.lane == 0) {
        barrier_expect(keys, held * ROW);
        barrier_expect(values, held * ROW);
        // Values are not prefetched: they arrive while scores are computed, and prefetching them delays the keys of
        // other blocks.
        if (PAGE_SHIFT > 0) {
            own.each_page([&](uint, uint page, uint slot, uint count) {
                prefetch_bulk(k_plane + page_bytes_or_zero(page) + slot * ROW, count * ROW);
            });
        } else if (range.rows > 0) {
            prefetch_rows(p, k_plane, range.slot, range.rows);
        }
    }
}

// Copies the keys and the values of the warp's range. One lane calls it.
template <typename Own>
inline void copy_range(const AttendParams &p, const KeyRange &range, const Own &own, const uchar *k_plane, const uchar *v_plane, uint own_k,
                         uint own_v, uint keys, uint values) {
    if (PAGE_SHIFT > 0) {
        copy_from_pages(own, k_plane, own_k, keys);
        copy_from_pages(own, v_plane, own_v, values);
    } else {
        copy(p, k_plane, range.slot, range.rows, own_k, keys);
        copy(p, v_plane, range.slot, range.rows, own_v, values);
    }
}

// Over pages: the entries of the two keys whose scores the lane has.
template <typename Early>
inline void look_up_keys(const Lane &self, const KeyRange &range, const Early &early, Range seen, uint (&entries)[2]) {
    if (PAGE_SHIFT > 0) {
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            entries[i] = early.entry(seen.first + range.first + self.g * range.length + self.warp * 2 + i);
        }
    }
}

// Scores of the lane's two keys by query rows 2t and 2t + 1. Keys of other blocks, and keys that no page holds, are
// masked.
inline void scores_of_range(const AttendParams &p, const Shared &shared, const Lane &self, const KeyRange &range,
                              const uint (&entries)[2], const uint4 (&queries)[LOADS], uint keys, float (&s)[4]) {
    if (self.warp * 2 < range.length) {
        barrier_wait(keys, 0);
        scores(p, shared.k + self.warp * (2 * ROW), queries, s);
        const uint key = self.g * range.length + self.warp * 2;
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            const bool is_held = PAGE_SHIFT == 0 || is_page(entries[c / 2], p.page_entries);
            s[c] = key + c / 2 < range.count && is_held ? s[c] : nothing();
        }
    }
}

// Stores the weights of the warp's keys, relative to the block's largest scores. Returns in m the largest scores of
// query rows 2t and 2t + 1. All threads call it.
inline void leave_weights(Shared &shared, const Lane &self, const float (&s)[4], float (&m)[2]) {
    m[0] = fmaxf(s[0], s[2]);
    m[1] = fmaxf(s[1], s[3]);
#pragma unroll
    for (uint step = 4; step < 32; step *= 2) {
        m[0] = fmaxf(m[0], __shfl_xor_sync(0xFFFFFFFF, m[0], step));
        m[1] = fmaxf(m[1], __shfl_xor_sync(0xFFFFFFFF, m[1], step));
    }
    if (self.g == 0) {
        shared.maxima[2 * self.t][self.warp] = m[0];
        shared.maxima[2 * self.t + 1][self.warp] = m[1];
    }
    __syncthreads();
    m[0] = largest(shared.maxima[2 * self.t]);
    m[1] = largest(shared.maxima[2 * self.t + 1]);
    bool is_seen[4];
    float weights[4];
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        is_seen[c] = s[c] != nothing();
        weights[c] = is_seen[c] ? exp2_fast(s[c] - m[c % 2]) : 0;
    }
    const Weights terms = two_terms(weights, is_seen);
    shared.weights[self.warp][self.lane] = make_uint4(terms.leading.x, terms.rest.x, terms.leading.y, terms.rest.y);
    __syncthreads();
}

// Sends the block's largest scores to the cluster's blocks.
inline void send_maxima(Shared &shared, const Lane &self, const float (&m)[2]) {
    if (self.g == 0) {
#pragma unroll
        for (uint c = 0; c < 2; c++) {
            if (2 * self.t + c < GROUP) {
                send(address_in(&shared.m[self.rank][2 * self.t + c], self.warp), m[c], address_in(&shared.all_m, self.warp));
            }
        }
    }
}

// Multiplies the block's weights with the warp's slice of the values, and sends outputs and sums of weights to the
// block that merges the slice.
inline void send_outputs(Shared &shared, const Lane &self) {
    // Values as B operands: b.x has the first keys of two units, b.y their second keys.
    uint2 b[WARPS][PRODUCTS];
    const uint own_coordinates = shared_address(shared.v) + self.lane % 8 * STRETCH + self.lane / 8 * ROW + self.warp * (SLICE * 2);
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
    // o: coordinates 2t and 2t + 1 of every eight, of query row g; o[i][.][2] and o[i][.][3] are their parts from the
    // second terms of the weights. l: the sum of the weights, as their product with ones. Each has two accumulators,
    // because a product waits for the previous one with the same accumulator.
    float o[PRODUCTS][2][4] = {}, l[2][4] = {};
#pragma unroll
    for (uint u = 0; u < WARPS; u++) {
        const uint4 w = shared.weights[u][self.lane];
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
    if (self.g < GROUP) {
        const uint to = address_in(&shared.o[self.rank][self.g][2 * self.t], self.warp), barrier = address_in(&shared.all_o, self.warp);
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i++) {
            send(to + i * 32, make_float2(whole(o[i], 0), whole(o[i], 1)), barrier);
        }
        if (self.t == 0) {
            send(address_in(&shared.l[self.rank][self.g], self.warp), whole(l, 0), barrier);
        }
    }
}

constexpr uint ROW_QUADS = SLICE / 4;

// Merges the states that the blocks have sent, in their order, for four coordinates of row r. Every block waits for all
// states here, so none writes to a block that has ended.
inline SoftmaxState merged(const Shared &shared, uint r, uint column, uint all_m, uint all_o) {
    barrier_wait(all_m, 0);
    SoftmaxState sum;
    float f[CLUSTER];
#pragma unroll
    for (uint b = 0; b < CLUSTER; b++) {
        sum.merge_max(shared.m[b][r]);
    }
#pragma unroll
    for (uint b = 0; b < CLUSTER; b++) {
        f[b] = factor_of(shared.m[b][r], sum.m);
    }
    barrier_wait(all_o, 0);
#pragma unroll
    for (uint b = 0; b < CLUSTER; b++) {
        const float4 x = *reinterpret_cast<const float4 *>(&shared.o[b][r][column * 4]);
        sum.merge(shared.l[b][r], x, f[b]);
    }
    return sum;
}

// The weights of the warp's keys, and the block's largest scores (leave_weights).
template <typename Early>
inline void weigh_keys(const AttendParams &p, Shared &shared, const Lane &self, const KeyRange &range, const Early &early,
                       const Range &seen, const uchar *q, const QueryRows &query_rows, uint keys, float (&m)[2]) {
    uint entries[2] = {NONE, NONE};
    look_up_keys(self, range, early, seen, entries);
    uint4 queries[LOADS];
    load_queries(q, query_rows, queries);
    float s[4] = {nothing(), nothing(), nothing(), nothing()};
    scores_of_range(p, shared, self, range, entries, queries, keys, s);
    leave_weights(shared, self, s, m);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTERED
    KVANT_KERNEL(const uchar *q, uchar *out, const uchar *k, const uchar *, const float *, const uchar *v, const uchar *,
           const float *, const uint *positions, const uint *sequence, const uint *lens, float *, uint *, const float *sinks,
           const AttendParams p, const uint *table, const uchar *, const uchar *, const float *earlier,
           const float *earlier_ends, float *new_ends) {
    extern __shared__ __align__(128) uchar memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const uint thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const uint rank = blockIdx.x % CLUSTER, pair = blockIdx.x / CLUSTER;
    const Lane self = {warp, lane, lane / 4, lane % 4, rank};
    const uint item = pair / p.kv_heads, head = pair % p.kv_heads;
    const uint keys = shared_address(&shared.keys), values = shared_address(&shared.values);
    const uint all_m = shared_address(&shared.all_m), all_o = shared_address(&shared.all_o);
    init_barriers(thread, keys, values, all_m, all_o);
    EarlyPages<CLUSTER * WARPS * TILE> early;
    const Token token = load_token_and_pages(p, positions, sequence, lens, table, item, early);
    const bool exists = token.sequence != NONE;
    const Range seen = exists ? visible(p, token) : Range{0, 0};
    const ulong plane = exists ? (token.sequence * p.row_sequence + rows_of_head(p, head)) * ROW : 0;
    const KeyRange range = key_range_of(p, self, seen);
    const uint own_k = shared_address(shared.k + warp * STRETCH), own_v = shared_address(shared.v + warp * STRETCH);
    // Over pages: the page or pages of the warp's range.
    const RowsInPages own(early, range.slot, PAGE_SHIFT > 0 ? range.rows : 0);
    const uint held = PAGE_SHIFT > 0 ? own.held() : range.rows;
    prepare_copies(p, self, range, own, held, own_v, k + plane, keys, values);
    expect_states(thread, all_m, all_o);

    wait_unless_late<EARLIER>();
    if (TWO_FIT) {
        let_next_begin();
    }
    if (lane == 0) {
        copy_range(p, range, own, k + plane, v + plane, own_k, own_v, keys, values);
    }
    __syncwarp();

    const QueryRows query_rows(p, item, head);
    float m[2];
    weigh_keys(p, shared, self, range, early, seen, q, query_rows, keys, m);

    // All blocks of the cluster have begun. The maxima are sent before the outputs, so that factors are known when
    // these arrive.
    cluster_wait();
    send_maxima(shared, self, m);
    if (!TWO_FIT) {
        let_next_begin();
    }
    barrier_wait(values, 0);
    send_outputs(shared, self);

    wait_if_late<EARLIER>();
    if (thread < GROUP * ROW_QUADS) {
        const uint r = thread / ROW_QUADS, column = thread % ROW_QUADS;
        const SoftmaxState sum = merged(shared, r, column, all_m, all_o);
        const Pages pages = pages_of(p, table, exists ? token.sequence : 0, gap_of(token));
        const RowEnds row_ends(sinks, earlier, earlier_ends, new_ends);
        const Output output = {p, out, row_ends, query_rows, seen.len() > 0, seen, pages};
        output.finish(r * (HEAD_DIM / 4) + rank * ROW_QUADS + column, sum);
    }
}
