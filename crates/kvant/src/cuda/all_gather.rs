use super::{
    all_reduce::{MEETING_BLOCKS, MEETING_THREADS},
    copy, headers,
};
use crate::{
    Result,
    gpu::{Builder, Launch, Params, Source, params},
    ops::all_gather::{Call, NAME},
};

params! {
    pub(crate) struct AllGatherParams {
        pub units: u32,
        pub row_units: u32,
        pub rank: u32,
    }
}

static SOURCE: Source = Source {
    name: "all_gather.cu",
    text: include_str!("all_gather.cu"),
    headers: headers::ALL,
    layouts: &[AllGatherParams::layout],
};

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let Some((peers, exchange)) = super::peers(call.peers.as_ref(), NAME, b)? else {
        return copy::build(&call.of_one_rank(), b);
    };
    let row_bytes = call.columns * call.x.dtype().size();
    let fits = |unit: usize| {
        [row_bytes, call.x.byte_offset(), call.out.byte_offset()].into_iter().all(|bytes| bytes.is_multiple_of(unit))
    };
    let unit = [16, 8, 4, 2].into_iter().find(|&unit| fits(unit)).unwrap_or(1);
    let units = call.x.bytes() / unit;
    let params = AllGatherParams {
        units: Launch::uint(NAME, "x", units)?,
        row_units: Launch::uint(NAME, "x", row_bytes / unit)?,
        rank: peers.rank as u32,
    };
    let blocks = units.div_ceil(MEETING_THREADS).clamp(1, MEETING_BLOCKS);
    let launch = Launch::new(NAME, &SOURCE, "all_gather")
        .constant("UNIT", unit as u32)
        .constant("RANKS", peers.x.len() as u32)
        .read(0, &call.x)
        .params(1, &params);
    let launch = super::bind_exchange(launch, 2, peers, exchange);
    let launch = peers.out.iter().zip(12..).fold(launch, |launch, (out, index)| launch.write(index, out));
    b.push(launch.grid([blocks, 1, 1], [MEETING_THREADS, 1, 1]))
}
