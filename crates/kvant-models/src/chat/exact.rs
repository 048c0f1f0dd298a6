//! JSON whose numbers keep their digits.

use std::{
    fmt,
    ops::{Index, IndexMut},
};

use indexmap::IndexMap;
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error as _, IgnoredAny, IntoDeserializer, MapAccess, SeqAccess, Visitor, value},
    forward_to_deserialize_any,
    ser::{SerializeMap, SerializeSeq},
};

/// Maximum nesting depth, as in serde_json.
const MAX_DEPTH: usize = 128;

/// A JSON value. Unlike [`serde_json::Value`], it keeps the text of each number, so that identifiers of 20 digits are
/// unchanged.
///
/// ```
/// use kvant_models::chat::JsonValue;
/// let value = JsonValue::parse(r#"{"id": 123456789012345678901, "price": 1.10}"#)?;
/// assert_eq!(value.to_string(), r#"{"id":123456789012345678901,"price":1.10}"#);
/// assert_eq!(value["id"], JsonValue::Number("123456789012345678901".to_string()));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub enum JsonValue {
    /// `null`.
    #[default]
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// The text of a number.
    Number(String),
    /// A string.
    String(String),
    /// A list.
    Array(Vec<JsonValue>),
    /// An object. Among equal keys, the last one wins.
    Object(IndexMap<String, JsonValue>),
}

static NULL: JsonValue = JsonValue::Null;

impl JsonValue {
    /// Parses JSON.
    ///
    /// # Errors
    /// The text is not valid JSON, or is nested deeper than 128 levels.
    pub fn parse(text: &str) -> Result<JsonValue, serde_json::Error> {
        serde_json::from_str::<IgnoredAny>(text)?;
        Reader { rest: text }.value(0)
    }

    /// The string, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        if let JsonValue::String(text) = self { Some(text) } else { None }
    }

    /// The elements, if it is a list.
    pub fn as_array(&self) -> Option<&[JsonValue]> {
        if let JsonValue::Array(items) = self { Some(items) } else { None }
    }

    /// The fields, if it is an object.
    pub fn as_object(&self) -> Option<&IndexMap<String, JsonValue>> {
        if let JsonValue::Object(fields) = self { Some(fields) } else { None }
    }

    /// The fields, if it is an object.
    pub fn as_object_mut(&mut self) -> Option<&mut IndexMap<String, JsonValue>> {
        if let JsonValue::Object(fields) = self { Some(fields) } else { None }
    }

    /// Whether it is `null`.
    pub fn is_null(&self) -> bool {
        *self == JsonValue::Null
    }

    /// Whether it is an object.
    pub fn is_object(&self) -> bool {
        self.as_object().is_some()
    }

    /// Whether it is a string.
    pub fn is_string(&self) -> bool {
        self.as_str().is_some()
    }

    /// Converts to serde_json, which rounds numbers to 64 bits.
    pub fn to_rounded(&self) -> serde_json::Value {
        use serde_json::Value;
        match self {
            JsonValue::Null => Value::Null,
            JsonValue::Bool(value) => Value::Bool(*value),
            JsonValue::Number(text) => rounded(text),
            JsonValue::String(text) => Value::String(text.clone()),
            JsonValue::Array(items) => items.iter().map(JsonValue::to_rounded).collect(),
            JsonValue::Object(fields) => {
                Value::Object(fields.iter().map(|(key, value)| (key.clone(), value.to_rounded())).collect())
            }
        }
    }

    /// Converts to a value of templates. Numbers that fit in 128 bits or a float become Python numbers; others stay
    /// text.
    pub(super) fn to_template(&self) -> minijinja::Value {
        use minijinja::Value;
        match self {
            JsonValue::Null => Value::from(()),
            JsonValue::Bool(value) => Value::from(*value),
            JsonValue::Number(text) => number(text),
            JsonValue::String(text) => Value::from(text.as_str()),
            JsonValue::Array(items) => Value::from(items.iter().map(JsonValue::to_template).collect::<Vec<_>>()),
            JsonValue::Object(fields) => {
                fields.iter().map(|(key, value)| (Value::from(key.as_str()), value.to_template())).collect()
            }
        }
    }
}

