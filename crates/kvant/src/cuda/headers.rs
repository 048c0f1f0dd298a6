//! The headers of the kernel files, as lists that a [`Source`](crate::gpu::Source) names.

use std::fmt::Write;

use crate::{codec, gpu::Header};

const CONVERT_H: Header = Header { name: "convert.h", text: || include_str!("convert.h").to_string() };
const ELEMENTS_H: Header = Header { name: "elements.h", text: || include_str!("elements.h").to_string() };
const VECTORS_H: Header = Header { name: "vectors.h", text: || include_str!("vectors.h").to_string() };
const TEAM_H: Header = Header { name: "team.h", text: || include_str!("team.h").to_string() };
const ORDERED_H: Header = Header { name: "ordered.h", text: || include_str!("ordered.h").to_string() };
const AFFINE_H: Header = Header { name: "affine.h", text: || include_str!("affine.h").to_string() };
const CODEBOOKS_H: Header = Header { name: "codebooks.h", text: codebooks };
const SIGNS_H: Header = Header { name: "signs.h", text: signs };
const ROTATE_H: Header = Header { name: "rotate.h", text: || include_str!("rotate.h").to_string() };
const PLANES_H: Header = Header { name: "planes.h", text: || include_str!("planes.h").to_string() };
const SLOTS_H: Header = Header { name: "slots.h", text: || include_str!("slots.h").to_string() };
const TURBOQUANT_H: Header = Header { name: "turboquant.h", text: || include_str!("turboquant.h").to_string() };
const FRAGMENTS_H: Header = Header { name: "fragments.h", text: || include_str!("fragments.h").to_string() };
const ATTEND_SIDE_H: Header = Header { name: "attend_side.h", text: || include_str!("attend_side.h").to_string() };
const ATTEND_PLAN_H: Header = Header { name: "attend_plan.h", text: || include_str!("attend_plan.h").to_string() };
const ATTEND_ROTATE_H: Header =
    Header { name: "attend_rotate.h", text: || include_str!("attend_rotate.h").to_string() };
const NORM_ROPE_H: Header = Header { name: "norm_rope.h", text: || include_str!("norm_rope.h").to_string() };

/// Loads and stores by dtype.
pub(super) const ELEMENTS: &[Header] = &[CONVERT_H, ELEMENTS_H];
/// The same, four elements at a time.
pub(super) const VECTORS: &[Header] = &[CONVERT_H, ELEMENTS_H, VECTORS_H];
/// What brings the elements of a row together.
pub(super) const ROWS: &[Header] = &[CONVERT_H, ELEMENTS_H, VECTORS_H, TEAM_H, ORDERED_H];
/// The rows of a weight, dense or affine.
pub(super) const AFFINE: &[Header] = &[CONVERT_H, ELEMENTS_H, VECTORS_H, TEAM_H, AFFINE_H];
/// The Hadamard rotation.
pub(super) const ROTATE: &[Header] = &[CONVERT_H, ELEMENTS_H, VECTORS_H, SIGNS_H, ROTATE_H];
/// Attention: the rows of a cache layer as operands of tensor cores, the rotation, and who works on what.
pub(super) const ATTEND: &[Header] = &[
    CONVERT_H,
    ELEMENTS_H,
    CODEBOOKS_H,
    PLANES_H,
    SIGNS_H,
    FRAGMENTS_H,
    ATTEND_SIDE_H,
    ATTEND_PLAN_H,
    ATTEND_ROTATE_H,
];
/// The rows of a cache layer to be read, the rotation, and where tokens stand.
pub(super) const READ: &[Header] =
    &[CONVERT_H, ELEMENTS_H, VECTORS_H, CODEBOOKS_H, PLANES_H, SIGNS_H, ROTATE_H, SLOTS_H];
/// The rows of a cache layer to be written; norm and rotary embedding of a head.
pub(super) const WRITE: &[Header] = &[
    CONVERT_H,
    ELEMENTS_H,
    VECTORS_H,
    CODEBOOKS_H,
    PLANES_H,
    SIGNS_H,
    ROTATE_H,
    SLOTS_H,
    TEAM_H,
    TURBOQUANT_H,
    NORM_ROPE_H,
];

/// The centroids and thresholds of the TurboQuant codebooks, as arrays. Threads ask for different entries at a time,
/// which constant memory would serve one by one.
fn codebooks() -> String {
    let mut text = String::from(
        "// TurboQuant's codebooks: generated from codec/codebook.rs.\n#ifndef KVANT_CODEBOOKS_H\n#define KVANT_CODEBOOKS_H\n",
    );
    for bits in [4, 5, 6, 8] {
        let centroids = codec::centroids(bits).expect("these sizes have codebooks");
        let thresholds = codec::thresholds(bits).expect("these sizes have codebooks");
        for (name, values) in [("CENTROIDS", centroids), ("THRESHOLDS", thresholds)] {
            let _ = write!(text, "__device__ const float {name}_{bits}[{}] = {{", values.len());
            for (i, value) in values.iter().enumerate() {
                // The shortest decimal that names this f32.
                let _ = write!(text, "{}{value:e}f,", if i % 8 == 0 { "\n    " } else { " " });
            }
            text += "\n};\n";
        }
    }
    text + "#endif\n"
}

/// The signs of the Hadamard rotation: bit D + j says whether sign j of dimension D is −1.
fn signs() -> String {
    let bit = |at: usize| at >= 2 && codec::sign_is_negative(1 << at.ilog2(), at - (1 << at.ilog2()));
    let mut text = String::from(
        "// The rotation's signs: generated from codec/signs.rs.\n#ifndef KVANT_SIGNS_H\n#define KVANT_SIGNS_H\n",
    );
    // Dimensions 2 to 4096.
    text += "__device__ const unsigned SIGN_BITS[256] = {";
    for word in 0..256 {
        let bits = (0..32).fold(0u32, |bits, i| bits | u32::from(bit(32 * word + i)) << i);
        let _ = write!(text, "{}0x{bits:08X},", if word % 8 == 0 { "\n    " } else { " " });
    }
    text + "\n};\n#endif\n"
}
