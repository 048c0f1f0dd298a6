//! Divides an attention call into tasks: (block of query tokens, KV heads, split of the context).

use std::ops::Range;

use super::{
    route::{AttendKernel, select},
    tile::TILE,
};
use crate::{
    cpu::SimdLevel,
    ops::attend::{PageSpan, visible},
};

/// Limits of a block: its query rows (tokens × query heads of a KV head), and their floats.
struct BlockLimits {
    /// Maximum floats of the rows: queries and sums must fit into the second-level cache.
    floats: usize,
    rows: Range<usize>,
    tokens: usize,
}

impl BlockLimits {
    fn of(kernel: AttendKernel) -> BlockLimits {
        match kernel {
            AttendKernel::FewRows | AttendKernel::FixedPoint => BlockLimits { floats: 8192, rows: 16..64, tokens: 32 },
            // Keys are widened once for all rows of a block.
            AttendKernel::ManyRows => BlockLimits { floats: 16384, rows: 16..64, tokens: 32 },
            // In addition, values are transposed.
            AttendKernel::AmxRows => BlockLimits { floats: 65536, rows: 32..256, tokens: 256 },
        }
    }
}

/// Minimum keys of a task, if the plan chooses the number of splits.
const SPLIT_KEYS: usize = 256;
/// Minimum query rows of blocks that are made smaller to use more threads.
const SHARED_ROWS: usize = 64;
/// Tasks per thread. Several small tasks limit the delay if a thread loses its core for a while.
const TASKS_PER_THREAD: usize = 4;
/// Maximum KV heads of a task, and the minimum number of keys in pages for more than one. Several heads read a page's
/// memory as a whole; a single head reads a few KiB of it and jumps to the next page.
pub(super) const TASK_HEADS: usize = 8;
const LONG_KEYS: usize = 4096;
/// Limits for excessive requests: splits of a block, and floats of all partial states.
const MAX_SPLITS: usize = 4096;
const PARTIAL_FLOATS: usize = 1 << 26;
/// Positions of a part on a batch-invariant device, a multiple of every tile size. Large enough that merges take no
/// time, small enough that threads share long contexts.
pub(super) const PART: usize = 512;

/// The input of a plan.
pub(super) struct BatchShape<'a> {
    pub positions: &'a [u32],
    pub sequence: &'a [u32],
    pub lens: &'a [u32],
    pub capacity: usize,
    pub window: usize,
    /// The span of positions that the call attends to, and the positions of a page.
    pub span: PageSpan,
    pub page_tokens: usize,
    pub kv_heads: usize,
    /// Query heads of a KV head.
    pub group: usize,
    pub head_dim: usize,
    pub level: SimdLevel,
    /// Whether keys or values are quantised.
    pub quantised: bool,
    /// Whether a token's result depends only on its own keys.
    pub batch_invariant: bool,
    /// Whether the keys are in pages.
    pub paged: bool,
    pub threads: usize,
    /// Requested splits; 0 if the plan chooses the number.
    pub splits: usize,
}

/// Consecutive tokens of the batch that belong to one sequence and have consecutive positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Segment {
    pub token: usize,
    pub tokens: usize,
    pub sequence: usize,
    pub position: usize,
}

/// A segment whose queries are processed together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct QueryBlock {
    pub segment: Segment,
    /// The first position that any of its tokens may see.
    pub start: usize,
    /// The number of keys that any of its tokens may see.
    pub keys: usize,
    pub splits: usize,
    /// The KV heads of a task; the last task of the block may have fewer.
    pub task_heads: usize,
    /// The index of its first task. Its tasks follow in order: for each group of KV heads, all splits.
    pub first_task: usize,
    /// The first row of its partial states, if it has more than one split.
    pub first_partial: usize,
}

#[derive(Default)]
pub(super) struct WorkPlan {
    pub blocks: Vec<QueryBlock>,
    pub tasks: usize,
    pub partial_rows: usize,
}

