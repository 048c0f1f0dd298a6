//! Calls of each operation, with arguments drawn from a tape.

use super::*;
use crate::common::query;

pub(super) fn source_shape(order: HeadOrder, tokens: usize, heads: usize, dim: usize) -> [usize; 3] {
    match order {
        HeadOrder::TokenMajor => [tokens, heads, dim],
        HeadOrder::HeadMajor => [heads, tokens, dim],
    }
}

const ORDERS: [HeadOrder; 2] = [HeadOrder::TokenMajor, HeadOrder::HeadMajor];
const COUNTS: [usize; 6] = [2, 1, 3, 5, 0, 9];
const WIDTHS: [usize; 6] = [64, 1, 7, 65, 128, 33];

pub(super) fn kv_write(w: &mut World) -> Result<()> {
    let layer = w.layer(true);
    let (order, tokens) = (w.tape.pick(&ORDERS), w.tape.pick(&COUNTS));
    let spec = *layer.spec();
    let extra = w.tape.pick(&[0, 1, 4]);
    let shape = source_shape(order, tokens + extra, spec.kv_heads, spec.head_dim);
    let (k, v) = (w.input(&shape), w.input(&shape));
    let step = w.step(&layer, tokens);
    let first_token = w.tape.size(&[0, extra]);
    w.attempt("kv_write", |enc| {
        ops::kv_write(enc, &KvWrite::new(&k, &v, &step, &layer).order(order).first_token(first_token))
    })
}

pub(super) fn kv_read(w: &mut World) -> Result<()> {
    let layer = w.layer(false);
    let spec = *layer.spec();
    let (order, tokens) = (w.tape.pick(&ORDERS), w.tape.pick(&COUNTS).min(spec.capacity));
    let out = w.output(&source_shape(order, tokens, spec.kv_heads, spec.head_dim));
    let (start, sequence) = (w.tape.size(&[0, spec.capacity - tokens]), w.tape.size(&[0, spec.sequences - 1]));
    let (side, keep_rotated) = (w.tape.pick(&[KvSide::K, KvSide::V]), w.tape.flag());
    w.attempt("kv_read", |enc| {
        ops::kv_read(
            enc,
            &KvRead::new(&layer, side, &out).sequence(sequence).start(start).keep_rotated(keep_rotated).order(order),
        )
    })
}

pub(super) fn attend(w: &mut World) -> Result<()> {
    let layer = w.layer(false);
    let spec = *layer.spec();
    let (tokens, group) = (w.tape.pick(&COUNTS), w.tape.pick(&[1, 2, 3]));
    let shape = [tokens, spec.kv_heads * group, spec.head_dim];
    let (q, out) = (w.input(&shape), w.output(&shape));
    let step = w.step(&layer, tokens);
    let sinks = w.tape.flag().then(|| w.input(&[shape[1]]));
    let splits = w.tape.flag().then(|| w.tape.size(&[1, 3]));
    let softcap = w.tape.flag().then(|| w.tape.number(&[30.0, 0.5]));
    let window = w.tape.flag().then(|| w.tape.size(&[1, 4, usize::MAX]));
    let (scale, q_rotated) = (w.tape.number(&[0.125, 1.0]), w.tape.fault());
    w.attempt("attend", |enc| {
        let args = Attend::new(query(&q, q_rotated), &layer, &step, &out)
            .scale(scale)
            .softcap(softcap)
            .window(window)
            .sinks(sinks.as_ref())
            .splits(splits);
        // Every valid call can be explained.
        let explained = ops::explain(&args, enc.device());
        let result = ops::attend(enc, &args);
        assert!(explained.is_ok() || result.is_err(), "a call without an explanation: {explained:?}");
        result
    })
}

/// The tensors and the other parameters of a rotary embedding.
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
        Rope::new(angles, rotated_pairs).layout(layout).freq_factors(self.factors.as_ref())
    }
}

