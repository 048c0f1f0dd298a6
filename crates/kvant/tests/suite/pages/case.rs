//! A pool whose sequences hold random tokens, and attention over it, compared with the reference.

use crate::common::{
    Bound, Out, Output, Rng, bytes_of, devices, differences, input,
    layers::{self, Source},
    query, run,
};
use kvant::{
    CacheLayer, Codec, DType, Device, KvLayer, KvPool, PoolSpec, Result, Sequence, Step,
    ops::{self, Attend, Hadamard},
};

/// Attention over pages: sequences of (past, new) tokens, the past written in pieces.
#[derive(Clone, Debug)]
pub struct Case {
    pub head_dim: usize,
    pub kv_heads: usize,
    pub group: usize,
    pub k: Codec,
    pub v: Codec,
    pub dtype: DType,
    pub page_tokens: usize,
    pub window: Option<usize>,
    pub q_rotated: bool,
    pub sequences: Vec<(usize, usize)>,
}

pub const CASE: Case = Case {
    head_dim: 64,
    kv_heads: 2,
    group: 2,
    k: Codec::F16,
    v: Codec::F16,
    dtype: DType::F32,
    page_tokens: 16,
    window: None,
    q_rotated: false,
    sequences: Vec::new(),
};

/// A pool whose sequences hold what a case says, and the step of the new tokens.
pub struct Filled {
    pub pool: KvPool,
    pub step: Step,
    pub sequences: Vec<Sequence>,
    /// Of the new tokens, in the order of the step.
    pub new: Vec<usize>,
}

impl Case {
    pub fn layer(&self) -> CacheLayer {
        CacheLayer::new(self.kv_heads, self.head_dim, self.k).v(self.v).window(self.window)
    }

    /// The keys and values of all sequences, one after the other.
    pub fn source(&self) -> Source {
        let all = self.sequences.iter().map(|&(past, new)| past + new).sum();
        Source::random(&mut Rng::of(format!("{self:?}")), all, self.kv_heads, self.head_dim)
    }

    /// Pages are taken in turns, so that those of a sequence do not follow one another. Memory that nobody has written
    /// holds NaN.
    pub fn filled(&self, device: &Device, source: &Source) -> Result<Filled> {
        let pages: usize = self.sequences.iter().map(|&(past, new)| (past + new).div_ceil(self.page_tokens) + 2).sum();
        let bytes_per_page = {
            let vector = |codec: Codec| codec.bytes_per_vector(self.head_dim) + 256;
            (vector(self.k) + vector(self.v)) * self.kv_heads * self.page_tokens + 2048
        };
        // Another layer of the same group, so that the tested one does not begin where the page does.
        let other = if self.head_dim.is_power_of_two() { Codec::tq(5) } else { Codec::F16 };
        let before = self.layer().k(Codec::BF16).v(other);
        let bytes = 4 * pages * bytes_per_page + (1 << 16);
        let spec = PoolSpec::new(vec![before, self.layer()], bytes).page_tokens(self.page_tokens);
        let pool = KvPool::new(device, &spec)?;
        layers::fill(pool.layer(0)?, 0xFF)?;
        let firsts: Vec<usize> = self
            .sequences
            .iter()
            .scan(0, |at, &(past, new)| {
                *at += past + new;
                Some(*at - past - new)
            })
            .collect();
        let mut sequences: Vec<Sequence> = self.sequences.iter().map(|_| pool.sequence()).collect();
        let piece = 2 * self.page_tokens + 3;
        loop {
            let mut batch = Vec::new();
            let mut tokens = Vec::new();
            for ((sequence, &(past, _)), &first) in sequences.iter_mut().zip(&self.sequences).zip(&firsts) {
                let (len, count) = (sequence.len(), piece.min(past - sequence.len()));
                tokens.extend(first + len..first + len + count);
                batch.push((sequence, count));
            }
            if tokens.is_empty() {
                break;
            }
            let step = pool.step(&mut batch)?;
            layers::write(pool.layer(1)?, &source.gather(&tokens), DType::F32, &step)?;
        }
        let mut batch = Vec::new();
        let mut new = Vec::new();
        for ((sequence, &(past, count)), &first) in sequences.iter_mut().zip(&self.sequences).zip(&firsts) {
            new.extend(first + past..first + past + count);
            batch.push((sequence, count));
        }
        let step = pool.step(&mut batch)?;
        Ok(Filled { pool, step, sequences, new })
    }

    pub fn queries(&self, tokens: usize) -> Vec<f32> {
        Rng::of(format!("queries of {self:?}")).normals(tokens * self.kv_heads * self.group * self.head_dim)
    }

    pub fn attend(&self, layer: &KvLayer, step: &Step) -> Result<Out> {
        let shape = [step.tokens(), self.kv_heads * self.group, self.head_dim];
        let device = layer.device();
        let q = input(device, self.dtype, &self.queries(step.tokens()), &shape)?;
        let out = Out::new(device, self.dtype, &shape)?;
        run(device, |enc| {
            if self.q_rotated {
                ops::hadamard(enc, &Hadamard::new(&q, &q))?;
            }
            ops::attend(enc, &Attend::new(query(&q, self.q_rotated), layer, step, &out.tensor))
        })?;
        Ok(out)
    }

    pub fn bound(&self, device: &Device) -> Bound {
        let codec = if self.k.is_quantised() { self.k } else { self.v };
        let mut bound = Bound::of(self.dtype).over(device, codec, 1.0);
        if self.k.is_centred() || self.v.is_centred() {
            // A mean adds to each sum.
            bound.arithmetic *= 1.5;
        }
        if self.dtype != DType::F32 && device.kind() == kvant::DeviceKind::Cuda && codec.is_quantised() {
            bound.arithmetic += 1.0 / 2048.0;
        }
        if self.q_rotated {
            // The rotated queries are rounded once more, on each device by itself.
            bound.arithmetic += Bound::of(self.dtype).unit;
        }
        bound.of_prompt(device, self.dtype, [self.k, self.v], 1.0)
    }

    /// Every device agrees with the reference over the same bytes.
    pub fn check(&self) {
        self.check_with(|_| Ok(()));
    }

    /// The same after `change` has changed the step.
    pub fn check_with(&self, change: impl Fn(&Step) -> Result<()>) {
        let source = self.source();
        for device in devices() {
            let compare = || -> Result<Vec<String>> {
                let made = |device| -> Result<Filled> {
                    let filled = self.filled(device, &source)?;
                    change(&filled.step)?;
                    layers::write(filled.pool.layer(1)?, &source.gather(&filled.new), DType::F32, &filled.step)?;
                    Ok(filled)
                };
                let (got, want) = (made(device)?, made(&Device::reference())?);
                // Both took the same pages. The first plane of the first layer begins where the memory does.
                let [from, to] = [&got, &want].map(|made| made.pool.layer(0).map(|layer| layer.k().clone()));
                let (from, to) = (from?, to?);
                let memory = |planes: &kvant::Planes| planes.tensors().next().map(|(_, low)| low.clone()).unwrap();
                memory(&to).write_bytes(&bytes_of(&memory(&from))?)?;
                let bound = self.bound(device);
                let [got, want] = [&got, &want].map(|made| -> Result<Output> {
                    self.attend(made.pool.layer(1)?, &made.step)?.close_within("out", bound)
                });
                Ok(differences(&[got?], &[want?]))
            };
            let wrong = compare().unwrap_or_else(|error| vec![error.to_string()]);
            assert!(wrong.is_empty(), "{self:?} on {device}:\n  {}", wrong.join("\n  "));
        }
    }
}
