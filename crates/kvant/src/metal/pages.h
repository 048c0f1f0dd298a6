// Locates a vector in a layer with pages: layer.rs.
#ifndef KVANT_PAGES_H
#define KVANT_PAGES_H
#include <metal_stdlib>
using namespace metal;

// The row of a vector in each plane, where row 0 is `bytes` bytes after its start.
struct RowPlace {
    ulong bytes;
    ulong row;
    bool held;
};

// The unit of page tables in bytes: an entry is the distance of a page from the start of the pool's memory.
constant constexpr ulong PAGE_UNIT = 256;

// [sequences, width] values; one below `entries` is a page.
struct PageTable {
    device const uint *table;
    uint width;
    uint entries;
};

// A page holds 2^shift positions. The table is not trusted: a position without a page is not held.
inline RowPlace place_in_page(PageTable pages, uint sequence, uint head, uint position, uint shift) {
    const uint index = position >> shift;
    if (index >= pages.width) {
        return RowPlace{0, 0, false};
    }
    const uint entry = pages.table[ulong(sequence) * pages.width + index];
    if (entry >= pages.entries) {
        return RowPlace{0, 0, false};
    }
    const ulong bytes = entry * PAGE_UNIT, row = (head << shift) + (position & ((1u << shift) - 1));
    return RowPlace{bytes, row, true};
}

#endif
