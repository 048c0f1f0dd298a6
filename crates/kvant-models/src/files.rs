//! Opens the files of a checkpoint. Small files are read completely, with a size limit.

use std::{
    borrow::Cow,
    fmt,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde_json::Value;

use crate::{
    Error, Result,
    gguf::Gguf,
    open_file::{OpenFile, open},
    untrusted::line,
};

/// Maximum bytes of a JSON file: larger than any model's config.json, and small enough to keep in memory.
const JSON_LIMIT: u64 = 16 << 20;

/// The files of a checkpoint: a directory, a GGUF file, or bytes that are part of the program.
///
/// ```no_run
/// use kvant::Device;
/// use kvant_models::{Files, LoadOptions, Model, Tokenizer};
/// static FILES: [(&str, &[u8]); 2] = [
///     ("config.json", b"..."), // include_bytes!("config.json")
///     ("model.safetensors", b"..."),
/// ];
/// let files = Files::embedded(&FILES);
/// let model = Model::load_files(&files, &Device::default(), &LoadOptions::default())?;
/// # Ok::<(), kvant_models::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Files(Location);

#[derive(Clone)]
enum Location {
    Directory(PathBuf),
    /// A GGUF file contains everything.
    Gguf(Arc<Gguf>),
    Embedded(&'static [(&'static str, &'static [u8])]),
}

impl Files {
    /// The files in a directory.
    pub fn directory(path: impl Into<PathBuf>) -> Files {
        Files(Location::Directory(path.into()))
    }

    /// A GGUF file. For a split model, any of its files.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn gguf(path: &Path) -> Result<Files> {
        Ok(Files(Location::Gguf(Arc::new(Gguf::open(path)?))))
    }

    /// The checkpoint at a path: a `.gguf` file, a directory with `config.json`, or a directory with one GGUF model,
    /// which may be split. Files whose names start with `mmproj` are image or audio encoders, not models.
    ///
    /// # Errors
    /// `File` for a directory that cannot be read or has several GGUF models; as [`Gguf::open`].
    pub fn at(path: &Path) -> Result<Files> {
        let is_directory = match std::fs::metadata(path) {
            Ok(found) => found.is_dir(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(unreadable(path, error)),
        };
        if !is_directory {
            return if is_gguf(path) { Files::gguf(path) } else { Ok(Files::directory(path)) };
        }
        let directory = Files::directory(path);
        if directory.has("config.json") {
            return Ok(directory);
        }
        match &gguf_models(path)?[..] {
            [] => Ok(directory),
            [model] => Files::gguf(model),
            [first, second, ..] => {
                let names = [first, second].map(|path| path.file_name().unwrap_or_default().to_string_lossy());
                let reason = format!("several GGUF models ({}, {}): give the path of one", names[0], names[1]);
                Err(Error::file(path, reason))
            }
        }
    }

    /// The GGUF file, if it is one.
    pub fn as_gguf(&self) -> Option<&Gguf> {
        match &self.0 {
            Location::Gguf(gguf) => Some(gguf),
            _ => None,
        }
    }

    /// Files in memory, as pairs of a name and the contents.
    pub fn embedded(files: &'static [(&'static str, &'static [u8])]) -> Files {
        Files(Location::Embedded(files))
    }

    /// The path of a file for messages.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        match &self.0 {
            Location::Directory(directory) => directory.join(name),
            Location::Gguf(gguf) => gguf.path().to_path_buf(),
            Location::Embedded(_) => PathBuf::from(name),
        }
    }

    /// An error about the files as a whole.
    pub(crate) fn error(&self, reason: &str) -> Error {
        match &self.0 {
            Location::Directory(path) => Error::file(path, reason),
            Location::Gguf(gguf) => Error::file(gguf.path(), reason),
            Location::Embedded(_) => Error::file(Path::new("the embedded model"), reason),
        }
    }

    /// Checks that the directory exists.
    pub(crate) fn check(&self) -> Result<()> {
        match &self.0 {
            Location::Directory(directory) if !directory.is_dir() => Err(self.error("not a directory")),
            _ => Ok(()),
        }
    }

    /// Whether a file with this name exists. A dangling link counts, and is an error when opened: in a snapshot of
    /// links, as in the Hugging Face cache, a file with a missing target must not be skipped.
    pub(crate) fn has(&self, name: &str) -> bool {
        match &self.0 {
            Location::Directory(directory) => {
                let found = std::fs::symlink_metadata(directory.join(name));
                !matches!(found, Err(e) if e.kind() == io::ErrorKind::NotFound)
            }
            Location::Gguf(_) => false,
            Location::Embedded(_) => self.in_memory(name).is_some(),
        }
    }

    pub(crate) fn open(&self, name: &str) -> Result<OpenFile> {
        match &self.0 {
            Location::Directory(directory) => Ok(OpenFile::Disk(open(&directory.join(name))?)),
            Location::Gguf(gguf) => Err(Error::file(gguf.path(), format_args!("has no {name}"))),
            Location::Embedded(_) => match self.in_memory(name) {
                Some(bytes) => Ok(OpenFile::Memory(bytes)),
                None => Err(Error::file(Path::new(name), "not in the embedded model")),
            },
        }
    }

    /// The files with weights or a configuration, by name: their paths, or `None` for files in memory.
    pub(crate) fn weights(&self) -> Result<Vec<(String, Option<PathBuf>)>> {
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let paths = match &self.0 {
            Location::Embedded(files) => return Ok(files.iter().map(|(name, _)| (name.to_string(), None)).collect()),
            Location::Gguf(gguf) => gguf.paths().map(Path::to_path_buf).collect(),
            Location::Directory(directory) => {
                let failed = |e| unreadable(directory, e);
                let entries = std::fs::read_dir(directory).map_err(failed)?;
                let paths = entries.map(|entry| entry.map(|entry| entry.path()));
                let mut paths = paths.collect::<io::Result<Vec<PathBuf>>>().map_err(failed)?;
                paths.retain(|path| path.extension().is_some_and(|kind| kind == "safetensors" || kind == "json"));
                paths.sort();
                paths
            }
        };
        Ok(paths.into_iter().map(|path| (name(&path), Some(path))).collect())
    }

    fn in_memory(&self, name: &str) -> Option<&'static [u8]> {
        match self.0 {
            Location::Directory(_) | Location::Gguf(_) => None,
            Location::Embedded(files) => files.iter().find(|(file, _)| *file == name).map(|&(_, bytes)| bytes),
        }
    }

    /// Reads a file of at most `limit` bytes.
    pub(crate) fn read(&self, name: &str, limit: u64) -> Result<Cow<'static, [u8]>> {
        let path = self.path(name);
        let bytes = match self.open(name)? {
            OpenFile::Memory(bytes) => Cow::Borrowed(bytes),
            OpenFile::Disk(file) => {
                let mut bytes = Vec::new();
                // Reads one byte more than the limit to detect a longer file.
                file.take(limit + 1).read_to_end(&mut bytes).map_err(|e| Error::file(&path, e))?;
                Cow::Owned(bytes)
            }
        };
        if bytes.len() as u64 > limit {
            return Err(Error::file(&path, format_args!("longer than the limit of {limit} bytes")));
        }
        Ok(bytes)
    }

    /// Reads a JSON object from a file.
    pub(crate) fn read_json(&self, name: &str) -> Result<Value> {
        let bytes = self.read(name, JSON_LIMIT)?;
        let value: Value = serde_json::from_slice(&bytes).map_err(|e| Error::file(&self.path(name), e))?;
        if value.is_object() {
            Ok(value)
        } else {
            Err(Error::file(&self.path(name), "the contents must be a JSON object"))
        }
    }

    /// Like [`Files::read_json`], but returns `None` if the file does not exist.
    pub(crate) fn read_json_if_there(&self, name: &str) -> Result<Option<Value>> {
        if self.has(name) { self.read_json(name).map(Some) } else { Ok(None) }
    }
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("gguf"))
}

