//! A compiled source: its kernels, and their launches.

use std::ffi::{CString, c_void};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::count::{Counts, Table};
use crate::error::{Error, Result};
use crate::host::Shared;
use crate::launch::{Buffer, Constant, Grid, Launch, Schedule, Stats};
use crate::lexer::Tokens;
use crate::lint;
use crate::parse::{self, Argument, ArgumentKind, FunctionConstant, Kernel};
use crate::report::{Findings, Lines};
use crate::rewrite::{Pass, rewrite};
use crate::runtime::{CONSTANT, RawCounts, RawExtent, RawLaunch, Region, WRITE};
use crate::source::{Source, Strictness};
use crate::toolchain::Build;

/// Metal's limits.
const MAX_THREADS: u64 = 1024;
const MAX_THREADGROUP_BYTES: usize = 32 << 10;

/// A compiled source.
pub struct Library {
    shared: Arc<Shared>,
    name: String,
    path: PathBuf,
    build: Build,
    kernels: Vec<Kernel>,
    constants: Vec<FunctionConstant>,
    loaded: libloading::Library,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("name", &self.name)
            .field("build", &self.build)
            .field("kernels", &self.kernels)
            .finish_non_exhaustive()
    }
}

impl Library {
    pub(crate) fn compile(shared: Arc<Shared>, source: &Source, build: Build) -> Result<Library> {
        let name = source.name.clone();
        let refused = |diagnostics| Error::Compile { name: name.clone(), diagnostics };
        let text = shared.toolchain.preprocess(source)?;
        let tokens = Tokens::new(&text);
        let mut unit = parse::parse(&tokens).map_err(|d| refused(vec![d]))?;
        parse::instantiate_all(&tokens, &mut unit, &source.instantiations).map_err(|d| refused(vec![d]))?;
        if !source.only.is_empty() {
            parse::select(&tokens, &mut unit, &source.only).map_err(|d| refused(vec![d]))?;
        }
        if source.strictness == Strictness::Strict && !unit.unnumbered.is_empty() {
            return Err(refused(unit.unnumbered));
        }
        let rewritten = |pass| rewrite(&tokens, &unit, pass).map_err(|d| refused(vec![d]));
        if source.strictness != Strictness::Trusted {
            let unqualified = lint::missing_qualifiers(&tokens, &unit);
            if !unqualified.is_empty() {
                return Err(refused(unqualified));
            }
            shared.toolchain.check_types(source, &rewritten(Pass::Typed)?)?;
        }
        let rewritten = rewritten(Pass::Run)?;
        let path = shared.toolchain.compile(source, &rewritten, build, &shared.runtime_path)?;
        // SAFETY: the library was just compiled from a source whose only static initialisers are constants.
        let loaded =
            unsafe { libloading::Library::new(&path) }.map_err(|source| Error::Load { path: path.clone(), source })?;
        Ok(Library { shared, name, path, build, kernels: unit.kernels, constants: unit.constants, loaded })
    }

    /// The counting build of a launch's kernel, specialised for its function constants.
    pub(crate) fn counting(shared: Arc<Shared>, source: &Source, launch: &Launch<'_>) -> Result<(Library, Table)> {
        let name = source.name.clone();
        let refused = |diagnostics| Error::Compile { name: name.clone(), diagnostics };
        let text = shared.toolchain.preprocess(source)?;
        let tokens = Tokens::new(&text);
        let mut unit = parse::parse(&tokens).map_err(|d| refused(vec![d]))?;
        parse::instantiate_all(&tokens, &mut unit, &source.instantiations).map_err(|d| refused(vec![d]))?;
        parse::select(&tokens, &mut unit, &[launch.kernel.to_string()]).map_err(|d| refused(vec![d]))?;
        let rewritten = rewrite(&tokens, &unit, Pass::Run).map_err(|d| refused(vec![d]))?;
        let mut values = String::new();
        for constant in &unit.constants {
            let value = launch.constants.iter().find(|v| v.0 == constant.index).map(|v| v.1);
            let name = &constant.name;
            let literal = value.map_or("0".into(), Constant::literal);
            values.push_str(&format!("#define __msl_value_{name} {literal}\n"));
            values.push_str(&format!("#define __msl_given_{name} {}\n", value.is_some()));
        }
        let text = format!("{values}{rewritten}");
        let (path, table) = shared.toolchain.compile_counting(source, &text, &shared.runtime_path)?;
        // SAFETY: as in `compile`.
        let loaded =
            unsafe { libloading::Library::new(&path) }.map_err(|source| Error::Load { path: path.clone(), source })?;
        let library = Library {
            shared,
            name,
            path,
            build: Build::Plain,
            kernels: unit.kernels,
            constants: unit.constants,
            loaded,
        };
        Ok((library, table))
    }

