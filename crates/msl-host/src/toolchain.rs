//! Calls clang with its options, and caches its results.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::compiler::{Compiler, PLAIN as PLAIN_PROCESSOR, PROCESSOR};
use crate::count::{Table, instrument};
use crate::error::{Diagnostic, Error, Result};
use crate::source::{Source, Strictness};

/// The build of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Build {
    /// Optimised. Guard pages catch accesses outside of buffers; poison reveals results that depend on unwritten
    /// memory.
    Plain,
    /// Checks every memory access: bounds, declared access, initialisation, races. Much slower.
    Checker,
}

/// The files that replace the Metal standard library, and the sources of the runtime.
const INCLUDE: &[(&str, &str)] = &[
    ("msl_host.h", include_str!("../include/msl_host.h")),
    ("msl/context.h", include_str!("../include/msl/context.h")),
    ("msl/types.h", include_str!("../include/msl/types.h")),
    ("msl/math.h", include_str!("../include/msl/math.h")),
    ("msl/sync.h", include_str!("../include/msl/sync.h")),
    ("msl/atomic.h", include_str!("../include/msl/atomic.h")),
    ("msl/columns.h", include_str!("../include/msl/columns.h")),
    ("msl/matrix.h", include_str!("../include/msl/matrix.h")),
    ("msl/internals.h", include_str!("../include/msl/internals.h")),
    ("msl/glue.h", include_str!("../include/msl/glue.h")),
];
const RUNTIME: &[(&str, &str)] = &[
    ("abi.h", include_str!("../runtime/abi.h")),
    ("machine.h", include_str!("../runtime/machine.h")),
    ("state.h", include_str!("../runtime/state.h")),
    ("memory.cpp", include_str!("../runtime/memory.cpp")),
    ("schedule.cpp", include_str!("../runtime/schedule.cpp")),
    ("checker.cpp", include_str!("../runtime/checker.cpp")),
    ("count.cpp", include_str!("../runtime/count.cpp")),
    ("dispatch.cpp", include_str!("../runtime/dispatch.cpp")),
];
/// `-ftls-model=initial-exec`: every access reads `running`, which only one library of the process defines, so the
/// loader can place it in the thread's static block.
const RUNTIME_OPTIONS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    "-shared",
    "-ftls-model=initial-exec",
    "-fno-semantic-interposition",
    "-fno-omit-frame-pointer",
    "-fno-exceptions",
    "-fno-rtti",
];
/// Standard headers that a source may include. They are empty, because `msl_host.h` precedes the preprocessed text.
const STANDARD: &[&str] = &[
    "metal_stdlib",
    "metal_atomic",
    "metal_math",
    "metal_simdgroup",
    "metal_simdgroup_matrix",
    "metal_integer",
    "metal_common",
    "metal_compute",
    "metal_geometric",
    "metal_relational",
    "metal_types",
    "metal_limits",
    "metal_type_traits",
    "metal_quadgroup",
    "metal_pack",
    "metal_matrix",
    "metal_uniform",
    "metal_array",
];

/// Headers of features that are not simulated.
const REFUSED: &[&str] = &["metal_tensor", "MetalPerformancePrimitives/MetalPerformancePrimitives.h"];

/// Options of every compilation.
///
/// - `-ffp-contract=off` and the excess-precision options: every operation rounds as written.
/// - `-fno-finite-loops`: clang does not delete endless loops.
/// - `-fconvergent-functions`: clang does not copy or merge calls that wait for other threads.
/// - Frame pointers: each of those calls is identified by its call chain.
const COMMON: &[&str] = &[
    "-x",
    "c++",
    "-std=c++14",
    "-nostdinc",
    "-nostdinc++",
    "-D__METAL__=1",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-ffp-contract=off",
    "-fno-finite-loops",
    "-fno-strict-aliasing",
    "-fconvergent-functions",
    "-fno-omit-frame-pointer",
    "-fno-optimize-sibling-calls",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-caret-diagnostics",
    "-fno-color-diagnostics",
    "-ferror-limit=0",
    "-Wno-c++17-extensions",
    "-Wno-unknown-attributes",
    "-Wno-unknown-pragmas",
    "-Wno-user-defined-literals",
    "-Wno-reserved-user-defined-literal",
    "-Wno-duplicate-decl-specifier",
    "-Wno-pass-failed",
];
const TYPED: &[&str] = &["-DMSL_TYPED", "-fsyntax-only"];
const WARNINGS: &[&str] =
    &["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-Wno-unused-function", "-Wno-unused-const-variable"];
