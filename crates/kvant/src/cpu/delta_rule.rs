//! The gated delta rule. A task has one head of one run. Columns of its state are independent: a few vectors of columns
//! stay in the first cache of a core while the task goes through some rows, whose inputs have been prepared.
//!
//! Prompts go through the state in blocks of four tokens: the chunked form of the rule (section 3.3 of the paper) with
//! chunks that fit in registers. It needs 3.25 multiply-adds for each element of the state and token, instead of 4, and
//! a quarter of the loads and stores. Larger chunks only add work within the chunk: one of 64 needs 4.

use super::{
    Cpu,
    elements::Elements,
    simd::{Simd, SimdKernel},
};
use crate::ops::{
    delta_rule::{Call, MAX_DIM, NORM_EPS},
    state_runs::Run,
};

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    // SAFETY: the device's lock is held while a call runs, and the indices have been checked.
    let runs = unsafe { call.runs.active() };
    let tensors = RuleTensors {
        qkv: Elements::of(&call.qkv),
        a: Elements::of(&call.a),
        b: Elements::of(&call.b),
        rate: Elements::of(&call.rate),
        a_bias: Elements::of(&call.a_bias),
        state: Elements::of(call.state.memory()),
        out: Elements::of(&call.out),
    };
    cpu.threads.run(runs.len() * call.heads, |task| {
        let (run, head) = (&runs[task / call.heads], task % call.heads);
        cpu.level.dispatch(HeadTask { call, tensors, run, head, is_batch_invariant: cpu.batch_invariant });
    });
}

#[derive(Clone, Copy)]
struct RuleTensors {
    qkv: Elements,
    a: Elements,
    b: Elements,
    rate: Elements,
    a_bias: Elements,
    state: Elements,
    out: Elements,
}

/// One head of one run.
struct HeadTask<'a> {
    call: &'a Call,
    tensors: RuleTensors,
    run: &'a Run<'a>,
    head: usize,
    is_batch_invariant: bool,
}

/// Rows whose inputs are prepared together, a multiple of BLOCK.
const ROWS: usize = 8;
/// Tokens that go through the state together: it is read and written once for all of them.
const BLOCK: usize = 4;

/// The inputs of a token.
#[derive(Clone)]
struct Token {
    q: [f32; MAX_DIM],
    k: [f32; MAX_DIM],
    /// Values, then the result.
    v: [f32; MAX_DIM],
    decay: f32,
    beta: f32,
}

impl SimdKernel for HeadTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Call { heads, key_dim, value_dim, .. } = *self.call;
        let none = Token { q: [0.0; MAX_DIM], k: [0.0; MAX_DIM], v: [0.0; MAX_DIM], decay: 0.0, beta: 0.0 };
        let mut tokens = vec![none; self.run.rows.len().min(ROWS)];
        // SAFETY: `dispatch` enables the instructions; rows and slots have been checked, and no other task has this
        // head of them. D and Dv are multiples of 16, and so of LANES.
        unsafe {
            let mut before = self.state(self.run.slot);
            for (part, slot) in self.run.parts() {
                let state = self.state(slot);
                if self.run.is_fresh && part.start == self.run.rows.start {
                    state.write_bytes(0, key_dim * value_dim);
                } else if state != before {
                    // Slots may overlap.
                    state.copy_from(before, key_dim * value_dim);
                }
                for first in part.clone().step_by(ROWS) {
                    let rows = first..part.end.min(first + ROWS);
                    for (row, token) in rows.clone().zip(&mut tokens) {
                        self.load::<S>(row, token);
                    }
                    self.advance::<S>(state, &mut tokens[..rows.len()]);
                    for (row, token) in rows.zip(&tokens) {
                        self.tensors.out.store::<S>((row * heads + self.head) * value_dim, &token.v[..value_dim]);
                    }
                }
                before = state;
            }
        }
    }
}

