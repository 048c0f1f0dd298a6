// all_gather: out has the columns of x of all ranks, in their order; bits are copied.
//
// A rank stores its columns on all ranks. A thread moves UNIT bytes at a time; UNIT divides the bytes of a row. Blocks
// with one index meet before the copy (all outputs are free) and after it (all columns are stored).
#include "device/dependent_launch.h"
#include "device/peers.h"

struct AllGatherParams {
    // Bytes of x: of all rows, and of one row.
    uint units;
    uint row_units;
    uint rank;
};

template <uint BYTES> struct UnitOf;
template <> struct UnitOf<1> { typedef uchar type; };
template <> struct UnitOf<2> { typedef ushort type; };
template <> struct UnitOf<4> { typedef uint type; };
template <> struct UnitOf<8> { typedef uint2 type; };
template <> struct UnitOf<16> { typedef uint4 type; };

extern "C" __global__ void __launch_bounds__(512)
    KVANT_KERNEL(const uchar *x, const AllGatherParams p, uint *failed, Exchange *own, Exchange *e0, Exchange *e1, Exchange *e2,
                 Exchange *e3, Exchange *e4, Exchange *e5, Exchange *e6, Exchange *e7, uchar *out0, uchar *out1, uchar *out2,
                 uchar *out3, uchar *out4, uchar *out5, uchar *out6, uchar *out7) {
    typedef UnitOf<UNIT>::type Unit;
    take_turn();
    const uint number = number_of_collective(own);
    const Ranks ranks = {{e0, e1, e2, e3, e4, e5, e6, e7}, own, p.rank};
    if (!begin_collective<RANKS>(ranks, number, failed)) {
        return;
    }
    uchar *const outs[MAX_RANKS] = {out0, out1, out2, out3, out4, out5, out6, out7};
    const ulong step = ulong(gridDim.x) * blockDim.x;
    for (ulong i = blockIdx.x * blockDim.x + threadIdx.x; i < p.units; i += step) {
        const Unit value = reinterpret_cast<const Unit *>(x)[i];
        const uint row = uint(i) / p.row_units, column = uint(i) % p.row_units;
        const ulong to = (ulong(row) * RANKS + p.rank) * p.row_units + column;
#pragma unroll
        for (uint r = 0; r < RANKS; r++) {
            reinterpret_cast<Unit *>(outs[r])[to] = value;
        }
    }
    meet<RANKS, true>(ranks, number, failed);
}
