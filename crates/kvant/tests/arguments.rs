//! Arguments of every kind: an operation takes them or says why not, and writes nothing when it does not.
//!
//! Proptest makes a tape of bytes, and every choice in the making of a call reads one: byte 0 is always the plainest
//! choice, so a tape of zeros is a valid call, and shrinking a failing tape brings out the one choice that matters.
//! Each tensor is a view inside a larger allocation, and every byte of every allocation is looked at afterwards.

mod common;

use common::{FLOATS, bytes_of, devices, indices, input, layers::linear_spec, run};
use kvant::{
    Codec, DType, Device, Encoder, Error, KvLayer, LayerSpec, Result, SlotOrder, Step, Tensor,
    codec::{Norm, TurboQuant},
    ops::{
        self, Activation, Affine, Angles, Argmax, Attend, Columns, Embed, Experts, Fresh, Gate, Hadamard, HeadNorm,
        KvRead, KvSide, KvWrite, Linear, MoeCombine, MoeRoute, NormRope, NormRopeWrite, PairLayout, Residual, RmsNorm,
        Rope, Sample, Softcap, SourceOrder, Weight, attend::Plan,
    },
};
use proptest::prelude::*;

// ------------------------------------------------------------------------------------------------------------- the tape

struct Tape<'a> {
    bytes: &'a [u8],
}

impl Tape<'_> {
    fn next(&mut self) -> u8 {
        let Some((&first, rest)) = self.bytes.split_first() else { return 0 };
        self.bytes = rest;
        first
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.next() as usize % from.len()]
    }

    /// Rarely true.
    fn fault(&mut self) -> bool {
        self.next() > 246
    }

    fn flag(&mut self) -> bool {
        self.next() % 2 == 1
    }

    /// A valid number, or now and then any.
    fn number(&mut self, valid: &[f32]) -> f32 {
        if self.fault() {
            self.pick(&[f32::NAN, f32::INFINITY, -1.0, 0.0, f32::MAX, 1e-45, 2.0])
        } else {
            self.pick(valid)
        }
    }

    fn size(&mut self, valid: &[usize]) -> usize {
        if self.fault() {
            self.pick(&[0, 1, 5, usize::MAX, usize::MAX / 2, u32::MAX as usize, 1 << 33])
        } else {
            self.pick(valid)
        }
    }
}

/// What a tensor holds.
#[derive(Clone, Copy)]
enum Content {
    Floats,
    /// u32 below a limit, mostly.
    Below(usize),
    /// Any u32.
    Words,
}

/// An allocation, and the part of it that an operation is given.
struct Made {
    whole: Tensor,
    view: Tensor,
    written: bool,
}

struct World<'t> {
    tape: Tape<'t>,
    device: Device,
    /// For a tensor that is not where it should be.
    other: Device,
    made: Vec<Made>,
}

impl<'t> World<'t> {
    fn new(device: &Device, bytes: &'t [u8]) -> World<'t> {
        let other = if *device == Device::reference() { Device::cpu() } else { Device::reference() };
        World { tape: Tape { bytes }, device: device.clone(), other, made: Vec::new() }
    }

    /// A tensor of one of the dtypes (the first by default) and the shape; with faults in either, in its device, or an
    /// alias of one made before.
    fn tensor(&mut self, accepts: &[DType], shape: &[usize], content: Content, written: bool) -> Tensor {
        if self.tape.fault() && !self.made.is_empty() {
            let at = self.tape.next() as usize % self.made.len();
            self.made[at].written |= written;
            let made = &self.made[at].view;
            return made.reshape(shape).unwrap_or_else(|_| made.clone());
        }
        let mut shape = shape.to_vec();
        if self.tape.fault() {
            match self.tape.next() % 6 {
                0 => drop(shape.pop()),
                1 if shape.len() < 4 => shape.push(1),
                2 => shape.reverse(),
                3 => shape.iter_mut().take(1).for_each(|d| *d += 1),
                4 => shape.iter_mut().take(1).for_each(|d| *d = d.saturating_sub(1)),
                _ => shape.iter_mut().skip(1).take(1).for_each(|d| *d = self.tape.pick(&[0, 1, 3, 64])),
            }
        }
        let any = [DType::F32, DType::F16, DType::BF16, DType::U32, DType::U8];
        let dtype = if self.tape.fault() { self.tape.pick(&any) } else { self.tape.pick(accepts) };
        let device = if self.tape.fault() { self.other.clone() } else { self.device.clone() };
        let count: usize = shape.iter().product();
        let before = self.tape.pick(&[0, 1, 3]);
        let whole = Tensor::zeros(&device, dtype, &[before + count + 5]).unwrap();
        let bytes = self.content(dtype, before + count + 5, content);
        whole.write_bytes(&bytes).unwrap();
        let view = whole.rows(before..before + count).unwrap().reshape(&shape).unwrap();
        self.made.push(Made { whole, view: view.clone(), written });
        view
    }

    fn content(&mut self, dtype: DType, count: usize, content: Content) -> Vec<u8> {
        // One byte of the tape seeds all of a tensor.
        let seed = self.tape.next();
        let mut rng = common::Rng::new(seed.into());
        let wild = self.tape.fault();
        match (dtype, content) {
            (DType::U32, Content::Below(limit)) => {
                let far = [limit as u32, u32::MAX, limit as u32 + 1];
                let values = (0..count)
                    .map(|_| if wild && rng.below(4) == 0 { rng.pick(&far) } else { rng.below(limit.max(1)) as u32 });
                values.flat_map(u32::to_le_bytes).collect()
            }
            (DType::U32 | DType::U8, _) => (0..count * dtype.size()).map(|_| rng.bits() as u8).collect(),
            _ => {
                let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, 1e-42, -0.0];
                let mut values = rng.normals(count);
                if wild {
                    values.iter_mut().for_each(|x| *x = if rng.below(4) == 0 { rng.pick(&odd) } else { *x });
                }
                common::encode(dtype, &values)
            }
        }
    }

