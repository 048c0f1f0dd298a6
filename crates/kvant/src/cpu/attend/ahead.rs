//! What is fetched from memory while something else is computed.
//!
//! A core has few outstanding misses of its first-level cache, so lines are asked for one by one, evenly over the
//! arithmetic, in the order in which they stand in memory, and only into the second-level cache.

use crate::cpu::simd::Simd;

const LINE: usize = 64;

/// Where the rows of a plane stand.
#[derive(Clone, Copy)]
pub(super) struct Plane {
    pub start: *const u8,
    /// Bytes from a row to the next.
    pub stride: usize,
    /// Bytes of a row; 0 for no plane.
    pub bytes: usize,
}

impl Plane {
    pub const NONE: Plane = Plane { start: std::ptr::null(), stride: 0, bytes: 0 };
}

/// Equally long runs of bytes at equal distances.
#[derive(Clone, Copy)]
struct Runs {
    start: *const u8,
    stride: usize,
    bytes: usize,
    count: usize,
}

/// The rows of up to three planes that are to be fetched, as runs.
pub(super) struct Wanted {
    runs: [Runs; 3],
    lines: usize,
}

impl Wanted {
    /// `rows` rows from `first` on.
    pub fn new(planes: &[Plane; 3], first: usize, rows: usize) -> Wanted {
        let nothing = Runs { start: std::ptr::null(), stride: 0, bytes: 0, count: 0 };
        let mut wanted = Wanted { runs: [nothing; 3], lines: 0 };
        let planes = planes.iter().filter(|plane| plane.bytes > 0);
        for (to, &Plane { start, stride, bytes }) in wanted.runs.iter_mut().zip(planes) {
            let (count, bytes) = if stride == bytes { (1, rows * bytes) } else { (rows, bytes) };
            *to = Runs { start: start.wrapping_add(first * stride), stride, bytes, count };
            wanted.lines += count * bytes.div_ceil(LINE);
        }
        wanted
    }
}

/// How far fetching has come.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'a> {
    /// The next line, and the end of its run.
    at: *const u8,
    end: *const u8,
    /// Lines that are left in all.
    left: usize,
    /// Where the next run of these begins, and how many follow.
    next: *const u8,
    follow: usize,
    /// Those that come after.
    current: usize,
    wanted: &'a [Runs; 3],
}

impl<'a> Ahead<'a> {
    pub fn new(wanted: &'a Wanted) -> Ahead<'a> {
        let Wanted { runs, lines } = wanted;
        let start = runs[0].start;
        Ahead { at: start, end: start, left: *lines, next: start, follow: runs[0].count, current: 0, wanted: runs }
    }

    /// How many lines are left.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Asks for the next `lines` lines. Calls nothing: that would cost its caller the contents of all its registers.
    ///
    /// # Safety
    /// The level's instructions are enabled.
    #[inline(always)]
    pub unsafe fn fetch<S: Simd>(&mut self, lines: usize) {
        for _ in 0..lines.min(self.left) {
            if self.at >= self.end {
                if self.follow == 0 {
                    // There is a next plane as long as lines are left.
                    self.current = (self.current + 1).min(2);
                    self.follow = self.wanted[self.current].count;
                    self.next = self.wanted[self.current].start;
                }
                let Runs { stride, bytes, .. } = self.wanted[self.current];
                self.at = self.next;
                self.end = self.next.wrapping_add(bytes);
                self.next = self.next.wrapping_add(stride);
                self.follow = self.follow.wrapping_sub(1);
            }
            // SAFETY: passed on to the caller; any address may be asked for.
            unsafe { S::prefetch(self.at) };
            self.at = self.at.wrapping_add(LINE);
            self.left -= 1;
        }
    }
}
