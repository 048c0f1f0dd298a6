//! The routing of a mixture of experts: choosing the experts of each token, and summing their outputs.
//! [`linear`](super::linear()) with [`Experts`](super::Experts) computes the experts in between.

pub use combine::{MoeCombine, moe_combine};
pub use route::{ExpertGroups, ExpertScores, MoeRoute, moe_route};

pub(crate) mod route {
    use super::super::check;
    use crate::{
        DType, Encoder, Result, Tensor,
        encoder::{Access::*, Touch},
        group::rank_tensors,
    };

    pub(crate) const NAME: &str = "moe_route";

    /// The function that turns a token's logits into the scores of its experts.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum ExpertScores {
        /// The softmax over all experts.
        #[default]
        Softmax,
        /// 1 / (1 + e⁻ˣ) of each logit.
        Sigmoid,
    }

    /// Groups of experts with consecutive ids, from which a token chooses first.
    ///
    /// A group's value is the sum of its two largest corrected scores. The token chooses its experts from the `chosen`
    /// groups with the largest values; among equals the lower group is first, and NaN is last.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ExpertGroups {
        /// The number of groups, at most [`ExpertGroups::MAX`]: a divisor of E that leaves two or more experts in each.
        pub count: usize,
        /// The groups of a token, from 1 to `count`. They have `top_k` experts or more.
        pub chosen: usize,
    }

    impl ExpertGroups {
        /// The maximum number of groups.
        pub const MAX: usize = 32;
    }

    /// Arguments of [`moe_route`](moe_route()): the experts of each token and their weights.
    ///
    /// The operation selects the `top_k` largest logits of each token in descending order; among equals the lower id is
    /// first, and NaN is last. The weights are the softmax over these logits only, times a factor per expert. Without
    /// `normalise`, the softmax is over all logits of the token, so that the weights sum to less than 1.
    ///
    /// With any of `scores`, `bias`, `groups`, `min_sum`, `epsilon` and `scale`, the operation computes for each token:
    ///
    /// 1. the scores of all experts: [`ExpertScores`]. A NaN among the logits makes every softmax score NaN;
    /// 2. the corrected scores: scores + `bias`;
    /// 3. the candidates: all experts, or those of the chosen [`ExpertGroups`];
    /// 4. the `top_k` candidates with the largest corrected scores (without `bias`, with the largest logits) in
    ///    descending order; among equals the lower id is first, and NaN is last;
    /// 5. their weights: the scores without the bias, times `scale` and the factor per expert. With `normalise`, they
    ///    are divided by max(Σ, `min_sum`) + `epsilon`, where Σ is the sum of the chosen experts' scores.
    #[derive(Clone, Copy, Debug)]
    #[non_exhaustive]
    pub struct MoeRoute<'a> {
        /// `[T, E]`, f32, f16 or bf16.
        pub logits: &'a Tensor,
        /// The scores of the experts.
        pub scores: ExpertScores,
        /// f32 `[E]`: added to the scores for the choice, but not for the weights.
        pub bias: Option<&'a Tensor>,
        /// The groups that a token chooses before its experts.
        pub groups: Option<ExpertGroups>,
        /// f32 `[E]`: multiplies the weight of each chosen expert.
        pub expert_scale: Option<&'a Tensor>,
        /// Whether the weights are normalised over the chosen experts (the default), instead of over all experts.
        pub normalise: bool,
        /// The minimum of the sum that divides normalised weights: 0 (the default) or more.
        pub min_sum: f32,
        /// Added to that sum: 0 (the default) or more.
        pub epsilon: f32,
        /// Multiplies all weights.
        pub scale: f32,
        /// The chosen experts: u32 `[T, top_k]`, with top_k from 1 to E.
        pub ids: &'a Tensor,
        /// The weights of the chosen experts: f32 `[T, top_k]`.
        pub weights: &'a Tensor,
    }

    impl<'a> MoeRoute<'a> {
        /// The `ids` and `weights` of the largest logits.
        pub fn new(logits: &'a Tensor, ids: &'a Tensor, weights: &'a Tensor) -> Self {
            MoeRoute {
                logits,
                scores: ExpertScores::Softmax,
                bias: None,
                groups: None,
                expert_scale: None,
                normalise: true,
                min_sum: 0.0,
                epsilon: 0.0,
                scale: 1.0,
                ids,
                weights,
            }
        }
    }

    setters! { MoeRoute<'a> {
        scores: ExpertScores,
        bias: Option<&'a Tensor>,
        groups: Option<ExpertGroups>,
        expert_scale: Option<&'a Tensor>,
        normalise: bool,
        min_sum: f32,
        epsilon: f32,
        scale: f32,
    } }

    /// Runs [`MoeRoute`].
    ///
    /// # Errors
    /// Those of [every operation](crate::ops#errors).
    pub fn moe_route(enc: &mut Encoder, args: &MoeRoute) -> Result<()> {
        check::float(NAME, "logits", args.logits)?;
        let [tokens, experts] = check::rank(NAME, "logits", args.logits, ["T", "E"])?;
        check::dtype(NAME, "ids", args.ids, DType::U32)?;
        let [_, top_k] = check::rank(NAME, "ids", args.ids, ["T", "top_k"])?;
        check::shape(NAME, "ids", args.ids, &[("T", tokens), ("top_k", top_k)])?;
        check::value_is(NAME, "top_k", (1..=experts).contains(&top_k), format_args!("1 to {experts}"), top_k)?;
        check::dtype(NAME, "weights", args.weights, DType::F32)?;
        check::shape(NAME, "weights", args.weights, &[("T", tokens), ("top_k", top_k)])?;
        for (arg, of_experts) in [("expert_scale", args.expert_scale), ("bias", args.bias)] {
            if let Some(tensor) = of_experts {
                check::dtype(NAME, arg, tensor, DType::F32)?;
                check::shape(NAME, arg, tensor, &[("E", experts)])?;
            }
        }
        if let Some(groups) = args.groups {
            check_groups(groups, experts, top_k)?;
        }
        for (arg, value) in [("min_sum", args.min_sum), ("epsilon", args.epsilon)] {
            check::value_is(NAME, arg, value.is_finite() && value >= 0.0, "finite, 0 or more", value)?;
        }
        check::finite(NAME, "scale", args.scale)?;
        enc.submit(super::super::Call::MoeRoute(Call {
            logits: args.logits.clone(),
            bias: args.bias.cloned(),
            expert_scale: args.expert_scale.cloned(),
            rule: RouteRule {
                scores: args.scores,
                groups: args.groups,
                normalise: args.normalise,
                min_sum: args.min_sum,
                epsilon: args.epsilon,
                scale: args.scale,
            },
            ids: args.ids.clone(),
            weights: args.weights.clone(),
            tokens,
            experts,
            top_k,
        }))
    }

    fn check_groups(groups: ExpertGroups, experts: usize, top_k: usize) -> Result<()> {
        let ExpertGroups { count, chosen } = groups;
        let max = ExpertGroups::MAX.min(experts / 2);
        let fits = (1..=max).contains(&count) && experts.is_multiple_of(count);
        check::value_is(NAME, "groups.count", fits, format_args!("a divisor of {experts} from 1 to {max}"), count)?;
        check::value_is(NAME, "groups.chosen", (1..=count).contains(&chosen), format_args!("1 to {count}"), chosen)?;
        check::at_most(NAME, "top_k", top_k, chosen * (experts / count))
    }

    /// The options that are not tensors.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub(crate) struct RouteRule {
        pub scores: ExpertScores,
        pub groups: Option<ExpertGroups>,
        pub normalise: bool,
        pub min_sum: f32,
        pub epsilon: f32,
        pub scale: f32,
    }

    #[derive(Clone, Debug)]
    pub(crate) struct Call {
        pub logits: Tensor,
        pub bias: Option<Tensor>,
        pub expert_scale: Option<Tensor>,
        pub rule: RouteRule,
        pub ids: Tensor,
        pub weights: Tensor,
        pub tokens: usize,
        pub experts: usize,
        pub top_k: usize,
    }

    rank_tensors! { Call { logits, bias, expert_scale, ids, weights } }

    impl Call {
        /// Whether the weights are the softmax over the chosen or over all logits, so that no other scores are needed.
        pub(crate) fn is_plain(&self) -> bool {
            let RouteRule { scores, groups, normalise: _, min_sum, epsilon, scale } = self.rule;
            let is_softmax = scores == ExpertScores::Softmax;
            is_softmax && self.bias.is_none() && groups.is_none() && [min_sum, epsilon, scale] == [0.0, 0.0, 1.0]
        }

        pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
            visit(Touch { arg: "logits", tensor: &self.logits, access: Read });
            if let Some(tensor) = &self.bias {
                visit(Touch { arg: "bias", tensor, access: Read });
            }
            if let Some(tensor) = &self.expert_scale {
                visit(Touch { arg: "expert_scale", tensor, access: Read });
            }
            visit(Touch { arg: "ids", tensor: &self.ids, access: Write });
            visit(Touch { arg: "weights", tensor: &self.weights, access: Write });
        }

        pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
            &[]
        }

        pub(crate) fn check_indices(&self) -> Result<()> {
            Ok(())
        }
    }
}

