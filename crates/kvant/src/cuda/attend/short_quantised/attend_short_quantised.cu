// attend_short_quantised: attend_quantised for short contexts: decode over quantised keys and values that fit into the
// shared memory of a cluster; one query token at a time, up to 8 query heads (rows below) of a KV head.
//
// q [T, H, D] -> out [T, H, D].
//
// As in attend_short.cu every token and KV head has a cluster of blocks, and a block copies all of its codes at once
// (copies.h). Then
//
//   a warp rotates a query (queries.h);
//   it computes the scores of 16 keys, S^T = K q^T, and their weights relative to its own maximum, times the norms of
//     the values;
//   after a barrier it computes 64 of the output's coordinates, O^T = V^T P^T, over the block's keys or a part of them
//     (values.h);
//   the block adds up these parts and sends each row to the shared memory of the cluster's block with the row's number;
//   that block merges the states of all blocks and rotates the row back.
//
// Centroids are looked up in tables in shared memory (attend/codes.h). They begin where the block's memory begins, not
// at a multiple of 64 KiB, which leaves room for more codes. Operands are f16, products are summed in float.
//
// Over pages (work.h) a warp copies its keys from the one or two pages that hold them. A key that no page holds is
// masked. Around page means (means.h) scores get the product of query and mean, and o gets the mean of values times the
// sum of the weights of its page.
//
// Tables are filled, and positions, sequences, lengths and page tables are read, before the previous kernel has ended
// (device/dependent_launch.h).
#include "attend/short_quantised/means.h"
#include "device/dependent_launch.h"

using ValueCodes = SliceCodes<V_CODEC>;
using ValueRows = ValueCodes::C;
using ValueTable = Table<V_CODEC>;

// Padding between stretches, so that lanes read two rows of every stretch without bank conflicts. `run`: bytes of a row
// that each of four lanes reads.
inline constexpr uint gap(uint run) {
    return run >= 32 || run <= 4 ? 16 : 4 * run;
}
constexpr uint K_LOW = TILE * KeyCodes::LOW_ROW + gap(KeyCodes::LOW_RUN);
constexpr uint K_HIGH = TILE * KeyCodes::HIGH_ROW + gap(KeyCodes::HIGH_RUN);
constexpr uint V_LOW = TILE * ValueRows::LOW_ROW + 16;
constexpr uint V_HIGH = TILE * ValueRows::HIGH_ROW + 16;

// Copies of long values would delay those of keys. Long values are copied after all keys.
constexpr uint K_ROW = KeyCodes::LOW_ROW + KeyCodes::HIGH_ROW, V_ROW = ValueRows::LOW_ROW + ValueRows::HIGH_ROW;
constexpr bool VALUES_LATER = K_ROW + V_ROW >= 256;

// Slices of a row; parts into which the keys are divided among warps.
constexpr uint SLICES = HEAD_DIM / SLICE;
constexpr uint PARTS = WARPS / SLICES;
// Bytes between rows of the parts, padded so that few lanes share a bank.
constexpr uint PARTS_ROW = WARPS * SLICE * 4 + 32;
constexpr uint PARTS_BYTES = PARTS > 1 ? GROUP * PARTS_ROW : 0;
constexpr uint K_BYTES = WARPS * K_LOW > PARTS_BYTES ? WARPS * K_LOW : PARTS_BYTES;
constexpr float WEIGHT_SCALE = 16384;
constexpr float LOWEST = -3.402823466e38f;

