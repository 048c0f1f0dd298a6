// How the blocks of an attention launch divide the work.
//
// A work item is up to `item_rows` query rows of one KV head. Rows are numbered token by token, the query heads of a
// group within a token. The keys of an item are those that any of its tokens sees, in tiles of TILE.
//
// With `splits` = 0 the tiles of all items and heads are concatenated, and the blocks share them evenly. So a batch of
// mixed lengths, or one long sequence, keeps all blocks equally busy, whatever lengths the device finds. Otherwise the
// tiles of every item and head are divided among `splits` blocks. A block that has a part of an item stores its softmax
// state (state.h), and the last block merges the states.
//
// If blocks form clusters, a cluster takes the role of a block: its blocks divide each of its parts among them.
#ifndef KVANT_CUDA_ATTEND_WORK_H
#define KVANT_CUDA_ATTEND_WORK_H
#include "device/arrivals.h"
#include "attend/softmax.h"
#include "device/convert.h"
#include "device/pages.h"

struct AttendParams {
    // Rows of the planes between sequences and between KV heads.
    ulong row_sequence;
    ulong row_head;
    // Rows between slots.
    uint row_slot;
    uint tokens;
    uint sequences;
    // KV heads or, with SHARES > 1, their shares: each counts as a KV head, and `group` is its query heads.
    uint kv_heads;
    // Query heads of a KV head.
    uint group;
    uint capacity;
    uint window;
    // Query rows of an item, items of a KV head, and blocks that share an item and head (0: all blocks share all items
    // evenly).
    uint item_rows;
    uint items;
    uint splits;
    float scale;
    float softcap;
    // Entries of a sequence in the page table; an entry of at least page_entries is no page.
    uint page_width;
    uint page_entries;
};

// No sequence, position or page.
constexpr uint NONE = 0xFFFFFFFF;
static_assert(NONE == NO_PAGE, "attend: page_of() returns NONE");

// The first row of a KV head, counted from the first row of head 0. SHARES successive heads have the same rows.
inline ulong rows_of_head(const AttendParams &p, uint head) {
    return ulong(head / SHARES) * p.row_head;
}

// The query heads of a token.
inline uint query_heads(const AttendParams &p) {
    return p.kv_heads * p.group - p.kv_heads / SHARES * LACKING;
}

// The rows of q, and of the output, that a token has for a KV head or share. The last share of a KV head has LACKING
// rows fewer than the others: 0 or 1. A lacking row is computed as a copy of the previous row, and not written.
struct QueryRows {
    ulong first;
    uint count;

    QueryRows(const AttendParams &p, uint token, uint head)
        : first(ulong(token) * query_heads(p) + head * p.group - head / SHARES * LACKING),
          count(head % SHARES == SHARES - 1 ? p.group - LACKING : p.group) {}

    bool has(uint r) const {
        return LACKING == 0 || r < count;
    }
    ulong at(uint r) const {
        return first + (has(r) ? r : count - 1);
    }
};

constexpr uint THREADS = 32 * WARPS;

// Maximum items whose tiles blocks share evenly.
constexpr uint MAX_SHARED_ITEMS = 256;

// Maximum states that are merged at once.
constexpr uint MAX_MERGE = 24;

struct Range {
    uint first;
    uint end;

    uint len() const {
        return end - first;
    }
};

// Position and sequence of a token, and the length of that sequence; NONE for a sequence that does not exist.
struct Token {
    uint position;
    uint sequence;
    uint len;
};

inline Token load_token(const AttendParams &p, const uint *positions, const uint *sequence, const uint *lens, uint token) {
    Token t = {positions[token], sequence[token], 0};
    if (t.sequence < p.sequences) {
        t.len = lens[t.sequence];
    } else {
        t.sequence = NONE;
    }
    return t;
}

// The part of the visible positions to which a launch attends: `PageSpan` of ops/attend.rs. Values other than
// ALL_POSITIONS need pages. EXACT_PAGES, the first page and the recent ones, needs sequences with one token each. Key
// ranges, and everything that they index, then count positions without the gap of pages between the first page and the
// recent ones.
constexpr uint ALL_POSITIONS = 0;
constexpr uint FIRST_PAGE = 1;
constexpr uint SEALED_PAGES = 2;
constexpr uint RECENT_PAGES = 3;
constexpr uint EXACT_PAGES = 4;

