// attend_decode: softmax(scale * q K^T [softcap] + mask) V for decode over dense 16-bit keys and values: every token
// belongs to a different sequence.
//
// q [T, H, D] -> out [T, H, D]; q, K and V have one 16-bit dtype, out any dtype.
//
// A work item (work.h) is a token; the GROUP <= 8 query heads of a KV head are computed together, so that each key and
// value is read once. Larger groups are halved (SHARES = 2): each half counts as a KV head, and both halves read equal
// keys and values. The keys of an item are divided into units of 16. The units of all items and heads are concatenated
// and divided evenly among clusters of CLUSTER blocks. A cluster divides the units of each of its parts among its
// blocks, and a block among its warps. Warps work independently: each has its own ring of buffers and its own softmax
// state (state.h). For each unit:
//
//   scores   S^T = K q^T on tensor cores: 16 keys by 8 query rows, queries in registers;
//   weights  P = exp2(S - max), transposed into B operands within the warp, each the sum of two 16-bit numbers;
//   values   O^T += V^T P^T.
//
// A warp waits only for its own copies, which prefetch across the ends of parts. At the end of a part the states of the
// warps are merged, then those of the cluster's blocks, through distributed shared memory. If several clusters share an
// item and head, the last one to finish merges their states.
//
// Over pages (work.h) a unit is in one page. The page is looked up when the previous unit is fetched, and again for the
// unit's scores. A key that no page holds is zeros, and masked.
//
// Positions, sequences, lengths and page tables are read before the previous kernel has ended
// (device/dependent_launch.h).
#include "attend/decode/ring.h"
#include "attend/dense.h"
#include "attend/division.h"
#include "attend/merge_quads.h"
#include "attend/work.h"
#include "device/cluster.h"
#include "device/convert.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"

static_assert(TILE == 16, "attend: a unit is what a product takes");

// Products of values.
constexpr uint PRODUCTS = HEAD_DIM / 16;

// With BULK all rows begin at the same bank. To reduce bank conflicts, odd rows of lanes load in another order and swap
// afterwards. At D = 512 there are too few registers for that.
constexpr bool SWAPS = BULK && HEAD_DIM < 512;

template <typename T>
inline void swap(T &a, T &b) {
    const T c = a;
    a = b;
    b = c;
}

// An item: its keys, its sequence, and the units that one head has in all earlier items.
struct Item {
    Range keys;
    uint sequence;
    uint before;
// EXACT_PAGES.
#if SPAN == 4
    uint gap;
#else
    static constexpr uint gap = 0;
#endif
};
constexpr uint ITEM_BYTES = SPAN == EXACT_PAGES ? 20 : 16;
static_assert(sizeof(Item) == ITEM_BYTES, "attend: Item");

// Shared memory, in bytes; decode/mod.rs computes the same sum. Rows of outputs are padded by 16 bytes against bank
// conflicts.
constexpr uint OUTPUT_PITCH = HEAD_DIM + 4;
constexpr uint AT_OUTPUTS = WARPS * RING_BYTES;
constexpr uint AT_SUMS = AT_OUTPUTS + WARPS * GROUP * OUTPUT_PITCH * 4;
// m and l of the block's state. The block's o overwrites the first warp's.
constexpr uint AT_ENDS = AT_SUMS + WARPS * 8 * 8;
constexpr uint AT_BARRIERS = AT_ENDS + 64;
constexpr uint AT_ITEMS = AT_BARRIERS + WARPS * BUFFERS * 8;
constexpr uint AT_FLAG = AT_ITEMS + MAX_SHARED_ITEMS * ITEM_BYTES;
static_assert(AT_FLAG + 16 == SHARED_BYTES, "attend: the shared memory that Rust asks for");

inline Item item_of(const AttendParams &p, Token token) {
    Item item = {};
    if (token.sequence != NONE) {
        item.keys = visible(p, token);
        item.sequence = token.sequence;
#if SPAN == 4
        item.gap = gap_of(token);
#endif
    }
    return item;
}

// Units of an item: at least one, so that a block writes the output.
inline uint units_of(const Item &item) {
    return max(tiles_of(in_units(item.keys)), 1u);
}

