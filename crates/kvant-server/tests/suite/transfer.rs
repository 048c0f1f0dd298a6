//! Prompts that one worker computes and another continues.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    time::Duration,
};

use kvant::Codec;
use kvant_server::{TransferOptions, Transfers};

use super::*;

/// A worker with an engine of its own, whose logits depend on the text alone.
struct Worker {
    router: Router,
    engine: Engine,
    port: u16,
    // Serves transfers while it exists.
    _server: Server,
}

fn options(codec: Codec) -> EngineOptions {
    EngineOptions::default().codecs(codec).context(1024).sequences(2).page_tokens(16).model_identity(b"model".to_vec())
}

fn worker(options: EngineOptions, transfer: TransferOptions) -> Worker {
    let device = CpuOptions { threads: Some(2), batch_invariant: true, ..CpuOptions::default() };
    let model = Model::load(Path::new(MODEL), &Device::cpu_with(device).unwrap()).unwrap();
    let engine = Engine::start(model, Arc::new(Tokenizer::load(Path::new(MODEL)).unwrap()), options).unwrap();
    let template = ChatTemplate::new(TEMPLATE, [("bos_token", "<bos>")].into_iter().collect()).unwrap();
    let server = Server::new(engine.clone(), Some(template), ServerOptions::new(NAME));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    server.transfer(Transfers::start(listener, transfer).unwrap());
    Worker { router: server.router(), engine, port, _server: server }
}

fn transfer() -> TransferOptions {
    TransferOptions::new("127.0.0.1").peer("127.0.0.1")
}

const PATHS: [&str; 2] = ["/v1/completions", "/v1/chat/completions"];

/// A request of a route with log probabilities, which show the logits' bits.
fn body(path: &str, max_tokens: usize) -> Value {
    let text = "A vector is a contiguous growable array. ".repeat(12);
    let common = json!({"max_tokens": max_tokens, "temperature": 0});
    match path {
        "/v1/completions" => and(common, json!({"prompt": text, "logprobs": 2})),
        _ => and(common, json!({"messages": [{"role": "user", "content": text}], "logprobs": true, "top_logprobs": 2})),
    }
}

/// Lets a worker compute the prompt. Returns `kv_transfer_params` for another one.
async fn prefill(worker: &Worker, path: &str) -> Value {
    let asked = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null});
    let body = and(body(path, 1), json!({"kv_transfer_params": asked}));
    let answer = post(worker.router.clone(), path, body).await.ok();
    let params = answer["kv_transfer_params"].clone();
    assert_eq!((&params["do_remote_prefill"], &params["remote_port"]), (&json!(true), &json!(worker.port)), "{answer}");
    params
}

/// The choice of an answer, and the tokens of its prompt that were found.
async fn decode(worker: &Worker, path: &str, params: &Value) -> (Value, u64) {
    let body = and(body(path, 20), json!({"kv_transfer_params": params}));
    let answer = post(worker.router.clone(), path, body).await.ok();
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (answer["choices"][0].clone(), cached)
}

/// Text and log probabilities are those of one worker, and the prompt is not computed again.
#[tokio::test(flavor = "multi_thread")]
async fn another_worker_continues_a_prompt() {
    for codec in [Codec::F16, Codec::tq(4), Codec::tq_centred(4)] {
        let [first, second, alone] = [0; 3].map(|_| worker(options(codec), transfer()));
        for path in PATHS {
            let want = decode(&alone, path, &Value::Null).await;
            assert_eq!(want.1, 0);
            let params = prefill(&first, path).await;
            let (choice, cached) = decode(&second, path, &params).await;
            assert_eq!(choice, want.0, "{codec}: {path}");
            let pages = params["remote_block_ids"].as_array().unwrap().len() as u64;
            assert_eq!((cached, pages > 5), (16 * pages, true), "{codec}: {path}");
            // A token is good for one transfer. The pages are in the cache now.
            let again = decode(&second, path, &params).await;
            assert_eq!(again.0, want.0);
        }
    }
}

/// A receiver with the beginning of a prompt fetches only the other pages.
#[tokio::test(flavor = "multi_thread")]
async fn pages_that_are_there_do_not_travel() {
    let path = PATHS[0];
    // Of a layer that seals pages, the dense ones travel anyway: they are larger.
    for (codec, max_share) in [(Codec::F16, 0.7), (Codec::tq_centred(4), 0.95)] {
        let mut bytes = Vec::new();
        for has_beginning in [false, true] {
            let [first, second] = [0; 2].map(|_| worker(options(codec), transfer()));
            let text = "A vector is a contiguous growable array. ".repeat(12);
            let short = json!({"prompt": text[..text.len() / 2], "max_tokens": 1, "temperature": 0});
            if has_beginning {
                post(second.router.clone(), path, short).await.ok();
            }
            let mut params = prefill(&first, path).await;
            let (port, travelled) = counting(first.port);
            params["remote_port"] = json!(port);
            let (_, cached) = decode(&second, path, &params).await;
            let pages = params["remote_block_ids"].as_array().unwrap().len();
            assert_eq!(cached, 16 * pages as u64, "{codec}");
            bytes.push(travelled.await.unwrap());
        }
        assert!((bytes[1] as f64) < max_share * bytes[0] as f64, "{codec}: {bytes:?}");
    }
}

