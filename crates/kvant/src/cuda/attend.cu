// attend: softmax(scale * q K^T [softcap] + mask) V over a cache layer (or over the batch's own keys, FRESH): decode,
// verification and prefill. q [T, H, D] -> out [T, H, D].
//
// A block takes pieces of items (attend_plan.h): up to 8 NT query rows that share a KV head, over some tiles of TILE keys.
// So each key and value is read once for all heads of the group. Tiles of keys and of values travel in turn through a
// ring of BUFFERS in shared memory, filled by asynchronous copies some tiles ahead. For each tile:
//
//   scores   each warp takes 16 keys: S^T = K q^T on tensor cores, rows are keys, columns are queries;
//   softmax  the rows' maxima over all warps, P = exp2(S - max), left in shared memory as B operands;
//   values   each warp takes a slice of the coordinates: O^T += V^T P^T, over all keys of the tile.
//
// Operands are f16 (f16 and quantised planes) or bf16 (bf16 and f32 planes). A float that does not fit into one is split
// into the sum of several, Q_TERMS for queries and P_TERMS for weights, K_PARTS and V_PARTS for stored coordinates: all
// products are taken, and summed in float. Over quantised planes P carries the norm of its value, relative to the largest
// so far; o is scaled back at the end. Scores are in units of log 2.
//
// Over quantised keys the queries are rotated when they are loaded; over quantised values the output is rotated back once.
#include "planes.h"
#include "fragments.h"
#include "attend_side.h"
#include "attend_plan.h"
#include "attend_rotate.h"

using K = Side<K_CODEC, K_PARTS, HEAD_DIM>;
using V = Side<V_CODEC, V_PARTS, HEAD_DIM>;

// The maximum of no scores.
inline float nothing() {
    return __uint_as_float(0xFF800000);
}

inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr uint THREADS = 32 * WARPS;
constexpr uint ROWS = 8 * NT;
constexpr uint STEPS = HEAD_DIM / 16;
constexpr uint KEY_GROUPS = TILE / 16;
constexpr uint WARP_GROUPS = (KEY_GROUPS + WARPS - 1) / WARPS;
constexpr uint SLICE = HEAD_DIM / WARPS;
using Values = V::Values<SLICE>;
constexpr uint PRODUCTS = SLICE / 16;
// Weights differ by the norm of the value's block.
constexpr uint VARIANTS = V::BLOCKS == 2 ? 2 : 1;
// Independent sums, so that one product need not wait for the one before it, and so that small terms are not added to
// large sums one by one: tensor cores cut off what does not fit.
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

// Shared memory, in bytes. A buffer: rows of the low plane, of the high plane, norms; buffers of keys hold the norms of the
// tile's values, too. cuda/attend.rs computes the same sum.
constexpr uint max_of(uint a, uint b) {
    return a > b ? a : b;
}
constexpr uint K_HIGH = TILE * K::PITCH;
constexpr uint K_NORMS = K_HIGH + TILE * K::HIGH_PITCH;
constexpr uint V_NORMS = K_NORMS + TILE * K::BLOCKS * 4;
constexpr uint V_HIGH = TILE * V::PITCH;
constexpr uint BUFFER = max_of(V_NORMS + TILE * V::BLOCKS * 4, V_HIGH + TILE * V::HIGH_PITCH);
constexpr bool ONE_TABLE = K_CODEC == V_CODEC;
constexpr uint AT_TABLES = max_of(BUFFERS * BUFFER, ROWS * HEAD_DIM * 4);
constexpr uint AT_V_TABLE = ONE_TABLE ? AT_TABLES : AT_TABLES + K::TABLE_BYTES;
constexpr uint AT_QUERIES = AT_V_TABLE + V::TABLE_BYTES;
constexpr uint AT_WEIGHTS = AT_QUERIES + Q_TERMS * STEPS * NT * 256;
constexpr uint AT_MAXIMA = AT_WEIGHTS + VARIANTS * P_TERMS * KEY_GROUPS * NT * 256;
constexpr uint AT_ROWS = AT_MAXIMA + WARPS * (ROWS + 4) * 4;
constexpr uint ROW_BYTES = 32;
constexpr uint AT_PREFIX = AT_ROWS + ROWS * ROW_BYTES;
constexpr uint AT_END = AT_PREFIX + (MAX_SHARED_ITEMS + 8) * 4;
static_assert(AT_END == SHARED_BYTES, "attend: the shared memory that Rust asks for");
static_assert(PRODUCTS * 16 * WARPS == HEAD_DIM, "attend: every warp has a slice");

// What is known of a query row.
struct Row {
    Token token;
    // The positions it sees; none outside of its sequence's segment.
    Range seen;
    // Takes a product of its queries and a key to a score.
    float factor;
    float m;
    float l;
};
static_assert(sizeof(Row) == ROW_BYTES, "attend: Row");

struct Buffers {
    // The batch's token when it is the only one.
    Token only;
    const uchar *q;
    uchar *out;
    Planes k;
    Planes v;
    const uint *positions;
    const uint *sequence;
    const uint *lens;
    float *partials;
    uint *counters;
    float *state;
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
    // Numbers that the whole block sees: 8, then the prefix sums of the items' tiles.
    uint *words() const {
        return reinterpret_cast<uint *>(base + AT_PREFIX);
    }
    uint *prefix() const {
        return words() + 7;
    }
};

// ------------------------------------------------------------------------------------------------------------ the plan

// The rows of an item, as (first row, count) among the rows of a KV head.
inline Range rows_of(const AttendParams &p, uint item) {
    const ulong first = ulong(item) * p.item_rows;
    const ulong all = ulong(p.tokens) * p.group;
    return {uint(first), uint(min(first + p.item_rows, all))};
}