impl BatchShape<'_> {
    /// The kernel for `rows` query rows.
    pub fn kernel(&self, rows: usize) -> AttendKernel {
        select(self.level, self.quantised, if self.batch_invariant { 1 } else { rows })
    }

    /// Cuts positions into the parts whose states are merged in order, whichever tasks compute them.
    pub fn parts(&self, positions: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let part = if self.batch_invariant { PART } else { usize::MAX };
        let bounds = positions.start / part..positions.end.div_ceil(part);
        bounds.map(move |i| positions.start.max(i * part)..positions.end.min((i + 1).saturating_mul(part)))
    }

    /// The length of a sequence; 0 for inactive rows, which have no sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.lens.get(sequence).map_or(0, |&len| len as usize)
    }

    /// The positions that a token at `position` sees, in a sequence of `len` tokens.
    pub fn seen(&self, len: usize, position: usize) -> Range<usize> {
        self.span.of(visible(position, len, self.capacity, self.window), position, self.page_tokens)
    }

    /// A range that contains all positions that the tokens of `block` see.
    pub fn seen_by_any(&self, block: &Segment) -> Range<usize> {
        let len = self.len(block.sequence);
        self.seen(len, block.position).start..self.seen(len, block.position + block.tokens - 1).end
    }

    /// Positions that every token of `block` sees.
    pub fn seen_by_all(&self, block: &Segment) -> Range<usize> {
        let len = self.len(block.sequence);
        let end = self.seen(len, block.position).end;
        self.seen(len, block.position + block.tokens - 1).start.min(end)..end
    }

    /// The number of KV heads of a task, whose queries and sums must stay in the second-level cache.
    fn task_heads(&self, block: &Segment, keys: usize) -> usize {
        let (rows, heads) = (block.tokens * self.group, self.kv_heads.min(TASK_HEADS));
        let kernel = self.kernel(rows);
        let many = matches!(kernel, AttendKernel::ManyRows | AttendKernel::AmxRows);
        let floats = BlockLimits::of(AttendKernel::FewRows).floats;
        let fits = rows.saturating_mul(heads).saturating_mul(self.head_dim) <= floats;
        if self.paged && keys >= LONG_KEYS && fits && !many { heads } else { 1 }
    }

    /// Maximum tokens of a block. Blocks of more than [`SHARED_ROWS`] rows read keys and values fewer times, but are
    /// made only if each thread has enough tasks.
    fn block_tokens(&self) -> usize {
        let rows = if self.batch_invariant { 1 } else { usize::MAX };
        let max = block_tokens(self.level, self.quantised, rows, self.head_dim, self.group);
        if self.threads == 1 {
            return max;
        }
        let shared = (self.positions.len() * self.kv_heads).div_ceil(self.threads * TASKS_PER_THREAD);
        max.min(shared.max(SHARED_ROWS / self.group).max(1))
    }

    fn next_segment(&self, token: usize, max_tokens: usize) -> Segment {
        let (sequence, position) = (self.sequence[token], self.positions[token]);
        let follows = |i: &usize| {
            self.sequence[token + i] == sequence && self.positions[token + i] as usize == position as usize + i
        };
        let tokens = 1 + (1..max_tokens.min(self.positions.len() - token)).take_while(follows).count();
        Segment { token, tokens, sequence: sequence as usize, position: position as usize }
    }
}

impl QueryBlock {
    /// The positions of the block's keys.
    fn positions(&self) -> Range<usize> {
        self.start..self.start + self.keys
    }

    /// The positions of a split. Splits end where tiles do, unless a split would be smaller than a tile.
    pub fn of_split(&self, shape: &BatchShape, split: usize) -> Range<usize> {
        if self.splits == 1 {
            return self.positions();
        }
        if shape.batch_invariant {
            return shape.parts(self.positions()).nth(split).unwrap_or(0..0);
        }
        let unit = if self.keys >= self.splits * TILE { TILE } else { 1 };
        let cut = |i: usize| if i == self.splits { self.keys } else { self.keys * i / self.splits / unit * unit };
        self.start + cut(split)..self.start + cut(split + 1)
    }
}

/// Maximum tokens of a block for the kernel of `rows` rows. `group`: query heads per KV head.
pub(super) fn block_tokens(level: SimdLevel, quantised: bool, rows: usize, head_dim: usize, group: usize) -> usize {
    let BlockLimits { floats, rows, tokens } = BlockLimits::of(select(level, quantised, rows));
    let rows = (floats / head_dim).clamp(rows.start, rows.end);
    (rows / group).clamp(1, tokens)
}

