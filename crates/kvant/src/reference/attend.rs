use std::{collections::BTreeMap, ops::Range};

use super::{check_len, hadamard, io, key_bias, softcap};
use crate::{Result, ops::attend::Call};

/// A partial softmax result over some of the keys. It can be extended, or merged with the state over other keys
/// (Milakov & Gimelshein 2018; Dao et al. 2022).
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Σⱼ exp(scoreⱼ − m) · valueⱼ.
    pub o: Vec<f64>,
    /// The largest score, and at least `f64::MIN`; −∞ without keys.
    pub m: f64,
    /// Σⱼ exp(scoreⱼ − m).
    pub l: f64,
}

impl State {
    /// The state over no keys.
    pub fn empty(head_dim: usize) -> State {
        State { o: vec![0.0; head_dim], m: f64::NEG_INFINITY, l: 0.0 }
    }

    /// The state over the keys of both, which have equal D. Associative and commutative; the empty state is neutral.
    #[must_use]
    pub fn merge(self, other: State) -> State {
        // An empty side must not be scaled by exp(−∞ + ∞).
        if other.m == f64::NEG_INFINITY && other.l == 0.0 {
            return self;
        }
        if self.m == f64::NEG_INFINITY && self.l == 0.0 {
            return other;
        }
        let m = self.m.max(other.m);
        let (a, b) = ((self.m - m).exp(), (other.m - m).exp());
        let o = self.o.iter().zip(&other.o).map(|(x, y)| a * x + b * y).collect();
        State { o, m, l: a * self.l + b * other.l }
    }

    /// softmax · V; zeros without keys, NaN if every score was −∞.
    pub fn finish(&self) -> Vec<f64> {
        let no_key = self.m == f64::NEG_INFINITY && self.l == 0.0;
        self.o.iter().map(|o| if no_key { 0.0 } else { o / self.l }).collect()
    }

    /// log2 Σⱼ exp(scoreⱼ), which a merge needs in addition to the result. −∞ without keys, or if every score was −∞.
    fn end(&self) -> f64 {
        (self.m + self.l.ln()) * std::f64::consts::LOG2_E
    }

    /// Rebuilds the state from a result and its end.
    fn of_result(result: &[f64], end: f64) -> State {
        if end == f64::NEG_INFINITY {
            return State::empty(result.len());
        }
        State { o: result.to_vec(), m: end * std::f64::consts::LN_2, l: 1.0 }
    }
}

/// One query vector, and the parameters of its scores.
#[derive(Clone, Copy, Debug)]
pub struct QueryVector<'a> {
    /// D coordinates.
    pub q: &'a [f64],
    /// Multiplies the scores.
    pub scale: f64,
    /// s ← c·tanh(s/c), after the scale.
    pub softcap: Option<f64>,
}

/// The state of a query that sees all of the keys and values: scoreⱼ = scale · q·kⱼ, with the query's softcap.
///
/// # Errors
/// `Shape` if a key or a value does not have the query's length.
pub fn attend<'a>(query: QueryVector, keys_values: impl IntoIterator<Item = (&'a [f64], &'a [f64])>) -> Result<State> {
    let (mut scores, mut values) = (Vec::new(), Vec::new());
    for (key, value) in keys_values {
        check_len("attend", "key", query.q.len(), key.len())?;
        check_len("attend", "value", query.q.len(), value.len())?;
        let score = query.scale * query.q.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
        scores.push(query.softcap.map_or(score, |cap| softcap(score, cap)));
        values.push(value);
    }
    let mut state = State::empty(query.q.len());
    // Start from a finite value, because −∞ − (−∞) is NaN: so a score of −∞ has weight zero unless all scores are −∞.
    let lowest = if scores.is_empty() { f64::NEG_INFINITY } else { f64::MIN };
    state.m = scores.iter().copied().fold(lowest, f64::max);
    for (score, value) in scores.iter().zip(values) {
        let weight = (score - state.m).exp();
        state.l += weight;
        state.o.iter_mut().zip(value).for_each(|(o, v)| *o += weight * v);
    }
    Ok(state)
}

/// Decoded vectors of one sequence and KV head.
struct Context<'a> {
    call: &'a Call,
    /// Keys and values by position: cached positions that some token sees. Others are not decoded.
    cached: BTreeMap<usize, [Vec<f64>; 2]>,
}

impl Context<'_> {
    fn attend(&self, query: QueryVector, seen: Range<usize>) -> State {
        let Call { splits, head_dim, .. } = *self.call;
        let over = |keys_values: Vec<(&[f64], &[f64])>| {
            attend(query, keys_values).expect("all vectors have the layer's head_dim")
        };
        let mut state = State::empty(head_dim);
        let part = seen.len().div_ceil(splits.max(1)).max(1);
        for first in seen.clone().step_by(part) {
            let range = self.cached.range(first..seen.end.min(first + part));
            state = state.merge(over(range.map(|(_, [k, v])| (&k[..], &v[..])).collect()));
        }
        state
    }
}

