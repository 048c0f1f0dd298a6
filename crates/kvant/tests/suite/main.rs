//! The tests of the library: one binary, so that its helpers compile once and its tests share the cores.
//!
//! `KVANT_TEST_SCOPE` (`quick`, `default` or `all`) selects how much runs; see [`common::Scope`].

mod arguments;
mod attend_routes;
mod codec;
mod common;
mod conformance;
mod cuda_compiles;
mod from_mlx_native;
mod generic_routes;
mod golden;
mod groups;
mod hazards;
mod pages;
mod partial_attention;
mod reference;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod refused_kernels;
