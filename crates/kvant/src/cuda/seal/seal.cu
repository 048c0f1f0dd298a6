// seal: encodes dense rows of pages of a pool with the layer's codecs. Each page, KV head and side is encoded
// separately, around its own mean if the side's codec is centred.
//
// pages [n, 3]: entries of the dense and of the sealed pages, and the index of the page in its sequence. Grid (blocks,
// 2): blockIdx.y is 0 for keys and 1 for values. An item is one head of one page; a block takes every gridDim.x-th item
// that has pages. Its threads rotate the rows, add them up, compute the mean of the rotated rows, and encode the rows
// around it. With TILES a warp has eight rows at a time (codec/encode_tiles.h), otherwise HEAD_DIM / PER lanes have a
// row (codec/encode_rows.h). The rows of a page stay in registers if there are threads for all; otherwise they are
// loaded and rotated twice. Rows of dense codecs are moved. With KEY_BIAS the rotated bias is subtracted from keys
// first.
#include "device/dependent_launch.h"
#include "device/key_bias.h"
#include "seal/page_mean.h"
#if TILES
#include "codec/encode_tiles.h"
#endif

struct SealParams {
    // Rows of `pages`.
    uint count;
    uint kv_heads;
    // An entry of at least this number is not a page.
    uint dense_entries;
    uint sealed_entries;
    float k_scale;
    float v_scale;
};

constexpr uint PAGE_ROWS = 1u << PAGE_SHIFT;
constexpr uint ROW_BYTES = HEAD_DIM * size_of(DENSE);

// Words of the tables in shared memory, before the sums.
constexpr uint SIGN_WORDS = TILES ? HEAD_DIM / 2 : 0;
constexpr uint K_WORDS = table_words(K_CODEC, TABLE_COPIES), V_WORDS = table_words(V_CODEC, TABLE_COPIES);
constexpr uint TABLE_WORDS = (SIGN_WORDS + (K_WORDS > V_WORDS ? K_WORDS : V_WORDS) + 3) / 4 * 4;
static_assert(TABLE_WORDS * 4 + sizeof(PageSums) == SHARED_BYTES, "seal: the shared memory that Rust asks for");

// One side of the layer.
struct Side {
    const uchar *dense;
    WritablePlanes planes;
    uchar *means;
    float scale;
    bool is_key;
    KeyBias bias;
};

// The rows of a head in a dense page, and their destination.
struct Item {
    const uchar *source;
    WritablePlanes to;
    uchar *mean;
    // The head's first row in the sealed page.
    ulong first_row;
    uint head;
    // The page's index in its sequence.
    uint index;
};

// The items of a block, one after the other.
struct Items {
    const SealParams &p;
    const uint *pages;
    const Side &side;
    uint next;

    Items(const SealParams &p, const uint *pages, const Side &side) : p(p), pages(pages), side(side), next(blockIdx.x) {}

    // The next item that has pages; false if there is none.
    bool take(Item &item) {
        while (next < p.count * p.kv_heads) {
            const uint page = next / p.kv_heads, head = next % p.kv_heads;
            const uint dense = pages[3 * page], sealed = pages[3 * page + 1];
            next += gridDim.x;
            if (dense < p.dense_entries && sealed < p.sealed_entries) {
                item.source = side.dense + page_bytes(dense) + ulong(head) * (PAGE_ROWS * ROW_BYTES);
                item.to = side.planes.of_page(sealed);
                item.mean = side.means + page_bytes(sealed) + head * mean_bytes(HEAD_DIM);
                item.first_row = ulong(head) << PAGE_SHIFT;
                item.head = head;
                item.index = pages[3 * page + 2];
                return true;
            }
        }
        return false;
    }
};

#if TILES

