//! Arbitrary bytes as the body of a gRPC request: requests of the engine, or an error of the client.
#![cfg_attr(fuzzing, no_main)]

use std::{
    path::Path,
    sync::{Arc, LazyLock},
};

use kvant::{CpuOptions, Device};
use kvant_engine::{Engine, EngineOptions};
use kvant_grpc::internals;
use kvant_models::{Model, Tokenizer};
use libfuzzer_sys::fuzz_target;

static ENGINE: LazyLock<Engine> = LazyLock::new(|| {
    kvant_fuzz::allow_caught_panics();
    let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/kvant-cli/model"));
    let device = Device::cpu_with(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("a CPU");
    let tokenizer = Tokenizer::load(model).expect("the shipped tokenizer");
    let model = Model::load(model, &device).expect("the shipped model");
    let options = EngineOptions::default().context(128).sequences(2);
    Engine::start(model, Arc::new(tokenizer), options).expect("room for two short texts")
});

fuzz_target!(|bytes: &[u8]| {
    match internals::requests(&ENGINE, bytes) {
        // Cancels the request.
        Ok(requests) => requests.into_iter().for_each(|request| drop(ENGINE.submit(request))),
        Err(status) => assert_eq!(status.code() as i32, 3, "{status:?}"),
    }
    assert!(ENGINE.is_healthy());
});

/// Without cargo-fuzz, a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
