use serde_json::json;

use crate::{assert_keys, copy_of_the_model, kvant, scratch, str};

const KEYS: &str = "kv tokens nats_per_token perplexity kl_mean kl_p99 top1_agreement bytes_per_token";

const TEXT: &str = "\
# Vectors

A vector is a contiguous growable array type. Vectors have O(1) indexing and amortized O(1) push.
<|doc|>
# Traits

A trait tells the compiler about functionality a particular type has and can share with other types.
";

#[test]
fn a_text_gives_a_line_per_cache_type() {
    let file = scratch("eval_text").join("text");
    std::fs::write(&file, TEXT).unwrap();
    let args = ["eval", "--text", str(&file), "--kv", "f32,f16,tq8,tq4,f16:tq4,tq3:tq2", "--json"];
    let lines = kvant(&args).json();
    let kvs: Vec<&str> = lines.iter().map(|line| line["kv"].as_str().unwrap()).collect();
    assert_eq!(kvs, ["f32", "f16", "tq8", "tq4", "f16:tq4", "tq3:tq2"]);
    let number = |i: usize, key: &str| lines[i][key].as_f64().unwrap();
    for (i, line) in lines.iter().enumerate() {
        assert_keys(line, KEYS);
        assert_eq!(line["tokens"], lines[0]["tokens"]);
        let perplexity = number(i, "nats_per_token").exp();
        assert!((number(i, "perplexity") / perplexity - 1.0).abs() < 1e-9);
        assert!((0.5..6.0).contains(&number(i, "nats_per_token")), "a trained model knows this kind of text");
    }
    // f32 equals itself; fewer bits diverge more.
    assert_eq!((number(0, "kl_mean"), number(0, "kl_p99"), number(0, "top1_agreement")), (0.0, 0.0, 1.0));
    let divergence: Vec<f64> = (0..4).map(|i| number(i, "kl_mean")).collect();
    assert!(divergence.is_sorted() && divergence[3] > 100.0 * divergence[1], "{divergence:?}");
    assert!(number(3, "kl_p99") >= number(3, "kl_mean") && number(3, "kl_mean") < 0.5);
    // 5 layers of 2 heads of 256, one of 1 head of 512; keys and values.
    let bytes = [4 * 6144, 2 * 6144, 6144 + 2 * 4 * 12, 6144 / 2 + 2 * 4 * 12, 6144 + 6144 / 4 + 4 * 12];
    for (i, bytes) in bytes.into_iter().enumerate() {
        assert_eq!(lines[i]["bytes_per_token"], bytes, "{}", kvs[i]);
    }
}

/// The divergences of other software's formats match known results; without rotation they are larger than their bytes
/// suggest.
#[test]
fn formats_of_other_software_are_references() {
    let file = scratch("eval_peers").join("text");
    std::fs::write(&file, TEXT.repeat(2)).unwrap();
    let kv = "q8_0,q8_0-rot,fp8,q4_0,q4_0-rot,iq4_nl-rot,mlx4,nvfp4,tq4";
    let lines = kvant(&["eval", "--text", str(&file), "--kv", kv, "--json"]).json();
    let divergence = |name: &str| {
        let line = lines.iter().find(|line| line["kv"] == name).unwrap();
        assert_keys(line, KEYS);
        line["kl_mean"].as_f64().unwrap()
    };
    assert!(divergence("q8_0-rot") < 1e-3 && divergence("q8_0") < 2e-3);
    assert!(divergence("fp8") > 10.0 * divergence("q8_0"));
    assert!(divergence("q4_0-rot") < divergence("q4_0") && divergence("q4_0") < 0.5);
    assert!(divergence("nvfp4") > divergence("iq4_nl-rot") && divergence("mlx4") > divergence("tq4"));
    // 6144 coordinates of a token's keys and values.
    for (at, bits) in [8.5, 8.5, 8.0, 4.5].into_iter().enumerate() {
        assert_eq!(lines[at]["bytes_per_token"], 6144.0 * bits / 8.0, "{}", lines[at]["kv"]);
    }
    let budget = ["--budget", "3", "--out", "x", "--kv", "q4_0"];
    let error = kvant(&[&["eval", "--text", str(&file)], &budget[..]].concat()).error();
    assert!(error.contains("single types to choose from, got q4_0"), "{error}");
    assert!(kvant(&["eval", "--text", str(&file), "--kv", "mlx4-rot"]).error().contains("mlx4-rot"));
}