impl HeadTask<'_> {
    /// The head's state in a slot.
    ///
    /// # Safety
    /// The slot exists.
    unsafe fn state(&self, slot: usize) -> *mut f32 {
        let at = slot * self.call.state.stride() + self.head * self.call.key_dim * self.call.value_dim;
        // SAFETY: the caller's promise.
        unsafe { self.tensors.state.at(at).cast() }
    }

    /// Takes a state through tokens, whose results replace their values. On a batch-invariant device, tokens must not
    /// depend on the end of a step, so they go one by one.
    ///
    /// # Safety
    /// The level's instructions are enabled; `state` is the head's, and no other task has it.
    #[inline(always)]
    unsafe fn advance<S: Simd>(&self, state: *mut f32, tokens: &mut [Token]) {
        let together = if self.is_batch_invariant { 0 } else { tokens.len() / BLOCK * BLOCK };
        let (blocks, others) = tokens.split_at_mut(together);
        // SAFETY: the caller's promise.
        unsafe {
            self.blocks::<S, 2, BLOCK>(state, blocks);
            self.blocks::<S, 4, 1>(state, others);
        }
    }

    /// Takes a state through blocks of T tokens, N vectors of columns at a time, which stay in the first cache.
    ///
    /// # Safety
    /// As [`HeadTask::advance`].
    #[inline(always)]
    unsafe fn blocks<S: Simd, const N: usize, const T: usize>(&self, state: *mut f32, tokens: &mut [Token]) {
        let Call { key_dim, value_dim, .. } = *self.call;
        let (blocks, _) = tokens.as_chunks_mut::<T>();
        let mut weights = [const { Weights::<T>::NONE }; ROWS];
        // SAFETY: the caller's promise; whole vectors of columns.
        unsafe {
            for (weights, block) in weights.iter_mut().zip(&*blocks) {
                *weights = Weights::new::<S>(block, key_dim);
            }
            let mut column = 0;
            while column + N * S::LANES <= value_dim {
                for (weights, block) in weights.iter().zip(&mut *blocks) {
                    columns::<S, N, T>(state.add(column), [key_dim, value_dim], block, weights, column);
                }
                column += N * S::LANES;
            }
            while column < value_dim {
                for (weights, block) in weights.iter().zip(&mut *blocks) {
                    columns::<S, 1, T>(state.add(column), [key_dim, value_dim], block, weights, column);
                }
                column += S::LANES;
            }
        }
    }

    /// Loads a token's normalised query and key, its value and its gates.
    ///
    /// # Safety
    /// The row exists, and the level's instructions are enabled.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, row: usize, token: &mut Token) {
        let Call { heads, key_heads, key_dim, value_dim, .. } = *self.call;
        let (at, key_head) = (row * self.call.width(), self.call.key_head(self.head));
        let mut gates = [0f32; 4];
        let [a, b, rate, a_bias] = &mut gates;
        // SAFETY: the caller's promise.
        unsafe {
            let qkv = self.tensors.qkv;
            qkv.load::<S>(at + key_head * key_dim, &mut token.q[..key_dim]);
            qkv.load::<S>(at + (key_heads + key_head) * key_dim, &mut token.k[..key_dim]);
            qkv.load::<S>(at + 2 * key_heads * key_dim + self.head * value_dim, &mut token.v[..value_dim]);
            self.tensors.a.load::<S>(row * heads + self.head, std::slice::from_mut(a));
            self.tensors.b.load::<S>(row * heads + self.head, std::slice::from_mut(b));
            self.tensors.rate.load::<S>(self.head, std::slice::from_mut(rate));
            self.tensors.a_bias.load::<S>(self.head, std::slice::from_mut(a_bias));
            normalise::<S>(&mut token.q[..key_dim], 1.0 / (key_dim as f32).sqrt());
            normalise::<S>(&mut token.k[..key_dim], 1.0);
        }
        let x = *a + *a_bias;
        token.decay = (*rate * (x.max(0.0) + (-x.abs()).exp().ln_1p())).exp();
        token.beta = 1.0 / (1.0 + (-*b).exp());
    }
}

/// x · scale / √(Σx² + ε).
///
/// # Safety
/// The level's instructions are enabled; the length is a multiple of LANES.
#[inline(always)]
unsafe fn normalise<S: Simd>(x: &mut [f32], scale: f32) {
    // SAFETY: whole vectors within the slice.
    unsafe {
        let mut squares = S::zero();
        for vector in x.chunks_exact(S::LANES) {
            let vector = S::load(vector.as_ptr());
            squares = S::fma(vector, vector, squares);
        }
        let factor = S::splat(scale / (S::sum(squares) + NORM_EPS).sqrt());
        for vector in x.chunks_exact_mut(S::LANES) {
            S::store(vector.as_mut_ptr(), S::mul(S::load(vector.as_ptr()), factor));
        }
    }
}

/// How the tokens of a block act on each other, for all columns. With s < t, d(s, t) is the product of the decays after
/// token s up to t.
struct Weights<const T: usize> {
    /// The product of the decays up to each token.
    decay: [f32; T],
    /// For s < t: beta of t · d(s, t) · (key of t · key of s).
    keys: [[f32; T]; T],
    /// For s ≤ t: d(s, t) · (query of t · key of s).
    queries: [[f32; T]; T],
    /// d(t, T − 1).
    rest: [f32; T],
}

impl<const T: usize> Weights<T> {
    const NONE: Weights<T> = Weights { decay: [0.0; T], keys: [[0.0; T]; T], queries: [[0.0; T]; T], rest: [0.0; T] };

    /// # Safety
    /// The level's instructions are enabled; `key_dim` is a multiple of LANES.
    #[inline(always)]
    unsafe fn new<S: Simd>(tokens: &[Token; T], key_dim: usize) -> Weights<T> {
        let (mut weights, mut decay) = (Weights::NONE, 1.0);
        for (t, token) in tokens.iter().enumerate() {
            decay *= token.decay;
            weights.decay[t] = decay;
            let mut since = 1.0;
            for s in (0..=t).rev() {
                // SAFETY: the caller's promise.
                let (key, query) = unsafe {
                    let earlier = &tokens[s].k[..key_dim];
                    (dot::<S>(&token.k[..key_dim], earlier), dot::<S>(&token.q[..key_dim], earlier))
                };
                weights.keys[t][s] = token.beta * since * key;
                weights.queries[t][s] = since * query;
                since *= tokens[s].decay;
            }
        }
        let mut rest = 1.0;
        for (t, token) in tokens.iter().enumerate().rev() {
            weights.rest[t] = rest;
            rest *= token.decay;
        }
        weights
    }
}

