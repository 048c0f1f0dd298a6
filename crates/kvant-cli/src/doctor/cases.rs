//! A small case for every operation.

use kvant::{
    CacheLayer, Codec, DType, Device, Encoder, KvLayer, KvPool, LayerSpec, PoolSpec, Step, Tensor,
    ops::{
        self, Activation, Add, AddBias, Affine, Argmax, Attend, CausalConv, DeltaRule, Embed, Experts, Gate, Hadamard,
        HeadNorm, KvRead, KvSide, KvWrite, Linear, MoeCombine, MoeRoute, NextNorm, NormRope, NormRopeWrite, RmsNorm,
        Rope, Sample, Softcap, StateRuns, StateSlots, Weight,
    },
};

use kvant_models::KvCodec;

use crate::{bench::random, result::Result};

type Run = dyn Fn(&Device) -> Result<Vec<f32>>;

/// An operation with its inputs on a device.
pub struct Trial {
    pub name: String,
    /// Maximum relative error.
    pub bound: f64,
    run: Box<Run>,
}

impl Trial {
    pub fn new(name: impl Into<String>, bound: f64, run: impl Fn(&Device) -> Result<Vec<f32>> + 'static) -> Trial {
        Trial { name: name.into(), bound, run: Box::new(run) }
    }

    pub fn run(&self, device: &Device) -> Result<Vec<f32>> {
        (self.run)(device)
    }
}

/// The cases for activations of `dtype`. `eight_bits`: matrix products may round activations to 8 bits.
pub fn all(dtype: DType, eight_bits: bool) -> Vec<Trial> {
    // The bound allows four roundings of a result, or of the operation's intermediate values.
    let bound = match dtype {
        DType::F32 => 1e-4,
        DType::F16 => 2e-3,
        _ => 1e-2,
    };
    let mut cases = small(dtype, bound);
    for bits in [0, 4, 6, 8] {
        let of_products = if eight_bits { bound.max(1e-2) } else { bound };
        for rows in [1, 3, 12, 40, 100] {
            cases.push(Trial::new(format!("linear, {}, {rows} rows", format_of(bits)), of_products, move |device| {
                linear(device, dtype, bits, rows)
            }));
        }
        for tokens in [1, 40] {
            let name = format!("linear, {} of experts, {tokens} tokens", format_of(bits));
            cases.push(Trial::new(name, of_products, move |device| experts(device, dtype, bits, tokens)));
        }
        cases.push(Trial::new(format!("embed, {}", format_of(bits)), bound, move |device| embed(device, dtype, bits)));
    }
    cases.push(Trial::new("kv_write, kv_read", bound, move |device| written(device, dtype)));
    for kv in ["f32", "f16", "bf16", "tq8", "tq5", "tq4", "tq3", "tq2", "f16:tq4", "tq4c"] {
        for head_dim in [64, 128, 256, 512] {
            let name = format!("norm_rope_write, attend, {kv}, {head_dim}");
            // A coordinate close to a threshold may get the adjacent index.
            let bound = if kv.contains("tq") { bound.max(2e-2) } else { bound };
            cases.push(Trial::new(name, bound, move |device| cache(device, dtype, kv, head_dim)));
        }
    }
    cases
}

fn format_of(bits: u32) -> String {
    if bits == 0 { "dense".to_string() } else { format!("affine {bits} bits") }
}

fn run(device: &Device, record: impl FnOnce(&mut Encoder) -> kvant::Result<()>) -> Result {
    let mut enc = device.encoder()?;
    record(&mut enc)?;
    Ok(enc.commit()?.wait()?)
}

fn indices(device: &Device, count: usize, below: usize, shape: &[usize]) -> Result<Tensor> {
    let ids: Vec<u32> = (0..count).map(|i| ((i * 7 + i / 3) % below) as u32).collect();
    Ok(Tensor::from_slice(device, &ids, shape)?)
}

/// Converts u32 to f32, which is exact for small numbers.
fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.to_vec::<u32>()?.into_iter().map(|x| x as f32).collect())
}

/// All rows except the last continue a sequence; the last one begins another.
fn state_runs(device: &Device, rows: usize) -> Result<StateRuns> {
    Ok(StateRuns::new(device, &[(1, 6, rows as u32 - 1), (0, 0, 1)])?)
}

