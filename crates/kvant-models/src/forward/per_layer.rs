//! Per-layer inputs: every token has P additional inputs for each block.
//!
//! input\[l\] = (table\[id\]\[l\] · √P + norm(projection(embedding) · H^-½)\[l\]) · 2^-½, computed once per pass.

use kvant::ops::{self, Activation, Columns, Embed, Linear, NextNorm, Residual, RmsNorm};

use super::{Pass, rounded};
use crate::{Result, weights::LayerInputWeights};

impl Pass<'_> {
    /// Computes the inputs of all blocks, if the model has them. `h` is still the scaled embedding.
    pub(super) fn per_layer_inputs(&mut self) -> Result<()> {
        let spec = self.network.spec();
        let (Some(weights), Some(own), Some(inputs)) =
            (&self.network.weights.per_layer, &self.views.per_layer, spec.per_layer_input)
        else {
            return Ok(());
        };
        let scale = rounded((inputs.size as f32).sqrt(), self.network.activations);
        let out = &own.embedded[0];
        ops::embed(self.enc, &Embed::new(weights.embed.weight(), &self.views.ids, out).scale(scale))?;
        let alpha = (spec.hidden_size as f32).sqrt().recip();
        let (x, weight) = (&self.views.h, weights.projection.weight());
        ops::linear(self.enc, &Linear::new(x, weight, &own.input[0]).alpha(alpha))?;
        ops::rms_norm(
            self.enc,
            &RmsNorm::new(&own.input[1], spec.norm_eps, &own.input[1])
                .weight(Some(&weights.norm))
                .residual(Residual::After(&own.embedded[1]))
                .scale(std::f32::consts::FRAC_1_SQRT_2),
        )?;
        Ok(())
    }

    /// h = scale · (h + norm(projection(gelu(gate(h)) · input of block l))), and norms of h.
    pub(super) fn add_layer_input(
        &mut self,
        l: usize,
        weights: &LayerInputWeights,
        scale: f32,
        next: &[NextNorm],
    ) -> Result<()> {
        let views = self.views;
        let own = views.per_layer.as_ref().expect("a model with these weights has these views");
        self.linear(&views.h, &weights.gate, &own.gate)?;
        let size = own.gate.shape()[1];
        let input = Columns { tensor: &own.input[0], start: l * size };
        self.gate(Columns::from(&own.gate), input, Activation::GeluTanh, &own.gate)?;
        self.linear(&own.gate, &weights.output, &views.y)?;
        self.add_normed(&views.y, &weights.norm, scale, next)
    }
}
