//! Recognises a checkpoint by samples of its files.

use std::{fs, io, path::Path, time::UNIX_EPOCH};

use crate::{Error, Files, Result, open_file::OpenFile};

/// Samples of each file, evenly spaced, and their bytes.
const SAMPLES: u64 = 256;
const SAMPLE: u64 = 4096;

impl Files {
    /// Bytes that recognise the checkpoint: names, sizes and samples of the contents of all files with weights or a
    /// configuration. Two checkpoints with equal samples are most likely equal; checkpoints that differ in few numbers
    /// may have equal samples. Hash it to get an identity.
    ///
    /// # Errors
    /// `File` for a file that cannot be read.
    pub fn samples(&self) -> Result<Vec<u8>> {
        let mut samples = Vec::new();
        for (name, path) in self.weights()? {
            let failed = |error: io::Error| Error::file(Path::new(&name), error);
            let file = match &path {
                Some(path) => OpenFile::Disk(fs::File::open(path).map_err(failed)?),
                None => self.open(&name)?,
            };
            let len = file.len().map_err(failed)?;
            samples.extend_from_slice(name.as_bytes());
            samples.extend_from_slice(&len.to_le_bytes());
            let size = SAMPLE.min(len);
            let count = len.div_ceil(SAMPLE).min(SAMPLES);
            for index in 0..count {
                // From the first bytes to the last ones.
                let at = u128::from(len - size) * u128::from(index) / u128::from(count.max(2) - 1);
                let start = samples.len();
                samples.resize(start + size as usize, 0);
                file.read_at(at as u64, &mut samples[start..]).map_err(failed)?;
            }
        }
        Ok(samples)
    }

    /// The modification times of the files of [`Files::samples`], as bytes. They also differ between checkpoints with
    /// equal samples, but change when a checkpoint is copied.
    ///
    /// # Errors
    /// `File` for a file that cannot be read.
    pub fn modification_times(&self) -> Result<Vec<u8>> {
        let mut times = Vec::new();
        for (name, path) in self.weights()? {
            let Some(path) = path else { continue };
            let modified = fs::metadata(&path).and_then(|metadata| metadata.modified());
            let modified = modified.map_err(|error| Error::file(Path::new(&name), error))?;
            // Times before 1970 are equal.
            let nanoseconds = modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
            times.extend_from_slice(&nanoseconds.to_le_bytes());
        }
        Ok(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_are_recognised() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(root.path().join(name), bytes).unwrap();
        let files = Files::directory(root.path());
        let mut weights: Vec<u8> = (0..3u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        write("model.safetensors", &weights);
        write("config.json", b"{}");
        let (samples, times) = (files.samples().unwrap(), files.modification_times().unwrap());
        assert!(samples.len() < 2 << 20 && times.len() == 32);
        write("notes.txt", b"other files do not matter");
        assert_eq!((files.samples().unwrap(), files.modification_times().unwrap()), (samples.clone(), times.clone()));
        for at in [0, 1 << 20, weights.len() - 1] {
            // Longer than the distance of two samples.
            let end = (at + (16 << 10)).min(weights.len());
            weights[at..end].iter_mut().for_each(|byte| *byte ^= 1);
            write("model.safetensors", &weights);
            assert_ne!(files.samples().unwrap(), samples, "{at}");
            weights[at..end].iter_mut().for_each(|byte| *byte ^= 1);
        }
        write("model.safetensors", &weights);
        assert_eq!(files.samples().unwrap(), samples);
        assert_ne!(files.modification_times().unwrap(), times, "the file was written again");
        write("config.json", b"");
        assert_ne!(files.samples().unwrap(), samples);
        assert!(Files::directory(root.path().join("missing")).samples().is_err());
        static EMBEDDED: [(&str, &[u8]); 1] = [("config.json", b"{}")];
        assert!(Files::embedded(&EMBEDDED).modification_times().unwrap().is_empty());
        assert!(!Files::embedded(&EMBEDDED).samples().unwrap().is_empty());
    }
}