// The pages between the first one and the recent ones, which EXACT_PAGES leaves out.
inline uint gap_of(Token token) {
    return SPAN == EXACT_PAGES ? max(page_index(token.position), 2u) - 2 : 0;
}

// A position, or the end of a range, without the gap.
inline uint without_gap(uint position, uint gap) {
    if (position <= PAGE_KEYS) {
        return position;
    }
    return position <= (gap + 1) << PAGE_SHIFT ? PAGE_KEYS : position - (gap << PAGE_SHIFT);
}

// The positions that a token sees, of those in the launch's span. Both ends grow with the token's position, except for
// EXACT_PAGES.
inline Range visible(const AttendParams &p, Token token) {
    const uint after = token.position == NONE ? NONE : token.position + 1;
    const uint window_first = after > p.window ? after - p.window : 0;
    uint end = min(token.len, after);
    // Over pages the capacity is the number of positions for which the page table has entries.
    const uint held = PAGE_SHIFT == 0 && token.len > p.capacity ? token.len - p.capacity : 0;
    if (!RING) {
        end = min(end, p.capacity);
    }
    uint first = max(held, window_first);
    if (SPAN == EXACT_PAGES) {
        const uint gap = gap_of(token);
        first = without_gap(first, gap);
        end = without_gap(end, gap);
    } else if (SPAN != ALL_POSITIONS) {
        // The first position of the page before the token's page, or of page 0.
        const uint recent = (max(page_index(token.position), 1u) - 1) << PAGE_SHIFT;
        first = max(first, SPAN == FIRST_PAGE ? 0 : SPAN == SEALED_PAGES ? PAGE_KEYS : recent);
        end = min(end, SPAN == FIRST_PAGE ? min(PAGE_KEYS, recent) : SPAN == SEALED_PAGES ? recent : NONE);
    }
    return {min(first, end), end};
}

// The pages of a sequence (device/pages.h).
struct Pages {
    const uint *entries;
    // An entry of at least `count` is no page.
    uint count;
    uint gap;

    // The entry of page `index`.
    inline uint at(uint index) const {
        return entries[SPAN == EXACT_PAGES && index > 0 ? index + gap : index];
    }
    // entry(): the entry of a position below p.capacity. The next function: the page of an entry, NONE if it is no
    // page.
    inline uint entry(uint position) const {
        return at(page_index(position));
    }
    inline uint page(uint entry) const {
        return page_of(entry, count);
    }
    // The page that holds a position below p.capacity; NONE if none does.
    inline uint of(uint position) const {
        return page(entry(position));
    }
    inline bool hold_any(Range keys) const {
        const uint last = page_index(keys.end - 1);
        for (uint i = page_index(keys.first); keys.len() > 0 && i <= last; i++) {
            if (page(at(i)) != NONE) {
                return true;
            }
        }
        return false;
    }
};

// The pages of a sequence that exists; `gap` is the gap of its token.
inline Pages pages_of(const AttendParams &p, const uint *table, uint sequence, uint gap = 0) {
    return {entries_of(table, p.page_width, sequence), p.page_entries, gap};
}

// As Pages, for the first MAX_POSITIONS positions that a token may see: the lanes of a warp hold the entries, so all
// lanes call entry() and of() together.
template <uint MAX_POSITIONS>
struct EarlyPages {
    static constexpr uint COUNT = PAGE_SHIFT == 0 ? 1 : (MAX_POSITIONS / PAGE_KEYS + 1 + 31) / 32;
    // Lane i has entries i, i + 32, and so on, of the table from `first` on; NONE for those after the table's end.
    uint first;
    uint entries[COUNT];
    uint count;

