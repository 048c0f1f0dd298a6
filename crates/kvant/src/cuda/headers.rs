//! The headers of the kernel files, as lists that a [`Source`](crate::gpu::Source) names.

use super::cells;
use crate::gpu::{Header, tables};

const CONVERT_H: Header = Header { name: "convert.h", text: || include_str!("convert.h").to_string() };
const ELEMENTS_H: Header = Header { name: "elements.h", text: || include_str!("elements.h").to_string() };
const VECTORS_H: Header = Header { name: "vectors.h", text: || include_str!("vectors.h").to_string() };
const TEAM_H: Header = Header { name: "team.h", text: || include_str!("team.h").to_string() };
const ORDERED_H: Header = Header { name: "ordered.h", text: || include_str!("ordered.h").to_string() };
const LINEAR_H: Header = Header { name: "linear.h", text: || include_str!("linear.h").to_string() };
const LINEAR_BYTES_H: Header = Header { name: "linear_bytes.h", text: || include_str!("linear_bytes.h").to_string() };
const AFFINE_H: Header = Header { name: "affine.h", text: || include_str!("affine.h").to_string() };
// Threads ask for different entries of a codebook at a time, which constant memory would serve one by one.
const CODEBOOKS_H: Header =
    Header { name: "codebooks.h", text: || tables::codebooks("__device__ __align__(8) const float") };
const SIGNS_H: Header = Header { name: "signs.h", text: || tables::signs("__device__ const unsigned") };
const ROTATE_H: Header = Header { name: "rotate.h", text: || include_str!("rotate.h").to_string() };
const BUTTERFLIES_H: Header = Header { name: "butterflies.h", text: || include_str!("butterflies.h").to_string() };
const PLANES_H: Header = Header { name: "planes.h", text: || include_str!("planes.h").to_string() };
const SLOTS_H: Header = Header { name: "slots.h", text: || include_str!("slots.h").to_string() };
const TURBOQUANT_H: Header = Header { name: "turboquant.h", text: || include_str!("turboquant.h").to_string() };
const CELLS_H: Header = Header { name: "cells.h", text: cells::header };
const NEAREST_H: Header = Header { name: "nearest.h", text: || include_str!("nearest.h").to_string() };
const ENCODE_TILES_H: Header = Header { name: "encode_tiles.h", text: || include_str!("encode_tiles.h").to_string() };
const AHEAD_H: Header = Header { name: "ahead.h", text: || include_str!("ahead.h").to_string() };
const FRAGMENTS_H: Header = Header { name: "fragments.h", text: || include_str!("fragments.h").to_string() };
const ATTEND_SIDE_H: Header = Header { name: "attend_side.h", text: || include_str!("attend_side.h").to_string() };
const ATTEND_PLAN_H: Header = Header { name: "attend_plan.h", text: || include_str!("attend_plan.h").to_string() };
const ATTEND_CLUSTER_H: Header =
    Header { name: "attend_cluster.h", text: || include_str!("attend_cluster.h").to_string() };
const ATTEND_TILES_H: Header = Header { name: "attend_tiles.h", text: || include_str!("attend_tiles.h").to_string() };
const ATTEND_SHARED_H: Header =
    Header { name: "attend_shared.h", text: || include_str!("attend_shared.h").to_string() };
const ATTEND_QUERIES_H: Header =
    Header { name: "attend_queries.h", text: || include_str!("attend_queries.h").to_string() };
const ATTEND_SOFTMAX_H: Header =
    Header { name: "attend_softmax.h", text: || include_str!("attend_softmax.h").to_string() };
const ATTEND_SCORES_H: Header =
    Header { name: "attend_scores.h", text: || include_str!("attend_scores.h").to_string() };
const ATTEND_VALUES_H: Header =
    Header { name: "attend_values.h", text: || include_str!("attend_values.h").to_string() };
const ATTEND_ROTATE_H: Header =
    Header { name: "attend_rotate.h", text: || include_str!("attend_rotate.h").to_string() };
const ATTEND_CODES_H: Header = Header { name: "attend_codes.h", text: || include_str!("attend_codes.h").to_string() };
const ATTEND_MERGE_H: Header = Header { name: "attend_merge.h", text: || include_str!("attend_merge.h").to_string() };
const ATTEND_STATE_H: Header = Header { name: "attend_state.h", text: || include_str!("attend_state.h").to_string() };
const ATTEND_QUANTISED_SHARED_H: Header =
    Header { name: "attend_quantised_shared.h", text: || include_str!("attend_quantised_shared.h").to_string() };
const ATTEND_QUANTISED_QUERIES_H: Header =
    Header { name: "attend_quantised_queries.h", text: || include_str!("attend_quantised_queries.h").to_string() };
