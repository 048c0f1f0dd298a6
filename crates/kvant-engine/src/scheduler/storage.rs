//! The scheduler's interface to pages.

/// A storage of keys and values. [`PoolStorage`](super::PoolStorage) implements it with a [`kvant::KvPool`];
/// simulations count pages instead.
///
/// Dropping a sequence releases its pages.
pub trait Storage {
    /// The pages of one request.
    type Sequence;
    /// The data that a forward pass needs about a batch.
    type Step;

    /// An empty sequence.
    fn empty(&mut self) -> Self::Sequence;

    /// Returns the longest kept prefix of `tokens` among requests of a salt; possibly empty.
    ///
    /// # Errors
    /// A failure, which ends the engine.
    fn find(&mut self, salt: &[u8], tokens: &[u32]) -> Result<Self::Sequence, StorageError>;

    /// Prepares [`Storage::find`], which then need not wait for files. Returns the number of pages that came to the
    /// device, and whether others are still being read. By default there are no files.
    ///
    /// # Errors
    /// A failure, which ends the engine.
    fn prefetch(&mut self, salt: &[u8], tokens: &[u32]) -> Result<(usize, bool), StorageError> {
        let _ = (salt, tokens);
        Ok((0, false))
    }

    /// The positions where steps that compute `tokens` should end, in increasing order, without the end of `tokens`. A
    /// sequence with recurrent states can be continued only where a step has ended. None by default.
    fn stops(&mut self, salt: &[u8], tokens: &[u32]) -> Vec<usize> {
        let _ = (salt, tokens);
        Vec::new()
    }

    /// Keeps the tokens of a sequence for [`Storage::find`]. Positions before `done` are already kept.
    ///
    /// # Errors
    /// A failure, which ends the engine.
    fn keep(&mut self, salt: &[u8], sequence: &Self::Sequence, tokens: &[u32], done: usize)
    -> Result<(), StorageError>;

    /// Appends tokens to all sequences of a batch, or to none.
    ///
    /// # Errors
    /// `OutOfPages`, or a failure, which ends the engine.
    fn append(&mut self, batch: &mut [(&mut Self::Sequence, usize)]) -> Result<Self::Step, StorageError>;

    /// Maximum drafts of a sequence in a step.
    fn max_drafts(&self) -> usize {
        usize::MAX
    }

    /// Prepares a sequence for a step whose last `drafts` tokens may be [removed](Storage::truncate).
    fn hold(&mut self, sequence: &mut Self::Sequence, drafts: usize) {
        let _ = (sequence, drafts);
    }

    /// Removes drafts, the last tokens of the latest step.
    ///
    /// # Errors
    /// A failure, which ends the engine.
    fn truncate(&mut self, sequence: &mut Self::Sequence, len: usize) -> Result<(), StorageError>;

    /// The number of tokens of a sequence.
    fn len(&self, sequence: &Self::Sequence) -> usize;

    /// Maximum memory of a sequence of `len` tokens, in the unit of [`Storage::capacity`].
    fn need(&self, len: usize) -> usize;

    /// The part of a sequence's memory that is shared if `found` of its tokens were found in the cache. It stays shared
    /// while the sequence grows.
    fn spared(&self, found: usize) -> usize;

    /// The total memory.
    fn capacity(&self) -> usize;

    /// Positions per page.
    fn page_tokens(&self) -> usize;
}

/// An error of a [`Storage`].
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// There are too few pages, even if the prefix cache is emptied.
    #[error("too few pages")]
    OutOfPages,
    /// The pool has failed.
    #[error(transparent)]
    Failed(#[from] kvant::Error),
}
