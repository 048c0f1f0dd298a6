//! The forward pass of Gemma 4 text.
//!
//! ```text
//! h = embedding · √hidden, then for each layer
//!   h += post_attention_norm(attention(input_norm(h)))
//!   h += post_feedforward_norm(mlp(pre_feedforward_norm(h)))                          with or without parallel experts
//!   h += post_per_layer_input_norm(projection(gelu(gate(h)) · input of this layer))   if the model has such inputs
//!   h *= layer_scalar
//! and logits = norm(h) · embeddingᵀ, softcapped.
//! ```
//!
//! Every line is one or a few operations. One encoder records the whole pass.

mod feedforward;
mod per_layer;

use kvant::{
    Encoder, KvPool, Step, Tensor,
    ops::{self, Attend, HeadNorm, NormRope, NormRopeWrite, Residual, RmsNorm, Rope},
};

use crate::{
    Result,
    config::{Config, RopeConfig},
    weights::{Matrix, Stack, Weights},
    workspace::Views,
};

/// A model's configuration and tensors.
pub(crate) struct Gemma4 {
    pub config: Config,
    pub weights: Weights,
    /// For layers whose frequencies are divided by a factor.
    freq_factors: Vec<Option<Tensor>>,
}

impl Gemma4 {
    pub(crate) fn new(config: Config, weights: Weights) -> Result<Gemma4> {
        let device = weights.norm.device().clone();
        let factors = |rope: &RopeConfig| -> Result<Option<Tensor>> {
            if rope.factor == 1.0 {
                return Ok(None);
            }
            let same = vec![rope.factor; rope.rotated_pairs];
            Ok(Some(Tensor::from_slice(&device, &same, &[rope.rotated_pairs])?))
        };
        let freq_factors = config.layers.iter().map(|layer| factors(&layer.rope)).collect::<Result<_>>()?;
        Ok(Gemma4 { config, weights, freq_factors })
    }

    /// Encodes the pass over the tokens of a step, whose ids are in `views`. `wanted` says which rows get logits, and
    /// where these go.
    pub(crate) fn encode(
        &self,
        enc: &mut Encoder,
        views: &Views,
        pool: &KvPool,
        step: &Step,
        wanted: &Wanted,
    ) -> Result<()> {
        let mut pass = Pass { model: self, enc, views, step };
        pass.embed()?;
        // The layers from here on write no keys: they run for the rows that are wanted alone.
        let own = self.config.cache_layers();
        for l in 0..own {
            pass.layer(l, pool)?;
        }
        match *wanted {
            Wanted::Nothing => return Ok(()),
            Wanted::Every { .. } => {}
            Wanted::Some { rows, views, step, .. } => {
                pass.gather(rows, views)?;
                (pass.views, pass.step) = (views, step);
            }
        }
        for l in own..self.config.layers.len() {
            pass.layer(l, pool)?;
        }
        match *wanted {
            Wanted::Nothing => Ok(()),
            Wanted::Every { logits } | Wanted::Some { logits, .. } => pass.logits(logits),
        }
    }
}

/// The rows of a pass whose logits are wanted.
pub(crate) enum Wanted<'a> {
    Nothing,
    Every {
        logits: &'a Tensor,
    },
    /// Some rows, by their indices (u32 `[n]`), with tensors and a step for them alone.
    Some {
        rows: &'a Tensor,
        views: &'a Views,
        step: &'a Step,
        logits: &'a Tensor,
    },
}

/// One forward pass that is being encoded.
struct Pass<'a> {
    model: &'a Gemma4,
    enc: &'a mut Encoder,
    views: &'a Views,
    step: &'a Step,
}

