//! Pages of prefixes in files, which outlive the process.
//!
//! A directory has one file per page. Its files can belong to several models, cache types and devices: the name of a
//! file, and its contents, start with a hash of all of these. Nothing in the directory is trusted: a file is used only
//! if its bytes are exactly those of the page with its name. Other files are left alone.
//!
//! A thread writes, removes and touches files. A page is written to a temporary file, which is then renamed. Until
//! then, the page is read from memory. Another thread reads pages (`reads.rs`), so that the engine need not wait.

mod format;
mod index;
mod reads;

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

use flume::{Receiver, Sender};
use kvant::{Fetched, PageKey, PageStore};

use crate::lock::lock;
use format::PageName;
pub(crate) use format::hash;
use index::Index;
use reads::{ReadWork, Reads, Taken};

/// Maximum bytes of pages that wait to be written.
const MAX_UNWRITTEN: usize = 64 << 20;
/// The file that the process locks.
const LOCK: &str = "kvant.lock";
/// The extension of files that are being written.
const TEMPORARY: &str = "page.tmp";

/// A directory of pages, for the engines of one process. Clones are handles of one directory. When the last one is
/// dropped, all pages are written, and another process can open the directory.
///
/// ```
/// use kvant_engine::PageFiles;
/// let directory = std::env::temp_dir().join(format!("kvant-pages-{}", std::process::id()));
/// let files = PageFiles::open(&directory, 1 << 30)?;
/// assert_eq!(files.bytes(), 0);
/// assert!(PageFiles::open(&directory, 1 << 30).is_err(), "the directory is in use");
/// # drop(files);
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), kvant_engine::PageFilesError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PageFiles(Arc<OpenDirectory>);

