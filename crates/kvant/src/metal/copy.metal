// copy: bytes from one buffer to another.
//
// With WORDS, both addresses are multiples of 4, and a thread copies 4 bytes; the rest is copied by bytes. Without, a
// thread copies one byte.
#include <metal_stdlib>
using namespace metal;

struct CopyParams {
    ulong bytes;
};

constant bool WORDS [[function_constant(0)]];

kernel void copy(device const uchar *from [[buffer(0)]],
                 device uchar *to [[buffer(1)]],
                 constant CopyParams &p [[buffer(2)]],
                 uint group [[threadgroup_position_in_grid]],
                 uint threads [[threads_per_threadgroup]],
                 uint index [[thread_index_in_threadgroup]]) {
    const ulong size = WORDS ? 4 : 1;
    // More than 2^32 threads are possible.
    const ulong at = (ulong(group) * threads + index) * size;
    if (WORDS && at + 4 <= p.bytes) {
        *reinterpret_cast<device uint *>(to + at) = *reinterpret_cast<device const uint *>(from + at);
    } else {
        for (ulong j = at; j < min(at + size, p.bytes); j++) {
            to[j] = from[j];
        }
    }
}
