//! Grammars in the engine, with the shipped model.

use std::time::{Duration, Instant};

use crate::common::{collect, engine, options, request};
use kvant_engine::{CompiledGrammar, Engine, EngineRequest, Event, Failure, FinishReason, Grammar, SubmitError};
use kvant_models::Sampling;
use serde_json::{Value, json};

const SCHEMA: &str = r##"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["struct", "enum", "trait"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 5000},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3}
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": false,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-z]{1,6}$"}}
}"##;

fn compile(engine: &Engine, grammar: &Grammar) -> CompiledGrammar {
    engine.compile(grammar).unwrap()
}

fn schema(engine: &Engine) -> CompiledGrammar {
    compile(engine, &Grammar::JsonSchema(SCHEMA.to_string()))
}

fn warm(seed: u64) -> Sampling {
    Sampling::default().temperature(1.2).seed(seed)
}

/// Requests that follow the schema, with seeds 0, 1, …
fn with_schema(engine: &Engine, count: u64) -> Vec<EngineRequest> {
    let grammar = schema(engine);
    (0..count)
        .map(|seed| request(engine, "# JSON\n\n").max_tokens(150).sampling(warm(seed)).grammar(grammar.clone()))
        .collect()
}

fn texts(engine: &Engine, requests: Vec<EngineRequest>) -> Vec<(Vec<u32>, String, FinishReason)> {
    let all: Vec<_> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let texts = all.into_iter().map(|responses| {
        let (ids, text, finished) = collect(responses);
        (ids, text, finished.reason)
    });
    texts.collect()
}

#[test]
fn texts_follow_a_schema() {
    let engine = engine(options().sequences(6));
    let mut complete = 0;
    for (_, text, reason) in texts(&engine, with_schema(&engine, 24)) {
        match reason {
            FinishReason::Grammar | FinishReason::StopId(_) => {
                complete += 1;
                let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
                let fields = value.as_object().unwrap();
                let known = ["name", "kind", "lines", "tags"];
                assert!(fields.keys().all(|key| known.contains(&key.as_str())), "{text}");
                assert!(fields["name"].as_str().unwrap().chars().count() <= 12, "{text}");
                assert!(["struct", "enum", "trait"].contains(&fields["kind"].as_str().unwrap()), "{text}");
                assert!((1..=5000).contains(&fields["lines"].as_i64().unwrap()), "{text}");
                let tags = fields.get("tags").map_or(&[][..], |tags| tags.as_array().unwrap());
                let is_tag =
                    |tag: &str| (1..=6).contains(&tag.len()) && tag.bytes().all(|byte| byte.is_ascii_lowercase());
                assert!(tags.len() <= 3 && tags.iter().all(|tag| is_tag(tag.as_str().unwrap())), "{text}");
            }
            FinishReason::Length => {}
            other => panic!("{other:?}: {text}"),
        }
    }
    assert!(complete >= 20, "{complete}");
}

#[test]
fn concurrency_preemptions_and_chunks_do_not_change_texts() {
    let roomy = engine(options().sequences(1));
    let expected = texts(&roomy, with_schema(&roomy, 8));
    let few = engine(options().sequences(6).step_tokens(7).memory(5 << 20).page_tokens(16));
    assert_eq!(texts(&few, with_schema(&few, 8)), expected);
    println!("{} preemptions", few.stats().preemptions);
    // Drafts that the schema forbids are no drafts.
    let drafting = engine(options().sequences(3).drafts(8).adaptive_drafts(false));
    assert_eq!(texts(&drafting, with_schema(&drafting, 8)), expected);
    let drafts = drafting.stats().drafts;
    println!("{drafts:?}");
    assert!(drafts.accepted > 10 && drafts.accepted < drafts.tokens, "{drafts:?}");
    // Other requests are not affected.
    let mut mixed = with_schema(&few, 4);
    mixed.insert(2, request(&few, "fn main").sampling(warm(1)));
    let plain = collect(roomy.submit(request(&roomy, "fn main").sampling(warm(1))).unwrap());
    assert_eq!(texts(&few, mixed)[2].0, plain.0);
}

