//! Reads and checks request bodies.

use std::{fmt::Display, io::Read, sync::Arc};

use axum::{
    body::Body,
    extract::{FromRequest, Request},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use flate2::read::MultiGzDecoder;
use futures_util::StreamExt;
use kvant_models::chat::JsonValue;
use serde::de::DeserializeOwned;

use crate::{
    app::App,
    blocking::blocking,
    error::{ApiError, Result},
    fields,
};

/// A JSON body of a request or a response.
#[derive(Debug)]
pub(crate) struct Json<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self> {
        check_content_type(request.headers())?;
        let is_compressed = is_gzip(request.headers())?;
        let limit = app.options.body_limit;
        let too_long = || {
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is longer than the limit of {limit} bytes"))
        };
        let declared =
            request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        if declared.is_some_and(|length: u64| length > discarded(limit) as u64) {
            return Err(too_long());
        }
        let read = tokio::time::timeout(app.options.body_time, read(request.into_body(), limit)).await;
        let late = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
        let bytes = read.map_err(late)??.ok_or_else(too_long)?;
        let is_strict = app.options.strict_fields;
        if !is_compressed {
            return parse(&bytes, is_strict).map(Json);
        }
        let unpacked = blocking(move || unpacked(&bytes, limit)).await??;
        parse(&unpacked.ok_or_else(too_long)?, is_strict).map(Json)
    }
}

/// `Display` of a JSON value writes JSON.
impl<T: Display> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, "application/json")], self.0.to_string()).into_response()
    }
}

/// Maximum bytes of an oversized body that are read and discarded. A client that is still sending does not read the
/// response.
fn discarded(limit: usize) -> usize {
    limit.saturating_mul(8)
}

/// Reads a body. Returns `None` if it exceeds the limit.
async fn read(body: Body, limit: usize) -> Result<Option<Vec<u8>>> {
    let (mut pieces, mut bytes, mut length) = (body.into_data_stream(), Vec::new(), 0_usize);
    while let Some(piece) = pieces.next().await {
        let gone = |_| ApiError::new(StatusCode::BAD_REQUEST, "the body has ended early");
        let piece = piece.map_err(gone)?;
        length = length.saturating_add(piece.len());
        if length <= limit {
            bytes.extend_from_slice(&piece);
        } else if length > discarded(limit) {
            break;
        } else {
            bytes = Vec::new();
        }
    }
    Ok((length <= limit).then_some(bytes))
}

/// Whether the body is compressed with gzip.
fn is_gzip(headers: &HeaderMap) -> Result<bool> {
    let encoding = headers.get(header::CONTENT_ENCODING).map(|value| value.to_str().unwrap_or("?").trim());
    match encoding.map(str::to_ascii_lowercase).as_deref() {
        None | Some("" | "identity") => Ok(false),
        Some("gzip" | "x-gzip") => Ok(true),
        Some(other) => {
            let other: String = other.chars().take(32).collect();
            let message = format!("the header Content-Encoding must be gzip or identity, got {other:?}");
            Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
        }
    }
}

/// Decompresses a body. Returns `None` if it exceeds the limit.
fn unpacked(bytes: &[u8], limit: usize) -> Result<Option<Vec<u8>>> {
    let mut unpacked = Vec::new();
    let max = (limit as u64).saturating_add(1);
    let read = MultiGzDecoder::new(bytes).take(max).read_to_end(&mut unpacked);
    let invalid = |error| ApiError::new(StatusCode::BAD_REQUEST, format!("the body is not valid gzip: {error}"));
    let length = read.map_err(invalid)?;
    Ok((length <= limit).then_some(unpacked))
}

/// Requires `application/json`. Browsers let any page send other types without a preflight request, even to localhost.
fn check_content_type(headers: &HeaderMap) -> Result<()> {
    let media = headers.get(header::CONTENT_TYPE).and_then(|media| media.to_str().ok()).unwrap_or_default();
    let media = media.split(';').next().unwrap_or_default().trim();
    if media.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!("the header Content-Type must be application/json, got {media:?}");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}

/// Parses a JSON body. An unknown field is an error, unless its value is null. An unknown hint is an error only if
/// `is_strict`.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8], is_strict: bool) -> Result<T> {
    let invalid = |error: &dyn std::fmt::Display| {
        ApiError::new(StatusCode::BAD_REQUEST, format!("the body is not valid JSON: {error}"))
    };
    let text = std::str::from_utf8(bytes).map_err(|error| invalid(&error))?;
    let value = JsonValue::parse(text).map_err(|error| invalid(&error))?;
    if !value.is_object() {
        return Err(ApiError::new(StatusCode::BAD_REQUEST, "the body must be a JSON object"));
    }
    typed(&value, is_strict)
}

