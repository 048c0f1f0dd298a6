//! The operations of a decoder layer.
//!
//! Each operation is a function of an [`Encoder`](crate::Encoder) and a descriptor struct with named fields. The
//! function checks every argument and records the call; it writes nothing when it returns an error.
//! [`mod@crate::reference`] defines the exact result of every operation in f64.
//!
//! # Shapes and dtypes
//!
//! Tensors are row-major. Documentation names dimensions by letters:
//!
//! | letter | dimension |
//! |---|---|
//! | T | tokens (rows) of the call |
//! | H, Hk | query heads, KV heads |
//! | D | coordinates of a head (head size) |
//! | S | sequences of the cache |
//! | K, N | inputs and outputs of a matrix; N is also the width of a row |
//! | E | experts |
//! | V | vocabulary |
//! | P | positions of a table |
//!
//! Floating-point tensors are f32, f16 or bf16, each independently of the others, unless the operation says
//! otherwise. Numbers such as `scale` and `eps` must be finite. A call whose outputs are all empty does nothing.
//!
//! # Memory
//!
//! An output must not overlap any other argument. The exceptions are the in-place pairs that an operation names:
//! there, both arguments are the same view with the same dtype.
//!
//! # Errors
//!
//! When an operation is recorded, it returns
//!
//! - `Shape`, `DType`, `Value` or `Overflow` for arguments that are invalid or do not match;
//! - `WrongDevice` for a tensor on another device than the encoder;
//! - `Overlap` for an output that overlaps another argument;
//! - on a GPU also `Unsupported`, `Compile`, `OutOfMemory` and `DeviceFault`, because kernels are compiled and
//!   scratch memory is allocated at that point. The first call can take seconds. Under
//!   [`Encoder::capture`](crate::Encoder::capture), the capture compiles and returns these errors.
//!
//! Index tensors (positions, sequences, ids) are read when the call runs. On the CPU,
//! [`Encoder::commit`](crate::Encoder::commit) returns `OutOfRange` for an index that is out of range. A GPU kernel
//! skips such an entry, or writes zeros if the operation's documentation says so.
//!
//! # Accuracy
//!
//! Every device except the reference reads its inputs as f32, computes in f32 or more precisely, and rounds each result
//! once to the dtype of the output. The table lists the exceptions. Rounding is to nearest, ties to even; values beyond
//! the largest finite number overflow to infinity. A GPU may flush subnormals (magnitudes below 1.2e-38) to zero in
//! tensors, in arguments such as `eps`, and in intermediate results.
//!
//! The conformance tests compare every device with the f64 reference. Let u be the unit roundoff of the output (2⁻²⁴,
//! 2⁻¹¹ or 2⁻⁸ for f32, f16 or bf16) and a = 16·2⁻²⁴. The normalised squared error Σ(x−y)²/Σy², without the worst
//! element, must be at most u² + (g·a + r)². The last column has the gain g of an operation (1 if not given), the
//! rounding r of a case (0 if not given), and measured errors. For attention, g = max(1, |scale|·√D).
//!
//! | operation | case | sums in | rounding besides the final one | error |
//! |---|---|---|---|---|
//! | [`kv_write`](kv_write()), [`kv_read`](kv_read()) | dense to the same dtype | none | none | bits are copied, NaN payloads included |
//! | | dense to another dtype | none | none | correctly rounded |
//! | | TurboQuant | f32 (the reference uses f64) | as the codec defines ([`codec::encode`](crate::codec::encode)) | a coordinate next to a threshold may get the neighbouring index |
//! | [`attend`](attend()) | unless below | f32, softmax included | none | g as above; r = u of `q` for rotated f16 or bf16 queries |
//! | | quantised keys or values; CPU at [`Avx512Vbmi`](crate::SimdLevel::Avx512Vbmi) and above (default where available) | integers | centroids and their factors are rounded to fixed point | r = 2⁻¹² + g/2¹⁴. RMS error with normal keys and queries, measured: 1.5·10⁻⁴ of a result at scale 1/√D; at scale 1 up to 4.4·10⁻⁴ (D = 256) and 6.1·10⁻⁴ (D = 512) |
//! | | 32 query rows or more of a KV head, in prompts or groups of heads; CPU at [`Avx512Amx`](crate::SimdLevel::Avx512Amx) (default where available), D a multiple of 32 | f32 | queries, keys, values and softmax weights are split into hi + lo bf16; products lo · lo are omitted | r = (1 + g)/2¹⁷: each factor keeps 16 bits or more (below 2⁻¹¹⁰ fewer). RMS error with normal keys and queries, measured at scale 1/√D: 5.1·10⁻⁶ over f16, 3.3·10⁻⁶ over bf16, 6.4·10⁻⁶ over f32 and quantised caches |
//! | | other tokens over quantised keys or values; CUDA, f16 or bf16 `out` | f32 | centroids and their factors are rounded to f16 | r = g/2¹¹: a relative error of at most 2⁻¹² for each rounded factor |
//! | | prompts over dense caches of `q`'s 16-bit dtype, f16 or bf16 `out`; CUDA | f32 | softmax weights are rounded to `q`'s dtype | r = half a unit of `q`'s dtype |
//! | | prompts over quantised caches of a pool, bf16 `q`, f16 or bf16 `out`; CUDA | f32 | also decoded keys and values | r = (2 + g)·2⁻⁹ |
//! | | other caches; CUDA, f16 or bf16 `out` | f32 | softmax weights and f32 queries, keys and values are split into several f16 or bf16 terms | at least 16 bits of each factor |
//! | | CUDA, f32 `out` | f32 | as above; centroids are split as well | at least 22 bits of each factor |
//! | | quantised values; CUDA | f32 | weights are scaled by the largest norm among the values that a block of neighbouring tokens sees | values with a norm below 2⁻²⁸ of the largest lose bits of their weight; below about 2⁻³⁸ they count as zero |
//! | [`norm_rope`](norm_rope()) | [`Angles::Theta`] | f32 | angles are exact to 1e-5 rad up to position 1 048 576 | r = 1e-5 · position / 2²⁰ |
//! | [`norm_rope_write`](norm_rope_write()) | | f32 | none: keys and values are encoded from f32 | as `norm_rope`, then as `kv_write` |
//! | [`hadamard`](hadamard()) | | f32 | none | |
//! | [`linear`](linear()) | unless below | f32 | none | g = 2 for K > 4096 |
//! | | affine or blocks, up to 15 rows for one matrix (with experts: for each); CPU at `Avx512Vbmi` and above | integers per group (8-bit and IQ4 codes: f32), then f32 | activations are rounded to steps of about 2⁻²³ of the largest of their group | activations below half a step count as zero |
//! | | with [`eight_bit_activations`](crate::CpuOptions::eight_bit_activations), dense f16 or bf16, 16 rows or more for one matrix, affine or blocks, 48 rows or more for a matrix (with experts: on average); CPU at `Avx512Amx` | f32 | activations and weights are rounded to bf16 | r = 2⁻⁷: each factor has a relative error of at most 2⁻⁸. Measured with normal activations: 2.4·10⁻³ of the RMS of a result, 1.6·10⁻³ if one factor is already bf16. Products below 2⁻¹²⁶ count as zero |
//! | | with `eight_bit_activations`, affine or blocks, 16 rows or more for one matrix (with experts: all rows, once one expert has 16), unless above; CPU at `Avx2Vnni`, `Avx512Vnni` and above | integers per group, then f32 | activations are rounded to 8 bits, to steps of 1/127 of the largest of their group | r = 2⁻⁷ with normal activations, up to √N/440 if one of the N inputs of a group is far larger than the others. Measured with normal activations: 4·10⁻³ to 6·10⁻³ of the RMS of a result |
//! | | dense f16 or bf16, 16 rows or more for one matrix, affine or blocks, 32 rows or more for a matrix (with experts: on average), unless above; CPU at `Avx512Amx` (default where available) | f32 | activations and weights are split into hi + lo bf16; products lo · lo are omitted | r = 2⁻¹⁵. Measured: 3·10⁻⁶ of the RMS of a result. Products below 2⁻¹¹⁷ keep 8 bits, below 2⁻¹²⁶ none |
//! | | affine or blocks, 16 rows or more for one matrix (with experts: all rows, once one expert has 16), unless above; CPU at `Avx2Vnni`, `Avx512Vnni` and above | integers per group, then f32 | activations are rounded to 16 bits, relative to the largest of their group | r = 2⁻¹⁵. Measured: about 2·10⁻⁵ of the RMS of a result (f32: 10⁻⁷, bf16: about 10⁻³) |
//! | | affine, one or two rows for one matrix, or few rows of experts; CUDA | integers per group, then f32 | activations are rounded to steps of 2⁻²² of the largest of 128 consecutive inputs | activations below one step count as zero |
//! | | affine or blocks, bf16 `x` and `out`, 1024 rows or more (on GPUs other than Hopper and for groups of 32: 33; for codes of 2, 3 and 5 bits and blocks: 41), no experts; CUDA with cuBLASLt | f32 | weights are rounded to bf16 | r = 2⁻¹⁰ |
//! | | bf16 `x` and `out`, experts: affine in groups of 32, more than 2 rows for each; codes of 2, 3 and 5 bits and blocks, more than 48; CUDA on Hopper | f32 | weights are rounded to bf16 | r = 2⁻¹⁰ |
//! | | affine codes of 4, 6 or 8 bits in groups of 64 or 128 with bf16 scales, bf16 `x` and `out`, 33 to 128 rows (with experts: more than 16 for each); CUDA on Hopper | f32 | weights are rounded to bf16 | r = 3·2⁻¹¹ |
//! | [`copy`](copy()), [`all_gather`](all_gather()) | | none | none | bits are copied |
//! | [`all_reduce`](all_reduce()) | | f32, in the order of ranks | none | the same bits on all ranks, in every run |
//! | [`embed`](embed()) | | none | none | |
//! | [`merge_attention`](merge_attention()) | | f32, in the order of ranks | none | |
//! | [`add`](add()), [`add_bias`](add_bias()) | | f32 | none | |
//! | [`causal_conv`](causal_conv()) | | f32 | none | g = 4 |
//! | [`delta_rule`](delta_rule()) | unless below | f32 | none | g = 4, for the state as well |
//! | | bf16 `qkv` and `out`, runs of more than 16 rows, D of 64 or 128, Dv a multiple of 64; CUDA on Hopper | f32 | factors of products are rounded to bf16 | r = 2⁻⁷, for the state as well |
//! | [`rms_norm`](rms_norm()) | | f32; rows whose squares leave the range of f32 are rescaled | `next` reads `out` as rounded to its dtype | g = 8 with `gate` |
//! | [`gate`](gate()) | | none | none | g = 8 |
//! | [`softcap`](softcap()) | | none | none | |
//! | [`spread`](spread()) | | none | none | |
//! | [`moe_route`](moe_route()) | chosen by logits | f32 | none | ids are exact |
//! | | with a bias or groups | f32 | none | corrected scores, or values of groups, that differ by less than 2⁻²² may be ordered either way; scores below 2⁻¹²⁶ may count as zero |
//! | [`moe_combine`](moe_combine()) | | f32 | none | |
//! | [`argmax`](argmax()) | | none | none | exact |
//! | [`sample`](sample()) | | f32 or wider | none | if the rates of two candidates are equal up to rounding, either may be drawn |
//!
//! "Blocks" include MXFP4 and NVFP4 with separate scales. On CUDA they also include MXFP8, whose weights are exact in
//! bf16. The CPU multiplies MXFP8 in f32.
//!
//! To multiply in f32 on a CPU with VNNI or AMX, at half the speed or less for [`linear`](linear()), open the device
//! with [`CpuOptions`](crate::CpuOptions)` { simd: Some(SimdLevel::Avx512), .. }`, or `Avx2` without AVX-512.