pub(super) fn norm_rope(w: &mut World) -> Result<()> {
    let (tokens, heads, dim) = (w.tape.pick(&COUNTS), w.tape.pick(&[1, 2, 3, 0]), w.tape.pick(&WIDTHS));
    let x = w.input(&[tokens, heads, dim]);
    let out_order = w.tape.pick(&ORDERS);
    let out = w.output(&source_shape(out_order, tokens, heads, dim));
    let positions = w.u32s(&[tokens], 100, false);
    let (normed, weight, eps) = w.norm(dim);
    let turn = Turn::new(w, dim);
    let rotate = w.tape.fault();
    w.attempt("norm_rope", |enc| {
        let args = NormRope::new(&x, &positions, &out)
            .norm(normed.then_some(HeadNorm::new(eps).weight(weight.as_ref())))
            .rope(turn.as_ref().map(Turn::rope))
            .rotate(rotate)
            .out_order(out_order);
        ops::norm_rope(enc, &args).map(drop)
    })
}

pub(super) fn norm_rope_write(w: &mut World) -> Result<()> {
    let layer = w.layer(true);
    let spec = *layer.spec();
    let (tokens, group) = (w.tape.pick(&COUNTS), w.tape.pick(&[1, 2]));
    let (q_shape, kv_shape) = ([tokens, spec.kv_heads * group, spec.head_dim], [tokens, spec.kv_heads, spec.head_dim]);
    let (q, k, v, q_out) = (w.input(&q_shape), w.input(&kv_shape), w.input(&kv_shape), w.output(&q_shape));
    let norms = [(); 3].map(|()| w.norm(spec.head_dim));
    let norm = |i: usize| {
        let (present, weight, eps) = &norms[i];
        present.then_some(HeadNorm::new(*eps).weight(weight.as_ref()))
    };
    let turn = Turn::new(w, spec.head_dim);
    let step = w.step(&layer, tokens);
    w.attempt("norm_rope_write", |enc| {
        let args = NormRopeWrite::new(&q, &k, &v, &step, &layer, &q_out)
            .q_norm(norm(0))
            .k_norm(norm(1))
            .v_norm(norm(2))
            .rope(turn.as_ref().map(Turn::rope));
        ops::norm_rope_write(enc, &args).map(drop)
    })
}

pub(super) fn rms_norm(w: &mut World) -> Result<()> {
    let shape = [w.tape.pick(&COUNTS), w.tape.pick(&WIDTHS)];
    let terms = w.tape.pick(&[None, Some(1), Some(3)]);
    let x = w.input(&[shape[0] * terms.unwrap_or(1), shape[1]]);
    let combine = terms.map(|terms| w.f32(&[shape[0], terms]));
    let (weight, out) = (w.weight(&[shape[1]]), w.output(&shape));
    let kind = w.tape.next() % 4;
    let (residual, sum, residual_weight) = (w.input(&shape), w.output(&shape), w.weight(&[shape[1]]));
    let (eps, scale) = (w.tape.number(&[1e-6, 0.0]), w.tape.number(&[1.0, -0.5]));
    let next_eps = w.tape.number(&[1e-6, 0.0]);
    let gate = w.tape.next().is_multiple_of(3).then(|| w.input(&shape));
    let nexts: Vec<_> = (0..w.tape.next() % 5)
        .map(|_| (w.weight(&[shape[1]]), w.output(&shape), w.tape.number(&[1.0, -0.5])))
        .collect();
    w.attempt("rms_norm", |enc| {
        let residual = match kind {
            0 => Residual::None,
            1 => Residual::After(&residual),
            2 => Residual::Normed { residual: &residual, weight: residual_weight.as_ref() },
            _ => Residual::Before { residual: &residual, sum: &sum },
        };
        let next: Vec<_> = nexts.iter().map(|(w, out, s)| NextNorm::new(out).weight(w.as_ref()).scale(*s)).collect();
        let args = RmsNorm::new(&x, eps, &out).weight(weight.as_ref()).residual(residual).scale(scale);
        ops::rms_norm(enc, &args.combine(combine.as_ref()).gate(gate.as_ref()).next(&next).next_eps(next_eps))
    })
}

pub(super) fn hadamard(w: &mut World) -> Result<()> {
    let dim = w.tape.pick(&[64, 2, 128, 4096, 1, 3, 8192]);
    let shape = [w.tape.pick(&COUNTS), w.tape.pick(&[1, 2]), dim];
    let shape = &shape[w.tape.pick(&[0, 1, 2])..];
    let (x, out, inverse) = (w.input(shape), w.output(shape), w.tape.flag());
    w.attempt("hadamard", |enc| ops::hadamard(enc, &Hadamard::new(&x, &out).inverse(inverse)))
}

