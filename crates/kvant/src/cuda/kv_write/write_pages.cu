// write_pages: new keys and values, [T, Hk, D] or [Hk, T, D], into pages with means, in steps of several tokens of a
// sequence: all vectors except those of pages that get the mean of a previous page, which open_pages.cu writes later.
//
// blockIdx.y is 0 for keys and 1 for values. An item is one head of a window of tokens (kv_write/step_pages.h); a
// block has some items in a row, most of them of one window, which it plans once. The threads take a page together:
// they rotate its vectors, sum them, make the mean, which is the rotated mean, and encode the vectors around it. With
// TILES a warp has eight rows at a time (codec/encode_tiles.h), otherwise HEAD_DIM / PER lanes have a row
// (kv_write/page_lanes.h). The vectors of a page stay in registers if there are threads for all of them; if not, they
// are loaded and rotated twice.
//
// `later` has a mark for each token that opens a page in open_pages.cu, then for each window whether there is any.
#include "device/dependent_launch.h"
#include "kv_write/page_lanes.h"
#include "kv_write/page_sums.h"
#include "kv_write/vectors.h"
#if TILES
#include "codec/encode_tiles.h"
#endif

// Words of the tables that this kernel has in shared memory, before the sums.
#if TILES
constexpr uint SIGN_WORDS = HEAD_DIM / 2;
#else
constexpr uint SIGN_WORDS = 0;
#endif
constexpr uint K_WORDS = table_words(K_CODEC, TABLE_COPIES), V_WORDS = table_words(V_CODEC, TABLE_COPIES);
constexpr uint TABLE_WORDS = (SIGN_WORDS + (K_WORDS > V_WORDS ? K_WORDS : V_WORDS) + 3) / 4 * 4;
static_assert(TABLE_WORDS * 4 + sizeof(PageSums) == SHARED_BYTES, "write_pages: the shared memory that Rust asks for");

// The tokens of a page: those from `first` on in order, or a list.
struct PageTokens {
    uint first;
    const uint *list;

    uint of(uint i) const {
        return first != NO_TOKEN ? first + i : list[i];
    }
};

#if TILES

