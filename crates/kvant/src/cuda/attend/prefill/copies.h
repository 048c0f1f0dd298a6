// Copies of queries, keys and values to the shared memory of attend_prefill.cu, in the layout of matrices that wgmma.h
// describes.
#ifndef KVANT_CUDA_ATTEND_PREFILL_COPIES_H
#define KVANT_CUDA_ATTEND_PREFILL_COPIES_H
#include "attend/prefill/layout.h"

// Copies chunk `chunk` of the keys or values from `first` on; missing keys, and keys that no page holds, become zeros.
// `page` is the page of the lane's unit (entry_of_lane).
inline void copy_chunk(const AttendParams &p, const uchar *plane, Range keys, uint first, uint chunk, bool of_values,
                       uint to, uint page) {
    constexpr uint PIECES = COLUMNS / 8;
    constexpr uint TOGETHER = 32 / PIECES;
    // A copy occupies the register of its address until it is issued. Several copies at once are faster only at head
    // size 64.
    constexpr uint ADDRESSES = WARPGROUP_PRODUCTS && HEAD_DIM == 64 ? 4 : 1;
    const uint lane = threadIdx.x % 32, piece = lane % PIECES, in_block = piece % 8;
    uint column = chunk * COLUMNS * 2 + piece * 16;
    if (SHARED_ROWS && of_values) {
        // Each consumer's block.
        column = piece / 8 * (HEAD_DIM / 2) * 2 + chunk * 128 + in_block * 16;
    }
    const uint there = min(keys.end - first, TILE);
    const uint slot0 = RING ? first % p.capacity : first;
    const uint step = p.row_slot * ROW;
    to += piece / 8 * BLOCK;
    const uint r0 = lane / PIECES;
    if constexpr (PAGE_SHIFT > 0) {
#pragma unroll 1
        for (uint unit = 0; unit < TILE / 16; unit++) {
            const uint of_unit = __shfl_sync(0xFFFFFFFF, page, unit), slot = slot_in_page(first + unit * 16);
            const uchar *from = plane + page_bytes_or_zero(of_unit) + (slot + r0) * ROW + column;
#pragma unroll
            for (uint i = 0; i < 16; i += TOGETHER) {
                const uint r = unit * 16 + r0 + i;
                copy_async<16>(to + r * 128 + (in_block ^ r % 8) * 16, from, r < there && of_unit != NONE);
                from += TOGETHER * ROW;
            }
        }
        return;
    }
    if (there == TILE && (!RING || slot0 + TILE <= p.capacity)) {
        const uchar *from[ADDRESSES];
#pragma unroll
        for (uint i = 0; i < ADDRESSES; i++) {
            from[i] = plane + ulong(slot0 + r0 + i * TOGETHER) * step + column;
        }
#pragma unroll(ADDRESSES == 1 ? 8 : 1)
        for (uint r = r0; r < TILE; r += ADDRESSES * TOGETHER) {
#pragma unroll
            for (uint i = 0; i < ADDRESSES; i++) {
                const uint row = r + i * TOGETHER;
                copy_async<16>(to + row * 128 + (in_block ^ row % 8) * 16, from[i], true);
                from[i] += ADDRESSES * TOGETHER * step;
            }
        }
    } else {
#pragma unroll 1
        for (uint r = r0; r < TILE; r += TOGETHER) {
            const bool is_there = r < there;
            uint slot = slot0 + (is_there ? r : 0);
            if (RING && slot >= p.capacity) {
                slot %= p.capacity;
            }
            copy_async<16>(to + r * 128 + (in_block ^ r % 8) * 16, plane + ulong(slot) * step + column, is_there);
        }
    }
}

// The beginning of the rows of the item's KV head.
inline ulong plane_of(const AttendParams &p, const Item &item, uint sequence) {
    return (sequence * p.row_sequence + rows_of_head(p, item.head)) * ROW;
}

