//! Parts of decoder layers in f64.

use super::checkpoint::Tensors;

pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| value.into()).collect()
}

pub fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&value| value as f32).collect()
}

/// W·x for a matrix of rows as long as x.
pub fn product(weights: &[f32], x: &[f64]) -> Vec<f64> {
    weights.chunks(x.len()).map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()).collect()
}

/// x · (offset + w) / √(mean x² + eps).
pub fn norm(x: &[f64], weights: &[f32], offset: f64, eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weights).map(|(x, &w)| x * (offset + f64::from(w)) / (mean + eps).sqrt()).collect()
}

pub fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Rotates the pairs (i, i + pairs) of a head.
pub fn rotate(head: &mut [f64], position: usize, pairs: usize, theta: f64) {
    for i in 0..pairs {
        let angle = position as f64 * theta.powf(-(i as f64) / pairs as f64);
        let (a, b) = (head[i], head[i + pairs]);
        head[i] = a * angle.cos() - b * angle.sin();
        head[i + pairs] = b * angle.cos() + a * angle.sin();
    }
}

/// Keys and values of all earlier tokens.
#[derive(Default)]
pub struct Cache {
    pub keys: Vec<Vec<f64>>,
    pub values: Vec<Vec<f64>>,
}

impl Cache {
    /// The attention of each head of a token to all tokens of the cache.
    pub fn attend(&self, q: &[f64], dim: usize) -> Vec<f64> {
        let heads = q.len() / dim;
        let group = heads / (self.keys[0].len() / dim);
        let head = |h: usize| {
            let (q, kv) = (&q[h * dim..(h + 1) * dim], h / group * dim..(h / group + 1) * dim);
            let dot =
                |k: &Vec<f64>| q.iter().zip(&k[kv.clone()]).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt();
            let scores: Vec<f64> = self.keys.iter().map(dot).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            let column = |d: usize| self.values.iter().zip(&weights).map(|(v, w)| v[kv.start + d] * w).sum::<f64>();
            (0..dim).map(|d| column(d) / total).collect::<Vec<f64>>()
        };
        (0..heads).flat_map(head).collect()
    }
}

/// down(silu(gate(x)) · up(x)).
pub fn mlp([gate, up, down]: [&[f32]; 3], x: &[f64]) -> Vec<f64> {
    let inner = product(gate, x).into_iter().zip(product(up, x)).map(|(g, up)| g / (1.0 + (-g).exp()) * up);
    product(down, &inner.collect::<Vec<f64>>())
}

/// Qwen's experts and the shared one with its gate. The weights of the `top_k` most probable add up to 1.
/// `prefix` precedes the names.
pub fn experts(tensors: &Tensors, prefix: &str, top_k: usize, x: &[f64]) -> Vec<f64> {
    let of = |name: &str| tensors.values(&format!("{prefix}{name}"));
    let logits = product(of("gate.weight"), x);
    let mut chosen: Vec<usize> = (0..logits.len()).collect();
    chosen.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    chosen.truncate(top_k);
    let total: f64 = chosen.iter().map(|&e| logits[e].exp()).sum();
    let shared = ["gate_proj", "up_proj", "down_proj"].map(|name| format!("shared_expert.{name}.weight"));
    let gate = 1.0 / (1.0 + (-product(of("shared_expert_gate.weight"), x)[0]).exp());
    let mut sum = mlp(shared.each_ref().map(|name| of(name)), x);
    sum.iter_mut().for_each(|y| *y *= gate);
    let (both, down) = (of("experts.gate_up_proj"), of("experts.down_proj"));
    for e in chosen {
        let (of_gates, of_down) = (both.len() / logits.len(), down.len() / logits.len());
        let (gate, up) = both[e * of_gates..(e + 1) * of_gates].split_at(of_gates / 2);
        let y = mlp([gate, up, &down[e * of_down..(e + 1) * of_down]], x);
        sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += y * logits[e].exp() / total);
    }
    sum
}
