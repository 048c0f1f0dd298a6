//! vLLM's protocol with the clients of the crate `vllm-proto`.

use std::{net::TcpListener, path::Path, sync::Arc, time::Duration};

use kvant::{CpuOptions, Device};
use kvant_engine::{Engine, EngineOptions, EngineStats};
use kvant_grpc::{GrpcOptions, GrpcServer, KvEventSource};
use kvant_models::{Model, Tokenizer};
use kvant_transfer::{TransferOptions, Transfers};
use prost_types::{Struct, value::Kind};
use tonic::{Code, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
use vllm_proto::{
    AbortRequest, CandidateTokens, DecodingParameters, GenerateRequest, GenerateResponse, GetKvEventSourcesRequest,
    GetModelInfoRequest, GetServerInfoRequest, KvCacheParameters, RandomSampling, ResponseOptions, StoppingCriteria,
    TokenIds,
    candidate_tokens::Select,
    control_client::ControlClient,
    decoding_parameters::{StringChoices, StructuredOutput},
    finish_info::{FinishReason, StopReason},
    generate_request::Prompt,
    inference_client::InferenceClient,
};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvant-cli/model");
const NAME: &str = "rustdoc-11m";

struct Running {
    engine: Engine,
    server: GrpcServer,
    channel: Channel,
}

/// A server of the shipped model, and a connection to it.
async fn running() -> Running {
    running_with(|options| options).await
}

async fn running_with(change: impl FnOnce(GrpcOptions) -> GrpcOptions) -> Running {
    let device = Device::cpu_with(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let model = Model::load(Path::new(MODEL), &device).unwrap();
    let tokenizer = Tokenizer::load(Path::new(MODEL)).unwrap();
    let options = EngineOptions::default().context(512).sequences(4).model_identity(b"model".to_vec());
    let engine = Engine::start(model, Arc::new(tokenizer), options).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let events = KvEventSource { endpoint: "tcp://*:5557".into(), topic: "kv".into(), replay: None };
    let options = change(GrpcOptions::new(NAME).events(events));
    let server = GrpcServer::start(engine.clone(), options, listener).unwrap();
    let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    Running { engine, server, channel }
}

/// A greedy request with a prompt of token ids, which wants token ids.
fn request(engine: &Engine, text: &str, max_new_tokens: u32) -> GenerateRequest {
    let ids = engine.tokenizer().encode_prompt(text).unwrap();
    GenerateRequest {
        request_id: "a".into(),
        prompt: Some(Prompt::TokenIds(TokenIds { ids })),
        temperature: Some(0.0),
        stopping: Some(StoppingCriteria { max_new_tokens, ignore_eos: true, ..Default::default() }),
        response: Some(ResponseOptions { output_token_ids: true, ..Default::default() }),
        ..Default::default()
    }
}

async fn stream(running: &Running, request: GenerateRequest) -> Vec<GenerateResponse> {
    let mut responses =
        InferenceClient::new(running.channel.clone()).generate_stream(request).await.unwrap().into_inner();
    let mut all = Vec::new();
    while let Some(response) = responses.message().await.unwrap() {
        all.push(response);
    }
    all
}

async fn until(engine: &Engine, is_met: impl Fn(&EngineStats) -> bool) {
    for _ in 0..2000 {
        if is_met(&engine.stats()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{:?}", engine.stats());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_equals_the_answer_at_once() {
    let running = running().await;
    let wanted = request(&running.engine, "# Vec", 12);
    let responses = stream(&running, wanted.clone()).await;
    let whole = InferenceClient::new(running.channel.clone()).generate(wanted.clone()).await.unwrap().into_inner();
    assert_eq!(responses.len(), 13, "a token each, and the end");
    let prompt = responses[0].prompt_info.as_ref().unwrap();
    assert!(prompt.num_prompt_tokens > 0 && prompt.token_ids.is_empty());
    assert!(responses[1..].iter().all(|response| response.prompt_info.is_none()));
    let outputs = || responses.iter().map(|response| response.outputs.as_ref().unwrap());
    let all = whole.outputs.unwrap();
    assert_eq!(outputs().flat_map(|output| output.token_ids.clone()).collect::<Vec<u32>>(), all.token_ids);
    assert_eq!(outputs().map(|output| output.text.as_str()).collect::<String>(), all.text);
    assert_eq!((all.token_ids.len(), all.num_tokens), (12, 12));
    assert_eq!(running.engine.tokenizer().decode(&all.token_ids).unwrap(), all.text);
    let end = all.finish_info.unwrap();
    assert_eq!((end.finish_reason(), end.num_output_tokens), (FinishReason::Length, 12));

    // A text prompt, without text in the answer.
    let text = GenerateRequest {
        prompt: Some(Prompt::Text("# Vec".into())),
        response: Some(ResponseOptions {
            output_text: Some(false),
            output_token_ids: true,
            prompt_token_ids: true,
            ..Default::default()
        }),
        ..wanted.clone()
    };
    let responses = stream(&running, text).await;
    let Some(Prompt::TokenIds(ids)) = wanted.prompt else { unreachable!() };
    assert_eq!(responses[0].prompt_info.as_ref().unwrap().token_ids, ids.ids);
    assert!(responses.iter().all(|response| response.outputs.as_ref().unwrap().text.is_empty()));
    running.server.stop(Duration::from_secs(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn sampling_stops_scores_and_constraints() {
    let running = running().await;
    let base = request(&running.engine, "# Vec", 20);
    let greedy = stream(&running, base.clone()).await;
    let third = greedy[2].outputs.as_ref().unwrap().token_ids[0];

    // A stop id is named, and not part of the text.
    let stopping = StoppingCriteria { stop_token_ids: vec![third], ..base.stopping.clone().unwrap() };
    let stopped = stream(&running, GenerateRequest { stopping: Some(stopping), ..base.clone() }).await;
    let end = stopped.last().unwrap().outputs.as_ref().unwrap().finish_info.clone().unwrap();
    assert_eq!((end.finish_reason(), end.stop_reason), (FinishReason::Stop, Some(StopReason::StopTokenId(third))));

    // Log probabilities: greedy tokens have rank 1 and are the best alternative.
    let candidates = Some(CandidateTokens { select: Some(Select::TopN(2)) });
    let response = ResponseOptions {
        output_logprobs: true,
        output_candidates: candidates,
        prompt_logprobs: true,
        ..base.response.clone().unwrap()
    };
    let scored = stream(&running, GenerateRequest { response: Some(response), ..base.clone() }).await;
    let prompt = scored[0].prompt_info.as_ref().unwrap();
    assert_eq!(prompt.logprobs.len() as u32, prompt.num_prompt_tokens);
    for response in &scored[..20] {
        let output = response.outputs.as_ref().unwrap();
        let best = &output.candidate_tokens[0].tokens[0];
        assert_eq!((output.ranks[0], best.id, best.rank), (1, output.token_ids[0], 1));
        assert!(output.logprobs[0] <= 0.0 && best.logprob == output.logprobs[0]);
    }

    // Several sequences have different seeds, and one prompt.
    let sampling = RandomSampling { num_sequences: 3, seed: Some(1), ..Default::default() };
    let several =
        stream(&running, GenerateRequest { sampling: Some(sampling), temperature: Some(2.0), ..base.clone() }).await;
    let text = |index: u32| -> Vec<u32> {
        let outputs = several.iter().filter_map(|response| response.outputs.as_ref());
        outputs.filter(|output| output.index == index).flat_map(|output| output.token_ids.clone()).collect()
    };
    assert!(text(0).len() == 20 && text(1).len() == 20 && text(0) != text(1) && text(1) != text(2));
    assert_eq!(several.iter().filter(|response| response.prompt_info.is_some()).count(), 1);

    // A constraint.
    let choices = StringChoices { choices: vec!["a.b (c)".into(), "d|e".into()] };
    let decoding =
        DecodingParameters { structured_output: Some(StructuredOutput::Choice(choices)), ..Default::default() };
    let chosen = stream(&running, GenerateRequest { decoding: Some(decoding), ..base }).await;
    let text: String = chosen.iter().map(|response| response.outputs.as_ref().unwrap().text.clone()).collect();
    assert!(["a.b (c)", "d|e"].contains(&text.as_str()), "{text:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_prompt_is_cached_within_its_salt() {
    let running = running().await;
    let cached = async |kv: Option<KvCacheParameters>| {
        let request = GenerateRequest { kv, ..request(&running.engine, &"# Vec\n".repeat(60), 1) };
        let responses = stream(&running, request).await;
        responses.last().unwrap().outputs.as_ref().unwrap().finish_info.as_ref().unwrap().num_cached_tokens.unwrap()
    };
    assert_eq!(cached(None).await, 0);
    assert!(cached(None).await >= 64);
    let salted = Some(KvCacheParameters { cache_salt: "tenant".into(), ..Default::default() });
    assert_eq!(cached(salted.clone()).await, 0);
    assert!(cached(salted).await >= 64);
    assert_eq!(cached(Some(KvCacheParameters { bypass_prefix_cache: true, ..Default::default() })).await, 0);
}

/// One server computes a prompt, another continues it, as Dynamo's sidecar asks for it.
#[tokio::test(flavor = "multi_thread")]
async fn another_server_continues_a_prompt() {
    let transferring = || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let transfers = Transfers::start(listener, TransferOptions::new("127.0.0.1").peer("127.0.0.1")).unwrap();
        running_with(|options| options.transfers(transfers))
    };
    let (first, second) = (transferring().await, transferring().await);
    let prompt = "# Vec\n".repeat(60);
    let with = |params: Struct, max_new_tokens| GenerateRequest {
        kv: Some(KvCacheParameters { kv_transfer_params: Some(params), ..Default::default() }),
        ..request(&first.engine, &prompt, max_new_tokens)
    };
    let asked = [("do_remote_decode".to_string(), Kind::BoolValue(true).into())].into();
    let end = stream(&first, with(Struct { fields: asked }, 1)).await;
    let end = end.last().unwrap().outputs.clone().unwrap().finish_info.unwrap();
    let mut params = end.kv_transfer_params.unwrap();
    // The sidecar sends the port as text.
    let Some(Kind::NumberValue(port)) = params.fields["remote_port"].kind else { panic!("{params:?}") };
    params.fields.insert("remote_port".into(), Kind::StringValue(port.to_string()).into());
    let continued = stream(&second, with(params.clone(), 12)).await;
    let cached = continued.last().unwrap().outputs.clone().unwrap().finish_info.unwrap().num_cached_tokens.unwrap();
    let tokens = continued[0].prompt_info.as_ref().unwrap().num_prompt_tokens;
    assert_eq!(cached, (tokens - 1) / 64 * 64);
    let ids = |responses: &[GenerateResponse]| -> Vec<u32> {
        responses.iter().flat_map(|response| response.outputs.clone().unwrap().token_ids).collect()
    };
    let alone = running().await;
    assert_eq!(ids(&continued), ids(&stream(&alone, request(&alone.engine, &prompt, 12)).await));
    // A token is good for one transfer, and a server without transfers computes the prompt.
    let again = stream(&alone, with(params, 12)).await;
    assert_eq!(ids(&again), ids(&continued));
}

/// When a server ends, its streams fail so that routers let another server continue.
#[tokio::test(flavor = "multi_thread")]
async fn drained_streams_are_unavailable() {
    let running = running().await;
    let long = request(&running.engine, "# Vec", 400);
    let mut responses = InferenceClient::new(running.channel.clone()).generate_stream(long).await.unwrap().into_inner();
    responses.message().await.unwrap().unwrap();
    running.engine.drain(Duration::ZERO);
    let failed = loop {
        match responses.message().await {
            Ok(response) => assert!(response.unwrap().outputs.unwrap().finish_info.is_none()),
            Err(status) => break status,
        }
    };
    assert_eq!(failed.code(), Code::Unavailable, "{failed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn aborts_and_vanished_clients_end_their_requests() {
    let running = running().await;
    let long = request(&running.engine, "# Vec", 400);
    let mut client = InferenceClient::new(running.channel.clone());
    let mut responses = client.generate_stream(long.clone()).await.unwrap().into_inner();
    responses.message().await.unwrap().unwrap();
    let abort = AbortRequest { request_ids: vec!["unknown".into(), "a".into()] };
    ControlClient::new(running.channel.clone()).abort(abort).await.unwrap();
    let mut last = None;
    while let Some(response) = responses.message().await.unwrap() {
        last = response.outputs.unwrap().finish_info;
    }
    assert_eq!(last.unwrap().finish_reason(), FinishReason::Aborted);
    until(&running.engine, |stats| stats.finished_cancelled == 1 && stats.running == 0).await;

    let mut responses = client.generate_stream(long).await.unwrap().into_inner();
    responses.message().await.unwrap().unwrap();
    drop(responses);
    until(&running.engine, |stats| stats.finished_cancelled == 2 && stats.running == 0).await;
    assert_eq!(running.engine.stats().requests_used, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_name_the_field() {
    let running = running().await;
    let base = request(&running.engine, "# Vec", 2);
    let decoding = |decoding: DecodingParameters| GenerateRequest { decoding: Some(decoding), ..base.clone() };
    let sampling = |sampling: RandomSampling| GenerateRequest { sampling: Some(sampling), ..base.clone() };
    for (request, code, part) in [
        (GenerateRequest::default(), Code::InvalidArgument, "prompt"),
        (
            GenerateRequest { prompt: Some(Prompt::TokenIds(TokenIds::default())), ..base.clone() },
            Code::InvalidArgument,
            "prompt",
        ),
        (
            GenerateRequest { prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![u32::MAX] })), ..base.clone() },
            Code::InvalidArgument,
            "prompt",
        ),
        (
            GenerateRequest { prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![5; 600] })), ..base.clone() },
            Code::InvalidArgument,
            "511",
        ),
        (GenerateRequest { temperature: Some(f32::NAN), ..base.clone() }, Code::InvalidArgument, "temperature"),
        (GenerateRequest { model: "other".into(), ..base.clone() }, Code::NotFound, "other"),
        (GenerateRequest { lora_name: "x".into(), ..base.clone() }, Code::InvalidArgument, "lora_name"),
        (sampling(RandomSampling { top_p: Some(2.0), ..Default::default() }), Code::InvalidArgument, "top_p"),
        (
            sampling(RandomSampling { num_sequences: u32::MAX, ..Default::default() }),
            Code::InvalidArgument,
            "num_sequences",
        ),
        (
            decoding(DecodingParameters { logit_bias: [(u32::MAX, 1.0)].into(), ..Default::default() }),
            Code::InvalidArgument,
            "logit_bias",
        ),
        (
            decoding(DecodingParameters { allowed_token_ids: vec![1], ..Default::default() }),
            Code::InvalidArgument,
            "allowed_token_ids",
        ),
        (
            decoding(DecodingParameters {
                structured_output: Some(StructuredOutput::Regex("(".into())),
                ..Default::default()
            }),
            Code::InvalidArgument,
            "grammar",
        ),
    ] {
        let status = InferenceClient::new(running.channel.clone()).generate_stream(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(part), "{part}: {status:?}");
    }
    // The beginning of a long prompt is removed on request.
    let long = GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![5; 600] })),
        truncate_prompt_tokens: 100,
        ..base
    };
    assert_eq!(stream(&running, long).await[0].prompt_info.as_ref().unwrap().num_prompt_tokens, 100);
}