    fn input(&mut self, shape: &[usize]) -> Tensor {
        self.tensor(&FLOATS, shape, Content::Floats, false)
    }

    fn f32(&mut self, shape: &[usize]) -> Tensor {
        self.tensor(&[DType::F32], shape, Content::Floats, false)
    }

    fn output(&mut self, shape: &[usize]) -> Tensor {
        self.tensor(&FLOATS, shape, Content::Floats, true)
    }

    fn u32s(&mut self, shape: &[usize], limit: usize, written: bool) -> Tensor {
        self.tensor(&[DType::U32], shape, Content::Below(limit), written)
    }

    fn weight(&mut self, shape: &[usize]) -> Option<Tensor> {
        self.tape.flag().then(|| self.input(shape))
    }

    /// A layer and its planes among the tensors that are watched.
    fn layer(&mut self, written: bool) -> KvLayer {
        let tape = &mut self.tape;
        let quantised = Codec::TurboQuant(TurboQuant {
            bits: tape.pick(&[4, 5, 6, 8]),
            scale: 1.0,
            norm: tape.pick(&[Norm::Rms, Norm::LeastSquares, Norm::Unbiased]),
        });
        let codecs = [Codec::F32, quantised, Codec::F16, Codec::BF16];
        let spec = LayerSpec {
            sequences: tape.pick(&[1, 2]),
            kv_heads: tape.pick(&[1, 2, 3]),
            capacity: tape.pick(&[9, 4, 1, 33]),
            head_dim: tape.pick(&[64, 128, 8, 64]),
            k: tape.pick(&codecs),
            v: tape.pick(&codecs),
            ring: tape.flag(),
            order: tape.pick(&[SlotOrder::HeadMajor, SlotOrder::TokenMajor]),
        };
        let device = if tape.fault() { &self.other } else { &self.device };
        let layer = KvLayer::new(device, spec).unwrap();
        for (_, plane) in layer.k().tensors().chain(layer.v().tensors()) {
            self.made.push(Made { whole: plane.clone(), view: plane.clone(), written });
        }
        layer
    }

    /// A step of so many tokens that fits the layer, but for faults.
    fn step(&mut self, layer: &KvLayer, tokens: usize) -> Step {
        let spec = layer.spec();
        let mut places = Vec::new();
        let limit = if spec.ring { 100 } else { spec.capacity };
        // Each position once in its sequence: two tokens for one slot would race for it.
        for i in 0..tokens {
            places.push(((i % spec.sequences) as u32, (i / spec.sequences % limit) as u32));
        }
        let plain = Step::new(&self.device, spec.sequences, &places).unwrap();
        let mut guarded = |values: &Tensor, limit: usize| {
            let made = self.u32s(&[values.elements()], limit, false);
            let keep = self.tape.fault();
            if !keep && made.dtype() == DType::U32 && made.elements() == values.elements() {
                made.write(&values.to_vec::<u32>().unwrap()).unwrap();
            }
            made
        };
        Step {
            positions: guarded(&plain.positions, limit),
            sequence: guarded(&plain.sequence, spec.sequences),
            lens: guarded(&plain.lens, limit + 1),
        }
    }

    fn norm(&mut self, head_dim: usize) -> (bool, Option<Tensor>, f32) {
        let present = !self.tape.flag();
        (present, self.weight(&[head_dim]), self.tape.number(&[1e-6, 0.0]))
    }

    /// Takes or refuses; either way the memory is as it must be. Some calls are captured and replayed.
    fn attempt(&mut self, what: &str, record: impl Fn(&mut Encoder) -> Result<()>) -> Result<()> {
        let before: Vec<Vec<u8>> = self.made.iter().map(|made| bytes_of(&made.whole).unwrap()).collect();
        let result = if self.tape.flag() {
            Encoder::capture(&self.device, record).and_then(|graph| {
                let after: Vec<Vec<u8>> = self.made.iter().map(|made| bytes_of(&made.whole).unwrap()).collect();
                assert!(before == after, "{}: {what}: a capture runs nothing", self.device);
                graph.replay()?.wait()
            })
        } else {
            run(&self.device, record)
        };
        for (i, (made, before)) in self.made.iter().zip(&before).enumerate() {
            let after = bytes_of(&made.whole).unwrap();
            let from = made.view.byte_offset() - made.whole.byte_offset();
            let inside = from..from + made.view.bytes();
            for (at, (x, y)) in before.iter().zip(&after).enumerate() {
                let allowed = result.is_ok() && made.written && inside.contains(&at);
                assert!(
                    allowed || x == y,
                    "{}: {what}: byte {at} of tensor {i} {:?} changed; result {result:?}",
                    self.device,
                    made.view
                );
            }
        }
        result
    }
}

// ------------------------------------------------------------------------------------------------------- the operations

fn source_shape(order: SourceOrder, tokens: usize, heads: usize, dim: usize) -> [usize; 3] {
    match order {
        SourceOrder::TokenMajor => [tokens, heads, dim],
        SourceOrder::HeadMajor => [heads, tokens, dim],
    }
}

const ORDERS: [SourceOrder; 2] = [SourceOrder::TokenMajor, SourceOrder::HeadMajor];
const COUNTS: [usize; 6] = [2, 1, 3, 5, 0, 9];
const WIDTHS: [usize; 6] = [64, 1, 7, 65, 128, 33];

