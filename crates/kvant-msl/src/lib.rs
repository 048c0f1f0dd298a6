//! A kvant device that runs the Metal kernels on this machine, through [`msl_host`].
//!
//! It gets exactly the launches that the Apple runtime gets. Launches between two barriers may run in any order on a
//! GPU, so here they run in reverse order.

use std::{
    any::Any,
    collections::HashMap,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kvant::{
    Device, Error, Result,
    gpu::{self, Executor, Launch, LaunchPass, Limits, Order, Replay, Use, Wait},
};
use msl_host::{Access, Buffer, Constant, Counts, Grid, Host, Library, SumOrder};

pub use msl_host::{Build, Schedule};

/// A launch that was counted instead of checked.
#[derive(Clone, Debug)]
pub struct Counted {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Its counts.
    pub counts: Counts,
}

/// The launches of a counting device, in order.
pub type Counter = Arc<Mutex<Vec<Counted>>>;

/// The ways in which launches are run.
#[derive(Clone, Debug)]
pub struct Runs {
    ways: Vec<(Build, Schedule)>,
    seed: u64,
    /// The number of launches of each kind so far, if later launches of a kind run in one way only.
    seen: Option<Arc<Mutex<HashMap<String, usize>>>>,
    /// The counter, if the device counts.
    counter: Option<Counter>,
    /// Prefixes of the names of kernels that the device rejects.
    refused: &'static [&'static str],
    busy_groups: usize,
}

impl Runs {
    /// Four runs per launch: the plain build forward, in reverse and at random, then the checker build. All four must
    /// leave equal bytes, and the checker must report nothing.
    pub fn all(seed: u64) -> Runs {
        let ways = vec![
            (Build::Plain, Schedule::Forward),
            (Build::Plain, Schedule::Reverse),
            (Build::Plain, Schedule::Random(seed)),
            (Build::Checker, Schedule::Random(seed.wrapping_add(1))),
        ];
        Runs { ways, seed, seen: None, counter: None, refused: &[], busy_groups: BUSY_GROUPS }
    }

    /// The first launch of a kind runs in all four ways. Each later launch runs once, in a random order of threads: the
    /// second, fourth, eighth and so on in the checker build, the others in the plain build. A kind is a kernel with
    /// its constants and the class of its grid: the threads of a group, and the number of groups rounded up to a power
    /// of two. Launches of very many threads skip the checker build, which takes ten times as long; their kernels have
    /// small launches elsewhere.
    pub fn first_of_a_kind(seed: u64) -> Runs {
        Runs { seen: Some(Arc::default()), ..Runs::all(seed) }
    }

    /// One run per launch.
    pub fn once(build: Build, schedule: Schedule) -> Runs {
        let ways = vec![(build, schedule)];
        Runs { ways, seed: 0, seen: None, counter: None, refused: &[], busy_groups: BUSY_GROUPS }
    }

    /// Emulates a GPU whose compiler rejects the kernels whose names begin with these prefixes. Their launches fail.
    pub fn refusing(self, refused: &'static [&'static str]) -> Runs {
        Runs { refused, ..self }
    }

    fn refuses(&self, launch: &Launch) -> bool {
        self.refused.iter().any(|start| launch.kernel.starts_with(start))
    }

    /// Counts each launch in msl-host's counting build. Launches are planned for a GPU of `cores` cores.
    pub fn counting(cores: usize) -> (Runs, Counter) {
        let counter = Counter::default();
        let runs = Runs::once(Build::Plain, Schedule::Forward);
        let runs = Runs { counter: Some(counter.clone()), busy_groups: gpu::metal_busy_groups(cores), ..runs };
        (runs, counter)
    }

    /// Forgets the kinds launched so far, so that later runs do not depend on earlier ones.
    pub fn forget(&self) {
        if let Some(seen) = &self.seen {
            seen.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
    }

    /// The builds and schedules for this launch.
    fn ways_of(&self, launch: &Launch) -> Vec<(Build, Schedule)> {
        let Some(seen) = &self.seen else { return self.ways.clone() };
        let groups = launch.grid.groups.map(u32::next_power_of_two);
        let Launch { source, kernel, constants, .. } = launch;
        let kind = format!("{}/{kernel} {constants:?} {groups:?} of {:?}", source.name, launch.grid.threads);
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        let count = seen.entry(kind).or_default();
        *count += 1;
        let at_random = Schedule::Random(self.seed.wrapping_add(*count as u64));
        let small = threads(launch) <= CHECKED_THREADS;
        match *count {
            1 if small => self.ways.clone(),
            1 => self.ways.iter().filter(|(build, _)| *build == Build::Plain).copied().collect(),
            n if small && n.is_power_of_two() => vec![(Build::Checker, at_random)],
            _ => vec![(Build::Plain, at_random)],
        }
    }
}