/// The delta rule of four heads, two of them with one key.
fn delta_rule(device: &Device, dtype: DType, rows: usize) -> Result<Vec<f32>> {
    const DIM: usize = 64;
    let (qkv, out) = (random(device, dtype, &[rows, 8 * DIM], 19)?, Tensor::zeros(device, dtype, &[rows, 4, DIM])?);
    let gates = [random(device, dtype, &[rows, 4], 20)?, random(device, dtype, &[rows, 4], 21)?];
    let decay = [Tensor::from_slice(device, &[-0.3f32; 4], &[4])?, random(device, DType::F32, &[4], 22)?];
    let state = random(device, DType::F32, &[2, 4, DIM, DIM], 23)?;
    let (slots, runs) = (StateSlots::new(&state)?, state_runs(device, rows)?);
    let args = DeltaRule::new(&qkv, gates.each_ref(), decay.each_ref(), &slots, &runs, &out);
    run(device, |enc| ops::delta_rule(enc, &args))?;
    Ok([out.to_f32()?, state.to_f32()?].concat())
}

/// Operations with only one variant worth testing.
fn small(dtype: DType, bound: f64) -> Vec<Trial> {
    const ROWS: usize = 5;
    const WIDTH: usize = 384;
    let x = move |device: &Device, seed| random(device, dtype, &[ROWS, WIDTH], seed);
    let out = move |device: &Device| Tensor::zeros(device, dtype, &[ROWS, WIDTH]);
    vec![
        Trial::new("rms_norm", bound, move |device| {
            let (x, weight, out, next) =
                (x(device, 1)?, random(device, DType::F32, &[WIDTH], 2)?, out(device)?, out(device)?);
            let norms = [NextNorm::new(&next).scale(0.5)];
            let args = RmsNorm::new(&x, 1e-6, &out).weight(Some(&weight)).next(&norms);
            run(device, |enc| ops::rms_norm(enc, &args))?;
            Ok([out.to_f32()?, next.to_f32()?].concat())
        }),
        Trial::new("gate", bound, move |device| {
            let (gate, up, out) = (x(device, 3)?, x(device, 4)?, out(device)?);
            let args = Gate::new(&gate, &up, Activation::GeluTanh, &out);
            run(device, |enc| ops::gate(enc, &args))?;
            Ok(out.to_f32()?)
        }),
        Trial::new("add", bound, move |device| {
            let (x, y, out) = (x(device, 14)?, x(device, 15)?, out(device)?);
            run(device, |enc| ops::add(enc, &Add::new(&x, &y, &out)))?;
            Ok(out.to_f32()?)
        }),
        Trial::new("add_bias", bound, move |device| {
            let (x, bias, out) = (x(device, 5)?, random(device, dtype, &[WIDTH], 6)?, out(device)?);
            run(device, |enc| ops::add_bias(enc, &AddBias::new(&x, &bias, &out)))?;
            Ok(out.to_f32()?)
        }),
        Trial::new("softcap", bound, move |device| {
            let (x, out) = (x(device, 7)?, out(device)?);
            run(device, |enc| ops::softcap(enc, &Softcap::new(&x, 1.5, &out)))?;
            Ok(out.to_f32()?)
        }),
        Trial::new("causal_conv", bound, move |device| {
            let (x, weight, out) = (x(device, 16)?, random(device, dtype, &[WIDTH, 4], 17)?, out(device)?);
            let state = random(device, dtype, &[2, 3, WIDTH], 18)?;
            let (slots, runs) = (StateSlots::new(&state)?, state_runs(device, ROWS)?);
            let args = CausalConv::new(&x, &weight, &slots, &runs, &out).silu(true);
            run(device, |enc| ops::causal_conv(enc, &args))?;
            Ok([out.to_f32()?, state.to_f32()?].concat())
        }),
        Trial::new("delta_rule", bound, move |device| delta_rule(device, dtype, ROWS)),
        Trial::new("delta_rule, prompts", bound, move |device| delta_rule(device, dtype, 20)),
        Trial::new("hadamard", bound, move |device| {
            let x = random(device, dtype, &[ROWS, 256], 8)?;
            let out = Tensor::zeros(device, dtype, &[ROWS, 256])?;
            run(device, |enc| ops::hadamard(enc, &Hadamard::new(&x, &out)))?;
            Ok(out.to_f32()?)
        }),
        Trial::new("copy", 0.0, move |device| {
            let (x, out) = (x(device, 9)?, out(device)?);
            run(device, |enc| ops::copy(enc, &x, &out))?;
            Ok(out.to_f32()?)
        }),
        Trial::new("argmax", 0.0, move |device| {
            let (x, out) = (x(device, 10)?, Tensor::zeros(device, DType::U32, &[ROWS])?);
            run(device, |enc| ops::argmax(enc, &Argmax::new(&x, &out)))?;
            numbers(&out)
        }),
        Trial::new("sample", 0.0, move |device| {
            let (x, out) = (x(device, 11)?, Tensor::zeros(device, DType::U32, &[ROWS])?);
            let counter = indices(device, ROWS, 1 << 20, &[ROWS])?;
            let args = Sample::new(&x, &counter, &out).temperature(0.7).top_k(20).seed(3);
            run(device, |enc| ops::sample(enc, &args))?;
            numbers(&out)
        }),
        Trial::new("moe_route, moe_combine", bound, move |device| {
            let (experts, top_k) = (32, 4);
            let logits = random(device, dtype, &[ROWS, experts], 12)?;
            let ids = Tensor::zeros(device, DType::U32, &[ROWS, top_k])?;
            let weights = Tensor::zeros(device, DType::F32, &[ROWS, top_k])?;
            let (rows, out) = (random(device, dtype, &[ROWS * top_k, WIDTH], 13)?, out(device)?);
            run(device, |enc| {
                ops::moe_route(enc, &MoeRoute::new(&logits, &ids, &weights))?;
                ops::moe_combine(enc, &MoeCombine::new(&rows, &weights, &out))
            })?;
            Ok([numbers(&ids)?, weights.to_f32()?, out.to_f32()?].concat())
        }),
        Trial::new("norm_rope", bound, move |device| {
            let shape = [ROWS, 4, 128];
            let (x, weight) = (random(device, dtype, &shape, 14)?, random(device, DType::F32, &[128], 15)?);
            let (positions, out) = (indices(device, ROWS, 1000, &[ROWS])?, Tensor::zeros(device, dtype, &shape)?);
            let norm = HeadNorm::new(1e-6).weight(Some(&weight));
            let args = NormRope::new(&x, &positions, &out).norm(Some(norm)).rope(Some(Rope::new(1e4, 64)));
            run(device, |enc| ops::norm_rope(enc, &args).map(drop))?;
            Ok(out.to_f32()?)
        }),
    ]
}

