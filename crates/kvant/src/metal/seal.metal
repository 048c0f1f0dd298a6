// seal: encodes the dense rows of whole pages as rows of sealed pages, each page around its own mean.
//
// `pages` is [n, 3]: the entries of a dense and of a sealed page, and the page's index in its sequence; a row with an
// entry that is not a page is skipped. A threadgroup takes one KV head of one side of a page: group.x is the head,
// group.y the row of `pages`, group.z 0 for keys and 1 for values. The rows of a head in a page are [P, D], one after
// the other. Keys are encoded without their bias, if the layer has one.
//   mean   if the codec is centred: all threads sum the vectors whose squared lengths are finite. The mean is
//          rotated, and stored as codes of 8 bits and a scale (docs/codec.md).
//   rows   a SIMD-group takes one row at a time; all SIMD-groups share a long row. The row is rotated, the stored
//          mean is subtracted, and the difference is encoded. Rows of a dense side are converted.
#include "key_bias.h"
#include "pages.h"
#include "turboquant.h"

struct MetalSealParams {
    uint head_dim;
    uint dense_entries;
    uint sealed_entries;
    float k_scale;
    float v_scale;
};

constant uint DENSE [[function_constant(0)]];
constant uint K_CODEC [[function_constant(1)]];
constant uint V_CODEC [[function_constant(2)]];
constant uint K_NORM [[function_constant(3)]];
constant uint V_NORM [[function_constant(4)]];
constant uint PAGE_SHIFT [[function_constant(5)]];
constant bool ALIGNED [[function_constant(6)]];
constant bool KEY_BIAS [[function_constant(7)]];
constant uint POSITIONS = 1u << PAGE_SHIFT;
constant bool K_HAS_HIGH = (WITH_HIGH >> K_CODEC % CENTRED & 1) != 0;
constant bool V_HAS_HIGH = (WITH_HIGH >> V_CODEC % CENTRED & 1) != 0;
constant bool K_HAS_NORMS = K_CODEC >= TQ2;
constant bool V_HAS_NORMS = V_CODEC >= TQ2;
constant bool K_HAS_MEANS = (K_CODEC & CENTRED) != 0;
constant bool V_HAS_MEANS = (V_CODEC & CENTRED) != 0;

// SIMD-groups of a threadgroup, and maximum coordinates of a row that one of them processes alone (metal/seal.rs).
constant constexpr uint SIMDS = 8;
constant constexpr uint MAX_ALONE = 512;
// The largest code of a mean.
constant constexpr float MEAN_LEVELS = 127;
// Maximum positions of a page.
constant constexpr uint MAX_POSITIONS = 256;
// Maximum quads of a vector that a thread sums.
constant constexpr uint MAX_QUADS = 4;

// The dense vectors of a head in a page, without their bias.
struct DenseRows {
    device const uchar *elements; // of the page
    ulong first;                  // the head's first row in a page
    uint dim;
    bool biased;
    KeyBias bias;
    uint position; // the position of the page's first vector

    ulong start(uint i) const {
        return (first + i) * dim;
    }
    float4 quad(uint i, uint j) const {
        const float4 x = load4(elements, start(i) + j, 4, DENSE, ALIGNED);
        return biased ? x - bias.quad_at(position + i, j) : x;
    }
};

