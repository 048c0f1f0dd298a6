//! Defaults of keys that a configuration leaves out: those of the family's class in transformers.

use std::{collections::HashMap, sync::LazyLock};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{Result, config::fields::Fields};

/// The class of a `model_type`.
#[derive(Debug, Deserialize)]
struct Class {
    /// Keys and their values.
    keys: Map<String, Value>,
    /// Other names of keys.
    #[serde(default)]
    aliases: Map<String, Value>,
}

/// Written by `tools/config_defaults.py`, from the classes themselves.
static CLASSES: LazyLock<HashMap<String, Class>> =
    LazyLock::new(|| serde_json::from_str(include_str!("defaults.json")).unwrap_or_default());

/// Whether the embedding is the output matrix.
pub(super) const TIED: &str = "tie_word_embeddings";

/// Whether a file leaves [`TIED`] out that its class ties by default and its text model's class does not.
pub(super) fn is_tied_outside(whole_type: &str, model_type: &str, text: &Fields, outer: &Fields) -> bool {
    let default = |model_type| CLASSES.get(model_type).and_then(|class| class.keys.get(TIED)).and_then(Value::as_bool);
    let is_absent = [text, outer].iter().all(|fields| fields.get(TIED).is_none());
    is_absent && default(whole_type) == Some(true) && default(model_type) == Some(false)
}

/// The keys of a text model, with those that it leaves out. `outer` is the whole file.
///
/// A key that is null is not left out: many classes give null a meaning of its own.
///
/// # Errors
/// `Config` for a key with two names and two values.
pub(super) fn complete(model_type: &str, text: &Fields, outer: &Fields) -> Result<Map<String, Value>> {
    let mut map = text.map().clone();
    let Some(class) = CLASSES.get(model_type) else { return Ok(map) };
    for (alias, name) in class.aliases.iter().filter_map(|(alias, name)| Some((alias, name.as_str()?))) {
        match (text.get(alias), text.get(name)) {
            (Some(one), Some(other)) if one != other => {
                return Err(text.error(alias, format_args!("absent or the same as {name}"), one));
            }
            (Some(value), _) => drop(map.insert(name.to_string(), value.clone())),
            (None, Some(value)) => drop(map.insert(alias.clone(), value.clone())),
            (None, None) => {}
        }
    }
    // All classes read null like nothing here.
    if map.get("rope_parameters").is_some_and(Value::is_null) {
        map.remove("rope_parameters");
    }
    // These may be next to the text model.
    let is_outer = |key: &str| ["vocab_size", TIED].contains(&key) && outer.get(key).is_some();
    for (key, value) in class.keys.iter().filter(|(key, _)| !is_outer(key)) {
        if !map.contains_key(key) {
            map.insert(key.clone(), value.clone());
        }
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::{FAMILIES, Family};

    #[test]
    fn every_model_type_has_its_defaults() {
        let is_wrapper = |family: &Family, name: &str| family.wrappers.iter().any(|(wrapper, _)| *wrapper == name);
        let types = FAMILIES.into_iter().flat_map(|family| family.model_types.iter().map(move |name| (family, name)));
        for (_, model_type) in types.filter(|(family, name)| !is_wrapper(family, name)) {
            let class = CLASSES.get(*model_type).unwrap_or_else(|| panic!("{model_type} has no defaults"));
            assert!(class.keys.contains_key("rms_norm_eps"), "{model_type}");
        }
    }
}
