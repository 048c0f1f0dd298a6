//! The intermediate tensors of a drafter's passes.

use kvant::Tensor;

use super::{
    Drafter,
    vocabulary::{VocabularyBuffers, VocabularyViews},
};
use crate::{
    Result,
    forward::{Taps, Workspace},
};

/// Scratch for passes of a drafter, with views for the current number of rows.
pub(crate) struct DraftSpace {
    /// Scratch of the blocks.
    blocks: Workspace,
    /// Scratch after the last block's attention, for the rows that get logits.
    last: Workspace,
    buffers: SpaceBuffers,
    views: SpaceViews,
    /// The rows of the views, and those that get logits.
    fitted: [usize; 2],
}

/// Buffers for the maximum number of rows, M.
struct SpaceBuffers {
    /// `[2·M, W]`: embeddings, then hidden states.
    pair: Tensor,
    /// `[2·M·W]`: the rows of `pair` by token.
    joined: Tensor,
    /// The rows of `pair` by token, u32 `[2·M]`.
    alternate: Tensor,
    /// `[M·3·H]`: the target's hidden states by token, for EAGLE-3.
    features: Option<Tensor>,
    vocabulary: VocabularyBuffers,
}

/// The buffers in the shapes of a pass of R rows.
pub(super) struct SpaceViews {
    /// The residual stream of the blocks, `[R, H]`.
    pub stream: Tensor,
    /// The first rows of `pair`, `[R, W]`.
    pub embedding: Tensor,
    /// Rows of `pair` from M on, `[R, W]`.
    pub hidden: Tensor,
    /// `[2·M, W]`.
    pub pair: Tensor,
    /// u32 `[2·R]`.
    pub alternate: Tensor,
    /// `[2·R, W]`.
    pub joined_rows: Tensor,
    /// `joined_rows` as `[R, 2·W]`.
    pub joined: Tensor,
    pub features: Option<FeatureViews>,
    pub vocabulary: VocabularyViews,
}

/// The target's hidden states by token.
pub(super) struct FeatureViews {
    /// `[3·R, H]`.
    pub rows: Tensor,
    /// `rows` as `[R, 3·H]`.
    pub joined: Tensor,
}

impl DraftSpace {
    /// Allocates scratch for passes of up to `rows` rows; up to `wanted` rows get logits. Both are at least 1.
    pub(crate) fn new(drafter: &Drafter, rows: usize, wanted: usize) -> Result<DraftSpace> {
        let (rows, wanted) = (rows.max(1), wanted.max(1).min(rows.max(1)));
        let (network, device) = (&drafter.network, drafter.network.weights.norm.device());
        let (spec, dtype) = (network.spec(), network.activations());
        let width = drafter.joined_width();
        let alternate: Vec<u32> = (0..rows).flat_map(|row| [row as u32, (rows + row) as u32]).collect();
        let features = match drafter.taps {
            Taps::Residual(_) => {
                Some(Tensor::zeros(device, dtype, &[rows * drafter.taps.count() * drafter.target_width])?)
            }
            Taps::Final | Taps::FinalOfEvery => None,
        };
        let buffers = SpaceBuffers {
            pair: Tensor::zeros(device, dtype, &[2 * rows, width])?,
            joined: Tensor::zeros(device, dtype, &[2 * rows * width])?,
            alternate: Tensor::from_slice(device, &alternate, &[alternate.len()])?,
            features,
            vocabulary: drafter.vocabulary.buffers(device, wanted)?,
        };
        let blocks = Workspace::new(spec, device, dtype, rows)?;
        let last = Workspace::new(spec, device, dtype, wanted)?;
        let views = buffers.views(drafter, &blocks.views.h, rows, wanted)?;
        Ok(DraftSpace { blocks, last, buffers, views, fitted: [rows, wanted] })
    }

    /// Adapts the views to a pass of `rows` rows; `wanted` rows get logits.
    pub(crate) fn fit(&mut self, drafter: &Drafter, rows: usize, wanted: usize) -> Result<()> {
        let spec = drafter.network.spec();
        self.blocks.fit(spec, rows)?;
        self.last.fit(spec, wanted)?;
        if self.fitted != [rows, wanted] {
            self.views = self.buffers.views(drafter, &self.blocks.views.h, rows, wanted)?;
            self.fitted = [rows, wanted];
        }
        Ok(())
    }

    pub(super) fn views(&self) -> &SpaceViews {
        &self.views
    }

    pub(super) fn blocks(&self) -> &Workspace {
        &self.blocks
    }

    pub(super) fn last(&self) -> &Workspace {
        &self.last
    }
}

impl SpaceBuffers {
    fn views(&self, drafter: &Drafter, stream: &Tensor, rows: usize, wanted: usize) -> Result<SpaceViews> {
        let &[capacity, width] = self.pair.shape() else { unreachable!("the buffer is a matrix") };
        let joined = self.joined.rows(0..2 * rows * width)?;
        let features = match &self.features {
            Some(features) => {
                let (count, width) = (drafter.taps.count(), drafter.target_width);
                let all = features.rows(0..rows * count * width)?;
                let (rows, joined) = (all.reshape(&[rows * count, width])?, all.reshape(&[rows, count * width])?);
                Some(FeatureViews { rows, joined })
            }
            None => None,
        };
        Ok(SpaceViews {
            stream: stream.clone(),
            embedding: self.pair.rows(0..rows)?,
            hidden: self.pair.rows(capacity / 2..capacity / 2 + rows)?,
            pair: self.pair.clone(),
            alternate: self.alternate.rows(0..2 * rows)?,
            joined_rows: joined.reshape(&[2 * rows, width])?,
            joined: joined.reshape(&[rows, 2 * width])?,
            features,
            vocabulary: self.vocabulary.views(wanted)?,
        })
    }
}
