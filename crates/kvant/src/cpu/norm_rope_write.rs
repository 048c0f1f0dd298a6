//! Norm and rotary embedding of Q, K and V, and the write of K and V to the cache, in one pass over the tokens.
//!
//! q `[T, H, D]` to q_out; k and v `[T, Hk, D]` to the layer, encoded from f32. Threads share the tokens. A token's
//! keys and values are processed before its queries, so `q_out` may share memory with any of the inputs.

use super::{
    Cpu, hadamard,
    norm_rope::{Activations, HeadRmsNorm, Rotary, tokens_per_task},
    planes::{PlaneRows, Tokens},
    scratch,
    simd::{Simd, SimdKernel},
};
use crate::ops::norm_rope_write::Call;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let dim = call.head_dim;
    let spec = call.layer.spec();
    let work = NormRopeWriteWork {
        call,
        // SAFETY: kernels run under the device's lock, and this one does not write to the positions.
        positions: unsafe { call.positions.host_slice() },
        // SAFETY: kernels run under the device's lock, and this one does not write to the step.
        tokens: unsafe { Tokens::new(&call.step, &call.layer) },
        q: Activations::new(&call.q, dim),
        q_out: Activations::new(&call.q_out, dim),
        q_norm: HeadRmsNorm::new(cpu, call.q_norm.as_ref()),
        k: CachedSide {
            source: Activations::new(&call.k, dim),
            norm: HeadRmsNorm::new(cpu, call.k_norm.as_ref()),
            planes: PlaneRows::new(&call.layer, &call.layer.k),
        },
        v: CachedSide {
            source: Activations::new(&call.v, dim),
            norm: HeadRmsNorm::new(cpu, call.v_norm.as_ref()),
            planes: PlaneRows::new(&call.layer, &call.layer.v),
        },
        rotary: call.rope.as_ref().map(|rope| Rotary::new(rope, dim)),
        signs: call.rotate_q.then(|| hadamard::signs(dim)),
    };
    let mut per_task = tokens_per_task((call.heads + 2 * spec.kv_heads) * dim);
    if per_task < call.tokens && !work.tokens.are_distinct() {
        per_task = call.tokens;
    }
    cpu.threads.run(call.tokens.div_ceil(per_task), |task| {
        let range = task * per_task..((task + 1) * per_task).min(call.tokens);
        cpu.level.dispatch(NormRopeWriteTask { work: &work, range });
    });
}

struct NormRopeWriteWork<'a> {
    call: &'a Call,
    /// Positions of the rotary embedding.
    positions: &'a [u32],
    tokens: Tokens<'a>,
    q: Activations,
    q_out: Activations,
    q_norm: Option<HeadRmsNorm>,
    k: CachedSide,
    v: CachedSide,
    rotary: Option<Rotary<'a>>,
    signs: Option<&'static [f32]>,
}

/// Keys or values: their source, norm and destination.
struct CachedSide {
    source: Activations,
    norm: Option<HeadRmsNorm>,
    planes: PlaneRows,
}

struct NormRopeWriteTask<'a> {
    work: &'a NormRopeWriteWork<'a>,
    range: std::ops::Range<usize>,
}

impl SimdKernel for NormRopeWriteTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let NormRopeWriteWork { call, positions, tokens, rotary, signs, .. } = self.work;
        let spec = call.layer.spec();
        let pairs = rotary.as_ref().map_or(0, Rotary::pairs);
        let memory = &mut *scratch::take(call.head_dim + 2 * pairs);
        let (row, turns) = memory.split_at_mut(call.head_dim);
        for token in self.range {
            let position = positions[token];
            // SAFETY: `dispatch` enables the instructions; rows are within the tensors and, for tokens that are kept,
            // within the layer. No other task has this token or its slot.
            unsafe {
                if let Some(rotary) = rotary {
                    rotary.turns::<S>(position, turns);
                }
                if let Some(place) = tokens.place(&call.layer, token) {
                    for (side, rotary) in [(&self.work.k, rotary.as_ref()), (&self.work.v, None)] {
                        let planes = side.planes.shifted(place.bytes);
                        for head in 0..spec.kv_heads {
                            side.source.load::<S>(token * spec.kv_heads + head, row);
                            prepare::<S>(row, side.norm.as_ref(), rotary, turns);
                            planes.store::<S>(place.row + head * call.layer.head_stride(), row, &[]);
                        }
                    }
                }
                for head in token * call.heads..(token + 1) * call.heads {
                    self.work.q.load::<S>(head, row);
                    prepare::<S>(row, self.work.q_norm.as_ref(), rotary.as_ref(), turns);
                    if let Some(signs) = signs {
                        hadamard::rotate::<S>(row, signs);
                    }
                    self.work.q_out.store::<S>(head, row);
                }
            }
        }
    }
}

