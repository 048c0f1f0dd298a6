//! Reads a logical range of a cache layer into a dense tensor, in order: decoded, or copied if the dtypes agree.
//!
//! Out is `[n, Hk, D]` or `[Hk, n, D]`. Threads share the positions.

use super::{
    Cpu, convert,
    key_bias::HeadBias,
    planes::PlaneRows,
    scratch,
    simd::{Simd, SimdKernel},
};
use crate::{
    DType,
    layer::{PageTable, RowPlace},
    ops::kv_read::Call,
};

/// Minimum elements of a task.
const TASK: usize = 32 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let spec = call.layer.spec();
    let planes = PlaneRows::new(&call.layer, call.planes());
    // SAFETY: the device's lock is held while a call runs, and the call does not write to the step.
    let table = call.step.as_ref().map_or_else(PageTable::default, |step| unsafe { step.page_table(&call.layer) });
    let out = ReadOutput { start: call.out.host_ptr(), dtype: call.out.dtype() };
    let per_task = (TASK / (spec.kv_heads * spec.head_dim)).max(1);
    cpu.threads.run(call.tokens.div_ceil(per_task), |task| {
        let range = task * per_task..((task + 1) * per_task).min(call.tokens);
        cpu.level.dispatch(KvReadTask { call, table, planes: &planes, out: &out, range });
    });
}

struct ReadOutput {
    start: *mut u8,
    dtype: DType,
}

// SAFETY: tasks write disjoint rows, and the device's lock excludes everyone else.
unsafe impl Sync for ReadOutput {}

struct KvReadTask<'a> {
    call: &'a Call,
    table: PageTable<'a>,
    planes: &'a PlaneRows,
    out: &'a ReadOutput,
    range: std::ops::Range<usize>,
}

impl SimdKernel for KvReadTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let (call, out) = (self.call, self.out);
        let spec = call.layer.spec();
        let x = &mut *scratch::take(spec.head_dim);
        let room = &mut *scratch::take(3 * spec.head_dim);
        let (at_page, room) = room.split_at_mut(spec.head_dim);
        let (pairs, at_slot) = room.split_at_mut(spec.head_dim);
        for head in 0..spec.kv_heads {
            // SAFETY: the device's lock is held while a call runs.
            let bias = call.key_bias().map(|bias| unsafe { HeadBias::new(bias, head) });
            for i in self.range.clone() {
                let place = call.layer.place(self.table, call.sequence, head, call.start + i);
                let out_row = call.order.row(i, head, call.tokens, spec.kv_heads);
                // SAFETY: `dispatch` enables the instructions; validation keeps the rows within the layer and `out`.
                unsafe {
                    let to = out.start.add(out_row * spec.head_dim * out.dtype.size());
                    let Some(RowPlace { bytes, row }) = place else {
                        if call.fills {
                            to.write_bytes(0, spec.head_dim * out.dtype.size());
                        }
                        continue;
                    };
                    let planes = self.planes.shifted(bytes);
                    if let Some(dtype) = planes.dense() {
                        let from = planes.dense_row(row, dtype);
                        convert::convert_row::<S>(from, dtype, to, out.dtype, spec.head_dim);
                    } else {
                        planes.load::<S>(row, x, call.keep_rotated);
                        if let Some(bias) = &bias {
                            let position = call.start + i;
                            bias.at_page(position / bias.page_tokens, at_page);
                            bias.at_slot(at_page, position % bias.page_tokens, pairs, at_slot);
                            x.iter_mut().zip(&*at_slot).for_each(|(x, bias)| *x += bias);
                        }
                        convert::store_row::<S>(x, to, out.dtype);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Step, Tensor,
        codec::BITS,
        cpu::testing,
        ops::{self, KvSide},
    };

    /// Writes 17 tokens to a ring of 12 and reads the last nine.
    fn read(device: &Device, codec: Codec, slots: HeadOrder, order: HeadOrder, out: (DType, bool)) -> Vec<f32> {
        let (ring, sequences) = (true, 2);
        let (k, v) = (codec, Codec::F32);
        let spec = LayerSpec::new(3, 64, 12, k).sequences(sequences).v(v).ring(ring).order(slots);
        let layer = KvLayer::new(device, spec).unwrap();
        let x: Vec<f32> =
            (0..17 * 3 * 64u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 20) as f32 / 2048. - 1.).collect();
        let x = Tensor::from_slice(device, &x, &[17, 3, 64]).unwrap();
        let tokens: Vec<_> = (0..17).map(|p| (1, p)).collect();
        let step = Step::new(device, 2, &tokens).unwrap();
        let shape = if order == HeadOrder::TokenMajor { [9, 3, 64] } else { [3, 9, 64] };
        let (dtype, keep_rotated) = out;
        let out = Tensor::zeros(device, dtype, &shape).unwrap();
        let mut enc = device.encoder().unwrap();
        let source = HeadOrder::TokenMajor;
        let write = ops::KvWrite::new(&x, &x, &step, &layer).order(source);
        ops::kv_write(&mut enc, &write).unwrap();
        let (layer, side, out_ref) = (&layer, KvSide::K, &out);
        let read = ops::KvRead::new(layer, side, out_ref).sequence(1).start(8).keep_rotated(keep_rotated).order(order);
        ops::kv_read(&mut enc, &read).unwrap();
        enc.commit().unwrap().wait().unwrap();
        out.to_f32().unwrap()
    }

    #[test]
    fn wrapped_ranges_equal_the_reference() {
        let codecs = [Codec::F32, Codec::F16].into_iter().chain(BITS.map(Codec::tq));
        for level in testing::levels() {
            let device = testing::device(level, 2);
            for codec in codecs.clone() {
                for slots in [HeadOrder::HeadMajor, HeadOrder::TokenMajor] {
                    for order in [HeadOrder::HeadMajor, HeadOrder::TokenMajor] {
                        for out in [(DType::F32, false), (DType::F32, true), (DType::BF16, false)] {
                            let got = read(&device, codec, slots, order, out);
                            let want = read(&Device::reference(), codec, slots, order, out);
                            // A code next to a threshold may differ, at a cost of one step between centroids.
                            let close = |(a, b): &(&f32, &f32)| (*a - *b).abs() <= 1e-6 + b.abs() / 250.0;
                            let far = got.iter().zip(&want).filter(|pair| !close(pair)).count();
                            assert!(
                                far <= if codec.is_quantised() { 64 } else { 0 },
                                "{device} {codec} {out:?}: {far}"
                            );
                            assert!(got.iter().any(|x| x.abs() > 0.1));
                        }
                    }
                }
            }
        }
    }
}