#[derive(Clone, Copy)]
enum MatrixKind {
    Dense,
    Affine { bits: u32, group: usize },
    Blocks(BlockFormat),
    Floats(FloatFormat),
}

/// A matrix of any kind.
struct Matrix {
    tensors: Vec<Tensor>,
    kind: MatrixKind,
}

impl Matrix {
    fn new(w: &mut World, lead: &[usize], kind: MatrixKind, inputs: usize) -> Matrix {
        let shape = |last: usize| [lead, &[last]].concat();
        let tensors = match kind {
            MatrixKind::Dense => vec![w.input(&shape(inputs))],
            MatrixKind::Affine { bits, group } => {
                let scales = w.tape.pick(&FLOATS);
                let words = inputs * bits as usize / 32;
                vec![
                    w.tensor(&[DType::U32], &shape(words), Content::Words, false),
                    w.tensor(&[scales], &shape(inputs / group), Content::Floats, false),
                    w.tensor(&[scales], &shape(inputs / group), Content::Floats, false),
                ]
            }
            MatrixKind::Blocks(format) => {
                let bytes = format.row_bytes(inputs).expect("whole blocks");
                vec![w.tensor(&[DType::U8], &shape(bytes), Content::Words, false)]
            }
            MatrixKind::Floats(format) => vec![
                w.tensor(&[DType::U8], &shape(inputs * format.bits() / 8), Content::Words, false),
                w.tensor(&[DType::U8], &shape(inputs / format.group()), Content::Words, false),
            ],
        };
        let wrong = w.tape.fault();
        let kind = match kind {
            MatrixKind::Affine { bits, group } => {
                let bits = if wrong { w.tape.pick(&[0, 1, 7, 64, u32::MAX]) } else { bits };
                MatrixKind::Affine { bits, group: w.tape.size(&[group]) }
            }
            MatrixKind::Blocks(_) if wrong => MatrixKind::Blocks(w.tape.pick(&BlockFormat::ALL)),
            MatrixKind::Floats(_) if wrong => MatrixKind::Floats(w.tape.pick(&FloatFormat::ALL)),
            kind => kind,
        };
        Matrix { tensors, kind }
    }

    fn weight(&self) -> Weight<'_> {
        match self.kind {
            MatrixKind::Dense => Weight::Dense(&self.tensors[0]),
            MatrixKind::Blocks(format) => Blocks::new(&self.tensors[0], format).into(),
            MatrixKind::Floats(format) => ScaledFloats::new(&self.tensors[0], &self.tensors[1], format).into(),
            MatrixKind::Affine { bits, group } => Weight::Affine(Affine {
                codes: &self.tensors[0],
                scales: &self.tensors[1],
                biases: &self.tensors[2],
                bits,
                group,
            }),
        }
    }
}

/// A kind of matrix, and a valid number of inputs.
fn matrix_kind(w: &mut World) -> (MatrixKind, usize) {
    let many = w.tape.pick(&[1, 2, 3]);
    match w.tape.pick(&[0, 1, 2, 3]) {
        0 => (MatrixKind::Dense, w.tape.pick(&WIDTHS)),
        1 => {
            let group = w.tape.pick(&[32, 64, 128]);
            (MatrixKind::Affine { bits: w.tape.pick(&[4, 6, 8, 2, 3, 5]), group }, group * many)
        }
        2 => {
            let format = w.tape.pick(&BlockFormat::ALL);
            (MatrixKind::Blocks(format), format.block_inputs() * many)
        }
        _ => (MatrixKind::Floats(w.tape.pick(&FloatFormat::ALL)), 32 * many),
    }
}