    pub(crate) fn count(&self, launch: &Launch<'_>, table: &Table) -> Result<Counts> {
        let mut counts = RawCounts::new(table.blocks.len(), table.sites.len());
        let stats = self.run_once(launch, Schedule::Forward, Some(&mut counts))?;
        let groups = grid(launch.grid).map_or(0, |(groups, ..)| groups.iter().map(|&n| u64::from(n)).product());
        Ok(Counts::of(&counts, table, stats.threads, groups))
    }

    /// The index of the function constant `name`.
    pub fn constant_index(&self, name: &str) -> Option<u32> {
        self.constants.iter().find(|c| c.name == name).map(|c| c.index)
    }

    /// The kernels that can be launched: those that are not templates, and every instantiation.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// The build that the library was compiled for.
    pub fn build(&self) -> Build {
        self.build
    }

    /// Runs a launch to its end.
    ///
    /// The kernel is native code in this process. Guard pages catch accesses outside of its buffers; the checker build
    /// detects them before they happen. In a plain build, an access far beyond the guards may corrupt the process.
    ///
    /// # Errors
    /// [`Error::Launch`] if the launch does not fit the kernel. [`Error::Findings`] if the run had errors; outputs
    /// are copied back in this case too.
    pub fn run(&self, launch: &Launch<'_>, schedule: Schedule) -> Result<Stats> {
        self.run_once(launch, schedule, None)
    }

    fn run_once(&self, launch: &Launch<'_>, schedule: Schedule, counts: Option<&mut RawCounts>) -> Result<Stats> {
        let refused = |reason: String| Error::Launch { kernel: launch.kernel.into(), reason };
        let number = self.kernels.iter().position(|k| k.name == launch.kernel).ok_or_else(|| {
            let known: Vec<&str> = self.kernels.iter().map(|k| k.name.as_str()).collect();
            refused(format!("{} has no such kernel; it has {}", self.name, known.join(", ")))
        })?;
        let constants = self.constants(launch).map_err(refused)?;
        self.check_arguments(launch, &self.kernels[number]).map_err(refused)?;
        if launch.lockstep && self.build == Build::Plain {
            return Err(refused("lanes run in lockstep only in the checker build".into()));
        }
        let (groups, threads, total) = grid(launch.grid).map_err(refused)?;
        let threadgroup_bytes = threadgroup_bytes(launch).map_err(refused)?;
        let mut regions = Regions::bind(&self.shared, &launch.buffers)?;
        let specialised = counts.is_some();
        for extent in &mut regions.extents {
            let constant = |a: &Argument| a.constant && a.kind == ArgumentKind::Buffer(extent.index);
            if self.kernels[number].arguments.iter().any(constant) {
                extent.access |= CONSTANT;
            }
        }
        let (code, seed) = match schedule {
            Schedule::Forward => (0, 0),
            Schedule::Reverse => (1, 0),
            Schedule::Random(seed) => (2, seed),
        };
        let name = CString::new(launch.kernel).unwrap_or_default();
        let raw = RawLaunch {
            entry: self.symbol(&format!("msl_entry_{number}"))?,
            kernel: name.as_ptr(),
            extents: regions.extents.as_ptr(),
            extent_count: regions.extents.len() as u64,
            threadgroup_bytes,
            groups,
            threads,
            total,
            schedule: code,
            allow_divergence: u32::from(launch.allow_divergence),
            flush: u32::from(launch.flush),
            sum_order: launch.sum_order as u32,
            lockstep: u32::from(launch.lockstep),
            same_values: u32::from(launch.same_values),
            reads_end: u32::from(launch.reads_end),
            seed,
            counts: counts.map_or(std::ptr::null_mut(), |c| &raw mut *c.numbers),
            time_limit_ms: u32::try_from(launch.time_limit.as_millis()).unwrap_or(u32::MAX).max(1),
        };
        if !specialised {
            self.set_constants(&constants)?;
        }
        let mut list = Vec::new();
        let mut lines = None;
        // SAFETY: the entry belongs to this library, the regions live until `regions` is dropped, and the launch
        // borrows their contents for its accesses.
        let stats = unsafe {
            self.shared.runtime.dispatch(&raw, |finding| {
                let lines = lines.get_or_insert_with(|| Lines::new(&self.path, self.shared.toolchain.include()));
                list.push(lines.finding(finding, &self.name));
            })
        }?;
        regions.copy_back();
        if list.is_empty() {
            return Ok(Stats { threads: stats.threads, switches: stats.switches, rendezvous: stats.rendezvous });
        }
        Err(Error::Findings(Box::new(Findings { kernel: launch.kernel.into(), build: self.build, schedule, list })))
    }

