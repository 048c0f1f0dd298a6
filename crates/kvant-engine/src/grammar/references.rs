//! Converts schemas for `llguidance`: references without escapes, and only formats that it knows.

use serde_json::{Map, Value};

/// The formats that `llguidance` enforces. Others are annotations, as the standard permits.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Removes formats that are annotations. Resolves references that contain escapes, name anchors or use the schema's own
/// id.
pub fn normalize(schema: &mut Value) {
    let mut references = References { root: schema.clone(), key: free_key(schema), found: Vec::new() };
    references.schema(schema);
    let mut targets = Map::new();
    // Targets can contain references.
    while let Some((_, target)) = references.found.get(targets.len()) {
        let mut target = target.clone();
        let name = targets.len().to_string();
        references.schema(&mut target);
        targets.insert(name, target);
    }
    if let (Some(fields), false) = (schema.as_object_mut(), targets.is_empty()) {
        fields.insert(references.key, Value::Object(targets));
    }
}

/// A key that the schema does not contain, to store the targets of references.
fn free_key(schema: &Value) -> String {
    let mut key = "referenced".to_string();
    while schema.get(&key).is_some() {
        key.push('_');
    }
    key
}

struct References {
    root: Value,
    key: String,
    /// Fragments, decoded, and their targets. The index of a fragment is the name of the target's copy.
    found: Vec<(String, Value)>,
}

impl References {
    fn schema(&mut self, schema: &mut Value) {
        match schema {
            Value::Array(items) => items.iter_mut().for_each(|item| self.schema(item)),
            Value::Object(fields) => {
                if fields.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
                    fields.shift_remove("format");
                }
                for (key, value) in fields.iter_mut() {
                    match (key.as_str(), value) {
                        ("const" | "enum" | "default" | "example" | "examples", _) => {}
                        ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(names)) => {
                            names.values_mut().for_each(|value| self.schema(value));
                        }
                        ("$ref", Value::String(reference)) => self.reference(reference),
                        (_, value) => self.schema(value),
                    }
                }
            }
            _ => {}
        }
    }

    /// Replaces a reference that `llguidance` cannot follow with a reference to a copy of its target.
    fn reference(&mut self, reference: &mut String) {
        let id = self.root["$id"].as_str().map(|id| id.trim_end_matches('#')).filter(|id| !id.is_empty());
        let local = id.and_then(|id| reference.strip_prefix(id)).unwrap_or(reference);
        let fragment = local.strip_prefix('#').unwrap_or(local);
        let is_local = local.is_empty() || local.starts_with('#');
        if !is_local || local.len() == reference.len() && is_plain(fragment) {
            return;
        }
        let Some(fragment) = percent_decoded(fragment) else { return };
        let known = self.found.iter().position(|(other, _)| *other == fragment);
        let place = known.unwrap_or(self.found.len());
        if known.is_none() {
            // The error of `llguidance` names the reference.
            let Some(target) = self.target(&fragment).cloned() else { return };
            self.found.push((fragment, target));
        }
        *reference = format!("#/{}/{place}", self.key);
    }

    /// The target of a fragment without percent escapes.
    fn target(&self, fragment: &str) -> Option<&Value> {
        if fragment.is_empty() || fragment.starts_with('/') {
            return self.root.pointer(fragment);
        }
        let named = format!("#{fragment}");
        let has_name = |schema: &Map<String, Value>| {
            schema.get("$anchor").is_some_and(|anchor| *anchor == *fragment)
                || ["$id", "id"].iter().any(|key| schema.get(*key).is_some_and(|id| *id == *named))
        };
        find(&self.root, &has_name)
    }
}

/// Whether `llguidance` can follow a fragment: a pointer without escapes.
fn is_plain(fragment: &str) -> bool {
    (fragment.is_empty() || fragment.starts_with('/')) && !fragment.contains(['~', '%'])
}

/// Returns the first object that satisfies a predicate.
fn find<'v>(value: &'v Value, is_match: &impl Fn(&Map<String, Value>) -> bool) -> Option<&'v Value> {
    match value {
        Value::Object(fields) if is_match(fields) => Some(value),
        Value::Object(fields) => fields.values().find_map(|value| find(value, is_match)),
        Value::Array(items) => items.iter().find_map(|value| find(value, is_match)),
        _ => None,
    }
}

/// Decodes percent escapes such as `%20`. Returns `None` if an escape is incomplete or the bytes are not UTF-8.
fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut out = Vec::new();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                u8::try_from(digit(bytes.next()?)? * 16 + digit(bytes.next()?)?).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn normalized(mut schema: Value) -> Value {
        normalize(&mut schema);
        schema
    }

    #[test]
    fn references_that_need_no_copy_stay() {
        for reference in
            ["#", "#/$defs/a", "#/properties/b/items/0", "https://example.com/other#/$defs/a", "#/$defs/x%2", "#none"]
        {
            let schema = json!({"$ref": reference, "$defs": {"a": {"type": "null"}}});
            assert_eq!(normalized(schema.clone()), schema, "{reference}");
        }
    }

    #[test]
    fn references_with_escapes_anchors_and_ids() {
        let target = json!({"type": "string", "items": {"$ref": "#/$defs/c%3Cd%3E"}});
        for (reference, defs) in [
            ("#/$defs/a~1b", json!({"a/b": target, "c<d>": {}})),
            ("#/$defs/a~0b", json!({"a~b": target, "c<d>": {}})),
            ("#/$defs/a%20b", json!({"a b": target, "c<d>": {}})),
            ("#/$defs/%C3%A9", json!({"é": target, "c<d>": {}})),
            ("#named", json!({"a": and_anchor(&target), "c<d>": {}})),
            ("https://example.com/s#/$defs/a", json!({"a": target, "c<d>": {}})),
        ] {
            let schema = json!({"$id": "https://example.com/s", "items": {"$ref": reference}, "$defs": defs});
            let found = normalized(schema);
            let place = found["items"]["$ref"].as_str().unwrap();
            let copy = found.pointer(&place[1..]).unwrap();
            assert_eq!(copy["type"], "string", "{reference}: {found}");
            let inner = copy["items"]["$ref"].as_str().unwrap();
            assert_eq!(found.pointer(&inner[1..]), Some(&json!({})), "{reference}: {found}");
        }
    }

    fn and_anchor(schema: &Value) -> Value {
        let mut schema = schema.clone();
        schema["$anchor"] = json!("named");
        schema
    }

    #[test]
    fn a_target_that_refers_to_itself_is_copied_once() {
        let schema =
            json!({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"items": {"$ref": "#/$defs/a~1b"}}}, "referenced": 1});
        let found = normalized(schema);
        assert_eq!(found["referenced_"], json!({"0": {"items": {"$ref": "#/referenced_/0"}}}));
        let spelled = json!({"anyOf": [{"$ref": "#/$defs/%61b"}, {"$ref": "#/$defs/a%62"}], "$defs": {"ab": {}}});
        assert_eq!(normalized(spelled)["referenced"], json!({"0": {}}));
    }

    #[test]
    fn formats_that_are_annotations_go() {
        let schema = json!({
            "format": "binary", "const": {"format": "binary"},
            "properties": {"format": {"format": "password", "pattern": "a"}, "a": {"format": "email"}},
        });
        let expected = json!({
            "const": {"format": "binary"}, "properties": {"format": {"pattern": "a"}, "a": {"format": "email"}},
        });
        assert_eq!(normalized(schema), expected);
    }
}
