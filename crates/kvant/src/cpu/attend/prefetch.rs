//! Prefetches the next keys or values while others are computed.
//!
//! A core allows few outstanding misses of its first-level cache. So lines are prefetched one by one, spread evenly
//! over the arithmetic, in the order of their addresses, and only into the second-level cache.

use crate::cpu::simd::Simd;

const LINE: usize = 64;

/// The address and layout of a plane's rows.
#[derive(Clone, Copy)]
pub(super) struct Plane {
    pub start: *const u8,
    /// Bytes between rows; 0 if all rows share one.
    pub stride: usize,
    /// Bytes of a row; 0 if the side lacks this plane.
    pub bytes: usize,
}

impl Plane {
    pub const NONE: Plane = Plane { start: std::ptr::null(), stride: 0, bytes: 0 };
}

/// Maximum planes of a side.
pub(super) const PLANES: usize = 4;

/// Equally long runs of bytes at equal distances.
#[derive(Clone, Copy)]
struct LineRuns {
    start: *const u8,
    stride: usize,
    bytes: usize,
    count: usize,
}

/// The rows of a side's planes to prefetch, as runs of bytes.
pub(super) struct PrefetchRuns {
    runs: [LineRuns; PLANES],
    lines: usize,
}

impl PrefetchRuns {
    /// Prefetches `rows` rows from `first` on, counted from `bytes` bytes after the start of each plane.
    pub fn new(planes: &[Plane; PLANES], bytes: usize, first: usize, rows: usize) -> PrefetchRuns {
        let nothing = LineRuns { start: std::ptr::null(), stride: 0, bytes: 0, count: 0 };
        let mut wanted = PrefetchRuns { runs: [nothing; PLANES], lines: 0 };
        let planes = planes.iter().filter(|plane| plane.bytes > 0);
        let from = bytes;
        for (to, &Plane { start, stride, bytes }) in wanted.runs.iter_mut().zip(planes) {
            let start = start.wrapping_add(from);
            let (count, bytes) = match stride {
                0 => (rows.min(1), bytes),
                _ if stride == bytes => (1, rows * bytes),
                _ => (rows, bytes),
            };
            *to = LineRuns { start: start.wrapping_add(first * stride), stride, bytes, count };
            wanted.lines += count * bytes.div_ceil(LINE);
        }
        wanted
    }
}

/// The progress of prefetching.
#[derive(Clone, Copy)]
pub(super) struct Prefetcher<'a> {
    /// The next line, and the end of its run.
    at: *const u8,
    end: *const u8,
    /// Remaining lines of all planes.
    left: usize,
    /// The start of the next run of this plane, and the number of runs from there.
    next: *const u8,
    follow: usize,
    /// The current plane, and all of them.
    current: usize,
    wanted: &'a [LineRuns; PLANES],
}

impl<'a> Prefetcher<'a> {
    pub fn new(wanted: &'a PrefetchRuns) -> Prefetcher<'a> {
        let PrefetchRuns { runs, lines } = wanted;
        let start = runs[0].start;
        Prefetcher { at: start, end: start, left: *lines, next: start, follow: runs[0].count, current: 0, wanted: runs }
    }

    /// The number of remaining lines.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Prefetches the next `lines` lines. Calls no function: a call would spill all registers of the caller.
    ///
    /// # Safety
    /// The level's instructions are enabled.
    #[inline(always)]
    pub unsafe fn fetch<S: Simd>(&mut self, lines: usize) {
        for _ in 0..lines.min(self.left) {
            if self.at >= self.end {
                if self.follow == 0 {
                    // While lines remain, there is a next plane.
                    self.current = (self.current + 1).min(PLANES - 1);
                    self.follow = self.wanted[self.current].count;
                    self.next = self.wanted[self.current].start;
                }
                let LineRuns { stride, bytes, .. } = self.wanted[self.current];
                self.at = self.next;
                self.end = self.next.wrapping_add(bytes);
                self.next = self.next.wrapping_add(stride);
                self.follow = self.follow.wrapping_sub(1);
            }
            // SAFETY: passed on to the caller; any address may be prefetched.
            unsafe { S::prefetch(self.at) };
            self.at = self.at.wrapping_add(LINE);
            self.left -= 1;
        }
    }
}
