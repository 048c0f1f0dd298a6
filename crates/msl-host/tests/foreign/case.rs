//! A case: launches of foreign kernels, and their expected results.

use std::collections::HashMap;
use std::sync::OnceLock;

use msl_host::{Buffer, Build, Constant, Grid, Host, Kind, Launch, Library, Schedule};

use crate::corpus::Unit;
use crate::data::Type;

/// A dispatch. Buffers are indices of the case's memory.
#[derive(Clone, Debug)]
pub struct Dispatch {
    /// The index of the case's unit that has the kernel.
    pub unit: usize,
    pub kernel: String,
    pub grid: Grid,
    /// (index, memory, whether the kernel writes)
    pub buffers: Vec<(u32, usize, bool)>,
    pub threadgroup: Vec<(u32, usize)>,
    pub constants: Vec<(u32, Constant)>,
}

impl Dispatch {
    pub fn new(kernel: &str, groups: [usize; 3], threads: [usize; 3]) -> Dispatch {
        let grid = Grid::Threadgroups { groups: groups.map(|n| n as u32), threads: threads.map(|n| n as u32) };
        Dispatch { unit: 0, kernel: kernel.into(), grid, buffers: vec![], threadgroup: vec![], constants: vec![] }
    }

    /// Selects the case's unit that has the kernel.
    pub fn of(self, unit: usize) -> Dispatch {
        Dispatch { unit, ..self }
    }

    /// Binds memory that the kernel reads, at the indices from 0.
    pub fn reads(mut self, memory: &[usize]) -> Dispatch {
        self.buffers.extend(memory.iter().enumerate().map(|(i, m)| (i as u32, *m, false)));
        self
    }

    pub fn read(mut self, index: u32, memory: usize) -> Dispatch {
        self.buffers.push((index, memory, false));
        self
    }

    pub fn write(mut self, index: u32, memory: usize) -> Dispatch {
        self.buffers.push((index, memory, true));
        self
    }

    pub fn threadgroup(mut self, index: u32, bytes: usize) -> Dispatch {
        self.threadgroup.push((index, bytes.next_multiple_of(16)));
        self
    }

    pub fn constant(mut self, index: u32, value: Constant) -> Dispatch {
        self.constants.push((index, value));
        self
    }
}

/// Launches with their memory, the memory that holds the result, and the result.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub units: Vec<Unit>,
    pub memory: Vec<Vec<u8>>,
    pub dispatches: Vec<Dispatch>,
    pub result: usize,
    pub kind: Type,
    pub expected: Vec<f64>,
    /// The tolerance of a result, absolute and relative.
    pub tolerance: f64,
    /// Whether the case runs by default.
    pub chosen: bool,
    /// Whether the kernel relies on lanes that run in lockstep. By the rules of the specification it has races.
    pub lockstep: bool,
    /// The error of the kernel that the checker reports. Other builds run the kernel unless the error is a race.
    pub fault: Option<Kind>,
}

/// The ways for kernels that rely on lockstep.
const LOCKSTEP_WAYS: [(Build, Schedule); 3] =
    [(Build::Checker, Schedule::Forward), (Build::Checker, Schedule::Reverse), (Build::Checker, Schedule::Random(1))];

/// The builds and schedules of every case.
pub const WAYS: [(Build, Schedule); 4] = [
    (Build::Plain, Schedule::Forward),
    (Build::Plain, Schedule::Reverse),
    (Build::Plain, Schedule::Random(1)),
    (Build::Checker, Schedule::Random(2)),
];

/// The ways in descending order of sensitivity.
pub const MUTANT_WAYS: [(Build, Schedule); 3] = [WAYS[3], WAYS[0], WAYS[1]];

pub fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| Host::new().unwrap_or_else(|e| panic!("{e}")))
}

impl Case {
    /// Runs the case in each way; returns the first error.
    pub fn check(&self, edit: Option<&(String, String)>, ways: &[(Build, Schedule)]) -> Result<(), String> {
        let mut libraries = HashMap::new();
        let ways = if self.lockstep { &LOCKSTEP_WAYS } else { ways };
        for &(build, schedule) in ways {
            if self.fault == Some(Kind::Race) && build == Build::Plain {
                continue;
            }
            if let std::collections::hash_map::Entry::Vacant(entry) = libraries.entry(build) {
                let misaligned = self.fault == Some(Kind::Misaligned) && build == Build::Plain;
                let compiled = self.units.iter().map(|unit| {
                    let source = unit.source(edit);
                    host().compile(&if misaligned { source.unaligned() } else { source }, build)
                });
                let compiled: Result<Vec<Library>, _> = compiled.collect();
                entry.insert(compiled.map_err(|e| format!("does not compile: {e}"))?);
            }
            let outcome = self.run(&libraries[&build], schedule);
            if let (Some(fault), Build::Checker) = (self.fault, build) {
                let found = outcome.as_ref().err().and_then(|e| e.findings()).map(|f| f.list.iter());
                if found.is_some_and(|mut list| list.all(|f| f.kind == fault)) {
                    continue;
                }
                return Err(format!("expected findings of {fault:?}, got {outcome:?}"));
            }
            let memory = outcome.map_err(|e| format!("{build:?} {schedule:?}: {e}"))?;
            self.compare(&memory[self.result]).map_err(|e| format!("{build:?} {schedule:?}: {e}"))?;
        }
        Ok(())
    }

    fn run(&self, libraries: &[Library], schedule: Schedule) -> Result<Vec<Vec<u8>>, msl_host::Error> {
        let mut memory = self.memory.clone();
        for d in &self.dispatches {
            let mut launch = Launch::new(&d.kernel, d.grid);
            for &(index, number, writes) in &d.buffers {
                let access = if writes { msl_host::Access::ReadWrite } else { msl_host::Access::Read };
                let (pointer, len) = (memory[number].as_mut_ptr(), memory[number].len());
                // SAFETY: the vector outlives the run, and nobody else uses it.
                launch = launch.buffer(index, unsafe { Buffer::raw(pointer, len, access) });
            }
            launch = launch.reads_end_at_barriers();
            launch = if self.lockstep { launch.lockstep().same_values() } else { launch };
            launch = d.threadgroup.iter().fold(launch, |l, &(index, bytes)| l.threadgroup_memory(index, bytes));
            launch = d.constants.iter().fold(launch, |l, &(index, value)| l.constant(index, value));
            libraries[d.unit].run(&launch, schedule)?;
        }
        Ok(memory)
    }

    fn compare(&self, bytes: &[u8]) -> Result<(), String> {
        let found = self.kind.decode(bytes);
        if found.len() != self.expected.len() {
            return Err(format!("{} results, expected {}", found.len(), self.expected.len()));
        }
        let near = |(a, b): (&f64, &f64)| a == b || (a - b).abs() <= self.tolerance * b.abs().max(1.0);
        let wrong: Vec<usize> = (0..found.len()).filter(|&i| !near((&found[i], &self.expected[i]))).collect();
        match wrong.first() {
            None => Ok(()),
            Some(&i) => Err(format!(
                "{} of {} results are wrong, the first at {i}: {}, expected {}",
                wrong.len(),
                found.len(),
                found[i],
                self.expected[i]
            )),
        }
    }
}
