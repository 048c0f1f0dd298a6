//! The findings of a run, and their text.

use std::fmt;
use std::path::Path;

use crate::launch::Schedule;
use crate::runtime::RawFinding;
use crate::toolchain::Build;

/// The kinds of findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// An access outside of a buffer, of threadgroup memory or of a local array.
    OutOfBounds,
    /// A write to a buffer that the launch declares read-only.
    UndeclaredAccess,
    /// A read of threadgroup memory, or of a buffer declared write-only, before any write.
    UninitialisedRead,
    /// Two threads access the same byte, at least one of them writes, and no barrier orders them.
    Race,
    /// Threads wait at different barriers or SIMD-group functions, or some have returned.
    Divergence,
    /// The kernel did not end in time.
    TimeLimit,
    /// The locals exceed a fiber's stack.
    StackOverflow,
    /// An integer division by zero.
    Arithmetic,
    /// An access that violates its type's alignment.
    Misaligned,
    /// More threadgroup memory than Metal allows.
    Limit,
}

const KINDS: [Kind; 10] = [
    Kind::OutOfBounds,
    Kind::UndeclaredAccess,
    Kind::UninitialisedRead,
    Kind::Race,
    Kind::Divergence,
    Kind::TimeLimit,
    Kind::StackOverflow,
    Kind::Arithmetic,
    Kind::Misaligned,
    Kind::Limit,
];

/// A position in a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// The source or header.
    pub file: String,
    /// The line, counted from 1.
    pub line: u32,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// A thread of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    /// `[[threadgroup_position_in_grid]]`
    pub threadgroup: [u32; 3],
    /// `[[thread_index_in_threadgroup]]`
    pub index: u32,
    /// `[[simdgroup_index_in_threadgroup]]`
    pub simdgroup: u32,
    /// `[[thread_index_in_simdgroup]]`
    pub lane: u32,
}

/// One error of a run. Repetitions of an error at one position are one finding.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The kind of error.
    pub kind: Kind,
    /// The description.
    pub message: String,
    /// The position in the source.
    pub location: Option<Location>,
    /// For a race: the position of the other access.
    pub other: Option<Location>,
    /// The first thread that caused it.
    pub thread: Option<Thread>,
    /// How often it happened; for a race, the number of bytes.
    pub count: u64,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.location {
            Some(location) => write!(f, "{location}: {}", self.message)?,
            None => write!(f, "{}", self.message)?,
        }
        if let Some(other) = &self.other {
            write!(f, " (there: {other})")?;
        }
        if let Some(t) = self.thread {
            let [x, y, z] = t.threadgroup;
            write!(
                f,
                "\n      by thread {} of threadgroup ({x},{y},{z}), simdgroup {} lane {}",
                t.index, t.simdgroup, t.lane
            )?;
        }
        if self.count > 1 {
            write!(f, "; {} times", self.count)?;
        }
        Ok(())
    }
}

/// All findings of one run, with the information to reproduce it.
#[derive(Clone, Debug)]
pub struct Findings {
    /// The kernel.
    pub kernel: String,
    /// The build.
    pub build: Build,
    /// The schedule, with its seed.
    pub schedule: Schedule,
    /// The findings; never empty.
    pub list: Vec<Finding>,
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {} ({:?} build, schedule {:?}):", self.kernel, self.build, self.schedule)?;
        for finding in &self.list {
            write!(f, "\n    {finding}")?;
        }
        Ok(())
    }
}

/// Maps offsets in a compiled library to lines of its source.
pub(crate) struct Lines<'a> {
    loader: Option<addr2line::Loader>,
    include: &'a Path,
}

impl<'a> Lines<'a> {
    pub fn new(library: &Path, include: &'a Path) -> Lines<'a> {
        // A library without a line table still gives findings, but without locations.
        Lines { loader: addr2line::Loader::new(library).ok(), include }
    }

    /// The innermost line of the user's source at `pc`: inlined calls of the Metal library are skipped. An instruction
    /// without a line has the line of the last instruction before it that has one.
    fn locate(&self, pc: u64) -> Option<Location> {
        (0..64).find_map(|back| self.locate_exactly(pc.checked_sub(back)?))
    }

    fn locate_exactly(&self, pc: u64) -> Option<Location> {
        let mut frames = self.loader.as_ref()?.find_frames(pc).ok()?;
        while let Ok(Some(frame)) = frames.next() {
            let Some((file, line)) = frame.location.and_then(|l| Some((l.file?, l.line?))) else { continue };
            if line > 0 && !Path::new(file).starts_with(self.include) && !file.ends_with("entry points") {
                // The compiler read standard input in the cache directory, and prefixes names with it.
                let short = self.include.parent().and_then(|cache| Path::new(file).strip_prefix(cache).ok());
                return Some(Location { file: short.unwrap_or(Path::new(file)).display().to_string(), line });
            }
        }
        None
    }

    pub fn finding(&self, raw: &RawFinding, source: &str) -> Finding {
        let kind = KINDS.get(raw.kind as usize).copied().unwrap_or(Kind::OutOfBounds);
        let mut location = (raw.pc != 0).then(|| self.locate(raw.pc)).flatten();
        let mut other = (raw.other_pc != 0).then(|| self.locate(raw.other_pc)).flatten();
        if kind == Kind::TimeLimit {
            location = location.or(other.take());
            other = None;
        }
        if location.is_none() && raw.line > 0 {
            location = Some(Location { file: source.into(), line: raw.line });
        }
        Finding {
            kind,
            message: raw.message(),
            location,
            other,
            thread: (raw.has_thread != 0).then_some(Thread {
                threadgroup: raw.group,
                index: raw.thread,
                simdgroup: raw.simdgroup,
                lane: raw.lane,
            }),
            count: raw.count,
        }
    }
}
