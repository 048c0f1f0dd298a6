//! The simulator: what compiles, what runs, what it must find, and its command.

// Kernels run nowhere else.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod command;
mod compiling;
mod counting;
mod leniency;
mod oracle;
mod running;
mod support;