// short_quantised/mod.rs computes the same size.
struct Shared {
    // Later, the parts of the output overwrite the keys: row by row, each with the parts of all warps.
    uchar k_low[K_BYTES];
    uchar v_low[WARPS * V_LOW];
    uchar k_high[KeyCodes::HIGH_BITS > 0 ? WARPS * K_HIGH : 16];
    uchar v_high[ValueRows::HIGH_BITS > 0 ? WARPS * V_HIGH : 16];
    uchar k_means[K_MEANS];
    uchar v_means[V_MEANS];
    // B operands of the products with keys, and with values.
    uint4 queries[HEAD_DIM];
    uint2 weights[BLOCKS][WARPS][32];
    // Received from the cluster's blocks: outputs, and for each warp the largest score and the sum of the weights.
    float o[CLUSTER][HEAD_DIM];
    float2 ends[CLUSTER][WARPS];
    // By warps: a whole number above the scores of each query row, a power of two above the norms of the values.
    float maxima[8][WARPS];
    float norms[BLOCKS][WARPS];
    // The sums of the weights of each page, by warps and query rows.
    float masses[V_CENTRED ? WARPS : 1][MAX_PAGES][8];
    // Factors from products to scores.
    float factors[8];
    // Barriers: for keys, values, ends, outputs.
    ulong keys;
    ulong values;
    ulong all_ends;
    ulong all_o;
};

// Tables first. The hardware reserves the first 1024 bytes, or none.
constexpr uint AT_TABLES = 1024;
constexpr uint AT_V_TABLE = AT_TABLES + (K_CODEC == V_CODEC ? 0 : KeyTable::BYTES);
using KeyLookup = Lookup<K_CODEC, AT_TABLES>;
using ValueLookup = Lookup<V_CODEC, AT_V_TABLE>;
constexpr uint AT_SHARED = AT_V_TABLE + ValueTable::BYTES;
static_assert(AT_SHARED + (sizeof(Shared) + 15) / 16 * 16 == SHARED_BYTES, "attend: the shared memory that Rust asks for");

inline uchar *at_place(uint place) {
    return memory + (place - (shared_address(memory) & 0xFFFFFF));
}

// Norms are floats or halves.
template <bool HALVES>
inline float norm(const uchar *norms, uint i) {
    return HALVES ? half_to_float(reinterpret_cast<const ushort *>(norms)[i]) : reinterpret_cast<const float *>(norms)[i];
}

// Pairs of f16.
inline uint multiply_halves(uint a, uint b) {
    uint out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// Products of 16 keys, without their norms, for each block of the coordinates. A lane gets the products of the two keys
// at row `unit` of stretch g with query rows 2t and 2t + 1.
inline void multiply_keys(const Shared &shared, const KeyLookup &lookup, uint unit, float (&s)[BLOCKS][4]) {
    const uint lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr uint CHAINS = 4;
#pragma unroll
    for (uint b = 0; b < BLOCKS; b++) {
        float sums[CHAINS][4] = {};
        KeyCodes keys[2];
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            const uint row = 2 * unit + i;
            const uint low = row * KeyCodes::LOW_ROW + b * KeyCodes::LOW_BYTES + t * KeyCodes::LOW_RUN;
            const uint high = row * KeyCodes::HIGH_ROW + b * KeyCodes::HIGH_BYTES + t * KeyCodes::HIGH_RUN;
            keys[i].read(shared.k_low + g * K_LOW + low, shared.k_high + g * K_HIGH + high);
        }
        uint chain = 0;
#pragma unroll
        for (uint i = 0; i < KeyCodes::LOADS * KeyCodes::UNITS; i++) {
            uint4 q[2] = {};
            if (g < GROUP) {
#pragma unroll
                for (uint j = 0; j < 2; j++) {
                    q[j] = shared.queries[(b * (CHUNK / 32) + i * 2 + j) * 32 + lane];
                }
            }
            const auto multiply = [&](uint product, const uint(&a)[4]) {
                const uint4 of = q[product / 2];
                mma<true>(sums[chain++ % CHAINS], a, product % 2 == 0 ? make_uint2(of.x, of.y) : make_uint2(of.z, of.w));
            };
            key_operands(keys[0], keys[1], i / KeyCodes::UNITS, i % KeyCodes::UNITS, lookup, multiply);
        }
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            s[b][c] = (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]);
        }
    }
}

