// The loop of a warp of attend_quantised.cu over its keys: copies of the next group overlap with products of this one.
#ifndef KVANT_CUDA_ATTEND_QUANTISED_KEY_LOOP_H
#define KVANT_CUDA_ATTEND_QUANTISED_KEY_LOOP_H
#include "attend/quantised/means.h"

// The keys of a part that a warp has. When a group's keys are in registers, copies of the next group's keys begin;
// likewise for values. Means of values are copied to the memory of the means of keys, after these have been multiplied
// by the queries.
struct KeyLoop {
    Sources from;
    Box box;
    // The end of the keys, and the first of the next group; both count from the part's first key, since positions may
    // be near 2^32.
    uint end;
    uint first;
    Group group;
    // Over pages: the pages of the sequence; the position of the part's first key, a multiple of 16; the first position
    // that the token sees; and the entry of the group after the next, looked up a group ahead.
    Pages pages;
    uint start;
    uint seen;
    uint entry_after;
    Means means;

    void look_up_after() {
        if (PAGE_SHIFT > 0) {
            const uint after = first + STEP;
            entry_after = after < end ? pages.entry(start + after) : NONE;
        }
    }
    // The group that begins with key `first`, over pages.
    Group group_of(uint entry) const {
        const uint position = start + first;
        return {slot_in_page(position), min(KEYS, end - first) - 1, pages.page(entry), seen > position ? seen - position : 0};
    }

    // Begins to copy.
    void begin(const AttendParams &p, const Sources &sources, Range keys, const Pages &of_sequence, uint first_seen,
               const uchar *k_means, const uchar *v_means) {
        const uint team = threadIdx.x / 32 / TEAM;
        from = sources;
        end = keys.len();
        first = team * KEYS;
        pages = of_sequence;
        start = keys.first;
        seen = first_seen;
        if (HAS_MEANS) {
            const EvenSplit split((end + KEYS - 1) / KEYS, TEAMS);
            first = split.first(team) * KEYS;
            end = min(split.first(team + 1) * KEYS, end);
        }
        if (first < end) {
            const uint slot = RING ? (keys.first % p.capacity + first) % p.capacity : keys.first + first;
            group = {slot, min(KEYS, end - first) - 1, 0, 0};
            if (HAS_MEANS) {
                means.k = k_means;
                means.v = v_means;
                means.look_up(pages, page_of(first), page_of(end - 1));
            }
            if (PAGE_SHIFT > 0) {
                group = group_of(pages.entry(start + first));
                look_up_after();
            }
            box.copy_keys(p, from, group);
            if constexpr (HAS_MEANS) {
                means.begin(pages, page_of(end - 1));
            }
            copies_commit();
            box.copy_values(p, from, group);
            copies_commit();
        }
    }
    // The page of a key, counted from the sequence's first.
    uint page_of(uint key) const {
        return page_index(start + key);
    }

    void run(const AttendParams &p, Accumulators &acc) {
        const uint t = threadIdx.x % 4;
        const float factor[2] = {shared_at<float>(AT_FACTORS)[2 * t], shared_at<float>(AT_FACTORS)[2 * t + 1]};
        const Lookup<K_CODEC> k_lookup(k_table());
        const Lookup<V_CODEC> v_lookup(v_table());
        const Queries queries(p, threadIdx.x / 32 % TEAM);
        bool means_are_new = true;
#pragma unroll 1
        while (first < end) {
            const Group current = group;
            const uint page = page_of(first);
            first += STEP;
            const bool more = first < end;
            if (PAGE_SHIFT > 0) {
                group = group_of(entry_after);
                look_up_after();
            } else {
                group = {group.slot + STEP, more ? min(KEYS, end - first) - 1 : 0, 0, 0};
            }
            if (RING && group.slot >= p.capacity) {
                group.slot %= p.capacity;
            }
            Keys keys;
            Norms k_norms, v_norms;
            copies_wait<1>();
            __syncwarp();
            box.read_keys(keys, k_norms, v_norms);
            if (K_CENTRED && means_are_new) {
                Means::multiply(queries, acc.turn);
            }
            __syncwarp();
            if (more) {
                box.copy_keys(p, from, group);
            }
            if (V_CENTRED && means_are_new) {
                means.copy(means.v);
            }
            means_are_new = false;
            copies_commit();
            float s[4];
            multiply_keys(k_lookup, queries, keys, k_norms, s);
            add_up(s, acc.turn);
            if (K_CENTRED) {
                Means::add_product(page - means.first, s);
            }
            const uint2 weights = weigh(p, current, factor, v_norms, s, acc);
            Values values;
            copies_wait<1>();
            __syncwarp();
            box.read_values(values);
            __syncwarp();
            if (more) {
                box.copy_values(p, from, group);
            }
            copies_commit();
            multiply_values(v_lookup, values, weights, acc);
            if (HAS_MEANS && (!more || page != page_of(first))) {
                const bool ends_lot = !more || page - means.first == LOT - 1;
                means_are_new = end_page(page - means.first, ends_lot, more, acc);
            }
        }
    }
    // Called after the warp's last key of a page. If the lot ends with this page, the next lot begins.
    bool end_page(uint entry, bool ends_lot, bool more, Accumulators &acc) {
        if (V_CENTRED) {
            Means::end_page(entry, acc);
        }
        if (!ends_lot) {
            return false;
        }
        if (V_CENTRED) {
            copies_wait<0>();
            __syncwarp();
            Means::add_values(acc);
        }
        if (more) {
            __syncwarp();
            means.begin(pages, page_of(end - 1));
            copies_commit();
            copies_wait<0>();
            __syncwarp();
        }
        return more;
    }
};

#endif
