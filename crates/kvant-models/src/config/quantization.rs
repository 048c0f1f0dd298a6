//! MLX's `quantization` object: bits and group size, with overrides per module.

use serde_json::Value;

use super::{Overrides, canonical, fields::Fields};
use crate::Result;

/// The quantisation of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    /// 4, 6 or 8.
    pub bits: u32,
    /// Inputs that share a scale and a bias: 32, 64 or 128.
    pub group: usize,
}

/// The quantisation of all tensors. A tensor is quantised if the file has scales for it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quantization {
    default: Option<Scheme>,
    overrides: Overrides,
}

impl Quantization {
    /// The scheme of a module such as `model.layers.0.mlp.up_proj`, with any prefix. `None` if the configuration has
    /// no scheme, or has `false` for this module.
    pub fn scheme(&self, module: &str) -> Option<Scheme> {
        self.overrides.get(canonical(module)).copied().unwrap_or(self.default)
    }

    pub(super) fn parse(fields: &Fields) -> Result<Quantization> {
        if let Some(method) = fields.string("quant_method")? {
            return Err(fields.error(
                "quant_method",
                "absent: only MLX's affine format is supported",
                format_args!("{method:?}"),
            ));
        }
        let default = scheme(fields, None)?;
        let mut overrides = Overrides::new();
        for key in fields.keys() {
            if matches!(key, "bits" | "group_size" | "mode" | "quant_method") {
                continue;
            }
            let of_module = match fields.get(key) {
                Some(Value::Bool(false)) => None,
                Some(Value::Bool(true)) => Some(default),
                _ => {
                    let inner = fields.object(key)?;
                    Some(scheme(&inner.ok_or_else(|| fields.missing(key, "an object or false"))?, Some(default))?)
                }
            };
            overrides.insert(canonical(key).to_string(), of_module);
        }
        Ok(Quantization { default: Some(default), overrides })
    }
}

/// Bits and group size of one object; an override inherits missing values.
fn scheme(fields: &Fields, default: Option<Scheme>) -> Result<Scheme> {
    let mode = fields.string("mode")?.unwrap_or("affine");
    if mode != "affine" {
        return Err(fields.error("mode", "\"affine\"", format_args!("{mode:?}")));
    }
    let bits = fields.size("bits", default.map(|d| d.bits as usize), 32)?;
    if !matches!(bits, 4 | 6 | 8) {
        return Err(fields.error("bits", "4, 6 or 8", bits));
    }
    let group = fields.size("group_size", default.map(|d| d.group), 1024)?;
    if !matches!(group, 32 | 64 | 128) {
        return Err(fields.error("group_size", "32, 64 or 128", group));
    }
    Ok(Scheme { bits: bits as u32, group })
}