/// Waits for a state of the health service.
async fn health_is(running: &Running, wanted: ServingStatus) {
    let mut health = HealthClient::new(running.channel.clone());
    for _ in 0..200 {
        let check = HealthCheckRequest { service: "vllm.Inference".into() };
        if health.check(check).await.is_ok_and(|response| response.into_inner().status() == wanted) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the health does not become {wanted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn facts_and_health() {
    let running = running().await;
    let mut control = ControlClient::new(running.channel.clone());
    let info = control.get_server_info(GetServerInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.api_version, "vllm");
    assert_eq!((info.max_model_len, info.kv_block_size, info.max_running_requests), (512, 64, 4));
    assert!(info.total_kv_blocks >= 32 && info.parallelism.unwrap().data_parallel_size == 1);
    let model = control.get_model_info(GetModelInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((model.served_model_name.as_str(), model.supports_token_ids_input), (NAME, true));
    let sources = control.get_kv_event_sources(GetKvEventSourcesRequest {}).await.unwrap().into_inner().sources;
    assert_eq!((sources.len(), sources[0].transport.as_str(), sources[0].topic.as_str()), (1, "zmq", "kv"));

    health_is(&running, ServingStatus::Serving).await;
    running.engine.drain(Duration::from_secs(1));
    health_is(&running, ServingStatus::NotServing).await;
    let refused = InferenceClient::new(running.channel.clone()).generate(request(&running.engine, "a", 1)).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unavailable);
}