// finite ← for each vector, 1 if its squared length is finite, so that it counts in the mean. Ends with a barrier.
inline void note_finite(DenseRows rows, threadgroup uint *finite, Place place) {
    for (uint i = place.simdgroup; i < POSITIONS; i += place.simdgroups) {
        float squares = 0;
        for (uint j = 4 * place.lane; j < rows.dim; j += 128) {
            const float4 x = rows.quad(i, j);
            squares += dot(x, x);
        }
        squares = simd_sum(squares);
        if (place.lane == 0) {
            finite[i] = is_finite(squares) ? 1 : 0;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// row ← the rotated mean of the finite vectors. Threads form slices; each slice sums every `slices`-th vector, and
// `row` holds the sum of each slice. Ends with a barrier.
inline void make_mean(DenseRows rows, threadgroup const uint *finite, threadgroup float *row, threadgroup float *room,
                      Place place) {
    const uint index = index_of(place), threads = threads_of(place), dim = rows.dim;
    const uint quads = clamp(dim / 4, 32u, threads), slices = threads / quads;
    const uint slice = index / quads, quad = index % quads;
    float4 sums[MAX_QUADS];
    for (uint k = 0; k < MAX_QUADS; k++) {
        sums[k] = float4(0);
    }
    uint count = 0;
    for (uint i = slice; i < POSITIONS; i += slices) {
        if (finite[i] == 0) {
            continue;
        }
        count++;
        for (uint k = 0; k < MAX_QUADS; k++) {
            const uint j = 4 * (quad + k * quads);
            if (j < dim) {
                sums[k] += rows.quad(i, j);
            }
        }
    }
    count = reduce<Sum>(quad == 0 ? count : 0, reinterpret_cast<threadgroup uint *>(room), place);
    for (uint k = 0; k < MAX_QUADS; k++) {
        const uint j = 4 * (quad + k * quads);
        if (j < dim) {
            put4(row, slice * dim + j, 4, sums[k], true);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = 4 * index; j < dim; j += 4 * threads) {
        float4 sum = get4(row, j, 4, true);
        for (uint s = 1; s < slices; s++) {
            sum += get4(row, s * dim + j, 4, true);
        }
        put4(row, j, 4, sum / float(max(count, 1u)), true);
    }
    rotate(row, 1, dim, false, index, threads);
}

// Stores a rotated mean, rounded to its codes.
inline void store_mean(threadgroup const float *row, device uchar *to, uint dim, threadgroup float *room, Place place) {
    const uint index = index_of(place), threads = threads_of(place);
    float largest = 0;
    for (uint j = 4 * index; j < dim; j += 4 * threads) {
        const float4 size = abs(get4(row, j, 4, true));
        largest = max(largest, max(max(size.x, size.y), max(size.z, size.w)));
    }
    const float scale = reduce<Max>(largest, room, place) / MEAN_LEVELS;
    for (uint j = 4 * index; j < dim; j += 4 * threads) {
        const float4 most = float4(MEAN_LEVELS), mean = get4(row, j, 4, true);
        const float4 codes = scale > 0 ? clamp(rint(mean / scale), -most, most) : float4(0);
        const uint4 bytes = uint4(int4(codes)) & 255;
        *reinterpret_cast<device uint *>(to + j) = bytes.x | bytes.y << 8 | bytes.z << 16 | bytes.w << 24;
    }
    if (index == 0) {
        *reinterpret_cast<device float *>(to + dim) = scale;
    }
}

// Threadgroup memory: a row of D floats for each SIMD-group, or one for all; WRITE_ROOM floats for each SIMD-group; a
// flag for each vector.
struct SealRoom {
    threadgroup float *rows;
    threadgroup float *encoding;
    threadgroup uint *finite;
};

// Seals the rows of a head. `to`: the planes of the sealed page. All threads call it.
inline void seal_head(DenseRows rows, WritablePlanes to, uint head, Encoding encoding, SealRoom shared, Place place) {
    const uint dim = rows.dim;
    const bool alone = dim <= MAX_ALONE;
    const Place own = alone ? Place{place.lane, 0, 1} : place;
    const uint index = index_of(own), threads = threads_of(own);
    threadgroup float *row = shared.rows + (alone ? place.simdgroup * dim : 0);
    threadgroup float *room = shared.encoding + (alone ? place.simdgroup * WRITE_ROOM : 0);
    const bool centred = is_centred(encoding.codec);
    device uchar *mean = centred ? to.means + head * mean_bytes(dim) : nullptr;
    if (centred) {
        note_finite(rows, shared.finite, place);
        make_mean(rows, shared.finite, shared.rows, shared.encoding, place);
        store_mean(shared.rows, mean, dim, shared.encoding, place);
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    }
    const uint step = alone ? place.simdgroups : 1;
    for (uint i = alone ? place.simdgroup : 0; i < POSITIONS; i += step) {
        if (!is_quantised(encoding.codec)) {
            move_row(rows.elements, rows.start(i), DENSE, to.low, rows.start(i), encoding.codec, dim, ALIGNED, index, threads);
            continue;
        }
        for (uint j = 4 * index; j < dim; j += 4 * threads) {
            put4(row, j, 4, rows.quad(i, j), true);
        }
        // Every SIMD-group has the same number of rows, so that all reach the barriers of `rotate`.
        rotate(row, 1, dim, false, index, threads);
        for (uint j = 4 * index; centred && j < dim; j += 4 * threads) {
            put4(row, j, 4, get4(row, j, 4, true) - load_mean4(mean, j, dim), true);
        }
        encode(row, room, to, rows.first + i, dim, encoding, own);
    }
}

kernel void seal(device const uint *pages [[buffer(0)]],
                 device const uchar *k_dense [[buffer(1)]],
                 device const uchar *v_dense [[buffer(2)]],
                 device uchar *k_low [[buffer(3)]],
                 device uchar *k_high [[buffer(4), function_constant(K_HAS_HIGH)]],
                 device uchar *k_norms [[buffer(5), function_constant(K_HAS_NORMS)]],
                 device uchar *v_low [[buffer(6)]],
                 device uchar *v_high [[buffer(7), function_constant(V_HAS_HIGH)]],
                 device uchar *v_norms [[buffer(8), function_constant(V_HAS_NORMS)]],
                 device uchar *k_means [[buffer(9), function_constant(K_HAS_MEANS)]],
                 device uchar *v_means [[buffer(10), function_constant(V_HAS_MEANS)]],
                 constant MetalSealParams &p [[buffer(11)]],
                 device const float *bias_pairs [[buffer(12), function_constant(KEY_BIAS)]],
                 device const uint *bias_places [[buffer(13), function_constant(KEY_BIAS)]],
                 device const float *bias_starts [[buffer(14), function_constant(KEY_BIAS)]],
                 device const float *bias_steps [[buffer(15), function_constant(KEY_BIAS)]],
                 threadgroup float *rows [[threadgroup(0)]],
                 uint3 group [[threadgroup_position_in_grid]],
                 uint lane [[thread_index_in_simdgroup]],
                 uint simdgroup [[simdgroup_index_in_threadgroup]],
                 uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float encoding[SIMDS * WRITE_ROOM];
    threadgroup uint finite[MAX_POSITIONS];
    const SealRoom room = {rows, encoding, finite};
    const Place place = {lane, simdgroup, simdgroups};
    const uint from = pages[3 * group.y], to = pages[3 * group.y + 1], head = group.x;
    if (from >= p.dense_entries || to >= p.sealed_entries) {
        return;
    }
    const ulong dense = from * PAGE_UNIT, sealed = to * PAGE_UNIT, first = ulong(head) << PAGE_SHIFT;
    const uint position = KEY_BIAS ? pages[3 * group.y + 2] << PAGE_SHIFT : 0;
    KeyBias bias = {nullptr, nullptr, nullptr, nullptr, p.head_dim, PAGE_SHIFT};
    if (KEY_BIAS) {
        bias = key_bias_of(bias_pairs, bias_places, bias_starts, bias_steps, head, p.head_dim, PAGE_SHIFT);
    }
    if (group.z == 0) {
        const DenseRows from_rows = {k_dense + dense, first, p.head_dim, KEY_BIAS, bias, position};
        const WritablePlanes planes = {k_low, K_HAS_HIGH ? k_high : nullptr, K_HAS_NORMS ? k_norms : nullptr,
                                       K_HAS_MEANS ? k_means : nullptr};
        seal_head(from_rows, shifted(planes, sealed, K_CODEC), head, Encoding{K_CODEC, K_NORM, p.k_scale}, room, place);
    } else {
        const DenseRows from_rows = {v_dense + dense, first, p.head_dim, false, bias, position};
        const WritablePlanes planes = {v_low, V_HAS_HIGH ? v_high : nullptr, V_HAS_NORMS ? v_norms : nullptr,
                                       V_HAS_MEANS ? v_means : nullptr};
        seal_head(from_rows, shifted(planes, sealed, V_CODEC), head, Encoding{V_CODEC, V_NORM, p.v_scale}, room, place);
    }
}
