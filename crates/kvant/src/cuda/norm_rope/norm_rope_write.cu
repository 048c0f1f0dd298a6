// norm_rope_write: norm and rotary embedding of queries, keys and values, [T, H, D] and twice [T, Hk, D], in one
// launch; the queries go to q_out, optionally rotated, the keys and values into the slots of a cache layer.
//
// A block takes one head of one token, blockIdx.x: with blockIdx.y below H a query, then Hk keys, then Hk values. All
// of a head is read before anything is written, so that `q_out` may be `q`. Keys and values of tokens that the layer
// does not hold when the step is written, or for which their sequence has no page, are skipped, as are tokens whose
// sequence or position is out of range.
//
// Positions, sequences, lengths, page tables, weights and angles are read before the previous kernel has ended
// (device/dependent_launch.h).
#include "codec/encode_rows.h"
#include "device/cache_slots.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "norm_rope/head.h"

struct NormRopeWriteParams {
    RopeParams rope;
    LayerParams layer;
    uint heads;
    uint head_dim;
    float q_eps;
    float k_eps;
    float v_eps;
    float k_scale;
    float v_scale;
};

constexpr bool HAS_TABLES = ANGLES == TABLES;
#if IN_REGISTERS
constexpr uint LANES = HEAD_DIM / PER;
// Copies of the tables of codec/nearest_centroid.h.
constexpr uint COPIES = 1;

template <uint CODEC> inline void fill_tables(uint *tables) {
    if constexpr (is_quantised(CODEC)) {
        Nearest<CODEC, COPIES>::fill(tables);
    }
}

// Encodes a rotated row of a head.
template <uint CODEC, uint NORM>
inline void encode(float (&y)[PER], const WritablePlanes &planes, RowPlace place, float scale, uint lane,
                   const uint *tables) {
    if constexpr (is_quantised(CODEC)) {
        const Nearest<CODEC, COPIES> nearest_to(tables);
        const WritablePlanes to = planes.of_page(place.page);
        store_encoded<PER, LANES, CODEC, NORM, COPIES>(y, to, place.row, threadIdx.x < LANES, scale, lane, nearest_to);
    }
}
#endif