    fn symbol(&self, name: &str) -> Result<*const c_void> {
        // SAFETY: only the address is used; its users know the type that rewrite.rs gave it.
        let symbol = unsafe { self.loaded.get::<*const c_void>(name.as_bytes()) };
        symbol.map(|s| *s).map_err(|source| Error::Load { path: self.path.clone(), source })
    }

    /// The launch's constants as (number in this library, bytes, length).
    fn constants(&self, launch: &Launch<'_>) -> std::result::Result<Vec<(u32, [u8; 8], usize)>, String> {
        let mut values = Vec::new();
        for &(index, value) in &launch.constants {
            let (kind, bytes, len) = value.parts();
            let Some(number) = self.constants.iter().position(|c| c.index == index) else {
                return Err(format!("the source has no function constant {index}"));
            };
            let constant = &self.constants[number];
            if canonical(&constant.kind) != Some(kind) {
                return Err(format!(
                    "function constant {index} (`{}`) is a {}, got a {kind}",
                    constant.name, constant.kind
                ));
            }
            values.push((number as u32, bytes, len));
        }
        Ok(values)
    }

    /// Sets the function constants, which are thread-local, for the calling thread, which will run the kernel.
    fn set_constants(&self, values: &[(u32, [u8; 8], usize)]) -> Result<()> {
        if self.constants.is_empty() {
            return Ok(());
        }
        let (forget, constant, derive) =
            (self.symbol("msl_forget_constants")?, self.symbol("msl_constant")?, self.symbol("msl_derive_constants")?);
        // SAFETY: rewrite.rs gives the three functions these types; `msl_constant` returns the address of a variable
        // whose type, and therefore length, was checked.
        unsafe {
            std::mem::transmute::<*const c_void, extern "C" fn()>(forget)();
            let address = std::mem::transmute::<*const c_void, extern "C" fn(u32) -> *mut u8>(constant);
            for (number, bytes, len) in values {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), address(*number), *len);
            }
            std::mem::transmute::<*const c_void, extern "C" fn()>(derive)();
        }
        Ok(())
    }

    fn check_arguments(&self, launch: &Launch<'_>, kernel: &Kernel) -> std::result::Result<(), String> {
        let bound = |index: u32| launch.buffers.iter().any(|b| b.0 == index);
        let roomy = |index: u32| launch.threadgroup_bytes.iter().any(|b| b.0 == index && b.1 > 0);
        for argument in &kernel.arguments {
            // A parameter that depends on a false or undefined function constant does not exist.
            let value = argument.only_if.as_ref().and_then(|name| self.constants.iter().find(|c| &c.name == name));
            let value = value.and_then(|c| launch.constants.iter().find(|v| v.0 == c.index));
            let absent = argument.only_if.is_some() && value.is_none_or(|v| v.1.parts().1 == [0; 8]);
            let (there, place) = match argument.kind {
                ArgumentKind::Buffer(index) => (bound(index), format!("buffer({index})")),
                ArgumentKind::Threadgroup(index) => (roomy(index), format!("threadgroup({index})")),
                ArgumentKind::Builtin(_) => continue,
            };
            if !there && !absent {
                return Err(format!("{place} (`{}`) is not bound", argument.name));
            }
        }
        let has = |kind: &ArgumentKind| kernel.arguments.iter().any(|a| &a.kind == kind);
        for (n, (index, buffer)) in launch.buffers.iter().enumerate() {
            if !has(&ArgumentKind::Buffer(*index)) {
                return Err(format!("buffer({index}) is bound, but the kernel has no such parameter"));
            }
            if launch.buffers[..n].iter().any(|b| b.0 == *index) {
                return Err(format!("buffer({index}) is bound twice"));
            }
            let rest = buffer.len.checked_sub(buffer.offset);
            if rest.is_none_or(|rest| buffer.extent.is_some_and(|extent| extent > rest)) {
                return Err(format!(
                    "buffer({index}): offset {} and extent {:?} reach past its {} bytes",
                    buffer.offset, buffer.extent, buffer.len
                ));
            }
        }
        for (index, _) in &launch.threadgroup_bytes {
            if !has(&ArgumentKind::Threadgroup(*index)) {
                return Err(format!("threadgroup({index}) is given memory, but the kernel has no such parameter"));
            }
        }
        Ok(())
    }
}

