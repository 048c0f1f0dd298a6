//! Every invalid input gives one message that names it, exit code 1, and no panic.

use std::path::Path;

use crate::{copy_of_the_model, kvant, kvant_with_input, scratch, shipped, str};

#[track_caller]
fn fails(args: &[&str], message: &str) {
    let error = kvant(args).error();
    assert!(error.contains(message), "{error}");
}

#[track_caller]
fn generate_fails(directory: &Path, message: &str) {
    fails(&["generate", "--model", str(directory), "--max-tokens", "1"], message);
}

#[test]
fn arguments() {
    fails(&["generate", "--kv", "tq7"], "tq7");
    fails(&["generate", "--kv", "f16:"], "f16, bf16");
    fails(&["generate", "--kv", "tq4:tq4:tq4"], "one codec, or two");
    fails(&["generate", "--device", "abacus"], "abacus");
    fails(&["generate", "--threads", "0"], "threads");
    fails(&["generate", "--device", "reference", "--threads", "2"], "--threads is for the CPU");
    let message = "--eight-bit-activations is for the CPU device, got --device reference";
    fails(&["generate", "--device", "reference", "--eight-bit-activations"], message);
    let message = "--batch-invariant is for the CPU device, got --device reference";
    fails(&["generate", "--device", "reference", "--batch-invariant"], message);
    fails(&["serve", "--eight-bit-activations", "--batch-invariant"], "cannot be used with");
    fails(&["generate", "--temperature=-1"], "temperature");
    fails(&["generate", "--temperature", "-1"], "`temperature`");
    fails(&["generate", "--temperature", "NaN"], "temperature");
    fails(&["generate", "--top-p", "0"], "top_p");
    fails(&["generate", "--max-tokens=-1"], "-1");
    fails(&["generate", "--max-tokens", "0"], "0");
    fails(&["generate", "--stop", ""], "--stop");
    fails(&["frobnicate"], "frobnicate");
    fails(&["bench", "attend", "--shapes", "64:4"], "head_dim:heads:kv_heads");
    fails(&["bench", "attend", "--shapes", "64:3:2"], "multiple");
    fails(&["bench", "attend", "--shapes", "100:4:2", "--context", "1"], "one of [64, 80, 96");
    fails(&["bench", "attend", "--context", "0"], "0");
    fails(&["bench", "attend", "--seconds=-1"], "-1");
    fails(&["bench", "attend", "--context", "4294967295", "--shapes", "512:65536:65536"], "memory");
    fails(&["bench", "norm-rope", "--context", "4294967295", "--shapes", "512:65536:65536"], "memory");
    fails(&["bench", "encode", "--kv", "f16"], "TurboQuant types");
}

#[test]
fn absent_devices_say_why() {
    for (kind, device) in [("cuda", "cuda"), ("cuda", "cuda:7"), ("metal", "metal")] {
        // A machine that has such a device cannot run this test.
        if kvant(&["devices"]).ok().lines().any(|line| line.contains(kind) && line.contains("not available")) {
            fails(&["generate", "--device", device], &format!("device {device} is not available: "));
        }
    }
}

/// A library with the driver's name but without its functions: one message says that no GPU is available; the CPU runs.
#[cfg(target_os = "linux")]
#[test]
fn an_invalid_driver_is_reported_once() {
    let directory = scratch("an_invalid_driver_is_reported_once");
    let source = directory.join("empty.c");
    std::fs::write(&source, "int nothing(void) { return 0; }\n").unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        let mut cc = std::process::Command::new("cc");
        assert!(cc.args(["-shared", "-fPIC", "-o"]).arg(directory.join(name)).arg(&source).status().unwrap().success());
    }
    let run =
        |args: &[&str]| crate::Run::new(crate::command(args).env("LD_LIBRARY_PATH", &directory).output().unwrap());
    let missing = "has no function cuInit";
    assert!(run(&["devices"]).ok().contains(missing));
    let error = run(&["generate", "--device", "cuda"]).error();
    assert!(error.contains(missing), "{error}");
    let run = run(&["generate", "--max-tokens", "1"]);
    assert!(run.stderr.contains("a GPU is not used: ") && run.stderr.contains(missing), "{}", run.stderr);
    run.ok();
}

