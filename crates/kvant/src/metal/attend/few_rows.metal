// attend, for few query rows per KV head: decode and verification.
//
// attend_few: q [T, H, D] over a cache layer, out [T, H, D]. A threadgroup takes (tile of up to R query rows, KV head,
// split): all rows share what it reads. It goes through its keys 64 at a time:
//   scores    8 threads a key, which stride over D: each key is read once, whole lines at a time;
//   softmax   a SIMD-group a row, two keys a thread; the row's state is in its registers;
//   values    a thread owns four coordinates of every 128/(D/4)-th key, and o of all rows at them, in registers; the
//             threads left over, where D/4 does not divide 128, own none.
// Over quantised keys the queries are rotated first; over quantised values o is rotated back at the end. Over page
// means a tile begins where a page does, or within it: each mean of keys is one more key, and each mean of values one
// more value, whose weight is the sum of the page's weights.
#include "attend/keys.h"
#include "attend/softmax.h"
#include "rotate.h"

constant constexpr uint THREADS = 128;
constant constexpr uint SIMDS = THREADS / 32;
// Keys that are worked on between barriers.
constant constexpr uint TILE = 64;
// Threads of a key when scores are made, and keys that they take at once.
constant constexpr uint KEY_THREADS = 8;
constant constexpr uint KEYS_AT_ONCE = 2;
// The most pages of a tile, and how many there are.
constant constexpr uint MOST_PAGES = TILE / 16;
constant uint PAGES = TILE >> PAGE_SHIFT > 1 ? TILE >> PAGE_SHIFT : 1;
static_assert(MOST_PAGES * KEY_THREADS <= 32, "attend: a SIMD-group multiplies the means of a tile");

// Threadgroup memory of attend_few. `rows_of_d` holds the queries, [R, D], and in the end o, [slices, R, D].
template <uint D, uint R> struct Room {
    threadgroup float *rows_of_d;
    threadgroup float *scores; // [2, TILE, R]
    threadgroup float *factors;
    threadgroup Row *rows;
    threadgroup float *products; // [MOST_PAGES, R]: of queries and the means of keys
    threadgroup float *masses;   // [MOST_PAGES, R]: the sums of the weights of a page; -1 where a row sees no key of it
};

// What a thread owns.
template <uint D, uint R> struct Work {
    float4 o[R];                            // at coordinates 4·(index % (D/4)), of the keys of slice index / (D/4)
    State states[(R + SIMDS - 1) / SIMDS];  // of rows simd, simd + SIMDS, …
    uint index;
    uint lane;
    uint simd;
};

// The products of queries and the means of the keys from `base` on, before `end`; the threads of one SIMD-group.
template <uint D, uint R>
void multiply_means(CachedKeys keys, uint base, uint end, Room<D, R> room, thread const Work<D, R> &work) {
    const uint page = work.lane / KEY_THREADS, of_key = work.lane % KEY_THREADS;
    const uint key = base + (page << PAGE_SHIFT);
    RowPlace at = {0, 0, false};
    if (page < PAGES && key < end) {
        at = keys.place_of(key);
    }
    float sums[R];
    for (uint r = 0; r < R; r++) {
        sums[r] = 0;
    }
    for (uint j = of_key * 4; j < D && at.held; j += KEY_THREADS * 4) {
        const float4 mean = keys.key_mean4(at, j, D);
        for (uint r = 0; r < R; r++) {
            sums[r] += dot(*reinterpret_cast<threadgroup const float4 *>(room.rows_of_d + r * D + j), mean);
        }
    }
    for (uint r = 0; r < R; r++) {
        for (ushort distance = 1; distance < KEY_THREADS; distance *= 2) {
            sums[r] += simd_shuffle_xor(sums[r], distance);
        }
        if (of_key == r && page < PAGES) {
            room.products[page * R + r] = sums[r];
        }
    }
}

