// The means of pages, for centred codecs: which one a page gets, and subtracting it from rows. docs/codec.md has the
// policy, reference/page_means.rs its definition.
//
// A step opens a page if it writes the page's first position; it then chooses the page's mean. That of vectors which
// the previous page stores can be made once that page is complete, which the same step may have written. So a step of
// several tokens of a sequence takes two launches (kv_write/write_pages.cu, kv_write/open_pages.cu). Here is what a
// token does which is the only one of its sequence.
#ifndef KVANT_CUDA_CODEC_PAGE_MEANS_H
#define KVANT_CUDA_CODEC_PAGE_MEANS_H
#include "codec/encode_rows.h"
#include "device/cache_slots.h"

constexpr uint PAGE_POSITIONS = 1u << PAGE_SHIFT;

// The largest code of a mean.
constexpr float MEAN_LEVELS = 127;

inline float scale_of_mean(float largest) {
    return largest / MEAN_LEVELS;
}

inline int code_of_mean(float m, float scale) {
    return scale > 0 ? int(fmaxf(-MEAN_LEVELS, fminf(rintf(m / scale), MEAN_LEVELS))) : 0;
}

// Four codes, the first in the lowest byte.
inline uint four_codes(const int *codes) {
    return (codes[0] & 255) | (codes[1] & 255) << 8 | (codes[2] & 255) << 16 | uint(codes[3]) << 24;
}

// Whether vector `row` of a page is finite: its norms are.
template <uint DIM, uint CODEC> inline bool is_finite_row(const Planes &page, ulong row) {
    constexpr uint BLOCKS = (DIM + 255) / 256;
#pragma unroll
    for (uint block = 0; block < BLOCKS; block++) {
        if (is_nan_or_infinite(load_norm(page, row * BLOCKS + block, CODEC))) {
            return false;
        }
    }
    return true;
}

// A page that a token opens alone, and the previous page of its sequence, if that is held.
struct OpenedPage {
    bool opens;
    bool has_previous;
    uint previous;
};

// That of a token that is the only one of its sequence in the step.
inline OpenedPage opened_page(const LayerParams &layer, const uint *table, uint sequence, uint head, uint position) {
    OpenedPage opened = {(position & (PAGE_POSITIONS - 1)) == 0, false, 0};
    RowPlace place;
    if (opened.opens && position >= PAGE_POSITIONS &&
        find_in_pages(layer, table, sequence, head, position - PAGE_POSITIONS, place)) {
        opened.has_previous = true;
        opened.previous = place.page;
    }
    return opened;
}

// The mean of a row's page, as far as a lane needs it. It is loaded before the row is rotated, which takes as long.
template <uint MINE> struct MeanPart {
    uint codes[MINE / 4];
    float scale;

    inline void load(const uchar *mean, uint dim, uint lane) {
#pragma unroll
        for (uint i = 0; i < MINE / 4; i++) {
            codes[i] = reinterpret_cast<const uint *>(mean + lane * MINE)[i];
        }
        scale = *reinterpret_cast<const float *>(mean + dim);
    }
    inline float at(uint j) const {
        return scale * code_of_four(codes[j / 4], j % 4);
    }
};

inline ulong mean_at(RowPlace at, uint head, uint dim) {
    return page_bytes(at.page) + head * mean_bytes(dim);
}

// BITS bits of each of MINE indices, as store_bits leaves them.
template <uint BITS, uint MINE> struct PartOfPlane {
    static constexpr uint EACH = 32 / BITS;
    uint words[(MINE + EACH - 1) / EACH];

    inline void load(const uchar *from) {
        if constexpr (MINE >= EACH) {
#pragma unroll
            for (uint i = 0; i < MINE / EACH; i++) {
                words[i] = reinterpret_cast<const uint *>(from)[i];
            }
        } else if constexpr (MINE * BITS == 16) {
            words[0] = *reinterpret_cast<const ushort *>(from);
        } else {
            words[0] = *from;
        }
    }
    inline uint at(uint j) const {
        return words[j / EACH] >> (j % EACH * BITS) & ((1u << BITS) - 1);
    }
};

