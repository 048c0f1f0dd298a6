use std::process::Stdio;

use serde_json::{Value, json};

use crate::{assert_keys, command, copy_of_the_model, kvant, kvant_with_input, shipped, str};

const KEYS: &str = "text prompt_tokens generated_tokens decode_steps warm_up_seconds prompt_tokens_per_s \
                    decode_tokens_per_s cache_bytes cache_bytes_f16 kv device";

#[test]
fn generate_without_arguments_writes_a_text() {
    let run = kvant(&["generate", "--max-tokens", "24"]);
    assert!(run.stderr.contains("tokens/s") && run.stderr.contains("f16"), "{}", run.stderr);
    assert!(run.ok().split_whitespace().count() > 5);
}

/// Rates count only timed passes: the first token comes from the prompt's pass.
#[test]
fn a_rate_names_the_steps_that_it_counts() {
    let args = ["generate", "--device", "cpu", "--max-tokens", "8"];
    let run = kvant(&args);
    assert!(run.stderr.contains("generated: 8 tokens, in 7 decode steps after the first"), "{}", run.stderr);
    let line = kvant(&[&args[..], &["--json"]].concat()).json().remove(0);
    assert_eq!((&line["generated_tokens"], &line["decode_steps"]), (&8.into(), &7.into()));
    assert_eq!(line["warm_up_seconds"], 0.0, "the CPU compiles no kernels");
}

/// The beginning-of-text token is not duplicated if the prompt contains it.
#[test]
fn a_prompt_begins_once() {
    let tokens = |prompt| {
        let args = ["generate", "--prompt", prompt, "--max-tokens", "1", "--json"];
        kvant(&args).json()[0]["prompt_tokens"].clone()
    };
    assert_eq!(tokens("<bos>a"), tokens("a"));
}

#[test]
fn json_equals_the_text_output() {
    let args = ["generate", "--prompt", "A `Vec<T>` is", "--max-tokens", "20", "--kv", "tq6:tq4", "--seed", "7"];
    let text = kvant(&args).ok();
    let lines = kvant(&[&args[..], &["--json"]].concat()).json();
    let [line] = &lines[..] else { panic!("{} lines", lines.len()) };
    assert_keys(line, KEYS);
    assert_eq!(line["text"].as_str().unwrap().trim_end(), text.trim_end());
    let number = |key: &str| line[key].as_f64().unwrap();
    assert!(number("prompt_tokens") > 1.0 && (1.0..=20.0).contains(&number("generated_tokens")));
    assert!(number("prompt_tokens_per_s") > 0.0 && number("decode_tokens_per_s") > 0.0);
    assert!(number("cache_bytes") < 0.5 * number("cache_bytes_f16"));
    assert_eq!(line["kv"], "tq6:tq4");
    assert!(line["device"].as_str().unwrap().starts_with("cpu"));
}

#[test]
fn a_seed_decides_the_text() {
    let text = |seed: &str| kvant(&["generate", "--max-tokens", "40", "--temperature", "1", "--seed", seed]).ok();
    assert_eq!(text("3"), text("3"));
    assert_ne!(text("3"), text("4"));
}

#[test]
fn greedy_needs_no_seed_and_no_number_of_threads() {
    let text = |rest: &[&str]| kvant(&[&["generate", "--max-tokens", "30", "--temperature", "0"], rest].concat()).ok();
    let one = text(&["--threads", "1"]);
    assert_eq!(one, text(&["--threads", "1", "--seed", "9"]));
    assert_eq!(one, text(&["--threads", "1", "--model", str(&shipped())]));
}

