//! A logical range of a cache layer to a dense tensor, in order: decoded, or as bytes where the dtypes agree.
//!
//! Out is `[n, Hk, D]` or `[Hk, n, D]`. Threads share the positions.

use super::{
    Cpu, convert,
    kv_write::move_elements,
    planes::PlaneRows,
    scratch,
    simd::{Kernel, Simd},
};
use crate::{DType, ops::kv_read::Call};

/// Elements that make a task worth a thread.
const TASK: usize = 32 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let spec = call.layer.spec();
    let planes = PlaneRows::new(call.planes(), spec.head_dim);
    let out = Out { start: call.out.host_ptr(), dtype: call.out.dtype() };
    let per_task = (TASK / (spec.kv_heads * spec.head_dim)).max(1);
    cpu.pool.run(call.tokens.div_ceil(per_task), |task| {
        let range = task * per_task..((task + 1) * per_task).min(call.tokens);
        cpu.level.dispatch(Task { call, planes: &planes, out: &out, range });
    });
}

struct Out {
    start: *mut u8,
    dtype: DType,
}

// SAFETY: tasks write disjoint rows, and the device's lock excludes everyone else.
unsafe impl Sync for Out {}

struct Task<'a> {
    call: &'a Call,
    planes: &'a PlaneRows,
    out: &'a Out,
    range: std::ops::Range<usize>,
}

impl Kernel for Task<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let (call, out) = (self.call, self.out);
        let spec = call.layer.spec();
        scratch::with(spec.head_dim, |x| {
            for head in 0..spec.kv_heads {
                for i in self.range.clone() {
                    let row = call.layer.row(call.sequence, head, call.layer.slot(call.start + i));
                    let out_row = call.order.row(i, head, call.tokens, spec.kv_heads);
                    // SAFETY: `dispatch` enables the instructions; validation keeps the rows within layer and out.
                    unsafe {
                        let to = out.start.add(out_row * spec.head_dim * out.dtype.size());
                        if let Some(dtype) = self.planes.dense() {
                            let from = self.planes.dense_row(row, dtype);
                            move_elements::<S>(from, dtype, to, out.dtype, spec.head_dim);
                        } else {
                            self.planes.load::<S>(row, x, call.keep_rotated);
                            convert::store_row::<S>(x, to, out.dtype);
                        }
                    }
                }
            }
        });
    }
}
