// attend_quantised: attend (attend.cu) for decode over quantised keys and values, one query token at a time, up to 8 query
// heads of a KV head. q [T, H, D] -> out [T, H, D].
//
// A block takes pieces of items (attend_plan.h); an item is a token, with the heads of one KV head. Within a piece every
// warp goes its own way, without a barrier: it takes every WARPS-th group of 16 keys, with its own maxima and sums, and
// the warps' states are merged at the end. For each group:
//
//   scores   S^T = K q^T on tensor cores: rows are keys, columns are heads. A lane holds coordinates of 2 keys;
//   softmax  in registers; sums are scaled back only when a maximum has grown;
//   values   O^T += V^T P^T: rows are coordinates, columns are heads. A lane holds coordinates of 4 keys.
//
// With 512 coordinates a row, a group of keys belongs to two warps: each takes one block of the coordinates, and they add up
// their scores through shared memory.
//
// Codes go from device memory into the registers of the lane that looks them up (attend_codes.h): the order of coordinates
// within a product is free, so that a lane's operands are the 16 bytes that it loads. While a group is worked on the codes
// of the next are on their way.
//
// Operands are f16: centroids, queries (rotated, scaled into range) and weights, which carry the norm of their value relative
// to the largest so far. Products are summed in float. The output is rotated back once.
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
constexpr uint AT_PREFIX = AT_FACTORS + ROWS * 4;
constexpr uint AT_END = AT_PREFIX + (MAX_SHARED_ITEMS + 8) * 4;
// The hardware has the first 1024 bytes for itself.
static_assert(AT_END <= (63 << 10), "attend: room before the tables");
static_assert((64 << 10) + Table<K_CODEC>::BYTES + (ONE_TABLE ? 0 : Table<V_CODEC>::BYTES) == SHARED_BYTES,
              "attend: the shared memory that Rust asks for");
static_assert(PRODUCTS % MERGED == 0, "attend: products are merged in whole rounds");
static_assert(TEAM == 1 || MERGED >= 2, "attend: room for the scores of a team");

template <typename T>
inline T *shared_at(uint at) {
    return reinterpret_cast<T *>(memory + at);
}

inline uchar *k_table() {
    return memory + ((0 - shared_address(memory)) & 0xFFFF);
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

struct Buffers {
    const uchar *q;
    Planes k;
    Planes v;
    const uint *positions;
    const uint *sequence;
    const uint *lens;
    Partials to;
};

// ------------------------------------------------------------------------------------------------------------- queries

// Where a coordinate of a query stands, in elements: B operands of two products side by side for each lane.
inline uint query_place(uint row, uint coord) {
    constexpr uint RUN = KeyCodes::RUN;
    const uint c = coord % CHUNK;
    const uint t = c % (RUN * K_LANES) / RUN;
    // Of the lane's coordinates.
    const uint at = coord / CHUNK * (CHUNK / K_LANES) + c / (RUN * K_LANES) * RUN + c % RUN;
    return (at / 8 * 32 + row * 4 + t) * 8 + at % 8;
}

// Loads the heads of an item, rotated if need be, as B operands; rows that are not there are zeros.
inline void load_queries(const AttendParams &p, const Buffers &b, uint token, uint head) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    ushort *to = shared_at<ushort>(AT_QUERIES);
#pragma unroll 1
    for (uint r = warp; r < ROWS; r += WARPS) {
        if (r >= p.group) {
            for (uint i = lane; i < BLOCKS * PRODUCTS * 2; i += 32) {
                shared_at<uint4>(AT_QUERIES)[i / 4 * 32 + r * 4 + i % 4] = make_uint4(0, 0, 0, 0);
            }
            if (lane == 0) {
                shared_at<float>(AT_FACTORS)[r] = 0;
            }
            continue;
        }
        float x[HEAD_DIM / 32];
        const ulong at = (ulong(token) * p.kv_heads * p.group + head * p.group + r) * HEAD_DIM + lane;
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            x[i] = load(b.q, at + 32 * i, Q_DTYPE);
        }
        if (ROTATE_Q) {
            rotate<HEAD_DIM>(x, lane);
        }
        float largest = 0;
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            largest = fmaxf(largest, fabsf(x[i]));
        }
