//! Helpers of the tests.

use std::sync::OnceLock;

use msl_host::{Build, Error, Finding, Grid, Host, Kind, Launch, Library, Schedule, Source};

pub const SCHEDULES: [Schedule; 4] = [Schedule::Forward, Schedule::Reverse, Schedule::Random(1), Schedule::Random(2)];

/// The host shared by a test binary. Without clang it panics with installation instructions.
pub fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| Host::new().unwrap_or_else(|e| panic!("{e}")))
}

/// Cargo's runner for programs of this target, if this machine cannot run them itself.
pub fn emulator() -> Vec<String> {
    let runner = std::env::var("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER").unwrap_or_default();
    if cfg!(target_arch = "aarch64") { runner.split_whitespace().map(String::from).collect() } else { Vec::new() }
}

/// A kernel's text after the common includes. Line 1 is the text's own first line.
pub fn source(text: &str) -> Source {
    Source::new(
        "test.metal",
        &format!("#include <metal_stdlib>\nusing namespace metal;\n#line 1 \"test.metal\"\n{text}"),
    )
}

pub fn compile(text: &str, build: Build) -> Library {
    host().compile(&source(text), build).unwrap_or_else(|e| panic!("{e}"))
}

pub fn groups(groups: u32, threads: u32) -> Grid {
    Grid::Threadgroups { groups: [groups, 1, 1], threads: [threads, 1, 1] }
}

pub fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn shorts(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn to_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

pub fn to_words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

pub fn to_shorts(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
}

/// Runs a launch that must have no findings.
pub fn run(library: &Library, launch: &Launch<'_>, schedule: Schedule) {
    if let Err(e) = library.run(launch, schedule) {
        panic!("{e}");
    }
}

/// Runs a launch that must have findings, and returns them.
pub fn findings(library: &Library, launch: &Launch<'_>, schedule: Schedule) -> Vec<Finding> {
    match library.run(launch, schedule) {
        Err(Error::Findings(findings)) => findings.list.clone(),
        other => panic!("expected findings, got {other:?}"),
    }
}

/// The lines of the findings of a kind.
pub fn lines(list: &[Finding], kind: Kind) -> Vec<u32> {
    let mut lines: Vec<u32> =
        list.iter().filter(|f| f.kind == kind).map(|f| f.location.as_ref().map_or(0, |l| l.line)).collect();
    lines.sort_unstable();
    lines.dedup();
    lines
}
