use serde_json::Value;

use crate::{assert_keys, kvant};

const KEYS: &str = "op device head_dim heads kv_heads context kv us_median us_min bytes gbps";

/// The bytes per call that `bench` reports for one small case.
fn bytes(op: &str, context: &str, kv: &str) -> u64 {
    let args = ["bench", op, "--shapes", "64:4:2", "--context", context, "--seconds", "0.01", "--json", "--kv", kv];
    let lines = kvant(&args).json();
    let [line] = &lines[..] else { panic!("one case, {} lines", lines.len()) };
    assert_keys(line, KEYS);
    assert_eq!((&line["op"], line["context"].to_string()), (&op.into(), context.to_string()));
    let number = |key: &str| line[key].as_f64().unwrap();
    assert!(number("us_min") > 0.0 && number("us_median") >= number("us_min"));
    let gbps = number("bytes") / number("us_median") / 1e3;
    assert!((number("gbps") - gbps).abs() <= 0.01 * gbps + 1e-3);
    line["bytes"].as_u64().unwrap()
}

#[test]
fn attend_reads_the_keys_and_values() {
    assert_eq!(bytes("attend", "4096", "f16"), 4096 * 2 * (64 + 64) * 2);
    assert_eq!(bytes("attend", "4096", "f32:tq4"), 4096 * 2 * (64 * 4 + 64 / 2 + 4));
}

#[test]
fn writing_reads_new_vectors_and_writes_cached_ones() {
    assert_eq!(bytes("kv-write", "100", "bf16"), 100 * 2 * 2 * 64 * (4 + 2));
    assert_eq!(bytes("encode", "100", "tq5"), 100 * 2 * 2 * (64 * 4 + 64 * 5 / 8 + 4));
    assert_eq!(bytes("encode", "100", "tq2"), 100 * 2 * 2 * (64 * 4 + 64 * 2 / 8 + 4));
    assert_eq!(bytes("attend", "4096", "tq3:tq2"), 4096 * 2 * (64 * 5 / 8 + 2 * 4));
}

/// Codecs with page means are measured on a pool.
#[test]
fn bytes_include_the_means_of_pages() {
    let vectors = 4096 * 2 * 2 * (64 / 2 + 2);
    assert_eq!(bytes("attend", "4096", "tq4c"), vectors + 64 * 2 * 2 * (64 + 4));
    assert_eq!(bytes("encode", "128", "tq2c"), 128 * 2 * 2 * (64 * 4 + 64 / 4 + 2) + 2 * 2 * 2 * (64 + 4));
    assert_eq!(bytes("kv-write", "1", "f16:tq3c"), 2 * (2 * 64 * 4 + 64 * 2 + 64 * 3 / 8 + 2 + 64 + 4));
}

#[test]
fn pages_can_be_chosen() {
    let args = "bench attend --shapes 64:4:2 --context 300 --kv f16,tq8 --seconds 0.01 --json --page-tokens 128";
    assert_eq!(kvant(&args.split(' ').collect::<Vec<_>>()).json().len(), 2);
}

/// New keys and values have the dtype of the activations.
#[test]
fn bytes_depend_on_activations() {
    let args = "bench kv-write --shapes 64:4:2 --context 100 --kv f16 --seconds 0.01 --json --activations bf16";
    let lines = kvant(&args.split(' ').collect::<Vec<_>>()).json();
    assert_eq!(lines[0]["bytes"], 100 * 2 * 2 * 64 * (2 + 2));
    let args = "bench attend --shapes 64:4:2 --context 100 --kv f16 --seconds 0.01 --json --activations f16";
    assert_eq!(kvant(&args.split(' ').collect::<Vec<_>>()).json().len(), 1);
}

#[test]
fn every_shape_meets_every_context() {
    let args = "bench norm-rope --shapes 64:4:2,128:2:1 --context 1,3 --seconds 0 --json";
    let lines = kvant(&args.split(' ').collect::<Vec<_>>()).json();
    let cases: Vec<(u64, u64)> =
        lines.iter().map(|line| (line["head_dim"].as_u64().unwrap(), line["context"].as_u64().unwrap())).collect();
    assert_eq!(cases, [(64, 1), (64, 3), (128, 1), (128, 3)]);
    assert!(lines.iter().all(|line| line["kv"].is_null()));
}

const MODEL_KEYS: &str =
    "op device kv sequences context temperature us_first us_median us_min tokens_per_second bytes gbps of_read";

/// The lines of `bench model` after the lines about the device and loading.
fn model_lines(args: &[&str]) -> Vec<Value> {
    let mut lines = kvant(&[&["bench", "model", "--json"], args].concat()).json();
    lines.iter().for_each(|line| assert_keys(line, MODEL_KEYS));
    let parts = lines.split_off(3);
    assert_eq!(lines.iter().map(|line| line["op"].as_str().unwrap()).collect::<Vec<_>>(), ["read", "copy", "load"]);
    assert!(lines.iter().all(|line| line["gbps"].as_f64().unwrap() > 0.0));
    parts
}