#pragma unroll
        for (uint step = 1; step < 32; step *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
        }
        const float2 range = to_half_range(largest);
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            to[query_place(r, lane + 32 * i)] = float_to_half(x[i] * range.x);
        }
        if (lane == 0) {
            shared_at<float>(AT_FACTORS)[r] = p.scale * range.y * (SOFTCAP ? 1 / p.softcap : 1.4426950408889634f);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------- keys

// The rows of a group of keys: key i of the group is at slot `slot` + i of a ring; past the last, the last.
struct Group {
    uint slot;
    uint last;

    uint slot_of(const AttendParams &p, uint i) const {
        uint at = slot + min(i, last);
        if (RING && at >= p.capacity) {
            at -= p.capacity;
            if (at >= p.capacity) {
                at %= p.capacity;
            }
        }
        return at;
    }
};

// What a lane reads from: its coordinates of the first row, norms of the first row, all of the warp's block.
struct Sources {
    const uchar *k_low;
    const uchar *k_high;
    const uchar *k_norms;
    const uchar *v_low;
    const uchar *v_high;
    const uchar *v_norms;
    // Rows between slots.
    uint row_slot;
};

template <uint BYTES>
inline const uchar *row_at(const uchar *first, uint row_slot, uint slot) {
    return first + ulong(slot) * (row_slot * BYTES);
}

using Keys = KeyCodes[2];
using Values = ValueCodes[4];

inline void load_keys(const AttendParams &p, const Sources &from, Group group, Keys &to, bool there) {
    const uint g = threadIdx.x % 32 / 4;
#pragma unroll
    for (uint i = 0; i < 2; i++) {
        const uint slot = group.slot_of(p, g + 8 * i);
        to[i].load(row_at<KeyCodes::LOW_ROW>(from.k_low, from.row_slot, slot),
                   row_at<KeyCodes::HIGH_ROW>(from.k_high, from.row_slot, slot), there);
    }
}

inline void load_values(const AttendParams &p, const Sources &from, Group group, Values &to, bool there) {
    const uint t = threadIdx.x % 4;
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        const uint slot = group.slot_of(p, 2 * t + i % 2 + i / 2 * 8);
        to[i].load(row_at<ValueCodes::LOW_ROW>(from.v_low, from.row_slot, slot),
                   row_at<ValueCodes::HIGH_ROW>(from.v_high, from.row_slot, slot), there);
    }
}

// Norms of the keys or values g and g + 8 of a group.
using Norms = uint[2];

inline void load_norms(const AttendParams &p, const Sources &from, const uchar *norms, Group group, Norms &to, bool there) {
    const uint g = threadIdx.x % 32 / 4;
#pragma unroll
    for (uint i = 0; i < 2; i++) {
        load_once<4>(row_at<4 * BLOCKS>(norms, from.row_slot, group.slot_of(p, g + 8 * i)), to + i, there);
    }
}

// ------------------------------------------------------------------------------------------------------------ the loop

// A lane's share of a warp's state: of columns 2t and 2t + 1 the maximum, the same in all lanes, and the lane's part of l;
// sums of coordinates by row and column.
struct Work {
    float m[2];
    float l[2];
    float o[PRODUCTS][4];
    // Of the values' norms so far, rounded up to a power of two.
    float norm;
};

constexpr float LOWEST = -3.402823466e38f;
constexpr float SMALLEST_NORM = 7.888609052210118e-31f;

// The B operands of two products at a time, from shared memory, or from registers where there are enough.
struct Queries {
    const uint4 *shared;
    uint4 held[QUERIES_HELD ? PRODUCTS / 2 : 1];

    Queries(uint block) : shared(shared_at<uint4>(AT_QUERIES) + block * (PRODUCTS / 2) * 32 + threadIdx.x % 32) {
        if constexpr (QUERIES_HELD) {
#pragma unroll
            for (uint i = 0; i < PRODUCTS / 2; i++) {
                held[i] = shared[i * 32];
            }
        }
    }
    uint4 at(uint i) const {
        return QUERIES_HELD ? held[QUERIES_HELD ? i : 0] : shared[i * 32];
    }
};

