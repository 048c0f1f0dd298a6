use super::{check_len, io};
use crate::{
    Error, Result,
    ops::{
        ExpertGroups, ExpertScores,
        moe::{combine, route},
    },
};

/// The options of [`moe_route`]; see [`MoeRoute`](crate::ops::MoeRoute).
#[derive(Clone, Copy, Debug)]
pub struct Routing<'a> {
    /// The scores of the experts.
    pub scores: ExpertScores,
    /// Added to the scores for the choice.
    pub bias: Option<&'a [f64]>,
    /// The groups that are chosen first.
    pub groups: Option<ExpertGroups>,
    /// Multiplies each expert's weight.
    pub expert_scale: Option<&'a [f64]>,
    /// Whether the weights are divided by their sum.
    pub normalise: bool,
    /// The minimum of that sum.
    pub min_sum: f64,
    /// Added to that sum.
    pub epsilon: f64,
    /// Multiplies all weights.
    pub scale: f64,
}

impl Default for Routing<'_> {
    fn default() -> Self {
        Routing {
            scores: ExpertScores::Softmax,
            bias: None,
            groups: None,
            expert_scale: None,
            normalise: true,
            min_sum: 0.0,
            epsilon: 0.0,
            scale: 1.0,
        }
    }
}

impl Routing<'_> {
    /// Whether the weights are the softmax over the chosen or over all logits, without other scores.
    fn is_plain(&self) -> bool {
        let is_softmax = self.scores == ExpertScores::Softmax;
        let numbers = [self.min_sum, self.epsilon, self.scale];
        is_softmax && self.bias.is_none() && self.groups.is_none() && numbers == [0.0, 0.0, 1.0]
    }
}

/// The chosen experts and their weights: the `top_k` largest logits in descending order (among equals the lower id
/// first, NaN last), the softmax over these logits, times each expert's `expert_scale`. Without `normalise`, the
/// softmax is over all logits. For scores, their bias and groups see [`MoeRoute`](crate::ops::MoeRoute).
///
/// # Errors
/// `Shape` if the number of scales or biases is not that of the logits, `Value` if the groups do not divide the logits.
pub fn moe_route(logits: &[f64], routing: &Routing, top_k: usize) -> Result<Vec<(usize, f64)>> {
    for (arg, values) in [("expert_scale", routing.expert_scale), ("bias", routing.bias)] {
        check_len("moe_route", arg, logits.len(), values.map_or(logits.len(), <[f64]>::len))?;
    }
    let scores = scores(routing.scores, logits);
    let corrected: Vec<f64> = match routing.bias {
        Some(bias) => scores.iter().zip(bias).map(|(score, bias)| score + bias).collect(),
        None => scores.clone(),
    };
    let candidates = match routing.groups {
        Some(groups) => candidates(&corrected, groups)?,
        None => (0..logits.len()).collect(),
    };
    // Scores increase with logits, but rounding can give different logits equal scores.
    let ids = largest(if routing.bias.is_some() { &corrected } else { logits }, candidates, top_k);
    let scores = match (ids.first(), routing.is_plain() && routing.normalise) {
        (Some(&first), true) => logits.iter().map(|logit| (logit - logits[first]).exp()).collect(),
        _ => scores,
    };
    let sum: f64 = ids.iter().map(|&id| scores[id]).sum();
    // The comparison leaves a NaN unchanged.
    let sum = if sum < routing.min_sum { routing.min_sum } else { sum };
    let divisor = if routing.normalise { sum + routing.epsilon } else { 1.0 };
    let factor = |id: usize| routing.scale * routing.expert_scale.map_or(1.0, |scale| scale[id]);
    Ok(ids.into_iter().map(|id| (id, scores[id] / divisor * factor(id))).collect())
}

fn scores(kind: ExpertScores, logits: &[f64]) -> Vec<f64> {
    match kind {
        ExpertScores::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
        ExpertScores::Softmax => {
            let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let exponentials = logits.iter().map(|logit| (logit - largest).exp());
            let sum: f64 = exponentials.clone().sum();
            exponentials.map(|exponential| exponential / sum).collect()
        }
    }
}

/// The experts of the chosen groups: the groups with the largest sums of their two best experts.
fn candidates(corrected: &[f64], groups: ExpertGroups) -> Result<Vec<usize>> {
    let experts = corrected.len();
    if groups.count == 0 || !experts.is_multiple_of(groups.count) {
        let (expected, got) = (format!("a divisor of {experts}"), groups.count.to_string());
        return Err(Error::Value { op: "moe_route", arg: "groups.count", expected, got });
    }
    let size = experts / groups.count;
    let of_group = |group: usize| (group * size..(group + 1) * size).collect();
    let value = |group| largest(corrected, of_group(group), 2).into_iter().map(|id| corrected[id]).sum();
    let values: Vec<f64> = (0..groups.count).map(value).collect();
    let mut chosen = largest(&values, (0..groups.count).collect(), groups.chosen);
    chosen.sort_unstable();
    Ok(chosen.into_iter().flat_map(of_group).collect())
}

