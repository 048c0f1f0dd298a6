//! moe_route and moe_combine against the reference.

use crate::common::{FLOATS, Out, Rng, conform, input, run};
use kvant::{
    DType,
    ops::{self, ExpertGroups, ExpertScores, MoeCombine, MoeRoute},
};

const SCORES: [ExpertScores; 2] = [ExpertScores::Softmax, ExpertScores::Sigmoid];

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
                        // In the coarse dtypes there are equal logits, for which the lower id comes first.
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

/// Scores, with and without a bias, groups and factors; on CUDA in registers and, for 600 experts or 40 choices, not.
#[test]
fn moe_route_by_scores() {
    let sizes = [
        (0, 4, 2, (2, 1)),
        (5, 4, 4, (1, 1)),
        (33, 128, 8, (8, 4)),
        (3, 96, 7, (32, 5)),
        (2, 250, 40, (5, 2)),
        (2, 512, 9, (4, 3)),
        (2, 600, 9, (6, 2)),
    ];
    for (tokens, experts, top_k, (count, chosen)) in sizes {
        for dtype in FLOATS {
            for scores in SCORES {
                for (biased, grouped, normalise) in
                    [(false, false, true), (true, false, true), (true, true, true), (false, true, false)]
                {
                    let what = format!(
                        "moe_route T {tokens}, E {experts}, top {top_k}, {dtype}, {scores:?}, bias {biased}, \
                         groups {:?}, normalised {normalise}",
                        grouped.then_some((count, chosen))
                    );
                    conform(what, |device| {
                        let mut rng = Rng::new(experts as u64 + 7);
                        let logits = input(device, dtype, &rng.normals(tokens * experts), &[tokens, experts])?;
                        let scale = input(device, DType::F32, &rng.normals(experts), &[experts])?;
                        let bias: Vec<f32> = rng.normals(experts).iter().map(|x| x * 0.1).collect();
                        let bias = input(device, DType::F32, &bias, &[experts])?;
                        let ids = Out::new(device, DType::U32, &[tokens, top_k])?;
                        let weights = Out::new(device, DType::F32, &[tokens, top_k])?;
                        let args = MoeRoute::new(&logits, &ids.tensor, &weights.tensor)
                            .scores(scores)
                            .bias(biased.then_some(&bias))
                            .groups(grouped.then_some(ExpertGroups { count, chosen }))
                            .expert_scale(grouped.then_some(&scale))
                            .normalise(normalise)
                            .epsilon(1e-20)
                            .scale(2.5);
                        run(device, |enc| ops::moe_route(enc, &args))?;
                        Ok(vec![ids.same("ids")?, weights.close("weights")?])
                    });
                }
            }
        }
    }
}

/// A sum below its minimum is replaced by the minimum, and the epsilon is added: scores of 1e-9, 1e-12 and about 0.
#[test]
fn moe_route_of_small_sums() {
    let logits = [-20.7, -27.6, -60.0, -200.0, -20.0, -90.0];
    for scores in SCORES {
        for (min_sum, epsilon) in [(0.0, 1e-20), (1e-12, 0.0), (1e-3, 0.0), (0.5, 0.5), (1e-12, 1e-9)] {
            for first in [0, 2] {
                let what = format!("moe_route of small sums, {scores:?}, {min_sum}, {epsilon}, from {first}");
                conform(what, |device| {
                    // The last experts are chosen.
                    let bias: Vec<f32> = (0..6).map(|e| if e < first { -2.0 } else { 0.1 * e as f32 }).collect();
                    let bias = input(device, DType::F32, &bias, &[6])?;
                    let logits = input(device, DType::F32, &logits, &[1, 6])?;
                    let ids = Out::new(device, DType::U32, &[1, 3])?;
                    let weights = Out::new(device, DType::F32, &[1, 3])?;
                    let args = MoeRoute::new(&logits, &ids.tensor, &weights.tensor).scores(scores).bias(Some(&bias));
                    run(device, |enc| ops::moe_route(enc, &args.min_sum(min_sum).epsilon(epsilon)))?;
                    Ok(vec![ids.same("ids")?, weights.close("weights")?])
                });
            }
        }
    }
}

