// linear_skinny_mma: linear (linear_generic.cu) for the few rows of a decode step, on tensor cores. Reading W is the
// limit.
//
// x is [.., inputs], f32, f16 or bf16; W is [outputs, inputs], dense of x's dtype (or bf16 for x of f32), or affine
// codes. Rows of both begin at multiples of 16 bytes (of 8 for codes of 6 bits).
//
// A block has TILES tiles of 16 outputs for TOKENS rows; its warps divide the inputs among them. A warp takes SPAN
// inputs at a time: W is the A of its products, 16 outputs by 16 inputs; x is the B, 16 inputs by 8 columns. Lane 4g +
// t copies LANE neighbouring weights of the outputs g and g + 8, part t of the span, to shared memory, 16 bytes at a
// time and STAGES spans ahead of their use. x is copied ahead as well. Only the warp's own lanes read both, so the
// block has a single barrier, before the warps' sums are added. The assignment of inputs to products is arbitrary if A
// and B agree: each lane multiplies its own inputs, in the order in which its codes are unpacked.
//
// Codes are integers that f16 and bf16 hold exactly. Scale and bias are applied in float: the scale to a group's sum of
// products, the bias to its sum of x, which is a product with ones. If a span has several groups, a token has a column
// for each group, which is zero at the inputs of other groups. An x of f32 is a sum of three bf16 numbers, each in its
// own column: nothing is rounded.
//
// Copies of W begin before the previous kernel has ended (device/dependent_launch.h); x is read later.
#include "device/affine.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "device/reduce.h"
#include "linear/out_parts.h"
#include "linear/params.h"

struct SkinnyMmaParams {
    LinearParams linear;
    OutParts parts;
};

constexpr bool AFFINE = BITS != 0;
constexpr bool HALF = X_DTYPE == F16;
constexpr uint TERMS = X_DTYPE == F32 ? 3 : 1;

// Weights of a unit, which are unpacked together; the words of a unit; its products, which take four weights of a lane
// each.
constexpr uint UNIT = AFFINE ? 16 : 8;
constexpr uint UNIT_WORDS = AFFINE ? words_of(BITS) : 4;
constexpr uint UNIT_PRODUCTS = UNIT / 4;
// Weights of a lane in a span, their words, and how many of these are copied at a time.
constexpr uint LANE = 32;
constexpr uint UNITS = LANE / UNIT;
constexpr uint WORDS = UNITS * UNIT_WORDS;
constexpr uint COPY = BITS == 6 ? 2 : 4;
// The distance between units of a lane, and between the first units of neighbouring lanes. A unit with the length of
// one copy is adjacent to the units of the three other lanes.
constexpr bool SIDE_BY_SIDE = UNIT_WORDS == COPY;
constexpr uint UNIT_STEP = SIDE_BY_SIDE ? 4 * UNIT : UNIT;
constexpr uint LANE_STEP = SIDE_BY_SIDE ? UNIT : LANE;
constexpr uint SPAN = 4 * LANE;
// Groups of a span; columns of x; products that are needed for these columns.
constexpr uint GROUPS = AFFINE && SPAN > GROUP ? SPAN / GROUP : 1;
constexpr uint COLUMNS = TOKENS * TERMS * GROUPS;
constexpr uint WIDE = (COLUMNS + 7) / 8;
// Groups whose scales a lane needs: those of its two columns.
constexpr uint MINE = GROUPS > 1 ? 2 : 1;
// Whether codes keep the offset MAGIC in their 16 bits; it is then subtracted from the sums. Only if the error is at
// most the rounding error of the result.
constexpr bool FOLD = (BITS == 4 || BITS == 6) && !HALF && OUT_DTYPE != F32;
constexpr uint OUTPUTS = 16 * TILES;
// Words of shared memory that a warp has for a span of W and of x, and pieces of 16 bytes of x.
constexpr uint W_STAGE = 2 * TILES * WORDS * 32;
constexpr uint X_ROW = SPAN * size_of(X_DTYPE);
constexpr uint X_PIECES = X_ROW / 16;
constexpr uint STAGE = W_STAGE + TOKENS * X_ROW / 4;
// Scales and biases are read VECTOR at a time, and kept for several spans; VECTOR divides their rows: [TILES][scales or
// biases][16 outputs][KEPT].
constexpr uint KEPT = VECTOR > GROUPS ? VECTOR : GROUPS;
constexpr uint KEPT_SPANS = KEPT / GROUPS;
constexpr uint FACTOR_WORDS = AFFINE ? TILES * 2 * 16 * KEPT * size_of(W_DTYPE) / 4 : 0;
constexpr uint WARP_WORDS = STAGES * STAGE + FACTOR_WORDS;
// skinny_mma.rs computes the same sum.
static_assert(WARPS * (WARP_WORDS + OUTPUTS * WIDE * 8) * 4 == SHARED_BYTES, "linear: the shared memory that Rust asks for");
constexpr uint MY_PIECES = (TOKENS * X_PIECES + 31) / 32;