fn kv_write(w: &mut World) -> Result<()> {
    let layer = w.layer(true);
    let (order, tokens) = (w.tape.pick(&ORDERS), w.tape.pick(&COUNTS));
    let spec = *layer.spec();
    let extra = w.tape.pick(&[0, 1, 4]);
    let shape = source_shape(order, tokens + extra, spec.kv_heads, spec.head_dim);
    let (k, v) = (w.input(&shape), w.input(&shape));
    let step = w.step(&layer, tokens);
    let first_token = w.tape.size(&[0, extra]);
    w.attempt("kv_write", |enc| {
        ops::kv_write(enc, &KvWrite { k: &k, v: &v, order, first_token, step: &step, layer: &layer })
    })
}

fn kv_read(w: &mut World) -> Result<()> {
    let layer = w.layer(false);
    let spec = *layer.spec();
    let (order, tokens) = (w.tape.pick(&ORDERS), w.tape.pick(&COUNTS).min(spec.capacity));
    let out = w.output(&source_shape(order, tokens, spec.kv_heads, spec.head_dim));
    let (start, sequence) = (w.tape.size(&[0, spec.capacity - tokens]), w.tape.size(&[0, spec.sequences - 1]));
    let (side, keep_rotated) = (w.tape.pick(&[KvSide::K, KvSide::V]), w.tape.flag());
    w.attempt("kv_read", |enc| {
        ops::kv_read(enc, &KvRead { layer: &layer, side, sequence, start, keep_rotated, order, out: &out })
    })
}

fn attend(w: &mut World) -> Result<()> {
    let layer = w.layer(false);
    let spec = *layer.spec();
    let (tokens, group) = (w.tape.pick(&COUNTS), w.tape.pick(&[1, 2, 3]));
    let shape = [tokens, spec.kv_heads * group, spec.head_dim];
    let (q, out) = (w.input(&shape), w.output(&shape));
    let step = w.step(&layer, tokens);
    let order = w.tape.pick(&ORDERS);
    let fresh_shape = source_shape(order, tokens, spec.kv_heads, spec.head_dim);
    let fresh = w
        .tape
        .flag()
        .then(|| (w.input(&fresh_shape), w.input(&fresh_shape), w.u32s(&[spec.sequences], spec.capacity + 1, false)));
    let fresh = fresh.as_ref().map(|(k, v, past)| Fresh { k, v, order, past });
    let plan = w.tape.flag().then(|| Plan { kernel: "any", reason: "any".into(), splits: w.tape.size(&[0, 1, 3]) });
    let softcap = w.tape.flag().then(|| w.tape.number(&[30.0, 0.5]));
    let window = w.tape.flag().then(|| w.tape.size(&[1, 4, usize::MAX]));
    let (scale, q_rotated) = (w.tape.number(&[0.125, 1.0]), w.tape.fault());
    w.attempt("attend", |enc| {
        let args = Attend {
            q: &q,
            layer: &layer,
            step: &step,
            fresh,
            scale,
            softcap,
            window,
            q_rotated,
            plan: plan.as_ref(),
            out: &out,
        };
        // A plan can be asked for whenever the call is valid.
        let planned = ops::attend::plan(&args, enc.device());
        let result = ops::attend(enc, &args);
        assert!(planned.is_ok() || result.is_err(), "a call without a plan: {planned:?}");
        result
    })
}

/// The tensors of a rotary embedding, and the rest of it.
struct Turn {
    tables: Option<(Tensor, Tensor)>,
    factors: Option<Tensor>,
    theta: f64,
    rotated_pairs: usize,
    layout: PairLayout,
}

impl Turn {
    fn new(w: &mut World, head_dim: usize) -> Option<Turn> {
        if w.tape.flag() {
            return None;
        }
        let rotated_pairs = w.tape.pick(&[head_dim / 2, head_dim / 8, 0]);
        let pairs = w.tape.size(&[rotated_pairs]);
        let tables = w.tape.flag().then(|| (w.f32(&[100, rotated_pairs]), w.f32(&[100, rotated_pairs])));
        let factors = (tables.is_none() && w.tape.flag() || w.tape.fault()).then(|| w.f32(&[rotated_pairs]));
        let layout = w.tape.pick(&[PairLayout::Halves, PairLayout::LeadingHalves, PairLayout::Interleaved]);
        let theta = f64::from(w.tape.number(&[10_000.0]));
        Some(Turn { tables, factors, theta, rotated_pairs: pairs, layout })
    }

    fn rope(&self) -> Rope<'_> {
        let angles = match &self.tables {
            Some((cos, sin)) => Angles::Tables { cos, sin },
            None => Angles::Theta(self.theta),
        };
        let Turn { rotated_pairs, layout, .. } = *self;
        Rope { angles, rotated_pairs, layout, freq_factors: self.factors.as_ref() }
    }
}

fn norm_rope(w: &mut World) -> Result<()> {
    let (tokens, heads, dim) = (w.tape.pick(&COUNTS), w.tape.pick(&[1, 2, 3, 0]), w.tape.pick(&WIDTHS));
    let x = w.input(&[tokens, heads, dim]);
    let out_order = w.tape.pick(&ORDERS);
    let out = w.output(&source_shape(out_order, tokens, heads, dim));
    let positions = w.u32s(&[tokens], 100, false);
    let (normed, weight, eps) = w.norm(dim);
    let turn = Turn::new(w, dim);
    let rotate = w.tape.fault();
    w.attempt("norm_rope", |enc| {
        let args = NormRope {
            x: &x,
            norm: normed.then_some(HeadNorm { weight: weight.as_ref(), eps }),
            rope: turn.as_ref().map(Turn::rope),
            positions: &positions,
            rotate,
            out_order,
            out: &out,
        };
        ops::norm_rope(enc, &args)
    })
}

