//! The field `kv_transfer_params`, as vLLM's HTTP API and its proxies have it.

use serde::Deserialize;
use serde_json::{Map, Value, json};

/// `kv_transfer_params` of a request. A proxy sends `do_remote_decode` to the worker that computes the prompt, and
/// passes the field of its answer to the worker that continues.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct TransferParams {
    /// Another worker continues the prompt.
    do_remote_decode: Option<bool>,
    /// Another worker has computed the prompt.
    do_remote_prefill: Option<bool>,
    remote_host: Option<String>,
    remote_port: Option<u16>,
    /// kvant's own: the one-time token.
    remote_token: Option<String>,
    /// Fields that kvant does not need.
    #[serde(flatten)]
    _others: Map<String, Value>,
}

/// Where the pages of a prompt are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub host: String,
    pub port: u16,
    pub token: [u8; 32],
}

impl TransferParams {
    /// Whether the answer should offer the prompt's pages.
    pub fn is_offer_asked(&self) -> bool {
        self.do_remote_decode == Some(true)
    }

    /// Where the prompt's pages are. `None` if nobody has computed it, `Some(Err)` if the field lacks something.
    pub fn source(&self) -> Option<Result<Source, &'static str>> {
        if self.do_remote_prefill != Some(true) {
            return None;
        }
        let source = || {
            let host = self.remote_host.clone().ok_or("without `remote_host`")?;
            let port = self.remote_port.ok_or("without `remote_port`")?;
            let token = self.remote_token.as_deref().ok_or("without `remote_token`")?;
            Ok(Source { host, port, token: parse_token(token).ok_or("with an invalid `remote_token`")? })
        };
        Some(source())
    }
}

/// The field in an answer that offers `pages` pages of a prompt.
pub(crate) fn offered(engine_id: &str, source: &Source, pages: usize) -> Value {
    let token: String = source.token.iter().map(|byte| format!("{byte:02x}")).collect();
    json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_engine_id": engine_id,
        "remote_block_ids": (0..pages).collect::<Vec<usize>>(),
        "remote_host": source.host,
        "remote_port": source.port,
        "remote_token": token,
        "tp_size": 1,
    })
}

fn parse_token(text: &str) -> Option<[u8; 32]> {
    if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut token = [0; 32];
    for (byte, at) in token.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&text[at..at + 2], 16).ok()?;
    }
    Some(token)
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
        assert!(matches!(params(json!({"do_remote_prefill": true})).source(), Some(Err(_))));
    }
}