/// The ids of the largest values in descending order; among equals the lower id is first, and NaN is last. `ids` is
/// ascending.
fn largest(values: &[f64], mut ids: Vec<usize>, count: usize) -> Vec<usize> {
    let rank = |id: usize| if values[id].is_nan() { (1, 0.0) } else { (0, -values[id]) };
    // The sort is stable, so equals stay in the order of their ids.
    ids.sort_by(|&a, &b| rank(a).partial_cmp(&rank(b)).expect("NaN has been replaced"));
    ids.truncate(count);
    ids
}

/// Σⱼ weights\[j\] · row j of x. x has one row per weight.
///
/// # Errors
/// `Shape` if x is not a whole number of rows.
pub fn moe_combine(x: &[f64], weights: &[f64]) -> Result<Vec<f64>> {
    let dim = x.len().checked_div(weights.len()).unwrap_or(0);
    check_len("moe_combine", "x", dim * weights.len(), x.len())?;
    Ok((0..dim).map(|i| weights.iter().enumerate().map(|(j, w)| w * x[j * dim + i]).sum()).collect())
}

pub(crate) fn run_route(call: &route::Call) {
    let logits = io::load(&call.logits);
    let [scale, bias] = [&call.expert_scale, &call.bias].map(|tensor| tensor.as_ref().map(io::load));
    let rule = call.rule;
    let routing = Routing {
        scores: rule.scores,
        bias: bias.as_deref(),
        groups: rule.groups,
        expert_scale: scale.as_deref(),
        normalise: rule.normalise,
        min_sum: rule.min_sum.into(),
        epsilon: rule.epsilon.into(),
        scale: rule.scale.into(),
    };
    let chosen = (0..call.tokens).flat_map(|token| {
        let logits = &logits[token * call.experts..(token + 1) * call.experts];
        moe_route(logits, &routing, call.top_k).expect("validation compared the lengths")
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
    // An empty sum is zero.
    out.resize(call.tokens * call.dim, 0.0);
    if let Some(added) = &call.added {
        let weights = call.added_weights.as_ref().map(io::load);
        for (i, (out, added)) in out.iter_mut().zip(io::load(added)).enumerate() {
            *out += weights.as_ref().map_or(1.0, |weights| weights[i / call.dim]) * added;
        }
    }
    io::store(&call.out, &out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn among_equals_the_lower_id_is_first_and_weights_sum_to_one() {
        let plain = Routing::default();
        let chosen = moe_route(&[1.0, f64::NAN, 3.0, 1.0, 3.0, -5.0], &plain, 4).unwrap();
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [2, 4, 0, 3]);
        assert!((chosen.iter().map(|c| c.1).sum::<f64>() - 1.0).abs() < 1e-15);
        assert_eq!(chosen[0].1, chosen[1].1);
        let scaled = moe_route(&[0.0, 0.0], &Routing { expert_scale: Some(&[2.0, 6.0]), ..plain }, 2).unwrap();
        assert_eq!(scaled, [(0, 1.0), (1, 3.0)]);
        let of_all = moe_route(&[0.0, 3f64.ln()], &Routing { normalise: false, ..plain }, 1).unwrap();
        assert!(of_all[0].0 == 1 && (of_all[0].1 - 0.75).abs() < 1e-15, "{of_all:?}");
    }

    /// Sigmoids of 0, ln 3 and -ln 3 are 1/2, 3/4 and 1/4.
    #[test]
    fn a_bias_affects_the_choice_only() {
        let three = 3f64.ln();
        let routing =
            Routing { scores: ExpertScores::Sigmoid, bias: Some(&[0.0, 0.0, 0.75]), scale: 3.0, ..Routing::default() };
        let chosen = moe_route(&[0.0, three, -three], &routing, 2).unwrap();
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [2, 1]);
        assert!((chosen[0].1 - 0.75).abs() < 1e-15 && (chosen[1].1 - 2.25).abs() < 1e-15, "{chosen:?}");
        let raw = moe_route(&[0.0, three, -three], &Routing { normalise: false, ..routing }, 2).unwrap();
        assert!((raw[0].1 - 0.75).abs() < 1e-15 && (raw[1].1 - 2.25).abs() < 1e-15, "{raw:?}");
        let floored = moe_route(&[0.0, three, -three], &Routing { min_sum: 1.5, epsilon: 0.5, ..routing }, 2).unwrap();
        assert!((floored[0].1 - 0.375).abs() < 1e-15, "{floored:?}");
    }

    /// The largest score is in group 0, and the largest sum of two in group 1.
    #[test]
    fn groups_are_ranked_by_their_best_two() {
        let groups = Some(ExpertGroups { count: 2, chosen: 1 });
        let routing = Routing { scores: ExpertScores::Sigmoid, groups, ..Routing::default() };
        let chosen = moe_route(&[2.0, -9.0, -9.0, 1.0, 1.0, 0.0], &routing, 2).unwrap();
        assert_eq!(chosen, [(3, 0.5), (4, 0.5)]);
        let of_equals = moe_route(&[1.0, f64::NAN, f64::NAN, 1.0, 2.0, 0.0], &routing, 1).unwrap();
        assert_eq!(of_equals[0].0, 4, "a group with a NaN in its sum comes last");
    }
}