inline Range join(Range a, Range b) {
    return a.first >= a.end ? b : b.first >= b.end ? a : Range{min(a.first, b.first), max(a.end, b.end)};
}

// How many tiles the cached keys of an item are, sequence by sequence; at least one, so that somebody writes its output.
inline uint item_tiles(const AttendParams &p, const Buffers &b, uint item) {
    if (p.tokens == 1) {
        return max(tiles_of(visible(p, b.only)), 1u);
    }
    const Range rows = rows_of(p, item);
    const uint first = rows.first / p.group, end = (rows.end - 1) / p.group + 1;
    uint tiles = 0;
    for (uint i = first; i < end; i++) {
        const Token token = load_token(p, b.positions, b.sequence, b.lens, i);
        bool leads = token.sequence != NONE;
        for (uint j = first; leads && j < i; j++) {
            leads = b.sequence[j] != token.sequence;
        }
        if (!leads) {
            continue;
        }
        Range keys = visible(p, token);
        for (uint j = i + 1; j < end; j++) {
            if (b.sequence[j] == token.sequence) {
                keys = join(keys, visible(p, load_token(p, b.positions, b.sequence, b.lens, j)));
            }
        }
        tiles += tiles_of(keys);
    }
    return max(tiles, 1u);
}

// ------------------------------------------------------------------------------------------------------ moving tiles

// The keys of a sequence that a piece goes through: key indices are positions, or (FRESH) tokens of the batch.
struct Segment {
    Range keys;
    uint sequence;
    ulong first_row;
};

// Begins to copy rows of a plane: ROW bytes each, in steps of COPY; a row of shared memory is PITCH bytes.
template <uint ROW, uint COPY, uint PITCH, uint ELEMENT>
inline void copy_rows(const AttendParams &p, const void *plane, const Segment &segment, uint first, uint to) {
    constexpr uint CHUNKS = ROW / COPY;
    constexpr uint TOGETHER = max_of(THREADS / CHUNKS, 1);
    const uint lane = threadIdx.x % CHUNKS;
    const uchar *from = static_cast<const uchar *>(plane) + segment.first_row * ROW + lane * COPY;
    uint slot0 = first;
    if (RING) {
        slot0 %= p.capacity;
    }
    const uint row_bytes = p.row_slot * ROW;
#pragma unroll 4
    for (uint i = threadIdx.x / CHUNKS; i < TILE; i += TOGETHER) {
        const bool there = first + i < segment.keys.end;
        uint slot = slot0 + i;
        if (RING && slot >= p.capacity) {
            slot -= p.capacity;
            if (slot >= p.capacity) {
                slot %= p.capacity;
            }
        }
        const uchar *row = from + ulong(slot) * row_bytes;
        const uint at = to + i * PITCH + lane * COPY;
        if constexpr (ELEMENT >= COPY) {
            copy_async<COPY>(at, row, there);
        } else if constexpr (ELEMENT == 4) {
            // A view may begin at any element.
#pragma unroll
            for (uint j = 0; j < COPY; j += 4) {
                copy_async<4>(at + j, row + j, there);
            }
        } else {
#pragma unroll
            for (uint j = 0; j < COPY; j += 2) {
                const ushort x = there ? *reinterpret_cast<const ushort *>(row + j) : 0;
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(at + j), "h"(x) : "memory");
            }
        }
    }
}

template <typename S>
inline void copy_side(const AttendParams &p, const Planes &planes, const Segment &segment, uint first, uint to, uint high) {
    copy_rows<S::ROW, 16, S::PITCH, ALIGNED || S::QUANTISED ? 16 : S::BITS / 8>(p, planes.low, segment, first, to);
    if constexpr (S::HIGH_ROW > 0) {
        copy_rows<S::HIGH_ROW, S::HIGH_COPY, S::HIGH_PITCH, 16>(p, planes.high, segment, first, to + high);
    }
}

template <typename S>
inline void copy_norms(const AttendParams &p, const Planes &planes, const Segment &segment, uint first, uint to) {
    if constexpr (S::BLOCKS > 0) {
        copy_rows<4 * S::BLOCKS, 4 * S::BLOCKS, 4 * S::BLOCKS, 16>(p, planes.norms, segment, first, to);
    }
}

// Begins to copy the keys of a tile, with the norms of its values, or nothing where there is no such tile.
inline void copy_keys(const AttendParams &p, const Buffers &b, const Shared &shared, const Segment &segment, uint tiles,
                      uint tile) {
    if (tile < tiles) {
        const uint first = segment.keys.first + tile * TILE, to = shared_address(shared.buffer(2 * tile));
        copy_side<K>(p, b.k, segment, first, to, K_HIGH);
        copy_norms<K>(p, b.k, segment, first, to + K_NORMS);
        copy_norms<V>(p, b.v, segment, first, to + V_NORMS);
    }
    copies_commit();
}

inline void copy_values(const AttendParams &p, const Buffers &b, const Shared &shared, const Segment &segment, uint tiles,
                        uint tile) {
    if (tile < tiles) {
        const uint first = segment.keys.first + tile * TILE, to = shared_address(shared.buffer(2 * tile + 1));
        copy_side<V>(p, b.v, segment, first, to, V_HIGH);
    }
    copies_commit();
}

// ------------------------------------------------------------------------------------------------------------- queries

// A power of two that brings `largest` near 2^12, exactly, and its inverse.
inline float2 to_half_range(float largest) {
    const int exponent = int(__float_as_uint(largest) >> 23 & 255) - 127;
    const int up = largest == 0 || exponent == 128 ? 0 : min(max(12 - exponent, -100), 100);
    return make_float2(__uint_as_float(uint(127 + up) << 23), __uint_as_float(uint(127 - up) << 23));
}