pub(super) fn linear(w: &mut World) -> Result<()> {
    let (kind, inputs) = matrix_kind(w);
    let (tokens, outputs) = (w.tape.pick(&COUNTS), w.tape.pick(&[3, 1, 17, 0, 64]));
    let (mixture, expanded, top_k, count) = (w.tape.flag(), w.tape.flag(), w.tape.pick(&[2, 1, 0]), 3);
    let lead = if mixture { vec![count, outputs] } else { vec![outputs] };
    let matrix = Matrix::new(w, &lead, kind, inputs);
    let x_rows = if mixture && expanded { tokens * top_k } else { tokens };
    let x = w.input(&[x_rows, inputs]);
    let ids = mixture.then(|| w.u32s(&[tokens, top_k], count, false));
    let out = w.output(&[if mixture { tokens * top_k } else { tokens }, outputs]);
    let alpha = w.tape.number(&[1.0, 0.5]);
    let first = w.tape.size(&[0, 1, 3]);
    let parts = if mixture { vec![] } else { vec![first, outputs.saturating_sub(first)] };
    w.attempt("linear", |enc| {
        let experts = ids.as_ref().map(|ids| Experts::new(ids).expanded(expanded));
        ops::linear(enc, &Linear::new(&x, matrix.weight(), &out).experts(experts).alpha(alpha).parts(&parts))
    })
}

pub(super) fn embed(w: &mut World) -> Result<()> {
    let (kind, inputs) = matrix_kind(w);
    let (tokens, rows) = (w.tape.pick(&COUNTS), w.tape.pick(&[11, 1]));
    let table = Matrix::new(w, &[rows], kind, inputs);
    let (ids, out) = (w.u32s(&[tokens], rows, false), w.output(&[tokens, inputs]));
    let scale = w.tape.number(&[1.0, 8.0]);
    w.attempt("embed", |enc| ops::embed(enc, &Embed::new(table.weight(), &ids, &out).scale(scale)))
}

pub(super) fn gate(w: &mut World) -> Result<()> {
    let (rows, dim) = (w.tape.pick(&COUNTS), w.tape.pick(&WIDTHS));
    let before = w.tape.pick(&[0, 2]);
    let (one, two) = (w.input(&[rows, before + dim]), w.input(&[rows, dim]));
    let out = w.output(&[rows, dim]);
    let (start, activation) = (
        w.tape.size(&[before]),
        w.tape.pick(&[
            Activation::GeluTanh,
            Activation::Silu,
            Activation::ClampedSwish,
            Activation::Sigmoid,
            Activation::Identity,
        ]),
    );
    w.attempt("gate", |enc| {
        let (gate, up) = (Columns { tensor: &one, start }, Columns::from(&two));
        ops::gate(enc, &Gate::new(gate, up, activation, &out))
    })
}

pub(super) fn add(w: &mut World) -> Result<()> {
    let shape = [w.tape.pick(&COUNTS), w.tape.pick(&WIDTHS)];
    let (x, y, out) = (w.input(&shape), w.input(&shape), w.output(&shape));
    w.attempt("add", |enc| ops::add(enc, &Add::new(&x, &y, &out)))
}

pub(super) fn add_bias(w: &mut World) -> Result<()> {
    let (tokens, dim) = (w.tape.pick(&COUNTS), w.tape.pick(&WIDTHS));
    let (mixture, top_k, count) = (w.tape.flag(), w.tape.pick(&[2, 1, 0]), 3);
    let shape = [if mixture { tokens * top_k } else { tokens }, dim];
    let (x, out) = (w.input(&shape), w.output(&shape));
    let bias = if mixture { w.input(&[count, dim]) } else { w.input(&[dim]) };
    let ids = mixture.then(|| w.u32s(&[tokens, top_k], count, false));
    w.attempt("add_bias", |enc| ops::add_bias(enc, &AddBias::new(&x, &bias, &out).experts(ids.as_ref())))
}

pub(super) fn causal_conv(w: &mut World) -> Result<()> {
    let (rows, channels, taps) = (w.tape.pick(&COUNTS), w.tape.pick(&WIDTHS), w.tape.pick(&[4, 2, 1]));
    let (x, out, weight) = (w.input(&[rows, channels]), w.output(&[rows, channels]), w.input(&[channels, taps]));
    let (bias, state) = (w.input(&[channels]), StateSlots::new(&w.output(&[STATES, taps - 1, channels]))?);
    let has_bias = w.tape.flag();
    let runs = state_runs(w, rows);
    w.attempt("causal_conv", |enc| {
        let args = CausalConv::new(&x, &weight, &state, &runs, &out).bias(has_bias.then_some(&bias));
        ops::causal_conv(enc, &args)
    })
}

