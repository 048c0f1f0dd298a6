//! Fields of objects whose form depends on other fields, so that no type describes them.

use kvant_models::chat::JsonValue;

use crate::error::{ApiError, Result};

/// Refuses fields of an object that are not among the known ones, unless they are null.
pub(crate) fn only_fields(value: &JsonValue, path: &str, known: &[&str]) -> Result<()> {
    let fields = value.as_object().into_iter().flatten();
    let mut others = fields.filter(|(key, value)| !value.is_null() && !known.contains(&key.as_str()));
    match others.next() {
        Some((key, _)) => {
            let key: String = key.chars().take(64).collect();
            Err(ApiError::unsupported(format!("{path}.{key}"), "this server does not know the field"))
        }
        None => Ok(()),
    }
}

/// The string of a field.
pub(crate) fn string<'v>(value: &'v JsonValue, path: &str, field: &str) -> Result<&'v str> {
    let path = format!("{path}.{field}");
    value[field].as_str().ok_or_else(|| ApiError::field(&path, format!("`{path}` must be a string")))
}
