//! Per-head RMS norm, rotary embedding and optional Hadamard rotation: `[T, H, D]` to `[T, H, D]` or `[H, T, D]`.
//!
//! A head is widened to f32, transformed in scratch memory, and rounded once when it is stored. Cosines and sines are
//! computed once per token for all heads: position · frequency in turns, in f64, whose fractional part is then exact
//! enough for f32. Threads share the tokens.

use std::sync::{Arc, Mutex, PoisonError};

use super::{
    Cpu, convert, hadamard, scratch,
    simd::{Simd, SimdKernel},
};
use crate::{
    DType, Tensor,
    ops::{
        PairLayout,
        norm_rope::{AnglesCall, Call, NormCall, RopeCall},
    },
};

/// Minimum elements of a task.
const TASK: usize = 16 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let work = NormRopeWork {
        call,
        // SAFETY: kernels run under the device's lock, and this one does not write to the positions.
        positions: unsafe { call.positions.host_slice() },
        x: Activations::new(&call.x, call.head_dim),
        out: Activations::new(&call.out, call.head_dim),
        norm: HeadRmsNorm::new(cpu, call.norm.as_ref()),
        rotary: call.rope.as_ref().map(|rope| Rotary::new(rope, call.head_dim)),
        signs: call.rotate.then(|| hadamard::signs(call.head_dim)),
    };
    let per_task = tokens_per_task(call.heads * call.head_dim);
    cpu.threads.run(call.tokens.div_ceil(per_task), |task| {
        let tokens = task * per_task..((task + 1) * per_task).min(call.tokens);
        cpu.level.dispatch(NormRopeTask { work: &work, tokens });
    });
}

/// The number of tokens of a task, for tokens of `elements` elements.
pub(super) fn tokens_per_task(elements: usize) -> usize {
    (TASK / elements.max(1)).max(1)
}

/// Rows of activations, shared by the tasks.
#[derive(Clone, Copy)]
pub(super) struct Activations {
    start: *mut u8,
    dtype: DType,
    dim: usize,
}

// SAFETY: tasks write disjoint rows, and the device's lock excludes everyone else.
unsafe impl Send for Activations {}
// SAFETY: as above.
unsafe impl Sync for Activations {}

impl Activations {
    pub(super) fn new(tensor: &Tensor, dim: usize) -> Activations {
        Activations { start: tensor.host_ptr(), dtype: tensor.dtype(), dim }
    }

    /// # Safety
    /// The level's instructions are enabled; the tensor has that row, and nobody writes to it.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(&self, row: usize, to: &mut [f32]) {
        debug_assert_eq!(to.len(), self.dim);
        // SAFETY: the caller's promise.
        unsafe { convert::load_row::<S>(self.start.add(row * self.dim * self.dtype.size()), self.dtype, to) }
    }

    /// # Safety
    /// As for [`Activations::load`], and nobody reads the row.
    #[inline(always)]
    pub(super) unsafe fn store<S: Simd>(&self, row: usize, from: &[f32]) {
        debug_assert_eq!(from.len(), self.dim);
        // SAFETY: the caller's promise.
        unsafe { convert::store_row::<S>(from, self.start.add(row * self.dim * self.dtype.size()), self.dtype) }
    }
}

struct NormRopeWork<'a> {
    call: &'a Call,
    positions: &'a [u32],
    x: Activations,
    out: Activations,
    norm: Option<HeadRmsNorm>,
    rotary: Option<Rotary<'a>>,
    signs: Option<&'static [f32]>,
}

struct NormRopeTask<'a> {
    work: &'a NormRopeWork<'a>,
    tokens: std::ops::Range<usize>,
}

impl SimdKernel for NormRopeTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let NormRopeWork { call, positions, x, out, ref norm, ref rotary, signs } = *self.work;
        let pairs = rotary.as_ref().map_or(0, Rotary::pairs);
        let memory = &mut *scratch::take(call.head_dim + 2 * pairs);
        let (row, turns) = memory.split_at_mut(call.head_dim);
        for token in self.tokens {
            // SAFETY: `dispatch` enables the instructions; rows are within the tensors. A whole row is read before it
            // is written, so `out` may be `x`.
            unsafe {
                if let Some(rotary) = rotary {
                    rotary.turns::<S>(positions[token], turns);
                }
                for head in 0..call.heads {
                    x.load::<S>(token * call.heads + head, row);
                    if let Some(norm) = norm {
                        norm.apply::<S>(row);
                    }
                    if let Some(rotary) = rotary {
                        rotary.apply::<S>(turns, row);
                    }
                    if let Some(signs) = signs {
                        hadamard::rotate::<S>(row, signs);
                    }
                    out.store::<S>(call.out_order.row(token, head, call.tokens, call.heads), row);
                }
            }
        }
    }
}

