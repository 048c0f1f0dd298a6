// attend_unpack: decodes the keys or values that the tokens of a call see, from the pages of a pool to dense bf16 pages
// with equal numbers of positions.
//
// out: pages [slots, slot_pages] of [Hk, PAGE_KEYS, D]. The pages of a sequence begin with the one that has the first
// position that any of its tokens sees (attend_unpack_ranges.cu). TABLE: also writes their page table [S, page_width];
// a page that is not unpacked has the entry NONE. UNROTATE: quantised vectors are rotated back. KEY_BIAS: adds the key
// bias, which stored keys do not include.
//
// Grid (pages of a sequence, Hk, S): a block decodes one head of one page, a warp every WARPS-th row of it. Lanes hold
// runs of coordinates (rotate_warp.h).
#include "attend/work.h"
#include "codec/planes.h"
#include "codec/rotate_warp.h"
#include "device/fragments.h"
#include "device/key_bias.h"
#include "device/vectors.h"

struct AttendUnpackParams {
    AttendParams attend;
    // Sequences, and pages of each, for which memory is allocated.
    uint slots;
    uint slot_pages;
};

constexpr uint VALUES = HEAD_DIM / 32;
constexpr uint RUN = Runs<HEAD_DIM>::RUN;

// The lane's runs of a row of the page, as stored, plus the mean of the page.
inline void load_row(float (&x)[VALUES], const Planes &planes, uint head, uint row, uint lane) {
#pragma unroll
    for (uint i = 0; i < VALUES / RUN; i++) {
        const uint j = Runs<HEAD_DIM>::coord(i, lane), quad = j & ~3u;
        float4 y = load_row4(planes, ulong(head) * PAGE_KEYS + row, quad, HEAD_DIM, CODEC);
        if (is_centred(CODEC)) {
            y = y + load_mean4(planes.means + head * mean_bytes(HEAD_DIM), quad, HEAD_DIM);
        }
        if (RUN == 2) {
            x[0] = j == quad ? y.x : y.z;
            x[1] = j == quad ? y.y : y.w;
        } else {
            x[4 * i] = y.x;
            x[4 * i + 1] = y.y;
            x[4 * i + 2] = y.z;
            x[4 * i + 3] = y.w;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    KVANT_KERNEL(const uchar *low, const uchar *high, const float *norms, const uchar *means, uchar *out,
                 const uint *ranges, const uint *table, uint *new_table, const __grid_constant__ AttendUnpackParams p,
                 const float *bias_pairs, const uint *bias_places, const float *bias_starts, const float *bias_steps) {
    constexpr uint PAGE_BYTES = PAGE_KEYS * HEAD_DIM * 2;
    const uint index = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
    const uint slot = ranges[3 * sequence], first = ranges[3 * sequence + 1], end = ranges[3 * sequence + 2];
    const uint in_slot = index - page_index(first);
    const uint page = pages_of(p.attend, table, sequence).of(index << PAGE_SHIFT);
    const bool is_seen =
        slot < p.slots && index >= page_index(first) && index <= page_index(end - 1) && in_slot < p.slot_pages;
    const ulong to = (ulong(slot) * p.slot_pages + in_slot) * p.attend.kv_heads * PAGE_BYTES;
    if (TABLE && head == 0 && threadIdx.x == 0) {
        new_table[ulong(sequence) * p.attend.page_width + index] = is_seen && page != NONE ? uint(to / PAGE_UNIT) : NONE;
    }
    if (!is_seen || page == NONE) {
        return;
    }
    const ulong moved = page_bytes_or_zero(page);
    const Planes planes = {low + moved, high + moved, norms + moved / sizeof(float), means + moved};
    uint *rows = reinterpret_cast<uint *>(out + to + ulong(head) * PAGE_BYTES);
    const uint lane = threadIdx.x % 32;
    const Runs<HEAD_DIM> runs(lane);
    const KeyBias bias = {bias_pairs, bias_places, bias_starts, bias_steps};
#pragma unroll 1
    for (uint row = threadIdx.x / 32; row < PAGE_KEYS; row += WARPS) {
        float x[VALUES];
        load_row(x, planes, head, row, lane);
        if (UNROTATE && is_quantised(CODEC)) {
            hadamard_warp<HEAD_DIM>(x, lane);
            runs.flip(x);
        }
#pragma unroll
        for (uint i = 0; KEY_BIAS && i < VALUES; i++) {
            x[i] += bias.at(head, index, row, Runs<HEAD_DIM>::coord(i / RUN, lane) + i % RUN, HEAD_DIM);
        }
#pragma unroll
        for (uint i = 0; i < VALUES; i += 2) {
            const uint j = Runs<HEAD_DIM>::coord(i / RUN, lane) + i % RUN;
            rows[(row * HEAD_DIM + j) / 2] = pack<false>(x[i], x[i + 1]);
        }
    }
}
