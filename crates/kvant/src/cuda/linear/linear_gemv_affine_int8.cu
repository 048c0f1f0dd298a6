// linear_gemv_affine_int8: linear (linear_generic.cu) for affine codes and one or two rows, or few rows of experts, on
// integer tensor cores. Reading W is the limit.
//
// x is [.., inputs], f32, f16 or bf16; W is [outputs, inputs], codes of 4, 6 or 8 bits. Rows of both begin at multiples
// of 16 bytes (of 8 for codes of 6 bits).
//
// A block has TILES tiles of 16 outputs for TOKENS rows; its warps divide the inputs among them. A warp takes SPAN
// inputs at a time. W is the A of its products: 16 outputs by 32 inputs, one code per byte. Codes of 8 bits are
// unchanged, others are unpacked to words of four. Lane 4g + t has LANE neighbouring codes of the outputs g and g + 8,
// or two times 16 of them. Asynchronous copies bring codes, scales and biases to shared memory, STAGES spans ahead of
// their use. Only the warp's own lanes read them, so the block has a single barrier, at the end.
//
// A number of x becomes an integer of 23 bits, relative to the largest number of its span: three signed bytes, each in
// its own column of B. DEPTH spans are converted at a time, so that the steps of one span overlap with those of
// another. If a span has several groups, each group has its own columns, which are zero at the inputs of other groups.
// Sums of products are exact. In float, a group's sum is multiplied by its scale, and its bias by the sum of x, which
// is a product with ones. If a number of x is not finite, or at least 2^110, the row's results are NaN.
//
// Copies of W begin before the previous kernel has ended (device/dependent_launch.h); x is read later.
#include "device/affine.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "device/reduce.h"
#include "linear/gating.h"
#include "linear/integer_products.h"
#include "linear/params.h"

// Words of a lane in a span.
constexpr uint WORDS = UNITS * UNIT_WORDS;
// Words that are copied at a time. Codes of 6 bits in rows at multiples of 16 bytes (PACKED) are copied unchanged: six
// lanes copy 96 bytes of a row, regardless of the lanes that read them later.
constexpr bool PACKED = BITS == 6 && W_ALIGNED;
constexpr uint COPY = BITS == 6 && !PACKED ? 2 : 4;
// Units of 16 bytes are adjacent to those of the three other lanes.
constexpr bool SIDE_BY_SIDE = UNIT_WORDS == COPY;
constexpr uint UNIT_STEP = SIDE_BY_SIDE ? 4 * UNIT : UNIT;
constexpr uint LANE_STEP = SIDE_BY_SIDE ? UNIT : LANE;
constexpr uint GROUPS = SPAN > GROUP ? SPAN / GROUP : 1;
// Four columns, three of them bytes of x, for each group of each token; eight to a product.
constexpr uint QUADS = TOKENS * GROUPS;
constexpr uint WIDE = (QUADS + 1) / 2;
constexpr uint OUTPUTS = 16 * TILES;

// Words of shared memory that a warp has for a span of W.
constexpr uint STAGE = 2 * TILES * WORDS * 32;
// Scales and biases are read VECTOR at a time; VECTOR divides their rows. The scales of several spans, a period, are
// read together, PERIODS periods ahead: [PERIODS][TILES][scales or biases][16 outputs][KEPT].
constexpr uint KEPT = VECTOR > GROUPS ? VECTOR : GROUPS;
constexpr uint KEPT_SPANS = KEPT / GROUPS;
constexpr uint PERIODS = 1 + (STAGES + KEPT_SPANS - 1) / KEPT_SPANS;
constexpr uint PERIOD = TILES * 32 * KEPT * size_of(W_DTYPE) / 4;
// The bytes of a span of x, [TOKENS][3][SPAN] with gaps against bank conflicts, then zeros, then the units of the
// bytes.
constexpr uint ZEROS = TOKENS * 3 * DIGIT;
constexpr uint UNITS_AT = ZEROS + 8;
constexpr uint DIGITS = UNITS_AT + 4;
// Spans of x that are read before the first becomes bytes.
constexpr uint BATCH = DEPTH * TOKENS <= 4 ? DEPTH : 4 / TOKENS;
constexpr uint WARP_WORDS = (STAGES * STAGE + PERIODS * PERIOD + DEPTH * DIGITS + 3) / 4 * 4;
// gemv_affine_int8.rs computes the same sum.
static_assert(WARPS * (WARP_WORDS + OUTPUTS * TOKENS) * 4 == SHARED_BYTES, "linear: the shared memory that Rust asks for");