/// Sealed pages lower the divergence; their bytes include the means and the dense pages.
#[test]
fn sealed_pages_lower_the_divergence() {
    let file = scratch("eval_sealed").join("text");
    std::fs::write(&file, TEXT.repeat(2)).unwrap();
    let args = ["eval", "--text", str(&file), "--kv", "tq4,tq4c", "--page-tokens", "16", "--json"];
    let lines = kvant(&args).json();
    lines.iter().for_each(|line| assert_keys(line, KEYS));
    let [plain, sealed] = [0, 1].map(|index| lines[index]["kl_mean"].as_f64().unwrap());
    assert!(sealed < 0.6 * plain, "{sealed} {plain}");
    // 5 layers of 2 heads of 256, one of 1 head of 512; keys and values; 2-byte norms, and a share of a mean.
    let means: f64 = 2.0 * (5.0 * 2.0 * 260.0 + 516.0) / 16.0;
    let (vectors, dense) = (6144.0 / 2.0 + 2.0 * 2.0 * 12.0 + means, 6144.0 * 2.0);
    let tokens = lines[1]["tokens"].as_f64().unwrap() + 1.0;
    let expected = (vectors * (tokens - 48.0) + dense * 48.0) / tokens;
    assert!((lines[1]["bytes_per_token"].as_f64().unwrap() - expected).abs() <= 1.0, "{expected}");
}

/// f16 matches its own answers; few bits diverge.
#[test]
fn answers_are_compared_token_by_token() {
    let file = scratch("eval_answers").join("text");
    std::fs::write(&file, TEXT.repeat(2)).unwrap();
    let args = ["eval", "--text", str(&file), "--answers", "--prompt-tokens", "40", "--answer-tokens", "12"];
    let lines = kvant(&[&args[..], &["--prompts", "2", "--kv", "f16,tq2,kivi2", "--json"]].concat()).json();
    lines.iter().for_each(|line| {
        assert_keys(line, "kv prompt_tokens answer_tokens first_divergence kl_mean kl_p99 top1_agreement");
    });
    assert_eq!((&lines[0]["kl_mean"], &lines[0]["first_divergence"]), (&json!(0.0), &json!([null, null])));
    assert!(lines[1]["kl_mean"].as_f64().unwrap() > 1e-3);
    // All 52 tokens are in the first tile, which is exact.
    assert!(lines[2]["kl_mean"].as_f64().unwrap() < 1e-4);
}

/// Sealed pages of several prompts, each as long as a pass: the pool has room for a single pass over all of them.
#[test]
fn answers_to_prompts_as_long_as_a_pass() {
    let file = scratch("eval_long_answers").join("ids");
    let ids: Vec<String> = (0..4 * 512).map(|i| (i * 7919 % 400 + 20).to_string()).collect();
    std::fs::write(&file, ids.join(" ")).unwrap();
    let args = ["eval", "--tokens", str(&file), "--answers", "--prompt-tokens", "512", "--answer-tokens", "2"];
    let lines = kvant(&[&args[..], &["--prompts", "4", "--kv", "tq4c", "--json"]].concat()).json();
    assert_eq!(lines[0]["first_divergence"].as_array().unwrap().len(), 4);
}