// Loads the rows of an item, rotated if need be, as B operands; rows that are not there are zeros.
inline void load_queries(const AttendParams &p, const Buffers &b, const Shared &shared, Range item, uint head) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    ushort *to = reinterpret_cast<ushort *>(shared.queries());
#pragma unroll 1
    for (uint r = warp; r < ROWS; r += WARPS) {
        if (r >= item.len()) {
            for (uint i = lane; i < Q_TERMS * STEPS * 4; i += 32) {
                shared.queries()[(i / 4 * NT + r / 8) * 32 + r % 8 * 4 + i % 4] = make_uint2(0, 0);
            }
            if (lane == 0) {
                shared.rows()[r].factor = 0;
            }
            continue;
        }
        float x[HEAD_DIM / 32];
        const uint row = item.first + r;
        const ulong at =
            (ulong(row / p.group) * p.kv_heads * p.group + head * p.group + row % p.group) * HEAD_DIM + lane;
        float largest = 0;
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            x[i] = load(b.q, at + 32 * i, Q_DTYPE);
        }
        if (ROTATE_Q) {
            rotate<HEAD_DIM>(x, lane);
        }
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            largest = fmaxf(largest, fabsf(x[i]));
        }
        float2 range = make_float2(1, 1);
        if constexpr (K::HALF) {
#pragma unroll
            for (uint step = 1; step < 32; step *= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
            }
            range = to_half_range(largest);
        }
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            uint terms[Q_TERMS];
            split<K::HALF, Q_TERMS>(x[i] * range.x, 0, terms);
            const uint3 place = K::key_place(lane + 32 * i);
#pragma unroll
            for (uint term = 0; term < Q_TERMS; term++) {
                const uint fragment = (term * STEPS + place.x) * NT + r / 8;
                to[(fragment * 32 + r % 8 * 4 + place.y) * 4 + place.z] = ushort(terms[term]);
            }
        }
        if (lane == 0) {
            shared.rows()[r].factor = p.scale * range.y * (SOFTCAP ? 1 / p.softcap : 1.4426950408889634f);
        }
    }
}

// -------------------------------------------------------------------------------------------------------- partial states

// o, then m and l, of the rows of an item; a multiple of 16 bytes.
inline ulong state_floats(const AttendParams &p) {
    return ulong(p.item_rows) * HEAD_DIM + (p.item_rows * 2 + 3) / 4 * 4;
}

// exp2(part - whole), also where both are infinite or there is nothing.
inline float factor_of(float part, float whole) {
    return part == whole ? 1 : exp2_fast(part - whole);
}

// Leaves the rows in shared.output(), with their m and l, as a partial state.
inline void leave_state(const AttendParams &p, const Buffers &b, const Shared &shared, uint slot, uint rows) {
    float *to = b.partials + slot * state_floats(p);
    for (uint at = threadIdx.x; at < rows * (HEAD_DIM / 4); at += THREADS) {
        __stcg(reinterpret_cast<float4 *>(to) + at, reinterpret_cast<const float4 *>(shared.output())[at]);
    }
    for (uint r = threadIdx.x; r < rows; r += THREADS) {
        __stcg(reinterpret_cast<float2 *>(to + p.item_rows * HEAD_DIM) + r,
               make_float2(shared.rows()[r].m, shared.rows()[r].l));
    }
}

// Counts this block's arrival; whether it is the last of `all`, who then sees what the others have left.
inline bool arrive(const Shared &shared, uint *counter, uint all) {
    __syncthreads();
    if (threadIdx.x == 0) {
        uint before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        const bool last = before == all - 1;
        if (last) {
            // For the next launch.
            *counter = 0;
        }
        shared.words()[2] = last;
    }
    __syncthreads();
    return shared.words()[2] != 0;
}

// Merges `count` parts of an item, the first one and every `step`-th after it, in this order, into shared.output() and the
// rows' m and l.
inline void merge_parts(const AttendParams &p, const Buffers &b, const Shared &shared, const Piece &piece, uint rows,
                        uint first, uint count, uint step) {
    const ulong stride = state_floats(p);
    // m and l of every part and row; m becomes the factor of the part.
    float2 *parts = reinterpret_cast<float2 *>(shared.queries());
    static_assert(MAX_MERGE * ROWS * 8 <= (Q_TERMS * STEPS + VARIANTS * P_TERMS * KEY_GROUPS) * NT * 256, "attend: room");
    for (uint at = threadIdx.x; at < count * rows; at += THREADS) {
        const float *from = b.partials + piece.slot(first + at / rows * step) * stride + p.item_rows * HEAD_DIM;
        parts[at] = __ldcg(reinterpret_cast<const float2 *>(from) + at % rows);
    }
    __syncthreads();
    for (uint r = threadIdx.x; r < rows; r += THREADS) {
        float m = nothing(), l = 0;
        for (uint part = 0; part < count; part++) {
            m = fmaxf(m, parts[part * rows + r].x);
        }
        for (uint part = 0; part < count; part++) {
            const float2 of_part = parts[part * rows + r];
            const float factor = factor_of(of_part.x, m);
            l += of_part.y * factor;
            parts[part * rows + r].x = factor;
        }
        shared.rows()[r].m = m;
        shared.rows()[r].l = l;
    }
    __syncthreads();
    constexpr uint QUADS = HEAD_DIM / 4;
    for (uint at = threadIdx.x; at < rows * QUADS; at += THREADS) {
        const uint r = at / QUADS;
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (uint part = 0; part < count; part++) {
            const float *from = b.partials + piece.slot(first + part * step) * stride;
            const float4 x = __ldcg(reinterpret_cast<const float4 *>(from) + at);
            const float f = parts[part * rows + r].x;
            o = make_float4(o.x + x.x * f, o.y + x.y * f, o.z + x.z * f, o.w + x.w * f);
        }
        reinterpret_cast<float4 *>(shared.output())[at] = o;
    }
    __syncthreads();
}

