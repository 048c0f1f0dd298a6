//! The TurboQuant codec: its distortion, its edge cases, its diagnostics.

use kvant::{
    Codec, Device, Error, HeadOrder, KvLayer, LayerSpec, Step, Tensor,
    codec::{
        self, BITS, BLOCK, Norm, PageMean, TurboQuant, centroids, decode, decode_around, decode_rotated, encode,
        encode_around, stats, thresholds,
    },
    ops::{KvWrite, kv_write},
    reference::hadamard,
};

/// SplitMix64, with distributions.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1).
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// N(0, 1), by Box and Muller.
    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }

    fn gaussian(&mut self, dim: usize) -> Vec<f64> {
        (0..dim).map(|_| self.normal()).collect()
    }

    /// A normal vector in which about one coordinate in 64 is 10 times larger: kurtosis 73.
    fn outliers(&mut self, dim: usize) -> Vec<f64> {
        (0..dim).map(|_| self.normal() * if self.next().is_multiple_of(64) { 10.0 } else { 1.0 }).collect()
    }
}

fn dims() -> impl Iterator<Item = usize> {
    (3..=12).map(|log2| 1 << log2)
}

/// The distortion of the optimal quantiser of N(0, 1).
fn optimum(bits: u32) -> f64 {
    match bits {
        2 => 0.1175,
        3 => 3.454e-2,
        4 => 9.501e-3,
        5 => 2.505e-3,
        6 => 6.44e-4,
        _ => 4.12e-5,
    }
}

fn tq(bits: u32, norm: Norm) -> TurboQuant {
    TurboQuant { bits, scale: 1.0, norm, centred: false }
}

/// Σ‖x − x̂‖² / Σ‖x‖² over some vectors.
fn distortion(tq: TurboQuant, vectors: &[Vec<f64>]) -> f64 {
    let (mut error, mut signal) = (0.0, 0.0);
    for x in vectors {
        let decoded = decode(tq, &encode(tq, x).unwrap()).unwrap();
        error += x.iter().zip(&decoded).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        signal += x.iter().map(|x| x * x).sum::<f64>();
    }
    error / signal
}

/// The expected distortion of a block of B coordinates of random direction: mean and variance of (z − c)², for one
/// coordinate.
///
/// Divided by its own root mean square, a Gaussian block is uniform on the sphere of radius √B, where a coordinate has
/// the density (1 − z²/B)^((B−3)/2), up to a factor. For large B this becomes the normal distribution.
fn on_the_sphere(bits: u32, block: usize) -> (f64, f64) {
    let (c, t) = (centroids(bits).unwrap(), thresholds(bits).unwrap());
    let b = block as f64;
    let steps = 400_000;
    let (mut mass, mut mean, mut square) = (0.0, 0.0, 0.0);
    for i in 0..steps {
        let z = b.sqrt() * ((2 * i + 1) as f64 / steps as f64 - 1.0);
        let density = (1.0 - z * z / b).powf((b - 3.0) / 2.0);
        let error = (z - f64::from(c[usize::from(codec::nearest(z as f32, t))])).powi(2);
        mass += density;
        mean += density * error;
        square += density * error * error;
    }
    (mean / mass, square / mass - (mean / mass).powi(2))
}

#[test]
fn gaussian_distortion_is_the_expected_one() {
    for dim in dims() {
        let mut random = Random(dim as u64);
        let vectors: Vec<_> = (0..(1 << 18) / dim).map(|_| random.gaussian(dim)).collect();
        for bits in BITS {
            let (expected, variance) = on_the_sphere(bits, dim.min(BLOCK));
            // A finite block is slightly better than the optimum: its coordinates cannot all be large.
            let saved = 1.0 - expected / optimum(bits);
            assert!(
                saved > -1.5e-3 && saved < 2.5 / dim.min(BLOCK) as f64 + 1.5e-3,
                "{bits} bits, D = {dim}: saved {saved}"
            );
            let measured = distortion(tq(bits, Norm::Rms), &vectors);
            let sampling = (variance / (1 << 18) as f64).sqrt();
            assert!(
                (measured - expected).abs() < 5.0 * sampling,
                "{bits} bits, D = {dim}: {measured:e}, not {expected:e} ± {sampling:e}"
            );
        }
    }
}

