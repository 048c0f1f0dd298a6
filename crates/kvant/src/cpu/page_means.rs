//! Writes keys and values to layers with centred codecs: page by page, around the mean of each.
//!
//! The tokens of a step are sorted into runs of one page each. A run that fills its page, or opens the first page of a
//! sequence, makes the page's mean of its own vectors. A run that opens another page makes it of the vectors that the
//! previous page stores, which the same step may have written: such runs follow when the others are done. Within each
//! of the two parts, threads share the runs. A run takes one KV head of one side after the other: its vectors stay in
//! the first- or second-level cache while their mean is made and they are encoded around it.
//!
//! On a batch-invariant device every run that opens a page uses the mean of the previous page, and the first page's
//! mean is zero, so that means do not depend on the chunks of a prompt.

use std::{cell::RefCell, ops::Range};

use super::{
    Cpu, convert,
    planes::{PlaneRows, Tokens},
    scratch,
    simd::{Simd, SimdKernel},
    turboquant::dot,
};
use crate::{DType, KvLayer, codec::MEAN_LEVELS};

/// Elements of keys (and as many of values) that make a task worth a thread.
const TASK: usize = 8 * 1024;

/// The keys and values of a step's tokens.
///
/// # Safety
/// Of all functions: the level's instructions are enabled, and the token and head exist.
#[allow(clippy::missing_safety_doc, reason = "said once, above")]
pub(super) trait TokenVectors: Sync {
    /// Whether to load a vector twice is faster than to keep it.
    const LOADS_TWICE: bool = false;
    /// Floats of a token that all its vectors need.
    fn shared_len(&self) -> usize;
    /// Computes these.
    unsafe fn share<S: Simd>(&self, token: usize, shared: &mut [f32]);
    /// The vector of a side: 0 for keys, 1 for values.
    unsafe fn load<S: Simd>(&self, side: usize, token: usize, head: usize, shared: &[f32], to: &mut [f32]);
    /// Writes the vector to a dense row; `row` is scratch memory.
    unsafe fn store<S: Simd>(
        &self,
        (side, token, head): (usize, usize, usize),
        shared: &[f32],
        row: &mut [f32],
        to: *mut u8,
        dtype: DType,
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            self.load::<S>(side, token, head, shared, row);
            convert::store_row::<S>(row, to, dtype);
        }
    }
}

/// Writes the keys and values of a step to a paged layer.
pub(super) fn write<V: TokenVectors>(cpu: &Cpu, layer: &KvLayer, tokens: &Tokens, sides: [PlaneRows; 2], vectors: &V) {
    let Some(page_tokens) = layer.pages().map(|pages| pages.page_tokens) else { return };
    let mut plan = PLAN.take();
    plan.make(layer, tokens, page_tokens, cpu.batch_invariant);
    let work = PageWork { layer, page_tokens, sides, vectors, order: &plan.order };
    work.write_runs(cpu, &plan.first, true);
    // Only a step with gaps opens two pages of a sequence without filling the first.
    let independent = plan.second.is_sorted_by(|a, b| a.sequence < b.sequence);
    work.write_runs(cpu, &plan.second, independent);
    PLAN.set(plan);
}

thread_local! {
    /// Kept between calls: after warm-up a step allocates nothing.
    static PLAN: RefCell<PageRuns> = RefCell::default();
}

/// The runs of a step.
#[derive(Default)]
struct PageRuns {
    /// (sequence, position, token), sorted, without tokens that are not stored.
    order: Vec<(u32, u32, u32)>,
    /// Runs that need no other run.
    first: Vec<PageRun>,
    /// Runs that need the previous page, in the order of sequences and positions.
    second: Vec<PageRun>,
}

/// Tokens of a step that are stored in one page.
#[derive(Clone, Debug)]
struct PageRun {
    /// In the plan's order.
    tokens: Range<usize>,
    sequence: usize,
    /// The page's distance from the start of the pool's memory.
    bytes: usize,
    mean: MeanOfRun,
}

/// The mean of a run's page.
#[derive(Clone, Copy, Debug)]
enum MeanOfRun {
    /// That of the run's vectors.
    Own,
    /// That of the vectors in the page `bytes` bytes from the start of the pool's memory.
    Previous { bytes: usize },
    /// Zero.
    Zero,
    /// The one that the page has.
    Kept,
}