/// Passes everything between a receiver and a sender on. Returns its port and the number of bytes of the sender.
fn counting(to: u16) -> (u16, tokio::task::JoinHandle<u64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let bytes = tokio::task::spawn_blocking(move || {
        let (mut receiver, _) = listener.accept().unwrap();
        let mut sender = TcpStream::connect(("127.0.0.1", to)).unwrap();
        let (mut from, mut greeted) = (receiver.try_clone().unwrap(), sender.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from, &mut greeted));
        let bytes = std::io::copy(&mut sender, &mut receiver).unwrap();
        let _ = receiver.shutdown(Shutdown::Both);
        bytes
    });
    (port, bytes)
}

/// Streams continue prompts, too.
#[tokio::test(flavor = "multi_thread")]
async fn streams_continue_a_prompt() {
    let [first, second] = [0; 2].map(|_| worker(options(Codec::F16), transfer()));
    let params = prefill(&first, PATHS[0]).await;
    let more = json!({"kv_transfer_params": params, "stream": true, "stream_options": {"include_usage": true}});
    let chunks = post(second.router.clone(), PATHS[0], and(body(PATHS[0], 5), more)).await.chunks();
    let usage = &chunks.last().unwrap()["usage"];
    assert!(usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0, "{usage}");
}

/// A stream offers the pages in its first event.
#[tokio::test(flavor = "multi_thread")]
async fn streams_offer_a_prompt() {
    let [first, second] = [0; 2].map(|_| worker(options(Codec::F16), transfer()));
    for path in PATHS {
        let more = json!({"kv_transfer_params": {"do_remote_decode": true}, "stream": true});
        let chunks = post(first.router.clone(), path, and(body(path, 1), more)).await.chunks();
        let params = chunks[0]["kv_transfer_params"].clone();
        assert!(chunks[1..].iter().all(|chunk| chunk["kv_transfer_params"].is_null()));
        let pages = params["remote_block_ids"].as_array().unwrap().len() as u64;
        assert_eq!(decode(&second, path, &params).await.1, 16 * pages, "{path}");
    }
}

/// A prompt without a full page, and a token that is invalid or in use: nothing is offered, and the answer says so.
#[tokio::test(flavor = "multi_thread")]
async fn there_may_be_nothing_to_offer() {
    let first = worker(options(Codec::F16), transfer());
    let token = "5c".repeat(32);
    let asked = |token: Value| json!({"do_remote_decode": true, "remote_token": token});
    let long = json!({"prompt": "A vector ".repeat(40), "max_tokens": 1});
    for (body, token, is_offered) in [
        (json!({"prompt": "A", "max_tokens": 1}), Value::Null, false),
        (long.clone(), json!("short"), false),
        (long.clone(), json!(token), true),
        (long, json!(token), false),
    ] {
        let body = and(body, json!({"kv_transfer_params": asked(token.clone())}));
        let params = post(first.router.clone(), PATHS[0], body).await.ok()["kv_transfer_params"].clone();
        assert_eq!(params["do_remote_prefill"], is_offered, "{token}: {params}");
    }
}

