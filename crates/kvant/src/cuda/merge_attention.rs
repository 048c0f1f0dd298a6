use super::{
    all_reduce::{MEETING_BLOCKS, MEETING_THREADS},
    headers,
};
use crate::{
    Result,
    gpu::{Builder, Launch, Params, Source, params, rows_aligned4},
    ops::merge_attention::{Call, NAME},
};

params! {
    pub(crate) struct MergeAttentionParams {
        pub fours: u32,
        pub head_dim: u32,
        pub heads: u32,
        pub own_heads: u32,
        pub first_head: u32,
        pub rank: u32,
    }
}

static SOURCE: Source = Source {
    name: "merge_attention.cu",
    text: include_str!("merge_attention.cu"),
    headers: headers::ALL,
    layouts: &[MergeAttentionParams::layout],
};

/// Ranks have tensors of one shape and offset, so that all choose the same grid.
pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let uint = |arg, value| Launch::uint(NAME, arg, value);
    let peers = super::peers(call.peers.as_ref(), NAME, b)?;
    let fours = call.tokens * call.own_heads * call.head_dim.div_ceil(4);
    let params = MergeAttentionParams {
        fours: uint("out", fours)?,
        head_dim: uint("x", call.head_dim)?,
        heads: uint("x", call.heads)?,
        own_heads: uint("out", call.own_heads)?,
        first_head: uint("x", call.first_head)?,
        rank: peers.map_or(0, |(peers, _)| peers.rank as u32),
    };
    let launch = Launch::new(NAME, &SOURCE, "merge_attention")
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("ALIGNED", rows_aligned4(call.head_dim, [&call.x, &call.out]))
        .constant("SINKS", call.sinks.is_some())
        .constant("RANKS", peers.map_or(1, |(peers, _)| peers.x.len()) as u32)
        .params(0, &params)
        .read_if(1, call.sinks.as_ref())
        .write(2, &call.out);
    let parts = call.parts().zip(0..);
    let launch = parts.fold(launch, |launch, ((x, ends), part)| launch.read(3 + part, x).read(11 + part, ends));
    let launch = match peers {
        Some((peers, exchange)) => super::bind_exchange(launch, 19, peers, exchange),
        None => launch,
    };
    let blocks = fours.div_ceil(MEETING_THREADS).clamp(1, MEETING_BLOCKS);
    b.push(launch.grid([blocks, 1, 1], [MEETING_THREADS, 1, 1]))
}
