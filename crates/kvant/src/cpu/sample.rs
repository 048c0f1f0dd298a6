//! Draws one token per row of logits. Threads share the rows.
//!
//! The contract describes all entries in descending order. Every cut keeps a prefix of that order, so a partial
//! selection finds the few largest entries first, and more only if these do not suffice. Without a cut no order is
//! needed: a block of entries is skipped if its random bits are too large for its largest probability to win.

use std::cell::RefCell;

use super::{
    Cpu,
    argmax::{self, largest},
    elements::{Elements, SliceParts},
    scratch,
    simd::{Simd, SimdKernel},
};
use crate::ops::{
    SampleRow,
    sample::{Call, exponential_of, noise, stream},
};

/// Entries that are selected first if the number of entries needed is unknown.
const FIRST: usize = 64;
/// Entries that are skipped together if none is large enough.
const BLOCK: usize = 64;

thread_local! {
    /// Selected entries, kept so that a step allocates nothing.
    static SELECTED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let logits = Elements::of(&call.logits);
    // SAFETY: calls run under the device's lock; the counters are an input, and the output overlaps no other argument.
    let (counters, out) = unsafe { (call.counter.host_slice::<u32>(), call.out.host_slice_mut::<u32>()) };
    // SAFETY: as above, another input.
    let words = call.rows.as_ref().map(|rows| unsafe { rows.host_slice::<u32>() });
    if words.is_none() && call.how.temperature == 0.0 {
        return argmax::rows(cpu, logits, call.vocab, out);
    }
    let rows = SliceParts::new(out, 1);
    cpu.threads.run(rows.count(), |row| {
        let how = call.how(row, words);
        let stream = stream(how.seed, counters[row]);
        // SAFETY: each task takes its own part, of one row.
        let out = unsafe { rows.part(row) };
        out[0] = cpu.level.dispatch(Draw { how, vocab: call.vocab, logits, row, stream });
    });
}

/// Draws the token of one row.
struct Draw {
    how: SampleRow,
    vocab: usize,
    logits: Elements,
    row: usize,
    /// The random bits of the row.
    stream: u64,
}

/// The candidate with the largest rate so far.
struct Best {
    rate: f32,
    id: usize,
}

impl Best {
    fn offer(&mut self, id: usize, p: f32, bits: u32) {
        let rate = p / exponential_of(bits);
        if rate > self.rate || rate == self.rate && id < self.id {
            *self = Best { rate, id };
        }
    }
}

impl SimdKernel for Draw {
    type Output = u32;
    #[inline(always)]
    fn run<S: Simd>(self) -> u32 {
        let vocab = self.vocab;
        let row = &mut *scratch::take(vocab.next_multiple_of(BLOCK));
        row[vocab..].fill(f32::NEG_INFINITY);
        // SAFETY: `dispatch` enables the instructions, and the row exists.
        let largest = unsafe {
            self.logits.load::<S>(self.row * vocab, &mut row[..vocab]);
            largest::<S>(row)
        };
        if largest.is_infinite() {
            // If the largest entry is infinite, all infinite entries have equal shares. A row of NaN has no candidate.
            let mut none = true;
            for x in &mut row[..vocab] {
                (*x, none) = if *x == largest { (0.0, false) } else { (f32::NAN, none) };
            }
            return if none { u32::MAX } else { self.draw::<S>(row, 0.0) };
        }
        self.draw::<S>(row, largest)
    }
}