// Leaves this block's state, and merges: parts into groups of about the square root of their number, groups into the
// whole. Whoever comes last does it. True for the block that then holds the whole.
inline bool merge(const AttendParams &p, const Buffers &b, const Shared &shared, const Piece &piece, uint rows) {
    uint group = piece.parts;
    if (piece.parts > MAX_MERGE) {
        group = uint(ceilf(sqrtf(float(piece.parts))));
    }
    const uint groups = (piece.parts + group - 1) / group;
    const uint first = piece.part / group * group;
    const uint members = min(group, piece.parts - first);
    uint *of_item = b.counters + piece.item * p.kv_heads + piece.head;
    uint *of_group = groups == 1 ? of_item : b.counters + p.items * p.kv_heads + piece.slot(first);
    // First the members of the group, then the groups.
    uint *counter = of_group;
    uint slot = piece.slot(piece.part), begin = first, count = members, step = 1;
#pragma unroll 1
    while (true) {
        leave_state(p, b, shared, slot, rows);
        if (!arrive(shared, counter, count)) {
            return false;
        }
        merge_parts(p, b, shared, piece, rows, begin, count, step);
        if (counter == of_item) {
            return true;
        }
        slot = piece.slot(first);
        counter = of_item;
        begin = 0;
        count = groups;
        step = group;
    }
}

// Takes the rows in shared.output() to the output, or to the state that the step's own keys are added to.
inline void finish_rows(const AttendParams &p, const Buffers &b, const Shared &shared, Range item, uint head) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint r = warp; r < item.len(); r += WARPS) {
        const uint row = item.first + r;
        const ulong at = ulong(row / p.group) * p.kv_heads * p.group + head * p.group + row % p.group;
        float m = shared.rows()[r].m, l = shared.rows()[r].l;
        float x[HEAD_DIM / 32];
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            x[i] = shared.output()[r * HEAD_DIM + lane + 32 * i];
        }
        if (V::QUANTISED) {
            unrotate<HEAD_DIM>(x, lane);
        }
        if (b.state != nullptr) {
            float *state = b.state + at * (HEAD_DIM + 2);
            if (!FRESH) {
#pragma unroll
                for (uint i = 0; i < HEAD_DIM / 32; i++) {
                    state[lane + 32 * i] = x[i];
                }
                if (lane == 0) {
                    state[HEAD_DIM] = m;
                    state[HEAD_DIM + 1] = l;
                }
                continue;
            }
            const float cached_m = state[HEAD_DIM], cached_l = state[HEAD_DIM + 1];
            const float whole = fmaxf(m, cached_m);
            const float f = factor_of(m, whole), g = factor_of(cached_m, whole);
            l = l * f + cached_l * g;
#pragma unroll
            for (uint i = 0; i < HEAD_DIM / 32; i++) {
                x[i] = x[i] * f + state[lane + 32 * i] * g;
            }
        }
        const float inverse = l == 0 ? 0 : 1 / l;
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            store(b.out, at * HEAD_DIM + lane + 32 * i, x[i] * inverse, OUT_DTYPE);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------- the main loop

// A thread's share of the work on a piece: its columns' softmax, its coordinates' sums.
struct Work {
    // By tile of columns: columns 2t and 2t + 1. The maximum is the same in all warps, l is this lane's part of it.
    float m[NT][2];
    float l[NT][2];
    // Coordinates by row, query columns.
    float o[PRODUCTS][NT][4];
    // Of the values' norms so far, rounded up to a power of two.
    float norm;
};

// S^T of 16 keys: raw products, with the keys' norms.
inline void scores(const Shared &shared, const uchar *buffer, uint group, float (&s)[NT][4]) {
    const uint lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint2 *queries = shared.queries() + lane;
    const uint *table = shared.k_table() + lane;
    const float *norms = reinterpret_cast<const float *>(buffer + K_NORMS);
    float sums[CHAINS][NT][4] = {};
    const uint row = group * 16 + g;
    constexpr uint HALVES = K::BLOCKS == 2 ? 2 : 1;
#pragma unroll
    for (uint half = 0; half < HALVES; half++) {
        constexpr uint LOADS = K::LOADS / HALVES;
#pragma unroll 4
        for (uint j = 0; j < LOADS; j++) {
            const uint i = half * LOADS + j;
            typename K::KeyWords x, y;
            K::load_key(buffer, buffer + K_HIGH, row, i, t, x);
            K::load_key(buffer, buffer + K_HIGH, row + 8, i, t, y);
#pragma unroll
            for (uint step = 0; step < K::LOAD_STEPS; step++) {
                uint a[K_PARTS][4];
                K::key_operand(x, y, step, table, a);
#pragma unroll
                for (uint term = 0; term < Q_TERMS; term++) {
#pragma unroll
                    for (uint n = 0; n < NT; n++) {
                        const uint2 q = queries[((term * STEPS + i * K::LOAD_STEPS + step) * NT + n) * 32];
#pragma unroll
                        for (uint part = 0; part < K_PARTS; part++) {
                            mma<K::HALF>(sums[chain_of(step + j, term, part)][n], a[part], q);
                        }
                    }
                }
            }
        }
        const float of_g = K::QUANTISED ? norms[row * K::BLOCKS + half] : 1;
        const float of_g8 = K::QUANTISED ? norms[(row + 8) * K::BLOCKS + half] : 1;
#pragma unroll
        for (uint n = 0; n < NT; n++) {
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                float sum = 0;
#pragma unroll
                for (uint chain = 0; chain < CHAINS; chain++) {
                    sum += sums[chain][n][c];
                    sums[chain][n][c] = 0;
                }
                if (K::QUANTISED) {
                    sum *= c < 2 ? of_g : of_g8;
                }
                s[n][c] = half == 0 ? sum : s[n][c] + sum;
            }
        }
    }
}

