use super::{check_len, io};
use crate::{Result, ops::rms_norm::Call};

/// x · weight / √(mean x² + eps); without a weight, ones.
///
/// # Errors
/// `Shape` when the weight is not as long as x.
pub fn rms_norm(x: &[f64], weight: Option<&[f64]>, eps: f64) -> Result<Vec<f64>> {
    check_len("rms_norm", "weight", x.len(), weight.map_or(x.len(), <[f64]>::len))?;
    let mean_square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let r = (mean_square + eps).sqrt().recip();
    Ok(x.iter().enumerate().map(|(i, x)| x * r * weight.map_or(1.0, |w| w[i])).collect())
}

pub(crate) fn run(call: &Call) {
    let mut x = io::load(&call.x);
    let weight = call.weight.as_ref().map(io::load);
    let residual = call.residual.as_ref().map(io::load);
    if let (Some(_), Some(residual)) = (&call.sum, &residual) {
        x.iter_mut().zip(residual).for_each(|(x, r)| *x += r);
    }
    let mut out = Vec::with_capacity(x.len());
    for (row, x) in x.chunks(call.dim).enumerate() {
        let mut normed = rms_norm(x, weight.as_deref(), call.eps.into()).expect("validation compared the lengths");
        if let (None, Some(residual)) = (&call.sum, &residual) {
            let residual = &residual[row * call.dim..];
            normed.iter_mut().zip(residual).for_each(|(n, r)| *n += r);
        }
        out.extend(normed.iter().map(|n| n * f64::from(call.scale)));
    }
    if let Some(sum) = &call.sum {
        io::store(sum, &x);
    }
    io::store(&call.out, &out);
}
