use crate::{
    Result,
    cuda::{affine::Parts, headers, vectors},
    gpu::{Builder, Launch, Params, Source, params},
    ops::embed::{Call, NAME},
};

params! {
    pub(crate) struct EmbedParams {
        pub vocab: u32,
        pub dim: u32,
        pub tokens: u32,
        pub scale: f32,
    }
}

static SOURCE: Source = Source {
    name: "embed.cu",
    text: include_str!("embed.cu"),
    headers: headers::AFFINE,
    layouts: &[EmbedParams::layout],
};

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let (dim, tokens) = (call.dims.inputs, call.ids.elements());
    let params = EmbedParams {
        vocab: Launch::uint(NAME, "table", call.dims.outputs)?,
        dim: Launch::uint(NAME, "table", dim)?,
        tokens: Launch::uint(NAME, "ids", tokens)?,
        scale: call.scale,
    };
    let table = Parts::of(&call.table, dim);
    // Four times as many elements per thread when the table is affine.
    let (groups, threads) = vectors::grid(tokens, if table.bits == 0 { dim } else { dim / 4 });
    b.push(
        Launch::new(NAME, &SOURCE, "embed")
            .constant("TABLE_DTYPE", table.dtype)
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("BITS", table.bits)
            .constant("GROUP", table.group)
            .constant("ALIGNED", table.aligned)
            .constant("OUT_ALIGNED", dim.is_multiple_of(4) && vectors::aligned4(&call.out))
            .read(0, table.weight)
            .read_if(1, table.scales)
            .read_if(2, table.biases)
            .read(3, &call.ids)
            .write(4, &call.out)
            .params(5, &params)
            .grid(groups, threads),
    )
}
