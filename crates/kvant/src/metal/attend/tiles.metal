// attend, for many query rows per KV head: prompts.
//
// attend_tiles: q [T, H, D] over a cache layer, out [T, H, D]. A threadgroup takes (tile of ROWS query rows, KV head,
// split) and goes through its keys a few at a time. SIMD-group g owns coordinates g·W .. (g+1)·W, W = D/SIMDS, of
// everything: of the queries and of o as 8x8 matrices in registers, and of the keys and values, which it brings into
// its own part of threadgroup memory, 8 at a time.
//   scores    each SIMD-group multiplies its coordinates; the partial products meet in threadgroup memory;
//   softmax   a SIMD-group a row, a key a thread; the row's state is in its registers;
//   values    each SIMD-group adds weights · values to its part of o.
// Over quantised keys the queries are rotated first; over quantised values o is rotated back at the end. Over page
// means these are added where keys and values are decoded, once for all rows of a tile.
#include "attend/keys.h"
#include "attend/softmax.h"
#include "rotate.h"

// Threadgroup memory.
struct Room {
    threadgroup float *parts;   // [SIMDS, ROWS, KEYS]: products over each SIMD-group's coordinates
    threadgroup float *weights; // [ROWS, KEYS]
    threadgroup float *stage;   // [SIMDS, 8, W]: keys or values; also [8, D]: queries or o of a block
    threadgroup float *factors; // [ROWS, 8], equal along a row
    threadgroup Row *rows;
};

// What a thread owns.
template <uint D, uint ROWS, uint SIMDS, uint KEYS> struct Work {
    simdgroup_float8x8 q[ROWS / 8][D / SIMDS / 8];
    simdgroup_float8x8 o[ROWS / 8][D / SIMDS / 8];
    State states[ROWS / SIMDS]; // of rows simd, simd + SIMDS, …
    uint blocks;                // that hold rows
    uint seeing;                // bit b: whether a row of block b sees anything in this pass
    uint index;
    uint lane;
    uint simd;
};

// Brings coordinates first .. first + WIDTH of keys (or values) base .. base + 8 into `stage` [8, WIDTH]: zeros from
// `end` on, and where there is no page. Returns whether all that this thread brought is finite.
template <bool VALUES, uint D, uint WIDTH>
bool bring(CachedKeys keys, uint base, uint end, uint first, threadgroup float *stage, uint lane) {
    bool finite = true;
    for (uint i = lane; i < 8 * WIDTH / 4; i += 32) {
        const uint key = base + i / (WIDTH / 4), j = first + i % (WIDTH / 4) * 4;
        float4 x = float4(0);
        const RowPlace at = key < end ? keys.place_of(key) : RowPlace{0, 0, false};
        if (at.held) {
            x = VALUES ? keys.value4(at, j, D) : keys.key4(at, j, D);
            if (VALUES ? V_CENTRED : K_CENTRED) {
                x += VALUES ? keys.value_mean4(at, j, D) : keys.key_mean4(at, j, D);
            }
        }
        finite = finite && is_finite(x.x) && is_finite(x.y) && is_finite(x.z) && is_finite(x.w);
        *reinterpret_cast<threadgroup float4 *>(stage + i * 4) = x;
    }
    return finite;
}

// Adds 8 values, some not finite, to o: only what a row sees may touch it, so element by element.
template <uint D, uint ROWS, uint SIMDS, uint KEYS>
void add_values_one_by_one(CachedKeys keys, uint base, uint end, threadgroup const float *weights,
                           threadgroup const float *values, Room room, thread Work<D, ROWS, SIMDS, KEYS> &work) {
    constexpr uint WIDTH = D / SIMDS;
    // This SIMD-group's products are used up.
    threadgroup float *patch = room.parts + work.simd * (ROWS * KEYS);
#pragma unroll
    for (uint b = 0; b < ROWS / 8; b++) {
        if (!(work.seeing >> b & 1)) {
            continue;
        }
#pragma unroll
        for (uint m = 0; m < WIDTH / 8; m++) {
            simdgroup_store(work.o[b][m], patch, 8);
            simdgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = work.lane; i < 64; i += 32) {
                const uint r = b * 8 + i / 8;
                const Row row = room.rows[r];
                float sum = patch[i];
                for (uint key = base; key < min(base + 8, end); key++) {
                    if (sees(row, keys.sequence, keys.position_of(key))) {
                        sum += weights[r * KEYS + key - base] * values[(key - base) * WIDTH + m * 8 + i % 8];
                    }
                }
                patch[i] = sum;
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            simdgroup_load(work.o[b][m], patch, 8);
        }
    }
}