// Merges what the cluster's blocks have sent for a row, in their order, and writes it to the output, if `writes`.
// sees(): whether the token sees any key. One warp calls it.
template <typename Sees>
inline void finish(const AttendParams &p, Shared &shared, ulong row, bool writes, const QueryRuns &runs, Sees sees, uchar *out,
                   const RowEnds &ends) {
    constexpr uint RUN = QueryRuns::RUN;
    const uint lane = threadIdx.x % 32;
    // Outputs arrive meanwhile.
    wait_if_late<EARLIER>();
    const float earlier_end = ends.of_earlier(row);
    float before[HEAD_DIM / 32];
#pragma unroll
    for (uint i = 0; i < HEAD_DIM / 32; i++) {
        before[i] = ends.earlier_at<float>(row * HEAD_DIM + QueryRuns::coord(i / RUN, lane) + i % RUN);
    }
    // Each lane has two of the cluster's warps: one of the lower four blocks, one of the upper four.
    barrier_wait(shared_address(&shared.all_ends), 0);
    const float2 low = shared.ends[0][lane], high = shared.ends[CLUSTER / 2][lane];
    float m[2] = {low.x, high.x};
#pragma unroll
    for (uint step = 1; step < WARPS; step *= 2) {
        m[0] = fmaxf(m[0], __shfl_xor_sync(0xFFFFFFFF, m[0], step));
        m[1] = fmaxf(m[1], __shfl_xor_sync(0xFFFFFFFF, m[1], step));
    }
    float whole = fmaxf(m[0], m[1]);
#pragma unroll
    for (uint step = WARPS; step < 32; step *= 2) {
        whole = fmaxf(whole, __shfl_xor_sync(0xFFFFFFFF, whole, step));
    }
    float l = low.y * factor_of(low.x, whole) + high.y * factor_of(high.x, whole);
    const float of_blocks[2] = {factor_of(m[0], whole), factor_of(m[1], whole)};
    float f[CLUSTER];
#pragma unroll
    for (uint b = 0; b < CLUSTER; b++) {
        f[b] = __shfl_sync(0xFFFFFFFF, of_blocks[b / (CLUSTER / 2)], b % (CLUSTER / 2) * WARPS);
    }
    barrier_wait(shared_address(&shared.all_o), 0);
    float x[HEAD_DIM / 32] = {};
#pragma unroll
    for (uint b = 0; b < CLUSTER; b++) {
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i += RUN) {
            uint of_block[RUN];
            read_bytes<4 * RUN>(reinterpret_cast<const uchar *>(&shared.o[b][QueryRuns::coord(i / RUN, lane)]), of_block);
#pragma unroll
            for (uint j = 0; j < RUN; j++) {
                x[i + j] += __uint_as_float(of_block[j]) * f[b];
            }
        }
    }
    if (!writes) {
        return;
    }
    transform_warp<HEAD_DIM>(x, l, lane);
    runs.flip(x);
    const RowFactors factors = finish_row(p, ends, row, whole, l, earlier_end, sees);
    const float own = norm_of_rotation() * factors.own;
#pragma unroll
    for (uint i = 0; i < HEAD_DIM / 32; i++) {
        x[i] = EARLIER ? x[i] * own + before[i] * factors.earlier : x[i] * own;
    }
#pragma unroll
    for (uint i = 0; i < HEAD_DIM / 32; i += RUN) {
        const uint coord = QueryRuns::coord(i / RUN, lane);
        if constexpr (RUN == 4) {
            store4(out, row * HEAD_DIM + coord, make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]), OUT_DTYPE);
        } else {
            store(out, row * HEAD_DIM + coord, x[i], OUT_DTYPE);
            store(out, row * HEAD_DIM + coord + 1, x[i + 1], OUT_DTYPE);
        }
    }
    if (ENDS) {
        // All lanes have read the earlier end.
        __syncwarp();
        if (lane == 0) {
            ends.leave(row, factors.end);
        }
    }
}

