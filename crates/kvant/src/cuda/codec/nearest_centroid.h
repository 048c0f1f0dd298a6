// The index of the centroid nearest to a number, by arithmetic and one comparison.
//
// Numbers are divided into cells of equal width, each with at most one threshold of a codebook. For each cell, a table
// has the threshold in the cell, or the next one above, and the number of thresholds below the cell
// (threshold_cells.rs). Lanes read different cells. If shared memory allows, each lane therefore has its own copies of
// the table and of the centroids, in separate banks. More than 16 copies of the table are not faster, because 16 lanes
// at a time read entries of 8 bytes.
#ifndef KVANT_CUDA_CODEC_NEAREST_CENTROID_H
#define KVANT_CUDA_CODEC_NEAREST_CENTROID_H
#include "codec/planes.h"
#include "codec/threshold_cells.h"
#include "device/fragments.h"

// The number of cells of a codec, and the middle of the last cell. The first cell is as far below 0.
inline constexpr uint cells_of(uint codec) {
    return plain(codec) == TQ2 ? CELL_COUNT_2
           : plain(codec) == TQ3 ? CELL_COUNT_3
           : plain(codec) == TQ4 ? CELL_COUNT_4
           : plain(codec) == TQ5 ? CELL_COUNT_5
           : plain(codec) == TQ6 ? CELL_COUNT_6
           : CELL_COUNT_8;
}

inline constexpr float reach_of(uint codec) {
    return plain(codec) == TQ2 ? REACH_2
           : plain(codec) == TQ3 ? REACH_3
           : plain(codec) == TQ4 ? REACH_4
           : plain(codec) == TQ5 ? REACH_5
           : plain(codec) == TQ6 ? REACH_6
           : REACH_8;
}

inline constexpr uint cell_copies(uint copies) {
    return copies < 16 ? copies : 16;
}

// Words of shared memory for the tables of a codec: [cells][cell copies][threshold, index], [centroids][copies].
inline constexpr uint table_words(uint codec, uint copies) {
    return is_quantised(codec) ? 2 * cells_of(codec) * cell_copies(copies) + levels_of(codec) * copies : 0;
}

template <uint CODEC> inline const Cell *cells_table() {
    return plain(CODEC) == TQ2 ? CELLS_2
           : plain(CODEC) == TQ3 ? CELLS_3
           : plain(CODEC) == TQ4 ? CELLS_4
           : plain(CODEC) == TQ5 ? CELLS_5
           : plain(CODEC) == TQ6 ? CELLS_6
           : CELLS_8;
}

template <uint CODEC> inline const float *centroids_table() {
    return plain(CODEC) == TQ2 ? CENTROIDS_2
           : plain(CODEC) == TQ3 ? CENTROIDS_3
           : plain(CODEC) == TQ4 ? CENTROIDS_4
           : plain(CODEC) == TQ5 ? CENTROIDS_5
           : plain(CODEC) == TQ6 ? CENTROIDS_6
           : CENTROIDS_8;
}

template <uint CODEC, uint COPIES> struct Nearest {
    static constexpr uint CELLS = cells_of(CODEC), CELL_COPIES = cell_copies(COPIES);
    // Addresses in shared memory, of this lane's copies.
    uint cells;
    uint centroids;

    // Fills the tables, which begin at a multiple of 8 bytes. All threads of the block call it; copies_wait and a
    // barrier must follow. Its sources are constant.
    static inline void fill(uint *tables) {
        if constexpr (COPIES == 1) {
            // Asynchronous copies of the whole tables; the thread continues meanwhile.
            const uint to = shared_address(tables);
            for (uint i = threadIdx.x; i < CELLS; i += blockDim.x) {
                copy_async<8>(to + i * 8, reinterpret_cast<const uchar *>(cells_table<CODEC>() + i), true);
            }
            for (uint i = threadIdx.x; i < levels_of(CODEC) / 2; i += blockDim.x) {
                copy_async<8>(to + CELLS * 8 + i * 8, reinterpret_cast<const uchar *>(centroids_table<CODEC>() + 2 * i), true);
            }
            copies_commit();
            return;
        }
        for (uint i = threadIdx.x; i < CELLS * CELL_COPIES; i += blockDim.x) {
            const Cell cell = cells_table<CODEC>()[i / CELL_COPIES];
            reinterpret_cast<uint2 *>(tables)[i] = make_uint2(__float_as_uint(cell.threshold), cell.below);
        }
        for (uint i = threadIdx.x; i < levels_of(CODEC) * COPIES; i += blockDim.x) {
            tables[2 * CELLS * CELL_COPIES + i] = __float_as_uint(centroids_table<CODEC>()[i / COPIES]);
        }
    }

    inline Nearest(const uint *tables) {
        // A cell's number is added to 2^23.
        cells = shared_address(tables) + threadIdx.x % CELL_COPIES * 8 - 0x4B000000 * (CELL_COPIES * 8);
        centroids = shared_address(tables) + (2 * CELLS * CELL_COPIES + threadIdx.x % COPIES) * 4;
    }

    inline float centroid(uint index) const {
        float c;
        asm("ld.shared.b32 %0, [%1];" : "=f"(c) : "r"(index * (COPIES * 4) + centroids));
        return c;
    }

    // Returns the index, and the centroid in c. The result for NaN is arbitrary, but valid.
    inline uint operator()(float z, float &c) const {
        const float place = __saturatef(fmaf(z, 0.5f / reach_of(CODEC), 0.5f));
        const uint cell = __float_as_uint(fmaf(place, float(CELLS - 1), 8388608.0f));
        float threshold;
        uint index;
        asm("ld.shared.v2.b32 {%0, %1}, [%2];" : "=f"(threshold), "=r"(index) : "r"(cell * (CELL_COPIES * 8) + cells));
        index += z > threshold ? 1 : 0;
        c = centroid(index);
        return index;
    }
};

#endif
