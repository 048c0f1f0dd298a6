//! A model of Apple's GPUs: the least time that the counts of a launch allow. It ignores latencies and registers, and
//! assumes that a cache reads each byte once. Nobody has compared it with a device.

use super::Counts;

/// A chip, as far as the model knows it.
///
/// Rates of a core are those that <https://github.com/philipturner/metal-benchmarks> (dc2adc6) measured on Apple 7 and
/// 8. Cores, clocks and bandwidths are those that it and Apple publish.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chip {
    /// Such as `M1`.
    pub name: &'static str,
    /// GPU cores.
    pub cores: u32,
    /// Clock, in GHz.
    pub ghz: f64,
    /// Bandwidth of the memory, in GB/s.
    pub bandwidth: f64,
}

impl Chip {
    /// The smallest and the largest of two generations.
    pub const ALL: [Chip; 4] = [
        Chip { name: "M1", cores: 8, ghz: 1.278, bandwidth: 68.0 },
        Chip { name: "M1 Max", cores: 32, ghz: 1.296, bandwidth: 400.0 },
        Chip { name: "M2", cores: 10, ghz: 1.398, bandwidth: 100.0 },
        Chip { name: "M2 Max", cores: 38, ghz: 1.398, bandwidth: 400.0 },
    ];

    /// The chip of a name.
    pub fn named(name: &str) -> Option<Chip> {
        Chip::ALL.into_iter().find(|chip| chip.name.eq_ignore_ascii_case(name))
    }
}

/// What takes the longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Bound {
    /// Distinct bytes through the memory's bandwidth.
    Memory,
    /// Transactions through a core's cache: 64 bytes a cycle.
    Cache,
    /// Threadgroup memory: 32 banks a cycle.
    Threadgroup,
    /// The four schedulers of a core: an instruction of a SIMD-group each, a cycle.
    Issue,
    /// The pipeline of slow integers, conversions and functions: 32 threads a cycle.
    Complex,
    /// SIMD-group functions: 256 bytes a cycle.
    Shuffle,
    /// The matrix pipeline.
    Matrix,
}

/// The least time of a launch on a chip.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// In microseconds, if the launch fills all cores evenly.
    pub microseconds: f64,
    /// What it is the time of.
    pub bound: Bound,
}

/// Cycles of a core for each SIMD-group's instruction. 128 threads add or multiply floats or integers in a cycle, so
/// that a SIMD-group of 32 takes a quarter of it.
mod cycles {
    pub const SIMPLE: f64 = 0.25;
    pub const QUARTER: f64 = 1.0;
    pub const INT64: f64 = 1.0;
    pub const INT64_PRODUCT: f64 = 4.0;
    pub const RECIPROCAL: f64 = 1.5;
    pub const ROOT: f64 = 2.0;
    pub const TRIGONOMETRIC: f64 = 3.5;
    /// A reduction is five shuffles and five additions.
    pub const SHUFFLE: f64 = 0.5;
    pub const REDUCTION: f64 = 5.0;
    /// 512 products of numbers, at 102 a cycle.
    pub const MATRIX: f64 = 5.0;
    pub const SECTOR: f64 = 0.5;
}

impl Counts {
    /// The least time on a chip, and what bounds it.
    pub fn estimate(&self, chip: &Chip) -> Estimate {
        let o = &self.operations;
        let n = |count: u64| count as f64;
        let simple = n(o.float32 + o.float16 + o.int + o.branches);
        let exchanged = n(self.shuffles + self.votes) + cycles::REDUCTION * n(self.reductions);
        let complex = cycles::QUARTER * n(o.int_slow + o.conversions + o.exponentials)
            + cycles::RECIPROCAL * n(o.reciprocals)
            + cycles::ROOT * n(o.roots)
            + cycles::TRIGONOMETRIC * n(o.trigonometric);
        let wide = cycles::INT64 * n(o.int64) + cycles::INT64_PRODUCT * n(o.int64_products);
        let accesses = n(self.device.accesses + self.threadgroup.accesses + self.private.accesses);
        let barriers = n(self.barriers + self.simdgroup_barriers);
        let issued = simple
            + exchanged
            + cycles::REDUCTION * n(self.reductions)
            + n(o.int_slow + o.conversions + o.exponentials + o.reciprocals + o.roots + o.trigonometric)
            + accesses
            + barriers;
        let core = |cycles: f64| cycles / f64::from(chip.cores) / chip.ghz / 1000.0;
        let times = [
            (n(self.footprint[0] + self.footprint[1]) / chip.bandwidth / 1000.0, Bound::Memory),
            (core(cycles::SECTOR * n(self.device.units)), Bound::Cache),
            (core(n(self.threadgroup.units)), Bound::Threadgroup),
            (core(cycles::SIMPLE * issued + wide + cycles::MATRIX * n(self.matrix_products)), Bound::Issue),
            (core(complex), Bound::Complex),
            (core(cycles::SHUFFLE * exchanged), Bound::Shuffle),
            (core(cycles::MATRIX * n(self.matrix_products)), Bound::Matrix),
        ];
        let most = times.into_iter().fold((0.0, Bound::Memory), |a, b| if b.0 > a.0 { b } else { a });
        Estimate { microseconds: most.0, bound: most.1 }
    }
}