const ATTEND_QUANTISED_GATHER_H: Header =
    Header { name: "attend_quantised_gather.h", text: || include_str!("attend_quantised_gather.h").to_string() };
const ATTEND_QUANTISED_ROWS_H: Header =
    Header { name: "attend_quantised_rows.h", text: || include_str!("attend_quantised_rows.h").to_string() };
const ATTEND_QUANTISED_SCORES_H: Header =
    Header { name: "attend_quantised_scores.h", text: || include_str!("attend_quantised_scores.h").to_string() };
const ATTEND_QUANTISED_WAY_H: Header =
    Header { name: "attend_quantised_way.h", text: || include_str!("attend_quantised_way.h").to_string() };
const MBARRIER_H: Header = Header { name: "mbarrier.h", text: || include_str!("mbarrier.h").to_string() };
const WGMMA_H: Header = Header { name: "wgmma.h", text: || include_str!("wgmma.h").to_string() };
const ATTEND_PREFILL_SHARED_H: Header =
    Header { name: "attend_prefill_shared.h", text: || include_str!("attend_prefill_shared.h").to_string() };
const ATTEND_PREFILL_COPIES_H: Header =
    Header { name: "attend_prefill_copies.h", text: || include_str!("attend_prefill_copies.h").to_string() };
const ATTEND_PREFILL_SUMS_H: Header =
    Header { name: "attend_prefill_sums.h", text: || include_str!("attend_prefill_sums.h").to_string() };
const ATTEND_PREFILL_ODD_H: Header =
    Header { name: "attend_prefill_odd.h", text: || include_str!("attend_prefill_odd.h").to_string() };
const ATTEND_DECODE_RING_H: Header =
    Header { name: "attend_decode_ring.h", text: || include_str!("attend_decode_ring.h").to_string() };
const ATTEND_WEIGHTS_H: Header =
    Header { name: "attend_weights.h", text: || include_str!("attend_weights.h").to_string() };
const ATTEND_SHORT_COPIES_H: Header =
    Header { name: "attend_short_copies.h", text: || include_str!("attend_short_copies.h").to_string() };
const ATTEND_SHORT_QUERIES_H: Header =
    Header { name: "attend_short_queries.h", text: || include_str!("attend_short_queries.h").to_string() };
const ATTEND_SHORT_SLICES_H: Header =
    Header { name: "attend_short_slices.h", text: || include_str!("attend_short_slices.h").to_string() };
const NORM_ROPE_H: Header = Header { name: "norm_rope.h", text: || include_str!("norm_rope.h").to_string() };

/// Loads and stores by dtype.
pub(super) const ELEMENTS: &[Header] = &[CONVERT_H, ELEMENTS_H, AHEAD_H];
/// The same, four elements at a time.
pub(super) const VECTORS: &[Header] = &[CONVERT_H, ELEMENTS_H, VECTORS_H, AHEAD_H];
/// What brings the elements of a row together.
pub(super) const ROWS: &[Header] = &[CONVERT_H, ELEMENTS_H, VECTORS_H, TEAM_H, ORDERED_H, AHEAD_H];
/// The rows of a weight, dense or affine.
pub(super) const AFFINE: &[Header] = &[CONVERT_H, ELEMENTS_H, VECTORS_H, TEAM_H, AFFINE_H, AHEAD_H];
/// The same, multiplied.
pub(super) const LINEAR: &[Header] =
    &[CONVERT_H, ELEMENTS_H, VECTORS_H, TEAM_H, AFFINE_H, LINEAR_H, FRAGMENTS_H, AHEAD_H];
/// The same, by integers.
pub(super) const LINEAR_CODES: &[Header] =
    &[CONVERT_H, ELEMENTS_H, VECTORS_H, TEAM_H, AFFINE_H, LINEAR_H, LINEAR_BYTES_H, FRAGMENTS_H, AHEAD_H];
/// The same, by bulk copies.
pub(super) const LINEAR_BULK: &[Header] =
    &[CONVERT_H, ELEMENTS_H, VECTORS_H, TEAM_H, AFFINE_H, LINEAR_H, LINEAR_BYTES_H, FRAGMENTS_H, MBARRIER_H, AHEAD_H];
/// Many rows by an affine weight.
pub(super) const LINEAR_MANY: &[Header] =
    &[CONVERT_H, ELEMENTS_H, VECTORS_H, AFFINE_H, LINEAR_H, FRAGMENTS_H, MBARRIER_H, WGMMA_H, AHEAD_H];