/// Enough for the states after a few rows to differ by chance.
const STATES: usize = 30;

/// One run of all rows. The tape may change everything about it.
fn state_runs(w: &mut World, rows: usize) -> StateRuns {
    let starts = w.tensor(&[DType::U32], &[2], Content::Rising(rows + 1), false);
    let (slots, past) = (w.u32s(&[1], STATES, false), w.u32s(&[1], 9, false));
    let after = w.tensor(&[DType::U32], &[rows], Content::Rising(STATES), false);
    StateRuns::from_tensors(starts, slots, past, after, rows)
}

pub(super) fn delta_rule(w: &mut World) -> Result<()> {
    let (rows, heads, key_heads) = (w.tape.pick(&COUNTS), w.tape.pick(&[2, 2, 1, 0]), w.tape.pick(&[1, 1, 1, 2]));
    let (key_dim, value_dim) = (w.tape.pick(&[32, 64, 32, 33]), w.tape.pick(&[16, 48, 16, 7]));
    let qkv = w.input(&[rows, 2 * key_heads * key_dim + heads * value_dim]);
    let (a, b, out) = (w.input(&[rows, heads]), w.input(&[rows, heads]), w.output(&[rows, heads, value_dim]));
    let (rate, a_bias) = (w.f32(&[heads]), w.f32(&[heads]));
    let shape = [STATES, heads, key_dim, value_dim];
    let state = StateSlots::new(&w.tensor(&[DType::F32], &shape, Content::Floats, true))?;
    let runs = state_runs(w, rows);
    w.attempt("delta_rule", |enc| {
        ops::delta_rule(enc, &DeltaRule::new(&qkv, [&a, &b], [&rate, &a_bias], &state, &runs, &out))
    })
}

pub(super) fn softcap(w: &mut World) -> Result<()> {
    let shape = [w.tape.pick(&COUNTS), w.tape.pick(&WIDTHS)];
    let (x, out, cap) = (w.input(&shape), w.output(&shape), w.tape.number(&[30.0, 0.1]));
    w.attempt("softcap", |enc| ops::softcap(enc, &Softcap::new(&x, cap, &out)))
}

pub(super) fn spread(w: &mut World) -> Result<()> {
    let (tokens, outputs) = (w.tape.pick(&COUNTS), w.tape.pick(&[67, 1, 0, 400]));
    let (chosen, width) = (w.tape.pick(&[3, 1, 0]), w.tape.pick(&WIDTHS));
    let groups = w.tape.flag().then(|| w.u32s(&[tokens, chosen], 9, false));
    let x = w.input(&[tokens * if groups.is_some() { chosen } else { 1 }, width]);
    let (places, out) = (w.u32s(&[outputs], 200, false), w.output(&[tokens, outputs]));
    let fill = w.tape.number(&[-1.0, f32::NEG_INFINITY]);
    w.attempt("spread", |enc| ops::spread(enc, &Spread::new(&x, &places, fill, &out).groups(groups.as_ref())))
}

pub(super) fn argmax(w: &mut World) -> Result<()> {
    let (rows, dim) = (w.tape.pick(&COUNTS), w.tape.pick(&[64, 1, 1000, 0]));
    let (x, out) = (w.input(&[rows, dim]), w.u32s(&[rows], 10, true));
    w.attempt("argmax", |enc| ops::argmax(enc, &Argmax::new(&x, &out)))
}

pub(super) fn sample(w: &mut World) -> Result<()> {
    let (rows, vocab) = (w.tape.pick(&COUNTS), w.tape.pick(&[64, 1, 1000, 0]));
    let (logits, counter, out) = (w.input(&[rows, vocab]), w.u32s(&[rows], 1000, false), w.u32s(&[rows], 10, true));
    let (temperature, top_k) = (w.tape.number(&[1.0, 0.0, 0.7]), w.tape.size(&[0, 1, 40]));
    let (top_p, min_p) = (w.tape.number(&[1.0, 0.5, 1e-9]), w.tape.number(&[0.0, 0.1]));
    let seed = u64::from(w.tape.next()) << 56;
    // Parameters may be any bits.
    let own = w.tape.flag().then(|| w.u32s(&[rows, SampleRow::WORDS], 1 << 30, false));
    w.attempt("sample", |enc| {
        let (logits, counter, out) = (&logits, &counter, &out);
        ops::sample(
            enc,
            &Sample::new(logits, counter, out)
                .temperature(temperature)
                .top_k(top_k)
                .top_p(top_p)
                .min_p(min_p)
                .seed(seed)
                .rows(own.as_ref()),
        )
    })
}

