//! API keys.

use axum::http::{HeaderMap, StatusCode, header};
use subtle::{Choice, ConstantTimeEq};

use crate::error::{ApiError, Result};

/// The keys that clients can use. Empty: no key is needed.
#[derive(Clone, Default)]
pub struct ApiKeys(Vec<String>);

impl ApiKeys {
    /// Keys, without those that are empty.
    pub fn new<K: Into<String>>(keys: impl IntoIterator<Item = K>) -> ApiKeys {
        ApiKeys(keys.into_iter().map(Into::into).filter(|key: &String| !key.is_empty()).collect())
    }

    /// One key a line. Empty lines and lines that start with `#` are skipped.
    pub fn parse(lines: &str) -> ApiKeys {
        ApiKeys::new(lines.lines().map(str::trim).filter(|line| !line.starts_with('#')))
    }

    /// Whether no key is needed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the keys of `other`.
    #[must_use]
    pub fn and(mut self, other: ApiKeys) -> ApiKeys {
        self.0.extend(other.0);
        self
    }

    /// Checks the key in `Authorization: Bearer KEY` or `x-api-key: KEY`.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let refused = |message: &str| {
            let error = ApiError::new(StatusCode::UNAUTHORIZED, message);
            Err(ApiError { code: Some("invalid_api_key"), ..error })
        };
        match key(headers) {
            None => refused("an API key is needed: send it in the header `Authorization: Bearer KEY`"),
            Some(key) if self.contains(key) => Ok(()),
            Some(_) => refused("the API key is wrong"),
        }
    }

    /// Compares with every key, each in a time that depends on its length only.
    fn contains(&self, key: &[u8]) -> bool {
        let equal = self.0.iter().map(|known| known.as_bytes().ct_eq(key));
        equal.fold(Choice::from(0), |any, equal| any | equal).into()
    }
}

/// The key that a client sends.
pub(crate) fn key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()).and_then(|value| {
        let (scheme, key) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()))
}

/// Prints no key.
impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_in_either_header() {
        let keys = ApiKeys::parse("# users\n secret \n\nother\n").and(ApiKeys::new(["third", ""]));
        let check = |name: &'static str, value: &str| {
            keys.check(&HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())])).is_ok()
        };
        assert!(check("authorization", "Bearer secret") && check("authorization", "bearer other"));
        assert!(check("x-api-key", "third"));
        for wrong in ["Bearer secre", "Bearer secrett", "secret", "Basic secret", "Bearer ", "Bearer # users", ""] {
            assert!(!check("authorization", wrong), "{wrong:?}");
        }
        assert!(keys.check(&HeaderMap::new()).is_err());
        assert!(ApiKeys::new([""; 1]).check(&HeaderMap::new()).is_ok());
        assert_eq!(format!("{keys:?}"), "ApiKeys(3)");
    }
}
