//! Writes to the cache, and the small operations.

use kvant::{
    Codec, DType, HeadOrder, KvLayer, LayerSpec, Result, Step, Tensor,
    ops::{
        self, Activation, Argmax, Columns, Embed, Gate, Hadamard, HeadNorm, KvWrite, NormRope, NormRopeWrite, Residual,
        RmsNorm, Rope, Sample,
    },
};

use crate::timer::{Timer, noise};

pub fn cache(timer: &Timer) -> Result<()> {
    timer.head();
    let device = &timer.device;
    let (tokens, heads, dim) = (8192, 8, 256);
    // Three of each, so that none is read from a cache.
    let sources = (0..6).map(|_| noise(device, DType::BF16, &[tokens, heads, dim])).collect::<Result<Vec<_>>>()?;
    let at: Vec<(u32, u32)> = (0..tokens as u32).map(|p| (0, p)).collect();
    let step = Step::new(device, 1, &at)?;
    for codec in [Codec::BF16, Codec::tq(8), Codec::tq(6), Codec::tq(5), Codec::tq(4)] {
        let spec = LayerSpec::new(heads, dim, tokens, codec);
        let layers = [KvLayer::new(device, spec)?, KvLayer::new(device, spec)?, KvLayer::new(device, spec)?];
        let bytes = 2 * sources[0].bytes() + layers[0].bytes();
        timer.line(&format!("kv_write 8192 × 8 × 256 bf16 → {codec}"), bytes, 3, |enc, i| {
            let order = HeadOrder::TokenMajor;
            let (k, v) = (&sources[2 * i], &sources[2 * i + 1]);
            ops::kv_write(enc, &KvWrite::new(k, v, &step, &layers[i]).order(order))
        })?;
        let q = noise(device, DType::BF16, &[1, 16, dim])?;
        let (one, other) = (sources[0].rows(0..1)?, sources[1].rows(0..1)?);
        let one_step = Step::new(device, 1, &[(0, 4097)])?;
        let weight = noise(device, DType::BF16, &[dim])?;
        let norm = Some(HeadNorm::new(1e-6).weight(Some(&weight)));
        let rope = Some(Rope::new(1e6, dim / 2));
        let name = format!("norm_rope_write of 1 token, 16 + 8 + 8 heads × 256, bf16 → {codec}");
        timer.line(&name, 0, 3, |enc, i| {
            let args = NormRopeWrite::new(&q, &one, &other, &one_step, &layers[i], &q)
                .q_norm(norm)
                .k_norm(norm)
                .v_norm(norm)
                .rope(rope);
            ops::norm_rope_write(enc, &args).map(drop)
        })?;
    }
    let q = noise(device, DType::BF16, &[4096, 16, dim])?;
    let positions = Tensor::from_slice(device, &(0..4096).collect::<Vec<u32>>(), &[4096])?;
    let rope = Some(Rope::new(1e6, dim / 2));
    timer.line("norm_rope 4096 × 16 × 256 bf16", 2 * q.bytes(), 1, |enc, _| {
        let args = NormRope::new(&q, &positions, &q).norm(Some(HeadNorm::new(1e-6))).rope(rope);
        ops::norm_rope(enc, &args).map(drop)
    })
}

pub fn rest(timer: &Timer) -> Result<()> {
    timer.head();
    let device = &timer.device;
    for rows in [1, 4096] {
        let x = noise(device, DType::BF16, &[rows, 4096])?;
        let (out, weight) = (noise(device, DType::BF16, &[rows, 4096])?, noise(device, DType::BF16, &[4096])?);
        timer.line(&format!("rms_norm {rows} × 4096 bf16, after a residual"), 3 * x.bytes(), 1, |enc, _| {
            let residual = Residual::After(&out);
            let args = RmsNorm::new(&x, 1e-6, &out).weight(Some(&weight)).residual(residual);
            ops::rms_norm(enc, &args)
        })?;
        timer.line(&format!("gate {rows} × 4096 bf16"), 3 * x.bytes(), 1, |enc, _| {
            let (gate, up) = (Columns::from(&x), Columns::from(&out));
            ops::gate(enc, &Gate::new(gate, up, Activation::GeluTanh, &x))
        })?;
        let heads = x.reshape(&[rows * 16, 256])?;
        timer.line(&format!("hadamard {} × 256 bf16", rows * 16), 2 * x.bytes(), 1, |enc, _| {
            ops::hadamard(enc, &Hadamard::new(&heads, &heads))
        })?;
    }
    let logits = noise(device, DType::BF16, &[1, 262_144])?;
    let (id, counter) = (Tensor::zeros(device, DType::U32, &[1])?, Tensor::zeros(device, DType::U32, &[1])?);
    timer.line("argmax of 262144 bf16", logits.bytes(), 1, |enc, _| ops::argmax(enc, &Argmax::new(&logits, &id)))?;
    for (top_k, top_p) in [(0, 1.0), (64, 0.95)] {
        timer.line(&format!("sample of 262144 bf16, top_k {top_k}, top_p {top_p}"), logits.bytes(), 1, |enc, _| {
            let args = Sample::new(&logits, &counter, &id).temperature(0.01).top_k(top_k).top_p(top_p).seed(1);
            ops::sample(enc, &args)
        })?;
    }
    let table = noise(device, DType::BF16, &[4096, 4096])?;
    let ids = Tensor::from_slice(device, &(0..512).collect::<Vec<u32>>(), &[512])?;
    let out = Tensor::zeros(device, DType::BF16, &[512, 4096])?;
    timer.line("embed 512 × 4096 bf16", 2 * out.bytes(), 1, |enc, _| ops::embed(enc, &Embed::new(&table, &ids, &out)))
}
