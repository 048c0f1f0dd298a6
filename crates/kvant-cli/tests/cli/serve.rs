//! `kvant serve`: starts, responds, and stops on SIGTERM.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::Stdio,
};

use super::{command, copy_of_the_model, kvant, scratch, str};

#[test]
fn invalid_options_are_refused() {
    let directory = scratch("serve-keys");
    let empty = directory.join("keys");
    std::fs::write(&empty, "# none\n\n").unwrap();
    assert!(kvant(&["serve", "--api-key-file", str(&empty)]).error().contains("no key"));
    assert!(kvant(&["serve", "--api-key", ""]).error().contains("--api-key"));
    assert!(kvant(&["serve", "--host", "no such host"]).error().contains("cannot listen"));
    assert!(kvant(&["serve", "--chat-template", "missing.jinja", "--port", "0"]).error().contains("missing.jinja"));
    assert!(kvant(&["serve", "missing/model", "--port", "0"]).error().contains("missing/model"));
    // Reported before the model is loaded.
    for (option, value, expected) in [
        ("--context", "1", "2.."),
        ("--max-sequences", "0", "1..=65536"),
        ("--max-sequences", "1000000000", "1..=65536"),
        ("--drafts", "33", "0..=32"),
        ("--max-connections", "0", "1.."),
        ("--name", "", ""),
        ("--cors", "nonsense", "expected an origin"),
        ("--allowed-host", "", "the name of a host"),
        ("--allowed-host", "box:8080", "without scheme and port"),
    ] {
        let error = kvant(&["serve", "--port", "0", option, value]).error();
        assert!(error.contains(option) && error.contains(value) && error.contains(expected), "{error}");
        assert!(!error.contains("loaded"), "{error}");
    }
}

/// Pages that cannot store one text of the context are rejected.
#[test]
fn memory_holds_a_text_of_the_context() {
    let error = kvant(&["serve", "--port", "0", "--memory", "3MiB"]).error();
    assert!(error.contains("--memory") && error.contains("8192 tokens") && error.contains("--context"), "{error}");
    assert!(!error.contains("loaded"), "{error}");
}

/// A server on its own port, killed at the end.
struct Running {
    child: std::process::Child,
    port: u16,
}

