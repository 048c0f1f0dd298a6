//! The keys and values of many sequences in pages: pools, sequences, shared prefixes, export.
//!
//! | file | contents |
//! |---|---|
//! | `pool.rs` | [`KvPool`]: the memory, its layers, and the steps of batches |
//! | `spec.rs` | [`PoolSpec`], [`CacheLayer`], [`StepSize`]: what a pool and a step are made for |
//! | `growth.rs` | the pages that a step takes and gives back |
//! | `step_words.rs` | what a step uploads: positions, sequences, lengths, page tables |
//! | `layout.rs` | layer groups: how memory is divided into their pages, and which pages a sequence of some length holds |
//! | `pages.rs` | which pages are free, and how often each is held |
//! | `sequence.rs` | [`Sequence`]: the pages of one conversation; fork and truncation |
//! | `prefix.rs` | [`PrefixCache`]: pages found by their tokens; eviction; the tier in host memory |
//! | `export.rs` | a sequence as bytes, and back |

mod export;
mod growth;
mod layout;
mod pages;
mod pool;
mod prefix;
mod sequence;
mod spec;
mod step_words;
#[cfg(all(test, target_os = "linux"))]
mod tests;

pub use pool::{KvPool, PoolUsage};
pub use prefix::PrefixCache;
pub use sequence::Sequence;
pub use spec::{CacheLayer, PoolSpec, StepSize};
