//! The field `kv_transfer_params`: a structure of protocol buffers, as JSON.

use std::time::Instant;

use kvant_engine::EngineRequest;
use kvant_transfer::{Offered, TransferParams};
use prost_types::{ListValue, Struct, Value as ProtoValue, value::Kind};
use serde_json::{Map, Value};
use tonic::Status;

use crate::{request::invalid, server::Shared};

/// The field of a request.
pub(crate) fn params(params: Option<Struct>) -> Result<Option<TransferParams>, Status> {
    let parse = |params| serde_json::from_value(json(params)).map_err(|error| invalid("kv.kv_transfer_params", error));
    params.map(parse).transpose()
}

/// A structure as JSON. Its depth is limited by the decoder of protocol buffers.
fn json(fields: Struct) -> Value {
    Value::Object(fields.fields.into_iter().map(|(name, value)| (name, json_value(value))).collect::<Map<_, _>>())
}

fn json_value(value: ProtoValue) -> Value {
    match value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        // JSON has no infinite numbers.
        Some(Kind::NumberValue(number)) => number.into(),
        Some(Kind::StringValue(text)) => text.into(),
        Some(Kind::BoolValue(value)) => value.into(),
        Some(Kind::StructValue(fields)) => json(fields),
        Some(Kind::ListValue(list)) => list.values.into_iter().map(json_value).collect(),
    }
}

/// The field of an answer.
pub(crate) fn structure(params: &Value) -> Option<Struct> {
    let fields = params.as_object()?.iter().map(|(name, value)| (name.clone(), proto_value(value)));
    Some(Struct { fields: fields.collect() })
}

fn proto_value(value: &Value) -> ProtoValue {
    let kind = match value {
        Value::Null => Kind::NullValue(0),
        Value::Bool(value) => Kind::BoolValue(*value),
        Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or_default()),
        Value::String(text) => Kind::StringValue(text.clone()),
        Value::Array(values) => Kind::ListValue(ListValue { values: values.iter().map(proto_value).collect() }),
        Value::Object(_) => Kind::StructValue(structure(value).unwrap_or_default()),
    };
    ProtoValue { kind: Some(kind) }
}

impl Shared {
    /// Fetches the pages of a prompt that another worker has computed, and offers those of this one, as a request asks
    /// for it. If this fails, the prompt is computed here. Blocks.
    pub fn transfer(&self, params: Option<&TransferParams>, request: &EngineRequest) -> Option<Offered> {
        let params = params?;
        let Some(transfers) = &self.options.transfers else {
            tracing::warn!("`kv_transfer_params` is of no use: this server does not transfer pages");
            return None;
        };
        let started = Instant::now();
        match transfers.fetch(&self.engine, request, params) {
            Ok(None) => {}
            Ok(Some(pages)) => {
                let ms = started.elapsed().as_millis() as u64;
                tracing::info!(pages, ms, "fetched the pages of a prompt");
            }
            Err(reason) => {
                tracing::warn!(%reason, "`kv_transfer_params` is of no use: the prompt is computed here");
            }
        }
        transfers.offer(&self.engine, request, params, ())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_survives_a_structure() {
        let value = json!({"a": null, "b": [1.0, "x", {"c": true}], "d": {"e": -2.5}, "f": []});
        assert_eq!(json(structure(&value).unwrap()), value);
        assert!(structure(&json!([1])).is_none());
        let infinite = ProtoValue { kind: Some(Kind::NumberValue(f64::INFINITY)) };
        assert_eq!(json_value(infinite), Value::Null);
    }

    #[test]
    fn fields_have_types() {
        let of = |value: Value| params(structure(&value));
        assert!(of(json!({"do_remote_decode": true})).unwrap().unwrap().is_offer_asked());
        // Numbers are fractions in a structure.
        let offer = json!({"do_remote_prefill": true, "remote_host": "h", "remote_port": 5600, "remote_token": "x"});
        assert!(of(offer).unwrap().unwrap().has_source());
        let wrong = of(json!({"do_remote_decode": "yes"})).unwrap_err();
        assert!(wrong.message().contains("kv.kv_transfer_params"), "{wrong}");
        assert!(params(None).unwrap().is_none());
    }
}