/// A model with recurrent layers: cache types matter in its other layers.
#[test]
fn hybrids_are_measured() {
    let file = scratch("eval_hybrid").join("ids");
    let ids: Vec<String> = (0..90).map(|i| (i * i * 7 % 90 + 3).to_string()).collect();
    std::fs::write(&file, ids.join(" ")).unwrap();
    for family in ["qwen3_5", "lfm2"] {
        let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvant-models/tests/golden").join(family);
        let args = ["eval", "--model", str(&golden), "--tokens", str(&file), "--page-tokens", "16"];
        let lines = kvant(&[&args[..], &["--kv", "f32,f16,tq4,tq2,q4_0", "--json"]].concat()).json();
        lines.iter().for_each(|line| assert_keys(line, KEYS));
        let divergence: Vec<f64> = lines.iter().map(|line| line["kl_mean"].as_f64().unwrap()).collect();
        assert!(
            divergence[0] == 0.0 && divergence[1] < divergence[2] && divergence[2] < divergence[3],
            "{divergence:?}"
        );
        let answers = ["--answers", "--prompt-tokens", "30", "--answer-tokens", "12", "--prompts", "2"];
        let lines = kvant(&[&args[..], &answers[..], &["--kv", "f16,tq2", "--json"]].concat()).json();
        assert!(lines[0]["kl_mean"].as_f64().unwrap() < lines[1]["kl_mean"].as_f64().unwrap(), "{lines:?}");
        let error = kvant(&[&args[..], &["--kv", "kivi2"]].concat()).error();
        assert!(error.contains("kivi2 needs a model without recurrent layers"), "{error}");
    }
}

/// Held-out tokens for which other implementations have computed the loss with these weights.
#[test]
fn known_tokens_give_the_known_loss() {
    let tokens = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvant-models/tests/golden/rustdoc-11m/tokens.txt");
    let lines = kvant(&["eval", "--tokens", tokens, "--kv", "f32", "--json"]).json();
    assert_eq!(lines[0]["tokens"], 179);
    let nats = lines[0]["nats_per_token"].as_f64().unwrap();
    assert!((nats - 1.629343).abs() < 0.001, "{nats}");
}

#[test]
fn windows_begin_anew() {
    let file = scratch("eval_windows").join("ids");
    std::fs::write(&file, "2 17 301 2 17 301 2 17").unwrap();
    let nats = |window: &str, file: &std::path::Path| {
        let args = ["eval", "--tokens", str(file), "--kv", "f32", "--json", "--window-tokens", window];
        let lines = kvant(&args).json();
        (lines[0]["tokens"].as_u64().unwrap(), lines[0]["nats_per_token"].as_f64().unwrap())
    };
    let (tokens, windowed) = nats("3", &file);
    assert_eq!(tokens, 2 + 2 + 1);
    let one = file.with_file_name("one");
    std::fs::write(&one, "2 17 301").unwrap();
    let (_, whole) = nats("3", &one);
    std::fs::write(&one, "2 17").unwrap();
    let (_, part) = nats("3", &one);
    assert!((windowed - (4.0 * whole + part) / 5.0).abs() < 1e-6);
}

#[test]
fn results_are_printed_as_a_table() {
    let file = scratch("eval_table").join("text");
    std::fs::write(&file, TEXT).unwrap();
    let table = kvant(&["eval", "--text", str(&file), "--kv", "f16,tq4"]).ok();
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(table.lines().nth(2).unwrap().starts_with("tq4 "));
}

/// Ids that end a turn are not part of a text.
#[test]
fn documents_end_with_one_id() {
    let directory = copy_of_the_model("documents_end_with_one_id");
    let file = directory.join("text");
    std::fs::write(&file, TEXT).unwrap();
    let eval = || kvant(&["eval", "--model", str(&directory), "--text", str(&file), "--kv", "f32", "--json"]).json();
    let want = eval();
    let config = directory.join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    json["eos_token_id"] = serde_json::json!([1, 3]);
    std::fs::write(&config, json.to_string()).unwrap();
    assert_eq!(eval(), want);
    // If the tokenizer does not specify it, it is the first of the model's.
    std::fs::remove_file(directory.join("tokenizer_config.json")).unwrap();
    assert_eq!(eval(), want);
}