/// a · b.
///
/// # Safety
/// The level's instructions are enabled; the lengths are equal, and multiples of LANES.
#[inline(always)]
unsafe fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: whole vectors within the slices.
    unsafe {
        let mut sum = S::zero();
        for (a, b) in a.chunks_exact(S::LANES).zip(b.chunks_exact(S::LANES)) {
            sum = S::fma(S::load(a.as_ptr()), S::load(b.as_ptr()), sum);
        }
        S::sum(sum)
    }
}

/// T tokens of N vectors of columns, which begin at `state`. The results replace the tokens' values. With S the state
/// before the block, and the changes u:
///
/// ```text
/// u[t]   = beta[t] · (v[t] − decay[t] · Sᵀk[t]) − Σ keys[t, s] · u[s]       s < t
/// out[t] = decay[t] · Sᵀq[t] + Σ queries[t, s] · u[s]                       s ≤ t
/// S      ← decay[T − 1] · S + Σ k[t] ⊗ rest[t] · u[t]
/// ```
///
/// # Safety
/// The level's instructions are enabled; `state` has `key_dim` rows at a distance of `value_dim`, each with these
/// columns.
#[inline(always)]
unsafe fn columns<S: Simd, const N: usize, const T: usize>(
    state: *mut f32,
    [key_dim, value_dim]: [usize; 2],
    tokens: &mut [Token; T],
    weights: &Weights<T>,
    column: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (mut seen, mut asked) = ([[S::zero(); N]; T], [[S::zero(); N]; T]);
        if T == 1 {
            let vectors = [tokens[0].k.as_ptr(), tokens[0].q.as_ptr()];
            [seen[0], asked[0]] = products::<S, N, 2>(state, [key_dim, value_dim], vectors);
        } else {
            // Sums of both do not fit in registers at once.
            seen = products::<S, N, T>(state, [key_dim, value_dim], tokens.each_ref().map(|token| token.k.as_ptr()));
            asked = products::<S, N, T>(state, [key_dim, value_dim], tokens.each_ref().map(|token| token.q.as_ptr()));
        }
        let mut changes = [[S::zero(); N]; T];
        for t in 0..T {
            let v = tokens[t].v.as_mut_ptr().add(column);
            let (decay, beta) = (S::splat(weights.decay[t]), S::splat(tokens[t].beta));
            for j in 0..N {
                let at = v.add(j * S::LANES);
                let mut change = S::mul(beta, S::sub(S::load(at), S::mul(decay, seen[t][j])));
                let mut out = S::mul(decay, asked[t][j]);
                for (s, earlier) in changes[..t].iter().enumerate() {
                    change = S::fma(S::splat(-weights.keys[t][s]), earlier[j], change);
                    out = S::fma(S::splat(weights.queries[t][s]), earlier[j], out);
                }
                changes[t][j] = change;
                S::store(at, S::fma(S::splat(weights.queries[t][t]), change, out));
            }
        }
        for (changes, &rest) in changes.iter_mut().zip(&weights.rest) {
            for change in changes {
                *change = S::mul(S::splat(rest), *change);
            }
        }
        let decay = S::splat(weights.decay[T - 1]);
        for i in 0..key_dim {
            let row = state.add(i * value_dim);
            let mut new = [S::zero(); N];
            for (j, new) in new.iter_mut().enumerate() {
                *new = S::mul(decay, S::load(row.add(j * S::LANES)));
            }
            for t in 0..T {
                let k = S::splat(tokens[t].k[i]);
                for j in 0..N {
                    new[j] = S::fma(k, changes[t][j], new[j]);
                }
            }
            for (j, &new) in new.iter().enumerate() {
                S::store(row.add(j * S::LANES), new);
            }
        }
    }
}

/// The products of T keys or queries with N vectors of columns of the state.
///
/// # Safety
/// As [`columns`]; each vector has `key_dim` elements.
#[inline(always)]
unsafe fn products<S: Simd, const N: usize, const T: usize>(
    state: *const f32,
    [key_dim, value_dim]: [usize; 2],
    vectors: [*const f32; T],
) -> [[S::F; N]; T] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[S::zero(); N]; T];
        for i in 0..key_dim {
            let row = state.add(i * value_dim);
            let mut own = [S::zero(); N];
            for (j, own) in own.iter_mut().enumerate() {
                *own = S::load(row.add(j * S::LANES));
            }
            for t in 0..T {
                let x = S::splat(*vectors[t].add(i));
                for j in 0..N {
                    sums[t][j] = S::fma(x, own[j], sums[t][j]);
                }
            }
        }
        sums
    }
}
