use crate::{
    Result,
    cuda::{headers, vectors},
    gpu::{Builder, Launch, Params, Source, params},
    ops::{
        Activation,
        gate::{Call, NAME, OwnedColumns},
    },
};

params! {
    pub(crate) struct GateParams {
        pub rows: u32,
        pub dim: u32,
        pub gate_start: u32,
        pub gate_width: u32,
        pub up_start: u32,
        pub up_width: u32,
    }
}

static SOURCE: Source = Source {
    name: "gate.cu",
    text: include_str!("gate.cu"),
    headers: headers::VECTORS,
    layouts: &[GateParams::layout],
};

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let Call { gate, up, activation, out, rows, dim } = call;
    let uint = |arg, value| Launch::uint(NAME, arg, value);
    let params = GateParams {
        rows: uint("out", *rows)?,
        dim: uint("out", *dim)?,
        gate_start: uint("gate", gate.start)?,
        gate_width: uint("gate", gate.width)?,
        up_start: uint("up", up.start)?,
        up_width: uint("up", up.width)?,
    };
    let fours = |side: &OwnedColumns| {
        vectors::aligned4(&side.tensor) && side.start.is_multiple_of(4) && side.width.is_multiple_of(4)
    };
    let aligned = dim.is_multiple_of(4) && vectors::aligned4(out) && fours(gate) && fours(up);
    let (groups, threads) = vectors::grid(*rows, *dim);
    b.push(
        Launch::new(NAME, &SOURCE, "gate")
            .constant("GATE_DTYPE", gate.tensor.dtype())
            .constant("UP_DTYPE", up.tensor.dtype())
            .constant("OUT_DTYPE", out.dtype())
            .constant("GELU", *activation == Activation::GeluTanh)
            .constant("ALIGNED", aligned)
            .read(0, &gate.tensor)
            .read(1, &up.tensor)
            .write(2, out)
            .params(3, &params)
            .grid(groups, threads),
    )
}