// The vectors of a page. `ahead` is what the warp's rows are loaded from next.
template <uint DTYPE, uint CODEC, uint NORM> struct Pages {
    static constexpr uint STRIP = HEAD_DIM / 16, SETS = PAGE_POSITIONS / (8 * WARPS);
    const KvWriteParams &p;
    const Side &side;
    PageSums &room;
    const uint *signs;
    uint a[4];
    uint turn;
    Strips<HEAD_DIM> strips;
    // The token of the first position and the head of the whole page whose first rows have been loaded.
    uint loaded_page, loaded_head;

    Pages(const KvWriteParams &p, const Side &side, PageSums &room, const uint *signs)
        : p(p), side(side), room(room), signs(signs), turn(0), loaded_page(NO_TOKEN) {
        // 1 / sqrt(HEAD_DIM), or that times sqrt(2).
        strip_matrix<DTYPE == F16>(a, threadIdx.x % 32, HEAD_DIM == 128 ? 0.125f : 0.0625f);
    }

    // The page's position whose row g of eight the warp has.
    static uint position_of(uint set, uint g) {
        return (set * WARPS + threadIdx.x / 32) * 8 + g;
    }

    // Of tokens that do not exist, another one's row.
    void load(const PageTokens &page, uint set, uint head) {
        const uint t = page.of(position_of(set, threadIdx.x % 32 / 4));
        strips.load(side.source + source_row(p, t < p.tokens ? t : 0, head) * (HEAD_DIM * 2));
        loaded_page = NO_TOKEN;
    }

    void load_ahead(uint first, uint head) {
        load({first, nullptr}, 0, head);
        loaded_page = first;
        loaded_head = head;
    }

    // Adds the vectors of a set that are finite, and there, to the warp's; returns how many they are. `usual`: all of
    // them, by a look at the source.
    uint add(float (&sum)[2][STRIP], const float (&y)[2][2][STRIP], const PageTokens &page, uint set, bool usual) {
        const uint t = threadIdx.x % 4;
        uint found = 8;
        if (page.first != NO_TOKEN && usual) {
#pragma unroll
            for (uint i = 0; i < 2 * STRIP; i++) {
                const uint s = i / STRIP, c = i % STRIP;
                sum[s][c] = set == 0 ? y[0][s][c] + y[1][s][c] : sum[s][c] + (y[0][s][c] + y[1][s][c]);
            }
            return found;
        }
        bool counts[2];
        found = 0;
#pragma unroll
        for (uint r = 0; r < 2; r++) {
            float squares = 0;
#pragma unroll
            for (uint i = 0; i < 2 * STRIP; i++) {
                squares = fmaf(y[r][i / STRIP][i % STRIP], y[r][i / STRIP][i % STRIP], squares);
            }
            counts[r] = page.of(position_of(set, 2 * t + r)) != NO_TOKEN && !is_nan_or_infinite(strips_sum(squares));
            found += __popc(__ballot_sync(ALL, counts[r]) & 15);
        }
#pragma unroll
        for (uint i = 0; i < 2 * STRIP; i++) {
            const uint s = i / STRIP, c = i % STRIP;
            sum[s][c] += (counts[0] ? y[0][s][c] : 0) + (counts[1] ? y[1][s][c] : 0);
        }
        return found;
    }

    // Writes a page of which `first` is the first position's place. `next_head` is the one whose rows are loaded
    // meanwhile, if it is less than all.
    void write(const PageTokens &page, RowPlace first, uint head, uint next_head) {
        const uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
        float y[2][2][STRIP];
        const float *mean = nullptr;
        if (page.first == NO_TOKEN || loaded_page != page.first || loaded_head != head) {
            load(page, 0, head);
        }
        if constexpr (is_centred(CODEC)) {
            float sum[2][STRIP] = {};
            uint found = 0;
#pragma unroll 1
            for (uint set = 0; set < SETS; set++) {
                strips.template rotate<DTYPE == F16>(y, a, signs);
                const bool usual = __all_sync(ALL, strips.template are_usual<DTYPE == F16>());
                if (set + 1 < SETS) {
                    load(page, set + 1, head);
                }
                found += add(sum, y, page, set, usual);
            }
            if (SETS > 1) {
                load(page, 0, head);
            }
#pragma unroll
            for (uint s = 0; s < 2; s++) {
                store_lane_sums<1, 4>(sum[s], &room.sums[turn][warp][(g + 8 * s) * STRIP]);
            }
            if (lane == 0) {
                room.found[turn][warp] = found;
            }
            mean = mean_of_sums(room, turn, side.planes.means + mean_at(first, head, HEAD_DIM));
            turn ^= 1;
        }
        const Nearest<CODEC, TABLE_COPIES> nearest_to(side.tables);
        const WritablePlanes to = side.planes.of_page(first.page);
#pragma unroll 1
        for (uint set = 0; set < SETS; set++) {
            if (SETS > 1 || !is_centred(CODEC)) {
                strips.template rotate<DTYPE == F16>(y, a, signs);
            }
            if (set + 1 < SETS) {
                load(page, set + 1, head);
            } else if (page.first != NO_TOKEN && next_head < p.layer.kv_heads) {
                load_ahead(page.first, next_head);
            }
            if constexpr (is_centred(CODEC)) {
                subtract_from_eight<HEAD_DIM>(y, mean, lane);
            }
            const auto place = [&](uint row) {
                const uint i = position_of(set, row);
                return StoredRow{to, first.row + i, page.of(i) != NO_TOKEN};
            };
            store_eight<HEAD_DIM, CODEC, NORM>(y, place, side.scale, nearest_to, lane);
        }
    }
};

#else