/// Rotation before quantisation makes outliers cost no more than other vectors. Without it, they would.
#[test]
fn outlier_vectors() {
    for dim in dims().filter(|&dim| dim >= 64) {
        let mut random = Random(dim as u64);
        let vectors: Vec<_> = (0..(1 << 18) / dim).map(|_| random.outliers(dim)).collect();
        let all: Vec<f64> = vectors.concat();
        let moment = |power: i32| all.iter().map(|x| x.powi(power)).sum::<f64>() / all.len() as f64;
        let kurtosis = moment(4) / moment(2).powi(2);
        assert!((60.0..90.0).contains(&kurtosis), "kurtosis {kurtosis}");
        for bits in BITS {
            let measured = distortion(tq(bits, Norm::Rms), &vectors) / optimum(bits);
            // A block with one dominant coordinate is flatter than normal after the rotation, and therefore slightly
            // cheaper.
            assert!((0.85..1.02).contains(&measured), "{bits} bits, D = {dim}: {measured} of the optimum");
            // An inverse rotation cancels the one in `encode`.
            let unrotated: Vec<_> = vectors.iter().map(|x| hadamard(x, true).unwrap()).collect();
            let without = distortion(tq(bits, Norm::Rms), &unrotated) / optimum(bits);
            // At 2 bits, the optimum itself is an eighth of the signal.
            assert!(
                without > if bits == 2 { 3.0 } else { 5.0 },
                "{bits} bits, D = {dim}: {without} of the optimum without the rotation"
            );
        }
    }
}

/// A one-hot vector becomes ±1 in every rotated coordinate, so its distortion is known exactly.
#[test]
fn one_hot_of_every_coordinate() {
    for bits in BITS {
        let near_one = centroids(bits).unwrap().iter().map(|&c| (1.0 - f64::from(c)).abs()).fold(f64::MAX, f64::min);
        for hot in 0..512 {
            let mut x = vec![0.0; 512];
            x[hot] = -3.0;
            let encoded = encode(tq(bits, Norm::Rms), &x).unwrap();
            let n = (3.0 / 512f64.sqrt()) as f32;
            assert_eq!(encoded.norms, [n, n]);
            let measured = distortion(tq(bits, Norm::Rms), &[x]);
            assert!((measured - near_one * near_one).abs() < 1e-6, "{bits} bits, coordinate {hot}: {measured}");
        }
    }
}

/// Each block has its own norm, so a weak block next to a strong one keeps its precision.
#[test]
fn head_512_two_blocks() {
    for (strong, weak) in [(0, 1), (1, 0)] {
        let mut random = Random(512);
        let mut y = [random.gaussian(256), random.gaussian(256)];
        y[strong].iter_mut().for_each(|y| *y *= 1e4);
        let y = y.concat();
        let encoded = encode(tq(6, Norm::Rms), &hadamard(&y, true).unwrap()).unwrap();
        assert!(encoded.norms[strong] > 5e3 * encoded.norms[weak]);
        let decoded = decode_rotated(tq(6, Norm::Rms), &encoded).unwrap();
        for block in 0..2 {
            let range = block * 256..(block + 1) * 256;
            let error: f64 = range.clone().map(|j| (y[j] - decoded[j]).powi(2)).sum();
            let signal: f64 = range.map(|j| y[j] * y[j]).sum();
            assert!(error / signal < 2.0 * optimum(6), "block {block}: {}", error / signal);
        }
    }
}

