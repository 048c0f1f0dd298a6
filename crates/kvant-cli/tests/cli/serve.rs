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
