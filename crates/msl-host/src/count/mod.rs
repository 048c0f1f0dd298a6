//! The counting build: counts of a launch, in units of a GPU. See [`Host::count`].

mod ir;

use std::fmt;
use std::sync::Arc;

use crate::error::Result;
use crate::host::Host;
use crate::launch::Launch;
use crate::library::Library;
use crate::runtime::RawCounts;
use crate::source::Source;

pub(crate) use ir::{OPS, Op, Site, Table, instrument};

/// Counts of one launch: instructions of SIMD-groups, not of threads, unless a field says otherwise.
///
/// An instruction counts once for the 32 threads of a SIMD-group, and once more for each branch that some of them take.
/// Operations on vectors count per element. The README lists the limits of these counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// Threads, SIMD-groups and threadgroups that ran.
    pub threads: u64,
    #[allow(missing_docs)]
    pub simdgroups: u64,
    #[allow(missing_docs)]
    pub threadgroups: u64,
    /// Threadgroup memory of a threadgroup, in bytes.
    pub threadgroup_bytes: u64,
    /// Accesses of device memory.
    pub device: Traffic,
    /// Accesses of constant memory, except constant references, which Apple's compiler reads before the kernel.
    pub constant: Traffic,
    /// Accesses of threadgroup memory. Their `units` are cycles of 32 banks of 4 bytes.
    pub threadgroup: Traffic,
    /// Accesses of a thread's own arrays that are not in registers.
    pub private: Traffic,
    /// Distinct bytes of device memory that the launch reads, and that it writes, in whole sectors of 32 bytes.
    pub footprint: [u64; 2],
    /// `threadgroup_barrier` and `simdgroup_barrier`.
    pub barriers: u64,
    #[allow(missing_docs)]
    pub simdgroup_barriers: u64,
    /// Shuffles, reductions (with scans) and votes of 32 bits per thread.
    pub shuffles: u64,
    #[allow(missing_docs)]
    pub reductions: u64,
    #[allow(missing_docs)]
    pub votes: u64,
    /// Products of 8 × 8 matrices, and loads and stores of them.
    pub matrix_products: u64,
    #[allow(missing_docs)]
    pub matrix_accesses: u64,
    /// Arithmetic.
    pub operations: Operations,
    /// The mean fraction of a SIMD-group's threads that were active, from 0 to 1.
    pub active: f64,
    /// Places in the source that access device, constant or private memory, most units first.
    pub lines: Vec<SourceLine>,
}

/// Accesses of one kind of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Instructions.
    pub accesses: u64,
    /// Bytes that threads requested.
    pub bytes: u64,
    /// Transactions: sectors of 32 bytes that an instruction touches; for threadgroup memory, cycles of its banks.
    pub units: u64,
    /// Minimum units for these bytes.
    pub ideal: u64,
}

impl Traffic {
    /// Units beyond the minimum; for threadgroup memory, bank conflicts.
    pub fn excess(&self) -> u64 {
        self.units.saturating_sub(self.ideal)
    }
}

/// Arithmetic, by its rate on Apple's GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operations {
    /// Sums, products, fused multiply-adds, comparisons and selections of floats.
    pub float32: u64,
    /// Sums, products, fused multiply-adds, comparisons and selections of halves and bfloats.
    pub float16: u64,
    /// Integers of up to 32 bits.
    pub int: u64,
    /// Products, shifts and bit counts of integers of up to 32 bits.
    pub int_slow: u64,
    /// 64-bit integers and addresses.
    pub int64: u64,
    /// Products of 64-bit integers.
    pub int64_products: u64,
    /// Conversions between integers and floats, and rounding.
    pub conversions: u64,
    /// Powers and logarithms.
    pub exponentials: u64,
    /// Reciprocals, as part of divisions.
    pub reciprocals: u64,
    /// Square roots and their reciprocals.
    pub roots: u64,
    /// Sines and other trigonometric functions.
    pub trigonometric: u64,
    /// Conditional branches.
    pub branches: u64,
}

impl Operations {
    /// The sum of all operations.
    pub fn sum(&self) -> u64 {
        self.float32
            + self.float16
            + self.int
            + self.int_slow
            + self.int64
            + self.int64_products
            + self.conversions
            + self.exponentials
            + self.reciprocals
            + self.roots
            + self.trigonometric
            + self.branches
    }
}

