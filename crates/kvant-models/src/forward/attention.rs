//! The first half of a block: attention over the cache.

use kvant::{
    KvPool, Tensor,
    ops::{
        self, Activation, AllGather, Attend, Columns, Embed, HeadNorm, MoeCombine, NormRope, NormRopeWrite, RmsNorm,
        Rope,
    },
};

use super::{
    Network, Pass,
    workspace::{AttentionViews, GatheredViews},
};
use crate::{
    Result,
    spec::{AttentionSpec, KeysValues, QkNorm},
    weights::AttentionWeights,
};

impl Pass<'_> {
    /// y = attention(x).
    pub(super) fn attention(
        &mut self,
        l: usize,
        pool: &KvPool,
        (spec, weights, own): (&AttentionSpec, &AttentionWeights, &AttentionViews),
    ) -> Result<()> {
        let (views, index) = (self.views, self.network.stored[l]);
        let kv = pool.layer(index)?;
        self.project(self.mixer_input(l), &weights.qkv, &own.qkv, &[&own.q[0], &own.k[0], &own.v[0]])?;
        let norms = HeadNorms::new(self.network, spec, weights);
        let mut rope = self.network.rope(l);
        match spec.qk_norm {
            Some(QkNorm::Rows) => self.norm_rows(weights, own)?,
            Some(QkNorm::RotatedHeads) => self.rotate_heads(spec, own, rope.take())?,
            None | Some(QkNorm::Heads | QkNorm::Unweighted) => {}
        }
        let (mut from, q, k) = (&own.q[1], &own.q[1], &own.k[1]);
        if self.network.query_factors.is_some() {
            // Rotation commutes with a factor. The buffer of the attention output is free here.
            let args = MoeCombine::new(&own.q[0], &views.query_factors, &own.attended[0]);
            ops::moe_combine(self.enc, &args)?;
            from = &own.attended[1];
        }
        let write = |v| {
            NormRopeWrite::new(from, k, v, self.step, kv, q).q_norm(norms.q).k_norm(norms.k).v_norm(norms.v).rope(rope)
        };
        let q = match spec.keys_values {
            KeysValues::Own => ops::norm_rope_write(self.enc, &write(&own.v[1]))?,
            // Values are the keys before norm and rotation.
            KeysValues::KeysAreValues => ops::norm_rope_write(self.enc, &write(k))?,
            KeysValues::SharedWith(_) | KeysValues::External => {
                let positions = self.query_positions.unwrap_or(self.step.positions());
                let args = NormRope::new(from, positions, q).norm(norms.q).rope(rope);
                ops::norm_rope(self.enc, &args.rotate(kv.rotates_queries()))?
            }
        };
        if let (Some(stored), true) = (&mut self.stored, spec.stores_keys()) {
            let next = self.enc.device().encoder()?;
            std::mem::replace(self.enc, next).commit()?.wait()?;
            stored(index, self.step)?;
        }
        let sinks = weights.sinks.as_ref();
        match &own.by_position {
            Some(all) => self.attend_by_position(q, kv, spec, (own, all), sinks)?,
            None => {
                let attend = Attend::new(q, kv, self.step, &own.attended[1]).scale(spec.scale).softcap(spec.softcap);
                ops::attend(self.enc, &attend.window(spec.window).sinks(sinks))?;
            }
        }
        let mut attended = &own.attended[0];
        if let (Some(matrix), Some(gate)) = (&weights.output_gate, &own.output_gate) {
            // Some kernels fuse the gate with the product if it follows directly.
            self.linear(self.mixer_input(l), matrix, gate)?;
            self.gate(Columns::from(gate), Columns::from(attended), Activation::Sigmoid, gate)?;
            attended = gate;
        }
        self.output_linear(attended, &weights.output, &views.y)?;
        self.leave_partial();
        Ok(())
    }

    /// Norms queries and keys in place, over all heads of a token.
    fn norm_rows(&mut self, weights: &AttentionWeights, own: &AttentionViews) -> Result<()> {
        let gathered = own.gathered.each_ref().map(Option::as_ref);
        let of_x = [(&own.q[0], &weights.q_norm), (&own.k[0], &weights.k_norm)];
        for ((x, weight), gathered) in of_x.into_iter().zip(gathered) {
            match (weight, gathered) {
                (Some(weight), Some(gathered)) => self.norm_gathered(x, weight, gathered)?,
                (Some(weight), None) => {
                    ops::rms_norm(self.enc, &RmsNorm::new(x, self.spec().norm_eps, x).weight(Some(weight)))?;
                }
                (None, _) => {}
            }
        }
        Ok(())
    }

    /// Norms the heads of all ranks, and keeps those of each rank.
    fn norm_gathered(&mut self, x: &Tensor, weight: &Tensor, gathered: &GatheredViews) -> Result<()> {
        let GatheredViews { rows, parts, ids } = gathered;
        ops::all_gather(self.enc, &AllGather::new(x, rows))?;
        ops::rms_norm(self.enc, &RmsNorm::new(rows, self.spec().norm_eps, rows).weight(Some(weight)))?;
        Ok(ops::embed(self.enc, &Embed::new(parts, ids, x))?)
    }

    /// Rotates queries and keys in place, before their norms.
    fn rotate_heads(&mut self, spec: &AttentionSpec, own: &AttentionViews, rope: Option<Rope>) -> Result<()> {
        if rope.is_none() {
            return Ok(());
        }
        ops::norm_rope(self.enc, &NormRope::new(&own.q[1], self.step.positions(), &own.q[1]).rope(rope))?;
        if spec.stores_keys() {
            ops::norm_rope(self.enc, &NormRope::new(&own.k[1], self.step.positions(), &own.k[1]).rope(rope))?;
        }
        Ok(())
    }
}

/// The norms of a block's heads.
struct HeadNorms<'a> {
    q: Option<HeadNorm<'a>>,
    k: Option<HeadNorm<'a>>,
    v: Option<HeadNorm<'a>>,
}

impl<'a> HeadNorms<'a> {
    fn new(network: &Network, spec: &AttentionSpec, weights: &'a AttentionWeights) -> HeadNorms<'a> {
        let eps = network.spec().norm_eps;
        let of_heads = |weight: &'a Option<_>| match spec.qk_norm {
            None | Some(QkNorm::Rows) => None,
            Some(QkNorm::Unweighted) => Some(HeadNorm::new(eps)),
            Some(QkNorm::Heads | QkNorm::RotatedHeads) => Some(HeadNorm::new(eps).weight(weight.as_ref())),
        };
        let v_norm = spec.v_norm;
        HeadNorms {
            q: of_heads(&weights.q_norm),
            k: of_heads(&weights.k_norm),
            v: v_norm.then_some(HeadNorm::new(eps)),
        }
    }
}