#[cfg(test)]
mod accuracy;
pub(crate) mod add;
pub(crate) mod add_bias;
pub(crate) mod all_gather;
pub(crate) mod all_reduce;
pub(crate) mod argmax;
pub mod attend;
pub(crate) mod blocks;
pub(crate) mod causal_conv;
pub(crate) mod check;
pub(crate) mod copy;
pub(crate) mod delta_rule;
pub(crate) mod embed;
pub(crate) mod gate;
pub(crate) mod hadamard;
pub(crate) mod kv_read;
pub(crate) mod kv_write;
pub(crate) mod linear;
pub(crate) mod merge_attention;
pub(crate) mod moe;
pub(crate) mod norm_rope;
pub(crate) mod norm_rope_write;
pub(crate) mod rms_norm;
pub(crate) mod sample;
pub(crate) mod seal;
pub(crate) mod softcap;
pub(crate) mod spread;
pub(crate) mod state_runs;
pub(crate) mod state_slots;

pub use add::{Add, add};
pub use add_bias::{AddBias, add_bias};
pub use all_gather::{AllGather, all_gather};
pub use all_reduce::{AllReduce, all_reduce};
pub use argmax::{Argmax, argmax};
pub use attend::{Attend, Explanation, Query, attend, explain};
pub use blocks::{BlockFormat, Blocks, FloatFormat, ScaledFloats};
pub use causal_conv::{CausalConv, causal_conv};
pub use copy::copy;
pub use delta_rule::{DeltaRule, DeltaRuleShape, delta_rule};
pub use embed::{Embed, embed};
pub use gate::{Activation, Columns, Gate, gate};
pub use hadamard::{Hadamard, hadamard};
pub use kv_read::{KvRead, KvSide, kv_read};
pub use kv_write::{KvWrite, kv_write};
pub use linear::{Affine, Experts, Linear, Weight, linear};
pub use merge_attention::{MergeAttention, merge_attention};
pub use moe::{ExpertGroups, ExpertScores, MoeCombine, MoeRoute, moe_combine, moe_route};
pub use norm_rope::{Angles, HeadNorm, NormRope, PairLayout, Rope, norm_rope};
pub use norm_rope_write::{NormRopeWrite, norm_rope_write};
pub use rms_norm::{NextNorm, Residual, RmsNorm, rms_norm};
pub use sample::{Sample, SampleRow, sample};
pub use softcap::{Softcap, softcap};
pub use spread::{Spread, spread};
pub use state_runs::StateRuns;
pub use state_slots::StateSlots;

