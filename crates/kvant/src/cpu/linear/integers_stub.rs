//! Replaces `integers` on processors other than x86-64, where [`select`](super::route::select) never returns its
//! kernels.

#[derive(Clone, Copy)]
pub struct IntegerLayout;

impl IntegerLayout {
    pub fn new(_: usize, _: usize, _: usize, _: i16) -> IntegerLayout {
        IntegerLayout
    }

    pub fn inputs(&self) -> usize {
        0
    }

    pub fn groups(&self) -> usize {
        0
    }
}

const WHY: &str = "no activations are prepared as integers";

pub mod block_codes {
    use super::{
        super::{block::WeightPrefetch, blocks::BlockMatrix},
        WHY,
        byte_products::RowCodes,
    };

    #[derive(Clone, Copy)]
    pub struct BlockCodes<const PACKING: usize>;

    impl<const PACKING: usize> BlockCodes<PACKING> {
        pub fn new(_: &BlockMatrix, _: *const u8, _: usize, _: WeightPrefetch) -> Self {
            unreachable!("{WHY}")
        }
    }

    impl<const PACKING: usize> RowCodes for BlockCodes<PACKING> {}
}

pub mod byte_products {
    use super::{
        super::block::{RowFactors, WeightPrefetch},
        IntegerLayout, WHY,
    };

    pub trait RowCodes: Copy {}

    #[derive(Clone, Copy)]
    #[allow(dead_code, reason = "nothing reads it here")]
    pub struct PackedCodes<const BITS: usize> {
        pub codes: *const u8,
        pub apart: usize,
        pub prefetch: WeightPrefetch,
    }

    impl<const BITS: usize> RowCodes for PackedCodes<BITS> {}

    pub fn stride(_: IntegerLayout) -> usize {
        unreachable!("{WHY}")
    }

    pub unsafe fn prepare(_: IntegerLayout, _: &[f32], _: &mut [f32]) -> bool {
        unreachable!("{WHY}")
    }

    pub unsafe fn dots<C: RowCodes, const R: usize, const T: usize>(
        _: IntegerLayout,
        _: C,
        _: &RowFactors,
        _: [*const f32; T],
    ) -> [[f32; T]; R] {
        unreachable!("{WHY}")
    }
}

pub mod panel_codes {
    use super::{WHY, panel_products};
    use crate::cpu::simd::Simd;

    pub unsafe fn unpack<S: Simd, const PER_WORD: usize>(
        _: panel_products::PanelLayout,
        _: usize,
        _: [*const u8; panel_products::OUTPUTS],
        _: &mut [f32],
    ) {
        unreachable!("{WHY}")
    }
}

pub mod panel_products {
    use super::{IntegerLayout, WHY};
    use crate::cpu::simd::Simd;

    pub const OUTPUTS: usize = 1;
    pub const ROWS: usize = 1;
    pub const WORDS: usize = 2;
    pub const BYTES: usize = 4;

    #[derive(Clone, Copy)]
    pub struct PanelLayout {
        pub rows: IntegerLayout,
        pub per_word: usize,
    }

    impl PanelLayout {
        pub fn words(&self) -> usize {
            unreachable!("{WHY}")
        }

        pub fn stride(&self) -> usize {
            unreachable!("{WHY}")
        }

        pub fn panel(&self) -> usize {
            unreachable!("{WHY}")
        }
    }

    pub unsafe fn prepare<S: Simd, const PER_WORD: usize>(_: PanelLayout, _: &[f32], _: &mut [f32]) -> bool {
        unreachable!("{WHY}")
    }

    #[allow(dead_code, reason = "nothing reads it here")]
    pub struct PanelOutputs<const R: usize> {
        pub rows: [*mut f32; R],
        pub outputs: usize,
        pub alpha: f32,
    }

    pub unsafe fn products<S: Simd, const PER_WORD: usize, const R: usize>(
        _: PanelLayout,
        _: &[f32],
        _: [*const f32; R],
        _: &PanelOutputs<R>,
    ) {
        unreachable!("{WHY}")
    }
}
