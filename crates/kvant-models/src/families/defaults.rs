//! Defaults of keys that a configuration leaves out: those of the family's class in transformers.

use std::sync::LazyLock;

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
static CLASSES: LazyLock<Map<String, Value>> =
    LazyLock::new(|| serde_json::from_str(include_str!("defaults.json")).unwrap_or_default());

fn class(model_type: &str) -> Option<Class> {
    Class::deserialize(CLASSES.get(model_type)?).ok()
}

/// The keys of a text model, with those that it leaves out. `outer` is the whole file.
///
/// A key that is null is not left out: many classes give null a meaning of its own.
///
/// # Errors
/// `Config` for a key with two names and two values.
pub(super) fn complete(model_type: &str, text: &Fields, outer: &Fields) -> Result<Map<String, Value>> {
    let mut map = text.map().clone();
    let Some(class) = class(model_type) else { return Ok(map) };
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
    let is_outer = |key: &str| ["vocab_size", "tie_word_embeddings"].contains(&key) && outer.get(key).is_some();
    for (key, value) in class.keys.into_iter().filter(|(key, _)| !is_outer(key)) {
        map.entry(key).or_insert(value);
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::FAMILIES;

    #[test]
    fn every_model_type_has_its_defaults() {
        for model_type in FAMILIES.into_iter().flat_map(|family| family.model_types) {
            let class = class(model_type).unwrap_or_else(|| panic!("{model_type} has no defaults"));
            assert!(class.keys.contains_key("rms_norm_eps"), "{model_type}");
        }
    }
}
