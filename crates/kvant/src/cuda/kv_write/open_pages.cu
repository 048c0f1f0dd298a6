// open_pages: the pages that a step opens with the mean of what the previous page stores, for layers with centred
// codecs: after write_pages.cu, which has marked the tokens that open them, over the step's keys and values.
//
// A block takes one head, blockIdx.y, of windows of tokens from the blockIdx.x-th on; blockIdx.z is 0 for keys and 1
// for values. Most windows have no such token. For those that have, the threads sum the vectors of the previous page,
// decoded, store the mean, and store the step's vectors of the page around it. Threads form slices, which have a
// vector at a time.
#include "device/dependent_launch.h"
#include "kv_write/page_lanes.h"
#include "kv_write/step_pages.h"
#include "kv_write/vectors.h"

// Quads of a row that a thread has, threads of a slice, and slices.
constexpr uint SLICE = HEAD_DIM / 4 < 32 ? 32 : HEAD_DIM / 4 < THREADS ? HEAD_DIM / 4 : THREADS;
constexpr uint SLICES = THREADS / SLICE;
constexpr uint QUADS = (HEAD_DIM / 4 + SLICE - 1) / SLICE;

struct Shared {
    // Sums of the slices; then a row.
    float4 sums[SLICES * SLICE * QUADS];
    // Of each position of the page, its token, and whether that is counted.
    uint tokens[PAGE_POSITIONS];
    uint counted[PAGE_POSITIONS];
    float room[EXCHANGE];

    float *row() {
        return reinterpret_cast<float *>(sums);
    }
};

// The sum over the block; at most 2^24.
inline uint block_sum(uint x, Shared &shared) {
    __syncthreads();
    return uint(over_team<Sum>(float(x), shared.room, whole_block()));
}

// Notes which vectors of a page are finite. Ends with a barrier.
template <uint CODEC> inline void note_stored(const Planes &page, ulong first, Shared &shared) {
    for (uint i = threadIdx.x; i < PAGE_POSITIONS; i += THREADS) {
        shared.counted[i] = is_finite_row<HEAD_DIM, CODEC>(page, first + i) ? 1 : 0;
    }
    __syncthreads();
}

// The row in shared memory becomes the sum of all vectors that are counted: quad(i, j) gives coordinates j .. j+3 of
// vector i. Returns how many there are. Ends with a barrier.
template <typename Quad> inline uint sum_vectors(Shared &shared, Quad quad) {
    const uint slice = threadIdx.x / SLICE, own = threadIdx.x % SLICE;
    uint found = 0;
    float4 sums[QUADS];
#pragma unroll
    for (uint k = 0; k < QUADS; k++) {
        sums[k] = all4(0);
    }
    for (uint i = slice; i < PAGE_POSITIONS; i += SLICES) {
        if (shared.counted[i] == 0) {
            continue;
        }
        found++;
#pragma unroll
        for (uint k = 0; k < QUADS; k++) {
            const uint j = 4 * (own + k * SLICE);
            if (j < HEAD_DIM) {
                sums[k] = sums[k] + quad(i, j);
            }
        }
    }
    found = block_sum(own == 0 ? found : 0, shared);
#pragma unroll
    for (uint k = 0; k < QUADS; k++) {
        shared.sums[slice * (SLICE * QUADS) + own + k * SLICE] = sums[k];
    }
    __syncthreads();
    if (threadIdx.x < SLICE) {
#pragma unroll
        for (uint k = 0; k < QUADS; k++) {
            float4 sum = shared.sums[own + k * SLICE];
            for (uint s = 1; s < SLICES; s++) {
                sum = sum + shared.sums[s * (SLICE * QUADS) + own + k * SLICE];
            }
            shared.sums[own + k * SLICE] = sum;
        }
    }
    __syncthreads();
    return found;
}

// Stores the mean that is in the row. Begins with a barrier.
inline void store_mean(Shared &shared, uchar *to) {
    const float *row = shared.row();
    float largest = 0;
    for (uint j = threadIdx.x; j < HEAD_DIM; j += THREADS) {
        largest = fmaxf(largest, fabsf(row[j]));
    }
    __syncthreads();
    const float scale = scale_of_mean(over_team<Max>(largest, shared.room, whole_block()));
    for (uint j = 4 * threadIdx.x; j < HEAD_DIM; j += 4 * THREADS) {
        const int codes[4] = {code_of_mean(row[j], scale), code_of_mean(row[j + 1], scale),
                              code_of_mean(row[j + 2], scale), code_of_mean(row[j + 3], scale)};
        *reinterpret_cast<uint *>(to + j) = four_codes(codes);
    }
    if (threadIdx.x == 0) {
        *reinterpret_cast<float *>(to + HEAD_DIM) = scale;
    }
}

// Whether the step opens the page without filling it, and the sequence holds the previous page. All threads call it.
inline bool needs_previous(const KvWriteParams &p, const Tokens &tokens, PageOfSequence page, Shared &shared) {
    if (!has_previous(p, tokens, page)) {
        return false;
    }
    uint written = 0, opened = 0;
    for (uint t = threadIdx.x; t < p.tokens; t += THREADS) {
        const bool here = is_in(p, tokens, page, t);
        written += here ? 1 : 0;
        opened += here && tokens.positions[t] == page.first() ? 1 : 0;
    }
    written = block_sum(written, shared);
    return block_sum(opened, shared) > 0 && written < PAGE_POSITIONS;
}