#[test]
fn a_text_ends_where_its_grammar_ends() {
    let engine = engine(options());
    let of = |grammar: Grammar| request(&engine, "# Examples\n\n").grammar(compile(&engine, &grammar));
    let (_, text, finished) = collect(engine.submit(of(Grammar::Regex("(yes|no)!".to_string()))).unwrap());
    assert!(["yes!", "no!"].contains(&text.as_str()), "{text}");
    assert_eq!(finished.reason, FinishReason::Grammar);
    // Nothing is sampled, whether the model can sample a stop id or not.
    for request in [of(Grammar::Regex(String::new())), of(Grammar::Regex(String::new())).stop_ids(Vec::new())] {
        let (ids, text, finished) = collect(engine.submit(request).unwrap());
        assert_eq!((ids.len(), text.as_str()), (0, ""));
        assert!(matches!(finished.reason, FinishReason::Grammar | FinishReason::StopId(_)));
    }
    // Stop ids are sampled only where the text is complete, and not before the minimum.
    let eos = engine.tokenizer().eos().to_vec();
    let list = || of(Grammar::Lark("start: \"a\" (\",\" \"a\"){0,30}".to_string()));
    let wants_end = Sampling::default().logit_bias(eos.iter().map(|&id| (id, 1000.0)).collect());
    let (_, text, finished) = collect(engine.submit(list().sampling(wants_end.clone())).unwrap());
    assert_eq!((text.as_str(), finished.reason), ("a", FinishReason::StopId(eos[0])));
    let (ids, text, _) = collect(engine.submit(list().sampling(wants_end).min_tokens(5)).unwrap());
    assert!(ids.len() >= 5 && text.starts_with("a,a,a"), "{text}");
    // Stop strings and the length limit end it earlier.
    let (_, text, finished) = collect(engine.submit(list().stop([",a,a"]).stop_ids(Vec::new())).unwrap());
    assert_eq!((text.as_str(), finished.reason), ("a", FinishReason::StopString(0)));
    let (ids, _, finished) = collect(engine.submit(list().stop_ids(Vec::new()).max_tokens(4)).unwrap());
    assert_eq!((ids.len(), finished.reason), (4, FinishReason::Length));
}

#[test]
fn a_grammar_without_next_token_fails_only_its_request() {
    let engine = engine(options());
    let grammar = compile(&engine, &Grammar::Regex("[0-9]+".to_string()));
    let ids: Vec<u32> =
        (0..4096).filter(|&id| engine.tokenizer().decode(&[id]).unwrap().trim().parse::<u64>().is_ok()).collect();
    let nothing = request(&engine, "# A").grammar(grammar).sampling(Sampling::default().suppressed(ids));
    let last = engine.submit(nothing).unwrap().last().unwrap();
    assert!(matches!(&last, Event::Failed(Failure::Request(reason)) if reason.contains("no token")), "{last:?}");
    assert!(engine.is_healthy());
    let other = crate::common::engine(options());
    let foreign = request(&other, "# A").grammar(schema(&engine));
    assert!(matches!(other.submit(foreign), Err(SubmitError::Invalid { field: "grammar", .. })));
}

