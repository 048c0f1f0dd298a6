//! The gated delta rule. A task has one head of one run. Columns of its state are independent: a few vectors of columns
//! stay in the first cache of a core while the task goes through a chunk of rows, whose inputs have been prepared.

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
        cpu.level.dispatch(HeadTask { call, tensors, run, head });
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
    run: &'a Run,
    head: usize,
}

/// Rows of a chunk.
const ROWS: usize = 8;

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
            let at = self.run.slot * self.call.state.stride() + self.head * key_dim * value_dim;
            let state: *mut f32 = self.tensors.state.at(at).cast();
            if self.run.is_fresh {
                std::slice::from_raw_parts_mut(state, key_dim * value_dim).fill(0.0);
            }
            for first in self.run.rows.clone().step_by(ROWS) {
                let rows = first..self.run.rows.end.min(first + ROWS);
                for (row, token) in rows.clone().zip(&mut tokens) {
                    self.load::<S>(row, token);
                }
                let tokens = &mut tokens[..rows.len()];
                let mut column = 0;
                while column + 4 * S::LANES <= value_dim {
                    for token in &mut *tokens {
                        columns::<S, 4>(state.add(column), value_dim, key_dim, token, column);
                    }
                    column += 4 * S::LANES;
                }
                while column < value_dim {
                    for token in &mut *tokens {
                        columns::<S, 1>(state.add(column), value_dim, key_dim, token, column);
                    }
                    column += S::LANES;
                }
                for (row, token) in rows.zip(&*tokens) {
                    self.tensors.out.store::<S>((row * heads + self.head) * value_dim, &token.v[..value_dim]);
                }
            }
        }
    }
}

impl HeadTask<'_> {
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

/// One token of N vectors of columns, which begin at `state`. The results replace the token's values.
///
/// # Safety
/// The level's instructions are enabled; `state` has `key_dim` rows at a distance of `value_dim`, each with these
/// columns.
#[inline(always)]
unsafe fn columns<S: Simd, const N: usize>(
    state: *mut f32,
    value_dim: usize,
    key_dim: usize,
    token: &mut Token,
    column: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut seen = [S::zero(); N];
        for (i, &k) in token.k[..key_dim].iter().enumerate() {
            let row = state.add(i * value_dim);
            for (j, sum) in seen.iter_mut().enumerate() {
                *sum = S::fma(S::splat(k), S::load(row.add(j * S::LANES)), *sum);
            }
        }
        let (decay, beta) = (S::splat(token.decay), S::splat(token.beta));
        let v = token.v.as_mut_ptr().add(column);
        let mut change = [S::zero(); N];
        for (j, change) in change.iter_mut().enumerate() {
            let v = S::load(v.add(j * S::LANES));
            *change = S::mul(beta, S::sub(v, S::mul(decay, seen[j])));
        }
        let mut sums = [S::zero(); N];
        for i in 0..key_dim {
            let (k, q, row) = (S::splat(token.k[i]), S::splat(token.q[i]), state.add(i * value_dim));
            for j in 0..N {
                let at = row.add(j * S::LANES);
                let new = S::fma(k, change[j], S::mul(decay, S::load(at)));
                S::store(at, new);
                sums[j] = S::fma(q, new, sums[j]);
            }
        }
        for (j, &sum) in sums.iter().enumerate() {
            S::store(v.add(j * S::LANES), sum);
        }
    }
}