    inline void load(const AttendParams &p, const uint *table, uint sequence, uint from, uint gap) {
        first = from;
        count = p.page_entries;
#pragma unroll
        for (uint i = 0; i < COUNT; i++) {
            uint at = from + i * 32 + threadIdx.x % 32;
            at += SPAN == EXACT_PAGES && at > 0 ? gap : 0;
            entries[i] = at < p.page_width ? entries_of(table, p.page_width, sequence)[at] : NONE;
        }
    }
    inline bool has(uint position) const {
        return page_index(position) - first < COUNT * 32;
    }
    // NONE if no lane has it.
    inline uint entry(uint position) const {
        const uint at = page_index(position) - first;
        uint found = NONE;
#pragma unroll
        for (uint i = 0; i < COUNT; i++) {
            const uint of_lane = __shfl_sync(0xFFFFFFFF, entries[i], at % 32);
            found = at / 32 == i ? of_lane : found;
        }
        return found;
    }
    inline uint page(uint entry) const {
        return page_of(entry, count);
    }
    inline uint of(uint position) const {
        return page(entry(position));
    }
};

// As load_token, with the entries of the first pages that the token may see. These depend on the token's position and
// sequence. In the most likely case, sequence 0 and a first page that is the first of the span, no load waits for
// another: all are issued at once.
template <uint MAX_POSITIONS>
inline Token load_token_and_pages(const AttendParams &p, const uint *positions, const uint *sequence, const uint *lens,
                                  const uint *table, uint token, EarlyPages<MAX_POSITIONS> &pages) {
    const uint len = lens[0];
    const Token t = {positions[token], sequence[token], len};
    if (PAGE_SHIFT > 0) {
        constexpr uint LIKELY = SPAN == SEALED_PAGES ? 1 : 0;
        pages.load(p, table, 0, LIKELY, gap_of(t));
        const uint first = page_index(visible(p, {t.position, 0, NONE}).first);
        if ((t.sequence > 0 || first != LIKELY) && t.sequence < p.sequences) {
            pages.load(p, table, t.sequence, first, gap_of(t));
        }
    }
    return t.sequence > 0 ? load_token(p, positions, sequence, lens, token) : t;
}

// Over pages, units of 16 keys begin at multiples of 16, so that no unit belongs to two pages. Extends a range to the
// beginning of its first unit.
inline Range in_units(Range keys) {
    return {PAGE_SHIFT == 0 ? keys.first : keys.first & ~15u, keys.end};
}

// Up to 16 consecutive positions of a sequence, in one page or in two.
struct RowsInPages {
    uint page[2];
    uint count[2];
    // The first row's place in its page.
    uint slot;

    // `pages` is Pages or EarlyPages; the lanes of a warp have the same arguments.
    template <typename Of>
    inline RowsInPages(const Of &pages, uint position, uint rows) : slot(slot_in_page(position)) {
        count[0] = min(rows, PAGE_KEYS - slot);
        count[1] = rows - count[0];
        page[0] = count[0] > 0 ? pages.of(position) : NONE;
        page[1] = count[1] > 0 ? pages.of(position + count[0]) : NONE;
    }
    inline bool hold(uint row) const {
        return row < count[0] ? page[0] != NONE : row < count[0] + count[1] && page[1] != NONE;
    }
    // Rows that pages hold.
    inline uint held() const {
        return (page[0] != NONE ? count[0] : 0) + (page[1] != NONE ? count[1] : 0);
    }
    // Calls use(row, page, slot, rows) for the rows in each page.
    template <typename Use> inline void each_page(Use use) const {
        if (page[0] != NONE) {
            use(0u, page[0], slot, count[0]);
        }
        if (page[1] != NONE) {
            use(count[0], page[1], 0u, count[1]);
        }
    }
};

// Whether the token sees any key. The positions that it may see are those of visible(); some may have no page.
inline bool sees_any(const AttendParams &p, const uint *table, Token token) {
    if (token.sequence == NONE) {
        return false;
    }
    const Range seen = visible(p, token);
    return PAGE_SHIFT == 0 ? seen.len() > 0 : pages_of(p, table, token.sequence, gap_of(token)).hold_any(seen);
}

