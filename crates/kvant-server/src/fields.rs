//! Fields of objects whose format depends on other fields, and which no type describes.

use kvant_models::chat::JsonValue;

use crate::error::{ApiError, Result};

/// Fields without effect on the answer: speed, cost, retention, truncation and caching of prompts by other servers, and
/// parts of other servers' answers that clients send back. `*` matches any index.
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

/// Whether a field has no effect here. An example of `path` is `messages.0.cache_control`.
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

/// Rejects unknown fields of an object, unless they are null.
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

/// Returns a field, which must be a string.
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
