//! Counts responses by status.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

/// Number of responses by status.
#[derive(Default)]
pub(crate) struct Statuses(Mutex<BTreeMap<u16, u64>>);

impl Statuses {
    pub fn add(&self, status: u16) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(status).or_default() += 1;
    }

    pub fn counts(&self) -> BTreeMap<u16, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
