// attend_prefill: softmax(scale * q K^T [softcap] + mask) V for many tokens over dense 16-bit keys and values, on
// tensor cores: by products of warpgroups (WARPGROUP_PRODUCTS, Hopper) or of warps.
//
// q [T, H, D] -> out [T, H, D]; q, K and V have one 16-bit dtype, out any dtype.
//
// A work item is ROWS query rows of one KV head, and all keys that any of them sees. Rows are numbered token by token,
// the heads of the group within a token. Keys are ordered by sequence (segments), in tiles of TILE. With products of
// warpgroups a block processes several items: first the item with the block's number, then items that no block has
// taken. If shared memory has room for the tokens of two ITEMS, the warps that copy begin the next item while the warps
// that compute finish the current one. With products of warps a block has one item. The warps share the work:
//
//   two warpgroups compute. Each has 64 rows and all coordinates. At head size 512 the sums of 64 rows fill the
//   registers of both, so both have the same rows: each computes the scores of half of a tile's keys, and half of the
//   output's coordinates.
//     They exchange the maxima of rows, and the weights, through shared memory;
//   keys and values are copied into a ring of STAGES buffers. A buffer holds a chunk: COLUMNS coordinates of a tile's
//   keys or values. Warps take turns, a buffer each; barriers signal full and free buffers. With products of
//   warpgroups, four warps only copy. Otherwise the warps that compute also copy, ahead of use: threads cannot give up
//   registers there, so a warp that only copies would cost as many as one that computes.
//
// For each tile: S = q K^T, both in shared memory; P = exp2(S - max), rounded to operands within the thread; O += P V.
// Products of warpgroups overlap the scores of a tile with the values of the previous tile. Single warps overlap with
// each other: some multiply while others compute their softmax.
//
// SPLIT: `splits` blocks have equal shares of an item's tiles. Each stores its state (split.h), and the last one to
// arrive merges the states.
//
// Over pages (work.h) segments begin at multiples of 16 keys, so that a unit of 16 is in one page. Lanes of a warp look
// up a tile's units. Keys that no page holds are zeros, and masked.
//
// 0 times a value that is not finite is NaN, so rows may get NaN from keys that they do not see. If a result is not
// finite, the item is computed again, and tiles with infinite or NaN values are added key by key (nonfinite.h). By then
// a block with several items has begun one or two others.
#include "attend/prefill/copies.h"
#include "attend/prefill/nonfinite.h"
#include "attend/prefill/products.h"
#include "attend/prefill/split.h"
#include "attend/state.h"

// Registers of a thread that copies, and of one that computes: together those of the block.
constexpr uint PRODUCER_REGISTERS = 40;
constexpr uint CONSUMER_REGISTERS = 232;

