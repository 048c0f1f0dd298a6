//! Random numbers, ids, and the time.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A random number, for seeds and ids.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Creates the id of an answer: a prefix and 96 random bits.
pub(crate) fn random_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:08x}", random(), random() as u32)
}

/// The current time in seconds since 1970.
pub(crate) fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