/// The Hadamard rotation.
pub(super) const ROTATE: &[Header] = &[CONVERT_H, ELEMENTS_H, VECTORS_H, SIGNS_H, ROTATE_H, AHEAD_H];
/// Attention: the rows of a cache layer as operands of tensor cores, the rotation, and who works on what.
pub(super) const ATTEND: &[Header] = &[
    CONVERT_H,
    ELEMENTS_H,
    CODEBOOKS_H,
    PLANES_H,
    SIGNS_H,
    BUTTERFLIES_H,
    FRAGMENTS_H,
    ATTEND_SIDE_H,
    ATTEND_PLAN_H,
    ATTEND_CLUSTER_H,
    ATTEND_ROTATE_H,
    ATTEND_SHARED_H,
    ATTEND_TILES_H,
    ATTEND_QUERIES_H,
    ATTEND_SCORES_H,
    ATTEND_VALUES_H,
    ATTEND_MERGE_H,
    ATTEND_SOFTMAX_H,
    AHEAD_H,
];
/// Decode attention over quantised rows: lookups, the rotation, who works on what, and how that comes together.
pub(super) const ATTEND_QUANTISED: &[Header] = &[
    CONVERT_H,
    ELEMENTS_H,
    CODEBOOKS_H,
    PLANES_H,
    SIGNS_H,
    BUTTERFLIES_H,
    FRAGMENTS_H,
    ATTEND_CODES_H,
    MBARRIER_H,
    ATTEND_MERGE_H,
    ATTEND_PLAN_H,
    ATTEND_CLUSTER_H,
    ATTEND_ROTATE_H,
    ATTEND_SOFTMAX_H,
    ATTEND_QUANTISED_SHARED_H,
    ATTEND_QUANTISED_QUERIES_H,
    ATTEND_QUANTISED_GATHER_H,
    ATTEND_QUANTISED_ROWS_H,
    ATTEND_QUANTISED_SCORES_H,
    ATTEND_QUANTISED_WAY_H,
    AHEAD_H,
];
/// The same where contexts are short.
pub(super) const ATTEND_SHORT_QUANTISED: &[Header] = &[
    CONVERT_H,
    ELEMENTS_H,
    CODEBOOKS_H,
    PLANES_H,
    SIGNS_H,
    BUTTERFLIES_H,
    FRAGMENTS_H,
    ATTEND_CODES_H,
    MBARRIER_H,
    ATTEND_PLAN_H,
    ATTEND_CLUSTER_H,
    ATTEND_ROTATE_H,
    ATTEND_SOFTMAX_H,
    ATTEND_SHORT_COPIES_H,
    ATTEND_SHORT_QUERIES_H,
    ATTEND_SHORT_SLICES_H,
    AHEAD_H,
];
/// Decode attention over dense rows, contexts short or long: operands of tensor cores, who works on what, and how that comes together.
pub(super) const ATTEND_DECODE: &[Header] = &[
    CONVERT_H,
    ELEMENTS_H,
    FRAGMENTS_H,
    ATTEND_PLAN_H,
    ATTEND_CLUSTER_H,
    ATTEND_SOFTMAX_H,
    ATTEND_STATE_H,
    AHEAD_H,
    ATTEND_WEIGHTS_H,
    ATTEND_DECODE_RING_H,
    MBARRIER_H,
];
/// Attention of many tokens over dense rows: products of warpgroups, and the barriers between those who copy and those who compute.
pub(super) const ATTEND_PREFILL: &[Header] = &[
    CONVERT_H,
    ELEMENTS_H,
    FRAGMENTS_H,
    ATTEND_PLAN_H,
    ATTEND_SOFTMAX_H,
    MBARRIER_H,
    WGMMA_H,
    ATTEND_PREFILL_SHARED_H,
    ATTEND_PREFILL_COPIES_H,
    ATTEND_PREFILL_SUMS_H,
    ATTEND_PREFILL_ODD_H,
];
/// The rows of a cache layer to be read, the rotation, and where tokens stand.
pub(super) const READ: &[Header] =
    &[CONVERT_H, ELEMENTS_H, VECTORS_H, CODEBOOKS_H, PLANES_H, SIGNS_H, ROTATE_H, SLOTS_H, AHEAD_H];
/// The rows of a cache layer to be written; norm and rotary embedding of a head.
pub(super) const WRITE: &[Header] = &[
    CONVERT_H,
    ELEMENTS_H,
    VECTORS_H,
    CODEBOOKS_H,
    CELLS_H,
    PLANES_H,
    FRAGMENTS_H,
    NEAREST_H,
    SIGNS_H,
    ROTATE_H,
    SLOTS_H,
    TEAM_H,
    BUTTERFLIES_H,
    TURBOQUANT_H,
    ENCODE_TILES_H,
    NORM_ROPE_H,
    AHEAD_H,
];