// S^T of a group: the products of the warp's coordinates, with the keys' norms. `after`: what to do when a product is done.
template <typename After>
inline void multiply_keys(const Lookup<K_CODEC> &lookup, const Queries &queries, const Keys &keys, const Norms &norms,
                          float (&s)[4], After after) {
    float sums[2][4] = {};
#pragma unroll
    for (uint i = 0; i < KeyCodes::LOADS; i++) {
#pragma unroll
        for (uint unit = 0; unit < KeyCodes::UNITS; unit++) {
            uint4 q[2];
#pragma unroll
            for (uint j = 0; j < 2; j++) {
                q[j] = queries.at((i * KeyCodes::UNITS + unit) * 2 + j);
            }
            key_operands(keys[0], keys[1], i, unit, lookup, [&](uint product, const uint(&a)[4]) {
                const uint4 of = q[product / 2];
                mma<true>(sums[product % 2], a, product % 2 == 0 ? make_uint2(of.x, of.y) : make_uint2(of.z, of.w));
                after((i * KeyCodes::UNITS + unit) * 4 + product);
            });
        }
    }
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        s[c] = (sums[0][c] + sums[1][c]) * __uint_as_float(norms[c / 2]);
    }
}

// Adds up the scores of a team. Two buffers in turn: a warp is at most one group ahead of the other.
inline void add_up(float (&s)[4], uint turn) {
    if constexpr (TEAM > 1) {
        const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float4 *scores = shared_at<float4>(AT_SUMS) + turn % 2 * (WARPS * 32) + lane;
        scores[warp * 32] = make_float4(s[0], s[1], s[2], s[3]);
        asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / TEAM), "n"(32 * TEAM) : "memory");
        const float4 other = scores[(warp ^ 1) * 32];
        s[0] += other.x;
        s[1] += other.y;
        s[2] += other.z;
        s[3] += other.w;
    }
}

// O^T of the warp's coordinates.
template <typename After>
inline void multiply_values(const Lookup<V_CODEC> &lookup, const Values &values, uint2 weights, Work &work, After after) {
#pragma unroll
    for (uint i = 0; i < ValueCodes::LOADS; i++) {
#pragma unroll
        for (uint unit = 0; unit < ValueCodes::UNITS; unit++) {
            value_operands(values, i, unit, lookup, [&](uint product, const uint(&a)[4]) {
                mma<true>(work.o[(i * ValueCodes::UNITS + unit) * 8 + product], a, weights);
                after((i * ValueCodes::UNITS + unit) * 8 + product);
            });
        }
    }
}

// The maxima, and the largest norm, over all lanes; what has been summed so far relative to them.
inline void grow(const float (&s)[4], float norm, Work &work) {
    float m[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
    for (uint step = 4; step < 32; step *= 2) {
        m[0] = fmaxf(m[0], __shfl_xor_sync(0xFFFFFFFF, m[0], step));
        m[1] = fmaxf(m[1], __shfl_xor_sync(0xFFFFFFFF, m[1], step));
        norm = fmaxf(norm, __shfl_xor_sync(0xFFFFFFFF, norm, step));
    }
    const float grown = fmaxf(work.norm, power_above(norm));
    const float decay = work.norm / grown;
    work.norm = grown;
    float factor[2];
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        m[c] = fmaxf(m[c], work.m[c]);
        factor[c] = factor_of(work.m[c], m[c]);
        work.m[c] = m[c];
        work.l[c] *= factor[c];
        factor[c] *= decay;
    }
#pragma unroll
    for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            work.o[i][c] *= factor[c % 2];
        }
    }
}

// The weights of a group from its raw scores, as B operands.
inline uint2 weigh(const AttendParams &p, Group group, const float (&factor)[2], Norms &norms, float (&s)[4], Work &work) {
    const uint g = threadIdx.x % 32 / 4;
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        s[c] *= factor[c % 2];
        if (SOFTCAP) {
            s[c] = p.softcap * 1.4426950408889634f * tanhf(s[c]);
        }
    }
    if (group.last + 1 < KEYS) {
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            if (g + 8 * i > group.last) {
                s[2 * i] = s[2 * i + 1] = nothing();
                norms[i] = 0;
            }
        }
    }
    const float norm = fmaxf(fabsf(__uint_as_float(norms[0])), fabsf(__uint_as_float(norms[1])));
    const bool grows = fmaxf(s[0], s[2]) > work.m[0] || fmaxf(s[1], s[3]) > work.m[1] || norm >= work.norm;
    if (__any_sync(0xFFFFFFFF, grows)) {
        grow(s, norm, work);
    }
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        s[c] = exp2_fast(s[c] - work.m[c % 2]);
        work.l[c % 2] += s[c];
    }
    const float inverse = WEIGHT_SCALE / work.norm;
    const float low = __uint_as_float(norms[0]) * inverse, high = __uint_as_float(norms[1]) * inverse;
    return make_uint2(transpose8(pack<true>(s[0] * low, s[1] * low)), transpose8(pack<true>(s[2] * high, s[3] * high)));
}

