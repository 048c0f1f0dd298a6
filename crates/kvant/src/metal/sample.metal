// sample: draws one token per row of logits, as ops/sample.rs says: softmax at a temperature, cut down by top_k, top_p
// and min_p.
//
// logits is [rows, vocab], f32, f16 or bf16; counter and out are [rows]. With ROWS, each row has parameters of its own.
// One threadgroup per row.
//
// Nothing is sorted. Every entry has a rank: the ordered bits of its logit, then its index, so that larger ranks come
// first. Every question is the same one: which entry, in falling order of rank, is the first at which a running sum of
// weights reaches a goal? top_k sums ones, top_p and the draw sum probabilities. The answer is found digit by digit of
// its rank: all entries that share the digits known so far add their weight to a histogram of the next digit, and the
// bin in which the goal falls is that digit. Probabilities are integers, in units of 2^-UNIT_BITS: their sums are
// exact, whatever the order of the additions, and a row's token does not depend on how its threads are scheduled.
#include "vectors.h"
#include "ordered.h"
#include "reduce.h"
#include "upper_half.h"

struct SampleParams {
    ulong seed;
    // Times 2^64.
    ulong top_p;
    uint vocab;
    uint top_k;
    float temperature;
    float min_p;
};

constant uint X_DTYPE [[function_constant(0)]];
constant bool ALIGNED [[function_constant(1)]];
constant bool TOP_K [[function_constant(2)]];
constant bool TOP_P [[function_constant(3)]];
// Digits of 8 bits of a key, and of an index.
constant uint KEY_DIGITS [[function_constant(4)]];
constant uint ID_DIGITS [[function_constant(5)]];
// Of a probability of 1: all of a row add up to less than 2^64.
constant uint UNIT_BITS [[function_constant(6)]];
constant bool ROWS [[function_constant(7)]];
constant constexpr uint BINS = 256;

// The parameters of a row that has its own: words in the order of SampleParams, whatever they are.
inline SampleParams own_params(SampleParams p, device const uint *rows, uint row) {
    device const uint *own = rows + ulong(row) * 8;
    p.seed = own[0] | ulong(own[1]) << 32;
    p.top_p = max(own[2] | ulong(own[3]) << 32, ulong(1));
    p.top_k = max(own[5], 1u);
    p.temperature = fmax(as_type<float>(own[6]), 1.17549435e-38f);
    p.min_p = fmin(as_type<float>(own[7]), 1.0f);
    return p;
}

// What a sum is compared with: a number of entries, a share of all that there is, or a number below it.
enum class Goal { Count, Share, Below };

struct Row {
    device const uchar *logits;
    ulong start;
    uint vocab;
    float largest;
    float temperature;
};

// The bits of a key beyond its digits are the same in all logits of one sign.
inline ulong rank_of(float logit, uint id) {
    const ulong key = ordered(logit) >> (32 - 8 * KEY_DIGITS);
    const ulong last = (1ul << (8 * ID_DIGITS)) - 1;
    return key << (8 * ID_DIGITS) | (last - id);
}

inline uint id_of(ulong rank) {
    const ulong last = (1ul << (8 * ID_DIGITS)) - 1;
    return uint(last - (rank & last));
}

// e^((logit - largest) / temperature); 1 for the largest also when it is infinite.
inline float probability(Row row, float logit) {
    return logit == row.largest ? 1.0f : precise::exp((logit - row.largest) / row.temperature);
}

// 24 bits of a SplitMix64 step, as the upper bits of 64: a number below 1, times 2^64.
inline ulong uniform_bits(ulong seed, uint counter) {
    ulong z = seed + (ulong(counter) + 1) * 0x9E3779B97F4A7C15ul;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ul;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBul;
    z ^= z >> 31;
    return z >> 40 << 40;
}

// Sums of 64 bits in each bin, COPIES of each so that a SIMD-group's lanes meet less often in one.
template <uint COPIES>
struct Histogram {
    atomic_uint low[BINS * COPIES];
    atomic_uint high[BINS * COPIES];
    ulong sums[BINS];
    ulong coarse[BINS / 16];
    // The digits found so far, and what of the goal is left among the entries that share them.
    ulong prefix;
    ulong left;
};

template <uint COPIES>
inline void add(threadgroup Histogram<COPIES> &histogram, uint bin, uint lane, ulong weight) {
    const uint at = bin * COPIES + lane % COPIES;
    const uint low = uint(weight);
    const uint old = atomic_fetch_add_explicit(&histogram.low[at], low, memory_order_relaxed);
    const uint high = uint(weight >> 32) + (old + low < old ? 1 : 0);
    if (high != 0) {
        atomic_fetch_add_explicit(&histogram.high[at], high, memory_order_relaxed);
    }
}

