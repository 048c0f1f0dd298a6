//! Options of transfers.

use std::time::Duration;

/// Options of [`Transfers::start`](crate::Transfers::start).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TransferOptions {
    /// The name or address under which other workers reach the listener.
    pub host: String,
    /// The names and addresses from which pages are fetched, as `remote_host` has them; `*` for any. Requests name a
    /// host and a port to connect to: allow only workers. The pages of a host are trusted. Default: none.
    pub peers: Vec<String>,
    /// Maximum time between the end of a prompt and the fetch of its pages. Default: 60 s.
    pub offer_time: Duration,
    /// Maximum time of a transfer, without the time in which the prompt is computed. Default: 60 s.
    pub transfer_time: Duration,
}

impl TransferOptions {
    /// Options of a worker that others reach under this name or address.
    pub fn new(host: impl Into<String>) -> TransferOptions {
        let (offer_time, transfer_time) = (Duration::from_secs(60), Duration::from_secs(60));
        TransferOptions { host: host.into(), peers: Vec::new(), offer_time, transfer_time }
    }

    /// Adds a host to [`TransferOptions::peers`].
    #[must_use]
    pub fn peer(mut self, host: impl Into<String>) -> Self {
        self.peers.push(host.into());
        self
    }

    /// Sets [`TransferOptions::offer_time`].
    #[must_use]
    pub fn offer_time(self, offer_time: Duration) -> Self {
        TransferOptions { offer_time, ..self }
    }

    /// Sets [`TransferOptions::transfer_time`].
    #[must_use]
    pub fn transfer_time(self, transfer_time: Duration) -> Self {
        TransferOptions { transfer_time, ..self }
    }
}