/// The RMS norm of a head, with its weight in f32.
pub(super) struct HeadRmsNorm {
    weight: Option<scratch::ScratchFloats>,
    eps: f32,
}

impl HeadRmsNorm {
    pub(super) fn new(cpu: &Cpu, call: Option<&NormCall>) -> Option<HeadRmsNorm> {
        let call = call?;
        let weight = call.weight.as_ref().map(|weight| {
            let mut row = scratch::take(weight.elements());
            cpu.level.dispatch(LoadTensor { from: Activations::new(weight, row.len()), to: &mut row });
            row
        });
        Some(HeadRmsNorm { weight, eps: call.eps })
    }

    /// row ← row · weight / √(mean row² + eps).
    ///
    /// # Safety
    /// The level's instructions are enabled; the weight is as long as the row.
    #[inline(always)]
    pub(super) unsafe fn apply<S: Simd>(&self, row: &mut [f32]) {
        let n = row.len();
        let whole = n - n % S::LANES;
        // SAFETY: whole vectors of the row; the caller guarantees the instructions.
        let mut squares = unsafe {
            let (mut even, mut odd) = (S::zero(), S::zero());
            for i in (0..whole).step_by(S::LANES) {
                let x = S::load(row.as_ptr().add(i));
                // Two independent chains of additions take half the time of one.
                (even, odd) = (odd, S::fma(x, x, even));
            }
            S::sum(S::add(even, odd))
        };
        squares += row[whole..].iter().map(|x| x * x).sum::<f32>();
        let mut squares = f64::from(squares);
        if !squares.is_finite() || squares < 1e-24 && self.eps < 1e-24 {
            // The squares overflow or underflow f32 and eps does not hide it, or an element is NaN, which stays NaN.
            squares = row.iter().map(|&x| f64::from(x).powi(2)).sum();
        }
        let factor = 1.0 / (squares / n as f64 + f64::from(self.eps)).sqrt();
        // With an eps of zero, tiny numbers need a factor beyond f32, which is applied in two steps.
        let (first, factor) = if factor < 1e30 { (1.0, factor as f32) } else { (1e30f32, (factor / 1e30) as f32) };
        if first != 1.0 {
            row.iter_mut().for_each(|x| *x *= first);
        }
        let weight = self.weight.as_deref();
        assert!(weight.is_none_or(|weight| weight.len() == n));
        // SAFETY: whole vectors of row and weight, which are equally long.
        unsafe {
            let splat = S::splat(factor);
            for i in (0..whole).step_by(S::LANES) {
                let at = row.as_mut_ptr().add(i);
                let mut x = S::mul(S::load(at), splat);
                if let Some(weight) = weight {
                    x = S::mul(x, S::load(weight.as_ptr().add(i)));
                }
                S::store(at, x);
            }
        }
        for i in whole..n {
            row[i] = row[i] * factor * weight.map_or(1.0, |weight| weight[i]);
        }
    }
}

/// Loads a whole tensor as one row.
struct LoadTensor<'a> {
    from: Activations,
    to: &'a mut [f32],
}

impl SimdKernel for LoadTensor<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: `dispatch` enables the instructions; the row is the tensor.
        unsafe { self.from.load::<S>(0, self.to) }
    }
}

/// The rotary embedding of a head.
pub(super) struct Rotary<'a> {
    layout: PairLayout,
    pairs: usize,
    angles: PairAngles<'a>,
}

enum PairAngles<'a> {
    /// Turns per position of each pair, frequency / 2π, and the divisors of its angles.
    Frequencies {
        turns: Arc<[f64]>,
        factors: Option<&'a [f32]>,
    },
    Tables {
        cos: Activations,
        sin: Activations,
    },
}

