// The keys that a block of a cluster has, and their copies to its shared memory, for attend_short_quantised.cu.
//
// The cluster's blocks divide the keys evenly. A block's keys are in one stretch per warp, which the warp copies at
// once. A product takes two keys of every stretch.
#ifndef KVANT_CUDA_ATTEND_SHORT_QUANTISED_COPIES_H
#define KVANT_CUDA_ATTEND_SHORT_QUANTISED_COPIES_H
#include "attend/work.h"
#include "device/cluster.h"
#include "device/mbarrier.h"

static_assert(WARPS == CLUSTER, "attend: what a warp has goes to the block of its number");
static_assert(TILE == 16, "attend: a product takes two keys of eight stretches");

// The keys of a block and of a warp of it.
struct Own {
    // Keys of the block, and keys of a stretch: an even number.
    uint count;
    uint length;
    // Row and slot of the block's first key; rows of the warp's stretch, and the slot of its first row.
    ulong plane;
    uint slot;
    uint rows;
    uint slot_of_rows;
    // Over pages: the pages of the block's keys, and the pages of the stretch; `plane` is the head's first row in a
    // page, and slots are positions.
    EarlyPages<CLUSTER * WARPS * TILE> pages;
    RowsInPages in_pages;

    Own(const AttendParams &p, const EarlyPages<CLUSTER * WARPS * TILE> &pages, const Token &token, uint head)
        : pages(pages), in_pages(pages, 0, 0) {
        const bool exists = token.sequence != NONE;
        const Range seen = exists ? visible(p, token) : Range{0, 0};
        const uint rank = blockIdx.x % CLUSTER;
        const EvenSplit line(tiles_of(seen), CLUSTER);
        const uint first = min(line.first(rank) * TILE, seen.len());
        count = min(line.first(rank + 1) * TILE, seen.len()) - first;
        length = (count + TILE - 1) / TILE * 2;
        plane = exists ? token.sequence * p.row_sequence + rows_of_head(p, head) : 0;
        slot = RING ? (seen.first + first) % p.capacity : seen.first + first;
        const uint before = threadIdx.x / 32 * length;
        rows = before < count ? min(count - before, length) : 0;
        slot_of_rows = slot_of(p, before);
        if (PAGE_SHIFT > 0) {
            in_pages = RowsInPages(pages, slot_of_rows, rows);
        }
    }
    // Rows of the stretch that are copied.
    uint held() const {
        return PAGE_SHIFT > 0 ? in_pages.held() : rows;
    }
    // The slot of the block's key `i`; arbitrary for a missing key.
    uint slot_of(const AttendParams &p, uint i) const {
        const uint at = slot + i;
        return RING && at >= p.capacity ? at - p.capacity : at;
    }
};

// The address of a warp's stretch in a plane; over pages, of the head's rows in a page.
template <uint ROW>
inline const uchar *stretch_of(const AttendParams &p, const uchar *plane, const Own &own) {
    if (PAGE_SHIFT > 0) {
        return plane + own.plane * ROW;
    }
    return plane + (own.plane + ulong(own.slot_of_rows) * p.row_slot) * ROW;
}

// Copies the rows of a warp's stretch, ROW bytes each, to consecutive rows in shared memory.
template <uint ROW>
inline void copy(const AttendParams &p, const uchar *from, const Own &own, uint to, uint barrier) {
    // A copy ends at the end of a ring, and the next begins at its beginning.
    const uint left = p.capacity - own.slot_of_rows;
    if constexpr (PAGE_SHIFT > 0) {
        own.in_pages.each_page([&](uint row, uint page, uint slot, uint rows) {
            copy_bulk(to + row * ROW, from + page_bytes_or_zero(page) + slot * ROW, rows * ROW, barrier);
        });
    } else if constexpr (IN_ORDER) {
        const uint run = RING ? min(own.rows, left) : own.rows;
        if (run > 0) {
            copy_bulk(to, from, run * ROW, barrier);
        }
        if (RING && run < own.rows) {
            copy_bulk(to + run * ROW, from - ulong(own.slot_of_rows) * ROW, (own.rows - run) * ROW, barrier);
        }
    } else {
        // Other heads' rows are in between.
        const ulong step = ulong(p.row_slot) * ROW;
#pragma unroll 1
        for (uint row = 0; row < own.rows; row++) {
            copy_bulk(to + row * ROW, from + (ulong(row) - (RING && row >= left ? p.capacity : 0)) * step, ROW, barrier);
        }
    }
}

// Prefetches what copy() will copy to L2. The previous kernel may still write some of it; L2 is coherent, and nothing
// is read.
template <uint ROW>
inline void prefetch_rows(const AttendParams &p, const uchar *from, const Own &own) {
    if (PAGE_SHIFT > 0) {
        own.in_pages.each_page([&](uint, uint page, uint slot, uint rows) {
            prefetch_bulk(from + page_bytes_or_zero(page) + slot * ROW, rows * ROW);
        });
    } else if (own.rows > 0 && IN_ORDER && (!RING || own.slot_of_rows + own.rows <= p.capacity)) {
        prefetch_bulk(from, own.rows * ROW);
    }
}

#endif
