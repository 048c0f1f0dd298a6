//! Bodies of requests from clients that nobody trusts.

use std::{path::Path, sync::Arc};

use kvant::{CpuOptions, Device};
use kvant_engine::{Engine, EngineOptions};
use kvant_grpc::internals;
use kvant_models::{Model, Tokenizer};
use proptest::{prelude::*, test_runner::TestRunner};
use prost::Message;
use prost_types::{ListValue, Struct, Value, value::Kind};
use tonic::Code;
use vllm_proto::{
    CandidateTokens, DecodingParameters, GenerateRequest, KvCacheParameters, RandomSampling, ResponseOptions,
    StoppingCriteria, TokenIds,
    candidate_tokens::Select,
    decoding_parameters::{StringChoices, StructuredOutput},
    generate_request::Prompt,
};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvant-cli/model");

fn engine() -> Engine {
    let device = Device::cpu_with(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
    let model = Model::load(Path::new(MODEL), &device).unwrap();
    let tokenizer = Tokenizer::load(Path::new(MODEL)).unwrap();
    Engine::start(model, Arc::new(tokenizer), EngineOptions::default().context(128).sequences(2)).unwrap()
}

/// A request with every field that is read.
fn request(output: Option<StructuredOutput>) -> Vec<u8> {
    let value = |kind| Value { kind: Some(kind) };
    let list = ListValue { values: vec![value(Kind::NumberValue(0.0)), value(Kind::NullValue(0))] };
    let fields = [
        ("do_remote_decode", Kind::BoolValue(true)),
        ("remote_port", Kind::NumberValue(5600.0)),
        ("remote_token", Kind::StringValue("5a".repeat(32))),
        ("remote_block_ids", Kind::ListValue(list)),
    ];
    let params = Struct { fields: fields.map(|(name, kind)| (name.to_string(), value(kind))).into() };
    let candidates = Some(CandidateTokens { select: Some(Select::TopN(2)) });
    let request = GenerateRequest {
        request_id: "a".into(),
        prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![5, 6, 7] })),
        temperature: Some(0.5),
        sampling: Some(RandomSampling { num_sequences: 2, top_k: Some(5), top_p: Some(0.9), ..Default::default() }),
        decoding: Some(DecodingParameters {
            presence_penalty: 0.5,
            logit_bias: [(7, -1.0)].into(),
            structured_output: output,
            ..Default::default()
        }),
        stopping: Some(StoppingCriteria {
            max_new_tokens: 3,
            stop_token_ids: vec![9],
            stop_strings: vec!["end".into()],
            ..Default::default()
        }),
        response: Some(ResponseOptions { output_candidates: candidates, ..Default::default() }),
        kv: Some(KvCacheParameters { kv_transfer_params: Some(params), cache_salt: "s".into(), ..Default::default() }),
        priority: -3,
        ..Default::default()
    };
    request.encode_to_vec()
}

/// Every body is a request that the engine checks, or an error of the client.
fn check(engine: &Engine, body: &[u8]) {
    match internals::requests(engine, body) {
        Ok(requests) => requests.into_iter().for_each(|request| drop(engine.submit(request))),
        Err(status) => assert_eq!(status.code(), Code::InvalidArgument, "{status:?}"),
    }
}

/// Whole requests, requests with changed bytes, and arbitrary bytes.
#[test]
fn any_body_gets_an_answer() {
    let engine = engine();
    let choices = StringChoices { choices: vec!["a|b".into(), String::new()] };
    let outputs = [
        None,
        Some(StructuredOutput::JsonObject(true)),
        Some(StructuredOutput::Choice(choices)),
        Some(StructuredOutput::Regex("a{2,3}".into())),
        Some(StructuredOutput::Json(r#"{"enum": [1]}"#.into())),
        Some(StructuredOutput::Grammar("start: \"x\"".into())),
    ];
    let bodies: Vec<Vec<u8>> = outputs.into_iter().map(request).collect();
    for body in &bodies {
        assert_eq!(internals::requests(&engine, body).unwrap().len(), 2);
    }
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let changed = (prop::sample::select(bodies), changes, any::<prop::sample::Index>(), any::<bool>());
    let changed = changed.prop_map(|(mut body, changes, end, is_cut)| {
        for (at, byte) in changes {
            let at = at.index(body.len());
            body[at] = byte;
        }
        if is_cut {
            body.truncate(end.index(body.len()));
        }
        body
    });
    let bodies = prop_oneof![4 => changed, 1 => prop::collection::vec(any::<u8>(), 0..64)];
    // PROPTEST_CASES sets more.
    let config = ProptestConfig { failure_persistence: None, ..Default::default() };
    let mut runner = TestRunner::new(ProptestConfig { cases: config.cases.max(2000), ..config });
    runner
        .run(&bodies, |body| {
            check(&engine, &body);
            Ok(())
        })
        .unwrap();
}
