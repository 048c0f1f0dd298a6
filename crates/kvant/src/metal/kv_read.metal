// kv_read: positions start .. start+n of one side of a cache layer, in order, to out [n, Hk, D] or [Hk, n, D].
//
// A threadgroup takes one vector: group.x is its head, group.y counts the positions. A quantised vector is decoded to
// threadgroup memory, around the mean of its page if the codec is centred, and rotated back there unless KEEP_ROTATED.
// The key bias, which stored keys do not include, is added last. A dense vector of out's dtype keeps its bits. For a
// position without a page, out gets zeros if FILLS, and is unchanged otherwise.
#include "key_bias.h"
#include "planes.h"
#include "rotate.h"
#include "rows.h"
#include "slots.h"

struct KvReadParams {
    ulong start;
    uint tokens;
    uint sequence;
    uint head_dim;
    LayerParams layer;
};

constant uint CODEC [[function_constant(0)]];
constant uint OUT_DTYPE [[function_constant(1)]];
constant bool HEAD_MAJOR [[function_constant(2)]];
constant bool KEEP_ROTATED [[function_constant(3)]];
constant bool ALIGNED [[function_constant(4)]];
constant uint PAGE_SHIFT [[function_constant(5)]];
constant bool FILLS [[function_constant(6)]];
constant bool KEY_BIAS [[function_constant(7)]];
constant bool PAGED = PAGE_SHIFT != 0;
constant bool HAS_HIGH = (WITH_HIGH >> CODEC % CENTRED & 1) != 0;
constant bool HAS_NORMS = CODEC >= TQ2;
constant bool HAS_MEANS = (CODEC & CENTRED) != 0;

kernel void kv_read(device const uchar *low [[buffer(0)]],
                    device const uchar *high [[buffer(1), function_constant(HAS_HIGH)]],
                    device const uchar *norms [[buffer(2), function_constant(HAS_NORMS)]],
                    device uchar *out [[buffer(3)]],
                    constant KvReadParams &p [[buffer(4)]],
                    device const uint *table [[buffer(5), function_constant(PAGED)]],
                    device const uchar *means [[buffer(6), function_constant(HAS_MEANS)]],
                    device const float *bias_pairs [[buffer(7), function_constant(KEY_BIAS)]],
                    device const uint *bias_places [[buffer(8), function_constant(KEY_BIAS)]],
                    device const float *bias_starts [[buffer(9), function_constant(KEY_BIAS)]],
                    device const float *bias_steps [[buffer(10), function_constant(KEY_BIAS)]],
                    threadgroup float *row [[threadgroup(0)]],
                    uint3 group [[threadgroup_position_in_grid]],
                    uint index [[thread_index_in_threadgroup]],
                    uint3 threads [[threads_per_threadgroup]]) {
    const uint head = group.x, token = group.y, dim = p.head_dim;
    const RowPlace from = layer_place(p.layer, PAGED ? table : nullptr, PAGE_SHIFT, p.sequence, head, p.start + token);
    const ulong to = (HEAD_MAJOR ? ulong(head) * p.tokens + token : ulong(token) * p.layer.kv_heads + head) * dim;
    if (!from.held) {
        for (uint j = 4 * index; FILLS && j < dim; j += 4 * threads.x) {
            store4(out, to + j, dim - j, float4(0), OUT_DTYPE, ALIGNED);
        }
        return;
    }
    if (!is_quantised(CODEC)) {
        move_row(low + from.bytes, from.row * dim, CODEC, out, to, OUT_DTYPE, dim, ALIGNED, index, threads.x);
        return;
    }
    const Planes all = {low, HAS_HIGH ? high : nullptr, HAS_NORMS ? norms : nullptr, HAS_MEANS ? means : nullptr};
    const Planes planes = shifted(all, from.bytes, CODEC);
    for (uint j = 4 * index; j < dim; j += 4 * threads.x) {
        float4 y = load_row4(planes, from.row, j, dim, CODEC);
        if (HAS_MEANS) {
            y += load_mean4(planes.means + head * mean_bytes(dim), j, dim);
        }
        put4(row, j, 4, y, true);
    }
    // Without rotation, a thread stores the coordinates that it loaded, and no barrier is needed.
    if (!KEEP_ROTATED) {
        rotate(row, 1, dim, true, index, threads.x);
    }
    if (KEY_BIAS) {
        const KeyBias bias = key_bias_of(bias_pairs, bias_places, bias_starts, bias_steps, head, dim, PAGE_SHIFT);
        for (uint j = 4 * index; j < dim; j += 4 * threads.x) {
            put4(row, j, 4, get4(row, j, 4, true) + bias.quad_at(uint(p.start + token), j), true);
        }
    }
    store_row(out, to, row, dim, OUT_DTYPE, ALIGNED, index, threads.x);
}