/// Threadgroups that keep the device busy. Few, so that small cases are split.
const BUSY_GROUPS: usize = 16;

/// Launches with more threads skip the checker build, unless every launch is checked.
const CHECKED_THREADS: u64 = 16 << 10;

fn threads(launch: &Launch) -> u64 {
    launch.grid.groups.iter().chain(&launch.grid.threads).map(|&n| u64::from(n)).product()
}

/// Opens the device.
///
/// # Errors
/// `NoDevice` if msl-host does not run: it requires Linux on x86-64 or 64-bit ARM, and clang.
pub fn device(runs: Runs) -> Result<Device> {
    let host = Host::new()
        .map_err(|error| Error::NoDevice { kind: kvant::DeviceKind::Metal, reason: format!("msl-host: {error}") })?;
    let arithmetic =
        Arithmetic::of_environment().map_err(|reason| Error::NoDevice { kind: kvant::DeviceKind::Metal, reason })?;
    let inner = Inner { host, libraries: HashMap::new(), arithmetic };
    Ok(gpu::metal_device(MslHost { shared: Arc::new(Shared { inner: Mutex::new(inner), runs }) }))
}

struct MslHost {
    shared: Arc<Shared>,
}

/// The lock is held during every transfer and every run, which makes access to memory exclusive.
struct Shared {
    inner: Mutex<Inner>,
    runs: Runs,
}

/// Arithmetic that GPUs may use and the CPU does not by default. Results must stay within their bounds.
#[derive(Clone, Copy, Default)]
struct Arithmetic {
    flush: bool,
    contract: bool,
    sums: SumOrder,
}

impl Arithmetic {
    /// Reads `KVANT_MSL_ARITHMETIC`, a list such as `flush,contract,neighbours`.
    fn of_environment() -> std::result::Result<Arithmetic, String> {
        let mut arithmetic = Arithmetic::default();
        let list = std::env::var("KVANT_MSL_ARITHMETIC").unwrap_or_default();
        for word in list.split(',').filter(|word| !word.is_empty()) {
            match word {
                "flush" => arithmetic.flush = true,
                "contract" => arithmetic.contract = true,
                "lanes" => arithmetic.sums = SumOrder::Lanes,
                "neighbours" => arithmetic.sums = SumOrder::Neighbours,
                _ => {
                    return Err(format!(
                        "KVANT_MSL_ARITHMETIC has `{word}`; it takes flush, contract, lanes and neighbours"
                    ));
                }
            }
        }
        Ok(arithmetic)
    }
}