// Context of all phases: the thread, the block's rank in its cluster, its memory, and the addresses of its
// barriers.
struct Block {
    const AttendParams &p;
    Shared &shared;
    uint thread;
    uint warp;
    uint lane;
    uint g;
    uint t;
    uint rank;
    uint keys;
    uint values;
    uint all_ends;
    uint all_o;
};

// Initialises the block's barriers. All blocks of the cluster call it before cluster_wait().
inline void init_barriers(const Block &b) {
    if (b.thread == 0) {
        barrier_init(b.keys, WARPS);
        barrier_init(b.values, WARPS);
        barrier_init(b.all_ends, 1);
        barrier_init(b.all_o, 1);
    }
    show_barriers_to_copies();
    __syncthreads();
    cluster_arrive_early();
}

// The bytes that the cluster's blocks send. Not next to barrier_init: racecheck would report a race.
inline void expect_states(const Block &b) {
    if (b.thread == 0) {
        barrier_expect(b.all_ends, sizeof(b.shared.ends));
        barrier_expect(b.all_o, sizeof(b.shared.o));
    }
}

inline void fill_tables(uint thread) {
    KeyTable::fill(at_place(AT_TABLES), thread, THREADS);
    if (K_CODEC != V_CODEC) {
        ValueTable::fill(at_place(AT_V_TABLE), thread, THREADS);
    }
}

// The two keys whose scores a lane computes.
struct LaneKeys {
    // Among the keys of the block.
    uint first;
    bool there[2];
    // Offsets of their norms, in bytes.
    ulong k_norms_at[2];
    ulong v_norms_at[2];
};

// Locates the lane's keys, and prefetches their norms.
inline LaneKeys locate_keys(const Block &b, const Own &own, const uchar *k_norms, const uchar *v_norms) {
    LaneKeys keys;
    keys.first = b.g * own.length + b.warp * 2;
#pragma unroll
    for (uint i = 0; i < 2; i++) {
        keys.there[i] = b.warp * 2 < own.length && keys.first + i < own.count;
        uint slot = own.slot_of(b.p, keys.there[i] ? keys.first + i : 0);
        ulong moved = 0;
        if (PAGE_SHIFT > 0) {
            const uint page = own.pages.of(slot);
            keys.there[i] = keys.there[i] && page != NONE;
            moved = page_bytes_or_zero(page);
            slot %= PAGE_KEYS;
        }
        const ulong norm = (own.plane + ulong(slot) * b.p.row_slot) * BLOCKS;
        keys.k_norms_at[i] = moved + norm * (K_CENTRED ? 2 : 4);
        keys.v_norms_at[i] = moved + norm * (V_CENTRED ? 2 : 4);
        if (keys.there[i]) {
            const uchar *at = b.t < 2 ? k_norms + keys.k_norms_at[i] : v_norms + keys.v_norms_at[i];
            asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
        }
    }
    return keys;
}

// The rows that a warp copies: their addresses in the cache, and in shared memory.
struct RowCopies {
    const uchar *k_low_from;
    const uchar *k_high_from;
    const uchar *v_low_from;
    const uchar *v_high_from;
    uint k_low_at;
    uint k_high_at;
    uint v_low_at;
    uint v_high_at;

    inline RowCopies(const Block &b, const Own &own, const uchar *k_low, const uchar *k_high, const uchar *v_low, const uchar *v_high)
        : k_low_from(stretch_of<KeyCodes::LOW_ROW>(b.p, k_low, own)),
          k_high_from(stretch_of<KeyCodes::HIGH_ROW>(b.p, k_high, own)),
          v_low_from(stretch_of<ValueRows::LOW_ROW>(b.p, v_low, own)),
          v_high_from(stretch_of<ValueRows::HIGH_ROW>(b.p, v_high, own)),
          k_low_at(shared_address(b.shared.k_low + b.warp * K_LOW)), k_high_at(shared_address(b.shared.k_high + b.warp * K_HIGH)),
          v_low_at(shared_address(b.shared.v_low + b.warp * V_LOW)), v_high_at(shared_address(b.shared.v_high + b.warp * V_HIGH)) {}

