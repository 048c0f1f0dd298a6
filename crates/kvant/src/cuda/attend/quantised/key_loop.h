// The loop of a warp of attend_quantised.cu over its keys: copies of the next group overlap with products of this one.
#ifndef KVANT_CUDA_ATTEND_QUANTISED_KEY_LOOP_H
#define KVANT_CUDA_ATTEND_QUANTISED_KEY_LOOP_H
#include "attend/quantised/scores.h"

// The keys of a part that a warp has. When a group's keys are in registers, copies of the next group's keys begin;
// likewise for values.
struct KeyLoop {
    Sources from;
    Box box;
    // The number of keys, and the first of the next group; both count from the part's first key, since positions may be
    // near 2^32.
    uint end;
    uint first;
    Group group;
    // Over pages: those of the sequence; the position of the part's first key, a multiple of 16, and the first that the
    // token sees; and the entry of the group after the next, looked up a group ahead.
    Pages pages;
    uint start;
    uint seen;
    uint entry_after;

    void look_up_after() {
        if (PAGE_SHIFT > 0) {
            const uint after = first + TEAMS * KEYS;
            entry_after = after < end ? pages.entry(start + after) : NONE;
        }
    }
    // The group that begins with key `first`, over pages.
    Group group_of(uint entry) const {
        const uint position = start + first;
        return {position % PAGE_KEYS, min(KEYS, end - first) - 1, pages.page(entry), seen > position ? seen - position : 0};
    }

    // Begins to copy.
    void begin(const AttendParams &p, const Sources &sources, Range keys, const Pages &of_sequence, uint first_seen) {
        from = sources;
        end = keys.len();
        first = threadIdx.x / 32 / TEAM * KEYS;
        pages = of_sequence;
        start = keys.first;
        seen = first_seen;
        if (first < end) {
            const uint slot = RING ? (keys.first % p.capacity + first) % p.capacity : keys.first + first;
            group = {slot, min(KEYS, end - first) - 1, 0, 0};
            if (PAGE_SHIFT > 0) {
                group = group_of(pages.entry(start + first));
                look_up_after();
            }
            box.copy_keys(p, from, group);
            copies_commit();
            box.copy_values(p, from, group);
            copies_commit();
        }
    }

    void run(const AttendParams &p, Work &work) {
        const uint t = threadIdx.x % 4;
        const float factor[2] = {shared_at<float>(AT_FACTORS)[2 * t], shared_at<float>(AT_FACTORS)[2 * t + 1]};
        const Lookup<K_CODEC> k_lookup(k_table());
        const Lookup<V_CODEC> v_lookup(v_table());
        const Queries queries(p, threadIdx.x / 32 % TEAM);
#pragma unroll 1
        while (first < end) {
            const Group current = group;
            first += TEAMS * KEYS;
            const bool more = first < end;
            if (PAGE_SHIFT > 0) {
                group = group_of(entry_after);
                look_up_after();
            } else {
                group = {group.slot + TEAMS * KEYS, more ? min(KEYS, end - first) - 1 : 0, 0, 0};
            }
            if (RING && group.slot >= p.capacity) {
                group.slot %= p.capacity;
            }
            Keys keys;
            Norms k_norms, v_norms;
            copies_wait<1>();
            __syncwarp();
            box.read_keys(keys, k_norms, v_norms);
            __syncwarp();
            if (more) {
                box.copy_keys(p, from, group);
            }
            copies_commit();
            float s[4];
            multiply_keys(k_lookup, queries, keys, k_norms, s);
            add_up(s, work.turn);
            const uint2 weights = weigh(p, current, factor, v_norms, s, work);
            Values values;
            copies_wait<1>();
            __syncwarp();
            box.read_values(values);
            __syncwarp();
            if (more) {
                box.copy_values(p, from, group);
            }
            copies_commit();
            multiply_values(v_lookup, values, weights, work);
        }
    }
};

#endif
