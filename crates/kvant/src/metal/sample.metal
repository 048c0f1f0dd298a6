// sample: draws one token per row of logits, as ops/sample.rs defines: softmax at a temperature, cut by top_k, top_p
// and min_p.
//
// logits is [rows, vocab], f32, f16 or bf16; counter and out are [rows]. With ROWS, each row has its own parameters.
// One threadgroup per row.
//
// Nothing is sorted. Every entry has a rank: the ordered bits of its logit, then its index, so that larger ranks come
// first. A cut finds the first entry, in descending order of rank, at which a running sum of weights reaches a goal:
// top_k sums ones, top_p sums probabilities. Probabilities are integers, in units of 2^-UNIT_BITS. Their sums are exact
// for any order of the additions, so that a row's token does not depend on the schedule of its threads.
//
// The row is read twice: for its largest logit, and for the entry with the largest ratio of probability to random
// number. A cut reads it twice more. First every entry adds 1 and its probability to one of 256 bins, by its distance
// from the largest logit: a bin is an eighth of a temperature wide, and a probability in the last bin is less than a
// unit. Then the entries of the bin that contains the goal are copied to a list, with the bins before it that fit. In
// the list, the rank of the cut is found digit by digit: all entries that share the known digits add their weight to a
// histogram of the next digit. If a bin does not fit the list, the row is read once per digit instead.
#include "vectors.h"
#include "ordered.h"
#include "reduce.h"
#include "upper_half.h"

