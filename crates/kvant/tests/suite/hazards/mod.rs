//! The known ways in which caches and attention kernels go wrong, one test each, on every device.

mod numbers;
mod order;
mod places;
mod refusals;
mod seen;
mod states;

use crate::common::{
    Bound, FLOATS, Out, Rng, assert_close,
    attention::Case,
    bytes_of, devices, indices, input,
    layers::{self, CODECS, GAUSSIAN_MSE, Source, copy_to, fill, linear_spec, planes, range_step, ring_spec, step},
    nmse, run, sees_indices,
};
use kvant::{
    CacheLayer, Codec, DType, Device, DeviceKind, Encoder, Error, HeadOrder, KvLayer, KvPool, PoolSpec, Result,
    Sequence, Step, StepSize, Tensor,
    ops::{
        self, Angles, Attend, Hadamard, HeadNorm, KvRead, KvSide, KvWrite, NormRope, PairLayout, Residual, RmsNorm,
        Rope, Softcap,
    },
};

/// Plain attention of f32 queries over a layer.
fn attend(layer: &KvLayer, q: &Tensor, step: &Step, window: Option<usize>) -> Result<Vec<f32>> {
    let out = Out::new(layer.device(), DType::F32, q.shape())?;
    run(layer.device(), |enc| ops::attend(enc, &plain(layer, q, step, window, &out.tensor)))?;
    out.bytes()?;
    out.tensor.to_f32()
}

fn plain<'a>(layer: &'a KvLayer, q: &'a Tensor, step: &'a Step, window: Option<usize>, out: &'a Tensor) -> Attend<'a> {
    let scale = (layer.spec().head_dim as f32).powf(-0.5);
    Attend::new(q, layer, step, out).scale(scale).window(window)
}

/// Softmax attention of one query over the given keys and values of one head, in f64.
fn by_hand(q: &[f32], keys: &[&[f32]], values: &[&[f32]], scale: f64, softcap: Option<f64>) -> Vec<f32> {
    let dot = |k: &[f32]| k.iter().zip(q).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() * scale;
    let cap = |s: f64| softcap.map_or(s, |c| c * (s / c).tanh());
    let scores: Vec<f64> = keys.iter().map(|k| cap(dot(k))).collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    let column = |d: usize| values.iter().zip(&weights).map(|(v, w)| f64::from(v[d]) * w).sum::<f64>() / total;
    (0..values.first().map_or(0, |v| v.len())).map(|d| column(d) as f32).collect()
}

fn rows(x: &[f32], dim: usize) -> Vec<&[f32]> {
    x.chunks(dim).collect()
}