/// The canonical MSL name of a scalar type with several names.
fn canonical(kind: &str) -> Option<&'static str> {
    Some(match kind {
        "bool" => "bool",
        "char" | "int8_t" => "char",
        "uchar" | "uint8_t" => "uchar",
        "short" | "int16_t" => "short",
        "ushort" | "uint16_t" => "ushort",
        "int" | "int32_t" => "int",
        "uint" | "uint32_t" | "unsigned" => "uint",
        "long" | "int64_t" => "long",
        "ulong" | "uint64_t" | "size_t" => "ulong",
        "half" => "half",
        "float" => "float",
        _ => return None,
    })
}

type Extents3 = ([u32; 3], [u32; 3], [u32; 3]);

/// The number of threadgroups, the threads of each, the threads of the grid.
fn grid(grid: Grid) -> std::result::Result<Extents3, String> {
    let (groups, threads, total) = match grid {
        Grid::Threadgroups { groups, threads } => {
            (groups, threads, [0, 1, 2].map(|i| u64::from(groups[i]) * u64::from(threads[i])))
        }
        Grid::Threads { total, threads } => {
            ([0, 1, 2].map(|i| total[i].div_ceil(threads[i].max(1))), threads, total.map(u64::from))
        }
    };
    if groups.contains(&0) || threads.contains(&0) {
        return Err(format!("an empty grid: {groups:?} threadgroups of {threads:?} threads"));
    }
    let product = |v: [u32; 3]| v.iter().try_fold(1u64, |p, &n| p.checked_mul(u64::from(n)));
    match product(threads) {
        Some(n) if n <= MAX_THREADS => {}
        _ => return Err(format!("a threadgroup of {threads:?} threads; Metal allows {MAX_THREADS}")),
    }
    if product(groups).is_none_or(|n| n > u64::from(u32::MAX)) || total.iter().any(|&n| n > u64::from(u32::MAX)) {
        return Err(format!("a grid of {groups:?} threadgroups of {threads:?} threads does not fit 32 bits"));
    }
    Ok((groups, threads, total.map(|n| n as u32)))
}

