//! Kernels that the device's compiler rejects are replaced by simpler ones, with equal results.

use kvant::{
    Codec, DType, Device, KvLayer, LayerSpec, Result, Step, Tensor,
    ops::{self, Attend, Experts, KvWrite, Linear, Weight},
};

use crate::common::{Rng, run};

/// A Metal device without tiles: a launch of these kernels fails.
fn device() -> Device {
    let runs = kvant_msl::Runs::once(kvant_msl::Build::Plain, kvant_msl::Schedule::Random(1));
    kvant_msl::device(runs.refusing(&["attend_tiles", "linear_tiles"])).expect("msl-host is available")
}

fn random(device: &Device, seed: u64, shape: &[usize]) -> Result<Tensor> {
    Tensor::from_slice(device, &Rng::new(seed).normals(shape.iter().product()), shape)
}

/// A prompt of 21 tokens, with two query heads for each of two KV heads.
fn prompt(device: &Device, head_dim: usize, codec: Codec) -> Result<Vec<f32>> {
    let tokens = 21;
    let layer = KvLayer::new(device, LayerSpec::new(2, head_dim, tokens, codec))?;
    let step = Step::new(device, 1, &(0..tokens as u32).map(|p| (0, p)).collect::<Vec<_>>())?;
    let (k, v) = (random(device, 1, &[tokens, 2, head_dim])?, random(device, 2, &[tokens, 2, head_dim])?);
    let q = random(device, 3, &[tokens, 4, head_dim])?;
    let out = Tensor::zeros(device, DType::F32, &[tokens, 4, head_dim])?;
    run(device, |enc| {
        ops::kv_write(enc, &KvWrite::new(&k, &v, &step, &layer))?;
        ops::attend(enc, &Attend::new(&q, &layer, &step, &out).scale(0.1))
    })?;
    out.to_vec()
}

/// More rows than `few_rows` kernels take, for one matrix or four.
fn product(device: &Device, experts: usize) -> Result<Vec<f32>> {
    let (rows, inputs, outputs) = (37, 72, 50);
    let x = random(device, 4, &[rows, inputs])?;
    let shape = [experts, outputs, inputs];
    let w = random(device, 5, if experts == 1 { &shape[1..] } else { &shape })?;
    let out = Tensor::zeros(device, DType::F32, &[rows, outputs])?;
    let ids: Vec<u32> = (0..rows as u32).map(|r| r * 7 % 4).collect();
    let ids = Tensor::from_slice(device, &ids, &[rows, 1])?;
    let choices = (experts > 1).then(|| Experts::new(&ids));
    let linear = Linear::new(&x, Weight::Dense(&w), &out).experts(choices);
    run(device, |enc| ops::linear(enc, &linear))?;
    out.to_vec()
}

fn assert_close(what: &str, f: impl Fn(&Device) -> Result<Vec<f32>>) {
    let want = f(&Device::reference()).unwrap_or_else(|e| panic!("{what}: {e}"));
    let got = f(&device()).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(got.len(), want.len());
    for (i, (x, y)) in got.iter().zip(&want).enumerate() {
        assert!((x - y).abs() <= 1e-4 * (1.0 + y.abs()), "{what}: number {i} is {x}, want {y}");
    }
}

#[test]
fn prompts_fall_back_to_few_rows() {
    for (head_dim, codec) in [(64, Codec::F16), (96, Codec::F32), (256, Codec::tq(4)), (512, Codec::F32)] {
        assert_close(&format!("a prompt, D = {head_dim}"), |device| prompt(device, head_dim, codec));
    }
}

#[test]
fn products_fall_back_to_few_rows() {
    for experts in [1, 4] {
        assert_close(&format!("a product, {experts} matrices"), |device| product(device, experts));
    }
}