impl<'a> Rotary<'a> {
    pub(super) fn new(call: &'a RopeCall, head_dim: usize) -> Rotary<'a> {
        let (layout, pairs) = (call.layout, call.rotated_pairs);
        let angles = match &call.angles {
            AnglesCall::Tables { cos, sin, .. } => {
                PairAngles::Tables { cos: Activations::new(cos, pairs), sin: Activations::new(sin, pairs) }
            }
            &AnglesCall::Theta(theta) => {
                let turns = turns_per_position(theta, layout.frequency_base(head_dim, pairs), pairs);
                // SAFETY: kernels run under the device's lock, and none writes to its inputs.
                let factors = call.freq_factors.as_ref().map(|factors| unsafe { factors.host_slice::<f32>() });
                PairAngles::Frequencies { turns, factors }
            }
        };
        Rotary { layout, pairs, angles }
    }

    pub(super) fn pairs(&self) -> usize {
        self.pairs
    }

    /// turns ← the cosines, then the sines of all pairs at a position.
    ///
    /// # Safety
    /// The level's instructions are enabled; `turns` has two numbers per pair; the tables reach the position.
    #[inline(always)]
    pub(super) unsafe fn turns<S: Simd>(&self, position: u32, turns: &mut [f32]) {
        let (cos, sin) = turns.split_at_mut(self.pairs);
        // SAFETY: passed on to the caller.
        unsafe {
            match &self.angles {
                PairAngles::Tables { cos: cos_table, sin: sin_table } => {
                    cos_table.load::<S>(position as usize, cos);
                    sin_table.load::<S>(position as usize, sin);
                }
                PairAngles::Frequencies { turns, factors } => {
                    let position = f64::from(position);
                    // A separate loop without factors, which the compiler can vectorise.
                    let Some(factors) = factors else {
                        for (to, &turns) in cos.iter_mut().zip(&**turns) {
                            let turns = position * turns;
                            *to = (turns - turns.round_ties_even()) as f32;
                        }
                        return cos_sin::<S>(cos, sin);
                    };
                    for ((to, &turns), &factor) in cos.iter_mut().zip(&**turns).zip(*factors) {
                        let turns = position * (turns / f64::from(factor));
                        *to = (turns - turns.round_ties_even()) as f32;
                    }
                    cos_sin::<S>(cos, sin);
                }
            }
        }
    }

    /// Turns the pairs of a row.
    ///
    /// # Safety
    /// The level's instructions are enabled; `turns` comes from [`Rotary::turns`].
    #[inline(always)]
    pub(super) unsafe fn apply<S: Simd>(&self, turns: &[f32], row: &mut [f32]) {
        let (cos, sin) = turns.split_at(self.pairs);
        let pairs = self.pairs;
        let second = match self.layout {
            PairLayout::Halves => row.len() / 2,
            PairLayout::LeadingHalves => pairs,
            PairLayout::Interleaved => {
                let row = row.as_chunks_mut::<2>().0;
                for ((pair, &cos), &sin) in row.iter_mut().zip(cos).zip(sin) {
                    let [a, b] = *pair;
                    *pair = [a * cos - b * sin, a * sin + b * cos];
                }
                return;
            }
        };
        let (first, second) = row.split_at_mut(second);
        let (first, second) = (&mut first[..pairs], &mut second[..pairs]);
        let whole = pairs - pairs % S::LANES;
        // SAFETY: whole vectors of slices that are all `pairs` long.
        unsafe {
            for i in (0..whole).step_by(S::LANES) {
                let (cos, sin) = (S::load(cos.as_ptr().add(i)), S::load(sin.as_ptr().add(i)));
                let (at_a, at_b) = (first.as_mut_ptr().add(i), second.as_mut_ptr().add(i));
                let (a, b) = (S::load(at_a), S::load(at_b));
                S::store(at_a, S::sub(S::mul(a, cos), S::mul(b, sin)));
                S::store(at_b, S::fma(a, sin, S::mul(b, cos)));
            }
        }
        for i in whole..pairs {
            let (a, b) = (first[i], second[i]);
            (first[i], second[i]) = (a * cos[i] - b * sin[i], a * sin[i] + b * cos[i]);
        }
    }
}

/// theta^(−2i/base) / 2π for the first `pairs` values of i. The latest few tables are cached: a model has one or two,
/// and every layer of every step requests them.
fn turns_per_position(theta: f64, base: usize, pairs: usize) -> Arc<[f64]> {
    const KEPT: usize = 16;
    type Key = (u64, usize, usize);
    static TABLES: Mutex<Vec<(Key, Arc<[f64]>)>> = Mutex::new(Vec::new());
    let key = (theta.to_bits(), base, pairs);
    // A table is complete before it enters the list, so a panic elsewhere leaves the list valid.
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, table)) = tables.iter().find(|(known, _)| *known == key) {
        return table.clone();
    }
    let turns = |i: usize| theta.powf(-2.0 * i as f64 / base as f64) / std::f64::consts::TAU;
    let table: Arc<[f64]> = (0..pairs).map(turns).collect();
    if tables.len() == KEPT {
        tables.remove(0);
    }
    tables.push((key, table.clone()));
    table
}