/// Among equal corrected scores and equal groups the lower one comes first; NaN, and groups with it, come last.
#[test]
fn moe_route_of_equal_scores_and_nan() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let few = [0.0, 0.0, nan, nan, 1.0, -1.0, -1.0, 1.0, -inf, -inf, inf, nan];
    let many: Vec<f32> = (0..128).map(|e| if e % 5 == 0 { nan } else { (e % 7) as f32 }).collect();
    // Groups of NaN only.
    let rows: Vec<f32> = (0..128).map(|e| if e < 64 { nan } else { (e % 3) as f32 }).collect();
    let cases = [(&few[..], 3, 6), (&few[..], 4, 6), (&many[..], 8, 8), (&many[..], 40, 4), (&rows[..], 9, 4)];
    for (logits, top_k, count) in cases {
        for scores in SCORES {
            for chosen in [count - 1, count] {
                for biased in [false, true] {
                    let experts = logits.len();
                    let what =
                        format!("moe_route of equals, {experts} experts, {scores:?}, bias {biased}, {chosen} groups");
                    conform(what, |device| {
                        let logits = input(device, DType::F32, logits, &[1, experts])?;
                        let bias: Vec<f32> = (0..experts).map(|e| if e % 11 == 10 { nan } else { 0.5 }).collect();
                        let bias = input(device, DType::F32, &bias, &[experts])?;
                        let ids = Out::new(device, DType::U32, &[1, top_k])?;
                        let weights = Out::new(device, DType::F32, &[1, top_k])?;
                        let args = MoeRoute::new(&logits, &ids.tensor, &weights.tensor).scores(scores);
                        let args = args.groups(Some(ExpertGroups { count, chosen })).bias(biased.then_some(&bias));
                        run(device, |enc| ops::moe_route(enc, &args))?;
                        Ok(vec![ids.same("ids")?, weights.close("weights")?])
                    });
                }
            }
        }
    }
}

/// NaN is chosen last, and the lower id first among equals; 0 and -0 are equal.
#[test]
fn moe_route_of_equals_and_nan() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let few = [-0.0, 0.0, nan, -inf, -1.0, -0.0, -inf, nan, 2.0, 2.0, 0.0];
    // Equal logits in all lanes of a warp, and several in one lane.
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
                for added in [None, Some(out_type), Some(x_type)] {
                    for is_weighted in [false, true] {
                        check_combine([tokens, top_k, dim], x_type, out_type, added, is_weighted && added.is_some());
                    }
                }
            }
        }
    }
}

fn check_combine(
    [tokens, top_k, dim]: [usize; 3],
    x_type: DType,
    out_type: DType,
    added_type: Option<DType>,
    is_weighted: bool,
) {
    let what = format!(
        "moe_combine T {tokens}, top {top_k}, N {dim}, {x_type} -> {out_type}, added {added_type:?}, weighted {is_weighted}"
    );
    conform(what, |device| {
        let mut rng = Rng::new(dim as u64);
        let rows = tokens * top_k;
        let x = input(device, x_type, &rng.normals(rows * dim), &[rows, dim])?;
        let weights = input(device, DType::F32, &rng.normals(rows), &[tokens, top_k])?;
        let out = Out::new(device, out_type, &[tokens, dim])?;
        let added = input(device, added_type.unwrap_or(x_type), &rng.normals(tokens * dim), &[tokens, dim])?;
        let added_weights = input(device, DType::F32, &rng.normals(tokens), &[tokens, 1])?;
        let args = MoeCombine::new(&x, &weights, &out.tensor)
            .added(added_type.is_some().then_some(&added))
            .added_weights(is_weighted.then_some(&added_weights));
        run(device, |enc| ops::moe_combine(enc, &args))?;
        Ok(vec![out.close("out")?])
    });
}

/// The added tensor may be the output.
#[test]
fn moe_combine_in_place() {
    for dim in [64, 65] {
        conform(format!("moe_combine in place, N {dim}"), |device| {
            let mut rng = Rng::new(dim as u64);
            let x = input(device, DType::BF16, &rng.normals(6 * dim), &[6, dim])?;
            let weights = input(device, DType::F32, &rng.normals(6), &[3, 2])?;
            let both = Out::new(device, DType::F32, &[3, dim])?;
            both.tensor.write(&rng.normals(3 * dim))?;
            run(device, |enc| {
                ops::moe_combine(enc, &MoeCombine::new(&x, &weights, &both.tensor).added(Some(&both.tensor)))
            })?;
            Ok(vec![both.close("out")?])
        });
    }
}
