//! Records a decode step once and replays it for every token.
//!
//! Positions and lengths are in device buffers. A captured graph reads them at each replay, so the step that was
//! recorded for one token serves all tokens. Run it with `cargo run -p kvant --example 04-graph`.

use kvant::{Codec, DType, Device, Encoder, KvLayer, LayerSpec, Result, SlotOrder, Step, Tensor, ops};

const HEAD_DIM: usize = 64;
const TOKENS: usize = 6;

fn main() -> Result<()> {
    let device = Device::cpu();
    let spec = LayerSpec {
        sequences: 1,
        kv_heads: 1,
        capacity: TOKENS,
        head_dim: HEAD_DIM,
        k: Codec::F32,
        v: Codec::F32,
        window: None,
        ring: false,
        order: SlotOrder::HeadMajor,
    };
    let layer = KvLayer::new(&device, spec)?;

    // These change from token to token: query, key and value, the position, and the length of the sequence.
    let shape = [1, 1, HEAD_DIM];
    let q = Tensor::zeros(&device, DType::F32, &shape)?;
    let k = Tensor::zeros(&device, DType::F32, &shape)?;
    let v = Tensor::zeros(&device, DType::F32, &shape)?;
    let out = Tensor::zeros(&device, DType::F32, &shape)?;
    let step = Step::new(&device, 1, &[(0, 0)])?;

    let graph = Encoder::capture(&device, |enc| {
        let order = ops::SourceOrder::TokenMajor;
        ops::kv_write(enc, &ops::KvWrite { k: &k, v: &v, order, first_token: 0, step: &step, layer: &layer })?;
        let attend = ops::Attend {
            q: &q,
            layer: &layer,
            step: &step,
            fresh: None,
            scale: 1.0,
            softcap: None,
            window: None,
            q_rotated: false,
            plan: None,
            out: &out,
        };
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
