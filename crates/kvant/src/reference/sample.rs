use super::{
    argmax::{argmax, index},
    io,
};
use crate::ops::{Sample, SampleRow, sample::Call};

/// The parameters of [`sample`]; the fields are those of [`Sample`].
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f64,
    /// At least 1; the number of logits for all.
    pub top_k: usize,
    /// Above 0; 1 for all.
    pub top_p: f64,
    /// 0 for all.
    pub min_p: f64,
}

/// The token that is drawn with the random bits of ids, as [`Sample`] defines; `None` if all logits are NaN.
pub fn sample(logits: &[f64], how: Sampling, noise: impl Fn(usize) -> u32) -> Option<usize> {
    if how.temperature == 0.0 {
        return argmax(logits);
    }
    let rate = |&(id, p): &(usize, f64)| (p / exponential(noise(id)), id);
    let rates = candidates(logits, how).iter().map(rate).collect::<Vec<_>>();
    let largest = rates.into_iter().reduce(|a, b| if b.0 > a.0 || b.0 == a.0 && b.1 < a.1 { b } else { a });
    largest.map(|(_, id)| id)
}

/// −ln(1 − v) of v = (bits + ½) / 2³².
fn exponential(bits: u32) -> f64 {
    -(-(f64::from(bits) + 0.5) / 2f64.powi(32)).ln_1p()
}

/// The candidates in descending order, each with its probability up to a common factor.
pub fn candidates(logits: &[f64], how: Sampling) -> Vec<(usize, f64)> {
    let mut ids: Vec<usize> = (0..logits.len()).filter(|&id| !logits[id].is_nan()).collect();
    // The sort is stable, so equals stay in the order of their ids.
    ids.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).expect("NaN was removed"));
    ids.truncate(how.top_k);
    let Some(&first) = ids.first() else { return Vec::new() };
    let largest = logits[first];
    // The largest logit has p = 1, even if it is infinite.
    let p = |id: usize| if logits[id] == largest { 1.0 } else { ((logits[id] - largest) / how.temperature).exp() };
    let mut candidates: Vec<(usize, f64)> = ids.into_iter().map(|id| (id, p(id))).collect();
    if how.top_p < 1.0 {
        let total: f64 = candidates.iter().map(|c| c.1).sum();
        let mut running = 0.0;
        let reached = candidates.iter().position(|c| {
            running += c.1;
            running >= how.top_p * total
        });
        candidates.truncate(reached.map_or(candidates.len(), |last| last + 1));
    }
    candidates.retain(|c| c.1 >= how.min_p);
    candidates
}

pub(crate) fn run(call: &Call) {
    let logits = io::load(&call.logits);
    let counters = io::load_u32(&call.counter);
    let words = call.rows.as_ref().map(io::load_u32);
    let rows = logits.chunks(call.vocab).zip(counters).enumerate();
    let draw = |(index_of_row, (row, counter)): (usize, (&[f64], u32))| {
        let SampleRow { temperature, top_k, top_p, min_p, seed } = call.how(index_of_row, words.as_deref());
        let how = Sampling { temperature: temperature.into(), top_k, top_p: top_p.into(), min_p: min_p.into() };
        index(sample(row, how, |id| Sample::noise(seed, counter, id as u32)))
    };
    let out: Vec<u32> = rows.map(draw).collect();
    io::store_raw(&call.out, 0, &out);
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Sampling = Sampling { temperature: 1.0, top_k: usize::MAX, top_p: 1.0, min_p: 0.0 };

    fn ids(logits: &[f64], how: Sampling) -> Vec<usize> {
        candidates(logits, how).into_iter().map(|c| c.0).collect()
    }

    #[test]
    fn cuts_apply_in_order() {
        // Probabilities 1/2, 1/4, 1/8, 1/8.
        let logits = [0.25f64.ln(), 0.5f64.ln(), f64::NAN, 0.125f64.ln(), 0.125f64.ln()];
        assert_eq!(ids(&logits, ALL), [1, 0, 3, 4]);
        assert_eq!(ids(&logits, Sampling { top_k: 3, ..ALL }), [1, 0, 3]);
        assert_eq!(ids(&logits, Sampling { top_p: 0.7, ..ALL }), [1, 0]);
        assert_eq!(ids(&logits, Sampling { top_p: 0.8, ..ALL }), [1, 0, 3]);
        // Between the first two only, the first has a share of 2/3.
        assert_eq!(ids(&logits, Sampling { top_k: 2, top_p: 0.6, ..ALL }), [1]);
        assert_eq!(ids(&logits, Sampling { min_p: 0.3, ..ALL }), [1, 0]);
        // At temperature ½ the ratios are 1, 1/4, 1/16.
        assert_eq!(ids(&logits, Sampling { min_p: 0.3, temperature: 0.5, ..ALL }), [1]);
    }

    #[test]
    fn the_largest_rate_is_drawn() {
        let logits = [0.25f64.ln(), 0.5f64.ln(), 0.25f64.ln()];
        // e of these bits is ln 4/3, ln 2 and ln 4.
        let [quarter, half, three] = [1 << 30, 1 << 31, 3 << 30];
        let drawn = |logits: &[f64], how, bits: [u32; 3]| sample(logits, how, |id| bits[id]);
        for (bits, id) in [
            // Rates are p / e: with equal e, the largest p wins.
            ([half; 3], 1),
            // 0.25 / 0.288 is above 0.5 / 0.693, and that is above 0.5 / 1.386.
            ([quarter, half, half], 0),
            ([half, half, quarter], 2),
            ([half, three, three], 0),
            // Among equals, the lower id wins.
            ([quarter, three, quarter], 0),
        ] {
            assert_eq!(drawn(&logits, ALL, bits), Some(id), "{bits:?}");
        }
        // A candidate that a cut removed is not drawn.
        assert_eq!(drawn(&logits, Sampling { top_k: 2, ..ALL }, [half, three, 0]), Some(0));
        assert_eq!(drawn(&logits, Sampling { temperature: 0.0, ..ALL }, [0; 3]), Some(1));
        assert_eq!(drawn(&[f64::NAN; 3], ALL, [0; 3]), None);
        assert_eq!(drawn(&[f64::NEG_INFINITY, f64::INFINITY, 0.0], ALL, [0, u32::MAX, 0]), Some(1));
    }
}
