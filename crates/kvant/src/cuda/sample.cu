// sample: draws one token per row of logits, as ops/sample.rs says: softmax at a temperature, cut down by top_k, top_p
// and min_p.
//
// logits is [rows, vocab], f32, f16 or bf16; counter and out are [rows]. With ROWS, each row has parameters of its own.
// BLOCKS blocks, a power of two, share a row. All blocks of the grid are resident at once, and meet at barriers in
// `shares`, [rows][SHARE] of 64 bits.
//
// Nothing is sorted. Every entry has a rank: the ordered bits of its logit, then its index, so that larger ranks come
// first. A cut is the first entry, in falling order of rank, at which a running sum of weights reaches a goal: top_k
// sums ones, top_p sums probabilities. The rank of the cut is found digit by digit: all entries that share the known
// digits add their weights to a histogram of the next digit, and the bin that contains the goal is that digit.
// Probabilities are integers, in units of 2^-UNIT_BITS: their sums are exact, whatever the order of the additions, and
// a row's token does not depend on how its threads are scheduled. Finally the kernel selects the entry with the largest
// quotient of its probability and its random number.
#include "device/dependent_launch.h"
#include "device/float_order.h"
#include "device/reduce.h"
#include "device/vectors.h"

struct SampleParams {
    ulong seed;
    // top_p times 2^64.
    ulong top_p;
    uint vocab;
    uint top_k;
    float temperature;
    float min_p;
};

// A row of `rows`: a SampleParams in words, since rows begin at multiples of 4 bytes.
union RowParams {
    uint words[sizeof(SampleParams) / sizeof(uint)];
    SampleParams params;
};

// The parameters of a row that has its own. They are untrusted: values out of range become the nearest valid ones.
inline SampleParams own_params(SampleParams p, const uint *rows, uint row) {
    constexpr uint WORDS = sizeof(RowParams::words) / sizeof(uint);
    RowParams own;
#pragma unroll
    for (uint i = 0; i < WORDS; i++) {
        own.words[i] = rows[ulong(row) * WORDS + i];
    }
    p.seed = own.params.seed;
    p.top_p = max(own.params.top_p, ulong(1));
    p.top_k = max(own.params.top_k, 1u);
    p.temperature = fmaxf(own.params.temperature, 1.17549435e-38f);
    p.min_p = fminf(own.params.min_p, 1.0f);
    return p;
}

// KEY_DIGITS and ID_DIGITS count digits of 8 bits of a key and of an index. A probability of 1 is 2^UNIT_BITS; the
// probabilities of a row add up to less than 2^64. There are COPIES copies of the histogram, so that fewer lanes of a
// warp add to one bin.
constexpr uint BINS = 256;

// Memory that the blocks of a row share: a count of arrivals at the barrier, the largest key and the candidate of each
// block, and three histograms. One histogram is added to, one is read, and one is cleared.
constexpr uint SHARE = 8 + 2 * BLOCKS + 3 * BINS;

struct Shared {
    ulong *at;
    uint part;
    uint phase;

    ulong *key_of(uint part) const { return at + 8 + part; }
    ulong *candidate_of(uint part) const { return at + 8 + BLOCKS + part; }
    ulong *histogram(uint phase) const { return at + 8 + 2 * BLOCKS + phase % 3 * BINS; }

    // Waits for all blocks of the row. Afterwards, all blocks see each other's earlier writes.
    void barrier() const {
        if (BLOCKS == 1) {
            __syncthreads();
            return;
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            uint *arrived = reinterpret_cast<uint *>(at);
            // Replays continue the count of the last run; a power of two divides 2^32.
            const uint all = (atomicAdd(arrived, 1u) / BLOCKS + 1) * BLOCKS;
            uint seen;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
            } while (int(seen - all) < 0);
        }
        __syncthreads();
    }
};

// The bound of a sum: a number of entries, or a share of their total.
enum class Goal { Count, Share };

struct Row {
    const uchar *logits;
    ulong start;
    uint vocab;
    float largest;
    float temperature;
};

// Bits of a key below its digits are equal in all logits of one sign.
inline ulong rank_of(float logit, uint id) {
    const ulong key = ordered(logit) >> (32 - 8 * KEY_DIGITS);
    const ulong last = (ulong(1) << (8 * ID_DIGITS)) - 1;
    return key << (8 * ID_DIGITS) | (last - id);
}

inline uint id_of(ulong rank) {
    const ulong last = (ulong(1) << (8 * ID_DIGITS)) - 1;
    return uint(last - (rank & last));
}

// e^((logit - largest) / temperature); 1 for the largest, even if it is infinite.
inline float probability(Row row, float logit) {
    return logit == row.largest ? 1.0f : expf((logit - row.largest) / row.temperature);
}