impl WorkPlan {
    /// Makes the plan of a shape. Equal shapes give equal plans, and the plan alone determines the order of sums.
    pub fn make(&mut self, shape: &BatchShape) {
        self.blocks.clear();
        let tokens = shape.positions.len();
        let max_tokens = shape.block_tokens();
        let mut token = 0;
        let mut all_keys = 0usize;
        while token < tokens {
            let segment = shape.next_segment(token, max_tokens);
            token += segment.tokens;
            let seen = shape.seen_by_any(&segment);
            let (start, keys) = (seen.start, seen.len());
            all_keys = all_keys.saturating_add(keys);
            let task_heads = shape.task_heads(&segment, keys);
            let (splits, first_task, first_partial) = (1, 0, 0);
            self.blocks.push(QueryBlock { segment, start, keys, splits, task_heads, first_task, first_partial });
        }
        self.split(shape, all_keys);
    }

    fn split(&mut self, shape: &BatchShape, all_keys: usize) {
        let shares = shape.threads * TASKS_PER_THREAD;
        let share = all_keys.saturating_mul(shape.kv_heads).div_ceil(shares).max(SPLIT_KEYS);
        let mut floats = 0usize;
        for block in &mut self.blocks {
            block.splits = match shape.splits {
                0 if shape.threads == 1 => 1,
                0 => block.keys.saturating_mul(block.task_heads).div_ceil(share),
                forced => forced.min(block.keys),
            }
            .clamp(1, MAX_SPLITS);
            if shape.batch_invariant && block.splits > 1 {
                block.splits = shape.parts(block.positions()).count();
            }
            if block.splits > 1 {
                floats =
                    floats.saturating_add(block.segment.tokens * shape.group * shape.kv_heads * (shape.head_dim + 2));
            }
        }
        // Maximum splits of a block, so that the partial states fit the limit.
        let max_splits = (PARTIAL_FLOATS / floats.max(1)).clamp(1, MAX_SPLITS);
        (self.tasks, self.partial_rows) = (0, 0);
        for block in &mut self.blocks {
            if block.splits > max_splits {
                // Parts are never divided, so the only smaller number of splits is one.
                block.splits = if shape.batch_invariant { 1 } else { max_splits };
            }
            (block.first_task, block.first_partial) = (self.tasks, self.partial_rows);
            self.tasks += block.splits * shape.kv_heads.div_ceil(block.task_heads);
            if block.splits > 1 {
                self.partial_rows += block.splits * shape.kv_heads * block.segment.tokens * shape.group;
            }
        }
    }

    /// The block of a task, the task's range of the `kv_heads` KV heads, and its split.
    pub fn task(&self, task: usize, kv_heads: usize) -> (&QueryBlock, Range<usize>, usize) {
        let block = &self.blocks[self.blocks.partition_point(|block| block.first_task <= task) - 1];
        let i = task - block.first_task;
        let first = i / block.splits * block.task_heads;
        (block, first..kv_heads.min(first + block.task_heads), i % block.splits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape<'a>(tokens: &'a [(u32, u32)], lens: &'a [u32], buffers: &'a mut [Vec<u32>; 2]) -> BatchShape<'a> {
        *buffers = [tokens.iter().map(|t| t.1).collect(), tokens.iter().map(|t| t.0).collect()];
        BatchShape {
            positions: &buffers[0],
            sequence: &buffers[1],
            lens,
            capacity: 1 << 20,
            window: usize::MAX,
            span: PageSpan::All,
            page_tokens: usize::MAX,
            kv_heads: 1,
            group: 4,
            head_dim: 256,
            level: SimdLevel::Avx512Vbmi,
            quantised: true,
            batch_invariant: false,
            paged: false,
            threads: 4,
            splits: 0,
        }
    }

    #[test]
    fn one_sequence_with_one_head_uses_every_thread() {
        let mut plan = WorkPlan::default();
        plan.make(&shape(&[(0, 8191)], &[8192], &mut Default::default()));
        assert_eq!((plan.blocks.len(), plan.tasks, plan.partial_rows), (1, 16, 64));
        plan.make(&shape(&[(0, 99)], &[100], &mut Default::default()));
        assert_eq!((plan.tasks, plan.partial_rows), (1, 0), "too little to share");
    }

