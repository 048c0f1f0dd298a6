// linear_skinny_blocks_mma: linear (linear_generic.cu) for few rows by weights in blocks, by small floats with separate
// scales, and by affine codes of 2, 3 and 5 bits (block_codes.h), on tensor cores. Reading W is the limit.
//
// x is [.., inputs], f32, f16 or bf16, and its rows begin at multiples of 16 bytes; W begins anywhere.
//
// A block has OUTPUTS outputs for TOKENS rows; its warps divide the spans of 256 inputs among them. A warp copies a
// span of all outputs to shared memory, STAGES spans ahead of their use, in pieces of 16 bytes: neighbouring lanes have
// neighbouring pieces of a row. Pieces begin at multiples of 16 bytes; a row that does not begins within its first
// piece. x is copied in the same way. Only the warp's own lanes read W and x, so the block has a single barrier, before
// the warps' sums are added.
//
// W is the A of the products, 16 outputs by 16 inputs; x is the B, 16 inputs by 8 columns. A column is a row of x; an x
// of f32 is a sum of three bf16 numbers, each with its own column. A lane's codes become pairs that bf16 or f16 holds
// exactly. Scale and bias are applied in float: the scale to the sums of products, the bias to the sums of x, which are
// products with ones.
//
// With experts a block has one row; or (SORTED) TOKENS places of one expert, in the order of linear_gemm_affine_sort.
//
// Copies of W begin before the previous kernel has ended (device/dependent_launch.h); x is read later.
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "linear/block_codes.h"
#include "linear/params.h"

constexpr bool HALF = X_DTYPE == F16;
constexpr uint TERMS = X_DTYPE == F32 ? 3 : 1;
constexpr uint OUTPUTS = 16 * TILES;
static_assert(TOKENS * TERMS <= 8, "linear: columns of a product");

// COUNT: maximum pieces of 16 bytes that BYTES bytes touch if they begin at a multiple of ALIGNMENT. STRIDE: bytes of a
// row in shared memory, an odd number of pieces, so that eight rows have no bank conflicts.
template <uint BYTES, uint ALIGNMENT> struct Pieces {
    static constexpr uint COUNT = (31 - ALIGNMENT + BYTES) / 16;
    static constexpr uint STRIDE = (COUNT | 1) * 16;
};
typedef Pieces<CODE_BYTES, W_ALIGNMENT> CodePieces;
typedef Pieces<SCALE_BYTES, FACTOR_ALIGNMENT> FactorPieces;

// Offsets of codes, scales, biases and x in a stage. The stride of x prevents bank conflicts of neighbouring rows.
constexpr uint AT_SCALES = OUTPUTS * CodePieces::STRIDE;
constexpr uint AT_BIASES = AT_SCALES + (SEPARATE ? OUTPUTS * FactorPieces::STRIDE : 0);
constexpr uint AT_X = AT_BIASES + (AFFINE ? OUTPUTS * FactorPieces::STRIDE : 0);
constexpr uint X_ROW = SPAN * size_of(X_DTYPE), X_STRIDE = X_ROW + 32;
constexpr uint STAGE = AT_X + TOKENS * X_STRIDE;
// skinny_blocks_mma.rs computes the same sum.
static_assert(WARPS * (STAGES * STAGE + OUTPUTS * 8 * 4) == SHARED_BYTES, "linear: the shared memory that Rust asks for");

// Begins to copy a span of all outputs, `bytes` bytes of each; `from` is the address of the first output's span, and
// `outputs` outputs exist. Missing outputs repeat the last one.
template <uint BYTES, uint ALIGNMENT>
inline void begin_rows(uint to, const uchar *from, uint bytes, uint row_bytes, uint outputs, uint lane) {
    typedef Pieces<BYTES, ALIGNMENT> P;
#pragma unroll
    for (uint i = 0; i < OUTPUTS * P::COUNT; i += 32) {
        const uint piece = i + lane, output = piece / P::COUNT, in_row = piece % P::COUNT * 16;
        if (OUTPUTS * P::COUNT % 32 != 0 && piece >= OUTPUTS * P::COUNT) {
            break;
        }
        const uchar *row = from + min(output, outputs - 1) * row_bytes;
        const uint shift = ALIGNMENT == 16 ? 0 : uint(reinterpret_cast<ulong>(row)) % 16;
        const uint end = shift + bytes;
        if (in_row < end) {
            copy_async_part<16>(to + output * P::STRIDE + in_row, row - shift + in_row, min(end - in_row, 16u));
        }
    }
}

