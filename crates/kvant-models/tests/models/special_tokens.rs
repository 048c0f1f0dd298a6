//! Tokens that begin and end texts, in directories in Hugging Face's layout.

use std::path::Path;

use kvant_models::{Error, Files, Sampling, Tokenizer, chat::GenerationDefaults};
use serde_json::{Value, json};

use crate::common::shipped;

const EOS: u32 = 1;
const BOS: u32 = 2;

fn write(dir: &Path, name: &str, json: &Value) {
    std::fs::write(dir.join(name), json.to_string()).unwrap();
}

fn tokenizer_json() -> Value {
    serde_json::from_slice(&std::fs::read(shipped().join("tokenizer.json")).unwrap()).unwrap()
}

fn load(tokenizer: &Value, config: &Value) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "tokenizer.json", tokenizer);
    write(dir.path(), "tokenizer_config.json", config);
    Tokenizer::load(dir.path()).unwrap()
}

/// A post-processor with special tokens around a text.
fn template(before: &[&str], after: &[&str]) -> Value {
    let special = |name: &&str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let single: Vec<Value> = before.iter().map(special).chain([text("A")]).chain(after.iter().map(special)).collect();
    let token = |name: &str, id: u32| json!({"id": name, "ids": [id], "tokens": [name]});
    json!({
        "type": "TemplateProcessing", "single": single, "pair": [text("A"), text("B")],
        "special_tokens": {"<bos>": token("<bos>", BOS), "<eos>": token("<eos>", EOS), "<pad>": token("<pad>", 0)},
    })
}

/// As in transformers 5.24, for every tokenizer class: the post-processor decides, not `add_bos_token`.
#[test]
fn only_the_post_processor_starts_texts() {
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let sequence = json!({"type": "Sequence", "processors": [byte_level, template(&["<bos>"], &[])]});
    let cases: [(Value, &[u32]); 7] = [
        (Value::Null, &[]),
        (byte_level.clone(), &[]),
        (template(&["<bos>"], &[]), &[BOS]),
        (template(&[], &["<eos>"]), &[]),
        (template(&["<bos>"], &["<eos>"]), &[BOS]),
        (template(&["<pad>", "<bos>"], &[]), &[0, BOS]),
        (sequence, &[BOS]),
    ];
    for (processor, start) in cases {
        let mut tokenizer = tokenizer_json();
        tokenizer["post_processor"] = processor.clone();
        for add_bos in [Value::Null, json!(true), json!(false)] {
            for class in ["LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "TokenizersBackend"] {
                let config = json!({
                    "bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": add_bos, "tokenizer_class": class,
                });
                let tokenizer = load(&tokenizer, &config);
                let plain = tokenizer.encode("fn main", false).unwrap();
                let want = [start, &plain].concat();
                assert_eq!(tokenizer.encode("fn main", true).unwrap(), want, "{processor} {add_bos} {class}");
                assert_eq!(tokenizer.encode_prompt("fn main").unwrap(), want, "{processor} {add_bos} {class}");
                assert_eq!(tokenizer.adds_bos(), !start.is_empty());
                assert_eq!((tokenizer.eos(), tokenizer.eos_token()), (&[EOS][..], Some(EOS)));
            }
        }
    }
}

/// Templates know the id even if no text begins with it.
#[test]
fn a_bos_that_is_not_added_has_an_id() {
    let mut tokenizer = tokenizer_json();
    tokenizer["post_processor"] = Value::Null;
    let tokenizer = load(&tokenizer, &json!({"bos_token": {"content": "<bos>"}}));
    assert_eq!((tokenizer.bos(), tokenizer.adds_bos()), (Some(BOS), false));
}

/// Transformers adds tokens of `tokenizer_config.json` that are only in the vocabulary of `tokenizer.json`.
#[test]
fn named_tokens_are_special() {
    let mut tokenizer = tokenizer_json();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    added.retain(|token| token["content"] != "<eos>");
    tokenizer["model"]["vocab"]["<eos>"] = EOS.into();
    let plain = load(&tokenizer, &json!({}));
    assert!(plain.encode("a<eos>", false).unwrap().len() > 2);
    let named = load(&tokenizer, &json!({"eos_token": "<eos>"}));
    let ids = named.encode("a<eos>", false).unwrap();
    assert_eq!((ids.len(), ids[1], named.decode(&ids).unwrap().as_str()), (2, EOS, "a"));
}

/// Reads a `generation_config.json` next to the shipped model's configuration.
fn defaults(json: &Value) -> Result<GenerationDefaults, Error> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(shipped().join("config.json"), dir.path().join("config.json")).unwrap();
    write(dir.path(), "generation_config.json", json);
    GenerationDefaults::load_files(&Files::directory(dir.path()))
}

#[test]
fn sampling_parameters_at_limits_equal_transformers() {
    let read = |json: Value| defaults(&json).unwrap();
    for (written, top_k) in [(json!(-1), 0), (json!(0), 0), (json!(50.0), 50), (json!(20), 20)] {
        assert_eq!(read(json!({ "top_k": written })).top_k, Some(top_k), "{written}");
    }
    for (written, top_p) in [(json!(0), f32::MIN_POSITIVE), (json!(0.9), 0.9), (json!(1.5), 1.0), (json!(1), 1.0)] {
        assert_eq!(read(json!({ "top_p": written })).top_p, Some(top_p), "{written}");
    }
    let min_p = read(json!({"min_p": 1.0})).min_p.unwrap();
    assert!(min_p < 1.0 && min_p > 0.9999999);
    let odd = json!({"top_k": -1, "top_p": 0, "min_p": 1, "temperature": 0, "repetition_penalty": 1e-3});
    read(odd).sampling(Sampling::default()).validate(8).unwrap();
    let nulls = json!({"top_k": null, "top_p": null, "temperature": null, "suppress_tokens": null});
    assert_eq!(read(nulls), GenerationDefaults::default());
    // Suppressed tokens outside the vocabulary cannot be sampled anyway.
    assert_eq!(read(json!({"suppress_tokens": [3, 1 << 24]})).suppress_tokens, Some(vec![3]));
}

#[test]
fn sampling_parameters_without_a_meaning_are_refused_by_file_and_key() {
    for (key, value) in [
        ("top_k", json!(-2)),
        ("top_k", json!(0.5)),
        ("top_k", json!("all")),
        ("top_p", json!(-0.1)),
        ("top_p", json!([])),
        ("min_p", json!(1.1)),
        ("min_p", json!(-1)),
        ("temperature", json!(-0.5)),
        ("temperature", json!(1e300)),
        ("repetition_penalty", json!(0)),
        ("repetition_penalty", json!(-1.1)),
        ("typical_p", json!(0.0)),
        ("do_sample", json!("yes")),
        ("suppress_tokens", json!([-1])),
    ] {
        match defaults(&json!({ key: value })) {
            Err(Error::File { path, reason }) => {
                assert!(path.ends_with("generation_config.json") && reason.contains(&format!("`{key}`")), "{reason}");
            }
            other => panic!("{key} {value}: {other:?}"),
        }
    }
}
