//! out\[t\] = scale · table\[ids\[t\]\]: a row of the table for each token, widened or dequantised. Threads share the
//! tokens.

use super::{
    Cpu,
    elements::Elements,
    linear::matrix::Matrix,
    scratch,
    simd::{Simd, SimdKernel},
};
use crate::ops::embed::Call;

/// Minimum elements of a task.
const TASK: usize = 16 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let table = Matrix::new(&call.table, call.dims.inputs);
    let out = Elements::of(&call.out);
    // SAFETY: calls run under the device's lock, and the ids are an input only.
    let ids = unsafe { call.ids.host_slice::<u32>() };
    let rows = TASK / table.inputs.max(1) + 1;
    cpu.threads.run(ids.len().div_ceil(rows), |task| {
        let first = task * rows;
        let ids = &ids[first..ids.len().min(first + rows)];
        cpu.level.dispatch(EmbedRows { table, ids, scale: call.scale, first, out });
    });
}

/// Writes the rows of `ids` to the output's rows from `first` on.
struct EmbedRows<'a> {
    table: Matrix,
    ids: &'a [u32],
    scale: f32,
    first: usize,
    out: Elements,
}

impl SimdKernel for EmbedRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let dim = self.table.inputs;
        let row = &mut *scratch::take(dim);
        for (i, &id) in self.ids.iter().enumerate() {
            // SAFETY: validation checked that the id is a row of the table; only this task writes the output's row;
            // `dispatch` enables the instructions.
            unsafe {
                self.table.natural_row::<S>(id as usize, self.scale, row);
                self.out.store::<S>((self.first + i) * dim, row);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        DType, Device, Tensor,
        cpu::testing::{Numbers, assert_close, devices, tensor},
        ops::{self, Affine, Embed, Weight},
    };

    const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    fn run(device: &Device, table: Weight, ids: &[u32], out: DType, dim: usize) -> Tensor {
        let ids = Tensor::from_slice(device, ids, &[ids.len()]).unwrap();
        let out = tensor(device, out, &vec![7.0; ids.elements() * dim], &[ids.elements(), dim]);
        let mut enc = device.encoder().unwrap();
        ops::embed(&mut enc, &Embed::new(table, &ids, &out).scale(16.5)).unwrap();
        enc.commit().unwrap().wait().unwrap();
        out
    }

    fn ids(count: usize, vocab: usize) -> Vec<u32> {
        (0..count).map(|i| ((i * 7 + 3) % vocab) as u32).collect()
    }

    #[test]
    fn dense_rows() {
        for (dim, count) in [(1, 3), (37, 1), (256, 200), (5, 0), (0, 4)] {
            for (dtype, out) in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| (a, b))) {
                let data = Numbers(1).floats(11 * dim);
                let go = |device: &Device| {
                    let table = tensor(device, dtype, &data, &[11, dim]);
                    run(device, Weight::Dense(&table), &ids(count, 11), out, dim)
                };
                let want = go(&Device::reference());
                devices().iter().for_each(|device| assert_close(&go(device), &want, 1e-6, &(device, dtype, dim)));
            }
        }
    }

    #[test]
    fn affine_rows() {
        for (bits, group, groups) in [(4, 32, 5), (4, 64, 4), (4, 128, 17), (6, 64, 3), (6, 32, 33), (8, 32, 1)] {
            let dim = group * groups;
            for (scales_dtype, out) in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| (a, b))) {
                let go = |device: &Device| {
                    let mut numbers = Numbers(2);
                    let words: Vec<u32> = (0..9 * dim * bits / 32).map(|_| numbers.bits()).collect();
                    let codes = Tensor::from_slice(device, &words, &[9, dim * bits / 32]).unwrap();
                    let [scales, biases] =
                        [0, 1].map(|_| tensor(device, scales_dtype, &numbers.floats(9 * groups), &[9, groups]));
                    let (codes, scales, biases) = (&codes, &scales, &biases);
                    let table = Weight::Affine(Affine { codes, scales, biases, bits: bits as u32, group });
                    run(device, table, &ids(40, 9), out, dim)
                };
                let want = go(&Device::reference());
                devices().iter().for_each(|device| assert_close(&go(device), &want, 1e-3, &(device, bits, group)));
            }
        }
    }
}