// The lane's next addresses in W: its parts of a span, two for each tile, or three if PACKED.
constexpr uint PARTS = PACKED ? 3 : 2;
struct Rows {
    const uchar *values[TILES][PARTS];
};

// The row of a tile, and the bytes into its span, at which a part begins.
inline uint2 part_of(uint part, uint lane) {
    const uint piece = part * 32 + lane;
    return PACKED ? make_uint2(piece / 6, piece % 6 * 16)
                  : make_uint2(part * 8 + lane / 4, lane % 4 * (SIDE_BY_SIDE ? COPY * 4 : WORDS * 4));
}

// Begins to copy a lane's codes of a span, zeros beyond the inputs, and advances to the next span.
inline void begin_span(uint *stage, Rows &rows, uint span, uint lane, uint inputs) {
    if (PACKED) {
#pragma unroll
        for (uint part = 0; part < PARTS; part++) {
            // Rows end with whole parts.
            const bool there = WHOLE || (span * (SPAN / 32 * 24) + part_of(part, lane).y) < inputs / 32 * 24;
#pragma unroll
            for (uint tile = 0; tile < TILES; tile++) {
                const uint *to = stage + tile * 2 * WORDS * 32 + (part * 32 + lane) * 4;
                copy_async<16>(shared_address(to), rows.values[tile][part], there);
            }
        }
    } else {
#pragma unroll
        for (uint i = 0; i < WORDS; i += COPY) {
            const uint unit = i / UNIT_WORDS;
            const bool there = WHOLE || span * SPAN + lane % 4 * LANE_STEP + unit * UNIT_STEP < inputs;
            const uint at = SIDE_BY_SIDE ? unit * (4 * COPY * 4) : i * 4;
#pragma unroll
            for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
                for (uint r = 0; r < 2; r++) {
                    const uint *to = stage + (tile * 2 + r) * WORDS * 32 + i * 32 + lane * COPY;
                    copy_async<COPY * 4>(shared_address(to), rows.values[tile][r] + (there ? at : 0), there);
                }
            }
        }
    }
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (uint part = 0; part < PARTS; part++) {
            rows.values[tile][part] += 4 * WORDS * 4;
        }
    }
}

// Begins to copy the scales (lanes below 16) or biases (the others) of a period, of output lane % 16 of each tile.
inline void begin_factors(uint *to, const uchar *from, const ulong (&starts)[TILES], uint period, uint lane, uint groups) {
    constexpr uint SIZE = size_of(W_DTYPE), BYTES = VECTOR * SIZE;
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
        uchar *row = reinterpret_cast<uchar *>(to) + (tile * 32 + lane) * KEPT * SIZE;
#pragma unroll
        for (uint i = 0; i < KEPT; i += VECTOR) {
            const uint first = period * KEPT + i;
            const bool there = first < groups;
            const uchar *at = from + (starts[tile] + (there ? first : 0)) * SIZE;
            if constexpr (BYTES >= 4) {
                copy_async<BYTES>(shared_address(row + i * SIZE), at, there);
            } else {
                *reinterpret_cast<ushort *>(row + i * SIZE) = there ? *reinterpret_cast<const ushort *>(at) : 0;
            }
        }
    }
}

// The words of one unit of a lane's codes.
inline void unit_words(uint (&w)[UNIT_WORDS], const uint *stage, uint row, uint unit, uint lane) {
#pragma unroll
    for (uint i = 0; i < UNIT_WORDS; i++) {
        const uint word = unit * UNIT_WORDS + i;
        w[i] = PACKED ? stage[row * WORDS * 32 + lane * WORDS + word]
                      : stage[row * WORDS * 32 + word / COPY * COPY * 32 + lane * COPY + word % COPY];
    }
}