// The weights of a block's outputs.
struct Weights {
    const uchar *codes, *scales, *biases;
    uint code_bytes, factor_bytes, outputs;

    void begin(uint stage, uint span, uint inputs, uint lane) const {
        const uint count = min(inputs - span * SPAN, SPAN);
        const uint of_codes = INPUTS_OF_SPANS ? CODE_BYTES : CODE_BYTES * count / SPAN;
        begin_rows<CODE_BYTES, W_ALIGNMENT>(stage, codes + span * CODE_BYTES, of_codes, code_bytes, outputs, lane);
        const uint of_factors = INPUTS_OF_SPANS ? SCALE_BYTES : SCALE_BYTES * count / SPAN;
        if (SEPARATE) {
            begin_rows<SCALE_BYTES, FACTOR_ALIGNMENT>(stage + AT_SCALES, scales + span * SCALE_BYTES, of_factors,
                                                      factor_bytes, outputs, lane);
        }
        if (AFFINE) {
            begin_rows<SCALE_BYTES, FACTOR_ALIGNMENT>(stage + AT_BIASES, biases + span * SCALE_BYTES, of_factors,
                                                      factor_bytes, outputs, lane);
        }
    }
    // The codes of output `i` in a stage.
    Codes codes_in(const uchar *stage, uint i, uint span) const {
        const uint start = uint(reinterpret_cast<ulong>(codes)) + min(i, outputs - 1) * code_bytes + span * CODE_BYTES;
        return {stage + i * CodePieces::STRIDE, W_ALIGNMENT == 16 ? 0 : start % 16};
    }
    Factors factors_in(const uchar *stage, uint i, uint span, const uchar *factors) const {
        const uint start = uint(reinterpret_cast<ulong>(factors)) + min(i, outputs - 1) * factor_bytes + span * SCALE_BYTES;
        return {stage + i * FactorPieces::STRIDE, FACTOR_ALIGNMENT == 16 ? 0 : start % 16};
    }
};

// Begins to copy a span of these rows of x, up to the last input.
inline void begin_inputs(uint stage, const uchar *x, const uint (&rows)[TOKENS], uint inputs, uint span, uint lane) {
    constexpr uint COUNT = X_ROW / 16;
#pragma unroll
    for (uint i = 0; i < TOKENS * COUNT; i += 32) {
        const uint token = i / COUNT, in_row = i % COUNT * 16 + lane * 16;
        if (INPUTS_OF_SPANS || span * SPAN + in_row / size_of(X_DTYPE) < inputs) {
            const uchar *from = x + ulong(rows[token]) * (inputs * size_of(X_DTYPE)) + span * X_ROW + in_row;
            copy_async<16>(stage + AT_X + token * X_STRIDE + in_row, from, true);
        }
    }
}

// Four inputs of the lane's column as pairs.
inline uint2 inputs_of(const uchar *x, uint input, uint term) {
    if constexpr (X_DTYPE != F32) {
        return *reinterpret_cast<const uint2 *>(x + input * 2);
    }
    const float4 four = *reinterpret_cast<const float4 *>(x + input * 4);
    uint a[3], b[3];
    split<false>(four.x, four.y, a);
    split<false>(four.z, four.w, b);
    return term == 0 ? make_uint2(a[0], b[0]) : term == 1 ? make_uint2(a[1], b[1]) : make_uint2(a[2], b[2]);
}

constexpr uint NONE = 0xFFFFFFFF;

// Context of all phases: the block's rows and outputs, and the warp's spans and stages.
struct Warp {
    const LinearParams &p;
    const Weights &weights;
    const uint *order;
    uint lane;
    uint first_output;
    uint first_row;
    uint begin;
    uint end;
    const uchar *stages;

    inline uint row_of(uint token) const {
        return SORTED ? order[first_row + token] : first_row + token;
    }
};

// Begins to copy the weights of the first STAGES spans.
inline void fill_weights(const Warp &w) {
#pragma unroll
    for (uint s = 0; s < STAGES; s++) {
        if (w.begin + s < w.end) {
            w.weights.begin(shared_address(w.stages + s * STAGE), w.begin + s, w.p.inputs, w.lane);
        }
    }
}

// Begins to copy x of the first STAGES spans. The first group of copies also contains all copies of weights.
inline void fill_inputs(const Warp &w, const uchar *x, const uint (&rows)[TOKENS]) {
#pragma unroll
    for (uint s = 0; s < STAGES; s++) {
        if (w.begin + s < w.end) {
            begin_inputs(shared_address(w.stages + s * STAGE), x, rows, w.p.inputs, w.begin + s, w.lane);
        }
        copies_commit();
    }
}