/// A client chooses the token and calls both workers at once: pages travel while the prompt is computed.
#[tokio::test(flavor = "multi_thread")]
async fn pages_travel_while_the_prompt_is_computed() {
    let path = PATHS[0];
    let slow = || options(Codec::F16).step_tokens(20);
    let [first, second] = [0; 2].map(|_| worker(slow(), transfer()));
    let long = json!({"prompt": "A vector is a contiguous growable array. ".repeat(60), "temperature": 0});
    let with = |more: Value| and(long.clone(), more);
    let token = "c4".repeat(32);
    let source = json!({"do_remote_prefill": true, "remote_host": "127.0.0.1", "remote_port": first.port,
        "remote_token": token});
    let decoding = with(json!({"max_tokens": 20, "kv_transfer_params": source}));
    let decoding = tokio::spawn(post(second.router.clone(), path, decoding));
    // The receiver waits for the offer.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let prefill = json!({"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true, "remote_token": token}});
    let prefill = tokio::spawn(post(first.router.clone(), path, with(prefill)));
    let mut early = 0;
    while !prefill.is_finished() {
        let pages = second.engine.stats().pages_used;
        if first.engine.stats().running == 1 {
            early = early.max(pages);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let prefilled = prefill.await.unwrap().ok();
    assert_eq!(prefilled["kv_transfer_params"]["remote_token"], token);
    let answer = decoding.await.unwrap().ok();
    let alone = worker(slow(), transfer());
    let want = post(alone.router, path, with(json!({"max_tokens": 20}))).await.ok();
    assert_eq!(answer["choices"], want["choices"]);
    let tokens = prefilled["usage"]["prompt_tokens"].as_u64().unwrap();
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!(cached, (tokens - 1) / 16 * 16);
    assert!(early > 5, "{early} pages arrived before the prompt was computed");
}

/// Whatever is wrong with an offer, the answer is that of one worker.
#[tokio::test(flavor = "multi_thread")]
async fn a_useless_offer_costs_only_time() {
    let path = PATHS[0];
    let first = worker(options(Codec::F16), transfer());
    let (want, _) = decode(&worker(options(Codec::F16), transfer()), path, &Value::Null).await;
    let good = prefill(&first, path).await;
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let with = |more: Value| and(good.clone(), more);
    let second = worker(options(Codec::F16), transfer());
    for (params, reason) in [
        (with(json!({"remote_token": "5a".repeat(32)})), "a forged token"),
        (with(json!({"remote_token": "short"})), "no token"),
        (with(json!({"remote_port": gone})), "a peer that is gone"),
        (with(json!({"remote_host": "localhost"})), "a host that is not a peer"),
        (with(json!({"remote_host": null})), "no host"),
        (json!({"do_remote_prefill": true}), "nothing"),
    ] {
        assert_eq!(decode(&second, path, &params).await.0, want, "{reason}");
    }
    assert_eq!(decode(&second, path, &Value::Null).await.1 % 16, 0);
    // Another cache type and another model: the token is used up, and nothing is fetched.
    for other in [options(Codec::tq(4)), options(Codec::F16).model_identity(b"other".to_vec())] {
        let params = prefill(&first, path).await;
        let (_, cached) = decode(&worker(other, transfer()), path, &params).await;
        assert_eq!(cached, 0);
    }
    // Another prompt.
    let params = prefill(&first, path).await;
    let other = json!({"prompt": "B".repeat(400), "max_tokens": 2, "kv_transfer_params": params});
    post(worker(options(Codec::F16), transfer()).router.clone(), path, other).await.ok();
    // A worker that has not enabled transfers.
    let plain = Server::new(shared_engine(), None, ServerOptions::new(NAME)).router();
    post(plain, path, and(body(path, 2), json!({"kv_transfer_params": good}))).await.ok();
    // An offer that has expired.
    let brief = worker(options(Codec::F16), transfer().offer_time(Duration::ZERO));
    let params = prefill(&brief, path).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let third = worker(options(Codec::F16), transfer());
    assert_eq!(decode(&third, path, &params).await, (want, 0));
}

/// Passes the first `limit` bytes of a sender on, with one byte changed if `flip`, then closes the connections.
fn faulty(to: u16, limit: usize, flip: bool) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut receiver, _) = listener.accept().unwrap();
        let mut sender = TcpStream::connect(("127.0.0.1", to)).unwrap();
        let (mut from, mut to) = (receiver.try_clone().unwrap(), sender.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        let mut bytes = vec![0; limit];
        sender.read_exact(&mut bytes).unwrap();
        if flip {
            bytes[limit / 2] ^= 8;
        }
        let _ = receiver.write_all(&bytes);
        let _ = receiver.shutdown(Shutdown::Both);
    });
    port
}

/// A sender that is killed in the middle, and bytes that change on the way: complete pages are used, the rest is
/// computed.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_transfer_costs_only_time() {
    let path = PATHS[0];
    let first = worker(options(Codec::F16), transfer());
    let (want, _) = decode(&worker(options(Codec::F16), transfer()), path, &Value::Null).await;
    for (limit, flip) in [(1, false), (10, false), (100_000, false), (100_000, true)] {
        let mut params = prefill(&first, path).await;
        params["remote_port"] = json!(faulty(first.port, limit, flip));
        let second = worker(options(Codec::F16), transfer());
        let (choice, cached) = decode(&second, path, &params).await;
        assert_eq!(choice, want, "{limit} bytes, flip: {flip}");
        let pages = params["remote_block_ids"].as_array().unwrap().len() as u64;
        assert!(cached < 16 * pages, "{limit} bytes, flip: {flip}");
    }
}

/// A sender that says nothing costs at most the time of a transfer.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_peer_costs_limited_time() {
    let path = PATHS[0];
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let first = worker(options(Codec::F16), transfer());
    let mut params = prefill(&first, path).await;
    params["remote_port"] = json!(silent.local_addr().unwrap().port());
    let second = worker(options(Codec::F16), transfer().transfer_time(Duration::from_millis(300)));
    let (want, _) = decode(&first, path, &Value::Null).await;
    assert_eq!(decode(&second, path, &params).await, (want, 0));
}

/// Anybody can connect: nothing but a token gets an answer, and the listener goes on.
#[tokio::test(flavor = "multi_thread")]
async fn strangers_get_nothing() {
    let path = PATHS[0];
    let first = worker(options(Codec::F16), transfer());
    let params = prefill(&first, path).await;
    for bytes in
        [&b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"[..], &[0; 200], b"kvantkv3", &[&b"kvantkv3"[..], &[0; 100]].concat()]
    {
        let mut stream = TcpStream::connect(("127.0.0.1", first.port)).unwrap();
        stream.write_all(bytes).unwrap();
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() <= 1, "{answer:?}");
    }
    let second = worker(options(Codec::F16), transfer());
    assert!(decode(&second, path, &params).await.1 > 0);
}
