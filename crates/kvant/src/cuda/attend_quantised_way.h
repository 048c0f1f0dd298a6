// A warp's way through the keys of a piece, for attend_quantised.cu: what is loaded while what is worked on.
#ifndef KVANT_ATTEND_QUANTISED_WAY_H
#define KVANT_ATTEND_QUANTISED_WAY_H
#include "attend_quantised_scores.h"

// A warp's way through the keys of a piece.
struct Way {
    Sources from;
    // How many keys; of the group to be worked on the first, counted from the piece's first: positions may be near 2^32.
    uint end;
    uint first;
    Group groups[STAGES];
    Keys k[STAGES];
    Values v[STAGES];
    Norms k_norms[STAGES];
    Norms v_norms[STAGES];

    template <uint STAGE>
    void load_keys_of(const AttendParams &p, bool there) {
        load_norms(p, from, from.k_norms, groups[STAGE], k_norms[STAGE], there);
        load_norms(p, from, from.v_norms, groups[STAGE], v_norms[STAGE], there);
        load_keys(p, from, groups[STAGE], k[STAGE], there);
    }
    template <uint STAGE>
    void load_values_of(const AttendParams &p, bool there) {
        load_values(p, from, groups[STAGE], v[STAGE], there);
    }

    // Begins to load.
    void begin(const AttendParams &p, const Sources &sources, Range keys) {
        from = sources;
        end = keys.len();
        first = threadIdx.x / 32 / TEAM * KEYS;
        const bool there = first < end;
        const uint slot = RING ? (keys.first % p.capacity + first) % p.capacity : keys.first + first;
        groups[0] = {slot, there ? min(KEYS, end - first) - 1 : 0};
        load_keys_of<0>(p, there);
        if (WHOLE_AHEAD) {
            load_values_of<0>(p, there);
        }
    }

    void go(const AttendParams &p, Work &work) {
        const uint t = threadIdx.x % 4;
        const float factor[2] = {shared_at<float>(AT_FACTORS)[2 * t], shared_at<float>(AT_FACTORS)[2 * t + 1]};
        const Lookup<K_CODEC> k_lookup(k_table());
        const Lookup<V_CODEC> v_lookup(v_table());
        const Queries queries(threadIdx.x / 32 % TEAM);
#pragma unroll 1
        while (first < end) {
            step<0>(p, work, k_lookup, v_lookup, queries, factor);
            if (WHOLE_AHEAD && first < end) {
                step<STAGES - 1>(p, work, k_lookup, v_lookup, queries, factor);
            }
        }
    }

    // Works on the group of a stage.
    template <uint STAGE>
    void step(const AttendParams &p, Work &work, const Lookup<K_CODEC> &k_lookup, const Lookup<V_CODEC> &v_lookup,
              const Queries &queries, const float (&factor)[2]) {
        constexpr uint OTHER = WHOLE_AHEAD ? 1 - STAGE : 0;
        const Group group = groups[STAGE];
        const uint key = first + TEAMS * KEYS;
        const bool more = key < end;
        Group next = {group.slot + TEAMS * KEYS, more ? min(KEYS, end - key) - 1 : 0};
        if (RING && next.slot >= p.capacity) {
            next.slot %= p.capacity;
        }
        float s[4];
        multiply_keys(k_lookup, queries, k[STAGE], k_norms[STAGE], s, [&](uint product) {
            if (product > 0) {
                return;
            }
            if (WHOLE_AHEAD) {
                groups[OTHER] = next;
                load_keys_of<OTHER>(p, more);
                load_values_of<OTHER>(p, more);
            } else {
                load_values_of<0>(p, true);
            }
        });
        add_up(s, work.turn);
        const uint2 weights = weigh(p, group, factor, v_norms[STAGE], s, work);
        multiply_values(v_lookup, v[STAGE], weights, work, [&](uint product) {
            if (!WHOLE_AHEAD && product == 0) {
                groups[0] = next;
                load_keys_of<0>(p, more);
            }
        });
        first = key;
    }
};

#endif
