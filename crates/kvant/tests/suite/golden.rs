//! Results of MLX, on every device. The data and its format: `tests/golden/README.md`.

use std::{collections::HashMap, path::Path};

use crate::common::{Bound, Out, devices, input, layers, rounded, run};
use kvant::{
    Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Tensor,
    ops::{
        self, Affine, Attend, BlockFormat, Blocks, Embed, FloatFormat, HeadNorm, KvWrite, Linear, NormRope, PairLayout,
        Residual, RmsNorm, Rope, ScaledFloats, Weight,
    },
};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// The cases of one file.
struct Golden {
    cases: Vec<Case>,
}

struct Case {
    name: String,
    params: Value,
    tensors: HashMap<String, (DType, Vec<usize>, Vec<u8>)>,
}

impl Golden {
    fn load(operation: &str) -> Golden {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{operation}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a safetensors header");
        let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let metadata = header.metadata().as_ref().expect("the cases are in the metadata");
        let mut cases: Vec<Case> = metadata
            .iter()
            .map(|(name, params)| {
                let params = serde_json::from_str(params).expect("a case's parameters are JSON");
                Case { name: name.clone(), params, tensors: HashMap::new() }
            })
            .collect();
        cases.sort_by(|a, b| a.name.cmp(&b.name));
        for (name, view) in file.iter() {
            let (case, tensor) = name.split_once('/').expect("tensors are named CASE/TENSOR");
            let case = cases.iter_mut().find(|c| c.name == case).expect("a tensor belongs to a case");
            let dtype = match view.dtype() {
                Dtype::F32 => DType::F32,
                Dtype::F16 => DType::F16,
                Dtype::BF16 => DType::BF16,
                Dtype::U32 => DType::U32,
                Dtype::U8 => DType::U8,
                other => panic!("{name}: {other:?}"),
            };
            case.tensors.insert(tensor.to_string(), (dtype, view.shape().to_vec(), view.data().to_vec()));
        }
        assert!(cases.len() >= 10, "{operation}: the file holds cases");
        Golden { cases }
    }
}

/// The error of f32 sums, relative to the summands.
const ARITHMETIC: f64 = 4e-6;

impl Case {
    fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    fn shape(&self, tensor: &str) -> [usize; 3] {
        self.tensors[tensor].1.as_slice().try_into().expect("three dimensions")
    }

    fn tensor(&self, device: &Device, name: &str) -> Tensor {
        let (dtype, shape, bytes) = &self.tensors[name];
        Tensor::from_bytes(device, *dtype, shape, bytes).unwrap()
    }

    fn optional(&self, device: &Device, name: &str) -> Option<Tensor> {
        self.has(name).then(|| self.tensor(device, name))
    }

    fn number(&self, key: &str) -> f64 {
        self.params[key].as_f64().unwrap_or_else(|| panic!("{}: no number {key}", self.name))
    }

    fn integer(&self, key: &str) -> usize {
        self.params[key].as_u64().unwrap_or_else(|| panic!("{}: no integer {key}", self.name)) as usize
    }

    fn dtype(&self) -> DType {
        match self.params["dtype"].as_str() {
            Some("f32") => DType::F32,
            Some("f16") => DType::F16,
            Some("bf16") => DType::BF16,
            other => panic!("{}: dtype {other:?}", self.name),
        }
    }

    /// Compares every element within the golden data's own error (`mlx_err`), f32 arithmetic, and one rounding to the
    /// dtype on each side. `magnitude`: the size of the numbers that are added in f32.
    fn compare(&self, device: &Device, got: &[f32], want: &str, magnitude: f64) {
        if let Some(why) = self.difference(got, want, magnitude) {
            panic!("{device}: {}: {why}", self.name);
        }
    }

    fn difference(&self, got: &[f32], want: &str, magnitude: f64) -> Option<String> {
        let (dtype, shape, bytes) = &self.tensors[want];
        let reference = Device::reference();
        let want = Tensor::from_bytes(&reference, *dtype, shape, bytes).unwrap().to_f32().unwrap();
        if got.len() != want.len() {
            return Some(format!("{} elements, not {}", got.len(), want.len()));
        }
        let unit = Bound::of(self.dtype()).unit;
        let limit = |y: f32| self.number("mlx_err") + ARITHMETIC * magnitude + 2.0 * unit * f64::from(y).abs();
        let near = |x: f32, y: f32| (f64::from(x) - f64::from(y)).abs() <= limit(y);
        let at = (0..got.len()).find(|&i| !near(got[i], want[i]))?;
        Some(format!("element {at} is {}, MLX has {} (limit {:.2e})", got[at], want[at], limit(want[at])))
    }
}

