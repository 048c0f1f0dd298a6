//! Attention over a cache whose positions the ranks of a group divide: each rank attends with the query heads of all
//! ranks to its keys, and the results are merged.

use kvant::{
    KvLayer, Tensor,
    ops::{self, AllGather, Attend, MergeAttention, Query},
};

use super::{
    Pass,
    workspace::{AttentionViews, PositionViews},
};
use crate::{Result, spec::AttentionSpec};

impl Pass<'_> {
    /// Writes the results of the rank's heads to `attended`. `q` are the queries of these heads.
    pub(super) fn attend_by_position(
        &mut self,
        q: Query,
        kv: &KvLayer,
        spec: &AttentionSpec,
        (own, all): (&AttentionViews, &PositionViews),
        sinks: Option<&Tensor>,
    ) -> Result<()> {
        ops::all_gather(self.enc, &AllGather::new(&own.q[0], &all.q[0]))?;
        let q = if q.is_rotated() { Query::Rotated(&all.q[1]) } else { Query::Raw(&all.q[1]) };
        let attend = Attend::new(q, kv, self.step, &all.out).ends(Some(&all.ends));
        ops::attend(self.enc, &attend.scale(spec.scale).softcap(spec.softcap))?;
        let merge = MergeAttention::new(&all.out, &all.ends, &own.attended[1]);
        Ok(ops::merge_attention(self.enc, &merge.sinks(sinks))?)
    }
}
