use super::{check_len, io};
use crate::{Result, ops::all_reduce::Call};

/// The sum over ranks, element by element, in the order of ranks. Does nothing without ranks.
///
/// # Errors
/// `Shape` if ranks have different numbers of elements.
pub fn all_reduce(ranks: &[&[f64]]) -> Result<Vec<f64>> {
    let Some((first, others)) = ranks.split_first() else { return Ok(Vec::new()) };
    let mut sums = first.to_vec();
    for x in others {
        check_len("all_reduce", "ranks", sums.len(), x.len())?;
        sums.iter_mut().zip(*x).for_each(|(sum, x)| *sum += x);
    }
    Ok(sums)
}

pub(crate) fn run(call: &Call) -> Result<()> {
    let Some(peers) = &call.peers else {
        io::store(&call.out, &io::load(&call.x));
        return Ok(());
    };
    peers.wait_for_all()?;
    let inputs: Vec<Vec<f64>> = peers.x.iter().map(io::load).collect();
    // `out` may be `x`, which other ranks still read.
    peers.wait_for_all()?;
    let inputs: Vec<&[f64]> = inputs.iter().map(Vec::as_slice).collect();
    io::store(&call.out, &all_reduce(&inputs)?);
    Ok(())
}
