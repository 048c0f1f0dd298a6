use std::{fs, path::Path, process::Stdio};

use crate::{Run, command, scratch, shipped};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Lays a model out as `huggingface_hub` does: files by hash, and snapshots of links to them.
#[cfg(unix)]
fn lay_out(cache: &Path, name: &str, model: &Path) {
    let repository = cache.join(format!("models--{}", name.replace('/', "--")));
    let snapshot = repository.join("snapshots").join(COMMIT);
    let _ = fs::remove_dir_all(&repository);
    for directory in [&snapshot, &repository.join("blobs"), &repository.join("refs")] {
        fs::create_dir_all(directory).unwrap();
    }
    fs::write(repository.join("refs/main"), COMMIT).unwrap();
    for (i, entry) in fs::read_dir(model).unwrap().enumerate() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), repository.join(format!("blobs/{i}"))).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{i}"), snapshot.join(entry.file_name())).unwrap();
    }
}

#[cfg(unix)]
#[test]
fn names_of_the_hub_are_found_in_the_cache() {
    let cache = scratch("hub");
    lay_out(&cache, "org/tiny", &shipped());
    let run = |name: &str| {
        let args = ["generate", "--model", name, "--max-tokens", "3", "--json"];
        let output = command(&args).env("HF_HUB_CACHE", &cache).stdin(Stdio::null()).output().unwrap();
        Run::new(output)
    };
    assert_eq!(run("org/tiny").json()[0]["generated_tokens"], 3);
    let error = run("org/other").error();
    assert!(error.contains("org/other") && error.contains("nor in the cache"), "{error}");
    fs::remove_file(cache.join("models--org--tiny/snapshots").join(COMMIT).join("config.json")).unwrap();
    let error = run("org/tiny").error();
    assert!(error.contains("no config.json"), "{error}");
}
