//! Tests of the simulator: compiling, running, the errors that it must find, and its command.

// Kernels run only on these systems.
#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

mod command;
mod compiling;
mod counting;
mod leniency;
mod oracle;
mod running;
mod support;