// A warp's way through the keys of a piece.
struct Way {
    Sources from;
    uint end;
    // Of the group to be worked on, its first key.
    uint first;
    Group groups[STAGES];
    Keys k[STAGES];
    Values v[STAGES];
    Norms k_norms[STAGES];
    Norms v_norms[STAGES];

    template <uint STAGE>
    void load_keys_of(const AttendParams &p, bool there) {
        load_norms(p, from, from.k_norms, groups[STAGE], k_norms[STAGE], there);
        load_norms(p, from, from.v_norms, groups[STAGE], v_norms[STAGE], there);
        load_keys(p, from, groups[STAGE], k[STAGE], there);
    }
    template <uint STAGE>
    void load_values_of(const AttendParams &p, bool there) {
        load_values(p, from, groups[STAGE], v[STAGE], there);
    }

    // Begins to load.
    void begin(const AttendParams &p, const Sources &sources, Range keys) {
        from = sources;
        end = keys.end;
        first = keys.first + threadIdx.x / 32 / TEAM * KEYS;
        const bool there = first < end;
        groups[0] = {RING && there ? first % p.capacity : first, there ? min(KEYS, end - first) - 1 : 0};
        load_keys_of<0>(p, there);
        if (WHOLE_AHEAD) {
            load_values_of<0>(p, there);
        }
    }

    void go(const AttendParams &p, Work &work) {
        const uint t = threadIdx.x % 4;
        const float factor[2] = {shared_at<float>(AT_FACTORS)[2 * t], shared_at<float>(AT_FACTORS)[2 * t + 1]};
        const Lookup<K_CODEC> k_lookup(k_table());
        const Lookup<V_CODEC> v_lookup(v_table());
        const Queries queries(threadIdx.x / 32 % TEAM);
#pragma unroll 1
        for (uint turn = 0; first < end; turn++) {
            step<0>(p, work, k_lookup, v_lookup, queries, factor, WHOLE_AHEAD ? 0 : turn);
            if (WHOLE_AHEAD && first < end) {
                step<STAGES - 1>(p, work, k_lookup, v_lookup, queries, factor, 1);
            }
        }
    }

    // Works on the group of a stage.
    template <uint STAGE>
    void step(const AttendParams &p, Work &work, const Lookup<K_CODEC> &k_lookup, const Lookup<V_CODEC> &v_lookup,
              const Queries &queries, const float (&factor)[2], uint turn) {
        constexpr uint OTHER = WHOLE_AHEAD ? 1 - STAGE : 0;
        const Group group = groups[STAGE];
        const uint key = first + TEAMS * KEYS;
        const bool more = key < end;
        Group next = {group.slot + TEAMS * KEYS, more ? min(KEYS, end - key) - 1 : 0};
        if (RING && next.slot >= p.capacity) {
            next.slot %= p.capacity;
        }
        float s[4];
        multiply_keys(k_lookup, queries, k[STAGE], k_norms[STAGE], s, [&](uint product) {
            if (product > 0) {
                return;
            }
            if (WHOLE_AHEAD) {
                groups[OTHER] = next;
                load_keys_of<OTHER>(p, more);
                load_values_of<OTHER>(p, more);
            } else {
                load_values_of<0>(p, true);
            }
        });
        add_up(s, turn);
        const uint2 weights = weigh(p, group, factor, v_norms[STAGE], s, work);
        multiply_values(v_lookup, v[STAGE], weights, work, [&](uint product) {
            if (!WHOLE_AHEAD && product == 0) {
                groups[0] = next;
                load_keys_of<0>(p, more);
            }
        });
        first = key;
    }
};