// Encodes rows eight at a time. The first rows of the next item are loaded while the last ones are encoded.
template <uint CODEC, uint NORM> struct Encoder {
    static constexpr uint STRIP = HEAD_DIM / 16, SETS = PAGE_ROWS / (8 * WARPS);
    static constexpr bool HALF = DENSE == F16;
    PageSums &room;
    const uint *signs;
    const uint *tables;
    float scale;
    uint a[4];
    uint turn;
    Strips<HEAD_DIM> strips;

    Encoder(PageSums &room, const uint *signs, const uint *tables, const Side &side)
        : room(room), signs(signs), tables(tables), scale(side.scale), turn(0) {
        // 1 / sqrt(HEAD_DIM), or that times sqrt(2).
        strip_matrix<HALF>(a, threadIdx.x % 32, HEAD_DIM == 128 ? 0.125f : 0.0625f);
    }

    // The page's row that is row g of the warp's eight.
    static uint row_of(uint set, uint g) {
        return (set * WARPS + threadIdx.x / 32) * 8 + g;
    }
    void load(const Item &item, uint set) {
        strips.load(item.source + row_of(set, threadIdx.x % 32 / 4) * ROW_BYTES);
    }
    void load_ahead(const Item &item) {
        load(item, 0);
    }

    // Adds the finite rows of a set, and returns their number. `usual`: a check of the source found that all rows are
    // finite.
    uint add(float (&sum)[2][STRIP], const float (&y)[2][2][STRIP], bool usual) {
        bool counts[2] = {true, true};
        uint found = 8;
        if (!usual) {
            found = 0;
#pragma unroll
            for (uint r = 0; r < 2; r++) {
                float squares = 0;
#pragma unroll
                for (uint i = 0; i < 2 * STRIP; i++) {
                    squares = fmaf(y[r][i / STRIP][i % STRIP], y[r][i / STRIP][i % STRIP], squares);
                }
                counts[r] = !is_nan_or_infinite(strips_sum(squares));
                found += __popc(__ballot_sync(ALL, counts[r]) & 15);
            }
        }
#pragma unroll
        for (uint i = 0; i < 2 * STRIP; i++) {
            const uint s = i / STRIP, c = i % STRIP;
            sum[s][c] += (counts[0] ? y[0][s][c] : 0) + (counts[1] ? y[1][s][c] : 0);
        }
        return found;
    }

    // Encodes an item whose first rows have been loaded; `next` is the one after it, if `more`.
    void encode(const Item &item, const Item &next, bool more) {
        const uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
        float y[2][2][STRIP];
        const float *mean = nullptr;
        if constexpr (is_centred(CODEC)) {
            float sum[2][STRIP] = {};
            uint found = 0;
#pragma unroll 1
            for (uint set = 0; set < SETS; set++) {
                strips.template rotate<HALF>(y, a, signs);
                const bool usual = __all_sync(ALL, strips.template are_usual<HALF>());
                if (SETS > 1) {
                    // Reads the rows again, from the first one on.
                    load(item, (set + 1) % SETS);
                }
                found += add(sum, y, usual);
            }
#pragma unroll
            for (uint s = 0; s < 2; s++) {
                store_lane_sums<1, 4>(sum[s], &room.sums[turn][warp][(g + 8 * s) * STRIP]);
            }
            if (lane == 0) {
                room.found[turn][warp] = found;
            }
            mean = mean_of_sums(room, turn, item.mean);
            turn ^= 1;
        }
        const Nearest<CODEC, TABLE_COPIES> nearest_to(tables);
#pragma unroll 1
        for (uint set = 0; set < SETS; set++) {
            if (SETS > 1 || !is_centred(CODEC)) {
                strips.template rotate<HALF>(y, a, signs);
            }
            if (set + 1 < SETS) {
                load(item, set + 1);
            } else if (more) {
                load_ahead(next);
            }
            if constexpr (is_centred(CODEC)) {
                subtract_from_eight<HEAD_DIM>(y, mean, lane);
            }
            const auto place = [&](uint row) { return StoredRow{item.to, item.first_row + row_of(set, row), true}; };
            store_eight<HEAD_DIM, CODEC, NORM>(y, place, scale, nearest_to, lane);
        }
    }
};

#else

constexpr uint LANES = HEAD_DIM / PER;
// Rows at a time.
constexpr uint ROWS = THREADS / LANES;

