//! Reading small files whole, without trusting their size.

use std::{fs::File, io::Read, path::Path};

use serde_json::Value;

use crate::{Error, Result};

/// More than any model's config.json, and few enough bytes to hold.
pub(crate) const JSON_LIMIT: u64 = 16 << 20;

/// Opens a file that is one: to open a pipe would wait for somebody who writes into it.
pub(crate) fn open(path: &Path) -> Result<File> {
    let failed = |e| Error::file(path, e);
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(Error::file(path, "not a regular file"));
    }
    File::open(path).map_err(failed)
}

/// The whole file, when it has at most `limit` bytes.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = open(path)?;
    let mut bytes = Vec::new();
    // One byte past the limit tells a file that is too long from one that just fits.
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|e| Error::file(path, e))?;
    if bytes.len() as u64 > limit {
        return Err(Error::file(path, format_args!("longer than the {limit} bytes that such a file may have")));
    }
    Ok(bytes)
}

/// A JSON object from a file.
pub(crate) fn read_json(path: &Path) -> Result<Value> {
    let value: Value = serde_json::from_slice(&read(path, JSON_LIMIT)?).map_err(|e| Error::file(path, e))?;
    if value.is_object() { Ok(value) } else { Err(Error::file(path, "not a JSON object")) }
}

/// As [`read_json`], `None` when there is no such file.
pub(crate) fn read_json_if_there(path: &Path) -> Result<Option<Value>> {
    if is_there(path) { read_json(path).map(Some) } else { Ok(None) }
}

/// Whether there is such a name. A link that leads nowhere is one, and an error once it is opened: of a snapshot made of links, as
/// the Hugging Face cache has them, no file is passed over because what it leads to is gone.
pub(crate) fn is_there(path: &Path) -> bool {
    !matches!(std::fs::symlink_metadata(path), Err(e) if e.kind() == std::io::ErrorKind::NotFound)
}
