//! A case of an operation, and its result.

use kvant::DType;
use kvant_models::KvCodec;

use super::timing::Timing;
use crate::args::Heads;

/// One case.
pub struct Case {
    pub shape: Heads,
    /// Tokens, with a meaning that depends on the operation.
    pub context: u32,
    /// Unused by operations without a cache.
    pub kv: KvCodec,
    /// The dtype of queries, new keys and values, and outputs.
    pub activations: DType,
    pub page_tokens: Option<usize>,
}

impl Case {
    /// Whether the cache is in pages.
    pub fn is_paged(&self) -> bool {
        self.page_tokens.is_some() || self.kv.k.is_centred() || self.kv.v.is_centred()
    }

    pub fn page_tokens(&self) -> usize {
        self.page_tokens.unwrap_or(64)
    }
}

/// The result of a case.
pub struct Measured {
    pub timing: Timing,
    /// The bytes that one call must move.
    pub bytes: usize,
}
