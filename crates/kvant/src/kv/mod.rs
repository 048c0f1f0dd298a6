//! The keys and values of many sequences in pages: pools, sequences, shared prefixes, export.
//!
//! | file | contents |
//! |---|---|
//! | `pool.rs` | [`KvPool`]: the memory, its layers, and the steps of batches |
//! | `spec.rs` | [`PoolSpec`], [`CacheLayer`], [`StateLayer`], [`StepSize`]: the specifications of pools and steps |
//! | `growth.rs` | the pages that a step takes and releases |
//! | `step_rows.rs` | the rows of a sequence in a step: new tokens, or positions |
//! | `step_words.rs` | the upload of a step: positions, sequences, lengths, page tables |
//! | `layout.rs` | layer groups: the division of memory into their pages, and the pages that a sequence of a given length holds |
//! | `pages.rs` | free pages, and the hold count of each page |
//! | `sequence.rs` | [`Sequence`]: the pages of one conversation; fork and truncation |
//! | `prefix.rs` | [`PrefixCache`]: pages found by their tokens; eviction; the tier in host memory |
//! | `store.rs` | [`PageStore`]: the tier outside of memory |
//! | `transfer.rs` | [`PrefixPage`]: pages of prefixes that move between pools |
//! | `prefix_watch.rs` | [`PrefixChange`]: reports of the pages that kept prefixes gain and lose |
//! | `export.rs` | a sequence as bytes, and back |

mod export;
mod growth;
mod layout;
mod pages;
mod pool;
mod prefix;
mod prefix_watch;
mod sequence;
mod spec;
mod step_rows;
mod step_words;
mod store;
#[cfg(all(test, target_os = "linux"))]
mod tests;
mod transfer;

pub use pool::{KvPool, PoolUsage};
pub use prefix::PrefixCache;
pub use prefix_watch::{PrefixChange, PrefixPlace};
pub use sequence::Sequence;
pub use spec::{CacheLayer, PoolSpec, StateLayer, StepSize};
pub use store::{Fetched, PageKey, PageStore, Prefetched};
pub use transfer::PrefixPage;
