//! A file of finished results, so that an interrupted measurement continues.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{ErrorKind, Write},
    path::PathBuf,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{Result, files::replace, progress::note};

/// A line of the file. The first line is the subject instead.
#[derive(Serialize, Deserialize)]
struct KnownLine<T> {
    /// The name of the measurement.
    of: String,
    result: T,
}

/// Results by the names of their measurements.
pub struct ResumeFile<T> {
    path: PathBuf,
    file: File,
    known: BTreeMap<String, T>,
}

impl<T: Clone + Serialize + DeserializeOwned> ResumeFile<T> {
    /// Reads the file if its `subject`, a line of text, matches; otherwise starts a new one.
    pub fn open(path: PathBuf, subject: &str) -> Result<ResumeFile<T>> {
        let error = |error: std::io::Error| format!("{}: {error}", path.display());
        let mut known = BTreeMap::new();
        match fs::read_to_string(&path) {
            Ok(text) => match text.strip_prefix(subject).and_then(|rest| rest.strip_prefix('\n')) {
                Some(lines) => {
                    // The last line may be incomplete.
                    let lines = lines.lines().map_while(|line| serde_json::from_str::<KnownLine<T>>(line).ok());
                    known.extend(lines.map(|line| (line.of, line.result)));
                }
                None => note(&format!("{}: belongs to another measurement; starting a new one\n", path.display()))?,
            },
            Err(other) if other.kind() == ErrorKind::NotFound => {}
            Err(other) => return Err(error(other).into()),
        }
        let mut text = format!("{subject}\n");
        for (of, result) in &known {
            text += &line(of, result.clone())?;
        }
        replace(&path, &[text.as_bytes()])?;
        let file = File::options().append(true).open(&path).map_err(error)?;
        Ok(ResumeFile { path, file, known })
    }

    pub fn get(&self, of: &str) -> Option<&T> {
        self.known.get(of)
    }

    pub fn add(&mut self, of: &str, result: T) -> Result {
        let line = line(of, result.clone())?;
        self.file.write_all(line.as_bytes()).map_err(|error| format!("{}: {error}", self.path.display()))?;
        self.known.insert(of.to_string(), result);
        Ok(())
    }

    /// Removes the file.
    pub fn remove(self) -> Result {
        Ok(fs::remove_file(&self.path).map_err(|error| format!("{}: {error}", self.path.display()))?)
    }
}

fn line<T: Serialize>(of: &str, result: T) -> Result<String> {
    Ok(serde_json::to_string(&KnownLine { of: of.to_string(), result })? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finished_results_are_read_again() {
        let dir = std::env::temp_dir().join(format!("kvant-resume-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("best.json.part");
        let open = |subject| ResumeFile::<f64>::open(path.clone(), subject).unwrap();
        let mut file = open("a subject");
        assert_eq!(file.get("tq4,tq4"), None);
        file.add("tq4,tq4", 0.375).unwrap();
        file.add("tq4,tq3", 0.5).unwrap();
        drop(file);
        // A line that was incomplete when the process ended.
        let whole = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{whole}{{\"of\":\"tq2,tq")).unwrap();
        let mut again = open("a subject");
        assert_eq!((again.get("tq4,tq4"), again.get("tq4,tq3")), (Some(&0.375), Some(&0.5)));
        assert_eq!(again.get("tq2,tq"), None);
        again.add("tq2,tq2", 2.0).unwrap();
        drop(again);
        let again = open("a subject");
        assert_eq!((again.get("tq2,tq2"), again.known.len()), (Some(&2.0), 3));
        drop(again);
        let other = open("another subject");
        assert_eq!(other.known.len(), 0);
        other.remove().unwrap();
        assert!(!path.exists());
        fs::remove_dir_all(dir).unwrap();
    }
}
