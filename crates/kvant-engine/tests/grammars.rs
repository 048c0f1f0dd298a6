//! Property test: any sequence of tokens that a grammar allows is a text of its language. Schemas and tokens are
//! random.
//!
//! A small validator for the keywords in use checks the texts. With `KVANT_GRAMMAR_TEXTS=FILE`, the test also writes
//! schemas and texts to a file, which `tools/check_grammar_texts.py` checks with an independent validator.

use std::{
    cell::RefCell,
    fs::File,
    io::Write,
    path::Path,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use kvant_engine::{
    CompiledGrammar, Grammar,
    internals::{Compiler, start},
};
use kvant_models::{TokenPiece, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Maximum tokens of a text, and of its completion.
const MAX_TOKENS: usize = 150;

struct Table {
    compiler: Arc<Compiler>,
    pieces: Vec<TokenPiece>,
}

/// The tokens of the shipped model.
fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../kvant-cli/model"));
        let tokenizer = Tokenizer::load(dir).unwrap();
        Table { compiler: Compiler::new(&tokenizer).unwrap(), pieces: tokenizer.pieces().unwrap() }
    })
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % limit.max(1) as u64) as usize
    }
}

/// Generates a text of random tokens. Returns `None` if the text does not end.
fn random_text(grammar: CompiledGrammar, seed: u64) -> Option<String> {
    let Table { compiler, pieces } = table();
    let (mut state, mut random) = (start(grammar, compiler).unwrap(), Random(seed));
    let mut bytes = Vec::new();
    for count in 0..2 * MAX_TOKENS {
        if state.is_complete() {
            return Some(String::from_utf8(bytes).unwrap());
        }
        let allowed = state.allowed().unwrap();
        let hurries = count >= MAX_TOKENS;
        if allowed.may_end && (hurries || random.below(4) == 0) {
            return Some(String::from_utf8(bytes).unwrap());
        }
        let is_allowed = |id: &usize| allowed.tokens[id / 32] >> (id % 32) & 1 == 1;
        let text = |id: usize| match &pieces[id] {
            TokenPiece::Text(bytes) => bytes.as_slice(),
            _ => panic!("{:?} is no text", pieces[id]),
        };
        let all: Vec<usize> = (0..pieces.len()).filter(is_allowed).collect();
        // Preferring tokens that close strings and brackets makes texts end earlier.
        let close = |id: &usize| text(*id).iter().all(|byte| b"\"}],:".contains(byte));
        let closing: Vec<usize> = all.iter().copied().filter(close).collect();
        let among = if !closing.is_empty() && (hurries || random.below(2) == 0) { &closing } else { &all };
        if among.is_empty() {
            assert!(allowed.may_end);
            return Some(String::from_utf8(bytes).unwrap());
        }
        let id = among[random.below(among.len())];
        bytes.extend_from_slice(text(id));
        state.accept(id as u32).unwrap();
    }
    None
}

fn strings() -> impl Strategy<Value = Value> {
    let patterns = [LETTERS, PHONE, EITHER, UMLAUT];
    prop_oneof![
        Just(json!({"type": "string"})),
        (0usize..4, 0usize..6)
            .prop_map(|(min, more)| json!({"type": "string", "minLength": min, "maxLength": min + more})),
        prop::sample::select(patterns.to_vec()).prop_map(|pattern| json!({"type": "string", "pattern": pattern})),
        prop::sample::select(vec!["date", "time", "date-time", "uuid", "ipv4", "email"])
            .prop_map(|format| json!({"type": "string", "format": format})),
    ]
}

fn numbers() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!({"type": "integer"})),
        Just(json!({"type": "number"})),
        (-1000i64..1000, 0i64..2000)
            .prop_map(|(min, more)| json!({"type": "integer", "minimum": min, "maximum": min + more})),
        (-10i64..10, 1i64..30).prop_map(|(min, more)| {
            json!({"type": "number", "exclusiveMinimum": min as f64 / 4.0, "maximum": (min + more) as f64 / 4.0})
        }),
        (1i64..20).prop_map(|by| json!({"type": "integer", "multipleOf": by})),
    ]
}

fn scalars() -> impl Strategy<Value = Value> {
    prop_oneof![
        strings(),
        numbers(),
        Just(json!({"type": "boolean"})),
        Just(json!({"type": "null"})),
        Just(json!({})),
        Just(json!({"type": ["string", "null"]})),
        Just(json!({"const": {"a": [1, "ü\"\\\n"]}})),
        Just(json!({"enum": ["red", 3, null, {"x": []}, "ré\u{1F600}d"]})),
        Just(json!({"$ref": "#/$defs/tree"})),
    ]
}

