//! The headers of the kernel files. What a file includes is read from its `#include` lines.

use crate::gpu::{Header, headers, tables};

/// All of them, by their paths from this folder.
pub(super) static HEADERS: &[Header] = headers![
    "affine.h",
    "attend/keys.h",
    "attend/lanes.h",
    "attend/params.h",
    "attend/softmax.h",
    "blocks.h",
    "elements.h",
    "norm_rope.h",
    "ordered.h",
    "page_means.h",
    "pages.h",
    "planes.h",
    "reduce.h",
    "rotate.h",
    "rows.h",
    "slots.h",
    "turboquant.h",
    "upper_half.h",
    "vectors.h";
    "codebooks.h" => || tables::codebooks("constant constexpr float"),
    "signs.h" => || tables::signs("constant constexpr uint"),
];

#[test]
fn the_table_is_exact() {
    crate::gpu::assert_table_is_exact("metal", "metal", HEADERS);
}
