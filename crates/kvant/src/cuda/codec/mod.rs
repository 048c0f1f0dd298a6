//! Tables that the device code of the codecs reads.

pub(super) mod threshold_cells;
