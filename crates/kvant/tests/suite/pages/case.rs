//! A pool whose sequences hold random tokens, and attention over it, compared with the reference.

use crate::common::{
    Bound, Out, Output, Rng, bytes_of, devices, differences, input,
    layers::{self, Source},
    query, run,
};
use kvant::{
    CacheLayer, Codec, DType, Device, KeyBias, KeyTurns, KvLayer, KvPool, PoolSpec, Result, Sequence, Step, Tensor,
    ops::{self, Attend, Hadamard, PairLayout, Rope},
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
    /// The rotary embedding of the key bias, if keys have one: the bias is ten times longer than the keys without it.
    pub rope: Option<(PairLayout, usize)>,
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
    rope: None,
    sequences: Vec::new(),
};

/// A pool whose sequences hold the case's tokens, and the step of the new tokens.
pub struct Filled {
    pub pool: KvPool,
    pub step: Step,
    pub sequences: Vec<Sequence>,
    /// The source tokens of the new tokens, in the order of the step.
    pub new: Vec<usize>,
}

impl Filled {
    /// The whole memory of the pool: the first plane of the first layer begins at its start.
    fn memory(&self) -> Result<Tensor> {
        let layer = self.pool.layer(0)?;
        let (_, low) = layer.k().tensors().next().expect("every codec has a plane");
        Ok(low.clone())
    }
}

impl Case {
    pub fn layer(&self) -> CacheLayer {
        let dense = if self.dtype == DType::F32 { DType::F16 } else { self.dtype };
        CacheLayer::new(self.kv_heads, self.head_dim, self.k).v(self.v).window(self.window).dense(dense)
    }

    /// The keys and values of all sequences, one after the other.
    pub fn source(&self) -> Source {
        let all = self.sequences.iter().map(|&(past, new)| past + new).sum();
        Source::random(&mut Rng::of(format!("{self:?}")), all, self.kv_heads, self.head_dim)
    }

    /// The key biases of the pool's layers, except the first one.
    fn biases(&self, device: &Device, longest: usize) -> Result<Vec<Option<KeyBias>>> {
        let Some((layout, pairs)) = self.rope else { return Ok(Vec::new()) };
        let factors: Vec<f32> = (0..pairs).map(|i| 1.0 + i as f32 / 7.0).collect();
        let factors = input(device, DType::F32, &factors, &[pairs])?;
        let rope = Rope::new(1e4, pairs).layout(layout).freq_factors(Some(&factors));
        let turns = KeyTurns::new(device, rope, self.head_dim, self.page_tokens, longest)?;
        let bias = Rng::of("bias of keys").normals(self.kv_heads * self.head_dim);
        let bias: Vec<f32> = bias.iter().map(|x| 10.0 * x).collect();
        let bias = input(device, DType::F32, &bias, &[self.kv_heads, self.head_dim])?;
        Ok(vec![None, Some(KeyBias::new(&bias, &turns)?)])
    }

    /// Sequences whose past was written on the device. Sequences take pages in turns, so that the pages of a sequence
    /// are not contiguous. Unwritten memory holds NaN.
    pub fn filled(&self, device: &Device, source: &Source) -> Result<Filled> {
        self.filled_by(device, |layer, step, tokens| layers::write(layer, &source.gather(tokens), DType::F32, step))
    }

    /// As [`Case::filled`], with the memory of another device, whose pool took the same pages.
    fn copied(&self, device: &Device, memory: &[u8]) -> Result<Filled> {
        let filled = self.filled_by(device, |_, _, _| Ok(()))?;
        filled.memory()?.write_bytes(memory)?;
        Ok(filled)
    }

    /// `write` stores the source tokens with the given numbers, according to a step.
    fn filled_by(&self, device: &Device, write: impl Fn(&KvLayer, &Step, &[usize]) -> Result<()>) -> Result<Filled> {
        // Another layer of the same group, so that the tested one does not begin at the start of the page.
        let other = if self.head_dim.is_power_of_two() { Codec::tq(5) } else { Codec::F16 };
        let before = self.layer().k(Codec::BF16).v(other);
        let held = |&(past, new): &(usize, usize)| (past + new).next_multiple_of(self.page_tokens);
        // One page stays free. No more, because msl-host compares all memory that a launch may write.
        let tokens = self.sequences.iter().map(held).sum::<usize>() + self.page_tokens;
        let spec = PoolSpec::new(vec![before, self.layer()], 0).page_tokens(self.page_tokens);
        let spec = spec.room_for(1, tokens, tokens)?;
        let pool = KvPool::with_key_biases(device, &spec, self.biases(device, tokens)?)?;
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
            write(pool.layer(1)?, &step, &tokens)?;
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
        self.attend_in(layer, step, None)
    }

