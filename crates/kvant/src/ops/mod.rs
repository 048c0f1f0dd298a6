//! The operations: one file each, with its contract, its validation and its dispatch.
//!
//! Each operation is a function of an [`Encoder`](crate::Encoder) and a descriptor struct with named fields. It
//! checks every argument, then hands a validated `Call` to the device; nothing is written when it returns an error.
//!
//! A GPU may take numbers below 1.2e-38 in magnitude for zero wherever they come up: in a tensor, an `eps` or on the way.
//!
//! # Errors
//! Of every operation, when it is recorded: `Shape`, `DType`, `Value` (numbers such as `scale` and `eps` are finite, too), `Overflow`
//! for arguments that do not fit together; `WrongDevice`; `Overlap`. On a GPU also `Unsupported`, `Compile`, `OutOfMemory` and
//! `DeviceFault`: kernels are compiled and scratch memory is allocated then, so that a first call can take seconds; under
//! [`Encoder::capture`](crate::Encoder::capture) it is the capture that compiles and says so. At the commit, on the CPU, `OutOfRange` for
//! what an index tensor holds.

pub(crate) mod argmax;
pub mod attend;
pub(crate) mod check;
pub(crate) mod copy;
pub(crate) mod embed;
pub(crate) mod gate;
pub(crate) mod hadamard;
pub(crate) mod kv_read;
pub(crate) mod kv_write;
pub(crate) mod linear;
pub(crate) mod moe;
pub(crate) mod norm_rope;
pub(crate) mod norm_rope_write;
pub(crate) mod rms_norm;
pub(crate) mod sample;
pub(crate) mod softcap;

pub use argmax::{Argmax, argmax};
pub use attend::{Attend, Fresh, attend};
pub(crate) use copy::copy;
pub use embed::{Embed, embed};
pub use gate::{Activation, Columns, Gate, gate};
pub use hadamard::{Hadamard, hadamard};
pub use kv_read::{KvRead, KvSide, kv_read};
pub use kv_write::{KvWrite, SourceOrder, kv_write};
pub use linear::{Affine, Experts, Linear, Weight, linear};
pub use moe::{MoeCombine, MoeRoute, moe_combine, moe_route};
pub use norm_rope::{Angles, HeadNorm, NormRope, PairLayout, Rope, norm_rope};
pub use norm_rope_write::{NormRopeWrite, norm_rope_write};
pub use rms_norm::{Residual, RmsNorm, rms_norm};
pub use sample::{Sample, sample};
pub use softcap::{Softcap, softcap};

use crate::{
    Result,
    encoder::{Access, Touch},
};

/// The validated calls of all operations: what a backend must be able to run.
///
/// Each file's `Call` holds owned tensors and the dimensions that validation resolved.
macro_rules! calls {
    ($($variant:ident($module:ident)),* $(,)?) => {
        // Boxing the large ones would allocate at every operation.
        #[allow(clippy::large_enum_variant)]
        #[derive(Clone, Debug)]
        pub(crate) enum Call { $($variant($module::Call)),* }

        impl Call {
            /// The operation's name.
            pub(crate) fn name(&self) -> &'static str {
                match self { $(Call::$variant(_) => $module::NAME),* }
            }

            /// Every tensor that the call reads or writes.
            pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
                match self { $(Call::$variant(call) => call.touches(visit)),* }
            }

            /// Whether all that it writes is empty: then it is done before it has begun.
            pub(crate) fn writes_nothing(&self) -> bool {
                let mut nothing = true;
                self.touches(&mut |touch| nothing &= touch.access == Access::Read || touch.tensor.elements() == 0);
                nothing
            }

            /// The (output, input) pairs that may be the very same view of the same dtype.
            pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
                match self { $(Call::$variant(call) => call.in_place()),* }
            }

            /// Checks the contents of index buffers (positions, sequences, ids).
            ///
            /// Only for devices in host memory, under their lock: elsewhere the kernels skip what is out of range.
            pub(crate) fn check_indices(&self) -> Result<()> {
                match self { $(Call::$variant(call) => call.check_indices()),* }
            }
        }
    };
}
use moe::{combine as moe_combine_call, route as moe_route_call};
calls! {
    Argmax(argmax),
    Attend(attend),
    Copy(copy),
    Embed(embed),
    Gate(gate),
    Hadamard(hadamard),
    KvRead(kv_read),
    KvWrite(kv_write),
    Linear(linear),
    MoeCombine(moe_combine_call),
    MoeRoute(moe_route_call),
    NormRope(norm_rope),
    NormRopeWrite(norm_rope_write),
    RmsNorm(rms_norm),
    Sample(sample),
    Softcap(softcap),
}