#[test]
fn norms_keep_their_promises() {
    let mut random = Random(7);
    for bits in BITS {
        for scale in [0.9, 1.0, 1.3] {
            let x = random.gaussian(512);
            let y = hadamard(&x, false).unwrap();
            let of = |norm| {
                let tq = TurboQuant { bits, scale, norm, centred: false };
                let encoded = encode(tq, &x).unwrap();
                let decoded = decode_rotated(tq, &encoded).unwrap();
                (encoded, decoded)
            };
            let [(rms, by_rms), (least, by_min), (unbiased, by_unbiased)] =
                [Norm::Rms, Norm::LeastSquares, Norm::Unbiased].map(of);
            assert!(rms.indices == least.indices && rms.indices == unbiased.indices);
            for (block, y) in y.chunks(BLOCK).enumerate() {
                let part = |v: &[f64]| v[block * BLOCK..(block + 1) * BLOCK].to_vec();
                let (a, b, c) = (part(&by_rms), part(&by_min), part(&by_unbiased));
                let squares: f64 = y.iter().map(|y| y * y).sum();
                let error = |v: &[f64]| v.iter().zip(y).map(|(v, y)| (v - y).powi(2)).sum::<f64>();
                let dot = |v: &[f64]| v.iter().zip(y).map(|(v, y)| v * y).sum::<f64>();
                // The decoded vector has the right length, for any scale.
                assert!(error(&a) < (3.2 * optimum(bits)).max(0.03) * squares);
                assert!(error(&b) <= error(&a) * (1.0 + 1e-6) && error(&b) <= error(&c) * (1.0 + 1e-6));
                assert!((dot(&c) / squares - 1.0).abs() < 1e-6);
                let n = (squares / BLOCK as f64).sqrt() / f64::from(scale);
                assert_eq!(rms.norms[block], n as f32);
            }
        }
    }
}

#[test]
fn zeros_and_vectors_that_are_not_finite() {
    for bits in BITS {
        for norm in [Norm::Rms, Norm::LeastSquares, Norm::Unbiased] {
            let zeros = encode(tq(bits, norm), &[0.0; 512]).unwrap();
            assert_eq!(zeros.norms, [0.0, 0.0]);
            assert_eq!(decode(tq(bits, norm), &zeros).unwrap(), [0.0; 512]);
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e25] {
                let mut x = vec![1.0; 512];
                x[300] = bad;
                let encoded = encode(tq(bits, norm), &x).unwrap();
                assert!(encoded.norms.iter().all(|n| n.is_nan()), "{bad}");
                assert_eq!(encoded.indices, [0; 512]);
                assert!(decode(tq(bits, norm), &encoded).unwrap().iter().all(|x| x.is_nan()));
            }
        }
    }
}

#[test]
fn bad_arguments_are_refused() {
    let good = tq(4, Norm::Rms);
    assert!(encode(TurboQuant { bits: 7, ..good }, &[0.0; 64]).is_err());
    for scale in [f32::NAN, f32::INFINITY, 0.0, -1.0, 1e-39, 1e4] {
        assert!(encode(TurboQuant { scale, ..good }, &[0.0; 64]).is_err());
    }
    assert!(encode(good, &[0.0; 96]).is_err());
    let mut encoded = encode(good, &[1.0; 64]).unwrap();
    encoded.indices[5] = 16;
    assert!(matches!(decode(good, &encoded), Err(Error::Value { arg: "indices", .. })));
    encoded.indices[5] = 15;
    encoded.norms.push(1.0);
    assert!(matches!(decode(good, &encoded), Err(Error::Value { arg: "norms", .. })));
    let device = Device::reference();
    let x = Tensor::from_slice(&device, &[0f32; 64], &[64]).unwrap();
    assert!(matches!(stats(&x, good), Err(Error::Shape { .. })));
    assert!(stats(&x.reshape(&[2, 2, 16]).unwrap(), TurboQuant { bits: 1, ..good }).is_err());
}

