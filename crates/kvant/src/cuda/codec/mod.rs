//! Shared parts of kernels of the codecs: tables that device code reads, and the compilation of kernels that encode.

pub(super) mod encoders;
pub(super) mod threshold_cells;