pub(crate) fn run(call: &Call) {
    let (layer, dim) = (&call.layer, call.head_dim);
    let spec = layer.spec();
    let group = call.heads / spec.kv_heads;
    let (q, lens) = (io::load(&call.q), io::load_u32(&call.step.lens));
    let positions = io::load_u32(&call.step.positions);
    let sequences = io::load_u32(&call.step.sequence);
    let sinks = call.sinks.as_ref().map(io::load);
    let earlier = call.earlier.as_ref().map(|earlier| (io::load(&earlier.out), io::load(&earlier.ends)));
    // SAFETY: the device's lock is held, and nothing writes to the step.
    let table = unsafe { call.step.page_table(layer) };
    let (mut out, mut ends) = (vec![0.0; q.len()], vec![f64::NEG_INFINITY; call.tokens * call.heads]);
    for (sequence, &len) in lens.iter().enumerate() {
        let tokens: Vec<(usize, usize)> = (0..call.tokens)
            .filter(|&token| sequences[token] as usize == sequence)
            .map(|token| (token, positions[token] as usize))
            .collect();
        let seen = |position: usize| call.seen(position, len as usize);
        for kv_head in 0..spec.kv_heads {
            let mut context = Context { call, cached: BTreeMap::new() };
            for &(_, position) in &tokens {
                for j in seen(position) {
                    let Some(place) = layer.place(table, sequence, kv_head, j) else { continue };
                    let load = || {
                        let mut rows = [&layer.k, &layer.v].map(|side| io::load_vector(layer, side, place, false));
                        if let Some(bias) = layer.key_bias() {
                            rows[0].iter_mut().zip(key_bias::at(bias, kv_head, j)).for_each(|(k, bias)| *k += bias);
                        }
                        rows
                    };
                    context.cached.entry(j).or_insert_with(load);
                }
            }
            for &(token, position) in &tokens {
                for head in kv_head * group..(kv_head + 1) * group {
                    let at = (token * call.heads + head) * dim;
                    let mut q = q[at..at + dim].to_vec();
                    if call.q_rotated {
                        q = hadamard(&q, true).expect("validation checked D");
                    }
                    let softcap = call.softcap.map(f64::from);
                    let query = QueryVector { q: &q, scale: call.scale.into(), softcap };
                    let mut state = context.attend(query, seen(position));
                    let row = at / dim;
                    if let Some((earlier, ends)) = &earlier {
                        state = state.merge(State::of_result(&earlier[at..at + dim], ends[row]));
                    }
                    if let Some(sinks) = &sinks {
                        state = state.merge(State { o: vec![0.0; dim], m: sinks[head], l: 1.0 });
                    }
                    ends[row] = state.end();
                    let result = if call.ends.is_some() && ends[row] == f64::NEG_INFINITY {
                        vec![0.0; dim]
                    } else {
                        state.finish()
                    };
                    out[at..at + dim].copy_from_slice(&result);
                }
            }
        }
    }
    io::store(&call.out, &out);
    if let Some(to) = &call.ends {
        io::store(to, &ends);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn state() -> impl Strategy<Value = State> {
        let filled = (-1e4..1e4, 1.0..50.0, prop::collection::vec(-10.0..10.0, 4));
        prop_oneof![
            1 => Just(State::empty(4)),
            4 => filled.prop_map(|(m, l, o)| State { o, m, l }),
        ]
    }

    fn close(a: &State, b: &State) -> bool {
        let near = |x: f64, y: f64| x == y || (x - y).abs() <= 1e-12 * (1.0 + x.abs().max(y.abs()));
        near(a.m, b.m) && near(a.l, b.l) && a.o.iter().zip(&b.o).all(|(&x, &y)| near(x, y))
    }

    proptest! {
        #[test]
        fn merge_is_associative_and_commutative(a in state(), b in state(), c in state()) {
            let left = a.clone().merge(b.clone()).merge(c.clone());
            let right = a.clone().merge(b.clone().merge(c));
            prop_assert!(close(&left, &right));
            prop_assert!(close(&a.clone().merge(b.clone()), &b.merge(a)));
        }

        #[test]
        fn the_empty_state_is_neutral(a in state()) {
            prop_assert_eq!(&a.clone().merge(State::empty(4)), &a);
            prop_assert_eq!(&State::empty(4).merge(a.clone()), &a);
        }

        #[test]
        fn any_split_gives_the_whole(
            rows in prop::collection::vec(prop::collection::vec(-3.0..3.0, 8), 2..20),
            cut in any::<prop::sample::Index>(),
        ) {
            let query = QueryVector { q: &rows[0][..4], scale: 50.0, softcap: None };
            let over = |rows: &[Vec<f64>]| attend(query, rows.iter().map(|row| row.split_at(4))).unwrap();
            let cut = cut.index(rows.len());
            let (whole, parts) = (over(&rows), over(&rows[..cut]).merge(over(&rows[cut..])));
            prop_assert!(close(&whole, &parts));
        }
    }

    #[test]
    fn no_key_gives_zeros() {
        assert_eq!(State::empty(3).merge(State::empty(3)).finish(), [0.0; 3]);
    }

    #[test]
    fn softmax_by_hand() {
        let query = QueryVector { q: &[2.0, 0.0], scale: 0.5, softcap: Some(3.0) };
        let (k0, k1) = ([1.0, 9.0], [-4.0, 9.0]);
        let out = attend(query, [(&k0[..], &[1.0, 0.0][..]), (&k1[..], &[0.0, 1.0][..])]).unwrap().finish();
        let (s0, s1) = (3.0 * (1.0f64 / 3.0).tanh(), 3.0 * (-4.0f64 / 3.0).tanh());
        let p0 = 1.0 / (1.0 + (s1 - s0).exp());
        assert!((out[0] - p0).abs() < 1e-15 && (out[1] - (1.0 - p0)).abs() < 1e-15);
    }
}