#[test]
fn bytes_per_vector_are_those_of_the_planes() {
    let device = Device::reference();
    for head_dim in dims() {
        for bits in BITS {
            let codec = Codec::tq(bits);
            let layer = KvLayer::new(&device, spec(codec, head_dim)).unwrap();
            assert_eq!(layer.k().bytes(), 4 * codec.bytes_per_vector(head_dim));
        }
    }
    assert_eq!(BITS.map(|bits| Codec::tq(bits).bytes_per_vector(256)), [68, 100, 132, 164, 196, 260]);
    // Sizes come from files and command lines: an overflow gives `usize::MAX`, not a small number.
    for codec in [Codec::F32, Codec::BF16, Codec::tq(8), Codec::tq(u32::MAX)] {
        assert_eq!(codec.bytes_per_vector(usize::MAX), usize::MAX, "{codec}");
    }
    assert_eq!(Codec::tq(4).bytes_per_vector(usize::MAX), usize::MAX / 2 + usize::MAX.div_ceil(256) * 4);
}

/// Two heads with two slots each.
fn spec(codec: Codec, head_dim: usize) -> LayerSpec {
    LayerSpec::new(2, head_dim, 2, codec)
}

/// Writes `x` `[2, 2, D]` as keys and values of both tokens of a layer.
fn write(device: &Device, layer: &KvLayer, x: &[f32]) {
    let x = Tensor::from_slice(device, x, &[2, 2, layer.spec().head_dim]).unwrap();
    let step = Step::new(device, 1, &[(0, 0), (0, 1)]).unwrap();
    let mut enc = device.encoder().unwrap();
    let order = HeadOrder::TokenMajor;
    kv_write(&mut enc, &KvWrite::new(&x, &x, &step, layer).order(order)).unwrap();
    enc.commit().unwrap().wait().unwrap();
}

#[test]
fn indices_and_norms_are_those_of_encode() {
    let device = Device::reference();
    let mut random = Random(3);
    for dim in [8, 64, 512] {
        for bits in BITS {
            let x: Vec<f32> = random.gaussian(4 * dim).iter().map(|&x| x as f32).collect();
            let layer = KvLayer::new(&device, spec(Codec::tq(bits), dim)).unwrap();
            write(&device, &layer, &x);
            let norms: Vec<f32> = layer.k().tensors().find(|(name, _)| *name == "norms").unwrap().1.to_vec().unwrap();
            let blocks = norms.len() / 4;
            // Token-major in the source, head-major in the layer.
            for (row, source) in [0, 2, 1, 3].into_iter().enumerate() {
                let x: Vec<f64> = x[source * dim..(source + 1) * dim].iter().map(|&x| x.into()).collect();
                let encoded = encode(tq(bits, Norm::default()), &x).unwrap();
                assert_eq!(codec::indices(layer.v(), row..row + 1).unwrap(), encoded.indices);
                assert_eq!(norms[row * blocks..(row + 1) * blocks], encoded.norms);
            }
            assert_eq!(codec::indices(layer.k(), 0..4).unwrap().len(), 4 * dim);
            assert!(codec::indices(layer.k(), 3..5).is_err());
        }
    }
    let dense = KvLayer::new(&device, spec(Codec::F16, 64)).unwrap();
    assert!(codec::indices(dense.k(), 0..1).is_err());
}

#[test]
fn a_bad_vector_leaves_its_neighbours_alone() {
    let device = Device::reference();
    let mut random = Random(5);
    for bits in BITS {
        let mut x: Vec<f32> = random.gaussian(4 * 64).iter().map(|&x| x as f32).collect();
        let layers = [0, 1].map(|_| KvLayer::new(&device, spec(Codec::tq(bits), 64)).unwrap());
        write(&device, &layers[0], &x);
        x[64 + 9] = f32::INFINITY;
        write(&device, &layers[1], &x);
        // Token 0 of head 1 is row 2.
        for row in [0, 1, 3] {
            let [a, b] = [0, 1].map(|i| codec::indices(layers[i].k(), row..row + 1).unwrap());
            assert_eq!(a, b);
        }
        assert_eq!(codec::indices(layers[1].k(), 2..3).unwrap(), [0; 64]);
        let norms: Vec<f32> = layers[1].k().tensors().find(|(name, _)| *name == "norms").unwrap().1.to_vec().unwrap();
        assert_eq!(norms.iter().map(|n| n.is_nan()).collect::<Vec<_>>(), [false, false, true, false]);
    }
}