const PLAIN: &[&str] = &["-O2", "-w", "-gline-tables-only", "-fPIC", "-ftrivial-auto-var-init=pattern"];
const CHECKER: &[&str] = &[
    "-O1",
    "-w",
    "-gline-tables-only",
    "-fPIC",
    "-ftrivial-auto-var-init=pattern",
    "-DMSL_CHECK",
    "-fsanitize=thread",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
    "-fsanitize=bounds,alignment,integer-divide-by-zero",
];

/// Keeps every operation: no vectors for the source's scalar code, no 64-bit counters for 32-bit ones. Loops of
/// constant length are unrolled, and calls inlined, as on GPUs.
const COUNTING: &[&str] = &[
    "-O2",
    "-w",
    "-gline-tables-only",
    "-fPIC",
    "-DMSL_COUNT",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fno-strict-aliasing",
    "-mllvm",
    "-indvars-widen-indvars=false",
    "-mllvm",
    "-disable-vector-combine",
    "-mllvm",
    "-unroll-threshold=3000",
    "-mllvm",
    "-inline-threshold=1000000",
];

/// No instructions that require aligned addresses, and no check of alignment.
const UNALIGNED: [&str; 2] = ["-fmax-type-align=1", "-fno-sanitize=alignment"];

/// Vectors of unrelated operations would hide operations that can be fused.
const CONTRACT: [&str; 2] = ["-ffp-contract=fast", "-fno-slp-vectorize"];

/// A compiler, and a directory for its results.
#[derive(Debug)]
pub(crate) struct Toolchain {
    compiler: Compiler,
    cache: PathBuf,
    include: PathBuf,
}

impl Toolchain {
    pub fn find() -> Result<Toolchain> {
        let compiler = Compiler::find()?;
        let cache = cache_folder();
        let hash =
            hash(INCLUDE.iter().flat_map(|(name, text)| [*name, *text]).chain(STANDARD.iter().chain(REFUSED).copied()));
        let include = cache.join(format!("include-{hash}"));
        let toolchain = Toolchain { compiler, cache, include };
        for (name, text) in INCLUDE {
            write_once(&toolchain.include.join(name), text)?;
        }
        for name in STANDARD {
            write_once(&toolchain.include.join("stub").join(name), "")?;
        }
        for name in REFUSED {
            let text = format!("#error \"<{name}> is not supported by msl-host: Metal's tensors are not simulated\"\n");
            write_once(&toolchain.include.join("stub").join(name), &text)?;
        }
        Ok(toolchain)
    }

    /// The directory of `msl_host.h`; reports omit its lines.
    pub fn include(&self) -> &Path {
        &self.include
    }

    /// The runtime as a shared object, compiled on first use.
    pub fn runtime(&self) -> Result<PathBuf> {
        let context = INCLUDE[1].1;
        let hash = hash(
            RUNTIME
                .iter()
                .flat_map(|(name, text)| [*name, *text])
                .chain([context, &self.compiler.version])
                .chain(RUNTIME_OPTIONS.iter().chain(PROCESSOR).copied()),
        );
        let library = self.cache.join(format!("libmsl_runtime-{hash}.so"));
        if library.exists() {
            return Ok(library);
        }
        // The sources include "../include/msl/context.h".
        let sources = self.cache.join(format!("runtime-{hash}"));
        write_once(&sources.join("include/msl/context.h"), context)?;
        for (name, text) in RUNTIME {
            write_once(&sources.join("runtime").join(name), text)?;
        }
        let scratch = Scratch::beside(&library);
        let mut command = self.compiler.command();
        command.args(RUNTIME_OPTIONS).args(PROCESSOR);
        command.arg(format!("-Wl,-soname,{}", file_name(&library))).arg("-o").arg(&scratch.0);
        command.args(
            RUNTIME
                .iter()
                .filter(|(name, _)| name.ends_with(".cpp"))
                .map(|(name, _)| sources.join("runtime").join(name)),
        );
        self.expect(&mut command, "the runtime of msl-host", None)?;
        scratch.publish(&library)?;
        Ok(library)
    }

