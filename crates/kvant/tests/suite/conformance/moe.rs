//! moe_route and moe_combine against the reference.

use crate::common::{FLOATS, Out, Rng, conform, input, run};
use kvant::{
    DType,
    ops::{self, MoeCombine, MoeRoute},
};

#[test]
fn moe_route() {
    let sizes = [
        (0, 4, 2),
        (1, 1, 1),
        (5, 4, 4),
        (9, 8, 2),
        (33, 128, 8),
        (1, 128, 32),
        (3, 65, 7),
        (2, 50, 37),
        (2, 500, 9),
        (2, 600, 9),
    ];
    for (tokens, experts, top_k) in sizes {
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

/// NaN is chosen last, and the lower id first among equals: 0 and -0 are equal.
#[test]
fn moe_route_of_equals_and_nan() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let few = [-0.0, 0.0, nan, -inf, -1.0, -0.0, -inf, nan, 2.0, 2.0, 0.0];
    // Equals in all lanes of a warp, and in several places of one lane.
    let many: Vec<f32> = (0..130).map(|e| if e % 3 == 0 { nan } else { (e % 7) as f32 }).collect();
    for (logits, top_k) in [(&few[..], 7), (&few[..], 9), (&many[..], 8), (&many[..], 32), (&many[..], 40)] {
        conform(format!("moe_route of equals and NaN among {}, top {top_k}", logits.len()), |device| {
            let logits = input(device, DType::F32, logits, &[1, logits.len()])?;
            let ids = Out::new(device, DType::U32, &[1, top_k])?;
            let weights = Out::new(device, DType::F32, &[1, top_k])?;
            run(device, |enc| ops::moe_route(enc, &MoeRoute::new(&logits, &ids.tensor, &weights.tensor)))?;
            Ok(vec![ids.same("ids")?, weights.close("weights")?])
        });
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
