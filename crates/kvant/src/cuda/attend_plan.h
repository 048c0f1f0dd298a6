// Who works on which keys.
//
// An item is up to `item_rows` query rows of one KV head; rows are numbered token by token, the heads of the group
// within. Its keys, those that any of its tokens sees, come in tiles of TILE. With `splits` = 0 the tiles of all items
// stand in one line, which the blocks share evenly: so a batch of mixed lengths, or one long sequence, keeps all of them
// busy alike, whatever the lengths in the buffers are. Else the tiles of every item are shared among `splits` blocks.
// A block that has only a part of an item leaves a partial state; the last one to do so merges them.
#ifndef KVANT_ATTEND_PLAN_H
#define KVANT_ATTEND_PLAN_H
#include "convert.h"

struct AttendParams {
    // Rows of the planes between sequences and between KV heads.
    ulong row_sequence;
    ulong row_head;
    // Rows between slots.
    uint row_slot;
    uint tokens;
    uint sequences;
    uint kv_heads;
    // Query heads of a KV head.
    uint group;
    uint capacity;
    uint window;
    // Query rows of an item, items of a KV head, and into how many parts each is split (0: shared evenly).
    uint item_rows;
    uint items;
    uint splits;
    float scale;
    float softcap;
};

constexpr uint NONE = 0xFFFFFFFF;

constexpr uint THREADS = 32 * WARPS;

// The most items that are shared evenly.
constexpr uint MAX_SHARED_ITEMS = 256;

// The most partial states that are merged at once.
constexpr uint MAX_MERGE = 24;

struct Range {
    uint first;
    uint end;

    uint len() const {
        return end - first;
    }
};

// A token's place: the sequence is NONE when the batch names one that does not exist.
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

// The positions that a token sees: among the cached ones, or (FRESH) of the batch's tokens.
inline Range visible(const AttendParams &p, Token token) {
    const uint after = token.position == NONE ? NONE : token.position + 1;
    const uint window_first = after > p.window ? after - p.window : 0;
    if (FRESH) {
        // No key is at NONE, not even the token's own.
        return token.position == NONE ? Range{0, 0} : Range{window_first, after};
    }
    uint end = min(token.len, after);
    const uint held = token.len > p.capacity ? token.len - p.capacity : 0;
    if (!RING) {
        end = min(end, p.capacity);
    }
    const uint first = max(held, window_first);
    return {min(first, end), end};
}

inline bool sees_any(const AttendParams &p, Token token) {
    return token.sequence != NONE && visible(p, token).len() > 0;
}

// What a row is multiplied by whose weights have the sum `l`. It is 0 where nothing is seen, and the output then; or keys are,
// all with a score of minus infinity, of which there is no softmax.
template <typename Sees>
inline float inverse_of_sum(float l, Sees sees) {
    if (l != 0) {
        return 1 / l;
    }
    return sees() ? __uint_as_float(0x7FC00000) : 0;
}

inline uint tiles_of(Range keys) {
    return keys.first >= keys.end ? 0 : (keys.end - keys.first + TILE - 1) / TILE;
}

// A line of tiles, cut into parts that differ by one tile at most; the longer ones come first.
struct Line {
    uint most;
    uint longer;

    Line(uint tiles, uint parts) : most(tiles / parts + 1), longer(tiles % parts) {}

    // The first tile of a part.
    uint first(uint part) const {
        return part * (most - 1) + min(part, longer);
    }
    // The part of a tile.
    uint part_of(uint tile) const {
        const uint in_longer = longer * most;
        return tile < in_longer ? tile / most : longer + (tile - in_longer) / (most - 1);
    }
};

// A block's work on one item.
struct Piece {
    uint item;
    uint head;
    // Its tiles among the item's.
    Range tiles;
    // In how many pieces the item is, and which of them this is; when more than one: the slot of the first one's partial
    // state, after which those of the others follow.
    uint parts;
    uint part;
    uint first_slot;

    uint slot(uint part) const {
        return first_slot + part;
    }
};

// Counts this block's arrival; whether it is the last of `all`, who then sees what the others have left.
inline bool arrive(uint *flag, uint *counter, uint all) {
    __syncthreads();
    if (threadIdx.x == 0) {
        uint before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        const bool last = before == all - 1;
        if (last) {
            // For the next launch.
            *counter = 0;
        }
        *flag = last;
    }
    __syncthreads();
    return *flag != 0;
}

#endif