    #[test]
    fn excessive_requests_are_limited() {
        let mut plan = WorkPlan::default();
        for (tokens, splits) in [(1, 4096), (2, 4080), (1024, 7), (20_000, 1)] {
            let all: Vec<(u32, u32)> = (0..tokens).map(|i| (0, 100_000 + i)).collect();
            let (lens, mut buffers) = ([130_000], Default::default());
            let shape = shape(&all, &lens, &mut buffers);
            plan.make(&BatchShape { splits: usize::MAX, kv_heads: 4, head_dim: 512, ..shape });
            let floats = plan.partial_rows * 514;
            assert!(floats <= PARTIAL_FLOATS, "{tokens} tokens: {floats} floats");
            assert_eq!(plan.blocks[0].splits, splits);
        }
    }

    #[test]
    fn splits_end_where_tiles_do() {
        let segment = Segment { token: 0, tokens: 1, sequence: 0, position: 0 };
        for (keys, splits) in
            [(1, 1), (3000, 7), (64 * 5, 5), (64 * 5 + 1, 5), (64 * 5 - 1, 5), (100, 100), (1 << 32, 4096)]
        {
            let block = QueryBlock { segment, start: 0, keys, splits, task_heads: 1, first_task: 0, first_partial: 0 };
            let mut buffers = Default::default();
            let shape = shape(&[], &[], &mut buffers);
            let ends: Vec<usize> = (0..splits).map(|i| block.of_split(&shape, i).end).collect();
            let starts = (0..splits).map(|i| block.of_split(&shape, i).start);
            assert!(
                starts.eq(std::iter::once(0).chain(ends[..splits - 1].iter().copied())),
                "each where the last one ends"
            );
            assert!(ends.windows(2).all(|w| w[0] < w[1]) && ends[0] > 0 && ends[splits - 1] == keys, "none is empty");
            let whole = ends[..splits - 1].iter().all(|end| end % TILE == 0);
            assert!(whole || keys < splits * TILE, "{keys} keys in {splits} splits: {ends:?}");
        }
    }

    /// The parts of a token's keys end at fixed positions, whatever else a task or a step contains.
    #[test]
    fn on_batch_invariant_devices_parts_depend_on_positions_alone() {
        let mut plan = WorkPlan::default();
        let (lens, mut buffers) = ([10 * PART as u32], Default::default());
        let last = lens[0] - 1;
        let tokens = [(0, last)];
        let alone = BatchShape { batch_invariant: true, window: 5 * PART + 7, ..shape(&tokens, &lens, &mut buffers) };
        let of = |threads, plan: &mut WorkPlan| {
            plan.make(&BatchShape { threads, ..alone });
            let block = &plan.blocks[0];
            let splits = (0..block.splits).map(|split| block.of_split(&alone, split));
            (block.splits, splits.flat_map(|positions| alone.parts(positions)).collect::<Vec<_>>())
        };
        let (splits, parts) = of(1, &mut plan);
        assert_eq!((splits, parts.len()), (1, 6));
        let (first, end) = (last as usize - 5 * PART - 6, 5 * PART);
        assert_eq!((parts[0].clone(), parts[1].clone()), (first..end, end..end + PART));
        assert_eq!(of(64, &mut plan), (6, parts));
        assert_eq!([1, 7, 100].map(|rows| alone.kernel(rows)), [alone.kernel(1); 3]);
    }

    #[test]
    fn the_window_bounds_the_work() {
        let mut plan = WorkPlan::default();
        for position in [2000, 1_000_000] {
            let (lens, mut buffers) = ([position + 1], Default::default());
            let tokens = [(0, position)];
            plan.make(&BatchShape { window: 1024, ..shape(&tokens, &lens, &mut buffers) });
            assert_eq!((plan.blocks[0].keys, plan.tasks), (1024, 4));
        }
    }

    #[test]
    fn blocks_follow_sequences_and_positions() {
        let tokens = [(0, 5), (0, 6), (1, 7), (1, 8), (1, 10), (0, 7)];
        let (lens, mut buffers) = ([9, 11], Default::default());
        let mut plan = WorkPlan::default();
        plan.make(&BatchShape { splits: 3, ..shape(&tokens, &lens, &mut buffers) });
        let starts: Vec<_> = plan.blocks.iter().map(|b| (b.segment.token, b.segment.tokens)).collect();
        assert_eq!(starts, [(0, 2), (2, 2), (4, 1), (5, 1)]);
        // Up to the last token of the block.
        assert_eq!(plan.blocks.iter().map(|b| b.keys).collect::<Vec<_>>(), [7, 9, 11, 8]);
        assert_eq!(plan.tasks, 12);
        let (block, heads, split) = plan.task(7, 1);
        assert_eq!((block.segment.token, heads, split), (4, 0..1, 1));
    }

