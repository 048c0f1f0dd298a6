//! Products of tiles.

use std::arch::asm;

use super::{APART, ROWS, TILE_BYTES, WORDS};

/// One or two tiles of rows times two tiles of outputs.
pub(super) struct Product {
    /// The first of `steps` tiles of 32 inputs; the second one counts if there are `two`.
    pub x: [*const f32; 2],
    pub two: bool,
    pub weights: [*const f32; 2],
    pub steps: usize,
    /// `[32 rows, APART]`, of which 32 columns are added to.
    pub totals: *mut f32,
}

/// Loads a digit of the activations or of the weights at these distances, or uses what is loaded, and adds the products.
/// Loads are next to the products that wait for them.
macro_rules! multiply {
    (1, $x:tt, $w:tt) => {
        concat!(
            load!("tmm4", "x0", $x),
            load!("tmm6", "w0", $w),
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            load!("tmm7", "w1", $w),
            "tdpbf16ps tmm1, tmm4, tmm7\n"
        )
    };
    (2, $x:tt, $w:tt) => {
        concat!(
            multiply!(1, $x, $w),
            load!("tmm5", "x1", $x),
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            "tdpbf16ps tmm3, tmm5, tmm7\n"
        )
    };
}

macro_rules! load {
    ($tile:literal, $from:literal, loaded) => {
        ""
    };
    ($tile:literal, $from:literal, $at:literal) => {
        concat!("tileloadd ", $tile, ", [{", $from, "} + {line} + ", $at, "]\n")
    };
}

/// The products of all digits but of two low ones.
macro_rules! digits {
    ($rows:tt, 1, 1) => {
        multiply!($rows, 0, 0)
    };
    ($rows:tt, 2, 1) => {
        concat!(multiply!($rows, 1024, 0), multiply!($rows, 0, loaded))
    };
    ($rows:tt, 1, 2) => {
        concat!(multiply!($rows, 0, 1024), multiply!($rows, loaded, 0))
    };
    ($rows:tt, 2, 2) => {
        concat!(multiply!($rows, 0, 1024), multiply!($rows, loaded, 0), multiply!($rows, 1024, loaded))
    };
}

// The distances in `totals!`, and of a low digit from the high one.
const _: () = assert!(ROWS * APART * size_of::<f32>() == 33792 && WORDS * size_of::<f32>() == 1024);

/// Loads or stores totals.
macro_rules! totals {
    (load, 1) => {
        "tileloadd tmm0, [{to} + {apart}]\ntileloadd tmm1, [{to} + {apart} + 64]\n"
    };
    (load, 2) => {
        concat!(
            totals!(load, 1),
            "tileloadd tmm2, [{to} + {apart} + 33792]\ntileloadd tmm3, [{to} + {apart} + 33856]\n"
        )
    };
    (store, 1) => {
        "tilestored [{to} + {apart}], tmm0\ntilestored [{to} + {apart} + 64], tmm1\n"
    };
    (store, 2) => {
        concat!(
            totals!(store, 1),
            "tilestored [{to} + {apart} + 33792], tmm2\ntilestored [{to} + {apart} + 33856], tmm3\n"
        )
    };
}

macro_rules! product {
    ($product:expr, $rows:tt, $x:tt, $w:tt) => {
        asm!(
            totals!(load, $rows),
            "2:",
            digits!($rows, $x, $w),
            "add {x0}, {x_step}",
            "add {x1}, {x_step}",
            "add {w0}, {w_step}",
            "add {w1}, {w_step}",
            "dec {steps}",
            "jnz 2b",
            totals!(store, $rows),
            x0 = inout(reg) $product.x[0] => _,
            x1 = inout(reg) $product.x[1] => _,
            w0 = inout(reg) $product.weights[0] => _,
            w1 = inout(reg) $product.weights[1] => _,
            steps = inout(reg) $product.steps => _,
            to = in(reg) $product.totals,
            apart = in(reg) APART * size_of::<f32>(),
            line = in(reg) TILE_BYTES,
            x_step = const $x * WORDS * size_of::<f32>(),
            w_step = const $w * WORDS * size_of::<f32>(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

impl Product {
    /// Adds the products to the totals. `digits`: of the activations and of the weights.
    ///
    /// # Safety
    /// There are `Tiles` whose registers have 16 rows of 64 bytes. The tiles have at least one step and these digits,
    /// and the totals exist.
    #[inline(always)]
    pub(super) unsafe fn add(&self, digits: [usize; 2]) {
        // SAFETY: the caller's promise.
        unsafe {
            match (self.two, digits) {
                (false, [1, 1]) => product!(self, 1, 1, 1),
                (false, [2, 1]) => product!(self, 1, 2, 1),
                (false, [1, _]) => product!(self, 1, 1, 2),
                (false, _) => product!(self, 1, 2, 2),
                (true, [1, 1]) => product!(self, 2, 1, 1),
                (true, [2, 1]) => product!(self, 2, 2, 1),
                (true, [1, _]) => product!(self, 2, 1, 2),
                (true, _) => product!(self, 2, 2, 2),
            }
        }
    }
}