// Chooses and stores the mean of a page. Ends with a barrier.
template <uint CODEC>
inline void choose_mean(const KvWriteParams &p, const Tokens &tokens, const Side &side, PageOfSequence page, uint head,
                        Shared &shared) {
    RowPlace at = {0, 0}, before = {0, 0};
    find_page(p, tokens, page, head, at);
    find_page(p, tokens, {page.sequence, page.index - 1}, head, before);
    float *row = shared.row();
    const Planes stored = side.planes.of_page(before.page).readable();
    note_stored<CODEC>(stored, before.row, shared);
    const uint found = sum_vectors(
        shared, [&](uint i, uint j) { return load_row4(stored, before.row + i, j, HEAD_DIM, CODEC); });
    const uchar *mean = stored.means + head * mean_bytes(HEAD_DIM);
    for (uint j = 4 * threadIdx.x; j < HEAD_DIM; j += 4 * THREADS) {
        const float4 four = load_mean4(mean, j, HEAD_DIM);
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            row[j + i] = found > 0 ? row[j + i] / float(found) + part(four, i) : 0;
        }
    }
    __syncthreads();
    store_mean(shared, side.planes.means + page_bytes(at.page) + head * mean_bytes(HEAD_DIM));
    __syncthreads();
}

// Writes the pages that a marked token opens, for a head. Pages may need one another: only a step with gaps opens two
// pages of a sequence without filling the first. The block of the first of them writes all in their order.
template <uint DTYPE, uint CODEC, uint NORM>
inline void open_pages(const KvWriteParams &p, const Tokens &tokens, const Side &side, uint token, uint head,
                       Shared &shared) {
    PageOfSequence page = {tokens.sequence[token], tokens.positions[token] >> PAGE_SHIFT};
    if (needs_previous(p, tokens, {page.sequence, page.index - 1}, shared)) {
        return;
    }
    for (;;) {
        choose_mean<CODEC>(p, tokens, side, page, head, shared);
        list_tokens(p, tokens, page, shared.tokens);
        write_rows<DTYPE, CODEC, NORM>(p, tokens, side, head, PAGE_POSITIONS, [&](uint i) { return shared.tokens[i]; });
        __syncthreads();
        page.index++;
        RowPlace place;
        if (!find_page(p, tokens, page, head, place) || !needs_previous(p, tokens, page, shared)) {
            return;
        }
    }
}

// Calls f(i) for each i below `count` for which is_marked(i). Every warp finds out by itself.
template <typename Marked, typename F> inline void for_each(uint count, Marked is_marked, F f) {
    for (uint base = 0; base < count; base += 32) {
        const uint i = base + threadIdx.x % 32;
        for (uint marked = __ballot_sync(ALL, i < count && is_marked(i)); marked != 0; marked &= marked - 1) {
            f(base + __ffs(marked) - 1);
        }
    }
}

template <uint DTYPE, uint CODEC, uint NORM>
inline void open_side(const KvWriteParams &p, const Tokens &tokens, Side side, const uint *later, uint *tables,
                      Shared &shared) {
    if constexpr (is_centred(CODEC)) {
        side.tables = tables;
        bool filled = false;
        const uint windows = (p.tokens + PAGE_POSITIONS - 1) / PAGE_POSITIONS, step = gridDim.x;
        const uint own = windows > blockIdx.x ? (windows - blockIdx.x + step - 1) / step : 0;
        for_each(own, [&](uint i) { return later[p.tokens + blockIdx.x + i * step] != 0; }, [&](uint i) {
            if (!filled) {
                Nearest<CODEC, TABLE_COPIES>::fill(tables);
                copies_wait<0>();
                __syncthreads();
                filled = true;
            }
            const uint first = (blockIdx.x + i * step) * PAGE_POSITIONS;
            for_each(min(PAGE_POSITIONS, p.tokens - first), [&](uint t) { return later[first + t] != 0; }, [&](uint t) {
                open_pages<DTYPE, CODEC, NORM>(p, tokens, side, first + t, blockIdx.y, shared);
            });
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    KVANT_KERNEL(const uchar *k, const uchar *v, const uint *positions, const uint *sequence, const uint *lens,
                 uchar *k_low, uchar *k_high, float *k_norms, uchar *v_low, uchar *v_high, float *v_norms,
                 const __grid_constant__ KvWriteParams p, const uint *table, uchar *k_means, uchar *v_means,
                 const uint *later) {
    take_turn();
    __shared__ Shared shared;
    constexpr uint K_WORDS = table_words(K_CODEC, TABLE_COPIES), V_WORDS = table_words(V_CODEC, TABLE_COPIES);
    __shared__ __align__(8) uint tables[K_WORDS > V_WORDS ? K_WORDS : V_WORDS];
    const Tokens tokens = {positions, sequence, lens, table};
    if (blockIdx.z == 0) {
        const Side side = {k, {k_low, k_high, k_norms, k_means}, p.k_scale, nullptr};
        open_side<K_DTYPE, K_CODEC, K_NORM>(p, tokens, side, later, tables, shared);
    } else {
        const Side side = {v, {v_low, v_high, v_norms, v_means}, p.v_scale, nullptr};
        open_side<V_DTYPE, V_CODEC, V_NORM>(p, tokens, side, later, tables, shared);
    }
}
