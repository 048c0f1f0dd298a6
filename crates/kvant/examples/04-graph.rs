//! Records a decode step once and replays it for every token.
//!
//! Positions and lengths are in device buffers. A captured graph reads them at each replay, so the step that was
//! recorded for one token serves all tokens. Run it with `cargo run -p kvant --example 04-graph`.

use kvant::{Codec, DType, Device, Encoder, HeadOrder, KvLayer, LayerSpec, Result, Step, Tensor, ops};

const HEAD_DIM: usize = 64;
const TOKENS: usize = 6;

fn main() -> Result<()> {
    let device = Device::cpu();
    let spec = LayerSpec::new(1, HEAD_DIM, TOKENS, Codec::F32);
    let layer = KvLayer::new(&device, spec)?;

    // These change from token to token: query, key and value, the position, and the length of the sequence.
    let shape = [1, 1, HEAD_DIM];
    let q = Tensor::zeros(&device, DType::F32, &shape)?;
    let k = Tensor::zeros(&device, DType::F32, &shape)?;
    let v = Tensor::zeros(&device, DType::F32, &shape)?;
    let out = Tensor::zeros(&device, DType::F32, &shape)?;
    let step = Step::new(&device, 1, &[(0, 0)])?;

    let graph = Encoder::capture(&device, |enc| {
        let order = HeadOrder::TokenMajor;
        ops::kv_write(enc, &ops::KvWrite::new(&k, &v, &step, &layer).order(order))?;
        let attend = ops::Attend::new(&q, &layer, &step, &out).scale(1.0);
        ops::attend(enc, &attend)
    })?;

    for token in 0..TOKENS {
        // Keys and queries are zero, so all weights are equal and attention returns the mean of the values so far.
        v.write(&[token as f32; HEAD_DIM])?;
        step.positions().write(&[token as u32])?;
        step.lens().write(&[token as u32 + 1])?;
        graph.replay()?.wait()?;

        let mean = out.to_f32()?[0];
        println!("after token {token}: {mean:.2}");
        assert!((mean - token as f32 / 2.0).abs() < 1e-5);
    }
    Ok(())
}