#[test]
fn a_prompt_from_standard_input() {
    let prompt = "fn main() {\n    let mut x = Vec::new();\n";
    let args = |prompt| ["generate", "--max-tokens", "12", "--temperature", "0", "--prompt", prompt];
    assert_eq!(kvant_with_input(&args("-"), prompt.as_bytes()).ok(), kvant(&args(prompt)).ok());
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let mut command = command(&["generate", "--max-tokens", "400", "--temperature", "1"]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert_eq!(stderr, "");
}

/// JSON and text have different readers.
#[test]
fn json_is_written_if_the_text_stream_is_closed() {
    let mut command = command(&["generate", "--max-tokens", "40", "--json"]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["generated_tokens"], 40);
}

/// As list items do.
#[test]
fn a_prompt_may_begin_with_a_hyphen() {
    let run = kvant(&["generate", "--prompt", "- a list", "--max-tokens", "1", "--json"]);
    assert!(run.json()[0]["prompt_tokens"].as_u64().unwrap() > 2);
}

/// A text longer than the model was made for runs with a note.
#[test]
fn long_texts_are_noted() {
    let directory = copy_of_the_model("long_texts_are_noted");
    let config = directory.join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    json["max_position_embeddings"] = 8.into();
    std::fs::write(&config, json.to_string()).unwrap();
    for (tokens, noted) in [("4", false), ("20", true)] {
        let run = kvant(&["generate", "--model", str(&directory), "--prompt", "A", "--max-tokens", tokens]);
        assert_eq!(run.stderr.contains("made for at most 8"), noted, "{}", run.stderr);
        run.ok();
    }
}

/// A model whose tokens are words that begin with ▁, which is dropped from the first word of a text.
fn model_of_words(name: &str) -> std::path::PathBuf {
    let directory = copy_of_the_model(name);
    let vocabulary: serde_json::Map<String, Value> = (0..4096).map(|id| (format!("▁w{id}"), json!(id))).collect();
    let mark = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": mark, "post_processor": null, "decoder": mark,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "▁w0"},
    });
    std::fs::write(directory.join("tokenizer.json"), json.to_string()).unwrap();
    directory
}

#[test]
fn a_word_after_the_prompt_keeps_its_space() {
    let model = model_of_words("a_word_after_the_prompt_keeps_its_space");
    let args = ["generate", "--model", str(&model), "--prompt", "w300", "--max-tokens", "3", "--temperature", "0"];
    let text = kvant(&args).ok();
    assert!(text.starts_with(" w") && text.matches(" w").count() == 3, "{text:?}");
    assert_eq!(format!("{}\n", kvant(&[&args[..], &["--json"]].concat()).json()[0]["text"].as_str().unwrap()), text);
    // The stop string begins with the space.
    let word = text.split_whitespace().next().unwrap();
    assert_eq!(kvant(&[&args[..], &["--stop", &format!(" {word}")]].concat()).ok(), "\n");
    let chat = ["chat", str(&model), "--plain", "--max-tokens", "3", "--temperature", "0"];
    let text = kvant_with_input(&chat, b"w300\n").ok();
    assert!(text.starts_with(" w") && text.matches(" w").count() == 3, "{text:?}");
}

/// A model and a text as positional arguments.
#[test]
fn a_model_and_a_text() {
    let model = super::shipped();
    let options = ["--temperature", "0", "--max-tokens", "4"];
    let named = kvant(&[&["generate", "--model", str(&model), "--prompt", "# Vec"][..], &options].concat()).ok();
    assert_eq!(kvant(&[&["generate", str(&model), "# Vec"][..], &options].concat()).ok(), named);
    let both = kvant(&["generate", str(&model), "# Vec", "--prompt", "x"]);
    assert!(both.code != 0 && both.stderr.contains("--prompt"), "{}", both.stderr);
}

/// Drafts do not change a text. A model without drafter says so.
#[test]
fn a_text_with_drafts() {
    let args =
        ["generate", "--prompt", "- a: 1\n- a: 1\n- a: 1\n-", "--max-tokens", "40", "--temperature", "0", "--json"];
    let line = |more: &[&str]| kvant(&[&args[..], more].concat()).json().remove(0);
    let (without, with) = (line(&[]), line(&["--drafts", "4"]));
    assert_keys(&with, &format!("{KEYS} accepted_drafts rejected_drafts"));
    assert_eq!(with["text"], without["text"]);
    let number = |key: &str| with[key].as_u64().unwrap();
    assert_eq!(number("decode_steps") + number("accepted_drafts") + 1, number("generated_tokens"));
    assert!(with["decode_tokens_per_s"].as_f64().unwrap() > 0.0);
    let error = kvant(&["generate", "--drafter", "self", "--max-tokens", "2"]).error();
    assert!(error.starts_with("error: --drafter self: "), "{error}");
    let run = kvant(&["generate", "--drafter", "auto", "--max-tokens", "2"]);
    assert!(run.code == 0 && run.stderr.contains("no drafter for this model"), "{}", run.stderr);
}
