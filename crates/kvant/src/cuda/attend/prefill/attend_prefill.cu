// attend_prefill: softmax(scale * q K^T [softcap] + mask) V for many tokens over dense 16-bit keys and values, on
// tensor cores: by products of warpgroups (WARPGROUP_PRODUCTS, Hopper) or of warps.
//
// q [T, H, D] -> out [T, H, D]; q, K and V have one 16-bit dtype, out that or the other one.
//
// A block has one work item: ROWS query rows of one KV head, numbered token by token, the heads of the group within;
// and all keys that any of them sees, sequence by sequence (segments), in tiles of TILE. The warps share the work:
//
//   two warpgroups compute. Each has 64 rows and all coordinates. At head size 512, whose sums fill the registers of
//     both, they have the same 64 rows: the scores of half of a tile's keys each, and half of the values' coordinates.
//     They exchange the maxima of rows, and the weights, through shared memory;
//   keys and values are copied into a ring of STAGES buffers ("chunks": COLUMNS coordinates of a tile's keys or
//     values), a warp a buffer, in turn; barriers signal full and free buffers. With products of warpgroups, four warps
//     only copy. Otherwise the warps that compute also copy, ahead of their use: where threads cannot give up
//     registers, a warp that only copies costs as many as one that computes.
//
// For each tile: S = q K^T, both in shared memory; P = exp2(S - max), rounded to operands within the thread; O += P V.
// Warpgroups compute the scores of a tile together with the values of the previous tile. Of single warps, some multiply
// while others have their softmax.
//
// SPLIT: `splits` blocks have an item's tiles, as equal shares of them. Each leaves its state (split.h), and the last
// one to arrive merges them.
//
// Over pages (work.h) segments begin at multiples of 16 keys, so that a unit of 16 is in one page. Lanes of a warp look
// up a tile's units. Keys that no page holds are zeros, and masked.
//
// 0 times a value that is not finite is NaN, so rows may get NaN from keys that they do not see. If a result is not
// finite, the item is computed again, and tiles with such values are added key by key (nonfinite.h).
#include "attend/prefill/copies.h"
#include "attend/prefill/nonfinite.h"
#include "attend/prefill/products.h"
#include "attend/prefill/split.h"
#include "attend/state.h"

// Registers of a thread that copies, and of one that computes: together those of the block.
constexpr uint PRODUCER_REGISTERS = 40;
constexpr uint CONSUMER_REGISTERS = 232;

// What this thread sees of the keys of a sequence.
inline Seen seen_by(const AttendParams &p, const Shared &shared, const Item &item, const uint *table, Range keys,
                    uint sequence) {
    Seen seen;
    seen.end = keys.end;
    seen.pages = pages_of(p, table, sequence);
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        const uint r = own_row(c);
        // Rows that do not exist need no mask.
        seen.row[c] = {0, NONE};
        if (r < item.rows) {
            const Token token = shared.tokens()[(item.first_row + r) / p.group - item.first_token];
            seen.row[c] = token.sequence == sequence ? visible(p, token) : Range{0, 0};
        }
    }
    seen.all.first = __reduce_max_sync(0xFFFFFFFF, max(seen.row[0].first, seen.row[1].first));
    seen.all.end = __reduce_min_sync(0xFFFFFFFF, min(seen.row[0].end, seen.row[1].end));
    return seen;
}

