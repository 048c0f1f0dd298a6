use crate::{
    DType, Device, SimdLevel, Tensor,
    cpu::testing::{self, Numbers, assert_close, tensor},
    ops::{self, Experts, Linear, Weight},
};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Devices with 8-bit activations and without.
fn devices() -> Vec<Device> {
    [false, true].map(testing::devices_with).concat()
}

fn rounds_to_eight_bits(device: &Device) -> bool {
    device.name().ends_with("8-bit activations")
}

/// The storage of the weights.
#[derive(Clone, Copy, Debug)]
enum WeightKind {
    Dense(DType),
    Affine { bits: u32, group: usize, scales: DType },
}

#[derive(Clone, Copy, Debug)]
struct LinearCase {
    kind: WeightKind,
    inputs: usize,
    outputs: usize,
    tokens: usize,
    /// (E, top_k, expanded).
    experts: Option<(usize, usize, bool)>,
    x: DType,
    out: DType,
    alpha: f32,
}

impl LinearCase {
    fn plain(kind: WeightKind, tokens: usize, inputs: usize, outputs: usize) -> LinearCase {
        LinearCase { kind, inputs, outputs, tokens, experts: None, x: DType::F32, out: DType::F32, alpha: 1.0 }
    }

    fn run(&self, device: &Device) -> Tensor {
        let mut numbers = Numbers(self.tokens as u64 ^ 0x5eed);
        let (e, n, k) = (self.experts.map_or(1, |e| e.0), self.outputs, self.inputs);
        let shape = |columns: usize| -> Vec<usize> {
            if self.experts.is_some() { vec![e, n, columns] } else { vec![n, columns] }
        };
        let parts = match self.kind {
            WeightKind::Dense(dtype) => vec![tensor(device, dtype, &numbers.floats(e * n * k), &shape(k))],
            WeightKind::Affine { bits, group, scales } => {
                let words: Vec<u32> = (0..e * n * k * bits as usize / 32).map(|_| numbers.bits()).collect();
                let mut scale = || tensor(device, scales, &numbers.floats(e * n * k / group), &shape(k / group));
                let (scales, biases) = (scale(), scale());
                vec![Tensor::from_slice(device, &words, &shape(k * bits as usize / 32)).unwrap(), scales, biases]
            }
        };
        let weight = match self.kind {
            WeightKind::Dense(_) => Weight::Dense(&parts[0]),
            WeightKind::Affine { bits, group, .. } => {
                let [codes, scales, biases] = &parts[..] else { unreachable!() };
                Weight::Affine(ops::Affine { codes, scales, biases, bits, group })
            }
        };
        let (top_k, expanded) = self.experts.map_or((1, false), |e| (e.1, e.2));
        let rows = self.tokens * top_k;
        // A few of many experts get the majority of rows.
        let ids: Vec<u32> = (0..rows).map(|i| (numbers.below(if i % 3 == 0 { e } else { e.min(2) })) as u32).collect();
        let ids = Tensor::from_slice(device, &ids, &[self.tokens, top_k]).unwrap();
        let x_rows = if expanded { rows } else { self.tokens };
        let x = tensor(device, self.x, &numbers.floats(x_rows * k), &[x_rows, k]);
        let out = tensor(device, self.out, &vec![7.0; rows * n], &[rows, n]);
        let experts = self.experts.map(|_| Experts::new(&ids).expanded(expanded));
        let mut enc = device.encoder().unwrap();
        ops::linear(&mut enc, &Linear::new(&x, weight, &out).experts(experts).alpha(self.alpha)).unwrap();
        enc.commit().unwrap().wait().unwrap();
        out
    }

