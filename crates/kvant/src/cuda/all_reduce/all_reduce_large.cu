// all_reduce of a large message: out = the sum of x over ranks, in the order of ranks; f32, f16 or bf16 in and out.
//
// Each rank adds a part of the elements: it reads them from the tensors of all ranks and stores the sums in the tensors
// of all ranks. Blocks with one index meet before (all inputs are complete, all outputs are free) and after (all sums
// are stored, all inputs are free). `out` may be `x`: only one rank accesses an element.
#include "device/dependent_launch.h"
#include "device/peers.h"
#include "device/vectors.h"

struct AllReduceLargeParams {
    // The elements that this rank adds.
    uint first;
    uint end;
    uint rank;
};

// Elements of 16 bytes of x.
constexpr uint PER = X_DTYPE == F32 ? 4 : 8;
// Loads of a thread from each rank before it adds, which hides the latency of the link.
constexpr uint AT_ONCE = 2;

struct Tensors {
    const uchar *x[MAX_RANKS];
    uchar *out[MAX_RANKS];
};

inline float4 widen(uint2 bits) {
    const ushort a = ushort(bits.x), b = ushort(bits.x >> 16), c = ushort(bits.y), d = ushort(bits.y >> 16);
    if (X_DTYPE == F16) {
        return make_float4(half_to_float(a), half_to_float(b), half_to_float(c), half_to_float(d));
    }
    return make_float4(bf16_to_float(a), bf16_to_float(b), bf16_to_float(c), bf16_to_float(d));
}

// Four of the elements of 16 bytes: the first four, or the last four.
inline float4 widen(uint4 bits, uint half) {
    if (X_DTYPE == F32) {
        return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w));
    }
    return widen(half == 0 ? make_uint2(bits.x, bits.y) : make_uint2(bits.z, bits.w));
}

inline void add_sixteen_bytes(const Tensors &tensors, uint i, const uint4 (&bits)[RANKS]) {
#pragma unroll
    for (uint half = 0; half < PER / 4; half++) {
        float4 sum = widen(bits[0], half);
#pragma unroll
        for (uint r = 1; r < RANKS; r++) {
            sum = sum + widen(bits[r], half);
        }
#pragma unroll
        for (uint r = 0; r < RANKS; r++) {
            store4(tensors.out[r], ulong(i) + half * 4, sum, OUT_DTYPE);
        }
    }
}

inline void add_aligned(const Tensors &tensors, uint first, uint end) {
    const ulong step = ulong(gridDim.x) * blockDim.x * PER;
    for (ulong i = first + ulong(blockIdx.x * blockDim.x + threadIdx.x) * PER; i < end; i += AT_ONCE * step) {
        uint4 bits[AT_ONCE][RANKS];
#pragma unroll
        for (uint u = 0; u < AT_ONCE; u++) {
            if (i + u * step < end) {
#pragma unroll
                for (uint r = 0; r < RANKS; r++) {
                    bits[u][r] = *reinterpret_cast<const uint4 *>(tensors.x[r] + (i + u * step) * size_of(X_DTYPE));
                }
            }
        }
#pragma unroll
        for (uint u = 0; u < AT_ONCE; u++) {
            if (i + u * step < end) {
                add_sixteen_bytes(tensors, uint(i + u * step), bits[u]);
            }
        }
    }
}

inline void add_one_by_one(const Tensors &tensors, uint first, uint end) {
    const ulong step = ulong(gridDim.x) * blockDim.x;
    for (ulong i = first + ulong(blockIdx.x * blockDim.x + threadIdx.x); i < end; i += step) {
        float sum = load(tensors.x[0], i, X_DTYPE);
#pragma unroll
        for (uint r = 1; r < RANKS; r++) {
            sum += load(tensors.x[r], i, X_DTYPE);
        }
#pragma unroll
        for (uint r = 0; r < RANKS; r++) {
            store(tensors.out[r], i, sum, OUT_DTYPE);
        }
    }
}

extern "C" __global__ void __launch_bounds__(512)
    KVANT_KERNEL(const AllReduceLargeParams p, uint *failed, Exchange *own, Exchange *e0, Exchange *e1, Exchange *e2, Exchange *e3,
                 Exchange *e4, Exchange *e5, Exchange *e6, Exchange *e7, const uchar *x0, const uchar *x1, const uchar *x2,
                 const uchar *x3, const uchar *x4, const uchar *x5, const uchar *x6, const uchar *x7, uchar *out0, uchar *out1,
                 uchar *out2, uchar *out3, uchar *out4, uchar *out5, uchar *out6, uchar *out7) {
    take_turn();
    const uint number = number_of_collective(own);
    const Ranks ranks = {{e0, e1, e2, e3, e4, e5, e6, e7}, own, p.rank};
    const Tensors tensors = {{x0, x1, x2, x3, x4, x5, x6, x7}, {out0, out1, out2, out3, out4, out5, out6, out7}};
    if (!begin_collective<RANKS>(ranks, number, failed)) {
        return;
    }
    if (ALIGNED) {
        add_aligned(tensors, p.first, p.end);
    } else {
        add_one_by_one(tensors, p.first, p.end);
    }
    meet<RANKS, true>(ranks, number, failed);
}
