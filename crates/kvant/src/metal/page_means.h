// The means of pages, for centred codecs: which one a page gets, and storing rows around it. docs/codec.md has the
// policy, reference/page_means.rs its definition.
//
// A step opens a page if it writes the page's first position; it then chooses the page's mean. That of vectors which
// the previous page stores can be made once that page is complete, which the same step may have written. So a step of
// several tokens of a sequence is written in two passes: pages that need no other, then the rest.
#ifndef KVANT_PAGE_MEANS_H
#define KVANT_PAGE_MEANS_H
#include "slots.h"
#include "turboquant.h"

// The passes (gpu/kv_write.rs). ALONE is the only one, if no sequence has two tokens in the step.
constant constexpr uint ALONE = 0;
constant constexpr uint FIRST_PASS = 1;
constant constexpr uint SECOND_PASS = 2;

// The largest code of a mean.
constant constexpr float MEAN_LEVELS = 127;
// The most positions of a page.
constant constexpr uint MOST_POSITIONS = 256;
// The most quads of a row that a thread has.
constant constexpr uint MOST_QUADS = 4;

constant constexpr uint NO_TOKEN = 0xFFFFFFFF;

// The tokens of a step, and the page table of the layer's group.
struct StepTokens {
    device const uint *positions;
    device const uint *sequence;
    device const uint *lens;
    device const uint *table;
    uint count;
    // Tokens from this position on are skipped.
    uint limit;
};

// The page of a sequence that holds the positions from index << shift on.
struct PageOfSequence {
    uint sequence;
    uint index;
    uint shift;

    uint first() const {
        return index << shift;
    }
    uint positions() const {
        return 1u << shift;
    }
};

inline RowPlace place_of(constant LayerParams &layer, StepTokens step, PageOfSequence page, uint head) {
    return layer_place(layer, step.table, page.shift, page.sequence, head, page.first());
}

// Whether token t is stored in the page.
inline bool is_in(constant LayerParams &layer, StepTokens step, PageOfSequence page, uint t) {
    const uint position = step.positions[t];
    return step.sequence[t] == page.sequence && position >> page.shift == page.index && position < step.limit &&
           is_kept(layer, page.sequence, position, step.lens);
}

// Whether the step opens the page, does not fill it, and the sequence holds the previous page. All threads call it.
// `guess`: the token of the page's first position, if tokens follow one another in the step.
inline bool needs_previous(constant LayerParams &layer, StepTokens step, PageOfSequence page, uint guess,
                           threadgroup uint *room, Place place) {
    if (page.index == 0 || !place_of(layer, step, PageOfSequence{page.sequence, page.index - 1, page.shift}, 0).held) {
        return false;
    }
    const uint index = index_of(place), threads = threads_of(place);
    if (guess < step.count && step.count - guess >= page.positions()) {
        uint in_order = 0;
        for (uint i = index; i < page.positions(); i += threads) {
            const bool here = is_in(layer, step, page, guess + i) && step.positions[guess + i] == page.first() + i;
            in_order += here ? 1 : 0;
        }
        if (reduce<Sum>(in_order, room, place) == page.positions()) {
            return false;
        }
    }
    uint written = 0, opened = 0;
    for (uint t = index; t < step.count; t += threads) {
        const bool here = is_in(layer, step, page, t);
        written += here ? 1 : 0;
        opened += here && step.positions[t] == page.first() ? 1 : 0;
    }
    written = reduce<Sum>(written, room, place);
    return reduce<Sum>(opened, room, place) > 0 && written < page.positions();
}

// The vectors that a page stores, less the page's mean.
struct StoredVectors {
    Planes page;
    uint head;
    uint shift;
    uint dim;
    uint codec;

    ulong row(uint i) const {
        return (ulong(head) << shift) + i;
    }
    // Whether vector i is finite: its norms are.
    bool counts(uint i) const {
        const uint blocks = (dim + 255) / 256;
        for (uint block = 0; block < blocks; block++) {
            if (!is_finite(load_norm(page, row(i) * blocks + block, codec))) {
                return false;
            }
        }
        return true;
    }
    float4 quad(uint i, uint j) const {
        return load_row4(page, row(i), j, dim, codec);
    }
};

// sums ← the sums of every `step`-th vector that counts; quads `quad`, `quad` + `quads`, … of each. Returns how many
// there are.
template <typename Vectors>
inline uint sum_vectors(Vectors vectors, uint count, uint first, uint step, uint quad, uint quads, uint dim,
                        thread float4 *sums) {
    uint found = 0;
    for (uint k = 0; k < MOST_QUADS; k++) {
        sums[k] = float4(0);
    }
    for (uint i = first; i < count; i += step) {
        if (!vectors.counts(i)) {
            continue;
        }
        found++;
        for (uint k = 0; k < MOST_QUADS; k++) {
            const uint j = 4 * (quad + k * quads);
            if (j < dim) {
                sums[k] += vectors.quad(i, j);
            }
        }
    }
    return found;
}

