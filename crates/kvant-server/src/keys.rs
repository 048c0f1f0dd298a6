//! API keys.

use std::{
    fs, io,
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
};

use axum::http::{HeaderMap, StatusCode, header};
use subtle::{Choice, ConstantTimeEq};

use crate::error::{ApiError, Result};

/// The accepted API keys. If empty, no key is required.
#[derive(Clone, Default)]
pub struct ApiKeys {
    fixed: Vec<String>,
    file: Option<Arc<KeyFile>>,
}

/// A file of keys, which can be reloaded.
struct KeyFile {
    path: PathBuf,
    keys: RwLock<Vec<String>>,
}

impl ApiKeys {
    /// Accepts these keys. Empty ones are ignored.
    pub fn new<K: Into<String>>(keys: impl IntoIterator<Item = K>) -> ApiKeys {
        let fixed = keys.into_iter().map(Into::into).filter(|key: &String| !key.is_empty()).collect();
        ApiKeys { fixed, file: None }
    }

    /// Parses one key per line. Empty lines and lines that start with `#` are skipped.
    pub fn parse(lines: &str) -> ApiKeys {
        ApiKeys::new(lines.lines().map(str::trim).filter(|line| !line.starts_with('#')))
    }

    /// Reads the keys of a file in the format of [`ApiKeys::parse`]. A server that [runs](crate::Server::run) reloads
    /// the file on SIGHUP.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn file(path: impl Into<PathBuf>) -> io::Result<ApiKeys> {
        let path = path.into();
        let keys = RwLock::new(ApiKeys::parse(&fs::read_to_string(&path)?).fixed);
        Ok(ApiKeys { fixed: Vec::new(), file: Some(Arc::new(KeyFile { path, keys })) })
    }

    /// Reloads the file, for all clones. Returns the number of its keys, or `None` without a file. A file without keys
    /// would disable authentication: it is an error, and the previous keys remain.
    ///
    /// # Errors
    /// The file cannot be read, or has no key.
    pub fn reload(&self) -> io::Result<Option<usize>> {
        let Some(file) = &self.file else { return Ok(None) };
        let keys = ApiKeys::parse(&fs::read_to_string(&file.path)?).fixed;
        if keys.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no key"));
        }
        let count = keys.len();
        *file.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
        Ok(Some(count))
    }

    /// Whether no key is required.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        self.fixed.len() + self.of_file().map_or(0, |keys| keys.len())
    }

    fn of_file(&self) -> Option<RwLockReadGuard<'_, Vec<String>>> {
        self.file.as_ref().map(|file| file.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds the keys of `other`, including its file.
    #[must_use]
    pub fn and(mut self, other: ApiKeys) -> ApiKeys {
        self.fixed.extend(other.fixed);
        self.file = other.file.or(self.file);
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

    /// Compares with every key in constant time, except for the length.
    fn contains(&self, key: &[u8]) -> bool {
        let of_file = self.of_file();
        let all = self.fixed.iter().chain(of_file.iter().flat_map(|keys| keys.iter()));
        let equal = all.map(|known| known.as_bytes().ct_eq(key));
        equal.fold(Choice::from(0), |any, equal| any | equal).into()
    }
}

/// The key in the headers of a request.
pub(crate) fn key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()).and_then(|value| {
        let (scheme, key) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()))
}

/// Does not print the keys.
impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKeys({})", self.len())
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

    #[test]
    fn a_file_is_read_again() {
        let path = std::env::temp_dir().join(format!("kvant-keys-{}", std::process::id()));
        fs::write(&path, "one\n").unwrap();
        let keys = ApiKeys::new(["fixed"]).and(ApiKeys::file(&path).unwrap());
        let of_server = keys.clone();
        assert!(of_server.contains(b"one") && of_server.contains(b"fixed") && !of_server.contains(b"two"));
        fs::write(&path, "# new\ntwo\nthree\n").unwrap();
        assert_eq!(keys.reload().unwrap(), Some(2));
        assert!(of_server.contains(b"two") && of_server.contains(b"fixed") && !of_server.contains(b"one"));
        // An empty or unreadable file changes nothing.
        fs::write(&path, "# none\n").unwrap();
        assert!(keys.reload().is_err());
        fs::remove_file(&path).unwrap();
        assert!(keys.reload().is_err() && of_server.contains(b"three"));
        assert_eq!(ApiKeys::new(["a"]).reload().unwrap(), None);
    }
}