// The keys of a sequence that this thread's rows see.
inline Seen seen_by(const AttendParams &p, const Shared &shared, const Item &item, const uint *table, Range keys,
                    uint sequence) {
    Seen seen;
    seen.end = keys.end;
    seen.pages = pages_of(p, table, sequence);
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        const uint r = own_row(c);
        // Missing rows need no mask.
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

// The work of a warp for all keys, with asynchronous products. Calls scored() after the last scores, if it knows that
// they are the last.
template <typename Scored>
inline void attend_ahead(const AttendParams &p, const Shared &shared, const Item &item, const uint *table,
                         Copier &copier, Cursor &cursor, Accumulators &acc, Scored scored) {
    const uint base = shared.address();
    clear(acc);
    each_segment(shared, [&](Range keys, uint sequence, bool last) {
        const Seen seen = seen_by(p, shared, item, table, keys, sequence);
        const uint tiles = tiles_of(keys);
        float s[SCORED / 2], f[2];
        uint w[TILE / 16][4];
        uint key = keys.first, entry = seen.entry(key);
        begin_scores(base, copier, cursor, s);
        end_scores(base, cursor, s);
        soften(p, shared, seen, key, seen.held(entry), s, acc, f);
        send_weights(shared, s);
#pragma unroll 1
        for (uint tile = 1; tile < tiles; tile++) {
            if constexpr (!SHARED_ROWS) {
                scale(acc, f);
                take_weights(shared, s, w);
            }
            entry = seen.entry(key + TILE);
            begin_scores(base, copier, cursor, s, [&](uint chunk) {
                // Products run while warpgroups wait for each other.
                if constexpr (SHARED_ROWS) {
                    if (chunk == 0) {
                        take_weights(shared, s, w);
                    }
                    scale(acc.o[chunk], f);
                }
            });
            const uint of_keys = cursor.before();
            Cursor used = cursor;
            begin_values(base, copier, cursor, w, acc);
            products_wait<CHUNKS>();
            hold(s);
            release(base, of_keys);
            key += TILE;
            soften(p, shared, seen, key, seen.held(entry), s, acc, f);
            if constexpr (SHARED_ROWS) {
                send_weights(shared, s);
            } else {
                finish_softmax(base, acc);
            }
            end_values(base, used, acc);
        }
        scale(acc, f);
        take_weights(shared, s, w);
        if (last) {
            scored();
        }
        Cursor used = cursor;
        begin_values(base, copier, cursor, w, acc);
        end_values(base, used, acc);
    });
}

// As attend_ahead, tile by tile. CAREFUL: values may not be finite.
template <bool CAREFUL>
inline void attend_in_order(const AttendParams &p, const Shared &shared, const Item &item, const uint *table,
                            Copier &copier, Cursor &cursor, Accumulators &acc) {
    const uint base = shared.address();
    clear(acc);
    copier.begin();
    each_segment(shared, [&](Range keys, uint sequence, bool) {
        const Seen seen = seen_by(p, shared, item, table, keys, sequence);
        const uint tiles = tiles_of(keys);
        float s[SCORED / 2], f[2];
        uint w[TILE / 16][4];
#pragma unroll 1
        for (uint tile = 0; tile < tiles; tile++) {
            const uint key = keys.first + tile * TILE, held = seen.held(seen.entry(key));
            begin_scores(base, copier, cursor, s);
            end_scores(base, cursor, s);
            soften(p, shared, seen, key, held, s, acc, f);
            send_weights(shared, s);
            scale(acc, f);
            take_weights(shared, s, w);
            Cursor used = cursor;
            if (CAREFUL && values_are_nonfinite(base, cursor)) {
                add_by_keys(base, copier, cursor, w, seen, key, held, acc);
                // All lanes of a warp take part in its products.
                __syncwarp();
            } else {
                begin_values(base, copier, cursor, w, acc);
            }
            end_values(base, used, acc);
        }
    });
}

// Rearranges the results of the four lanes of a row: `pairs` are two of each of four groups of 8 columns; afterwards
// they are the 8 columns of group t.
inline void gather_columns(uint (&pairs)[4], uint t) {
    // Exchanges with lane t ^ 1, then with lane t ^ 2.
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
}

// Writes a row, if it exists. result(i, eight) returns columns 2t and 2t + 1 of eight of chunk i. All lanes of the row
// call it.
template <typename Result>
inline void write_row(uchar *out, ulong row, uint first_column, uint t, bool writes, Result result) {
#pragma unroll
    for (uint i = 0; i < CHUNKS * PARTS; i++) {
        if constexpr (OUT_DTYPE == F32) {
#pragma unroll
            for (uint eight = 0; eight < WIDTH / 8; eight++) {
                const ulong at = row * HEAD_DIM + first_column + i * WIDTH + eight * 8 + 2 * t;
                const float2 two = result(i, eight);
                if (writes) {
                    *reinterpret_cast<float2 *>(out + at * 4) = two;
                }
            }
            continue;
        }
#pragma unroll
        for (uint j = 0; j < WIDTH / 8; j += 4) {
            uint pairs[4];
#pragma unroll
            for (uint n = 0; n < 4; n++) {
                const float2 two = result(i, j + n);
                pairs[n] = pack<OUT_DTYPE == F16>(two.x, two.y);
            }
            gather_columns(pairs, t);
            if (writes) {
                const uint column = first_column + i * WIDTH + (j + t) * 8;
                *reinterpret_cast<uint4 *>(out + row * ROW + column * 2) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }
}

// Writes the thread's results to the output.
inline void finish(const AttendParams &p, const Shared &shared, const Item &item, const uint *table, Accumulators &acc, uchar *out,
                   const RowEnds &ends) {
    const uint group = threadIdx.x / 128, t = threadIdx.x % 4;
    const uint first_column = SHARED_ROWS ? group * (HEAD_DIM / 2) : 0;
    // Read before the threads of a row meet below, because one of them then overwrites the ends.
    float earlier_end[2];
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        earlier_end[c] = own_row(c) < item.rows ? ends.of_earlier(row_of(p, item, own_row(c))) : nothing();
    }
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        acc.l[c] += __shfl_xor_sync(0xFFFFFFFF, acc.l[c], 1);
        acc.l[c] += __shfl_xor_sync(0xFFFFFFFF, acc.l[c], 2);
    }
    if constexpr (SHARED_ROWS) {
        // A warpgroup has the sum over the keys whose scores it computed.
        const float2 others = exchange(shared, acc.l);
        acc.l[0] += others.x;
        acc.l[1] += others.y;
    }
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        const uint r = own_row(c);
        const bool writes = r < item.rows;
        const ulong row = row_of(p, item, writes ? r : 0);
        const auto sees = [&] {
            return sees_any(p, table, shared.tokens()[(item.first_row + (writes ? r : 0)) / p.group - item.first_token]);
        };
        const RowFactors f = finish_row(p, ends, row, acc.m[c], acc.l[c], earlier_end[c], sees, 1 << WEIGHT_BITS);
        if (ENDS) {
            __syncwarp();
            if (writes && t == 0 && first_column == 0) {
                ends.leave(row, f.end);
            }
        }
        const auto result = [&](uint i, uint eight) {
            const float *o = acc.o[i] + 4 * eight + 2 * c;
            float2 two = make_float2(o[0] * f.own, o[1] * f.own);
            if (EARLIER && writes) {
                const float2 before = ends.earlier_at<float2>(row * HEAD_DIM + first_column + i * WIDTH + eight * 8 + 2 * t);
                two = make_float2(two.x + before.x * f.earlier, two.y + before.y * f.earlier);
            }
            return two;
        };
        write_row(out, row, first_column, t, writes, result);
    }
}

