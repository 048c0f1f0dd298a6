// Copies of keys and values to the shared memory of attend_decode.cu: each warp has a ring of BUFFERS buffers of one
// unit each.
//
// With BULK one copy brings a whole unit, whose rows are consecutive in the cache and in the buffer: an H200 reads 4.6
// TB/s this way, and 4.25 TB/s if lanes copy 16 bytes each. Without BULK, rows are padded by 16 bytes in the buffer, so
// that loads have no bank conflicts. Over pages a unit is in one page (in_units of work.h).
#ifndef KVANT_CUDA_ATTEND_DECODE_RING_H
#define KVANT_CUDA_ATTEND_DECODE_RING_H
#include "attend/dense.h"
#include "attend/work.h"
#include "device/fragments.h"
#include "device/mbarrier.h"

constexpr uint PITCH = BULK ? ROW : ROW + 16;
constexpr uint BUFFER = TILE * PITCH;
constexpr uint RING_BYTES = BUFFERS * BUFFER;

// A warp's buffers, and the barriers that signal full buffers.
struct Buffers {
    uint base;
    uint barriers;
    // The indices of the next buffer to fill and the next buffer to empty; the parity of the barriers' phases in this
    // lap of `emptied`.
    uint filled;
    uint emptied;
    uint parity;

    Buffers(uint base, uint barriers) : base(base), barriers(barriers), filled(0), emptied(0), parity(0) {
        if constexpr (BULK) {
            if (threadIdx.x % 32 == 0) {
#pragma unroll
                for (uint i = 0; i < BUFFERS; i++) {
                    barrier_init(barriers + i * 8, 1);
                }
                show_barriers_to_copies();
            }
            __syncwarp();
        }
    }

    // Begins to copy a unit's rows of a plane that begins at `plane`; missing keys become zeros. Over pages, `page`
    // holds the unit, or NONE.
    void fill(const AttendParams &p, const uchar *plane, Range keys, uint unit, uint page) {
        const uint first = in_units(keys).first + unit * TILE;
        // The unit's rows that are keys.
        Range there = {0, first < keys.end ? min(keys.end - first, TILE) : 0};
        uint slot = RING ? first % p.capacity : first;
        if (PAGE_SHIFT > 0) {
            there.end = page != NONE ? there.end : 0;
            there.first = keys.first > first ? min(keys.first - first, there.end) : 0;
            plane += page_bytes_or_zero(page);
            slot = slot_in_page(first);
        }
        const uint to = base + filled * BUFFER;
        if constexpr (BULK) {
            copy_whole(p, plane, slot, there, to, barriers + filled * 8);
        } else {
            copy_rows(p, plane, slot, there, to);
        }
        filled = filled + 1 == BUFFERS ? 0 : filled + 1;
    }

    static void clear(uint to, uint from, uint end) {
        for (uint at = from + threadIdx.x % 32 * 16; at < end; at += 512) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to + at), "r"(0) : "memory");
        }
    }

    static void copy_whole(const AttendParams &p, const uchar *plane, uint slot, Range there, uint to, uint barrier) {
        const uint lane = threadIdx.x % 32;
        if (there.len() < TILE) {
            clear(to, there.end * ROW, BUFFER);
            if (PAGE_SHIFT > 0) {
                clear(to, 0, there.first * ROW);
            }
            // Must precede the buffer's next copy.
            show_to_copies();
        }
        if (lane == 0) {
            // Up to the end of a ring, and from its beginning on.
            const uint before = RING ? min(there.end, p.capacity - slot) : there.end;
            barrier_expect(barrier, there.len() * ROW);
            if (there.len() > 0) {
                copy_bulk(to + there.first * ROW, plane + ulong(slot + there.first) * ROW, (before - there.first) * ROW, barrier);
            }
            if (before < there.end) {
                copy_bulk(to + before * ROW, plane, (there.end - before) * ROW, barrier);
            }
        }
    }

    static void copy_rows(const AttendParams &p, const uchar *plane, uint slot, Range there, uint to) {
        constexpr uint COPIES = TILE * ROW / 512;
        const uint lane = threadIdx.x % 32, step = p.row_slot * ROW, column = lane * 16 % ROW;
        if (there.len() == TILE && (!RING || slot + TILE <= p.capacity)) {
            const uchar *from = plane + ulong(slot + lane * 16 / ROW) * step + column;
            to += lane * 16 / ROW * PITCH + column;
#pragma unroll
            for (uint i = 0; i < COPIES; i++) {
                if constexpr (ROW > 512) {
                    copy_async<16>(to + i / 2 * PITCH + i % 2 * 512, from + i % 2 * 512, true);
                    from += i % 2 == 1 ? step : 0;
                } else {
                    copy_async<16>(to + i * (512 / ROW) * PITCH, from, true);
                    from += 512 / ROW * step;
                }
            }
        } else {
#pragma unroll 1
            for (uint i = 0; i < COPIES; i++) {
                const uint at = i * 512 + lane * 16, row = at / ROW, byte = at % ROW;
                uint row_slot = slot + row;
                if (RING && row_slot >= p.capacity) {
                    row_slot %= p.capacity;
                }
                const bool is_there = row >= there.first && row < there.end;
                copy_async<16>(to + row * PITCH + byte, plane + ulong(row_slot) * step + byte, is_there);
            }
        }
    }

    // Ends a turn, whether or not it has filled a buffer. BUFFERS turns precede the first wait.
    void end_turn() const {
        if constexpr (!BULK) {
            copies_commit();
        }
    }

    // Waits for the next buffer to empty, and returns its offset in the ring.
    uint wait() const {
        if constexpr (BULK) {
            barrier_wait(barriers + emptied * 8, parity);
        } else {
            copies_wait<BUFFERS - 1>();
        }
        __syncwarp();
        return emptied * BUFFER;
    }

    // Releases the buffer: all lanes have read it.
    void empty() {
        __syncwarp();
        emptied = emptied + 1 == BUFFERS ? 0 : emptied + 1;
        parity ^= emptied == 0 ? 1 : 0;
    }
};

#endif