/// A source line that accesses memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLine {
    /// The line, as `file:line`.
    pub line: String,
    /// `device`, `constant`, `threadgroup` or `private`.
    pub space: &'static str,
    #[allow(missing_docs)]
    pub traffic: Traffic,
}

const SPACES: [&str; 4] = ["device", "threadgroup", "constant", "private"];

impl Host {
    /// Runs a launch in the counting build, and counts. The kernel is compiled for the launch's function constants, as
    /// Metal specialises a pipeline.
    ///
    /// # Errors
    /// As [`Host::compile`] and [`Library::run`]; the checks are those of [`crate::Build::Plain`].
    pub fn count(&self, source: &Source, launch: &Launch<'_>) -> Result<Counts> {
        let (library, table) = Library::counting(Arc::clone(self.shared()), source, launch)?;
        library.count(launch, &table)
    }
}

impl Counts {
    pub(crate) fn of(raw: &RawCounts, table: &Table, threads: u64, threadgroups: u64) -> Counts {
        let mut ops: [u64; OPS] = [0; OPS];
        let (mut issued, mut ran) = (0u64, 0u64);
        for (block, each) in table.blocks.iter().enumerate() {
            let n: u64 = each.iter().map(|&n| u64::from(n)).sum();
            issued += n * raw.block_issues[block];
            ran += n * raw.block_lanes[block];
            for (op, total) in ops.iter_mut().enumerate() {
                *total += u64::from(each[op]) * raw.block_issues[block];
            }
        }
        let op = |op: Op| ops[op as usize];
        let mut spaces = [Traffic::default(); 4];
        let mut lines: Vec<SourceLine> = Vec::new();
        let library = Site { file: "simdgroup_load, simdgroup_store".into(), line: 0 };
        for (site, by_space) in table.sites.iter().chain([&library]).zip(&raw.sites) {
            for (space, t) in by_space.iter().enumerate().filter(|(_, t)| t.accesses > 0) {
                let total = &mut spaces[space];
                total.accesses += t.accesses;
                total.bytes += t.bytes;
                total.units += t.units;
                total.ideal += t.ideal;
                let line = format!("{}:{}", site.file, site.line);
                match lines.iter_mut().find(|p| p.line == line && p.space == SPACES[space]) {
                    Some(p) => {
                        p.traffic.accesses += t.accesses;
                        p.traffic.bytes += t.bytes;
                        p.traffic.units += t.units;
                        p.traffic.ideal += t.ideal;
                    }
                    None => lines.push(SourceLine { line, space: SPACES[space], traffic: *t }),
                }
            }
        }
        lines.sort_by_key(|p| std::cmp::Reverse((p.traffic.units.max(p.traffic.accesses), p.line.clone())));
        let [device, threadgroup, constant, private] = spaces;
        let n = &raw.numbers;
        Counts {
            threads,
            simdgroups: n.simdgroups,
            threadgroups,
            threadgroup_bytes: n.threadgroup_bytes,
            device,
            constant,
            threadgroup,
            private,
            footprint: [n.footprint_read, n.footprint_written],
            barriers: n.barriers,
            simdgroup_barriers: n.simdgroup_barriers,
            shuffles: n.shuffles,
            reductions: n.reductions + n.scans + n.quads,
            votes: n.votes,
            matrix_products: n.matrix_products,
            matrix_accesses: n.matrix_loads + n.matrix_stores,
            operations: Operations {
                float32: op(Op::Float32),
                float16: op(Op::Float16),
                int: op(Op::Int),
                int_slow: op(Op::IntSlow),
                int64: op(Op::Int64),
                int64_products: op(Op::Int64Product),
                conversions: op(Op::Convert),
                exponentials: op(Op::Exp),
                reciprocals: op(Op::Reciprocal),
                roots: op(Op::Root),
                trigonometric: op(Op::Trigonometric),
                branches: op(Op::Branch),
            },
            active: if issued == 0 { 1.0 } else { ran as f64 / (issued as f64 * 32.0) },
            lines,
        }
    }