// Takes keys begin .. end of a pass, whose rows see positions first .. last, into the states; all threads.
template <uint D, uint ROWS, uint SIMDS, uint KEYS>
void absorb(CachedKeys keys, uint begin, uint end, uint first, uint last, Room room,
            thread Work<D, ROWS, SIMDS, KEYS> &work, constant MetalAttendParams &p) {
    constexpr uint WIDTH = D / SIMDS, BLOCKS = ROWS / 8, MATRICES = WIDTH / 8;
    const uint lane = work.lane, simd = work.simd;
    threadgroup float *parts = room.parts + simd * (ROWS * KEYS);
    threadgroup float *stage = room.stage + simd * (8 * WIDTH);
    for (uint base = begin; base < end; base += KEYS) {
        const uint count = min(KEYS, end - base);
        const uint position = lane < count ? keys.position_of(base + lane) : 0;
        if (simd_min(lane < count ? position : NONE) > last || simd_max(position) < first) {
            continue;
        }
        for (uint n = 0; n < count; n += 8) {
            bring<false, D, WIDTH>(keys, base + n, end, simd * WIDTH, stage, lane);
            simdgroup_barrier(mem_flags::mem_threadgroup);
            simdgroup_float8x8 products[BLOCKS];
#pragma unroll
            for (uint b = 0; b < BLOCKS; b++) {
                products[b] = make_filled_simdgroup_matrix<float, 8, 8>(0);
            }
#pragma unroll
            for (uint m = 0; m < MATRICES; m++) {
                simdgroup_float8x8 key;
                simdgroup_load(key, stage + m * 8, WIDTH, ulong2(0, 0), true);
#pragma unroll
                for (uint b = 0; b < BLOCKS; b++) {
                    if (work.seeing >> b & 1) {
                        simdgroup_multiply_accumulate(products[b], work.q[b][m], key, products[b]);
                    }
                }
            }
#pragma unroll
            for (uint b = 0; b < BLOCKS; b++) {
                if (work.seeing >> b & 1) {
                    simdgroup_store(products[b], parts + b * 8 * KEYS + n, KEYS);
                }
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma unroll
        for (uint s = 0; s < ROWS / SIMDS; s++) {
            const uint r = simd + s * SIMDS;
            if (work.seeing >> r / 8 & 1) {
                const Row row = room.rows[r];
                const bool seen = lane < count && sees(row, keys.sequence, position);
                float score = 0, largest = work.states[s].m;
                if (seen) {
                    float product = room.parts[r * KEYS + lane];
                    for (uint g = 1; g < SIMDS; g++) {
                        product += room.parts[(g * ROWS + r) * KEYS + lane];
                    }
                    score = score_of(product, p);
                    largest = raised(largest, score);
                }
                const float m = simd_max(largest);
                const float weight = seen ? precise::exp2(score - m) : 0;
                const float factor = merge(work.states[s], State{m, simd_sum(weight)}).x;
                if (lane < KEYS) {
                    room.weights[r * KEYS + lane] = weight;
                }
                if (lane < 8) {
                    room.factors[r * 8 + lane] = factor;
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma unroll
        for (uint b = 0; b < BLOCKS; b++) {
            if (work.seeing >> b & 1) {
                simdgroup_float8x8 factors;
                simdgroup_load(factors, room.factors + b * 64, 8);
#pragma unroll
                for (uint m = 0; m < MATRICES; m++) {
                    work.o[b][m].thread_elements()[0] *= factors.thread_elements()[0];
                    work.o[b][m].thread_elements()[1] *= factors.thread_elements()[1];
                }
            }
        }
        for (uint n = 0; n < count; n += 8) {
            const bool finite = bring<true, D, WIDTH>(keys, base + n, end, simd * WIDTH, stage, lane);
            simdgroup_barrier(mem_flags::mem_threadgroup);
            if (simd_all(finite)) {
                simdgroup_float8x8 values[MATRICES];
#pragma unroll
                for (uint m = 0; m < MATRICES; m++) {
                    simdgroup_load(values[m], stage + m * 8, WIDTH);
                }
#pragma unroll
                for (uint b = 0; b < BLOCKS; b++) {
                    if (work.seeing >> b & 1) {
                        simdgroup_float8x8 weights;
                        simdgroup_load(weights, room.weights + b * 8 * KEYS + n, KEYS);
#pragma unroll
                        for (uint m = 0; m < MATRICES; m++) {
                            simdgroup_multiply_accumulate(work.o[b][m], weights, values[m], work.o[b][m]);
                        }
                    }
                }
            } else {
                add_values_one_by_one(keys, base + n, end, room.weights + n, stage, room, work);
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

// Loads the queries, rotated if the keys are. Begins with a barrier; `stage` is free again after the next one.
template <uint D, uint ROWS, uint SIMDS, uint KEYS>
void load_queries(device const uchar *q, Room room, thread Work<D, ROWS, SIMDS, KEYS> &work,
                  constant MetalAttendParams &p) {
    constexpr uint THREADS = 32 * SIMDS, WIDTH = D / SIMDS;
#pragma unroll
    for (uint b = 0; b < ROWS / 8; b++) {
        if (b < work.blocks) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = work.index; i < 8 * D / 4; i += THREADS) {
                const Row row = room.rows[b * 8 + i / (D / 4)];
                const ulong at = ulong(row.x) * D + i % (D / 4) * 4;
                *reinterpret_cast<threadgroup float4 *>(room.stage + i * 4) =
                    is_there(row) ? load4(q, at, 4, Q_DTYPE, Q_ALIGNED) : float4(0);
            }
            if (K_QUANTISED && !Q_ROTATED) {
                rotate(room.stage, 8, D, false, work.index, THREADS);
            } else {
                threadgroup_barrier(mem_flags::mem_threadgroup);
            }
#pragma unroll
            for (uint m = 0; m < WIDTH / 8; m++) {
                simdgroup_load(work.q[b][m], room.stage + work.simd * WIDTH + m * 8, D);
            }
        }
    }
}

// Puts o of block b into `stage`, [8, D], rotated back if the values are rotated. Begins and ends with a barrier.
template <uint D, uint ROWS, uint SIMDS, uint KEYS>
void collect(uint b, Room room, thread Work<D, ROWS, SIMDS, KEYS> &work) {
    constexpr uint WIDTH = D / SIMDS;
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint m = 0; m < WIDTH / 8; m++) {
        simdgroup_store(work.o[b][m], room.stage + work.simd * WIDTH + m * 8, D);
    }
    if (V_QUANTISED) {
        rotate(room.stage, 8, D, true, work.index, 32 * SIMDS);
    } else {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

template <uint D, uint ROWS, uint SIMDS, uint KEYS>
kernel void attend_tiles(device const uchar *q [[buffer(0)]],
                         device uchar *out [[buffer(1), function_constant(WHOLE)]],
                         device const uint *positions [[buffer(2)]],
                         device const uint *sequences [[buffer(3)]],
                         device const uint *lens [[buffer(4)]],
                         device const uchar *k_low [[buffer(5)]],
                         device const uchar *k_high [[buffer(6), function_constant(K_HIGH)]],
                         device const uchar *k_norms [[buffer(7), function_constant(K_QUANTISED)]],
                         device const uchar *v_low [[buffer(8)]],
                         device const uchar *v_high [[buffer(9), function_constant(V_HIGH)]],
                         device const uchar *v_norms [[buffer(10), function_constant(V_QUANTISED)]],
                         device const float *sinks [[buffer(11), function_constant(SINKS_HERE)]],
                         device float *partial_o [[buffer(13), function_constant(PARTIAL)]],
                         device float2 *partial_states [[buffer(14), function_constant(PARTIAL)]],
                         constant MetalAttendParams &p [[buffer(15)]],
                         device const uint *table [[buffer(16), function_constant(PAGED)]],
                         device const uchar *k_means [[buffer(17), function_constant(K_CENTRED)]],
                         device const uchar *v_means [[buffer(18), function_constant(V_CENTRED)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint index [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]]) {
    constexpr uint THREADS = 32 * SIMDS, WIDTH = D / SIMDS;
    threadgroup float parts[SIMDS * ROWS * KEYS];
    threadgroup float weights[ROWS * KEYS];
    threadgroup float4 stage[8 * D / 4];
    threadgroup float factors[ROWS * 8];
    threadgroup Row rows[ROWS];
    threadgroup float2 states[ROWS];
    const Room room = Room{parts, weights, reinterpret_cast<threadgroup float *>(stage), factors, rows};
    const uint kv_head = group.y, split = group.z;
    const Planes keys = {k_low, K_HIGH ? k_high : nullptr, K_QUANTISED ? k_norms : nullptr,
                         K_CENTRED ? k_means : nullptr};
    const Planes values = {v_low, V_HIGH ? v_high : nullptr, V_QUANTISED ? v_norms : nullptr,
                           V_CENTRED ? v_means : nullptr};
    Work<D, ROWS, SIMDS, KEYS> work;
    work.index = index;
    work.lane = lane;
    work.simd = simd;
    work.blocks = uint(min(ulong(ROWS), ulong(p.tokens) * p.group - ulong(group.x) * ROWS) + 7) / 8;
#pragma unroll
    for (uint b = 0; b < ROWS / 8; b++) {
#pragma unroll
        for (uint m = 0; m < WIDTH / 8; m++) {
            work.o[b][m] = make_filled_simdgroup_matrix<float, 8, 8>(0);
        }
    }
    for (uint s = 0; s < ROWS / SIMDS; s++) {
        work.states[s] = no_keys();
    }

    // Lane i of every SIMD-group knows row i.
    uint position;
    Row row = row_of(group.x, lane, kv_head, positions, sequences, p, position);
    if (index < ROWS) {
        rows[index] = row;
    }
    load_queries(q, room, work, p);

    for (uint sequence = simd_min(row.y); sequence != NONE;) {
        row = seeing(row, position, sequence, lens[sequence], p);
        const uint first = simd_min(row.z), last = simd_max(row.w);
        const uint2 part = first <= last ? part_of(last - first + 1, split, KEYS, p) : uint2(0);
        if (part.x < part.y) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (index < ROWS) {
                rows[index] = row;
            }
            work.seeing = simd_or(row.z <= row.w ? 1u << lane / 8 : 0);
            const CachedKeys seen = keys_of(keys, values, PAGED ? table : nullptr, sequence, kv_head, first, p);
            absorb(seen, part.x, part.y, first, last, room, work, p);
        }
        sequence = simd_min(row.y > sequence ? row.y : NONE);
    }

    if (lane == 0) {
#pragma unroll
        for (uint s = 0; s < ROWS / SIMDS; s++) {
            states[simd + s * SIMDS] = packed(work.states[s]);
        }
    }
#pragma unroll
    for (uint b = 0; b < ROWS / 8; b++) {
        if (b < work.blocks) {
            collect(b, room, work);
            for (uint i = index; i < 8 * D; i += THREADS) {
                const uint r = b * 8 + i / D;
                if (!is_there(rows[r])) {
                    continue;
                }
                const ulong at = ulong(rows[r].x) * D + i % D;
                if (PARTIAL) {
                    const ulong part = split * (ulong(p.tokens) * p.heads) * D + at;
                    if (states[r].x != -INFINITY) {
                        partial_o[part] = room.stage[i];
                    }
                    if (i % D == 0) {
                        partial_states[part / D] = states[r];
                    }
                } else {
                    store(out, at, room.stage[i] * finish(with_sink(unpacked(states[r]), SINKS_HERE ? sinks : nullptr, rows[r].x, p)), OUT_DTYPE);
                }
            }
        }
    }
}

// D, rows of a tile, SIMD-groups, keys between barriers: below 32 KiB of threadgroup memory each.
// SIMD-groups own whole 8x8 matrices, so that W is a multiple of 8.
template [[host_name("attend_tiles_64")]] [[kernel]] decltype(attend_tiles<64, 32, 4, 32>) attend_tiles<64, 32, 4, 32>;
template [[host_name("attend_tiles_128")]] [[kernel]] decltype(attend_tiles<128, 32, 4, 32>) attend_tiles<128, 32, 4, 32>;
template [[host_name("attend_tiles_256")]] [[kernel]] decltype(attend_tiles<256, 32, 8, 16>) attend_tiles<256, 32, 8, 16>;
template [[host_name("attend_tiles_512")]] [[kernel]] decltype(attend_tiles<512, 16, 8, 16>) attend_tiles<512, 16, 8, 16>;
template [[host_name("attend_tiles_80")]] [[kernel]] decltype(attend_tiles<80, 16, 2, 32>) attend_tiles<80, 16, 2, 32>;
template [[host_name("attend_tiles_96")]] [[kernel]] decltype(attend_tiles<96, 32, 4, 32>) attend_tiles<96, 32, 4, 32>;
template [[host_name("attend_tiles_112")]] [[kernel]] decltype(attend_tiles<112, 16, 2, 32>) attend_tiles<112, 16, 2, 32>;
template [[host_name("attend_tiles_192")]] [[kernel]] decltype(attend_tiles<192, 32, 8, 16>) attend_tiles<192, 32, 8, 16>;
