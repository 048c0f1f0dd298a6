//! The tables of the codec as text, for the headers of kernel files.

use std::fmt::Write;

use crate::codec;

/// The centroids and thresholds of the TurboQuant codebooks, as arrays; `float` declares one: `constant float`, say.
pub(crate) fn codebooks(float: &str) -> String {
    let mut text = String::from(
        "// TurboQuant's codebooks: generated from codec/codebook.rs.\n#ifndef KVANT_CODEBOOKS_H\n#define KVANT_CODEBOOKS_H\n",
    );
    for bits in codec::BITS {
        let centroids = codec::centroids(bits).expect("these sizes have codebooks");
        let thresholds = codec::thresholds(bits).expect("these sizes have codebooks");
        for (name, values) in [("CENTROIDS", centroids), ("THRESHOLDS", thresholds)] {
            let _ = write!(text, "{float} {name}_{bits}[{}] = {{", values.len());
            for (i, value) in values.iter().enumerate() {
                // The shortest decimal that names this f32.
                let _ = write!(text, "{}{value:e}f,", if i % 8 == 0 { "\n    " } else { " " });
            }
            text += "\n};\n";
        }
    }
    text + "#endif\n"
}

/// The signs of the Hadamard rotation: bit D + j is 1 if sign j of dimension D is −1. `uint` declares an array of 32
/// bits.
pub(crate) fn signs(uint: &str) -> String {
    let bit = |at: usize| at >= 2 && codec::sign_is_negative(1 << at.ilog2(), at - (1 << at.ilog2()));
    let mut text = String::from(
        "// The rotation's signs: generated from codec/signs.rs.\n#ifndef KVANT_SIGNS_H\n#define KVANT_SIGNS_H\n",
    );
    // Dimensions 2 to 4096.
    let _ = write!(text, "{uint} SIGN_BITS[256] = {{");
    for word in 0..256 {
        let bits = (0..32).fold(0u32, |bits, i| bits | u32::from(bit(32 * word + i)) << i);
        let _ = write!(text, "{}0x{bits:08X},", if word % 8 == 0 { "\n    " } else { " " });
    }
    text + "\n};\n#endif\n"
}
