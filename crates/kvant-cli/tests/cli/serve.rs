//! `kvant serve`: starts, answers, and stops on SIGTERM.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::Stdio,
};

use super::{command, kvant, scratch, str};

#[test]
fn what_cannot_be_served() {
    let directory = scratch("serve-keys");
    let empty = directory.join("keys");
    std::fs::write(&empty, "# none\n\n").unwrap();
    assert!(kvant(&["serve", "--api-key-file", str(&empty)]).error().contains("no key"));
    assert!(kvant(&["serve", "--api-key", ""]).error().contains("--api-key"));
    assert!(kvant(&["serve", "--host", "no such host"]).error().contains("cannot listen"));
    assert!(kvant(&["serve", "--chat-template", "missing.jinja", "--port", "0"]).error().contains("missing.jinja"));
    assert!(kvant(&["serve", "missing/model", "--port", "0"]).error().contains("missing/model"));
    // Before the model loads.
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

/// Pages that hold no text of the context would promise what they cannot do.
#[test]
fn memory_holds_a_text_of_the_context() {
    let error = kvant(&["serve", "--port", "0", "--memory", "3MiB"]).error();
    assert!(error.contains("--memory") && error.contains("8192 tokens") && error.contains("--context"), "{error}");
    assert!(!error.contains("loaded"), "{error}");
}

/// A server on a port of its own, killed at the end.
struct Running {
    child: std::process::Child,
    port: u16,
}

impl Running {
    /// Starts a server whose standard error goes to `log`, and waits until it answers.
    fn start(log: Stdio, more: &[&str]) -> Running {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let port_text = port.to_string();
        let options = [&["serve", "--port", &port_text, "--max-sequences", "2"], more].concat();
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

    /// The answer to a request, with its head.
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

/// Lost logs cost no request: their reader has gone, the disk is full, or nobody reads.
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
        // More lines than a pipe holds.
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

/// Prompts of megabytes for a context of 8192 tokens are refused by their length, and their memory goes back.
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
    let (after, most) = (running.kilobytes("VmRSS"), running.kilobytes("VmHWM"));
    let figures = format!("{seconds:.1} s, kB: {idle} idle, {most} at most, {after} after");
    println!("{figures}");
    // Tokenising one takes longer than all do.
    assert!(seconds < 20.0, "{figures}");
    assert!(most < idle + 1_500_000 && after < idle + 150_000, "{figures}");
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
