// Shared parts of attend_quantised.cu: the division of the work, the layout of shared memory, the kernel's arguments.
#ifndef KVANT_CUDA_ATTEND_QUANTISED_LAYOUT_H
#define KVANT_CUDA_ATTEND_QUANTISED_LAYOUT_H
#include "attend/codes.h"
#include "attend/merge_rows.h"

constexpr uint ROWS = 8;
constexpr uint KEYS = 16;
constexpr uint K_LANES = 4;
constexpr uint V_LANES = 8;
using KeyCodes = Codes<K_CODEC, K_LANES>;
using ValueCodes = Codes<V_CODEC, V_LANES>;
// Products of 16 coordinates, in a block of a row.
constexpr uint PRODUCTS = CHUNK / 16;
// Warps of a team, which shares a group of keys: each warp has one block of the coordinates. Number of teams.
constexpr uint TEAM = BLOCKS;
constexpr uint TEAMS = WARPS / TEAM;
// Keys or values are stored around the means of their pages (means.h). Groups of a team then follow one another.
constexpr bool HAS_MEANS = K_CENTRED || V_CENTRED;
constexpr uint STEP = HAS_MEANS ? KEYS : TEAMS * KEYS;
// Weights are scaled up, so that small ones keep their bits.
constexpr float WEIGHT_SCALE = 16384;

// Shared memory, in bytes: tables begin at address TABLES_AT, everything else is before and after them. The larger one
// of two compact tables is last, so that each begins at a multiple of its size.
constexpr bool ONE_TABLE = K_CODEC == V_CODEC;
constexpr uint K_TABLE = Table<K_CODEC>::BYTES, V_TABLE = ONE_TABLE ? 0 : Table<V_CODEC>::BYTES;
constexpr uint TABLES = K_TABLE + V_TABLE;
constexpr bool V_FIRST = COMPACT && !ONE_TABLE && V_TABLE < K_TABLE;
constexpr uint AT_K_TABLE = TABLES_AT + (V_FIRST ? V_TABLE : 0);
constexpr uint AT_V_TABLE = TABLES_AT + (V_FIRST || ONE_TABLE ? 0 : K_TABLE);
static_assert(!COMPACT || (AT_K_TABLE % K_TABLE == 0 && AT_V_TABLE % Table<V_CODEC>::BYTES == 0),
              "attend: a compact table begins at a multiple of its size");
static_assert(COMPACT || TABLES_AT % (64 << 10) == 0, "attend: other tables begin at multiples of 64 KiB");
constexpr uint AT_QUERIES = 0;
constexpr uint AT_PARTS = AT_QUERIES + ROWS * HEAD_DIM * 2;
// m and l of the rows of each warp.
constexpr uint AT_WARPS = AT_PARTS + MAX_MERGE * ROWS * 8;
constexpr uint WARP_FLOATS = 2 * ROWS;
constexpr uint AT_ENDS = AT_WARPS + WARPS * WARP_FLOATS * 4;
constexpr uint AT_FACTORS = AT_ENDS + ROWS * 8;
constexpr uint AT_MERGED_ENDS = AT_FACTORS + ROWS * 4;
constexpr uint AT_BARRIERS = AT_MERGED_ENDS + ROWS * 8;
constexpr uint AT_PREFIX = AT_BARRIERS + 64;
// Scores of a team.
constexpr uint AT_SCORES = (AT_PREFIX + (MAX_SHARED_ITEMS + 8) * 4 + 127) / 128 * 128;
// At the end of a part: its output; and the sums of all warps, here or after the tables, whichever has more free bytes.
constexpr uint AT_OUTPUT = AT_SCORES + (TEAM > 1 ? 2 * WARPS * 512 : 0);
constexpr uint AT_SUMS = AT_OUTPUT + ROWS * HEAD_DIM * 4;
// The hardware reserves the first 1024 bytes, or none.
constexpr uint AT_END = TABLES_AT - (1 << 10);
// Each warp's codes and norms of a group. Some warps have theirs before the tables, in the memory of the output and the
// sums; the other warps after the tables.
constexpr uint AT_BOX_NORMS = KEYS * (KeyCodes::LOW_PITCH + KeyCodes::HIGH_PITCH);
constexpr uint AT_BOX_VALUES = AT_BOX_NORMS + 2 * KEYS * 4;
constexpr uint AT_BOX_MEANS = AT_BOX_VALUES + KEYS * (ValueCodes::LOW_PITCH + ValueCodes::HIGH_PITCH);
// Each warp's lot of means: for each page the codes, the scale, the products with the queries, without bank conflicts.
constexpr uint LOT = 8;
constexpr uint AT_MEAN_SCALE = CHUNK;
constexpr uint AT_MEAN_PRODUCTS = CHUNK + 16;
constexpr uint MEAN_PITCH = AT_MEAN_PRODUCTS + ROWS * 4;
constexpr uint BOX = AT_BOX_MEANS + (HAS_MEANS ? LOT * MEAN_PITCH : 0);
constexpr uint BOXES_BEFORE = (AT_END - AT_OUTPUT) / BOX < WARPS ? (AT_END - AT_OUTPUT) / BOX : WARPS;
constexpr uint BYTES_BEFORE = AT_END - AT_SUMS;
constexpr uint BYTES_AFTER = SHARED_BYTES - TABLES_AT - TABLES;
static_assert(AT_SUMS < AT_END && TABLES_AT + TABLES + (WARPS - BOXES_BEFORE) * BOX <= SHARED_BYTES, "attend: shared memory");
constexpr bool SUMS_AFTER = BYTES_AFTER > BYTES_BEFORE;
constexpr uint SUMS_BYTES = SUMS_AFTER ? BYTES_AFTER : BYTES_BEFORE;
// Products of all warps that are merged at a time.
constexpr uint MERGED = SUMS_BYTES >= WARPS * PRODUCTS * 512       ? PRODUCTS
                        : SUMS_BYTES >= WARPS * PRODUCTS / 2 * 512 ? PRODUCTS / 2
                        : SUMS_BYTES >= WARPS * PRODUCTS / 4 * 512 ? PRODUCTS / 4
                                                                   : PRODUCTS / 8;