// A code of few bits as the low bits of these numbers adds its value: to 1024 in f16, to 128 in bf16.
constexpr uint MAGIC = HALF ? 0x64006400 : 0x43004300;
constexpr uint ONES = HALF ? 0x3C003C00 : 0x3F803F80;

// The code under the mask, in both halves of a word.
inline uint code_of(uint word, uint mask) {
    uint number;
    // (word & mask) | MAGIC, in one instruction.
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(number) : "r"(word), "r"(mask), "r"(MAGIC));
    return FOLD ? number : minus<HALF>(number, MAGIC);
}

// Pair i of the codes of a unit; in_pairs has the same order for x. i is known when the loop around it is unrolled.
inline uint code_pair(const uint (&w)[UNIT_WORDS], uint i) {
    if constexpr (!AFFINE) {
        return w[i];
    } else if constexpr (BITS == 4) {
        // Codes j and j + 4 of a word.
        return code_of(w[i / 4] >> (i % 4 * 4), 0x000F000F);
    } else if constexpr (BITS == 6) {
        // Codes i and i + 8 of 96 bits. `both` has 16 bits of each half of the 96, from the byte with the first bit of
        // code i on.
        const uint from = i / 2;
        const uint both = from == 0   ? __byte_perm(w[0], __funnelshift_r(w[1], w[2], 16), 0x5410)
                          : from == 1 ? __byte_perm(w[0], __funnelshift_r(w[1], w[2], 16), 0x6521)
                          : from == 2 ? __byte_perm(__funnelshift_r(w[0], w[1], 24), w[2], 0x6510)
                                      : __byte_perm(w[1], w[2], 0x7610);
        return code_of(both >> (i % 2 * 6 + from % 2 * 4), 0x003F003F);
    } else {
        // Codes j and j + 2 of a word.
        const uint two = w[i / 2] >> (i % 2 * 8);
        if constexpr (HALF) {
            return code_of(two, 0x00FF00FF);
        }
        // The highest bit of a code coincides with the 128 of MAGIC, so 128 is subtracted if the bit is 0.
        return minus<HALF>(two & 0x007F007F | MAGIC, (~two & 0x00800080) * 0x86);
    }
}

// Pair i of x, of the neighbouring pairs of a unit.
inline uint in_pairs(const uint (&x)[UNIT / 2], uint i) {
    if constexpr (!AFFINE) {
        return x[i];
    } else if constexpr (BITS == 4) {
        const uint j = i / 4 * 4 + i % 4 / 2;
        return __byte_perm(x[j], x[j + 2], i % 2 == 0 ? 0x5410 : 0x7632);
    } else if constexpr (BITS == 6) {
        return __byte_perm(x[i / 2], x[i / 2 + 4], i % 2 == 0 ? 0x5410 : 0x7632);
    } else {
        return __byte_perm(x[i / 2 * 2], x[i / 2 * 2 + 1], i % 2 == 0 ? 0x5410 : 0x7632);
    }
}

// A pair of floats, less the sum of the first `term` terms, as 16-bit numbers.
inline uint term_of(float a, float b, uint term) {
    uint terms[3];
    split<false>(a, b, terms);
    return term == 0 ? terms[0] : term == 1 ? terms[1] : terms[2];
}

