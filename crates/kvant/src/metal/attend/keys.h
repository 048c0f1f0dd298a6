// Query rows, and the keys that each row sees.
//
// Query rows of KV head h are (token, head h·G .. (h+1)·G), counted token by token. A tile is some consecutive rows, of
// tokens of any sequences. Its keys are processed in passes, one for each sequence among its tokens. A pass is divided
// among p.splits threadgroups. A row sees a key of a pass if the sequences are equal and the key's position is within
// the row's bounds. For a key without a page, position_of returns NONE, which is outside all bounds.
#ifndef KVANT_ATTEND_KEYS_H
#define KVANT_ATTEND_KEYS_H
#include "attend/params.h"
#include "pages.h"
#include "vectors.h"

// A query row: x is its vector in q and out (token · H + head); y is its token's sequence; z and w are the first and
// the last position that it sees in the current pass, none if z > w.
typedef uint4 Row;

constant constexpr uint NONE = 0xFFFFFFFF;

inline bool is_there(Row row) {
    return row.x != NONE;
}

// Row `i` of the tile, and its position. A row that does not exist, or whose sequence does not, has sequence NONE and
// never sees a key.
inline Row row_of(uint tile, uint i, uint kv_head, device const uint *positions, device const uint *sequences,
                  constant MetalAttendParams &p, thread uint &position) {
    Row row = uint4(NONE, NONE, NONE, 0);
    // Row numbers fit into 32 bits; the first row of a tile exists.
    const uint start = tile * p.tile_rows;
    position = 0;
    if (i < p.tile_rows && i < p.tokens * p.group - start) {
        const uint token = (start + i) / p.group;
        row.x = token * p.heads + kv_head * p.group + (start + i) % p.group;
        position = positions[token];
        if (sequences[token] < p.sequences) {
            row.y = sequences[token];
        }
    }
    return row;
}

inline uint window_start(uint position, uint window) {
    return position >= window ? position - window + 1 : 0;
}

// The positions of the call's span for a token at `position`: from x on, below y.
inline uint2 span_of(uint position) {
    const uint page = position >> PAGE_SHIFT, recent = (page > 0 ? page - 1 : 0) << PAGE_SHIFT;
    switch (SPAN) {
    case FIRST_PAGE: return uint2(0, min(1u << PAGE_SHIFT, recent));
    case SEALED_PAGES: return uint2(1u << PAGE_SHIFT, recent);
    case RECENT_PAGES: return uint2(recent, NONE);
    default: return uint2(0, NONE);
    }
}

// The bounds of a row for the keys of `sequence`, which has `len` keys.
inline Row seeing(Row row, uint position, uint sequence, uint len, constant MetalAttendParams &p) {
    const uint stored = RING ? len : min(len, p.capacity);
    if (row.y == sequence && stored > 0) {
        const uint held = stored > p.capacity ? stored - p.capacity : 0;
        const uint2 span = span_of(position);
        const uint first = max(max(held, window_start(position, p.window)), span.x), end = min(stored, span.y);
        const uint last = min(position, end - 1);
        if (first < end && first <= last) {
            return uint4(row.xy, first, last);
        }
    }
    return uint4(row.xy, NONE, 0);
}

// The part of `count` keys that belongs to a split: begin and end.
inline uint2 part_of(uint count, uint split, uint tile, constant MetalAttendParams &p) {
    // 32-bit divisions.
    const uint share = max(count / p.splits + (count % p.splits != 0 ? 1 : 0), p.min_keys);
    const ulong keys = (ulong(share / tile) + (share % tile != 0 ? 1 : 0)) * tile;
    return uint2(uint(min(ulong(count), split * keys)), uint(min(ulong(count), (split + 1) * keys)));
}

// The keys of a sequence and KV head, from position `first` on.
struct CachedKeys {
    Planes k;
    Planes v;
    ulong row;     // the row of slot 0, without pages
    uint stride;   // rows between slots
    uint sequence;
    uint first;
    uint slot;     // the slot of position `first`
    uint capacity;
    uint kv_head;
    PageTable pages;

    uint position_of(uint i) const {
        return PAGED && !place_of(i).held ? NONE : first + i;
    }
    RowPlace place_of(uint i) const {
        if (PAGED) {
            return place_in_page(pages, sequence, kv_head, first + i, PAGE_SHIFT);
        }
        // The keys wrap around the ring at most once.
        const uint before_end = capacity - slot;
        return RowPlace{0, row + ulong(i < before_end ? slot + i : i - before_end) * stride, true};
    }
    // Whether `count` keys from key i on are `stride` rows apart: within a page, or on one side of a ring's end.
    bool are_together(uint i, uint count) const {
        if (PAGED) {
            return 1u << PAGE_SHIFT >= count;
        }
        const uint before_end = capacity - slot;
        return i >= before_end || count <= before_end - i;
    }
    float4 key4(RowPlace at, uint j, uint head_dim) const {
        return K_QUANTISED ? load_row4(shifted(k, at.bytes, K_CODEC), at.row, j, head_dim, K_CODEC)
                           : load4(k.low + at.bytes, at.row * head_dim + j, 4, K_CODEC, K_ALIGNED);
    }
    // The means of the page that holds a key; codes are relative to them.
    float4 key_mean4(RowPlace at, uint j, uint head_dim) const {
        return load_mean4(k.means + at.bytes + kv_head * mean_bytes(head_dim), j, head_dim);
    }
    float4 value_mean4(RowPlace at, uint j, uint head_dim) const {
        return load_mean4(v.means + at.bytes + kv_head * mean_bytes(head_dim), j, head_dim);
    }
    float4 value4(RowPlace at, uint j, uint head_dim) const {
        return V_QUANTISED ? load_row4(shifted(v, at.bytes, V_CODEC), at.row, j, head_dim, V_CODEC)
                           : load4(v.low + at.bytes, at.row * head_dim + j, 4, V_CODEC, V_ALIGNED);
    }
};

// The first position of a pass over keys from position `first` on. With pages it is a multiple of `tile`, so that a
// tile has whole pages, or part of one. Rows do not see earlier positions.
inline uint begin_of_pass(uint first, uint tile) {
    return PAGED ? first / tile * tile : first;
}

inline CachedKeys keys_of(Planes k, Planes v, device const uint *table, uint sequence, uint kv_head, uint first,
                          constant MetalAttendParams &p) {
    const ulong row = TOKEN_MAJOR ? ulong(sequence) * p.capacity * p.kv_heads + kv_head
                                  : (ulong(sequence) * p.kv_heads + kv_head) * p.capacity;
    return CachedKeys{k, v, row, TOKEN_MAJOR ? p.kv_heads : 1, sequence, first, RING ? first % p.capacity : first,
                  p.capacity, kv_head, PageTable{table, p.page_width, p.page_entries}};
}

#endif