pub(crate) mod combine {
    use super::super::check;
    use crate::{
        DType, Encoder, Result, Tensor,
        encoder::{Access::*, Touch},
        group::rank_tensors,
    };

    pub(crate) const NAME: &str = "moe_combine";

    /// Arguments of [`moe_combine`](moe_combine()): the weighted sum of the experts' outputs, out\[t\] = Σⱼ
    /// weights\[t, j\] · x\[t·top_k + j\] + added_weights\[t\] · added\[t\].
    #[derive(Clone, Copy, Debug)]
    #[non_exhaustive]
    pub struct MoeCombine<'a> {
        /// `[T·top_k, N]`, f32, f16 or bf16.
        pub x: &'a Tensor,
        /// f32 `[T, top_k]`.
        pub weights: &'a Tensor,
        /// The output of a shared branch that all tokens pass through: `[T, N]`, f32, f16 or bf16. May be `out`.
        pub added: Option<&'a Tensor>,
        /// The weight of `added`: f32 `[T, 1]`; `None` for 1. Requires `added`.
        pub added_weights: Option<&'a Tensor>,
        /// `[T, N]`, f32, f16 or bf16.
        pub out: &'a Tensor,
    }

    impl<'a> MoeCombine<'a> {
        /// The weighted sum of the rows of `x`.
        pub fn new(x: &'a Tensor, weights: &'a Tensor, out: &'a Tensor) -> Self {
            MoeCombine { x, weights, added: None, added_weights: None, out }
        }
    }

    setters! { MoeCombine<'a> {
        added: Option<&'a Tensor>,
        added_weights: Option<&'a Tensor>,
    } }

    /// Runs [`MoeCombine`].
    ///
    /// # Errors
    /// Those of [every operation](crate::ops#errors).
    pub fn moe_combine(enc: &mut Encoder, args: &MoeCombine) -> Result<()> {
        check::float(NAME, "x", args.x)?;
        check::float(NAME, "out", args.out)?;
        check::dtype(NAME, "weights", args.weights, DType::F32)?;
        let [tokens, top_k] = check::rank(NAME, "weights", args.weights, ["T", "top_k"])?;
        let [_, dim] = check::rank(NAME, "x", args.x, ["T·top_k", "N"])?;
        check::shape(NAME, "x", args.x, &[("T·top_k", args.weights.elements()), ("N", dim)])?;
        check::shape(NAME, "out", args.out, &[("T", tokens), ("N", dim)])?;
        if let Some(added) = args.added {
            check::float(NAME, "added", added)?;
            check::shape(NAME, "added", added, &[("T", tokens), ("N", dim)])?;
        }
        if let Some(weights) = args.added_weights {
            check::value_is(NAME, "added_weights", args.added.is_some(), "absent without `added`", "a tensor")?;
            check::dtype(NAME, "added_weights", weights, DType::F32)?;
            check::shape(NAME, "added_weights", weights, &[("T", tokens), ("", 1)])?;
        }
        let (x, weights, out) = (args.x.clone(), args.weights.clone(), args.out.clone());
        let (added, added_weights) = (args.added.cloned(), args.added_weights.cloned());
        enc.submit(super::super::Call::MoeCombine(Call { x, weights, added, added_weights, out, tokens, top_k, dim }))
    }

    #[derive(Clone, Debug)]
    pub(crate) struct Call {
        pub x: Tensor,
        pub weights: Tensor,
        pub added: Option<Tensor>,
        pub added_weights: Option<Tensor>,
        pub out: Tensor,
        pub tokens: usize,
        pub top_k: usize,
        pub dim: usize,
    }

    rank_tensors! { Call { x, weights, added, added_weights, out } }

    impl Call {
        pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
            visit(Touch { arg: "x", tensor: &self.x, access: Read });
            visit(Touch { arg: "weights", tensor: &self.weights, access: Read });
            if let Some(tensor) = &self.added {
                visit(Touch { arg: "added", tensor, access: Read });
            }
            if let Some(tensor) = &self.added_weights {
                visit(Touch { arg: "added_weights", tensor, access: Read });
            }
            visit(Touch { arg: "out", tensor: &self.out, access: Write });
        }

        pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
            &[("out", "added")]
        }

        pub(crate) fn check_indices(&self) -> Result<()> {
            Ok(())
        }
    }
}