// Scores in units of log 2; minus infinity where the row does not see the key.
inline void shape_scores(const AttendParams &p, const Shared &shared, uint position_g, uint position_g8, bool all,
                         float (&s)[NT][4]) {
    const uint t = threadIdx.x % 4;
    const float cap = p.softcap * 1.4426950408889634f;
#pragma unroll
    for (uint n = 0; n < NT; n++) {
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            const Row &row = shared.rows()[n * 8 + 2 * t + c % 2];
            float score = s[n][c] * row.factor;
            if (SOFTCAP) {
                score = cap * tanhf(score);
            }
            if (!all) {
                const uint position = c < 2 ? position_g : position_g8;
                score = position >= row.seen.first && position < row.seen.end ? score : nothing();
            }
            s[n][c] = score;
        }
    }
}

// The largest norm of 16 keys' values in this lane.
inline float largest_norm(const uchar *buffer, uint group) {
    const uint g = threadIdx.x % 32 / 4;
    const float *norms = reinterpret_cast<const float *>(buffer + V_NORMS) + group * 16 * V::BLOCKS;
    float largest = 0;
#pragma unroll
    for (uint block = 0; block + 1 <= V::BLOCKS; block++) {
        largest = fmaxf(largest, fmaxf(fabsf(norms[g * V::BLOCKS + block]), fabsf(norms[(g + 8) * V::BLOCKS + block])));
    }
    return largest;
}

// The smallest power of two above x, within what can be inverted.
inline float power_above(float x) {
    const uint exponent = __float_as_uint(x) >> 23 & 255;
    return __uint_as_float(min(max(exponent + 1, 27u), 227u) << 23);
}

// Weights of 16 keys, from their scores and the new maxima, as B operands; adds them to l.
inline void weights(const Shared &shared, const uchar *buffer, uint group, const float (&s)[NT][4], Work &work) {
    const uint lane = threadIdx.x % 32, g = lane / 4;
    const float *norms = reinterpret_cast<const float *>(buffer + V_NORMS) + group * 16 * V::BLOCKS;
    float scale[VARIANTS][2];
#pragma unroll
    for (uint variant = 0; variant < VARIANTS; variant++) {
        scale[variant][0] = scale[variant][1] = WEIGHT_SCALE;
        if (V::QUANTISED) {
            const float inverse = WEIGHT_SCALE / work.norm;
            scale[variant][0] = norms[g * V::BLOCKS + variant] * inverse;
            scale[variant][1] = norms[(g + 8) * V::BLOCKS + variant] * inverse;
        }
    }
#pragma unroll
    for (uint n = 0; n < NT; n++) {
        float w[4];
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            w[c] = s[n][c] == nothing() ? 0 : exp2_fast(s[n][c] - work.m[n][c % 2]);
            work.l[n][c % 2] += w[c];
        }
#pragma unroll
        for (uint variant = 0; variant < VARIANTS; variant++) {
            uint low[P_TERMS], high[P_TERMS];
            float scaled[4];
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                // The norm of a value that is not seen may be NaN.
                scaled[c] = s[n][c] == nothing() ? 0 : w[c] * scale[variant][c / 2];
            }
            split<V::HALF, P_TERMS>(scaled[0], scaled[1], low);
            split<V::HALF, P_TERMS>(scaled[2], scaled[3], high);
#pragma unroll
            for (uint term = 0; term < P_TERMS; term++) {
                const uint2 pair = make_uint2(transpose8(low[term]), transpose8(high[term]));
                shared.weights()[(((variant * P_TERMS + term) * KEY_GROUPS + group) * NT + n) * 32 + lane] = pair;
            }
        }
    }
}

// Sums of V^T P^T, by coordinates and query columns: of the leading terms, and of the small ones (SMALL_WEIGHTS).
constexpr bool SMALL_WEIGHTS = OUT_DTYPE == F32 && P_TERMS * V_PARTS > 1;
using Sums = float[SMALL_WEIGHTS ? 2 : 1][PRODUCTS][NT][4];

// Adds the products of a tile, for this warp's slice. `filter` may change operands: it gets the group of 16 keys, the
// operands, whether they meet a term of the weights beyond the first, and that term.
template <typename Filter>
inline void multiply(const Shared &shared, const uchar *buffer, Sums &sums, Filter filter) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint slice = warp * SLICE;
    const uint variant = VARIANTS == 2 ? slice / 256 : 0;
    const uint2 *weights = shared.weights() + variant * P_TERMS * KEY_GROUPS * NT * 32 + lane;
    const uint *table = shared.v_table() + lane;
#pragma unroll 2
    for (uint group = 0; group < KEY_GROUPS; group++) {
        uint2 w[P_TERMS][NT];
#pragma unroll
        for (uint term = 0; term < P_TERMS; term++) {
#pragma unroll
            for (uint n = 0; n < NT; n++) {
                w[term][n] = weights[((term * KEY_GROUPS + group) * NT + n) * 32];
            }
        }
#pragma unroll
        for (uint i = 0; i < Values::LOADS; i++) {
            Values::operands(buffer, buffer + V_HIGH, group * 16, slice, i, g, t, table,
                             [&](uint product, const uint(&a)[V_PARTS][4]) {
#pragma unroll
                                 for (uint part = 0; part < V_PARTS; part++) {
#pragma unroll
                                     for (uint term = 0; term < P_TERMS; term++) {
                                         uint kept[4] = {a[part][0], a[part][1], a[part][2], a[part][3]};
                                         filter(group, kept, term > 0);
#pragma unroll
                                         for (uint n = 0; n < NT; n++) {
                                             const bool small = SMALL_WEIGHTS && part + term > 0;
                                             mma<V::HALF>(sums[small][product][n], kept, w[term][n]);
                                         }
                                     }
                                 }
                             });
        }
    }
}

