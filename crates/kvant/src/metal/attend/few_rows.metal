// attend_few: attention for few query rows per KV head: decode and verification.
//
// q [T, H, D] over a cache layer, out [T, H, D]. A threadgroup takes (tile of up to R query rows, KV head, split); all
// rows share the keys and values that it reads. Each of its SIMD-groups takes its own keys, 32 at a time. If the rows
// of large heads do not fit in its registers, several SIMD-groups read the same keys for different rows. L lanes share
// a key (lanes.h); 32 / L keys are loaded at once:
//   scores    the lanes exchange partial sums, eight keys in one tree; in the end lane i has the scores of key i;
//   softmax   in registers. All lanes have a row's largest score; each has the sum of its own weights;
//   values    a lane sums its coordinates over the keys of its L lanes.
// No SIMD-group waits for another before the end. Keys that not all rows see, and the ends of pages and rings, are
// processed one by one (`FAST` is false).
//
// Over quantised keys, the queries are rotated first; over quantised values, o is rotated back at the end. Norms
// multiply scores and weights, not coordinates. Over page means, 32 keys begin at the start of a page, or within it.
// Each mean of keys is then one more key, and each mean of values one more value, whose weight is the sum of the page's
// weights. The key bias, which stored keys do not include, is one more row of coordinates for each key: cosines and
// sines, which are multiplied by factors of the queries (key_bias.h).
#include "attend/lanes.h"
#include "attend/softmax.h"
#include "key_bias.h"
#include "rotate.h"

constant constexpr uint THREADS = 128;
constant constexpr uint SIMDS = THREADS / 32;
// Keys that a SIMD-group processes at once.
constant constexpr uint TILE = 32;
// Keys whose scores a group of lanes computes together.
constant constexpr uint TREE = 8;
// Maximum quads of queries, and of results, that a lane has in registers.
constant constexpr uint MAX_QUADS = 8;
// Pages of a tile, over page means.
constant uint PAGES = TILE >> PAGE_SHIFT > 1 ? TILE >> PAGE_SHIFT : 1;

// Rows of a SIMD-group.
constexpr uint rows_of_simd(uint dim, uint rows) {
    return rows > 1 && rows * quads_of_lane(dim, 32) > MAX_QUADS ? rows_of_simd(dim, rows / 2) : rows;
}

// Lanes that share a key.
constexpr uint lanes_of_key(uint dim, uint rows, uint lanes) {
    return lanes < 32 && rows * quads_of_lane(dim, lanes) > MAX_QUADS ? lanes_of_key(dim, rows, 2 * lanes) : lanes;
}

// The division of work for head size D and R rows.
template <uint D, uint R> struct Division {
    static constant constexpr uint ROWS = rows_of_simd(D, R);
    static constant constexpr uint SETS = R / ROWS;
    static constant constexpr uint STREAMS = SIMDS / SETS > 0 ? SIMDS / SETS : 1;
    static constant constexpr uint L = lanes_of_key(D, ROWS, 8);
    static constant constexpr uint QUADS = quads_of_lane(D, L);
    // Blocks of 256 coordinates, each with a norm.
    static constant constexpr uint BLOCKS = (D + 255) / 256;
    // Floats of threadgroup memory: the queries or results of all rows; the results of half of the streams; two
    // codebooks.
    static constant constexpr uint MERGED = STREAMS > 1 ? STREAMS / 2 * R * D : 0;
    static constant constexpr uint ROOM = MERGED > R * D ? MERGED : R * D;
    static constant constexpr uint FLOATS = ROOM > 2 * TABLE ? ROOM : 2 * TABLE;
};

// The registers of a lane.
template <uint D, uint R> struct Accumulators {
    float4 q[Division<D, R>::ROWS][Division<D, R>::QUADS];
    float4 o[Division<D, R>::ROWS][Division<D, R>::QUADS];
    State states[Division<D, R>::ROWS]; // m of all lanes, l of the lane's own keys
    uint2 seen[Division<D, R>::ROWS];   // the first and the last position of a pass that a row sees
    uint there;                         // the rows that exist, as bits
    uint lane;
    uint c;     // the lane's index among the L lanes of a key
    uint first; // the first of these lanes
    KeyBias bias;
    float4 factors[Division<D, R>::ROWS][Division<D, R>::QUADS]; // of the bias
    Codebook keys;
    Codebook values;
};

// 32 keys from `base` on, one per lane.
template <uint D> struct Tile {
    CachedKeys keys;
    uint base;
    uint seen;     // the rows that see the lane's key, as bits
    RowPlace mine; // the lane's key, if a row sees it
    float k_norms[(D + 255) / 256];
    float v_norms[(D + 255) / 256];
};