    /// The source after the preprocessor, with `# line "file"` markers.
    pub fn preprocess(&self, source: &Source) -> Result<String> {
        let mut command = self.compiler.command();
        command.arg("-E").args(COMMON).args(PROCESSOR).args(language(source)).arg("-I").arg(self.include.join("stub"));
        let mut own_headers = None;
        if !source.headers.is_empty() {
            let dir = self.cache.join(format!(
                "headers-{}",
                hash(source.headers.iter().flat_map(|(name, text)| [name.as_str(), text]))
            ));
            for (name, text) in &source.headers {
                write_once(&dir.join(name), text)?;
            }
            command.arg("-I").arg(&dir);
            own_headers = Some(format!("\"{}/", dir.display()));
        }
        for dir in &source.include_dirs {
            // The compiler runs in another directory.
            command.arg("-I").arg(std::path::absolute(dir).map_err(Error::io("finding", dir))?);
        }
        for (name, value) in &source.defines {
            command.arg(format!("-D{name}={value}"));
        }
        let input = format!("#line 1 \"{}\"\n{}", source.name, source.text);
        let text = self.expect(command.arg("-"), &source.name, Some(&input))?;
        // Unrolling takes clang minutes, and its factors may be macros, which the preprocessor leaves in a pragma.
        let loops = |line: &str| line.starts_with("#pragma unroll") || line.starts_with("#pragma clang loop");
        let text = text.lines().map(|line| if loops(line) { "" } else { line }).collect::<Vec<_>>().join("\n");
        // Line markers name headers as the source does, not by their temporary paths.
        Ok(match own_headers {
            Some(folder) => text.replace(&folder, "\""),
            None => text,
        })
    }

    /// Checks the types of a rewritten source, including address spaces.
    pub fn check_types(&self, source: &Source, text: &str) -> Result<()> {
        let language = language(source);
        let warnings = if source.strictness == Strictness::Strict { WARNINGS } else { &["-w"] };
        let mark = self.cache.join(format!(
            "typed-{}",
            hash(
                [text, &self.compiler.version, file_name(&self.include).as_str()]
                    .into_iter()
                    .chain(COMMON.iter().chain(PROCESSOR).chain(TYPED).chain(warnings).copied())
                    .chain(language.iter().map(String::as_str))
            )
        ));
        if mark.exists() {
            return Ok(());
        }
        let mut command = self.compiler.command();
        command
            .args(COMMON)
            .args(PROCESSOR)
            .args(&language)
            .args(TYPED)
            .args(warnings)
            .arg("-I")
            .arg(&self.include)
            .arg("-");
        let (success, output) = self.communicate(&mut command, Some(text))?;
        if !success {
            let found = diagnostics(&output.1, &self.include);
            let real: Vec<Diagnostic> =
                found.into_iter().filter(|d| !d.copies_across_spaces).map(|d| d.diagnostic).collect();
            if !real.is_empty() {
                return Err(Error::Compile { name: source.name.clone(), diagnostics: real });
            }
        }
        write_once(&mark, "")
    }

    /// Compiles a rewritten source to a shared object that is linked to the runtime.
    pub fn compile(&self, source: &Source, text: &str, build: Build, runtime: &Path) -> Result<PathBuf> {
        let (name, mut language) = (&source.name, language(source));
        if source.unaligned {
            language.extend(UNALIGNED.map(String::from));
        }
        if source.contract {
            language.extend(CONTRACT.map(String::from));
        }
        let options = match build {
            Build::Plain => [PROCESSOR, PLAIN, PLAIN_PROCESSOR].concat(),
            Build::Checker => [PROCESSOR, CHECKER].concat(),
        };
        let key = [text, &self.compiler.version, &file_name(&self.include), &file_name(runtime)];
        let options_key = COMMON.iter().chain(&options).copied().chain(language.iter().map(String::as_str));
        let hash = hash(key.into_iter().chain(options_key));
        let stem: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let library = self.cache.join(format!("{stem}-{hash}.so"));
        if library.exists() {
            return Ok(library);
        }
        let (object, scratch) = (Scratch::beside(&library.with_extension("o")), Scratch::beside(&library));
        let mut command = self.compiler.command();
        command
            .args(COMMON)
            .args(&options)
            .args(&language)
            .arg("-I")
            .arg(&self.include)
            .arg("-c")
            .arg("-o")
            .arg(&object.0)
            .arg("-");
        self.expect(&mut command, name, Some(text))?;
        self.link(&object.0, &scratch.0, name, runtime)?;
        scratch.publish(&library)?;
        Ok(library)
    }