// The entry of a unit in the page table.
inline uint entry_of(const AttendParams &p, const uint *table, const Item &item, uint unit) {
    const uint first = in_units(item.keys).first + unit * TILE;
    return first < item.keys.end ? pages_of(p, table, item.sequence, item.gap).entry(first) : NONE;
}

// The concatenated units that the cluster shares; `end` is the end of the block's share.
struct UnitRange {
    // The items: in shared memory, or the only one.
    const Item *items;
    Item only;
    uint count;
    uint heads;
    // Empty units after the units of each head: the cost of beginning and ending a part.
    uint ends;
    uint end;

    uint length_of(const Item &item) const {
        return units_of(item) + ends;
    }
};

// A part of an item and head, and the block's share of it.
struct Place {
    Item item;
    uint index;
    uint head;
    // The first unit of the item and head, among the units of all items.
    uint first;
    // The block's units, among the units of the item.
    uint from;
    uint to;
    // Where the next part begins.
    uint next;
};

// The part that begins at unit `at`, in an item from `index` on. It is empty if it has no units.
inline Place place_at(const UnitRange &range, uint at, uint index) {
    const uint heads = range.heads;
    Item item = range.only;
    if (range.count > 1) {
        while (true) {
            item = range.items[index];
            if ((item.before + range.length_of(item)) * heads > at) {
                break;
            }
            index++;
        }
    }
    const uint length = range.length_of(item), units = units_of(item);
    const uint head = (at - item.before * heads) / length;
    const uint first = item.before * heads + head * length;
    const uint from = min(at - first, units), to = min(range.end - first, units);
    const EvenSplit blocks(to - from, CLUSTER);
    const uint rank = blockIdx.x % CLUSTER;
    return {item, index, head, first, from + blocks.first(rank), from + blocks.first(rank + 1), first + length};
}

// The warp's first unit of a place. Warps take the concatenated units in turn, so that short parts do not all fall to
// the same warps.
inline uint first_of_warp(const Place &place) {
    return place.from + (threadIdx.x / 32 - place.first - place.from) % WARPS;
}

// A lane's share of its warp's softmax state.
struct Accumulators {
    // For query rows 2t and 2t + 1: the maximum, and this lane's part of the sum.
    float m[2];
    float l[2];
    // Coordinates 16 i + g and 16 i + g + 8, by the same query rows.
    float o[PRODUCTS][4];
    // The weights of the current unit, as B operands.
    Weights weights;

    inline void clear() {
        m[0] = m[1] = nothing();
        l[0] = l[1] = 0;
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                o[i][c] = 0;
            }
        }
    }
};

// Computes the scores of 16 keys, masked outside of `there`, then the new maxima and the weights.
inline void scores(const AttendParams &p, const uchar *buffer, const uint4 (&q)[LOADS], Range there, Accumulators &acc) {
    const uint lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr uint CHAINS = 4;
    float sums[CHAINS][4] = {};
    const uchar *row = buffer + g * PITCH + t * 32;
#pragma unroll
    for (uint i = 0; i < LOADS; i += 2) {
        uint4 x[2], y[2];
#pragma unroll
        for (uint j = 0; j < 2; j++) {
            const uint at = i * 64 + (SWAPS ? j ^ g % 2 : j) * 16;
            x[j] = *reinterpret_cast<const uint4 *>(row + at);
            y[j] = *reinterpret_cast<const uint4 *>(row + 8 * PITCH + at);
        }
        if (SWAPS && g % 2 == 1) {
            swap(x[0], x[1]);
            swap(y[0], y[1]);
        }
#pragma unroll
        for (uint j = 0; j < 2; j++) {
            const uint first[4] = {x[j].x, y[j].x, x[j].y, y[j].y}, second[4] = {x[j].z, y[j].z, x[j].w, y[j].w};
            mma<HALF>(sums[2 * (i + j) % CHAINS], first, make_uint2(q[i + j].x, q[i + j].y));
            mma<HALF>(sums[(2 * (i + j) + 1) % CHAINS], second, make_uint2(q[i + j].z, q[i + j].w));
        }
    }
    float s[4];
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        const float score = score_of(p, (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]));
        const uint key = g + c / 2 * 8;
        s[c] = key >= there.first && key < there.end ? score : nothing();
    }
    float m[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
    for (uint step = 4; step < 32; step *= 2) {
        m[0] = fmaxf(m[0], __shfl_xor_sync(0xFFFFFFFF, m[0], step));
        m[1] = fmaxf(m[1], __shfl_xor_sync(0xFFFFFFFF, m[1], step));
    }
    if (__any_sync(0xFFFFFFFF, m[0] > acc.m[0] || m[1] > acc.m[1])) {
        float f[2];
#pragma unroll
        for (uint c = 0; c < 2; c++) {
            m[c] = fmaxf(m[c], acc.m[c]);
            f[c] = factor_of(acc.m[c], m[c]);
            acc.m[c] = m[c];
            acc.l[c] *= f[c];
        }
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                acc.o[i][c] *= f[c % 2];
            }
        }
    }
    bool seen[4];
    float weights[4];
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        seen[c] = s[c] != nothing();
        weights[c] = seen[c] ? exp2_fast(s[c] - acc.m[c % 2]) : 0;
        acc.l[c % 2] += weights[c];
    }
    acc.weights = two_terms(weights, seen);
}