/// Converts JSON to a type.
fn typed<T: DeserializeOwned>(value: &JsonValue, is_strict: bool) -> Result<T> {
    let mut unknown: Option<String> = None;
    let mut track = serde_path_to_error::Track::new();
    let typed = {
        let tracked = serde_path_to_error::Deserializer::new(value, &mut track);
        let mut ignored = |path: serde_ignored::Path<'_>| {
            let path = field_path(&path.to_string());
            let is_hint = !is_strict && fields::is_hint(&path);
            if !is_hint && !at(value, &path).is_some_and(JsonValue::is_null) {
                unknown.get_or_insert(path);
            }
        };
        T::deserialize(serde_ignored::Deserializer::new(tracked, &mut ignored))
    };
    if let Some(field) = unknown {
        return Err(ApiError::unsupported(with_brackets(&field), "this server does not know the field"));
    }
    typed.map_err(|error| {
        let (message, path) = (error.to_string(), track.path().to_string());
        let missing = message.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        let is_missing = missing.is_some();
        let path = missing.map_or_else(|| field_path(&path), |field| join(&path, field));
        let message = if is_missing { "the field is missing".to_string() } else { without_rust(&message) };
        ApiError::field(&path, if path.is_empty() { message } else { format!("`{path}`: {message}") })
    })
}

/// Returns the value at a path such as `a.0.b`.
fn at<'v>(value: &'v JsonValue, path: &str) -> Option<&'v JsonValue> {
    path.split('.').try_fold(value, |value, part| match value {
        JsonValue::Object(fields) => fields.get(part),
        JsonValue::Array(items) => items.get(part.parse::<usize>().ok()?),
        _ => None,
    })
}

/// Replaces names of Rust types in a message of serde.
fn without_rust(message: &str) -> String {
    let Some((rest, kind)) = message.rsplit_once("expected ") else { return message.to_string() };
    let kind = match kind {
        "f32" | "f64" => "a number",
        "u8" | "u32" | "u64" | "usize" => "a non-negative integer",
        "i8" | "i32" | "i64" => "an integer",
        "a sequence" => "a list",
        "a map" => "an object",
        kind => kind,
    };
    format!("{rest}expected {kind}")
}

/// Converts `a.0.b` to `a[0].b`.
fn with_brackets(path: &str) -> String {
    let mut out = String::new();
    for part in path.split('.') {
        match part.parse::<usize>() {
            Ok(index) => out += &format!("[{index}]"),
            Err(_) if out.is_empty() => out += part,
            Err(_) => out += &format!(".{part}"),
        }
    }
    out
}

fn join(path: &str, field: &str) -> String {
    let path = field_path(path);
    if path.is_empty() { field.to_string() } else { format!("{path}.{field}") }
}

/// Removes serde's markers of optional values from a path.
fn field_path(path: &str) -> String {
    path.split('.').filter(|part| !part.is_empty() && *part != "?").collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Outer {
        inner: Option<Inner>,
        #[expect(dead_code, reason = "only its type is tested")]
        list: Option<Vec<Inner>>,
    }

    #[derive(Debug, Deserialize)]
    struct Inner {
        number: u32,
    }

    fn param(json: &str) -> String {
        parse::<Outer>(json.as_bytes(), true).unwrap_err().param.unwrap_or_default()
    }

    #[test]
    fn errors_name_the_field() {
        assert_eq!(param(r#"{"other": 1}"#), "other");
        assert_eq!(param(r#"{"inner": {"number": 1, "more": 2}}"#), "inner.more");
        assert_eq!(param(r#"{"inner": {"number": -1}}"#), "inner.number");
        assert_eq!(param(r#"{"inner": {}}"#), "inner.number");
        assert_eq!(param(r#"{"list": [{"number": 1}, {"number": "x"}]}"#), "list[1].number");
        assert_eq!(param(r#"{"list": [{"number": 1, "y": 0}]}"#), "list[0].y");
        for json in ["", "[]", "{", "nul"] {
            assert_eq!(param(json), "", "{json}");
        }
    }

    #[test]
    fn messages_name_no_type_of_rust() {
        let message = |json: &str| parse::<Outer>(json.as_bytes(), true).unwrap_err().message;
        assert_eq!(message(r#"{"inner": {}}"#), "`inner.number`: the field is missing");
        let negative = "`inner.number`: invalid value: integer `-1`, expected a non-negative integer";
        assert_eq!(message(r#"{"inner": {"number": -1}}"#), negative);
        assert!(message(r#"{"list": 5}"#).ends_with("expected a list"));
    }

    #[test]
    fn null_is_no_value() {
        let outer: Outer = parse(br#"{"inner": null, "other": null}"#, true).unwrap();
        assert!(outer.inner.is_none());
        parse::<Outer>(br#"{"list": [{"number": 1, "more": null}]}"#, true).unwrap();
        assert_eq!(parse::<Outer>(br#"{"inner": {"number": 7}}"#, true).unwrap().inner.unwrap().number, 7);
    }
}
