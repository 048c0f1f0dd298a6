//! What the scheduler knows of pages.

/// The storage of keys and values, as the scheduler sees it. [`PoolStorage`](super::PoolStorage) implements it over a
/// [`kvant::KvPool`]; simulations count pages instead.
///
/// Dropping a sequence gives its pages back.
pub trait Storage {
    /// The pages of one request.
    type Sequence;
    /// What a forward pass needs to know of a batch.
    type Step;

    /// An empty sequence.
    fn empty(&mut self) -> Self::Sequence;

    /// The longest kept prefix of `tokens` among requests of a salt; possibly empty.
    ///
    /// # Errors
    /// A failure that ends the engine.
    fn find(&mut self, salt: &[u8], tokens: &[u32]) -> Result<Self::Sequence, StorageError>;

    /// Keeps the tokens of a sequence for [`Storage::find`]; positions before `done` were kept before.
    ///
    /// # Errors
    /// A failure that ends the engine.
    fn keep(&mut self, salt: &[u8], sequence: &Self::Sequence, tokens: &[u32], done: usize)
    -> Result<(), StorageError>;

    /// Appends tokens to all sequences of a batch, or to none.
    ///
    /// # Errors
    /// `OutOfPages`; a failure that ends the engine.
    fn append(&mut self, batch: &mut [(&mut Self::Sequence, usize)]) -> Result<Self::Step, StorageError>;

    /// Removes the last tokens, which the latest step has appended.
    ///
    /// # Errors
    /// A failure that ends the engine.
    fn truncate(&mut self, sequence: &mut Self::Sequence, len: usize) -> Result<(), StorageError>;

    /// The number of tokens of a sequence.
    fn len(&self, sequence: &Self::Sequence) -> usize;

    /// The most memory that a sequence of so many tokens takes, in the unit of [`Storage::capacity`].
    fn need(&self, len: usize) -> usize;

    /// The part of it that a sequence which was found with so many tokens shares with others, as long as it grows.
    fn spared(&self, found: usize) -> usize;

    /// All memory.
    fn capacity(&self) -> usize;

    /// Positions of a page.
    fn page_tokens(&self) -> usize;
}

/// An error of a [`Storage`].
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// There are too few pages, also without those that only the prefix cache holds.
    #[error("too few pages")]
    OutOfPages,
    /// The pool has failed.
    #[error(transparent)]
    Failed(#[from] kvant::Error),
}
