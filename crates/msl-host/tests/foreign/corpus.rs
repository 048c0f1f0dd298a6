//! The sources of foreign kernels, and how a test includes them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use msl_host::{Source, Strictness};

/// The kernels of a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Project {
    Ggml,
    Mlx,
}

/// A translation unit: the included files of a project, and the kernels to test.
#[derive(Clone, Debug)]
pub struct Unit {
    pub project: Project,
    /// `norm.metal` of ggml; a list of headers of MLX, relative to its folder of kernels.
    pub files: &'static [&'static str],
    /// MLX instantiates its templates by name: (name, `function<arguments>`).
    pub instances: Vec<(String, String)>,
    /// The kernels to compile, by name.
    pub only: Vec<String>,
}

impl Unit {
    pub fn ggml(file: &'static [&'static str], kernels: &[&str]) -> Unit {
        let only = kernels.iter().map(|k| (*k).into()).collect();
        Unit { project: Project::Ggml, files: file, instances: Vec::new(), only }
    }

    pub fn mlx(files: &'static [&'static str], instances: &[(&str, &str)]) -> Unit {
        let instances = instances.iter().map(|(n, f)| ((*n).into(), (*f).into())).collect();
        Unit { project: Project::Mlx, files, instances, only: Vec::new() }
    }

    /// The source, with one file replaced by `edit`: its name and its new text.
    pub fn source(&self, edit: Option<&(String, String)>) -> Source {
        let root = corpus().unwrap_or_else(|| panic!("the corpus exists: tests check before"));
        let source = match self.project {
            Project::Ggml => {
                let (folder, name) = (root.join("ggml"), self.files[0]);
                let text = read(&folder.join(name));
                let text = edit.filter(|e| e.0 == name).map_or(text, |e| e.1.clone());
                Source::new(name, &text).include_dir(folder).define("GGML_METAL_HAS_BF16", "1")
            }
            Project::Mlx => {
                let include = |file: &&str| format!("#include \"{MLX_KERNELS}/{file}\"\n");
                let text: String = self.files.iter().map(include).collect();
                let name = format!("mlx_{}.metal", self.files[self.files.len() - 1].replace('/', "_"));
                Source::new(&name, &format!("#include <metal_stdlib>\n{text}")).include_dir(root.join("mlx"))
            }
        };
        let source = match edit {
            Some((name, text)) if self.project == Project::Mlx => source.header(&format!("{MLX_KERNELS}/{name}"), text),
            Some((name, text)) if name != self.files[0] => source.header(name, text),
            _ => source,
        };
        let source = self.instances.iter().fold(source, |s, (name, function)| s.instantiate(name, function));
        source.only(self.only.iter().map(String::as_str)).strictness(Strictness::Trusted)
    }

    /// The text of a file of the project.
    pub fn text(&self, file: &str) -> String {
        let root = corpus().unwrap_or_else(|| panic!("the corpus exists: tests check before"));
        match self.project {
            Project::Ggml => read(&root.join("ggml").join(file)),
            Project::Mlx => read(&root.join("mlx").join(MLX_KERNELS).join(file)),
        }
    }
}

const MLX_KERNELS: &str = "mlx/backend/metal/kernels";

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The folder of the corpus, downloaded on first use; `None`, with a message, without a network.
pub fn corpus() -> Option<&'static Path> {
    static CORPUS: OnceLock<Option<PathBuf>> = OnceLock::new();
    CORPUS.get_or_init(download).as_deref()
}

fn download() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let program = std::env::current_exe().unwrap_or_default();
    let target = program.ancestors().nth(3).map_or_else(|| root.join("target"), Path::to_path_buf);
    let out = target.join("foreign-kernels");
    if out.exists() {
        return Some(out);
    }
    let mut command = Command::new("python3");
    command.arg(root.join("tools/foreign_kernels.py")).arg("--out").arg(&out);
    match command.output() {
        Ok(done) if done.status.success() => Some(out),
        Ok(done) => {
            let reason = String::from_utf8_lossy(&done.stderr);
            eprintln!("SKIPPED: no foreign kernels: {}", reason.trim());
            None
        }
        Err(error) => {
            eprintln!("SKIPPED: no foreign kernels: python3: {error}");
            None
        }
    }
}
