//! The routing of a mixture of experts: choosing the experts of each token, and summing their outputs.
//! [`linear`](super::linear()) with [`Experts`](super::Experts) computes the experts in between.

pub use combine::{MoeCombine, moe_combine};
pub use route::{MoeRoute, moe_route};

pub(crate) mod route {
    use super::super::check;
    use crate::{
        DType, Encoder, Result, Tensor,
        encoder::{Access::*, Touch},
    };

    pub(crate) const NAME: &str = "moe_route";

    /// Arguments of [`moe_route`](moe_route()): the experts of each token and their weights.
    ///
    /// The operation takes the `top_k` largest logits of each token in falling order, with the lower id first among
    /// equals and NaN last. The weights are the softmax over these logits only, times a factor per expert. Without
    /// `normalise`, the softmax is over all logits of the token, so that the weights sum to less than 1.
    #[derive(Clone, Copy, Debug)]
    #[non_exhaustive]
    pub struct MoeRoute<'a> {
        /// `[T, E]`, f32, f16 or bf16.
        pub logits: &'a Tensor,
        /// f32 `[E]`: multiplies the weight of each chosen expert.
        pub expert_scale: Option<&'a Tensor>,
        /// Whether the softmax is over the chosen logits only (the default), or over all.
        pub normalise: bool,
        /// The chosen experts: u32 `[T, top_k]`, with top_k from 1 to E.
        pub ids: &'a Tensor,
        /// The weights of the chosen experts: f32 `[T, top_k]`.
        pub weights: &'a Tensor,
    }

    impl<'a> MoeRoute<'a> {
        /// The `ids` and `weights` of the largest logits.
        pub fn new(logits: &'a Tensor, ids: &'a Tensor, weights: &'a Tensor) -> Self {
            MoeRoute { logits, ids, weights, expert_scale: None, normalise: true }
        }
    }

    setters! { MoeRoute<'a> {
        expert_scale: Option<&'a Tensor>,
        normalise: bool,
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
        if let Some(scale) = args.expert_scale {
            check::dtype(NAME, "expert_scale", scale, DType::F32)?;
            check::shape(NAME, "expert_scale", scale, &[("E", experts)])?;
        }
        enc.submit(super::super::Call::MoeRoute(Call {
            logits: args.logits.clone(),
            expert_scale: args.expert_scale.cloned(),
            normalise: args.normalise,
            ids: args.ids.clone(),
            weights: args.weights.clone(),
            tokens,
            experts,
            top_k,
        }))
    }

    #[derive(Clone, Debug)]
    pub(crate) struct Call {
        pub logits: Tensor,
        pub expert_scale: Option<Tensor>,
        pub normalise: bool,
        pub ids: Tensor,
        pub weights: Tensor,
        pub tokens: usize,
        pub experts: usize,
        pub top_k: usize,
    }

    impl Call {
        pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
            visit(Touch { arg: "logits", tensor: &self.logits, access: Read });
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
    };

    pub(crate) const NAME: &str = "moe_combine";

    /// Arguments of [`moe_combine`](moe_combine()): the weighted sum of the experts' outputs, out\[t\] = Σⱼ
    /// weights\[t, j\] · x\[t·top_k + j\].
    #[derive(Clone, Copy, Debug)]
    #[non_exhaustive]
    pub struct MoeCombine<'a> {
        /// `[T·top_k, N]`, f32, f16 or bf16.
        pub x: &'a Tensor,
        /// f32 `[T, top_k]`.
        pub weights: &'a Tensor,
        /// `[T, N]`, f32, f16 or bf16.
        pub out: &'a Tensor,
    }

    impl<'a> MoeCombine<'a> {
        /// The weighted sum of the rows of `x`.
        pub fn new(x: &'a Tensor, weights: &'a Tensor, out: &'a Tensor) -> Self {
            MoeCombine { x, weights, out }
        }
    }

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
        let (x, weights, out) = (args.x.clone(), args.weights.clone(), args.out.clone());
        enc.submit(super::super::Call::MoeCombine(Call { x, weights, out, tokens, top_k, dim }))
    }

    #[derive(Clone, Debug)]
    pub(crate) struct Call {
        pub x: Tensor,
        pub weights: Tensor,
        pub out: Tensor,
        pub tokens: usize,
        pub top_k: usize,
        pub dim: usize,
    }

    impl Call {
        pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
            visit(Touch { arg: "x", tensor: &self.x, access: Read });
            visit(Touch { arg: "weights", tensor: &self.weights, access: Read });
            visit(Touch { arg: "out", tensor: &self.out, access: Write });
        }

        pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
            &[]
        }

        pub(crate) fn check_indices(&self) -> Result<()> {
            Ok(())
        }
    }
}
