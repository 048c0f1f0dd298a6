// What the parts of attend_quantised.cu share: who takes what, what lies where in shared memory, what the kernel is given.
#ifndef KVANT_ATTEND_QUANTISED_SHARED_H
#define KVANT_ATTEND_QUANTISED_SHARED_H
#include "attend_codes.h"
#include "attend_merge.h"

constexpr uint ROWS = 8;
constexpr uint KEYS = 16;
constexpr uint K_LANES = 4;
constexpr uint V_LANES = 8;
using KeyCodes = Codes<K_CODEC, K_LANES>;
using ValueCodes = Codes<V_CODEC, V_LANES>;
// Products of 16 coordinates, in a block of a row.
constexpr uint PRODUCTS = CHUNK / 16;
// Warps that share a group of keys, a block of the coordinates each; how many such teams there are.
constexpr uint TEAM = BLOCKS;
constexpr uint TEAMS = WARPS / TEAM;
// A warp waits for all of its loads at once. So those of the next group begin when the last group's have come: all of them
// (WHOLE_AHEAD), if registers hold the codes of two groups; else values while keys are worked on, and keys while values.
constexpr uint STAGES = WHOLE_AHEAD ? 2 : 1;

// Weights are scaled up, so that small ones keep their bits.
constexpr float WEIGHT_SCALE = 16384;

// Shared memory, in bytes: tables lie at multiples of 64 KiB, the rest comes before the first.
constexpr bool ONE_TABLE = K_CODEC == V_CODEC;
// Sums of all warps, for MERGED products.
constexpr uint AT_SUMS = 0;
constexpr uint AT_OUTPUT = AT_SUMS + WARPS * MERGED * 512;
constexpr uint AT_QUERIES = AT_OUTPUT + ROWS * HEAD_DIM * 4;
constexpr uint AT_PARTS = AT_QUERIES + ROWS * HEAD_DIM * 2;
// m and l of the rows of each warp.
constexpr uint AT_WARPS = AT_PARTS + MAX_MERGE * ROWS * 8;
constexpr uint WARP_FLOATS = 2 * ROWS;
constexpr uint AT_ENDS = AT_WARPS + WARPS * WARP_FLOATS * 4;
constexpr uint AT_FACTORS = AT_ENDS + ROWS * 8;
constexpr uint AT_MERGED_ENDS = AT_FACTORS + ROWS * 4;
constexpr uint AT_BARRIERS = AT_MERGED_ENDS + ROWS * 8;
constexpr uint AT_PREFIX = AT_BARRIERS + 64;
constexpr uint AT_END = AT_PREFIX + (MAX_SHARED_ITEMS + 8) * 4;
// The hardware has the first 1024 bytes for itself, or nothing.
static_assert(AT_END <= (63 << 10), "attend: room before the tables");
static_assert((64 << 10) + Table<K_CODEC>::BYTES + (ONE_TABLE ? 0 : Table<V_CODEC>::BYTES) == SHARED_BYTES,
              "attend: the shared memory that Rust asks for");
static_assert(CLUSTER == 1 || WARPS * MERGED * 512 >= (ROWS + CLUSTER - 1) / CLUSTER * HEAD_DIM * 4,
              "attend: room for merged rows");
static_assert(PRODUCTS % MERGED == 0, "attend: products are merged in whole rounds");
static_assert(TEAM == 1 || MERGED >= 2, "attend: room for the scores of a team");

template <typename T>
inline T *shared_at(uint at) {
    return reinterpret_cast<T *>(memory + at);
}

// In a cluster an address has the block's number in its highest byte, where lookups by 5 bits have nothing.
static_assert(CLUSTER == 1 || K_CODEC != TQ5 && V_CODEC != TQ5, "attend: 5 bits in a cluster");

inline uchar *k_table() {
    return memory + ((64 << 10) - shared_address(memory) % (1 << 24));
}

inline uchar *v_table() {
    return k_table() + (ONE_TABLE ? 0 : Table<K_CODEC>::BYTES);
}

// The state of an item's rows, for attend_merge.h.
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

// The same for the rows that this block has of a cluster's state, where the warps' sums were.
struct Merged {
    float *o() const {
        return shared_at<float>(AT_SUMS);
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
    // The only token, if there is one alone.
    bool alone;
    Token only;
};

#endif
