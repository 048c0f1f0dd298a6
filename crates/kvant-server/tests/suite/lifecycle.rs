//! Disconnecting clients, full queues, shutdown and failure, over TCP.

use std::net::SocketAddr;

use kvant_engine::EngineRequest;
use kvant_server::ServeError;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::JoinHandle,
};

use super::*;

/// A server on a port.
struct Running {
    engine: Engine,
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    served: JoinHandle<Result<(), ServeError>>,
}

async fn start(engine_options: EngineOptions, options: ServerOptions) -> Running {
    let engine = engine(engine_options);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let server = Server::new(engine.clone(), None, options);
    let served = tokio::spawn(server.serve(listener, async move {
        let _ = stopped.await;
    }));
    Running { engine, address, stop, served }
}

impl Running {
    /// Sends a request without reading the response.
    async fn request(&self, head: &str, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let body = body.to_string();
        let head = format!(
            "{head} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).await.unwrap();
        stream
    }

    async fn complete(&self, body: Value) -> TcpStream {
        self.request("POST /v1/completions", &body).await
    }

    async fn get(&self, path: &str) -> String {
        read(self.request(&format!("GET {path}"), &json!({})).await).await
    }
}

async fn read(mut stream: TcpStream) -> String {
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text).await;
    text
}

/// Reads until a text has arrived.
async fn read_until(stream: &mut TcpStream, text: &str) {
    let (mut all, mut piece) = (Vec::new(), [0; 1024]);
    while !String::from_utf8_lossy(&all).contains(text) {
        let read = stream.read(&mut piece).await.unwrap();
        assert!(read > 0, "the answer ended early");
        all.extend_from_slice(&piece[..read]);
    }
}

fn long(more: Value) -> Value {
    and(json!({"prompt": "# A", "max_tokens": 7000, "ignore_eos": true, "temperature": 1}), more)
}