impl PageRuns {
    fn make(&mut self, layer: &KvLayer, tokens: &Tokens, page_tokens: usize, batch_invariant: bool) {
        let PageRuns { order, first, second } = self;
        order.clear();
        first.clear();
        second.clear();
        let places = tokens.sequence.iter().zip(tokens.positions).zip(0..);
        let stored = places.filter(|&(_, token)| tokens.place(layer, token as usize).is_some());
        order.extend(stored.map(|((&sequence, &position), token)| (sequence, position, token)));
        if !order.is_sorted() {
            order.sort_unstable();
        }
        // Of tokens with the same place the last one wins.
        order.dedup_by(|next, kept| {
            let same = (next.0, next.1) == (kept.0, kept.1);
            if same {
                *kept = *next;
            }
            same
        });
        let mut next = 0;
        let page = |&(sequence, position, _): &(u32, u32, u32)| (sequence as usize, position as usize / page_tokens);
        for run in order.chunk_by(|a, b| page(a) == page(b)) {
            let tokens_of_run = next..next + run.len();
            next = tokens_of_run.end;
            let (sequence, index) = page(&run[0]);
            let place = |index: usize| layer.place(tokens.table, sequence, 0, index * page_tokens);
            let Some(to) = place(index) else { continue };
            let previous = index.checked_sub(1).and_then(place);
            let mean = match previous {
                _ if !(run[0].1 as usize).is_multiple_of(page_tokens) => MeanOfRun::Kept,
                Some(from) if run.len() < page_tokens || batch_invariant => MeanOfRun::Previous { bytes: from.bytes },
                None if batch_invariant => MeanOfRun::Zero,
                _ => MeanOfRun::Own,
            };
            let list = if matches!(mean, MeanOfRun::Previous { .. }) { &mut *second } else { &mut *first };
            list.push(PageRun { tokens: tokens_of_run, sequence, bytes: to.bytes, mean });
        }
    }
}

/// What the tasks share.
struct PageWork<'a, V> {
    layer: &'a KvLayer,
    page_tokens: usize,
    sides: [PlaneRows; 2],
    vectors: &'a V,
    order: &'a [(u32, u32, u32)],
}

impl<V: TokenVectors> PageWork<'_, V> {
    /// Writes runs, in order and on one thread unless they are `independent`.
    fn write_runs(&self, cpu: &Cpu, runs: &[PageRun], independent: bool) {
        if runs.is_empty() {
            return;
        }
        let spec = self.layer.spec();
        let tokens: usize = runs.iter().map(|run| run.tokens.len()).sum();
        let least = (TASK / (spec.kv_heads * spec.head_dim)).max(1);
        let per_task = if independent { (least * runs.len()).div_ceil(tokens).max(1) } else { runs.len() };
        cpu.threads.run(runs.len().div_ceil(per_task), |task| {
            let runs = &runs[task * per_task..((task + 1) * per_task).min(runs.len())];
            cpu.level.dispatch(PageRunsTask { work: self, runs });
        });
    }

    /// # Safety
    /// The level's instructions are enabled; nobody else uses the run's rows, nor the mean of its page.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, run: &PageRun) {
        let (spec, tokens) = (self.layer.spec(), &self.order[run.tokens.clone()]);
        let shared_len = self.vectors.shared_len();
        let shared = &mut *scratch::take(tokens.len() * shared_len);
        // SAFETY: passed on to the caller; the tokens and heads exist.
        unsafe {
            for (i, &(.., token)) in tokens.iter().enumerate() {
                self.vectors.share::<S>(token as usize, &mut shared[i * shared_len..][..shared_len]);
            }
            for (side, planes) in self.sides.iter().enumerate() {
                for head in 0..spec.kv_heads {
                    let vectors = HeadOfRun { work: self, tokens, shared, side, head };
                    vectors.write::<S>(planes, run);
                }
            }
        }
    }
}

struct PageRunsTask<'a, 'b, V> {
    work: &'a PageWork<'b, V>,
    runs: &'a [PageRun],
}

impl<V: TokenVectors> SimdKernel for PageRunsTask<'_, '_, V> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        for run in self.runs {
            // SAFETY: `dispatch` enables the instructions; each run is in one task, and each page in one run.
            unsafe { self.work.write::<S>(run) }
        }
    }
}