#[test]
fn rms_norm() {
    for case in &Golden::load("rms_norm").cases {
        for device in devices() {
            let x = case.tensor(device, "x");
            let weight = case.optional(device, "weight");
            let out = Out::new(device, case.dtype(), x.shape()).unwrap();
            let args = RmsNorm::new(&x, case.number("eps") as f32, &out.tensor).weight(weight.as_ref());
            run(device, |enc| ops::rms_norm(enc, &args)).unwrap();
            case.compare(device, &out.tensor.to_f32().unwrap(), "out", 1.0);
        }
    }
}

#[test]
fn rope() {
    for case in &Golden::load("rope").cases {
        for device in devices() {
            let x = case.tensor(device, "x");
            let (weight, factors) = (case.optional(device, "weight"), case.optional(device, "freq_factors"));
            let layout = match case.params["layout"].as_str() {
                Some("halves") => PairLayout::Halves,
                Some("leading_halves") => PairLayout::LeadingHalves,
                Some("interleaved") => PairLayout::Interleaved,
                other => panic!("{}: layout {other:?}", case.name),
            };
            let rotated_pairs = case.integer("rotated_pairs");
            let ours = if layout == PairLayout::Halves { x.shape()[2] } else { 2 * rotated_pairs };
            assert_eq!(case.integer("freq_denominator"), ours, "{}: the layout says the frequencies", case.name);
            let out = Out::new(device, case.dtype(), x.shape()).unwrap();
            let positions = case.tensor(device, "positions");
            let args = NormRope::new(&x, &positions, &out.tensor)
                .norm(case.params.get("eps").map(|_| HeadNorm::new(case.number("eps") as f32).weight(weight.as_ref())))
                .rope(Some(
                    Rope::new(case.number("theta"), rotated_pairs).layout(layout).freq_factors(factors.as_ref()),
                ));
            run(device, |enc| ops::norm_rope(enc, &args)).unwrap();
            // An angle may be off by 1e-5 rad at the farthest positions.
            let magnitude = if case.name.starts_with("far") { 12.0 } else { 4.0 };
            case.compare(device, &out.tensor.to_f32().unwrap(), "out", magnitude);
        }
    }
}

/// Through a cache: keys and values are written to an f32 layer, then attended to.
#[test]
fn sdpa() {
    for case in &Golden::load("sdpa").cases {
        for device in devices() {
            let [tokens, heads, head_dim] = case.shape("q");
            let [kv_heads, len, _] = case.shape("k");
            let spec = LayerSpec::new(kv_heads, head_dim, len + 5, Codec::F32);
            let layer = KvLayer::new(device, spec).unwrap();
            layers::fill(&layer, 0xFF).unwrap();
            let (k, v, q) = (case.tensor(device, "k"), case.tensor(device, "v"), case.tensor(device, "q"));
            let (all, new) = (
                layers::range_step(device, 1, 0..len).unwrap(),
                layers::range_step(device, 1, len - tokens..len).unwrap(),
            );
            let out = Out::new(device, case.dtype(), &[tokens, heads, head_dim]).unwrap();
            run(device, |enc| {
                let (order, first_token) = (HeadOrder::HeadMajor, 0);
                ops::kv_write(enc, &KvWrite::new(&k, &v, &all, &layer).order(order).first_token(first_token))?;
                let args = Attend::new(&q, &layer, &new, &out.tensor)
                    .scale(case.number("scale") as f32)
                    .softcap(case.params["softcap"].as_f64().map(|c| c as f32))
                    .window(case.params["window"].as_u64().map(|w| w as usize));
                ops::attend(enc, &args)
            })
            .unwrap();
            // Rounding errors of scores in the thousands change the weights.
            let magnitude = if case.name.contains("sharp") { 400.0 } else { 4.0 };
            // Rounding of factors to 16 bits changes them too. Values are about 1.
            let spread = (case.number("scale").abs() * (head_dim as f64).sqrt()).max(1.0);
            let rounding = Bound::of(case.dtype()).over(device, Codec::F32, spread).rounding;
            let rounded = 8.0 * rounding / ARITHMETIC;
            case.compare(device, &out.tensor.to_f32().unwrap(), "out", magnitude + rounded);
        }
    }
}