extern "C" __global__ void KVANT_KERNEL(const uchar *q, const uchar *k, const uchar *v, const uchar *q_weight,
                                           const uchar *k_weight, const uchar *v_weight, const float *cos,
                                           const float *sin, const float *factors, const uint *positions,
                                           const uint *sequence, const uint *lens, uchar *q_out, uchar *k_low,
                                           uchar *k_high, float *k_norms, uchar *v_low, uchar *v_high,
                                           float *v_norms, const __grid_constant__ NormRopeWriteParams p,
                                           const uint *table) {
    extern __shared__ float row[];
    const uint token = blockIdx.x, kv_heads = p.layer.kv_heads;
    constexpr uint dim = HEAD_DIM;
    const bool is_query = blockIdx.y < p.heads, is_key = !is_query && blockIdx.y < p.heads + kv_heads;
#if IN_REGISTERS
    // The block's first warp rotates and encodes the rows that the block has collected. Tables never change: they are
    // read ahead.
    constexpr uint K_WORDS = table_words(K_CODEC, COPIES), V_WORDS = table_words(V_CODEC, COPIES);
    __shared__ __align__(8) uint tables[(K_WORDS > V_WORDS ? K_WORDS : V_WORDS) + 2];
    const uint lane = threadIdx.x % LANES;
    const Signs<PER> signs(LANES, lane);
    if (is_key) {
        fill_tables<K_CODEC>(tables);
    } else if (!is_query) {
        fill_tables<V_CODEC>(tables);
    }
    const auto from_shared = [&](float(&y)[PER]) {
#pragma unroll
        for (uint j = 0; j < PER; j++) {
            y[j] = row[lane * PER + j];
        }
    };
#endif
    const Team team = {threadIdx.x, THREADS, threadIdx.x % 32, threadIdx.x / 32};
    float *room = row + dim;
    const Rope rope = {ANGLES, LAYOUT, cos, sin, factors}, none = {NO_ROPE, HALVES, nullptr, nullptr, nullptr};
    const Norm q_norm = {Q_NORM, q_weight, Q_WEIGHT_DTYPE, p.q_eps}, k_norm = {K_NORM, k_weight, K_WEIGHT_DTYPE, p.k_eps},
               v_norm = {V_NORM, v_weight, V_WEIGHT_DTYPE, p.v_eps};
    const uint position = positions[token], seq = sequence[token];
    const bool known = !HAS_TABLES || position < p.rope.table_rows;
    const uint head = blockIdx.y - p.heads - (is_key ? 0 : kv_heads);
    bool kept = !is_query && is_kept(p.layer, seq, position, lens);
    RowPlace place = {0, 0};
    if (PAGE_SHIFT > 0 && kept) {
        kept = find_in_pages(p.layer, table, seq, head, position, place);
    }
    Needed n;
    if (known && is_query) {
        n = needed(dim, q_norm, rope, p.rope, position, team);
    } else if (known && is_key) {
        n = needed(dim, k_norm, rope, p.rope, position, team);
    } else if (known) {
        n = needed(dim, v_norm, none, p.rope, position, team);
    }
    take_turn_early();
    if (!known) {
        // No copy may be in flight to the shared memory of a block that has ended.
        copies_wait<0>();
        return;
    }
    if (is_query) {
        const ulong at = (ulong(token) * p.heads + blockIdx.y) * dim;
        const float squares = load_head(row, q, at, Q_DTYPE, dim, team);
        norm_rope_head(row, room, squares, dim, q_norm, rope, p.rope, position, n, team);
#if IN_REGISTERS
        if (ROTATE_Q) {
            if (threadIdx.x < 32) {
                float y[PER];
                from_shared(y);
                rotate_row<PER, LANES>(y, signs, lane);
                if (threadIdx.x < LANES) {
#pragma unroll
                    for (uint j = 0; j < PER; j++) {
                        store(q_out, at + lane * PER + j, y[j], OUT_DTYPE);
                    }
                }
            }
            return;
        }
#endif
        for (uint j = threadIdx.x; j < dim; j += blockDim.x) {
            store(q_out, at + j, row[j], OUT_DTYPE);
        }
        return;
    }
    const ulong from = (ulong(token) * kv_heads + head) * dim;
    const float squares = is_key ? load_head(row, k, from, K_DTYPE, dim, team) : load_head(row, v, from, V_DTYPE, dim, team);
    // The tables; norm_rope_head ends with a barrier.
    copies_wait<0>();
    if (is_key) {
        norm_rope_head(row, room, squares, dim, k_norm, rope, p.rope, position, n, team);
    } else {
        norm_rope_head(row, room, squares, dim, v_norm, none, p.rope, position, n, team);
    }
    if (!kept) {
        return;
    }
    if (PAGE_SHIFT == 0) {
        place.row = layer_row(p.layer, seq, head, layer_slot(p.layer, position));
    }
    const uint codec = is_key ? K_CODEC : V_CODEC;
    if (!is_quantised(codec)) {
        uchar *low = (is_key ? k_low : v_low) + page_bytes(place.page);
        for (uint j = threadIdx.x; j < dim; j += blockDim.x) {
            store(low, place.row * dim + j, row[j], codec);
        }
        return;
    }
#if IN_REGISTERS
    const WritablePlanes planes =
        is_key ? WritablePlanes{k_low, k_high, k_norms} : WritablePlanes{v_low, v_high, v_norms};
    const float scale = is_key ? p.k_scale : p.v_scale;
    if (threadIdx.x < 32) {
        float y[PER];
        from_shared(y);
        rotate_row<PER, LANES>(y, signs, lane);
        // One code for both if they are encoded alike.
        if (is_key || (K_CODEC == V_CODEC && K_STORED_NORM == V_STORED_NORM)) {
            encode<K_CODEC, K_STORED_NORM>(y, planes, place, scale, lane, tables);
        } else {
            encode<V_CODEC, V_STORED_NORM>(y, planes, place, scale, lane, tables);
        }
    }
#endif
}
