// Communication of the ranks of a group of GPUs: kernels send packets to each other and meet at barriers.
//
// Each rank has an exchange (group/exchange.rs) in its own memory, which all ranks write. The order of collectives in
// the stream is equal on all ranks and numbers them. Every packet and signal carries the number of its collective. A
// graph can therefore be replayed, and nothing is cleared between two collectives.
//
// A missing rank is an error: kernels exit after LONGEST_WAIT, or when a word in host memory reports that a rank has
// failed. The results are then undefined, and the host returns the error (group/mod.rs).
#ifndef KVANT_CUDA_DEVICE_PEERS_H
#define KVANT_CUDA_DEVICE_PEERS_H
#include "device/arrivals.h"

constexpr uint MAX_RANKS = 8;
// Maximum blocks of a kernel that meets the same kernel on other ranks.
constexpr uint MAX_BLOCKS = 128;
// Nanoseconds. The host may start a rank late, but never as late as this.
constexpr ulong LONGEST_WAIT = 30000000000ull;

// Memory of a rank that the other ranks write.
struct Exchange {
    // Collectives that this rank has begun.
    uint number;
    // Blocks that have read `number`.
    uint arrivals;
    uint padding[30];
    // The last collective that each block of another rank has begun, and the last that it has finished.
    uint begun[MAX_RANKS][MAX_BLOCKS];
    uint done[MAX_RANKS][MAX_BLOCKS];
};

// 64 bits of a message in two halves; the upper 32 bits of each are the number of the collective. Both halves arrive
// together.
struct Packet {
    ulong halves[2];
};

// The packets from a rank to the owner of an exchange. Consecutive collectives alternate between two buffers: a fast
// rank may write the next collective's packets while a slow one reads the current ones.
inline Packet *packets_from(Exchange *exchange, uint rank, uint number, uint ranks, uint capacity) {
    return reinterpret_cast<Packet *>(exchange + 1) + ulong((number & 1) * ranks + rank) * capacity;
}

// The number of this collective.
inline uint number_of_collective(const Exchange *own) {
    // `volatile` bypasses the first-level cache, which may hold the previous number.
    return *const_cast<const volatile uint *>(&own->number) + 1;
}

// Stores the new number when all blocks have read the old one. One thread of each block calls it, after all threads of
// the block have read the number. The next collective starts after the end of this kernel.
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

// A wait with a time limit. `failed` is the word in host memory.
struct BoundedWait {
    uint polls;
    ulong start;

    // Whether to give up. Call it after each unsuccessful poll.
    bool is_over(uint *failed) {
        // Reading the word crosses the PCI bus, so only every 1024th poll reads it.
        if (++polls % 1024 != 0) {
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

// Waits for a packet of a collective. Returns false if it does not arrive.
inline bool receive(const Packet *from, uint number, uint *failed, uint2 &message) {
    BoundedWait wait = {0, 0};
    while (true) {
        ulong first, second;
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
        if (uint(first >> 32) == number && uint(second >> 32) == number) {
            message = make_uint2(uint(first), uint(second));
            return true;
        }
        if (wait.is_over(failed)) {
            return false;
        }
    }
}

// The exchanges of all ranks, and this rank's.
struct Ranks {
    Exchange *all[MAX_RANKS];
    Exchange *own;
    uint rank;
};

// A barrier among blocks with one index on all ranks, at the beginning of a collective or at its end. Afterwards the
// other blocks' earlier writes are visible. Returns false to all threads if a rank is missing. All threads of the block
// call it.
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
        BoundedWait wait = {0, 0};
        while (true) {
            uint seen;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(from) : "memory");
            if (seen == number) {
                break;
            }
            if (wait.is_over(failed)) {
                missing = 1;
                break;
            }
        }
    }
    __syncthreads();
    return missing == 0;
}

// Begins a collective whose blocks meet: all ranks have begun it afterwards. Returns false to all threads if a rank is
// missing. All threads of the block call it, after they have read `number`.
template <uint RANK_COUNT> inline bool begin_collective(const Ranks &ranks, uint number, uint *failed) {
    const bool all_came = meet<RANK_COUNT, false>(ranks, number, failed);
    if (threadIdx.x == blockDim.x - 1) {
        count_collective(ranks.own, number);
    }
    return all_came;
}

#endif
