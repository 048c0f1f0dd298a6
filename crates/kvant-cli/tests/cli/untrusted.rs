//! Errors show names and messages from hostile files without control characters, and shorten them.

use std::path::Path;

use serde_json::{Value, json};

use crate::{
    command, copy_of_the_model,
    gguf::writer::{Writer, text, u32},
    kvant, scratch, str,
};

/// A name with terminal colours, a title sequence, a right-to-left override, and great length.
fn hostile(length: usize) -> String {
    format!("\x1b[31m\x1b]0;title\x07\u{9b}2J\u{202e}\r\n{}end", "x".repeat(length))
}

/// Error messages have one line, no control characters, and limited length. One of them contains `expected`.
#[track_caller]
fn fails_safely(model: &Path, expected: &str) {
    let mut found = Vec::new();
    for args in [&["generate", "--model", str(model), "--max-tokens", "1"][..], &["inspect", str(model)]] {
        let run = kvant(args);
        if args[0] == "inspect" && run.code == 0 {
            continue;
        }
        let error = run.error();
        let line = error.strip_suffix('\n').unwrap();
        let is_control = |c: char| c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        assert!(!line.contains(is_control), "{}", error.escape_debug());
        assert!(error.len() < 4000, "{} bytes", error.len());
        found.push(error);
    }
    assert!(found.iter().any(|error| error.contains(expected)), "expected {expected:?}, got {found:?}");
}

/// Replaces a value of a JSON file.
fn edit(path: &Path, pointer: &str, value: Value) {
    let mut json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    match json.pointer_mut(pointer) {
        Some(place) => *place = value,
        None => json[pointer.trim_start_matches('/')] = value,
    }
    std::fs::write(path, json.to_string()).unwrap();
}

#[test]
fn configs() {
    for key in ["model_type", "hidden_activation", "dtype", "layer_types/0", "hidden_size", "quantization"] {
        let model = copy_of_the_model("untrusted_configs");
        edit(&model.join("config.json"), &format!("/{key}"), json!(hostile(1_000_000)));
        let run = kvant(&["generate", "--model", str(&model), "--max-tokens", "1"]);
        // Some keys have no effect.
        if run.code != 0 {
            fails_safely(&model, "");
        } else {
            assert!(matches!(key, "dtype" | "hidden_activation"), "{key}");
        }
    }
}

#[test]
fn tokenizers() {
    for pointer in ["/model/type", "/decoder/type", "/pre_tokenizer/type", "/normalizer"] {
        let model = copy_of_the_model("untrusted_tokenizers");
        edit(&model.join("tokenizer.json"), pointer, json!(hostile(1_000_000)));
        fails_safely(&model, "tokenizer.json: ");
    }
    let model = copy_of_the_model("untrusted_tokenizers");
    edit(&model.join("tokenizer.json"), &format!("/model/vocab/{}", "Ġthe"), json!(70_000));
    fails_safely(&model, "ids must be below the 4096 rows of the model's embedding, got 70000 of \"Ġthe\"");
}

#[test]
fn safetensors() {
    let header = |json: Value| {
        let json = json.to_string();
        [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat()
    };
    let name = hostile(1_000_000);
    let tensor = |dtype: &str| json!({"dtype": dtype, "shape": [4], "data_offsets": [0, 4]});
    let model = copy_of_the_model("untrusted_safetensors");
    let weights = model.join("model.safetensors");
    let many = json!({"dtype": "F32", "shape": vec![1; 200_000], "data_offsets": [0, 1]});
    for json in [json!({&name: tensor("F32")}), json!({"a": tensor(&name), &name: 3}), json!({"a": many})] {
        std::fs::write(&weights, header(json)).unwrap();
        fails_safely(&model, "model.safetensors: header: ");
    }
    std::fs::remove_file(&weights).unwrap();
    std::fs::write(model.join("model.safetensors.index.json"), json!({"weight_map": {"a": name}}).to_string()).unwrap();
    fails_safely(&model, "is not the plain name of a .safetensors file");
}

#[test]
fn gguf() {
    let path = scratch("untrusted_gguf").join("a.gguf");
    let name = hostile(1_000_000);
    let with = |key: &str, value| Writer::default().pair("general.architecture", text("llama")).pair(key, value);
    for (writer, expected) in [
        (Writer::default().pair("general.architecture", text(&name)), "general.architecture"),
        (with(&name, u32(1)).pair(&name, u32(1)), "appears twice"),
        (with("llama.attention.head_count", text(&name)), "must be an integer"),
        (with("tokenizer.ggml.model", text(&name)), "llama."),
        (Writer::default().tensor(&name, &[3], 2, vec![0; 18]), "are not whole blocks"),
    ] {
        std::fs::write(&path, writer.bytes()).unwrap();
        fails_safely(&path, expected);
    }
}

#[test]
fn templates() {
    let model = copy_of_the_model("untrusted_templates");
    let template = model.join("chat_template.jinja");
    for (source, expected) in [
        (format!("{{{{ raise_exception('{}') }}}}", hostile(400_000)), "chat template: "),
        (format!("{{{{ 1 | {} }}}}", "x".repeat(400_000)), "chat template: "),
        ("{{ raise_exception('x\\n' * 1000000) }}".to_string(), "chat template: "),
    ] {
        std::fs::write(&template, source).unwrap();
        let error = kvant(&["generate", "--chat", "--model", str(&model), "--max-tokens", "1"]).error();
        assert!(error.contains(expected) && error.len() < 4000, "{}: {}", error.len(), &error[..error.len().min(200)]);
        assert!(!error.trim_end().contains(char::is_control), "{}", error.escape_debug());
    }
}

#[test]
fn names_of_files() {
    let folder = scratch("untrusted_names").join(hostile(100));
    fails_safely(&folder, "no such directory or file");
    std::fs::create_dir(&folder).unwrap();
    fails_safely(&folder, "not a checkpoint: it has no config.json");
    std::fs::write(folder.join("\x1b[31m.gguf"), "GGUF").unwrap();
    std::fs::write(folder.join("\x1b[32m.gguf"), "GGUF").unwrap();
    fails_safely(&folder, "several GGUF models");
    std::fs::remove_file(folder.join("\x1b[32m.gguf")).unwrap();
    fails_safely(&folder, r"\u{1b}[31m.gguf: ");
}

/// Generated text is written to a pipe unchanged.
#[test]
fn a_pipe_gets_the_text_of_the_model() {
    let model = copy_of_the_model("untrusted_pipe");
    let tokenizer = model.join("tokenizer.json");
    let json: Value = serde_json::from_slice(&std::fs::read(&tokenizer).unwrap()).unwrap();
    let escape = json["model"]["vocab"]["ě"].as_u64().expect("the letter of byte 0x1b");
    // Every token is the letter of this byte, so that the model writes nothing else.
    let vocabulary: serde_json::Map<String, Value> = json["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(token, id)| (if id.as_u64() == Some(escape) { token.clone() } else { format!("ě{token}") }, id.clone()))
        .collect();
    let mut json = json;
    json["model"]["vocab"] = vocabulary.into();
    json["model"]["merges"] = json!([]);
    json["added_tokens"] = json!([]);
    std::fs::write(&tokenizer, json.to_string()).unwrap();
    let args = ["generate", "--model", str(&model), "--prompt", "", "--max-tokens", "3"];
    let output = command(&args).output().unwrap();
    assert!(output.stdout.starts_with(b"\x1b"), "{}", String::from_utf8_lossy(&output.stderr));
}