// Waits for the buffer at the cursor, and copies chunk `i` of the tile that begins with key `first`: of its keys, then
// of its values.
inline void fill(const AttendParams &p, uint base, const uchar *k, const uchar *v, const uint *table, ulong plane,
                 Range keys, uint sequence, uint first, uint i, const Cursor &cursor) {
    const bool of_values = i >= CHUNKS;
    const Pages pages = pages_of(p, table, sequence);
    const uint entry = entry_of_lane(pages, first, keys.end);
    barrier_wait(base + AT_FREE + cursor.stage * 8, cursor.parity ^ 1);
    copy_chunk(p, (of_values ? v : k) + plane, keys, first, of_values ? i - CHUNKS : i, of_values,
               base + AT_RING + cursor.stage * CHUNK, pages.page(entry));
    if constexpr (COPIES_ARRIVE) {
        barrier_arrive_behind_copies(base + AT_FULL + cursor.stage * 8);
    } else {
        copies_commit();
        copies_wait<0>();
        show_to_products();
        barrier_arrive(base + AT_FULL + cursor.stage * 8);
    }
}

// The item's chunks, by a warp that only copies, in the order in which they are used: keys of tile i, values of tile
// i - `ahead`. `number` counts chunks of all items.
inline void produce(const AttendParams &p, const Shared &shared, const Item &item, const uchar *k, const uchar *v,
                    const uint *table, uint ahead, Cursor &cursor, uint &number) {
    const uint warp = threadIdx.x / 32 % 4, base = shared.address();
    each_segment(shared, [&](Range keys, uint sequence, bool) {
        const ulong plane = plane_of(p, item, sequence);
        const uint tiles = tiles_of(keys);
#pragma unroll 1
        for (uint tile = 0; tile < tiles + ahead; tile++) {
#pragma unroll 1
            for (uint i = tile < tiles ? 0 : CHUNKS; i < (tile < ahead ? CHUNKS : 2 * CHUNKS); i++) {
                if (number % COPYING_WARPS == warp) {
                    const uint first = keys.first + (i >= CHUNKS ? tile - ahead : tile) * TILE;
                    fill(p, base, k, v, table, plane, keys, sequence, first, i, cursor);
                }
                number++;
                cursor.next();
            }
        }
    });
}

// If all warps copy: the remaining chunks, for each tile its keys, then its values.
struct Copier {
    const AttendParams &p;
    const Shared &shared;
    const Item &item;
    const uchar *k;
    const uchar *v;
    const uint *table;
    // The next chunk: its segment, the keys from its tile on, its number in the tile, and among all.
    uint segment;
    Range keys;
    uint i;
    uint number;
    Cursor cursor;

    // Copies the first chunks.
    inline void begin() {
        if constexpr (!WARPGROUP_PRODUCTS) {
            number = i = 0;
            go_to(0);
#pragma unroll 1
            for (uint chunk = 0; chunk < COPIES_AHEAD; chunk++) {
                next();
            }
        }
    }

    // Copies the next chunk, if one remains and it is the warp's turn. Must be called before each use of a chunk.
    inline void next() {
        if constexpr (!WARPGROUP_PRODUCTS) {
            if (keys.first >= keys.end) {
                return;
            }
            if (number % COPYING_WARPS == threadIdx.x / 32) {
                const uint sequence = shared.tokens()[segment].sequence;
                const ulong plane = plane_of(p, item, sequence);
                fill(p, shared.address(), k, v, table, plane, keys, sequence, keys.first, i, cursor);
            }
            number++;
            cursor.next();
            i++;
            if (i == 2 * CHUNKS) {
                i = 0;
                keys.first += TILE;
                if (keys.first >= keys.end) {
                    go_to(segment + 1);
                }
            }
        }
    }

    // Advances to the first segment from `from` on that has keys.
    inline void go_to(uint from) {
        const uint count = shared.state().segments;
        keys = {0, 0};
        for (segment = from; segment < count; segment++) {
            keys = shared.keys()[segment];
            if (keys.first < keys.end) {
                return;
            }
        }
    }
};

// Copies the warpgroup's queries, or its half of the queries of both; zeros for rows that do not exist.
inline void copy_queries(const AttendParams &p, const Shared &shared, const Item &item, const uchar *q) {
    constexpr uint PIECES = HEAD_DIM / 8;
    constexpr uint COPIED = ROWS / 2 * PIECES;
    const uint first = threadIdx.x / 128 * (ROWS / 2), base = shared.address();
#pragma unroll 4
    for (uint i = threadIdx.x % 128; i < COPIED; i += 128) {
        const uint r = first + i / PIECES, piece = i % PIECES;
        const bool there = r < item.rows;
        copy_async<16>(base + piece / 8 * Q_BLOCK + r * 128 + (piece % 8 ^ r % 8) * 16,
                       q + row_of(p, item, there ? r : 0) * ROW + piece * 16, there);
    }
    copies_commit();
}

#endif