// sum ← the sum of the finite vectors that a page stores from row `first` on, decoded, less the page's mean; returns
// how many they are. A warp does it: SHARERS lanes have MINE coordinates of a vector each, as many vectors at a time
// as there are lanes for. All of them get the sum.
template <uint MINE, uint SHARERS, uint CODEC, uint COPIES>
inline float sum_stored(float (&sum)[MINE], const Planes &page, ulong first, const Nearest<CODEC, COPIES> &nearest_to,
                        uint lane) {
    constexpr uint DIM = MINE * SHARERS, BLOCKS = (DIM + 255) / 256, BESIDE = 32 / SHARERS;
    constexpr uint LOW = low_bits_of(CODEC), HIGH = high_bits_of(CODEC);
    // Vectors whose codes are loaded before the first of them is decoded.
    constexpr uint AHEAD = MINE <= 8 ? 16 : 4;
    float found = 0;
#pragma unroll
    for (uint j = 0; j < MINE; j++) {
        sum[j] = 0;
    }
#pragma unroll 1
    for (uint begin = 0; begin < PAGE_POSITIONS; begin += AHEAD * BESIDE) {
        PartOfPlane<LOW, MINE> low[AHEAD];
        PartOfPlane<HIGH == 0 ? 1 : HIGH, MINE> high[AHEAD];
        float norms[AHEAD][BLOCKS];
#pragma unroll
        for (uint k = 0; k < AHEAD; k++) {
            const uint i = begin + k * BESIDE + threadIdx.x % 32 / SHARERS;
            const ulong row = first + min(i, PAGE_POSITIONS - 1);
            low[k].load(page.low + row * (DIM / 8 * LOW) + lane * (MINE / 8 * LOW));
            if constexpr (HIGH > 0) {
                high[k].load(page.high + row * (DIM / 8 * HIGH) + lane * (MINE / 8 * HIGH));
            }
#pragma unroll
            for (uint block = 0; block < BLOCKS; block++) {
                norms[k][block] = load_norm(page, row * BLOCKS + block, CODEC);
            }
        }
#pragma unroll
        for (uint k = 0; k < AHEAD; k++) {
            bool counts = begin + k * BESIDE + threadIdx.x % 32 / SHARERS < PAGE_POSITIONS;
            float norm = 0;
#pragma unroll
            for (uint block = 0; block < BLOCKS; block++) {
                counts = counts && !is_nan_or_infinite(norms[k][block]);
                norm = lane * MINE / 256 == block ? norms[k][block] : norm;
            }
            norm = counts ? norm : 0;
            found += counts ? 1 : 0;
#pragma unroll
            for (uint j = 0; j < MINE; j++) {
                uint index = low[k].at(j);
                if constexpr (HIGH > 0) {
                    index |= high[k].at(j) << LOW;
                }
                sum[j] = fmaf(norm, nearest_to.centroid(index), sum[j]);
            }
        }
    }
#pragma unroll
    for (uint distance = SHARERS; distance < 32; distance *= 2) {
        found += __shfl_xor_sync(ALL, found, distance);
#pragma unroll
        for (uint j = 0; j < MINE; j++) {
            sum[j] += __shfl_xor_sync(ALL, sum[j], distance);
        }
    }
    return found;
}

// Subtracts `mean`, that of its page, from a rotated row, of which SHARERS lanes have MINE coordinates each. All
// lanes of a warp call this; those whose row is not `kept` store nothing. With `opens` the row's token opens the
// page, and is the only one in it: the warp, all of whose lanes have parts of this row, chooses the mean, and stores
// it.
template <uint MINE, uint SHARERS, uint CODEC, uint COPIES>
inline void subtract_mean(float (&y)[MINE], const MeanPart<MINE> &mean, const WritablePlanes &planes, RowPlace at,
                          uint head, bool kept, OpenedPage opened, uint lane, const Nearest<CODEC, COPIES> &nearest_to) {
    constexpr uint DIM = MINE * SHARERS;
    if (__any_sync(ALL, opened.opens)) {
        float squares = 0;
#pragma unroll
        for (uint j = 0; j < MINE; j++) {
            squares = fmaf(y[j], y[j], squares);
        }
        const bool storable = !is_nan_or_infinite(lane_sum<SHARERS>(squares));
        float m[MINE];
        if (opened.has_previous) {
            const Planes previous = planes.of_page(opened.previous).readable();
            const ulong first = ulong(head) << PAGE_SHIFT;
            const float found = sum_stored<MINE, SHARERS>(m, previous, first, nearest_to, lane);
            const uchar *before = previous.means + head * mean_bytes(DIM);
#pragma unroll
            for (uint j = 0; j < MINE; j += 4) {
                const float4 four = load_mean4(before, lane * MINE + j, DIM);
#pragma unroll
                for (uint i = 0; i < 4; i++) {
                    m[j + i] = found > 0 ? m[j + i] / found + part(four, i) : 0;
                }
            }
        } else {
#pragma unroll
            for (uint j = 0; j < MINE; j++) {
                m[j] = storable ? y[j] : 0;
            }
        }
        float largest = 0;
#pragma unroll
        for (uint j = 0; j < MINE; j++) {
            largest = fmaxf(largest, fabsf(m[j]));
        }
#pragma unroll
        for (uint distance = 1; distance < SHARERS; distance *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, distance));
        }
        uchar *to = planes.means + mean_at(at, head, DIM);
        const float scale = scale_of_mean(largest);
#pragma unroll
        for (uint j = 0; j < MINE; j += 4) {
            int codes[4];
#pragma unroll
            for (uint i = 0; i < 4; i++) {
                codes[i] = code_of_mean(m[j + i], scale);
                y[j + i] -= scale * float(codes[i]);
            }
            if (kept) {
                *reinterpret_cast<uint *>(to + lane * MINE + j) = four_codes(codes);
            }
        }
        if (kept && lane == 0) {
            *reinterpret_cast<float *>(to + DIM) = scale;
        }
    } else if (kept) {
#pragma unroll
        for (uint j = 0; j < MINE; j++) {
            y[j] -= mean.at(j);
        }
    }
}

// Stores the row y around the mean of its page.
template <uint MINE, uint SHARERS, uint CODEC, uint NORM, uint COPIES>
inline void store_row_around(float (&y)[MINE], const WritablePlanes &planes, RowPlace at, uint head, bool kept,
                             OpenedPage opened, float scale, uint lane, const uint *tables) {
    MeanPart<MINE> mean = {};
    if (kept) {
        mean.load(planes.means + mean_at(at, head, MINE * SHARERS), MINE * SHARERS, lane);
    }
    rotate_row<MINE, SHARERS>(y, Signs<MINE>(SHARERS, lane), lane);
    const Nearest<CODEC, COPIES> nearest_to(tables);
    subtract_mean<MINE, SHARERS, CODEC>(y, mean, planes, at, head, kept, opened, lane, nearest_to);
    const WritablePlanes to = planes.of_page(at.page);
    store_encoded<MINE, SHARERS, CODEC, NORM, COPIES>(y, to, at.row, kept, scale, lane, nearest_to);
}

#endif