fn norm_rope_write(w: &mut World) -> Result<()> {
    let layer = w.layer(true);
    let spec = *layer.spec();
    let (tokens, group) = (w.tape.pick(&COUNTS), w.tape.pick(&[1, 2]));
    let (q_shape, kv_shape) = ([tokens, spec.kv_heads * group, spec.head_dim], [tokens, spec.kv_heads, spec.head_dim]);
    let (q, k, v, q_out) = (w.input(&q_shape), w.input(&kv_shape), w.input(&kv_shape), w.output(&q_shape));
    let norms = [(); 3].map(|()| w.norm(spec.head_dim));
    let norm = |i: usize| {
        let (present, weight, eps) = &norms[i];
        present.then_some(HeadNorm { weight: weight.as_ref(), eps: *eps })
    };
    let turn = Turn::new(w, spec.head_dim);
    let step = w.step(&layer, tokens);
    let rotate_q = w.tape.flag();
    w.attempt("norm_rope_write", |enc| {
        let args = NormRopeWrite {
            q: &q,
            k: &k,
            v: &v,
            q_norm: norm(0),
            k_norm: norm(1),
            v_norm: norm(2),
            rope: turn.as_ref().map(Turn::rope),
            rotate_q,
            step: &step,
            layer: &layer,
            q_out: &q_out,
        };
        ops::norm_rope_write(enc, &args)
    })
}

fn rms_norm(w: &mut World) -> Result<()> {
    let shape = [w.tape.pick(&COUNTS), w.tape.pick(&WIDTHS)];
    let (x, weight, out) = (w.input(&shape), w.weight(&[shape[1]]), w.output(&shape));
    let kind = w.tape.next() % 3;
    let (residual, sum) = (w.input(&shape), w.output(&shape));
    let (eps, scale) = (w.tape.number(&[1e-6, 0.0]), w.tape.number(&[1.0, -0.5]));
    w.attempt("rms_norm", |enc| {
        let residual = match kind {
            0 => Residual::None,
            1 => Residual::After(&residual),
            _ => Residual::Before { residual: &residual, sum: &sum },
        };
        ops::rms_norm(enc, &RmsNorm { x: &x, weight: weight.as_ref(), eps, residual, scale, out: &out })
    })
}

fn hadamard(w: &mut World) -> Result<()> {
    let dim = w.tape.pick(&[64, 2, 128, 4096, 1, 3, 8192]);
    let shape = [w.tape.pick(&COUNTS), w.tape.pick(&[1, 2]), dim];
    let shape = &shape[w.tape.pick(&[0, 1, 2])..];
    let (x, out, inverse) = (w.input(shape), w.output(shape), w.tape.flag());
    w.attempt("hadamard", |enc| ops::hadamard(enc, &Hadamard { x: &x, inverse, out: &out }))
}

/// A dense or affine matrix.
struct Matrix {
    tensors: Vec<Tensor>,
    affine: Option<(u32, usize)>,
}

impl Matrix {
    fn new(w: &mut World, lead: &[usize], affine: Option<(u32, usize)>, inputs: usize) -> Matrix {
        let shape = |last: usize| [lead, &[last]].concat();
        let tensors = match affine {
            None => vec![w.input(&shape(inputs))],
            Some((bits, group)) => {
                let scales = w.tape.pick(&FLOATS);
                let words = inputs * bits as usize / 32;
                vec![
                    w.tensor(&[DType::U32], &shape(words), Content::Words, false),
                    w.tensor(&[scales], &shape(inputs / group), Content::Floats, false),
                    w.tensor(&[scales], &shape(inputs / group), Content::Floats, false),
                ]
            }
        };
        let affine = affine.map(|(bits, group)| {
            let wrong = w.tape.fault();
            let bits = if wrong { w.tape.pick(&[0, 3, 5, 64, u32::MAX]) } else { bits };
            (bits, w.tape.size(&[group]))
        });
        Matrix { tensors, affine }
    }

    fn weight(&self) -> Weight<'_> {
        match self.affine {
            None => Weight::Dense(&self.tensors[0]),
            Some((bits, group)) => Weight::Affine(Affine {
                codes: &self.tensors[0],
                scales: &self.tensors[1],
                biases: &self.tensors[2],
                bits,
                group,
            }),
        }
    }
}

fn affine_kind(w: &mut World) -> (Option<(u32, usize)>, usize) {
    if w.tape.flag() {
        let group = w.tape.pick(&[32, 64, 128]);
        (Some((w.tape.pick(&[4, 6, 8]), group)), group * w.tape.pick(&[1, 2, 3]))
    } else {
        (None, w.tape.pick(&WIDTHS))
    }
}

fn linear(w: &mut World) -> Result<()> {
    let (affine, inputs) = affine_kind(w);
    let (tokens, outputs) = (w.tape.pick(&COUNTS), w.tape.pick(&[3, 1, 17, 0, 64]));
    let (mixture, expanded, top_k, count) = (w.tape.flag(), w.tape.flag(), w.tape.pick(&[2, 1, 0]), 3);
    let lead = if mixture { vec![count, outputs] } else { vec![outputs] };
    let matrix = Matrix::new(w, &lead, affine, inputs);
    let x_rows = if mixture && expanded { tokens * top_k } else { tokens };
    let x = w.input(&[x_rows, inputs]);
    let ids = mixture.then(|| w.u32s(&[tokens, top_k], count, false));
    let out = w.output(&[if mixture { tokens * top_k } else { tokens }, outputs]);
    let alpha = w.tape.number(&[1.0, 0.5]);
    w.attempt("linear", |enc| {
        let experts = ids.as_ref().map(|ids| Experts { ids, expanded });
        ops::linear(enc, &Linear { x: &x, weight: matrix.weight(), experts, alpha, out: &out })
    })
}