/// Converts a number to serde_json.
fn rounded(text: &str) -> serde_json::Value {
    let whole = text.parse::<i64>().map(serde_json::Value::from);
    let whole = whole.or_else(|_| text.parse::<u64>().map(serde_json::Value::from));
    whole.or_else(|_| text.parse::<f64>().map(serde_json::Value::from)).unwrap_or_default()
}

/// Converts a number to a value of templates.
fn number(text: &str) -> minijinja::Value {
    use minijinja::Value;
    if let Ok(whole) = text.parse::<i64>() {
        // Python has no negative integer zero.
        return Value::from(whole);
    }
    if let Ok(whole) = text.parse::<i128>() {
        return Value::from(whole);
    }
    match text.parse::<f64>() {
        Ok(float) if text.contains(['.', 'e', 'E']) && keeps_digits(text) => Value::from(float),
        _ => Value::from_object(LongNumber(text.to_string())),
    }
}

/// Whether the nearest float keeps all digits of a number: true for 0.1 and 1e21, false for 0.12345678901234567890.
pub fn keeps_digits(text: &str) -> bool {
    let Ok(float) = text.parse::<f64>() else { return false };
    float.is_finite() && decimal(text).is_some_and(|digits| Some(digits) == decimal(&format!("{float:e}")))
}

/// The sign, the significant digits and the decimal exponent of the last digit.
fn decimal(text: &str) -> Option<(bool, String, i64)> {
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let exponent: i64 = exponent.strip_prefix('+').unwrap_or(exponent).parse().ok()?;
    let is_negative = digits.starts_with('-');
    let digits = digits.trim_start_matches('-');
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let all = format!("{whole}{fraction}");
    let significant = all.trim_end_matches('0');
    if significant.is_empty() {
        return Some((is_negative, String::new(), 0));
    }
    let zeros = i64::try_from(all.len() - significant.len()).ok()?;
    let power = exponent.checked_sub(i64::try_from(fraction.len()).ok()?)?.checked_add(zeros)?;
    Some((is_negative, significant.trim_start_matches('0').to_string(), power))
}

/// A number in a template that neither 128 bits nor a float can represent.
#[derive(Debug)]
pub(super) struct LongNumber(pub String);

impl minijinja::value::Object for LongNumber {
    fn repr(self: &std::sync::Arc<Self>) -> minijinja::value::ObjectRepr {
        minijinja::value::ObjectRepr::Plain
    }

    fn render(self: &std::sync::Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Parses JSON that is known to be valid.
struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn value(&mut self, depth: usize) -> Result<JsonValue, serde_json::Error> {
        if depth >= MAX_DEPTH {
            return Err(serde_json::Error::custom("recursion limit exceeded"));
        }
        self.skip_space();
        match self.rest.bytes().next() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'"') => Ok(JsonValue::String(self.string()?)),
            _ => {
                let end = self.rest.find([',', ']', '}', ' ', '\t', '\n', '\r']).unwrap_or(self.rest.len());
                Ok(match self.cut(end) {
                    "null" => JsonValue::Null,
                    "true" => JsonValue::Bool(true),
                    "false" => JsonValue::Bool(false),
                    number => JsonValue::Number(number.to_string()),
                })
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<JsonValue, serde_json::Error> {
        let mut fields = IndexMap::new();
        while self.goes_on('}') {
            let key = self.string()?;
            self.skip_space();
            self.cut(1);
            fields.insert(key, self.value(depth + 1)?);
        }
        Ok(JsonValue::Object(fields))
    }

    fn array(&mut self, depth: usize) -> Result<JsonValue, serde_json::Error> {
        let mut items = Vec::new();
        while self.goes_on(']') {
            items.push(self.value(depth + 1)?);
        }
        Ok(JsonValue::Array(items))
    }

    /// Skips the bracket or comma before the next element. At the end, skips the closing bracket and returns false.
    fn goes_on(&mut self, end: char) -> bool {
        self.skip_space();
        if self.rest.starts_with(['{', '[', ',']) {
            self.cut(1);
            self.skip_space();
        }
        let is_end = self.rest.starts_with(end) || self.rest.is_empty();
        if is_end {
            self.cut(self.rest.len().min(1));
        }
        !is_end
    }

    fn string(&mut self) -> Result<String, serde_json::Error> {
        let mut bytes = self.rest.bytes().enumerate().skip(1);
        let mut end = self.rest.len();
        while let Some((place, byte)) = bytes.next() {
            match byte {
                b'\\' => _ = bytes.next(),
                b'"' => {
                    end = place + 1;
                    break;
                }
                _ => {}
            }
        }
        serde_json::from_str(self.cut(end))
    }

    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r']);
    }

    fn cut(&mut self, length: usize) -> &'a str {
        let (before, rest) = self.rest.split_at(length);
        self.rest = rest;
        before
    }
}