struct Inner {
    host: Host,
    arithmetic: Arithmetic,
    /// Libraries by the source's address and the build.
    libraries: HashMap<(usize, Build), Arc<Library>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Memory(msl_host::Memory);

impl gpu::Memory for Memory {
    fn host(&self) -> Option<NonNull<u8>> {
        NonNull::new(self.0.as_mut_ptr())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn fault(reason: impl std::fmt::Display) -> Error {
    Error::DeviceFault { device: "msl-host".to_string(), reason: reason.to_string() }
}

fn address(memory: &dyn gpu::Memory) -> *mut u8 {
    memory.host().expect("memory of msl-host has an address").as_ptr()
}

impl Executor for MslHost {
    fn name(&self) -> String {
        match (self.shared.runs.ways.as_slice(), &self.shared.runs.seen) {
            ([(build, schedule)], _) => format!("msl-host, {build:?} build, {schedule:?}"),
            (ways, None) => format!("msl-host, {} runs a launch", ways.len()),
            (ways, Some(_)) => format!("msl-host, {} runs of the first launch of a kind", ways.len()),
        }
    }

    fn limits(&self) -> Limits {
        Limits {
            threads: 1024,
            threadgroup_bytes: 32 << 10,
            busy_groups: self.shared.runs.busy_groups,
            warpgroup_products: false,
            library_products: false,
            clusters: false,
        }
    }

    fn refuses(&self, launch: &Launch) -> bool {
        self.shared.runs.refuses(launch)
    }

    fn allocate(&self, bytes: usize, zeroed: bool) -> Result<Box<dyn gpu::Memory>> {
        let out_of_memory = |_| Error::OutOfMemory { device: "msl-host".to_string(), bytes };
        let inner = self.shared.lock();
        let memory = if zeroed { inner.host.zeroed_memory(bytes) } else { inner.host.memory(bytes) };
        Ok(Box::new(Memory(memory.map_err(out_of_memory)?)))
    }

    fn upload(&self, memory: &dyn gpu::Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        let _guard = self.shared.lock();
        // SAFETY: the caller keeps the range within the allocation; the lock excludes every other access.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address(memory).add(offset), bytes.len()) }
        Ok(())
    }

    fn download(&self, memory: &dyn gpu::Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        let _guard = self.shared.lock();
        // SAFETY: as in `upload`.
        unsafe { std::ptr::copy_nonoverlapping(address(memory).add(offset), out.as_mut_ptr(), out.len()) }
        Ok(())
    }

    fn begin(&self) -> Result<Box<dyn LaunchPass>> {
        Ok(Box::new(Pass { shared: self.shared.clone(), launches: Vec::new() }))
    }

    fn capture(self: Arc<Self>, launches: Vec<Launch>) -> Result<Box<dyn Replay>> {
        Ok(Box::new(Graph { shared: self.shared.clone(), launches }))
    }
}

struct Pass {
    shared: Arc<Shared>,
    launches: Vec<Launch>,
}

impl LaunchPass for Pass {
    fn launch(&mut self, launch: Launch) -> Result<()> {
        self.launches.push(launch);
        Ok(())
    }

    fn commit(self: Box<Self>) -> Result<Box<dyn Wait>> {
        Ok(Box::new(Done(self.shared.run(&self.launches))))
    }
}

/// Work that was done at its commit. `wait` returns its error.
struct Done(Result<()>);

impl Wait for Done {
    fn wait(self: Box<Self>) -> Result<()> {
        self.0
    }

    fn is_done(&self) -> bool {
        true
    }
}

struct Graph {
    shared: Arc<Shared>,
    launches: Vec<Launch>,
}

impl Replay for Graph {
    fn replay(&self) -> Result<Option<Box<dyn Wait>>> {
        Ok(Some(Box::new(Done(self.shared.run(&self.launches)))))
    }
}

impl Shared {
    /// Runs launches in the order that their declared accesses require, and otherwise in reverse.
    fn run(&self, launches: &[Launch]) -> Result<()> {
        let mut inner = self.lock();
        let mut order = Order::new();
        let mut together: Vec<&Launch> = Vec::new();
        for launch in launches {
            if order.needs_barrier(launch) {
                together.drain(..).rev().try_for_each(|launch| inner.run(launch, &self.runs))?;
            }
            together.push(launch);
        }
        together.into_iter().rev().try_for_each(|launch| inner.run(launch, &self.runs))
    }
}

impl Inner {
    /// Runs a launch in each of the given ways, each time from equal memory.
    fn run(&mut self, launch: &Launch, runs: &Runs) -> Result<()> {
        if runs.refuses(launch) {
            return Err(fault(format!("{} is rejected on request", launch.kernel)));
        }
        if let Some(counter) = &runs.counter {
            let (source, library) = (self.source(launch.source), self.library(launch.source, Build::Plain)?);
            let run = self.launch(launch, &library)?;
            let counts = self.host.count(&source, &run).map_err(|error| fault(format!("{launch:?}: {error}")))?;
            let counted = Counted { kernel: launch.kernel, counts };
            counter.lock().unwrap_or_else(PoisonError::into_inner).push(counted);
            return Ok(());
        }
        let ways = runs.ways_of(launch);
        let [first, rest @ ..] = ways.as_slice() else { return Ok(()) };
        let before = if rest.is_empty() { Vec::new() } else { written(launch) };
        self.run_once(launch, *first)?;
        let wanted = if rest.is_empty() { Vec::new() } else { written(launch) };
        for &(build, schedule) in rest {
            restore(launch, &before);
            self.run_once(launch, (build, schedule))?;
            if written(launch) != wanted {
                return Err(fault(format!(
                    "{launch:?}: {build:?} build, {schedule:?}: other bytes than {:?} build, {:?}",
                    first.0, first.1
                )));
            }
        }
        Ok(())
    }

    fn run_once(&mut self, launch: &Launch, (build, schedule): (Build, Schedule)) -> Result<()> {
        let library = self.library(launch.source, build)?;
        let run = self.launch(launch, &library)?;
        library.run(&run, schedule).map(drop).map_err(|error| fault(format!("{launch:?}: {error}")))
    }

    fn launch<'a>(&self, launch: &'a Launch, library: &Library) -> Result<msl_host::Launch<'a>> {
        let grid = Grid::Threadgroups { groups: launch.grid.groups, threads: launch.grid.threads };
        let mut run = msl_host::Launch::new(launch.kernel, grid).sum_order(self.arithmetic.sums);
        if self.arithmetic.flush {
            run = run.flush_subnormals();
        }
        for binding in &launch.bindings {
            let access = match binding.access {
                Use::Read => Access::Read,
                Use::Write => Access::Write,
                Use::ReadWrite => Access::ReadWrite,
            };
            let start = address(binding.memory());
            // SAFETY: the binding is within its memory, which the launch keeps alive; the lock excludes other users.
            let buffer = unsafe { Buffer::raw(start.add(binding.offset), binding.bytes, access) };
            run = run.buffer(binding.index, buffer);
        }
        if let Some((index, bytes)) = &launch.params {
            run = run.bytes(*index, bytes);
        }
        for &(name, value) in &launch.constants {
            let unknown = || fault(format!("{launch:?}: no function constant {name}"));
            run = run.constant(
                library.constant_index(name).ok_or_else(unknown)?,
                match value {
                    gpu::Constant::Bool(value) => Constant::Bool(value),
                    gpu::Constant::UInt(value) => Constant::UInt(value),
                },
            );
        }
        if launch.threadgroup_bytes > 0 {
            run = run.threadgroup_memory(0, launch.threadgroup_bytes as usize);
        }
        Ok(run)
    }

