//! Attention over sealed vectors and their means.

use super::{PAGE, append, around, pool_of, reference_and_devices};
use crate::{
    common::{
        Out, Rng, input,
        layers::{self, CENTRED_CODECS},
        nmse, run,
    },
    pages::case::{CASE, Case, Filled},
};
use kvant::{
    CacheLayer, Codec, DType, Device,
    ops::{self, Attend},
};

/// Every fill of the last page, written at once or token by token.
#[test]
fn every_fill() {
    for (i, codec) in CENTRED_CODECS.into_iter().enumerate() {
        for (j, past) in [0, 1, PAGE - 1, PAGE, 3 * PAGE + 1].into_iter().enumerate() {
            let head_dim = [64, 128, 256, 512][(i + past) % 4];
            for (n, new) in [1, 2, PAGE, PAGE + 1].into_iter().enumerate() {
                // Each past with each number of new tokens, for every other codec.
                if (i + j + n) % 2 == 0 {
                    let sequences = vec![(past, new), (2 * PAGE, 1)];
                    Case { k: codec, v: codec, head_dim, sequences, ..CASE }.check();
                }
            }
        }
    }
}

/// Every pair of widths, and two plain or dense codecs for each: one for the values, one for the keys.
#[test]
fn every_pair() {
    let others = [Codec::F16, Codec::F32, Codec::BF16, Codec::tq(8), Codec::tq(3)];
    for (i, codec) in CENTRED_CODECS.into_iter().enumerate() {
        let others = [others[i % 5], others[(i + 2) % 5]];
        for (j, other) in others.into_iter().chain(CENTRED_CODECS).enumerate() {
            let head_dim = [64, 128, 256, 512][(i + j) % 4];
            let group = [2, 1, 4, 7, 16][(i + j) % 5];
            let page_tokens = [16, 32, 64, 128, 256][(i + 2 * j) % 5];
            let sequences = if (i + j) % 2 == 0 { vec![(130, 1), (17, 1)] } else { vec![(35, 18)] };
            let (k, v) = if j % 2 == 0 { (codec, other) } else { (other, codec) };
            let dtype = [DType::F32, DType::F16, DType::BF16][(i + 2 * j) % 3];
            Case { k, v, head_dim, group, page_tokens, sequences, dtype, ..CASE }.check();
        }
    }
}

/// The kernel that merges the splits of a context adds the results over other pages exactly once.
#[test]
fn forced_splits() {
    let cases = [(64, vec![(130, 1), (40, 1)], None), (128, vec![(100, 3)], Some(70)), (256, vec![(90, 30)], None)];
    for (head_dim, sequences, window) in cases {
        let codec = Codec::tq_centred(6);
        let case = Case { k: codec, v: codec, head_dim, sequences, window, ..CASE };
        let attended = |device: &Device, splits| {
            let source = case.source();
            let Filled { pool, step, new, sequences: _held } = case.filled(device, &source).unwrap();
            layers::write(pool.layer(1).unwrap(), &source.gather(&new), DType::F32, &step).unwrap();
            let out = case.attend_in(pool.layer(1).unwrap(), &step, Some(splits)).unwrap();
            out.bytes().unwrap();
            out.tensor.to_f32().unwrap()
        };
        for device in reference_and_devices() {
            let want = attended(&device, 1);
            for splits in [2, 5] {
                let error = nmse(&attended(&device, splits), &want);
                // Integers on the CPU are relative to the largest weight of a part.
                assert!(error < 1e-6, "{device}: D {head_dim}, {splits} splits: {error}");
            }
        }
    }
}

#[test]
fn windows() {
    for window in [1, 17, 40, 1000] {
        for sequences in [vec![(100, 1), (16, 1), (0, 1)], vec![(90, 30), (5, 3)]] {
            let codec = Codec::tq_centred(4);
            Case { window: Some(window), k: codec, v: codec, sequences, ..CASE }.check();
        }
    }
}

/// Vectors that are not finite, or whose norms overflow f16, do not affect tokens that do not see them: next to the
/// first seen one, in its page and in the page before.
#[test]
fn unseen_vectors_have_no_effect() {
    let (tokens, window) = (6 * PAGE + 6, 3 * PAGE + 4);
    let attended = |device: &Device, dtype: DType| -> Vec<f32> {
        let layer = CacheLayer::new(1, 64, Codec::tq_centred(8)).window(Some(window));
        let pool = pool_of(device, layer, tokens + PAGE);
        let layer = pool.layer(0).unwrap();
        layers::fill(layer, 0xFF).unwrap();
        let mut data = around(&mut Rng::of("unseen"), tokens, 1, 64, 2.0);
        let first = tokens - window;
        for (at, x) in [(first - 1, f32::NAN), (first - 2, 1e5), (first - PAGE, f32::INFINITY)] {
            data.k[at * 64..(at + 1) * 64].fill(x);
            data.v[at * 64..(at + 1) * 64].fill(-x);
        }
        let mut sequence = pool.sequence();
        let mut step = append(&pool, &mut sequence, &data.part(0..PAGE));
        for at in PAGE..tokens {
            step = append(&pool, &mut sequence, &data.part(at..at + 1));
        }
        let q = input(device, dtype, &Rng::of("q").normals(2 * 64), &[1, 2, 64]).unwrap();
        let out = Out::new(device, dtype, &[1, 2, 64]).unwrap();
        run(device, |enc| ops::attend(enc, &Attend::new(&q, layer, &step, &out.tensor))).unwrap();
        out.bytes().unwrap();
        out.tensor.to_f32().unwrap()
    };
    for dtype in [DType::F32, DType::BF16] {
        let want = attended(&Device::reference(), dtype);
        for device in reference_and_devices() {
            let got = attended(&device, dtype);
            assert!(nmse(&got, &want) < 1e-4, "{device}: {dtype}: {}", nmse(&got, &want));
        }
    }
}