// O^T += V^T P^T over 16 values.
inline void add_values(uint buffer, Accumulators &acc) {
    const uint lane = threadIdx.x % 32;
    // Lanes 0-7 address coordinates 0-7 of keys 0-7, lanes 8-15 coordinates 8-15 of keys 0-7; lanes 16-31 address both
    // of keys 8-15. With BULK the two halves of coordinates are exchanged for odd keys. With SWAPS the coordinates of
    // two successive products are exchanged for every other pair of keys.
    const uint key = lane / 16 * 8 + lane % 8;
    const uint from = buffer + key * PITCH + (lane / 8 + (BULK ? key : 0)) % 2 * 16;
    const uint other = SWAPS ? key / 2 % 2 * 32 : 0;
#pragma unroll
    for (uint i = 0; i < PRODUCTS; i += 2) {
        uint a[2][4];
#pragma unroll
        for (uint j = 0; j < 2; j++) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(a[j][0]), "=r"(a[j][1]), "=r"(a[j][2]), "=r"(a[j][3])
                         : "r"((j == 0 ? from + other : from - other) + (i + j) * 32)
                         : "memory");
            if (BULK) {
#pragma unroll
                for (uint n = 0; n < 4; n += 2) {
                    const uint x = a[j][n], y = a[j][n + 1];
                    a[j][n] = __byte_perm(x, y, 0x7610);
                    a[j][n + 1] = __byte_perm(y, x, 0x7610);
                }
            }
        }
        if (SWAPS && lane % 2 == 1) {
#pragma unroll
            for (uint n = 0; n < 4; n++) {
                swap(a[0][n], a[1][n]);
            }
        }
#pragma unroll
        for (uint j = 0; j < 2; j++) {
            mma<HALF>(acc.o[i + j], a[j], acc.weights.leading);
            mma<HALF>(acc.o[i + j], a[j], acc.weights.rest);
        }
    }
}

// Adds up the lengths of several items: `before` of each becomes the number of units of the items before it. All
// threads call it.
inline void add_lengths(const UnitRange &range, Item *shared_items, uint items, uint warp, uint lane) {
    if (warp == 0) {
        uint before = 0;
#pragma unroll 1
        for (uint first = 0; first < items; first += 32) {
            const uint own = first + lane < items ? range.length_of(shared_items[first + lane]) : 0;
            uint sum = own;
#pragma unroll
            for (uint step = 1; step < 32; step *= 2) {
                const uint x = __shfl_up_sync(0xFFFFFFFF, sum, step);
                sum += lane >= step ? x : 0;
            }
            if (first + lane < items) {
                shared_items[first + lane].before = before + sum - own;
            }
            before += __shfl_sync(0xFFFFFFFF, sum, 31);
        }
    }
    __syncthreads();
}

