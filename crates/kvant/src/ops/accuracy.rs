//! The accuracy table in the documentation of [`ops`](super) agrees with the conditions of the kernels.

use crate::{cpu, cuda};

/// The prefixes of the table's rows in `ops/mod.rs`.
const ROW: &str = "//! | ";

/// Rows about backends come from `accuracy.rs` next to each `route.rs`, which inserts the thresholds of the routes.
#[test]
fn rows_about_kernels_are_those_of_the_routes() {
    let ([cpu_attend, cpu_linear], [cuda_attend, cuda_linear, cuda_delta]) =
        (cpu::accuracy_rows(), cuda::accuracy_rows());
    let want = [cpu_attend, cuda_attend, cpu_linear, cuda_linear, cuda_delta].concat();
    let text = include_str!("mod.rs");
    let case = |row: &str| row.split(" | ").nth(1).is_some_and(|case| case.contains("CPU at") || case.contains("CUDA"));
    let rows = text.lines().filter(|line| line.starts_with(ROW) && case(line));
    let rows: Vec<&str> = rows.map(|line| line.trim_start_matches("//! ")).collect();
    assert_eq!(rows, want, "the table in ops/mod.rs must have these rows:\n//! {}", want.join("\n//! "));
}