/// Grammars that try to use much time or memory, or to crash the parser.
fn hostile() -> Vec<Grammar> {
    let deep = |open: &str, close: &str, n: usize| format!("{}{}{}", open.repeat(n), "{}", close.repeat(n));
    let chain: serde_json::Map<String, Value> =
        (0..4000).map(|i| (format!("n{i}"), json!({"$ref": format!("#/$defs/n{}", i + 1)}))).collect();
    let all_of_chain: serde_json::Map<String, Value> = (0..500)
        .map(|i| (format!("n{i}"), json!({"allOf": [{"$ref": format!("#/$defs/n{}", i + 1)}, {"type": "object"}]})))
        .collect();
    let wide: serde_json::Map<String, Value> =
        (0..3000).map(|i| (format!("p{i}"), json!({"type": ["string", "integer", "null"]}))).collect();
    let schemas = [
        deep(r#"{"items":"#, "}", 60),
        deep(r#"{"properties":{"a":"#, "}}", 30),
        deep(r#"{"anyOf":[{"type":"null"},"#, "]}", 30),
        deep(r#"{"allOf":["#, "]}", 30),
        json!({"$ref": "#/$defs/n0", "$defs": chain}).to_string(),
        json!({"$ref": "#/$defs/n0", "$defs": all_of_chain}).to_string(),
        json!({"$ref": "#"}).to_string(),
        json!({"allOf": [{"$ref": "#"}, {"type": "object"}]}).to_string(),
        json!({"type": "object", "properties": wide}).to_string(),
        json!({"type": "string", "minLength": 1_000_000_000u64}).to_string(),
        json!({"type": "string", "maxLength": u64::MAX}).to_string(),
        json!({"type": "string", "pattern": "(a|aa|aaa)*{1,1000}$"}).to_string(),
        json!({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}).to_string(),
        json!({"type": "string", "pattern": "(.{0,500}){0,500}x"}).to_string(),
        json!({"type": "array", "minItems": 1_000_000}).to_string(),
        json!({"type": "array", "items": {"type": "array", "minItems": 1000}, "minItems": 1000}).to_string(),
        json!({"type": "integer", "multipleOf": 99_991, "maximum": 1e300}).to_string(),
        json!({"type": "array", "items": {"type": "null"}, "minItems": u64::MAX}).to_string(),
        json!({"type": "number", "multipleOf": 1e-300}).to_string(),
        json!({"type": "number", "minimum": 1e308, "maximum": -1e308}).to_string(),
        json!({"enum": (0..20_000).collect::<Vec<i32>>()}).to_string(),
        json!({"type": "ü".repeat(200)}).to_string(),
        json!({"enum": "ü".repeat(200)}).to_string(),
        json!({"type": "object", "patternProperties": {"(a+)+b": {}, "(b+)+a": {}, ".*": {"type": "string"}}})
            .to_string(),
        json!({"type": "object", "minProperties": 500, "additionalProperties": {"type": "null"}}).to_string(),
    ];
    let regexes = [
        "(a{1,1000}){1,1000}".to_string(),
        "(((((a{0,99}){0,99}){0,99}){0,99}){0,99})".to_string(),
        ".*".repeat(2000),
        format!("({})", (0..20_000).map(|i| format!("w{i}")).collect::<Vec<_>>().join("|")),
        "(?s:.)*a(?s:.){0,2000}b".to_string(),
        "\\p{L}{1,3000}".to_string(),
        "a?".repeat(5000) + &"a".repeat(5000),
        "\\".to_string(),
        "\u{0}[\u{10FFFF}]".to_string(),
    ];
    let larks = [
        "start: start | \"a\"".to_string(),
        "start: start start | \"a\" | \"\"".to_string(),
        "start: a*\na: b*\nb: c*\nc: \"\"".to_string(),
        (0..5000).map(|i| format!("r{i}: r{} r{} | \"x\"\n", (i + 1) % 5000, (i * 7) % 5000)).collect::<String>()
            + "start: r0",
        format!("start: {}\"a\"{}", "(".repeat(60), ")*".repeat(60)),
        format!("start: {}", "\"a\"? ".repeat(20_000)),
        format!("start: {}", "/[a-z]*/ ".repeat(3000)),
        "start: A{1000000}\nA: \"a\"".to_string(),
        "start: a{500}\na: b{500}\nb: \"x\"".to_string(),
        "start: <[0-4095]>".to_string(),
        "start: <[99999999]>".to_string(),
        "start: @other".to_string(),
        "%import common.ESCAPED_STRING\nstart: ESCAPED_STRING".to_string(),
        "%llguidance {\"allow_invalid_utf8\": true}\nstart: /(?-u:.)*/".to_string(),
        "start: %json {\"$ref\": \"#\"}".to_string(),
        "start: text\ntext[stop=\"aaaaaaaaab\", max_tokens=3]: /(?s:.*)/".to_string(),
        "~".repeat(200_000),
        "start: ".to_string() + &"~".repeat(100_000) + "\"a\"",
        "start: ".to_string() + &"-".repeat(100_000),
        (0..20_000).map(|i| format!("%ignore /x{i}/\n")).collect::<String>() + "start: \"a\"",
    ];
    let schemas = schemas.into_iter().map(Grammar::JsonSchema);
    schemas.chain(regexes.into_iter().map(Grammar::Regex)).chain(larks.into_iter().map(Grammar::Lark)).collect()
}

#[test]
fn hostile_grammars_end_in_limited_time() {
    let engine = engine(options());
    let (mut slowest, mut refused, mut failed) = (Duration::ZERO, 0, 0);
    for grammar in hostile() {
        let name: String = format!("{grammar:?}").chars().take(100).collect();
        let started = Instant::now();
        let compiled = engine.compile(&grammar);
        let compile_time = started.elapsed();
        let started = Instant::now();
        let mut tokens = 0;
        let how = match compiled {
            Err(SubmitError::Invalid { field: "grammar", got, .. }) => {
                refused += 1;
                got.chars().take(80).collect()
            }
            Err(other) => panic!("{name}: {other}"),
            Ok(compiled) => {
                let request = request(&engine, "# A\n\n").sampling(warm(3)).max_tokens(60).grammar(compiled);
                let mut end = String::new();
                for event in engine.submit(request).unwrap() {
                    match event {
                        Event::Token(_) => tokens += 1,
                        Event::Failed(failure) => {
                            failed += 1;
                            end = failure.to_string();
                        }
                        Event::Finished(finished) => end = format!("{:?}", finished.reason),
                        _ => {}
                    }
                }
                end
            }
        };
        let per_token = started.elapsed() / (tokens + 1);
        println!("{compile_time:>10.1?} to compile, {per_token:>10.1?} a token ({tokens}): {name}: {how}");
        slowest = slowest.max(compile_time).max(per_token);
        assert!(engine.is_healthy(), "{name}");
    }
    println!("{refused} refused, {failed} failed");
    // Takes seconds on an idle machine. Other processes may use this one.
    assert!(slowest < Duration::from_secs(60), "{slowest:?}");
    collect(engine.submit(request(&engine, "fn main")).unwrap());
}
