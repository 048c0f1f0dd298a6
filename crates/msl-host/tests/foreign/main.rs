//! Kernels of MLX and ggml, which Apple's compiler accepts and Apple's GPUs run: msl-host compiles them, runs them under
//! all schedules with the right results, and reports nothing. Broken copies of them are noticed.
//!
//! `tools/foreign_kernels.py` downloads them; without a network the tests say that they skip. `KVANT_TEST_SCOPE=all`
//! runs every case, otherwise those that are marked `chosen` run, and `MSL_HOST_CASE=TEXT` those whose name has the text.

// Kernels run nowhere else.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
#![allow(clippy::expect_used)]

mod attention;
mod blocks;
mod case;
mod corpus;
mod data;
mod ggml_attention;
mod ggml_products;
mod ggml_rows;
mod mlx_attention;
mod mlx_products;
mod mlx_rows;

use case::{Case, WAYS};

fn cases() -> Vec<Case> {
    let all = [
        ggml_rows::cases(),
        ggml_products::cases(),
        ggml_attention::cases(),
        mlx_rows::cases(),
        mlx_products::cases(),
        mlx_attention::cases(),
    ]
    .concat();
    let everything = std::env::var("KVANT_TEST_SCOPE").is_ok_and(|scope| scope == "all");
    let only = std::env::var("MSL_HOST_CASE").ok();
    all.into_iter()
        .filter(|case| only.as_ref().map_or(everything || case.chosen, |name| case.name.contains(name)))
        .collect()
}

#[test]
fn foreign_kernels_are_right_under_every_schedule() {
    if corpus::corpus().is_none() {
        return;
    }
    let mut failed = Vec::new();
    for case in cases() {
        let started = std::time::Instant::now();
        let outcome = case.check(None, &WAYS);
        let verdict = if outcome.is_ok() { "right" } else { "WRONG" };
        eprintln!("{verdict} {} ({:.1} s)", case.name, started.elapsed().as_secs_f64());
        failed.extend(outcome.err().map(|e| format!("{}: {e}", case.name)));
    }
    assert!(failed.is_empty(), "{} cases failed:\n{}", failed.len(), failed.join("\n"));
}