use crate::{
    Result, Step,
    encoder::{Access, Touch},
    group::{Rank, RankTensors},
};

/// Defines the enum of the validated calls of all operations, which every backend must run.
///
/// The `Call` of each file holds owned tensors and the dimensions that validation resolved.
macro_rules! calls {
    ($($variant:ident($module:ident)),* $(,)?) => {
        // Boxing the large variants would allocate on every call.
        #[allow(clippy::large_enum_variant)]
        #[derive(Clone, Debug)]
        pub(crate) enum Call { $($variant($module::Call)),* }

        impl Call {
            /// The operation's name.
            pub(crate) fn name(&self) -> &'static str {
                match self { $(Call::$variant(_) => $module::NAME),* }
            }

            /// Visits every tensor that the call reads or writes.
            pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
                match self { $(Call::$variant(call) => call.touches(visit)),* }
            }

            /// Whether every output is empty, so that the call has no effect.
            pub(crate) fn writes_nothing(&self) -> bool {
                let mut nothing = true;
                self.touches(&mut |touch| nothing &= touch.access == Access::Read || touch.tensor.elements() == 0);
                nothing
            }

            /// The (output, input) pairs that may be the same view with the same dtype.
            pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
                match self { $(Call::$variant(call) => call.in_place()),* }
            }

            /// Replaces the tensors by those of a rank.
            pub(crate) fn move_to(&mut self, rank: &Rank) {
                match self { $(Call::$variant(call) => RankTensors::move_to(call, rank)),* }
            }

            /// Checks the contents of index buffers (positions, sequences, ids).
            ///
            /// Only for devices in host memory, under their lock. GPU kernels skip entries that are out of range.
            pub(crate) fn check_indices(&self) -> Result<()> {
                match self { $(Call::$variant(call) => call.check_indices()),* }
            }
        }
    };
}
use moe::{combine as moe_combine_call, route as moe_route_call};
calls! {
    Add(add),
    AddBias(add_bias),
    AllGather(all_gather),
    AllReduce(all_reduce),
    Argmax(argmax),
    Attend(attend),
    CausalConv(causal_conv),
    Copy(copy),
    DeltaRule(delta_rule),
    Embed(embed),
    Gate(gate),
    Hadamard(hadamard),
    KvRead(kv_read),
    KvWrite(kv_write),
    Linear(linear),
    MergeAttention(merge_attention),
    MoeCombine(moe_combine_call),
    MoeRoute(moe_route_call),
    NormRope(norm_rope),
    NormRopeWrite(norm_rope_write),
    RmsNorm(rms_norm),
    Sample(sample),
    Seal(seal),
    Softcap(softcap),
    Spread(spread),
}

impl Call {
    /// The step that gives the positions of the call's tokens.
    pub(crate) fn step(&self) -> Option<&Step> {
        match self {
            Call::Attend(call) => Some(&call.step),
            Call::KvRead(call) => call.step.as_ref(),
            Call::KvWrite(call) => Some(&call.step),
            Call::NormRopeWrite(call) => Some(&call.step),
            _ => None,
        }
    }
}
