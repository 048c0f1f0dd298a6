//! Parts that kernels of the codecs share: tables that device code reads, and how kernels that encode are compiled.

pub(super) mod encoders;
pub(super) mod threshold_cells;