/// The vectors of a run of one side and KV head.
struct HeadOfRun<'a, 'b, V> {
    work: &'a PageWork<'b, V>,
    tokens: &'a [(u32, u32, u32)],
    shared: &'a [f32],
    side: usize,
    head: usize,
}

impl<V: TokenVectors> HeadOfRun<'_, '_, V> {
    /// # Safety
    /// As for [`PageWork::write`]; `planes` are those of the side in the first page.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, memory: &PlaneRows, run: &PageRun) {
        let planes = &memory.shifted(run.bytes);
        let PageWork { layer, page_tokens, vectors, .. } = *self.work;
        let dim = layer.spec().head_dim;
        let row = |i: usize| self.head * page_tokens + self.tokens[i].1 as usize % page_tokens;
        // SAFETY: passed on to the caller.
        unsafe {
            if let Some(dtype) = planes.dense() {
                let x = &mut *scratch::take(dim);
                for (i, &(.., token)) in self.tokens.iter().enumerate() {
                    let place = (self.side, token as usize, self.head);
                    vectors.store::<S>(place, self.shared_of(i), x, planes.dense_row(row(i), dtype), dtype);
                }
                return;
            }
            let Some((quantiser, stored)) = planes.centred(row(0)) else {
                let x = &mut *scratch::take(dim);
                for i in 0..self.tokens.len() {
                    self.load::<S>(i, x);
                    planes.store::<S>(row(i), x, &[]);
                }
                return;
            };
            let mean = &mut *scratch::take(dim);
            // Whether vectors are kept between their mean and their encoding.
            let kept = matches!(run.mean, MeanOfRun::Own) && !V::LOADS_TWICE;
            let rows = &mut *scratch::take(if kept { self.tokens.len() * dim } else { dim });
            let place = |i: usize| if kept { i * dim..(i + 1) * dim } else { 0..dim };
            match run.mean {
                MeanOfRun::Own => {
                    let mut sum = SumOfVectors::new(mean);
                    let mut squares = [S::zero(); 2];
                    for i in 0..self.tokens.len() {
                        let x = &mut rows[place(i)];
                        self.load::<S>(i, x);
                        sum.add_unchecked::<S>(x, &mut squares);
                    }
                    // A vector that must be left out shows in the sum of all squares.
                    if !S::sum(S::add(squares[0], squares[1])).is_finite() {
                        sum = SumOfVectors::new(sum.sum);
                        for i in 0..self.tokens.len() {
                            let x = &mut rows[place(i)];
                            self.load::<S>(i, x);
                            sum.add::<S>(x);
                        }
                    }
                    sum.finish();
                    quantiser.rotate::<S>(mean);
                    stored.store(mean);
                }
                MeanOfRun::Previous { bytes } => {
                    let previous = memory.shifted(bytes);
                    let (mut sum, x) = (SumOfVectors::new(mean), &mut rows[place(0)]);
                    for i in 0..page_tokens {
                        previous.load::<S>(self.head * page_tokens + i, x, true);
                        sum.add::<S>(x);
                    }
                    sum.finish();
                    stored.store(mean);
                }
                MeanOfRun::Zero => {
                    mean.fill(0.0);
                    stored.store(mean);
                }
                MeanOfRun::Kept => {}
            }
            stored.load(mean);
            for i in 0..self.tokens.len() {
                let x = &mut rows[place(i)];
                if !kept {
                    self.load::<S>(i, x);
                }
                planes.store::<S>(row(i), x, mean);
            }
        }
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(&self, i: usize, to: &mut [f32]) {
        let token = self.tokens[i].2 as usize;
        // SAFETY: passed on to the caller.
        unsafe { self.work.vectors.load::<S>(self.side, token, self.head, self.shared_of(i), to) }
    }

    #[inline(always)]
    fn shared_of(&self, i: usize) -> &[f32] {
        let len = self.work.vectors.shared_len();
        &self.shared[i * len..][..len]
    }
}

/// A mean in a page: codes, then their scale.
#[derive(Clone, Copy)]
pub(super) struct StoredMean {
    pub start: *mut u8,
}

impl StoredMean {
    /// The scale of a mean of `dim` coordinates.
    ///
    /// # Safety
    /// As for [`StoredMean::load`].
    #[inline(always)]
    pub(super) unsafe fn scale(self, dim: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { self.start.add(dim).cast::<f32>().read_unaligned() }
    }