// Inputs of output rows other than keys and values, and the destination of the rows' ends. A row's end is log2 of the
// sum of the weights of its scores, -inf for none. A row and its end can be merged with results over other positions.
struct RowEnds {
    // Scores without a value, by query heads; null unless SINKS.
    const float *sinks;
#if EARLIER
    // Earlier results over other positions, [T, H, D], and their ends, [T, H].
    const float *earlier;
    const float *earlier_ends;
#endif
#if ENDS
    // [T, H]; may be `earlier_ends`, as the output may be `earlier`.
    float *ends;
#endif

    RowEnds(const float *sinks, const float *earlier, const float *earlier_ends, float *ends) : sinks(sinks) {
#if EARLIER
        this->earlier = earlier;
        this->earlier_ends = earlier_ends;
#endif
#if ENDS
        this->ends = ends;
#endif
    }
    // The end of the row's earlier result. Read by all threads of the row before any of them calls leave().
    float of_earlier(ulong row) const {
#if EARLIER
        return earlier_ends[row];
#else
        return nothing();
#endif
    }
    // Elements `i` and following of the earlier results.
    template <typename T> T earlier_at(ulong i) const {
#if EARLIER
        return *reinterpret_cast<const T *>(earlier + i);
#else
        return T();
#endif
    }
    void leave(ulong row, float end) const {
#if ENDS
        ends[row] = end;
#endif
    }
};

// A row of the output is o times `own`, plus the earlier result times `earlier`.
struct RowFactors {
    float own;
    float earlier;
    float end;
};

// The factors of row `row`. Its state is m, l and o, with l and o times `scale`; `earlier_end` is
// RowEnds::of_earlier(). If the sum of the weights is 0, either no key is seen, and the output is 0; or every score is
// -inf, and the output is NaN, unless a later launch merges it with other results.
template <typename Sees>
inline RowFactors finish_row(const AttendParams &p, const RowEnds &ends, ulong row, float m, float l, float earlier_end,
                             Sees sees, float scale = 1) {
    RowFactors f = {1, 0, nothing()};
    if (EARLIER && earlier_end != nothing()) {
        const float most = fmaxf(m, earlier_end);
        f.own = factor_of(m, most);
        f.earlier = scale * factor_of(earlier_end, most);
        l = l * f.own + f.earlier;
        m = most;
    }
    if (SINKS) {
        l += scale * factor_of(ends.sinks[row % query_heads(p)] * LOG2_E, m);
    }
    float inverse = 0;
    if (l != 0) {
        inverse = 1 / l;
        f.end = m + log2f(l / scale);
    } else if (!ENDS && sees()) {
        inverse = __uint_as_float(0x7FC00000);
    }
    f.own *= inverse;
    f.earlier *= inverse;
    return f;
}

inline uint tiles_of(Range keys) {
    return keys.first >= keys.end ? 0 : (keys.end - keys.first + TILE - 1) / TILE;
}

// Consecutive tiles divided into parts that differ by one tile at most; the longer parts come first.
struct EvenSplit {
    uint most;
    uint longer;

    EvenSplit(uint tiles, uint parts) : most(tiles / parts + 1), longer(tiles % parts) {}

    // The first tile of a part.
    uint first(uint part) const {
        return part * (most - 1) + min(part, longer);
    }
    // The part that has a tile.
    uint part_of(uint tile) const {
        const uint in_longer = longer * most;
        return tile < in_longer ? tile / most : longer + (tile - in_longer) / (most - 1);
    }
};

// A block's part of one work item.
struct ItemPart {
    uint item;
    uint head;
    // The part's tiles, among those of the item.
    Range tiles;
    // The number of parts of the item, and this part's number. With several parts: the slot of the first part's state;
    // the slots of the other parts follow.
    uint parts;
    uint part;
    uint first_slot;

    uint slot(uint part) const {
        return first_slot + part;
    }
};

// Counts the arrival of a block, whose threads have stored a state. Returns whether it is the last block.
inline bool arrive(uint *flag, uint *counter, uint all) {
    __syncthreads();
    if (threadIdx.x == 0) {
        *flag = count_arrival(counter, all);
    }
    __syncthreads();
    return *flag != 0;
}

#endif