    /// The summed counts of two launches that run one after the other.
    pub fn and(&self, other: &Counts) -> Counts {
        let traffic = |a: Traffic, b: Traffic| Traffic {
            accesses: a.accesses + b.accesses,
            bytes: a.bytes + b.bytes,
            units: a.units + b.units,
            ideal: a.ideal + b.ideal,
        };
        let (a, b) = (&self.operations, &other.operations);
        let (x, y) = (self.operations.sum() as f64, other.operations.sum() as f64);
        let mut lines = self.lines.clone();
        lines.extend(other.lines.iter().cloned());
        Counts {
            threads: self.threads + other.threads,
            simdgroups: self.simdgroups + other.simdgroups,
            threadgroups: self.threadgroups + other.threadgroups,
            threadgroup_bytes: self.threadgroup_bytes.max(other.threadgroup_bytes),
            device: traffic(self.device, other.device),
            constant: traffic(self.constant, other.constant),
            threadgroup: traffic(self.threadgroup, other.threadgroup),
            private: traffic(self.private, other.private),
            footprint: [0, 1].map(|i| self.footprint[i] + other.footprint[i]),
            barriers: self.barriers + other.barriers,
            simdgroup_barriers: self.simdgroup_barriers + other.simdgroup_barriers,
            shuffles: self.shuffles + other.shuffles,
            reductions: self.reductions + other.reductions,
            votes: self.votes + other.votes,
            matrix_products: self.matrix_products + other.matrix_products,
            matrix_accesses: self.matrix_accesses + other.matrix_accesses,
            operations: Operations {
                float32: a.float32 + b.float32,
                float16: a.float16 + b.float16,
                int: a.int + b.int,
                int_slow: a.int_slow + b.int_slow,
                int64: a.int64 + b.int64,
                int64_products: a.int64_products + b.int64_products,
                conversions: a.conversions + b.conversions,
                exponentials: a.exponentials + b.exponentials,
                reciprocals: a.reciprocals + b.reciprocals,
                roots: a.roots + b.roots,
                trigonometric: a.trigonometric + b.trigonometric,
                branches: a.branches + b.branches,
            },
            active: if x + y == 0.0 { 1.0 } else { (self.active * x + other.active * y) / (x + y) },
            lines,
        }
    }

    /// All rows of the report, as names and numbers.
    pub fn rows(&self) -> Vec<(&'static str, u64)> {
        let o = &self.operations;
        vec![
            ("threadgroups", self.threadgroups),
            ("simdgroups", self.simdgroups),
            ("threads", self.threads),
            ("threadgroup memory, bytes", self.threadgroup_bytes),
            ("device bytes read, distinct", self.footprint[0]),
            ("device bytes written, distinct", self.footprint[1]),
            ("device accesses", self.device.accesses),
            ("device bytes asked for", self.device.bytes),
            ("device transactions", self.device.units),
            ("constant accesses", self.constant.accesses),
            ("constant transactions", self.constant.units),
            ("threadgroup accesses", self.threadgroup.accesses),
            ("threadgroup bank cycles", self.threadgroup.units),
            ("threadgroup bank conflicts", self.threadgroup.excess()),
            ("private accesses", self.private.accesses),
            ("barriers", self.barriers),
            ("simdgroup barriers", self.simdgroup_barriers),
            ("shuffles", self.shuffles),
            ("reductions", self.reductions),
            ("votes", self.votes),
            ("matrix products", self.matrix_products),
            ("matrix loads and stores", self.matrix_accesses),
            ("float32", o.float32),
            ("float16", o.float16),
            ("int", o.int),
            ("int, slow", o.int_slow),
            ("int64", o.int64),
            ("int64 products", o.int64_products),
            ("conversions", o.conversions),
            ("exponentials", o.exponentials),
            ("reciprocals", o.reciprocals),
            ("roots", o.roots),
            ("trigonometric", o.trigonometric),
            ("branches", o.branches),
        ]
    }
}

impl fmt::Display for Counts {
    /// One row per count: of the launch, and per SIMD-group.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:32} {:>14} {:>14}", "", "launch", "per simdgroup")?;
        for (name, n) in self.rows() {
            writeln!(f, "{name:32} {n:>14} {:>14.1}", n as f64 / self.simdgroups.max(1) as f64)?;
        }
        write!(f, "{:32} {:>13.1}%", "threads that take part", self.active * 100.0)
    }
}