    /// Decodes the mean of vectors that are as long as `to`.
    ///
    /// # Safety
    /// The page has the mean, and nobody writes to it.
    #[inline(always)]
    pub(super) unsafe fn load(self, to: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            let scale = self.scale(to.len());
            let codes = std::slice::from_raw_parts(self.start.cast::<i8>(), to.len());
            to.iter_mut().zip(codes).for_each(|(to, &code)| *to = f32::from(code) * scale);
        }
    }

    /// Stores the nearest mean to a rotated one.
    ///
    /// # Safety
    /// The page has room for the mean, and nobody else uses it.
    #[inline(always)]
    unsafe fn store(self, mean: &[f32]) {
        let largest = mean.iter().fold(0f32, |largest, m| largest.max(m.abs()));
        let scale = largest / MEAN_LEVELS;
        // SAFETY: the caller's promise.
        unsafe {
            let codes = std::slice::from_raw_parts_mut(self.start.cast::<i8>(), mean.len());
            if scale > 0.0 {
                let code = |m: f32| (m / scale).round_ties_even().clamp(-MEAN_LEVELS, MEAN_LEVELS) as i8;
                codes.iter_mut().zip(mean).for_each(|(to, &m)| *to = code(m));
            } else {
                codes.fill(0);
            }
            self.start.add(mean.len()).cast::<f32>().write_unaligned(scale);
        }
    }
}

/// The sum of vectors, without those that are not finite or whose squared length overflows.
struct SumOfVectors<'a> {
    sum: &'a mut [f32],
    count: u32,
}

impl<'a> SumOfVectors<'a> {
    fn new(sum: &'a mut [f32]) -> Self {
        sum.fill(0.0);
        SumOfVectors { sum, count: 0 }
    }

    /// # Safety
    /// The level's instructions are enabled.
    #[inline(always)]
    unsafe fn add<S: Simd>(&mut self, x: &[f32]) {
        // SAFETY: passed on to the caller.
        unsafe {
            if dot::<S>(x, x).is_finite() {
                add::<S>(self.sum, x);
                self.count += 1;
            }
        }
    }

    /// Adds a vector whatever it holds, and its squares to those of others.
    ///
    /// # Safety
    /// The level's instructions are enabled.
    #[inline(always)]
    unsafe fn add_unchecked<S: Simd>(&mut self, x: &[f32], squares: &mut [S::F; 2]) {
        let [mut even, mut odd] = *squares;
        let n = self.sum.len().min(x.len());
        let whole = n - n % S::LANES;
        let sum = self.sum.as_mut_ptr();
        for i in (0..whole).step_by(S::LANES) {
            // SAFETY: whole vectors of both; the rest is the caller's promise.
            unsafe {
                let x = S::load(x.as_ptr().add(i));
                S::store(sum.add(i), S::add(S::load(sum.add(i)), x));
                // Two chains of additions take half the time of one.
                (even, odd) = (odd, S::fma(x, x, even));
            }
        }
        for (sum, &x) in self.sum[whole..].iter_mut().zip(&x[whole..n]) {
            *sum += x;
            // SAFETY: the caller's promise. Lanes that have the same number count it more than once.
            unsafe { even = S::fma(S::splat(x), S::splat(x), even) };
        }
        *squares = [even, odd];
        self.count += 1;
    }

    /// Divides by the number of vectors.
    fn finish(self) {
        let count = self.count.max(1) as f32;
        self.sum.iter_mut().for_each(|sum| *sum /= count);
    }
}

/// sum ← sum + x, for two slices of one length.
///
/// # Safety
/// The level's instructions are enabled.
#[inline(always)]
unsafe fn add<S: Simd>(sum: &mut [f32], x: &[f32]) {
    let n = sum.len().min(x.len());
    let whole = n - n % S::LANES;
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: whole vectors of both; the rest is the caller's promise.
        unsafe { S::store(sum.as_mut_ptr().add(i), S::add(S::load(sum.as_ptr().add(i)), S::load(x.as_ptr().add(i)))) }
    }
    sum[whole..n].iter_mut().zip(&x[whole..n]).for_each(|(sum, x)| *sum += x);
}