const NAMES: [&str; 6] = ["a", "b", "name", "ключ", "with \"quotes\"", ""];

fn objects(values: impl Strategy<Value = Value> + Clone) -> impl Strategy<Value = Value> {
    let properties = prop::collection::vec((prop::sample::select(&NAMES[..]), values.clone(), any::<bool>()), 0..4);
    let additional = prop_oneof![3 => Just(json!(false)), 1 => Just(Value::Null), 1 => values];
    (properties, additional).prop_map(|(properties, additional)| {
        let required: std::collections::BTreeSet<&str> =
            properties.iter().filter(|(.., required)| *required).map(|(name, ..)| *name).collect();
        let properties: serde_json::Map<String, Value> =
            properties.iter().map(|(name, schema, _)| (name.to_string(), schema.clone())).collect();
        let mut schema = json!({"type": "object", "properties": properties, "required": required});
        if !additional.is_null() {
            schema["additionalProperties"] = additional;
        }
        schema
    })
}

/// Random schemas. Some accept nothing or cannot be enforced.
fn schemas() -> impl Strategy<Value = Value> {
    let any = scalars().prop_recursive(4, 24, 4, |inner| {
        let inner = inner.boxed();
        prop_oneof![
            3 => objects(inner.clone()),
            1 => (inner.clone(), 0usize..3, 0usize..4)
                .prop_map(|(items, min, more)| json!({"type": "array", "items": items, "minItems": min, "maxItems": min + more})),
            1 => prop::collection::vec(inner.clone(), 1..3)
                .prop_map(|items| json!({"type": "array", "prefixItems": items, "items": false, "minItems": items.len()})),
            1 => prop::collection::vec(inner.clone(), 1..4).prop_map(|all| json!({"anyOf": all})),
            1 => prop::collection::vec(inner.clone(), 1..3).prop_map(|all| json!({"allOf": all})),
            1 => (inner.clone(), inner).prop_map(|(a, b)| json!({"oneOf": [
                {"type": "object", "properties": {"kind": {"const": "a"}, "v": a}, "required": ["kind", "v"], "additionalProperties": false},
                {"type": "object", "properties": {"kind": {"const": "b"}, "v": b}, "required": ["kind", "v"], "additionalProperties": false},
            ]})),
        ]
    });
    any.prop_map(|mut schema| {
        let leaf = json!({"type": "integer", "minimum": 0});
        let list = json!({"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2});
        schema["$defs"] = json!({"tree": {"anyOf": [leaf, list]}});
        schema
    })
}

/// Whether a schema of [`schemas`] accepts a value. Formats are not checked.
fn accepts(root: &Value, schema: &Value, value: &Value) -> bool {
    let Some(keywords) = schema.as_object() else { return schema == true };
    keywords.iter().all(|(keyword, with)| {
        let sub = |schema: &Value| accepts(root, schema, value);
        let any = || with.as_array().unwrap().iter();
        let (length, number) = (value.as_str().map(|text| text.chars().count() as u64), value.as_f64());
        let items = value.as_array();
        match keyword.as_str() {
            "type" if with.is_array() => any().any(|name| is_of_type(name, value)),
            "type" => is_of_type(with, value),
            "const" => with == value,
            "enum" => with.as_array().unwrap().contains(value),
            "$ref" => sub(root.pointer(&with.as_str().unwrap()[1..]).unwrap()),
            "anyOf" => any().any(sub),
            "allOf" => any().all(sub),
            "oneOf" => any().filter(|schema| sub(schema)).count() == 1,
            "minLength" => length.is_none_or(|length| length >= with.as_u64().unwrap()),
            "maxLength" => length.is_none_or(|length| length <= with.as_u64().unwrap()),
            "pattern" => value.as_str().is_none_or(|text| matches_pattern(with.as_str().unwrap(), text)),
            "minimum" => number.is_none_or(|number| number >= with.as_f64().unwrap()),
            "maximum" => number.is_none_or(|number| number <= with.as_f64().unwrap()),
            "exclusiveMinimum" => number.is_none_or(|number| number > with.as_f64().unwrap()),
            "multipleOf" => value.as_i64().is_none_or(|number| number % with.as_i64().unwrap() == 0),
            "minItems" => items.is_none_or(|items| items.len() as u64 >= with.as_u64().unwrap()),
            "maxItems" => items.is_none_or(|items| items.len() as u64 <= with.as_u64().unwrap()),
            "prefixItems" => {
                items.is_none_or(|items| any().zip(items).all(|(schema, item)| accepts(root, schema, item)))
            }
            "items" => {
                let first = keywords.get("prefixItems").and_then(Value::as_array).map_or(0, Vec::len);
                items.is_none_or(|items| items.iter().skip(first).all(|item| accepts(root, with, item)))
            }
            "required" => {
                value.as_object().is_none_or(|fields| any().all(|name| fields.contains_key(name.as_str().unwrap())))
            }
            "properties" => {
                let with = with.as_object().unwrap();
                let of =
                    |(name, value): (&String, &Value)| with.get(name).is_none_or(|schema| accepts(root, schema, value));
                value.as_object().is_none_or(|fields| fields.iter().all(of))
            }
            "additionalProperties" => {
                let known = keywords["properties"].as_object().unwrap();
                let of = |(name, value): (&String, &Value)| known.contains_key(name) || accepts(root, with, value);
                value.as_object().is_none_or(|fields| fields.iter().all(of))
            }
            "$defs" | "format" => true,
            other => panic!("{other}"),
        }
    })
}

fn is_of_type(name: &Value, value: &Value) -> bool {
    match name.as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("{other}"),
    }
}

/// The patterns of [`strings`].
fn matches_pattern(pattern: &str, text: &str) -> bool {
    match pattern {
        LETTERS => !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase()),
        PHONE => {
            let (a, b) = text.split_once('-').unwrap_or_default();
            a.chars().count() == 3 && b.chars().count() == 4 && text.chars().all(|c| c == '-' || c.is_numeric())
        }
        EITHER => text.contains("ab") || text.contains("cd"),
        UMLAUT => text.contains(['ä', 'ö', 'ü']),
        other => panic!("{other}"),
    }
}

