// Shared parts of attend_prefill.cu: division of the work, layout of shared memory, and barriers.
#ifndef KVANT_CUDA_ATTEND_PREFILL_LAYOUT_H
#define KVANT_CUDA_ATTEND_PREFILL_LAYOUT_H
#include "attend/work.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "device/mbarrier.h"
#include "device/ring_cursor.h"
#include "device/uniform.h"

constexpr bool HALF = DTYPE == F16;
constexpr uint ROW = HEAD_DIM * 2;
constexpr uint CONSUMERS = 256;
// Warps that copy in turn: the warps that only copy, or all warps.
constexpr uint COPYING_WARPS = WARPGROUP_PRODUCTS ? WARPS - CONSUMERS / 32 : WARPS;
// Whether copies signal the barrier themselves when a buffer is full, and the warps that multiply make the buffer
// visible to products of warpgroups. Otherwise a warp that copies waits for its copies and makes them visible, which is
// faster unless buffers must be filled sooner.
constexpr bool COPIES_ARRIVE = !WARPGROUP_PRODUCTS || HEAD_DIM == 64 || HEAD_DIM == 512;
// Both consumers have the same rows. Each computes the scores of half of a tile's keys, and half of the output's
// coordinates.
constexpr bool SHARED_ROWS = HEAD_DIM == 512;
// Keys of a tile whose scores a warpgroup computes.
constexpr uint SCORED = SHARED_ROWS ? TILE / 2 : TILE;
constexpr uint ROWS = SHARED_ROWS ? 64 : 128;
constexpr uint COLUMNS = HEAD_DIM < 512 ? HEAD_DIM : 128;
constexpr uint CHUNKS = HEAD_DIM / COLUMNS;
constexpr uint CHUNK = TILE * COLUMNS * 2;
// Coordinates of a product of values; products of a warpgroup for a chunk of values.
constexpr uint WIDTH = SHARED_ROWS || HEAD_DIM == 64 ? 64 : 128;
constexpr uint PARTS = SHARED_ROWS ? 1 : COLUMNS / WIDTH;
// Bytes of a block of 64 columns.
constexpr uint BLOCK = TILE * 128;
constexpr uint Q_BLOCK = ROWS * 128;
static_assert(TILE % 16 == 0, "attend: tiles are made of products");
// With SHARED_ROWS, warpgroups exchange weights, in pieces of 16 bytes per thread, and one number per row.
constexpr uint WEIGHT_PIECES = (SCORED / 4 + 3) / 4;
constexpr uint WEIGHTS = SHARED_ROWS ? WEIGHT_PIECES * CONSUMERS * 16 : 0;
constexpr uint NUMBERS = SHARED_ROWS ? 2 * ROWS * 4 : 0;
// If all warps copy: chunks that are copied ahead of the chunk in use. With more than two stages it is one fewer than
// possible, so that a warp that copies never waits for a warp that is one chunk behind.
constexpr uint COPIES_AHEAD = STAGES > 2 ? STAGES - 2 : 1;
// Each of the four warps that only copy fills or checks a buffer at most one lap late. Consumers hold the last chunk of
// a tile's keys and all chunks of the previous tile's values. If all warps copy, they may hold all chunks of a tile's
// values while one copies the next chunk.
static_assert(WARPGROUP_PRODUCTS ? STAGES >= 4 && STAGES > CHUNKS : STAGES > 1 && COPIES_AHEAD >= CHUNKS,
              "attend: enough buffers, or warps wait forever");

// Shared memory, in bytes; prefill/mod.rs computes the same sum.
constexpr uint AT_RING = ROWS * ROW;
constexpr uint AT_FULL = AT_RING + STAGES * CHUNK;
constexpr uint AT_FREE = AT_FULL + STAGES * 8;
constexpr uint AT_ITEM_FULL = AT_FREE + STAGES * 8;
constexpr uint AT_ITEM_FREE = AT_ITEM_FULL + ITEMS * 8;
constexpr uint AT_ITEMS = AT_ITEM_FREE + ITEMS * 8;
constexpr uint ITEM_BYTES = TOKENS * 20 + 32;
constexpr uint AT_WEIGHTS = AT_ITEMS + ITEMS * ITEM_BYTES;
constexpr uint AT_NUMBERS = AT_WEIGHTS + WEIGHTS;
static_assert(AT_NUMBERS + NUMBERS == SHARED_BYTES, "attend: the shared memory that Rust asks for");

// The block's data of an item.
struct ItemState {
    // Its number (Item); NONE after the last item.
    uint number;
    // Whether the item is processed again because a result was not finite: some values may be infinite or NaN.
    bool careful;
    // The number of sequences in `keys` that may have keys.
    uint segments;
    // 1 if the item must be processed again.
    uint failed;
    // Whether the block is the last to arrive among those that share the item.
    bool last;
};

struct Shared {
    uchar *base;
    // The item's index among the ITEMS.
    uint place;

    uint address() const {
        return shared_address(base);
    }
    // The tokens of the item; for the first token of each sequence, the keys that any of the sequence's tokens sees.
    Token *tokens() const {
        return reinterpret_cast<Token *>(item());
    }
    Range *keys() const {
        return reinterpret_cast<Range *>(item() + TOKENS * 12);
    }
    ItemState &state() const {
        return *reinterpret_cast<ItemState *>(item() + TOKENS * 20);
    }
    uchar *item() const {
        return base + AT_ITEMS + place * ITEM_BYTES;
    }
    // Piece `piece` of a thread's weights.
    uint4 *weights(uint piece, uint thread) const {
        return reinterpret_cast<uint4 *>(base + AT_WEIGHTS) + piece * CONSUMERS + thread;
    }
    // A warpgroup's number of row 0.
    float *numbers(uint group) const {
        return reinterpret_cast<float *>(base + AT_NUMBERS) + group * ROWS;
    }
};