// Encodes rows by HEAD_DIM / PER lanes each.
template <uint CODEC, uint NORM> struct Encoder {
    static constexpr uint SETS = (PAGE_ROWS + ROWS - 1) / ROWS;
    PageSums &room;
    const uint *tables;
    const Side &side;
    float scale;
    uint turn;

    Encoder(PageSums &room, const uint *, const uint *tables, const Side &side)
        : room(room), tables(tables), side(side), scale(side.scale), turn(0) {
    }

    void load_ahead(const Item &) {
    }

    // Loads the lane's part of a set's row, rotated; returns whether the row exists.
    bool load(float (&y)[PER], const Signs<PER> &signs, const Item &item, uint set, uint lane) {
        const uint row = set * ROWS + threadIdx.x / LANES;
        const bool there = row < PAGE_ROWS;
        load_part<DENSE>(y, item.source, (there ? row : 0) * HEAD_DIM + lane * PER, true);
        if (KEY_BIAS && side.is_key && there) {
#pragma unroll
            for (uint j = 0; j < PER; j++) {
                y[j] -= side.bias.at(item.head, item.index, row, lane * PER + j, HEAD_DIM);
            }
        }
        rotate_row<PER, LANES>(y, signs, lane);
        return there;
    }

    void encode(const Item &item, const Item &, bool) {
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
                there = load(y, signs, item, set, lane);
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
            mean = mean_of_sums(room, turn, item.mean) + lane * PER;
            turn ^= 1;
        }
        const Nearest<CODEC, TABLE_COPIES> nearest_to(tables);
#pragma unroll 1
        for (uint set = 0; set < SETS; set++) {
            if (SETS > 1 || !is_centred(CODEC)) {
                there = load(y, signs, item, set, lane);
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
            store_encoded<PER, LANES, CODEC, NORM, TABLE_COPIES>(
                y, item.to, item.first_row + set * ROWS + threadIdx.x / LANES, there, scale, lane, nearest_to);
        }
    }
};

#endif

template <uint CODEC, uint NORM>
inline void seal_side(const SealParams &p, const uint *pages, const Side &side, uint *shared) {
    Items items(p, pages, side);
    Item item, next;
    if (!items.take(item)) {
        return;
    }
    if constexpr (is_quantised(CODEC)) {
        uint *cells = shared + SIGN_WORDS;
#if TILES
        fill_signs<HEAD_DIM>(shared);
#endif
        Nearest<CODEC, TABLE_COPIES>::fill(cells);
        Encoder<CODEC, NORM> encoder(*reinterpret_cast<PageSums *>(shared + TABLE_WORDS), shared, cells, side);
        encoder.load_ahead(item);
        copies_wait<0>();
        __syncthreads();
        for (bool more = true; more; item = next) {
            more = items.take(next);
            encoder.encode(item, next, more);
        }
    } else {
        do {
            move_row(item.source, 0, DENSE, item.to.low, item.first_row * HEAD_DIM, CODEC, PAGE_ROWS * HEAD_DIM, true,
                     threadIdx.x, THREADS);
        } while (items.take(item));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MINBLOCKS)
    KVANT_KERNEL(const uint *pages, const uchar *k, const uchar *v, uchar *k_low, uchar *k_high, float *k_norms,
                 uchar *v_low, uchar *v_high, float *v_norms, uchar *k_means, uchar *v_means,
                 const __grid_constant__ SealParams p, const float *bias_pairs, const uint *bias_places,
                 const float *bias_starts, const float *bias_steps) {
    take_turn();
    extern __shared__ __align__(16) uint shared[];
    const bool is_key = blockIdx.y == 0;
    const KeyBias bias = {bias_pairs, bias_places, bias_starts, bias_steps};
    const Side side = is_key ? Side{k, {k_low, k_high, k_norms}, k_means, p.k_scale, true, bias}
                             : Side{v, {v_low, v_high, v_norms}, v_means, p.v_scale, false, bias};
    // Both sides share the code if they are encoded alike.
    if (is_key || (K_CODEC == V_CODEC && K_NORM == V_NORM)) {
        seal_side<K_CODEC, K_NORM>(p, pages, side, shared);
    } else {
        seal_side<V_CODEC, V_NORM>(p, pages, side, shared);
    }
}