// A unit of x as neighbouring pairs, of one term.
inline void load_pairs(uint (&pairs)[UNIT / 2], const uint *shared, uint term) {
    const uchar *x = reinterpret_cast<const uchar *>(shared);
#pragma unroll
    for (uint i = 0; i < UNIT / 2; i += 4) {
        uint4 four;
        if (X_DTYPE == F32) {
            const float4 a = *reinterpret_cast<const float4 *>(x + i * 8), b = *reinterpret_cast<const float4 *>(x + i * 8 + 16);
            four = make_uint4(term_of(a.x, a.y, term), term_of(a.z, a.w, term), term_of(b.x, b.y, term), term_of(b.z, b.w, term));
        } else {
            four = *reinterpret_cast<const uint4 *>(x + i * 4);
        }
        pairs[i] = four.x;
        pairs[i + 1] = four.y;
        pairs[i + 2] = four.z;
        pairs[i + 3] = four.w;
    }
}

// The lane's addresses in W: its part of the first span.
struct Rows {
    const uchar *values[TILES][2];
};

template <uint BYTES> struct Bytes;
template <> struct Bytes<2> { typedef ushort Type; };
template <> struct Bytes<4> { typedef uint Type; };
template <> struct Bytes<8> { typedef uint2 Type; };
template <> struct Bytes<16> { typedef uint4 Type; };

// Lane l fetches for the warp, of output l % 16 of each tile, the scales (below lane 16) or the biases.
typedef Bytes<VECTOR * size_of(W_DTYPE)>::Type Vector;
struct Fetched {
    Vector values[TILES][KEPT / VECTOR];
};

// Fetches the scales (or biases) of several spans from `span` on.
inline void fetch(Fetched &to, const uchar *from, const ulong (&starts)[TILES], uint span, uint groups) {
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (uint i = 0; i < KEPT / VECTOR; i++) {
            const uint first = span * SPAN / GROUP + i * VECTOR;
            // Without a branch, all loads are in flight at once.
            const ulong at = starts[tile] + min(first, groups - VECTOR);
            const Vector value = *reinterpret_cast<const Vector *>(from + at * size_of(W_DTYPE));
            to.values[tile][i] = first < groups ? value : Vector{};
        }
    }
}

// Two neighbouring scales or biases, the first at an even index; or one of them twice.
inline float2 factors_at(const uchar *factors, uint i) {
    if (MINE == 1) {
        const float one = load(factors, i, W_DTYPE);
        return make_float2(one, one);
    }
    if (W_DTYPE == F32) {
        return *reinterpret_cast<const float2 *>(factors + i * 4);
    }
    const uint pair = *reinterpret_cast<const uint *>(factors + i * 2);
    return W_DTYPE == F16 ? unpack<true>(pair) : unpack<false>(pair);
}

// Begins to copy a lane's weights of a span, zeros where they are beyond the inputs.
inline void begin_span(uint *stage, const Rows &rows, uint span, uint lane, uint inputs) {
    const ulong offset = ulong(span) * (4 * WORDS * 4);
#pragma unroll
    for (uint i = 0; i < WORDS; i += COPY) {
        const uint unit = i / UNIT_WORDS;
        const bool there = span * SPAN + lane % 4 * LANE_STEP + unit * UNIT_STEP < inputs;
        const uint at = SIDE_BY_SIDE ? unit * (4 * COPY * 4) : i * 4;
#pragma unroll
        for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (uint r = 0; r < 2; r++) {
                const uint *to = stage + (tile * 2 + r) * WORDS * 32 + i * 32 + lane * COPY;
                copy_async<COPY * 4>(shared_address(to), rows.values[tile][r] + (there ? offset + at : 0), there);
            }
        }
    }
}

// The pieces of x that a lane copies of every span.
struct Pieces {
    const uchar *from[MY_PIECES];
};

// Begins to copy a warp's span of x, zeros beyond the inputs.
inline void begin_inputs(uint *stage, const Pieces &pieces, uint span, uint lane, uint inputs) {
#pragma unroll
    for (uint i = 0; i < MY_PIECES; i++) {
        const uint piece = i * 32 + lane;
        if (piece < TOKENS * X_PIECES) {
            const bool there = span * SPAN + piece % X_PIECES * (16 / size_of(X_DTYPE)) < inputs;
            copy_async<16>(shared_address(stage + W_STAGE + piece * 4), pieces.from[i] + (there ? ulong(span) * X_ROW : 0), there);
        }
    }
}

