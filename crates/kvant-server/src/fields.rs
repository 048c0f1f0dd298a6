//! Fields of objects whose form depends on other fields, so that no type describes them.

use kvant_models::chat::JsonValue;

use crate::error::{ApiError, Result};

/// Fields that ask for nothing that an answer shows: how fast it comes, what it costs, what is kept, how other servers
/// trim or cache a prompt, and parts of their answers that clients send back. `*` is any index.
const HINTS: [&str; 21] = [
    "cache_control",
    "context_management",
    "inference_geo",
    "max_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "speed",
    "verbosity",
    "messages.*.cache_control",
    "messages.*.provider_specific_fields",
    "messages.*.reasoning_details",
    "messages.*.thinking_blocks",
    "messages.*.tool_calls.*.extra_content",
    "messages.*.tool_calls.*.provider_specific_fields",
    "tools.*.allowed_callers",
    "tools.*.defer_loading",
    "tools.*.eager_input_streaming",
    "tools.*.input_examples",
];

/// Whether a field changes nothing here. `path` is such as `messages.0.cache_control`.
pub(crate) fn is_hint(path: &str) -> bool {
    let is_same = |hint: &str, part: &str| hint == part || hint == "*" && part.bytes().all(|b| b.is_ascii_digit());
    let is = |hint: &&str| {
        let (mut hint, mut path) = (hint.split('.'), path.split('.'));
        loop {
            match (hint.next(), path.next()) {
                (None, None) => return true,
                (Some(hint), Some(part)) if is_same(hint, part) => {}
                _ => return false,
            }
        }
    };
    HINTS.iter().any(is)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_by_their_paths() {
        for path in ["cache_control", "tools.0.eager_input_streaming", "messages.12.tool_calls.3.extra_content"] {
            assert!(is_hint(path), "{path}");
        }
        for path in
            ["temprature", "tools.x.defer_loading", "tools.0", "tools.0.defer_loading.more", "eager_input_streaming"]
        {
            assert!(!is_hint(path), "{path}");
        }
    }
}
