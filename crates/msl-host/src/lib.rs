//! Runs Metal compute kernels on Linux, and reports their errors.
//!
//! ```
//! use msl_host::{Buffer, Build, Grid, Host, Launch, Schedule, Source};
//! # if cfg!(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))) { return Ok::<(), msl_host::Error>(()); }
//!
//! let source = Source::new("double.metal", r#"
//!     #include <metal_stdlib>
//!     kernel void twice(device const uint *x [[buffer(0)]], device uint *y [[buffer(1)]],
//!                       uint i [[thread_position_in_grid]]) { y[i] = 2 * x[i]; }
//! "#);
//! let library = Host::new()?.compile(&source, Build::Checker)?;
//! let (x, mut y) = ([3u32, 4].map(u32::to_le_bytes).concat(), vec![0; 8]);
//! let grid = Grid::Threadgroups { groups: [1, 1, 1], threads: [2, 1, 1] };
//! let launch = Launch::new("twice", grid).buffer(0, Buffer::read(&x)).buffer(1, Buffer::write(&mut y));
//! library.run(&launch, Schedule::Forward)?;
//! assert_eq!(y, [6u32, 8].map(u32::to_le_bytes).concat());
//! # Ok::<(), msl_host::Error>(())
//! ```
//!
//! | subject | items |
//! |---|---|
//! | compiler, memory | [`Host`], [`Memory`] |
//! | a source and its compiled form | [`Source`], [`Strictness`], [`Library`], [`Kernel`], [`Build`] |
//! | a dispatch | [`Launch`], [`Buffer`], [`Access`], [`Constant`], [`Grid`], [`Schedule`], [`SumOrder`], [`Stats`] |
//! | counting | [`Host::count`], [`Counts`] |
//! | errors | [`Error`], [`Diagnostic`] (compiling), [`Findings`], [`Finding`], [`Kind`] (running) |
//!
//! A source passes these stages:
//!
//! 1. clang's preprocessor;
//! 2. `lexer` and `parse` find kernels;
//! 3. `lint` finds pointers without an address space;
//! 4. `rewrite` converts MSL to C++;
//! 5. clang checks the types, with address spaces as part of them, then compiles the source without them;
//! 6. `runtime/` runs it.

mod compiler;
mod count;
mod error;
mod host;
mod launch;
mod lexer;
mod library;
mod lint;
mod parse;
mod report;
mod rewrite;
mod runtime;
mod source;
mod spaces;
mod toolchain;

pub use count::{Counts, Operations, SourceLine, Traffic};
pub use error::{Diagnostic, Error, Result};
pub use host::{Host, Memory};
pub use launch::{Access, Buffer, Constant, Grid, Launch, Schedule, Stats, SumOrder};
pub use library::Library;
pub use parse::{Argument, ArgumentKind, Kernel};
pub use report::{Finding, Findings, Kind, Location, Thread};
pub use source::{Source, Strictness};
pub use toolchain::Build;