    // Announces the bytes of all copies to their barriers, and prefetches the keys. One lane calls it.
    inline void expect(const Block &b, const Own &own) const {
        barrier_expect(b.keys, own.held() * K_ROW);
        barrier_expect(b.values, own.held() * V_ROW);
        prefetch_rows<KeyCodes::LOW_ROW>(b.p, k_low_from, own);
        if constexpr (KeyCodes::HIGH_BITS > 0) {
            prefetch_rows<KeyCodes::HIGH_ROW>(b.p, k_high_from, own);
        }
    }
    inline void copy_keys(const Block &b, const Own &own) const {
        copy<KeyCodes::LOW_ROW>(b.p, k_low_from, own, k_low_at, b.keys);
        if constexpr (KeyCodes::HIGH_BITS > 0) {
            copy<KeyCodes::HIGH_ROW>(b.p, k_high_from, own, k_high_at, b.keys);
        }
    }
    inline void copy_values(const Block &b, const Own &own) const {
        copy<ValueRows::LOW_ROW>(b.p, v_low_from, own, v_low_at, b.values);
        if constexpr (ValueRows::HIGH_BITS > 0) {
            copy<ValueRows::HIGH_ROW>(b.p, v_high_from, own, v_high_at, b.values);
        }
    }
};

// Norms of a lane's two keys and of their values, for each block of coordinates. A missing key has none.
struct Norms {
    float of_keys[BLOCKS][2];
    float of_values[BLOCKS][2];
};

inline void load_norms(Norms &norms, const LaneKeys &keys, const uchar *k_norms, const uchar *v_norms) {
#pragma unroll
    for (uint b = 0; b < BLOCKS; b++) {
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            norms.of_keys[b][i] = keys.there[i] ? norm<K_CENTRED>(k_norms + keys.k_norms_at[i], b) : 0;
            norms.of_values[b][i] = keys.there[i] ? norm<V_CENTRED>(v_norms + keys.v_norms_at[i], b) : 0;
        }
    }
}

// Copies the codes of the warp's keys and values to shared memory and, around page means, the means. Meanwhile it loads
// norms and rotates the warp's query.
inline void load(const Block &b, const Own &own, const RowCopies &copies, const LaneKeys &keys, const QueryRuns &runs,
                 const QueryRows &rows, uint page, uint head, const uchar *q, const uchar *k_norms, const uchar *v_norms,
                 const uchar *k_means, const uchar *v_means, Norms &norms) {
    float x[HEAD_DIM / 32];
    if (b.warp < GROUP) {
        load_query(q, rows.at(b.warp), x);
    }
    if constexpr (K_CENTRED) {
        copy_mean(k_means, page, head, b.shared.k_means);
    }
    if constexpr (V_CENTRED) {
        copy_mean(v_means, page, head, b.shared.v_means);
    }
    load_norms(norms, keys, k_norms, v_norms);
    if (b.lane == 0) {
        copies.copy_keys(b, own);
        if (!VALUES_LATER) {
            copies.copy_values(b, own);
        }
    }
    __syncwarp();
    if (b.warp < GROUP) {
        leave_query(b.p, x, runs, b.warp, b.shared.queries, b.shared.factors);
    }
    if (HAS_MEANS) {
        copies_commit();
        copies_wait<0>();
    }
    __syncthreads();
    if (VALUES_LATER && b.lane == 0) {
        copies.copy_values(b, own);
    }
    __syncwarp();
}