struct Item {
    uint head;
    // Index of the item's first row among the rows of the KV head.
    uint first_row;
    uint rows;
    uint first_token;
    uint tokens;
    // The index of the item among all items of all heads, and of this block among the blocks that share the item.
    uint pair;
    uint part;

    // The last items come first: they see more keys than others.
    Item(const AttendParams &p, uint work) {
        pair = SPLIT ? work / p.splits : work;
        part = SPLIT ? work % p.splits : 0;
        head = pair % p.kv_heads;
        first_row = (p.items - 1 - pair / p.kv_heads) * ROWS;
        rows = min(p.tokens * p.group - first_row, ROWS);
        first_token = first_row / p.group;
        tokens = (first_row + rows - 1) / p.group + 1 - first_token;
    }
};

// The next chunk of the ring.
using Cursor = RingCursor<STAGES>;

// Waits for the warps of one warpgroup, or of both consumers.
inline void meet(uint barrier, uint threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Waits for all warps that have the same queries.
inline void meet_rows() {
    if (SHARED_ROWS) {
        meet(1, CONSUMERS);
    } else {
        meet(2 + of_warp(threadIdx.x / 128), 128);
    }
}

// With SHARED_ROWS: waits for the warp of the other warpgroup that has the same rows.
inline void meet_partner() {
    meet(4 + threadIdx.x / 32 % 4, 64);
}

// Products of warpgroups may read the results of earlier ordinary stores and copies.
inline void show_to_products() {
    if constexpr (WARPGROUP_PRODUCTS) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
}

// The row of q and of out of a row of the item.
inline ulong row_of(const AttendParams &p, const Item &item, uint r) {
    const uint row = item.first_row + r;
    return (ulong(row / p.group) * p.kv_heads + item.head) * p.group + row % p.group;
}

// Shortens the segments to part `part` of all tiles.
inline void keep_share(const AttendParams &p, const Shared &shared, uint part) {
    const uint count = shared.state().segments;
    uint tiles = 0;
    for (uint i = 0; i < count; i++) {
        tiles += tiles_of(shared.keys()[i]);
    }
    const EvenSplit split(tiles, p.splits);
    const Range own = {split.first(part), split.first(part + 1)};
    uint before = 0;
    for (uint i = 0; i < count; i++) {
        const Range keys = shared.keys()[i];
        const uint of_segment = tiles_of(keys);
        const uint first = min(max(own.first, before) - before, of_segment);
        const uint end = min(max(own.end, before) - before, of_segment);
        shared.keys()[i] =
            first < end ? Range{keys.first + first * TILE, min(keys.first + end * TILE, keys.end)} : Range{NONE, 0};
        before += of_segment;
    }
}

// Finds the item's tokens and keys, by at least TOKENS threads; this one is `thread`. They meet by meet().
template <typename Meet>
inline void load_item(const AttendParams &p, const Shared &shared, const Item &item, const uint *positions,
                      const uint *sequence, const uint *lens, uint thread, Meet meet) {
    Token token = {0, NONE, 0};
    if (thread < TOKENS) {
        if (thread < item.tokens) {
            token = load_token(p, positions, sequence, lens, item.first_token + thread);
        }
        shared.tokens()[thread] = token;
        shared.keys()[thread] = {NONE, 0};
    }
    if (thread == 0) {
        shared.state().segments = 0;
        shared.state().failed = 0;
    }
    meet();
    if (token.sequence != NONE) {
        uint first = 0;
        while (shared.tokens()[first].sequence != token.sequence) {
            first++;
        }
        const Range seen = visible(p, token);
        if (seen.first < seen.end) {
            atomicMin(&shared.keys()[first].first, in_units(seen).first);
            atomicMax(&shared.keys()[first].end, seen.end);
            atomicMax(&shared.state().segments, first + 1);
        }
    }
    meet();
    if (SPLIT) {
        if (thread == 0) {
            keep_share(p, shared, item.part);
        }
        meet();
    }
}

// Over pages: each lane looks up one unit of 16 keys of a tile for its whole warp. The entry of this lane's unit, in
// the tile that begins with key `first` of a segment that ends at `end`; NONE if the unit does not exist.
inline uint entry_of_lane(const Pages &pages, uint first, uint end) {
    const uint at = threadIdx.x % 32 * 16;
    return PAGE_SHIFT > 0 && at < TILE && at < end - first ? pages.entry(first + at) : NONE;
}

// Calls use(keys, sequence, last) for each sequence of the item that has keys; `last` if it is known to be the last.
template <typename Use>
inline void each_segment(const Shared &shared, Use use) {
    const uint count = of_warp(shared.state().segments);
#pragma unroll 1
    for (uint i = 0; i < count; i++) {
        const Range keys = {of_warp(shared.keys()[i].first), of_warp(shared.keys()[i].end)};
        if (keys.first < keys.end) {
            use(keys, shared.tokens()[i].sequence, i + 1 == count);
        }
    }
}

#endif