struct SampleParams {
    ulong seed;
    // top_p times 2^64.
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
// Units of a probability of 1. The sum of a row is less than 2^64.
constant uint UNIT_BITS [[function_constant(6)]];
constant bool ROWS [[function_constant(7)]];
constant constexpr uint BINS = 256;

// The parameters of a row that has its own: words with the layout of SampleParams. They are untrusted: values out of
// range become the nearest valid ones.
inline SampleParams own_params(SampleParams p, device const uint *rows, uint row) {
    device const uint *own = rows + ulong(row) * (sizeof(SampleParams) / sizeof(uint));
    p.seed = own[0] | ulong(own[1]) << 32;
    p.top_p = max(own[2] | ulong(own[3]) << 32, ulong(1));
    p.top_k = max(own[5], 1u);
    p.temperature = fmax(as_type<float>(own[6]), 1.17549435e-38f);
    p.min_p = fmin(as_type<float>(own[7]), 1.0f);
    return p;
}

// The goal of a sum: a number of entries, or a share of the total.
enum class Goal { Count, Share };

struct Row {
    device const uchar *logits;
    ulong start;
    uint vocab;
    float largest;
    float temperature;
};

// Bits of a key below its digits are equal for all logits of one sign.
inline ulong rank_of(float logit, uint id) {
    const ulong key = ordered(logit) >> (32 - 8 * KEY_DIGITS);
    const ulong last = (1ul << (8 * ID_DIGITS)) - 1;
    return key << (8 * ID_DIGITS) | (last - id);
}

inline uint id_of(ulong rank) {
    const ulong last = (1ul << (8 * ID_DIGITS)) - 1;
    return uint(last - (rank & last));
}

// e^((logit - largest) / temperature); 1 for the largest, even if it is infinite.
inline float probability(Row row, float logit) {
    return logit == row.largest ? 1.0f : precise::exp((logit - row.largest) / row.temperature);
}

// The random bits that all ids of a row share: a SplitMix64 step.
inline ulong stream_of(ulong seed, uint counter) {
    ulong z = seed + (ulong(counter) + 1) * 0x9E3779B97F4A7C15ul;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ul;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBul;
    return z ^ (z >> 31);
}

inline uint mixed(uint x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// -ln(1 - v) for the random bits v of an id: an exponentially distributed number. A polynomial for small v, where 1 - v
// would lose low bits.
inline float exponential(ulong stream, uint id) {
    const uint bits = mixed(mixed(id + uint(stream)) ^ uint(stream >> 32));
    const float v = (float(bits) + 0.5f) * 2.3283064365386963e-10f;
    return v < 0.015625f ? v * (1.0f + v * (0.5f + v * (0.33333334f + v * 0.25f)))
                         : -precise::log(fmax(1.0f - v, 5.9604645e-8f));
}

// Entries of the list.
constant constexpr uint LISTED = 1024;

// Threadgroup memory.
template <uint COPIES>
struct Shared {
    // A histogram of 64-bit sums: COPIES of each bin, so that lanes of a SIMD-group collide less often.
    atomic_uint low[BINS * COPIES];
    atomic_uint high[BINS * COPIES];
    // For each bin by distance: the number of entries, and the probability of those that no cut has removed.
    atomic_uint counts[BINS];
    ulong weights[BINS];
    // The sums in which a goal is searched.
    ulong sums[BINS];
    ulong coarse[BINS / 16];
    // Ranks of all entries of bins from `from` to `to`.
    ulong list[LISTED];
    atomic_uint listed;
    uint from;
    uint to;
    // The bin that contains the goal, and the rest of the goal in it.
    uint bin;
    ulong left;
};

// A thread, and the row that all threads process.
struct Worker {
    Row row;
    uint index;
    uint threads;
    uint lane;
};

// 255 for the largest logit, 0 from a distance of 32 temperatures on; never increasing with the distance.
inline uint bin_of(Row row, float logit) {
    const float distance = (row.largest - logit) * (8 / row.temperature);
    return logit == row.largest ? BINS - 1 : BINS - 1 - uint(fmin(distance, float(BINS - 1)));
}

inline float logit_of(ulong rank) {
    const uint key = uint(rank >> (8 * ID_DIGITS)) << (32 - 8 * KEY_DIGITS);
    // Sets the bits beyond the digits.
    return from_ordered(key >> 31 ? key : key | ((1u << (32 - 8 * KEY_DIGITS)) - 1));
}

// Units of an entry.
inline ulong weight_of(Row row, float logit) {
    return ulong(probability(row, logit) * float(1ul << UNIT_BITS));
}

template <uint COPIES>
inline void add(threadgroup Shared<COPIES> &shared, uint bin, uint lane, ulong weight) {
    const uint at = bin * COPIES + lane % COPIES;
    const uint low = uint(weight);
    const uint old = atomic_fetch_add_explicit(&shared.low[at], low, memory_order_relaxed);
    const uint high = uint(weight >> 32) + (old + low < old ? 1 : 0);
    if (high != 0) {
        atomic_fetch_add_explicit(&shared.high[at], high, memory_order_relaxed);
    }
}

// Calls `f.take(logit, id)` for the thread's entries of the row that are not NaN.
template <typename F> inline void each_entry(Worker worker, thread F &f) {
    const Row row = worker.row;
    for (uint i = worker.index * 4; i < row.vocab; i += worker.threads * 4) {
        const uint count = min(4u, row.vocab - i);
        const float4 values = load4(row.logits, row.start + i, count, X_DTYPE, ALIGNED);
        for (uint j = 0; j < count; j++) {
            if (!is_nan(values[j])) {
                f.take(values[j], i + j);
            }
        }
    }
}

struct Largest {
    uint key;

    void take(float logit, uint) {
        key = max(key, ordered(logit));
    }
};

// Moves the histogram to `sums`, and clears it. Begins and ends with a barrier.
template <uint COPIES> inline void settle(Worker worker, threadgroup Shared<COPIES> &shared) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint bin = worker.index; bin < BINS; bin += worker.threads) {
        ulong sum = 0;
        for (uint at = bin * COPIES; at < (bin + 1) * COPIES; at++) {
            sum += ulong(atomic_exchange_explicit(&shared.high[at], 0u, memory_order_relaxed)) << 32;
            sum += atomic_exchange_explicit(&shared.low[at], 0u, memory_order_relaxed);
        }
        shared.sums[bin] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Finds the entry with the largest ratio of probability to random number, among ranks from `cut` on.
struct Race {
    Row row;
    ulong stream;
    ulong cut;
    float min_p;
    float largest;
    uint id;

    void take(float logit, uint other) {
        const float p = probability(row, logit);
        if (p < min_p || rank_of(logit, other) < cut) {
            return;
        }
        const float rate = p / exponential(stream, other);
        // Among equals, the lower id wins, because it comes first.
        if (rate > largest) {
            largest = rate;
            id = other;
        }
    }
};

// Adds ones and weights of entries to the bins by distance.
template <uint COPIES> struct Distribute {
    threadgroup Shared<COPIES> *shared;
    Worker worker;
    uint far; // entries of bin 0, often the majority, counted per thread

    void take(float logit, uint) {
        const uint bin = bin_of(worker.row, logit);
        if (bin == 0) {
            far++;
            return;
        }
        atomic_fetch_add_explicit(&shared->counts[bin], 1u, memory_order_relaxed);
        const ulong weight = weight_of(worker.row, logit);
        if (weight != 0) {
            add(*shared, bin, worker.lane, weight);
        }
    }
};

template <uint COPIES>
inline void distribute(Worker worker, threadgroup Shared<COPIES> &shared) {
    for (uint bin = worker.index; bin < BINS; bin += worker.threads) {
        atomic_store_explicit(&shared.counts[bin], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Distribute<COPIES> f = {&shared, worker, 0};
    each_entry(worker, f);
    if (f.far != 0) {
        atomic_fetch_add_explicit(&shared.counts[0], f.far, memory_order_relaxed);
    }
    settle(worker, shared);
    // Each thread next reads only the bins that it writes here.
    for (uint bin = worker.index; bin < BINS; bin += worker.threads) {
        shared.weights[bin] = shared.sums[bin];
    }
}

// Lists the entries of some bins.
template <uint COPIES> struct Gather {
    threadgroup Shared<COPIES> *shared;
    Row row;
    uint from;
    uint to;

    void take(float logit, uint id) {
        const uint bin = bin_of(row, logit);
        if (bin >= from && bin <= to) {
            const uint at = atomic_fetch_add_explicit(&shared->listed, 1u, memory_order_relaxed);
            // The counts guarantee room.
            shared->list[min(at, LISTED - 1)] = rank_of(logit, id);
        }
    }
};

// Adds the weight of entries that share the known digits to the histogram of the next digit; without digits, all to one
// bin.
template <uint COPIES> struct Digit {
    threadgroup Shared<COPIES> *shared;
    Worker worker;
    uint bin;
    ulong cut;
    ulong prefix;
    uint shift; // of the digit; 64 without
    bool ones;

    void take_rank(float logit, ulong rank) {
        if (rank < cut || bin_of(worker.row, logit) != bin) {
            return;
        }
        const uint above = shift + 8;
        if (above < 8 * (KEY_DIGITS + ID_DIGITS) && rank >> above != prefix) {
            return;
        }
        const ulong weight = ones ? 1 : weight_of(worker.row, logit);
        if (weight != 0) {
            add(*shared, shift < 64 ? uint(rank >> shift) % BINS : 0, worker.lane, weight);
        }
    }
    void take(float logit, uint id) {
        take_rank(logit, rank_of(logit, id));
    }
};

// Adds entries from the list if it has the bin, otherwise from the row; then settles.
template <uint COPIES> inline void add_digit(thread Digit<COPIES> &f, threadgroup Shared<COPIES> &shared) {
    if (f.bin >= shared.from && f.bin <= shared.to) {
        const uint count = atomic_load_explicit(&shared.listed, memory_order_relaxed);
        for (uint i = f.worker.index; i < count; i += f.worker.threads) {
            const ulong rank = shared.list[i];
            f.take_rank(logit_of(rank), rank);
        }
    } else {
        each_entry(f.worker, f);
    }
    settle(f.worker, shared);
}

// Finds the bin of `sums` that contains the goal, counted from the last bin. With FIRST, `goal` and `value` give the
// goal as a part of the total; otherwise it is the rest of the previous call. Ends with a barrier.
template <bool FIRST, uint COPIES>
inline void find(Worker worker, threadgroup Shared<COPIES> &shared, Goal goal, ulong value) {
    if (worker.index < BINS / 16) {
        ulong sum = 0;
        for (uint bin = worker.index * 16; bin < worker.index * 16 + 16; bin++) {
            sum += shared.sums[bin];
        }
        shared.coarse[worker.index] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (worker.index == 0) {
        ulong left = shared.left;
        if (FIRST) {
            ulong total = 0;
            for (uint i = 0; i < BINS / 16; i++) {
                total += shared.coarse[i];
            }
            // At least 1, and at most the total.
            switch (goal) {
            case Goal::Count: left = min(value, total); break;
            case Goal::Share: left = upper_half(total, value) + (total * value != 0 ? 1 : 0); break;
            }
        }
        uint chunk = BINS / 16 - 1;
        while (chunk > 0 && left > shared.coarse[chunk]) {
            left -= shared.coarse[chunk];
            chunk--;
        }
        uint bin = chunk * 16 + 15;
        while (bin > chunk * 16 && left > shared.sums[bin]) {
            left -= shared.sums[bin];
            bin--;
        }
        shared.bin = bin;
        shared.left = left;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Lists bin `bin`, and the bins before it that fit. Ends with a barrier.
template <uint COPIES> inline void list_bin(Worker worker, threadgroup Shared<COPIES> &shared, uint bin) {
    if (bin >= shared.from && bin <= shared.to) {
        return;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (worker.index == 0) {
        uint count = 0, from = BINS;
        const uint own = atomic_load_explicit(&shared.counts[bin], memory_order_relaxed);
        for (uint b = BINS; b > bin && count <= LISTED; b--) {
            count += atomic_load_explicit(&shared.counts[b - 1], memory_order_relaxed);
        }
        if (own <= LISTED) {
            from = bin;
        }
        shared.from = from;
        shared.to = count <= LISTED ? BINS - 1 : bin;
        atomic_store_explicit(&shared.listed, 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (bin >= shared.from) {
        Gather<COPIES> f = {&shared, worker.row, shared.from, shared.to};
        each_entry(worker, f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The rank of the entry, in descending order, at which the running sum reaches the goal, among ranks from `cut` on. The
// histogram is empty before and after. All threads of the threadgroup call it.
template <uint COPIES>
inline ulong search(Worker worker, threadgroup Shared<COPIES> &shared, ulong cut, Goal goal, ulong value) {
    for (uint bin = worker.index; bin < BINS; bin += worker.threads) {
        shared.sums[bin] = goal == Goal::Count
                               ? ulong(atomic_load_explicit(&shared.counts[bin], memory_order_relaxed))
                               : shared.weights[bin];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    find<true>(worker, shared, goal, value);
    const uint bin = shared.bin;
    list_bin(worker, shared, bin);
    Digit<COPIES> f = {&shared, worker, bin, cut, 0, 0, goal == Goal::Count};
    for (uint digit = 0; digit < KEY_DIGITS + ID_DIGITS; digit++) {
        f.shift = 8 * (KEY_DIGITS + ID_DIGITS - 1 - digit);
        add_digit(f, shared);
        find<false>(worker, shared, goal, 0);
        f.prefix = f.prefix << 8 | shared.bin;
    }
    return f.prefix;
}

// Removes from bin `bin` the weights of entries whose rank is below `cut`.
template <uint COPIES>
inline void cut_down(Worker worker, threadgroup Shared<COPIES> &shared, ulong cut) {
    const uint bin = bin_of(worker.row, logit_of(cut));
    Digit<COPIES> f = {&shared, worker, bin, cut, 0, 64, false};
    add_digit(f, shared);
    for (uint b = worker.index; b <= bin; b += worker.threads) {
        shared.weights[b] = b < bin ? 0 : shared.sums[0];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
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
    threadgroup Shared<COPIES> shared;
    threadgroup uint largest[32];
    const Place place = {lane, simdgroup, simdgroups};
    SampleParams p = {params.seed, params.top_p, params.vocab, params.top_k, params.temperature, params.min_p};
    if (ROWS) {
        p = own_params(p, rows, group);
    }
    Worker worker = {Row{logits, ulong(group) * p.vocab, p.vocab, 0, p.temperature}, thread_index, threads, lane};

    for (uint at = thread_index; at < BINS * COPIES; at += threads) {
        atomic_store_explicit(&shared.low[at], 0u, memory_order_relaxed);
        atomic_store_explicit(&shared.high[at], 0u, memory_order_relaxed);
    }
    if (thread_index == 0) {
        shared.left = 0;
        shared.from = BINS;
        shared.to = 0;
    }
    Largest found = {0};
    each_entry(worker, found);
    const uint key = reduce<Max>(found.key, largest, place);
    // All logits are NaN: no id.
    if (key == 0) {
        if (thread_index == 0) {
            out[group] = 0xFFFFFFFF;
        }
        return;
    }
    worker.row.largest = from_ordered(key);

    const bool top_k = ROWS ? p.top_k < p.vocab : TOP_K, top_p = ROWS ? ~p.top_p != 0 : TOP_P;
    ulong cut = 0;
    if (top_k || top_p) {
        distribute(worker, shared);
    }
    if (top_k) {
        cut = search(worker, shared, cut, Goal::Count, p.top_k);
    }
    // One candidate needs no draw.
    if (ROWS && top_k && p.top_k == 1) {
        if (thread_index == 0) {
            out[group] = id_of(cut);
        }
        return;
    }
    if (top_p) {
        if (top_k) {
            cut_down(worker, shared, cut);
        }
        cut = search(worker, shared, cut, Goal::Share, p.top_p);
    }
    Race race = {worker.row, stream_of(p.seed, counter[group]), cut, p.min_p, 0, Min::none};
    each_entry(worker, race);
    // Rates are not negative, so their bits have the order of the rates.
    const uint rate = as_type<uint>(race.largest);
    const uint max_rate = reduce<Max>(rate, largest, place);
    const uint id = reduce<Min>(rate == max_rate ? race.id : Min::none, largest, place);
    if (thread_index == 0) {
        out[group] = id;
    }
}

template [[host_name("sample_short")]] kernel decltype(sample<1>) sample<1>;
template [[host_name("sample_long")]] kernel decltype(sample<4>) sample<4>;