    fn check(&self, devices: &[Device]) {
        let want = self.run(&Device::reference());
        // Weights are at most 1 (dense) or 256. A sum of K products in f32 has an error of about √K · 2⁻²⁴ of the
        // largest product. The `gemm` crate, which multiplies many rows, may add a long sum in sequence: an error of
        // about K · 2⁻²⁷, six times as much for thousands of products.
        let largest = match self.kind {
            WeightKind::Dense(_) => 1.0,
            WeightKind::Affine { bits, .. } => (1u32 << bits) as f32,
        };
        let many = self.tokens >= super::route::MANY_ROWS_BY_VNNI;
        for device in devices {
            // 16-bit activations have an error of at most 2⁻¹⁷, and codes are up to half of `largest`. Products of hi +
            // lo bf16 have an error of at most 2⁻¹⁵.
            let is_of = |level: &SimdLevel| device.name().starts_with(&level.to_string());
            let vnni = SimdLevel::ALL.iter().any(|level| level.has_vnni() && is_of(level));
            let words = many
                && match self.kind {
                    WeightKind::Affine { .. } => vnni,
                    WeightKind::Dense(dtype) => dtype != DType::F32 && is_of(&SimdLevel::Avx512Amx),
                };
            let inputs = self.inputs as f32;
            let sums = match () {
                // 8-bit numbers have an error of 1/254 of the largest, or of themselves.
                () if words && rounds_to_eight_bits(device) => 6e-3 * inputs.sqrt(),
                () if words => 1e-5 * inputs.sqrt(),
                () if self.tokens >= super::route::MANY_ROWS => 1e-6 * inputs.sqrt().max(inputs / 20.0),
                () => 1e-6 * inputs.sqrt(),
            };
            let bound = self.alpha.abs() * largest * sums;
            assert_close(&self.run(device), &want, bound, &(device, self));
        }
    }
}

fn kinds() -> Vec<WeightKind> {
    let mut kinds: Vec<WeightKind> = FLOATS.map(WeightKind::Dense).to_vec();
    for bits in [4, 6, 8] {
        for (group, scales) in [(32, DType::F32), (64, DType::BF16), (128, DType::F16)] {
            kinds.push(WeightKind::Affine { bits, group, scales });
        }
    }
    kinds
}

#[test]
fn every_weight_with_few_and_many_rows() {
    let devices = devices();
    for kind in kinds() {
        for tokens in [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 75] {
            for (inputs, outputs) in [(128, 1), (384, 37), (2176, 66)] {
                LinearCase::plain(kind, tokens, inputs, outputs).check(&devices);
            }
        }
    }
}

#[test]
fn long_rows_in_streams() {
    let devices = devices();
    for kind in kinds() {
        for tokens in [1, 3, 6] {
            LinearCase::plain(kind, tokens, 2048, 293).check(&devices);
        }
    }
}

#[test]
fn dense_rows_of_any_length() {
    let devices = devices();
    for dtype in FLOATS {
        for inputs in [1, 2, 7, 15, 16, 17, 31, 33, 100, 257] {
            for tokens in [1, 3, 66] {
                LinearCase::plain(WeightKind::Dense(dtype), tokens, inputs, 9).check(&devices);
            }
        }
    }
}

#[test]
fn affine_rows_of_odd_group_counts() {
    let devices = devices();
    for bits in [4, 6, 8] {
        for (group, groups) in [(32, 1), (32, 17), (64, 3), (64, 33), (128, 1), (128, 16)] {
            for tokens in [1, 66] {
                let kind = WeightKind::Affine { bits, group, scales: DType::F16 };
                LinearCase::plain(kind, tokens, group * groups, 13).check(&devices);
            }
        }
    }
}

#[test]
fn activations_of_every_dtype_and_alpha() {
    let devices = devices();
    for kind in [WeightKind::Dense(DType::F32), WeightKind::Dense(DType::BF16), kinds()[4]] {
        for x in FLOATS {
            for out in FLOATS {
                for tokens in [1, 6, 70] {
                    LinearCase { x, out, alpha: -2.5, ..LinearCase::plain(kind, tokens, 256, 70) }.check(&devices);
                }
            }
        }
    }
}

#[test]
fn experts_choose_their_matrix() {
    let devices = devices();
    for kind in kinds() {
        for tokens in [1, 5, 200] {
            for experts in [(1, 1, false), (6, 3, false), (6, 3, true), (64, 2, false)] {
                for out in [DType::F32, DType::F16] {
                    LinearCase { experts: Some(experts), out, ..LinearCase::plain(kind, tokens, 128, 35) }
                        .check(&devices);
                }
            }
        }
    }
}

#[test]
fn more_rows_than_are_prepared_at_a_time() {
    let devices = devices();
    for experts in [None, Some((5, 2, false)), Some((5, 2, true))] {
        LinearCase { experts, ..LinearCase::plain(kinds()[4], 1030, 64, 33) }.check(&devices);
        LinearCase { experts, ..LinearCase::plain(WeightKind::Dense(DType::F32), 2050, 20, 3) }.check(&devices);
    }
}