impl Draw {
    /// Draws from a row that is padded with −∞ to whole blocks, and has a finite largest entry.
    #[inline(always)]
    fn draw<S: Simd>(&self, row: &[f32], largest: f32) -> u32 {
        let (vocab, SampleRow { top_k, top_p, min_p, temperature, .. }) = (self.vocab, self.how);
        let all = top_k == vocab;
        if all && top_p >= 1.0 && min_p <= 0.0 {
            // SAFETY: `dispatch` enables the instructions.
            return unsafe { self.draw_from_all::<S>(row, largest) };
        }
        let mut selected = SELECTED.take();
        let mut count = if all { FIRST.min(vocab) } else { top_k };
        let mut all_p = None;
        let id = loop {
            let complete = !all || count == vocab;
            // SAFETY: `dispatch` enables the instructions.
            unsafe { select::<S>(row, vocab, count, &mut selected) };
            let p = &mut *scratch::take(selected.len().next_multiple_of(16));
            p.fill(f32::NEG_INFINITY);
            p.iter_mut().zip(&selected).for_each(|(p, &key)| *p = row[id_of(key)]);
            // SAFETY: as above; the slice is whole vectors.
            unsafe { exponentials::<S>(p, largest, temperature) };
            let p = &p[..selected.len()];
            // If all candidates are selected, they are summed in this order, so that the running sum reaches the total.
            let total = match all_p {
                _ if complete => p.iter().map(|&p| f64::from(p)).sum(),
                Some(total) => total,
                // SAFETY: as above.
                None => unsafe { sum::<S>(row, largest, temperature) },
            };
            all_p = Some(total);
            if let Some(keep) = self.cut(p, total, complete) {
                let mut best = Best { rate: 0.0, id: usize::MAX };
                for (&key, &p) in selected[..keep].iter().zip(p) {
                    let id = id_of(key);
                    best.offer(id, p, noise(self.stream, id as u32));
                }
                break best.id as u32;
            }
            count = count.saturating_mul(16).min(vocab);
        };
        SELECTED.set(selected);
        id
    }

    /// The number of selected entries that may be drawn, from their descending probabilities `p`; `None` if more
    /// entries must be selected to decide. `total` is the sum of all candidates of top_k; `complete` says whether all
    /// of them are selected.
    fn cut(&self, p: &[f32], total: f64, complete: bool) -> Option<usize> {
        let mut keep = p.len();
        // Whether the cuts fall among the selected entries, so that later ones do not matter.
        let mut cut = complete;
        if self.how.top_p < 1.0 {
            let goal = f64::from(self.how.top_p) * total;
            let mut running = 0.0;
            let reached = p.iter().position(|&p| {
                running += f64::from(p);
                running >= goal
            });
            match reached {
                Some(last) => (keep, cut) = (last + 1, true),
                // All candidates that min_p keeps are selected, and top_p keeps more.
                None if !complete && p.last().is_none_or(|&p| p >= self.how.min_p) => return None,
                None => {}
            }
        }
        if self.how.min_p > 0.0 {
            let likely = p[..keep].partition_point(|&p| p >= self.how.min_p);
            // The first entry has the largest probability, so it always stays.
            (keep, cut) = (likely.max(1), cut || likely < keep);
        }
        cut.then_some(keep)
    }

    /// Draws, without cuts, from a row that is padded with −∞ to whole blocks, and has a finite largest entry.
    ///
    /// # Safety
    /// The instructions of `S` are enabled.
    #[inline(always)]
    unsafe fn draw_from_all<S: Simd>(&self, row: &[f32], largest: f32) -> u32 {
        let blocks = row.len() / BLOCK;
        let maxima = &mut *scratch::take(blocks.next_multiple_of(16));
        maxima.fill(f32::NEG_INFINITY);
        for (max, block) in maxima.iter_mut().zip(row.chunks_exact(BLOCK)) {
            // SAFETY: the caller's promise; a block is whole vectors.
            *max = unsafe { argmax::largest::<S>(block) };
        }
        // The block of the largest entry first: its rate bounds the others.
        let first = maxima[..blocks].iter().position(|&max| max == largest).unwrap_or(0);
        // SAFETY: the caller's promise; the slice is whole vectors.
        unsafe { exponentials::<S>(maxima, largest, self.how.temperature) };
        let mut best = Best { rate: 0.0, id: usize::MAX };
        for block in std::iter::once(first).chain(0..blocks) {
            let start = block * BLOCK;
            // The exponential number is at least v, so larger random bits bound the rate from above. The factor covers
            // rounding.
            let bound = f64::from(maxima[block]) / f64::from(best.rate) * 2f64.powi(32) * 1.0001;
            if bound < 0.25 {
                continue;
            }
            let mut bits = [0u32; BLOCK];
            bits.iter_mut().zip(start as u32..).for_each(|(bits, id)| *bits = noise(self.stream, id));
            // The bound is infinite before the first offer.
            let bound = bound as u32;
            if !bits.iter().fold(false, |any, &bits| any | (bits <= bound)) {
                continue;
            }
            let mut p = [0f32; BLOCK];
            let entries = &row[start..start + BLOCK];
            p.copy_from_slice(entries);
            // SAFETY: as above.
            unsafe { exponentials::<S>(&mut p, largest, self.how.temperature) };
            for (index, (&p, &bits)) in p.iter().zip(&bits).enumerate() {
                if bits <= bound && !entries[index].is_nan() {
                    best.offer(start + index, p, bits);
                }
            }
        }
        best.id as u32
    }
}