// The words of one unit of a lane's weights.
inline void unit_words(uint (&w)[UNIT_WORDS], const uint *stage, uint row, uint unit, uint lane) {
#pragma unroll
    for (uint i = 0; i < UNIT_WORDS; i++) {
        const uint word = unit * UNIT_WORDS + i;
        w[i] = stage[row * WORDS * 32 + word / COPY * COPY * 32 + lane * COPY + word % COPY];
    }
}

// Context of all phases: the block's rows and outputs, and the warp's spans and shared memory.
struct Warp {
    const LinearParams &p;
    uint lane;
    uint first_output;
    uint first_row;
    // Whether the expert exists.
    bool known;
    // The warp's spans, and the number of groups of a row.
    uint begin;
    uint end;
    uint groups;
    uint *stages;
    uchar *factors;
};

// Where a lane copies from: its weights, its scales or biases, and its pieces of x.
struct Sources {
    Rows rows;
    ulong starts[TILES];
    const uchar *factors;
    Pieces pieces;
};

// Missing outputs repeat the last one and are not stored.
inline void find_weights(Sources &from, const Warp &w, const uchar *values, uint expert) {
    const ulong row_bytes = AFFINE ? ulong(w.p.inputs) / 8 * BITS : ulong(w.p.inputs) * 2;
    const ulong first = ulong(w.known ? expert : 0) * w.p.outputs;
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (uint r = 0; r < 2; r++) {
            const ulong row = first + min(w.first_output + tile * 16 + r * 8 + w.lane / 4, w.p.outputs - 1);
            from.rows.values[tile][r] = values + row * row_bytes + w.lane % 4 * (SIDE_BY_SIDE ? COPY * 4 : WORDS * 4);
        }
        from.starts[tile] = (first + min(w.first_output + tile * 16 + w.lane % 16, w.p.outputs - 1)) * w.groups;
    }
}

inline void find_inputs(Sources &from, const Warp &w, const uchar *x) {
#pragma unroll
    for (uint i = 0; i < MY_PIECES; i++) {
        const uint piece = i * 32 + w.lane;
        const ulong row = min(w.first_row + piece / X_PIECES, w.p.rows - 1) / w.p.rows_per_input;
        from.pieces.from[i] = x + row * w.p.inputs * size_of(X_DTYPE) + piece % X_PIECES * 16;
    }
}

// Begins to copy the weights of the first STAGES spans.
inline void fill_weights(const Warp &w, const Sources &from) {
#pragma unroll
    for (uint s = 0; s < STAGES; s++) {
        if (w.begin + s < w.end) {
            begin_span(w.stages + s * STAGE, from.rows, w.begin + s, w.lane, w.p.inputs);
        }
    }
}

// Begins to copy x of the first STAGES spans. The first group of copies also contains all copies of weights.
inline void fill_inputs(const Warp &w, const Sources &from) {
#pragma unroll
    for (uint s = 0; s < STAGES; s++) {
        if (w.begin + s < w.end) {
            begin_inputs(w.stages + s * STAGE, from.pieces, w.begin + s, w.lane, w.p.inputs);
        }
        copies_commit();
    }
}

// Begins to copy the span that takes the place of `span` in `stage`.
inline void refill_stage(const Warp &w, const Sources &from, uint *stage, uint span) {
    if (span + STAGES < w.end) {
        begin_span(stage, from.rows, span + STAGES, w.lane, w.p.inputs);
        begin_inputs(stage, from.pieces, span + STAGES, w.lane, w.p.inputs);
    }
    copies_commit();
}

// Stores the scales and biases that were fetched, and fetches those of the spans after them.
inline void keep_factors(const Warp &w, const Sources &from, Fetched &fetched, uint span) {
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (uint i = 0; i < KEPT / VECTOR; i++) {
            reinterpret_cast<Vector *>(w.factors)[(tile * 32 + w.lane) * (KEPT / VECTOR) + i] = fetched.values[tile][i];
        }
    }
    if (span + KEPT_SPANS < w.end) {
        fetch(fetched, from.factors, from.starts, span + KEPT_SPANS, w.groups);
    }
}

