//! Numbers in JSON schemas that cannot be enforced exactly.

use kvant_models::chat::{JsonValue, keeps_digits};

/// 2^53: up to this number, an f64 represents every integer.
const MAX_EXACT_INTEGER: f64 = 9_007_199_254_740_992.0;

/// A number of a schema that an f64 cannot represent.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InexactNumber {
    /// The path of the number in the schema, such as `properties.age.maximum`.
    pub path: String,
    /// The number.
    pub number: String,
}

/// The role of a value in a schema.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Schema,
    /// An object that maps names to schemas.
    Names,
    /// A number or value that constrains the accepted values.
    Bound,
    Annotation,
}

impl InexactNumber {
    /// Finds the first number of `enum`, `const`, `multipleOf` or a bound that is an integer above 2^53, or has more
    /// digits than an f64 keeps.
    pub fn find(schema: &JsonValue) -> Option<InexactNumber> {
        find(schema, Part::Schema, String::new())
    }
}

impl std::fmt::Display for InexactNumber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let InexactNumber { path, number } = self;
        let number: String = number.chars().take(64).collect();
        write!(f, "`{path}` is {number}, but only integers up to 2^53 and 17 digits can be enforced exactly")
    }
}

fn find(value: &JsonValue, place: Part, path: String) -> Option<InexactNumber> {
    match value {
        JsonValue::Number(number) if place == Part::Bound && !is_exact(number) => {
            Some(InexactNumber { path, number: number.clone() })
        }
        JsonValue::Array(items) => {
            items.iter().enumerate().find_map(|(index, item)| find(item, place, format!("{path}[{index}]")))
        }
        JsonValue::Object(fields) => fields.iter().find_map(|(key, value)| {
            let dot = if path.is_empty() { "" } else { "." };
            find(value, place.of_field(key), format!("{path}{dot}{key}"))
        }),
        _ => None,
    }
}

impl Part {
    fn of_field(self, key: &str) -> Part {
        match (self, key) {
            (Part::Schema, "properties" | "patternProperties" | "$defs" | "definitions") => Part::Names,
            (Part::Schema, "enum" | "const" | "multipleOf") => Part::Bound,
            (Part::Schema, "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum") => Part::Bound,
            (Part::Schema, "default" | "example" | "examples") => Part::Annotation,
            (Part::Names, _) => Part::Schema,
            (place, _) => place,
        }
    }
}

fn is_exact(number: &str) -> bool {
    let value: f64 = number.parse().unwrap_or(f64::NAN);
    keeps_digits(number) && (value.fract() != 0.0 || value.abs() <= MAX_EXACT_INTEGER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_beyond_floats_are_found() {
        for (schema, path) in [
            (r#"{"const": 9007199254740993}"#, "const"),
            (r#"{"enum": [1, {"a": [123456789012345678901]}]}"#, "enum[1].a[0]"),
            (r#"{"properties": {"enum": {"maximum": 18446744073709551615}}}"#, "properties.enum.maximum"),
            (r#"{"anyOf": [{}, {"multipleOf": 0.12345678901234567890}]}"#, "anyOf[1].multipleOf"),
            (r#"{"$defs": {"a": {"exclusiveMinimum": 1e400}}}"#, "$defs.a.exclusiveMinimum"),
        ] {
            let found = InexactNumber::find(&JsonValue::parse(schema).unwrap()).unwrap();
            assert_eq!(found.path, path);
            assert!(found.to_string().contains(&found.number));
        }
        for schema in [
            r#"{"minimum": -9007199254740992, "maximum": 9007199254740992, "multipleOf": 0.1, "const": 1.50}"#,
            r#"{"default": 123456789012345678901, "examples": [0.12345678901234567890]}"#,
            r#"{"properties": {"enum": {"default": 1e400}, "const": {"type": "string"}}}"#,
        ] {
            assert_eq!(InexactNumber::find(&JsonValue::parse(schema).unwrap()), None, "{schema}");
        }
    }
}
