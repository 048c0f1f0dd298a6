// The ranks of a group of GPUs: how their kernels send numbers to each other, and wait for each other.
//
// Each rank has an exchange (group/exchange.rs) in its own memory, which all ranks write. Collectives are numbered, in
// the order of the stream, which is the same on all ranks: what a rank receives has the number of its collective. So a
// graph can be replayed, and nothing is cleared between two collectives.
//
// A rank that does not come is an error: kernels leave after LONGEST_WAIT, or when a word in host memory says that a
// rank has failed. The results are garbage then, and the host reports the failure (group/mod.rs).
#ifndef KVANT_CUDA_DEVICE_PEERS_H
#define KVANT_CUDA_DEVICE_PEERS_H
#include "device/arrivals.h"

constexpr uint MAX_RANKS = 8;
// Blocks of a kernel that meets the same kernel of other ranks.
constexpr uint MAX_BLOCKS = 128;
// Nanoseconds. The host may be late to start a rank, but never for so long.
constexpr ulong LONGEST_WAIT = 30000000000ull;

// Memory of a rank that the other ranks write.
struct Exchange {
    // Collectives that this rank has begun.
    uint number;
    // Blocks that have read it.
    uint arrivals;
    uint padding[30];
    // The collectives that a block of another rank has begun, and the ones whose work it has done.
    uint begun[MAX_RANKS][MAX_BLOCKS];
    uint done[MAX_RANKS][MAX_BLOCKS];
};

// Two times 32 bits of a message, each with the number of the collective in its upper half: both arrive together.
struct Packet {
    ulong halves[2];
};

// The packets from a rank to the owner of an exchange, for every other collective: while a slow rank reads those of
// one, a fast one may write those of the next.
inline Packet *packets_from(Exchange *exchange, uint rank, uint number, uint ranks, uint capacity) {
    return reinterpret_cast<Packet *>(exchange + 1) + ulong((number & 1) * ranks + rank) * capacity;
}

// The number of this collective.
inline uint number_of_collective(const Exchange *own) {
    // Not from the first-level cache, which may have it from the previous collective.
    return *const_cast<const volatile uint *>(&own->number) + 1;
}

// One thread of each block calls it, once all threads of the block have read the number. The next collective reads the
// new one when this kernel has ended.
inline void count_collective(Exchange *own, uint number) {
    if (count_arrival(&own->arrivals, gridDim.x)) {
        own->number = number;
    }
}

inline ulong nanoseconds() {
    ulong time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

// A wait that ends. `failed` is the word in host memory.
struct Patience {
    uint looks;
    ulong start;

    // Called after each look in vain. Whether to give up.
    bool is_over(uint *failed) {
        // The word is behind the PCI bus, so most looks do without it.
        if (++looks % 1024 != 0) {
            return false;
        }
        uint seen;
        asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(failed) : "memory");
        const ulong now = nanoseconds();
        start = start == 0 ? now : start;
        if (seen == 0 && now - start > LONGEST_WAIT) {
            asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(failed), "r"(1u) : "memory");
            return true;
        }
        return seen != 0;
    }
};

inline void send(Packet *to, uint2 message, uint number) {
    const ulong high = ulong(number) << 32, first = high | message.x, second = high | message.y;
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}

// Waits for a packet of a collective. False if it does not come.
inline bool receive(const Packet *from, uint number, uint *failed, uint2 &message) {
    Patience patience = {0, 0};
    while (true) {
        ulong first, second;
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
        if (uint(first >> 32) == number && uint(second >> 32) == number) {
            message = make_uint2(uint(first), uint(second));
            return true;
        }
        if (patience.is_over(failed)) {
            return false;
        }
    }
}

// The exchanges of all ranks of a kernel, and the place of this one among them.
struct Ranks {
    Exchange *all[MAX_RANKS];
    Exchange *own;
    uint rank;
};

// Waits for this block of all other ranks, at the beginning of a collective or at its end. Their earlier writes are
// visible then. False, for all threads, if a rank does not come. All threads of the block call it.
template <uint RANK_COUNT, bool AT_END> inline bool meet(const Ranks &ranks, uint number, uint *failed) {
    __shared__ uint missing;
    if (threadIdx.x == 0) {
        missing = 0;
    }
    // All threads of the block have written.
    __syncthreads();
    const uint other = threadIdx.x;
    if (other < RANK_COUNT && other != ranks.rank) {
        Exchange *peer = ranks.all[0];
#pragma unroll
        for (uint r = 1; r < RANK_COUNT; r++) {
            peer = other == r ? ranks.all[r] : peer;
        }
        uint *to = (AT_END ? peer->done : peer->begun)[ranks.rank] + blockIdx.x;
        const uint *from = (AT_END ? ranks.own->done : ranks.own->begun)[other] + blockIdx.x;
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(number) : "memory");
        Patience patience = {0, 0};
        while (true) {
            uint seen;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(from) : "memory");
            if (seen == number) {
                break;
            }
            if (patience.is_over(failed)) {
                missing = 1;
                break;
            }
        }
    }
    __syncthreads();
    return missing == 0;
}

#endif
