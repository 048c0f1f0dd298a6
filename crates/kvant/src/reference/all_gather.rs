use super::io;
use crate::{Result, Tensor, ops::all_gather::Call};

pub(crate) fn run(call: &Call) -> Result<()> {
    let Some(peers) = &call.peers else {
        gather(std::slice::from_ref(&call.x), call);
        return Ok(());
    };
    peers.wait_for_all()?;
    gather(&peers.x, call);
    // Later calls may write `x`.
    peers.wait_for_all()
}

/// Copies the rows of each rank into its columns.
fn gather(ranks: &[Tensor], call: &Call) {
    for (rank, x) in ranks.iter().enumerate() {
        for row in 0..call.rows {
            let to = (row * ranks.len() + rank) * call.columns;
            io::copy_elements(x, row * call.columns, &call.out, to, call.columns);
        }
    }
}