// Reads the items of the cluster's share to shared memory. An only item stays in registers, and its page table is read
// with it. Returns the number of units of all heads.
template <typename Early>
inline uint read_items(const AttendParams &p, const uint *positions, const uint *sequence, const uint *lens, const uint *table,
                       uint first_item, UnitRange &range, Item *shared_items, Early &pages_of_only, uint warp, uint lane) {
    const uint items = range.count;
    if (items == 1) {
        range.only = item_of(p, load_token_and_pages(p, positions, sequence, lens, table, first_item, pages_of_only));
        return range.length_of(range.only) * range.heads;
    }
#pragma unroll 1
    for (uint i = threadIdx.x; i < items; i += THREADS) {
        shared_items[i] = item_of(p, load_token(p, positions, sequence, lens, i));
    }
    __syncthreads();
    add_lengths(range, shared_items, items, warp, lane);
    return (shared_items[items - 1].before + range.length_of(shared_items[items - 1])) * range.heads;
}

// The next unit that this warp fetches, and over pages its entry in the page table.
struct Ahead {
    Place place;
    uint unit;
    uint entry;
    // Whether the unit's values are fetched next, after its keys.
    bool of_values;
    // Whether the block has more units.
    bool more;

    inline void look_up(const AttendParams &p, const uint *table) {
        if (PAGE_SHIFT > 0 && unit < place.to) {
            entry = entry_of(p, table, place.item, unit);
        }
    }

    // Fills the buffer of BUFFERS steps ago, which is free.
    inline void fetch(const AttendParams &p, const uint *table, const UnitRange &range, Buffers &ring, uint first_head, const uchar *k,
                      const uchar *v) {
        while (more && unit >= place.to) {
            more = place.next < range.end;
            if (more) {
                place = place_at(range, place.next, place.index);
                unit = first_of_warp(place);
                look_up(p, table);
            }
        }
        if (more) {
            const ulong plane = place.item.sequence * p.row_sequence + rows_of_head(p, first_head + place.head);
            const uint page = page_of(entry, p.page_entries);
            ring.fill(p, (of_values ? v : k) + plane * ROW, place.item.keys, unit, page);
            unit += of_values ? WARPS : 0;
            if (of_values) {
                look_up(p, table);
            }
            of_values = !of_values;
        }
        ring.end_turn();
    }
};

// Looks up the first entry. The page table of an only item has been read.
template <typename Early>
inline void look_up_first(const AttendParams &p, const uint *table, const Early &pages_of_only, uint items, Ahead &ahead) {
    const uint first_position = in_units(ahead.place.item.keys).first + ahead.unit * TILE;
    if (PAGE_SHIFT > 0 && items == 1 && pages_of_only.has(first_position)) {
        ahead.entry = first_position < ahead.place.item.keys.end ? pages_of_only.entry(first_position) : NONE;
    } else {
        ahead.look_up(p, table);
    }
}

// Attends to the warp's units of a place, with the ring filled BUFFERS steps ahead. Keys and values of a unit take one
// step each. The first BUFFERS steps of the block (`first`) only fetch.
inline void attend_to(const AttendParams &p, const uint *table, const UnitRange &range, const Place &place, bool first, uint first_head,
                      const uchar *own_ring, Buffers &ring, Ahead &ahead, const uint4 (&queries)[LOADS], const uchar *k,
                      const uchar *v, Accumulators &acc) {
    uint unit = first_of_warp(place);
    bool values_next = false;
    int step = first ? -int(BUFFERS) : 0;
#pragma unroll 1
    while (step < 0 || unit < place.to) {
        if (step >= 0) {
            // Looked up while the copy is awaited.
            const uint entry = PAGE_SHIFT > 0 && !values_next ? entry_of(p, table, place.item, unit) : NONE;
            const uint buffer = ring.wait();
            if (!values_next) {
                const Range keys = place.item.keys;
                const uint first = in_units(keys).first + unit * TILE;
                Range there = {0, first < keys.end ? keys.end - first : 0};
                if (PAGE_SHIFT > 0) {
                    there.first = keys.first > first ? keys.first - first : 0;
                    there.end = is_page(entry, p.page_entries) ? there.end : 0;
                }
                scores(p, own_ring + buffer, queries, there, acc);
            } else {
                add_values(ring.base + buffer, acc);
                unit += WARPS;
            }
            values_next = !values_next;
            ring.empty();
        }
        step++;
        ahead.fetch(p, table, range, ring, first_head, k, v);
    }
}