#[test]
fn stats_are_per_head() {
    let device = Device::reference();
    let mut random = Random(11);
    let (tokens, dim) = (500, 64);
    let mut x = Vec::new();
    for token in 0..tokens {
        x.extend(random.gaussian(dim));
        // Head 1: one-hot vectors. Head 2: zeros, except for one infinity.
        x.extend((0..dim).map(|i| f64::from(u8::from(i == token % dim))));
        x.extend((0..dim).map(|i| if token == 9 && i == 3 { f64::INFINITY } else { 0.0 }));
    }
    let x: Vec<f32> = x.iter().map(|&x| x as f32).collect();
    let x = Tensor::from_slice(&device, &x, &[tokens, 3, dim]).unwrap();
    let [gaussian, one_hot, zeros] = stats(&x, tq(4, Norm::Rms)).unwrap().try_into().unwrap();
    assert!((gaussian.rms - 1.0).abs() < 1e-9);
    // On the sphere: 3·64/66.
    assert!((gaussian.kurtosis - 2.909).abs() < 0.05, "{gaussian:?}");
    // P(|z| > 2.7326) is 0.63 %, slightly less on the sphere.
    assert!((0.004..0.008).contains(&gaussian.clip_fraction), "{gaussian:?}");
    assert!((gaussian.distortion / on_the_sphere(4, 64).0 - 1.0).abs() < 0.05, "{gaussian:?}");
    assert!((one_hot.kurtosis - 1.0).abs() < 1e-9 && one_hot.clip_fraction == 0.0, "{one_hot:?}");
    assert_eq!((zeros.vectors, zeros.non_finite), (tokens, 1));
    assert_eq!((zeros.rms, zeros.distortion, zeros.clip_fraction), (0.0, 0.0, 0.0));
}

/// The worked example of docs/codec.md: every line that starts with a name is computed here, and must be in the
/// document.
#[test]
fn worked_example() {
    let document = include_str!("../../../../docs/codec.md");
    let x = [0.5, -1.25, 2.0, 0.0, 3.5, -0.75, 1.0, -2.5];
    let device = Device::reference();
    let layer = KvLayer::new(&device, spec(Codec::tq(6), 8)).unwrap();
    write(&device, &layer, &x.map(|x| x as f32).repeat(4));
    let plane = |name: &str| layer.k().tensors().find(|(n, _)| *n == name).unwrap().1.rows(0..1).unwrap();
    let indices = codec::indices(layer.k(), 0..1).unwrap();
    let norm = plane("norms").to_vec::<f32>().unwrap()[0];
    let encoded = codec::Encoded { indices: indices.clone(), norms: vec![norm] };
    let y = hadamard(&x, false).unwrap();
    let n = (y.iter().map(|y| y * y).sum::<f64>() / 8.0).sqrt();
    let z: Vec<f64> = y.iter().map(|y| y / n).collect();
    let c: Vec<f64> = indices.iter().map(|&i| centroids(6).unwrap()[usize::from(i)].into()).collect();
    let bytes = |name| plane(name).to_vec::<u8>().unwrap().iter().map(|b| format!(" {b:02x}")).collect::<String>();
    let numbers = |v: &[f64]| v.iter().map(|v| format!(" {v:.4}")).collect::<String>();
    for line in [
        format!("x       {}", numbers(&x)),
        format!("s       {}", codec::signs(8).unwrap().iter().map(|s| format!(" {s:+}")).collect::<String>()),
        format!("y       {}", numbers(&y)),
        format!("n        {n:.6}"),
        format!("norm     {norm:.6}, bytes {}", norm.to_le_bytes().map(|b| format!("{b:02x}")).join(" ")),
        format!("z       {}", numbers(&z)),
        format!("indices {}", indices.iter().map(|i| format!(" {i}")).collect::<String>()),
        format!("low     {}", bytes("low")),
        format!("high    {}", bytes("high")),
        format!("c       {}", numbers(&c)),
        format!("decoded {}", numbers(&decode(tq(6, Norm::default()), &encoded).unwrap())),
    ] {
        assert!(document.lines().any(|l| l == line), "docs/codec.md lacks the line:\n{line}");
    }
    for bits in [2, 3] {
        let indices = encode(tq(bits, Norm::default()), &x).unwrap().indices;
        let (low, high) = codec::plane_bytes(bits, 8).unwrap();
        let (mut low, mut high) = (vec![0; low], vec![0; high]);
        codec::pack(bits, &indices, &mut low, &mut high).unwrap();
        let numbers: String = indices.iter().map(|i| format!(" {i}")).collect();
        let bytes = |plane: &[u8]| plane.iter().map(|b| format!(" {b:02x}")).collect::<String>();
        let high = if high.is_empty() { String::new() } else { format!(", high{}", bytes(&high)) };
        let line = format!("{bits} bits   indices{numbers}, low{}{high}", bytes(&low));
        assert!(document.lines().any(|l| l == line), "docs/codec.md lacks the line:\n{line}");
    }
}

