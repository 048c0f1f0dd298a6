//! Writes new keys and values to a cache layer: copied or converted to dense codecs, encoded to TurboQuant.
//!
//! Sources are `[T, Hk, D]` or `[Hk, T, D]`, the layer `[S, Hk, cap, D]` or `[S, cap, Hk, D]`. Threads share the
//! tokens. Within a task, consecutive tokens of a sequence form a run. If source and layer have the same order, a run
//! is contiguous in both and is copied as a whole.

use super::{
    Cpu, convert,
    planes::{PlaneRows, Tokens},
    scratch,
    simd::{Simd, SimdKernel},
};
use crate::{
    DType, HeadOrder, KvLayer, Tensor,
    layer::RowPlace,
    ops::kv_write::{Call, is_kept},
};

/// Minimum elements of K (and equally many of V) of a task.
const TASK: usize = 16 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let spec = call.layer.spec();
    // SAFETY: kernels run under the device's lock, and this one does not write to the step.
    let tokens = unsafe { Tokens::new(&call.step, &call.layer) };
    let sides = [
        SourceAndPlanes { source: SourceRows::new(&call.k), planes: PlaneRows::new(&call.layer, &call.layer.k) },
        SourceAndPlanes { source: SourceRows::new(&call.v), planes: PlaneRows::new(&call.layer, &call.layer.v) },
    ];
    // Longer pieces of a head's memory are written faster, as long as the sources stay in the second-level cache.
    let [min_tokens, max_tokens] = [TASK, 8 * TASK].map(|elements| (elements / (spec.kv_heads * spec.head_dim)).max(1));
    let mut per_task = call.tokens.div_ceil(4 * cpu.threads.threads()).clamp(min_tokens, max_tokens);
    if per_task < call.tokens && !tokens.are_distinct() {
        per_task = call.tokens;
    }
    cpu.threads.run(call.tokens.div_ceil(per_task), |task| {
        let range = task * per_task..((task + 1) * per_task).min(call.tokens);
        cpu.level.dispatch(KvWriteTask { call, tokens, sides: &sides, range });
    });
}

struct SourceAndPlanes {
    source: SourceRows,
    planes: PlaneRows,
}

#[derive(Clone, Copy)]
struct SourceRows {
    start: *const u8,
    dtype: DType,
}

// SAFETY: sources are only read.
unsafe impl Sync for SourceRows {}

impl SourceRows {
    fn new(tensor: &Tensor) -> SourceRows {
        SourceRows { start: tensor.host_ptr(), dtype: tensor.dtype() }
    }
}

struct KvWriteTask<'a> {
    call: &'a Call,
    tokens: Tokens<'a>,
    sides: &'a [SourceAndPlanes; 2],
    range: std::ops::Range<usize>,
}

impl SimdKernel for KvWriteTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let mut token = self.range.start;
        while token < self.range.end {
            let place = self.tokens.place(&self.call.layer, token);
            let run = place.map_or(1, |_| run_length(&self.tokens, &self.call.layer, token..self.range.end));
            if let Some(place) = place {
                for side in self.sides {
                    // SAFETY: `dispatch` enables the instructions; the run's tokens exist and are kept.
                    unsafe { self.write::<S>(side, token, run, place) }
                }
            }
            token += run;
        }
    }
}

/// The number of leading `tokens` that go to consecutive slots of one sequence. The first token is kept.
#[inline(always)]
fn run_length(step: &Tokens, layer: &KvLayer, tokens: std::ops::Range<usize>) -> usize {
    let first = tokens.start;
    let (sequence, position) = (step.sequence[first], step.positions[first] as usize);
    let (len, capacity) = (step.lens[sequence as usize] as usize, layer.spec().capacity);
    let longest = tokens.len().min(layer.contiguous_from(position));
    let follows = |&i: &usize| {
        step.sequence[first + i] == sequence
            && step.positions[first + i] as usize == position + i
            && is_kept(position + i, len, capacity)
    };
    1 + (1..longest).take_while(follows).count()
}

