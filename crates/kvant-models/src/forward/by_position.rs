//! Attention over a cache whose positions the ranks of a group divide: each rank attends with the query heads of all
//! ranks to its keys, and the results are merged.

use kvant::{
    KvLayer, Tensor,
    ops::{self, AllGather, Attend, KvWrite, MergeAttention, NormRope, Query, Rope},
};

use super::{
    Pass,
    attention::HeadNorms,
    workspace::{AttentionViews, PositionViews},
};
use crate::{
    Result,
    spec::{AttentionSpec, KeysValues},
};

/// The tensors of the attention of a block.
pub(super) struct DividedAttention<'a> {
    pub spec: &'a AttentionSpec,
    pub own: &'a AttentionViews,
    pub all: &'a PositionViews,
    pub norms: &'a HeadNorms<'a>,
    pub rope: Option<Rope<'a>>,
    /// The queries before norm and rotary embedding.
    pub from: &'a Tensor,
    pub sinks: Option<&'a Tensor>,
}

impl Pass<'_> {
    /// attended = the results of the rank's heads.
    pub(super) fn attend_by_position(&mut self, kv: &KvLayer, args: &DividedAttention) -> Result<()> {
        let &DividedAttention { spec, own, all, norms, rope, from, sinks } = args;
        let norm = NormRope::new(from, self.step.positions(), &own.q[1]).norm(norms.q).rope(rope);
        ops::norm_rope(self.enc, &norm.rotate(kv.rotates_queries()))?;
        self.store_divided(kv, args)?;
        ops::all_gather(self.enc, &AllGather::new(&own.q[0], &all.q[0]))?;
        let q = if kv.rotates_queries() { Query::Rotated(&all.q[1]) } else { Query::Raw(&all.q[1]) };
        let attend = Attend::new(q, kv, self.step, &all.out).ends(Some(&all.ends));
        ops::attend(self.enc, &attend.scale(spec.scale).softcap(spec.softcap))?;
        let merge = MergeAttention::new(&all.out, &all.ends, &own.attended[1]);
        Ok(ops::merge_attention(self.enc, &merge.sinks(sinks))?)
    }

    /// Stores the keys and values of the positions that each rank has. They are rotated before, because a rank's rows
    /// have other positions in the cache than in the text.
    fn store_divided(&mut self, kv: &KvLayer, args: &DividedAttention) -> Result<()> {
        let &DividedAttention { spec, own, norms, rope, .. } = args;
        let (k, v) = match spec.keys_values {
            KeysValues::Own => (&own.k[1], &own.v[1]),
            // Values are the keys before norm and rotation, so the keys move to the unused buffer of values.
            KeysValues::KeysAreValues => (&own.v[1], &own.k[1]),
            KeysValues::SharedWith(_) => return Ok(()),
        };
        let positions = self.step.positions();
        ops::norm_rope(self.enc, &NormRope::new(&own.k[1], positions, k).norm(norms.k).rope(rope))?;
        if norms.v.is_some() {
            ops::norm_rope(self.enc, &NormRope::new(v, positions, v).norm(norms.v))?;
        }
        Ok(ops::kv_write(self.enc, &KvWrite::new(k, v, self.step, kv))?)
    }
}
