// kv_read: positions start .. start+n of one side of a cache layer, in order, to out [n, Hk, D] or [Hk, n, D].
//
// A block takes one vector: blockIdx.x counts the positions, y is its head. A quantised vector is decoded to shared
// memory, around the mean of its page if the codec is centred, and rotated back there unless KEEP_ROTATED. With
// KEY_BIAS, the bias that keys are stored without is added. A dense vector of out's dtype keeps its bits. A position
// without a page becomes zeros if FILLS; otherwise `out` does not change there.
#include "codec/planes.h"
#include "codec/rotate_block.h"
#include "device/cache_slots.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/key_bias.h"

struct KvReadParams {
    ulong start;
    uint tokens;
    uint sequence;
    uint head_dim;
    LayerParams layer;
};

extern "C" __global__ void KVANT_KERNEL(const uchar *low, const uchar *high, const float *norms, uchar *out,
                                   const __grid_constant__ KvReadParams p, const uint *table,
                                   const uchar *means, const float *bias_pairs, const uint *bias_places,
                                   const float *bias_starts, const float *bias_steps) {
    take_turn();
    extern __shared__ float row[];
    const uint token = blockIdx.x, head = blockIdx.y, dim = p.head_dim;
    // On a ring the position may exceed 32 bits.
    const ulong position = p.start + token;
    const ulong to = (HEAD_MAJOR ? ulong(head) * p.tokens + token : ulong(token) * p.layer.kv_heads + head) * dim;
    RowPlace place;
    if (PAGE_SHIFT == 0) {
        const uint slot = uint(p.layer.ring != 0 ? position % p.layer.capacity : position);
        place = {layer_row(p.layer, p.sequence, head, slot), 0};
    } else if (!find_in_pages(p.layer, table, p.sequence, head, position, place)) {
        for (uint j = threadIdx.x; FILLS && j < dim; j += blockDim.x) {
            store(out, to + j, 0, OUT_DTYPE);
        }
        return;
    }
    const ulong from = place.row, moved = page_bytes(place.page);
    low += moved;
    if (!is_quantised(CODEC)) {
        for (uint j = threadIdx.x; j < dim; j += blockDim.x) {
            if (CODEC == OUT_DTYPE) {
                copy_element(low, from * dim + j, out, to + j, OUT_DTYPE);
            } else {
                store(out, to + j, load(low, from * dim + j, CODEC), OUT_DTYPE);
            }
        }
        return;
    }
    const Planes planes = {low, high + moved, norms + moved / sizeof(float), means + moved};
    for (uint j = 4 * threadIdx.x; j < dim; j += 4 * blockDim.x) {
        float4 y = load_row4(planes, from, j, dim, CODEC);
        if (is_centred(CODEC)) {
            y = y + load_mean4(planes.means + head * mean_bytes(dim), j, dim);
        }
        row[j] = y.x;
        row[j + 1] = y.y;
        row[j + 2] = y.z;
        row[j + 3] = y.w;
    }
    if (KEEP_ROTATED) {
        __syncthreads();
    } else {
        rotate(row, 1, dim, true, threadIdx.x, blockDim.x);
    }
    const KeyBias bias = {bias_pairs, bias_places, bias_starts, bias_steps};
    for (uint j = threadIdx.x; j < dim; j += blockDim.x) {
        float x = row[j];
        if (KEY_BIAS) {
            x += bias.at(head, uint(page_index(position)), slot_in_page(position), j, dim);
        }
        store(out, to + j, x, OUT_DTYPE);
    }
}
