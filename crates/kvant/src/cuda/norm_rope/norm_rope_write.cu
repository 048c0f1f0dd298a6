// norm_rope_write: norm and rotary embedding of queries, keys and values, [T, H, D] and twice [T, Hk, D], in one
// launch; the queries go to q_out, optionally rotated, the keys and values into the slots of a cache layer.
//
// A block takes one head of one token, blockIdx.x: with blockIdx.y below H a query, then Hk keys, then Hk values. All
// of a head is read before anything is written, so that `q_out` may be `q`. Keys and values are skipped if the layer
// does not hold their token when the step is written, or if its sequence has no page for it. Tokens whose sequence or
// position is out of range are skipped.
//
// On a rank that stores a share of the positions (DIVIDED), `slots` are the slots of the tokens among the rank's rows.
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

// The block's head of a token: with blockIdx.y below H a query, then Hk keys, then Hk values.
struct Head {
    const NormRopeWriteParams &p;
    Team team;
    bool is_query;
    bool is_key;
    // Index among the heads of keys, or of values.
    uint head;
    uint position;
    // In shared memory: the head's row, and room for its norm.
    float *row;
    float *room;
};

#if IN_REGISTERS
constexpr uint LANES = HEAD_DIM / PER;
// Copies of the tables of codec/nearest_centroid.h.
constexpr uint COPIES = 1;
constexpr uint K_WORDS = table_words(K_CODEC, COPIES), V_WORDS = table_words(V_CODEC, COPIES);
constexpr uint TABLE_WORDS = (K_WORDS > V_WORDS ? K_WORDS : V_WORDS) + 2;

template <uint CODEC> inline void fill_tables(uint *tables) {
    if constexpr (is_quantised(CODEC)) {
        Nearest<CODEC, COPIES>::fill(tables);
    }
}

// The block's first warp rotates and encodes the rows that the block has computed. Tables are constant and therefore
// read ahead.
struct Encoder {
    uint lane;
    Signs<PER> signs;
    const uint *tables;

    inline Encoder(uint *room, bool is_query, bool is_key) : lane(threadIdx.x % LANES), signs(LANES, lane), tables(room) {
        if (is_key) {
            fill_tables<K_CODEC>(room);
        } else if (!is_query) {
            fill_tables<V_CODEC>(room);
        }
    }
    // The lane's part of the row, rotated.
    inline void load(float (&y)[PER], const float *row) const {
#pragma unroll
        for (uint j = 0; j < PER; j++) {
            y[j] = row[lane * PER + j];
        }
        rotate_row<PER, LANES>(y, signs, lane);
    }
    // Encodes a rotated row of a head.
    template <uint CODEC, uint NORM>
    inline void encode(float (&y)[PER], const WritablePlanes &planes, RowPlace place, float scale) const {
        if constexpr (is_quantised(CODEC)) {
            const Nearest<CODEC, COPIES> nearest_to(tables);
            const WritablePlanes to = planes.of_page(place.page);
            store_encoded<PER, LANES, CODEC, NORM, COPIES>(y, to, place.row, threadIdx.x < LANES, scale, lane, nearest_to);
        }
    }
};
#else
struct Encoder {
    inline Encoder(uint *, bool, bool) {}
};
#endif

inline void store_query(const Head &h, const Encoder &encoder, uchar *q_out, ulong at) {
#if IN_REGISTERS
    if (ROTATE_Q) {
        if (threadIdx.x < 32) {
            float y[PER];
            encoder.load(y, h.row);
            if (threadIdx.x < LANES) {
#pragma unroll
                for (uint j = 0; j < PER; j++) {
                    store(q_out, at + encoder.lane * PER + j, y[j], OUT_DTYPE);
                }
            }
        }
        return;
    }
#endif
    for (uint j = threadIdx.x; j < HEAD_DIM; j += blockDim.x) {
        store(q_out, at + j, h.row[j], OUT_DTYPE);
    }
}

// Stores a key or value, in the format of the layer.
inline void store_row(const Head &h, const Encoder &encoder, const WritablePlanes &planes, RowPlace place) {
    const uint codec = h.is_key ? K_CODEC : V_CODEC;
    if (!is_quantised(codec)) {
        uchar *low = planes.low + page_bytes(place.page);
        for (uint j = threadIdx.x; j < HEAD_DIM; j += blockDim.x) {
            store(low, place.row * HEAD_DIM + j, h.row[j], codec);
        }
        return;
    }
#if IN_REGISTERS
    const float scale = h.is_key ? h.p.k_scale : h.p.v_scale;
    if (threadIdx.x < 32) {
        float y[PER];
        encoder.load(y, h.row);
        // Both sides share this code if they have one codec and one kind of norm.
        if (h.is_key || (K_CODEC == V_CODEC && K_STORED_NORM == V_STORED_NORM)) {
            encoder.encode<K_CODEC, K_STORED_NORM>(y, planes, place, scale);
        } else {
            encoder.encode<V_CODEC, V_STORED_NORM>(y, planes, place, scale);
        }
    }
#endif
}

