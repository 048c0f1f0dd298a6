// page_means: the means of the pages that a step opens, for layers with centred codecs: before each pass of kv_write.cu
// over the step's keys and values, [T, Hk, D] or [Hk, T, D].
//
// A block takes one head, blockIdx.y, of one token, blockIdx.x; blockIdx.z is 0 for keys and 1 for values. It has work
// if the token has the first position of a page. In the first pass, for pages whose means are those of the step's
// vectors: the threads list the page's tokens, sum their vectors, and rotate and store the mean. In the second pass,
// for the others: they sum what the previous page stores. Threads form slices, which have a vector at a time.
//
// In the first pass the blocks of the first head also write, for each token, whether it belongs to the second.
#include "codec/page_means.h"
#include "codec/rotate_block.h"
#include "device/dependent_launch.h"
#include "kv_write/vectors.h"

constexpr uint NO_TOKEN = 0xFFFFFFFF;
constexpr uint LANES = HEAD_DIM / PER;
// Quads of a row that a thread has, threads of a slice, and slices.
constexpr uint SLICE = HEAD_DIM / 4 < 32 ? 32 : HEAD_DIM / 4 < THREADS ? HEAD_DIM / 4 : THREADS;
constexpr uint SLICES = THREADS / SLICE;
constexpr uint QUADS = (HEAD_DIM / 4 + SLICE - 1) / SLICE;
constexpr uint K_WORDS = table_words(K_CODEC, 1), V_WORDS = table_words(V_CODEC, 1);

struct Shared {
    // Sums of the slices; then a row.
    float4 sums[SLICES * SLICE * QUADS];
    // Of each position of the page, its token, and whether that is counted.
    uint tokens[PAGE_POSITIONS];
    uint counted[PAGE_POSITIONS];
    float room[EXCHANGE];
    __align__(8) uint tables[K_WORDS > V_WORDS ? K_WORDS : V_WORDS];

    float *row() {
        return reinterpret_cast<float *>(sums);
    }
};

// A side of the layer and its source.
struct Side {
    const uchar *source;
    WritablePlanes planes;
    float scale;
};

// The page of a sequence that holds the positions from index << PAGE_SHIFT on.
struct PageOfSequence {
    uint sequence;
    uint index;

    uint first() const {
        return index << PAGE_SHIFT;
    }
};

// The sum over the block; at most 2^24.
inline uint block_sum(uint x, Shared &shared) {
    __syncthreads();
    return uint(over_team<Sum>(float(x), shared.room, whole_block()));
}

inline bool find_page(const KvWriteParams &p, const Tokens &tokens, PageOfSequence page, uint head, RowPlace &place) {
    return find_in_pages(p.layer, tokens.table, page.sequence, head, page.first(), place);
}

// Whether token t is stored in the page.
inline bool is_in(const KvWriteParams &p, const Tokens &tokens, PageOfSequence page, uint t) {
    const uint position = tokens.positions[t];
    return tokens.sequence[t] == page.sequence && position >> PAGE_SHIFT == page.index && position < p.position_limit &&
           is_kept(p.layer, page.sequence, position, tokens.lens);
}

