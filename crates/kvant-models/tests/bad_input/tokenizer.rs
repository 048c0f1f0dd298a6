//! Tokenizers.

use kvant_models::{Error, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{any_value, assert_modest, common::shipped};

#[test]
fn bad_tokenizers_are_file_errors() {
    let good = std::fs::read(shipped().join("tokenizer.json")).unwrap();
    let deep = [b"{\"model\":".repeat(50_000)].concat();
    let half = &good[..good.len() / 2];
    let bad: [&[u8]; 8] = [b"", b"{}", b"null", b"[]", half, &deep, b"{\"model\": {\"type\": \"BPE\"}}", b"\xff\xfe{}"];
    for bytes in bad {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), bytes).unwrap();
        let Err(Error::File { path, .. }) = Tokenizer::load(dir.path()) else { panic!("{} bytes", bytes.len()) };
        assert!(path.ends_with("tokenizer.json"));
    }
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(Tokenizer::load(empty.path()), Err(Error::File { .. })));

    // Broken within a section, and well formed but senseless: both make the tokenizers crate panic.
    let text = small_tokenizer().to_string();
    let broken = text.replacen("\"decoder\":{", "\"decoder\":{\"a\":\u{1},", 1);
    assert_ne!(broken, text);
    assert!(matches!(Tokenizer::parse(broken.as_bytes()), Err(Error::Tokenizer { .. })));
    let mut senseless = small_tokenizer();
    senseless["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": 3});
    assert!(matches!(Tokenizer::parse(senseless.to_string().as_bytes()), Err(Error::Tokenizer { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Keys replaced and removed anywhere in a tokenizer.
    #[test]
    fn mutated_tokenizers_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any_value()), 1..3)) {
        let mut json = small_tokenizer();
        for (at, value) in edits {
            let mut pointers = Vec::new();
            collect_pointers(&json, String::new(), &mut pointers);
            let pointer: &String = at.get(&pointers);
            *json.pointer_mut(pointer).unwrap() = value;
        }
        if let Ok(tokenizer) = Tokenizer::parse(json.to_string().as_bytes())
            && let Ok(ids) = tokenizer.encode("abba", true)
        {
            let _ = tokenizer.decode(&ids);
        }
        assert_modest();
    }
}

/// The shipped tokenizer with a vocabulary of a few words.
fn small_tokenizer() -> Value {
    let text = std::fs::read(shipped().join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&text).unwrap();
    json["model"]["vocab"] = json!({"<pad>": 0, "<eos>": 1, "<bos>": 2, "a": 3, "b": 4, "ab": 5});
    json["model"]["merges"] = json!([["a", "b"]]);
    json
}

fn collect_pointers(value: &Value, at: String, out: &mut Vec<String>) {
    out.push(at.clone());
    match value {
        Value::Object(map) => map.iter().for_each(|(k, v)| collect_pointers(v, format!("{at}/{k}"), out)),
        Value::Array(list) => list.iter().enumerate().for_each(|(i, v)| collect_pointers(v, format!("{at}/{i}"), out)),
        _ => {}
    }
}
