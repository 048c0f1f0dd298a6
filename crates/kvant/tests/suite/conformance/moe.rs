//! moe_route and moe_combine against the reference.

use crate::common::{FLOATS, Out, Rng, conform, input, run};
use kvant::{
    DType,
    ops::{self, MoeCombine, MoeRoute},
};

#[test]
fn moe_route() {
    for (tokens, experts, top_k) in [(0, 4, 2), (1, 1, 1), (5, 4, 4), (9, 8, 2), (33, 128, 8), (3, 65, 7), (2, 50, 37)]
    {
        for dtype in FLOATS {
            for (scaled, normalise) in [(false, true), (true, true), (true, false)] {
                conform(
                    format!(
                        "moe_route T {tokens}, E {experts}, top {top_k}, {dtype}, scaled {scaled}, normalised {normalise}"
                    ),
                    |device| {
                        let mut rng = Rng::new(experts as u64);
                        // In the coarse dtypes there are equals, and then the lower id comes first.
                        let logits = input(device, dtype, &rng.normals(tokens * experts), &[tokens, experts])?;
                        let scale = input(device, DType::F32, &rng.normals(experts), &[experts])?;
                        let ids = Out::new(device, DType::U32, &[tokens, top_k])?;
                        let weights = Out::new(device, DType::F32, &[tokens, top_k])?;
                        let args = MoeRoute::new(&logits, &ids.tensor, &weights.tensor);
                        let args = args.expert_scale(scaled.then_some(&scale)).normalise(normalise);
                        run(device, |enc| ops::moe_route(enc, &args))?;
                        Ok(vec![ids.same("ids")?, weights.close("weights")?])
                    },
                );
            }
        }
    }
}

#[test]
fn moe_combine() {
    for (tokens, top_k, dim) in [(0, 2, 3), (1, 1, 1), (1, 8, 65), (5, 2, 130), (33, 4, 64)] {
        for x_type in FLOATS {
            for out_type in FLOATS {
                conform(format!("moe_combine T {tokens}, top {top_k}, N {dim}, {x_type} -> {out_type}"), |device| {
                    let mut rng = Rng::new(dim as u64);
                    let rows = tokens * top_k;
                    let x = input(device, x_type, &rng.normals(rows * dim), &[rows, dim])?;
                    let weights = input(device, DType::F32, &rng.normals(rows), &[tokens, top_k])?;
                    let out = Out::new(device, out_type, &[tokens, dim])?;
                    run(device, |enc| ops::moe_combine(enc, &MoeCombine::new(&x, &weights, &out.tensor)))?;
                    Ok(vec![out.close("out")?])
                });
            }
        }
    }
}