const LETTERS: &str = "^[a-z]+$";
const PHONE: &str = "^\\d{3}-\\d{4}$";
const EITHER: &str = "ab|cd";
const UMLAUT: &str = "[äöü]";

#[derive(Debug, Default)]
struct Seen {
    compiled: usize,
    refused: usize,
    complete: usize,
    endless: usize,
    inexact: usize,
}

#[test]
fn texts_follow_random_schemas() {
    let cases = if std::env::var("KVANT_TEST_SCOPE").is_ok_and(|scope| scope == "all") { 5000 } else { 150 };
    let seen = RefCell::new(Seen::default());
    let file = std::env::var_os("KVANT_GRAMMAR_TEXTS").map(|path| File::create(path).unwrap());
    let file = RefCell::new(file);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(cases));
    let run = runner.run(&(schemas(), any::<u64>()), |(schema, seed)| {
        let mut seen = seen.borrow_mut();
        let Ok(grammar) = table().compiler.compile(&Grammar::JsonSchema(schema.to_string())) else {
            seen.refused += 1;
            return Ok(());
        };
        seen.compiled += 1;
        for index in 0..4 {
            let Some(text) = random_text(grammar.clone(), seed.wrapping_add(index)) else {
                seen.endless += 1;
                continue;
            };
            // Numbers that an f64 rounds or cannot represent.
            let is_number = |c: char| c.is_ascii_digit() || ".eE+-".contains(c);
            let is_inexact = |number: &str| {
                number.len() > 15
                    || number.trim_start_matches('-').starts_with(|c: char| c.is_ascii_digit())
                        && number.contains(['e', 'E'])
            };
            if text.split(|c| !is_number(c)).any(is_inexact) {
                seen.inexact += 1;
                continue;
            }
            seen.complete += 1;
            let value: Value = match serde_json::from_str(&text) {
                Ok(value) => value,
                Err(error) => return Err(TestCaseError::fail(format!("{error}: {text:?} of {schema}"))),
            };
            if !accepts(&schema, &schema, &value) {
                return Err(TestCaseError::fail(format!("{text} is not of {schema}")));
            }
            if let Some(file) = &mut *file.borrow_mut() {
                writeln!(file, "{}", json!([schema, text])).unwrap();
            }
        }
        Ok(())
    });
    let seen = seen.into_inner();
    println!("{seen:?}");
    run.unwrap_or_else(|error| panic!("{error}"));
    assert!(seen.compiled > seen.refused && seen.complete > 5 * (seen.endless + seen.inexact), "{seen:?}");
}