// A lane's columns of B: a term of a token, at the inputs of one group. Offsets are in words, from the beginning of a
// stage.
struct Columns {
    uint inputs_at[WIDE];
    uint term[WIDE];
    uint group[WIDE];
    bool mine[WIDE];
};

inline Columns columns_of(uint lane) {
    Columns out;
#pragma unroll
    for (uint b = 0; b < WIDE; b++) {
        const uint column = 8 * b + lane / 4, token = column / GROUPS / TERMS;
        out.term[b] = column / GROUPS % TERMS;
        out.mine[b] = column < COLUMNS;
        out.group[b] = column % GROUPS;
        out.inputs_at[b] = W_STAGE + (token * X_ROW + lane % 4 * LANE_STEP * size_of(X_DTYPE)) / 4;
    }
    return out;
}

// Products of a span with its weights, and with ones. Odd and even products have separate sums, because a product waits
// for the previous product into the same sum.
struct Products {
    float weights[TILES][WIDE][2][4] = {};
    float ones[WIDE][2][4] = {};
};

inline void multiply_unit(Products &products, const uint *stage, const Columns &columns, uint unit, uint lane) {
    uint in[WIDE][UNIT / 2] = {};
#pragma unroll
    for (uint b = 0; b < WIDE; b++) {
        if (columns.mine[b] && (GROUPS == 1 || (unit * UNIT_STEP + lane % 4 * LANE_STEP) / GROUP == columns.group[b])) {
            load_pairs(in[b], stage + columns.inputs_at[b] + unit * UNIT_STEP * size_of(X_DTYPE) / 4, columns.term[b]);
        }
    }
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
        uint low[UNIT_WORDS], high[UNIT_WORDS];
        unit_words(low, stage, tile * 2, unit, lane);
        unit_words(high, stage, tile * 2 + 1, unit, lane);
#pragma unroll
        for (uint i = 0; i < UNIT_PRODUCTS; i++) {
            const uint a[4] = {code_pair(low, 2 * i), code_pair(high, 2 * i), code_pair(low, 2 * i + 1), code_pair(high, 2 * i + 1)};
#pragma unroll
            for (uint b = 0; b < WIDE; b++) {
                const uint2 four = make_uint2(in_pairs(in[b], 2 * i), in_pairs(in[b], 2 * i + 1));
                mma<HALF>(products.weights[tile][b][i % 2], a, four);
                if (AFFINE && tile == 0) {
                    const uint all[4] = {ONES, ONES, ONES, ONES};
                    mma<HALF>(products.ones[b][i % 2], all, four);
                }
            }
        }
    }
}

// Adds the products of a span, scaled; `kept` is the span's place among those whose scales are stored.
inline void add_products(float (&sums)[TILES][WIDE][4], const Products &products, const Warp &w, uint kept) {
    const uint g = w.lane / 4, t = w.lane % 4;
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (uint r = 0; r < 2; r++) {
            float2 scale = make_float2(1, 1), bias = make_float2(0, 0);
            if (AFFINE) {
                const uint at = (tile * 32 + r * 8 + g) * KEPT + kept * GROUPS + (GROUPS == 4 ? t % 2 * 2 : 0);
                scale = factors_at(w.factors, at);
                bias = factors_at(w.factors, at + 16 * KEPT);
            }
#pragma unroll
            for (uint b = 0; b < WIDE; b++) {
#pragma unroll
                for (uint j = 0; j < 2; j++) {
                    const uint i = 2 * r + j;
                    float product = products.weights[tile][b][0][i] + products.weights[tile][b][1][i];
                    if (AFFINE) {
                        const float one = products.ones[b][0][i] + products.ones[b][1][i];
                        product = FOLD ? product - 128 * one : product;
                        product = (j == 0 ? scale.x : scale.y) * product + (j == 0 ? bias.x : bias.y) * one;
                    }
                    sums[tile][b][i] += product;
                }
            }
        }
    }
}

