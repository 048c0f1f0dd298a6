//! The divergences that a search has measured, in a file: a search that was stopped continues where it was.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{Result, output};

/// A line of the file. The first one says what is measured.
#[derive(Serialize, Deserialize)]
struct MeasuredLine {
    /// A codec, or a pair, for each layer.
    layers: String,
    kl_mean: f64,
}

/// Divergences by the codecs of all layers.
pub struct DivergenceFile {
    path: PathBuf,
    file: File,
    known: BTreeMap<String, f64>,
}

impl DivergenceFile {
    /// Reads the file if it is of the same `subject`, and starts it anew otherwise.
    pub fn open(path: PathBuf, subject: &str) -> Result<DivergenceFile> {
        let error = |error: std::io::Error| format!("{}: {error}", path.display());
        let mut known = BTreeMap::new();
        match fs::read_to_string(&path) {
            Ok(text) => match text.strip_prefix(subject).and_then(|rest| rest.strip_prefix('\n')) {
                Some(lines) => {
                    // The last line may be incomplete.
                    let lines = lines.lines().map_while(|line| serde_json::from_str::<MeasuredLine>(line).ok());
                    known.extend(lines.map(|line| (line.layers, line.kl_mean)));
                }
                None => output::note(&format!("{}: of another search; starts anew\n", path.display()))?,
            },
            Err(other) if other.kind() == ErrorKind::NotFound => {}
            Err(other) => return Err(error(other).into()),
        }
        let mut text = format!("{subject}\n");
        for (layers, &kl_mean) in &known {
            text += &line(layers, kl_mean)?;
        }
        replace(&path, &text)?;
        let file = File::options().append(true).open(&path).map_err(error)?;
        Ok(DivergenceFile { path, file, known })
    }

    pub fn get(&self, layers: &str) -> Option<f64> {
        self.known.get(layers).copied()
    }

    pub fn add(&mut self, layers: &str, kl_mean: f64) -> Result {
        let line = line(layers, kl_mean)?;
        self.file.write_all(line.as_bytes()).map_err(|error| format!("{}: {error}", self.path.display()))?;
        self.known.insert(layers.to_string(), kl_mean);
        Ok(())
    }

    /// Removes the file.
    pub fn remove(self) -> Result {
        Ok(fs::remove_file(&self.path).map_err(|error| format!("{}: {error}", self.path.display()))?)
    }
}

fn line(layers: &str, kl_mean: f64) -> Result<String> {
    Ok(serde_json::to_string(&MeasuredLine { layers: layers.to_string(), kl_mean })? + "\n")
}

/// Writes a file such that it is complete, or as it was.
pub fn replace(path: &Path, text: &str) -> Result {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".new");
    let new = path.with_file_name(name);
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    Ok(written.map_err(|error| format!("{}: {error}", path.display()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_known_again() {
        let dir = std::env::temp_dir().join(format!("kvant-measured-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("best.json.part");
        let mut measured = DivergenceFile::open(path.clone(), "a subject").unwrap();
        assert_eq!(measured.get("tq4,tq4"), None);
        measured.add("tq4,tq4", 0.375).unwrap();
        measured.add("tq4,tq3", 0.5).unwrap();
        drop(measured);
        // A line that was being written when the process ended.
        let whole = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{whole}{{\"layers\":\"tq2,tq")).unwrap();
        let mut again = DivergenceFile::open(path.clone(), "a subject").unwrap();
        assert_eq!((again.get("tq4,tq4"), again.get("tq4,tq3")), (Some(0.375), Some(0.5)));
        assert_eq!(again.get("tq2,tq"), None);
        again.add("tq2,tq2", 2.0).unwrap();
        drop(again);
        let again = DivergenceFile::open(path.clone(), "a subject").unwrap();
        assert_eq!((again.get("tq2,tq2"), again.known.len()), (Some(2.0), 3));
        drop(again);
        let other = DivergenceFile::open(path.clone(), "another subject").unwrap();
        assert_eq!(other.known.len(), 0);
        other.remove().unwrap();
        assert!(!path.exists());
        fs::remove_dir_all(dir).unwrap();
    }
}