// A lane's rows of a span in a stage: outputs g and g + 8 of each tile.
struct Span {
    Codes codes[TILES][2];
    Factors scales[TILES][2];
    Factors biases[TILES][2];
    Header headers[TILES][2];
};

inline void find_span(Span &of, const Warp &w, const uchar *stage, uint span) {
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (uint r = 0; r < 2; r++) {
            const uint output = tile * 16 + r * 8 + w.lane / 4;
            of.codes[tile][r] = w.weights.codes_in(stage, output, span);
            of.scales[tile][r] = w.weights.factors_in(stage + AT_SCALES, output, span, w.weights.scales);
            of.biases[tile][r] = w.weights.factors_in(stage + AT_BIASES, output, span, w.weights.biases);
            of.headers[tile][r] = header_of(of.codes[tile][r]);
        }
    }
}

// Sums of a unit: one for each half if halves have their own scales.
constexpr uint SUMS = HALVES ? 2 : 1;

// Adds the products of a tile with the inputs of unit `u`, scaled; `ones` are sums of the inputs.
inline void multiply_tile(float (&sums)[4], const Span &of, const Tables<HALF> &numbers, const uint2 (&inputs)[2],
                          const float (&ones)[SUMS][4], uint tile, uint u, uint t) {
    uint pairs[2][4];
    pairs_of<HALF>(of.codes[tile][0], numbers, u, t, pairs[0]);
    pairs_of<HALF>(of.codes[tile][1], numbers, u, t, pairs[1]);
    float products[SUMS][4];
#pragma unroll
    for (uint half = 0; half < 2; half++) {
        const uint a[4] = {pairs[0][2 * half], pairs[1][2 * half], pairs[0][2 * half + 1], pairs[1][2 * half + 1]};
        half < SUMS ? mma_alone<HALF>(products[half], a, inputs[half]) : mma<HALF>(products[0], a, inputs[half]);
    }
#pragma unroll
    for (uint r = 0; r < 2; r++) {
#pragma unroll
        for (uint half = 0; half < SUMS; half++) {
            float2 factors = factors_of(of.headers[tile][r], of.codes[tile][r], of.scales[tile][r], of.biases[tile][r], u, half);
            if (FOLD) {
                factors.y -= 128 * factors.x;
            }
#pragma unroll
            for (uint j = 0; j < 2; j++) {
                float &sum = sums[2 * r + j];
                sum += factors.x * products[half][2 * r + j];
                if (BIASED) {
                    sum += factors.y * ones[half][j];
                }
            }
        }
    }
}

// Adds the products of all tiles with a span of x. `x` is the lane's row in the stage, `term` its term.
inline void multiply_span(float (&sums)[TILES][4], const Span &of, const Tables<HALF> &numbers, const uchar *x, uint term,
                          const Warp &w, uint span) {
    const uint t = w.lane % 4;
#pragma unroll
    for (uint u = 0; u < UNITS; u++) {
        if (!INPUTS_OF_SPANS && span * SPAN + u * UNIT >= w.p.inputs) {
            break;
        }
        uint2 inputs[2];
        float ones[SUMS][4];
#pragma unroll
        for (uint half = 0; half < 2; half++) {
            inputs[half] = inputs_of(x, u * UNIT + half * 16 + 4 * t, term);
            if (BIASED) {
                constexpr uint ONE = HALF ? 0x3C003C00 : 0x3F803F80;
                const uint all[4] = {ONE, ONE, ONE, ONE};
                half < SUMS ? mma_alone<HALF>(ones[half], all, inputs[half]) : mma<HALF>(ones[0], all, inputs[half]);
            }
        }
#pragma unroll
        for (uint tile = 0; tile < TILES; tile++) {
            multiply_tile(sums[tile], of, numbers, inputs, ones, tile, u, t);
        }
    }
}

