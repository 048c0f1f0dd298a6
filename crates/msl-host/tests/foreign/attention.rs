//! Attention in f64.

/// The shape of attention, and the options that change its scores.
#[derive(Clone, Debug)]
pub struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
    pub queries: usize,
    pub keys: usize,
    pub d: usize,
    pub scale: f64,
    pub causal: bool,
    /// Added to the scores: \[query\]\[key\].
    pub mask: Option<Vec<f64>>,
    /// One score per head without a value.
    pub sinks: Option<Vec<f64>>,
}

impl Attention {
    /// The result, \[head\]\[query\]\[d\], from queries in the same order and keys and values, \[head\]\[key\]\[d\].
    pub fn run(&self, q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
        let (d, n) = (self.d, self.keys);
        let mut out = Vec::with_capacity(q.len());
        for (row, q) in q.chunks(d).enumerate() {
            let (head, query) = (row / self.queries, row % self.queries);
            let from = head / (self.heads / self.kv_heads) * n * d;
            let seen = if self.causal { n - self.queries + query + 1 } else { n };
            let score = |i: usize| {
                let dot: f64 = q.iter().zip(&k[from + i * d..]).map(|(a, b)| a * b).sum();
                dot * self.scale + self.mask.as_ref().map_or(0.0, |m| m[query * n + i])
            };
            let scores: Vec<f64> = (0..seen).map(score).collect();
            let sink = self.sinks.as_ref().map(|s| s[head]);
            let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum = weights.iter().sum::<f64>() + sink.map_or(0.0, |s| (s - max).exp());
            out.extend(
                (0..d).map(|j| weights.iter().enumerate().map(|(i, w)| w * v[from + i * d + j]).sum::<f64>() / sum),
            );
        }
        out
    }
}
