//! Publishes the prefixes that a pool keeps, as vLLM publishes its KV events, for routers that send a request to the
//! holder of its prefix.
//!
//! | task | item |
//! |---|---|
//! | publish the changes of a pool | [`Publisher`] |
//! | decide which salts routers see | [`Salt`] |
//!
//! # Messages
//!
//! A message of the PUB socket has three frames: the topic; a sequence number, u64 in big-endian order, from 0; and a
//! batch in MessagePack, the list `[seconds since 1970, [event, …], data-parallel rank]`. An event is a map.
//!
//! | `type` | fields |
//! |---|---|
//! | `BlockStored` | `block_hashes`, `parent_block_hash`, `token_ids` of all blocks, `block_size`, `lora_id`, `medium`, `lora_name`, `extra_keys`, `cache_salt`, `group_idx`, `kv_cache_spec_kind` |
//! | `BlockRemoved` | `block_hashes`, `medium`, `group_idx` |
//! | `AllBlocksCleared` | |
//!
//! A block is a page of the layers without window, hence `kv_cache_spec_kind` is `full_attention`. `medium` is `GPU`
//! for pages in the pool, on a CPU too, and `CPU` for pages that were evicted to host memory. `extra_keys` and
//! `cache_salt` have the salt of the first block of a prefix, if it has one.
//!
//! The ROUTER socket answers a request with a sequence number by all later messages that it still has, each with an
//! empty frame, the topic, the number and the batch, and then by a message with the number −1, and an empty topic and
//! batch, as in vLLM 0.33.

#![forbid(unsafe_code)]

mod address;
mod events;
mod publisher;

pub use address::AddressError;
pub use events::Salt;
pub use publisher::{Publisher, Report};

/// The crate's README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
