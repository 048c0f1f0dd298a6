//! Prompts that one worker computes and another continues: the pages travel over TCP.
//!
//! | task | item |
//! |---|---|
//! | serve and fetch pages | [`Transfers`], [`TransferOptions`] |
//! | the field `kv_transfer_params` | [`TransferParams`], [`Offered::params`] |
//! | read the bytes of a transfer | [`PageReader`] |
//!
//! The worker that computes a prompt offers its pages under a one-time token. A request with this token makes another
//! worker fetch them into its prefix cache before it submits the request: full pages of layers without a window while
//! the prompt is computed, the others at its end. If this fails, the request is computed like any other: from the pages
//! that arrived, or from none.

#![forbid(unsafe_code)]

mod fetch;
mod offers;
mod options;
mod params;
mod send;
mod timed;
mod transfers;
mod wire;

pub use offers::Offered;
pub use options::TransferOptions;
pub use params::TransferParams;
pub use transfers::Transfers;
pub use wire::{PageReader, Received, Refusal, TransferError};

/// The crate's README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
