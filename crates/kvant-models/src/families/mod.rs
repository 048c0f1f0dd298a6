//! The model families: each converts its `config.json` to a decoder description, and names its tensors.
//!
//! # Add a family
//!
//! 1. Write `families/NAME.rs` with a [`Family`], and add it to [`FAMILIES`].
//! 2. `describe` reads the keys. It must read every key of the family: a value that would change the arithmetic in ways
//!    that the description cannot express is an error that names the key. Unknown keys are ignored.
//! 3. `names` is the family's table of tensors, followed by the tables that complete it.
//! 4. Add its types to the table of `tools/config_defaults.py` and run it: absent keys get the defaults of the class in
//!    transformers (`defaults.json`), so `describe` contains none.
//! 5. Add a golden checkpoint (`tools/golden_families.py`), and its name to the tests' list.
//!
//! [`common`] reads the keys shared by most families, [`rope`] the scalings of rotary embeddings.

mod common;
mod defaults;
mod ernie4_5;
mod ernie4_5_moe;
mod exaone4;
mod experts;
mod family;
mod gemma3;
mod gemma4;
mod glm4_moe;
mod gpt_oss;
mod granite;
mod hunyuan;
mod hunyuan_v1_moe;
mod kind;
mod lfm2;
mod limits;
mod llama;
mod minimax_m2;
mod ministral3;
mod muse_glimmer;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_next;
mod rope;
mod seed_oss;
mod smollm3;

use serde_json::Value;

use crate::{
    Config, Error, Result,
    config::{fields::Fields, once_each},
};
use common::{ConfigJson, MAX_POSITIONS};
pub(crate) use family::{ExpertLayout, Family, Names};

static FAMILIES: [&Family; 25] = [
    &ernie4_5::FAMILY,
    &ernie4_5_moe::FAMILY,
    &exaone4::FAMILY,
    &gemma3::FAMILY,
    &gemma4::FAMILY,
    &glm4_moe::FAMILY,
    &gpt_oss::FAMILY,
    &granite::FAMILY,
    &granite::HYBRID,
    &hunyuan::FAMILY,
    &hunyuan_v1_moe::FAMILY,
    &lfm2::FAMILY,
    &llama::FAMILY,
    &minimax_m2::FAMILY,
    &ministral3::FAMILY,
    &muse_glimmer::FAMILY,
    &olmo2::FAMILY,
    &phi3::FAMILY,
    &qwen2::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3::FAMILY,
    &qwen3_next::FAMILY,
    &qwen3_next::NEXT,
    &seed_oss::FAMILY,
    &smollm3::FAMILY,
];

/// The family of a [`Config`].
pub(crate) fn named(name: &str) -> Result<&'static Family> {
    FAMILIES.into_iter().find(|family| family.name == name).ok_or_else(|| unsupported(format!("family {name:?}")))
}

/// Checks a parsed `config.json`.
pub(crate) fn parse(json: &Value) -> Result<Config> {
    let outer = Fields::new(json)?;
    let mut text = outer.clone();
    let whole_type = type_of(&outer)?;
    let mut model_type = whole_type.clone();
    let wrappers = || FAMILIES.iter().flat_map(|family| family.wrappers.iter().map(move |names| (family, names)));
    if let Some((family, (_, inner))) = wrappers().find(|(_, (wrapper, _))| *wrapper == model_type) {
        let may_be_flat = family.model_types.contains(&model_type.as_str());
        let mut named = false;
        match outer.object("text_config")? {
            Some(inner) => {
                named = ["model_type", "architectures"].iter().any(|key| inner.get(key).is_some());
                text = inner;
            }
            None if may_be_flat => {}
            None => return Err(outer.missing("text_config", "an object")),
        }
        model_type = if named { type_of(&text)? } else { (*inner).to_string() };
    }
    let family = FAMILIES.into_iter().find(|family| family.model_types.contains(&model_type.as_str()));
    let family = family.ok_or_else(|| unsupported(format!("model_type {model_type:?}")))?;
    let mut keys = defaults::complete(&model_type, &text, &outer)?;
    let is_tied_outside = defaults::is_tied_outside(&whole_type, &model_type, &text, &outer);
    if is_tied_outside {
        keys.remove(defaults::TIED);
    }
    let json = ConfigJson { model_type, text: text.with_keys(&keys), outer, is_tied_outside };
    let decoder = (family.describe)(&json)?;
    decoder.check()?;
    let ConfigJson { text, outer, .. } = &json;
    Ok(Config {
        family: family.name,
        decoder,
        max_position_embeddings: text.size_or_null("max_position_embeddings", MAX_POSITIONS)?,
        bos_token_id: match text.token_ids("bos_token_id")?.first() {
            Some(&id) => Some(id),
            None => outer.token_ids("bos_token_id")?.first().copied(),
        },
        eos_token_ids: {
            let mut ids = outer.token_ids("eos_token_id")?;
            ids.extend(text.token_ids("eos_token_id")?);
            once_each(ids)
        },
    })
}

/// The `model_type`, or for files without it the type implied by `architectures`.
fn type_of(fields: &Fields) -> Result<String> {
    if let Some(name) = fields.string("model_type")? {
        return Ok(name.to_string());
    }
    let Some(name) = fields.get("architectures").and_then(|names| names.get(0)).and_then(Value::as_str) else {
        return Err(fields.missing("model_type", format_args!("one of {}", known_types())));
    };
    let mut known = FAMILIES.iter().flat_map(|family| family.architectures);
    match known.find(|(architecture, _)| *architecture == name) {
        Some((_, model_type)) => Ok((*model_type).to_string()),
        None => Err(unsupported(format!("architecture {name:?}"))),
    }
}

fn unsupported(what: String) -> Error {
    Error::Unsupported { what, reason: format!("kvant-models runs the text models of model_type {}", known_types()) }
}

/// Every `model_type`, for messages.
fn known_types() -> String {
    let types = |family: &&'static Family| {
        let wrappers = family.wrappers.iter().map(|(wrapper, _)| *wrapper);
        family.model_types.iter().copied().chain(wrappers).collect::<Vec<_>>()
    };
    let mut types: Vec<&str> = FAMILIES.iter().flat_map(types).collect();
    types.sort_unstable();
    types.dedup();
    types.join(", ")
}
