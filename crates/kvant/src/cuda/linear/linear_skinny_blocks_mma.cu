// linear_skinny_blocks_mma: linear (linear_generic.cu) for few rows by weights in blocks, by small floats with separate
// scales, and by affine codes of 2, 3 and 5 bits (block_codes.h), on tensor cores. Reading W is the limit.
//
// x is [.., inputs], f32, f16 or bf16, and its rows begin at multiples of 16 bytes; W begins anywhere.
//
// A block has OUTPUTS outputs for TOKENS rows; its warps divide the spans of 256 inputs among them. A warp copies a
// span of all outputs to shared memory, STAGES spans ahead of their use, in pieces of 16 bytes: neighbouring lanes have
// neighbouring pieces of a row. Where rows begin at no multiple of 16 bytes, pieces do, and the row begins within the
// first. x comes the same way; only the warp's own lanes use both, so the block has no barrier but the one before the
// warps' sums are added.
//
// W is the A of the products, 16 outputs by 16 inputs, x the B, 16 inputs by 8 columns: a row, or, for x of f32, one of
// the three bf16 numbers whose sum it is. A lane's four codes of each become pairs that bf16 or f16 holds exactly;
// scale and bias are applied in float to the sums over their inputs, and a bias counts as often as a product with ones
// says.
//
// With experts a block has one row; or (SORTED) TOKENS places of one expert in the order that linear_gemm_affine_sort
// makes.
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

// Begins to copy a span, `bytes` of each row, of all outputs; `from` is that of the first, `outputs` exist. Beyond the
// last output the last is copied again.
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
    // Where output `i` is in a stage.
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

