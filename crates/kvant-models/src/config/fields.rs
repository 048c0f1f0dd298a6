//! Typed, range-checked access to the keys of a JSON object. Every error names the key.

use std::{fmt::Display, path::Path};

use serde_json::{Map, Value};

use crate::{Error, Result};

/// A JSON object and its path in the file.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(json: &'a Value) -> Result<Fields<'a>> {
        let map = json.as_object().ok_or_else(|| Error::Config {
            key: "(file)".to_string(),
            expected: "a JSON object".to_string(),
            got: shown(json),
        })?;
        Ok(Fields { map, path: String::new() })
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key)
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    pub(crate) fn error(&self, key: &str, expected: impl Display, got: impl Display) -> Error {
        let mut got = got.to_string();
        // Values in malicious files can be long.
        if let Some((end, _)) = got.char_indices().nth(80) {
            got.truncate(end);
            got.push('…');
        }
        Error::Config { key: format!("{}{key}", self.path), expected: expected.to_string(), got }
    }

    pub(crate) fn missing(&self, key: &str, expected: impl Display) -> Error {
        self.error(key, expected, if self.map.contains_key(key) { "null" } else { "nothing" })
    }

    pub(crate) fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// Other keys at one place in the file.
    pub(crate) fn with_keys<'b>(&self, map: &'b Map<String, Value>) -> Fields<'b> {
        Fields { map, path: self.path.clone() }
    }

    /// The value, if it exists and is not null.
    fn present(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// A nested object; `None` if it is absent or null.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Fields<'a>>> {
        let Some(value) = self.present(key) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.error(key, "an object", shown(value)))?;
        Ok(Some(Fields { map, path: format!("{}{key}.", self.path) }))
    }

    /// The first of these objects that exists.
    pub(crate) fn first_of(&self, keys: &[&str]) -> Result<Option<Fields<'a>>> {
        for key in keys {
            if let Some(fields) = self.object(key)? {
                return Ok(Some(fields));
            }
        }
        Ok(None)
    }

    pub(crate) fn string(&self, key: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.present(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.error(key, "a string", shown(value)))
    }

    pub(crate) fn bool_or_null(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.present(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.error(key, "true or false", shown(value)))
    }

    /// An integer from `min` to `max`; `None` if it is absent or null.
    fn whole(&self, key: &str, min: usize, max: usize) -> Result<Option<usize>> {
        let Some(value) = self.present(key) else { return Ok(None) };
        let number = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (min..=max).contains(n));
        number.map(Some).ok_or_else(|| self.error(key, format_args!("an integer from {min} to {max}"), shown(value)))
    }

    /// A number from 1 to `max`. Without a default, it must exist.
    pub(crate) fn size(&self, key: &str, default: Option<usize>, max: usize) -> Result<usize> {
        let found = self.whole(key, 1, max)?.or(default);
        found.ok_or_else(|| self.missing(key, format_args!("an integer from 1 to {max}")))
    }

    /// A number from 1 to `max`; `None` if it is absent or null.
    pub(crate) fn size_or_null(&self, key: &str, max: usize) -> Result<Option<usize>> {
        self.whole(key, 1, max)
    }

    /// A number from 0 to `max`. Without a default, it must exist.
    pub(crate) fn count(&self, key: &str, default: Option<usize>, max: usize) -> Result<usize> {
        let found = self.whole(key, 0, max)?.or(default);
        found.ok_or_else(|| self.missing(key, format_args!("an integer from 0 to {max}")))
    }

    pub(crate) fn float_or_null(&self, key: &str, expected: &str, ok: impl Fn(f64) -> bool) -> Result<Option<f64>> {
        let Some(value) = self.present(key) else { return Ok(None) };
        let number = value.as_f64().filter(|&x| x.is_finite() && ok(x));
        number.map(Some).ok_or_else(|| self.error(key, expected, shown(value)))
    }

    pub(crate) fn float(
        &self,
        key: &str,
        default: Option<f64>,
        expected: &str,
        ok: impl Fn(f64) -> bool,
    ) -> Result<f64> {
        self.float_or_null(key, expected, ok)?.or(default).ok_or_else(|| self.missing(key, expected))
    }

    /// An array of a given number of numbers.
    pub(crate) fn floats(&self, key: &str, count: usize, expected: &str, ok: impl Fn(f64) -> bool) -> Result<Vec<f64>> {
        let expected = format_args!("an array of {count} numbers {expected}");
        let float = |value: &Value| {
            let float = value.as_f64().filter(|&x| x.is_finite() && ok(x));
            float.ok_or_else(|| self.error(key, expected, shown(value)))
        };
        match self.present(key) {
            Some(Value::Array(values)) if values.len() == count => values.iter().map(float).collect(),
            Some(Value::Array(values)) => Err(self.error(key, expected, format_args!("{} of them", values.len()))),
            Some(value) => Err(self.error(key, expected, shown(value))),
            None => Err(self.missing(key, expected)),
        }
    }

    /// An array of numbers below `limit`; none if the key is absent or null.
    pub(crate) fn indices(&self, key: &str, limit: usize) -> Result<Vec<usize>> {
        let expected = format_args!("an array of integers below {limit}");
        let index = |value: &Value| {
            let index = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n < limit);
            index.ok_or_else(|| self.error(key, expected, shown(value)))
        };
        match self.present(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(values)) => values.iter().map(index).collect(),
            Some(value) => Err(self.error(key, expected, shown(value))),
        }
    }

    /// One or more token ids; none if the key is absent or null.
    pub(crate) fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| self.error(key, "a token id or an array of them", shown(value)))
        };
        match self.present(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(id).collect(),
            Some(value) => Ok(vec![id(value)?]),
        }
    }
}

/// A value for an error message. Arrays and objects may be long, so only their kind is shown.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) => "an array".to_string(),
        Value::Object(_) => "an object".to_string(),
        other => other.to_string(),
    }
}

/// Names `path` instead of `config.json` in an error about a key.
pub(crate) fn in_file<T>(path: &Path, result: Result<T>) -> Result<T> {
    result.map_err(|error| match error {
        Error::Config { key, expected, got } => {
            Error::file(path, format_args!("`{key}` must be {expected}, got {got}"))
        }
        other => other,
    })
}
