use super::{check_len, io};
use crate::{
    Result,
    ops::moe::{combine, route},
};

/// The chosen experts and their weights: the `top_k` largest logits in falling order (the lower id first among
/// equals, NaN last), the softmax over just those, times each one's `expert_scale`. Without `normalise`, the softmax is
/// over all logits.
///
/// # Errors
/// `Shape` when there is not one scale per logit.
pub fn moe_route(
    logits: &[f64],
    expert_scale: Option<&[f64]>,
    normalise: bool,
    top_k: usize,
) -> Result<Vec<(usize, f64)>> {
    check_len("moe_route", "expert_scale", logits.len(), expert_scale.map_or(logits.len(), <[f64]>::len))?;
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    let rank = |id: usize| if logits[id].is_nan() { (1, 0.0) } else { (0, -logits[id]) };
    // The sort is stable, so equals stay in the order of their ids.
    ids.sort_by(|&a, &b| rank(a).partial_cmp(&rank(b)).expect("NaN has been replaced"));
    ids.truncate(top_k);
    let Some(&first) = ids.first() else { return Ok(Vec::new()) };
    let exp = |id: usize| (logits[id] - logits[first]).exp();
    let sum: f64 = if normalise { ids.iter().map(|&id| exp(id)).sum() } else { (0..logits.len()).map(exp).sum() };
    Ok(ids.iter().map(|&id| (id, exp(id) / sum * expert_scale.map_or(1.0, |s| s[id]))).collect())
}

/// Σⱼ weights\[j\] · row j of x, where x holds one row per weight.
///
/// # Errors
/// `Shape` when x is not a whole number of rows.
pub fn moe_combine(x: &[f64], weights: &[f64]) -> Result<Vec<f64>> {
    let dim = x.len().checked_div(weights.len()).unwrap_or(0);
    check_len("moe_combine", "x", dim * weights.len(), x.len())?;
    Ok((0..dim).map(|i| weights.iter().enumerate().map(|(j, w)| w * x[j * dim + i]).sum()).collect())
}

pub(crate) fn run_route(call: &route::Call) {
    let logits = io::load(&call.logits);
    let scale = call.expert_scale.as_ref().map(io::load);
    let chosen = (0..call.tokens).flat_map(|token| {
        let logits = &logits[token * call.experts..(token + 1) * call.experts];
        moe_route(logits, scale.as_deref(), call.normalise, call.top_k).expect("validation compared the lengths")
    });
    let (ids, weights): (Vec<u32>, Vec<f64>) = chosen.map(|(id, weight)| (id as u32, weight)).unzip();
    io::store_raw(&call.ids, 0, &ids);
    io::store(&call.weights, &weights);
}

pub(crate) fn run_combine(call: &combine::Call) {
    let (x, weights) = (io::load(&call.x), io::load(&call.weights));
    let rows = (0..call.tokens).flat_map(|token| {
        let choices = token * call.top_k..(token + 1) * call.top_k;
        let x = &x[choices.start * call.dim..choices.end * call.dim];
        moe_combine(x, &weights[choices]).expect("x has a row for each choice")
    });
    let mut out: Vec<f64> = rows.collect();
    // A sum over no choices is zero.
    out.resize(call.tokens * call.dim, 0.0);
    io::store(&call.out, &out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_go_by_id_and_weights_sum_to_one() {
        let chosen = moe_route(&[1.0, f64::NAN, 3.0, 1.0, 3.0, -5.0], None, true, 4).unwrap();
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [2, 4, 0, 3]);
        assert!((chosen.iter().map(|c| c.1).sum::<f64>() - 1.0).abs() < 1e-15);
        assert_eq!(chosen[0].1, chosen[1].1);
        let scaled = moe_route(&[0.0, 0.0], Some(&[2.0, 6.0]), true, 2).unwrap();
        assert_eq!(scaled, [(0, 1.0), (1, 3.0)]);
        let of_all = moe_route(&[0.0, 3f64.ln()], None, false, 1).unwrap();
        assert!(of_all[0].0 == 1 && (of_all[0].1 - 0.75).abs() < 1e-15, "{of_all:?}");
    }
}
