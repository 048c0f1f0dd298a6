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

    // Broken JSON within a section, and valid but inconsistent JSON: the tokenizers crate panics on both.
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

    /// Keys replaced and removed in a tokenizer.
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

/// Normalisers and decoders that expand without limit, with an added token that the library normalises when it loads.
#[test]
fn tokenizers_that_expand_are_refused() {
    let doubling = || vec![json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}); 36];
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    for (section, value) in [
        ("normalizer", json!({"type": "Sequence", "normalizers": doubling()})),
        ("normalizer", json!({"type": "Prepend", "prepend": "a".repeat(1 << 20)})),
        ("pre_tokenizer", json!({"type": "Sequence", "pretokenizers": vec![byte_level; 40]})),
        ("decoder", json!({"type": "Sequence", "decoders": doubling()})),
    ] {
        let mut json = small_tokenizer();
        json[section] = value;
        let added = json!({"id": 6, "content": "aé", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": true, "special": false});
        json["added_tokens"].as_array_mut().unwrap().push(added);
        let error = Tokenizer::parse(json.to_string().as_bytes()).unwrap_err().to_string();
        assert!(error.contains("bytes from one, the limit is"), "{error}");
        assert_modest();
    }
}

/// A post-processor that repeats a text is ignored. If a second one follows, the library panics.
#[test]
fn post_processors_change_nothing_or_are_refused() {
    let many = json!({"type": "TemplateProcessing", "single": vec![json!({"Sequence": {"id": "A", "type_id": 0}}); 3],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {}});
    let mut json = small_tokenizer();
    json["post_processor"] = many.clone();
    let tokenizer = Tokenizer::parse(json.to_string().as_bytes()).unwrap();
    assert_eq!(tokenizer.encode("abba", false).unwrap(), [5, 4, 3]);
    json["post_processor"] = json!({"type": "Sequence", "processors": [many.clone(), many]});
    let error = Tokenizer::parse(json.to_string().as_bytes()).unwrap_err().to_string();
    assert!(error.contains("`post_processor` must be one"), "{error}");
}

/// The embedding has a row for each id, except for special tokens that the model does not use.
#[test]
fn ids_beyond_the_embedding_are_found_at_load() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    std::fs::copy(shipped().join("config.json"), dir.path().join("config.json")).unwrap();
    let load = |json: &Value| {
        std::fs::write(&path, json.to_string()).unwrap();
        Tokenizer::load(dir.path())
    };
    let mut json = small_tokenizer();
    json["model"]["vocab"]["c"] = json!(4095);
    load(&json).unwrap();
    json["model"]["vocab"]["c"] = json!(4096);
    let error = load(&json).unwrap_err().to_string();
    let expected =
        "tokenizer.json: tokenizer: ids must be below the 4096 rows of the model's embedding, got 4096 of \"c\"";
    assert!(error.ends_with(expected), "{error}");

    let added = |special: bool| {
        let mut json = small_tokenizer();
        let token = json!({"id": 4096, "content": "<image>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special});
        json["added_tokens"].as_array_mut().unwrap().push(token);
        // The library assigns the next free ids to added tokens.
        json["model"]["vocab"].as_object_mut().unwrap().extend((6..4096).map(|id| (format!("w{id}"), json!(id))));
        load(&json)
    };
    assert!(added(false).unwrap_err().to_string().contains("got 4096 of \"<image>\""));
    // As in Gemma 3's files for models without images.
    let tokenizer = added(true).unwrap();
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [5]);
    let error = tokenizer.encode("a<image>", false).unwrap_err().to_string();
    assert!(error.contains("got 4096 of \"<image>\""), "{error}");
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