inline bool is_finite(float x) {
    return (__float_as_uint(x) & 0x7F800000) != 0x7F800000;
}

// The halves of a pair that are finite, zeros in place of the others.
inline uint keep_finite(uint pair) {
    constexpr uint EXPONENT = V::HALF ? 0x7C00 : 0x7F80;
    const uint low = (pair & EXPONENT) == EXPONENT ? 0 : 0xFFFF;
    const uint high = (pair >> 16 & EXPONENT) == EXPONENT ? 0 : 0xFFFF0000;
    return pair & (low | high);
}

// The same where a value is not finite: row by row, over the keys that the row sees, for 0 times infinity is not 0. What
// is not finite meets the leading term alone, since terms differ in sign.
inline void multiply_by_rows(const Buffers &b, const Shared &shared, const uchar *buffer, const Segment &segment, uint first,
                             Sums &sums) {
    const uint t = threadIdx.x % 4;
#pragma unroll 1
    for (uint r = 0; r < ROWS; r++) {
        const Range seen = shared.rows()[r].seen;
        Sums of_row = {};
        multiply(shared, buffer, of_row, [&](uint group, uint(&a)[4], bool small) {
            uint mask[2] = {0, 0};
#pragma unroll
            for (uint k = 0; k < 4; k++) {
                const uint key = first + group * 16 + 2 * t + k % 2 + k / 2 * 8;
                uint position = key;
                if (FRESH) {
                    position = key < segment.keys.end && b.sequence[key] == segment.sequence ? b.positions[key] : NONE;
                }
                const bool sees = position >= seen.first && position < seen.end;
                mask[k / 2] |= sees ? 0xFFFF << 16 * (k % 2) : 0;
            }
#pragma unroll
            for (uint j = 0; j < 4; j++) {
                a[j] = (small ? keep_finite(a[j]) : a[j]) & mask[j / 2];
            }
        });
        if (r % 8 / 2 == t) {
#pragma unroll
            for (uint n = 0; n < NT; n++) {
#pragma unroll
                for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
                    for (uint c = 0; c < 4; c++) {
                        if (n == r / 8 && c % 2 == r % 2) {
                            sums[0][i][n][c] = of_row[0][i][n][c] + (SMALL_WEIGHTS ? of_row[SMALL_WEIGHTS][i][n][c] : 0);
                            if (SMALL_WEIGHTS) {
                                sums[SMALL_WEIGHTS][i][n][c] = 0;
                            }
                        }
                    }
                }
            }
        }
    }
}

// O^T += V^T P^T over the tile that begins with key `first`.
inline void add_values(const Buffers &b, const Shared &shared, const uchar *buffer, const Segment &segment, uint first,
                       Work &work) {
    Sums sums = {};
    multiply(shared, buffer, sums, [](uint, uint(&)[4], bool) {});
    if (!V::QUANTISED) {
        float check = 0;
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
            for (uint n = 0; n < NT; n++) {
#pragma unroll
                for (uint c = 0; c < 4; c++) {
                    check += (sums[0][i][n][c] + (SMALL_WEIGHTS ? sums[SMALL_WEIGHTS][i][n][c] : 0)) * 0.0f;
                }
            }
        }
        if (__any_sync(0xFFFFFFFF, !is_finite(check))) {
            multiply_by_rows(b, shared, buffer, segment, first, sums);
        }
    }
#pragma unroll
    for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
        for (uint n = 0; n < NT; n++) {
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                work.o[i][n][c] += sums[0][i][n][c] + (SMALL_WEIGHTS ? sums[SMALL_WEIGHTS][i][n][c] : 0);
            }
        }
    }
}

// The scores of a tile, the new maxima, and the weights.
inline void attend_to(const AttendParams &p, const Buffers &b, const Shared &shared, const Segment &segment, Range all,
                      uint tile, Work &work) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
            const uchar *buffer = shared.buffer(2 * tile);
            const uint first = segment.keys.first + tile * TILE;
            const bool whole = !FRESH && first >= all.first && first + TILE <= all.end;
            float s[WARP_GROUPS][NT][4];
            float largest[NT][2], norm = 0;
#pragma unroll
            for (uint n = 0; n < NT; n++) {
                largest[n][0] = largest[n][1] = nothing();
            }
#pragma unroll
            for (uint j = 0; j < WARP_GROUPS; j++) {
                const uint group = warp + j * WARPS;
                if (group >= KEY_GROUPS) {
                    break;
                }
                uint position[2];
#pragma unroll
                for (uint i = 0; i < 2; i++) {
                    const uint key = first + group * 16 + g + 8 * i;
                    position[i] = key;
                    if (FRESH) {
                        const bool own = key < segment.keys.end && b.sequence[key] == segment.sequence;
                        position[i] = own ? b.positions[key] : NONE;
                    }
                }
                scores(shared, buffer, group, s[j]);
                shape_scores(p, shared, position[0], position[1], whole, s[j]);
                if (V::QUANTISED) {
                    norm = fmaxf(norm, largest_norm(buffer, group));
                }
#pragma unroll
                for (uint n = 0; n < NT; n++) {
#pragma unroll
                    for (uint c = 0; c < 4; c++) {
                        largest[n][c % 2] = fmaxf(largest[n][c % 2], s[j][n][c]);
                    }
                }
            }
            // Over the keys of this warp, then of all.
            float *maxima = shared.maxima();