// Stores the states of the block's warps in shared memory.
inline void leave_warps(const Accumulators &acc, float *outputs, float2 *sums, uint warp, uint g, uint t) {
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        const float l = column_sum(acc.l[c]);
        if (g == 0) {
            sums[warp * 8 + 2 * t + c] = make_float2(acc.m[c], l);
        }
        if (2 * t + c < GROUP) {
            float *to = outputs + (warp * GROUP + 2 * t + c) * OUTPUT_PITCH + g;
#pragma unroll
            for (uint i = 0; i < PRODUCTS; i++) {
                to[16 * i] = acc.o[i][c];
                to[16 * i + 8] = acc.o[i][c + 2];
            }
        }
    }
}

// The merged state of the block's warps, for four coordinates of a row.
inline SoftmaxState sum_of_warps(const float *outputs, const float2 *sums, uint r, uint column) {
    SoftmaxState sum;
#pragma unroll
    for (uint w = 0; w < WARPS; w++) {
        sum.merge_max(sums[w * 8 + r].x);
    }
#pragma unroll
    for (uint w = 0; w < WARPS; w++) {
        const float2 of_warp = sums[w * 8 + r];
        const float *from = outputs + (w * GROUP + r) * OUTPUT_PITCH + column * 4;
        sum.merge(of_warp, *reinterpret_cast<const float4 *>(from));
    }
    const float unscale = 1 / WEIGHT_SCALE;
    sum.o = make_float4(sum.o.x * unscale, sum.o.y * unscale, sum.o.z * unscale, sum.o.w * unscale);
    return sum;
}

// Merges the states of the block's warps and, in a cluster, of its blocks, which read each other's states. Writes the
// output, or the state of one of several parts. In a cluster, blocks end only after a cluster_wait().
inline void merge_block(const States &states, const ItemPart &part_of_item, const Output &output, const SharedState &own_state,
                        const float *outputs, const float2 *sums) {
#pragma unroll 1
    for (uint quad = threadIdx.x; quad < QUADS; quad += THREADS) {
        const uint r = quad / (HEAD_DIM / 4), column = quad % (HEAD_DIM / 4);
        const SoftmaxState sum = sum_of_warps(outputs, sums, r, column);
        if (CLUSTER > 1) {
            *own_state.at(quad) = sum.o;
            if (column == 0) {
                own_state.ml[r] = make_float2(sum.m, sum.l);
            }
        } else if (part_of_item.parts == 1) {
            output.finish(quad, sum);
        } else {
            states.leave(part_of_item.slot(part_of_item.part), quad, sum);
        }
    }
    if constexpr (CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
        merge_in_cluster(own_state, states.rank, [&](uint quad, const SoftmaxState &sum) {
            if (part_of_item.parts == 1) {
                output.finish(quad, sum);
            } else {
                states.leave(part_of_item.slot(part_of_item.part), quad, sum);
            }
        });
        cluster_arrive();
    }
}

// If the share begins at unit `at` among the empty units of a head, moves to the next place. Returns false if the share
// has no more units.
inline bool skip_empty_units(const UnitRange &range, uint at, Place &place) {
    if (at - place.first >= units_of(place.item)) {
        if (place.next >= range.end) {
            return false;
        }
        place = place_at(range, place.next, place.index);
    }
    return true;
}

// Context of the end of a place: tensors, and the block's share of all units.
struct Block {
    const AttendParams &p;
    uchar *memory;
    uchar *out;
    float *partials;
    uint *counters;
    const uint *table;
    RowEnds ends;
    const Division &division;
    const EvenSplit &line;
    uint own;
    uint warp;
    uint lane;
};

// Whether other blocks of the cluster may still read this block's state. It waits for them before the state is
// overwritten, and before the block ends.
struct ReadByOthers {
    bool pending = false;

    inline void wait() {
        if (pending) {
            cluster_wait();
        }
        pending = false;
    }
};

