//! The launches of `all_reduce`: one for small messages, and for devices that are no group; one for large messages.

use super::{THREADS, headers};
use crate::{
    Result, Tensor,
    gpu::{Builder, Launch, Params, Source, Use, params},
    group::{Exchange, Peers},
    ops::all_reduce::{Call, NAME},
};

params! {
    pub(crate) struct AllReduceSmallParams {
        pub elements: u32,
        pub messages: u32,
        pub capacity: u32,
        pub rank: u32,
    }

    pub(crate) struct AllReduceLargeParams {
        pub first: u32,
        pub end: u32,
        pub rank: u32,
    }
}

static SMALL: Source = Source {
    name: "all_reduce_small.cu",
    text: include_str!("all_reduce_small.cu"),
    headers: headers::ALL,
    layouts: &[AllReduceSmallParams::layout],
};

static LARGE: Source = Source {
    name: "all_reduce_large.cu",
    text: include_str!("all_reduce_large.cu"),
    headers: headers::ALL,
    layouts: &[AllReduceLargeParams::layout],
};

/// Threads of a block of the kernels that meet their peers.
pub(super) const MEETING_THREADS: usize = 512;
/// The largest number of blocks of such a kernel: a link is busy with fewer threads than a GPU has.
pub(super) const MEETING_BLOCKS: usize = 64;

/// Ranks have tensors of one shape and offset, so that all choose the same kernel and grid.
pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let Some((peers, exchange)) = super::peers(call.peers.as_ref(), NAME, b)? else {
        return b.push(small(call, None)?);
    };
    if messages(call) <= exchange.capacity() {
        return b.push(small(call, Some((peers, exchange)))?);
    }
    b.push(large(call, peers, exchange)?)
}

/// Elements of `x` in `bytes`.
fn elements_of(bytes: usize, call: &Call) -> usize {
    bytes / call.x.dtype().size()
}

/// Whether vectors of `per` elements of `x`, and of `out`, begin at multiples of their size.
fn is_aligned(call: &Call, per: usize) -> bool {
    let begins = |tensor: &Tensor| tensor.byte_offset().is_multiple_of((per * tensor.dtype().size()).min(16));
    call.elements.is_multiple_of(per) && begins(&call.x) && begins(&call.out)
}

/// Messages of 8 bytes.
fn messages(call: &Call) -> usize {
    call.elements.div_ceil(elements_of(8, call))
}

fn constants(launch: Launch, call: &Call, ranks: usize, per: usize) -> Launch {
    launch
        .constant("X_DTYPE", call.x.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("RANKS", ranks as u32)
        .constant("ALIGNED", is_aligned(call, per))
}

fn small(call: &Call, peers: Option<(&Peers, &Exchange)>) -> Result<Launch> {
    let messages = messages(call);
    let params = AllReduceSmallParams {
        elements: Launch::uint(NAME, "x", call.elements)?,
        messages: Launch::uint(NAME, "x", messages)?,
        capacity: peers.map_or(0, |(_, exchange)| exchange.capacity() as u32),
        rank: peers.map_or(0, |(peers, _)| peers.rank as u32),
    };
    let launch = Launch::new(NAME, &SMALL, "all_reduce_small");
    let launch = constants(launch, call, peers.map_or(1, |(peers, _)| peers.x.len()), elements_of(8, call))
        .read(0, &call.x)
        .write(1, &call.out)
        .params(2, &params)
        .grid([messages.div_ceil(THREADS), 1, 1], [THREADS, 1, 1]);
    Ok(match peers {
        Some((peers, exchange)) => super::bind_exchange(launch, 3, peers, exchange),
        None => launch,
    })
}

fn large(call: &Call, peers: &Peers, exchange: &Exchange) -> Result<Launch> {
    let (ranks, per) = (peers.x.len(), elements_of(16, call));
    // Whole lines of memory, of 128 bytes or more.
    let part = call.elements.div_ceil(ranks).next_multiple_of(64);
    let limit = |rank: usize| Launch::uint(NAME, "x", (rank * part).min(call.elements));
    let params =
        AllReduceLargeParams { first: limit(peers.rank)?, end: limit(peers.rank + 1)?, rank: peers.rank as u32 };
    let blocks = part.div_ceil(per * MEETING_THREADS).clamp(1, MEETING_BLOCKS);
    let launch = Launch::new(NAME, &LARGE, "all_reduce_large");
    let launch = constants(launch, call, ranks, per).params(0, &params);
    let launch = super::bind_exchange(launch, 1, peers, exchange);
    let in_place = std::sync::Arc::ptr_eq(call.x.storage(), call.out.storage());
    let reads = if in_place { Use::ReadWrite } else { Use::Read };
    let launch = peers.x.iter().zip(11..).fold(launch, |launch, (x, index)| launch.tensor(index, x, reads));
    let launch = peers.out.iter().zip(19..).fold(launch, |launch, (out, index)| launch.write(index, out));
    Ok(launch.grid([blocks, 1, 1], [MEETING_THREADS, 1, 1]))
}