// Merges the warps' states into the block's.
inline void merge_warps(const AttendParams &p, Work &work, const State &state) {
    const uint thread = threadIdx.x, warp = thread / 32, lane = thread % 32, t = lane % 4;
    float *warps = shared_at<float>(AT_WARPS);
#pragma unroll
    for (uint c = 0; c < 2; c++) {
#pragma unroll
        for (uint step = 4; step < 32; step *= 2) {
            work.l[c] += __shfl_xor_sync(0xFFFFFFFF, work.l[c], step);
        }
        if (lane < 4) {
            warps[warp * WARP_FLOATS + 2 * t + c] = work.m[c];
            warps[warp * WARP_FLOATS + ROWS + 2 * t + c] = work.l[c];
        }
    }
    __syncthreads();
    float m[2] = {LOWEST, LOWEST};
#pragma unroll
    for (uint w = 0; w < WARPS; w++) {
        m[0] = fmaxf(m[0], warps[w * WARP_FLOATS + 2 * t]);
        m[1] = fmaxf(m[1], warps[w * WARP_FLOATS + 2 * t + 1]);
    }
    if (thread < ROWS) {
        float most = LOWEST, l = 0;
#pragma unroll
        for (uint w = 0; w < WARPS; w++) {
            most = fmaxf(most, warps[w * WARP_FLOATS + thread]);
        }
#pragma unroll
        for (uint w = 0; w < WARPS; w += TEAM) {
            l += warps[w * WARP_FLOATS + ROWS + thread] * factor_of(warps[w * WARP_FLOATS + thread], most);
        }
        state.set_end(thread, most == LOWEST ? nothing() : most, l);
    }
    const float unscale = work.norm * (1 / WEIGHT_SCALE);
    const float factor[2] = {factor_of(work.m[0], m[0]) * unscale, factor_of(work.m[1], m[1]) * unscale};
    float4 *sums = shared_at<float4>(AT_SUMS);
#pragma unroll
    for (uint round = 0; round < PRODUCTS / MERGED; round++) {
        if (round > 0) {
            __syncthreads();
        }
        if (2 * t < p.group) {
#pragma unroll
            for (uint i = 0; i < MERGED; i++) {
                const float(&o)[4] = work.o[round * MERGED + i];
                sums[(warp * MERGED + i) * 32 + lane] =
                    make_float4(o[0] * factor[0], o[1] * factor[1], o[2] * factor[0], o[3] * factor[1]);
            }
        }
        __syncthreads();
#pragma unroll 1
        for (uint at = thread; at < TEAM * MERGED * 32; at += THREADS) {
            if (2 * t >= p.group) {
                continue;
            }
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
            for (uint w = 0; w < WARPS; w += TEAM) {
                const float4 x = sums[w * MERGED * 32 + at];
                sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
            }
            const uint product = round * MERGED + at / 32 % MERGED;
            const uint coord = at / (MERGED * 32) * CHUNK + ValueCodes::coord(lane / 4, product * 2);
            float *o = state.o() + 2 * t * HEAD_DIM + coord;
            o[0] = sum.x;
            o[1] = sum.z;
            o[HEAD_DIM] = sum.y;
            o[HEAD_DIM + 1] = sum.w;
        }
    }
    __syncthreads();
}