template <uint DTYPE, uint CODEC, uint NORM> struct Pages {
    static constexpr uint SETS = (PAGE_POSITIONS + ROWS - 1) / ROWS;
    const KvWriteParams &p;
    const Side &side;
    PageSums &room;
    uint turn;

    Pages(const KvWriteParams &p, const Side &side, PageSums &room, const uint *) : p(p), side(side), room(room), turn(0) {
    }

    void load_ahead(uint, uint) {
    }

    // The lane's part of a set's row, rotated; returns whether there is one.
    bool load(float (&y)[PER], const Signs<PER> &signs, const PageTokens &page, uint set, uint head, uint lane) {
        const uint i = set * ROWS + threadIdx.x / LANES, t = i < PAGE_POSITIONS ? page.of(i) : NO_TOKEN;
        load_part<DTYPE>(y, p, side, t != NO_TOKEN ? t : 0, head, lane);
        rotate_row<PER, LANES>(y, signs, lane);
        return t != NO_TOKEN;
    }

    // Writes a page of which `first` is the first position's place.
    void write(const PageTokens &page, RowPlace first, uint head, uint) {
        const uint lane = threadIdx.x % LANES, warp = threadIdx.x / 32;
        const Signs<PER> signs(LANES, lane);
        float y[PER];
        bool there = false;
        const float *mean = nullptr;
        if constexpr (is_centred(CODEC)) {
            float sum[PER] = {};
            uint found = 0;
#pragma unroll 1
            for (uint set = 0; set < SETS; set++) {
                there = load(y, signs, page, set, head, lane);
                const float squares = lane_sum<LANES>(tree_sum<PER>([&](uint j) { return __fmul_rn(y[j], y[j]); }));
                const bool counts = there && !is_nan_or_infinite(squares);
                found += __popc(__ballot_sync(ALL, counts && lane == 0));
#pragma unroll
                for (uint j = 0; j < PER; j++) {
                    sum[j] += counts ? y[j] : 0;
                }
            }
            store_lane_sums<LANES, 32>(sum, &room.sums[turn][warp][lane * PER]);
            if (threadIdx.x % 32 == 0) {
                room.found[turn][warp] = found;
            }
            mean = mean_of_sums(room, turn, side.planes.means + mean_at(first, head, HEAD_DIM)) + lane * PER;
            turn ^= 1;
        }
        const Nearest<CODEC, TABLE_COPIES> nearest_to(side.tables);
#pragma unroll 1
        for (uint set = 0; set < SETS; set++) {
            if (SETS > 1 || !is_centred(CODEC)) {
                there = load(y, signs, page, set, head, lane);
            }
            if constexpr (is_centred(CODEC)) {
#pragma unroll
                for (uint j = 0; j < PER; j += 4) {
                    const float4 four = *reinterpret_cast<const float4 *>(mean + j);
#pragma unroll
                    for (uint i = 0; i < 4; i++) {
                        y[j + i] -= part(four, i);
                    }
                }
            }
            store_encoded<PER, LANES, CODEC, NORM, TABLE_COPIES>(y, side.planes.of_page(first.page),
                                                                 first.row + set * ROWS + threadIdx.x / LANES, there,
                                                                 side.scale, lane, nearest_to);
        }
    }
};

#endif

struct Shared {
    Window window;
    uint list[PAGE_POSITIONS];
};

// Writes the vectors of an item that are in no whole page.
template <uint DTYPE, uint CODEC, uint NORM, typename Writer>
inline void write_left(const KvWriteParams &p, const Tokens &tokens, const Side &side, Shared &shared, Writer &pages,
                       uint head) {
    const Window &window = shared.window;
    // Only around means it matters which page opens. Pages of any order are encoded alike.
    constexpr uint WANTED = is_centred(CODEC)     ? 1 << KEPT
                            : is_quantised(CODEC) ? 1 << KEPT | 1 << PREVIOUS
                                                  : 1 << KEPT | 1 << PREVIOUS | 1 << OWN;
    write_rows<DTYPE, CODEC, NORM>(p, tokens, side, head, PAGE_POSITIONS, [&](uint i) {
        return (WANTED >> window.kinds[i] & 1) != 0 ? window.first + i : NO_TOKEN;
    });
    if constexpr (is_quantised(CODEC)) {
        for (uint i = 0; i < PAGE_POSITIONS; i++) {
            const uint t = window.first + i;
            if (window.kinds[i] != OWN || (tokens.positions[t] & (PAGE_POSITIONS - 1)) != 0) {
                continue;
            }
            const PageOfSequence page = {tokens.sequence[t], tokens.positions[t] >> PAGE_SHIFT};
            RowPlace first = {0, 0};
            find_page(p, tokens, page, head, first);
            list_tokens(p, tokens, page, shared.list);
            pages.write({NO_TOKEN, shared.list}, first, head, NO_TOKEN);
        }
    }
}