#pragma unroll
            for (uint step = 4; step < 32; step *= 2) {
#pragma unroll
                for (uint n = 0; n < NT; n++) {
                    largest[n][0] = fmaxf(largest[n][0], __shfl_xor_sync(0xFFFFFFFF, largest[n][0], step));
                    largest[n][1] = fmaxf(largest[n][1], __shfl_xor_sync(0xFFFFFFFF, largest[n][1], step));
                }
                if (V::QUANTISED) {
                    norm = fmaxf(norm, __shfl_xor_sync(0xFFFFFFFF, norm, step));
                }
            }
            if (g == 0) {
#pragma unroll
                for (uint n = 0; n < NT; n++) {
                    *reinterpret_cast<float2 *>(maxima + warp * (ROWS + 4) + n * 8 + 2 * t) =
                        make_float2(largest[n][0], largest[n][1]);
                }
                if (t == 0) {
                    maxima[warp * (ROWS + 4) + ROWS] = norm;
                }
            }
            __syncthreads();
            float decay = 1;
            if (V::QUANTISED) {
#pragma unroll
                for (uint w = 0; w < WARPS; w++) {
                    norm = fmaxf(norm, maxima[w * (ROWS + 4) + ROWS]);
                }
                const float grown = fmaxf(work.norm, power_above(norm));
                decay = work.norm / grown;
                work.norm = grown;
            }
#pragma unroll
            for (uint n = 0; n < NT; n++) {
                float2 m = make_float2(work.m[n][0], work.m[n][1]);
#pragma unroll
                for (uint w = 0; w < WARPS; w++) {
                    const float2 of_warp = *reinterpret_cast<const float2 *>(maxima + w * (ROWS + 4) + n * 8 + 2 * t);
                    m = make_float2(fmaxf(m.x, of_warp.x), fmaxf(m.y, of_warp.y));
                }
                const float f[2] = {factor_of(work.m[n][0], m.x), factor_of(work.m[n][1], m.y)};
                work.m[n][0] = m.x;
                work.m[n][1] = m.y;
                work.l[n][0] *= f[0];
                work.l[n][1] *= f[1];
#pragma unroll
                for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
                    for (uint c = 0; c < 4; c++) {
                        work.o[i][n][c] *= f[c % 2] * decay;
                    }
                }
            }
#pragma unroll
            for (uint j = 0; j < WARP_GROUPS; j++) {
                const uint group = warp + j * WARPS;
                if (group < KEY_GROUPS) {
                    weights(shared, buffer, group, s[j], work);
                }
            }
}

// Goes through the tiles of a segment. `all`: the positions that every row sees. `prepare` runs while the first tiles come.
template <typename Prepare>
inline void go_through(const AttendParams &p, const Buffers &b, const Shared &shared, const Segment &segment, Range all,
                       Work &work, Prepare prepare) {
    const uint tiles = tiles_of(segment.keys);
    constexpr int AHEAD = BUFFERS / 2;
    // Nobody reads the buffers any more.
    __syncthreads();
#pragma unroll 1
    for (int tile = -AHEAD; tile < int(tiles); tile++) {
        if (tile >= 0) {
            attend_to(p, b, shared, segment, all, tile, work);
        }
        // Values of the tile before this one, and its keys, are not read any more: their buffers are free.
        copy_values(p, b, shared, segment, tiles, tile + AHEAD - 1);
        if (tile >= 0) {
            // This tile's values and the next one's keys have come, and all weights are there.
            copies_wait<BUFFERS - 3>();
            __syncthreads();
        }
        copy_keys(p, b, shared, segment, tiles, tile + AHEAD);
        if (tile == -1) {
            prepare();
            copies_wait<BUFFERS - 2>();
            __syncthreads();
        }
        if (tile >= 0) {
            add_values(b, shared, shared.buffer(2 * tile + 1), segment, segment.keys.first + tile * TILE, work);
        }
    }
}
// The part of a segment's tiles that lies within `tiles`, where `before` tiles come before the segment.
inline Range part_of(Range keys, uint before, Range tiles) {
    const uint all = tiles_of(keys);
    const uint from = min(max(tiles.first, before) - before, all);
    const uint to = min(max(tiles.end, before) - before, all);
    return {min(keys.first + from * TILE, keys.end), min(keys.first + to * TILE, keys.end)};
}

// One piece, from the queries to the output or the partial state.
inline void work_on(const AttendParams &p, const Buffers &b, const Shared &shared, const Piece &piece,
                    bool &tables_filled) {
    const uint thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const Range item = rows_of(p, piece.item);
    Row *rows = shared.rows();
    // The last piece is done with shared memory.
    __syncthreads();
    for (uint r = thread; r < ROWS; r += THREADS) {
        Token token = {0, NONE, 0};
        if (r < item.len()) {
            token = p.tokens == 1 ? b.only
                                  : load_token(p, b.positions, b.sequence, b.lens, (item.first + r) / p.group);
        }
        rows[r].token = token;
    }
    __syncthreads();

    Work work;
    work.norm = 0;
#pragma unroll
    for (uint n = 0; n < NT; n++) {
        work.m[n][0] = work.m[n][1] = nothing();
        work.l[n][0] = work.l[n][1] = 0;
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                work.o[i][n][c] = 0;
            }
        }
    }
    bool queries_loaded = false;
    auto prepare = [&] {
        if (!tables_filled) {
            tables_filled = true;
            K::fill_table(shared.k_table(), thread, THREADS);
            if (!ONE_TABLE) {
                V::fill_table(shared.v_table(), thread, THREADS);
            }
        }
        if (!queries_loaded) {
            queries_loaded = true;
            load_queries(p, b, shared, item, piece.head);
        }
    };
    uint before = 0;
