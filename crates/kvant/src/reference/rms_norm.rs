use super::{all_reduce, check_len, gate::activate, io, moe::moe_combine};
use crate::{
    Result, Tensor,
    ops::{
        Activation,
        rms_norm::{Addition, Call},
    },
};

/// x · weight / √(mean x² + eps); without a weight, ones.
///
/// # Errors
/// `Shape` if the weight does not have the length of x.
pub fn rms_norm(x: &[f64], weight: Option<&[f64]>, eps: f64) -> Result<Vec<f64>> {
    check_len("rms_norm", "weight", x.len(), weight.map_or(x.len(), <[f64]>::len))?;
    let mean_square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let r = (mean_square + eps).sqrt().recip();
    Ok(x.iter().enumerate().map(|(i, x)| x * r * weight.map_or(1.0, |w| w[i])).collect())
}

/// The weighted sum of the rows of each token.
fn weighted_sums(x: &[f64], weights: &[f64], call: &Call) -> Vec<f64> {
    let terms = call.terms();
    let sums = (0..call.rows).flat_map(|row| {
        let choices = row * terms..(row + 1) * terms;
        let x = &x[choices.start * call.dim..choices.end * call.dim];
        moe_combine(x, &weights[choices]).expect("x has a row for each weight")
    });
    let mut sums: Vec<f64> = sums.collect();
    // An empty sum is zero.
    sums.resize(call.rows * call.dim, 0.0);
    sums
}

pub(crate) fn run(call: &Call) -> Result<()> {
    if let Some(sum) = call.all_reduce() {
        all_reduce::run(&sum)?;
    }
    let norm = |x: &[f64], weight: Option<&Tensor>, eps: f32| -> Vec<f64> {
        let weight = weight.map(io::load);
        let rows = x.chunks(call.dim);
        let normed = |row| rms_norm(row, weight.as_deref(), eps.into()).expect("validation compared the lengths");
        rows.flat_map(normed).collect()
    };
    let sum = |a: Vec<f64>, b: Vec<f64>| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
    let scaled = |x: Vec<f64>, scale: f32| -> Vec<f64> { x.iter().map(|x| x * f64::from(scale)).collect() };

    let mut x = match &call.combine {
        Some(combine) => weighted_sums(&io::load(&call.x), &io::load(combine), call),
        None => io::load(&call.x),
    };
    let mut residual = call.residual.as_ref().map(io::load);
    match &call.add {
        Addition::After => {}
        Addition::Normed { weight } => residual = residual.map(|residual| norm(&residual, weight.as_ref(), call.eps)),
        Addition::Before { sum: to } => {
            x = sum(x, residual.take().expect("there is a residual to add"));
            io::store(to, &x);
        }
    }
    let normed = norm(&x, call.weight.as_ref(), call.eps);
    let out = match residual {
        Some(residual) => sum(normed, residual),
        None => normed,
    };
    let mut out = scaled(out, call.scale);
    if let Some(gate) = &call.gate {
        let gated = out.iter().zip(io::load(gate)).map(|(x, gate)| x * activate(Activation::Silu, gate));
        out = gated.collect();
    }
    io::store(&call.out, &out);
    let stored = io::load(&call.out);
    for next in call.nexts() {
        let normed = norm(&stored, next.weight.as_ref(), call.next_eps);
        io::store(&next.out, &scaled(normed, next.scale));
    }
    Ok(())
}