// The random bits that all ids of a row share: a SplitMix64 step.
inline ulong stream_of(ulong seed, uint counter) {
    ulong z = seed + (ulong(counter) + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

inline uint mixed(uint x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// -ln(1 - v) of the random bits v of an id: an exponentially distributed number. A polynomial if 1 - v would lose the
// low bits of v.
inline float exponential(ulong stream, uint id) {
    const uint bits = mixed(mixed(id + uint(stream)) ^ uint(stream >> 32));
    const float v = (float(bits) + 0.5f) * 2.3283064365386963e-10f;
    return v < 0.015625f ? v * (1.0f + v * (0.5f + v * (0.33333334f + v * 0.25f)))
                         : -logf(fmaxf(1.0f - v, 5.9604645e-8f));
}

// Sums of 64 bits in each bin.
struct Histogram {
    ulong bins[BINS * COPIES];
    ulong sums[BINS];
    ulong coarse[BINS / 16];
    // The digits found so far, and the rest of the goal among the entries that share them.
    ulong prefix;
    ulong left;
};

// A search among the entries whose rank is at least `cut`: the kind of its goal, and the goal's value.
struct Search {
    ulong cut;
    Goal goal;
    ulong value;
};

// Adds the weights of the block's entries that share the digits of `prefix` to the bins of digit `digit`.
inline void fill_bins(Row row, const Search &search, Histogram &histogram, const Shared &shared, uint digit, ulong prefix,
                      Team team) {
    const uint shift = 8 * (KEY_DIGITS + ID_DIGITS - 1 - digit);
    for (ulong at = (shared.part * team.size + team.index) * 4; at < row.vocab; at += BLOCKS * team.size * 4) {
        const uint i = uint(at);
        const uint count = min(4u, row.vocab - i);
        const float4 values = load4(row.logits, row.start + i, count, X_DTYPE, ALIGNED);
        for (uint j = 0; j < count; j++) {
            const ulong rank = rank_of(part(values, j), i + j);
            if (rank < search.cut || (digit > 0 && rank >> (shift + 8) != prefix)) {
                continue;
            }
            const ulong weight = search.goal == Goal::Count
                                     ? 1
                                     : ulong(probability(row, part(values, j)) * float(ulong(1) << UNIT_BITS));
            if (weight != 0) {
                atomicAdd(&histogram.bins[uint(rank >> shift) % BINS * COPIES + team.lane % COPIES], weight);
            }
        }
    }
}

// Adds up the copies of each bin, of all blocks, then the bins by 16, and clears the bins.
inline void add_bins(Histogram &histogram, Shared &shared, Team team) {
    for (uint bin = team.index; bin < BINS; bin += team.size) {
        ulong sum = 0;
        for (uint at = bin * COPIES; at < (bin + 1) * COPIES; at++) {
            sum += histogram.bins[at];
            histogram.bins[at] = 0;
        }
        if (BLOCKS == 1) {
            histogram.sums[bin] = sum;
            continue;
        }
        if (sum != 0) {
            atomicAdd(shared.histogram(shared.phase) + bin, sum);
        }
        // Clears the histogram that was read last, before all blocks came to the previous barrier.
        if (shared.part == 0) {
            shared.histogram(shared.phase + 1)[bin] = 0;
        }
    }
    shared.barrier();
    if (BLOCKS > 1) {
        for (uint bin = team.index; bin < BINS; bin += team.size) {
            histogram.sums[bin] = __ldcg(shared.histogram(shared.phase) + bin);
        }
        shared.phase++;
        __syncthreads();
    }
    if (team.index < BINS / 16) {
        ulong sum = 0;
        for (uint bin = team.index * 16; bin < team.index * 16 + 16; bin++) {
            sum += histogram.sums[bin];
        }
        histogram.coarse[team.index] = sum;
    }
}

// The bin in which the goal falls becomes the next digit. One thread calls it.
inline void find_digit(const Search &search, Histogram &histogram, uint digit, ulong prefix) {
    ulong left = histogram.left;
    if (digit == 0) {
        ulong total = 0;
        for (uint i = 0; i < BINS / 16; i++) {
            total += histogram.coarse[i];
        }
        // At least 1, and at most the total.
        switch (search.goal) {
        case Goal::Count: left = min(search.value, total); break;
        case Goal::Share: left = __umul64hi(total, search.value) + (total * search.value != 0 ? 1 : 0); break;
        }
    }
    uint chunk = BINS / 16 - 1;
    while (chunk > 0 && left > histogram.coarse[chunk]) {
        left -= histogram.coarse[chunk];
        chunk--;
    }
    uint bin = chunk * 16 + 15;
    while (bin > chunk * 16 && left > histogram.sums[bin]) {
        left -= histogram.sums[bin];
        bin--;
    }
    histogram.prefix = prefix << 8 | bin;
    histogram.left = left;
}

// The rank of the entry, in falling order, at which the running sum reaches the goal. The histogram is empty before and
// after. All threads of the block call it.
inline ulong find_rank(Row row, Search search, Histogram &histogram, Shared &shared, Team team) {
    ulong prefix = 0;
    for (uint digit = 0; digit < KEY_DIGITS + ID_DIGITS; digit++) {
        fill_bins(row, search, histogram, shared, digit, prefix, team);
        __syncthreads();
        add_bins(histogram, shared, team);
        __syncthreads();
        if (team.index == 0) {
            find_digit(search, histogram, digit, prefix);
        }
        __syncthreads();
        prefix = histogram.prefix;
    }
    return prefix;
}

// The candidate of the block: the entry with the largest quotient of probability and random number (its rate), among
// the entries whose rank is at least `cut`. The upper half has the bits of the rate, the lower half the inverted id:
// among equal rates the lowest id wins.
inline ulong race(Row row, ulong cut, ulong stream, float min_p, uint *room, const Shared &shared, Team team) {
    float largest = 0;
    uint id = 0xFFFFFFFF;
    for (ulong at = (shared.part * team.size + team.index) * 4; at < row.vocab; at += BLOCKS * team.size * 4) {
        const uint i = uint(at);
        const uint count = min(4u, row.vocab - i);
        const float4 values = load4(row.logits, row.start + i, count, X_DTYPE, ALIGNED);
        for (uint j = 0; j < count; j++) {
            const float p = probability(row, part(values, j));
            if (p < min_p || rank_of(part(values, j), i + j) < cut) {
                continue;
            }
            const float rate = p / exponential(stream, i + j);
            // Among equals, the lower id comes first.
            if (rate > largest) {
                largest = rate;
                id = i + j;
            }
        }
    }
    // Rates are not negative, so their bits have the order of the rates.
    const uint rate = __float_as_uint(largest);
    const uint most = over_team<Max>(rate, room, team);
    const uint lowest = over_team<Min>(rate == most ? id : uint(Min::none), room + EXCHANGE, team);
    return ulong(most) << 32 | (0xFFFFFFFFu - lowest);
}

// The largest key of the row's logits, 0 for NaN; also clears the row's first histogram.
inline uint largest_key(const Row &row, const Shared &shared, uint *room, Team team) {
    uint key = 0;
    for (ulong at = (shared.part * team.size + team.index) * 4; at < row.vocab; at += BLOCKS * team.size * 4) {
        const uint i = uint(at);
        const uint count = min(4u, row.vocab - i);
        const float4 values = load4(row.logits, row.start + i, count, X_DTYPE, ALIGNED);
        for (uint j = 0; j < count; j++) {
            key = max(key, ordered(part(values, j)));
        }
    }
    key = over_team<Max>(key, room, team);
    if (BLOCKS > 1) {
        if (team.index == 0) {
            *shared.key_of(shared.part) = key;
        }
        for (uint bin = team.index; shared.part == 0 && bin < BINS; bin += team.size) {
            shared.histogram(0)[bin] = 0;
        }
        shared.barrier();
        for (uint part = 0; part < BLOCKS; part++) {
            key = max(key, uint(__ldcg(shared.key_of(part))));
        }
    }
    return key;
}

// The best candidate of all blocks.
inline ulong best_of_blocks(ulong best, const Shared &shared, Team team) {
    if (BLOCKS > 1) {
        if (team.index == 0) {
            *shared.candidate_of(shared.part) = best;
        }
        shared.barrier();
        for (uint part = 0; part < BLOCKS; part++) {
            best = max(best, ulong(__ldcg(shared.candidate_of(part))));
        }
    }
    return best;
}

extern "C" __global__ void KVANT_KERNEL(const uchar *logits, const uint *counter, uint *out, const SampleParams params, ulong *shares, const uint *rows) {
    take_turn();
    __shared__ Histogram histogram;
    __shared__ uint room[2 * EXCHANGE];
    const Team team = whole_block();
    const uint row_index = blockIdx.x / BLOCKS;
    const SampleParams p = ROWS ? own_params(params, rows, row_index) : params;
    Shared shared = {shares + ulong(row_index) * SHARE, blockIdx.x % BLOCKS, 0};
    Row row = {logits, ulong(row_index) * p.vocab, p.vocab, 0, p.temperature};

    for (uint at = team.index; at < BINS * COPIES; at += team.size) {
        histogram.bins[at] = 0;
    }
    if (team.index == 0) {
        histogram.left = 0;
    }
    const uint key = largest_key(row, shared, room, team);
    // All entries are NaN: no id.
    if (key == 0) {
        if (team.index == 0 && shared.part == 0) {
            out[row_index] = 0xFFFFFFFF;
        }
        return;
    }
    row.largest = from_ordered(key);
    __syncthreads();

    // NaN has the key 0.
    ulong cut = ulong(1) << (8 * ID_DIGITS);
    if (ROWS ? p.top_k < p.vocab : TOP_K) {
        cut = find_rank(row, {cut, Goal::Count, p.top_k}, histogram, shared, team);
    }
    if (ROWS ? ~p.top_p != 0 : TOP_P) {
        cut = find_rank(row, {cut, Goal::Share, p.top_p}, histogram, shared, team);
    }
    // One candidate needs no draw.
    if (ROWS && p.top_k == 1 && p.vocab > 1) {
        if (team.index == 0 && shared.part == 0) {
            out[row_index] = id_of(cut);
        }
        return;
    }
    const ulong own = race(row, cut, stream_of(p.seed, counter[row_index]), p.min_p, room, shared, team);
    const ulong best = best_of_blocks(own, shared, team);
    if (team.index == 0 && shared.part == 0) {
        out[row_index] = 0xFFFFFFFFu - uint(best);
    }
}