// One piece, from the queries to the output or the partial state.
inline void work_on(const AttendParams &p, const Buffers &b, const Piece &piece, bool &tables_filled) {
    const uint thread = threadIdx.x, lane = thread % 32, g = lane / 4, t = lane % 4;
    const Token token = load_token(p, b.positions, b.sequence, b.lens, piece.item);
    Range keys = {0, 0};
    if (token.sequence != NONE) {
        const Range seen = visible(p, token);
        keys = {min(seen.first + piece.tiles.first * TILE, seen.end), min(seen.first + piece.tiles.end * TILE, seen.end)};
    }
    Way way;
    way.first = way.end = 0;
    if (keys.first < keys.end) {
        const ulong row = token.sequence * p.row_sequence + piece.head * p.row_head;
        const uint coord = thread / 32 % TEAM * CHUNK;
        const uint k_coord = coord + t * KeyCodes::RUN, v_coord = coord + g * ValueCodes::RUN;
        const Sources from = {b.k.low + row * KeyCodes::LOW_ROW + k_coord * KeyCodes::LOW_BITS / 8,
                              b.k.high + row * KeyCodes::HIGH_ROW + k_coord * KeyCodes::HIGH_BITS / 8,
                              reinterpret_cast<const uchar *>(b.k.norms + row * BLOCKS + coord / 256),
                              b.v.low + row * ValueCodes::LOW_ROW + v_coord * ValueCodes::LOW_BITS / 8,
                              b.v.high + row * ValueCodes::HIGH_ROW + v_coord * ValueCodes::HIGH_BITS / 8,
                              reinterpret_cast<const uchar *>(b.v.norms + row * BLOCKS + coord / 256),
                              p.row_slot};
        way.begin(p, from, keys);
    }
    // The last piece is done with shared memory.
    __syncthreads();
    if (!tables_filled) {
        tables_filled = true;
        Table<K_CODEC>::fill(k_table(), thread, THREADS);
        if (!ONE_TABLE) {
            Table<V_CODEC>::fill(v_table(), thread, THREADS);
        }
    }
    load_queries(p, b, piece.item, piece.head);
    __syncthreads();

    Work work = {};
    work.m[0] = work.m[1] = LOWEST;
    work.norm = SMALLEST_NORM;
    way.go(p, work);
    const State state = {};
    merge_warps(p, work, state);
    if (piece.parts > 1 && !merge(p, b.to, state, piece, p.group)) {
        return;
    }
    finish_rows<true>(b.to, state, p.group, [&](uint r) {
        return ulong(piece.item) * p.kv_heads * p.group + piece.head * p.group + r;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_quantised(const uchar *q, uchar *out, const uchar *k_low, const uchar *k_high, const float *k_norms,
                     const uchar *v_low, const uchar *v_high, const float *v_norms, const uint *positions,
                     const uint *sequence, const uint *lens, float *partials, uint *counters, float *state,
                     const AttendParams p) {
    const Buffers b = {q,         {k_low, k_high, k_norms}, {v_low, v_high, v_norms}, positions, sequence, lens,
                       {partials, counters, state, out}};
    const uint thread = threadIdx.x, block = blockIdx.x;
    bool tables_filled = false;

    // The line of all tiles: items in order, within an item its heads. prefix[i]: tiles of one head before item i. With
    // splits, the line of the block's own item and head.
    const bool shared_evenly = p.splits == 0;
    const uint splits = max(p.splits, 1u);
    const uint pair = block / splits;
    const uint items = shared_evenly ? p.items : 1, heads = shared_evenly ? p.kv_heads : 1;
    const uint first_item = shared_evenly ? 0 : pair / p.kv_heads;
    uint *prefix = shared_at<uint>(AT_PREFIX) + 7;
    for (uint i = thread; i < items; i += THREADS) {
        const Token token = load_token(p, positions, sequence, lens, first_item + i);
        // At least one, so that somebody writes its output.
        prefix[i + 1] = token.sequence == NONE ? 1 : max(tiles_of(visible(p, token)), 1u);
    }
    if (thread == 0) {
        prefix[0] = 0;
    }
    __syncthreads();
    if (items > 1) {
        if (thread == 0) {
#pragma unroll 1
            for (uint i = 1; i < items; i++) {
                prefix[i + 1] += prefix[i];
            }
        }
        __syncthreads();
    }
    const uint tiles = prefix[items] * heads;
    const uint blocks = min(shared_evenly ? gridDim.x : splits, tiles);
    const uint own = shared_evenly ? block : block % splits;
    if (own >= blocks) {
        return;
    }
    const Line line(tiles, blocks);
    uint at = line.first(own);
    const uint end = line.first(own + 1);
    uint item = 0;
#pragma unroll 1
    while (at < end) {
        while (prefix[item + 1] * heads <= at) {
            item++;
        }
        const uint of_item = prefix[item + 1] - prefix[item];
        const uint head = (at - prefix[item] * heads) / of_item;
        const uint first = prefix[item] * heads + head * of_item;
        const uint first_block = line.part_of(first), last_block = line.part_of(first + of_item - 1);
        const bool at_its_start = line.first(first_block) == first;
        // The other states' slots follow 2 apart: a block has one for what it begins with, one for what it ends with.
        const uint slot = 2 * (block - own + first_block);
        const Piece piece = {first_item + item,
                             shared_evenly ? head : pair % p.kv_heads,
                             {at - first, min(end - first, of_item)},
                             last_block - first_block + 1,
                             own - first_block,
                             slot + (at_its_start ? 0 : 1),
                             slot + 2};
        work_on(p, b, piece, tables_filled);
        at = first + piece.tiles.end;
    }
}