/// The GGUF models in a directory, sorted. A split model is represented by its first file.
fn gguf_models(directory: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e| unreadable(directory, e);
    let mut models = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if is_gguf(&path) && !name.starts_with("mmproj") && !is_later_part(&name) {
            models.push(path);
        }
    }
    models.sort();
    Ok(models)
}

/// Whether a name ends like `-00002-of-00003.gguf` with a number above 1.
fn is_later_part(name: &str) -> bool {
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let Some((rest, count)) = stem.rsplit_once("-of-") else { return false };
    let Some((_, number)) = rest.rsplit_once('-') else { return false };
    let five = |digits: &str| digits.len() == 5 && digits.bytes().all(|digit| digit.is_ascii_digit());
    five(count) && five(number) && number != "00001"
}

fn unreadable(path: &Path, error: io::Error) -> Error {
    Error::file(path, format_args!("cannot be read: {error}"))
}

/// Prints the path, or the number of embedded files.
impl fmt::Display for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Location::Directory(path) => line(&path.to_string_lossy()).fmt(f),
            Location::Gguf(gguf) => line(&gguf.path().to_string_lossy()).fmt(f),
            Location::Embedded(files) => write!(f, "{} embedded files", files.len()),
        }
    }
}

/// Prints only names: the contents are megabytes.
impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Directory(path) => path.fmt(f),
            Location::Gguf(gguf) => gguf.path().fmt(f),
            Location::Embedded(files) => f.debug_list().entries(files.iter().map(|(name, _)| name)).finish(),
        }
    }
}
