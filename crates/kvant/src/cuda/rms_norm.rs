use super::{all_reduce, headers};
use crate::{
    DType, Result,
    gpu::{
        Builder, LANES, Launch, Source,
        rms_norm::{LAYOUTS, launch, warps_of_row},
    },
    group::{Exchange, Peers},
    ops::rms_norm::{Call, NAME},
};

static SOURCE: Source =
    Source { name: "rms_norm.cu", text: include_str!("rms_norm.cu"), headers: headers::ALL, layouts: LAYOUTS };

/// Warps of a block that has one row at most: their registers hold 8192 elements.
const MAX_WARPS: usize = 16;
/// Groups of four elements that a thread holds.
const MAX_HELD: usize = 4;

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let peers = super::peers(call.peers.as_ref(), NAME, b)?;
    let at_once = peers.filter(|(_, exchange)| sums_at_once(call, exchange));
    if at_once.is_none()
        && let Some(sum) = call.all_reduce()
    {
        all_reduce::build(&sum, b)?;
    }
    let groups = groups(call);
    let launch = launch(call, &SOURCE, MAX_WARPS)?
        .constant("HELD", groups.min(MAX_HELD) as u32)
        .constant("BEYOND", groups > MAX_HELD);
    b.push(with_peers(launch, at_once).reads_ahead(&[1, 5, 6, 7, 8]))
}

/// Groups of four elements of a row for each thread that shares it.
fn groups(call: &Call) -> usize {
    call.dim.div_ceil(4 * LANES * warps_of_row(call.dim, MAX_WARPS))
}

/// Whether the norm's kernel adds over ranks: four elements of x are one message of 8 bytes, all messages fit into the
/// exchange, and a thread holds its elements.
fn sums_at_once(call: &Call, exchange: &Exchange) -> bool {
    let are_messages = call.x.dtype() != DType::F32 && call.dim.is_multiple_of(4);
    let is_aligned = call.x.byte_offset().is_multiple_of(8);
    are_messages && is_aligned && call.x.elements() / 4 <= exchange.capacity() && groups(call) <= MAX_HELD
}

fn with_peers(launch: Launch, peers: Option<(&Peers, &Exchange)>) -> Launch {
    let launch = launch.constant("RANKS", peers.map_or(1, |(peers, _)| peers.x.len()) as u32);
    match peers {
        Some((peers, exchange)) => {
            super::bind_exchange(launch.constant("CAPACITY", exchange.capacity() as u32), 15, peers, exchange)
        }
        None => launch.constant("CAPACITY", 0),
    }
}