#[test]
fn texts_follow_regular_expressions_and_grammars() {
    let sum = "start: term (\"+\" term)*\nterm: NUMBER | \"(\" start \")\"\nNUMBER: /[0-9]{1,3}/";
    for seed in 0..50 {
        let date = table().compiler.compile(&Grammar::Regex(r"[0-9]{4}/[01][0-9](/\w\n)?".to_string())).unwrap();
        let text = random_text(date, seed).unwrap();
        assert!(text[..4].parse::<u32>().is_ok() && text[4..].starts_with('/'), "{text:?}");
        let sum = table().compiler.compile(&Grammar::Lark(sum.to_string())).unwrap();
        if let Some(text) = random_text(sum, seed) {
            let opened = text.matches('(').count();
            assert_eq!(opened, text.matches(')').count(), "{text}");
        }
        let object = table().compiler.compile(&Grammar::JsonObject).unwrap();
        if let Some(text) = random_text(object, seed) {
            assert!(serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
        }
    }
}

#[test]
fn invalid_grammars_name_the_reason() {
    let wrong = [
        (Grammar::JsonSchema("{".to_string()), "EOF"),
        (Grammar::JsonSchema("[]".to_string()), "an object"),
        (Grammar::JsonSchema("false".to_string()), "an object"),
        (Grammar::JsonSchema(r#"{"type": "strin"}"#.to_string()), "strin"),
        (Grammar::JsonSchema(r#"{"not": {}}"#.to_string()), "not"),
        (Grammar::JsonSchema(r##"{"$ref": "#/$defs/x"}"##.to_string()), "x"),
        (Grammar::Regex("(".to_string()), "("),
        (Grammar::Lark("begin: \"a\"".to_string()), "start"),
        (Grammar::Lark(String::new()), "start"),
    ];
    for (grammar, word) in wrong {
        let error = table().compiler.compile(&grammar).unwrap_err().to_string();
        assert!(error.starts_with("`grammar`") && error.contains(word) && error.len() < 800, "{grammar:?}: {error}");
    }
}

/// Maximum cost of common grammars: the mean time of the masks of a text.
#[test]
fn masks_are_cheap() {
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "kind": {"enum": ["a", "b"]}, "lines": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}}},
        "required": ["name", "kind", "lines", "tags"],
    });
    for (name, grammar) in [
        ("a JSON object", Grammar::JsonObject),
        ("a schema", Grammar::JsonSchema(schema.to_string())),
        ("a regular expression", Grammar::Regex("([a-z]{1,10}, )*[0-9]+".to_string())),
    ] {
        let started = Instant::now();
        let compiled = table().compiler.compile(&grammar).unwrap();
        let compile = started.elapsed();
        let (mut count, mut masks, mut first, mut random) = (0, Duration::ZERO, Duration::ZERO, Random(7));
        for text in 0..20 {
            let mut state = start(compiled.clone(), &table().compiler).unwrap();
            for _ in 0..100 {
                let started = Instant::now();
                let allowed = state.allowed().unwrap();
                masks += started.elapsed();
                count += 1;
                if count == 1 {
                    first = masks;
                }
                let all: Vec<u32> =
                    (0..4096).filter(|id| allowed.tokens[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
                let Some(&id) = all.get(random.below(all.len())) else { break };
                state.accept(id).unwrap();
                if state.is_complete() {
                    break;
                }
            }
            assert!(text > 0 || count > 0);
        }
        let mean = masks / count;
        println!("{name}: {compile:.1?} to compile, {first:.1?} the first mask, {mean:.1?} the mean of {count}");
        assert!(mean < Duration::from_millis(20), "{name}: {mean:?}");
    }
}

#[test]
fn large_multiples_are_refused() {
    let compile = |schema: Value| table().compiler.compile(&Grammar::JsonSchema(schema.to_string()));
    for multiple in [json!(100_000), json!(0.01), json!(2.5), json!(1e3)] {
        assert!(compile(json!({"type": "number", "multipleOf": multiple})).is_ok(), "{multiple}");
    }
    for multiple in [json!(100_001), json!(1e6), json!(1e300), json!(0.1000001), json!("1")] {
        assert!(compile(json!({"items": {"type": "number", "multipleOf": multiple}})).is_err(), "{multiple}");
    }
    let both = json!({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}], "type": "integer"});
    assert!(compile(both.clone()).is_err());
    let lark = format!("start: \"a\" %json {both}");
    assert!(table().compiler.compile(&Grammar::Lark(lark)).unwrap_err().to_string().contains("multipleOf"));
}
