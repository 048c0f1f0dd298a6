//! Rejects JSON schemas that `llguidance` accepts but cannot enforce, or for which it needs too much time.

use std::collections::BTreeSet;

use kvant_models::chat::JsonValue;
use serde_json::{Map, Value};

use super::{
    numbers::InexactNumber,
    references,
    source::{check_operators, operators},
};

/// Maximum product of all `multipleOf` of a schema, which is the number of states of its automaton.
const MAX_MULTIPLE: u128 = 100_000;
/// Maximum references of a schema. A chain of references is compiled recursively.
const MAX_REFERENCES: usize = 1000;
/// Maximum keys of all objects in a schema. The time of a compilation grows with the square of the properties.
const MAX_KEYS: usize = 5000;

/// Prepares a schema for `llguidance`.
///
/// # Errors
/// The reason why it is rejected.
pub fn prepared(source: &str) -> Result<Value, String> {
    let exact = JsonValue::parse(source).map_err(|error| error.to_string())?;
    if let Some(number) = InexactNumber::find(&exact) {
        return Err(number.to_string());
    }
    let mut schema = exact.to_rounded();
    check(&schema)?;
    references::normalize(&mut schema);
    Ok(schema)
}

/// Checks a schema and all its subschemas.
///
/// # Errors
/// The reason why it is rejected.
fn check(schema: &Value) -> Result<(), String> {
    let mut found = Keywords::default();
    found.value(schema)?;
    let product = found.multiples.iter().fold(1u128, |product, multiple| product.saturating_mul(*multiple));
    if product > MAX_MULTIPLE {
        return Err(format!("the product of all `multipleOf` is {product}; at most {MAX_MULTIPLE} is allowed"));
    }
    for (what, count, max) in [("references", found.references, MAX_REFERENCES), ("keys", found.keys, MAX_KEYS)] {
        if count > max {
            return Err(format!("it has {count} {what}; at most {max} are allowed"));
        }
    }
    check_operators(found.operators)?;
    if found.merges { check_bounds(&found.excluded, &found.bounds) } else { Ok(()) }
}

/// The constraints found in a schema, including places where they are not keywords.
#[derive(Default)]
struct Keywords {
    multiples: BTreeSet<u128>,
    bounds: Vec<f64>,
    /// Exclusive bounds.
    excluded: Vec<f64>,
    /// Whether bounds of different subschemas can constrain one number.
    merges: bool,
    references: usize,
    keys: usize,
    /// Operators of all patterns.
    operators: usize,
}

impl Keywords {
    fn value(&mut self, value: &Value) -> Result<(), String> {
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.value(item)),
            Value::Object(fields) => self.object(fields),
            _ => Ok(()),
        }
    }

    fn object(&mut self, fields: &Map<String, Value>) -> Result<(), String> {
        let numbers =
            |keys: [&str; 2]| keys.into_iter().filter_map(|key| fields.get(key)?.as_f64()).collect::<Vec<f64>>();
        let excluded = numbers(["exclusiveMinimum", "exclusiveMaximum"]);
        let bounds = [numbers(["minimum", "maximum"]), excluded.clone()].concat();
        if fields.get("type").is_none_or(|kind| kind != "integer") {
            check_bounds(&excluded, &bounds)?;
        }
        self.excluded.extend(excluded);
        self.bounds.extend(bounds);
        self.merges |= fields.contains_key("allOf") || fields.contains_key("$ref") && fields.len() > 1;
        self.multiples.extend(fields.get("multipleOf").map(coefficient));
        self.keys += fields.len();
        self.references += usize::from(fields.contains_key("$ref"));
        self.operators += fields.get("pattern").and_then(Value::as_str).map_or(0, operators);
        if let Some(Value::Object(patterns)) = fields.get("patternProperties") {
            self.operators += patterns.keys().map(|pattern| operators(pattern)).sum::<usize>();
        }
        fields.values().try_for_each(|value| self.value(value))
    }
}

/// `llguidance` 1.9 allows an excluded integer bound if the other bound is less than 1 away.
fn check_bounds(excluded: &[f64], bounds: &[f64]) -> Result<(), String> {
    let is_near = |bound: f64, other: f64| bound != other && (bound - other).abs() < 1.0;
    let mut pairs =
        excluded.iter().filter(|bound| bound.fract() == 0.0).flat_map(|a| bounds.iter().map(move |b| (a, b)));
    match pairs.find(|(a, b)| is_near(**a, **b)) {
        Some((excluded, other)) => {
            Err(format!("the bounds {excluded} (excluded) and {other} must differ by at least 1, or be integers"))
        }
        None => Ok(()),
    }
}

/// A number without its decimal point: 25 for 0.25. Returns the maximum for a value that is not a number.
fn coefficient(number: &Value) -> u128 {
    let text = number.to_string();
    let text = text.strip_suffix(".0").unwrap_or(&text).trim_start_matches('-');
    let digits: String = text.split(['e', 'E']).next().unwrap_or_default().replace('.', "");
    let power = text.split(['e', 'E']).nth(1).and_then(|power| power.parse::<u32>().ok()).unwrap_or(0);
    let digits: u128 = digits.parse().unwrap_or(u128::MAX);
    10u128.checked_pow(power).map_or(u128::MAX, |power| digits.saturating_mul(power)).max(1)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn near_excluded_bounds() {
        let bad = json!({"type": "number", "exclusiveMinimum": 1.0, "maximum": 1.25});
        assert!(check(&bad).is_err() && check(&json!({"items": [bad]})).is_err());
        assert!(check(&json!({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0})).is_err());
        assert!(check(&json!({"allOf": [{"exclusiveMinimum": 1}, {"maximum": 1.5}]})).is_err());
        for good in [
            json!({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
            json!({"type": "number", "exclusiveMinimum": 1.5, "maximum": 1.75}),
            json!({"type": "number", "exclusiveMinimum": 0}),
            json!({"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5}),
            json!({"properties": {"a": {"exclusiveMinimum": 1}, "b": {"maximum": 1.5}}}),
        ] {
            assert_eq!(check(&good), Ok(()), "{good}");
        }
    }

    #[test]
    fn long_chains_and_large_patterns_are_refused() {
        let chain = |links: usize| {
            let link = |i: usize| (i.to_string(), json!({"items": {"$ref": format!("#/$defs/{}", i + 1)}}));
            json!({"$ref": "#/$defs/0", "$defs": (0..links).map(link).collect::<Map<_, _>>()})
        };
        assert_eq!(check(&chain(MAX_REFERENCES - 1)), Ok(()));
        assert!(check(&chain(MAX_REFERENCES)).is_err());
        let pattern = |count: usize| json!({"items": {"pattern": "a?".repeat(count)}});
        assert_eq!(check(&pattern(5000)), Ok(()));
        assert!(check(&pattern(5001)).is_err());
        assert!(check(&json!({"patternProperties": {"a?".repeat(5001): {}}})).is_err());
        let properties = |count: usize| (0..count).map(|i| (i.to_string(), json!({}))).collect::<Map<_, _>>();
        assert_eq!(check(&json!({"properties": properties(MAX_KEYS - 1)})), Ok(()));
        assert!(check(&json!({"properties": properties(MAX_KEYS)})).is_err());
    }

    #[test]
    fn coefficients() {
        for (number, expected) in
            [(json!(25), 25), (json!(0.25), 25), (json!(3.0), 3), (json!(0), 1), (json!("x"), u128::MAX)]
        {
            assert_eq!(coefficient(&number), expected, "{number}");
        }
    }
}