#[test]
fn a_model_is_measured_in_parts() {
    let args = "--prompts 5,70 --decode 1,40 --sequences 1,3 --context 20 --kv f16,tq4 --seconds 0.05";
    let lines = model_lines(&args.split(' ').collect::<Vec<_>>());
    let cases: Vec<String> = lines
        .iter()
        .map(|line| format!("{} {} {} {}", line["op"], line["kv"], line["sequences"], line["context"]).replace('"', ""))
        .collect();
    let parts = ["prompt K 1 5", "prompt K 1 70", "decode K 1 1", "decode K 1 40", "batch K 1 20", "batch K 3 20"];
    let of = |kv| parts.iter().map(move |part| part.replace('K', kv));
    assert_eq!(cases, of("f16").chain(of("tq4")).collect::<Vec<_>>());
    let number = |i: usize, key: &str| lines[i][key].as_f64().unwrap();
    for (i, line) in lines.iter().enumerate() {
        assert!(number(i, "us_min") > 0.0 && number(i, "us_median") >= number(i, "us_min"), "{line}");
        let tokens = if line["op"] == "prompt" { number(i, "context") } else { number(i, "sequences") };
        let rate = tokens / number(i, "us_median") * 1e6;
        assert!((number(i, "tokens_per_second") / rate - 1.0).abs() < 1e-3, "{line}");
    }
    assert!(number(3, "bytes") > number(2, "bytes"), "a longer context reads more");
    assert!(number(3, "bytes") > number(9, "bytes"), "f16 reads more than tq4");
    // Three sequences read their own keys and values, and the weights once.
    let [one, three] = [number(4, "bytes"), number(5, "bytes")];
    assert!(three > one && three < 3.0 * one);
}

#[test]
fn steps_with_draws() {
    let args = "--decode 5 --sequences 2 --context 20 --temperature 0,0.8 --seconds 0.05";
    let lines = model_lines(&args.split(' ').collect::<Vec<_>>());
    let cases: Vec<_> = lines.iter().map(|line| (line["op"].as_str().unwrap(), &line["temperature"])).collect();
    let (greedy, drawn) = (Value::from(0.0), Value::from(0.8));
    assert_eq!(cases, [("decode", &greedy), ("decode", &drawn), ("batch", &greedy), ("batch", &drawn)]);
    let error = kvant(&["bench", "model", "--decode", "1", "--temperature=-1", "--seconds", "0"]).error();
    assert!(error.contains("temperature"), "{error}");
}

/// Batches begin at a boundary: a page of 256 tokens.
#[test]
fn hybrids_are_measured_in_parts() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvant-models/tests/golden/qwen3_5");
    let args = "--prompts 5 --decode 20 --sequences 1,3 --context 256 --kv bf16 --seconds 0.01 --model";
    let lines = model_lines(&args.split(' ').chain([model]).collect::<Vec<_>>());
    let cases: Vec<String> =
        lines.iter().map(|line| format!("{} {}", line["op"].as_str().unwrap(), line["sequences"])).collect();
    assert_eq!(cases, ["prompt 1", "decode 1", "batch 1", "batch 3"]);
}

/// In a mixture of experts, a token reads only the experts that it is routed to.
#[test]
fn decode_counts_the_bytes_of_a_token() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvant-models/tests/golden/moe");
    let lines = model_lines(&["--model", model, "--decode", "1", "--kv", "f32", "--seconds", "0"]);
    // Matrices are bf16 with 32 inputs. Two layers have heads of 64, one has a head of 128 whose values are its keys.
    let attention = 2 * (128 + 64 + 64 + 128) + (256 + 128 + 256);
    // In each of 3 layers: 3 matrices of the MLP, the router of 6 experts, 3 matrices of each of 2 experts.
    let feed_forward = 3 * (3 * 32 + 6 + 2 * 3 * 32);
    // A row of the embedding, and the output matrix.
    let tables = 1 + 96;
    let keys_and_values = 4 * (2 * (64 + 64) + (128 + 128));
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0]["bytes"], (attention + feed_forward + tables) * 32 * 2 + keys_and_values);
}

#[test]
fn threads_are_the_cpu_devices() {
    let args = "bench norm-rope --shapes 64:4:2 --context 1 --seconds 0 --json --device cpu --threads 3";
    let lines = kvant(&args.split(' ').collect::<Vec<_>>()).json();
    assert!(lines[0]["device"].as_str().unwrap().contains("3 threads"));
}

const DRAFT_KEYS: &str = "op device kv sequences context drafts acceptance tokens_per_second_without tokens_per_second \
                          ratio model_ratio rows tokens accepted_at";

/// A planted share of drafts is accepted. No drafts are accepted at 0, and few are tried.
#[test]
fn drafts_with_planted_acceptance() {
    let args = "bench model --sequences 1,2 --context 20 --drafts 4 --acceptance 0.8,0 --seconds 0.3 --json";
    let lines = kvant(&args.split(' ').collect::<Vec<_>>()).json().split_off(3);
    lines.iter().for_each(|line| assert_keys(line, DRAFT_KEYS));
    let cases: Vec<String> = lines.iter().map(|line| format!("{} {}", line["sequences"], line["acceptance"])).collect();
    assert_eq!(cases, ["1 0.8", "1 0.0", "2 0.8", "2 0.0"]);
    for line in &lines {
        let number = |key: &str| line[key].as_f64().unwrap();
        assert!(number("tokens_per_second") > 0.0 && number("tokens") > 0.9 && number("rows") >= 1.0, "{line}");
        let ratio = number("tokens_per_second") / number("tokens_per_second_without");
        assert!((number("ratio") / ratio - 1.0).abs() < 0.01, "{line}");
        let accepted: Vec<f64> =
            line["accepted_at"].as_array().unwrap().iter().map(|share| share.as_f64().unwrap()).collect();
        assert_eq!(accepted.len(), 4);
        match line["acceptance"].as_f64() {
            Some(0.0) => assert!(accepted[0] == 0.0 && number("rows") < 1.5, "{line}"),
            // Where drafts do not pay, few are tried.
            _ => assert!((0.0..=1.0).contains(&accepted[0]), "{line}"),
        }
        assert!(accepted.is_sorted_by(|a, b| a >= b), "{line}");
    }
    let error = kvant(&["bench", "model", "--acceptance", "1.5"]).error();
    assert!(error.contains("0 to 1"), "{error}");
}
