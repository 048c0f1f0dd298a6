use super::{check_len, io};
use crate::{Result, group::Peers, ops::merge_attention::Call};

/// Merges results of attention over disjoint keys, each with its end (log2 of the sum of its weights), and a sink.
///
/// # Errors
/// `Shape` if the results have different lengths.
pub fn merge_attention(results: &[(&[f64], f64)], sink: Option<f64>) -> Result<Vec<f64>> {
    let dim = results.first().map_or(0, |(result, _)| result.len());
    for (result, _) in results {
        check_len("merge_attention", "results", dim, result.len())?;
    }
    let sink = sink.map(|sink| sink * std::f64::consts::LOG2_E);
    let highest = results.iter().map(|(_, end)| *end).chain(sink).fold(f64::NEG_INFINITY, f64::max);
    if highest == f64::NEG_INFINITY {
        return Ok(vec![0.0; dim]);
    }
    let weight = |end: f64| (end - highest).exp2();
    let sum: f64 = results.iter().map(|(_, end)| *end).chain(sink).map(weight).sum();
    let seen = || results.iter().filter(|(_, end)| *end > f64::NEG_INFINITY);
    Ok((0..dim).map(|i| seen().map(|(result, end)| weight(*end) * result[i]).sum::<f64>() / sum).collect())
}

pub(crate) fn run(call: &Call) -> Result<()> {
    let wait = || call.peers.as_ref().map_or(Ok(()), Peers::wait_for_all);
    wait()?;
    let parts: Vec<[Vec<f64>; 2]> = call.parts().map(|(x, ends)| [io::load(x), io::load(ends)]).collect();
    // The other ranks must have read this rank's result before it changes.
    wait()?;
    let (sinks, dim) = (call.sinks.as_ref().map(io::load), call.head_dim);
    let mut out = Vec::with_capacity(call.out.elements());
    for row in 0..call.tokens * call.own_heads {
        let at = call.part_row(row);
        let results: Vec<_> = parts.iter().map(|[x, ends]| (&x[at * dim..(at + 1) * dim], ends[at])).collect();
        out.extend(merge_attention(&results, sinks.as_ref().map(|sinks| sinks[row % call.own_heads]))?);
    }
    io::store(&call.out, &out);
    Ok(())
}
