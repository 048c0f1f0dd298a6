// Rows of the step, encoded by HEAD_DIM / PER lanes of a warp each (codec/encode_rows.h): single ones, and pages around
// their means.
#ifndef KVANT_CUDA_KV_WRITE_PAGE_LANES_H
#define KVANT_CUDA_KV_WRITE_PAGE_LANES_H
#include "device/vectors.h"
#include "kv_write/step_pages.h"

constexpr uint LANES = HEAD_DIM / PER;
// Rows at a time.
constexpr uint ROWS = THREADS / LANES;

// A side of the layer and its source.
struct Side {
    const uchar *source;
    WritablePlanes planes;
    float scale;
    // Of codec/nearest_centroid.h.
    const uint *tables;
};

// A lane's part of the source's row of a token and head.
template <uint DTYPE>
inline void load_part(float (&y)[PER], const KvWriteParams &p, const Side &side, uint token, uint head, uint lane) {
    const ulong from = source_row(p, token, head) * HEAD_DIM + lane * PER;
#pragma unroll
    for (uint j = 0; j < PER; j += 4) {
        const float4 four = load4(side.source, from + j, 4, DTYPE, ALIGNED);
        y[j] = four.x;
        y[j + 1] = four.y;
        y[j + 2] = four.z;
        y[j + 3] = four.w;
    }
}

// Stores a head's vectors of up to `count` tokens: token(i), or NO_TOKEN. Their pages have their means.
template <uint DTYPE, uint CODEC, uint NORM, typename Token>
inline void write_rows(const KvWriteParams &p, const Tokens &tokens, const Side &side, uint head, uint count,
                       Token token) {
    const uint lane = threadIdx.x % LANES;
#pragma unroll 1
    for (uint first = 0; first < count; first += ROWS) {
        const uint i = first + threadIdx.x / LANES, t = i < count ? token(i) : NO_TOKEN;
        RowPlace at = {0, 0};
        const bool kept = t != NO_TOKEN &&
                          find_in_pages(p.layer, tokens.table, tokens.sequence[t], head, tokens.positions[t], at);
        if (!__any_sync(ALL, kept)) {
            continue;
        }
        if constexpr (CODEC == DTYPE) {
            // Bits are copied.
            if (kept) {
                const ulong from = source_row(p, t, head) * HEAD_DIM + lane * PER, to = at.row * HEAD_DIM + lane * PER;
                move_row(side.source, from, DTYPE, side.planes.of_page(at.page).low, to, DTYPE, PER, ALIGNED, 0, 1);
            }
        } else {
            float y[PER];
            load_part<DTYPE>(y, p, side, kept ? t : 0, head, lane);
            if constexpr (is_centred(CODEC)) {
                store_row_around<PER, LANES, CODEC, NORM, TABLE_COPIES>(y, side.planes, at, head, kept,
                                                                        {false, false, 0}, side.scale, lane, side.tables);
            } else {
                store_row<PER, LANES, CODEC, NORM, TABLE_COPIES>(y, side.planes.of_page(at.page), at.row, kept,
                                                                 side.scale, lane, side.tables, ALIGNED);
            }
        }
    }
}

#endif
