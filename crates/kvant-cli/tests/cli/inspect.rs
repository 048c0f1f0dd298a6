use std::path::Path;

use crate::{assert_keys, kvant, str};

#[test]
fn the_shipped_model_is_described() {
    let lines = kvant(&["inspect", "--json"]).json();
    let [model] = &lines[..] else { panic!("{lines:?}") };
    assert_keys(
        model,
        "family layers recurrent_layers window_layers window hidden_size vocab_size context parameters weight_bytes \
         formats state_bytes cache",
    );
    assert_eq!(model["family"], "gemma4");
    let sum =
        |key: &str| -> u64 { model["formats"].as_array().unwrap().iter().map(|f| f[key].as_u64().unwrap()).sum() };
    assert_eq!(sum("bytes"), model["weight_bytes"].as_u64().unwrap());
    let parameters = model["parameters"].as_u64().unwrap();
    assert!((10_000_000..12_000_000).contains(&parameters) && sum("parameters") < parameters);
    for line in model["cache"].as_array().unwrap() {
        assert_keys(line, "context kv bytes");
    }
    let text = kvant(&["inspect"]).ok();
    for word in ["gemma4", "parameters  10.9 M", "tq4", "4 bit, group 64"] {
        assert!(text.contains(word), "{word} is not in {text}");
    }
}

#[test]
fn experts_in_mxfp4_are_named() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvant-models/tests/golden/gpt_oss_mxfp4");
    let model = &kvant(&["inspect", str(&golden), "--json"]).json()[0];
    assert_eq!((&model["family"], &model["window"]), (&"gpt_oss".into(), &8.into()));
    let names: Vec<&str> = model["formats"].as_array().unwrap().iter().map(|f| f["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["bf16", "mxfp4"]);
}

/// The states of a hybrid are no part of its cache: they do not grow with the text.
#[test]
fn states_are_counted_apart_from_the_cache() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvant-models/tests/golden/qwen3_5");
    let model = &kvant(&["inspect", str(&golden), "--json"]).json()[0];
    assert_eq!((&model["layers"], &model["recurrent_layers"]), (&4.into(), &2.into()));
    // Two layers: three inputs of 2·2·32 + 4·48 channels, and four matrices of 32 × 48, in f32.
    assert_eq!(model["state_bytes"], 2 * 4 * (3 * 320 + 4 * 32 * 48));
    // Two layers of keys and values: two heads of 64 each.
    let line = &model["cache"][0];
    let context = line["context"].as_u64().unwrap().next_multiple_of(64);
    assert_eq!((&line["kv"], line["bytes"].as_u64()), (&"f32".into(), Some(context * 2 * 2 * 2 * 64 * 4)));
    let text = kvant(&["inspect", str(&golden)]).ok();
    for words in ["4, 2 of them recurrent", "states of one sequence"] {
        assert!(text.contains(words), "{words} is not in {text}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_model_that_cannot_fit_is_refused_with_numbers_and_advice() {
    let error = kvant(&["generate", "--max-tokens", "4000000000"]).error();
    for word in ["TiB of memory", "weights", "in f16", "GiB free", "tokens fit (--max-tokens)"] {
        assert!(error.contains(word), "{word} is not in {error}");
    }
}
