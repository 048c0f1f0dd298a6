use super::{io, key_bias};
use crate::{layer::PageTable, ops::kv_read::Call};

pub(crate) fn run(call: &Call) {
    let spec = call.layer.spec();
    // SAFETY: the device's lock is held, and nothing writes to the step.
    let table = call.step.as_ref().map_or_else(PageTable::default, |step| unsafe { step.page_table(&call.layer) });
    let (planes, dim) = (call.planes(), spec.head_dim);
    for token in 0..call.tokens {
        for head in 0..spec.kv_heads {
            let place = call.layer.place(table, call.sequence, head, call.start + token);
            let to = call.order.row(token, head, call.tokens, spec.kv_heads) * dim;
            match place {
                None if call.fills => io::store_range(&call.out, to, &vec![0.0; dim]),
                None => {}
                Some(place) if call.out.dtype() == planes.low.dtype() => {
                    io::copy_elements(&planes.low, io::first_element(&planes.low, place, dim), &call.out, to, dim);
                }
                Some(place) => {
                    let mut x = io::load_vector(&call.layer, planes, place, call.keep_rotated);
                    if let Some(bias) = call.key_bias() {
                        let bias = key_bias::at(bias, head, call.start + token);
                        x.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
                    }
                    io::store_range(&call.out, to, &x);
                }
            }
        }
    }
}
