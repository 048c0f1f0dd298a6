//! An attention case, run on a device and on the reference over equal cache bytes.
//!
//! The cache is written on the tested device and its planes are copied to the reference. Attention is therefore
//! compared over exactly equal indices and norms, whichever centroid the encoder chose for a coordinate half-way
//! between two. Encoders have their own tests.

use std::fmt;

use kvant::{
    Codec, DType, Device, DeviceKind, HeadOrder, KvLayer, LayerSpec, Result, Step, Tensor,
    ops::{self, Attend, Hadamard},
};

use super::{
    Bound, Out, Output, Rng, devices, differences, indices, input,
    layers::{Source, copy_to, fill, planes, step, write},
    query, run,
};

/// An attention call and its cache. The default is one token after 64 others, f32, one head.
#[derive(Clone, Debug)]
pub struct Case {
    pub head_dim: usize,
    pub kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    pub k: Codec,
    pub v: Codec,
    /// The dtype of new keys and values.
    pub source: DType,
    pub q: DType,
    pub out: DType,
    /// `None`: a linear layer with spare room. `Some`: a ring with this many slots.
    pub ring: Option<usize>,
    pub order: HeadOrder,
    /// (past, new) tokens of each sequence.
    pub sequences: Vec<(usize, usize)>,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub window: Option<usize>,
    /// Each head has a sink.
    pub sinks: bool,
    pub q_rotated: bool,
    pub splits: Option<usize>,
}

impl Default for Case {
    fn default() -> Case {
        Case {
            head_dim: 64,
            kv_heads: 1,
            group: 1,
            k: Codec::F32,
            v: Codec::F32,
            source: DType::F32,
            q: DType::F32,
            out: DType::F32,
            ring: None,
            order: HeadOrder::HeadMajor,
            sequences: vec![(64, 1)],
            scale: 0.0,
            softcap: None,
            window: None,
            sinks: false,
            q_rotated: false,
            splits: None,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { head_dim, kv_heads, group, k, v, source, q, out, ring, order, sequences, .. } = self;
        write!(f, "D {head_dim}, Hk {kv_heads}, H/Hk {group}, k {k}, v {v}, {source} -> cache, q {q}, out {out}, ")?;
        write!(f, "ring {ring:?}, {order:?}, (past, new) {sequences:?}, scale {}, ", self.scale())?;
        write!(f, "softcap {:?}, window {:?}, sinks {}, ", self.softcap, self.window, self.sinks)?;
        write!(f, "q_rotated {}, splits {:?}", self.q_rotated, self.splits)
    }
}

/// The data of a case.
pub struct Data {
    /// Tokens of all sequences from position 0 on, one sequence after the other.
    pub source: Source,
    /// The query tokens, as (sequence, position), in the order of the batch.
    pub tokens: Vec<(u32, u32)>,
    /// `[T, H, D]`.
    pub queries: Vec<f32>,
}

impl Case {
    /// 1/√D unless the case has its own.
    pub fn scale(&self) -> f32 {
        if self.scale == 0.0 { (self.head_dim as f32).powf(-0.5) } else { self.scale }
    }

    pub fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    pub fn spec(&self) -> LayerSpec {
        let longest = self.sequences.iter().map(|&(past, new)| past + new).max().unwrap_or(0);
        // Not a multiple of any tile.
        LayerSpec::new(self.kv_heads, self.head_dim, self.ring.unwrap_or(longest + 7), self.k)
            .sequences(self.sequences.len())
            .v(self.v)
            .ring(self.ring.is_some())
            .order(self.order)
    }

    /// The new tokens, one sequence after the other.
    fn tokens(&self) -> Vec<(u32, u32)> {
        let sequences = (0..).zip(&self.sequences);
        sequences.flat_map(|(s, &(past, new))| (past..past + new).map(move |p| (s, p as u32))).collect()
    }

    /// Random keys, values and queries, and the new tokens in a shuffled order: sequences interleave in the batch.
    pub fn data(&self) -> Data {
        let mut rng = Rng::of(self);
        let all: usize = self.sequences.iter().map(|&(past, new)| past + new).sum();
        let source = Source::random(&mut rng, all, self.kv_heads, self.head_dim);
        let mut tokens = self.tokens();
        if self.sequences.len() > 1 {
            rng.shuffle(&mut tokens);
        }
        let queries = rng.normals(tokens.len() * self.heads() * self.head_dim);
        Data { source, tokens, queries }
    }

    /// The source token of a (sequence, position).
    fn source_token(&self, (sequence, position): (u32, u32)) -> usize {
        let before = self.sequences[..sequence as usize].iter().map(|&(past, new)| past + new);
        before.sum::<usize>() + position as usize
    }

    /// A layer with the cache's contents when attention runs. Slots that were never written hold NaN.
    pub fn layer(&self, device: &Device, data: &Data) -> Result<KvLayer> {
        let layer = KvLayer::new(device, self.spec())?;
        fill(&layer, 0xFF)?;
        let mut tokens = Vec::new();
        for (s, &(past, new)) in self.sequences.iter().enumerate() {
            tokens.extend((0..past + new).map(|p| (s as u32, p as u32)));
        }
        if tokens.is_empty() {
            return Ok(layer);
        }
        let source: Vec<usize> = tokens.iter().map(|&token| self.source_token(token)).collect();
        let step = step(device, self.sequences.len(), &tokens)?;
        write(&layer, &data.source.gather(&source), self.source, &step)?;
        Ok(layer)
    }

