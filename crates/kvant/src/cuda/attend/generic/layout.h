// Shared parts of attend_generic.cu: the division of the work among warps, the layout of shared memory, the kernel's
// arguments.
#ifndef KVANT_CUDA_ATTEND_GENERIC_LAYOUT_H
#define KVANT_CUDA_ATTEND_GENERIC_LAYOUT_H
#include "attend/generic/operands.h"
#include "attend/merge_rows.h"
#include "codec/planes.h"
#include "device/key_bias.h"

using K = Operand<K_CODEC, K_PARTS, HEAD_DIM>;
using V = Operand<V_CODEC, V_PARTS, HEAD_DIM>;

constexpr uint ROWS = 8 * NT;
constexpr uint STEPS = HEAD_DIM / 16;
constexpr uint KEY_GROUPS = TILE / 16;
constexpr uint WARP_GROUPS = (KEY_GROUPS + WARPS - 1) / WARPS;
constexpr uint SLICE = HEAD_DIM / WARPS;
using Values = V::Values<SLICE>;
constexpr uint PRODUCTS = SLICE / 16;
// Variants of a weight: one for each norm of the value.
constexpr uint VARIANTS = V::BLOCKS == 2 ? 2 : 1;
// Independent sums, so that a product need not wait for the previous one. Small terms have sums of their own: tensor
// cores would truncate each when they add it to a large sum.
constexpr bool SMALL_TERMS = Q_TERMS * K_PARTS > 1;
constexpr uint CHAINS = NT == 1 ? 4 : NT == 2 || SMALL_TERMS ? 2 : 1;

inline constexpr uint chain_of(uint step, uint term, uint part) {
    if constexpr (SMALL_TERMS) {
        return step % (CHAINS / 2) + (term + part > 0 ? CHAINS / 2 : 0);
    }
    return step % CHAINS;
}

// Weights in f16 are scaled up, so that small ones keep their bits.
constexpr float WEIGHT_SCALE = V::HALF ? 16384.0f : 1.0f;

// Shared memory, in bytes. A buffer has rows of the low plane, rows of the high plane, and norms; a buffer of keys also
// has the norms of the tile's values. generic/mod.rs computes the same sum.
constexpr uint max_of(uint a, uint b) {
    return a > b ? a : b;
}
// Norms around page means are halves. Buffers of values then hold the means of the tile's pages.
constexpr bool HAS_MEANS = K_CENTRED || V_CENTRED;
constexpr uint K_NORM_BYTES = K::BLOCKS * (K_CENTRED ? 2 : 4), V_NORM_BYTES = V::BLOCKS * (V_CENTRED ? 2 : 4);
constexpr uint TILE_PAGES = TILE > PAGE_KEYS ? TILE / PAGE_KEYS : 1;
constexpr uint MEAN_BYTES = mean_bytes(HEAD_DIM);
constexpr uint K_HIGH = TILE * K::PITCH;
constexpr uint K_NORMS = K_HIGH + TILE * K::HIGH_PITCH;
constexpr uint V_NORMS = K_NORMS + TILE * K_NORM_BYTES;
constexpr uint V_HIGH = TILE * V::PITCH;
constexpr uint V_MEANS = V_HIGH + TILE * V::HIGH_PITCH;
constexpr uint V_MEANS_END = V_MEANS + (V_CENTRED ? TILE_PAGES * MEAN_BYTES : 0);
constexpr uint BUFFER = (max_of(V_NORMS + TILE * V_NORM_BYTES, V_MEANS_END) + 15) / 16 * 16;
constexpr bool ONE_TABLE = K_CODEC == V_CODEC;
constexpr uint AT_TABLES = max_of(BUFFERS * BUFFER, ROWS * HEAD_DIM * 4);
constexpr uint AT_V_TABLE = ONE_TABLE ? AT_TABLES : AT_TABLES + K::TABLE_BYTES;
constexpr uint AT_QUERIES = AT_V_TABLE + V::TABLE_BYTES;
constexpr uint AT_WEIGHTS = AT_QUERIES + Q_TERMS * STEPS * NT * 256;
constexpr uint AT_MAXIMA = AT_WEIGHTS + VARIANTS * P_TERMS * KEY_GROUPS * NT * 256;
constexpr uint AT_ROWS = AT_MAXIMA + WARPS * (ROWS + 4) * 4;
constexpr uint ROW_BYTES = 32;
constexpr uint AT_PREFIX = AT_ROWS + ROWS * ROW_BYTES;
constexpr uint AT_PRODUCTS = AT_PREFIX + (MAX_SHARED_ITEMS + 8) * 4;
// Pages whose means are multiplied at a time.
constexpr uint PAGES_AT_ONCE = 16;
constexpr uint AT_SCALES = AT_PRODUCTS + (K_CENTRED ? PAGES_AT_ONCE * ROWS * 4 : 0);
constexpr uint AT_MASSES = AT_SCALES + (V_CENTRED ? PAGES_AT_ONCE * 4 : 0);
constexpr uint AT_BIASED = AT_MASSES + (V_CENTRED ? KEY_GROUPS * ROWS * 4 : 0);
// Floats between rows of products with the key bias, padded against bank conflicts.
constexpr uint BIASED_PITCH = HEAD_DIM + 4;
constexpr uint AT_END = AT_BIASED + (KEY_BIAS ? ROWS * (BIASED_PITCH + 1) * 4 : 0);
static_assert(AT_END == SHARED_BYTES, "attend: the shared memory that Rust asks for");
static_assert(MAX_MERGE * ROWS * 8 <= AT_MAXIMA - AT_QUERIES, "attend: room for the parts that are merged");
static_assert(PRODUCTS * 16 * WARPS == HEAD_DIM, "attend: every warp has a slice");