fn centred(bits: u32) -> TurboQuant {
    TurboQuant { centred: true, ..tq(bits, Norm::Unbiased) }
}

/// Around the stored mean, vectors with a common part of any size have the distortion of normal vectors. The unbiased
/// norm scales the nearest point of a sphere up, from an error of d to d/(1 − d).
#[test]
fn distortion_around_a_mean_is_the_optimum() {
    for dim in [64, 128, 256, 512] {
        let mut random = Random(dim as u64);
        for size in [0.0, 0.3, 3.0, 30.0, 1000.0] {
            let common: Vec<f64> = random.gaussian(dim).iter().map(|x| size * x).collect();
            let one = |random: &mut Random| random.gaussian(dim).iter().zip(&common).map(|(x, m)| x + m).collect();
            let vectors: Vec<Vec<f64>> = (0..64 * 1024 / dim).map(|_| one(&mut random)).collect();
            let mean = PageMean::of(dim, vectors.iter().map(Vec::as_slice)).unwrap();
            let around = hadamard(&mean.rotated(), true).unwrap();
            for bits in BITS {
                let (mut error, mut signal) = (0.0, 0.0);
                for x in &vectors {
                    let decoded = decode_around(centred(bits), &mean, &encode_around(centred(bits), &mean, x).unwrap());
                    error += x.iter().zip(decoded.unwrap()).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
                    signal += x.iter().zip(&around).map(|(x, m)| (x - m).powi(2)).sum::<f64>();
                }
                // A mean is rounded to 1/127 of its largest coordinate. Beyond some hundred deviations, this error
                // dominates the stored vectors. It is not normal, and costs less.
                let expected = optimum(bits) / (1.0 - optimum(bits));
                let ratio = error / signal / expected;
                // A block of few coordinates has a known length.
                let min = if size < 30.0 { 0.95 - 5.0 / dim.min(BLOCK) as f64 } else { 0.3 };
                assert!((min..1.05).contains(&ratio), "{bits} bits, D = {dim}, size {size}: {ratio}");
            }
        }
    }
}