// Whether the step opens the page, does not fill it, and the sequence holds the previous page. All threads call it.
// `guess`: the token of the page's first position, if tokens follow one another in the step.
inline bool needs_previous(const KvWriteParams &p, const Tokens &tokens, PageOfSequence page, uint guess,
                           Shared &shared) {
    RowPlace before;
    if (page.index == 0 || !find_page(p, tokens, {page.sequence, page.index - 1}, 0, before)) {
        return false;
    }
    if (guess < p.tokens && p.tokens - guess >= PAGE_POSITIONS) {
        uint in_order = 0;
        for (uint i = threadIdx.x; i < PAGE_POSITIONS; i += THREADS) {
            const bool here = is_in(p, tokens, page, guess + i) && tokens.positions[guess + i] == page.first() + i;
            in_order += here ? 1 : 0;
        }
        if (block_sum(in_order, shared) == PAGE_POSITIONS) {
            return false;
        }
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

// Whether a token belongs to the second pass. All threads call it.
inline bool is_second(const KvWriteParams &p, const Tokens &tokens, uint token, Shared &shared) {
    const uint position = tokens.positions[token];
    const PageOfSequence page = {tokens.sequence[token], position >> PAGE_SHIFT};
    return is_kept(p.layer, page.sequence, position, tokens.lens) &&
           needs_previous(p, tokens, page, token - (position - page.first()), shared);
}

// Makes the list of a page's tokens. Begins and ends with a barrier.
inline void list_tokens(const KvWriteParams &p, const Tokens &tokens, PageOfSequence page, Shared &shared) {
    __syncthreads();
    for (uint i = threadIdx.x; i < PAGE_POSITIONS; i += THREADS) {
        shared.tokens[i] = NO_TOKEN;
    }
    __syncthreads();
    for (uint t = threadIdx.x; t < p.tokens; t += THREADS) {
        if (is_in(p, tokens, page, t)) {
            shared.tokens[tokens.positions[t] - page.first()] = t;
        }
    }
    __syncthreads();
}

// Notes which of the listed vectors have a finite squared length; a warp takes one at a time. Ends with a barrier.
template <uint DTYPE>
inline void note_finite(const KvWriteParams &p, const uchar *source, uint head, Shared &shared) {
    const uint lane = threadIdx.x % 32;
    for (uint i = threadIdx.x / 32; i < PAGE_POSITIONS; i += THREADS / 32) {
        const uint token = shared.tokens[i];
        float squares = 0;
        for (uint j = 4 * lane; token != NO_TOKEN && j < HEAD_DIM; j += 128) {
            const float4 x = load4(source, source_row(p, token, head) * HEAD_DIM + j, 4, DTYPE, ALIGNED);
            squares += dot(x, x);
        }
        squares = over_warp<Sum>(squares);
        if (lane == 0) {
            shared.counted[i] = token != NO_TOKEN && !is_nan_or_infinite(squares) ? 1 : 0;
        }
    }
    __syncthreads();
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

// Chooses the mean of a page that the step opens in this pass. Ends with a barrier.
template <uint DTYPE, uint CODEC>
inline void choose_mean(const KvWriteParams &p, const Tokens &tokens, const Side &side, PageOfSequence page, uint head,
                        Shared &shared) {
    RowPlace at = {0, 0};
    find_page(p, tokens, page, head, at);
    float *row = shared.row();
    if (PASS == FIRST_PASS) {
        note_finite<DTYPE>(p, side.source, head, shared);
        const uint found = sum_vectors(shared, [&](uint i, uint j) {
            return load4(side.source, source_row(p, shared.tokens[i], head) * HEAD_DIM + j, 4, DTYPE, ALIGNED);
        });
        for (uint j = threadIdx.x; j < HEAD_DIM; j += THREADS) {
            row[j] /= float(max(found, 1u));
        }
        rotate(row, 1, HEAD_DIM, false, threadIdx.x, THREADS);
    } else {
        RowPlace before = {0, 0};
        find_page(p, tokens, {page.sequence, page.index - 1}, head, before);
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
    }
    store_mean(shared, side.planes.means + page_bytes(at.page) + head * mean_bytes(HEAD_DIM));
    __syncthreads();
}

// Stores the step's vectors of a page around the page's mean. The first warp does it. Ends with a barrier.
template <uint DTYPE, uint CODEC, uint NORM>
inline void store_page(const KvWriteParams &p, const Tokens &tokens, const Side &side, PageOfSequence page, uint head,
                       Shared &shared) {
    list_tokens(p, tokens, page, shared);
    Nearest<CODEC, 1>::fill(shared.tables);
    copies_wait<0>();
    __syncthreads();
    const uint lane = threadIdx.x % LANES;
    for (uint i = 0; threadIdx.x < 32 && i < PAGE_POSITIONS; i++) {
        const uint token = shared.tokens[i];
        RowPlace at;
        if (token == NO_TOKEN ||
            !find_in_pages(p.layer, tokens.table, page.sequence, head, tokens.positions[token], at)) {
            continue;
        }
        float y[PER];
#pragma unroll
        for (uint j = 0; j < PER; j += 4) {
            const ulong from = source_row(p, token, head) * HEAD_DIM + lane * PER + j;
            const float4 four = load4(side.source, from, 4, DTYPE, ALIGNED);
#pragma unroll
            for (uint k = 0; k < 4; k++) {
                y[j + k] = part(four, k);
            }
        }
        store_row_around<PER, LANES, CODEC, NORM, 1>(y, side.planes, at, head, threadIdx.x < LANES, {false, false, 0},
                                                     side.scale, lane, shared.tables);
    }
    __syncthreads();
}

// The mean of the page that a token opens in this pass, for a head. In the second pass pages may need one another: only
// a step with gaps opens two pages of a sequence without filling the first. The block of the first of them does all,
// and stores the vectors of each before it goes on to the next.
template <uint DTYPE, uint CODEC, uint NORM>
inline void open_pages(const KvWriteParams &p, const Tokens &tokens, const Side &side, uint token, uint head,
                       Shared &shared) {
    PageOfSequence page = {tokens.sequence[token], tokens.positions[token] >> PAGE_SHIFT};
    if (PASS == FIRST_PASS) {
        list_tokens(p, tokens, page, shared);
        choose_mean<DTYPE, CODEC>(p, tokens, side, page, head, shared);
        return;
    }
    if (needs_previous(p, tokens, {page.sequence, page.index - 1}, NO_TOKEN, shared)) {
        return;
    }
    for (;;) {
        choose_mean<DTYPE, CODEC>(p, tokens, side, page, head, shared);
        const PageOfSequence next = {page.sequence, page.index + 1};
        RowPlace place;
        if (!find_page(p, tokens, next, head, place) || !needs_previous(p, tokens, next, NO_TOKEN, shared)) {
            return;
        }
        store_page<DTYPE, CODEC, NORM>(p, tokens, side, page, head, shared);
        page = next;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    KVANT_KERNEL(const uchar *k, const uchar *v, const uint *positions, const uint *sequence, const uint *lens,
                 uchar *k_low, uchar *k_high, float *k_norms, uchar *v_low, uchar *v_high, float *v_norms,
                 const __grid_constant__ KvWriteParams p, const uint *table, uchar *k_means, uchar *v_means,
                 uint *second) {
    take_turn();
    __shared__ Shared shared;
    const Tokens tokens = {positions, sequence, lens, table, second};
    const uint token = blockIdx.x, head = blockIdx.y, position = positions[token], seq = sequence[token];
    const bool is_key = blockIdx.z == 0;
    RowPlace at;
    const bool opens = is_centred(is_key ? K_CODEC : V_CODEC) && (position & (PAGE_POSITIONS - 1)) == 0 &&
                       position < p.position_limit && is_kept(p.layer, seq, position, lens) &&
                       find_in_pages(p.layer, table, seq, head, position, at);
    const bool marks = PASS == FIRST_PASS && head == 0 && is_key;
    if (!opens && !marks) {
        return;
    }
    const bool later = PASS == FIRST_PASS ? is_second(p, tokens, token, shared) : second[token] != 0;
    if (marks && threadIdx.x == 0) {
        second[token] = later ? 1 : 0;
    }
    if (!opens || later != (PASS == SECOND_PASS)) {
        return;
    }
    if (is_key) {
        if constexpr (is_centred(K_CODEC)) {
            const Side side = {k, {k_low, k_high, k_norms, k_means}, p.k_scale};
            open_pages<K_DTYPE, K_CODEC, K_NORM>(p, tokens, side, token, head, shared);
        }
    } else if constexpr (is_centred(V_CODEC)) {
        const Side side = {v, {v_low, v_high, v_norms, v_means}, p.v_scale};
        open_pages<V_DTYPE, V_CODEC, V_NORM>(p, tokens, side, token, head, shared);
    }
}