template <uint D> inline bool k_pairs(uint lanes) {
    return are_pairs(D, lanes) && K_CODEC != F32;
}

template <uint D> inline bool v_pairs(uint lanes) {
    return are_pairs(D, lanes) && V_CODEC != F32;
}

template <uint N> struct Sums {
    float of[N];
};

// The products of the lane's coordinates of a key with those of the queries. The key belongs to lane `from`.
template <uint D, uint R>
Sums<Division<D, R>::ROWS> products(thread const Accumulators<D, R> &acc, LaneOfRow<D, Division<D, R>::L> key,
                                    thread const Tile<D> &tile, uint from) {
    typedef Division<D, R> Of;
    Sums<Of::ROWS> sums;
    for (uint r = 0; r < Of::ROWS; r++) {
        sums.of[r] = 0;
    }
    for (uint block = 0; block < Of::BLOCKS; block++) {
        constexpr uint EACH = Of::QUADS / Of::BLOCKS;
        // With one norm, scores are multiplied by it at the end.
        const float norm =
            Of::BLOCKS > 1 && K_QUANTISED ? simd_shuffle(tile.k_norms[block], ushort(from)) : 1;
        for (uint r = 0; r < Of::ROWS; r++) {
            float sum = 0;
            for (uint n = block * EACH; n < (block + 1) * EACH; n++) {
                sum += dot(acc.q[r][n], key.quads[n]);
            }
            sums.of[r] = Of::BLOCKS > 1 && K_QUANTISED ? sums.of[r] + norm * sum : sums.of[r] + sum;
        }
    }
    return sums;
}

// The scores of COUNT keys, by a tree: each half of the lanes continues with half of the keys.
template <uint D, uint R, uint COUNT> struct Tree {
    static Sums<Division<D, R>::ROWS> of(thread const Accumulators<D, R> &acc, thread const Tile<D> &tile, RowAddress row,
                                         uint key, uint stride) {
        typedef Division<D, R> Of;
        constexpr uint SPAN = Of::L / TREE, DISTANCE = COUNT / 2 * SPAN;
        const Sums<Of::ROWS> a = Tree<D, R, COUNT / 2>::of(acc, tile, row, key, stride);
        const Sums<Of::ROWS> b = Tree<D, R, COUNT / 2>::of(acc, tile, further(row, DISTANCE * stride, D, K_CODEC),
                                                           key + DISTANCE, stride);
        const bool upper = (acc.c & DISTANCE) != 0;
        Sums<Of::ROWS> sums;
        for (uint r = 0; r < Of::ROWS; r++) {
            const float keep = upper ? b.of[r] : a.of[r], send = upper ? a.of[r] : b.of[r];
            sums.of[r] = keep + simd_shuffle_xor(send, ushort(DISTANCE));
        }
        return sums;
    }
};

template <uint D, uint R> struct Tree<D, R, 1> {
    static Sums<Division<D, R>::ROWS> of(thread const Accumulators<D, R> &acc, thread const Tile<D> &tile, RowAddress row,
                                         uint key, uint) {
        constexpr uint L = Division<D, R>::L;
        const LaneOfRow<D, L> loaded =
            load_row<D, L>(row, acc.c, true, k_pairs<D>(L), K_CODEC, K_ALIGNED, acc.keys);
        return products(acc, loaded, tile, key);
    }
};

// Sums over lanes of a key that are at most `max_distance` apart.
template <uint N> inline Sums<N> added(Sums<N> sums, uint max_distance) {
    for (uint distance = max_distance; distance > 0; distance /= 2) {
        for (uint r = 0; r < N; r++) {
            sums.of[r] += simd_shuffle_xor(sums.of[r], ushort(distance));
        }
    }
    return sums;
}