impl From<serde_json::Value> for JsonValue {
    fn from(value: serde_json::Value) -> JsonValue {
        use serde_json::Value;
        match value {
            Value::Null => JsonValue::Null,
            Value::Bool(value) => JsonValue::Bool(value),
            Value::Number(number) => JsonValue::Number(number.to_string()),
            Value::String(text) => JsonValue::String(text),
            Value::Array(items) => JsonValue::Array(items.into_iter().map(JsonValue::from).collect()),
            Value::Object(fields) => {
                JsonValue::Object(fields.into_iter().map(|(key, value)| (key, JsonValue::from(value))).collect())
            }
        }
    }
}

impl From<&serde_json::Value> for JsonValue {
    fn from(value: &serde_json::Value) -> JsonValue {
        value.clone().into()
    }
}

impl From<&JsonValue> for JsonValue {
    fn from(value: &JsonValue) -> JsonValue {
        value.clone()
    }
}

impl From<bool> for JsonValue {
    fn from(value: bool) -> JsonValue {
        JsonValue::Bool(value)
    }
}

impl From<&str> for JsonValue {
    fn from(text: &str) -> JsonValue {
        JsonValue::String(text.to_string())
    }
}

impl From<String> for JsonValue {
    fn from(text: String) -> JsonValue {
        JsonValue::String(text)
    }
}

/// The field of an object, or `null` if it is absent.
impl Index<&str> for JsonValue {
    type Output = JsonValue;

    fn index(&self, key: &str) -> &JsonValue {
        self.as_object().and_then(|fields| fields.get(key)).unwrap_or(&NULL)
    }
}

/// The field of an object, which is inserted if absent. A value that is not an object is replaced by an empty one.
impl IndexMut<&str> for JsonValue {
    fn index_mut(&mut self, key: &str) -> &mut JsonValue {
        if !self.is_object() {
            *self = JsonValue::Object(IndexMap::new());
        }
        match self {
            JsonValue::Object(fields) => fields.entry(key.to_string()).or_default(),
            // It is an object now.
            other => other,
        }
    }
}

impl PartialEq<str> for JsonValue {
    fn eq(&self, text: &str) -> bool {
        self.as_str() == Some(text)
    }
}

impl PartialEq<&str> for JsonValue {
    fn eq(&self, text: &&str) -> bool {
        self == *text
    }
}

impl PartialEq<bool> for JsonValue {
    fn eq(&self, value: &bool) -> bool {
        *self == JsonValue::Bool(*value)
    }
}

/// Compact JSON.
impl fmt::Display for JsonValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JsonValue::Null => f.write_str("null"),
            JsonValue::Bool(value) => write!(f, "{value}"),
            JsonValue::Number(text) => f.write_str(text),
            JsonValue::String(text) => write_string(f, text),
            JsonValue::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    write!(f, "{}{item}", if index == 0 { '[' } else { ',' })?;
                }
                f.write_str(if items.is_empty() { "[]" } else { "]" })
            }
            JsonValue::Object(fields) => {
                for (index, (key, value)) in fields.iter().enumerate() {
                    f.write_str(if index == 0 { "{" } else { "," })?;
                    write_string(f, key)?;
                    write!(f, ":{value}")?;
                }
                f.write_str(if fields.is_empty() { "{}" } else { "}" })
            }
        }
    }
}

fn write_string(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    f.write_str(&serde_json::to_string(text).map_err(|_| fmt::Error)?)
}