// A query row.
struct Row {
    Token token;
    // The positions that the row sees in the current segment; none in segments of other sequences.
    Range seen;
    // The factor from a product of query and key to a score.
    float factor;
    float m;
    float l;
};
static_assert(sizeof(Row) == ROW_BYTES, "attend: Row");

struct Buffers {
    // The batch's only token, if it has one.
    Token only;
    const uchar *q;
    Planes k;
    Planes v;
    const uint *positions;
    const uint *sequence;
    const uint *lens;
    Partials to;
    const uint *table;
    KeyBias bias;
};

struct Shared {
    uchar *base;

    uchar *buffer(uint i) const {
        return base + i % BUFFERS * BUFFER;
    }
    float *output() const {
        return reinterpret_cast<float *>(base);
    }
    uint *k_table() const {
        return reinterpret_cast<uint *>(base + AT_TABLES);
    }
    uint *v_table() const {
        return reinterpret_cast<uint *>(base + AT_V_TABLE);
    }
    uint2 *queries() const {
        return reinterpret_cast<uint2 *>(base + AT_QUERIES);
    }
    uint2 *weights() const {
        return reinterpret_cast<uint2 *>(base + AT_WEIGHTS);
    }
    float *maxima() const {
        return reinterpret_cast<float *>(base + AT_MAXIMA);
    }
    Row *rows() const {
        return reinterpret_cast<Row *>(base + AT_ROWS);
    }
    // 8 words of the block, then the prefix sums of the items' tiles.
    uint *words() const {
        return reinterpret_cast<uint *>(base + AT_PREFIX);
    }
    uint *prefix() const {
        return words() + 7;
    }

    // Over page means. [PAGES_AT_ONCE][ROWS]: the products of queries and the means of keys; [PAGES_AT_ONCE]: the
    // scales of the means of values; [KEY_GROUPS][ROWS]: the sums of the weights of 16 values.
    float *products() const {
        return reinterpret_cast<float *>(base + AT_PRODUCTS);
    }
    float *scales() const {
        return reinterpret_cast<float *>(base + AT_SCALES);
    }
    float *masses() const {
        return reinterpret_cast<float *>(base + AT_MASSES);
    }

    // For keys without their bias (generic/key_bias.h): a row's products, and the factor that converts them to products
    // of the scaled query.
    float *biased(uint r) const {
        return reinterpret_cast<float *>(base + AT_BIASED) + r * BIASED_PITCH;
    }
    float *bias_factors() const {
        return reinterpret_cast<float *>(base + AT_BIASED) + ROWS * BIASED_PITCH;
    }

    // The state of an item's rows, for merge_rows.h; its parts use the memory of the queries, which are no longer
    // needed.
    float *o() const {
        return output();
    }
    float2 end(uint r) const {
        return make_float2(rows()[r].m, rows()[r].l);
    }
    void set_end(uint r, float m, float l) const {
        rows()[r].m = m;
        rows()[r].l = l;
    }
    float2 *parts() const {
        return reinterpret_cast<float2 *>(queries());
    }
    uint *flag() const {
        return words() + 2;
    }
};

#endif
