// kv_read: positions start .. start+n of one side of a cache layer, in order, to out [n, Hk, D] or [Hk, n, D].
//
// A threadgroup takes one vector: group.x is its head, group.y counts the positions. A quantised vector is decoded to
// threadgroup memory, and rotated back there unless KEEP_ROTATED. A dense one of out's dtype keeps its bits.
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
constant bool HAS_HIGH = CODEC == TQ5 || CODEC == TQ6;
constant bool HAS_NORMS = CODEC >= TQ4;

kernel void kv_read(device const uchar *low [[buffer(0)]],
                    device const uchar *high [[buffer(1), function_constant(HAS_HIGH)]],
                    device const float *norms [[buffer(2), function_constant(HAS_NORMS)]],
                    device uchar *out [[buffer(3)]],
                    constant KvReadParams &p [[buffer(4)]],
                    threadgroup float *row [[threadgroup(0)]],
                    uint3 group [[threadgroup_position_in_grid]],
                    uint index [[thread_index_in_threadgroup]],
                    uint3 threads [[threads_per_threadgroup]]) {
    const uint head = group.x, token = group.y, dim = p.head_dim;
    // On a ring the position may be beyond 32 bits.
    const ulong position = p.start + token;
    const uint slot = uint(p.layer.ring != 0 ? position % p.layer.capacity : position);
    const ulong from = layer_row(p.layer, p.sequence, head, slot);
    const ulong to = (HEAD_MAJOR ? ulong(head) * p.tokens + token : ulong(token) * p.layer.kv_heads + head) * dim;
    if (!is_quantised(CODEC)) {
        move_row(low, from * dim, CODEC, out, to, OUT_DTYPE, dim, ALIGNED, index, threads.x);
        return;
    }
    const Planes planes = {low, HAS_HIGH ? high : nullptr, HAS_NORMS ? norms : nullptr};
    for (uint j = 4 * index; j < dim; j += 4 * threads.x) {
        put4(row, j, 4, load_row4(planes, from, j, dim, CODEC), true);
    }
    // A thread stores the coordinates that it loaded, unless they were rotated.
    if (!KEEP_ROTATED) {
        rotate(row, 1, dim, true, index, threads.x);
    }
    store_row(out, to, row, dim, OUT_DTYPE, ALIGNED, index, threads.x);
}