    #[test]
    fn tasks_over_long_pages_have_several_heads() {
        let mut plan = WorkPlan::default();
        for (kv_heads, threads) in [(1, 1), (2, 4), (8, 2), (11, 3)] {
            for (keys, paged) in [(LONG_KEYS, true), (LONG_KEYS - 1, true), (LONG_KEYS, false)] {
                let (lens, mut buffers) = ([keys as u32], Default::default());
                let tokens = [(0, keys as u32 - 1)];
                let shape = shape(&tokens, &lens, &mut buffers);
                plan.make(&BatchShape { kv_heads, threads, paged, head_dim: 128, ..shape });
                let several = paged && keys == LONG_KEYS;
                assert_eq!(plan.blocks[0].task_heads, if several { kv_heads.min(TASK_HEADS) } else { 1 });
                assert!(plan.tasks >= threads * TASKS_PER_THREAD || threads == 1);
                // Every head and split must occur once.
                let mut seen = vec![0; kv_heads * plan.blocks[0].splits];
                for task in 0..plan.tasks {
                    let (block, heads, split) = plan.task(task, kv_heads);
                    heads.for_each(|head| seen[head * block.splits + split] += 1);
                }
                assert!(seen.iter().all(|&count| count == 1), "{seen:?}");
            }
        }
        // Not for many rows: their kernels transpose keys once for all heads, or their states exceed the cache.
        let (lens, mut buffers) = ([8192], Default::default());
        let tokens: Vec<(u32, u32)> = (0..32).map(|i| (0, 8160 + i)).collect();
        let shape = shape(&tokens, &lens, &mut buffers);
        for (level, quantised) in
            [(SimdLevel::Avx512Vbmi, true), (SimdLevel::Avx512Vbmi, false), (SimdLevel::Avx512Amx, true)]
        {
            plan.make(&BatchShape { kv_heads: 4, paged: true, level, quantised, ..shape });
            assert!(plan.blocks.iter().all(|block| block.task_heads == 1));
        }
    }

    #[test]
    fn blocks_are_smaller_if_threads_would_idle() {
        let (lens, mut buffers) = ([2048], Default::default());
        let tokens: Vec<(u32, u32)> = (0..2048).map(|i| (0, i)).collect();
        let shape = shape(&tokens, &lens, &mut buffers);
        // 256 rows of 4 heads.
        for (threads, max) in [(1, 64), (2, 64), (16, 32), (64, 16)] {
            let level = SimdLevel::Avx512Amx;
            let mut plan = WorkPlan::default();
            plan.make(&BatchShape { level, threads, ..shape });
            assert_eq!(plan.blocks[0].segment.tokens, max, "{threads} threads");
            // Blocks of other kernels never have more tokens.
            plan.make(&BatchShape { quantised: false, threads, ..shape });
            assert_eq!(plan.blocks[0].segment.tokens, 16);
        }
    }

    #[test]
    fn positions_that_all_see_are_within_those_that_each_sees() {
        let (lens, mut buffers) = ([40], Default::default());
        let mut shape = shape(&[(0, 30)], &lens, &mut buffers);
        for (capacity, window) in [(64, usize::MAX), (64, 5), (20, usize::MAX), (8, 3), (20, 12)] {
            (shape.capacity, shape.window) = (capacity, window);
            for (position, tokens) in (0..40).flat_map(|p| (1..10).map(move |n| (p, n))) {
                let block = Segment { token: 0, tokens, sequence: 0, position };
                let (any, all) = (shape.seen_by_any(&block), shape.seen_by_all(&block));
                for p in position..position + tokens {
                    for key in 0..50 {
                        let seen = shape.seen(40, p).contains(&key);
                        assert!(!seen || any.contains(&key));
                        assert!(seen || !all.contains(&key));
                    }
                }
            }
        }
    }
}
