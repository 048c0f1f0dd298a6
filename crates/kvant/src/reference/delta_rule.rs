use super::io;
use crate::ops::delta_rule::{Call, NORM_EPS};

pub(crate) fn run(call: &Call) {
    let Call { heads, key_heads, key_dim, value_dim, .. } = *call;
    let (qkv, a, b) = (io::load(&call.qkv), io::load(&call.a), io::load(&call.b));
    let (rate, a_bias) = (io::load(&call.rate), io::load(&call.a_bias));
    let mut out = io::load(&call.out);
    // SAFETY: the device's lock is held while a call runs, and the indices have been checked.
    for run in unsafe { call.runs.active() } {
        let slot = |slot| call.state.slot(slot).expect("slots have been checked");
        let mut state = io::load(&slot(run.slot));
        if run.is_fresh {
            state.fill(0.0);
        }
        for row in run.rows.clone() {
            for (head, state) in state.chunks_exact_mut(key_dim * value_dim).enumerate() {
                let row_at = row * call.width();
                let key_head = call.key_head(head);
                let q = normalised(&qkv[row_at + key_head * key_dim..][..key_dim]);
                let k = normalised(&qkv[row_at + (key_heads + key_head) * key_dim..][..key_dim]);
                let v = &qkv[row_at + 2 * key_heads * key_dim + head * value_dim..][..value_dim];
                let decay = (rate[head] * softplus(a[row * heads + head] + a_bias[head])).exp();
                let beta = 1.0 / (1.0 + (-b[row * heads + head]).exp());
                let scale = 1.0 / (key_dim as f64).sqrt();
                for column in 0..value_dim {
                    let of_column = |i: usize| i * value_dim + column;
                    let seen: f64 = (0..key_dim).map(|i| k[i] * decay * state[of_column(i)]).sum();
                    let change = beta * (v[column] - seen);
                    let mut sum = 0.0;
                    for i in 0..key_dim {
                        let s = decay * state[of_column(i)] + k[i] * change;
                        state[of_column(i)] = s;
                        sum += q[i] * s;
                    }
                    out[(row * heads + head) * value_dim + column] = scale * sum;
                }
            }
            if let Some(after) = run.slot_after(row) {
                io::store(&slot(after), &state);
            }
        }
    }
    io::store(&call.out, &out);
}

fn normalised(x: &[f64]) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| x * x).sum();
    let root = (squares + f64::from(NORM_EPS)).sqrt();
    x.iter().map(|x| x / root).collect()
}

/// ln(1 + eˣ).
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
