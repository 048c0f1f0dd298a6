//! Rows on pages: `kv_write`, `norm_rope_write` and `kv_read` agree on their places, and skip inactive rows.

use super::case::{CASE, Case, Filled};
use crate::common::{
    Bound, Out, Rng, conform, input,
    layers::{self, CODECS, Source},
    run,
};
use kvant::{
    CacheLayer, Codec, DType, HeadOrder, KvPool, PoolSpec, StepSize,
    ops::{self, Attend, KvRead, KvSide, NormRopeWrite},
};

/// Written vectors are read back, and positions without a page read as zero.
#[test]
fn written_vectors_are_read_back() {
    // The widest heads, for which a thread processes several parts of a row.
    let cases =
        CODECS.into_iter().map(|codec| (codec, 64)).chain([(Codec::F32, 4096), (Codec::F16, 80), (Codec::BF16, 112)]);
    for (codec, head_dim) in cases {
        let case = Case { head_dim, k: codec, v: Codec::F32, window: Some(20), sequences: vec![(70, 3)], ..CASE };
        let source = case.source();
        conform(format!("kv_read of {codec}"), |device| {
            let Filled { pool, step, new, sequences } = case.filled(device, &source)?;
            let layer = pool.layer(1)?;
            layers::write(layer, &source.gather(&new), DType::F32, &step)?;
            let mut outputs = Vec::new();
            for (side, order) in [(KvSide::K, HeadOrder::TokenMajor), (KvSide::V, HeadOrder::HeadMajor)] {
                for start in [sequences[0].held(1)?.start, 0] {
                    let (tokens, heads) = (73 - start, case.kv_heads);
                    let shape = if order == HeadOrder::TokenMajor {
                        [tokens, heads, head_dim]
                    } else {
                        [heads, tokens, head_dim]
                    };
                    let out = Out::new(device, DType::F32, &shape)?;
                    // Zeros must be written explicitly.
                    out.tensor.write(&vec![f32::NAN; out.tensor.elements()])?;
                    let (sequence, keep_rotated, step) = (0, false, Some(&step));
                    let read = KvRead::new(layer, side, &out.tensor)
                        .sequence(sequence)
                        .step(step)
                        .start(start)
                        .keep_rotated(keep_rotated)
                        .order(order);
                    run(device, |enc| ops::kv_read(enc, &read))?;
                    outputs.push(out.close(&format!("{side:?} from {start}"))?);
                }
            }
            Ok(outputs)
        });
    }
}

/// The fused operation uses the same places: without norms and rotation, it stores what `kv_write` would.
#[test]
fn norm_rope_write_stores_on_pages() {
    // The widest heads, for which a thread processes several parts of a row.
    let cases =
        CODECS.into_iter().map(|codec| (codec, 64)).chain([(Codec::F32, 4096), (Codec::F16, 80), (Codec::BF16, 112)]);
    for (codec, head_dim) in cases {
        let case = Case { head_dim, k: codec, v: Codec::BF16, sequences: vec![(70, 20), (20, 1)], ..CASE };
        let source = case.source();
        conform(format!("norm_rope_write of {codec}"), |device| {
            let Filled { pool, step, new, sequences } = case.filled(device, &source)?;
            let (layer, data) = (pool.layer(1)?, source.gather(&new));
            let x = |values: &[f32]| input(device, DType::F32, values, &[new.len(), case.kv_heads, case.head_dim]);
            let (k, v) = (x(&data.k)?, x(&data.v)?);
            let q_out = Out::new(device, DType::F32, &[new.len(), case.kv_heads, case.head_dim])?;
            let args = NormRopeWrite::new(&k, &k, &v, &step, layer, &q_out.tensor);
            run(device, |enc| ops::norm_rope_write(enc, &args))?;
            let mut outputs = vec![q_out.close("q_out")?];
            for (sequence, held) in sequences.iter().enumerate() {
                for side in [KvSide::K, KvSide::V] {
                    let out = Out::new(device, DType::F32, &[held.len(), case.kv_heads, case.head_dim])?;
                    let (start, keep_rotated, order, step) = (0, false, HeadOrder::TokenMajor, Some(&step));
                    let read = KvRead::new(layer, side, &out.tensor)
                        .sequence(sequence)
                        .step(step)
                        .start(start)
                        .keep_rotated(keep_rotated)
                        .order(order);
                    run(device, |enc| ops::kv_read(enc, &read))?;
                    outputs.push(out.close(&format!("{side:?} of sequence {sequence}"))?);
                }
            }
            Ok(outputs)
        });
    }
}

/// Inactive rows of a step store nothing, and attention gives zeros for them.
#[test]
fn inactive_rows_do_nothing() {
    for codec in [Codec::F16, Codec::tq(4)] {
        conform(format!("inactive rows over {codec}"), |device| {
            let layer = CacheLayer::new(2, 64, codec);
            let pool = KvPool::new(device, &PoolSpec::new(vec![layer], 1 << 20))?;
            let (mut a, mut b) = (pool.sequence(), pool.sequence());
            let step = pool.reserve_step(StepSize::decode(5, 100))?;
            let layer = pool.layer(0)?;
            let mut rng = Rng::of("inactive");
            let mut outputs = Vec::new();
            for round in 0..3 {
                let mut batch = vec![(&mut b, 1), (&mut a, 1)];
                batch.truncate(round);
                pool.step_into(&mut batch, &step)?;
                let data = Source::random(&mut rng, 5, 2, 64);
                layers::write(layer, &data, DType::F32, &step)?;
                let q = input(device, DType::F32, &rng.normals(5 * 4 * 64), &[5, 4, 64])?;
                let out = Out::new(device, DType::F32, &[5, 4, 64])?;
                run(device, |enc| ops::attend(enc, &Attend::new(&q, layer, &step, &out.tensor)))?;
                let values = out.tensor.to_f32()?;
                assert!(values[round * 4 * 64..].iter().all(|&x| x == 0.0), "{device}: rows from {round} on");
                outputs.push(out.close_within("out", Bound::of(DType::F32).over(device, codec, 1.0))?);
            }
            Ok(outputs)
        });
    }
}