fn embed(w: &mut World) -> Result<()> {
    let (affine, inputs) = affine_kind(w);
    let (tokens, rows) = (w.tape.pick(&COUNTS), w.tape.pick(&[11, 1]));
    let table = Matrix::new(w, &[rows], affine, inputs);
    let (ids, out) = (w.u32s(&[tokens], rows, false), w.output(&[tokens, inputs]));
    let scale = w.tape.number(&[1.0, 8.0]);
    w.attempt("embed", |enc| ops::embed(enc, &Embed { table: table.weight(), ids: &ids, scale, out: &out }))
}

fn gate(w: &mut World) -> Result<()> {
    let (rows, dim) = (w.tape.pick(&COUNTS), w.tape.pick(&WIDTHS));
    let before = w.tape.pick(&[0, 2]);
    let (one, two) = (w.input(&[rows, before + dim]), w.input(&[rows, dim]));
    let out = w.output(&[rows, dim]);
    let (start, activation) = (w.tape.size(&[before]), w.tape.pick(&[Activation::GeluTanh, Activation::Silu]));
    w.attempt("gate", |enc| {
        let (gate, up) = (Columns { tensor: &one, start }, Columns::all(&two));
        ops::gate(enc, &Gate { gate, up, activation, out: &out })
    })
}

fn softcap(w: &mut World) -> Result<()> {
    let shape = [w.tape.pick(&COUNTS), w.tape.pick(&WIDTHS)];
    let (x, out, cap) = (w.input(&shape), w.output(&shape), w.tape.number(&[30.0, 0.1]));
    w.attempt("softcap", |enc| ops::softcap(enc, &Softcap { x: &x, cap, out: &out }))
}

fn argmax(w: &mut World) -> Result<()> {
    let (rows, dim) = (w.tape.pick(&COUNTS), w.tape.pick(&[64, 1, 1000, 0]));
    let (x, out) = (w.input(&[rows, dim]), w.u32s(&[rows], 10, true));
    w.attempt("argmax", |enc| ops::argmax(enc, &Argmax { x: &x, out: &out }))
}

fn sample(w: &mut World) -> Result<()> {
    let (rows, vocab) = (w.tape.pick(&COUNTS), w.tape.pick(&[64, 1, 1000, 0]));
    let (logits, counter, out) = (w.input(&[rows, vocab]), w.u32s(&[rows], 1000, false), w.u32s(&[rows], 10, true));
    let (temperature, top_k) = (w.tape.number(&[1.0, 0.0, 0.7]), w.tape.size(&[0, 1, 40]));
    let (top_p, min_p) = (w.tape.number(&[1.0, 0.5, 1e-9]), w.tape.number(&[0.0, 0.1]));
    let seed = u64::from(w.tape.next()) << 56;
    w.attempt("sample", |enc| {
        let (logits, counter, out) = (&logits, &counter, &out);
        ops::sample(enc, &Sample { logits, temperature, top_k, top_p, min_p, seed, counter, out })
    })
}

fn moe_route(w: &mut World) -> Result<()> {
    let (tokens, experts) = (w.tape.pick(&COUNTS), w.tape.pick(&[4, 1, 128, 0]));
    let top_k = w.tape.pick(&[1, 2, 4, 0]);
    let logits = w.input(&[tokens, experts]);
    let scale = w.tape.flag().then(|| w.f32(&[experts]));
    let ids = w.u32s(&[tokens, top_k], 10, true);
    let weights = w.tensor(&[DType::F32], &[tokens, top_k], Content::Floats, true);
    w.attempt("moe_route", |enc| {
        let (logits, ids, weights) = (&logits, &ids, &weights);
        ops::moe_route(enc, &MoeRoute { logits, expert_scale: scale.as_ref(), ids, weights })
    })
}

fn moe_combine(w: &mut World) -> Result<()> {
    let (tokens, top_k, dim) = (w.tape.pick(&COUNTS), w.tape.pick(&[2, 1, 8, 0]), w.tape.pick(&WIDTHS));
    let (x, weights, out) = (w.input(&[tokens * top_k, dim]), w.f32(&[tokens, top_k]), w.output(&[tokens, dim]));
    w.attempt("moe_combine", |enc| ops::moe_combine(enc, &MoeCombine { x: &x, weights: &weights, out: &out }))
}

type Operation = fn(&mut World) -> Result<()>;

const OPERATIONS: [(&str, Operation); 15] = [
    ("kv_write", kv_write),
    ("kv_read", kv_read),
    ("attend", attend),
    ("norm_rope", norm_rope),
    ("norm_rope_write", norm_rope_write),
    ("rms_norm", rms_norm),
    ("hadamard", hadamard),
    ("linear", linear),
    ("embed", embed),
    ("gate", gate),
    ("softcap", softcap),
    ("argmax", argmax),
    ("sample", sample),
    ("moe_route", moe_route),
    ("moe_combine", moe_combine),
];

/// The devices that are present, the reference among them.
fn present() -> Vec<Device> {
    Device::list().into_iter().filter_map(|entry| entry.device.ok()).collect()
}

/// The plainest arguments are valid: what the property tests vary are not hopeless calls.
#[test]
fn plain_arguments_are_taken() {
    for device in present() {
        for (name, operation) in OPERATIONS {
            operation(&mut World::new(&device, &[])).unwrap_or_else(|e| panic!("{device}: {name}: {e}"));
        }
    }
}

/// Of random tapes, many calls are taken and many refused; else the property would say little.
#[test]
fn tapes_reach_both_ends() {
    let mut rng = common::Rng::of("tapes");
    for (name, operation) in OPERATIONS {
        let mut taken = 0;
        for _ in 0..200 {
            let tape: Vec<u8> = (0..96).map(|_| rng.bits() as u8).collect();
            taken += usize::from(operation(&mut World::new(&Device::cpu(), &tape)).is_ok());
        }
        assert!((20..=195).contains(&taken), "{name}: {taken} of 200 calls are taken");
    }
}