/// An entry as a number whose order is that of the contract: larger values rank higher, and among equals lower ids.
fn key_of(x: f32, id: usize) -> u64 {
    // Adding zero turns −0 into 0. Then the bits are mapped so that they compare as the numbers do.
    let bits = (x + 0.0).to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(!(id as u32))
}

fn id_of(key: u64) -> usize {
    !(key as u32) as usize
}

/// The first `count` entries of a row in descending order, without NaN; fewer if the row has fewer.
#[inline(always)]
unsafe fn select<S: Simd>(row: &[f32], vocab: usize, count: usize, selected: &mut Vec<u64>) {
    selected.clear();
    let room = count.saturating_mul(2).max(256);
    // Once `count` entries are known, only larger ones than their minimum can matter.
    let mut min = f32::NEG_INFINITY;
    let mut full = false;
    for (block, start) in row.chunks_exact(BLOCK).zip((0..).step_by(BLOCK)) {
        // SAFETY: the caller's promise; a block is whole vectors.
        if full && unsafe { largest::<S>(block) } <= min {
            continue;
        }
        for (&x, id) in block.iter().zip(start..vocab) {
            if x > min || !full && !x.is_nan() {
                selected.push(key_of(x, id));
            }
        }
        if selected.len() >= room {
            let (_, &mut last, _) = selected.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
            selected.truncate(count);
            min = row[id_of(last)];
            full = true;
        }
    }
    if selected.len() > count {
        selected.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
        selected.truncate(count);
    }
    selected.sort_unstable_by(|a, b| b.cmp(a));
}

/// Replaces each x by p = e^((x − largest)/temperature), in a whole number of vectors.
#[inline(always)]
unsafe fn exponentials<S: Simd>(x: &mut [f32], largest: f32, temperature: f32) {
    for x in x.chunks_exact_mut(S::LANES) {
        // SAFETY: the caller's promise; a whole vector.
        unsafe { S::store(x.as_mut_ptr(), exponential::<S>(S::load(x.as_ptr()), largest, temperature)) }
    }
}

#[inline(always)]
unsafe fn exponential<S: Simd>(x: S::F, largest: f32, temperature: f32) -> S::F {
    // SAFETY: the caller's promise.
    unsafe { S::exp(S::div(S::sub(x, S::splat(largest)), S::splat(temperature))) }
}