// The work of a warp for all keys, by products that run while it does something else.
inline void attend_ahead(const AttendParams &p, const Shared &shared, const Item &item, const uint *table,
                         Copier &copier, Cursor &cursor, Work &work) {
    const uint base = shared.address();
    clear(work);
    each_segment(shared, [&](Range keys, uint sequence) {
        const Seen seen = seen_by(p, shared, item, table, keys, sequence);
        const uint tiles = tiles_of(keys);
        float s[SCORED / 2], f[2];
        uint w[TILE / 16][4];
        uint key = keys.first, entry = seen.entry(key);
        begin_scores(base, copier, cursor, s);
        end_scores(base, cursor, s);
        soften(p, shared, seen, key, seen.held(entry), s, work, f);
        send_weights(shared, s);
#pragma unroll 1
        for (uint tile = 1; tile < tiles; tile++) {
            if constexpr (!SHARED_ROWS) {
                scale(work, f);
                take_weights(shared, s, w);
            }
            entry = seen.entry(key + TILE);
            begin_scores(base, copier, cursor, s, [&](uint chunk) {
                // Warpgroups that wait for each other have products that run meanwhile.
                if constexpr (SHARED_ROWS) {
                    if (chunk == 0) {
                        take_weights(shared, s, w);
                    }
                    scale(work.o[chunk], f);
                }
            });
            const uint of_keys = cursor.before();
            Cursor used = cursor;
            begin_values(base, copier, cursor, w, work);
            products_wait<CHUNKS>();
            hold(s);
            release(base, of_keys);
            key += TILE;
            soften(p, shared, seen, key, seen.held(entry), s, work, f);
            if constexpr (SHARED_ROWS) {
                send_weights(shared, s);
            } else {
                finish_softmax(base, work);
            }
            end_values(base, used, work);
        }
        scale(work, f);
        take_weights(shared, s, w);
        Cursor used = cursor;
        begin_values(base, copier, cursor, w, work);
        end_values(base, used, work);
    });
}

// The same, tile by tile. CAREFUL: values may not be finite.
template <bool CAREFUL>
inline void attend_in_order(const AttendParams &p, const Shared &shared, const Item &item, const uint *table,
                            Copier &copier, Cursor &cursor, Work &work) {
    const uint base = shared.address();
    clear(work);
    copier.begin();
    each_segment(shared, [&](Range keys, uint sequence) {
        const Seen seen = seen_by(p, shared, item, table, keys, sequence);
        const uint tiles = tiles_of(keys);
        float s[SCORED / 2], f[2];
        uint w[TILE / 16][4];
#pragma unroll 1
        for (uint tile = 0; tile < tiles; tile++) {
            const uint key = keys.first + tile * TILE, held = seen.held(seen.entry(key));
            begin_scores(base, copier, cursor, s);
            end_scores(base, cursor, s);
            soften(p, shared, seen, key, held, s, work, f);
            send_weights(shared, s);
            scale(work, f);
            take_weights(shared, s, w);
            Cursor used = cursor;
            if (CAREFUL && values_are_nonfinite(base, cursor)) {
                add_by_keys(base, copier, cursor, w, seen, key, held, work);
                // Products are the warp's together.
                __syncwarp();
            } else {
                begin_values(base, copier, cursor, w, work);
            }
            end_values(base, used, work);
        }
    });
}

// Writes the thread's results to the output.
inline void finish(const AttendParams &p, const Shared &shared, const Item &item, const uint *table, Work &work, uchar *out,
                   const float *sinks) {
    const uint group = threadIdx.x / 128, t = threadIdx.x % 4;
    const uint first_column = SHARED_ROWS ? group * (HEAD_DIM / 2) : 0;
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        work.l[c] += __shfl_xor_sync(0xFFFFFFFF, work.l[c], 1);
        work.l[c] += __shfl_xor_sync(0xFFFFFFFF, work.l[c], 2);
    }
    if constexpr (SHARED_ROWS) {
        // Each warpgroup has the sum over the keys that it scored.
        const float2 others = exchange(shared, work.l);
        work.l[0] += others.x;
        work.l[1] += others.y;
    }
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        const uint r = own_row(c);
        const bool writes = r < item.rows;
        const ulong row = row_of(p, item, writes ? r : 0);
        const float l = with_sink(p, sinks, row, work.m[c], work.l[c], 1 << WEIGHT_BITS);
        const float inverse = inverse_of_sum(l, [&] {
            return sees_any(p, table, shared.tokens()[(item.first_row + (writes ? r : 0)) / p.group - item.first_token]);
        });