// The work of the warps that only copy: for each item in turn, its tokens, then its chunks. When the slot of an item is
// free again, the warps know whether the item has failed; a failed item is processed again in its slot.
inline void produce_items(const AttendParams &p, uchar *memory, const uchar *k, const uchar *v, const uint *positions,
                          const uint *sequence, const uint *lens, const uint *table, uint *taken) {
    constexpr uint PRODUCERS = THREADS - CONSUMERS;
    const uint own = threadIdx.x - CONSUMERS, all = p.items * p.kv_heads * (SPLIT ? p.splits : 1);
    const auto meet_producers = [] { meet(8, PRODUCERS); };
    // The block's next item, in the first thread.
    uint next = blockIdx.x;
    uint chunks = 0;
    Cursor cursor;
    for (RingCursor<ITEMS> place;; place.next()) {
        place = place.of_warp();
        cursor = cursor.of_warp();
        const Shared shared = {memory, place.stage};
        const uint full = shared.address() + AT_ITEM_FULL + place.stage * 8, free = shared.address() + AT_ITEM_FREE;
        ItemState &state = shared.state();
        barrier_wait(free + place.stage * 8, place.parity ^ 1);
        if (own == 0) {
            state.careful = state.failed != 0;
            if (!state.careful && next < all) {
                state.number = next;
                // The number of calls is the number of items: the last call resets the counter for the next launch.
                next = gridDim.x < all ? gridDim.x + atomicInc(taken, all - 1) : NONE;
            } else if (!state.careful) {
                // Only the item before this one may still fail.
                const uint before = place.before();
                ItemState &last = Shared{memory, before}.state();
                barrier_wait(free + before * 8, place.parity ^ (place.stage == 0 ? 1 : 0));
                state.careful = last.failed != 0;
                state.number = state.careful ? last.number : NONE;
                last.failed = 0;
            }
        }
        // Before this point a warp may still read tokens and keys of the previous item of the slot.
        meet_producers();
        if (state.number == NONE) {
            barrier_arrive(full);
            return;
        }
        const Item item(p, state.number);
        const uint ahead = state.careful ? 0 : 1;
        load_item(p, shared, item, positions, sequence, lens, own, meet_producers);
        barrier_arrive(full);
        produce(p, shared, item, k, v, table, ahead, cursor, chunks);
    }
}

