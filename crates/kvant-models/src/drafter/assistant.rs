//! Gemma 4's assistants.

use kvant::DType;

use super::{Drafter, not_a_drafter};
use crate::{Files, Model, Result};

/// The `model_type` of assistants.
pub(super) const MODEL_TYPES: [&str; 2] = ["gemma4_assistant", "gemma4_unified_assistant"];
/// The architecture of assistants in GGUF files.
pub(super) const ARCHITECTURE: &str = "gemma4-assistant";

pub(super) fn load(_: &Files, _: &Model, _: Option<DType>) -> Result<Drafter> {
    Err(not_a_drafter("assistants"))
}