// Takes keys begin .. end of a pass into the states; all threads.
template <uint D, uint R>
void absorb(CachedKeys keys, uint begin, uint end, Room<D, R> room, thread Work<D, R> &work, constant MetalAttendParams &p) {
    constexpr uint KEYS = THREADS / KEY_THREADS;
    constexpr uint QUADS = D / 4, SLICES = THREADS / QUADS;
    const uint group = work.index / KEY_THREADS, of_key = work.index % KEY_THREADS;
    const uint slice = work.index / QUADS, quad = work.index % QUADS * 4;
    // Two buffers in turn: the next scores may be written while others still read these weights.
    threadgroup float *scores = room.scores;
    for (uint base = begin; base < end; base += TILE) {
        const uint count = min(TILE, end - base);
        for (uint step = 0; step < count; step += KEYS * KEYS_AT_ONCE) {
            float sums[KEYS_AT_ONCE][R];
            RowPlace at[KEYS_AT_ONCE];
            bool wanted[KEYS_AT_ONCE];
            for (uint n = 0; n < KEYS_AT_ONCE; n++) {
                const uint i = step + n * KEYS + group;
                wanted[n] = false;
                at[n] = RowPlace{0, 0, false};
                if (i < count) {
                    const uint sequence = keys.sequence, position = keys.position_of(base + i);
                    for (uint r = 0; r < R; r++) {
                        wanted[n] = wanted[n] || sees(room.rows[r], sequence, position);
                    }
                    at[n] = keys.place_of(base + i);
                }
                for (uint r = 0; r < R; r++) {
                    sums[n][r] = 0;
                }
            }
            for (uint j = of_key * 4; j < D; j += KEY_THREADS * 4) {
                float4 key[KEYS_AT_ONCE];
                for (uint n = 0; n < KEYS_AT_ONCE; n++) {
                    key[n] = wanted[n] ? keys.key4(at[n], j, D) : float4(0);
                }
                for (uint r = 0; r < R; r++) {
                    const float4 q = *reinterpret_cast<threadgroup const float4 *>(room.rows_of_d + r * D + j);
                    for (uint n = 0; n < KEYS_AT_ONCE; n++) {
                        sums[n][r] += dot(q, key[n]);
                    }
                }
            }
            for (uint n = 0; n < KEYS_AT_ONCE; n++) {
                const uint i = step + n * KEYS + group;
                for (uint r = 0; r < R; r++) {
                    float sum = sums[n][r];
                    for (ushort distance = 1; distance < KEY_THREADS; distance *= 2) {
                        sum += simd_shuffle_xor(sum, distance);
                    }
                    if (of_key == r) {
                        scores[i * R + r] = K_CENTRED ? sum : score_of(sum, p);
                    }
                }
            }
        }
        if (K_CENTRED && work.simd == 0) {
            multiply_means(keys, base, end, room, work);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        // Scores become weights; a key that a row does not see gets -1.
        for (uint s = 0; work.simd + s * SIMDS < R; s++) {
            const uint r = work.simd + s * SIMDS;
            const Row row = room.rows[r];
            float score[TILE / 32];
            bool seen[TILE / 32];
            float largest = work.states[s].m;
            for (uint n = 0; n < TILE / 32; n++) {
                const uint i = n * 32 + work.lane;
                seen[n] = i < count && sees(row, keys.sequence, keys.position_of(base + i));
                if (seen[n]) {
                    score[n] = scores[i * R + r];
                    if (K_CENTRED) {
                        score[n] = score_of(score[n] + room.products[(i >> PAGE_SHIFT) * R + r], p);
                    }
                    largest = raised(largest, score[n]);
                }
            }
            const float m = simd_max(largest);
            float sum = 0, weights[TILE / 32];
            for (uint n = 0; n < TILE / 32; n++) {
                const float weight = seen[n] ? precise::exp2(score[n] - m) : 0;
                sum += weight;
                weights[n] = weight;
                if (n * 32 + work.lane < count) {
                    scores[(n * 32 + work.lane) * R + r] = seen[n] ? weight : -1;
                }
            }
            const float factor = merge(work.states[s], State{m, simd_sum(sum)}).x;
            if (work.lane == 0) {
                room.factors[r] = factor;
            }
            for (uint page = 0; V_CENTRED && page < PAGES; page++) {
                float mass = 0;
                bool any = false;
                for (uint n = 0; n < TILE / 32; n++) {
                    if ((n * 32 + work.lane) >> PAGE_SHIFT == page) {
                        mass += weights[n];
                        any = any || seen[n];
                    }
                }
                mass = simd_sum(mass);
                any = simd_any(any);
                if (work.lane == 0) {
                    room.masses[page * R + r] = any ? mass : -1;
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        for (uint r = 0; r < R; r++) {
            work.o[r] *= room.factors[r];
        }
        for (uint i = slice < SLICES ? slice : count; i < count; i += SLICES) {
            float weights[R];
            bool wanted = false;
            for (uint r = 0; r < R; r++) {
                weights[r] = scores[i * R + r];
                wanted = wanted || !(weights[r] < 0);
            }
            if (wanted) {
                const float4 value = keys.value4(keys.place_of(base + i), quad, D);
                for (uint r = 0; r < R; r++) {
                    // By choice, not by a factor of 0: a value that is not seen may be anything.
                    if (!(weights[r] < 0)) {
                        work.o[r] += weights[r] * value;
                    }
                }
            }
        }
        for (uint page = V_CENTRED ? slice : PAGES; page < PAGES && slice < SLICES; page += SLICES) {
            bool wanted = false;
            for (uint r = 0; r < R; r++) {
                wanted = wanted || !(room.masses[page * R + r] < 0);
            }
            if (wanted) {
                const float4 mean = keys.value_mean4(keys.place_of(base + (page << PAGE_SHIFT)), quad, D);
                for (uint r = 0; r < R; r++) {
                    const float mass = room.masses[page * R + r];
                    if (!(mass < 0)) {
                        work.o[r] += mass * mean;
                    }
                }
            }
        }
        scores = scores == room.scores ? room.scores + TILE * R : room.scores;
    }
}

// Loads the queries of the tile's rows, rotated if the keys are; ends with a barrier.
template <uint D, uint R>
void load_queries(device const uchar *q, Room<D, R> room, uint index, constant MetalAttendParams &p) {
    for (uint i = index; i < R * D / 4; i += THREADS) {
        const Row row = room.rows[i / (D / 4)];
        const ulong at = ulong(row.x) * D + i % (D / 4) * 4;
        *reinterpret_cast<threadgroup float4 *>(room.rows_of_d + i * 4) =
            is_there(row) ? load4(q, at, 4, Q_DTYPE, Q_ALIGNED) : float4(0);
    }
    if (K_QUANTISED && !Q_ROTATED) {
        rotate(room.rows_of_d, p.tile_rows, D, false, index, THREADS);
    } else {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// Puts o of the tile's rows, summed over slices, where the queries were, [R, D], and ends with a barrier. Since the
// queries were last read there has been one.
template <uint D, uint R> void collect(Room<D, R> room, thread const Work<D, R> &work) {
    constexpr uint QUADS = D / 4, SLICES = THREADS / QUADS;
    threadgroup float4 *o = reinterpret_cast<threadgroup float4 *>(room.rows_of_d);
    if (work.index < SLICES * QUADS) {
        for (uint r = 0; r < R; r++) {
            o[work.index / QUADS * (R * QUADS) + r * QUADS + work.index % QUADS] = work.o[r];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (SLICES > 1) {
        for (uint i = work.index; i < R * QUADS; i += THREADS) {
            float4 sum = o[i];
            for (uint slice = 1; slice < SLICES; slice++) {
                sum += o[slice * (R * QUADS) + i];
            }
            o[i] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

template <uint D, uint R>
kernel void attend_few(device const uchar *q [[buffer(0)]],
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
    threadgroup float4 rows_of_d[R * THREADS];
    threadgroup float scores[2 * TILE * R];
    threadgroup float factors[R];
    threadgroup Row rows[R];
    threadgroup float2 states[R];
    threadgroup float products[MOST_PAGES * R];
    threadgroup float masses[MOST_PAGES * R];
    const Room<D, R> room = Room<D, R>{reinterpret_cast<threadgroup float *>(rows_of_d), scores, factors, rows,
                                       products, masses};
    const uint kv_head = group.y, split = group.z;
    const Planes keys = {k_low, K_HIGH ? k_high : nullptr, K_QUANTISED ? k_norms : nullptr,
                         K_CENTRED ? k_means : nullptr};
    const Planes values = {v_low, V_HIGH ? v_high : nullptr, V_QUANTISED ? v_norms : nullptr,
                           V_CENTRED ? v_means : nullptr};
    Work<D, R> work;
    work.index = index;
    work.lane = lane;
    work.simd = simd;
    for (uint r = 0; r < R; r++) {
        work.o[r] = float4(0);
    }
    for (uint s = 0; s * SIMDS < R; s++) {
        work.states[s] = no_keys();
    }

    // Lane i of every SIMD-group knows row i.
    uint position;
    Row row = row_of(group.x, lane, kv_head, positions, sequences, p, position);
    if (index < R) {
        rows[index] = row;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_queries(q, room, index, p);

    for (uint sequence = simd_min(row.y); sequence != NONE;) {
        row = seeing(row, position, sequence, lens[sequence], p);
        const uint seen_first = simd_min(row.z), last = simd_max(row.w);
        const uint first = begin_of_pass(seen_first, TILE);
        const uint2 part = seen_first <= last ? part_of(last - first + 1, split, TILE, p) : uint2(0);
        if (part.x < part.y) {
            if (index < R) {
                rows[index] = row;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            const CachedKeys seen = keys_of(keys, values, PAGED ? table : nullptr, sequence, kv_head, first, p);
            absorb(seen, part.x, part.y, room, work, p);
        }
        sequence = simd_min(row.y > sequence ? row.y : NONE);
    }

    for (uint s = 0; simd + s * SIMDS < R; s++) {
        if (lane == 0) {
            states[simd + s * SIMDS] = packed(work.states[s]);
        }
    }
    collect(room, work);
    if (V_QUANTISED) {
        rotate(room.rows_of_d, p.tile_rows, D, true, index, THREADS);
    }
    for (uint i = index; i < R * D; i += THREADS) {
        const uint r = i / D, j = i % D;
        if (!is_there(rows[r])) {
            continue;
        }
        const ulong start = ulong(rows[r].x) * D;
        if (PARTIAL) {
            const ulong at = split * (ulong(p.tokens) * p.heads) * D + start;
            if (states[r].x != -INFINITY) {
                partial_o[at + j] = room.rows_of_d[i];
            }
            if (j == 0) {
                partial_states[at / D] = states[r];
            }
        } else {
            store(out, start + j, room.rows_of_d[i] * finish(with_sink(unpacked(states[r]), SINKS_HERE ? sinks : nullptr, rows[r].x, p)), OUT_DTYPE);
        }
    }
}

// The rows of a tile: those of a token, or of a few tokens.
template [[host_name("attend_few_64_1")]] [[kernel]] decltype(attend_few<64, 1>) attend_few<64, 1>;
template [[host_name("attend_few_64_2")]] [[kernel]] decltype(attend_few<64, 2>) attend_few<64, 2>;
template [[host_name("attend_few_64_4")]] [[kernel]] decltype(attend_few<64, 4>) attend_few<64, 4>;
template [[host_name("attend_few_64_8")]] [[kernel]] decltype(attend_few<64, 8>) attend_few<64, 8>;
template [[host_name("attend_few_128_1")]] [[kernel]] decltype(attend_few<128, 1>) attend_few<128, 1>;
template [[host_name("attend_few_128_2")]] [[kernel]] decltype(attend_few<128, 2>) attend_few<128, 2>;
template [[host_name("attend_few_128_4")]] [[kernel]] decltype(attend_few<128, 4>) attend_few<128, 4>;
template [[host_name("attend_few_128_8")]] [[kernel]] decltype(attend_few<128, 8>) attend_few<128, 8>;
template [[host_name("attend_few_256_1")]] [[kernel]] decltype(attend_few<256, 1>) attend_few<256, 1>;
template [[host_name("attend_few_256_2")]] [[kernel]] decltype(attend_few<256, 2>) attend_few<256, 2>;
template [[host_name("attend_few_256_4")]] [[kernel]] decltype(attend_few<256, 4>) attend_few<256, 4>;
template [[host_name("attend_few_256_8")]] [[kernel]] decltype(attend_few<256, 8>) attend_few<256, 8>;
template [[host_name("attend_few_512_1")]] [[kernel]] decltype(attend_few<512, 1>) attend_few<512, 1>;
template [[host_name("attend_few_512_2")]] [[kernel]] decltype(attend_few<512, 2>) attend_few<512, 2>;
template [[host_name("attend_few_512_4")]] [[kernel]] decltype(attend_few<512, 4>) attend_few<512, 4>;
template [[host_name("attend_few_512_8")]] [[kernel]] decltype(attend_few<512, 8>) attend_few<512, 8>;
// Of the less common head sizes: one row, and more.
template [[host_name("attend_few_80_1")]] [[kernel]] decltype(attend_few<80, 1>) attend_few<80, 1>;
template [[host_name("attend_few_80_8")]] [[kernel]] decltype(attend_few<80, 8>) attend_few<80, 8>;
template [[host_name("attend_few_96_1")]] [[kernel]] decltype(attend_few<96, 1>) attend_few<96, 1>;
template [[host_name("attend_few_96_8")]] [[kernel]] decltype(attend_few<96, 8>) attend_few<96, 8>;
template [[host_name("attend_few_112_1")]] [[kernel]] decltype(attend_few<112, 1>) attend_few<112, 1>;
template [[host_name("attend_few_112_8")]] [[kernel]] decltype(attend_few<112, 8>) attend_few<112, 8>;
template [[host_name("attend_few_192_1")]] [[kernel]] decltype(attend_few<192, 1>) attend_few<192, 1>;
template [[host_name("attend_few_192_8")]] [[kernel]] decltype(attend_few<192, 8>) attend_few<192, 8>;