    /// Compiles a rewritten source so that it counts: a shared object, and the meaning of its blocks and sites.
    pub fn compile_counting(&self, source: &Source, text: &str, runtime: &Path) -> Result<(PathBuf, Table)> {
        let (name, mut language) = (&source.name, language(source));
        if source.unaligned {
            language.extend(UNALIGNED.map(String::from));
        }
        let key = [text, &self.compiler.version, &file_name(&self.include), &file_name(runtime)];
        let options =
            COMMON.iter().chain(PROCESSOR).chain(COUNTING).copied().chain(language.iter().map(String::as_str));
        let stem: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let ir = self.cache.join(format!("{stem}-{}.ll", hash(key.into_iter().chain(options))));
        if !ir.exists() {
            let scratch = Scratch::beside(&ir);
            let mut command = self.compiler.command();
            command.args(COMMON).args(PROCESSOR).args(COUNTING).args(&language).arg("-I").arg(&self.include);
            command.args(["-S", "-emit-llvm", "-o"]).arg(&scratch.0).arg("-");
            self.expect(&mut command, name, Some(text))?;
            scratch.publish(&ir)?;
        }
        let (counting, table) = instrument(&std::fs::read_to_string(&ir).map_err(Error::io("reading", &ir))?);
        let library = ir.with_file_name(format!("{stem}-{}.so", hash([counting.as_str(), &file_name(runtime)])));
        if !library.exists() {
            let (object, scratch) = (Scratch::beside(&library.with_extension("o")), Scratch::beside(&library));
            let mut command = self.compiler.command();
            command.args(["-x", "ir", "-O1", "-Xclang", "-disable-llvm-passes", "-fPIC", "-w"]).args(PROCESSOR);
            command.args(["-fno-omit-frame-pointer", "-c", "-o"]).arg(&object.0).arg("-");
            self.expect(&mut command, name, Some(&counting))?;
            self.link(&object.0, &scratch.0, name, runtime)?;
            scratch.publish(&library)?;
        }
        Ok((library, table))
    }

    fn link(&self, object: &Path, library: &Path, name: &str, runtime: &Path) -> Result<()> {
        let mut link = self.compiler.command();
        link.arg("-shared").arg("-o").arg(library).arg(object).arg(runtime).arg("-lm").arg("-Wl,-z,now");
        link.arg(format!("-Wl,-rpath,{}", self.cache.display()));
        self.expect(&mut link, name, None).map(drop)
    }

    /// Runs the compiler and returns its output, or its diagnostics as an error.
    fn expect(&self, command: &mut Command, name: &str, input: Option<&str>) -> Result<String> {
        let (success, (out, err)) = self.communicate(command, input)?;
        if success {
            return Ok(out);
        }
        let mut diagnostics: Vec<Diagnostic> =
            diagnostics(&err, &self.include).into_iter().map(|d| d.diagnostic).collect();
        if diagnostics.is_empty() {
            diagnostics.push(Diagnostic { file: name.into(), line: 0, message: err });
        }
        Err(Error::Compile { name: name.into(), diagnostics })
    }

    fn communicate(&self, command: &mut Command, input: Option<&str>) -> Result<(bool, (String, String))> {
        let failed = || Error::io("running", &self.compiler.program);
        command.current_dir(&self.cache).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed())?;
        let stdin = child.stdin.take();
        let output = std::thread::scope(|scope| {
            // On a separate thread: the compiler may fill its output pipe before it has read all input.
            scope.spawn(move || {
                if let (Some(mut stdin), Some(input)) = (stdin, input) {
                    // A compiler that stops early closes the pipe; its messages give the reason.
                    let _ = stdin.write_all(input.as_bytes());
                }
            });
            child.wait_with_output()
        });
        let output = output.map_err(failed())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((output.status.success(), (text(&output.stdout), text(&output.stderr))))
    }
}

