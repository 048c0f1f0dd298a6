//! The input of a compilation: a `.metal` text with its includes.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A `.metal` source with its headers, macros and additional instantiations.
#[derive(Clone, Debug)]
pub struct Source {
    pub(crate) name: String,
    pub(crate) text: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) include_dirs: Vec<PathBuf>,
    pub(crate) defines: Vec<(String, String)>,
    pub(crate) instantiations: Vec<(String, String)>,
    pub(crate) only: Vec<String>,
    pub(crate) strictness: Strictness,
    pub(crate) language: (u32, u32),
    pub(crate) unaligned: bool,
    pub(crate) contract: bool,
}

/// The requirements that a source must satisfy to compile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Strictness {
    /// Every pointer has an address space, address spaces are part of the types, and clang has no warnings. For your
    /// own kernels: Apple's compiler rejects violations of the first two rules.
    #[default]
    Strict,
    /// As [`Strictness::Strict`], without warnings.
    Typed,
    /// The source only has to compile without address spaces. For kernels that Apple's compiler has accepted: the other
    /// levels do not support member functions with an address space.
    Trusted,
}

impl Source {
    /// A source from a string. Reports show `name` as the file name.
    pub fn new(name: &str, text: &str) -> Source {
        Source {
            name: name.into(),
            text: text.into(),
            headers: Vec::new(),
            include_dirs: Vec::new(),
            defines: Vec::new(),
            instantiations: Vec::new(),
            only: Vec::new(),
            strictness: Strictness::Strict,
            language: (3, 1),
            unaligned: false,
            contract: false,
        }
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

    /// Compiles only these kernels of the source. Compiling hundreds of instantiations takes minutes.
    pub fn only<N: Into<String>>(mut self, kernels: impl IntoIterator<Item = N>) -> Source {
        self.only.extend(kernels.into_iter().map(Into::into));
        self
    }

    /// Sets the requirements of the source. The default is [`Strictness::Strict`].
    pub fn strictness(self, strictness: Strictness) -> Source {
        Source { strictness, ..self }
    }

    /// Allows accesses that violate the alignment of their types. They are undefined by the specification, and findings
    /// by default; some kernels rely on GPUs that support them.
    pub fn unaligned(self) -> Source {
        Source { unaligned: true, ..self }
    }

    /// Lets the compiler fuse `a * b + c` into one operation with one rounding, as Apple's compiler does. By default
    /// every operation rounds. The checks between operations prevent most of it in [`crate::Build::Checker`].
    pub fn contract(self) -> Source {
        Source { contract: true, ..self }
    }

    /// Sets the version of the Metal language, as the runtime requests it from Apple's compiler. The default is 3.1,
    /// the first with `bfloat`.
    pub fn language(self, major: u32, minor: u32) -> Source {
        Source { language: (major, minor), ..self }
    }
}
