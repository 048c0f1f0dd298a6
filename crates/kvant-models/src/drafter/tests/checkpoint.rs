//! Writes small random checkpoints.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// Inputs that share a scale and a bias.
const GROUP: usize = 32;

/// The tensors of a checkpoint, f32, I64 or U32.
#[derive(Clone, Default)]
pub struct Tensors {
    floats: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    integers: BTreeMap<String, Vec<i64>>,
    words: BTreeMap<String, (Vec<usize>, Vec<u32>)>,
    state: u64,
}

impl Tensors {
    /// Numbers from −1 to 1 (splitmix64).
    fn next(&mut self) -> f32 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.state ^ self.state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ z >> 31) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Adds a matrix, whose products with normal vectors are about as large as these.
    pub fn matrix(&mut self, name: &str, shape: &[usize]) -> &mut Tensors {
        let scale = (3.0 / shape[shape.len() - 1] as f32).sqrt();
        let values = (0..shape.iter().product()).map(|_| scale * self.next()).collect();
        self.set(name, shape, values)
    }

    /// Adds the weights of a norm, around `mean`.
    pub fn norm(&mut self, name: &str, len: usize, mean: f32) -> &mut Tensors {
        let values = (0..len).map(|_| mean + 0.4 * self.next()).collect();
        self.set(name, &[len], values)
    }

    pub fn set(&mut self, name: &str, shape: &[usize], values: Vec<f32>) -> &mut Tensors {
        self.floats.insert(name.to_string(), (shape.to_vec(), values));
        self
    }

    pub fn integers(&mut self, name: &str, values: Vec<i64>) -> &mut Tensors {
        self.integers.insert(name.to_string(), values);
        self
    }

    pub fn remove(&mut self, name: &str) {
        assert!(self.floats.remove(name).is_some() || self.integers.remove(name).is_some(), "{name}");
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.floats.keys().map(String::as_str)
    }

    pub fn has(&self, name: &str) -> bool {
        self.floats.contains_key(name)
    }

    pub fn shape(&self, name: &str) -> &[usize] {
        &self.floats[name].0
    }

    pub fn values(&self, name: &str) -> &[f32] {
        &self.floats[name].1
    }

    /// The checkpoint with its matrices in MLX's affine format of 8 bits, and with the values that this represents.
    pub fn quantised(&self) -> [Tensors; 2] {
        let (mut coded, mut values) = (self.clone(), self.clone());
        for (name, (shape, matrix)) in
            self.floats.iter().filter(|(_, (shape, _))| shape.len() == 2 && shape[1].is_multiple_of(GROUP))
        {
            let module = name.strip_suffix(".weight").unwrap();
            let (mut words, mut scales, mut biases, mut decoded) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            for group in matrix.chunks(GROUP) {
                let min = group.iter().copied().fold(f32::INFINITY, f32::min);
                let scale = (group.iter().copied().fold(f32::NEG_INFINITY, f32::max) - min) / 255.0;
                let codes: Vec<u8> = group.iter().map(|value| ((value - min) / scale).round() as u8).collect();
                words.extend(codes.chunks(4).map(|code| u32::from_le_bytes(code.try_into().unwrap())));
                decoded.extend(codes.iter().map(|&code| scale * f32::from(code) + min));
                scales.push(scale);
                biases.push(min);
            }
            coded.floats.remove(name);
            coded.words.insert(name.clone(), (vec![shape[0], shape[1] / 4], words));
            coded.set(&format!("{module}.scales"), &[shape[0], shape[1] / GROUP], scales);
            coded.set(&format!("{module}.biases"), &[shape[0], shape[1] / GROUP], biases);
            values.set(name, shape, decoded);
        }
        [coded, values]
    }

    /// A directory with the checkpoint and a configuration.
    pub fn directory(&self, config: &Value) -> tempfile::TempDir {
        let (mut header, mut data) = (Map::new(), Vec::new());
        let mut add = |name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
            let offsets = [data.len(), data.len() + bytes.len()];
            header.insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
            data.extend(bytes);
        };
        for (name, (shape, values)) in &self.floats {
            add(name, "F32", shape, values.iter().flat_map(|value| value.to_le_bytes()).collect());
        }
        for (name, (shape, words)) in &self.words {
            add(name, "U32", shape, words.iter().flat_map(|word| word.to_le_bytes()).collect());
        }
        for (name, values) in &self.integers {
            add(name, "I64", &[values.len()], values.iter().flat_map(|value| value.to_le_bytes()).collect());
        }
        let header = serde_json::to_vec(&header).unwrap();
        let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
        dir
    }
}
