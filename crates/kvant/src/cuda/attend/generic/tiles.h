// The tiles of keys of a work item, and their copies to shared memory, for attend_generic.cu.
#ifndef KVANT_CUDA_ATTEND_GENERIC_TILES_H
#define KVANT_CUDA_ATTEND_GENERIC_TILES_H
#include "attend/generic/layout.h"
#include "device/fragments.h"

// The rows of an item, as (first row, count) among the rows of a KV head.
inline Range rows_of(const AttendParams &p, uint item) {
    const ulong first = ulong(item) * p.item_rows;
    const ulong all = ulong(p.tokens) * p.group;
    return {uint(first), uint(min(first + p.item_rows, all))};
}

inline Range join(Range a, Range b) {
    return a.first >= a.end ? b : b.first >= b.end ? a : Range{min(a.first, b.first), max(a.end, b.end)};
}

// With page means, tiles begin at multiples of TILE: extends the range to the beginning of its first tile.
inline Range in_tiles(Range keys) {
    return {HAS_MEANS && keys.len() > 0 ? keys.first / TILE * TILE : keys.first, keys.end};
}

// The number of tiles of an item's cached keys, sequence by sequence; at least one, so that a block writes the output.
inline uint item_tiles(const AttendParams &p, const Buffers &b, uint item) {
    if (p.tokens == 1) {
        return max(tiles_of(in_tiles(visible(p, b.only))), 1u);
    }
    const Range rows = rows_of(p, item);
    const uint first = rows.first / p.group, end = (rows.end - 1) / p.group + 1;
    uint tiles = 0;
    for (uint i = first; i < end; i++) {
        const Token token = load_token(p, b.positions, b.sequence, b.lens, i);
        bool leads = token.sequence != NONE;
        for (uint j = first; leads && j < i; j++) {
            leads = b.sequence[j] != token.sequence;
        }
        if (!leads) {
            continue;
        }
        Range keys = visible(p, token);
        for (uint j = i + 1; j < end; j++) {
            if (b.sequence[j] == token.sequence) {
                keys = join(keys, visible(p, load_token(p, b.positions, b.sequence, b.lens, j)));
            }
        }
        tiles += tiles_of(in_tiles(keys));
    }
    return max(tiles, 1u);
}

// The keys of one sequence in a part: key indices are positions. Without pages
// first_row is the row of key 0, otherwise that of the head in each page.
struct Segment {
    Range keys;
    uint sequence;
    ulong first_row;
    Pages pages;
    // The offset of the head's mean in the plane of a page.
    uint mean;
    // The first key that any row sees, which may be after the first key of the range.
    uint seen_first;

    // The position of the key `at` keys behind `first`; NONE if no page holds it.
    inline uint position(const Buffers &b, uint first, uint at) const {
        const uint key = first + at;
        if (PAGE_SHIFT > 0) {
            return at < keys.end - first && pages.of(key) != NONE ? key : NONE;
        }
        return key;
    }
};

// Begins to copy rows of a plane: ROW bytes each, in steps of COPY; a row of shared memory is PITCH bytes.
template <uint ROW, uint COPY, uint PITCH, uint ELEMENT>
inline void copy_rows(const AttendParams &p, const void *plane, const Segment &segment, uint first, uint to) {
    constexpr uint CHUNKS = ROW / COPY;
    constexpr uint TOGETHER = max_of(THREADS / CHUNKS, 1);
    const uint lane = threadIdx.x % CHUNKS;
    const uchar *from = static_cast<const uchar *>(plane) + segment.first_row * ROW + lane * COPY;
    uint slot0 = first;
    if (RING) {
        slot0 %= p.capacity;
    }
    const uint row_bytes = p.row_slot * ROW;
#pragma unroll 4
    for (uint i = threadIdx.x / CHUNKS; i < TILE; i += TOGETHER) {
        bool there = i < segment.keys.end - first;
        uint slot = slot0 + i;
        ulong moved = 0;
        if (PAGE_SHIFT > 0) {
            // A row that no page holds is zeros.
            const uint page = there ? segment.pages.of(slot) : NONE;
            there = page != NONE;
            moved = there ? page_bytes_or_zero(page) : 0;
            slot %= PAGE_KEYS;
        }
        if (RING && slot >= p.capacity) {
            slot -= p.capacity;
            if (slot >= p.capacity) {
                slot %= p.capacity;
            }
        }
        const uchar *row = from + moved + ulong(slot) * row_bytes;
        const uint at = to + i * PITCH + lane * COPY;
        if constexpr (ELEMENT >= COPY) {
            copy_async<COPY>(at, row, there);
        } else if constexpr (ELEMENT == 4) {
            // A view may begin at any element.
#pragma unroll
            for (uint j = 0; j < COPY; j += 4) {
                copy_async<4>(at + j, row + j, there);
            }
        } else {
#pragma unroll
            for (uint j = 0; j < COPY; j += 2) {
                const ushort x = there ? *reinterpret_cast<const ushort *>(row + j) : 0;
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(at + j), "h"(x) : "memory");
            }
        }
    }
}