    fn library(&mut self, source: &'static gpu::Source, build: Build) -> Result<Arc<Library>> {
        let key = (std::ptr::from_ref(source) as usize, build);
        if let Some(library) = self.libraries.get(&key) {
            return Ok(library.clone());
        }
        let msl = self.source(source);
        let library = Arc::new(self.host.compile(&msl, build).map_err(|e| fault(format!("{}: {e}", source.name)))?);
        self.libraries.insert(key, library.clone());
        Ok(library)
    }

    fn source(&self, source: &'static gpu::Source) -> msl_host::Source {
        let text = text_of(source.name, || source.text.to_string());
        let mut msl = msl_host::Source::new(source.name, &format!("{text}\n{}", source.assertions())).language(3, 0);
        for (name, text) in source.included_by(&text, &|header| text_of(header.name, header.text)) {
            msl = msl.header(name, &text);
        }
        if self.arithmetic.contract { msl.contract() } else { msl }
    }
}

/// The text of a kernel file: from the folder `KVANT_METAL_DIR` if it is set and has the file, else the built-in text.
/// Authors of kernels use the folder to avoid rebuilding the library, and mutation tests to break a kernel.
fn text_of(name: &str, built_in: impl Fn() -> String) -> String {
    std::env::var_os("KVANT_METAL_DIR")
        .and_then(|dir| std::fs::read_to_string(std::path::Path::new(&dir).join(name)).ok())
        .unwrap_or_else(built_in)
}

/// Larger buffers are neither compared between runs nor restored; they keep the contents of the last run.
const COMPARED: usize = 64 << 20;

/// The buffers that a launch writes and whose contents are compared.
fn compared(launch: &Launch) -> impl Iterator<Item = &gpu::Binding> {
    launch.bindings.iter().filter(|b| b.access.writes() && b.bytes <= COMPARED)
}

/// The contents of these buffers.
fn written(launch: &Launch) -> Vec<Vec<u8>> {
    let bytes = |binding: &gpu::Binding| {
        // SAFETY: the binding is within its memory; the lock excludes writers.
        unsafe { std::slice::from_raw_parts(address(binding.memory()).add(binding.offset), binding.bytes) }.to_vec()
    };
    compared(launch).map(bytes).collect()
}

fn restore(launch: &Launch, before: &[Vec<u8>]) {
    for (binding, bytes) in compared(launch).zip(before) {
        // SAFETY: as in `written`; the lock also excludes readers.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), address(binding.memory()).add(binding.offset), bytes.len());
        }
    }
}

/// The example in the repository's README is a doctest here, because a published crate contains only its own files.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