impl Pass<'_> {
    fn embed(&mut self) -> Result<()> {
        let config = &self.model.config;
        ops::embed(
            self.enc,
            &ops::Embed::new(self.model.weights.embed.weight(), &self.views.ids, &self.views.h)
                .scale((config.hidden_size as f32).sqrt()),
        )?;
        self.per_layer_inputs()
    }

    /// Copies the rows of the residual stream, and of the layers' inputs, that `rows` names.
    fn gather(&mut self, rows: &Tensor, to: &Views) -> Result<()> {
        let mut copy = |from: &Tensor, out: &Tensor| ops::embed(self.enc, &ops::Embed::new(from, rows, out));
        copy(&self.views.h, &to.h)?;
        if let (Some(from), Some(to)) = (&self.views.per_layer, &to.per_layer) {
            copy(&from.input[0], &to.input[0])?;
        }
        Ok(())
    }

    fn layer(&mut self, l: usize, pool: &KvPool) -> Result<()> {
        let views = self.views;
        let layer = &self.model.weights.layers[l];
        // The factor is applied with the last addition to the residual stream.
        let last_scale = |is_last: bool| if is_last { layer.scalar } else { 1.0 };
        self.norm(&views.h, Some(&layer.input_norm), &views.x)?;
        self.attention(l, pool)?;
        self.add_normed(&views.y, &layer.post_attention_norm, 1.0)?;
        self.feedforward(l)?;
        self.add_normed(&views.y, &layer.post_feedforward_norm, last_scale(layer.per_layer.is_none()))?;
        if let Some(input) = &layer.per_layer {
            self.add_layer_input(l, input, last_scale(true))?;
        }
        Ok(())
    }

    /// y = attention(x).
    fn attention(&mut self, l: usize, pool: &KvPool) -> Result<()> {
        let views = self.views;
        let config = &self.model.config.layers[l];
        let weights = &self.model.weights.layers[l];
        let own = &views.layers[l];
        let kv = pool.layer(config.kv_source.unwrap_or(l))?;
        self.project(&weights.qkv, own.qkv.as_ref(), &[&own.q[0], &own.k[0], &own.v[0]])?;
        let norm = |weight| Some(self.model.head_norm(weight));
        let q = match &weights.k_norm {
            Some(k_norm) => {
                // Without their own projection, values are the keys before norm and rotation.
                let v = if config.k_eq_v { &own.k[1] } else { &own.v[1] };
                let args = NormRopeWrite::new(&own.q[1], &own.k[1], v, self.step, kv, &own.q[1])
                    .q_norm(norm(Some(&weights.q_norm)))
                    .k_norm(norm(Some(k_norm)))
                    .v_norm(norm(None))
                    .rope(Some(self.model.rope(l)));
                ops::norm_rope_write(self.enc, &args)?
            }
            None => {
                let args = NormRope::new(&own.q[1], self.step.positions(), &own.q[1])
                    .norm(norm(Some(&weights.q_norm)))
                    .rope(Some(self.model.rope(l)))
                    .rotate(kv.spec().k.is_quantised());
                ops::norm_rope(self.enc, &args)?
            }
        };
        let attend = Attend::new(q, kv, self.step, &own.attended[1]);
        ops::attend(self.enc, &attend.scale(1.0).window(config.window))?;
        self.linear(&own.attended[0], &weights.o, &views.y)
    }

    /// The logits of all rows.
    fn logits(&mut self, out: &Tensor) -> Result<()> {
        let (views, weights) = (self.views, &self.model.weights);
        self.norm(&views.h, Some(&weights.norm), &views.x)?;
        self.linear(&views.x, weights.lm_head.as_ref().unwrap_or(&weights.embed), out)?;
        if let Some(cap) = self.model.config.final_softcap {
            ops::softcap(self.enc, &ops::Softcap::new(out, cap, out))?;
        }
        Ok(())
    }

    fn linear(&mut self, x: &Tensor, weight: &Matrix, out: &Tensor) -> Result<()> {
        let args = ops::Linear::new(x, weight.weight(), out);
        Ok(ops::linear(self.enc, &args)?)
    }

    /// Multiplies x by a stack of matrices: one product into `row` for a single token, or else one product per part.
    fn project(&mut self, stack: &Stack, row: Option<&Tensor>, outs: &[&Tensor]) -> Result<()> {
        let x = &self.views.x;
        if let (Some(whole), Some(row)) = (&stack.whole, row) {
            return self.linear(x, whole, row);
        }
        stack.parts.iter().zip(outs).try_for_each(|(part, out)| self.linear(x, part, out))
    }

    /// out = norm(x).
    fn norm(&mut self, x: &Tensor, weight: Option<&Tensor>, out: &Tensor) -> Result<()> {
        let eps = self.model.config.rms_norm_eps;
        let args = RmsNorm::new(x, eps, out).weight(weight);
        Ok(ops::rms_norm(self.enc, &args)?)
    }

    /// h = scale · (h + norm(x)).
    fn add_normed(&mut self, x: &Tensor, weight: &Tensor, scale: f32) -> Result<()> {
        let h = &self.views.h;
        let eps = self.model.config.rms_norm_eps;
        let args = RmsNorm::new(x, eps, h).weight(Some(weight)).residual(Residual::After(h)).scale(scale);
        Ok(ops::rms_norm(self.enc, &args)?)
    }
}

impl Gemma4 {
    fn head_norm<'a>(&self, weight: Option<&'a Tensor>) -> HeadNorm<'a> {
        HeadNorm::new(self.config.rms_norm_eps).weight(weight)
    }

    fn rope(&self, l: usize) -> Rope<'_> {
        let RopeConfig { theta, rotated_pairs, .. } = self.config.layers[l].rope;
        Rope::new(theta, rotated_pairs).freq_factors(self.freq_factors[l].as_ref())
    }
}