    /// The step of the query tokens. The length of a sequence without new tokens is its past.
    pub fn step(&self, device: &Device, data: &Data) -> Result<Step> {
        let step = step(device, self.sequences.len(), &data.tokens)?;
        let lens: Vec<u32> = self.sequences.iter().map(|&(past, new)| (past + new) as u32).collect();
        let lens = indices(device, &lens, &[lens.len()])?;
        Ok(Step::from_tensors(step.positions().clone(), step.sequence().clone(), lens).with_batch(step.batch()))
    }

    /// Runs attention over a layer that is already written.
    pub fn attend(&self, layer: &KvLayer, data: &Data) -> Result<Out> {
        let out = Out::new(layer.device(), self.out, &[data.tokens.len(), self.heads(), self.head_dim])?;
        self.with_args(layer, data, &out.tensor, |args| {
            run(layer.device(), |enc| {
                if self.q_rotated {
                    let q = args.q.tensor();
                    ops::hadamard(enc, &Hadamard::new(q, q))?;
                }
                ops::attend(enc, args)
            })
        })?;
        Ok(out)
    }

    /// The kernel that a device selects for the case. Nothing runs.
    pub fn kernel(&self, device: &Device) -> Result<&'static str> {
        let layer = KvLayer::new(device, self.spec())?;
        // The kernel does not depend on the data.
        let source = Source { k: Vec::new(), v: Vec::new(), heads: self.kv_heads, dim: self.head_dim };
        let tokens = self.tokens();
        let queries = vec![0.0; tokens.len() * self.heads() * self.head_dim];
        let data = Data { source, tokens, queries };
        let out = Out::new(device, self.out, &[data.tokens.len(), self.heads(), self.head_dim])?;
        self.with_args(&layer, &data, &out.tensor, |args| Ok(ops::explain(args, device)?.kernel))
    }

    /// Calls `then` with the arguments of the attention call.
    fn with_args<T>(
        &self,
        layer: &KvLayer,
        data: &Data,
        out: &Tensor,
        then: impl FnOnce(&Attend) -> Result<T>,
    ) -> Result<T> {
        let device = layer.device();
        let q = input(device, self.q, &data.queries, out.shape())?;
        let step = self.step(device, data)?;
        let sinks: Vec<f32> = Rng::of("sinks").normals(self.heads()).iter().map(|x| 2.0 * x).collect();
        let sinks = Tensor::from_slice(device, &sinks, &[self.heads()])?;
        then(
            &Attend::new(query(&q, self.q_rotated), layer, &step, out)
                .scale(self.scale())
                .softcap(self.softcap)
                .window(self.window)
                .sinks(self.sinks.then_some(&sinks))
                .splits(self.splits),
        )
    }

    /// The error bound on a device. If the output is not f32, CUDA rounds the centroids of keys and values, the rotated
    /// queries and the weights to f16: four errors of at most 2⁻¹². Errors of scores are relative to the scores. The
    /// CPU may round them, too. CUDA's kernel for prompts rounds more.
    pub fn bound_on(&self, device: &Device) -> Bound {
        let mut bound = self.bound();
        let spread = (f64::from(self.scale().abs()) * (self.head_dim as f64).sqrt()).max(1.0);
        let codec = if self.k.is_quantised() { self.k } else { self.v };
        bound = bound.over(device, codec, spread);
        if codec.is_quantised() && self.out != DType::F32 && device.kind() == DeviceKind::Cuda {
            bound.arithmetic += spread / 2048.0;
        }
        if self.out != DType::F32 {
            bound = bound.of_prompt(device, self.q, [self.k, self.v], spread);
        }
        bound
    }

    /// An error e in a score changes a weight by the factor exp(e), and a score's error grows with its size.
    pub fn bound(&self) -> Bound {
        let spread = f64::from(self.scale().abs()) * (self.head_dim as f64).sqrt();
        let mut bound = Bound::of(self.out).times(spread.max(1.0));
        if self.q_rotated && self.q != DType::F32 {
            // Each device rounds the rotated queries once more.
            bound.arithmetic += Bound::of(self.q).unit;
        }
        if self.sinks {
            // The weight of a sink, which affects the whole row, has the rounding error of its score in base 2.
            bound.arithmetic += 4.0 * f64::from(f32::EPSILON);
        }
        bound
    }

    /// Runs the case on every device and compares the results with the reference over equal bytes.
    pub fn check(&self) {
        self.check_data(&self.data());
    }

    /// As [`Case::check`], with other data.
    pub fn check_data(&self, data: &Data) {
        self.check_on(devices(), data);
    }

    /// As [`Case::check`], on the given devices.
    pub fn check_on(&self, devices: &[Device], data: &Data) {
        let mut wrong = Vec::new();
        let mut last: Option<(Vec<Vec<u8>>, Output)> = None;
        for device in devices {
            let mut check = || -> Result<Vec<String>> {
                let layer = self.layer(device, data)?;
                let bytes = planes(&layer)?;
                if last.as_ref().is_none_or(|(seen, _)| *seen != bytes) {
                    let copy = copy_to(&layer, &Device::reference())?;
                    let want = self.attend(&copy, data)?.close_within("out", self.bound())?;
                    last = Some((bytes, want));
                }
                let (_, want) = last.as_ref().expect("just made");
                let got = self.attend(&layer, data)?.close_within("out", self.bound_on(device))?;
                Ok(differences(&[got], std::slice::from_ref(want)))
            };
            match check() {
                Ok(why) => wrong.extend(why.into_iter().map(|why| format!("{device}: {why}"))),
                Err(e) => wrong.push(format!("{device}: {e}")),
            }
        }
        assert!(wrong.is_empty(), "{self}:\n  {}", wrong.join("\n  "));
    }
}