impl KvWriteTask<'_> {
    /// Writes one side of a run, whose first token goes to `place` (of head 0).
    ///
    /// # Safety
    /// The level's instructions are enabled; the tokens exist and go to consecutive slots.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, side: &SourceAndPlanes, token: usize, run: usize, place: RowPlace) {
        let (call, layer) = (self.call, &self.call.layer);
        let spec = layer.spec();
        let planes = &side.planes.shifted(place.bytes);
        let row = |head, i| place.row + head * layer.head_stride() + i * layer.slot_stride();
        let from = |token, head| {
            let row = call.order.row(call.first_token + token, head, call.source_tokens, spec.kv_heads);
            side.source.start.wrapping_add(row * spec.head_dim * side.source.dtype.size())
        };
        // SAFETY: the rows exist in the source and in the layer (validated, or checked by `Tokens::place`), and no
        // other task writes to these slots.
        unsafe {
            match (call.order, spec.order, planes.dense()) {
                (HeadOrder::HeadMajor, HeadOrder::HeadMajor, Some(dtype)) => {
                    for head in 0..spec.kv_heads {
                        let to = planes.dense_row(row(head, 0), dtype);
                        convert::convert_row::<S>(from(token, head), side.source.dtype, to, dtype, run * spec.head_dim);
                    }
                }
                (HeadOrder::TokenMajor, HeadOrder::TokenMajor, Some(dtype)) => {
                    let to = planes.dense_row(row(0, 0), dtype);
                    let elements = run * spec.kv_heads * spec.head_dim;
                    convert::convert_row::<S>(from(token, 0), side.source.dtype, to, dtype, elements);
                }
                (_, _, Some(dtype)) => {
                    for head in 0..spec.kv_heads {
                        for i in 0..run {
                            let to = planes.dense_row(row(head, i), dtype);
                            convert::convert_row::<S>(
                                from(token + i, head),
                                side.source.dtype,
                                to,
                                dtype,
                                spec.head_dim,
                            );
                        }
                    }
                }
                (_, _, None) => {
                    let x = &mut *scratch::take(spec.head_dim);
                    for head in 0..spec.kv_heads {
                        for i in 0..run {
                            convert::load_row::<S>(from(token + i, head), side.source.dtype, x);
                            planes.store::<S>(row(head, i), x, &[]);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Result, Step, Tensor, bf16,
        codec::{BITS, Norm, TurboQuant},
        cpu::testing,
        f16,
        ops::{self, KvSide},
    };

    fn devices() -> Vec<Device> {
        testing::levels().map(|level| testing::device(level, 3)).collect()
    }

    /// Numbers from about −1 to 1, no two rows alike.
    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let mut state = u64::from(seed) << 32 | 0x9e37_79b9;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next() + next() * next()).collect()
    }

    fn upload(device: &Device, dtype: DType, data: &[f32], shape: &[usize]) -> Tensor {
        match dtype {
            DType::F32 => Tensor::from_slice(device, data, shape),
            DType::F16 => {
                Tensor::from_slice(device, &data.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>(), shape)
            }
            _ => Tensor::from_slice(device, &data.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>(), shape),
        }
        .unwrap()
    }

    #[derive(Clone, Debug)]
    struct KvWriteCase {
        spec: LayerSpec,
        source: DType,
        order: HeadOrder,
        /// (sequence, position) of each token.
        tokens: Vec<(u32, u32)>,
        first_token: usize,
    }

    /// The layer after a write of the case's tokens.
    fn write(device: &Device, case: &KvWriteCase) -> Result<KvLayer> {
        let layer = KvLayer::new(device, case.spec)?;
        let (heads, dim) = (case.spec.kv_heads, case.spec.head_dim);
        let source_tokens = case.first_token + case.tokens.len() + 2;
        let shape = match case.order {
            HeadOrder::TokenMajor => [source_tokens, heads, dim],
            HeadOrder::HeadMajor => [heads, source_tokens, dim],
        };
        let source = |seed| upload(device, case.source, &numbers(source_tokens * heads * dim, seed), &shape);
        let (k, v) = (source(1), source(2));
        let step = Step::new(device, case.spec.sequences, &case.tokens)?;
        let mut enc = device.encoder()?;
        let (order, first_token) = (case.order, case.first_token);
        ops::kv_write(&mut enc, &ops::KvWrite::new(&k, &v, &step, &layer).order(order).first_token(first_token))?;
        enc.commit()?.wait()?;
        Ok(layer)
    }

    fn bytes(tensor: &Tensor) -> Vec<u8> {
        let mut bytes = vec![0; tensor.bytes()];
        tensor.read_bytes(&mut bytes).unwrap();
        bytes
    }

    /// The number of differing bytes, the number of bytes, and the largest relative difference of norms.
    fn difference(a: &KvLayer, b: &KvLayer) -> (usize, usize, f32) {
        let (mut different, mut all, mut norms) = (0, 0, 0f32);
        for (a, b) in a.k().tensors().chain(a.v().tensors()).zip(b.k().tensors().chain(b.v().tensors())) {
            if a.0 == "norms" {
                for (a, b) in a.1.to_f32().unwrap().into_iter().zip(b.1.to_f32().unwrap()) {
                    norms = norms.max(if a == b { 0.0 } else { (a - b).abs() / a.abs().max(b.abs()) });
                }
            } else {
                let (a, b) = (bytes(a.1), bytes(b.1));
                all += a.len();
                different += a.iter().zip(&b).filter(|(a, b)| a != b).count();
            }
        }
        (different, all, norms)
    }

    fn linear(head_dim: usize, k: Codec, v: Codec) -> LayerSpec {
        let order = HeadOrder::HeadMajor;
        LayerSpec::new(3, head_dim, 11, k).sequences(2).v(v).order(order)
    }

    /// Two sequences, with gaps and a run.
    const TOKENS: [(u32, u32); 6] = [(0, 2), (0, 3), (0, 4), (1, 0), (1, 8), (0, 7)];

    #[test]
    fn every_dtype_and_order_equals_the_reference() {
        let reference = Device::reference();
        for device in devices() {
            for (k, v) in [(Codec::F32, Codec::F16), (Codec::BF16, Codec::F32), (Codec::F16, Codec::BF16)] {
                for source in [DType::F32, DType::F16, DType::BF16] {
                    for (ring, order) in [
                        (false, HeadOrder::HeadMajor),
                        (true, HeadOrder::HeadMajor),
                        (false, HeadOrder::TokenMajor),
                        (true, HeadOrder::TokenMajor),
                    ] {
                        for source_order in [HeadOrder::TokenMajor, HeadOrder::HeadMajor] {
                            let spec = linear(20, k, v).ring(ring).order(order);
                            let tokens = if ring {
                                // Longer than the ring, across its end.
                                (7..30).map(|p| (1, p)).chain([(0, 25)]).collect()
                            } else {
                                TOKENS.to_vec()
                            };
                            let case = KvWriteCase { spec, source, order: source_order, tokens, first_token: 1 };
                            let (got, want) = (write(&device, &case).unwrap(), write(&reference, &case).unwrap());
                            assert_eq!(difference(&got, &want).0, 0, "{device} {case:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn turboquant_equals_the_reference_except_at_ties() {
        let reference = Device::reference();
        for device in devices() {
            for dim in [8, 16, 64, 128, 256, 512] {
                for bits in BITS {
                    for norm in [Norm::Rms, Norm::LeastSquares, Norm::Unbiased] {
                        let scale = if dim == 128 { 1.07 } else { 1.0 };
                        let k = Codec::TurboQuant(TurboQuant { bits, scale, norm, centred: false });
                        let spec = linear(dim, k, Codec::tq(4));
                        let order = HeadOrder::TokenMajor;
                        let case =
                            KvWriteCase { spec, source: DType::F16, order, tokens: TOKENS.to_vec(), first_token: 0 };
                        let (got, want) = (write(&device, &case).unwrap(), write(&reference, &case).unwrap());
                        let (different, all, norms) = difference(&got, &want);
                        // f32 moves a coordinate across a threshold about once in 10⁵ (8 bits).
                        assert!(different <= 2 + all / 10_000, "{device} {case:?}: {different} of {all}");
                        assert!(norms < 2e-6, "{device} {case:?}: {norms}");
                    }
                }
            }
        }
    }

    #[test]
    fn unusual_vectors_equal_the_reference() {
        let reference = Device::reference();
        for bits in BITS {
            for dim in [8, 64, 512] {
                let codec = Codec::tq(bits);
                let spec = linear(dim, codec, codec).kv_heads(1).sequences(1);
                let mut rows = vec![numbers(dim, 5); 10];
                rows[1].fill(0.0);
                rows[2][3] = f32::NAN;
                rows[3][dim - 1] = f32::INFINITY;
                rows[4].iter_mut().for_each(|x| *x *= 1e-25);
                rows[5].iter_mut().for_each(|x| *x *= 1e17);
                rows[6].iter_mut().for_each(|x| *x *= 1e30);
                rows[7].iter_mut().skip(1).for_each(|x| *x = 0.0);
                rows[8].iter_mut().for_each(|x| *x *= 1e-41);
                let run = |device: &Device| {
                    let layer = KvLayer::new(device, spec).unwrap();
                    let x = Tensor::from_slice(device, &rows.concat(), &[10, 1, dim]).unwrap();
                    let tokens: Vec<_> = (0..10).map(|p| (0, p)).collect();
                    let step = Step::new(device, 1, &tokens).unwrap();
                    let mut enc = device.encoder().unwrap();
                    let order = HeadOrder::TokenMajor;
                    let write = ops::KvWrite::new(&x, &x, &step, &layer).order(order);
                    ops::kv_write(&mut enc, &write).unwrap();
                    enc.commit().unwrap().wait().unwrap();
                    let norms = layer.k().norms.as_ref().unwrap().to_f32().unwrap();
                    let low = layer.k().low.to_vec::<u8>().unwrap();
                    (norms, low)
                };
                let want = run(&reference);
                for device in devices() {
                    let got = run(&device);
                    for (row, (got, want)) in got.0.iter().zip(&want.0).enumerate() {
                        // Subnormal numbers have too few digits for equal codes, and the norm may depend on the codes.
                        let relative = if want.abs() < f32::MIN_POSITIVE { 3e-3 } else { 2e-6 };
                        let close = (got - want).abs() <= relative * want.abs() || got.is_nan() && want.is_nan();
                        assert!(close, "{device} tq{bits} D={dim} norm {row}: {got:e}, not {want:e}");
                    }
                    let row_bytes = got.1.len() / 11;
                    for row in (0..8).chain([9]) {
                        let at = row * row_bytes..(row + 1) * row_bytes;
                        let different = got.1[at.clone()].iter().zip(&want.1[at]).filter(|(a, b)| a != b).count();
                        // A vector along one axis has all rotated coordinates at two values.
                        assert!(different <= 1, "{device} tq{bits} D={dim} row {row}: {different} codes differ");
                    }
                }
            }
        }
    }

    #[test]
    fn dense_copies_keep_nan_payloads() {
        for device in devices() {
            for order in [HeadOrder::TokenMajor, HeadOrder::HeadMajor] {
                let spec = linear(24, Codec::F16, Codec::F16).kv_heads(2).sequences(1);
                let bits: Vec<f16> = (0..2 * 3 * 24).map(|i| f16::from_bits(0x7c01 + i as u16)).collect();
                let shape = if order == HeadOrder::TokenMajor { [3, 2, 24] } else { [2, 3, 24] };
                let x = Tensor::from_slice(&device, &bits, &shape).unwrap();
                let layer = KvLayer::new(&device, spec).unwrap();
                let step = Step::new(&device, 1, &[(0, 4), (0, 5), (0, 6)]).unwrap();
                let out = Tensor::zeros(&device, DType::F16, &shape).unwrap();
                let mut enc = device.encoder().unwrap();
                let write = ops::KvWrite::new(&x, &x, &step, &layer).order(order);
                ops::kv_write(&mut enc, &write).unwrap();
                let (side, out_ref) = (KvSide::V, &out);
                let read = ops::KvRead::new(&layer, side, out_ref).start(4).order(order);
                ops::kv_read(&mut enc, &read).unwrap();
                enc.commit().unwrap().wait().unwrap();
                assert_eq!(bytes(&out), bytes(&x), "{device}");
            }
        }
    }

    #[test]
    fn many_tokens_on_many_threads_equal_one_by_one() {
        for device in devices() {
            let spec = linear(128, Codec::tq(5), Codec::F16).capacity(700).sequences(1).ring(true);
            let all = 1000;
            let write_in = |batch: u32| {
                let layer = KvLayer::new(&device, spec).unwrap();
                let x = upload(&device, DType::BF16, &numbers(1000 * 3 * 128, 3), &[1000, 3, 128]);
                let mut enc = device.encoder().unwrap();
                for start in (0..all).step_by(batch as usize) {
                    let tokens: Vec<_> = (start..all.min(start + batch)).map(|p| (0, p)).collect();
                    let step = Step::new(&device, 1, &tokens).unwrap();
                    let (order, first_token) = (HeadOrder::TokenMajor, start as usize);
                    let write = ops::KvWrite::new(&x, &x, &step, &layer).order(order).first_token(first_token);
                    ops::kv_write(&mut enc, &write).unwrap();
                }
                enc.commit().unwrap().wait().unwrap();
                layer
            };
            let (different, _, norms) = difference(&write_in(1000), &write_in(1));
            assert_eq!((different, norms), (0, 0.0), "{device}");
        }
    }
}
