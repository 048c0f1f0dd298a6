//! The two central operations: write keys and values to a layer, then attend over it.
//!
//! An engine with its own cache manager needs only these. Run it with `cargo run -p kvant --example 01-attend`.

use kvant::{Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Result, Step, Tensor, ops};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;

fn main() -> Result<()> {
    let device = Device::cpu();

    // One sequence with 16 slots per head, in f16. Query heads 0 and 1 share KV head 0; heads 2 and 3 share KV head
    // 1.
    let layer = KvLayer::new(&device, LayerSpec::new(KV_HEADS, HEAD_DIM, 16, Codec::F16))?;

    // Three tokens at positions 0, 1, 2. The key of token t points along axis t; its value is t everywhere.
    let step = Step::new(&device, 1, &[(0, 0), (0, 1), (0, 2)])?;
    let mut keys = vec![0f32; 3 * KV_HEADS * HEAD_DIM];
    let mut values = keys.clone();
    for token in 0..3 {
        for head in 0..KV_HEADS {
            let row = (token * KV_HEADS + head) * HEAD_DIM;
            keys[row + token] = 8.0;
            values[row..row + HEAD_DIM].fill(token as f32);
        }
    }
    let k = Tensor::from_slice(&device, &keys, &[3, KV_HEADS, HEAD_DIM])?;
    let v = Tensor::from_slice(&device, &values, &[3, KV_HEADS, HEAD_DIM])?;

    // All three queries point along axis 1, like the key of token 1.
    let mut queries = vec![0f32; 3 * HEADS * HEAD_DIM];
    queries.chunks_exact_mut(HEAD_DIM).for_each(|q| q[1] = 8.0);
    let q = Tensor::from_slice(&device, &queries, &[3, HEADS, HEAD_DIM])?;
    let out = Tensor::zeros(&device, DType::F32, &[3, HEADS, HEAD_DIM])?;

    let mut enc = device.encoder()?;
    let order = HeadOrder::TokenMajor;
    ops::kv_write(&mut enc, &ops::KvWrite::new(&k, &v, &step, &layer).order(order))?;
    ops::attend(&mut enc, &ops::Attend::new(&q, &layer, &step, &out).scale(1.0))?;
    enc.commit()?.wait()?;

    let out = out.to_f32()?;
    for token in 0..3 {
        println!("token {token} gets {:.3}", out[token * HEADS * HEAD_DIM]);
    }
    // Token 0 sees only itself. Tokens 1 and 2 see key 1, which dominates; key 2 does not match the query of token 2.
    assert_eq!(out[0], 0.0);
    assert!((out[HEADS * HEAD_DIM] - 1.0).abs() < 1e-3);
    assert!((out[2 * HEADS * HEAD_DIM] - 1.0).abs() < 1e-3);
    Ok(())
}
