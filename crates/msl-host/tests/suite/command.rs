//! The command `msl-host`.

use std::path::PathBuf;
use std::process::Command;

use crate::support::emulator;

const TWICE: &str = "#include <metal_stdlib>
kernel void twice(device const uint *x [[buffer(0)]], device uint *y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i] = 2 * x[i];
}
kernel void shifted(device const uint *x [[buffer(0)]], device uint *y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i] = x[i + 1];
}
";

/// Exit code, standard output, standard error.
fn msl_host(arguments: &[&str]) -> (i32, String, String) {
    let mut words = emulator();
    words.push(env!("CARGO_BIN_EXE_msl-host").into());
    let done = Command::new(&words[0]).args(&words[1..]).args(arguments).output().expect("starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (done.status.code().unwrap_or(-1), text(&done.stdout), text(&done.stderr))
}

fn file(name: &str, text: &str) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, text).expect("writes");
    path.display().to_string()
}

#[test]
fn check_lists_kernels_or_errors() {
    let good = file("twice.metal", TWICE);
    let (code, out, err) = msl_host(&["check", &good]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(out, "twice\n  buffer(0) x\n  buffer(1) y\nshifted\n  buffer(0) x\n  buffer(1) y\n");
    assert_eq!(msl_host(&["check", "--only", "twice", &good]).1, "twice\n  buffer(0) x\n  buffer(1) y\n");
    let bad = file("bad.metal", "kernel void k(device float *o [[buffer(0)]]) {\n  o[0] = nothing;\n}\n");
    let (code, _, err) = msl_host(&["check", &bad]);
    assert!(code == 1 && err.contains("bad.metal:2: use of undeclared identifier 'nothing'"), "{err}");
    let loose = file("loose.metal", "kernel void k(device float *o) {\n  int unused; o[0] = 1;\n}\n");
    assert_eq!(msl_host(&["check", &loose]).0, 1);
    assert_eq!(msl_host(&["check", "--level", "trusted", &loose]).0, 0);
}

#[test]
fn run_prints_results_or_findings() {
    let source = file("run.metal", TWICE);
    let kernel =
        |name: &str| msl_host(&["run", "--threads", "3", "--in", "0=uint:3,4,5", "--out", "1=uint:3", &source, name]);
    assert_eq!(kernel("twice"), (0, "buffer(1): 6 8 10\n".into(), String::new()));
    let (code, _, err) = kernel("shifted");
    assert!(code == 1 && err.contains("run.metal:6: out-of-bounds read"), "{err}");
}

#[test]
fn count_prints_counts_and_places() {
    let source = file("count.metal", TWICE);
    let numbers = (0..32).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
    let input = format!("0=uint:{numbers}");
    let arguments = ["count", "--groups", "1", "--in", &input, "--out", "1=uint:32", "--lines", "1", &source, "twice"];
    let (code, out, err) = msl_host(&arguments);
    assert_eq!((code, err.as_str()), (0, ""));
    let row = |name: &str| out.lines().find_map(|l| l.strip_prefix(name)?.split_whitespace().next()?.parse().ok());
    assert_eq!([row("device accesses"), row("device transactions"), row("simdgroups")], [Some(2), Some(8), Some(1)]);
    assert!(out.contains("count.metal:3: device 2 accesses, 256 bytes, 8 units"), "{out}");
}

#[test]
fn wrong_commands_say_why() {
    for (arguments, reason) in [
        (&["frob"][..], "no command frob"),
        (&["check"], "expected one file"),
        (&["check", "--level"], "--level needs a value"),
        (&["run", "--groups", "1,2,3,4", "a", "b"], "--groups 1,2,3,4"),
        (&["run", "--in", "0=float:x", "a", "b"], "--in 0=float:x"),
    ] {
        let (code, _, err) = msl_host(arguments);
        assert!(code == 2 && err.contains(reason), "{arguments:?}: {err}");
    }
    let (code, _, err) = msl_host(&["check", "/nothing/here.metal"]);
    assert!(code == 1 && err.contains("/nothing/here.metal"), "{err}");
    assert!(msl_host(&["--help"]).1.contains("msl-host check"));
}
