//! The parameters of `linear`.

use super::params;

params! {
    pub(crate) struct LinearParams {
        pub rows: u32,
        pub outputs: u32,
        pub inputs: u32,
        pub experts: u32,
        pub rows_per_input: u32,
        pub alpha: f32,
    }
}
