// kv_write: stores new keys and values, [T, Hk, D] or [Hk, T, D], in the slots of a cache layer, both in one launch.
//
// blockIdx.y is 0 for keys and 1 for values. A row is one head of one token. For layers with codes: with ENCODE,
// HEAD_DIM / PER lanes of a warp have a row in registers (codec/encode_rows.h); with TILES, a warp has eight rows at a
// time (codec/encode_tiles.h). Otherwise rows are moved: each of blockDim.x threads moves 16 bytes of a row at a time
// (or 4 elements, or fewer); blockDim.y rows are moved in parallel, ROWS one after the other. Rows are loaded before
// their destination is known. A dense layer of the source's dtype gets the source's bits. A token is skipped if the
// layer does not hold it when the step is written, if its sequence has no page for it, or if its sequence or position
// is out of range. Therefore no slot is written twice. Rows of centred codecs are written by seal.cu.
#include "codec/encode_rows.h"
#include "device/cache_slots.h"
#include "device/elements.h"
#include "device/vectors.h"
#if TILES
#include "codec/encode_tiles.h"
#endif
#include "device/dependent_launch.h"

struct KvWriteParams {
    ulong first_token;
    ulong source_tokens;
    ulong tokens;
    LayerParams layer;
    float k_scale;
    float v_scale;
    uint head_dim;
};

// The tokens of the step, and the page table of the layer's group.
struct Tokens {
    const uint *positions;
    const uint *sequence;
    const uint *lens;
    const uint *table;
};

// A row of the source, and its destination.
struct Place {
    uint token;
    uint head;
    bool exists;
};

// Row i: rows are counted by tokens, then by heads.
inline Place place_of(const KvWriteParams &p, uint i) {
    const uint token = i / p.layer.kv_heads;
    const bool exists = token < p.tokens;
    return Place{exists ? token : 0, i - token * p.layer.kv_heads, exists};
}

inline ulong source_row(const KvWriteParams &p, Place place) {
    const ulong at = p.first_token + place.token;
    return HEAD_MAJOR ? place.head * p.source_tokens + at : at * p.layer.kv_heads + place.head;
}

// The row of the layer that stores it; false if there is none.
inline bool target_row(const KvWriteParams &p, Place place, const Tokens &tokens, RowPlace &to) {
    const uint position = tokens.positions[place.token], seq = tokens.sequence[place.token];
    if (!place.exists || !is_kept(p.layer, seq, position, tokens.lens)) {
        return false;
    }
    if (PAGE_SHIFT > 0) {
        return find_in_pages(p.layer, tokens.table, seq, place.head, position, to);
    }
    to = {layer_row(p.layer, seq, place.head, layer_slot(p.layer, position)), 0};
    return true;
}

#if TILES

constexpr uint K_WORDS = table_words(K_CODEC, TABLE_COPIES), V_WORDS = table_words(V_CODEC, TABLE_COPIES);
static_assert(HEAD_DIM * 2 + (K_WORDS > V_WORDS ? K_WORDS : V_WORDS) * 4 == SHARED_BYTES, "kv_write: the shared memory that Rust asks for");

// Each warp takes eight rows at a time, until none is left.
template <uint DTYPE, uint CODEC, uint NORM>
inline void encode(const uchar *source, WritablePlanes to, float scale, const Tokens &tokens, const KvWriteParams &p,
                   uint *tables) {
    const uint all = uint(p.tokens) * p.layer.kv_heads;
    if constexpr (CODEC == DTYPE) {
        // The dense side of a layer whose other side is quantised: its bits.
        constexpr uint PIECES = HEAD_DIM / 8, BESIDE = THREADS / PIECES;
        const uint j = threadIdx.x % PIECES;
        for (uint i = blockIdx.x * BESIDE + threadIdx.x / PIECES; i < all; i += gridDim.x * BESIDE) {
            const Place place = place_of(p, i);
            RowPlace at;
            if (target_row(p, place, tokens, at)) {
                reinterpret_cast<uint4 *>(to.low + page_bytes(at.page))[at.row * PIECES + j] =
                    reinterpret_cast<const uint4 *>(source)[source_row(p, place) * PIECES + j];
            }
        }
    } else {
        // 1 / sqrt(HEAD_DIM), or that times sqrt(2).
        constexpr float SCALE = HEAD_DIM == 128 ? 0.125f : 0.0625f;
        const uint lane = threadIdx.x % 32;
        uint *signs = tables, *cells = tables + HEAD_DIM / 2;
        fill_signs<HEAD_DIM>(signs);
        Nearest<CODEC, TABLE_COPIES>::fill(cells);
        uint a[4];
        strip_matrix<DTYPE == F16>(a, lane, SCALE);
        const Nearest<CODEC, TABLE_COPIES> nearest_to(cells);
        const auto source_of = [&](Place place) { return source + source_row(p, place) * (HEAD_DIM * 2); };
        const uint step = gridDim.x * (THREADS / 4);
        uint first = blockIdx.x * (THREADS / 4) + threadIdx.x / 32 * 8;
        Place place = place_of(p, first + lane / 4);
        Strips<HEAD_DIM> strips;
        strips.load(source_of(place));
        copies_wait<0>();
        __syncthreads();
#pragma unroll 1
        for (uint block_first = blockIdx.x * (THREADS / 4); block_first < all; block_first += step) {
            float y[2][2][HEAD_DIM / 16];
            strips.template rotate<DTYPE == F16>(y, a, signs);
            // Loads the next eight rows meanwhile. For rows that do not exist, loads the first row again.
            first += step;
            const Place next = place_of(p, first + lane / 4);
            strips.load(source_of(next));
            RowPlace at = {0, 0};
            const bool kept = target_row(p, place, tokens, at);
            const auto of_row = [&](uint i) {
                const uint page = PAGE_SHIFT == 0 ? 0 : __shfl_sync(ALL, at.page, i * 4);
                return StoredRow{to.of_page(page), __shfl_sync(ALL, at.row, i * 4), __shfl_sync(ALL, int(kept), i * 4) != 0};
            };
            store_eight<HEAD_DIM, CODEC, NORM>(y, of_row, scale, nearest_to, lane);
            place = next;
        }
    }
}