#[test]
fn quantized() {
    for case in &Golden::load("quantized").cases {
        let (inputs, outputs, tokens) = (case.integer("k"), case.integer("n"), case.integer("tokens"));
        for device in devices() {
            let (codes, scales) = (case.tensor(device, "w"), case.tensor(device, "scales"));
            let (biases, x) = (case.tensor(device, "biases"), case.tensor(device, "x"));
            let weight = Weight::Affine(Affine {
                codes: &codes,
                scales: &scales,
                biases: &biases,
                bits: case.integer("bits") as u32,
                group: case.integer("group_size"),
            });
            let out = Out::new(device, DType::F32, &[tokens, outputs]).unwrap();
            let args = Linear::new(&x, weight, &out.tensor);
            run(device, |enc| ops::linear(enc, &args)).unwrap();
            let want = if case.has("exact") { "exact" } else { "out" };
            case.compare(device, &out.tensor.to_f32().unwrap(), want, 10.0);

            // Every row of the table, dequantised.
            let ids = Tensor::from_slice(device, &(0..outputs as u32).collect::<Vec<_>>(), &[outputs]).unwrap();
            let table = Out::new(device, case.dtype(), &[outputs, inputs]).unwrap();
            let args = Embed::new(weight, &ids, &table.tensor);
            run(device, |enc| ops::embed(enc, &args)).unwrap();
            let want = case.tensor(&Device::reference(), "dequantized").to_f32().unwrap();
            // MLX rounds scale · q to the dtype before it adds the bias: an error relative to the larger of the two.
            let scale = want.iter().fold(1.0f32, |m, x| m.max(x.abs()));
            let bound = 2.0 * Bound::of(case.dtype()).unit as f32 * scale;
            for (i, (x, y)) in table.tensor.to_f32().unwrap().iter().zip(&want).enumerate() {
                assert!((x - y).abs() <= bound, "{device}: {}: weight {i} is {x}, MLX has {y}", case.name);
            }
        }
    }
}

/// Blocks of every format, dequantised by the gguf package and MLX: the reference agrees to f32's last bits, the
/// devices up to their rounding.
#[test]
fn blocks() {
    let golden = Golden::load("blocks");
    let formats = BlockFormat::ALL.map(|format| format.to_string()).into_iter();
    for format in formats.chain(FloatFormat::ALL.map(|format| format.to_string())) {
        assert!(golden.cases.iter().any(|case| case.name == format), "no blocks of {format}");
    }
    for case in &golden.cases {
        let want = case.tensor(&Device::reference(), "weights").to_f32().unwrap();
        let [rows, inputs] = case.tensors["weights"].1[..] else { panic!("two dimensions") };
        for device in [Device::reference()].iter().chain(devices()) {
            let names = if case.has("data") { ["data", "data"] } else { ["codes", "scales"] };
            let [data, scales] = names.map(|name| case.tensor(device, name));
            let blocks = BlockFormat::ALL.into_iter().find(|format| format.to_string() == case.name);
            let floats = FloatFormat::ALL.into_iter().find(|format| format.to_string() == case.name);
            let table: Weight = match (blocks, floats) {
                (Some(format), _) => Blocks::new(&data, format).into(),
                (_, Some(format)) => ScaledFloats::new(&data, &scales, format).into(),
                _ => panic!("no format is named {}", case.name),
            };
            let ids = Tensor::from_slice(device, &(0..rows as u32).collect::<Vec<_>>(), &[rows]).unwrap();
            let out = Out::new(device, DType::F32, &[rows, inputs]).unwrap();
            run(device, |enc| ops::embed(enc, &Embed::new(table, &ids, &out.tensor))).unwrap();
            let got = out.tensor.to_f32().unwrap();
            // The weights of a group share a scale, and a bias of similar magnitude.
            let group = floats.map_or(32, FloatFormat::group);
            let element = if floats == Some(FloatFormat::Mxfp8) { 448.0 } else { 6.0 };
            for (i, (got, want)) in got.chunks(group).zip(want.chunks(group)).enumerate() {
                let largest = want.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                for (x, y) in got.iter().zip(want) {
                    // A device may flush a subnormal scale, whose products reach those of `element`.
                    let bound = 8.0 * f32::EPSILON * largest + element * f32::MIN_POSITIVE;
                    assert!((x - y).abs() <= bound, "{device}: {}, group {i}: {x} instead of {y}", case.name);
                }
            }
        }
    }
}

/// The comparison is sensitive: a changed input fails.
#[test]
fn a_changed_input_is_noticed() {
    let golden = Golden::load("rms_norm");
    let case = golden.cases.iter().find(|c| c.name == "f32_t17_d64_w").expect("the case exists");
    let device = Device::reference();
    let mut values = case.tensor(&device, "x").to_f32().unwrap();
    values[100] += 0.01;
    let x = input(&device, DType::F32, &rounded(DType::F32, &values), &[17, 64]).unwrap();
    let weight = case.tensor(&device, "weight");
    let out = Out::new(&device, DType::F32, &[17, 64]).unwrap();
    let residual = Residual::None;
    let args = RmsNorm::new(&x, 1e-6, &out.tensor).weight(Some(&weight)).residual(residual);
    run(&device, |enc| ops::rms_norm(enc, &args)).unwrap();
    let got = out.tensor.to_f32().unwrap();
    assert!(case.difference(&got, "out", 1.0).is_some(), "a difference of 0.01 in one element must be noticed");
}