// Computes the factors of the bias from the queries; all threads call it. Starts with a barrier; `room`, R·D floats, is
// read until the next barrier.
template <uint D, uint R>
void make_factors(thread Accumulators<D, R> &acc, device const uchar *q, Row row, uint set, threadgroup float *room,
                  uint simd) {
    typedef Division<D, R> Of;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint r = simd; r < R; r += SIMDS) {
        const uint vector = simd_shuffle(row.x, ushort(r));
        for (uint j = 4 * acc.lane; j < D; j += 128) {
            const float4 x = vector != NONE ? load4(q, ulong(vector) * D + j, 4, Q_DTYPE, Q_ALIGNED) : float4(0);
            for (uint e = 0; e < 4; e++) {
                room[r * D + acc.bias.places[j + e]] = x[e];
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint r = 0; r < Of::ROWS; r++) {
        for (uint n = 0; n < Of::QUADS; n++) {
            const uint i = n * Of::L + acc.c;
            acc.factors[r][n] = i < D / 4 ? acc.bias.factors(room + (set * Of::ROWS + r) * D, i) : float4(0);
        }
    }
}

// Adds the products of the queries and the bias to scores.
template <uint D, uint R>
void add_bias(thread const Accumulators<D, R> &acc, thread const Tile<D> &tile, thread Sums<Division<D, R>::ROWS> &scores) {
    typedef Division<D, R> Of;
    const uint position = tile.keys.first + tile.base, first = position >> PAGE_SHIFT;
    for (uint page = 0; page < PAGES; page++) {
        // The tables cover only positions that pages hold.
        if (!tile.keys.place_of(tile.base + (page << PAGE_SHIFT)).held) {
            continue;
        }
        float4 factors[Of::ROWS][Of::QUADS];
        for (uint n = 0; n < Of::QUADS; n++) {
            const uint i = n * Of::L + acc.c;
            for (uint r = 0; r < Of::ROWS; r++) {
                factors[r][n] = i < D / 4 ? acc.bias.factors_on_page(acc.factors[r][n], first + page, i) : float4(0);
            }
        }
#pragma clang loop unroll(disable)
        for (uint key = 0; key < Of::L; key++) {
            const uint mine = acc.first + key, slot = acc.bias.slot_of(position + mine);
            Sums<Of::ROWS> sums;
            for (uint r = 0; r < Of::ROWS; r++) {
                sums.of[r] = 0;
            }
            for (uint n = 0; n < Of::QUADS; n++) {
                const uint i = n * Of::L + acc.c;
                const float4 turns = i < D / 4 ? acc.bias.turns(slot, i) : float4(0);
                for (uint r = 0; r < Of::ROWS; r++) {
                    sums.of[r] += dot(factors[r][n], turns);
                }
            }
            sums = added(sums, Of::L / 2);
            for (uint r = 0; r < Of::ROWS; r++) {
                scores.of[r] += acc.c == key && (PAGES == 1 || mine >> PAGE_SHIFT == page) ? sums.of[r] : 0;
            }
        }
    }
}

// The products of queries and keys; lane i gets those of key i.
template <uint D, uint R, bool FAST>
Sums<Division<D, R>::ROWS> multiply_keys(thread const Accumulators<D, R> &acc, thread const Tile<D> &tile) {
    typedef Division<D, R> Of;
    constexpr uint SPAN = Of::L / TREE;
    Sums<Of::ROWS> scores;
    for (uint r = 0; r < Of::ROWS; r++) {
        scores.of[r] = 0;
    }
    if (FAST) {
        const uint stride = tile.keys.stride;
        RowAddress row = address_of(tile.keys.k, tile.keys.place_of(tile.base), D, K_CODEC);
        row = further(row, acc.first * stride, D, K_CODEC);
#pragma clang loop unroll(disable)
        for (uint b = 0; b < SPAN; b++) {
            const Sums<Of::ROWS> sums =
                added(Tree<D, R, TREE>::of(acc, tile, row, acc.first + b, stride), SPAN / 2);
            for (uint r = 0; r < Of::ROWS; r++) {
                scores.of[r] = acc.c % SPAN == b ? sums.of[r] : scores.of[r];
            }
            row = further(row, stride, D, K_CODEC);
        }
    } else {
        for (uint i = 0; i < Of::L; i++) {
            const uint key = acc.first + i;
            const bool wanted = simd_shuffle(tile.seen, ushort(key)) != 0;
            RowAddress row = {tile.keys.k.low, tile.keys.k.high};
            if (wanted) {
                row = address_of(tile.keys.k, tile.keys.place_of(tile.base + key), D, K_CODEC);
            }
            const LaneOfRow<D, Of::L> loaded =
                load_row<D, Of::L>(row, acc.c, wanted, k_pairs<D>(Of::L), K_CODEC, K_ALIGNED, acc.keys);
            const Sums<Of::ROWS> sums = added(products(acc, loaded, tile, key), Of::L / 2);
            for (uint r = 0; r < Of::ROWS; r++) {
                scores.of[r] = acc.c == i ? sums.of[r] : scores.of[r];
            }
        }
    }
    for (uint r = 0; r < Of::ROWS; r++) {
        if (K_QUANTISED && Of::BLOCKS == 1) {
            scores.of[r] *= tile.k_norms[0];
        }
    }
    for (uint page = 0; K_CENTRED && page < PAGES; page++) {
        const RowPlace at = tile.keys.place_of(tile.base + (page << PAGE_SHIFT));
        LaneOfRow<D, Of::L> mean;
        for (uint n = 0; n < Of::QUADS; n++) {
            const uint quad = quad_of(n, acc.c, Of::L, k_pairs<D>(Of::L));
            mean.quads[n] = at.held && quad < D / 4 ? tile.keys.key_mean4(at, 4 * quad, D) : float4(0);
        }
        for (uint r = 0; r < Of::ROWS; r++) {
            float sum = 0;
            for (uint n = 0; n < Of::QUADS; n++) {
                sum += dot(acc.q[r][n], mean.quads[n]);
            }
            for (uint distance = Of::L / 2; distance > 0; distance /= 2) {
                sum += simd_shuffle_xor(sum, ushort(distance));
            }
            scores.of[r] += PAGES == 1 || acc.lane >> PAGE_SHIFT == page ? sum : 0;
        }
    }
    if (KEY_BIAS) {
        add_bias(acc, tile, scores);
    }
    return scores;
}

// Adds the values of a tile to o, by the weights of the lanes' own keys.
template <uint D, uint R, bool FAST>
void add_values(thread Accumulators<D, R> &acc, thread const Tile<D> &tile, Sums<Division<D, R>::ROWS> weights) {
    typedef Division<D, R> Of;
    constexpr uint EACH = Of::QUADS / Of::BLOCKS, SPAN = Of::L / TREE;
    const uint stride = tile.keys.stride;
    RowAddress row = {tile.keys.v.low, tile.keys.v.high};
    if (FAST) {
        row = further(address_of(tile.keys.v, tile.keys.place_of(tile.base), D, V_CODEC), acc.first * stride, D, V_CODEC);
    }
#pragma clang loop unroll(disable)
    for (uint b = 0; b < SPAN; b++) {
        for (uint s = 0; s < TREE; s++) {
            const uint i = s * SPAN + b, key = acc.first + i;
            const uint seen = FAST ? acc.there : simd_shuffle(tile.seen, ushort(key));
            const bool wanted = seen != 0;
            RowAddress at = FAST ? further(row, i * stride, D, V_CODEC) : row;
            if (!FAST && wanted) {
                at = address_of(tile.keys.v, tile.keys.place_of(tile.base + key), D, V_CODEC);
            }
            const LaneOfRow<D, Of::L> value =
                load_row<D, Of::L>(at, acc.c, FAST || wanted, v_pairs<D>(Of::L), V_CODEC, V_ALIGNED, acc.values);
            for (uint block = 0; block < Of::BLOCKS; block++) {
                const float norm =
                    V_QUANTISED && Of::BLOCKS > 1 ? simd_shuffle(tile.v_norms[block], ushort(key)) : 1;
                for (uint r = 0; r < Of::ROWS; r++) {
                    float weight = simd_shuffle(weights.of[r], ushort(key));
                    weight = V_QUANTISED && Of::BLOCKS > 1 ? weight * norm : weight;
                    // Selected, not multiplied by 0, because an unseen value may be NaN.
                    if (FAST || (seen >> r & 1) != 0) {
                        for (uint n = block * EACH; n < (block + 1) * EACH; n++) {
                            acc.o[r][n] += weight * value.quads[n];
                        }
                    }
                }
            }
        }
    }
}

// Adds the means of values, each times the sum of the weights of the page's keys that the L lanes have.
template <uint D, uint R>
void add_means(thread Accumulators<D, R> &acc, thread const Tile<D> &tile, Sums<Division<D, R>::ROWS> weights) {
    typedef Division<D, R> Of;
    for (uint page = 0; page < PAGES; page++) {
        const bool mine = PAGES == 1 || acc.lane >> PAGE_SHIFT == page;
        uint seen = mine ? tile.seen : 0;
        Sums<Of::ROWS> masses;
        for (uint r = 0; r < Of::ROWS; r++) {
            masses.of[r] = mine ? weights.of[r] : 0;
        }
        masses = added(masses, Of::L / 2);
        for (uint distance = Of::L / 2; distance > 0; distance /= 2) {
            seen |= simd_shuffle_xor(seen, ushort(distance));
        }
        if (seen == 0) {
            continue;
        }
        const RowPlace at = tile.keys.place_of(tile.base + (page << PAGE_SHIFT));
        for (uint n = 0; n < Of::QUADS; n++) {
            const uint quad = quad_of(n, acc.c, Of::L, v_pairs<D>(Of::L));
            const float4 mean = quad < D / 4 ? tile.keys.value_mean4(at, 4 * quad, D) : float4(0);
            for (uint r = 0; r < Of::ROWS; r++) {
                if ((seen >> r & 1) != 0) {
                    acc.o[r][n] += masses.of[r] * mean;
                }
            }
        }
    }
}

// Adds a tile to the states; all lanes of a SIMD-group call it.
template <uint D, uint R, bool FAST>
void take(thread Accumulators<D, R> &acc, thread Tile<D> &tile, constant MetalAttendParams &p) {
    typedef Division<D, R> Of;
    for (uint block = 0; block < Of::BLOCKS; block++) {
        const bool wanted = FAST || tile.seen != 0;
        const ulong norm = tile.mine.row * Of::BLOCKS + block;
        tile.k_norms[block] =
            K_QUANTISED && wanted ? load_norm(shifted(tile.keys.k, tile.mine.bytes, K_CODEC), norm, K_CODEC) : 0;
        tile.v_norms[block] =
            V_QUANTISED && wanted ? load_norm(shifted(tile.keys.v, tile.mine.bytes, V_CODEC), norm, V_CODEC) : 0;
    }
    const Sums<Of::ROWS> scores = multiply_keys<D, R, FAST>(acc, tile);
    Sums<Of::ROWS> weights, masses;
    for (uint r = 0; r < Of::ROWS; r++) {
        const bool sees = FAST || (tile.seen >> r & 1) != 0;
        const float score = score_of(scores.of[r], p);
        const float before = acc.states[r].m;
        const float m = simd_max(sees ? raised(before, score) : before);
        const float weight = sees ? precise::exp2(score - m) : 0;
        if (m != before) {
            const float factor = precise::exp2(before - m);
            acc.states[r] = State{m, acc.states[r].l * factor};
            for (uint n = 0; n < Of::QUADS; n++) {
                acc.o[r][n] *= factor;
            }
        }
        acc.states[r].l += weight;
        masses.of[r] = weight;
        weights.of[r] = V_QUANTISED && Of::BLOCKS == 1 && sees ? weight * tile.v_norms[0] : weight;
    }
    add_values<D, R, FAST>(acc, tile, weights);
    if (V_CENTRED) {
        add_means(acc, tile, masses);
    }
}

// Processes keys begin .. end of a pass; all lanes of a SIMD-group call it.
template <uint D, uint R>
void absorb(CachedKeys keys, uint begin, uint end, uint stream, thread Accumulators<D, R> &acc, constant MetalAttendParams &p) {
    typedef Division<D, R> Of;
    for (uint base = begin + stream * TILE; base < end; base += Of::STREAMS * TILE) {
        Tile<D> tile;
        tile.keys = keys;
        tile.base = base;
        tile.seen = 0;
        const uint i = base + acc.lane, position = keys.first + i;
        for (uint r = 0; r < Of::ROWS; r++) {
            const uint2 bounds = acc.seen[r];
            const bool sees = i < end && bounds.x <= position && position <= bounds.y;
            tile.seen |= sees ? 1u << r : 0;
        }
        tile.mine = RowPlace{0, 0, false};
        if (tile.seen != 0) {
            tile.mine = keys.place_of(i);
            tile.seen = tile.mine.held ? tile.seen : 0;
        }
        if (keys.are_together(base, TILE) && simd_all((tile.seen & acc.there) == acc.there)) {
            take<D, R, true>(acc, tile, p);
        } else if (simd_any(tile.seen != 0)) {
            take<D, R, false>(acc, tile, p);
        }
    }
}

// Merges the states and o of the streams into those of the first one. All threads call it.
template <uint D, uint R>
void merge_streams(thread Accumulators<D, R> &acc, threadgroup float *room, threadgroup float2 *states, uint set, uint stream) {
    typedef Division<D, R> Of;
    const bool pairs = v_pairs<D>(Of::L);
    for (uint half_of = Of::STREAMS / 2; half_of > 0; half_of /= 2) {
        // After the first round, a stream overwrites only the slot that it has read itself: others may still be read.
        const uint slot = stream % half_of + (half_of < Of::STREAMS / 2 ? half_of : 0);
        if (stream >= half_of && stream < 2 * half_of) {
            for (uint r = 0; r < Of::ROWS; r++) {
                const uint row = slot * R + set * Of::ROWS + r;
                for (uint n = 0; n < Of::QUADS; n++) {
                    const uint quad = quad_of(n, acc.c, Of::L, pairs);
                    if (n % (32 / Of::L) == acc.first / Of::L && quad < D / 4) {
                        reinterpret_cast<threadgroup float4 *>(room)[row * (D / 4) + quad] = acc.o[r][n];
                    }
                }
                if (acc.lane == 0) {
                    states[row] = packed(acc.states[r]);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (stream < half_of) {
            for (uint r = 0; r < Of::ROWS; r++) {
                const uint row = slot * R + set * Of::ROWS + r;
                const float2 factors = merge(acc.states[r], unpacked(states[row]));
                for (uint n = 0; n < Of::QUADS; n++) {
                    const uint quad = quad_of(n, acc.c, Of::L, pairs);
                    if (quad < D / 4) {
                        const float4 other = reinterpret_cast<threadgroup const float4 *>(room)[row * (D / 4) + quad];
                        acc.o[r][n] = acc.o[r][n] * factors.x + other * factors.y;
                    }
                }
            }
            // Lanes overwrite memory that other lanes of the SIMD-group have read.
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

template <uint D, uint R>
kernel void attend_few(device const uchar *q [[buffer(0)]],
                       device uchar *out [[buffer(1), function_constant(WHOLE)]],
                       device const uint *positions [[buffer(2)]],
                       device const uint *sequences [[buffer(3)]],
                       device const uint *lens [[buffer(4)]],
                       device const uchar *k_low [[buffer(5)]],
                       device const uchar *k_high [[buffer(6), function_constant(K_HIGH)]],
                       device const uchar *k_norms [[buffer(7), function_constant(K_QUANTISED)]],
                       device const uchar *v_low [[buffer(8)]],
                       device const uchar *v_high [[buffer(9), function_constant(V_HIGH)]],
                       device const uchar *v_norms [[buffer(10), function_constant(V_QUANTISED)]],
                       device const float *sinks [[buffer(11), function_constant(SINKS_HERE)]],
                       device const float *earlier_out [[buffer(12), function_constant(EARLIER_HERE)]],
                       device float *partial_o [[buffer(13), function_constant(PARTIAL)]],
                       device float2 *partial_states [[buffer(14), function_constant(PARTIAL)]],
                       constant MetalAttendParams &p [[buffer(15)]],
                       device const uint *table [[buffer(16), function_constant(PAGED)]],
                       device const uchar *k_means [[buffer(17), function_constant(K_CENTRED)]],
                       device const uchar *v_means [[buffer(18), function_constant(V_CENTRED)]],
                       device const float *earlier_ends [[buffer(19), function_constant(EARLIER_HERE)]],
                       device float *ends [[buffer(20), function_constant(ENDS_HERE)]],
                       device const float *bias_pairs [[buffer(21), function_constant(KEY_BIAS)]],
                       device const uint *bias_places [[buffer(22), function_constant(KEY_BIAS)]],
                       device const float *bias_starts [[buffer(23), function_constant(KEY_BIAS)]],
                       device const float *bias_steps [[buffer(24), function_constant(KEY_BIAS)]],
                       uint3 group [[threadgroup_position_in_grid]],
                       uint index [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint simd [[simdgroup_index_in_threadgroup]]) {
    typedef Division<D, R> Of;
    threadgroup float4 memory[Of::FLOATS / 4];
    threadgroup float2 states[SIMDS * R];
    threadgroup float *room = reinterpret_cast<threadgroup float *>(memory);
    const uint kv_head = group.y, split = group.z;
    const uint set = simd % Of::SETS, stream = simd / Of::SETS;
    const Planes keys = {k_low, K_HIGH ? k_high : nullptr, K_QUANTISED ? k_norms : nullptr,
                         K_CENTRED ? k_means : nullptr};
    const Planes values = {v_low, V_HIGH ? v_high : nullptr, V_QUANTISED ? v_norms : nullptr,
                           V_CENTRED ? v_means : nullptr};

    // Lane i of every SIMD-group has row i.
    uint position;
    Row row = row_of(group.x, lane, kv_head, positions, sequences, p, position);
    if (K_QUANTISED && !Q_ROTATED) {
        // A SIMD-group loads a row at a time.
        for (uint r = simd; r < R; r += SIMDS) {
            const uint vector = simd_shuffle(row.x, ushort(r));
            for (uint quad = lane; quad < D / 4; quad += 32) {
                reinterpret_cast<threadgroup float4 *>(room)[r * (D / 4) + quad] =
                    vector != NONE ? load4(q, ulong(vector) * D + 4 * quad, 4, Q_DTYPE, Q_ALIGNED) : float4(0);
            }
        }
        rotate(room, p.tile_rows, D, false, index, THREADS);
    }
    Accumulators<D, R> acc;
    acc.lane = lane;
    acc.c = lane % Of::L;
    acc.first = lane - acc.c;
    acc.there = 0;
    for (uint r = 0; r < Of::ROWS; r++) {
        const uint vector = simd_shuffle(row.x, ushort(set * Of::ROWS + r));
        acc.there |= vector != NONE ? 1u << r : 0;
        acc.states[r] = no_keys();
        for (uint n = 0; n < Of::QUADS; n++) {
            const uint quad = quad_of(n, acc.c, Of::L, k_pairs<D>(Of::L));
            acc.o[r][n] = float4(0);
            acc.q[r][n] = float4(0);
            if (vector != NONE && quad < D / 4) {
                acc.q[r][n] =
                    K_QUANTISED && !Q_ROTATED
                        ? reinterpret_cast<threadgroup const float4 *>(room)[(set * Of::ROWS + r) * (D / 4) + quad]
                        : load4(q, ulong(vector) * D + 4 * quad, 4, Q_DTYPE, Q_ALIGNED);
            }
        }
    }
    acc.bias = KeyBias{nullptr, nullptr, nullptr, nullptr, D, PAGE_SHIFT};
    if (KEY_BIAS) {
        acc.bias = key_bias_of(bias_pairs, bias_places, bias_starts, bias_steps, kv_head, D, PAGE_SHIFT);
        make_factors(acc, q, row, set, room, simd);
    }
    if (has_table(K_CODEC) || has_table(V_CODEC)) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = index; i < TABLE; i += THREADS) {
            room[i] = has_table(K_CODEC) ? centroid(i, K_CODEC) : 0;
            room[TABLE + i] = has_table(V_CODEC) ? centroid(i, V_CODEC) : 0;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    acc.keys = Codebook{K_QUANTISED ? centroid(lane, K_CODEC) : 0, room};
    acc.values = Codebook{V_QUANTISED ? centroid(lane, V_CODEC) : 0, room + TABLE};

    for (uint sequence = simd_min(row.y); sequence != NONE;) {
        row = seeing(row, position, sequence, lens[sequence], p);
        const uint seen_first = simd_min(row.z), last = simd_max(row.w);
        const uint first = begin_of_pass(seen_first, TILE);
        const uint2 part = seen_first <= last ? part_of(last - first + 1, split, TILE * Of::STREAMS, p) : uint2(0);
        if (part.x < part.y) {
            for (uint r = 0; r < Of::ROWS; r++) {
                const ushort from = ushort(set * Of::ROWS + r);
                acc.seen[r] = uint2(simd_shuffle(row.z, from), simd_shuffle(row.w, from));
            }
            const CachedKeys seen = keys_of(keys, values, PAGED ? table : nullptr, sequence, kv_head, first, p);
            absorb(seen, part.x, part.y, stream, acc, p);
        }
        sequence = simd_min(row.y > sequence ? row.y : NONE);
    }

    // o is divided among the groups of lanes that share a key, l among all lanes.
    for (uint r = 0; r < Of::ROWS; r++) {
        acc.states[r].l = simd_sum(acc.states[r].l);
        for (uint n = 0; n < Of::QUADS; n++) {
            for (uint distance = Of::L; distance < 32; distance *= 2) {
                const float4 o = acc.o[r][n];
                acc.o[r][n] = o + float4(simd_shuffle_xor(o.x, ushort(distance)), simd_shuffle_xor(o.y, ushort(distance)),
                                          simd_shuffle_xor(o.z, ushort(distance)), simd_shuffle_xor(o.w, ushort(distance)));
            }
        }
    }
    // Other SIMD-groups may read queries and codebooks up to here.
    if ((K_QUANTISED && !Q_ROTATED) || has_table(K_CODEC) || has_table(V_CODEC)) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    merge_streams(acc, room, states, set, stream);
    const bool pairs = v_pairs<D>(Of::L);
    if (V_QUANTISED) {
        // Since the last barrier, no other SIMD-group has read the memory that a SIMD-group writes here.
        for (uint r = 0; r < Of::ROWS && stream == 0; r++) {
            for (uint n = 0; n < Of::QUADS; n++) {
                const uint quad = quad_of(n, acc.c, Of::L, pairs);
                if (n % (32 / Of::L) == acc.first / Of::L) {
                    reinterpret_cast<threadgroup float4 *>(room)[(set * Of::ROWS + r) * (D / 4) + quad] = acc.o[r][n];
                }
            }
        }
        rotate(room, p.tile_rows, D, true, index, THREADS);
    }
    for (uint r = 0; r < Of::ROWS && stream == 0; r++) {
        const uint vector = simd_shuffle(row.x, ushort(set * Of::ROWS + r));
        if (vector == NONE) {
            continue;
        }
        const ulong start = ulong(vector) * D, at = split * (ulong(p.tokens) * p.heads) * D + start;
        State state = acc.states[r];
        float2 factors = float2(1, 0);
        if (EARLIER_HERE) {
            // `ends` may be the memory of the earlier ends: the lane that writes an end has read it before.
            factors = with_earlier(state, simd_shuffle(lane == 0 ? earlier_ends[vector] : 0, ushort(0)));
        }
        const float factor = PARTIAL ? 1 : finish(with_sink(state, SINKS_HERE ? sinks : nullptr, vector, p));
        for (uint n = 0; n < Of::QUADS; n++) {
            const uint quad = quad_of(n, acc.c, Of::L, pairs);
            if (n % (32 / Of::L) != acc.first / Of::L || quad >= D / 4) {
                continue;
            }
            float4 o =
                V_QUANTISED ? reinterpret_cast<threadgroup const float4 *>(room)[(set * Of::ROWS + r) * (D / 4) + quad]
                            : acc.o[r][n];
            if (EARLIER_HERE) {
                o = o * factors.x + *reinterpret_cast<device const float4 *>(earlier_out + start + 4 * quad) * factors.y;
            }
            if (!PARTIAL) {
                store4(out, start + 4 * quad, 4, o * factor, OUT_DTYPE, false);
            } else if (state.m != -INFINITY) {
                *reinterpret_cast<device float4 *>(partial_o + at + 4 * quad) = o;
            }
        }
        if (PARTIAL && lane == 0) {
            partial_states[at / D] = packed(state);
        }
        if (ENDS_HERE && lane == 0) {
            ends[vector] = end_of(state);
        }
    }
}

// The second argument is the maximum rows of a tile: those of one token, or of a few.
template [[host_name("attend_few_64_1")]] [[kernel]] decltype(attend_few<64, 1>) attend_few<64, 1>;
template [[host_name("attend_few_64_2")]] [[kernel]] decltype(attend_few<64, 2>) attend_few<64, 2>;
template [[host_name("attend_few_64_4")]] [[kernel]] decltype(attend_few<64, 4>) attend_few<64, 4>;
template [[host_name("attend_few_64_8")]] [[kernel]] decltype(attend_few<64, 8>) attend_few<64, 8>;
template [[host_name("attend_few_128_1")]] [[kernel]] decltype(attend_few<128, 1>) attend_few<128, 1>;
template [[host_name("attend_few_128_2")]] [[kernel]] decltype(attend_few<128, 2>) attend_few<128, 2>;
template [[host_name("attend_few_128_4")]] [[kernel]] decltype(attend_few<128, 4>) attend_few<128, 4>;
template [[host_name("attend_few_128_8")]] [[kernel]] decltype(attend_few<128, 8>) attend_few<128, 8>;
template [[host_name("attend_few_256_1")]] [[kernel]] decltype(attend_few<256, 1>) attend_few<256, 1>;
template [[host_name("attend_few_256_2")]] [[kernel]] decltype(attend_few<256, 2>) attend_few<256, 2>;
template [[host_name("attend_few_256_4")]] [[kernel]] decltype(attend_few<256, 4>) attend_few<256, 4>;
template [[host_name("attend_few_256_8")]] [[kernel]] decltype(attend_few<256, 8>) attend_few<256, 8>;
template [[host_name("attend_few_512_1")]] [[kernel]] decltype(attend_few<512, 1>) attend_few<512, 1>;
template [[host_name("attend_few_512_2")]] [[kernel]] decltype(attend_few<512, 2>) attend_few<512, 2>;
template [[host_name("attend_few_512_4")]] [[kernel]] decltype(attend_few<512, 4>) attend_few<512, 4>;
template [[host_name("attend_few_512_8")]] [[kernel]] decltype(attend_few<512, 8>) attend_few<512, 8>;
// The less common head sizes have kernels for one row, and for up to eight.
template [[host_name("attend_few_80_1")]] [[kernel]] decltype(attend_few<80, 1>) attend_few<80, 1>;
template [[host_name("attend_few_80_8")]] [[kernel]] decltype(attend_few<80, 8>) attend_few<80, 8>;
template [[host_name("attend_few_96_1")]] [[kernel]] decltype(attend_few<96, 1>) attend_few<96, 1>;
template [[host_name("attend_few_96_8")]] [[kernel]] decltype(attend_few<96, 8>) attend_few<96, 8>;
template [[host_name("attend_few_112_1")]] [[kernel]] decltype(attend_few<112, 1>) attend_few<112, 1>;
template [[host_name("attend_few_112_8")]] [[kernel]] decltype(attend_few<112, 8>) attend_few<112, 8>;
template [[host_name("attend_few_192_1")]] [[kernel]] decltype(attend_few<192, 1>) attend_few<192, 1>;
template [[host_name("attend_few_192_8")]] [[kernel]] decltype(attend_few<192, 8>) attend_few<192, 8>;