#pragma unroll 1
    for (uint lead = 0; lead < item.len(); lead++) {
        const uint sequence = rows[lead].token.sequence;
        bool leads = sequence != NONE && (p.tokens > 1 || lead == 0);
        for (uint r = 0; p.tokens > 1 && leads && r < lead; r++) {
            leads = rows[r].token.sequence != sequence;
        }
        if (!leads) {
            continue;
        }
        Range any = {0, 0}, all = {0, NONE};
        if (p.tokens == 1) {
            any = all = visible(p, b.only);
        }
        for (uint r = 0; p.tokens > 1 && r < item.len(); r++) {
            const Token token = rows[r].token;
            const Range seen = token.sequence == sequence ? visible(p, token) : Range{0, 0};
            any = join(any, seen);
            all = {max(all.first, seen.first), min(all.end, seen.end)};
        }
        __syncthreads();
        for (uint r = thread; r < ROWS; r += THREADS) {
            rows[r].seen = rows[r].token.sequence == sequence ? visible(p, rows[r].token) : Range{0, 0};
        }
        Segment segment = {any, sequence, 0};
        if (FRESH) {
            // From the first to the last token of the batch that any row sees.
            if (thread == 0) {
                shared.words()[0] = NONE;
                shared.words()[1] = 0;
            }
            __syncthreads();
            for (uint i = thread; i < p.tokens; i += THREADS) {
                if (b.sequence[i] == sequence && b.positions[i] >= any.first && b.positions[i] < any.end) {
                    atomicMin(shared.words(), i);
                    atomicMax(shared.words() + 1, i + 1);
                }
            }
            __syncthreads();
            segment.keys = {min(shared.words()[0], shared.words()[1]), shared.words()[1]};
            segment.first_row = piece.head * p.row_head;
        } else {
            segment.keys = part_of(any, before, piece.tiles);
            before += tiles_of(any);
            segment.first_row = sequence * p.row_sequence + piece.head * p.row_head;
        }
        if (segment.keys.first < segment.keys.end) {
            go_through(p, b, shared, segment, all, work, prepare);
        }
    }
    copies_wait<0>();
    __syncthreads();

    // l over all lanes and warps; o to shared memory, in order.
    float *sums = shared.maxima();
#pragma unroll
    for (uint n = 0; n < NT; n++) {
#pragma unroll
        for (uint c = 0; c < 2; c++) {
            float l = work.l[n][c];
#pragma unroll
            for (uint step = 4; step < 32; step *= 2) {
                l += __shfl_xor_sync(0xFFFFFFFF, l, step);
            }
            if (g == 0) {
                sums[warp * (ROWS + 4) + n * 8 + 2 * t + c] = l;
                if (warp == 0) {
                    rows[n * 8 + 2 * t + c].m = work.m[n][c];
                }
            }
        }
    }
    const float unscale = (V::QUANTISED ? work.norm : 1.0f) * (1 / WEIGHT_SCALE);
    float *output = shared.output();
#pragma unroll
    for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
        for (uint n = 0; n < NT; n++) {
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                const uint coord = warp * SLICE + Values::coord(2 * i + c / 2, g);
                output[(n * 8 + 2 * t + c % 2) * HEAD_DIM + coord] = work.o[i][n][c] * unscale;
            }
        }
    }
    __syncthreads();
    for (uint r = thread; r < ROWS; r += THREADS) {
        float l = 0;
#pragma unroll
        for (uint w = 0; w < WARPS; w++) {
            l += sums[w * (ROWS + 4) + r];
        }
        rows[r].l = l;
    }
    __syncthreads();
    if (piece.parts > 1 && !merge(p, b, shared, piece, item.len())) {
        return;
    }
    finish_rows(p, b, shared, item, piece.head);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR)
    attend(const uchar *q, uchar *out, const uchar *k_low, const uchar *k_high, const float *k_norms, const uchar *v_low,
           const uchar *v_high, const float *v_norms, const uint *positions, const uint *sequence, const uint *lens,
           float *partials, uint *counters, float *state, const AttendParams p) {
    extern __shared__ __align__(128) uchar memory[];
    const Shared shared = {memory};
    Token only = {0, NONE, 0};
    if (p.tokens == 1) {
        only = load_token(p, positions, sequence, lens, 0);
    }
    // The queries are needed soon, wherever they are now.
    constexpr uint Q_LINE = 128 / size_of(Q_DTYPE);
    if (threadIdx.x * ulong(Q_LINE) < ulong(p.tokens) * p.kv_heads * p.group * HEAD_DIM) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(q + threadIdx.x * 128));
    }
    const Buffers b = {only, q, out, {k_low, k_high, k_norms}, {v_low, v_high, v_norms}, positions, sequence, lens, partials,
                       counters, state};
    const uint thread = threadIdx.x, block = blockIdx.x;
    bool tables_filled = false;

    // The line of all tiles: items in order, within an item its heads. prefix[i]: tiles of one head before item i. With
    // splits, the line of the block's own item and head.
    const bool shared_evenly = !FRESH && p.splits == 0;
    const uint splits = max(p.splits, 1u);
    const uint pair = block / splits;
    const uint items = shared_evenly ? p.items : 1, heads = shared_evenly ? p.kv_heads : 1;
    const uint first_item = shared_evenly ? 0 : pair / p.kv_heads;
    uint *prefix = shared.prefix();
#pragma unroll 1
    for (uint i = thread; i < items; i += THREADS) {
        prefix[i + 1] = FRESH ? 1 : item_tiles(p, b, first_item + i);
    }
    if (thread == 0) {
        prefix[0] = 0;
    }
    __syncthreads();
    if (thread == 0) {
#pragma unroll 1
        for (uint i = 1; i < items; i++) {
            prefix[i + 1] += prefix[i];
        }
    }
    __syncthreads();
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
        work_on(p, b, shared, piece, tables_filled);
        at = first + piece.tiles.end;
    }
}