macro_rules! taken_or_refused {
    ($($operation:ident),* $(,)?) => {
        mod taken_or_refused {
            use super::*;

            proptest! {
                #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
                $(
                    #[test]
                    fn $operation(tape in prop::collection::vec(any::<u8>(), 0..128)) {
                        for device in present() {
                            // Whatever comes back is fine; `attempt` has looked at the memory.
                            let _ = super::$operation(&mut World::new(&device, &tape));
                        }
                    }
                )*
            }
        }
    };
}
taken_or_refused!(
    kv_write,
    kv_read,
    attend,
    norm_rope,
    norm_rope_write,
    rms_norm,
    hadamard,
    linear,
    embed,
    gate,
    softcap,
    argmax,
    sample,
    moe_route,
    moe_combine,
);

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Tensors and layers of any description: made, or refused without an attempt at the memory.
    #[test]
    fn tensors_and_layers(
        shape in prop::collection::vec(prop_oneof![0usize..5, Just(usize::MAX), Just(1 << 40)], 0..6),
        range in (any::<u8>(), any::<u8>()),
        numbers in prop::collection::vec(prop_oneof![0usize..9, Just(64), Just(usize::MAX), Just(1usize << 33)], 4),
        bits in prop_oneof![Just(4u32), Just(8), 0u32..10, Just(u32::MAX)],
        scale in prop_oneof![Just(1.0f32), Just(f32::NAN), Just(0.0), any::<f32>()],
    ) {
        for device in present() {
            let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
            if shape.len() > 4 || elements.is_none_or(|n| n > 1 << 20) {
                if shape.len() > 4 || elements.and_then(|n| n.checked_mul(4)).is_none() {
                    prop_assert!(Tensor::zeros(&device, DType::F32, &shape).is_err());
                }
            } else {
                let t = Tensor::zeros(&device, DType::F16, &shape).unwrap();
                prop_assert_eq!(t.shape(), &shape[..]);
                let (a, b) = (range.0 as usize % 6, range.1 as usize % 6);
                let valid = a <= b && b <= shape.first().copied().unwrap_or(0);
                prop_assert_eq!(t.rows(a..b).is_ok(), valid && !shape.is_empty());
                let other = t.reshape(&[t.elements() + 1]);
                prop_assert!(t.reshape(&[t.elements()]).is_ok() && other.is_err());
                prop_assert!(t.read_bytes(&mut vec![0; t.bytes() + 1]).is_err() && t.write_bytes(&[0; 1 << 12]).is_err() || t.bytes() == 1 << 12);
            }
            let k = Codec::TurboQuant(TurboQuant { bits, scale, norm: Norm::Rms });
            let [sequences, kv_heads, capacity, head_dim] = [numbers[0], numbers[1], numbers[2], numbers[3]];
            let small = numbers.iter().all(|&n| n <= 64);
            let spec = LayerSpec { sequences, kv_heads, capacity, head_dim, k, ..linear_spec(1, 1, 1, Codec::F16) };
            let bytes = numbers.iter().try_fold(4usize, |n, &d| n.checked_mul(d));
            if small || bytes.is_none() || numbers.contains(&0) {
                let valid = small
                    && !numbers.contains(&0)
                    && [4, 5, 6, 8].contains(&bits)
                    && scale.is_finite()
                    && scale > 0.0
                    && head_dim.is_power_of_two()
                    && head_dim >= 8;
                prop_assert_eq!(KvLayer::new(&device, spec).is_ok(), valid, "{:?}", spec);
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------------- overlap rules

fn f32s(device: &Device, shape: &[usize]) -> Tensor {
    let t = Tensor::zeros(device, DType::F32, shape).unwrap();
    t.write(&common::Rng::of("overlap").normals(t.elements())).unwrap();
    t
}

fn refused_overlap(device: &Device, what: &str, record: impl FnOnce(&mut Encoder) -> Result<()>) {
    let result = run(device, record);
    assert!(matches!(result, Err(Error::Overlap { .. })), "{device}: {what}: {result:?}");
}

/// What may be done in place, and what may not: anything that is not said to be allowed is refused.
#[test]
fn overlap_is_refused_unless_the_operation_works_in_place() {
    for device in devices() {
        let memory = f32s(device, &[12, 64]);
        let part = |range: std::ops::Range<usize>| memory.rows(range).unwrap();
        let (a, shifted, b) = (part(0..4), part(1..5), part(8..12));
        let cap = 3.0;
        run(device, |e| ops::softcap(e, &Softcap { x: &a, cap, out: &a })).unwrap();
        refused_overlap(device, "softcap, shifted", |e| ops::softcap(e, &Softcap { x: &a, cap, out: &shifted }));
        run(device, |e| ops::hadamard(e, &Hadamard { x: &a, inverse: false, out: &a })).unwrap();
        refused_overlap(device, "hadamard, shifted", |e| {
            ops::hadamard(e, &Hadamard { x: &shifted, inverse: false, out: &a })
        });

        let norm = |x, residual, out| RmsNorm { x, weight: None, eps: 1e-6, residual, scale: 1.0, out };
        run(device, |e| ops::rms_norm(e, &norm(&a, Residual::After(&b), &b))).unwrap();
        run(device, |e| ops::rms_norm(e, &norm(&a, Residual::Before { residual: &b, sum: &b }, &a))).unwrap();
        run(device, |e| ops::rms_norm(e, &norm(&a, Residual::Before { residual: &b, sum: &a }, &b))).unwrap();
        refused_overlap(device, "rms_norm, out and sum", |e| {
            ops::rms_norm(e, &norm(&a, Residual::Before { residual: &b, sum: &a }, &a))
        });
        refused_overlap(device, "rms_norm, shifted", |e| ops::rms_norm(e, &norm(&a, Residual::None, &shifted)));
        // The weight of a single row is as large as the output, but it is not what works in place.
        let (row, weight) = (part(0..1), part(5..6));
        let flat = weight.reshape(&[64]).unwrap();
        refused_overlap(device, "rms_norm over its weight", |e| {
            ops::rms_norm(e, &RmsNorm { weight: Some(&flat), ..norm(&row, Residual::None, &weight) })
        });

        let (whole, up) = (Columns::all(&a), Columns::all(&b));
        let activation = Activation::Silu;
        run(device, |e| ops::gate(e, &Gate { gate: whole, up, activation, out: &a })).unwrap();
        refused_overlap(device, "gate, shifted", |e| {
            ops::gate(e, &Gate { gate: whole, up, activation, out: &shifted })
        });
        let w = f32s(device, &[64, 64]);
        let weight = Weight::Dense(&w);
        refused_overlap(device, "linear in place", |e| {
            ops::linear(e, &Linear { x: &a, weight, experts: None, alpha: 1.0, out: &a })
        });

        let heads = |t: &Tensor| t.reshape(&[2, 2, 64]).unwrap();
        let (x, y) = (heads(&a), heads(&b));
        let positions = Tensor::from_slice(device, &[3u32, 4], &[2]).unwrap();
        let rope = Some(Rope {
            angles: Angles::Theta(1e4),
            rotated_pairs: 32,
            layout: PairLayout::Halves,
            freq_factors: None,
        });
        let norm_rope =
            |out_order, out| NormRope { x: &x, norm: None, rope, positions: &positions, rotate: false, out_order, out };
        run(device, |e| ops::norm_rope(e, &norm_rope(SourceOrder::TokenMajor, &x))).unwrap();
        refused_overlap(device, "norm_rope, head-major, in place", |e| {
            ops::norm_rope(e, &norm_rope(SourceOrder::HeadMajor, &x))
        });

        let layer = KvLayer::new(device, linear_spec(2, 4, 64, Codec::F32)).unwrap();
        let step = Step::new(device, 1, &[(0, 0), (0, 1)]).unwrap();
        let write = |q_out, k, v| NormRopeWrite {
            q: &x,
            k,
            v,
            q_norm: None,
            k_norm: None,
            v_norm: None,
            rope,
            rotate_q: false,
            step: &step,
            layer: &layer,
            q_out,
        };
        let z = f32s(device, &[2, 2, 64]);
        run(device, |e| ops::norm_rope_write(e, &write(&x, &y, &y))).unwrap();
        refused_overlap(device, "norm_rope_write, queries over keys", |e| ops::norm_rope_write(e, &write(&y, &y, &z)));
        refused_overlap(device, "norm_rope_write, queries over values", |e| {
            ops::norm_rope_write(e, &write(&z, &y, &z))
        });

        // A layer over the memory of its source.
        let own = KvLayer::from_dense(linear_spec(2, 2, 64, Codec::F32), &y, &z).unwrap();
        let (order, first_token) = (SourceOrder::TokenMajor, 0);
        refused_overlap(device, "kv_write onto itself", |e| {
            ops::kv_write(e, &KvWrite { k: &y, v: &x, order, first_token, step: &step, layer: &own })
        });
        refused_overlap(device, "norm_rope_write onto itself", |e| {
            ops::norm_rope_write(e, &NormRopeWrite { layer: &own, ..write(&x, &y, &x) })
        });
        let twice = KvLayer::from_dense(linear_spec(2, 2, 64, Codec::F32), &y, &y).unwrap();
        refused_overlap(device, "K and V in one place", |e| {
            ops::kv_write(e, &KvWrite { k: &x, v: &x, order, first_token, step: &step, layer: &twice })
        });
        refused_overlap(device, "attend onto its queries", |e| ops::attend(e, &decode(&layer, &x, &step, &x)));
        refused_overlap(device, "attend onto its cache", |e| ops::attend(e, &decode(&own, &x, &step, &y)));
    }
}

fn decode<'a>(layer: &'a KvLayer, q: &'a Tensor, step: &'a Step, out: &'a Tensor) -> Attend<'a> {
    Attend { q, layer, step, fresh: None, scale: 0.125, softcap: None, window: None, q_rotated: false, plan: None, out }
}

#[test]
fn a_tensor_of_another_device_is_refused() {
    for device in devices() {
        let (here, there) = (f32s(device, &[2, 64]), f32s(&Device::reference(), &[2, 64]));
        let before = bytes_of(&there).unwrap();
        for (x, out) in [(&here, &there), (&there, &here), (&there, &there)] {
            let result = run(device, |e| ops::softcap(e, &Softcap { x, cap: 1.0, out }));
            assert!(matches!(result, Err(Error::WrongDevice { .. })), "{device}: {result:?}");
            let captured = Encoder::capture(device, |e| ops::softcap(e, &Softcap { x, cap: 1.0, out }));
            assert!(captured.is_err(), "{device}: a capture refuses, too");
        }
        assert_eq!(before, bytes_of(&there).unwrap(), "{device}");
        let spec = linear_spec(1, 2, 64, Codec::F32);
        // A layer whose halves live apart.
        let apart = KvLayer::from_dense(spec, &here, &there);
        let q = f32s(device, &[1, 1, 64]);
        let step = Step::new(device, 1, &[(0, 0)]).unwrap();
        let out = f32s(device, &[1, 1, 64]);
        let refused = apart.and_then(|layer| run(device, |e| ops::attend(e, &decode(&layer, &q, &step, &out))));
        assert!(matches!(refused, Err(Error::WrongDevice { .. })), "{device}: {refused:?}");
    }
}

// ----------------------------------------------------------------------------------------------------- encoder and graph

/// An encoder orders what depends on each other, in a chain of operations over the same few tensors.
#[test]
fn operations_see_what_came_before() {
    for device in devices() {
        let (a, b) = (f32s(device, &[3, 64]), f32s(device, &[3, 64]));
        let start = a.to_f32().unwrap();
        let mut enc = device.encoder().unwrap();
        for _ in 0..10 {
            ops::hadamard(&mut enc, &Hadamard { x: &a, inverse: false, out: &b }).unwrap();
            ops::hadamard(&mut enc, &Hadamard { x: &b, inverse: false, out: &b }).unwrap();
            ops::hadamard(&mut enc, &Hadamard { x: &b, inverse: true, out: &a }).unwrap();
            ops::hadamard(&mut enc, &Hadamard { x: &a, inverse: true, out: &a }).unwrap();
        }
        enc.commit().unwrap().wait().unwrap();
        let bound = common::Bound::of(DType::F32);
        common::assert_close(format!("{device}: there and back"), &a.to_f32().unwrap(), &start, bound);
    }
}

/// A failed call leaves the encoder as it was: what came before and comes after runs.
#[test]
fn an_encoder_outlives_a_refusal() {
    for device in devices() {
        let (x, y) = (f32s(device, &[2, 64]), f32s(device, &[2, 64]));
        let start = x.to_f32().unwrap();
        let mut enc = device.encoder().unwrap();
        ops::hadamard(&mut enc, &Hadamard { x: &x, inverse: false, out: &y }).unwrap();
        assert!(ops::softcap(&mut enc, &Softcap { x: &y, cap: -1.0, out: &y }).is_err());
        ops::hadamard(&mut enc, &Hadamard { x: &y, inverse: true, out: &y }).unwrap();
        enc.commit().unwrap().wait().unwrap();
        let bound = common::Bound::of(DType::F32);
        common::assert_close(format!("{device}"), &y.to_f32().unwrap(), &start, bound);
    }
}

/// A decode step, captured once and replayed: each replay follows the positions that were written in between, and gives
/// the bits of a run without a graph.
#[test]
fn a_replayed_decode_step_advances() {
    let (heads, kv_heads, dim, steps) = (4, 2, 64, 12);
    for codec in [Codec::F16, Codec::tq(4)] {
        for ring in [false, true] {
            for device in devices() {
                let mut rng = common::Rng::of("decode");
                let capacity = if ring { 5 } else { steps };
                let spec = LayerSpec { ring, ..linear_spec(kv_heads, capacity, dim, codec) };
                let (q, out) = (f32s(device, &[1, heads, dim]), f32s(device, &[1, heads, dim]));
                let (k, v) = (f32s(device, &[1, kv_heads, dim]), f32s(device, &[1, kv_heads, dim]));
                let step = Step {
                    positions: indices(device, &[0], &[1]).unwrap(),
                    sequence: indices(device, &[0], &[1]).unwrap(),
                    lens: indices(device, &[1], &[1]).unwrap(),
                };
                let (captured, plain) = (KvLayer::new(device, spec).unwrap(), KvLayer::new(device, spec).unwrap());
                let record = |enc: &mut Encoder, layer: &KvLayer| {
                    let rope = Some(Rope {
                        angles: Angles::Theta(1e4),
                        rotated_pairs: 32,
                        layout: PairLayout::Halves,
                        freq_factors: None,
                    });
                    let args = NormRopeWrite {
                        q: &q,
                        k: &k,
                        v: &v,
                        q_norm: None,
                        k_norm: Some(HeadNorm { weight: None, eps: 1e-6 }),
                        v_norm: None,
                        rope,
                        rotate_q: false,
                        step: &step,
                        layer,
                        q_out: &q,
                    };
                    ops::norm_rope_write(enc, &args)?;
                    ops::attend(enc, &decode(layer, &q, &step, &out))
                };
                let before = out.to_f32().unwrap();
                let graph = Encoder::capture(device, |enc| record(enc, &captured)).unwrap();
                assert!(out.to_f32().unwrap() == before, "{device}: a capture runs nothing");
                let untouched =
                    |layer: &KvLayer| common::layers::planes(layer).unwrap().iter().flatten().all(|&byte| byte == 0);
                assert!(untouched(&captured), "{device}: a capture writes nothing");
                let mut seen = Vec::new();
                for position in 0..steps {
                    let (query, key, value) =
                        (rng.normals(heads * dim), rng.normals(kv_heads * dim), rng.normals(kv_heads * dim));
                    step.positions.write(&[position as u32]).unwrap();
                    step.lens.write(&[position as u32 + 1]).unwrap();
                    k.write(&key).unwrap();
                    v.write(&value).unwrap();
                    q.write(&query).unwrap();
                    graph.replay().unwrap().wait().unwrap();
                    let replayed = out.to_f32().unwrap();
                    q.write(&query).unwrap();
                    run(device, |enc| record(enc, &plain)).unwrap();
                    let case = format!("{device}: {codec}, ring {ring}, position {position}");
                    let bound = common::Bound::of(DType::F32);
                    common::assert_close(&case, &replayed, &out.to_f32().unwrap(), bound);
                    assert!(!seen.contains(&replayed), "{case}: the step did not advance");
                    seen.push(replayed);
                }
                let planes = |layer| common::layers::planes(layer).unwrap();
                assert!(planes(&captured) == planes(&plain), "{device}: {codec}: the caches differ");
            }
        }
    }
}

/// An empty graph and an empty encoder are fine.
#[test]
fn nothing_recorded() {
    for device in devices() {
        device.encoder().unwrap().commit().unwrap().wait().unwrap();
        let graph = Encoder::capture(device, |_| Ok(())).unwrap();
        graph.replay().unwrap().wait().unwrap();
        graph.replay().unwrap().wait().unwrap();
        let _ = input(device, DType::F32, &[1.0], &[1]).unwrap();
    }
}