/// Applies the norm, then the rotary embedding, to one head.
///
/// # Safety
/// The level's instructions are enabled; `turns` comes from [`Rotary::turns`].
#[inline(always)]
unsafe fn prepare<S: Simd>(row: &mut [f32], norm: Option<&HeadRmsNorm>, rotary: Option<&Rotary>, turns: &[f32]) {
    // SAFETY: passed on to the caller.
    unsafe {
        if let Some(norm) = norm {
            norm.apply::<S>(row);
        }
        if let Some(rotary) = rotary {
            rotary.apply::<S>(turns, row);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Step, Tensor,
        cpu::testing::{Numbers, assert_close, devices, tensor},
        ops::{self, Angles, HeadNorm, KvSide, PairLayout, Rope},
    };

    /// (q_out, the last keys, the last values) after writing seven tokens to a ring of five.
    fn run(device: &Device, dim: usize, [k, v]: [Codec; 2], in_place: bool) -> [Tensor; 3] {
        let (sequences, kv_heads, capacity, ring, order) = (2, 2, 5, true, HeadOrder::HeadMajor);
        let layer = KvLayer::new(
            device,
            LayerSpec::new(kv_heads, dim, capacity, k).sequences(sequences).v(v).ring(ring).order(order),
        )
        .unwrap();
        let (tokens, heads) = (9, 6);
        let mut numbers = Numbers(3);
        let mut random = |dtype, shape: &[usize]| tensor(device, dtype, &numbers.floats(shape.iter().product()), shape);
        let q = random(DType::F16, &[tokens, heads, dim]);
        let kv = [random(DType::BF16, &[tokens, kv_heads, dim]), random(DType::F32, &[tokens, kv_heads, dim])];
        let (q_weight, k_weight) = (random(DType::BF16, &[dim]), random(DType::F32, &[dim]));
        let norm = |weight| Some(HeadNorm::new(1e-6).weight(weight));
        let places: Vec<_> = (0..7).map(|p| (1, p + 100)).chain([(0, 0), (0, 1)]).collect();
        let step = Step::new(device, sequences, &places).unwrap();
        let (layout, freq_factors) = (PairLayout::Halves, None);
        let rope = Rope::new(1e6, dim / 8).layout(layout).freq_factors(freq_factors);
        let q_out = if in_place { q.clone() } else { Tensor::zeros(device, DType::F32, q.shape()).unwrap() };
        let mut enc = device.encoder().unwrap();
        let args = ops::NormRopeWrite::new(&q, &kv[0], &kv[1], &step, &layer, &q_out)
            .q_norm(norm(Some(&q_weight)))
            .k_norm(norm(Some(&k_weight)))
            .v_norm(norm(None))
            .rope(Some(rope));
        ops::norm_rope_write(&mut enc, &args).unwrap();
        let read = |enc: &mut _, side| {
            let out = Tensor::zeros(device, DType::F32, &[5, kv_heads, dim]).unwrap();
            let (order, keep_rotated) = (HeadOrder::TokenMajor, false);
            let read =
                ops::KvRead::new(&layer, side, &out).sequence(1).start(102).keep_rotated(keep_rotated).order(order);
            ops::kv_read(enc, &read).unwrap();
            out
        };
        let (k, v) = (read(&mut enc, KvSide::K), read(&mut enc, KvSide::V));
        enc.commit().unwrap().wait().unwrap();
        [q_out, k, v]
    }

    #[test]
    fn every_codec_equals_the_reference() {
        let codecs = [
            [Codec::F32, Codec::F16],
            [Codec::tq(8), Codec::tq(4)],
            [Codec::BF16, Codec::tq(6)],
            [Codec::tq(5); 2],
            [Codec::tq(3), Codec::tq(2)],
        ];
        for device in devices() {
            for dim in [64, 128, 256, 512] {
                for codecs in codecs {
                    for in_place in [false, true] {
                        let got = run(&device, dim, codecs, in_place);
                        let want = run(&Device::reference(), dim, codecs, in_place);
                        assert_close(&got[0], &want[0], 4e-6, &(dim, codecs));
                        for (got, want) in got[1..].iter().zip(&want[1..]) {
                            let (got, want) = (got.to_f32().unwrap(), want.to_f32().unwrap());
                            let squares = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>();
                            let diff: Vec<f32> = got.iter().zip(&want).map(|(a, b)| a - b).collect();
                            // A few results may differ: a tie when rounding to bf16, or a code at a threshold.
                            assert!(squares(&diff) < 1e-5 * squares(&want), "{device} {dim} {codecs:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn equals_its_two_parts() {
        // In f32 the separate calls do not round in between, so the bits are equal.
        for device in devices() {
            let dim = 64;
            let (sequences, kv_heads, capacity, ring) = (1, 1, 50, false);
            let (k, v, order) = (Codec::tq(6), Codec::F32, HeadOrder::HeadMajor);
            let spec = LayerSpec::new(kv_heads, dim, capacity, k).sequences(sequences).v(v).ring(ring).order(order);
            let (fused, parts) = (KvLayer::new(&device, spec).unwrap(), KvLayer::new(&device, spec).unwrap());
            let x = tensor(&device, DType::F32, &Numbers(1).floats(40 * dim), &[40, 1, dim]);
            let [q_out, normed_k, normed_v] = [(); 3].map(|()| Tensor::zeros(&device, DType::F32, x.shape()).unwrap());
            let places: Vec<_> = (0..40).map(|p| (0, p)).collect();
            let step = Step::new(&device, 1, &places).unwrap();
            let norm = Some(HeadNorm::new(1e-5));
            let (layout, freq_factors, angles) = (PairLayout::Interleaved, None, Angles::Theta(1e4));
            let rope = Some(Rope::new(angles, dim / 2).layout(layout).freq_factors(freq_factors));
            let mut enc = device.encoder().unwrap();
            let args = ops::NormRopeWrite::new(&x, &x, &x, &step, &fused, &q_out).k_norm(norm).v_norm(norm).rope(rope);
            ops::norm_rope_write(&mut enc, &args).unwrap();
            let (positions, rotate, out_order) = (&step.positions, false, HeadOrder::TokenMajor);
            for (rope, out) in [(rope, &normed_k), (None, &normed_v)] {
                let args =
                    ops::NormRope::new(&x, positions, out).norm(norm).rope(rope).rotate(rotate).out_order(out_order);
                ops::norm_rope(&mut enc, &args).unwrap();
            }
            let (k, v, order) = (&normed_k, &normed_v, HeadOrder::TokenMajor);
            let write = ops::KvWrite::new(k, v, &step, &parts).order(order);
            ops::kv_write(&mut enc, &write).unwrap();
            enc.commit().unwrap().wait().unwrap();
            let planes = |layer: &KvLayer| {
                let all = layer.k().tensors().chain(layer.v().tensors());
                all.map(|(_, tensor)| {
                    let mut bytes = vec![0; tensor.bytes()];
                    tensor.read_bytes(&mut bytes).unwrap();
                    bytes
                })
                .collect::<Vec<_>>()
            };
            assert!(planes(&fused) == planes(&parts), "{device}");
        }
    }
}
