use super::io;
use crate::ops::argmax::Call;

/// The index of the largest element; the lowest among equals. NaN is never chosen; nothing but NaN gives 0.
pub fn argmax(x: &[f64]) -> usize {
    let mut best: Option<usize> = None;
    for (i, &value) in x.iter().enumerate() {
        if !value.is_nan() && best.is_none_or(|best| value > x[best]) {
            best = Some(i);
        }
    }
    best.unwrap_or(0)
}

pub(crate) fn run(call: &Call) {
    let x = io::load(&call.x);
    let out: Vec<u32> = x.chunks(call.dim).map(|row| argmax(row) as u32).collect();
    io::store_raw(&call.out, 0, &out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_and_nan() {
        assert_eq!(argmax(&[f64::NAN, 1.0, 2.0, 2.0]), 2);
        assert_eq!(argmax(&[f64::NAN, f64::NEG_INFINITY]), 1);
        assert_eq!(argmax(&[f64::NAN, f64::NAN]), 0);
        assert_eq!(argmax(&[-0.0, 0.0]), 0);
    }
}
