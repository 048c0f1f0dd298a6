//! Open files, and embedded bytes that replace files.

use std::{
    fmt,
    fs::File,
    io::{self, Read, Seek},
    path::Path,
};

use crate::{Error, Result};

/// An open file.
pub(crate) enum OpenFile {
    Disk(File),
    Memory(&'static [u8]),
}

impl OpenFile {
    pub(crate) fn len(&self) -> io::Result<u64> {
        match self {
            OpenFile::Disk(file) => Ok(file.metadata()?.len()),
            OpenFile::Memory(contents) => Ok(contents.len() as u64),
        }
    }

    /// Fills `bytes` from offset `start`. Several threads may read at the same time.
    pub(crate) fn read_at(&self, start: u64, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            #[cfg(unix)]
            OpenFile::Disk(file) => std::os::unix::fs::FileExt::read_exact_at(file, bytes, start),
            #[cfg(windows)]
            OpenFile::Disk(file) => {
                let (mut at, mut rest) = (start, bytes);
                while !rest.is_empty() {
                    match std::os::windows::fs::FileExt::seek_read(file, rest, at)? {
                        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                        count => {
                            at += count as u64;
                            rest = &mut rest[count..];
                        }
                    }
                }
                Ok(())
            }
            OpenFile::Memory(contents) => {
                let rest = usize::try_from(start).ok().and_then(|start| contents.get(start..));
                rest.unwrap_or_default().read_exact(bytes)
            }
        }
    }
}

impl fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenFile::Disk(file) => file.fmt(f),
            OpenFile::Memory(contents) => write!(f, "{} bytes", contents.len()),
        }
    }
}

/// The start of a Git LFS pointer file.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
/// Maximum bytes of a pointer file, according to Git LFS.
const LFS_LIMIT: u64 = 1024;

/// Opens a regular file. Opening a pipe would block until a writer appears.
///
/// # Errors
/// `File`, also for a Git LFS pointer.
pub(crate) fn open(path: &Path) -> Result<File> {
    let failed = |e| Error::file(path, e);
    let found = std::fs::metadata(path).map_err(failed)?;
    if !found.is_file() {
        return Err(Error::file(path, "not a regular file"));
    }
    let mut file = File::open(path).map_err(failed)?;
    if (LFS_POINTER.len() as u64..LFS_LIMIT).contains(&found.len()) {
        let mut start = [0; LFS_POINTER.len()];
        file.read_exact(&mut start).and_then(|()| file.rewind()).map_err(failed)?;
        if start == LFS_POINTER {
            let reason = "a pointer of Git LFS, not the file itself: `git lfs pull` in its repository fetches the file";
            return Err(Error::file(path, reason));
        }
    }
    Ok(file)
}