#[test]
fn missing_files_are_named() {
    fails(&["generate", "--model", "/nowhere/at/all"], "/nowhere/at/all: no such directory");
    let empty = scratch("missing_files_are_named");
    generate_fails(&empty, "not a checkpoint: it has no config.json");
    // An existing file is not reported as missing.
    generate_fails(&shipped().join("config.json"), "config.json: expected the directory of a checkpoint");
    fails(
        &["eval", "--model", str(&shipped().join("config.json")), "--tokens", "x"],
        "expected the directory of a checkpoint",
    );
    let typo = kvant(&["generate", "--model", str(&empty.join("gemma"))]).error();
    assert!(typo.contains("no such directory") && !typo.contains("Hub"), "{typo}");
    fails(&["eval", "--text", "/nowhere/text"], "/nowhere/text");
    fails(&["eval", "--tokens", "/nowhere/ids"], "/nowhere/ids");
    let model = shipped();
    fails(&["logits", "--model", str(&model), "--tokens-file", "/nowhere/ids", "--out", "x"], "/nowhere/ids");
    fails(&["logits", "--model", str(&model), "--tokens", "2", "--out", "/nowhere/out"], "/nowhere: no such directory");
}

#[test]
fn invalid_tokens_are_refused() {
    let model = shipped();
    let out = scratch("invalid_tokens_are_refused").join("out.safetensors");
    let logits = |tokens| ["logits", "--model", str(&model), "--out", str(&out), "--tokens", tokens];
    fails(&logits("2 x"), "\"x\"");
    fails(&logits(""), "no tokens");
    fails(&logits("2 4096"), "4096");
    fails(&["logits", "--model", str(&model), "--out", str(&out)], "--tokens");
    assert!(!out.exists());
    let ids = out.with_file_name("ids");
    std::fs::write(&ids, "2 5 4096").unwrap();
    fails(&["eval", "--tokens", str(&ids)], "4096");
    std::fs::write(&ids, "2").unwrap();
    fails(&["eval", "--tokens", str(&ids)], &format!("{}: at least 2 tokens", ids.display()));
    std::fs::write(&ids, [0xff, 0xfe]).unwrap();
    fails(&["eval", "--text", str(&ids)], "UTF-8");
}

#[test]
fn truncated_weights() {
    let directory = copy_of_the_model("truncated_weights");
    let weights = directory.join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    for length in [0, 7, 100, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&weights, &bytes[..length]).unwrap();
        generate_fails(&directory, "model.safetensors");
    }
    // A header that claims to exceed the memory.
    std::fs::write(&weights, [&u64::MAX.to_le_bytes()[..], &bytes[8..1000]].concat()).unwrap();
    generate_fails(&directory, "model.safetensors");
    std::fs::remove_file(&weights).unwrap();
    generate_fails(&directory, "safetensors");
}

/// Weights whose products overflow every dtype give an error instead of text made of id 0.
#[test]
fn nan_logits_are_an_error() {
    let directory = copy_of_the_model("nan_logits_are_an_error");
    let weights = directory.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let norm =
        json.as_object().unwrap().iter().find(|(name, _)| name.ends_with("layers.2.post_attention_layernorm.weight"));
    let (_, norm) = norm.unwrap();
    assert_eq!(norm["dtype"], "BF16");
    let at = |i: usize| header + norm["data_offsets"][i].as_u64().unwrap() as usize;
    bytes[at(0)..at(1)].chunks_mut(2).for_each(|x| x.copy_from_slice(&0x7f00u16.to_le_bytes()));
    std::fs::write(&weights, bytes).unwrap();
    fails(&["generate", "--model", str(&directory), "--max-tokens", "1", "--prompt", ""], "position 0 are NaN");
}

#[test]
fn broken_configs() {
    let directory = copy_of_the_model("broken_configs");
    let config = directory.join("config.json");
    let good = std::fs::read_to_string(&config).unwrap();
    for (from, to, message) in [
        ("\"gemma4_text\"", "\"perceptron\"", "perceptron"),
        ("\"hidden_size\": 256", "\"hidden_size\": 1000000000000", ""),
        ("\"hidden_size\": 256", "\"hidden_size\": 0", ""),
        ("\"hidden_size\": 256", "\"hidden_size\": -256", ""),
        ("\"num_hidden_layers\": 6", "\"num_hidden_layers\": 4000000000", ""),
        ("\"vocab_size\": 4096", "\"vocab_size\": 4097", ""),
        ("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", ""),
        ("\"bos_token_id\": 2", "\"bos_token_id\": 4096", "`bos_token_id` must be below the vocabulary's 4096"),
        ("{", "", "config.json"),
    ] {
        assert!(good.contains(from));
        std::fs::write(&config, good.replacen(from, to, 1)).unwrap();
        generate_fails(&directory, message);
    }
    std::fs::remove_file(&config).unwrap();
    generate_fails(&directory, "config.json");
}