/// The macros of the language version that Metal defines. `bfloat` came with 3.1.
fn language(source: &Source) -> Vec<String> {
    let (major, minor) = source.language;
    let mut options = vec![format!("-D__METAL_VERSION__={}", major * 100 + minor * 10)];
    if (major, minor) >= (3, 1) {
        options.push("-D__HAVE_BFLOAT__=1".into());
    }
    options
}

/// `MSL_HOST_CACHE`, or `msl-host` in the target directory of this program, or in the temporary directory.
fn cache_folder() -> PathBuf {
    if let Some(named) = std::env::var_os("MSL_HOST_CACHE") {
        return named.into();
    }
    let program = std::env::current_exe().unwrap_or_default();
    // Cargo tags its target directory.
    let target = program.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists());
    target.map_or_else(std::env::temp_dir, Path::to_path_buf).join("msl-host")
}

/// FNV-1a over 128 bits, with the lengths mixed in.
fn hash<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut h: u128 = 0x6c62272e07bb014262b821756295c58d;
    for part in parts {
        for byte in part.bytes().chain(part.len().to_le_bytes()) {
            h = (h ^ u128::from(byte)).wrapping_mul(0x0000000001000000000000000000013B);
        }
    }
    format!("{h:032x}")
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// A file that several processes may write at once: each writes a temporary file, and the last rename wins.
struct Scratch(PathBuf);

impl Scratch {
    fn beside(path: &Path) -> Scratch {
        use std::sync::atomic::{AtomicU32, Ordering};
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let unique = format!("{}.{}.{}", file_name(path), std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        Scratch(path.with_file_name(unique))
    }

    fn publish(&self, path: &Path) -> Result<()> {
        std::fs::rename(&self.0, path).map_err(Error::io("writing", path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Gone already if it was published.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn write_once(path: &Path, text: &str) -> Result<()> {
    if path.exists() {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(Error::io("creating", parent))?;
    }
    let scratch = Scratch::beside(path);
    std::fs::write(&scratch.0, text).map_err(Error::io("writing", path))?;
    scratch.publish(path)
}

struct Found {
    diagnostic: Diagnostic,
    /// MSL copies structs implicitly between address spaces; clang's C++ does not.
    copies_across_spaces: bool,
}

/// The errors in clang's output. An error inside of `msl_host.h` is reported at the user's line that caused it.
fn diagnostics(output: &str, include: &Path) -> Vec<Found> {
    let include = include.display().to_string();
    let mut list: Vec<Found> = Vec::new();
    for line in output.lines() {
        let Some((file, number, level, message)) = split(line) else { continue };
        if level == "note" {
            let Some(last) = list.last_mut() else { continue };
            if last.diagnostic.file.starts_with(&include) && !file.starts_with(&include) {
                (last.diagnostic.file, last.diagnostic.line) = (file.into(), number);
            }
            let spaces = message.contains("address space") || message.contains("__attribute__((address_space");
            let copying = last.diagnostic.message.contains("no matching constructor for initialization of")
                || last.diagnostic.message.contains("no viable overloaded '='");
            last.copies_across_spaces |= spaces && copying && message.contains("implicit");
        } else if level != "warning" {
            list.push(Found {
                diagnostic: Diagnostic { file: file.into(), line: number, message: message.into() },
                copies_across_spaces: false,
            });
        }
    }
    list
}

/// Splits `a.metal:3:5: error: message` into its parts.
fn split(line: &str) -> Option<(&str, u32, &str, &str)> {
    let level = ["fatal error", "error", "warning", "note"].into_iter().find(|l| line.contains(&format!(": {l}: ")))?;
    let (place, message) = line.split_once(&format!(": {level}: "))?;
    let (rest, _column) = place.rsplit_once(':')?;
    let (file, number) = rest.rsplit_once(':')?;
    Some((file, number.parse().ok()?, level, message))
}