// Scores of the lane's two keys by query rows 2t and 2t + 1.
inline void scores(const Block &b, const Own &own, const LaneKeys &keys, const Norms &norms, float (&s)[4]) {
    if (b.warp * 2 < own.length) {
        float of_means[4] = {};
        if constexpr (K_CENTRED) {
            const uint row[2] = {page_of_key(own, keys.first), page_of_key(own, keys.first + 1)};
            multiply_means(b.shared.k_means + row[0] * MEAN_PITCH, b.shared.k_means + row[1] * MEAN_PITCH, b.shared.queries, of_means);
        }
        barrier_wait(b.keys, 0);
        float products[BLOCKS][4];
        multiply_keys(b.shared, KeyLookup(at_place(AT_TABLES)), b.warp, products);
        const float factors[2] = {b.shared.factors[2 * b.t], b.shared.factors[2 * b.t + 1]};
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            float sum = of_means[c];
#pragma unroll
            for (uint block = 0; block < BLOCKS; block++) {
                sum += products[block][c] * norms.of_keys[block][c / 2];
            }
            sum *= factors[c % 2];
            if (SOFTCAP) {
                sum = b.p.softcap * LOG2_E * tanhf(sum);
            }
            s[c] = keys.there[c / 2] ? sum : nothing();
        }
    }
}

// The largest norm of the warp's values, for each block of coordinates, as bits.
inline void largest_norms(const Norms &norms, uint (&largest_norm)[BLOCKS]) {
#pragma unroll
    for (uint block = 0; block < BLOCKS; block++) {
        largest_norm[block] = max_of_warp(__float_as_uint(fmaxf(fabsf(norms.of_values[block][0]), fabsf(norms.of_values[block][1]))));
    }
}

// Stores the weights of the warp's keys, relative to the warp's largest score and multiplied by the norms of the
// values. Sends the largest score and the sum of the weights to the blocks that merge the rows.
inline void leave_weights(const Block &b, const Own &own, const Norms &norms, const uint (&largest_norm)[BLOCKS],
                          const float (&s)[4]) {
    // Of query rows 2t and 2t + 1.
    float m[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
    for (uint step = 4; step < 32; step *= 2) {
        m[0] = fmaxf(m[0], __shfl_xor_sync(0xFFFFFFFF, m[0], step));
        m[1] = fmaxf(m[1], __shfl_xor_sync(0xFFFFFFFF, m[1], step));
    }
    // Weights are relative to powers of two, so the factors between warps are powers of two as well.
    m[0] = ceilf(fmaxf(m[0], LOWEST));
    m[1] = ceilf(fmaxf(m[1], LOWEST));
    float weights[4];
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        weights[c] = exp2_fast(s[c] - m[c % 2]);
    }
#pragma unroll
    for (uint block = 0; block < BLOCKS; block++) {
        const float norm = power_above(__uint_as_float(largest_norm[block])), inverse = WEIGHT_SCALE * inverse_of_power(norm);
        const float first = norms.of_values[block][0] * inverse, second = norms.of_values[block][1] * inverse;
        b.shared.weights[block][b.warp][b.lane] = make_uint2(transpose8(pack<true>(weights[0] * first, weights[1] * first)),
                                                   transpose8(pack<true>(weights[2] * second, weights[3] * second)));
        if (b.lane == 0) {
            b.shared.norms[block][b.warp] = norm;
        }
    }
    if constexpr (V_CENTRED) {
        *reinterpret_cast<float2 *>(&b.shared.masses[b.warp][b.g][2 * b.t]) = sum_by_pages(own, weights);
    }
    if (b.g == 0) {
        b.shared.maxima[2 * b.t][b.warp] = m[0];
        b.shared.maxima[2 * b.t + 1][b.warp] = m[1];
    }
    float l[2] = {weights[0] + weights[2], weights[1] + weights[3]};
#pragma unroll
    for (uint step = 4; step < 32; step *= 2) {
        l[0] += __shfl_xor_sync(0xFFFFFFFF, l[0], step);
        l[1] += __shfl_xor_sync(0xFFFFFFFF, l[1], step);
    }
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        const uint r = min(2 * b.t + c, GROUP - 1);
        send_if(b.g == 0 && 2 * b.t + c < GROUP, address_in(&b.shared.ends[b.rank][b.warp], r), make_float2(m[c], l[c]),
                address_in(&b.shared.all_ends, r));
    }
}

