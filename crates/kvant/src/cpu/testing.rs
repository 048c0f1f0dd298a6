//! Helpers for tests of CPU kernels: devices of every level, numbers, and comparison with the reference.

use crate::{CpuOptions, DType, Device, SimdLevel, Tensor, bf16, f16};

/// The instruction sets of this machine, the best one last.
pub(super) fn levels() -> impl Iterator<Item = SimdLevel> {
    SimdLevel::ALL.into_iter().filter(|level| level.is_supported())
}

/// A CPU device.
pub(super) fn device(simd: SimdLevel, threads: usize) -> Device {
    let options = CpuOptions { threads: Some(threads), simd: Some(simd), ..CpuOptions::default() };
    Device::cpu_with(options).expect("the level is supported")
}

/// A CPU device of each supported instruction set, with one thread and with two; if `KVANT_TEST_SCOPE` is `quick`, only
/// of the best instruction set.
pub(super) fn devices() -> Vec<Device> {
    devices_with(false)
}

/// As [`devices`], with or without 8-bit activations in matrix products.
pub(super) fn devices_with(eight_bit_activations: bool) -> Vec<Device> {
    let levels: Vec<_> = levels().collect();
    let quick = std::env::var("KVANT_TEST_SCOPE").is_ok_and(|scope| scope == "quick");
    let first = if quick { levels.len() - 1 } else { 0 };
    levels[first..]
        .iter()
        .flat_map(|&level| [1, 2].map(|threads| (Some(threads), Some(level))))
        .map(|(threads, simd)| CpuOptions { threads, simd, eight_bit_activations, ..CpuOptions::default() })
        .map(|options| Device::cpu_with(options).expect("the level is supported"))
        .collect()
}

/// Deterministic pseudo-random numbers.
pub(super) struct Numbers(pub u64);

impl Numbers {
    pub(super) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.bits() as usize % limit
    }

    /// Uniform from −1 to 1.
    pub(super) fn float(&mut self) -> f32 {
        self.bits() as f32 / (1u32 << 31) as f32 - 1.0
    }

    pub(super) fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }
}

/// A tensor of a float dtype.
pub(super) fn tensor(device: &Device, dtype: DType, data: &[f32], shape: &[usize]) -> Tensor {
    let tensor = Tensor::zeros(device, dtype, shape).unwrap();
    write(&tensor, data);
    tensor
}

/// Rounds the numbers to the tensor's dtype.
pub(super) fn write(tensor: &Tensor, data: &[f32]) {
    match tensor.dtype() {
        DType::F32 => tensor.write(data),
        DType::F16 => tensor.write(&data.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>()),
        _ => tensor.write(&data.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>()),
    }
    .unwrap();
}

/// The unit roundoff of a dtype.
pub(super) fn rounding(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 1.0 / 2048.0,
        DType::BF16 => 1.0 / 256.0,
        _ => 0.0,
    }
}

/// Asserts that each number is within `absolute` plus the rounding of `dtype`, and NaN where NaN is expected.
#[track_caller]
pub(super) fn assert_close(got: &Tensor, want: &Tensor, absolute: f32, what: &dyn std::fmt::Debug) {
    let relative = 2.0 * rounding(got.dtype());
    for (i, (got, want)) in got.to_f32().unwrap().into_iter().zip(want.to_f32().unwrap()).enumerate() {
        let close = (got - want).abs() <= absolute + relative * want.abs();
        assert!(close || got == want || got.is_nan() && want.is_nan(), "{what:?}: element {i} is {got}, not {want}");
    }
}
