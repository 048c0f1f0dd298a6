//! Compilation of kernels that encode rows: how lanes share a row, and tables in shared memory.

use super::threshold_cells;
use crate::{
    Codec, LayerSpec, Tensor,
    cuda::blocks_per_multiprocessor,
    gpu::{LANES, Limits},
};

/// Threads of a block whose warps encode eight rows at a time.
pub(in crate::cuda) const EIGHTS: usize = 256;
/// Copies of the lookup tables: the first number that fits. One copy for each lane, or fewer of the long tables of 8
/// bits, which take longer to fill.
const COPIES: [usize; 5] = [32, 16, 8, 4, 2];
const COPIES_OF_8: usize = 8;

/// Coordinates of a row that a lane encodes; up to 32 lanes share a row.
pub(in crate::cuda) fn per_lane(dim: usize) -> usize {
    dim.min(32).max(dim / LANES)
}

fn bits(codec: Codec) -> u32 {
    match codec {
        Codec::Dense(_) => 0,
        Codec::TurboQuant(tq) => tq.bits,
    }
}

/// Whether warps can encode a side from `source` eight rows at a time (`encode_tiles.h`), or copy its bits: 16-bit
/// numbers that begin at multiples of 16 bytes.
pub(in crate::cuda) fn can_encode_eights(source: &Tensor, codec: Codec, low: &Tensor) -> bool {
    let aligned16 = |t: &Tensor| t.byte_offset().is_multiple_of(16);
    let moves = codec == Codec::Dense(source.dtype());
    source.dtype().size() == 2 && aligned16(source) && aligned16(low) && (codec.is_quantised() || moves)
}

/// Copies of the lookup tables if the `at_once` blocks of a multiprocessor share `bytes` bytes of shared memory.
pub(in crate::cuda) fn table_copies(
    spec: &LayerSpec,
    at_once: usize,
    bytes: impl Fn(usize) -> usize,
    limits: &Limits,
) -> usize {
    let most = if bits(spec.k).max(bits(spec.v)) == 8 { COPIES_OF_8 } else { COPIES[0] };
    let fits = |&copies: &usize| copies <= most && blocks_per_multiprocessor(bytes(copies), limits) >= at_once;
    COPIES.into_iter().find(fits).unwrap_or(1)
}

/// Bytes of the tables of the larger side. A block has the tables of one side.
pub(in crate::cuda) fn table_bytes(spec: &LayerSpec, copies: usize) -> usize {
    let of = |codec| threshold_cells::table_bytes(bits(codec), copies);
    of(spec.k).max(of(spec.v))
}
