//! Compiled kernels on disk: the second start of a program compiles nothing.
//!
//! A file holds the whole key with the code, so that another source, compiler, driver or device never matches. A kernel
//! is compiled again if its file does not match or is damaged. Failing to write a file is not an error. The folder
//! belongs to the user.

use std::{
    fs,
    path::{Path, PathBuf},
};

const MAGIC: &[u8; 16] = b"kvant cubin, v1\n";

/// A folder of compiled kernels.
pub(super) struct KernelCache {
    folder: Option<PathBuf>,
}

impl KernelCache {
    /// The user's folder: `$XDG_CACHE_HOME/kvant/cuda`, `~/.cache/kvant/cuda`, or on Windows
    /// `%LOCALAPPDATA%\kvant\cuda`.
    pub(super) fn of_user() -> KernelCache {
        let var = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let base = if cfg!(windows) {
            var("LOCALAPPDATA")
        } else {
            var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")))
        };
        KernelCache { folder: base.filter(|base| base.is_absolute()).map(|base| base.join("kvant").join("cuda")) }
    }

    #[cfg(test)]
    fn at(folder: &Path) -> KernelCache {
        KernelCache { folder: Some(folder.to_path_buf()) }
    }

    /// The code stored under this exact key.
    pub(super) fn get(&self, key: &str) -> Option<Vec<u8>> {
        let file = fs::read(self.folder.as_ref()?.join(name_of(key))).ok()?;
        let rest = file.strip_prefix(MAGIC)?;
        let (key_bytes, rest) = take_counted(rest)?;
        let (code, rest) = take_counted(rest)?;
        let sound = key_bytes == key.as_bytes() && rest == hash(code).to_le_bytes() && !code.is_empty();
        sound.then(|| code.to_vec())
    }

    /// Stores code, if the folder can be written.
    pub(super) fn put(&self, key: &str, code: &[u8]) {
        let Some(folder) = &self.folder else { return };
        if let Err(error) = write(folder, key, code) {
            tracing::debug!(folder = %folder.display(), %error, "a compiled kernel is not stored");
        }
    }
}

fn write(folder: &Path, key: &str, code: &[u8]) -> std::io::Result<()> {
    let mut options = fs::DirBuilder::new();
    options.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut options, 0o700);
    options.create(folder)?;
    let mut file = MAGIC.to_vec();
    for part in [key.as_bytes(), code] {
        file.extend((part.len() as u64).to_le_bytes());
        file.extend(part);
    }
    file.extend(hash(code).to_le_bytes());
    // A reader sees a whole file or none. Writers of one key write equal bytes.
    let path = folder.join(name_of(key));
    let temporary = path.with_extension(format!("{}-{:?}", std::process::id(), std::thread::current().id()));
    // A full disk leaves half a file.
    let written = fs::write(&temporary, file).and_then(|()| fs::rename(&temporary, path));
    written.inspect_err(|_| drop(fs::remove_file(&temporary)))
}

/// Splits off a length of eight bytes, then that number of bytes.
fn take_counted(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<8>()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)
}

fn name_of(key: &str) -> String {
    format!("{:016x}.cubin", hash(key.as_bytes()))
}

/// FNV-1a, 64 bits. It detects damage and names files; keys are compared in full.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_only_what_was_stored_whole() {
        let folder = std::env::temp_dir().join(format!("kvant-cubin-test-{}", std::process::id()));
        let cache = KernelCache::at(&folder);
        assert!(cache.get("a key").is_none());
        cache.put("a key", b"the code");
        assert_eq!(cache.get("a key").unwrap(), b"the code");
        assert!(cache.get("another").is_none());
        let path = folder.join(name_of("a key"));
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            fs::write(&path, &damaged).unwrap();
            assert!(cache.get("a key").is_none(), "byte {at}");
            fs::write(&path, &whole[..at]).unwrap();
            assert!(cache.get("a key").is_none(), "cut at {at}");
        }
        // A file of another key under this name, as after a collision.
        cache.put("another", b"other code");
        fs::rename(folder.join(name_of("another")), &path).unwrap();
        assert!(cache.get("a key").is_none());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn an_impossible_folder_is_not_an_error() {
        let cache = KernelCache::at(Path::new("/dev/null/kvant"));
        cache.put("a key", b"the code");
        assert!(cache.get("a key").is_none());
    }
}