#elif ENCODE

constexpr uint LANES = HEAD_DIM / PER;

template <uint DTYPE, uint CODEC, uint NORM>
inline void encode(const uchar *source, WritablePlanes to, float scale, const Tokens &tokens, const KvWriteParams &p,
                   uint *tables) {
    if constexpr (is_quantised(CODEC)) {
        Nearest<CODEC, TABLE_COPIES>::fill(tables);
        copies_wait<0>();
        __syncthreads();
    }
    const uint lane = threadIdx.x % LANES;
    const Place place = place_of(p, blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES);
    const ulong from = source_row(p, place) * HEAD_DIM + lane * PER;
    RowPlace at = {0, 0};
    if (CODEC == DTYPE) {
        // The dense side of a layer whose other side is quantised: its bits.
        if (target_row(p, place, tokens, at)) {
            uchar *low = to.low + page_bytes(at.page);
            move_row(source, from, DTYPE, low, at.row * HEAD_DIM + lane * PER, DTYPE, PER, ALIGNED, 0, 1);
        }
        return;
    }
    float y[PER];
    load_part<DTYPE>(y, source, from, ALIGNED);
    const bool kept = target_row(p, place, tokens, at);
    store_row<PER, LANES, CODEC, NORM, TABLE_COPIES>(y, to.of_page(at.page), at.row, kept, scale, lane, tables, ALIGNED);
}

#else

// A piece of a row: 16 bytes if rows of both sides begin at multiples of 16 and have one dtype, otherwise 4 elements.
template <uint DTYPE, uint CODEC>
inline void move(const uchar *source, uchar *to, const Tokens &tokens, const KvWriteParams &p) {
    constexpr bool WIDE = ALIGNED16 && DTYPE == CODEC;
    constexpr uint PIECE = WIDE ? 16 / size_of(DTYPE) : 4;
    for (uint j = threadIdx.x * PIECE; j < p.head_dim; j += blockDim.x * PIECE) {
        Place places[ROWS];
        uint4 moved[ROWS];
#pragma unroll
        for (uint r = 0; r < ROWS; r++) {
            places[r] = place_of(p, (blockIdx.x * ROWS + r) * blockDim.y + threadIdx.y);
            if (WIDE) {
                const ulong at = source_row(p, places[r]) * p.head_dim + j;
                moved[r] = *reinterpret_cast<const uint4 *>(source + at * size_of(DTYPE));
            }
        }
#pragma unroll
        for (uint r = 0; r < ROWS; r++) {
            RowPlace at;
            if (!target_row(p, places[r], tokens, at)) {
                continue;
            }
            uchar *page = to + page_bytes(at.page);
            if (WIDE) {
                *reinterpret_cast<uint4 *>(page + (at.row * p.head_dim + j) * size_of(CODEC)) = moved[r];
            } else {
                const uint count = min(4u, p.head_dim - j);
                move_row(source, source_row(p, places[r]) * p.head_dim + j, DTYPE, page, at.row * p.head_dim + j, CODEC,
                         count, ALIGNED, 0, 1);
            }
        }
    }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, MINBLOCKS)
    KVANT_KERNEL(const uchar *k, const uchar *v, const uint *positions, const uint *sequence, const uint *lens, uchar *k_low,
             uchar *k_high, float *k_norms, uchar *v_low, uchar *v_high, float *v_norms,
             const __grid_constant__ KvWriteParams p, const uint *table) {
    take_turn();
    const Tokens tokens = {positions, sequence, lens, table};
    const bool is_key = blockIdx.y == 0;
#if TILES || ENCODE
#if TILES
    // The signs, and the tables of keys or of values.
    extern __shared__ __align__(16) uint tables[];
#else
    constexpr uint K_WORDS = table_words(K_CODEC, TABLE_COPIES), V_WORDS = table_words(V_CODEC, TABLE_COPIES);
    __shared__ __align__(8) uint tables[K_WORDS > V_WORDS ? K_WORDS : V_WORDS];
#endif
    const uchar *source = is_key ? k : v;
    const WritablePlanes to =
        is_key ? WritablePlanes{k_low, k_high, k_norms} : WritablePlanes{v_low, v_high, v_norms};
    const float scale = is_key ? p.k_scale : p.v_scale;
    // Both sides share the code if they are encoded alike.
    if (is_key || (K_DTYPE == V_DTYPE && K_CODEC == V_CODEC && K_NORM == V_NORM)) {
        encode<K_DTYPE, K_CODEC, K_NORM>(source, to, scale, tokens, p, tables);
    } else {
        encode<V_DTYPE, V_CODEC, V_NORM>(source, to, scale, tokens, p, tables);
    }
#else
    if (is_key) {
        move<K_DTYPE, K_CODEC>(k, k_low, tokens, p);
    } else {
        move<V_DTYPE, V_CODEC>(v, v_low, tokens, p);
    }
#endif
}
