//! The input of a compilation: a `.metal` text with its includes.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A `.metal` source with its headers, macros and additional instantiations.
#[derive(Clone, Debug, Default)]
pub struct Source {
    pub(crate) name: String,
    pub(crate) text: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) include_dirs: Vec<PathBuf>,
    pub(crate) defines: Vec<(String, String)>,
    pub(crate) instantiations: Vec<(String, String)>,
}

impl Source {
    /// A source from a string. Reports show `name` as the file name.
    pub fn new(name: &str, text: &str) -> Source {
        Source { name: name.into(), text: text.into(), ..Source::default() }
    }

    /// A source from a file. Headers are found in the file's directory.
    pub fn file(path: impl AsRef<Path>) -> Result<Source> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(Error::io("reading", path))?;
        let mut source = Source::new(&path.file_name().unwrap_or(path.as_os_str()).to_string_lossy(), &text);
        // An empty parent means the current directory, and an empty -I would consume the next argument.
        if let Some(parent) = path.parent() {
            source.include_dirs.push(if parent.as_os_str().is_empty() { ".".into() } else { parent.into() });
        }
        Ok(source)
    }

    /// Adds a header, or replaces the one with this name: `#include "name"` finds `text`.
    pub fn header(mut self, name: &str, text: &str) -> Source {
        self.headers.retain(|h| h.0 != name);
        self.headers.push((name.into(), text.into()));
        self
    }

    /// Adds a directory to search for headers.
    pub fn include_dir(mut self, dir: impl Into<PathBuf>) -> Source {
        self.include_dirs.push(dir.into());
        self
    }

    /// Defines a macro.
    pub fn define(mut self, name: &str, value: &str) -> Source {
        self.defines.push((name.into(), value.into()));
        self
    }

    /// Instantiates a kernel template under a name, like `template [[host_name("name")]]` in the source:
    /// `source.instantiate("scale_half", "scale<half, 4>")`.
    pub fn instantiate(mut self, host_name: &str, function: &str) -> Source {
        self.instantiations.push((host_name.into(), function.into()));
        self
    }
}