/// This includes the time before and during the first step.
#[test]
fn a_request_always_runs_or_waits() {
    let engine = engine(EngineOptions::default().sequences(1).prefix_cache(false));
    let prompt: Vec<u32> = (0..3000).map(|i| i % 3000 + 10).collect();
    let requests = [0, 1].map(|_| engine.submit(EngineRequest::new(prompt.clone()).max_tokens(4)).unwrap());
    let mut looks = 0;
    loop {
        let stats = engine.stats();
        if stats.generated_tokens > 0 {
            break;
        }
        assert_eq!(stats.running + stats.waiting, requests.len(), "{stats:?}");
        looks += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(looks > 10, "the prompt was computed too fast to be seen");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_cancels() {
    let running = start(EngineOptions::default(), ServerOptions::new(NAME)).await;
    let prompt: Vec<u32> = (0..6000).map(|i| i % 3000 + 10).collect();
    for (body, is_stream) in [
        (long(json!({"stream": true})), true),
        (long(json!({})), false),
        (long(json!({"n": 3, "stream": true})), true),
        // While the prompt is being computed.
        (long(json!({"prompt": prompt, "max_tokens": 100})), false),
    ] {
        let cancelled = running.engine.stats().finished_cancelled;
        let mut stream = running.complete(body).await;
        if is_stream {
            read_until(&mut stream, "data: ").await;
        }
        until(&running.engine, "runs", |stats| stats.running > 0 && stats.requests_used > 0).await;
        drop(stream);
        until(&running.engine, "has ended", |stats| {
            stats.finished_cancelled > cancelled && stats.running == 0 && stats.requests_used == 0
        })
        .await;
    }
    assert_eq!(running.engine.stats().finished_length, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses() {
    let options = EngineOptions::default().sequences(1).queue(1);
    let running = start(options, ServerOptions::new(NAME)).await;
    let (first, second) = (running.complete(long(json!({}))).await, running.complete(long(json!({}))).await);
    until(&running.engine, "one waits", |stats| stats.running == 1 && stats.waiting == 1).await;
    let third = read(running.complete(long(json!({}))).await).await;
    assert!(third.starts_with("HTTP/1.1 429 ") && third.contains("retry-after: 1\r\n"), "{third}");
    assert!(third.contains("queue_full"), "{third}");
    // Either all choices are submitted, or none.
    drop(second);
    until(&running.engine, "none waits", |stats| stats.waiting == 0).await;
    let both = read(running.complete(long(json!({"n": 2}))).await).await;
    assert!(both.starts_with("HTTP/1.1 429 "), "{both}");
    until(&running.engine, "one is left", |_| running.engine.live() == 1).await;
    drop(first);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_pauses_itself_only() {
    let running = start(EngineOptions::default().unread(8), ServerOptions::new(NAME)).await;
    // Log probabilities fill the buffers of the connection.
    let slow = running.complete(long(json!({"stream": true, "logprobs": 100, "max_tokens": 8000}))).await;
    let generated = |running: &Running| running.engine.stats().generated_tokens;
    let (mut last, mut still) = (0, 0);
    while still < 20 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        still = if last > 0 && generated(&running) == last { still + 1 } else { 0 };
        last = generated(&running);
    }
    assert!(last > 0 && last < 7900, "{last} tokens without a reader");
    let quick = read(running.complete(long(json!({"max_tokens": 5}))).await).await;
    assert!(quick.starts_with("HTTP/1.1 200 "), "{quick}");
    // The response can arrive before the engine releases the request.
    until(&running.engine, "one is left", |_| running.engine.live() == 1).await;
    drop(slow);
    until(&running.engine, "has ended", |stats| stats.running == 0 && stats.requests_used == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pings_while_nothing_comes() {
    let options = ServerOptions::new(NAME).ping(Duration::from_millis(20));
    let running = start(EngineOptions::default(), options).await;
    let prompt: Vec<u32> = (0..4000).map(|i| i % 3000 + 10).collect();
    let body = json!({"prompt": prompt, "max_tokens": 1, "stream": true});
    let text = read(running.complete(body).await).await;
    let (ping, data) = (text.find(": ping\n").unwrap(), text.find("data: ").unwrap());
    assert!(ping < data, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_finishes_running_requests() {
    let running = start(EngineOptions::default(), ServerOptions::new(NAME)).await;
    let first = running.complete(long(json!({"max_tokens": 400}))).await;
    until(&running.engine, "runs", |stats| stats.running == 1).await;
    running.stop.send(()).unwrap();
    // A draining server still responds.
    for _ in 0..100 {
        let health = TcpStream::connect(running.address).await;
        let Ok(mut stream) = health else { break };
        let _ = stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
        let text = read(stream).await;
        if text.starts_with("HTTP/1.1 503 ") {
            assert!(text.contains("draining") && text.contains("retry-after"), "{text}");
            break;
        }
        assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
    }
    let text = read(first).await;
    assert!(text.starts_with("HTTP/1.1 200 ") && text.contains("\"completion_tokens\":400"), "{text}");
    assert!(running.served.await.unwrap().is_ok());
    assert!(TcpStream::connect(running.address).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_has_a_limit() {
    let options = ServerOptions::new(NAME).drain(Duration::from_millis(100));
    let running = start(EngineOptions::default(), options).await;
    let whole = running.complete(long(json!({}))).await;
    let mut stream = running.complete(long(json!({"stream": true}))).await;
    read_until(&mut stream, "data: ").await;
    until(&running.engine, "both run", |stats| stats.running == 2).await;
    running.stop.send(()).unwrap();
    assert!(matches!(running.served.await.unwrap(), Err(ServeError::Drain)));
    let whole = read(whole).await;
    assert!(whole.starts_with("HTTP/1.1 503 ") && whole.contains("draining"), "{whole}");
    let rest = read(stream).await;
    assert!(rest.contains("data: {\"error\":") && !rest.contains("[DONE]"), "{rest}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_reaches_all_clients() {
    let running = start(EngineOptions::default(), ServerOptions::new(NAME)).await;
    let whole = running.complete(long(json!({}))).await;
    let mut stream = running.complete(long(json!({"stream": true}))).await;
    read_until(&mut stream, "data: ").await;
    until(&running.engine, "both run", |stats| stats.running == 2).await;
    kvant_engine::internals::panic(&running.engine);
    let whole = read(whole).await;
    assert!(whole.starts_with("HTTP/1.1 500 ") && whole.contains("server_error"), "{whole}");
    assert!(read(stream).await.contains("data: {\"error\":"));
    assert!(matches!(running.served.await.unwrap(), Err(ServeError::Engine)));
    let answer = get(Server::new(running.engine, None, ServerOptions::new(NAME)).router(), "/health").await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["code"]),
        (StatusCode::SERVICE_UNAVAILABLE, &json!("unhealthy"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn health_during_many_requests() {
    let running = start(EngineOptions::default(), ServerOptions::new(NAME)).await;
    let mut clients = Vec::new();
    for _ in 0..40 {
        clients.push(running.complete(long(json!({"max_tokens": 4}))).await);
    }
    assert!(running.get("/health").await.starts_with("HTTP/1.1 200 "));
    for client in clients {
        assert!(read(client).await.starts_with("HTTP/1.1 200 "));
    }
    until(&running.engine, "all have ended", |stats| stats.running + stats.waiting == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_never_come_end() {
    let short = Duration::from_millis(200);
    let options = ServerOptions::new(NAME).head_time(short).body_time(short);
    let running = start(EngineOptions::default(), options).await;
    for (sent, answer) in [
        ("", ""),
        ("GET /health HTTP/1.1\r\nhost: x\r\nx-more: ", "HTTP/1.1 408 "),
        (
            "POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{",
            "HTTP/1.1 408 ",
        ),
    ] {
        let mut stream = TcpStream::connect(running.address).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let text = tokio::time::timeout(Duration::from_secs(20), read(stream)).await.expect("the server waits");
        assert!(text.is_empty() || (!answer.is_empty() && text.starts_with(answer)), "{sent:?}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stopped_loses_its_connection() {
    let options = ServerOptions::new(NAME).stall_time(Duration::from_millis(200));
    let running = start(EngineOptions::default(), options).await;
    // A response that exceeds the buffers of a connection.
    let body = json!({"prompt": "a ".repeat(700_000), "return_token_strs": true});
    let stream = running.request("POST /tokenize", &body).await;
    stream.readable().await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let text = read(stream).await;
    let (head, rest) = text.split_once("\r\n\r\n").unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    assert!(rest.len() < length.parse().unwrap(), "{length} bytes came");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_limit_wait() {
    let running = start(EngineOptions::default(), ServerOptions::new(NAME).connections(2)).await;
    let (first, second) = (running.complete(long(json!({}))).await, running.complete(long(json!({}))).await);
    until(&running.engine, "both run", |stats| stats.running == 2).await;
    let third = running.request("GET /health", &json!({})).await;
    let mut byte = [0];
    let answer = tokio::time::timeout(Duration::from_millis(300), third.peek(&mut byte)).await;
    assert!(answer.is_err(), "a third connection is open");
    drop(first);
    assert!(read(third).await.starts_with("HTTP/1.1 200 "));
    drop(second);
}
