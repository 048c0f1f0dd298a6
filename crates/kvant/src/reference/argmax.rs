use super::io;
use crate::ops::argmax::Call;

/// The index of the largest element; the lowest among equals. NaN is never chosen; `None` if all elements are NaN.
pub fn argmax(x: &[f64]) -> Option<usize> {
    let mut best: Option<usize> = None;
    for (i, &value) in x.iter().enumerate() {
        if !value.is_nan() && best.is_none_or(|best| value > x[best]) {
            best = Some(i);
        }
    }
    best
}

/// The index as the operation writes it.
pub(super) fn index(found: Option<usize>) -> u32 {
    found.map_or(u32::MAX, |index| index as u32)
}

pub(crate) fn run(call: &Call) {
    let x = io::load(&call.x);
    let out: Vec<u32> = x.chunks(call.dim).map(|row| index(argmax(row))).collect();
    io::store_raw(&call.out, 0, &out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_and_nan() {
        assert_eq!(argmax(&[f64::NAN, 1.0, 2.0, 2.0]), Some(2));
        assert_eq!(argmax(&[f64::NAN, f64::NEG_INFINITY]), Some(1));
        assert_eq!(argmax(&[f64::NAN, f64::NAN]), None);
        assert_eq!(argmax(&[-0.0, 0.0]), Some(0));
    }
}
