//! The parameters of `copy`.

use super::params;

params! {
    pub(crate) struct CopyParams {
        pub bytes: u64,
    }
}
