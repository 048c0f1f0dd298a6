//! Tests kernels of MLX and ggml, which Apple's compiler accepts and Apple's GPUs run. msl-host must compile them, run
//! them under all schedules with the right results, and report nothing. It must notice broken copies of them.
//!
//! `tools/foreign_kernels.py` downloads them; without a network the tests report that they skip. With
//! `KVANT_TEST_SCOPE=all` every case runs, otherwise the cases marked `chosen`; with `MSL_HOST_CASE=TEXT`, cases whose
//! name contains the text.

// Kernels run only on these systems.
#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
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
mod mutants;

use case::{Case, MUTANT_WAYS, WAYS};

fn every_case() -> Vec<Case> {
    [
        ggml_rows::cases(),
        ggml_products::cases(),
        ggml_attention::cases(),
        mlx_rows::cases(),
        mlx_products::cases(),
        mlx_attention::cases(),
    ]
    .concat()
}

fn everything() -> bool {
    std::env::var("KVANT_TEST_SCOPE").is_ok_and(|scope| scope == "all")
}

fn cases() -> Vec<Case> {
    let only = std::env::var("MSL_HOST_CASE").ok();
    let wanted = |case: &Case| only.as_ref().map_or(everything() || case.chosen, |name| case.name.contains(name));
    every_case().into_iter().filter(wanted).collect()
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

#[test]
fn broken_kernels_are_noticed() {
    if corpus::corpus().is_none() {
        return;
    }
    let all = every_case();
    let only = std::env::var("MSL_HOST_CASE").ok();
    let (mut noticed, mut survived) = (0, Vec::new());
    for target in mutants::TARGETS {
        let wanted = only.as_ref().map_or(everything() || target.chosen, |name| target.case.contains(name));
        if !wanted {
            continue;
        }
        let case = all.iter().find(|c| c.name.contains(target.case)).unwrap_or_else(|| panic!("{}", target.case));
        for (number, mutant) in target.mutants(case).into_iter().enumerate() {
            if !everything() && only.is_none() && number >= 2 {
                continue;
            }
            match case.check(Some(&mutant.edit), &MUTANT_WAYS) {
                Err(reason) => {
                    let reason = reason.lines().next().unwrap_or_default().to_string();
                    eprintln!("noticed {}: {} ({reason})", case.name, mutant.what);
                    noticed += 1;
                }
                Ok(()) if target.harmless.iter().any(|h| mutant.what.contains(h)) => {
                    eprintln!("harmless {}: {}", case.name, mutant.what);
                }
                Ok(()) => survived.push(format!("{}: {}", case.name, mutant.what)),
            }
        }
    }
    eprintln!("{noticed} mutants noticed, {} survived", survived.len());
    assert!(survived.is_empty(), "mutants that no case notices:\n{}", survived.join("\n"));
}