#[test]
fn empty_inputs_and_outputs() {
    let devices = devices();
    for kind in kinds() {
        for tokens in [0, 1, 70] {
            for (inputs, outputs) in [(0, 5), (128, 0), (0, 0), (128, 5)] {
                LinearCase::plain(kind, tokens, inputs, outputs).check(&devices);
                LinearCase { experts: Some((3, 2, true)), ..LinearCase::plain(kind, tokens, inputs, outputs) }
                    .check(&devices);
            }
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let devices = devices();
    for tokens in [1, 6, 70] {
        let case = LinearCase::plain(kinds()[4], tokens, 512, 300);
        for pair in devices.chunks(2) {
            let [one, two] = [0, 1].map(|i| case.run(&pair[i]).to_vec::<f32>().unwrap());
            assert_eq!(one, two, "{:?}", pair[1]);
        }
    }
}

/// Integers cannot represent numbers that are not finite, tiny or huge. Rows with them are computed nevertheless, and
/// do not affect their neighbours.
#[test]
fn rows_that_integers_cannot_represent() {
    let (inputs, outputs) = (256, 40);
    let reference = Device::reference();
    let mut all = devices();
    all.push(reference.clone());
    for (bits, group) in [(4, 64), (6, 32), (8, 128)] {
        for tokens in [7, 20, 70] {
            let mut numbers = Numbers(11);
            let mut x = numbers.floats(tokens * inputs);
            x[2 * inputs + 17] = f32::NAN;
            x[4 * inputs + 255] = f32::INFINITY;
            x[5 * inputs..6 * inputs].iter_mut().for_each(|x| *x *= 1e-27);
            x[6 * inputs..7 * inputs].iter_mut().for_each(|x| *x *= 1e34);
            let words: Vec<u32> = (0..outputs * inputs * bits / 32).map(|_| numbers.bits()).collect();
            let (scales, biases) = (numbers.floats(outputs * inputs / group), numbers.floats(outputs * inputs / group));
            let product = |device: &Device| -> Vec<f32> {
                let x = tensor(device, DType::F32, &x, &[tokens, inputs]);
                let codes = Tensor::from_slice(device, &words, &[outputs, inputs * bits / 32]).unwrap();
                let [scales, biases] =
                    [&scales, &biases].map(|s| tensor(device, DType::F32, s, &[outputs, inputs / group]));
                let (codes, scales, biases) = (&codes, &scales, &biases);
                let weight = Weight::Affine(ops::Affine { codes, scales, biases, bits: bits as u32, group });
                let out = tensor(device, DType::F32, &vec![7.0; tokens * outputs], &[tokens, outputs]);
                let mut enc = device.encoder().unwrap();
                ops::linear(&mut enc, &Linear::new(&x, weight, &out)).unwrap();
                enc.commit().unwrap().wait().unwrap();
                out.to_f32().unwrap()
            };
            let want = product(&reference);
            for device in &all {
                let got = product(device);
                for (t, (got, want)) in got.chunks(outputs).zip(want.chunks(outputs)).enumerate() {
                    if t == 2 || t == 4 {
                        assert!(got.iter().all(|x| !x.is_finite()), "{device}, {bits} bits, row {t} of {tokens}");
                        continue;
                    }
                    let largest = want.iter().fold(0f32, |a, x| a.max(x.abs()));
                    let bound = if rounds_to_eight_bits(device) { 2e-2 } else { 1e-4 };
                    for (x, y) in got.iter().zip(want) {
                        let close = (x - y).abs() <= largest * bound;
                        assert!(close, "{device}, {bits} bits, row {t} of {tokens}: {x}, not {y}");
                    }
                }
            }
        }
    }
}

/// Weights that are not sums of two bf16 numbers are multiplied nevertheless, and do not affect other outputs.
#[test]
fn weights_that_are_not_finite() {
    let (inputs, outputs, tokens) = (160, 70, 20);
    for dtype in [DType::BF16, DType::F16] {
        let mut numbers = Numbers(12);
        let x = numbers.floats(tokens * inputs);
        let mut w = numbers.floats(outputs * inputs);
        w[3 * inputs + 100] = f32::INFINITY;
        w[40 * inputs + 7] = f32::NAN;
        w[69 * inputs + 159] = f32::NEG_INFINITY;
        let product = |device: &Device| -> Vec<f32> {
            let x = tensor(device, DType::F32, &x, &[tokens, inputs]);
            let w = tensor(device, dtype, &w, &[outputs, inputs]);
            let out = tensor(device, DType::F32, &vec![7.0; tokens * outputs], &[tokens, outputs]);
            let mut enc = device.encoder().unwrap();
            ops::linear(&mut enc, &Linear::new(&x, Weight::Dense(&w), &out)).unwrap();
            enc.commit().unwrap().wait().unwrap();
            out.to_f32().unwrap()
        };
        let want = product(&Device::reference());
        for device in devices() {
            for (i, (&got, &want)) in product(&device).iter().zip(&want).enumerate() {
                let equal = got == want || got.is_nan() && want.is_nan();
                let bound = if rounds_to_eight_bits(&device) { 6e-2 } else { 1e-4 };
                let close = want.is_finite() && (got - want).abs() <= bound * want.abs().max(1.0);
                assert!(equal || close, "{device}, {dtype}, element {i}: {got}, not {want}");
            }
        }
    }
}

/// Earlier products leave data in scratch memory, which must not affect results, at any width and number of outputs.
#[test]
fn results_do_not_depend_on_what_ran_before() {
    let (inputs, tokens, group) = (256, 40, 32);
    for device in devices() {
        for bits in [2, 3, 4, 5, 6, 8] {
            for outputs in [16, 70] {
                let mut numbers = Numbers(14);
                let x = numbers.floats(tokens * inputs);
                let words: Vec<u32> = (0..outputs * inputs * bits / 32).map(|_| numbers.bits()).collect();
                let factors = numbers.floats(outputs * inputs / group);
                let product = |factors: &[f32]| -> Vec<u32> {
                    let x = tensor(&device, DType::F32, &x, &[tokens, inputs]);
                    let codes = Tensor::from_slice(&device, &words, &[outputs, inputs * bits / 32]).unwrap();
                    let scales = tensor(&device, DType::F32, factors, &[outputs, inputs / group]);
                    let (codes, scales) = (&codes, &scales);
                    let weight =
                        Weight::Affine(ops::Affine { codes, scales, biases: scales, bits: bits as u32, group });
                    let out = tensor(&device, DType::F32, &vec![7.0; tokens * outputs], &[tokens, outputs]);
                    let mut enc = device.encoder().unwrap();
                    ops::linear(&mut enc, &Linear::new(&x, weight, &out)).unwrap();
                    enc.commit().unwrap().wait().unwrap();
                    out.to_f32().unwrap().iter().map(|x| x.to_bits()).collect()
                };
                let before = product(&factors);
                product(&vec![f32::NAN; factors.len()]);
                assert_eq!(product(&factors), before, "{device}, {bits} bits, {outputs} outputs");
            }
        }
    }
}

/// A row has the same bits whatever its neighbours contain, for one matrix and for experts.
#[test]
fn odd_rows_do_not_change_their_neighbours() {
    let (inputs, outputs, bits, group) = (256, 40, 4usize, 64);
    for device in devices() {
        for (tokens, experts) in [(9, 1), (20, 1), (40, 3)] {
            let mut numbers = Numbers(5);
            let mut x = numbers.floats(tokens * inputs);
            let words: Vec<u32> = (0..experts * outputs * inputs * bits / 32).map(|_| numbers.bits()).collect();
            let factors = numbers.floats(experts * outputs * inputs / group);
            let ids: Vec<u32> = (0..tokens as u32).map(|t| t % experts as u32).collect();
            let product = |x: &[f32]| -> Vec<u32> {
                let x = tensor(&device, DType::F32, x, &[tokens, inputs]);
                let codes = Tensor::from_slice(&device, &words, &[experts, outputs, inputs * bits / 32]).unwrap();
                let scales = tensor(&device, DType::F32, &factors, &[experts, outputs, inputs / group]);
                let affine = ops::Affine { codes: &codes, scales: &scales, biases: &scales, bits: bits as u32, group };
                let ids = Tensor::from_slice(&device, &ids, &[tokens, 1]).unwrap();
                let out = tensor(&device, DType::F32, &vec![7.0; tokens * outputs], &[tokens, outputs]);
                let mut enc = device.encoder().unwrap();
                let args = Linear::new(&x, Weight::Affine(affine), &out).experts(Some(ops::Experts::new(&ids)));
                ops::linear(&mut enc, &args).unwrap();
                enc.commit().unwrap().wait().unwrap();
                out.to_f32().unwrap().iter().map(|x| x.to_bits()).collect()
            };
            let plain = product(&x);
            let odd = [1, 4];
            x[inputs + 17] = f32::NAN;
            x[4 * inputs..5 * inputs].iter_mut().for_each(|x| *x *= 1e-27);
            for (t, (got, want)) in product(&x).chunks(outputs).zip(plain.chunks(outputs)).enumerate() {
                assert!(odd.contains(&t) || got == want, "{device}, row {t} of {tokens}, {experts} experts");
            }
        }
    }
}