/// Replaces angles in `cos`, in turns from −½ to ½, by their cosines, and writes their sines.
///
/// # Safety
/// The level's instructions are enabled; the slices are equally long.
#[inline(always)]
unsafe fn cos_sin<S: Simd>(cos: &mut [f32], sin: &mut [f32]) {
    let n = cos.len();
    let whole = n - n % S::LANES;
    // SAFETY: whole vectors of both; the rest goes through buffers of a vector.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            let (c, s) = cos_sin_lanes::<S>(S::load(cos.as_ptr().add(i)));
            S::store(cos.as_mut_ptr().add(i), c);
            S::store(sin.as_mut_ptr().add(i), s);
        }
        if whole < n {
            let (mut c, mut s) = ([0f32; 16], [0f32; 16]);
            c[..n - whole].copy_from_slice(&cos[whole..]);
            let (vc, vs) = cos_sin_lanes::<S>(S::load(c.as_ptr()));
            S::store(c.as_mut_ptr(), vc);
            S::store(s.as_mut_ptr(), vs);
            cos[whole..].copy_from_slice(&c[..n - whole]);
            sin[whole..].copy_from_slice(&s[..n - whole]);
        }
    }
}

/// Cosine and sine of angles in turns, −½ to ½, to about 2e-7.
#[inline(always)]
unsafe fn cos_sin_lanes<S: Simd>(turns: S::F) -> (S::F, S::F) {
    // SAFETY: the caller's promise.
    unsafe {
        // The nearest quarter turn q, and the remainder, at most an eighth of a turn.
        let q = S::round(S::mul(turns, S::splat(4.0)));
        let x = S::mul(S::fma(q, S::splat(-0.25), turns), S::splat(std::f32::consts::TAU));
        let xx = S::mul(x, x);
        // Taylor: on |x| ≤ π/4 the next terms are below 2e-9 and 3e-10.
        let mut sin = S::splat(1.0 / 362_880.0);
        for c in [-1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0] {
            sin = S::fma(sin, xx, S::splat(c));
        }
        let sin = S::fma(S::mul(sin, xx), x, x);
        let mut cos = S::splat(-1.0 / 3_628_800.0);
        for c in [1.0 / 40_320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5, 1.0] {
            cos = S::fma(cos, xx, S::splat(c));
        }
        // For q from −2 to 2: cos(q·π/2) = 1 − |q| and sin(q·π/2) = q·(2 − |q|), exactly.
        let abs = S::max(q, S::sub(S::zero(), q));
        let quarter_cos = S::sub(S::splat(1.0), abs);
        let quarter_sin = S::mul(q, S::sub(S::splat(2.0), abs));
        (S::sub(S::mul(quarter_cos, cos), S::mul(quarter_sin, sin)), S::fma(quarter_sin, cos, S::mul(quarter_cos, sin)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Device, HeadOrder,
        cpu::testing::{Numbers, assert_close, devices, tensor},
        ops::{self, HeadNorm, Rope},
    };

    #[derive(Clone, Debug)]
    struct NormRopeCase {
        dims: [usize; 3],
        dtypes: [DType; 3],
        layout: PairLayout,
        pairs: usize,
        tables: bool,
        factors: bool,
        rotate: bool,
        order: HeadOrder,
    }

    /// The output of a case, with positions up to a million.
    fn norm_rope(device: &Device, case: &NormRopeCase, [with_norm, with_rope]: [bool; 2]) -> Tensor {
        let [tokens, heads, dim] = case.dims;
        let mut numbers = Numbers(7);
        let x = tensor(device, case.dtypes[0], &numbers.floats(tokens * heads * dim), &case.dims);
        let weight = tensor(device, case.dtypes[1], &numbers.floats(dim), &[dim]);
        let positions: Vec<u32> = (0..tokens).map(|t| [0, 1_048_576, 77, 5, 999_983][t % 5]).collect();
        let (mut cos, mut sin, rows) = (Vec::new(), Vec::new(), 100);
        for _ in 0..rows * case.pairs {
            let angle = numbers.float() * 3.0;
            cos.push(angle.cos());
            sin.push(angle.sin());
        }
        let cos = tensor(device, DType::F32, &cos, &[rows, case.pairs]);
        let sin = tensor(device, DType::F32, &sin, &[rows, case.pairs]);
        let positions: Vec<u32> = positions.iter().map(|p| if case.tables { p % 100 } else { *p }).collect();
        let positions = Tensor::from_slice(device, &positions, &[tokens]).unwrap();
        let factors: Vec<f32> = numbers.floats(case.pairs).iter().map(|x| 2.5 + x).collect();
        let factors = tensor(device, DType::F32, &factors, &[case.pairs]);
        let angles =
            if case.tables { ops::Angles::Tables { cos: &cos, sin: &sin } } else { ops::Angles::Theta(10_000.0) };
        let freq_factors = (case.factors && !case.tables).then_some(&factors);
        let rope = Rope::new(angles, case.pairs).layout(case.layout).freq_factors(freq_factors);
        let weight = (case.dims[0] != 2).then_some(&weight);
        let shape = match case.order {
            HeadOrder::TokenMajor => [tokens, heads, dim],
            HeadOrder::HeadMajor => [heads, tokens, dim],
        };
        let out = Tensor::zeros(device, case.dtypes[2], &shape).unwrap();
        let mut enc = device.encoder().unwrap();
        let args = ops::NormRope::new(&x, &positions, &out)
            .norm(with_norm.then_some(HeadNorm::new(1e-6).weight(weight)))
            .rope(with_rope.then_some(rope))
            .rotate(case.rotate)
            .out_order(case.order);
        ops::norm_rope(&mut enc, &args).unwrap();
        enc.commit().unwrap().wait().unwrap();
        out
    }

    #[test]
    fn layouts_dtypes_and_sizes_equal_the_reference() {
        use DType::{BF16, F16, F32};
        let reference = Device::reference();
        let layouts = [PairLayout::Halves, PairLayout::LeadingHalves, PairLayout::Interleaved];
        for device in devices() {
            let mut turn = 0;
            for dim in [2usize, 6, 20, 64, 80, 128, 256, 512] {
                for layout in layouts {
                    for pairs in [0, 1, dim / 4, dim / 2] {
                        turn += 1;
                        let dtypes = [[F32; 3], [F16, BF16, F32], [BF16, F32, F16], [BF16; 3]][turn % 4];
                        let order = [HeadOrder::TokenMajor, HeadOrder::HeadMajor][turn % 2];
                        let (tables, factors) = (turn % 3 == 0, turn % 3 == 1);
                        let rotate = turn % 2 == 0 && dim.is_power_of_two();
                        let dims = [turn % 6 + 1, turn % 3 + 1, dim];
                        let case = NormRopeCase { dims, dtypes, layout, pairs, tables, factors, rotate, order };
                        for parts in [[true, true], [false, true], [true, false], [false, false]] {
                            let want = norm_rope(&reference, &case, parts);
                            // Angles are within 1e-6; normalised heads have entries of a few units.
                            assert_close(&norm_rope(&device, &case, parts), &want, 4e-6, &case);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rope_far_position() {
        struct Far;
        impl SimdKernel for Far {
            type Output = f64;
            #[inline(always)]
            fn run<S: Simd>(self) -> f64 {
                let mut worst = 0f64;
                for position in [1, 1000, 1_048_575, 1_048_576] {
                    for theta in [1e4f64, 1e6] {
                        let (layout, pairs) = (PairLayout::Halves, 119);
                        let turns = turns_per_position(theta, 512, pairs);
                        let angles = PairAngles::Frequencies { turns, factors: None };
                        let rotary = Rotary { layout, pairs, angles };
                        let mut turns = vec![0.0; 2 * pairs];
                        // SAFETY: `dispatch` enables the instructions.
                        unsafe { rotary.turns::<S>(position, &mut turns) };
                        for i in 0..pairs {
                            let angle = f64::from(position) * theta.powf(-(i as f64) / 256.0);
                            let (sin, cos) = angle.sin_cos();
                            worst = worst.max((cos - f64::from(turns[i])).abs());
                            worst = worst.max((sin - f64::from(turns[pairs + i])).abs());
                        }
                    }
                }
                worst
            }
        }
        for device_level in crate::SimdLevel::ALL.into_iter().filter(|level| level.is_supported()) {
            let worst = device_level.dispatch(Far);
            assert!(worst < 4e-7, "{device_level}: {worst:e}");
        }
    }

    #[test]
    fn extreme_heads_have_unit_size() {
        for device in devices() {
            for (size, eps) in [(1e30f32, 1e-6), (3e-38, 0.0), (1e-42, 0.0)] {
                let x = tensor(&device, DType::F32, &[size, -size, size, size], &[1, 1, 4]);
                let positions = Tensor::from_slice(&device, &[3u32], &[1]).unwrap();
                let mut enc = device.encoder().unwrap();
                let args = ops::NormRope::new(&x, &positions, &x).norm(Some(HeadNorm::new(eps)));
                ops::norm_rope(&mut enc, &args).unwrap();
                enc.commit().unwrap().wait().unwrap();
                let want = tensor(&device, DType::F32, &[1.0, -1.0, 1.0, 1.0], &[1, 1, 4]);
                assert_close(&x, &want, 1e-5, &size);
            }
        }
    }
}
