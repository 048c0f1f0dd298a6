// Page tables of layers of a pool (PAGE_SHIFT > 0): layer.rs.
//
// A table is [sequences, width] entries, one for each page of a sequence. A page holds PAGE_KEYS positions and begins
// at a multiple of PAGE_KEYS. Within a page, each plane is [Hk, PAGE_KEYS] rows; page_bytes() is the distance of a
// page's planes from those of page 0. Entries are untrusted: an entry of at least the layer's number of entries is not
// a page.
#ifndef KVANT_CUDA_DEVICE_PAGES_H
#define KVANT_CUDA_DEVICE_PAGES_H
#include "device/convert.h"

// Unit of the entries, in bytes: layer.rs.
constexpr uint PAGE_UNIT = 256;
constexpr uint PAGE_KEYS = 1u << PAGE_SHIFT;
constexpr uint NO_PAGE = 0xFFFFFFFF;

// The page of a sequence that holds a position, and the position's slot in it.
template <typename Position> inline Position page_index(Position position) {
    return position >> PAGE_SHIFT;
}
template <typename Position> inline uint slot_in_page(Position position) {
    return uint(position) % PAGE_KEYS;
}

// The entries of a sequence, in a table of `width` entries for each.
inline const uint *entries_of(const uint *table, uint width, uint sequence) {
    return table + ulong(sequence) * width;
}

// Whether an entry is a page: a number below `count`.
inline bool is_page(uint entry, uint count) {
    return entry < count;
}

// The page of an entry, or NO_PAGE.
inline uint page_of(uint entry, uint count) {
    return is_page(entry, count) ? entry : NO_PAGE;
}

// The distance of a page's planes from those of page 0; 0 without pages.
inline ulong page_bytes(uint page) {
    return PAGE_SHIFT == 0 ? 0 : ulong(page) * PAGE_UNIT;
}

// As page_bytes(); 0 for NO_PAGE, whose rows are not read.
inline ulong page_bytes_or_zero(uint page) {
    return page == NO_PAGE ? 0 : page_bytes(page);
}

#endif