/// The directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageFilesError {
    /// Another process, or this one, has the directory open.
    #[error("{path}: another process stores prefixes there")]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// A file operation failed.
    #[error("{path}: {source}")]
    Io {
        /// The directory or the file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

#[derive(Debug)]
struct OpenDirectory {
    shared: Arc<PageDirectory>,
    /// `None` once the handle is dropped.
    work: Option<Sender<FileWork>>,
    reads: Option<Sender<ReadWork>>,
    threads: Vec<JoinHandle<()>>,
    /// Number of stores so far.
    stores: AtomicU64,
    /// Locked until it is closed.
    _lock: File,
}

#[derive(Debug)]
struct PageDirectory {
    directory: PathBuf,
    limit: u64,
    index: Mutex<Index>,
    /// Signals that a page was written.
    written: Condvar,
    reads: Mutex<Reads>,
    /// A delay of each read, for tests.
    #[cfg(any(test, feature = "internals"))]
    delay: Mutex<Duration>,
}

/// The work of the thread, in order.
#[derive(Debug)]
enum FileWork {
    Write(PageName),
    Remove(PageName),
    /// Sets the time of the latest use.
    Touch(PageName),
    #[cfg(test)]
    Signal(Sender<()>),
}

impl PageFiles {
    /// Opens a directory, and creates it if it does not exist. Removes the least recently used pages until the others
    /// have at most `max_bytes` bytes.
    ///
    /// # Errors
    /// `InUse` if another process has opened it; `Io`.
    pub fn open(directory: &Path, max_bytes: u64) -> Result<PageFiles, PageFilesError> {
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |source| PageFilesError::Io { path, source }
        };
        create(directory).map_err(failed(directory))?;
        let path = directory.join(LOCK);
        let file = private().write(true).create(true).truncate(false).open(&path).map_err(failed(&path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(PageFilesError::InUse { path: directory.to_path_buf() }),
            Err(fs::TryLockError::Error(error)) => return Err(failed(&path)(error)),
        }
        let mut index = find_pages(directory).map_err(failed(directory))?;
        let removed = index.shrink(max_bytes);
        let index = Mutex::new(index);
        let shared = Arc::new(PageDirectory {
            directory: directory.to_path_buf(),
            limit: max_bytes,
            index,
            written: Condvar::new(),
            reads: Mutex::default(),
            #[cfg(any(test, feature = "internals"))]
            delay: Mutex::default(),
        });
        let ((work, received), (reads, requested)) = (flume::unbounded(), flume::unbounded());
        let start = |name: &str, run: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name.to_string()).spawn(run).map_err(failed(directory))
        };
        let (writer, reader) = (Arc::clone(&shared), Arc::clone(&shared));
        let threads = vec![
            start("kvant-pages", Box::new(move || writer.run(&received)))?,
            start("kvant-page-reads", Box::new(move || reader.read_requested(&requested)))?,
        ];
        let open = OpenDirectory {
            shared,
            work: Some(work),
            reads: Some(reads),
            threads,
            stores: AtomicU64::new(0),
            _lock: file,
        };
        let files = PageFiles(Arc::new(open));
        removed.into_iter().for_each(|name| files.0.send(FileWork::Remove(name)));
        Ok(files)
    }

    /// Bytes of all files of pages, including pages that are not written yet.
    pub fn bytes(&self) -> u64 {
        lock(&self.0.shared.index).bytes()
    }

    /// Waits until the engines have dropped their handles and all pages are written, for at most `limit`. Returns
    /// whether this was the case.
    pub fn close(self, limit: Duration) -> bool {
        let (mut files, started) = (self.0, Instant::now());
        loop {
            files = match Arc::try_unwrap(files) {
                // Dropping the handle joins its thread.
                Ok(_) => return true,
                Err(files) => files,
            };
            if started.elapsed() >= limit {
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The store of the pages with an identity, which has several parts: everything that keys and values depend on. An
    /// engine with [`EngineOptions::page_files`](crate::EngineOptions::page_files) makes it.
    pub fn store(&self, identity: &[&[u8]]) -> PageFileStore {
        let number = self.0.stores.fetch_add(1, Ordering::Relaxed);
        PageFileStore { files: self.clone(), number, identity: format::hash(identity), wake: Arc::new(|| {}) }
    }

    /// Delays each read by the reading thread.
    #[cfg(any(test, feature = "internals"))]
    pub(crate) fn delay_reads(&self, delay: Duration) {
        *lock(&self.0.shared.delay) = delay;
    }

    /// Waits until the thread has done all work.
    #[cfg(test)]
    fn wait(&self) {
        let (signal, done) = flume::bounded(1);
        self.0.send(FileWork::Signal(signal));
        done.recv().unwrap();
    }
}

impl OpenDirectory {
    fn send(&self, work: FileWork) {
        if let Some(sender) = &self.work {
            // The thread ends only after the sender.
            let _ = sender.send(work);
        }
    }
}

impl Drop for OpenDirectory {
    fn drop(&mut self) {
        (self.work, self.reads) = (None, None);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Creates a directory that only its owner can read.
fn create(directory: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(directory)
}

/// Options of files that only their owner can read.
fn private() -> OpenOptions {
    #[cfg_attr(not(unix), expect(unused_mut, reason = "only Unix has modes"))]
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// The pages in a directory, in the order of their use. Removes files that a process was writing when it ended.
fn find_pages(directory: &Path) -> io::Result<Index> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let file_name = entry.file_name();
        let Some(file_name) = file_name.to_str() else { continue };
        // Does not follow links.
        let Some(metadata) = entry.metadata().ok().filter(fs::Metadata::is_file) else { continue };
        let temporary = file_name.strip_suffix(".tmp").and_then(PageName::parse);
        if temporary.is_some() {
            let _ = fs::remove_file(entry.path());
        } else if let Some(name) = PageName::parse(file_name) {
            found.push((metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), name, metadata.len()));
        }
    }
    found.sort_unstable();
    let mut index = Index::default();
    found.into_iter().for_each(|(_, name, bytes)| index.add_file(name, bytes));
    Ok(index)
}

impl PageDirectory {
    /// Does the work of the thread until all senders are dropped.
    fn run(&self, work: &Receiver<FileWork>) {
        for work in work {
            match work {
                FileWork::Write(name) => self.write(&name),
                FileWork::Remove(name) => {
                    // A page that was stored again is in use.
                    let index = lock(&self.index);
                    if !index.has(&name) {
                        let _ = fs::remove_file(self.path(&name));
                    }
                }
                FileWork::Touch(name) => {
                    let file = OpenOptions::new().write(true).open(self.path(&name));
                    // The times only order evictions after a restart.
                    let _ = file.and_then(|file| file.set_modified(SystemTime::now()));
                }
                #[cfg(test)]
                FileWork::Signal(signal) => {
                    let _ = signal.send(());
                }
            }
        }
    }

    /// Reads requested pages until all senders are dropped.
    fn read_requested(&self, requested: &Receiver<ReadWork>) {
        for ReadWork { key, bytes, wake } in requested {
            #[cfg(any(test, feature = "internals"))]
            thread::sleep(*lock(&self.delay));
            let page = self.read_file(&key.1, bytes);
            lock(&self.reads).end(&key, page);
            wake();
        }
    }

    fn path(&self, name: &PageName) -> PathBuf {
        self.directory.join(name.file_name())
    }

    /// Writes a page that is in memory.
    fn write(&self, name: &PageName) {
        let Some(page) = lock(&self.index).unwritten_page(name) else { return };
        let result = self.write_file(name, &page);
        let mut index = lock(&self.index);
        match result {
            Ok(()) => {
                if !index.set_written(name) {
                    let _ = fs::remove_file(self.path(name));
                }
            }
            Err(error) => {
                index.remove(name);
                tracing::warn!(%error, directory = %self.directory.display(), "a page of a prefix cannot be stored");
            }
        }
        drop(index);
        self.written.notify_all();
    }

    fn write_file(&self, name: &PageName, page: &[u8]) -> io::Result<()> {
        let path = self.path(name);
        let temporary = path.with_extension(TEMPORARY);
        let (header, checksum) = format::frame(name, page);
        // A link would be written through.
        let _ = fs::remove_file(&temporary);
        let written = private().write(true).create_new(true).open(&temporary).and_then(|mut file| {
            [&header[..], page, &checksum].into_iter().try_for_each(|bytes| file.write_all(bytes))
        });
        let renamed = written.and_then(|()| fs::rename(&temporary, &path));
        if renamed.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        renamed
    }

    /// Reads the page of a file, if it is intact.
    fn read_file(&self, name: &PageName, bytes: usize) -> Option<Vec<u8>> {
        let path = self.path(name);
        // Neither follows links, nor waits for a pipe.
        let metadata = fs::symlink_metadata(&path).ok()?;
        let len = format::file_len(bytes);
        if !metadata.is_file() || metadata.len() != len {
            return None;
        }
        let mut file = Vec::new();
        file.try_reserve_exact(usize::try_from(len).ok()?).ok()?;
        File::open(&path).and_then(|opened| opened.take(len).read_to_end(&mut file)).ok()?;
        format::read(name, bytes, file)
    }
}

/// The pages of one identity in a directory of [`PageFiles`].
pub struct PageFileStore {
    files: PageFiles,
    /// Differs between the stores of a directory.
    number: u64,
    identity: [u8; 32],
    /// Called when a page was read in the background.
    wake: Arc<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for PageFileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PageFileStore").field(&self.files).finish()
    }
}

impl PageFileStore {
    /// Sets a function that is called when [`PageStore::fetch`] can return a further page.
    #[must_use]
    pub fn on_read(self, wake: impl Fn() + Send + Sync + 'static) -> Self {
        PageFileStore { wake: Arc::new(wake), ..self }
    }

    /// Forgets a page that cannot be read.
    fn forget_damaged(&self, name: PageName) {
        // A page may have been removed while it was read.
        if self.index().remove(&name) {
            let directory = &self.files.0.shared.directory;
            tracing::warn!(directory = %directory.display(), "a stored page is damaged, and is computed again");
            self.files.0.send(FileWork::Remove(name));
        }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        lock(&self.files.0.shared.index)
    }

    /// The name of a page. Groups are few.
    fn name(&self, key: &PageKey, group: usize) -> PageName {
        PageName { identity: self.identity, key: *key, group: u32::try_from(group).unwrap_or(u32::MAX) }
    }
}

impl PageStore for PageFileStore {
    fn root(&self, salt: &[u8]) -> PageKey {
        format::hash(&[b"prefix", &self.identity, salt])
    }

    fn child(&self, parent: &PageKey, tokens: &[u32]) -> PageKey {
        let tokens: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        format::hash(&[b"page", parent, &tokens])
    }

    fn has(&self, key: &PageKey, group: usize) -> bool {
        self.index().has(&self.name(key, group))
    }

    fn read(&mut self, key: &PageKey, group: usize, bytes: usize) -> Option<Vec<u8>> {
        let name = self.name(key, group);
        let index = self.index();
        if let Some(page) = index.unwritten_page(&name) {
            return Some(page.to_vec()).filter(|page| page.len() == bytes);
        }
        if !index.has(&name) {
            return None;
        }
        drop(index);
        let page = self.files.0.shared.read_file(&name, bytes);
        if page.is_none() {
            self.forget_damaged(name);
        }
        page
    }

    fn fetch(&mut self, key: &PageKey, group: usize, bytes: usize) -> Fetched {
        let (name, directory) = (self.name(key, group), &self.files.0);
        let key = (self.number, name);
        let taken = lock(&directory.shared.reads).take(&key);
        match taken {
            Taken::Reading => return Fetched::Reading,
            Taken::Done(Some(page)) => return Fetched::Page(page),
            Taken::Done(None) => {
                self.forget_damaged(name);
                return Fetched::Missing;
            }
            Taken::Unknown => {}
        }
        let (unwritten, is_stored) = {
            let index = self.index();
            (index.unwritten_page(&name), index.has(&name))
        };
        match unwritten {
            Some(page) if page.len() == bytes => return Fetched::Page(page.to_vec()),
            None if is_stored => {}
            _ => return Fetched::Missing,
        }
        if lock(&directory.shared.reads).begin(key, bytes)
            && let Some(reads) = &directory.reads
        {
            // The thread ends only after the sender.
            let _ = reads.send(ReadWork { key, bytes, wake: Arc::clone(&self.wake) });
        }
        Fetched::Reading
    }

    fn has_room(&self) -> bool {
        self.index().unwritten < MAX_UNWRITTEN
    }

    fn write(&mut self, key: &PageKey, group: usize, page: Vec<u8>) {
        let (name, shared) = (self.name(key, group), &self.files.0.shared);
        if format::file_len(page.len()) > shared.limit {
            return;
        }
        let mut index = self.index();
        while index.unwritten >= MAX_UNWRITTEN {
            index = shared.written.wait(index).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        index.add_page(name, page);
        let removed = index.shrink(shared.limit);
        drop(index);
        removed.into_iter().for_each(|name| self.files.0.send(FileWork::Remove(name)));
        self.files.0.send(FileWork::Write(name));
    }

    fn touch(&mut self, pages: &[(PageKey, usize)]) {
        let mut index = self.index();
        let names = pages.iter().map(|(key, group)| self.name(key, *group));
        let touched: Vec<PageName> = names.filter(|name| index.touch(name)).collect();
        drop(index);
        touched.into_iter().for_each(|name| self.files.0.send(FileWork::Touch(name)));
    }

    fn clear(&mut self) {
        let removed = self.index().clear(&self.identity);
        removed.into_iter().for_each(|name| self.files.0.send(FileWork::Remove(name)));
    }
}

#[cfg(test)]
mod tests;