// The bytes of DEPTH spans of TOKENS rows of x, from `first` on, or fewer at the end of the warp's part.
inline void next_digits(uint *digits, const uchar *x, const ulong (&x_rows)[TOKENS], uint first, uint end, uint lane, uint inputs) {
#pragma unroll
    for (uint batch = 0; batch < DEPTH; batch += BATCH) {
        float4 v[BATCH][TOKENS];
#pragma unroll
        for (uint s = 0; s < BATCH; s++) {
            // Spans after the end repeat the last one and are not used.
            const uint i = min(first + batch + s, end - 1) * SPAN + lane * 4;
#pragma unroll
            for (uint token = 0; token < TOKENS; token++) {
                v[s][token] = WHOLE || i < inputs ? load4(x, x_rows[token] + i, X_DTYPE) : make_float4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (uint s = 0; s < BATCH && batch + s < DEPTH; s++) {
            uint *to = digits + (batch + s) * DIGITS;
#pragma unroll
            for (uint token = 0; token < TOKENS; token++) {
                const float unit = make_digits(to + token * 3 * DIGIT, v[s][token], lane);
                if (lane == 0) {
                    to[UNITS_AT + token] = __float_as_uint(unit);
                }
            }
        }
    }
}

// Context of all phases: the block's rows and outputs, and the warp's spans and shared memory.
struct Warp {
    const LinearParams &p;
    uint lane;
    uint warp;
    uint first_output;
    uint first_row;
    // The outputs (of a half), and whether the expert exists.
    uint dim;
    bool known;
    // The warp's spans, and the number of groups of a row.
    uint begin;
    uint end;
    uint groups;
    uint *stages;
    uint *factors;
    uint *digits;

    // Missing outputs repeat the last one (of a half) and are not stored.
    inline uint output_of(uint tile, uint r) const {
        const uint first = in_tile(r, p.outputs) - r % TILE_STEP;
        return min(first_output + tile * TILE_STEP + r % TILE_STEP, dim - 1) + first;
    }
    inline uint end_period() const {
        return (end * GROUPS + KEPT - 1) / KEPT;
    }
};

// Where a lane copies from: its parts of rows of codes, and its scales or biases.
struct Sources {
    Rows rows;
    ulong starts[TILES];
    const uchar *factors;
};

inline Sources sources_of(const Warp &w, const uchar *values, const uchar *scales, const uchar *biases, uint expert) {
    Sources from;
    const ulong row_bytes = ulong(w.p.inputs) / 8 * BITS;
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (uint part = 0; part < PARTS; part++) {
            const uint2 at = part_of(part, w.lane);
            const ulong row = ulong(w.known ? expert : 0) * w.p.outputs + w.output_of(tile, at.x);
            from.rows.values[tile][part] = values + row * row_bytes + w.begin * (4 * WORDS * 4) + at.y;
        }
        from.starts[tile] = (ulong(w.known ? expert : 0) * w.p.outputs + w.output_of(tile, w.lane % 16)) * w.groups;
    }
    from.factors = w.lane < 16 ? scales : biases;
    return from;
}

// Begins to copy the first STAGES spans, and their scales and biases.
inline void fill_stages(const Warp &w, Sources &from) {
    const uint first_period = w.begin * GROUPS / KEPT, end_period = w.end_period();
#pragma unroll
    for (uint s = 0; s < STAGES; s++) {
        if (w.begin + s < w.end) {
            begin_span(w.stages + s * STAGE, from.rows, w.begin + s, w.lane, w.p.inputs);
        }
        if (s == 0 && w.begin < w.end) {
#pragma unroll
            for (uint i = 0; i < PERIODS; i++) {
                const uint period = first_period + i;
                if (period < end_period) {
                    begin_factors(w.factors + period % PERIODS * PERIOD, from.factors, from.starts, period, w.lane, w.groups);
                }
            }
        }
        copies_commit();
    }
}

// Begins to copy the span that takes the place of `span` in `stage`, and the period of scales and biases that takes the
// place of the one that ends with it.
inline void refill_stage(const Warp &w, Sources &from, uint *stage, uint span) {
    if (span + STAGES < w.end) {
        begin_span(stage, from.rows, span + STAGES, w.lane, w.p.inputs);
    }
    const uint coming = span * GROUPS / KEPT + PERIODS;
    if ((span + 1) * GROUPS % KEPT == 0 && coming < w.end_period()) {
        begin_factors(w.factors + coming % PERIODS * PERIOD, from.factors, from.starts, coming, w.lane, w.groups);
    }
    copies_commit();
}

// Zeros, for the columns of other groups.
inline void clear_zeros(const Warp &w) {
    if (w.lane < 8) {
#pragma unroll
        for (uint s = 0; s < DEPTH; s++) {
            w.digits[s * DIGITS + ZEROS + w.lane] = 0;
        }
    }
}

// A lane's columns of the products. Its column of B is byte g % 4 of x for a group of a token, at the inputs of each
// unit. Its columns of results belong to the lowest two bytes of x, or to the highest; `weights` are the values of
// these bytes in units.
struct Columns {
    uint digits_at[WIDE][UNITS];
    float2 weights;
    // Minus the contribution of MAGIC to the results of both columns.
    float magic;
};

inline Columns columns_of(uint lane) {
    const uint g = lane / 4, t = lane % 4;
    Columns out;
#pragma unroll
    for (uint b = 0; b < WIDE; b++) {
        const uint quad = 2 * b + g / 4, token = quad / GROUPS, group = quad % GROUPS;
#pragma unroll
        for (uint unit = 0; unit < UNITS; unit++) {
            const bool mine = g % 4 < 3 && quad < QUADS && (GROUPS == 1 || (t * LANE_STEP + unit * UNIT_STEP) / GROUP == group);
            out.digits_at[b][unit] = mine ? (token * 3 + g % 4) * DIGIT + (t * LANE_STEP + unit * UNIT_STEP) / 4 : ZEROS;
        }
    }
    out.weights = t % 2 == 0 ? make_float2(1, 256) : make_float2(65536, 0);
    out.magic = t % 2 == 0 ? -MAGIC * (1 + 256) : -MAGIC * 65536;
    return out;
}

// A span of x, as B: the units of the lane's two columns of results (`scaled`), the excess of a sum of products
// (`less`), and the sums of x in each column (`ones`).
struct SpanOfX {
    uint4 in[WIDE][UNITS];
    float2 scaled[WIDE];
    float less[WIDE];
    float ones[WIDE];
};

inline int4 no_products() {
    return make_int4(MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS);
}

inline void load_span_of_x(SpanOfX &x, const uint *digits, const Columns &columns, uint lane) {
#pragma unroll
    for (uint b = 0; b < WIDE; b++) {
#pragma unroll
        for (uint unit = 0; unit < UNITS; unit++) {
            x.in[b][unit] = in_order(*reinterpret_cast<const uint4 *>(digits + columns.digits_at[b][unit]));
        }
    }
#pragma unroll
    for (uint b = 0; b < WIDE; b++) {
        int4 count = no_products();
        const uint4 all = make_uint4(0x01010101, 0x01010101, 0x01010101, 0x01010101);
#pragma unroll
        for (uint unit = 0; unit < UNITS; unit++) {
            count = mma_bytes(all, make_uint2(x.in[b][unit].x, x.in[b][unit].y), count);
            count = mma_bytes(all, make_uint2(x.in[b][unit].z, x.in[b][unit].w), count);
        }
        const uint quad = 2 * b + lane % 4 / 2;
        const float unit = __uint_as_float(digits[UNITS_AT + min(quad / GROUPS, TOKENS - 1)]);
        x.scaled[b] = make_float2(unit * columns.weights.x, unit * columns.weights.y);
        x.less[b] = unit * columns.magic;
        x.ones[b] = fmaf(__int_as_float(count.x), x.scaled[b].x, fmaf(__int_as_float(count.y), x.scaled[b].y, x.less[b]));
    }
}

// The products of a tile with a span of x.
inline void multiply_tile(int4 (&products)[WIDE], const SpanOfX &x, const uint *stage, uint tile, uint lane) {
#pragma unroll
    for (uint b = 0; b < WIDE; b++) {
        products[b] = no_products();
    }
#pragma unroll
    for (uint unit = 0; unit < UNITS; unit++) {
        uint words[2][UNIT_WORDS], low[4], high[4];
        unit_words(words[0], stage, tile * 2, unit, lane);
        unit_words(words[1], stage, tile * 2 + 1, unit, lane);
        unpack_unit(low, words[0]);
        unpack_unit(high, words[1]);
        const uint4 first = make_uint4(low[0], high[0], low[1], high[1]), second = make_uint4(low[2], high[2], low[3], high[3]);
#pragma unroll
        for (uint b = 0; b < WIDE; b++) {
            products[b] = mma_bytes(first, make_uint2(x.in[b][unit].x, x.in[b][unit].y), products[b]);
            products[b] = mma_bytes(second, make_uint2(x.in[b][unit].z, x.in[b][unit].w), products[b]);
        }
    }
}

// Adds the products of all tiles with a span of x, scaled, and biases times sums of x.
inline void multiply_span(const Warp &w, const SpanOfX &x, const uint *stage, uint span, float (&sums)[TILES][WIDE][2]) {
    const uint period = span * GROUPS / KEPT, kept = span * GROUPS % KEPT, g = w.lane / 4, t = w.lane % 4;
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
        int4 products[WIDE];
        multiply_tile(products, x, stage, tile, w.lane);
        const uchar *row = reinterpret_cast<const uchar *>(w.factors + period % PERIODS * PERIOD);
#pragma unroll
        for (uint b = 0; b < WIDE; b++) {
            const uint group = (2 * b + t / 2) % GROUPS;
#pragma unroll
            for (uint r = 0; r < 2; r++) {
                const uint at = (tile * 32 + r * 8 + g) * KEPT + kept + group;
                const float scale = load(row, at, W_DTYPE), bias = load(row, at + 16 * KEPT, W_DTYPE);
                const int low = r == 0 ? products[b].x : products[b].z, high = r == 0 ? products[b].y : products[b].w;
                const float product = fmaf(__int_as_float(low), x.scaled[b].x, fmaf(__int_as_float(high), x.scaled[b].y, x.less[b]));
                sums[tile][b][r] = fmaf(scale, product, fmaf(bias, x.ones[b], sums[tile][b][r]));
            }
        }
    }
}

