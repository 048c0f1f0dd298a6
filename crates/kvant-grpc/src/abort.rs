//! Running requests by the ids that their clients chose.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::watch;

/// All running requests that have an id. Several can have the same one.
#[derive(Debug, Default)]
pub(crate) struct Running(Mutex<HashMap<String, Vec<watch::Sender<bool>>>>);

/// The entry of a request, until it is dropped.
#[derive(Debug)]
pub(crate) struct Entry {
    running: Arc<Running>,
    id: String,
    aborted: watch::Receiver<bool>,
}

impl Running {
    pub fn add(self: &Arc<Self>, id: &str) -> Entry {
        let (abort, aborted) = watch::channel(false);
        if !id.is_empty() {
            self.lock().entry(id.to_string()).or_default().push(abort);
        }
        Entry { running: Arc::clone(self), id: id.to_string(), aborted }
    }

    /// Ends the requests of an id.
    pub fn abort(&self, id: &str) {
        let found = self.lock().remove(id).unwrap_or_default();
        found.into_iter().for_each(|abort| {
            let _ = abort.send(true);
        });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Vec<watch::Sender<bool>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// Waits until the request is aborted.
    pub async fn aborted(&mut self) {
        if self.aborted.wait_for(|aborted| *aborted).await.is_err() {
            // Without an id it cannot be aborted.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut running = self.running.lock();
        if let Some(senders) = running.get_mut(&self.id) {
            senders.retain(|abort| !abort.subscribe().same_channel(&self.aborted));
            if senders.is_empty() {
                running.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_end_with_their_requests() {
        let running = Arc::new(Running::default());
        let (first, second, other) = (running.add("a"), running.add("a"), running.add(""));
        drop(first);
        assert_eq!(running.lock()["a"].len(), 1);
        running.abort("b");
        running.abort("");
        assert!(!*second.aborted.borrow() && !*other.aborted.borrow());
        running.abort("a");
        assert!(*second.aborted.borrow());
        drop((second, other));
        assert!(running.lock().is_empty());
    }
}