/// The sum of the probabilities of a whole row, NaN left out.
#[inline(always)]
unsafe fn sum<S: Simd>(row: &[f32], largest: f32, temperature: f32) -> f64 {
    let mut total = 0.0;
    for block in row.chunks_exact(BLOCK) {
        // SAFETY: the caller's promise; a block is whole vectors. `max` returns its second operand for NaN, so that NaN
        // gets a probability of 2⁻¹²⁶.
        unsafe {
            let mut sum = S::zero();
            for x in block.chunks_exact(S::LANES) {
                let x = S::max(S::load(x.as_ptr()), S::splat(f32::NEG_INFINITY));
                sum = S::add(sum, exponential::<S>(x, largest, temperature));
            }
            total += f64::from(S::sum(sum));
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use crate::{
        DType, Device, Tensor,
        cpu::testing::{Numbers, devices, tensor},
        ops::{self, Sample},
    };

    #[derive(Clone, Copy, Debug)]
    struct SampleCase {
        vocab: usize,
        rows: usize,
        dtype: DType,
        temperature: f32,
        top_k: usize,
        top_p: f32,
        min_p: f32,
    }

    const PLAIN: SampleCase =
        SampleCase { vocab: 50, rows: 300, dtype: DType::F32, temperature: 0.8, top_k: 0, top_p: 1.0, min_p: 0.0 };

    impl SampleCase {
        fn run(&self, device: &Device, logits: &[f32]) -> Vec<u32> {
            let logits = tensor(device, self.dtype, logits, &[self.rows, self.vocab]);
            let counter: Vec<u32> = (0..self.rows as u32).collect();
            let counter = Tensor::from_slice(device, &counter, &[self.rows]).unwrap();
            let out = Tensor::from_slice(device, &vec![77u32; self.rows], &[self.rows]).unwrap();
            let SampleCase { temperature, top_k, top_p, min_p, .. } = *self;
            let sample = Sample::new(&logits, &counter, &out)
                .temperature(temperature)
                .top_k(top_k)
                .top_p(top_p)
                .min_p(min_p)
                .seed(42);
            let mut enc = device.encoder().unwrap();
            ops::sample(&mut enc, &sample).unwrap();
            enc.commit().unwrap().wait().unwrap();
            out.to_vec().unwrap()
        }

        fn check(&self, logits: &[f32], devices: &[Device]) {
            let want = self.run(&Device::reference(), logits);
            for device in devices {
                let got = self.run(device, logits);
                // Two rates may be equal up to f32 rounding.
                let differ = got.iter().zip(&want).filter(|(a, b)| a != b).count();
                assert!(differ <= self.rows / 300, "{device} {self:?}: {differ} differ");
            }
        }
    }

    fn logits(case: &SampleCase, spread: f32) -> Vec<f32> {
        Numbers(10).floats(case.rows * case.vocab).into_iter().map(|x| x * spread).collect()
    }

    #[test]
    fn every_cut_draws_as_the_reference() {
        let devices = devices();
        for vocab in [1, 50, 1000] {
            for spread in [0.01, 8.0] {
                let cuts = [
                    (0, 1.0, 0.0),
                    (1, 1.0, 0.0),
                    (40, 1.0, 0.0),
                    (0, 0.9, 0.0),
                    (0, 0.02, 0.0),
                    (0, 1.0, 0.3),
                    (30, 0.95, 0.05),
                    (0, 0.999, 1e-4),
                    (2000, 1.0, 0.0),
                ];
                for (i, (top_k, top_p, min_p)) in cuts.into_iter().enumerate() {
                    let dtype = [DType::F32, DType::F16, DType::BF16][(i + i / 3 + vocab) % 3];
                    let case = SampleCase { vocab, dtype, top_k, top_p, min_p, ..PLAIN };
                    case.check(&logits(&case, spread), &devices);
                }
            }
        }
    }

    #[test]
    fn equal_nan_and_infinite_logits() {
        let devices = devices();
        for vocab in [3, 200] {
            let case = SampleCase { vocab, ..PLAIN };
            let mut numbers = Numbers(11);
            let special = [0.5, -0.0, 0.0, f32::NAN, f32::NEG_INFINITY];
            let mut some = logits(&case, 1.0);
            some.iter_mut().step_by(2).for_each(|x| *x = special[numbers.below(5)]);
            let mut infinite = some.clone();
            infinite.iter_mut().step_by(7).for_each(|x| *x = f32::INFINITY);
            let masked: Vec<f32> = some.iter().map(|x| if *x == 0.5 { f32::NAN } else { f32::NEG_INFINITY }).collect();
            let nan = vec![f32::NAN; some.len()];
            for logits in [some, infinite, masked, nan] {
                for (temperature, top_k, top_p, min_p) in [
                    (0.0, 0, 1.0, 0.0),
                    (1.0, 0, 1.0, 0.0),
                    (1.0, 2, 1.0, 0.0),
                    (0.5, 0, 0.6, 0.1),
                    (1e-40, 9, 0.5, 0.0),
                ] {
                    SampleCase { temperature, top_k, top_p, min_p, ..case }.check(&logits, &devices);
                }
            }
        }
    }

    #[test]
    fn masked_tokens_are_never_drawn() {
        // With flat logits, any entry could be drawn.
        for device in devices() {
            let case = SampleCase { vocab: 3000, rows: 2000, temperature: 1.0, ..PLAIN };
            let mut logits = logits(&case, 0.01);
            logits.iter_mut().enumerate().filter(|(i, _)| i % 3 != 1).for_each(|(_, x)| *x = f32::NEG_INFINITY);
            for (row, id) in case.run(&device, &logits).into_iter().enumerate() {
                assert_eq!((row * case.vocab + id as usize) % 3, 1, "{device}: row {row} drew {id}");
            }
        }
    }

    #[test]
    fn a_large_vocabulary() {
        let devices = devices();
        for (top_k, top_p, min_p) in [(0, 1.0, 0.0), (40, 0.95, 0.0), (0, 0.95, 0.01), (100_000, 1.0, 0.0)] {
            for spread in [0.1, 12.0] {
                let case = SampleCase { vocab: 262_144, rows: 2, top_k, top_p, min_p, ..PLAIN };
                case.check(&logits(&case, spread), &devices);
            }
        }
    }
}