// Blocks: x counts OUTPUTS outputs, y the rows, TOKENS each (one with experts); or tiles of places, whose experts and
// rows are in `experts` and `order`, or NONE.
// With one row or two a multiprocessor has room for 24 warps: those of the next launch begin early.
extern "C" __global__ void __launch_bounds__(32 * WARPS, TOKENS > 2 ? 1 : 24 / WARPS)
    KVANT_KERNEL(const uchar *x, const uchar *values, const uchar *scales, const uchar *biases, const uint *ids, uchar *out,
                 const LinearParams p, const uint *experts, const uint *order) {
    extern __shared__ __align__(16) uchar shared[];
    const uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint first_output = blockIdx.x * OUTPUTS, first_row = blockIdx.y * TOKENS;
    const auto row_of = [&](uint token) { return SORTED ? order[first_row + token] : first_row + token; };
    const uint spans = (p.inputs + SPAN - 1) / SPAN, each = (spans + WARPS - 1) / WARPS;
    const uint begin = min(warp * each, spans), end = min(begin + each, spans);
    const uchar *stages = shared + warp * STAGES * STAGE;

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
    const Weights w = {values + first * code_bytes, scales + first * factor_bytes, biases + first * factor_bytes,
                       code_bytes, factor_bytes, p.outputs - first_output};
#pragma unroll
    for (uint s = 0; s < STAGES; s++) {
        if (begin + s < end) {
            w.begin(shared_address(stages + s * STAGE), begin + s, p.inputs, lane);
        }
    }
    if (!EXPERTS) {
        wait_for_previous();
    }
    let_next_begin();
    // Rows that do not exist repeat the first.
    uint rows[TOKENS];
#pragma unroll
    for (uint token = 0; token < TOKENS; token++) {
        const uint row = row_of(token);
        rows[token] = (row < p.rows ? row : row_of(0)) / (EXPERTS ? p.rows_per_input : 1);
    }
#pragma unroll
    for (uint s = 0; s < STAGES; s++) {
        if (begin + s < end) {
            begin_inputs(shared_address(stages + s * STAGE), x, rows, p.inputs, begin + s, lane);
        }
        // The first group holds what was begun of W, too.
        copies_commit();
    }

    // The lane's column of B: a term of a row. Columns without one repeat the last.
    const uint x_at = AT_X + min(g / TERMS, TOKENS - 1) * X_STRIDE, term = g % TERMS;
    const Tables<HALF> numbers = tables<HALF>(p.inputs >> 31);
    float sums[TILES][4] = {};
    uint slot = 0;
    for (uint span = begin; span < end; span++) {
        copies_wait<STAGES - 1>();
        __syncwarp();
        const uchar *stage = stages + slot * STAGE;
        Codes codes[TILES][2];
        Factors of_scales[TILES][2], of_biases[TILES][2];
        Header headers[TILES][2];
#pragma unroll
        for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (uint r = 0; r < 2; r++) {
                const uint output = tile * 16 + r * 8 + g;
                codes[tile][r] = w.codes_in(stage, output, span);
                of_scales[tile][r] = w.factors_in(stage + AT_SCALES, output, span, w.scales);
                of_biases[tile][r] = w.factors_in(stage + AT_BIASES, output, span, w.biases);
                headers[tile][r] = header_of(codes[tile][r]);
            }
        }
#pragma unroll
        for (uint u = 0; u < UNITS; u++) {
            if (!INPUTS_OF_SPANS && span * SPAN + u * UNIT >= p.inputs) {
                break;
            }
            // The sums of each half by themselves where it has a scale.
            constexpr uint SUMS = HALVES ? 2 : 1;
            uint2 inputs[2];
            float ones[SUMS][4];
#pragma unroll
            for (uint half = 0; half < 2; half++) {
                inputs[half] = inputs_of(stage + x_at, u * UNIT + half * 16 + 4 * t, term);
                if (BIASED) {
                    constexpr uint ONE = HALF ? 0x3C003C00 : 0x3F803F80;
                    const uint all[4] = {ONE, ONE, ONE, ONE};
                    half < SUMS ? mma_alone<HALF>(ones[half], all, inputs[half]) : mma<HALF>(ones[0], all, inputs[half]);
                }
            }
#pragma unroll
            for (uint tile = 0; tile < TILES; tile++) {
                uint pairs[2][4];
                pairs_of<HALF>(codes[tile][0], numbers, u, t, pairs[0]);
                pairs_of<HALF>(codes[tile][1], numbers, u, t, pairs[1]);
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
                        float2 factors = factors_of(headers[tile][r], codes[tile][r], of_scales[tile][r],
                                                    of_biases[tile][r], u, half);
                        if (FOLD) {
                            factors.y -= 128 * factors.x;
                        }
#pragma unroll
                        for (uint j = 0; j < 2; j++) {
                            float &sum = sums[tile][2 * r + j];
                            sum += factors.x * products[half][2 * r + j];
                            if (BIASED) {
                                sum += factors.y * ones[half][j];
                            }
                        }
                    }
                }
            }
        }
        __syncwarp();
        if (span + STAGES < end) {
            w.begin(shared_address(stage), span + STAGES, p.inputs, lane);
            begin_inputs(shared_address(stage), x, rows, p.inputs, span + STAGES, lane);
        }
        copies_commit();
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }

    // The sums of all warps: [WARPS][OUTPUTS][8], where the stages were not.
    float *parts = reinterpret_cast<float *>(shared + WARPS * STAGES * STAGE);
#pragma unroll
    for (uint tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (uint r = 0; r < 2; r++) {
            float *at = parts + (warp * OUTPUTS + tile * 16 + r * 8 + g) * 8 + 2 * t;
            *reinterpret_cast<float2 *>(at) = make_float2(sums[tile][2 * r], sums[tile][2 * r + 1]);
        }
    }
    __syncthreads();
    for (uint i = threadIdx.x; i < OUTPUTS * TOKENS; i += 32 * WARPS) {
        const uint output = i % OUTPUTS, token = i / OUTPUTS;
        float sum = 0;
#pragma unroll
        for (uint of_warp = 0; of_warp < WARPS; of_warp++) {
#pragma unroll
            for (uint c = 0; c < TERMS; c++) {
                sum += parts[(of_warp * OUTPUTS + output) * 8 + token * TERMS + c];
            }
        }
        const uint row = row_of(token);
        if (first_output + output < p.outputs && row < p.rows) {
            store(out, ulong(row) * p.outputs + first_output + output, known ? p.alpha * sum : 0.0f, OUT_DTYPE);
        }
    }
}