// Multiplies the warp's part of the weights with its slice of the values: o[i] has coordinates 2i and 2i + 1 of the
// lane's eight, for query rows 2t and 2t + 1. Returns the factor of the products. `means` gets the part of page means.
inline float multiply_values(const Block &b, const Own &own, float (&o)[4][4], MeanSums &means) {
    barrier_wait(b.values, 0);
    const uint slice = b.warp % SLICES, block = slice / (256 / SLICE);
    const ValueLookup lookup(at_place(AT_V_TABLE));
    const uchar *low = b.shared.v_low + 2 * b.t * V_LOW + (slice * 8 + b.g) * ValueCodes::LOW;
    const uchar *high = b.shared.v_high + 2 * b.t * V_HIGH + (slice * 8 + b.g) * ValueCodes::HIGH;
    constexpr uint UNITS = WARPS / PARTS;
    ValueCodes codes[UNITS];
#pragma unroll
    for (uint u = 0; u < UNITS; u++) {
        const uint unit = u * PARTS + b.warp / SLICES;
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const uint r = unit * 2 + j / 2;
            codes[u].read(j, low + j % 2 * V_LOW + r * ValueRows::LOW_ROW, high + j % 2 * V_HIGH + r * ValueRows::HIGH_ROW);
        }
    }
    // The lane has weights of row g, which become relative to the largest score of the block.
    const uint column = b.g < GROUP ? b.g : 0;
    const float max = largest(b.shared.maxima[column]), norm = largest(b.shared.norms[block]);
    float2 masses = make_float2(0, 0);
#pragma unroll
    for (uint u = 0; u < UNITS; u++) {
        const uint unit = u * PARTS + b.warp / SLICES;
        if (unit * 2 < own.length) {
            const uint2 w = b.shared.weights[block][unit][b.lane];
            const float of_unit = factor_of(b.shared.maxima[column][unit], max);
            const float f = of_unit * (b.shared.norms[block][unit] * inverse_of_power(norm));
            const uint both = pack<true>(f, f);
            const uint2 weights = make_uint2(multiply_halves(w.x, both), multiply_halves(w.y, both));
            codes[u].operands(lookup, [&](uint i, const uint(&a)[4]) { mma<true>(o[i], a, weights); });
            if constexpr (V_CENTRED) {
                masses.x += b.shared.masses[unit][2 * b.t][column] * of_unit;
                masses.y += b.shared.masses[unit][2 * b.t + 1][column] * of_unit;
            }
        }
    }
    if constexpr (V_CENTRED) {
        means.add(b.shared.v_means, slice, masses);
    }
    return norm * (1 / WEIGHT_SCALE / ValueTable::SCALE);
}