/// Rounds numbers to 64 bits, the maximum of serde. `Display` of [`JsonValue`] keeps them.
impl Serialize for JsonValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            JsonValue::Array(items) => {
                let mut list = serializer.serialize_seq(Some(items.len()))?;
                items.iter().try_for_each(|item| list.serialize_element(item))?;
                list.end()
            }
            JsonValue::Object(fields) => {
                let mut map = serializer.serialize_map(Some(fields.len()))?;
                fields.iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
                map.end()
            }
            JsonValue::String(text) => serializer.serialize_str(text),
            other => other.to_rounded().serialize(serializer),
        }
    }
}

/// The name by which a [`JsonValue`] requests the text of a value. Only its own deserializer knows the name.
const TEXT: &str = "$kvant::JsonValue";

/// Numbers keep their digits if the deserializer is another [`JsonValue`]. Other deserializers have rounded them.
impl<'de> Deserialize<'de> for JsonValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<JsonValue, D::Error> {
        deserializer.deserialize_newtype_struct(TEXT, OfAny)
    }
}

/// Visits the JSON text of a value or serde's data. The text is passed as bytes, a type that JSON does not have.
struct OfAny;

impl<'de> Visitor<'de> for OfAny {
    type Value = JsonValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bytes<E: serde::de::Error>(self, json: &[u8]) -> Result<JsonValue, E> {
        JsonValue::parse(std::str::from_utf8(json).map_err(E::custom)?).map_err(E::custom)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<JsonValue, D::Error> {
        deserializer.deserialize_any(OfAny)
    }

    fn visit_unit<E>(self) -> Result<JsonValue, E> {
        Ok(JsonValue::Null)
    }

    fn visit_none<E>(self) -> Result<JsonValue, E> {
        Ok(JsonValue::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<JsonValue, D::Error> {
        deserializer.deserialize_any(OfAny)
    }

    fn visit_bool<E>(self, value: bool) -> Result<JsonValue, E> {
        Ok(JsonValue::Bool(value))
    }

    fn visit_i64<E>(self, number: i64) -> Result<JsonValue, E> {
        Ok(JsonValue::Number(number.to_string()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<JsonValue, E> {
        Ok(JsonValue::Number(number.to_string()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<JsonValue, E> {
        Ok(serde_json::Value::from(number).into())
    }

    fn visit_str<E>(self, text: &str) -> Result<JsonValue, E> {
        Ok(text.into())
    }

    fn visit_string<E>(self, text: String) -> Result<JsonValue, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<JsonValue, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(JsonValue::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<JsonValue, A::Error> {
        let mut fields = IndexMap::new();
        while let Some((key, value)) = entries.next_entry()? {
            fields.insert(key, value);
        }
        Ok(JsonValue::Object(fields))
    }
}

impl<'de> IntoDeserializer<'de, serde_json::Error> for &'de JsonValue {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for &'de JsonValue {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match self {
            JsonValue::Null => visitor.visit_unit(),
            JsonValue::Bool(value) => visitor.visit_bool(*value),
            JsonValue::Number(_) => self.to_rounded().deserialize_any(visitor),
            JsonValue::String(text) => visitor.visit_borrowed_str(text),
            JsonValue::Array(items) => {
                let mut items = value::SeqDeserializer::new(items.iter());
                let list = visitor.visit_seq(&mut items)?;
                items.end().map(|()| list)
            }
            JsonValue::Object(fields) => {
                let mut fields = value::MapDeserializer::new(fields.iter().map(|(key, value)| (key.as_str(), value)));
                let map = visitor.visit_map(&mut fields)?;
                fields.end().map(|()| map)
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        if self.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        if name == TEXT { visitor.visit_bytes(self.to_string().as_bytes()) } else { visitor.visit_newtype_struct(self) }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        match self {
            JsonValue::String(text) => visitor.visit_enum(text.as_str().into_deserializer()),
            other => other.to_rounded().deserialize_enum(name, variants, visitor),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((any::<String>(), inner), 0..4)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn tokens_round_trip(value in any_json()) {
            for text in [value.to_string(), serde_json::to_string_pretty(&value).unwrap()] {
                let parsed = JsonValue::parse(&text).unwrap();
                prop_assert_eq!(&parsed, &JsonValue::from(value.clone()));
                prop_assert_eq!(parsed.to_string(), value.to_string());
                prop_assert_eq!(parsed.to_rounded(), value.clone());
            }
        }

        #[test]
        fn invalid_json_is_an_error(text in "[\\[\\]{}\",:0-9a-z.\\\\ -]{0,12}") {
            let expected = serde_json::from_str::<Value>(&text);
            let is_large = expected.as_ref().is_err_and(|error| error.to_string().contains("out of range"));
            prop_assert_eq!(JsonValue::parse(&text).is_ok(), expected.is_ok() || is_large);
        }
    }

    #[test]
    fn numbers_keep_their_text() {
        let text = r#"{"a":[123456789012345678901,-0,1.10,1e400,0.12345678901234567890123],"b":18446744073709551616}"#;
        let value = JsonValue::parse(text).unwrap();
        assert_eq!(value.to_string(), text);
        assert_eq!(JsonValue::deserialize(&value).unwrap(), value);
        let fields = BTreeMap::<String, Option<JsonValue>>::deserialize(&value).unwrap();
        assert_eq!(fields["a"].as_ref(), Some(&value["a"]));
        // serde's numbers have 64 bits.
        assert_eq!(serde_json::to_value(&value).unwrap(), value.to_rounded());
        assert_eq!(JsonValue::parse(" { \"a\" : [ ] , \"a\" : 1e5 } ").unwrap().to_string(), r#"{"a":1e5}"#);
    }

    #[test]
    fn types_of_values() {
        #[derive(Debug, Deserialize, PartialEq)]
        struct Typed {
            whole: u8,
            float: f32,
            list: Vec<Option<bool>>,
            kind: Word,
            any: Value,
        }
        #[derive(Debug, Deserialize, PartialEq)]
        #[serde(rename_all = "lowercase")]
        enum Word {
            One,
        }
        let json = r#"{"whole": 3, "float": 1e2, "list": [true, null], "kind": "one", "any": {"a": -1}}"#;
        let value = JsonValue::parse(json).unwrap();
        let expected =
            Typed { whole: 3, float: 100.0, list: vec![Some(true), None], kind: Word::One, any: json!({"a": -1}) };
        assert_eq!(Typed::deserialize(&value).unwrap(), expected);
        assert_eq!(serde_json::from_str::<JsonValue>(json).unwrap(), JsonValue::from(value.to_rounded()));
        let error = u8::deserialize(&JsonValue::parse("-1").unwrap()).unwrap_err().to_string();
        assert_eq!(error, "invalid value: integer `-1`, expected u8");
    }

    #[test]
    fn deep_json_is_an_error() {
        for open in ["[", "{\"a\":"] {
            let close = if open == "[" { "]" } else { "}" };
            let nested = |depth: usize| format!("{}0{}", open.repeat(depth), close.repeat(depth));
            assert!(JsonValue::parse(&nested(MAX_DEPTH - 1)).is_ok());
            assert!(JsonValue::parse(&nested(MAX_DEPTH)).is_err());
            assert!(JsonValue::parse(&nested(100_000)).is_err());
        }
        assert!(JsonValue::parse(r#""\ud800""#).is_err());
    }

    #[test]
    fn digits_that_a_float_keeps() {
        for kept in ["0", "-0.0", "0.1", "1.10", "1e21", "1E+2", "123.5e-3", "9007199254740992", "5e-324", "1e308"] {
            assert!(keeps_digits(kept), "{kept}");
        }
        for lost in ["9007199254740993", "0.12345678901234567890", "1e400", "1e-400", "123456789012345678901", "x"] {
            assert!(!keeps_digits(lost), "{lost}");
        }
        assert!(!keeps_digits(&format!("1e{}", "9".repeat(30))));
    }

    #[test]
    fn fields_by_name() {
        let mut value = JsonValue::from(json!({"a": {"b": "c"}}));
        assert!(value["a"]["b"] == "c" && value["x"]["y"].is_null());
        value["a"]["d"] = JsonValue::Bool(true);
        value["e"]["f"] = "g".into();
        assert_eq!(value.to_string(), r#"{"a":{"b":"c","d":true},"e":{"f":"g"}}"#);
    }
}