    /// Runs attention, with the context cut into `splits` parts if given.
    pub fn attend_in(&self, layer: &KvLayer, step: &Step, splits: Option<usize>) -> Result<Out> {
        let shape = [step.tokens(), self.kv_heads * self.group, self.head_dim];
        let device = layer.device();
        let q = input(device, self.dtype, &self.queries(step.tokens()), &shape)?;
        let out = Out::new(device, self.dtype, &shape)?;
        run(device, |enc| {
            if self.q_rotated {
                ops::hadamard(enc, &Hadamard::new(&q, &q))?;
            }
            ops::attend(enc, &Attend::new(query(&q, self.q_rotated), layer, step, &out.tensor).splits(splits))
        })?;
        Ok(out)
    }

    pub fn bound(&self, device: &Device) -> Bound {
        let codec = if self.k.is_quantised() { self.k } else { self.v };
        // Keys are stored minus the bias, which makes the stored vectors as long as the bias.
        let spread = if self.rope.is_some() { 10.0 } else { 1.0 };
        let mut bound = Bound::of(self.dtype).over(device, codec, spread);
        if self.rope.is_some() {
            // Scores get a second product with larger factors.
            bound.arithmetic *= 4.0;
            if device.kind() == kvant::DeviceKind::Cuda && self.dtype != DType::F32 {
                // Prompts read bf16 keys to which the bias has been added.
                bound.arithmetic += 1.0 / 512.0;
            }
        }
        if self.k.is_centred() || self.v.is_centred() {
            // A mean adds a term to each sum.
            bound.arithmetic *= 1.5;
        }
        if self.dtype != DType::F32 && device.kind() == kvant::DeviceKind::Cuda && codec.is_quantised() {
            bound.arithmetic += 1.0 / 2048.0;
        }
        if self.q_rotated {
            // Each device rounds the rotated queries once more.
            bound.arithmetic += Bound::of(self.dtype).unit;
        }
        bound.of_prompt(device, self.dtype, [self.k, self.v], 1.0)
    }

    /// Checks that every device agrees with the reference over equal bytes: the reference writes the past, the device
    /// the new tokens.
    pub fn check(&self) {
        self.check_with(|_| Ok(()));
    }

    /// As [`Case::check`], after `change` has changed the step.
    pub fn check_with(&self, change: impl Fn(&Step) -> Result<()>) {
        let devices = devices();
        if devices.is_empty() {
            return;
        }
        let source = self.source();
        let past = || -> Result<(Filled, Vec<u8>)> {
            let filled = self.filled(&Device::reference(), &source)?;
            let bytes = bytes_of(&filled.memory()?)?;
            Ok((filled, bytes))
        };
        let (reference, past) = past().unwrap_or_else(|error| panic!("{self:?} on the reference: {error}"));
        let attended = |filled: &Filled, bound: Bound| -> Result<Output> {
            self.attend(filled.pool.layer(1)?, &filled.step)?.close_within("out", bound)
        };
        // Devices that stored equal bytes share the reference's result.
        let mut last: Option<(Vec<u8>, Output)> = None;
        let mut wrong = Vec::new();
        change(&reference.step).unwrap_or_else(|error| panic!("{self:?} on the reference: {error}"));
        for device in devices {
            let mut compare = || -> Result<Vec<String>> {
                let (filled, bound) = (self.copied(device, &past)?, self.bound(device));
                change(&filled.step)?;
                layers::write(filled.pool.layer(1)?, &source.gather(&filled.new), DType::F32, &filled.step)?;
                let bytes = bytes_of(&filled.memory()?)?;
                if last.as_ref().is_none_or(|(seen, _)| *seen != bytes) {
                    reference.memory()?.write_bytes(&bytes)?;
                    last = Some((bytes, attended(&reference, bound)?));
                }
                let (_, want) = last.as_ref().expect("just made");
                Ok(differences(&[attended(&filled, bound)?], std::slice::from_ref(want)))
            };
            match compare() {
                Ok(why) => wrong.extend(why.into_iter().map(|why| format!("{device}: {why}"))),
                Err(error) => wrong.push(format!("{device}: {error}")),
            }
        }
        assert!(wrong.is_empty(), "{self:?}:\n  {}", wrong.join("\n  "));
    }
}
