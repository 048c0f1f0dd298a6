//! The field `kv_transfer_params`, as vLLM's HTTP API and its proxies have it.

use kvant_engine::hex;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// `kv_transfer_params` of a request. A proxy sends `do_remote_decode` to the worker that computes the prompt, and
/// passes the field of its answer to the worker that continues.
///
/// A client that calls both workers at once chooses the token: 64 random hexadecimal digits, as `remote_token` in both
/// requests.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct TransferParams {
    /// Another worker continues the prompt.
    do_remote_decode: Option<bool>,
    /// Another worker has computed the prompt.
    do_remote_prefill: Option<bool>,
    remote_host: Option<String>,
    /// A number, or as text: numbers of protocol buffers become fractions.
    remote_port: Option<Value>,
    /// kvant's own: the one-time token.
    remote_token: Option<String>,
    /// Fields that kvant does not need.
    #[serde(flatten)]
    _others: Map<String, Value>,
}

/// Where the pages of a prompt are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub host: String,
    pub port: u16,
    pub token: [u8; 32],
}

impl TransferParams {
    /// Whether the prompt's pages should be offered.
    pub fn is_offer_asked(&self) -> bool {
        self.do_remote_decode == Some(true)
    }

    /// Whether another worker has, or computes, the prompt's pages.
    pub fn has_source(&self) -> bool {
        self.do_remote_prefill == Some(true)
    }

    /// The token that the client has chosen; `Some(None)` if it is invalid.
    pub(crate) fn token(&self) -> Option<Option<[u8; 32]>> {
        self.remote_token.as_deref().map(hex::parse)
    }

    /// Where the prompt's pages are. `None` if nobody has computed it, `Some(Err)` if the field lacks something.
    pub(crate) fn source(&self) -> Option<Result<Source, &'static str>> {
        let source = || {
            let host = self.remote_host.clone().ok_or("`remote_host` is missing")?;
            let port = self.remote_port.as_ref().ok_or("`remote_port` is missing")?;
            let port = parse_port(port).ok_or("`remote_port` is invalid")?;
            let token = self.token().ok_or("`remote_token` is missing")?.ok_or("`remote_token` is invalid")?;
            Ok(Source { host, port, token })
        };
        self.has_source().then(source)
    }
}

/// The field in an answer that offers nothing.
pub fn not_offered(engine_id: &str) -> Value {
    json!({"do_remote_prefill": false, "do_remote_decode": false, "remote_engine_id": engine_id})
}

fn parse_port(port: &Value) -> Option<u16> {
    match port {
        Value::String(text) => text.parse().ok(),
        Value::Number(number) => {
            let port = number.as_f64()?;
            // In range, the conversion is exact.
            (port.fract() == 0.0 && (0.0..=f64::from(u16::MAX)).contains(&port)).then_some(port as u16)
        }
        _ => None,
    }
}

/// The field in an answer that offers `pages` pages of a prompt.
pub fn offered(engine_id: &str, source: &Source, pages: usize) -> Value {
    json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_engine_id": engine_id,
        "remote_block_ids": (0..pages).collect::<Vec<usize>>(),
        "remote_host": source.host,
        "remote_port": source.port,
        "remote_token": hex::of(&source.token),
        "tp_size": 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(value: Value) -> TransferParams {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn an_offer_is_a_source() {
        let source = Source { host: "10.0.0.1".to_string(), port: 5600, token: [0xa7; 32] };
        let offer = params(offered("id", &source, 3));
        assert_eq!(offer.source(), Some(Ok(source)));
        assert!(!offer.is_offer_asked());
    }

    #[test]
    fn requests_of_proxies() {
        let asked = params(json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
            "remote_host": null, "remote_port": null, "anything": {"else": 1},
        }));
        assert!(asked.is_offer_asked() && asked.source().is_none());
        let of = |token: &str| {
            let value = json!({"do_remote_prefill": true, "remote_host": "h", "remote_port": 1, "remote_token": token});
            params(value).source()
        };
        for token in ["", "12", &"é".repeat(32), &"+1".repeat(32), &"g".repeat(64)] {
            assert!(matches!(of(token), Some(Err(_))), "{token}");
        }
        assert!(matches!(of(&"0A".repeat(32)), Some(Ok(_))));
        for (port, want) in [
            (json!(5600), Some(5600)),
            (json!("5600"), Some(5600)),
            (json!(5600.0), Some(5600)),
            (json!(5600.5), None),
            (json!(-1), None),
            (json!(65536), None),
            (json!(1e300), None),
            (json!(""), None),
            (json!([1]), None),
        ] {
            assert_eq!(parse_port(&port), want, "{port}");
        }
        assert!(matches!(params(json!({"do_remote_prefill": true})).source(), Some(Err(_))));
    }
}
