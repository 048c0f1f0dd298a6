//! The error and the size of each codec: writes the same vectors in every codec and reads them back.
//!
//! Run it with `cargo run --release -p kvant --example 03-turboquant`.

use kvant::{Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Result, Step, Tensor, ops};

const TOKENS: usize = 512;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 256;

fn main() -> Result<()> {
    let device = Device::cpu();
    let x = vectors_with_outliers();
    let source = Tensor::from_slice(&device, &x, &[TOKENS, KV_HEADS, HEAD_DIM])?;

    println!("codec   bytes / vector   relative squared error");
    for codec in [Codec::F16, Codec::tq(8), Codec::tq(6), Codec::tq(5), Codec::tq(4)] {
        let back = there_and_back(&device, codec, &source)?;
        let error: f64 = x.iter().zip(&back).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let energy: f64 = x.iter().map(|a| f64::from(*a).powi(2)).sum();
        println!("{:<7} {:>14} {:>24.3e}", codec.to_string(), codec.bytes_per_vector(HEAD_DIM), error / energy);
        if let Codec::TurboQuant(tq) = codec {
            // The distortion of the optimal quantiser of a normal variable. The rotation makes coordinates nearly
            // normal.
            let optimal = [(4, 9.501e-3), (5, 2.505e-3), (6, 6.44e-4), (8, 4.12e-5)];
            let (_, optimal) = optimal.into_iter().find(|&(bits, _)| bits == tq.bits).expect("one of the four");
            // A block's norm is fitted to its own coordinates, so the result can be slightly better.
            let ratio = error / energy / optimal;
            assert!((0.8..1.05).contains(&ratio), "{codec}: {ratio} of the optimal distortion");
        }
    }
    Ok(())
}

/// Writes the vectors to a layer of this codec and reads them back.
fn there_and_back(device: &Device, codec: Codec, source: &Tensor) -> Result<Vec<f32>> {
    let layer = KvLayer::new(device, LayerSpec::new(KV_HEADS, HEAD_DIM, TOKENS, codec))?;
    let positions: Vec<(u32, u32)> = (0..TOKENS as u32).map(|position| (0, position)).collect();
    let step = Step::new(device, 1, &positions)?;
    let out = Tensor::zeros(device, DType::F32, source.shape())?;
    let order = HeadOrder::TokenMajor;

    let mut enc = device.encoder()?;
    let write = ops::KvWrite::new(source, source, &step, &layer).order(order);
    ops::kv_write(&mut enc, &write)?;
    let side = ops::KvSide::K;
    let read = ops::KvRead::new(&layer, side, &out).order(order);
    ops::kv_read(&mut enc, &read)?;
    enc.commit()?.wait()?;
    out.to_f32()
}

/// Vectors in which every 64th coordinate is 20 times larger than the others, as in real keys. A plain quantiser
/// would spend its range on these few; the rotation first spreads them over all coordinates.
fn vectors_with_outliers() -> Vec<f32> {
    let mut state = 1u32;
    let mut uniform = || {
        // xorshift32 (Marsaglia 2003)
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..TOKENS * KV_HEADS * HEAD_DIM).map(|i| if i % 64 == 5 { 20.0 * uniform() } else { uniform() }).collect()
}