// Merges the states of a place: of the block's warps, of the cluster's blocks, and of all parts of its item and head.
inline void finish_place(const Block &b, const Place &place, uint head, const QueryRows &rows, const Accumulators &acc,
                         ReadByOthers &read_by_others) {
    float *outputs = reinterpret_cast<float *>(b.memory + AT_OUTPUTS);
    float2 *sums = reinterpret_cast<float2 *>(b.memory + AT_SUMS);
    read_by_others.wait();
    const uint first_part = b.line.part_of(place.first), last_part = b.line.part_of(place.first + units_of(place.item) - 1);
    __syncthreads();
    leave_warps(acc, outputs, sums, b.warp, b.lane / 4, b.lane % 4);
    __syncthreads();
    const uint parts = last_part - first_part + 1, item = b.division.first_item + place.index;
    // The sum of the earlier items and heads and of the earlier clusters: unique for every part.
    const uint slot = b.division.block - b.own + first_part + item * b.p.kv_heads + head;
    const ItemPart part_of_item = {item, head, {place.from, place.to}, parts, b.own - first_part, slot};
    const States states = {b.partials, b.counters, b.p.items * b.p.kv_heads, b.p.kv_heads, blockIdx.x % CLUSTER};
    const Pages pages = pages_of(b.p, b.table, place.item.sequence, place.item.gap);
    const Output output = {b.p, b.out, b.ends, rows, place.item.keys.len() > 0, place.item.keys, pages};
    const SharedState own_state = {outputs, OUTPUT_PITCH, reinterpret_cast<float2 *>(b.memory + AT_ENDS)};
    merge_block(states, part_of_item, output, own_state, outputs, sums);
    read_by_others.pending = CLUSTER > 1;
    if (parts > 1) {
        read_by_others.wait();
        merge(states, part_of_item, output, reinterpret_cast<uint *>(b.memory + AT_FLAG), outputs);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTERED
    KVANT_KERNEL(const uchar *q, uchar *out, const uchar *k, const uchar *, const float *, const uchar *v, const uchar *,
           const float *, const uint *positions, const uint *sequence, const uint *lens, float *partials, uint *counters,
           const float *sinks, const AttendParams p, const uint *table, const uchar *, const uchar *,
           const float *earlier, const float *earlier_ends, float *new_ends) {
    extern __shared__ __align__(128) uchar memory[];
    const uint thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    Item *shared_items = reinterpret_cast<Item *>(memory + AT_ITEMS);
    const RowEnds row_ends(sinks, earlier, earlier_ends, new_ends);

    const Division division(p);
    const uint items = division.items, heads = division.heads;
    const uint first_item = division.first_item, first_head = division.first_head(p);
    UnitRange range = {shared_items, {}, items, heads, items > 1 ? END_UNITS : 0, 0};
    EarlyPages<31 * PAGE_KEYS> pages_of_only;
    const uint length = read_items(p, positions, sequence, lens, table, first_item, range, shared_items, pages_of_only, warp, lane);
    const uint sharers = min(division.sharers(), (length + MIN_UNITS - 1) / MIN_UNITS);
    const uint own = division.own();
    // Blocks that return here have not waited for the previous kernel; the first block of the first head waits
    // (device/dependent_launch.h).
    if (own >= sharers) {
        return;
    }
    const EvenSplit line(length, sharers);
    range.end = line.first(own + 1);
    Place place = place_at(range, line.first(own), 0);
    if (!skip_empty_units(range, line.first(own), place)) {
        return;
    }
    Ahead ahead = {place, first_of_warp(place), NONE, false, true};
    look_up_first(p, table, pages_of_only, items, ahead);
    wait_unless_late<EARLIER>();
    const uchar *own_ring = memory + warp * RING_BYTES;
    Buffers ring(shared_address(own_ring), shared_address(memory + AT_BARRIERS) + warp * BUFFERS * 8);
    const Block b = {p, memory, out, partials, counters, table, row_ends, division, line, own, warp, lane};
    ReadByOthers read_by_others;
    bool begun = false;
#pragma unroll 1
    while (true) {
        const uint head = first_head + place.head;
        const QueryRows rows(p, first_item + place.index, head);
        uint4 queries[LOADS];
        load_queries(q, rows, queries);
        Accumulators acc;
        acc.clear();
        attend_to(p, table, range, place, !begun, first_head, own_ring, ring, ahead, queries, k, v, acc);
        begun = true;

        // The next kernel does not begin earlier, because its blocks would share the few multiprocessors that this
        // kernel leaves free.
        if (place.next >= range.end) {
            let_next_begin();
        }
        wait_if_late<EARLIER>();
        finish_place(b, place, head, rows, acc, read_by_others);
        if (place.next >= range.end) {
            break;
        }
        place = place_at(range, place.next, place.index);
    }
    read_by_others.wait();
}
