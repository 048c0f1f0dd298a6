// copy: bytes from one buffer to another.
//
// Each thread moves one UNIT of 16, 4 or 1 bytes; both addresses are multiples of it. The last thread moves the rest by
// bytes.
#include "device/convert.h"
#include "device/dependent_launch.h"

struct CopyParams {
    ulong bytes;
};

extern "C" __global__ void KVANT_KERNEL(const uchar *from, uchar *to, const CopyParams p) {
    take_turn();
    const ulong at = (ulong(blockIdx.x) * blockDim.x + threadIdx.x) * UNIT;
    if (at + UNIT <= p.bytes) {
        if (UNIT == 16) {
            *reinterpret_cast<uint4 *>(to + at) = *reinterpret_cast<const uint4 *>(from + at);
        } else if (UNIT == 4) {
            *reinterpret_cast<uint *>(to + at) = *reinterpret_cast<const uint *>(from + at);
        } else {
            to[at] = from[at];
        }
    } else {
        for (ulong i = at; i < p.bytes; i++) {
            to[i] = from[i];
        }
    }
}
