use super::io;
use crate::ops::causal_conv::Call;

pub(crate) fn run(call: &Call) {
    let Call { channels, taps, .. } = *call;
    let (x, weight) = (io::load(&call.x), io::load(&call.weight));
    let bias = call.bias.as_ref().map_or(vec![0.0; channels], io::load);
    let mut out = io::load(&call.out);
    // SAFETY: the device's lock is held while a call runs, and the indices have been checked.
    for run in unsafe { call.runs.active() } {
        let slot = |slot| call.state.slot(slot).expect("slots have been checked");
        let mut of_slot = io::load(&slot(run.slot));
        if run.is_fresh {
            of_slot.fill(0.0);
        }
        // The inputs of the state, then those of the run.
        let inputs = [&of_slot, &x[run.rows.start * channels..run.rows.end * channels]].concat();
        for (row, to) in run.rows.clone().enumerate() {
            for channel in 0..channels {
                let products =
                    (0..taps).map(|tap| weight[channel * taps + tap] * inputs[(row + tap) * channels + channel]);
                let sum = bias[channel] + products.sum::<f64>();
                out[to * channels + channel] = if call.silu { sum / (1.0 + (-sum).exp()) } else { sum };
            }
            if let Some(after) = run.slot_after(to) {
                io::store(&slot(after), &inputs[(row + 1) * channels..(row + taps) * channels]);
            }
        }
    }
    io::store(&call.out, &out);
}
