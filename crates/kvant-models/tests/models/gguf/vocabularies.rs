//! Compares tokenizers for llama.cpp's vocabularies with the ids of transformers.

use std::path::{Path, PathBuf};

use kvant_models::{Tokenizer, gguf::Gguf};

/// The vocabularies; `None`, with a message, if they have not been downloaded.
fn downloaded() -> Option<PathBuf> {
    let out = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/gguf-vocabularies");
    if !out.exists() {
        eprintln!("SKIPPED: no vocabularies; python3 tools/gguf_vocabularies.py downloads them (77 MB)");
        return None;
    }
    Some(out)
}

/// The texts and their ids.
fn cases(gguf: &Path) -> Vec<(String, Vec<u32>)> {
    let read = |suffix: &str| std::fs::read_to_string(format!("{}{suffix}", gguf.display())).unwrap();
    let (texts, ids) = (read(".inp"), read(".out"));
    let ids = ids.lines().map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect());
    texts.split("\n__ggml_vocab_test__\n").map(str::to_string).zip(ids).collect()
}

#[test]
fn ids_equal_transformers() {
    let Some(directory) = downloaded() else { return };
    let mut wrong = Vec::new();
    let mut passed = Vec::new();
    let mut files: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for file in files.iter().filter(|file| file.extension().is_some_and(|kind| kind == "gguf")) {
        let name = file.file_stem().unwrap().to_str().unwrap();
        let started = std::time::Instant::now();
        let gguf = Gguf::open(file).unwrap();
        let tokenizer = match Tokenizer::from_gguf(gguf.metadata()) {
            Ok(tokenizer) => tokenizer,
            // WordPiece.
            Err(error) if name == "bert-bge" => {
                assert!(error.to_string().contains("\"bert\""), "{error}");
                continue;
            }
            Err(error) => panic!("{name}: {error}"),
        };
        let cases = cases(file);
        assert!(cases.len() > 40);
        let before = wrong.len();
        for (text, expected) in &cases {
            let got = tokenizer.encode(text, false).unwrap();
            if got != *expected {
                wrong.push(format!("{name}: {text:?}\n   got      {got:?}\n   expected {expected:?}"));
            }
            let decoded = tokenizer.decode_with_special(&got).unwrap();
            if decoded != *text {
                wrong.push(format!("{name}: {text:?}\n   decoded {decoded:?}"));
            }
        }
        println!("{name}: {:?}", started.elapsed());
        if wrong.len() == before {
            passed.push(name.to_string());
        }
    }
    println!("passed: {}", passed.join(", "));
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(passed.len() >= 14, "{passed:?}");
}
