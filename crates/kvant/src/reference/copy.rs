use crate::ops::copy::Call;

pub(crate) fn run(call: &Call) {
    debug_assert_eq!(call.from.bytes(), call.to.bytes());
    // SAFETY: the device's lock is held, both tensors have equally many bytes, and they do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(call.from.host_ptr(), call.to.host_ptr(), call.to.bytes()) }
}