impl Running {
    /// Starts a server with standard error redirected to `log`, and waits until it responds.
    fn start(log: Stdio, more: &[&str]) -> Running {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let port_text = port.to_string();
        let sequences: &[&str] = if more.contains(&"--max-sequences") { &[] } else { &["--max-sequences", "2"] };
        let options = [&["serve", "--port", &port_text], sequences, more].concat();
        let child = command(&options).stderr(log).spawn().unwrap();
        let running = Running { child, port };
        for _ in 0..600 {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return running;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        panic!("the server does not listen");
    }

    /// The response to a request, including its head.
    fn ask(&self, head: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let head = format!(
            "{head} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Stops the server, which finishes its work first.
    #[cfg(unix)]
    fn stop(mut self) {
        let started = std::time::Instant::now();
        let killed = std::process::Command::new("kill").arg(self.child.id().to_string()).status().unwrap();
        assert!(killed.success() && self.child.wait().unwrap().success());
        assert!(started.elapsed().as_secs() < 50, "a handle of the directory was not dropped");
    }

    /// A field of `/proc/PID/status` in kilobytes.
    #[cfg(target_os = "linux")]
    fn kilobytes(&self, key: &str) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory with two valid models and two that cannot be served.
fn directory_of_models(name: &str) -> std::path::PathBuf {
    let copy = copy_of_the_model(&format!("{name}-copy"));
    let directory = scratch(name);
    for model in ["one", "org/two", "cut", "wrong"] {
        std::fs::create_dir_all(directory.join(model)).unwrap();
        for file in std::fs::read_dir(&copy).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), directory.join(model).join(file.file_name())).unwrap();
        }
    }
    // One fails when it is found at the start, the other when it is loaded.
    std::fs::write(directory.join("wrong/config.json"), "{}").unwrap();
    std::fs::write(directory.join("cut/tokenizer.json"), "{}").unwrap();
    directory
}

fn complete(model: &str) -> String {
    format!(r##"{{"model": "{model}", "prompt": "# A", "max_tokens": 2}}"##)
}

#[test]
fn models_of_a_directory_share_memory() {
    let directory = directory_of_models("serve-models");
    let options = ["--models-dir", str(&directory), "--context", "256", "--max-sequences", "1"];
    let metric = |running: &Running, name: &str| -> u64 {
        let metrics = running.ask("GET /metrics", "");
        let line = metrics.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {metrics}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let running = Running::start(Stdio::null(), &options);
    let list = running.ask("GET /v1/models", "");
    assert!(["one", "org/two", "cut"].iter().all(|name| list.contains(&format!(r#""id":"{name}""#))), "{list}");
    assert!(!list.contains("wrong"), "{list}");
    for (model, status) in [("one", 200), ("org/two", 200), ("cut", 500), ("wrong", 404), ("one", 200)] {
        let answer = running.ask("POST /v1/completions", &complete(model));
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{model}: {answer}");
    }
    // Both fit, and the failed model takes no memory.
    let both = metric(&running, "kvant:models_bytes");
    assert_eq!(metric(&running, r#"kvant:model_loads_total{model_name="one"}"#), 1);
    drop(running);

    let memory = (both - 1).to_string();
    let running = Running::start(Stdio::null(), &[&options[..], &["--memory", &memory]].concat());
    for (model, loads) in [("one", 1), ("org/two", 1), ("org/two", 1), ("one", 2)] {
        let answer = running.ask("POST /v1/completions", &complete(model));
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains(&format!(r#""model":"{model}""#)), "{answer}");
        assert_eq!(metric(&running, &format!("kvant:model_loads_total{{model_name=\"{model}\"}}")), loads, "{model}");
        assert_eq!(metric(&running, "kvant:models_bytes"), both / 2);
    }
}

/// A directory that is copied into the one of the models is served without a restart.
#[test]
fn models_appear_in_a_directory() {
    let directory = directory_of_models("serve-appear");
    let later = scratch("serve-appear-later");
    std::fs::rename(directory.join("org/two"), later.join("two")).unwrap();
    std::fs::rename(directory.join("one"), later.join("one")).unwrap();
    let log = scratch("serve-appear-log").join("log");
    let options = ["--models-dir", str(&directory), "--context", "256", "--max-sequences", "1"];
    let running = Running::start(Stdio::from(std::fs::File::create(&log).unwrap()), &options);
    let until = |what: &str, is_so: &dyn Fn() -> bool| {
        let started = std::time::Instant::now();
        while !is_so() {
            assert!(started.elapsed().as_secs() < 60, "{what}");
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    };
    let complete = |model: &str| running.ask("POST /v1/completions", &complete(model));
    assert!(complete("org/two").starts_with("HTTP/1.1 404 "));
    std::fs::rename(later.join("two"), directory.join("org/two")).unwrap();
    until("a model that is asked for", &|| complete("org/two").starts_with("HTTP/1.1 200 "));
    std::fs::rename(later.join("one"), directory.join("one")).unwrap();
    until("a model in the list", &|| running.ask("GET /v1/models", "").contains(r#""id":"one""#));
    // One that was left out is complete now.
    assert!(complete("wrong").starts_with("HTTP/1.1 404 "));
    std::fs::copy(directory.join("one/config.json"), directory.join("wrong/config.json")).unwrap();
    until("a model that was left out", &|| complete("wrong").starts_with("HTTP/1.1 200 "));
    drop(running);
    let log = std::fs::read_to_string(&log).unwrap();
    assert_eq!(log.matches("left out").count(), 1, "{log}");
}

#[test]
fn templates_of_several_models() {
    let directory = directory_of_models("serve-templates");
    let files = ["short", "long"].map(|text| {
        let file = directory.join(format!("{text}.jinja"));
        std::fs::write(&file, format!("{text}: {{{{ bos_token }}}}{{{{ messages[0].content }}}}")).unwrap();
        file
    });
    let bad = directory.join("bad.jinja");
    std::fs::write(&bad, "{% if %}").unwrap();
    let of = |name: &str, file: &std::path::Path| format!("{name}={}", file.display());
    let small = ["--models-dir", str(&directory), "--context", "256", "--max-sequences", "1"];
    let (one, two) = (of("one", &files[0]), of("org/two", &files[1]));
    let options = [&small[..], &["--chat-template", &one, "--chat-template", &two]].concat();
    let running = Running::start(Stdio::null(), &options);
    let apply = |model: &str| {
        let body = format!(r#"{{"model": "{model}", "messages": [{{"role": "user", "content": "hello"}}]}}"#);
        running.ask("POST /apply-template", &body)
    };
    for (model, text) in [("one", "short: "), ("org/two", "long: ")] {
        let answer = apply(model);
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains(text) && answer.contains("hello"), "{answer}");
    }
    let list = running.ask("GET /v1/models", "");
    assert_eq!(list.matches(r#""has_chat_template":true"#).count(), 2, "{list}");
    for (more, expected) in [
        (&[str(&files[0])][..], "NAME=FILE"),
        (&[&of("one", &bad)], "bad.jinja"),
        (&["one=missing.jinja"], "missing.jinja"),
        (&[&of("three", &files[0])], "\"three\""),
        (&[&one, &of("one", &files[1])], "two templates"),
    ] {
        let more = more.iter().flat_map(|option| ["--chat-template", option]).collect::<Vec<_>>();
        // A model that is left out leaves a line in the log.
        let end = kvant(&[&["serve", "--port", "0"], &small[..], &more].concat());
        let error = end.stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
        assert!(end.code == 1 && error.contains(expected), "{more:?}: {}", end.stderr);
    }
    let two = ["--chat-template", str(&files[0]), "--chat-template", str(&files[1])];
    assert!(kvant(&[&["serve", "--port", "0"], &two[..]].concat()).error().contains("one template"));
}

#[test]
fn two_models_at_once() {
    let directory = directory_of_models("serve-two");
    let [one, two, cut] = ["one", "org/two", "cut"].map(|name| directory.join(name));
    let small = ["--context", "256", "--max-sequences", "1"];
    let options = [&[str(&one), str(&two), "--name", "main", "--name", "*"][..], &small].concat();
    let running = Running::start(Stdio::null(), &options);
    for (asked, model) in [("main", "main"), ("two", "two"), ("gpt-4o", "main")] {
        let answer = running.ask("POST /v1/completions", &complete(asked));
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains(&format!(r#""model":"{model}""#)), "{answer}");
    }
    for (more, expected) in [
        (&[str(&one), str(&one)][..], "\"one\""),
        (&[str(&one), str(&cut)], "tokenizer"),
        (&[str(&one), str(&two), "--memory", "1MiB"], "--memory"),
        (&["--models-dir", str(&one), "--name", "x"], "--name"),
        (&["--models-dir", "missing/directory"], "missing/directory"),
    ] {
        // Models loaded before the failing one leave lines in the log.
        let end = kvant(&[&["serve", "--port", "0"], more, &small].concat());
        let error = end.stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
        assert!(end.code == 1 && error.contains(expected), "{more:?}: {}", end.stderr);
    }
}

/// A prompt that an earlier process computed is found on disk. Another process cannot use the directory meanwhile.
#[cfg(unix)]
#[test]
fn prefixes_outlive_the_server() {
    let directory = scratch("serve-prefixes").join("pages");
    let options = ["--batch-invariant", "--context", "1024", "--prefix-dir", str(&directory), "--prefix-disk", "64MiB"];
    let prompt = "The vector grows and shrinks. ".repeat(40);
    let body = format!(r#"{{"prompt": "{prompt}", "max_tokens": 20, "temperature": 0}}"#);
    let ask = |running: &Running| {
        let answer = running.ask("POST /v1/completions", &body);
        let json = answer.split("\r\n\r\n").nth(1).unwrap();
        let json: serde_json::Value = serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {answer}"));
        let cached = json["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (json["choices"][0]["text"].as_str().unwrap().to_string(), cached)
    };
    let running = Running::start(Stdio::null(), &options);
    let (cold, cached) = ask(&running);
    assert_eq!(cached, 0);
    let error = kvant(&[&["serve", "--port", "0"], &options[..]].concat()).error();
    assert!(error.contains("--prefix-dir") && error.contains("another process"), "{error}");
    running.stop();
    let running = Running::start(Stdio::null(), &options);
    let (warm, cached) = ask(&running);
    assert_eq!(warm, cold);
    assert!(cached >= 64, "{cached}");
    let metrics = running.ask("GET /metrics", "");
    let disk = metrics.lines().find(|line| line.starts_with("kvant:kv_cache_disk_bytes")).unwrap();
    assert!(!disk.ends_with(" 0"), "{disk}");
    running.stop();
    // Another cache type stores other pages.
    let running = Running::start(Stdio::null(), &[&options[..], &["--kv", "tq4"]].concat());
    assert_eq!(ask(&running).1, 0);
    running.stop();
    // Nor does another server of the engine keep the directory open.
    #[cfg(feature = "grpc")]
    {
        let running = Running::start(Stdio::null(), &[&options[..], &["--grpc", "0"]].concat());
        running.ask("GET /health", "");
        running.stop();
    }
    assert!(kvant(&["serve", "--prefix-disk", "1MiB"]).error().contains("--prefix-dir"));
}

/// Lost log lines do not fail requests: the reader has closed the pipe, the disk is full, or nobody reads.
#[cfg(target_os = "linux")]
#[test]
fn logs_that_cannot_be_written() {
    let complete = r##"{"prompt": "# A", "max_tokens": 2}"##;
    for sink in ["closed", "full", "slow"] {
        let log = match sink {
            "full" => Stdio::from(std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap()),
            _ => Stdio::piped(),
        };
        let mut running = Running::start(log, &["--context", "512"]);
        if sink == "closed" {
            drop(running.child.stderr.take());
        }
        // More lines than the pipe buffers.
        let requests = if sink == "slow" { 700 } else { 5 };
        for _ in 0..requests {
            let answer = running.ask("GET /v1/models", "");
            assert!(answer.starts_with("HTTP/1.1 200 "), "{sink}: {answer}");
        }
        for _ in 0..3 {
            let answer = running.ask("POST /v1/completions", complete);
            assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("text_completion"), "{sink}: {answer}");
        }
        let refused = running.ask("POST /v1/completions", "{}");
        assert!(refused.starts_with("HTTP/1.1 400 "), "{sink}: {refused}");
        assert!(running.ask("GET /health", "").starts_with("HTTP/1.1 200 "), "{sink}");
    }
}

/// Prompts of megabytes for a context of 8192 tokens are rejected by length, and their memory is released.
#[cfg(target_os = "linux")]
#[test]
fn prompts_of_megabytes_are_refused_at_once() {
    let running = Running::start(Stdio::null(), &[]);
    let text = "The quick brown fox. ".repeat(390_000);
    let prompt = format!(r#"{{"prompt": "{text}", "max_tokens": 2}}"#);
    assert!(
        running.ask("POST /v1/completions", r##"{"prompt": "# A", "max_tokens": 2}"##).starts_with("HTTP/1.1 200 ")
    );
    let idle = running.kilobytes("VmRSS");
    let started = std::time::Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                let answer = running.ask("POST /v1/completions", &prompt);
                assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
                assert!(answer.contains("context_length_exceeded") && answer.contains("at least"), "{answer}");
            });
        }
    });
    let seconds = started.elapsed().as_secs_f64();
    let (after, peak) = (running.kilobytes("VmRSS"), running.kilobytes("VmHWM"));
    let figures = format!("{seconds:.1} s, kB: {idle} idle, {peak} peak, {after} after");
    println!("{figures}");
    // Tokenising a single one would take longer than all rejections.
    assert!(seconds < 20.0, "{figures}");
    assert!(peak < idle + 1_500_000 && after < idle + 150_000, "{figures}");
}

#[cfg(unix)]
#[test]
fn it_answers_until_sigterm() {
    let mut child = command(&["serve", "--port", "0", "--context", "512", "--max-sequences", "2"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let (mut line, mut start) = (String::new(), String::new());
    while !line.contains("listening on http://") {
        line.clear();
        assert!(log.read_line(&mut line).unwrap() > 0, "the server has ended");
        start += &line;
    }
    assert!(start.contains(" loaded files=4 embedded files device="), "{start}");
    let address = line.trim().rsplit("http://").next().unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("rustdoc-11m"), "{answer}");

    let killed = std::process::Command::new("kill").arg(child.id().to_string()).status().unwrap();
    assert!(killed.success());
    let mut rest = String::new();
    log.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success(), "{rest}");
    assert!(rest.contains("path=\"/v1/models\"") && rest.contains("stopping"), "{rest}");
}
