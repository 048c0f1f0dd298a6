//! Writing files.

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
};

use crate::Result;

/// Replaces a file atomically: it is either complete or unchanged. Devices, pipes and links are written in place.
///
/// # Errors
/// The path, and why it cannot be written.
pub fn replace(path: &Path, pieces: &[&[u8]]) -> Result {
    let write = |path: &Path| {
        let mut file = File::create(path)?;
        pieces.iter().try_for_each(|piece| file.write_all(piece))
    };
    let is_file = fs::symlink_metadata(path).map_or(true, |entry| entry.is_file());
    let written = if is_file {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(".new");
        let new = path.with_file_name(name);
        let written = write(&new).and_then(|()| fs::rename(&new, path));
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    } else {
        write(path)
    };
    written.map_err(|error| format!("{}: {error}", path.display()).into())
}