struct Norms {
    Norm q;
    Norm k;
    Norm v;
    Rope rope;
    Rope none;
};

// Weights and angles of the head.
inline Needed needed_of(const Head &h, const Norms &norms) {
    const RopeParams &rope = h.p.rope;
    Needed n;
    if (h.is_query) {
        n = needed(HEAD_DIM, norms.q, norms.rope, rope, h.position, h.team);
    } else if (h.is_key) {
        n = needed(HEAD_DIM, norms.k, norms.rope, rope, h.position, h.team);
    } else {
        n = needed(HEAD_DIM, norms.v, norms.none, rope, h.position, h.team);
    }
    return n;
}

extern "C" __global__ void KVANT_KERNEL(const uchar *q, const uchar *k, const uchar *v, const uchar *q_weight,
                                           const uchar *k_weight, const uchar *v_weight, const float *cos,
                                           const float *sin, const float *factors, const uint *positions,
                                           const uint *sequence, const uint *lens, uchar *q_out, uchar *k_low,
                                           uchar *k_high, float *k_norms, uchar *v_low, uchar *v_high,
                                           float *v_norms, const __grid_constant__ NormRopeWriteParams p,
                                           const uint *table, const uint *slots) {
    extern __shared__ float row[];
#if IN_REGISTERS
    __shared__ __align__(8) uint tables[TABLE_WORDS];
#else
    uint *tables = nullptr;
#endif
    const uint token = blockIdx.x, kv_heads = p.layer.kv_heads;
    const bool is_query = blockIdx.y < p.heads, is_key = !is_query && blockIdx.y < p.heads + kv_heads;
    const Encoder encoder(tables, is_query, is_key);
    const Team team = {threadIdx.x, THREADS, threadIdx.x % 32, threadIdx.x / 32};
    const Norms norms = {{Q_NORM, q_weight, Q_WEIGHT_DTYPE, p.q_eps}, {K_NORM, k_weight, K_WEIGHT_DTYPE, p.k_eps},
                         {V_NORM, v_weight, V_WEIGHT_DTYPE, p.v_eps}, {ANGLES, LAYOUT, cos, sin, factors},
                         {NO_ROPE, HALVES, nullptr, nullptr, nullptr}};
    const uint position = positions[token], seq = sequence[token], head = blockIdx.y - p.heads - (is_key ? 0 : kv_heads);
    // The position of the token's slot.
    const uint slot = DIVIDED ? slots[token] : position;
    const Head h = {p, team, is_query, is_key, head, position, row, row + HEAD_DIM};
    const bool known = !HAS_TABLES || position < p.rope.table_rows;
    RowPlace place = {0, 0};
    bool kept = !is_query && is_kept(p.layer, seq, slot, lens);
    kept = kept && (PAGE_SHIFT == 0 || find_in_pages(p.layer, table, seq, head, slot, place));
    Needed n;
    if (known) {
        n = needed_of(h, norms);
    }
    take_turn_early();
    if (!known) {
        // No copy may be in flight to the shared memory of a block that has ended.
        copies_wait<0>();
        return;
    }
    if (is_query) {
        const ulong at = (ulong(token) * p.heads + blockIdx.y) * HEAD_DIM;
        const float squares = load_head(row, q, at, Q_DTYPE, HEAD_DIM, team);
        norm_rope_head(row, h.room, squares, HEAD_DIM, norms.q, norms.rope, p.rope, position, n, team);
        store_query(h, encoder, q_out, at);
        return;
    }
    const ulong from = (ulong(token) * kv_heads + head) * HEAD_DIM;
    const float squares = is_key ? load_head(row, k, from, K_DTYPE, HEAD_DIM, team) : load_head(row, v, from, V_DTYPE, HEAD_DIM, team);
    // Waits for the tables; norm_rope_head ends with a barrier.
    copies_wait<0>();
    if (is_key) {
        norm_rope_head(row, h.room, squares, HEAD_DIM, norms.k, norms.rope, p.rope, position, n, team);
    } else {
        norm_rope_head(row, h.room, squares, HEAD_DIM, norms.v, norms.none, p.rope, position, n, team);
    }
    if (kept) {
        if (PAGE_SHIFT == 0) {
            place.row = layer_row(p.layer, seq, head, layer_slot(p.layer, slot));
        }
        store_row(h, encoder, is_key ? WritablePlanes{k_low, k_high, k_norms} : WritablePlanes{v_low, v_high, v_norms}, place);
    }
}