// The sums over the warp's spans. `x_rows` are the first elements of rows of x.
inline void multiply_spans(const Warp &w, Sources &from, const uchar *x, const ulong (&x_rows)[TOKENS], const Columns &columns,
                           float (&sums)[TILES][WIDE][2]) {
    uint slot = 0, at = DEPTH;
    for (uint span = w.begin; span < w.end; span++, at++) {
        if (at == DEPTH) {
            __syncwarp();
            next_digits(w.digits, x, x_rows, span, w.end, w.lane, w.p.inputs);
            at = 0;
        }
        copies_wait<STAGES - 1>();
        __syncwarp();
        uint *stage = w.stages + slot * STAGE;
        SpanOfX of_span;
        load_span_of_x(of_span, w.digits + at * DIGITS, columns, w.lane);
        multiply_span(w, of_span, stage, span, sums);
        __syncwarp();
        refill_stage(w, from, stage, span);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
}

// Epilogue: stores the warp's sums in shared memory, [WARPS][OUTPUTS][TOKENS], after the stages.
inline void leave_sums(const Warp &w, float *parts, const float (&sums)[TILES][WIDE][2]) {
    const uint g = w.lane / 4, t = w.lane % 4;
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (uint r = 0; r < 2; r++) {
            float *of = parts + (w.warp * OUTPUTS + tile * 16 + r * 8 + g) * TOKENS;
#pragma unroll
            for (uint b = 0; b < WIDE; b += GROUPS == 4 ? 2 : 1) {
                float sum = GROUPS == 4 ? sums[tile][b][r] + sums[tile][b + 1][r] : sums[tile][b][r];
                sum += __shfl_xor_sync(ALL, sum, 1);
                if (GROUPS >= 2) {
                    sum += __shfl_xor_sync(ALL, sum, 2);
                }
                const uint token = (2 * b + t / 2) / GROUPS;
                if (t % (GROUPS >= 2 ? 4 : 2) == 0 && token < TOKENS) {
                    of[token] = sum;
                }
            }
        }
    }
}

