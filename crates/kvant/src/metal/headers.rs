//! The headers of the kernel files, as lists that a [`Source`](crate::gpu::Source) names.

use crate::gpu::{Header, tables};

const ELEMENTS_H: Header = Header { name: "elements.h", text: || include_str!("elements.h").to_string() };
const CODEBOOKS_H: Header = Header { name: "codebooks.h", text: || tables::codebooks("constant constexpr float") };
const SIGNS_H: Header = Header { name: "signs.h", text: || tables::signs("constant constexpr uint") };
const ROTATE_H: Header = Header { name: "rotate.h", text: || include_str!("rotate.h").to_string() };
const ROWS_H: Header = Header { name: "rows.h", text: || include_str!("rows.h").to_string() };
const SLOTS_H: Header = Header { name: "slots.h", text: || include_str!("slots.h").to_string() };
const TURBOQUANT_H: Header = Header { name: "turboquant.h", text: || include_str!("turboquant.h").to_string() };
const NORM_ROPE_H: Header = Header { name: "norm_rope.h", text: || include_str!("norm_rope.h").to_string() };
const PLANES_H: Header = Header { name: "planes.h", text: || include_str!("planes.h").to_string() };
const VECTORS_H: Header = Header { name: "vectors.h", text: || include_str!("vectors.h").to_string() };
const REDUCE_H: Header = Header { name: "reduce.h", text: || include_str!("reduce.h").to_string() };
const ORDERED_H: Header = Header { name: "ordered.h", text: || include_str!("ordered.h").to_string() };
const AFFINE_H: Header = Header { name: "affine.h", text: || include_str!("affine.h").to_string() };
const WIDE_H: Header = Header { name: "wide.h", text: || include_str!("wide.h").to_string() };
const ATTEND_H: Header = Header { name: "attend.h", text: || include_str!("attend.h").to_string() };

/// Loads and stores by dtype.
pub(super) const ELEMENTS: &[Header] = &[ELEMENTS_H];
/// The same, four elements at a time.
pub(super) const VECTORS: &[Header] = &[ELEMENTS_H, VECTORS_H];
/// The Hadamard rotation.
pub(super) const ROTATE: &[Header] = &[ELEMENTS_H, VECTORS_H, ROWS_H, SIGNS_H, ROTATE_H];
/// What brings the elements of a row together.
pub(super) const ROWS: &[Header] = &[ELEMENTS_H, VECTORS_H, REDUCE_H, ORDERED_H, WIDE_H];
/// The rows of a weight, dense or affine.
pub(super) const AFFINE: &[Header] = &[ELEMENTS_H, VECTORS_H, AFFINE_H];
/// What attention is made of.
pub(super) const ATTEND: &[Header] = &[ELEMENTS_H, VECTORS_H, CODEBOOKS_H, PLANES_H, SIGNS_H, ROTATE_H, ATTEND_H];
/// The rows of a cache layer to be read, and the rotation.
pub(super) const READ: &[Header] = &[ELEMENTS_H, VECTORS_H, ROWS_H, CODEBOOKS_H, PLANES_H, SIGNS_H, ROTATE_H, SLOTS_H];
/// The rows of a cache layer to be written, and where tokens stand in it.
pub(super) const WRITE: &[Header] =
    &[ELEMENTS_H, VECTORS_H, ROWS_H, REDUCE_H, CODEBOOKS_H, PLANES_H, SIGNS_H, ROTATE_H, TURBOQUANT_H, SLOTS_H];
/// Norm and rotary embedding of a head.
pub(super) const NORM_ROPE: &[Header] =
    &[ELEMENTS_H, VECTORS_H, ROWS_H, REDUCE_H, WIDE_H, SIGNS_H, ROTATE_H, NORM_ROPE_H];
/// All that stands between a layer's projections and its attention.
pub(super) const NORM_ROPE_WRITE: &[Header] = &[
    ELEMENTS_H,
    VECTORS_H,
    ROWS_H,
    REDUCE_H,
    WIDE_H,
    CODEBOOKS_H,
    PLANES_H,
    SIGNS_H,
    ROTATE_H,
    TURBOQUANT_H,
    SLOTS_H,
    NORM_ROPE_H,
];
