//! Counts memory accesses and instructions of kvant's Metal kernels and of MLX's and ggml's on equal shapes, and prints
//! tables.
//!
//! `cargo run -p kvant-msl --example yardstick -- [decode|prompt|linear|sample ...] [--lines]`. The counts come from
//! msl-host's counting build. MLX's and ggml's kernels are downloaded on first use, to `target/foreign-kernels`.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod attention;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[allow(dead_code, unused_imports, clippy::expect_used, reason = "shared with a test that uses more of it")]
#[path = "../../../msl-host/tests/foreign/case.rs"]
mod case;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[allow(dead_code, clippy::expect_used, reason = "as above")]
#[path = "../../../msl-host/tests/foreign/corpus.rs"]
mod corpus;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[allow(dead_code, reason = "as above")]
#[path = "../../../msl-host/tests/foreign/data.rs"]
mod data;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod foreign;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod ours;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod products;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod table;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let asked = |name: &str| arguments.iter().any(|a| a == name);
    let any = arguments.iter().any(|a| !a.starts_with("--"));
    if corpus::corpus().is_none() {
        return Err("the kernels of MLX and ggml are not available".into());
    }
    let lines = asked("--lines");
    if !any || asked("decode") {
        attention::decode(lines)?;
    }
    if !any || asked("prompt") {
        attention::prompts(lines)?;
    }
    if !any || asked("linear") {
        products::linear(lines)?;
    }
    if !any || asked("sample") {
        products::sample(lines)?;
    }
    Ok(())
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn main() {
    eprintln!("msl-host runs on x86-64 Linux");
}