const BUDGET: [&str; 8] = ["--budget", "3", "--budget-tokens", "32", "--kv", "tq4,tq2", "--json", "--out"];

/// The text of a search, and the file that it writes.
fn search(folder: &str) -> (std::path::PathBuf, std::path::PathBuf) {
    let text = scratch(folder).join("text");
    std::fs::write(&text, TEXT).unwrap();
    let out = text.with_file_name("best.json");
    (text, out)
}

#[test]
fn a_budget_gives_types_per_layer_that_every_command_takes() {
    let (text, out) = search("eval_budget");
    let lines = kvant(&[&["eval", "--text", str(&text)], &BUDGET[..], &[str(&out)]].concat()).json();
    let at = format!("@{}", str(&out));
    let names: Vec<&str> = lines.iter().map(|line| line["kv"].as_str().unwrap()).collect();
    assert_eq!(names[0], at);
    assert!(["tq4:tq2", "tq2:tq4"].contains(&names[1]), "{names:?}");
    let number = |i: usize, key: &str| lines[i][key].as_f64().unwrap();
    assert!(
        number(0, "kl_mean") <= number(1, "kl_mean") && number(0, "bytes_per_token") <= number(1, "bytes_per_token")
    );
    assert_eq!(number(0, "tokens"), 31.0);

    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    assert_keys(&file, "layers bits kl_mean tokens model");
    let layers = file["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 6);
    assert!(
        layers.iter().all(|layer| ["tq4", "tq2", "tq4:tq2", "tq2:tq4"].contains(&layer.as_str().unwrap())),
        "{file}"
    );
    assert!(file["bits"].as_f64().unwrap() <= 3.0);
    assert!((file["kl_mean"].as_f64().unwrap() / number(0, "kl_mean") - 1.0).abs() < 1e-6);
    assert!(!out.with_file_name("best.json.part").exists());

    // Bytes of the layers: 5 with 2 heads of 256, one with 1 head of 512.
    let of = |codec: &str| if codec == "tq4" { 4 } else { 2 };
    let sides = layers.iter().map(|layer| {
        layer.as_str().unwrap().split_once(':').unwrap_or_else(|| {
            let both = layer.as_str().unwrap();
            (both, both)
        })
    });
    let codes: usize = sides.map(|(k, v)| (of(k) + of(v)) * 512 / 8).sum();
    assert_eq!(number(0, "bytes_per_token"), (codes + 12 * 2 * 4) as f64);

    let more = kvant(&["eval", "--text", str(&text), "--kv", &format!("f32,{at}"), "--json"]).json();
    assert_eq!(more[1]["kv"], at);
    assert!(more[1]["kl_mean"].as_f64().unwrap() > 0.0);
    let report = kvant(&["generate", "--kv", &at, "--max-tokens", "3", "--json"]).json().remove(0);
    assert_eq!(report["kv"], at);
    assert!(report["cache_bytes"].as_u64() < report["cache_bytes_f16"].as_u64());
    let logits = out.with_file_name("logits");
    kvant(&["logits", "--tokens", "2 17", "--kv", &at, "--out", str(&logits)]).ok();
    let bench = ["bench", "model", "--decode", "8", "--seconds", "0.01", "--json", "--kv", &at];
    assert_eq!(kvant(&bench).json().last().unwrap()["kv"], at);
}

/// An interrupted search does not repeat its measurements.
#[test]
fn a_stopped_search_continues() {
    let (text, out) = search("eval_resume");
    let run = || kvant(&[&["eval", "--text", str(&text)], &BUDGET[..], &[str(&out)]].concat()).json();
    run();
    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    // An impossible value, which shows in the result if it is reused.
    let layers = ["tq2:tq4"; 6];
    let known = json!({"of": layers.join(","), "result": 1e-12});
    let part = out.with_file_name("best.json.part");
    std::fs::write(&part, format!("{}\n{known}\n", file["model"].as_str().unwrap())).unwrap();
    run();
    let again: serde_json::Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    assert_eq!((&again["layers"], &again["kl_mean"]), (&json!(layers), &json!(1e-12)));
    assert!(!part.exists());
}

#[test]
fn budgets_that_cannot_be_met_are_refused() {
    let (text, out) = search("eval_bad_budget");
    let eval = |more: &[&str]| kvant(&[&["eval", "--text", str(&text)], more].concat()).error();
    let out = str(&out);
    assert!(eval(&["--budget", "1.5", "--out", out]).contains("at least the narrowest type's 2 bits, got 1.5"));
    assert!(eval(&["--budget", "-1", "--out", out]).contains("got -1"));
    assert!(eval(&["--budget", "3"]).contains("--out"));
    assert!(eval(&["--out", out]).contains("--budget"));
    assert!(eval(&["--budget", "3", "--out", out, "--kv", "f16:tq4"]).contains("single types to choose from"));
    assert!(eval(&["--budget", "3", "--out", out, "--kv", "tq4,tq4c"]).contains("equal bits"));
    assert!(eval(&["--budget", "3", "--out", "/no/such/place/best.json"]).contains("no such directory"));
    assert!(!std::path::Path::new(out).exists());
}

#[test]
fn files_of_types_per_layer_are_checked() {
    let file = scratch("eval_layers").join("kv.json");
    let at = format!("@{}", str(&file));
    let generate = || kvant(&["generate", "--max-tokens", "1", "--kv", &at]).error();
    assert!(generate().contains("No such file"));
    std::fs::write(&file, r#"{"layers": ["tq4", "tq9"]}"#).unwrap();
    assert!(generate().contains("tq9"));
    std::fs::write(&file, r#"{"layers": ["tq4", "tq3c"]}"#).unwrap();
    let error = generate();
    assert!(error.contains("codecs of 6 layers") && error.contains("of 2"), "{error}");
    let attend = kvant(&["bench", "attend", "--kv", &at]).error();
    assert!(attend.contains(&at), "{attend}");
}

#[test]
fn a_report_is_one_page_with_its_data() {
    let folder = scratch("eval_report");
    let (text, layers, out) = (folder.join("text"), folder.join("a<b>&.json"), folder.join("new").join("report"));
    std::fs::write(&text, TEXT).unwrap();
    std::fs::write(&layers, r#"{"layers": ["tq4", "tq4", "tq2", "tq3", "tq8", "f16"]}"#).unwrap();
    let kv = format!("f16,tq4,tq2c,@{}", str(&layers));
    let args = ["eval", "--text", str(&text), "--kv", &kv, "--report", str(&out), "--json"];
    let args = [&args[..], &["--window-tokens", "40", "--page-tokens", "16"]].concat();
    let answers = ["--answers", "--answer-tokens", "5", "--prompt-tokens", "20", "--prompts", "2"];
    let lines = kvant(&[&args[..], &answers].concat()).json();
    let read = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    let data: serde_json::Value = serde_json::from_str(&read("report.json")).unwrap();
    assert_keys(&data, "subject tokens window_tokens caches layers pages needles answers");
    assert_eq!(data["window_tokens"], 40);
    let caches = data["caches"].as_array().unwrap();
    assert_eq!(caches.len(), 4);
    for (cache, line) in caches.iter().zip(&lines) {
        let mut cache = cache.clone();
        let parts = cache.as_object_mut().unwrap().remove("kl_by_position").unwrap();
        assert_eq!(&cache, line);
        let parts: Vec<f64> = parts.as_array().unwrap().iter().map(|kl| kl.as_f64().unwrap()).collect();
        assert_eq!(parts.len(), 16);
        // Parts differ in length by at most one.
        let mean = parts.iter().sum::<f64>() / 16.0;
        assert!((0.5..2.0).contains(&(mean / line["kl_mean"].as_f64().unwrap())), "{parts:?}");
    }
    assert_keys(&data["layers"], "kv keys values");
    for side in ["keys", "values"] {
        let kls = data["layers"][side].as_array().unwrap();
        assert!(kls.len() == 6 && kls.iter().all(|kl| kl.as_f64().unwrap() > 0.0), "{kls:?}");
    }
    let pages = &data["pages"];
    assert_keys(pages, "page_tokens mean_share bits clipped clipped_normal");
    for side in ["keys", "values"] {
        let numbers = |name: &str| -> Vec<f64> {
            pages[name][side].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
        };
        let (share, clipped) = (numbers("mean_share"), numbers("clipped"));
        assert!(share.len() == 6 && share.iter().all(|&share| share > 0.02 && share < 0.98), "{share:?}");
        assert!(clipped.len() == 6 && clipped.iter().all(|&share| share > 0.001 && share < 0.03), "{clipped:?}");
    }
    assert_eq!(pages["page_tokens"], 16);
    let answers = data["answers"]["caches"].as_array().unwrap();
    assert!(answers.iter().zip(&lines).all(|(answer, line)| answer["kv"] == line["kv"]) && answers.len() == 4);
    assert_eq!(answers[0]["first_divergence"].as_array().unwrap().len(), 2);
    // The text is too short for needles.
    assert_eq!(data["needles"], json!([]));
    let page = read("report.html");
    assert_eq!(page.matches("<svg").count(), 6);
    for outside in ["<script", "src=", "href=", "url(", "@import", "<b>"] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.contains("a&lt;b&gt;&amp;.json"));
    assert!(!out.join("measurements.part").exists());

    // An impossible value in an interrupted report, which shows if it is reused.
    let subject = data["subject"].as_str().unwrap();
    let mut known = caches[0].clone();
    known["kl_mean"] = json!(0.125);
    let of = r#"Kv(Kv { name: "f16", codecs: Same(KvCodec { k: Dense(F16), v: Dense(F16) }) })"#;
    let line = json!({"of": of, "result": {"Cache": known}});
    std::fs::write(out.join("measurements.part"), format!("{subject}\n{line}\n")).unwrap();
    assert_eq!(kvant(&args).json()[0]["kl_mean"], 0.125);

    // No positive number to draw on a logarithmic axis.
    let ids = folder.join("ids");
    std::fs::write(&ids, "2 17 301").unwrap();
    let exact = folder.join("exact");
    kvant(&["eval", "--tokens", str(&ids), "--kv", "f32", "--report", str(&exact)]).ok();
    assert_eq!(std::fs::read_to_string(exact.join("report.html")).unwrap().matches("<svg").count(), 4);

    let both = kvant(&["eval", "--text", str(&text), "--report", str(&out), "--budget", "3", "--out", "x"]).error();
    assert!(both.contains("cannot be used with"), "{both}");
    let taken = kvant(&["eval", "--text", str(&text), "--report", str(&text)]).error();
    assert!(taken.contains("--report"), "{taken}");
}

/// A needle is more probable if the context contains it, with an exact cache and with good ones.
#[test]
fn a_report_looks_for_needles() {
    let folder = scratch("eval_needles");
    let (text, out) = (folder.join("text"), folder.join("report"));
    let whole = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/rustdoc-valid.txt"));
    std::fs::write(&text, &whole.unwrap()[..5000]).unwrap();
    let args = ["eval", "--text", str(&text), "--kv", "f16,tq8c,q8_0-rot,tq2c", "--report", str(&out)];
    kvant(&[&args[..], &["--needle-tokens", "1000"]].concat()).ok();
    let data: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(out.join("report.json")).unwrap()).unwrap();
    let needles = &data["needles"][0];
    assert_keys(needles, "context depths caches without");
    assert_eq!(needles["context"], 1000 - 32);
    let numbers = |list: &serde_json::Value| -> Vec<f64> {
        list.as_array().unwrap().iter().map(|p| p.as_f64().unwrap()).collect()
    };
    let caches = needles["caches"].as_array().unwrap();
    let names: Vec<&str> = caches.iter().map(|cache| cache["kv"].as_str().unwrap()).collect();
    assert_eq!(names, ["f32", "f16", "tq8c", "q8_0-rot", "tq2c"]);
    let (exact, without) = (numbers(&caches[0]["probabilities"]), numbers(&needles["without"]));
    assert!(exact.len() == 8 && exact.iter().all(|&p| p > 0.0 && p < 1.0), "{exact:?}");
    let mean = |numbers: &[f64]| numbers.iter().sum::<f64>() / numbers.len() as f64;
    assert!(mean(&exact) > mean(&without) + 0.03, "{exact:?}, without needles {without:?}");
    for cache in &caches[1..4] {
        let found = numbers(&cache["probabilities"]);
        let close = exact.iter().zip(&found).all(|(want, got)| (want - got).abs() < 0.05);
        assert!(close, "{}: {found:?}, not {exact:?}", cache["kv"]);
    }
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert_eq!(page.matches("<svg").count(), 7);
}

/// Several lengths in one run, with a row per cache type. A 2-bit cache retrieves less than an exact one.
#[test]
fn needles_and_pass_keys_are_looked_for_at_several_lengths() {
    let folder = scratch("eval_needle_lengths");
    let (text, ids) = (folder.join("text"), folder.join("ids"));
    let whole = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/rustdoc-valid.txt"));
    std::fs::write(&text, &whole.unwrap()[..6000]).unwrap();
    let args = ["eval", "--text", str(&text), "--kv", "f32,tq2", "--needle-tokens"];
    let lines = kvant(&[&args[..], &["1000,1100", "--json"]].concat()).json();
    assert_eq!(lines.len(), 4);
    for (lines, tokens) in lines.chunks(2).zip([1000, 1100]) {
        for line in lines {
            assert_keys(line, "kv context_tokens needle_probability needle_probability_min pass_keys_found pass_keys");
            assert_eq!(line["context_tokens"], tokens - 32);
            let (found, of) = (line["pass_keys_found"].as_u64().unwrap(), line["pass_keys"].as_u64().unwrap());
            assert!(found <= of && of.is_multiple_of(8) && of > 0);
            assert!(line["needle_probability_min"].as_f64() <= line["needle_probability"].as_f64());
        }
        let needle = |i: usize| lines[i]["needle_probability"].as_f64().unwrap();
        assert!(needle(1) < needle(0) - 0.01, "{lines:?}");
    }
    let table = kvant(&[&args[..], &["1000"]].concat()).ok();
    assert_eq!(table.lines().count(), 3, "{table}");

    let error = |more: &[&str]| kvant(&[&["eval", "--text", str(&text)], more].concat()).error();
    let long = error(&["--needle-tokens", "10000000"]);
    assert!(
        long.contains("--needle-tokens must be at most the model's context") && long.contains("10000000"),
        "{long}"
    );
    assert!(error(&["--needle-tokens", "500"]).contains("must be longer"));
    assert!(error(&["--needle-tokens", "0"]).contains("needle-tokens"));
    let budget = error(&["--needle-tokens", "1000", "--budget", "3", "--out", "x"]);
    assert!(budget.contains("cannot be used with"), "{budget}");
    std::fs::write(&ids, "2 17 301").unwrap();
    let short = kvant(&["eval", "--tokens", str(&ids), "--needle-tokens", "1000"]).error();
    assert!(short.contains("must be longer"), "{short}");
}
