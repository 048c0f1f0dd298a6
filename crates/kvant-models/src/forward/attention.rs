//! The first half of a block: attention over the cache.

use kvant::{
    KvPool,
    ops::{self, Attend, HeadNorm, MoeCombine, NormRope, NormRopeWrite, Rope},
};

use super::{Network, Pass};
use crate::{Result, spec::KeysValues};

impl Pass<'_> {
    /// y = attention(x).
    pub(super) fn attention(&mut self, l: usize, pool: &KvPool) -> Result<()> {
        let views = self.views;
        let spec = &self.network.spec().blocks[l].attention;
        let weights = &self.network.weights.blocks[l].attention;
        let own = &views.blocks[l];
        let kv = pool.layer(spec.source().unwrap_or(l))?;
        self.project(&weights.qkv, &own.qkv, &[&own.q[0], &own.k[0], &own.v[0]])?;
        let (norms, rope) = (HeadNorms::new(self.network, l), Some(self.network.rope(l)));
        let (mut from, q, k) = (&own.q[1], &own.q[1], &own.k[1]);
        if self.network.query_factors.is_some() {
            // A rotation commutes with a factor. The output of attention is still unused.
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
            KeysValues::SharedWith(_) => {
                let args = NormRope::new(from, self.step.positions(), q).norm(norms.q).rope(rope);
                ops::norm_rope(self.enc, &args.rotate(kv.spec().k.is_quantised()))?
            }
        };
        if let (Some(stored), None) = (&mut self.stored, spec.source()) {
            let next = self.enc.device().encoder()?;
            std::mem::replace(self.enc, next).commit()?.wait()?;
            stored(l, self.step)?;
        }
        let attend = Attend::new(q, kv, self.step, &own.attended[1]);
        let attend = attend.scale(spec.scale).softcap(spec.softcap).window(spec.window).sinks(weights.sinks.as_ref());
        ops::attend(self.enc, &attend)?;
        self.biased_linear(&own.attended[0], &weights.output, &views.y)
    }
}

/// The norms of a block's heads.
struct HeadNorms<'a> {
    q: Option<HeadNorm<'a>>,
    k: Option<HeadNorm<'a>>,
    v: Option<HeadNorm<'a>>,
}

impl<'a> HeadNorms<'a> {
    fn new(network: &'a Network, l: usize) -> HeadNorms<'a> {
        let eps = network.spec().norm_eps;
        let weights = &network.weights.blocks[l].attention;
        let weighted = |weight: &'a Option<_>| weight.as_ref().map(|weight| HeadNorm::new(eps).weight(Some(weight)));
        let v_norm = network.spec().blocks[l].attention.v_norm;
        HeadNorms {
            q: weighted(&weights.q_norm),
            k: weighted(&weights.k_norm),
            v: v_norm.then_some(HeadNorm::new(eps)),
        }
    }
}

impl Network {
    fn rope(&self, l: usize) -> Rope<'_> {
        let rope = &self.spec().blocks[l].attention.rope;
        Rope::new(rope.theta, rope.rotated_pairs).layout(rope.layout).freq_factors(self.factors[l].as_ref())
    }
}