static_assert(SUMS_BYTES >= WARPS * MERGED * 512, "attend: room for sums");
static_assert(CLUSTER == 1 || SUMS_BYTES >= (ROWS + CLUSTER - 1) / CLUSTER * HEAD_DIM * 4, "attend: room for merged rows");

template <typename T>
inline T *shared_at(uint at) {
    return reinterpret_cast<T *>(memory + at);
}

// Shared memory by its address within the block's.
inline uchar *shared_from(uint address) {
    return memory + (address - shared_address(memory) % (1 << 24));
}

inline uchar *k_table() {
    return shared_from(AT_K_TABLE);
}

inline uchar *v_table() {
    return shared_from(AT_V_TABLE);
}

inline uchar *after_tables() {
    return shared_from(TABLES_AT + TABLES);
}

inline uchar *box_of(uint warp) {
    return warp < BOXES_BEFORE ? memory + AT_OUTPUT + warp * BOX : after_tables() + (warp - BOXES_BEFORE) * BOX;
}

inline float4 *sums_of_warps() {
    return reinterpret_cast<float4 *>(SUMS_AFTER ? after_tables() : memory + AT_SUMS);
}

inline uint team_barrier(uint team) {
    return shared_address(shared_at<ulong>(AT_BARRIERS) + team);
}

// The state of an item's rows, for merge_rows.h.
struct State {
    float *o() const {
        return shared_at<float>(AT_OUTPUT);
    }
    float2 end(uint r) const {
        return shared_at<float2>(AT_ENDS)[r];
    }
    void set_end(uint r, float m, float l) const {
        shared_at<float2>(AT_ENDS)[r] = make_float2(m, l);
    }
    float2 *parts() const {
        return shared_at<float2>(AT_PARTS);
    }
    uint *flag() const {
        return shared_at<uint>(AT_PREFIX);
    }
};

// As State, for this block's rows of the cluster's state, in the memory of the warps' sums.
struct Merged {
    float *o() const {
        return reinterpret_cast<float *>(sums_of_warps());
    }
    float2 end(uint r) const {
        return shared_at<float2>(AT_MERGED_ENDS)[r];
    }
    void set_end(uint r, float m, float l) const {
        shared_at<float2>(AT_MERGED_ENDS)[r] = make_float2(m, l);
    }
    float2 *parts() const {
        return shared_at<float2>(AT_PARTS);
    }
    uint *flag() const {
        return shared_at<uint>(AT_PREFIX);
    }
};

struct Buffers {
    const uchar *q;
    Planes k;
    Planes v;
    const uint *positions;
    const uint *sequence;
    const uint *lens;
    Partials to;
    // The only token, if `alone`.
    bool alone;
    Token only;
    const uint *table;
};

#endif