#[test]
fn broken_tokenizers() {
    let directory = copy_of_the_model("broken_tokenizers");
    let tokenizer = directory.join("tokenizer.json");
    for content in ["", "{}", "[1, 2", "{\"model\": {\"type\": \"BPE\"}}"] {
        std::fs::write(&tokenizer, content).unwrap();
        generate_fails(&directory, "tokenizer.json");
    }
    // Well-formed JSON on which the parser crate panics.
    let mut senseless: serde_json::Value =
        serde_json::from_slice(&std::fs::read(shipped().join("tokenizer.json")).unwrap()).unwrap();
    senseless["normalizer"] = serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "AAAAAP8="});
    std::fs::write(&tokenizer, senseless.to_string()).unwrap();
    generate_fails(&directory, "inconsistent");
    std::fs::remove_file(&tokenizer).unwrap();
    generate_fails(&directory, "tokenizer.json");
}

/// In a clone without Git LFS, large files are small text files.
#[test]
fn pointers_of_git_lfs() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n";
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        let directory = copy_of_the_model("pointers_of_git_lfs");
        std::fs::write(directory.join(name), pointer).unwrap();
        generate_fails(&directory, &format!("{name}: a pointer of Git LFS, not the file itself: `git lfs pull`"));
    }
    let directory = scratch("pointers_of_git_lfs");
    let file = directory.join("model.gguf");
    std::fs::write(&file, pointer).unwrap();
    for path in [&directory, &file] {
        generate_fails(path, "model.gguf: a pointer of Git LFS");
    }
}

/// Checkpoints of other software have their tokenizer in another file.
#[test]
fn the_tokenizer_file_to_get_is_named() {
    for name in ["tokenizer.model", "tekken.json", "vocab.json"] {
        let directory = copy_of_the_model("the_tokenizer_file_to_get_is_named");
        std::fs::rename(directory.join("tokenizer.json"), directory.join(name)).unwrap();
        let message = format!("has no tokenizer.json, and its {name} is not supported: get tokenizer.json from");
        generate_fails(&directory, &message);
    }
}

/// The error has the system's reason instead of reporting a missing file. A loop of links cannot be read.
#[cfg(unix)]
#[test]
fn folders_that_cannot_be_read() {
    let directory = scratch("folders_that_cannot_be_read");
    let link = directory.join("loop");
    std::os::unix::fs::symlink(&link, &link).unwrap();
    generate_fails(&link, "loop: cannot be read: ");
    generate_fails(&link.join("model"), "model: cannot be read: ");
    std::os::unix::fs::symlink("config.json", directory.join("config.json")).unwrap();
    generate_fails(&directory, "config.json: cannot be read: ");
}

#[test]
fn a_prompt_that_is_not_text() {
    let error = kvant_with_input(&["generate", "--prompt", "-", "--max-tokens", "1"], &[0xff, 0xfe, 0x00]).error();
    assert!(error.contains("standard input"), "{error}");
}

/// The pipe has no writer.
#[cfg(unix)]
#[test]
fn pipes_are_no_checkpoints() {
    let directory = copy_of_the_model("pipes_are_no_checkpoints");
    for name in ["model.safetensors", "config.json"] {
        let path = directory.join(name);
        std::fs::remove_file(&path).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        generate_fails(&directory, &format!("{name}: not a regular file"));
    }
}

#[test]
fn help_and_version_are_not_errors() {
    assert!(kvant(&["--version"]).ok().starts_with("kvant "));
    for args in [&["--help"][..], &["generate", "--help"], &["bench", "attend", "--help"]] {
        assert!(kvant(args).ok().contains("Usage: kvant"));
    }
    let nothing = kvant(&[]);
    assert_eq!(nothing.code, 1);
    assert!(nothing.stderr.contains("Usage: kvant"));
}
