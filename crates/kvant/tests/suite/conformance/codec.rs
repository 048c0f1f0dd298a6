//! The TurboQuant codec on every device: its distortion is the one of the optimal quantiser.

use crate::common::{
    Rng, devices,
    layers::{self, GAUSSIAN_MSE, Source, linear_spec},
    nmse,
};
use kvant::{
    Codec, KvLayer,
    codec::{BITS, Norm, TurboQuant},
    ops::KvSide,
};

/// Σ(x−y)²/Σx² of keys that were written to a layer and read back.
fn distortion(device: &kvant::Device, codec: Codec, data: &Source) -> f64 {
    let tokens = data.tokens();
    let layer = KvLayer::new(device, linear_spec(data.heads, tokens, data.dim, codec)).unwrap();
    layers::write_at(&layer, data, 0).unwrap();
    nmse(&layers::read(&layer, KvSide::K, 0, 0..tokens).unwrap(), &data.k)
}

fn source(dim: usize, value: impl FnMut() -> f32) -> Source {
    source_of(32 * 1024, dim, value)
}

fn source_of(coordinates: usize, dim: usize, mut value: impl FnMut() -> f32) -> Source {
    let tokens = coordinates / dim;
    Source { k: (0..tokens * dim).map(|_| value()).collect(), v: vec![0.0; tokens * dim], heads: 1, dim }
}

#[test]
fn gaussian_vectors_have_the_optimal_distortion() {
    for dim in [64, 128, 256, 512, 1024, 4096] {
        let mut rng = Rng::new(dim as u64);
        // Enough vectors for the tolerance.
        let data = source_of(64 * 1024, dim, || rng.normal() as f32);
        // A block of few coordinates has a known length, and is slightly easier than independent normals.
        let tolerance = 0.03 + 2.0 / dim.min(256) as f64;
        for (bits, optimum) in GAUSSIAN_MSE {
            for device in devices() {
                let with = |norm| {
                    distortion(device, Codec::TurboQuant(TurboQuant { bits, scale: 1.0, norm, centred: false }), &data)
                };
                // The optimum refers to the norm with which the indices were chosen.
                let got = with(Norm::Rms);
                let off = (got / optimum - 1.0).abs();
                assert!(off < tolerance, "{device}: tq{bits}, D {dim}: {got:.4e}, not {optimum:.4e}");
                let default = with(Norm::default());
                assert!(default <= got, "{device}: tq{bits}, D {dim}: {default:.4e}, above {got:.4e}");
            }
        }
    }
}

/// The rotation makes any vector look Gaussian, so heavy tails do not increase the distortion.
#[test]
fn heavy_tails_do_not_increase_the_distortion() {
    for dim in [128, 256, 512, 2048] {
        let mut rng = Rng::new(dim as u64);
        // One coordinate in 64 is ten times as large: a kurtosis of 70.
        let data = source(dim, || rng.normal() as f32 * if rng.below(64) == 0 { 10.0 } else { 1.0 });
        for (bits, optimum) in GAUSSIAN_MSE {
            for device in devices() {
                let got = distortion(device, Codec::tq(bits), &data);
                // A short vector's few outliers give a discrete distribution, not a bell, which is slightly easier.
                let ratio = got / optimum;
                let min = if bits == 2 { 0.78 } else { 0.85 };
                assert!((min..1.06).contains(&ratio), "{device}: tq{bits}, D {dim}: {got:.4e}, not {optimum:.4e}");
            }
        }
    }
}

#[test]
fn more_bits_are_closer_at_every_size() {
    for dim in [8, 16, 32, 64, 4096] {
        let mut rng = Rng::new(dim as u64);
        let data = source(dim, || rng.normal() as f32);
        for device in devices() {
            let errors = BITS.map(|bits| distortion(device, Codec::tq(bits), &data));
            assert!(errors.is_sorted_by(|a, b| a > b), "{device}: D {dim}: {errors:?}");
            assert!(errors[5] < 2e-4, "{device}: D {dim}: {errors:?}");
        }
    }
}

/// The least-squares norm has the least error.
#[test]
fn the_least_squares_norm_has_the_least_error() {
    let mut rng = Rng::new(7);
    let data = source(256, || rng.normal() as f32);
    for device in devices() {
        for bits in BITS {
            let error = |norm| {
                distortion(device, Codec::TurboQuant(TurboQuant { bits, scale: 1.0, norm, centred: false }), &data)
            };
            let [rms, least, unbiased] = [Norm::Rms, Norm::LeastSquares, Norm::Unbiased].map(error);
            assert!(least <= rms && least < unbiased, "{device}: tq{bits}: {least:.5e} {rms:.5e} {unbiased:.5e}");
        }
    }
}

/// ⟨x, decoded x⟩ = ‖x‖² for the unbiased norm, block by block.
#[test]
fn the_unbiased_norm_keeps_the_inner_product() {
    let mut rng = Rng::new(8);
    for dim in [64, 256] {
        let data = source(dim, || rng.normal() as f32);
        for device in devices() {
            let codec = Codec::TurboQuant(TurboQuant { bits: 4, scale: 1.0, norm: Norm::Unbiased, centred: false });
            let layer = KvLayer::new(device, linear_spec(1, data.tokens(), dim, codec)).unwrap();
            layers::write_at(&layer, &data, 0).unwrap();
            let read = layers::read(&layer, KvSide::K, 0, 0..data.tokens()).unwrap();
            for (x, y) in data.k.chunks(dim).zip(read.chunks(dim)) {
                let dot =
                    |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
                let ratio = dot(x, y) / dot(x, x);
                assert!((ratio - 1.0).abs() < 1e-5, "{device}: D {dim}: {ratio}");
            }
        }
    }
}

/// Scaling a vector scales its decoded vector, up to the precision of f32.
#[test]
fn any_length() {
    let mut rng = Rng::new(9);
    let data = source(256, || rng.normal() as f32);
    for device in devices() {
        let plain = distortion(device, Codec::tq(4), &data);
        for factor in [1e-15f32, 1e-6, 1e6, 1e15] {
            let scaled = Source { k: data.k.iter().map(|x| x * factor).collect(), ..data.clone() };
            let got = distortion(device, Codec::tq(4), &scaled);
            assert!((got / plain - 1.0).abs() < 1e-3, "{device}: times {factor:e}: {got:.4e}, not {plain:.4e}");
        }
    }
}
