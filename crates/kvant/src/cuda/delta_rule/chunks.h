// Chunks of delta_rule: the data that delta_rule_chunks.cu computes and delta_rule_wgmma.cu reads.
//
// A chunk is up to CHUNK consecutive tokens of a run, from a multiple of CHUNK of its rows on. Chunks are counted over
// all runs that are computed in chunks. A pass has `slots` of them, from `first` on.
#ifndef KVANT_CUDA_DELTA_RULE_CHUNKS_H
#define KVANT_CUDA_DELTA_RULE_CHUNKS_H
#include "delta_rule/gates.h"
#include "device/reduce.h"
#include "device/wgmma.h"

struct DeltaRuleChunksParams {
    DeltaRuleParams rule; // max_rows: of runs that are not computed in chunks
    uint runs;
    uint first;
    uint slots;
};

constexpr uint CHUNK = 64;
// Bytes of a matrix of CHUNK rows of 64 columns (wgmma.h), of a chunk's queries or keys, and of both.
constexpr uint BLOCK = CHUNK * 128;
constexpr uint KEYS = KEY_DIM / 64 * BLOCK;
constexpr uint CHUNK_KEYS = 2 * KEYS;
// Data of each head of a chunk: two matrices of CHUNK columns, and FACTORS vectors of CHUNK floats.
constexpr uint AT_SCORES = BLOCK;
constexpr uint AT_FACTORS = 2 * BLOCK;
constexpr uint FACTORS = 4;
constexpr uint CHUNK_HEAD = AT_FACTORS + FACTORS * CHUNK * 4;

// The unit of 16 bytes in a matrix that has columns 8 * `unit` to 8 * `unit` + 7 of a row.
inline uint unit_at(uint row, uint unit) {
    return unit / 8 * BLOCK + row * 128 + ((unit ^ row) % 8) * 16;
}

struct Runs {
    const uint *starts, *slots;
    const DeltaRuleChunksParams &p;

    // Rows of a run; 0 if it is not computed in chunks.
    inline uint rows(uint run) const {
        const uint start = starts[run], end = min(starts[run + 1], p.rule.rows);
        const bool is_active = slots[run] < p.rule.states && start < end;
        return is_active && end - start > p.rule.max_rows ? end - start : 0;
    }

    inline uint chunks(uint run) const {
        return (rows(run) + CHUNK - 1) / CHUNK;
    }

    // Chunks of the runs before `run`. All lanes of a warp call it.
    inline uint chunks_before(uint run) const {
        uint sum = 0;
        for (uint i = threadIdx.x % 32; i < run; i += 32) {
            sum += chunks(i);
        }
        return over_warp<Sum>(sum);
    }
};

#endif
