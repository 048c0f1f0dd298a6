//! The keys and values of many sequences in pages: pools, sequences, shared prefixes, export.
//!
//! | file | contents |
//! |---|---|
//! | `pool.rs` | [`KvPool`]: the memory, its layers, and the steps of batches |
//! | `layout.rs` | layer groups: how memory is divided into their pages, and which pages a sequence of some length holds |
//! | `pages.rs` | which pages are free, and how often each is held |
//! | `sequence.rs` | [`Sequence`]: the pages of one conversation; fork and truncation |
//! | `prefix.rs` | [`PrefixCache`]: pages found by their tokens; eviction; the tier in host memory |
//! | `export.rs` | a sequence as bytes, and back |

mod export;
mod layout;
mod pages;
mod pool;
mod prefix;
mod sequence;
#[cfg(all(test, target_os = "linux"))]
mod tests;

pub use pool::{CacheLayer, KvPool, PoolSpec, PoolUsage, StepSize};
pub use prefix::PrefixCache;
pub use sequence::Sequence;
