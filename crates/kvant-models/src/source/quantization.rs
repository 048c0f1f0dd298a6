//! MLX's `quantization` object (mode, bits and group size, with overrides per module), and the quantisation methods of
//! other files.

use std::collections::HashMap;

use kvant::ops::FloatFormat;
use serde_json::Value;

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
    Floats(FloatFormat),
}

impl Scheme {
    /// A divisor of the number of inputs of a matrix.
    pub(crate) fn step(self) -> usize {
        match self {
            Scheme::Affine { group, .. } => group,
            Scheme::Floats(_) => 32,
        }
    }
}

/// The block of weights that share a scale in an 8-bit float format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockSize {
    pub outputs: usize,
    pub inputs: usize,
}

impl Default for BlockSize {
    fn default() -> BlockSize {
        BlockSize { outputs: 128, inputs: 128 }
    }
}

impl BlockSize {
    /// Reads a pair of numbers. If absent or null, the default applies.
    fn parse(fields: &Fields, key: &str) -> Result<BlockSize> {
        match fields.indices(key, 1 << 20)?[..] {
            [] => Ok(BlockSize::default()),
            [outputs, inputs] if outputs > 0 && inputs > 0 => Ok(BlockSize { outputs, inputs }),
            _ => Err(fields.error(key, "two numbers above 0", "others")),
        }
    }
}

/// The quantisation of all modules. A matrix is quantised if the file has scales for it.
///
/// Overrides are read when their module is loaded: some belong to other towers, in formats that text models do not
/// need.
#[derive(Debug, Default)]
pub(crate) struct Quantization<'a> {
    default: Option<Scheme>,
    block: BlockSize,
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
            // gpt-oss: the experts' tensors have their own names.
            Some("mxfp4") => return Ok(Quantization::default()),
            Some("fp8") => return Ok(Quantization::of_blocks(BlockSize::parse(&fields, "weight_block_size")?)),
            Some("compressed-tensors") => return compressed(&fields).map(Quantization::of_blocks),
            Some(method) => {
                let expected = "\"mxfp4\", \"fp8\" or \"compressed-tensors\", or absent in files of MLX";
                return Err(fields.error("quant_method", expected, format_args!("{method:?}")));
            }
        }
        let default = scheme(&fields, None)?;
        let modules = fields.keys().filter(|key| !matches!(*key, "bits" | "group_size" | "mode"));
        let overrides = modules.map(|key| (canonical(key), key)).collect();
        Ok(Quantization { default: Some(default), overrides, fields: Some(fields), block: BlockSize::default() })
    }

    /// The formats of these files are detected from the tensors.
    fn of_blocks(block: BlockSize) -> Quantization<'a> {
        Quantization { block, ..Quantization::default() }
    }

    /// The block size of 8-bit floats.
    pub(crate) fn block(&self) -> BlockSize {
        self.block
    }

    /// The scheme of a module such as `model.layers.0.mlp.up_proj`, with any prefix. `None` if the configuration has no
    /// scheme, or has `false` for this module.
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

/// Checks the formats of a compressed-tensors file, and returns its blocks.
fn compressed(fields: &Fields) -> Result<BlockSize> {
    let format = fields.string("format")?.unwrap_or("dense");
    if !matches!(format, "dense" | "pack-quantized" | "float-quantized" | "mixed-precision") {
        let expected = "\"pack-quantized\" or \"float-quantized\"";
        return Err(fields.error("format", expected, format_args!("{format:?}")));
    }
    let Some(groups) = fields.object("config_groups")? else { return Ok(BlockSize::default()) };
    for key in groups.keys() {
        let Some(group) = groups.object(key)? else { continue };
        if let Some(weights) = group.object("weights")?.filter(|weights| weights.get("block_structure").is_some()) {
            return BlockSize::parse(&weights, "block_structure");
        }
    }
    Ok(BlockSize::default())
}

/// MLX's modes.
const MODES: &str = "\"affine\", \"mxfp4\", \"mxfp8\" or \"nvfp4\"";

/// Parses the scheme of one object. An override inherits missing bits and group size from an affine default, but never
/// the mode.
fn scheme(fields: &Fields, default: Option<Scheme>) -> Result<Scheme> {
    let mode = fields.string("mode")?.unwrap_or("affine");
    if mode != "affine" {
        let format = FloatFormat::ALL.into_iter().find(|format| format.to_string() == mode);
        return floats(fields, format.ok_or_else(|| fields.error("mode", MODES, format_args!("{mode:?}")))?);
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

/// These modes have a fixed width and group size.
fn floats(fields: &Fields, format: FloatFormat) -> Result<Scheme> {
    for (key, only) in [("bits", format.bits()), ("group_size", format.group())] {
        let given = fields.size(key, Some(only), 1024)?;
        if given != only {
            return Err(fields.error(key, format_args!("{only} in mode \"{format}\""), given));
        }
    }
    Ok(Scheme::Floats(format))
}

/// Removes the prefixes that checkpoints add to a text model's tensor names.
fn canonical(name: &str) -> &str {
    ["model.language_model.", "language_model.model.", "language_model.", "model."]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(name)
}