template <typename S>
inline void copy_planes(const AttendParams &p, const Planes &planes, const Segment &segment, uint first, uint to, uint high) {
    copy_rows<S::ROW, 16, S::PITCH, ALIGNED || S::QUANTISED ? 16 : S::BITS / 8>(p, planes.low, segment, first, to);
    if constexpr (S::HIGH_ROW > 0) {
        copy_rows<S::HIGH_ROW, S::HIGH_COPY, S::HIGH_PITCH, 16>(p, planes.high, segment, first, to + high);
    }
}

// Norms are halves and are copied for two keys at a time; both are in one page.
template <typename S>
inline void copy_half_norms(const Planes &planes, const Segment &segment, uint first, uint to) {
    constexpr uint ROW = 2 * S::BLOCKS;
    const uchar *norms = reinterpret_cast<const uchar *>(planes.norms);
    for (uint i = 2 * threadIdx.x; i < TILE; i += 2 * THREADS) {
        const uint page = i < segment.keys.end - first ? segment.pages.of(first + i) : NONE;
        const uchar *from = norms + page_bytes_or_zero(page) + (segment.first_row + slot_in_page(first + i)) * ROW;
        copy_async<2 * ROW>(to + i * ROW, from, page != NONE);
    }
}

// The means of values of a tile's pages.
inline void copy_means(const Planes &planes, const Segment &segment, uint first, uint to) {
    constexpr uint WORDS = MEAN_BYTES / 4;
    for (uint i = threadIdx.x; i < TILE_PAGES * WORDS; i += THREADS) {
        const uint at = i / WORDS * PAGE_KEYS;
        const uint page = at < segment.keys.end - first ? segment.pages.of(first + at) : NONE;
        const uchar *from = planes.means + page_bytes_or_zero(page) + segment.mean + i % WORDS * 4;
        copy_async<4>(to + i * 4, from, page != NONE);
    }
}

template <typename S, bool CENTRED>
inline void copy_norms(const AttendParams &p, const Planes &planes, const Segment &segment, uint first, uint to) {
    if constexpr (CENTRED) {
        copy_half_norms<S>(planes, segment, first, to);
    } else if constexpr (S::BLOCKS > 0) {
        copy_rows<4 * S::BLOCKS, 4 * S::BLOCKS, 4 * S::BLOCKS, 16>(p, planes.norms, segment, first, to);
    }
}

// Begins to copy the keys of a tile and the norms of its values. A missing tile is skipped.
inline void copy_keys(const AttendParams &p, const Buffers &b, const Shared &shared, const Segment &segment, uint tiles,
                      uint tile) {
    if (tile < tiles) {
        const uint first = segment.keys.first + tile * TILE, to = shared_address(shared.buffer(2 * tile));
        copy_planes<K>(p, b.k, segment, first, to, K_HIGH);
        copy_norms<K, K_CENTRED>(p, b.k, segment, first, to + K_NORMS);
        copy_norms<V, V_CENTRED>(p, b.v, segment, first, to + V_NORMS);
    }
    copies_commit();
}

inline void copy_values(const AttendParams &p, const Buffers &b, const Shared &shared, const Segment &segment, uint tiles,
                        uint tile) {
    if (tile < tiles) {
        const uint first = segment.keys.first + tile * TILE, to = shared_address(shared.buffer(2 * tile + 1));
        copy_planes<V>(p, b.v, segment, first, to, V_HIGH);
        if constexpr (V_CENTRED) {
            copy_means(b.v, segment, first, to + V_MEANS);
        }
    }
    copies_commit();
}

#endif
