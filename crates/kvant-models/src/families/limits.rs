//! Maxima of a configuration: several times the size of existing models, and small enough that no product of two
//! overflows.

pub(super) const MAX_WIDTH: usize = 1 << 18;
pub(super) const MAX_LAYERS: usize = 1024;
pub(super) const MAX_HEADS: usize = 1024;
pub(super) const MAX_VOCAB: usize = 1 << 24;
pub(super) const MAX_EXPERTS: usize = 4096;
pub(super) const MAX_POSITIONS: usize = u32::MAX as usize;