fn threadgroup_bytes(launch: &Launch<'_>) -> std::result::Result<[u64; 31], String> {
    let mut lengths = [0; 31];
    let mut total = 0usize;
    for &(index, bytes) in &launch.threadgroup_bytes {
        if bytes % 16 != 0 {
            return Err(format!("threadgroup({index}): Metal requires a multiple of 16 bytes, got {bytes}"));
        }
        total = total.saturating_add(bytes);
        // The index is below 31: the kernel has a parameter with it.
        lengths[index as usize] = bytes as u64;
    }
    if total > MAX_THREADGROUP_BYTES {
        return Err(format!("{total} bytes of threadgroup memory; Metal allows {MAX_THREADGROUP_BYTES}"));
    }
    Ok(lengths)
}

/// The bindings of one run: regions in place, and copies of other memory.
struct Regions<'a> {
    shared: &'a Shared,
    extents: Vec<RawExtent>,
    copies: Vec<Copy>,
}

/// Bytes of the caller, copied between guard pages. Overlapping bindings share one copy.
struct Copy {
    start: usize,
    end: usize,
    region: *mut Region,
    written: bool,
}

impl<'a> Regions<'a> {
    fn bind(shared: &'a Shared, buffers: &[(u32, Buffer<'_>)]) -> Result<Regions<'a>> {
        let mut regions = Regions { shared, extents: Vec::new(), copies: Vec::new() };
        let mut spans: Vec<(usize, usize, bool)> = Vec::new();
        for (_, b) in buffers {
            let address = b.pointer as usize;
            if b.len > 0 && shared.find(address, b.len).is_none() {
                spans.push((address, address.saturating_add(b.len), b.access.bits() & WRITE != 0));
            }
        }
        spans.sort_unstable();
        for (start, end, written) in spans {
            match regions.copies.last_mut() {
                Some(last) if start < last.end => {
                    last.end = last.end.max(end);
                    last.written |= written;
                }
                _ => regions.copies.push(Copy { start, end, region: std::ptr::null_mut(), written }),
            }
        }
        for copy in &mut regions.copies {
            let len = copy.end - copy.start;
            copy.region = shared.runtime.allocate(len, false)?;
            // SAFETY: the region is fresh and has `len` bytes; the source is covered by bindings, whose memory is
            // valid.
            unsafe { std::ptr::copy_nonoverlapping(copy.start as *const u8, shared.runtime.base(copy.region), len) }
        }
        for (index, b) in buffers {
            let address = b.pointer as usize;
            let (region, at) = match shared.find(address, b.len) {
                Some(found) if b.len > 0 => found,
                _ => match regions.copies.iter().find(|c| c.start <= address && address < c.end && b.len > 0) {
                    Some(copy) => (copy.region, address - copy.start),
                    None => {
                        // Nothing to copy, but the binding needs its own address.
                        let region = shared.runtime.allocate(0, false)?;
                        regions.copies.push(Copy { start: 0, end: 0, region, written: false });
                        (region, 0)
                    }
                },
            };
            let bytes = b.extent.unwrap_or(b.len - b.offset);
            regions.extents.push(RawExtent {
                region,
                offset: (at + b.offset) as u64,
                bytes: bytes as u64,
                access: b.access.bits(),
                index: *index,
            });
        }
        Ok(regions)
    }

    fn copy_back(&self) {
        for copy in self.copies.iter().filter(|c| c.written) {
            // SAFETY: as for the first copy; a binding with write access guarantees that the memory may be written.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    self.shared.runtime.base(copy.region),
                    copy.start as *mut u8,
                    copy.end - copy.start,
                )
            }
        }
    }
}

impl Drop for Regions<'_> {
    fn drop(&mut self) {
        for copy in &self.copies {
            if !copy.region.is_null() {
                // SAFETY: the region is this run's own.
                unsafe { self.shared.runtime.free(copy.region) }
            }
        }
    }
}