// The sums over the warp's spans. The lane's column of B is a term of a row; surplus columns repeat the last term.
inline void multiply_spans(float (&sums)[TILES][4], const Warp &w, const uchar *x, const uint (&rows)[TOKENS]) {
    const uint g = w.lane / 4, x_at = AT_X + min(g / TERMS, TOKENS - 1) * X_STRIDE, term = g % TERMS;
    const Tables<HALF> numbers = tables<HALF>(w.p.inputs >> 31);
    uint slot = 0;
    for (uint span = w.begin; span < w.end; span++) {
        copies_wait<STAGES - 1>();
        __syncwarp();
        const uchar *stage = w.stages + slot * STAGE;
        Span of;
        find_span(of, w, stage, span);
        multiply_span(sums, of, numbers, stage + x_at, term, w, span);
        __syncwarp();
        if (span + STAGES < w.end) {
            w.weights.begin(shared_address(stage), span + STAGES, w.p.inputs, w.lane);
            begin_inputs(shared_address(stage), x, rows, w.p.inputs, span + STAGES, w.lane);
        }
        copies_commit();
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
}

// Epilogue: adds up the sums of all warps, [WARPS][OUTPUTS][8], and stores the results: zeros if the expert does not
// exist.
inline void store_sums(const Warp &w, const float *parts, uchar *out, bool known) {
    for (uint i = threadIdx.x; i < OUTPUTS * TOKENS; i += 32 * WARPS) {
        const uint output = i % OUTPUTS, token = i / OUTPUTS;
        float sum = 0;
#pragma unroll
        for (uint warp = 0; warp < WARPS; warp++) {
#pragma unroll
            for (uint c = 0; c < TERMS; c++) {
                sum += parts[(warp * OUTPUTS + output) * 8 + token * TERMS + c];
            }
        }
        const uint row = w.row_of(token);
        if (w.first_output + output < w.p.outputs && row < w.p.rows) {
            store(out, ulong(row) * w.p.outputs + w.first_output + output, known ? w.p.alpha * sum : 0.0f, OUT_DTYPE);
        }
    }
}

// Blocks: x counts OUTPUTS outputs, y the rows, TOKENS each (one with experts); or tiles of places, whose experts and
// rows are in `experts` and `order`, or NONE. With one or two rows, 24 warps fit on a multiprocessor, so that the next
// launch's warps begin early.
extern "C" __global__ void __launch_bounds__(32 * WARPS, TOKENS > 2 ? 1 : 24 / WARPS)
    KVANT_KERNEL(const uchar *x, const uchar *values, const uchar *scales, const uchar *biases, const uint *ids, uchar *out,
                 const LinearParams p, const uint *experts, const uint *order) {
    extern __shared__ __align__(16) uchar shared[];
    const uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint first_output = blockIdx.x * OUTPUTS, first_row = blockIdx.y * TOKENS;
    const uint spans = (p.inputs + SPAN - 1) / SPAN, each = (spans + WARPS - 1) / WARPS;
    const uint begin = min(warp * each, spans), end = min(begin + each, spans);
    if (EXPERTS) {
        wait_for_previous();
    }
    const uint expert = SORTED ? experts[blockIdx.y] : EXPERTS ? ids[first_row] : 0;
    if (SORTED && expert == NONE) {
        return;
    }
    const bool known = expert < p.experts;
    const ulong first = ulong(known ? expert : 0) * p.outputs + first_output;
    const uint code_bytes = ulong(p.inputs) * CODE_BYTES / SPAN;
    const uint factor_bytes = ulong(p.inputs) * SCALE_BYTES / SPAN;
    const Weights weights = {values + first * code_bytes, scales + first * factor_bytes, biases + first * factor_bytes,
                             code_bytes, factor_bytes, p.outputs - first_output};
    const Warp w = {p, weights, order, lane, first_output, first_row, begin, end, shared + warp * STAGES * STAGE};
    fill_weights(w);
    if (!EXPERTS) {
        wait_for_previous();
    }
    let_next_begin();
    // Rows that do not exist repeat the first.
    uint rows[TOKENS];
#pragma unroll
    for (uint token = 0; token < TOKENS; token++) {
        const uint row = w.row_of(token);
        rows[token] = (row < p.rows ? row : w.row_of(0)) / (EXPERTS ? p.rows_per_input : 1);
    }
    fill_inputs(w, x, rows);
    float sums[TILES][4] = {};
    multiply_spans(sums, w, x, rows);
    // The sums of all warps, after the stages.
    float *parts = reinterpret_cast<float *>(shared + WARPS * STAGES * STAGE);
#pragma unroll
    for (uint i = 0; i < 2 * TILES; i++) {
        float *at = parts + (warp * OUTPUTS + i * 8 + g) * 8 + 2 * t;
        *reinterpret_cast<float2 *>(at) = make_float2(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
    }
    __syncthreads();
    store_sums(w, parts, out, known);
}
