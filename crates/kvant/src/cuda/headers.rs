//! The headers of the kernel files, as lists that a [`Source`](crate::gpu::Source) names.

use std::fmt::Write;

use crate::{codec, gpu::Header};

const CONVERT_H: Header = Header { name: "convert.h", text: || include_str!("convert.h").to_string() };
const ELEMENTS_H: Header = Header { name: "elements.h", text: || include_str!("elements.h").to_string() };
const CODEBOOKS_H: Header = Header { name: "codebooks.h", text: codebooks };
const PLANES_H: Header = Header { name: "planes.h", text: || include_str!("planes.h").to_string() };

/// Loads and stores by dtype.
pub(super) const ELEMENTS: &[Header] = &[CONVERT_H, ELEMENTS_H];
/// The rows of a cache layer, whatever the codec.
#[allow(dead_code)]
pub(super) const PLANES: &[Header] = &[CONVERT_H, ELEMENTS_H, CODEBOOKS_H, PLANES_H];

/// The centroids and thresholds of the TurboQuant codebooks, as arrays in constant memory. A kernel whose threads ask
/// for different entries at a time copies them to shared memory first.
fn codebooks() -> String {
    let mut text = String::from(
        "// TurboQuant's codebooks: generated from codec/codebook.rs.\n#ifndef KVANT_CODEBOOKS_H\n#define KVANT_CODEBOOKS_H\n",
    );
    for bits in [4, 5, 6, 8] {
        let centroids = codec::centroids(bits).expect("these sizes have codebooks");
        let thresholds = codec::thresholds(bits).expect("these sizes have codebooks");
        for (name, values) in [("CENTROIDS", centroids), ("THRESHOLDS", thresholds)] {
            let _ = write!(text, "__constant__ const float {name}_{bits}[{}] = {{", values.len());
            for (i, value) in values.iter().enumerate() {
                // The shortest decimal that names this f32.
                let _ = write!(text, "{}{value:e}f,", if i % 8 == 0 { "\n    " } else { " " });
            }
            text += "\n};\n";
        }
    }
    text + "#endif\n"
}