pub(super) fn moe_route(w: &mut World) -> Result<()> {
    let (tokens, experts) = (w.tape.pick(&COUNTS), w.tape.pick(&[4, 1, 128, 0]));
    let top_k = w.tape.pick(&[1, 2, 4, 0]);
    let logits = w.input(&[tokens, experts]);
    let scale = w.tape.flag().then(|| w.f32(&[experts]));
    let ids = w.u32s(&[tokens, top_k], 10, true);
    let weights = w.tensor(&[DType::F32], &[tokens, top_k], Content::Floats, true);
    let bias = w.tape.flag().then(|| w.f32(&[experts]));
    let groups = w.tape.flag().then(|| ExpertGroups { count: w.tape.size(&[1, 2, 4]), chosen: w.tape.size(&[1, 2]) });
    let scores = w.tape.pick(&[ExpertScores::Softmax, ExpertScores::Sigmoid]);
    let [min_sum, epsilon, scale_all] = [0.0, 1e-20, 1.0].map(|valid| w.tape.number(&[valid]));
    w.attempt("moe_route", |enc| {
        let (logits, ids, weights) = (&logits, &ids, &weights);
        let args = MoeRoute::new(logits, ids, weights).expert_scale(scale.as_ref()).bias(bias.as_ref());
        let args = args.scores(scores).groups(groups).min_sum(min_sum).epsilon(epsilon).scale(scale_all);
        ops::moe_route(enc, &args)
    })
}

pub(super) fn moe_combine(w: &mut World) -> Result<()> {
    let (tokens, top_k, dim) = (w.tape.pick(&COUNTS), w.tape.pick(&[2, 1, 8, 0]), w.tape.pick(&WIDTHS));
    let (x, weights, out) = (w.input(&[tokens * top_k, dim]), w.f32(&[tokens, top_k]), w.output(&[tokens, dim]));
    let added = w.tape.flag().then(|| w.input(&[tokens, dim]));
    let added_weights = (added.is_some() && w.tape.flag()).then(|| w.f32(&[tokens, 1]));
    w.attempt("moe_combine", |enc| {
        let args = MoeCombine::new(&x, &weights, &out).added(added.as_ref()).added_weights(added_weights.as_ref());
        ops::moe_combine(enc, &args)
    })
}

pub(super) fn all_reduce(w: &mut World) -> Result<()> {
    let shape = [w.tape.pick(&COUNTS), w.tape.pick(&WIDTHS)];
    let (x, out) = (w.input(&shape), w.output(&shape));
    w.attempt("all_reduce", |enc| ops::all_reduce(enc, &AllReduce::new(&x, &out)))
}

pub(super) fn all_gather(w: &mut World) -> Result<()> {
    let shape = [w.tape.pick(&COUNTS), w.tape.pick(&WIDTHS)];
    let (x, out) = (w.u32s(&shape, 1000, false), w.u32s(&shape, 1000, true));
    w.attempt("all_gather", |enc| ops::all_gather(enc, &AllGather::new(&x, &out)))
}

pub(super) fn merge_attention(w: &mut World) -> Result<()> {
    let (tokens, heads, dim) = (w.tape.pick(&COUNTS), w.tape.pick(&[2, 1, 3, 0]), w.tape.pick(&WIDTHS));
    let (x, ends) = (w.f32(&[tokens, heads, dim]), w.f32(&[tokens, heads]));
    let (sinks, out) = (w.f32(&[heads]), w.output(&[tokens, heads, dim]));
    let args = MergeAttention::new(&x, &ends, &out).sinks(w.tape.flag().then_some(&sinks));
    w.attempt("merge_attention", |enc| ops::merge_attention(enc, &args))
}