/// Without a mean, a centred codec equals the plain one with unbiased norms in f16.
#[test]
fn a_mean_of_zeros_changes_nothing() {
    let mut random = Random(5);
    for dim in [8, 64, 512] {
        let x = random.gaussian(dim);
        for bits in BITS {
            let plain = encode(tq(bits, Norm::Unbiased), &x).unwrap();
            let around = encode_around(centred(bits), &PageMean::zero(dim), &x).unwrap();
            assert_eq!(encode(centred(bits), &x).unwrap(), around);
            assert_eq!(plain.indices, around.indices);
            for (plain, norm) in plain.norms.iter().zip(&around.norms) {
                assert_eq!(kvant::f16::from_f32(*plain).to_f32(), *norm);
            }
        }
    }
}

#[test]
fn special_vectors_around_a_mean() {
    let dim = 64;
    let mut random = Random(6);
    let good: Vec<Vec<f64>> = (0..10).map(|_| random.gaussian(dim)).collect();
    let mean = |extra: &[f64]| PageMean::of(dim, good.iter().map(Vec::as_slice).chain([extra])).unwrap();
    let expected = PageMean::of(dim, good.iter().map(Vec::as_slice)).unwrap();
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e30] {
        let mut x = good[0].clone();
        x[3] = bad;
        assert_eq!(mean(&x), expected, "{bad} must be skipped");
        let encoded = encode_around(centred(4), &expected, &x).unwrap();
        assert!(encoded.indices.iter().all(|&i| i == 0) && encoded.norms.iter().all(|n| n.is_nan()), "{bad}");
    }
    assert_eq!(PageMean::of(dim, []).unwrap(), PageMean::zero(dim));
    let (zeros, nan) = (vec![0.0; dim], vec![f64::NAN; dim]);
    assert_eq!(PageMean::of(dim, [&zeros[..], &nan[..], &zeros[..]]).unwrap(), PageMean::zero(dim));
    // A vector equal to the mean: the difference is zero.
    let same = vec![1.0; dim];
    let mean = PageMean::of(dim, [&same[..]; 3]).unwrap();
    let on_it = hadamard(&mean.rotated(), true).unwrap();
    let decoded = decode_around(centred(2), &mean, &encode_around(centred(2), &mean, &on_it).unwrap()).unwrap();
    assert!(on_it.iter().zip(&decoded).all(|(a, b)| (a - b).abs() < 1e-9));
    // A norm that overflows f16 becomes infinite.
    let long: Vec<f64> = good[0].iter().map(|x| 1e6 * x).collect();
    let encoded = encode_around(centred(4), &PageMean::zero(dim), &long).unwrap();
    assert_eq!(encoded.norms, [f32::INFINITY]);
    for mean in [PageMean::zero(32), PageMean::zero(128)] {
        assert!(
            encode_around(centred(4), &mean, &good[0]).is_err() && decode_around(centred(4), &mean, &encoded).is_err()
        );
    }
    assert!(encode_around(tq(4, Norm::Unbiased), &PageMean::zero(dim), &good[0]).is_err());
    assert!(PageMean::of(dim, [&good[0][..63]]).is_err() && PageMean::of(7, []).is_err());
}

/// Layers with memory of their own have no pages, and therefore no means.
#[test]
fn centred_codecs_need_pages() {
    for device in [Device::cpu(), Device::reference()] {
        for (k, v) in [(Codec::tq_centred(4), Codec::F16), (Codec::tq(4), Codec::tq_centred(2))] {
            for ring in [false, true] {
                let spec = LayerSpec::new(1, 64, 8, k).v(v).ring(ring);
                assert!(matches!(KvLayer::new(&device, spec), Err(Error::Value { .. })));
                let x = Tensor::zeros(&device, kvant::DType::F16, &[8, 64]).unwrap();
                assert!(matches!(KvLayer::from_dense(spec, &x, &x), Err(Error::Value { .. })));
            }
        }
    }
    let biased = Codec::TurboQuant(TurboQuant { norm: Norm::Rms, ..centred(4) });
    let layer = kvant::CacheLayer::new(1, 64, biased);
    let pool = kvant::KvPool::new(&Device::reference(), &kvant::PoolSpec::new(vec![layer], 1 << 20));
    assert!(matches!(pool, Err(Error::Value { .. })));
}