// Epilogue: adds up the sums of all warps, and stores the results. Results of an expert that does not exist are zeros.
inline void store_sums(const Warp &w, const float *parts, uchar *out, const uchar *up, uchar *gated) {
#pragma unroll 1
    for (uint i = threadIdx.x; i < TILES * TILE_STEP * TOKENS; i += 32 * WARPS) {
        const uint output = i % (TILES * TILE_STEP), token = i / (TILES * TILE_STEP);
        const uint at = output / TILE_STEP * 16 + output % TILE_STEP;
        float sum = 0, other = 0;
#pragma unroll
        for (uint warp = 0; warp < WARPS; warp++) {
            sum += parts[(warp * OUTPUTS + at) * TOKENS + token];
            other += GATING == HALVES ? parts[(warp * OUTPUTS + at + 8) * TOKENS + token] : 0;
        }
        if (w.first_output + output < w.dim && w.first_row + token < w.p.rows) {
            store_result(out, up, gated, places_in_row(w.first_row + token, w.p.outputs, w.first_output + output),
                         w.known ? w.p.alpha * sum : 0.0f, w.known ? w.p.alpha * other : 0.0f);
        }
    }
}

// Blocks: x counts tiles of outputs, y the rows, TOKENS each (one with experts). `up` and `gated` are those of
// linear/gating.h.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    KVANT_KERNEL(const uchar *x, const uchar *values, const uchar *scales, const uchar *biases, const uint *ids, uchar *out,
                 const LinearParams p, const uchar *up, uchar *gated) {
    extern __shared__ __align__(16) uint shared[];
    const uint lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint first_output = blockIdx.x * (TILES * TILE_STEP), first_row = blockIdx.y * TOKENS;
    const uint spans = (p.inputs + SPAN - 1) / SPAN, each = (spans + WARPS - 1) / WARPS;
    const uint begin = min(warp * each, spans), end = min(begin + each, spans);
    uint *stages = shared + warp * WARP_WORDS;
    uint *factors = stages + STAGES * STAGE;
    if (EXPERTS) {
        wait_for_previous();
    }
    const uint expert = EXPERTS ? ids[first_row] : 0;
    const uint dim = GATING == HALVES ? p.outputs / 2 : p.outputs;
    const Warp w = {p,     lane, warp,           first_output, first_row, dim,    expert < p.experts,
                    begin, end,  p.inputs / GROUP, stages,       factors,   factors + PERIODS * PERIOD};
    Sources from = sources_of(w, values, scales, biases, expert);
    fill_stages(w, from);
    clear_zeros(w);
    const Columns columns = columns_of(lane);
    float sums[TILES][WIDE][2] = {};
    ulong x_rows[TOKENS];
#pragma unroll
    for (uint token = 0; token < TOKENS; token++) {
        x_rows[token] = ulong(min(first_row + token, p.rows - 1) / p.rows_per_input) * p.inputs;
    }
    if (!EXPERTS) {
        wait_for_previous();
    }
    let_next_begin();
    multiply_spans(w, from, x, x_rows, columns, sums);
    float *parts = reinterpret_cast<float *>(shared + WARPS * WARP_WORDS);
    leave_sums(w, parts, sums);
    __syncthreads();
    store_sums(w, parts, out, up, gated);
}