// Stores a rotated mean. Of `mean` a thread has the quads `index`, `index` + `threads`, …; all threads call it.
inline void store_mean(thread const float4 *mean, device uchar *to, uint dim, threadgroup float *room, Place place) {
    const uint index = index_of(place), threads = threads_of(place);
    float largest = 0;
    for (uint k = 0; k < MOST_QUADS; k++) {
        if (4 * (index + k * threads) < dim) {
            const float4 size = abs(mean[k]);
            largest = max(largest, max(max(size.x, size.y), max(size.z, size.w)));
        }
    }
    const float scale = reduce<Max>(largest, room, place) / MEAN_LEVELS;
    for (uint k = 0; k < MOST_QUADS; k++) {
        const uint j = 4 * (index + k * threads);
        if (j < dim) {
            const float4 most = float4(MEAN_LEVELS);
            const float4 codes = scale > 0 ? clamp(rint(mean[k] / scale), -most, most) : float4(0);
            const uint4 bytes = uint4(int4(codes)) & 255;
            *reinterpret_cast<device uint *>(to + j) = bytes.x | bytes.y << 8 | bytes.z << 16 | bytes.w << 24;
        }
    }
    if (index == 0) {
        *reinterpret_cast<device float *>(to + dim) = scale;
    }
}

inline Planes readable(WritablePlanes planes) {
    return Planes{planes.low, planes.high, planes.norms, planes.means};
}

// What the sum of a previous page's vectors, less that page's mean, makes of the mean.
inline float4 mean_of_stored(float4 sum, uint found, StoredVectors vectors, uint j) {
    if (found == 0) {
        return float4(0);
    }
    return sum / float(found) + load_mean4(vectors.page.means + vectors.head * mean_bytes(vectors.dim), j, vectors.dim);
}

// Chooses the mean of a page that one token opens, whose rotated vector is `row`, and stores it at `to`. `previous` are
// the planes of the previous page, if there is one.
inline void open_page(threadgroup const float *row, threadgroup float *room, device uchar *to, bool has_previous,
                      StoredVectors previous, Place place) {
    const uint index = index_of(place), threads = threads_of(place), dim = previous.dim;
    float4 mean[MOST_QUADS];
    if (has_previous) {
        const uint found = sum_vectors(previous, 1u << previous.shift, 0, 1, index, threads, dim, mean);
        for (uint k = 0; k < MOST_QUADS; k++) {
            const uint j = 4 * (index + k * threads);
            mean[k] = j < dim ? mean_of_stored(mean[k], found, previous, j) : float4(0);
        }
    } else {
        float squares = 0;
        for (uint k = 0; k < MOST_QUADS; k++) {
            const uint j = 4 * (index + k * threads);
            mean[k] = coordinates(row, j, j < dim);
            squares += dot(mean[k], mean[k]);
        }
        if (!is_finite(reduce<Sum>(squares, room, place))) {
            for (uint k = 0; k < MOST_QUADS; k++) {
                mean[k] = float4(0);
            }
        }
    }
    store_mean(mean, to, dim, room, place);
}

// Stores a row of threadgroup memory, which is changed, at a place of the planes of a page, whose codec is centred:
// around the page's mean. Begins with a barrier. With `opens` the token opens the page, and is the only one in it.
inline void write_row_around(threadgroup float *row, threadgroup float *room, WritablePlanes planes, RowPlace at,
                             uint head, uint dim, Encoding encoding, bool opens, RowPlace previous, uint shift,
                             Place place) {
    const WritablePlanes to = shifted(planes, at.bytes, encoding.codec);
    device uchar *mean = to.means + head * mean_bytes(dim);
    const uint index = index_of(place), threads = threads_of(place);
    rotate(row, 1, dim, false, index, threads);
    if (opens) {
        const Planes stored = shifted(readable(planes), previous.bytes, encoding.codec);
        open_page(row, room, mean, previous.held, StoredVectors{stored, head, shift, dim, encoding.codec}, place);
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    }
    for (uint j = 4 * index; j < dim; j += 4 * threads) {
        put4(row, j, 4, get4(row, j, 4, true) - load_mean4(mean, j, dim), true);
    }
    encode(row, room, to, at.row, dim, encoding, place);
}

// Stores the row of a token that is the only one of its sequence in the step, whatever the codec. Begins with a
// barrier.
inline void write_alone(threadgroup float *row, threadgroup float *room, WritablePlanes planes, RowPlace at,
                        constant LayerParams &layer, StepTokens step, uint sequence, uint position, uint head, uint dim,
                        uint shift, Encoding encoding, bool aligned, Place place) {
    if (!is_centred(encoding.codec)) {
        write_row(row, room, shifted(planes, at.bytes, encoding.codec), at.row, dim, encoding, aligned, place);
        return;
    }
    const uint positions = 1u << shift;
    const bool opens = (position & (positions - 1)) == 0;
    RowPlace previous = {0, 0, false};
    if (opens && position >= positions) {
        previous = layer_place(layer, step.table, shift, sequence, head, position - positions);
    }
    write_row_around(row, room, planes, at, head, dim, encoding, opens, previous, shift, place);
}

#endif
