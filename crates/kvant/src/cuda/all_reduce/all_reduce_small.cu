// all_reduce of a small message: out = the sum of x over ranks, in the order of ranks; f32, f16 or bf16 in and out.
//
// One thread per 8 bytes of x. A thread sends its bytes to all other ranks, in packets with the number of the
// collective, and adds the packets that it receives. A packet is data and signal in one: the kernel takes one latency
// of the link and needs no barrier. With one rank (RANKS), out = x. `out` may be `x`.
//
// A packet overwrites one of the collective before the previous one. All ranks have read that one: a rank sends nothing
// before its earlier kernels have ended, and this rank has received packets of the previous collective from all others.
#include "device/dependent_launch.h"
#include "device/peers.h"
#include "device/vectors.h"

struct AllReduceSmallParams {
    uint elements;
    // Messages of 8 bytes.
    uint messages;
    // Packets per rank and message in an exchange.
    uint capacity;
    uint rank;
};

// Elements of 8 bytes of x.
constexpr uint PER = X_DTYPE == F32 ? 2 : 4;

inline uint2 load_message(const uchar *x, uint i, uint count) {
    if (ALIGNED) {
        return *reinterpret_cast<const uint2 *>(x + ulong(i) * size_of(X_DTYPE));
    }
    if (X_DTYPE == F32) {
        const uint *at = reinterpret_cast<const uint *>(x) + i;
        return make_uint2(at[0], count > 1 ? at[1] : 0);
    }
    const ushort *at = reinterpret_cast<const ushort *>(x) + i;
    const uint b = count > 1 ? at[1] : 0, c = count > 2 ? at[2] : 0, d = count > 3 ? at[3] : 0;
    return make_uint2(at[0] | b << 16, c | d << 16);
}

inline float widen(uint bits) {
    return X_DTYPE == F16 ? half_to_float(ushort(bits)) : bf16_to_float(ushort(bits));
}

// The last two are zero if x is f32.
inline float4 widen(uint2 message) {
    if (X_DTYPE == F32) {
        return make_float4(__uint_as_float(message.x), __uint_as_float(message.y), 0, 0);
    }
    return make_float4(widen(message.x), widen(message.x >> 16), widen(message.y), widen(message.y >> 16));
}

extern "C" __global__ void KVANT_KERNEL(const uchar *x, uchar *out, const AllReduceSmallParams p, uint *failed, Exchange *own,
                                        Exchange *e0, Exchange *e1, Exchange *e2, Exchange *e3, Exchange *e4, Exchange *e5,
                                        Exchange *e6, Exchange *e7) {
    take_turn_early();
    const uint number = RANKS > 1 ? number_of_collective(own) : 0;
    const uint at = blockIdx.x * blockDim.x + threadIdx.x;
    const bool has_message = at < p.messages;
    const uint i = at * PER, count = has_message ? p.elements - i : 0;
    const uint2 message = has_message ? load_message(x, i, count) : make_uint2(0, 0);
    Exchange *const all[MAX_RANKS] = {e0, e1, e2, e3, e4, e5, e6, e7};
    if (RANKS > 1) {
#pragma unroll
        for (uint r = 0; r < RANKS; r++) {
            if (has_message && r != p.rank) {
                send(packets_from(all[r], p.rank, number, RANKS, p.capacity) + at, message, number);
            }
        }
        __syncthreads();
        // While packets are on their way.
        if (threadIdx.x == 0) {
            count_collective(own, number);
        }
    }
    if (!has_message) {
        return;
    }
    float4 sum = widen(message);
    if (RANKS > 1) {
#pragma unroll
        for (uint r = 0; r < RANKS; r++) {
            uint2 of_rank = message;
            if (r != p.rank && !receive(packets_from(own, r, number, RANKS, p.capacity) + at, number, failed, of_rank)) {
                return;
            }
            const float4 term = widen(of_rank);
            sum = r == 0 ? term : sum + term;
        }
    }
    if (PER == 4) {
        store4(out, i, count, sum, OUT_DTYPE, ALIGNED);
        return;
    }
    store(out, i, sum.x, OUT_DTYPE);
    if (count > 1) {
        store(out, i + 1, sum.y, OUT_DTYPE);
    }
}