// Writes the items from `begin` to `end` of a side.
template <uint DTYPE, uint CODEC, uint NORM>
inline void write_side(const KvWriteParams &p, const Tokens &tokens, Side side, uint begin, uint end, uint *tables,
                       PageSums &room, Shared &shared, uint *later) {
    const Window &window = shared.window;
    uint *cells = tables + SIGN_WORDS;
    side.tables = cells;
    const uint heads = p.layer.kv_heads;
#if TILES
    fill_signs<HEAD_DIM>(tables);
#endif
    if constexpr (is_quantised(CODEC)) {
        Nearest<CODEC, TABLE_COPIES>::fill(cells);
        copies_wait<0>();
    }
    Pages<DTYPE, is_quantised(CODEC) ? CODEC : TQ4, NORM> pages(p, side, room, tables);
    if (is_quantised(CODEC)) {
        // Whole pages often begin with the first token.
        pages.load_ahead(begin / heads * PAGE_POSITIONS, begin % heads);
    }
#pragma unroll 1
    for (uint item = begin; item < end; item++) {
        const uint head = item % heads, first = item / heads * PAGE_POSITIONS;
        if (item == begin || head == 0) {
            plan_window(p, tokens, first, shared.window);
        }
        if (later != nullptr && head == 0) {
            for (uint i = threadIdx.x; i < PAGE_POSITIONS && window.later > 0 && first + i < p.tokens; i += THREADS) {
                const bool opens = (tokens.positions[first + i] & (PAGE_POSITIONS - 1)) == 0;
                later[first + i] = window.kinds[i] == PREVIOUS && opens ? 1 : 0;
            }
            if (threadIdx.x == 0) {
                later[p.tokens + first / PAGE_POSITIONS] = window.later;
            }
        }
        if (window.whole != NO_TOKEN) {
            const uint t = window.whole;
            if constexpr (is_quantised(CODEC)) {
                RowPlace place = {0, 0};
                find_page(p, tokens, {tokens.sequence[t], tokens.positions[t] >> PAGE_SHIFT}, head, place);
                pages.write({t, nullptr}, place, head, item + 1 < end ? head + 1 : NO_TOKEN);
            } else {
                write_rows<DTYPE, CODEC, NORM>(p, tokens, side, head, PAGE_POSITIONS, [&](uint i) { return t + i; });
            }
        }
        if (window.left > 0) {
            write_left<DTYPE, CODEC, NORM>(p, tokens, side, shared, pages, head);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MINBLOCKS)
    KVANT_KERNEL(const uchar *k, const uchar *v, const uint *positions, const uint *sequence, const uint *lens,
                 uchar *k_low, uchar *k_high, float *k_norms, uchar *v_low, uchar *v_high, float *v_norms,
                 const __grid_constant__ KvWriteParams p, const uint *table, uchar *k_means, uchar *v_means,
                 uint *later) {
    take_turn();
    extern __shared__ __align__(16) uint tables[];
    __shared__ Shared shared;
    PageSums &room = *reinterpret_cast<PageSums *>(tables + TABLE_WORDS);
    const Tokens tokens = {positions, sequence, lens, table};
    const bool is_key = blockIdx.y == 0;
    const uint items = (p.tokens + PAGE_POSITIONS - 1) / PAGE_POSITIONS * p.layer.kv_heads;
    const uint each = (items + gridDim.x - 1) / gridDim.x, begin = min(blockIdx.x * each, items);
    const uint end = min(begin + each, items);
    const Side side = is_key ? Side{k, {k_low, k_high, k_norms, k_means}, p.k_scale, nullptr}
                             : Side{v, {v_low, v_high, v_norms, v_means}, p.v_scale, nullptr};
    if (begin == end) {
        return;
    }
    uint *marks = is_key ? later : nullptr;
    // The same code where both are encoded alike.
    if (is_key || (K_DTYPE == V_DTYPE && K_CODEC == V_CODEC && K_NORM == V_NORM)) {
        write_side<K_DTYPE, K_CODEC, K_NORM>(p, tokens, side, begin, end, tables, room, shared, marks);
    } else {
        write_side<V_DTYPE, V_CODEC, V_NORM>(p, tokens, side, begin, end, tables, room, shared, marks);
    }
}