// The sums over the warp's spans.
inline void multiply_spans(const Warp &w, const Sources &from, Fetched &fetched, float (&sums)[TILES][WIDE][4]) {
    const Columns columns = columns_of(w.lane);
    uint slot = 0;
    for (uint span = w.begin; span < w.end; span++) {
        const uint kept = (span - w.begin) % KEPT_SPANS;
        if (AFFINE && kept == 0) {
            keep_factors(w, from, fetched, span);
        }
        copies_wait<STAGES - 1>();
        __syncwarp();
        uint *stage = w.stages + slot * STAGE;
        Products products;
#pragma unroll
        for (uint unit = 0; unit < UNITS; unit++) {
            multiply_unit(products, stage, columns, unit, w.lane);
        }
        add_products(sums, products, w, kept);
        __syncwarp();
        refill_stage(w, from, stage, span);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
}

// Epilogue: stores the warp's sums in shared memory, [WARPS][OUTPUTS][8 WIDE], after the stages.
inline void leave_sums(float *parts, const float (&sums)[TILES][WIDE][4], uint warp, uint lane) {
    const uint g = lane / 4, t = lane % 4;
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (uint b = 0; b < WIDE; b++) {
#pragma unroll
            for (uint r = 0; r < 2; r++) {
                const uint at = ((warp * OUTPUTS + tile * 16 + r * 8 + g) * WIDE + b) * 8 + 2 * t;
                *reinterpret_cast<float2 *>(parts + at) = make_float2(sums[tile][b][2 * r], sums[tile][b][2 * r + 1]);
            }
        }
    }
}

// Epilogue: adds up the sums of all warps, and stores the results. Results of an expert that does not exist are zeros.
inline void store_sums(const Warp &w, const OutParts &out_parts, const float *parts, uchar *out) {
#pragma unroll 1
    for (uint i = threadIdx.x; i < OUTPUTS * TOKENS; i += 32 * WARPS) {
        const uint output = i % OUTPUTS, token = i / OUTPUTS;
        float sum = 0;
#pragma unroll
        for (uint warp = 0; warp < WARPS; warp++) {
#pragma unroll
            for (uint c = 0; c < TERMS * GROUPS; c++) {
                sum += parts[(warp * OUTPUTS + output) * WIDE * 8 + token * TERMS * GROUPS + c];
            }
        }
        if (w.first_output + output < w.p.outputs && w.first_row + token < w.p.rows) {
            const ulong place = place_in_parts(w.p, out_parts, w.first_row + token, w.first_output + output);
            store(out, place, w.known ? w.p.alpha * sum : 0.0f, OUT_DTYPE);
        }
    }
}

// Blocks: x counts tiles of outputs, y the rows, TOKENS each (one with experts).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    KVANT_KERNEL(const uchar *x, const uchar *values, const uchar *scales, const uchar *biases, const uint *ids, uchar *out,
                const SkinnyMmaParams p) {
    extern __shared__ __align__(16) uint shared[];
    const uint lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint first_output = blockIdx.x * OUTPUTS, first_row = blockIdx.y * TOKENS;
    const uint spans = (p.linear.inputs + SPAN - 1) / SPAN, each = (spans + WARPS - 1) / WARPS;
    const uint begin = min(warp * each, spans), end = min(begin + each, spans);
    const uint groups = AFFINE ? p.linear.inputs / GROUP : 0;
    uint *stages = shared + warp * WARP_WORDS;
    uchar *factors = reinterpret_cast<uchar *>(stages + STAGES * STAGE);
    if (EXPERTS) {
        wait_for_previous();
    }
    const uint expert = EXPERTS ? ids[first_row] : 0;
    const Warp w = {p.linear, lane, first_output, first_row, expert < p.linear.experts, begin, end, groups, stages, factors};
    Sources from;
    from.factors = lane < 16 ? scales : biases;
    find_weights(from, w, values, expert);
    fill_weights(w, from);
    Fetched fetched = {};
    if (AFFINE && begin < end) {
        fetch(fetched, from.factors, from.starts, begin, groups);
    }
    if (!EXPERTS) {
        wait_for_previous();
    }
    let_next_begin();
    find_inputs(from, w, x);
    fill_inputs(w, from);
    float sums[TILES][WIDE][4] = {};
    multiply_spans(w, from, fetched, sums);
    float *parts = reinterpret_cast<float *>(shared + WARPS * WARP_WORDS);
    leave_sums(parts, sums, warp, lane);
    __syncthreads();
    store_sums(w, p.parts, parts, out);
}