// Sends the output of the warp's keys to the blocks that merge the rows, after the block has added up its PARTS.
inline void send_outputs(const Block &b, const float (&o)[4][4], const MeanSums &means, float scale) {
    const uint slice = b.warp % SLICES;
    // Coordinates of a row of the warp's slice.
    const auto sum_of = [&](uint i, uint c) { return o[i][c] * scale + (V_CENTRED ? means.o[i][c] * means.unit : 0); };
    const auto quad = [&](uint i, uint c) {
        return make_float4(sum_of(i, c), sum_of(i, c + 2), sum_of(i + 1, c), sum_of(i + 1, c + 2));
    };
    if constexpr (PARTS > 1) {
        uchar *parts = b.shared.k_low;
#pragma unroll
        for (uint c = 0; c < 2; c++) {
            if (2 * b.t + c < GROUP) {
                float4 *to = reinterpret_cast<float4 *>(parts + (2 * b.t + c) * PARTS_ROW) + (b.warp * SLICE + 8 * b.g) / 4;
                to[0] = quad(0, c);
                to[1] = quad(2, c);
            }
        }
        __syncthreads();
#pragma unroll
        for (uint first = 0; first < GROUP * HEAD_DIM / 4; first += THREADS) {
            const uint at = first + b.thread, r = at / (HEAD_DIM / 4), column = at % (HEAD_DIM / 4);
            if (GROUP * HEAD_DIM / 4 % THREADS != 0 && r >= GROUP) {
                break;
            }
            const float4 *from = reinterpret_cast<const float4 *>(parts + r * PARTS_ROW) + column;
            float4 sum = from[0];
#pragma unroll
            for (uint part = 1; part < PARTS; part++) {
                const float4 x = from[part * (HEAD_DIM / 4)];
                sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
            }
            send(address_in(&b.shared.o[b.rank][column * 4], r), sum, address_in(&b.shared.all_o, r));
        }
    } else {
#pragma unroll
        for (uint c = 0; c < 2; c++) {
            if (2 * b.t + c < GROUP) {
                const uint to = address_in(&b.shared.o[b.rank][slice * SLICE + 8 * b.g], 2 * b.t + c);
                const uint barrier = address_in(&b.shared.all_o, 2 * b.t + c);
                send(to, quad(0, c), barrier);
                send(to + 16, quad(2, c), barrier);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTERED
    KVANT_KERNEL(const uchar *q, uchar *out, const uchar *k_low, const uchar *k_high, const uchar *k_norms, const uchar *v_low,
           const uchar *v_high, const uchar *v_norms, const uint *positions, const uint *sequence, const uint *lens, float *, uint *,
           const float *sinks, const AttendParams p, const uint *table, const uchar *k_means, const uchar *v_means,
           const float *earlier, const float *earlier_ends, float *new_ends) {
    Shared &shared = *reinterpret_cast<Shared *>(at_place(AT_SHARED));
    const uint thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const uint rank = blockIdx.x % CLUSTER, pair = blockIdx.x / CLUSTER;
    const uint item = pair / p.kv_heads, head = pair % p.kv_heads;
    const Block b = {p, shared, thread, warp, lane, lane / 4, lane % 4, rank, shared_address(&shared.keys),
                     shared_address(&shared.values), shared_address(&shared.all_ends), shared_address(&shared.all_o)};
    init_barriers(b);
    EarlyPages<CLUSTER * WARPS * TILE> pages;
    const Token token = load_token_and_pages(p, positions, sequence, lens, table, item, pages);
    const QueryRuns runs(lane);
    // The loads of page tables are in flight meanwhile.
    fill_tables(thread);
    const Own own(p, pages, token, head);
    const LaneKeys keys = locate_keys(b, own, k_norms, v_norms);
    const uint page = page_of_warp(own);
    // Addresses are computed before the wait.
    const RowCopies copies(b, own, k_low, k_high, v_low, v_high);
    if (lane == 0) {
        copies.expect(b, own);
    }
    expect_states(b);
    // All blocks of the cluster have begun.
    cluster_wait();
    take_turn_unless_late<EARLIER>();
    const QueryRows rows(p, item, head);
    Norms norms;
    load(b, own, copies, keys, runs, rows, page, head, q, k_norms, v_norms, k_means, v_means, norms);

    uint largest_norm[BLOCKS];
    largest_norms(norms, largest_norm);
    float s[4] = {nothing(), nothing(), nothing(), nothing()};
    scores(b, own, keys, norms, s);
    leave_weights(b, own, norms, largest_norm, s);
    __syncthreads();

    float o[4][4] = {};
    MeanSums means;
    const float scale = multiply_values(b, own, o, means);
    send_outputs(b, o, means, scale);

    // Merges the states of the block's row. No block writes to a block that has ended: a block with a row waits for all
    // states, and a block without a row receives none.
    if (rank < GROUP && warp == 0) {
        // Page tables are read again only if the row needs this.
        const bool any = PAGE_SHIFT == 0 && sees_any(p, table, token);
        const RowEnds ends(sinks, earlier, earlier_ends, new_ends);
        const auto sees = [&] { return PAGE_SHIFT == 0 ? any : sees_any(p, table, token); };
        finish(p, shared, rows.at(rank), rows.has(rank), runs, sees, out, ends);
    }
}
