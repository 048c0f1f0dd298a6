//! EAGLE-3 heads.

use kvant::DType;

use super::{Drafter, not_a_drafter};
use crate::{Files, Model, Result, config::fields::Fields};

pub(super) fn is_config(_: &Fields) -> Result<bool> {
    Ok(false)
}

pub(super) fn load(_: &Files, _: &Model, _: Option<DType>) -> Result<Drafter> {
    Err(not_a_drafter("EAGLE-3"))
}