/// A weight matrix, or one per expert.
struct Matrix {
    bits: u32,
    tensors: Vec<Tensor>,
}

impl Matrix {
    const GROUP: usize = 64;

    /// `lead` is `[N]` or `[E, N]`. `bits` is 0 for a dense matrix.
    fn new(device: &Device, dtype: DType, bits: u32, lead: &[usize], inputs: usize) -> Result<Matrix> {
        let shape = |last| [lead, &[last]].concat();
        if bits == 0 {
            return Ok(Matrix { bits, tensors: vec![random(device, dtype, &shape(inputs), 20)?] });
        }
        let words = inputs * bits as usize / 32;
        let count = lead.iter().product::<usize>() * words;
        let codes: Vec<u32> = (0..count as u32).map(|i| (i ^ i >> 7).wrapping_mul(0x9E37_79B1)).collect();
        let factors = |seed| random(device, dtype, &shape(inputs / Matrix::GROUP), seed);
        let tensors = vec![Tensor::from_slice(device, &codes, &shape(words))?, factors(21)?, factors(22)?];
        Ok(Matrix { bits, tensors })
    }

    fn weight(&self) -> Weight<'_> {
        match &self.tensors[..] {
            [codes, scales, biases] => Affine { codes, scales, biases, bits: self.bits, group: Matrix::GROUP }.into(),
            tensors => Weight::Dense(&tensors[0]),
        }
    }
}

fn linear(device: &Device, dtype: DType, bits: u32, rows: usize) -> Result<Vec<f32>> {
    let (inputs, outputs) = (512, 272);
    let weight = Matrix::new(device, dtype, bits, &[outputs], inputs)?;
    let (x, out) = (random(device, dtype, &[rows, inputs], 23)?, Tensor::zeros(device, dtype, &[rows, outputs])?);
    run(device, |enc| ops::linear(enc, &Linear::new(&x, weight.weight(), &out).parts(&[160, 64, 48])))?;
    Ok(out.to_f32()?)
}

