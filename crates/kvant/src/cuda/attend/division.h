// A block's parts of work items, or a cluster's: see work.h.
#ifndef KVANT_CUDA_ATTEND_DIVISION_H
#define KVANT_CUDA_ATTEND_DIVISION_H
#include "attend/work.h"

// The items and heads of this block, and the number of blocks that share them.
struct Division {
    // If true, all blocks share the tiles of all items and heads. Otherwise `splits` blocks share the tiles of one item
    // and head.
    bool shared_evenly;
    uint splits;
    // This block's number, and the number of blocks.
    uint block;
    uint blocks;
    // The index of the block's item and head, if the block has only one.
    uint pair;
    // The items and heads whose tiles are shared, and the first item.
    uint items;
    uint heads;
    uint first_item;

    explicit Division(const AttendParams &p) {
        block = blockIdx.x / CLUSTER;
        blocks = gridDim.x / CLUSTER;
        shared_evenly = p.splits == 0;
        splits = max(p.splits, 1u);
        pair = block / splits;
        items = shared_evenly ? p.items : 1;
        heads = shared_evenly ? p.kv_heads : 1;
        first_item = shared_evenly ? 0 : pair / p.kv_heads;
    }
    // The first head.
    uint first_head(const AttendParams &p) const {
        return shared_evenly ? 0 : pair % p.kv_heads;
    }
    // The blocks that share the tiles, and this one's number among them.
    uint sharers() const {
        return shared_evenly ? blocks : splits;
    }
    uint own() const {
        return shared_evenly ? block : block % splits;
    }
};

// Calls use(part) for each part of an item that this block has. prefix[i] is the number of tiles of one head before
// item i. With PADDED, the last `padding` tiles of an item are empty: the cost of beginning and ending a part.
template <bool PADDED, typename Use>
inline void each_part(const AttendParams &p, const Division &d, const uint *prefix, uint padding, Use use) {
    const uint tiles = prefix[d.items] * d.heads;
    const uint sharers = min(d.sharers(), tiles), own = d.own();
    if (own >= sharers) {
        return;
    }
    const EvenSplit split(tiles, sharers);
    uint at = split.first(own);
    const uint end = split.first(own + 1);
    uint item = 0;
#pragma unroll 1
    while (at < end) {
        while (prefix[item + 1] * d.heads <= at) {
            item++;
        }
        const uint length = prefix[item + 1] - prefix[item], of_item = PADDED ? length - padding : length;
        const uint head = (at - prefix[item] * d.heads) / length;
        const uint first = prefix[item] * d.heads + head * length;
        if (PADDED && at - first >= of_item) {
            at = first + length;
            continue;
        }
        const uint first_sharer = split.part_of(first), last_sharer = split.part_of(first + of_item - 1);
        const uint of_head = d.shared_evenly ? head : d.pair % p.kv_heads;
        const ItemPart part = {d.first_item + item,
                               of_head,
                               {at - first, min(end - first, of_item)},
                               last_sharer - first_sharer + 1,
                               own - first_sharer,
                               // The sum of the earlier items and heads and of the earlier blocks: unique for every
                               // part.
                               d.block - own + first_sharer + (d.first_item + item) * p.kv_heads + of_head};
        use(part);
        at = first + (PADDED ? length : part.tiles.end);
    }
}

#endif