// The work of the warps that compute, for the items that the copying warps announce.
inline void consume_items(const AttendParams &p, uchar *memory, const uchar *q, uchar *out, const uchar *k, const uchar *v,
                          const uint *table, float *states, uint *arrivals, const RowEnds &ends) {
    // Warps with the same rows, or the same state to merge, fail together.
    constexpr bool ALL_FAIL = SHARED_ROWS || SPLIT;
    const uint group = of_warp(threadIdx.x / 128);
    bool has_queries = false;
    Cursor cursor;
    Accumulators acc;
    for (RingCursor<ITEMS> place;; place.next()) {
        place = place.of_warp();
        cursor = cursor.of_warp();
        const Shared shared = {memory, place.stage};
        const uint base = shared.address();
        barrier_wait(base + AT_ITEM_FULL + place.stage * 8, place.parity);
        const uint number = of_warp(shared.state().number);
        if (number == NONE) {
            return;
        }
        const bool careful = of_warp(shared.state().careful) != 0;
        const Item item(p, number);
        if (!has_queries) {
            copy_queries(p, shared, item, q);
        }
        has_queries = false;
        copies_wait<0>();
        show_to_products();
        meet_rows();
        Copier copier = {p, shared, item, k, v, table};
        if (careful) {
            attend_in_order<true>(p, shared, item, table, copier, cursor, acc);
        } else {
            attend_ahead(p, shared, item, table, copier, cursor, acc, [&] {
                // The queries are no longer needed: copy those of the next item, if it is known.
                meet_rows();
                RingCursor<ITEMS> then = place;
                then.next();
                has_queries = __all_sync(0xFFFFFFFF, barrier_is_over(base + AT_ITEM_FULL + then.stage * 8, then.parity));
                if (has_queries) {
                    const uint following = of_warp(Shared{memory, then.stage}.state().number);
                    if (following != NONE) {
                        copy_queries(p, shared, Item(p, following), q);
                    }
                }
            });
        }
        const bool failed = any_of(results_are_nonfinite(item, acc), ALL_FAIL ? 1 : 2 + group, ALL_FAIL ? CONSUMERS : 128);
        if (failed && !careful) {
            if (threadIdx.x % 128 == 0) {
                atomicOr(&shared.state().failed, 1u);
            }
        } else if (!SPLIT || merge(p, shared, item, states, arrivals, acc)) {
            finish(p, shared, item, table, acc, out, ends);
        }
        barrier_arrive(base + AT_ITEM_FREE + place.stage * 8);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KVANT_KERNEL(const uchar *q, uchar *out, const uchar *k, const uchar *, const float *, const uchar *v, const uchar *,
           const float *, const uint *positions, const uint *sequence, const uint *lens, float *states, uint *arrivals,
           const float *sinks, const AttendParams p, const uint *table, const uchar *, const uchar *, const float *earlier,
           const float *earlier_ends, float *new_ends) {
    extern __shared__ __align__(1024) uchar memory[];
    const RowEnds ends(sinks, earlier, earlier_ends, new_ends);
    const uint base = shared_address(memory);
    // wgmma.h needs this condition; it always holds.
    if (base % 1024 != 0) {
        __trap();
    }
    if (threadIdx.x == 0) {
        for (uint i = 0; i < STAGES; i++) {
            barrier_init(base + AT_FULL + i * 8, 32);
            barrier_init(base + AT_FREE + i * 8, CONSUMERS / 32 * WARP_ARRIVALS);
        }
        for (uint i = 0; WARPGROUP_PRODUCTS && i < ITEMS; i++) {
            barrier_init(base + AT_ITEM_FULL + i * 8, THREADS - CONSUMERS);
            barrier_init(base + AT_ITEM_FREE + i * 8, CONSUMERS);
            Shared{memory, i}.state().failed = 0;
        }
    }
    if constexpr (WARPGROUP_PRODUCTS) {
        __syncthreads();
        if (threadIdx.x >= CONSUMERS) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
            // The counter of taken items follows the counters of arrivals.
            uint *taken = arrivals + (SPLIT ? p.items * p.kv_heads : 0);
            produce_items(p, memory, k, v, positions, sequence, lens, table, taken);
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
            consume_items(p, memory, q, out, k, v, table, states, arrivals, ends);
        }
    } else {
        const Shared shared = {memory, 0};
        const Item item(p, blockIdx.x);
        copy_queries(p, shared, item, q);
        load_item(p, shared, item, positions, sequence, lens, threadIdx.x, [] { __syncthreads(); });
        copies_wait<0>();
        __syncthreads();
        Copier copier = {p, shared, item, k, v, table};
        Cursor cursor;
        Accumulators acc;
        attend_in_order<false>(p, shared, item, table, copier, cursor, acc);
        if (any_of(results_are_nonfinite(item, acc), 1, CONSUMERS)) {
            attend_in_order<true>(p, shared, item, table, copier, cursor, acc);
        }
        if (!SPLIT || merge(p, shared, item, states, arrivals, acc)) {
            finish(p, shared, item, table, acc, out, ends);
        }
    }
}
