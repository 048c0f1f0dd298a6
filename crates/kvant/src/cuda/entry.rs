//! Names of compiled kernels, as profilers show them.
//!
//! A name says operation, kernel and main constants: `attend_decode_bf16_d256`, `linear_skinny_mma_affine4_g64`. The
//! compiler gets it as the macro `KVANT_KERNEL`, the name of the function in every kernel file.

use crate::gpu::{
    Constant,
    planes::{codec_name, dtype_name},
};

/// The name of the compiled kernel that a launch's `kernel` and constants specify.
///
/// Launches that differ only in other constants share a name. The key of a compiled kernel has all constants.
pub(super) fn name(kernel: &str, constants: &[(&'static str, Constant)]) -> String {
    let value = |name: &str| match constants.iter().find(|(of, _)| *of == name)?.1 {
        Constant::UInt(value) => Some(value),
        Constant::Bool(_) => None,
    };
    let mut parts = vec![kernel.to_string()];
    // The kind of weight; without a weight, the dtype of the input.
    match (value("BITS"), value("GROUP"), value("W_DTYPE")) {
        (Some(bits @ 1..), Some(group), _) => parts.push(format!("affine{bits}_g{group}")),
        (Some(0), _, Some(dtype)) => parts.push(dtype_name(dtype)),
        _ => {
            let dtypes = ["DTYPE", "Q_DTYPE", "X_DTYPE", "K_DTYPE", "TABLE_DTYPE", "GATE_DTYPE"];
            parts.extend(dtypes.into_iter().find_map(value).map(dtype_name));
        }
    }
    parts.extend(value("HEAD_DIM").map(|dim| format!("d{dim}")));
    match (value("CODEC"), value("K_CODEC"), value("V_CODEC")) {
        (Some(codec), ..) => parts.push(codec_name(codec)),
        (_, Some(k), Some(v)) if k == v => parts.push(codec_name(k)),
        (_, Some(k), Some(v)) => parts.push(format!("k{}_v{}", codec_name(k), codec_name(v))),
        _ => {}
    }
    parts.join("_")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Codec, DType, gpu::planes::codec_code};

    #[test]
    fn names_say_the_main_constants() {
        let bf16 = Constant::from(DType::BF16);
        let uint = Constant::UInt;
        let decode = [("WARPS", uint(8)), ("HEAD_DIM", uint(256)), ("DTYPE", bf16)];
        assert_eq!(name("attend_decode", &decode), "attend_decode_bf16_d256");
        let affine = [("X_DTYPE", bf16), ("W_DTYPE", bf16), ("BITS", uint(4)), ("GROUP", uint(64))];
        assert_eq!(name("linear_skinny_mma", &affine), "linear_skinny_mma_affine4_g64");
        let dense = [("X_DTYPE", bf16), ("W_DTYPE", Constant::from(DType::F16)), ("BITS", uint(0)), ("GROUP", uint(1))];
        assert_eq!(name("linear_skinny_mma", &dense), "linear_skinny_mma_f16");
        let codec = |codec| uint(codec_code(codec));
        let layer = |k, v| [("Q_DTYPE", bf16), ("HEAD_DIM", uint(128)), ("K_CODEC", codec(k)), ("V_CODEC", codec(v))];
        let (tq2, tq4, tq8) = (Codec::tq(2), Codec::tq(4), Codec::tq(8));
        assert_eq!(name("attend_quantised", &layer(tq4, tq4)), "attend_quantised_bf16_d128_tq4");
        assert_eq!(name("attend_generic", &layer(tq8, Codec::BF16)), "attend_generic_bf16_d128_ktq8_vbf16");
        assert_eq!(name("attend_generic", &layer(Codec::BF16, tq2)), "attend_generic_bf16_d128_kbf16_vtq2");
        assert_eq!(name("softcap", &[("X_DTYPE", Constant::from(DType::F32))]), "softcap_f32");
        assert_eq!(name("copy", &[("UNIT", uint(16)), ("ALIGNED", Constant::Bool(true))]), "copy");
    }
}