fn experts(device: &Device, dtype: DType, bits: u32, tokens: usize) -> Result<Vec<f32>> {
    let (count, top_k, inputs, outputs) = (6, 2, 256, 80);
    let weight = Matrix::new(device, dtype, bits, &[count, outputs], inputs)?;
    let x = random(device, dtype, &[tokens, inputs], 24)?;
    let ids = indices(device, tokens * top_k, count, &[tokens, top_k])?;
    let out = Tensor::zeros(device, dtype, &[tokens * top_k, outputs])?;
    let args = Linear::new(&x, weight.weight(), &out).experts(Some(Experts::new(&ids)));
    run(device, |enc| ops::linear(enc, &args))?;
    Ok(out.to_f32()?)
}

fn embed(device: &Device, dtype: DType, bits: u32) -> Result<Vec<f32>> {
    let (rows, width, tokens) = (40, 128, 9);
    let table = Matrix::new(device, dtype, bits, &[rows], width)?;
    let (ids, out) = (indices(device, tokens, rows, &[tokens])?, Tensor::zeros(device, dtype, &[tokens, width])?);
    run(device, |enc| ops::embed(enc, &Embed::new(table.weight(), &ids, &out).scale(8.0)))?;
    Ok(out.to_f32()?)
}

/// Writes keys and values without norm and rotation to a layer that the caller owns.
fn written(device: &Device, dtype: DType) -> Result<Vec<f32>> {
    let (tokens, kv_heads, head_dim) = (6, 3, 96);
    let layer = KvLayer::new(device, LayerSpec::new(kv_heads, head_dim, 16, Codec::F16))?;
    let places: Vec<(u32, u32)> = (0..tokens as u32).map(|position| (0, position)).collect();
    let step = Step::new(device, 1, &places)?;
    let rows = |seed| random(device, dtype, &[tokens, kv_heads, head_dim], seed);
    let (k, v, out) = (rows(50)?, rows(51)?, Tensor::zeros(device, DType::F32, &[tokens, kv_heads, head_dim])?);
    run(device, |enc| ops::kv_write(enc, &KvWrite::new(&k, &v, &step, &layer)))?;
    run(device, |enc| ops::kv_read(enc, &KvRead::new(&layer, KvSide::V, &out)))?;
    Ok(out.to_f32()?)
}

/// Runs a prompt and a step of one token. Returns the attention results and the cache contents.
fn cache(device: &Device, dtype: DType, kv: &str, head_dim: usize) -> Result<Vec<f32>> {
    const PROMPT: usize = 70;
    let (kv, heads, kv_heads) = (kv.parse::<KvCodec>()?, 4, 2);
    let layer = CacheLayer::new(kv_heads, head_dim, kv.k).v(kv.v);
    let spec = PoolSpec::new(vec![layer], 0).page_tokens(32).room_for(1, PROMPT + 1, PROMPT + 1)?;
    let pool = KvPool::new(device, &spec)?;
    let mut sequence = pool.sequence();
    let mut results = Vec::new();
    for (seed, tokens) in [(30, PROMPT), (40, 1)] {
        let step = pool.step(&mut [(&mut sequence, tokens)])?;
        let rows = |heads, seed| random(device, dtype, &[tokens, heads, head_dim], seed);
        let (q, k, v) = (rows(heads, seed)?, rows(kv_heads, seed + 1)?, rows(kv_heads, seed + 2)?);
        let zeros = || Tensor::zeros(device, dtype, &[tokens, heads, head_dim]);
        let (queries, out) = (zeros()?, zeros()?);
        let norm = Some(HeadNorm::new(1e-6));
        let layer = pool.layer(0)?;
        let write = NormRopeWrite::new(&q, &k, &v, &step, layer, &queries).q_norm(norm).k_norm(norm);
        run(device, |enc| {
            let q = ops::norm_rope_write(enc, &write.rope(Some(Rope::new(1e4, head_dim / 2))))?;
            ops::attend(enc, &Attend::new(q, layer, &step, &out))
        })?;
        results.extend(out.to_f32()?);
        if tokens == 1 {
            for side in [KvSide::K, KvSide::V] {
                let out = Tensor::zeros(device, DType::F32, &[PROMPT + 1, kv_heads, head_dim])?;
                run(device, |enc| ops::kv_read(enc, &KvRead::new(layer, side, &out).step(Some(&step))))?;
                results.extend(out.to_f32()?);
            }
        }
    }
    Ok(results)
}
