use std::{fs, path::Path, process::Stdio};

use crate::{Run, command, scratch, shipped};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Lays out a model as `huggingface_hub` does: files by hash, and snapshots of links to them.
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
    assert!(error.contains("org/other") && error.contains("in the cache"), "{error}");
    fs::remove_file(cache.join("models--org--tiny/snapshots").join(COMMIT).join("config.json")).unwrap();
    let error = run("org/tiny").error();
    let expected = if cfg!(feature = "download") { "HF_HUB_OFFLINE" } else { "no config.json" };
    assert!(error.contains(expected), "{error}");
}

#[cfg(feature = "download")]
mod download {
    use std::{
        io::{BufRead, BufReader, Read, Write},
        net::{TcpListener, TcpStream},
        path::PathBuf,
        sync::{Arc, Mutex},
    };

    use super::*;

    /// A server with the hub's paths for downloads: a file list, and files served in ranges. As on the hub, weights are
    /// on another host.
    struct Hub {
        address: String,
        asked: Arc<Mutex<Vec<String>>>,
    }

    impl Hub {
        fn new(model: PathBuf) -> Hub {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = format!("http://{}", listener.local_addr().unwrap());
            let asked = Arc::new(Mutex::new(Vec::new()));
            let (own, log) = (address.clone(), asked.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    let _ = answer(stream.unwrap(), &model, &own, &log);
                }
            });
            Hub { address, asked }
        }

        fn run(&self, cache: &Path, name: &str) -> Run {
            let args = ["generate", "--model", name, "--max-tokens", "3", "--json"];
            let mut command = command(&args);
            command.env("HF_HUB_CACHE", cache).env("HF_ENDPOINT", &self.address).env("HF_HUB_OFFLINE", "0");
            Run::new(command.env("HF_TOKEN", "secret").stdin(Stdio::null()).output().unwrap())
        }

        fn asked(&self) -> Vec<String> {
            std::mem::take(&mut self.asked.lock().unwrap())
        }
    }

    fn answer(mut stream: TcpStream, model: &Path, own: &str, log: &Mutex<Vec<String>>) -> std::io::Result<()> {
        let mut head = String::new();
        let mut reader = BufReader::new(stream.try_clone()?);
        while reader.read_line(&mut head)? > 2 {}
        let path = head.split(' ').nth(1).unwrap_or_default().to_string();
        let header = |name: &str| {
            head.lines().find_map(|line| line.to_lowercase().strip_prefix(name).map(|value| value.trim().to_string()))
        };
        assert_eq!(header("authorization:").as_deref(), Some("bearer secret"));
        log.lock().unwrap().push(path.clone());
        let reply = |stream: &mut TcpStream, status: &str, headers: &str, body: &[u8]| {
            let length = body.len();
            write!(stream, "HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n")?;
            stream.write_all(body)
        };
        if path == "/api/models/org/tiny/revision/main" {
            let names = fs::read_dir(model)?.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let files: Vec<_> = names.map(|name| serde_json::json!({"rfilename": name})).collect();
            let info = serde_json::json!({"siblings": files, "sha": COMMIT}).to_string();
            return reply(&mut stream, "200 OK", "content-type: application/json\r\n", info.as_bytes());
        }
        let file = path.rsplit('/').next().unwrap_or_default();
        let known = path.starts_with("/org/tiny/resolve/main/") || path.starts_with("/elsewhere/");
        let Some(mut body) = known.then(|| fs::File::open(model.join(file)).ok()).flatten() else {
            return reply(&mut stream, "404 Not Found", "", b"no such entry");
        };
        let linked = format!("x-repo-commit: {COMMIT}\r\netag: \"{file}-tag\"\r\n");
        if file.ends_with(".safetensors") && !path.starts_with("/elsewhere/") {
            let headers = format!("{linked}location: {own}/elsewhere/{file}\r\n");
            return reply(&mut stream, "302 Found", &headers, b"");
        }
        let mut bytes = Vec::new();
        body.read_to_end(&mut bytes)?;
        let range = header("range:").expect("downloads ask for ranges");
        let (start, end) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        let start: usize = start.parse().unwrap();
        let end = end.parse().map_or(bytes.len(), |end: usize| end + 1);
        let headers = format!("{linked}content-range: bytes {start}-{}/{}\r\n", end - 1, bytes.len());
        reply(&mut stream, "206 Partial Content", &headers, &bytes[start..end])
    }

    #[test]
    fn models_are_downloaded_once_and_resumed() {
        let hub = Hub::new(shipped());
        let cache = scratch("download");
        let first = hub.run(&cache, "org/tiny");
        assert!(first.stderr.contains("downloading org/tiny: 4 files"), "{}", first.stderr);
        assert_eq!(first.json()[0]["generated_tokens"], 3);
        let asked = hub.asked();
        assert!(asked.last().unwrap().ends_with("/config.json"), "{asked:?}");
        // As by the Python package: a link in the snapshot.
        let repository = cache.join("models--org--tiny");
        let snapshot = repository.join("snapshots").join(COMMIT);
        assert_eq!(fs::read_to_string(repository.join("refs/main")).unwrap(), COMMIT);
        assert!(fs::read_link(snapshot.join("model.safetensors")).unwrap().ends_with("blobs/model.safetensors-tag"));

        // No further requests.
        hub.run(&cache, "org/tiny").ok();
        assert_eq!(hub.asked(), [""; 0]);

        // An interrupted download: partial weights, and no configuration.
        let blobs = repository.join("blobs");
        let whole = fs::read(blobs.join("model.safetensors-tag")).unwrap();
        fs::write(blobs.join("model.part"), &whole[..whole.len() / 2]).unwrap();
        fs::remove_file(blobs.join("model.safetensors-tag")).unwrap();
        fs::remove_file(snapshot.join("model.safetensors")).unwrap();
        fs::remove_file(snapshot.join("config.json")).unwrap();
        assert_eq!(hub.run(&cache, "org/tiny").json()[0]["generated_tokens"], 3);
        let asked = hub.asked();
        assert!(!asked.iter().any(|path| path.ends_with("/tokenizer.json")), "{asked:?}");
        assert_eq!(fs::read(blobs.join("model.safetensors-tag")).unwrap(), whole);
    }

    #[test]
    fn files_missing_on_the_hub_are_errors() {
        let hub = Hub::new(shipped());
        let cache = scratch("download-errors");
        let error = hub.run(&cache, "org/other").error();
        assert!(error.contains("org/other: cannot download") && error.contains("404"), "{error}");
        let error = hub.run(&cache, "org/tiny/a.gguf").error();
        assert!(error.contains("has no a.gguf"), "{error}");
        assert!(!cache.join("models--org--other").exists());
    }
}
