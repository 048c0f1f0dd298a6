//! MLX's `quantization` object: bits and group size, with overrides per module.

use std::collections::HashMap;

use serde_json::Value;

use crate::{Result, config::fields::Fields};

/// The quantisation of one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    /// 4, 6 or 8.
    pub bits: u32,
    /// Inputs that share a scale and a bias: 32, 64 or 128.
    pub group: usize,
}

/// The quantisation of all modules. A matrix is quantised if the file has scales for it.
///
/// Overrides are read when their module is loaded: files have some of other towers, in formats that text does not need.
#[derive(Debug, Default)]
pub(crate) struct Quantization<'a> {
    default: Option<Scheme>,
    fields: Option<Fields<'a>>,
    /// The keys of overrides by canonical module name.
    overrides: HashMap<&'a str, &'a str>,
}

impl<'a> Quantization<'a> {
    /// Reads the object of a `config.json`; without one, no module is quantised.
    pub(crate) fn parse(config: &'a Value) -> Result<Quantization<'a>> {
        let Some(fields) = Fields::new(config)?.first_of(&["quantization", "quantization_config"])? else {
            return Ok(Quantization::default());
        };
        if let Some(method) = fields.string("quant_method")? {
            return Err(fields.error(
                "quant_method",
                "absent: only MLX's affine format is supported",
                format_args!("{method:?}"),
            ));
        }
        let default = scheme(&fields, None)?;
        let modules = fields.keys().filter(|key| !matches!(*key, "bits" | "group_size" | "mode"));
        let overrides = modules.map(|key| (canonical(key), key)).collect();
        Ok(Quantization { default: Some(default), overrides, fields: Some(fields) })
    }

    /// The scheme of a module such as `model.layers.0.mlp.up_proj`, with any prefix. `None` if the configuration has
    /// no scheme, or has `false` for this module.
    pub(crate) fn scheme(&self, module: &str) -> Result<Option<Scheme>> {
        let (Some(fields), Some(key)) = (&self.fields, self.overrides.get(canonical(module))) else {
            return Ok(self.default);
        };
        match fields.get(key) {
            Some(Value::Bool(false)) => Ok(None),
            Some(Value::Bool(true)) => Ok(self.default),
            _ => {
                let inner = fields.object(key)?.ok_or_else(|| fields.missing(key, "an object or false"))?;
                scheme(&inner, self.default).map(Some)
            }
        }
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

/// Removes the prefixes that checkpoints add to a text model's tensor names.
fn canonical(name: &str) -> &str {
    ["model.language_model.", "language_model.model.", "language_model.", "model."]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(name)
}