// The rank of the entry, in falling order, at which the running sum reaches the goal, of the entries with ranks from
// `cut` on. The histogram is empty before and after. All threads of the threadgroup call it.
template <uint COPIES>
inline ulong search(Row row, ulong cut, Goal goal, ulong value, float min_p, threadgroup Histogram<COPIES> &histogram,
                    uint thread_index, uint threads, uint lane) {
    ulong prefix = 0;
    for (uint digit = 0; digit < KEY_DIGITS + ID_DIGITS; digit++) {
        const uint shift = 8 * (KEY_DIGITS + ID_DIGITS - 1 - digit);
        for (uint i = thread_index * 4; i < row.vocab; i += threads * 4) {
            const uint count = min(4u, row.vocab - i);
            const float4 values = load4(row.logits, row.start + i, count, X_DTYPE, ALIGNED);
            for (uint j = 0; j < count; j++) {
                const ulong rank = rank_of(values[j], i + j);
                if (rank < cut || (digit > 0 && rank >> (shift + 8) != prefix)) {
                    continue;
                }
                ulong weight = 1;
                if (goal != Goal::Count) {
                    const float p = probability(row, values[j]);
                    weight = p < min_p ? 0 : ulong(p * float(1ul << UNIT_BITS));
                }
                if (weight != 0) {
                    add(histogram, uint(rank >> shift) % BINS, lane, weight);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint bin = thread_index; bin < BINS; bin += threads) {
            ulong sum = 0;
            for (uint at = bin * COPIES; at < (bin + 1) * COPIES; at++) {
                sum += ulong(atomic_exchange_explicit(&histogram.high[at], 0u, memory_order_relaxed)) << 32;
                sum += atomic_exchange_explicit(&histogram.low[at], 0u, memory_order_relaxed);
            }
            histogram.sums[bin] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (thread_index < BINS / 16) {
            ulong sum = 0;
            for (uint bin = thread_index * 16; bin < thread_index * 16 + 16; bin++) {
                sum += histogram.sums[bin];
            }
            histogram.coarse[thread_index] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (thread_index == 0) {
            ulong left = histogram.left;
            if (digit == 0) {
                ulong total = 0;
                for (uint i = 0; i < BINS / 16; i++) {
                    total += histogram.coarse[i];
                }
                // At least 1, and at most the total.
                switch (goal) {
                case Goal::Count: left = min(value, total); break;
                case Goal::Share: left = upper_half(total, value) + (total * value != 0 ? 1 : 0); break;
                case Goal::Below: left = upper_half(total, value) + 1; break;
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
        threadgroup_barrier(mem_flags::mem_threadgroup);
        prefix = histogram.prefix;
    }
    return prefix;
}

template <uint COPIES>
kernel void sample(device const uchar *logits [[buffer(0)]],
                   device const uint *counter [[buffer(1)]],
                   device uint *out [[buffer(2)]],
                   constant SampleParams &params [[buffer(3)]],
                   device const uint *rows [[buffer(4), function_constant(ROWS)]],
                   uint group [[threadgroup_position_in_grid]],
                   uint thread_index [[thread_index_in_threadgroup]],
                   uint threads [[threads_per_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                   uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup Histogram<COPIES> histogram;
    threadgroup uint shared[32];
    const Place place = {lane, simdgroup, simdgroups};
    SampleParams p = {params.seed, params.top_p, params.vocab, params.top_k, params.temperature, params.min_p};
    if (ROWS) {
        p = own_params(p, rows, group);
    }
    Row row = {logits, ulong(group) * p.vocab, p.vocab, 0, p.temperature};

    for (uint at = thread_index; at < BINS * COPIES; at += threads) {
        atomic_store_explicit(&histogram.low[at], 0u, memory_order_relaxed);
        atomic_store_explicit(&histogram.high[at], 0u, memory_order_relaxed);
    }
    if (thread_index == 0) {
        histogram.left = 0;
    }
    uint key = 0;
    for (uint i = thread_index * 4; i < p.vocab; i += threads * 4) {
        const uint count = min(4u, p.vocab - i);
        const float4 values = load4(logits, row.start + i, count, X_DTYPE, ALIGNED);
        for (uint j = 0; j < count; j++) {
            key = max(key, ordered(values[j]));
        }
    }
    key = reduce<Max>(key, shared, place);
    // Nothing but NaN: no id.
    if (key == 0) {
        if (thread_index == 0) {
            out[group] = 0xFFFFFFFF;
        }
        return;
    }
    row.largest = from_ordered(key);
    threadgroup_barrier(mem_flags::mem_threadgroup); // The histogram is empty.

    // NaN has the key 0.
    ulong cut = 1ul << (8 * ID_DIGITS);
    if (ROWS ? p.top_k < p.vocab : TOP_K) {
        cut = search(row, cut, Goal::Count, p.top_k, 0, histogram, thread_index, threads, lane);
    }
    if (ROWS ? ~p.top_p != 0 : TOP_P) {
        cut = search(row, cut, Goal::Share, p.top_p, 0, histogram, thread_index, threads, lane);
    }
    // Of one candidate nothing is left to draw.
    ulong drawn = cut;
    if (!ROWS || p.top_k > 1 || p.vocab == 1) {
        const ulong u = uniform_bits(p.seed, counter[group]);
        drawn = search(row, cut, Goal::Below, u, p.min_p, histogram, thread_index, threads, lane);
    }
    if (thread_index == 0) {
        out[group] = id_of(drawn);
    }
}

template [[host_name("sample_short")]] kernel decltype(sample<1>) sample<1>;
template [[host_name("sample_long")]] kernel decltype(sample<8>) sample<8>;