#pragma unroll
        for (uint i = 0; i < CHUNKS * PARTS; i++) {
            // Four pairs by 8 columns each become, across the four lanes of a row, 16 bytes of 8 columns for each.
#pragma unroll
            for (uint j = 0; j < WIDTH / 8; j += 4) {
                uint pairs[4];
#pragma unroll
                for (uint n = 0; n < 4; n++) {
                    const float x = work.o[i][4 * (j + n) + 2 * c], y = work.o[i][4 * (j + n) + 2 * c + 1];
                    pairs[n] = pack<OUT_DTYPE == F16>(x * inverse, y * inverse);
                }
                // With lane t ^ 1, then t ^ 2.
#pragma unroll
                for (uint n = 0; n < 4; n += 2) {
                    const uint other = __shfl_xor_sync(0xFFFFFFFF, t % 2 == 0 ? pairs[n + 1] : pairs[n], 1);
                    pairs[n] = t % 2 == 0 ? pairs[n] : other;
                    pairs[n + 1] = t % 2 == 0 ? other : pairs[n + 1];
                }
#pragma unroll
                for (uint n = 0; n < 2; n++) {
                    const uint other = __shfl_xor_sync(0xFFFFFFFF, t < 2 ? pairs[n + 2] : pairs[n], 2);
                    pairs[n] = t < 2 ? pairs[n] : other;
                    pairs[n + 2] = t < 2 ? other : pairs[n + 2];
                }
                if (writes) {
                    const uint column = first_column + i * WIDTH + (j + t) * 8;
                    *reinterpret_cast<uint4 *>(out + row * ROW + column * 2) =
                        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KVANT_KERNEL(const uchar *q, uchar *out, const uchar *k, const uchar *, const float *, const uchar *v, const uchar *,
           const float *, const uint *positions, const uint *sequence, const uint *lens, float *states, uint *arrivals,
           const float *sinks,
           const AttendParams p, const uint *table) {
    extern __shared__ __align__(1024) uchar memory[];
    const Shared shared = {memory};
    // What wgmma.h needs; it always holds.
    if (shared_address(memory) % 1024 != 0) {
        __trap();
    }
    // The last items, which see the most keys, come first.
    Item item;
    const uint pair = SPLIT ? blockIdx.x / p.splits : blockIdx.x;
    const uint number = p.items - 1 - pair / p.kv_heads;
    item.head = pair % p.kv_heads;
    item.first_row = number * ROWS;
    item.rows = min(p.tokens * p.group - item.first_row, ROWS);
    item.first_token = item.first_row / p.group;
    item.tokens = (item.first_row + item.rows - 1) / p.group + 1 - item.first_token;

    const bool consumes = THREADS == CONSUMERS || threadIdx.x < CONSUMERS;
    if (consumes) {
        copy_queries(p, shared, item, q);
    }
    if (threadIdx.x == 0) {
        for (uint i = 0; i < STAGES; i++) {
            barrier_init(shared.address() + AT_FULL + i * 8, 32);
            barrier_init(shared.address() + AT_FREE + i * 8, CONSUMERS / 32 * WARP_ARRIVALS);
        }
    }
    load_item(p, shared, item, positions, sequence, lens);
    Cursor cursor;
    if (!consumes) {
        if constexpr (WARPGROUP_PRODUCTS) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        }
#pragma unroll 1
        for (uint ahead = 1; ahead != NONE; ahead = ahead == 1 && shared.words()[1] != 0 ? 0 : NONE) {
            produce(p, shared, item, k, v, table, ahead, cursor);
            if (ahead == 1) {
                meet(0, THREADS);
            }
        }
    } else {
        if constexpr (WARPGROUP_PRODUCTS) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        }
        copies_wait<0>();
        show_to_products();
        meet(1, CONSUMERS);
        Copier copier = {p, shared, item, k, v, table};
        Work work;
        if constexpr (WARPGROUP_PRODUCTS) {
            attend_ahead(p, shared, item, table, copier, cursor, work);
        } else {
            attend_in_order<false>(p, shared, item, table, copier, cursor, work);
        }
        if (results_are_nonfinite(item, work)) {
            atomicOr(shared.words() + 1, 1u);
        }
        meet(0, THREADS);
        if (shared.words()[1] != 0) {
            attend_in_order<true>(p, shared, item, table, copier, cursor, work);
        }
        if (!SPLIT || merge(p, shared, pair, states, arrivals, work)) {
            finish(p, shared, item, table, work, out, sinks);
        }
    }
}
