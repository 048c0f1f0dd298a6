//! MLX's `quantization` object: mode, bits and group size, with overrides per module; and the methods of other files.

use std::collections::HashMap;

use serde_json::Value;

use super::matrix::MXFP4_GROUP;
use crate::{Result, config::fields::Fields};

/// The quantisation of one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    Affine {
        /// 2, 3, 4, 5, 6 or 8.
        bits: u32,
        /// Inputs that share a scale and a bias: 32, 64 or 128.
        group: usize,
    },
    /// 4 bits in groups of 32.
    Mxfp4,
}

impl Scheme {
    /// Inputs that share a scale.
    pub(crate) fn group(self) -> usize {
        match self {
            Scheme::Affine { group, .. } => group,
            Scheme::Mxfp4 => MXFP4_GROUP,
        }
    }
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
        match fields.string("quant_method")? {
            None => {}
            // gpt-oss: the experts' tensors have names of their own.
            Some("mxfp4") => return Ok(Quantization::default()),
            Some(method) => {
                let expected = "\"mxfp4\", or absent in files of MLX";
                return Err(fields.error("quant_method", expected, format_args!("{method:?}")));
            }
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

/// The scheme of one object. An override inherits missing bits and group size of an affine default, but never its
/// mode.
fn scheme(fields: &Fields, default: Option<Scheme>) -> Result<Scheme> {
    match fields.string("mode")?.unwrap_or("affine") {
        "affine" => {}
        "mxfp4" => return mxfp4(fields),
        mode => return Err(fields.error("mode", "\"affine\" or \"mxfp4\"", format_args!("{mode:?}"))),
    }
    let (default_bits, default_group) = match default {
        Some(Scheme::Affine { bits, group }) => (Some(bits as usize), Some(group)),
        _ => (None, None),
    };
    let bits = fields.size("bits", default_bits, 32)?;
    if !matches!(bits, 2..=6 | 8) {
        return Err(fields.error("bits", "2 to 6 or 8", bits));
    }
    let group = fields.size("group_size", default_group, 1024)?;
    if !matches!(group, 32 | 64 | 128) {
        return Err(fields.error("group_size", "32, 64 or 128", group));
    }
    Ok(Scheme::Affine { bits: bits as u32, group })
}

/// The mode has one width and one size of groups.
fn mxfp4(fields: &Fields) -> Result<Scheme> {
    for (key, only) in [("bits", 4), ("group_size", MXFP4_GROUP)] {
        let given = fields.size(key, Some(only), 1024)?;
        if given != only {
            return Err(fields.error(key, format_args!("{only} in mode \"mxfp4\""), given));
        }
    }
    Ok(Scheme::Mxfp4)
}

/// Removes the prefixes that checkpoints add to a text model's tensor names.
fn canonical(name: &str) -> &str {
    ["model.language_model.", "language_model.model.", "language_model.", "model."]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(name)
}
