// kv_write: new keys and values, [T, Hk, D] or [Hk, T, D], into the slots of a cache layer, both in one launch.
//
// blockIdx.y is 0 for keys and 1 for values. A row is one head of one token. ENCODE, for layers with codes: HEAD_DIM / PER
// lanes of a warp have a row in registers (turboquant.h). Otherwise rows are moved: blockDim.x threads have 16 bytes (or 4
// elements, or fewer) of a row at a time, blockDim.y rows beside each other, ROWS one behind the other; what they move is on
// its way before it is known where to. A dense layer of the source's dtype gets its bits.
// A token that the layer does not hold when the step is written, or whose sequence or position is out of range, is
// skipped, so that no slot is written twice.
#include "elements.h"
#include "slots.h"
#include "turboquant.h"
#include "ahead.h"

struct KvWriteParams {
    ulong first_token;
    ulong source_tokens;
    ulong tokens;
    LayerParams layer;
    float k_scale;
    float v_scale;
    uint head_dim;
};

// A row of the source, and where it goes.
struct Place {
    uint token;
    uint head;
    bool exists;
};

// Row i of all, by tokens, then heads.
inline Place place_of(const KvWriteParams &p, uint i) {
    const uint token = i / p.layer.kv_heads;
    const bool exists = token < p.tokens;
    return Place{exists ? token : 0, i - token * p.layer.kv_heads, exists};
}

inline ulong source_row(const KvWriteParams &p, Place place) {
    const ulong token = p.first_token + place.token;
    return HEAD_MAJOR ? place.head * p.source_tokens + token : token * p.layer.kv_heads + place.head;
}

// The row of the layer that takes it; false when none does.
inline bool target_row(const KvWriteParams &p, Place place, const uint *positions, const uint *sequence, const uint *lens,
                       ulong &row) {
    const uint position = positions[place.token], seq = sequence[place.token];
    if (!place.exists || !is_kept(p.layer, seq, position, lens)) {
        return false;
    }
    row = layer_row(p.layer, seq, place.head, layer_slot(p.layer, position));
    return true;
}

#if ENCODE

constexpr uint LANES = HEAD_DIM / PER;

template <uint DTYPE>
inline void encode(const uchar *source, WritablePlanes to, Encoding encoding, const uint *positions, const uint *sequence,
                   const uint *lens, const KvWriteParams &p, const float *thresholds) {
    const uint lane = threadIdx.x % LANES;
    const Place place = place_of(p, blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES);
    const ulong from = source_row(p, place) * HEAD_DIM + lane * PER;
    ulong row = 0;
    if (encoding.codec == DTYPE) {
        // The dense side of a layer of which the other is quantised: its bits.
        if (target_row(p, place, positions, sequence, lens, row)) {
            move_row(source, from, DTYPE, to.low, row * HEAD_DIM + lane * PER, DTYPE, PER, ALIGNED, 0, 1);
        }
        return;
    }
    float y[PER];
#pragma unroll
    for (uint j = 0; j < PER; j += 4) {
        const float4 four = load4(source, from + j, 4, DTYPE, ALIGNED);
        y[j] = four.x;
        y[j + 1] = four.y;
        y[j + 2] = four.z;
        y[j + 3] = four.w;
    }
    const bool kept = target_row(p, place, positions, sequence, lens, row);
    store_row<PER, LANES>(y, to, row, kept, encoding, lane, thresholds, ALIGNED);
}

#else

// A piece of a row: 16 bytes where rows of both sides begin at multiples of them and have one dtype, else 4 elements.
template <uint DTYPE, uint CODEC>
inline void move(const uchar *source, uchar *to, const uint *positions, const uint *sequence, const uint *lens,
                 const KvWriteParams &p) {
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
            ulong row;
            if (!target_row(p, places[r], positions, sequence, lens, row)) {
                continue;
            }
            if (WIDE) {
                *reinterpret_cast<uint4 *>(to + (row * p.head_dim + j) * size_of(CODEC)) = moved[r];
            } else {
                const uint count = min(4u, p.head_dim - j);
                move_row(source, source_row(p, places[r]) * p.head_dim + j, DTYPE, to, row * p.head_dim + j, CODEC, count,
                         ALIGNED, 0, 1);
            }
        }
    }
}

#endif

extern "C" __global__ void kv_write(const uchar *k, const uchar *v, const uint *positions, const uint *sequence,
                                    const uint *lens, uchar *k_low, uchar *k_high, float *k_norms, uchar *v_low,
                                    uchar *v_high, float *v_norms, const __grid_constant__ KvWriteParams p) {
    take_turn();
    const bool is_key = blockIdx.y == 0;
#if ENCODE
    __shared__ float thresholds[THRESHOLD_ROOM];
    load_thresholds(thresholds, is_key ? K_CODEC : V_CODEC);
    if (is_key) {
        encode<K_DTYPE>(k, {k_low, k_high, k_norms}, {K_CODEC, K_NORM, p.k_scale}, positions, sequence, lens, p,
                        thresholds);
    } else {
        encode<V_DTYPE>(v, {v_low, v_high, v_norms}, {V_CODEC, V_NORM, p.v_scale}, positions, sequence, lens, p,
                        thresholds);
    }
#else
    if (is_key) {
        move<K_DTYPE, K_CODEC>(k, k_low, positions, sequence, lens, p);
    } else {
        move<V_DTYPE, V_CODEC>(v, v_low, positions, sequence, lens, p);
    }
#endif
}
