//! Requests of the protocol as requests of the engine.

use std::hash::{BuildHasher, Hasher, RandomState};

use kvant_engine::{CacheScope, CompiledGrammar, Engine, EngineRequest, Grammar, SubmitError};
use kvant_models::Sampling;
use kvant_transfer::TransferParams;
use tonic::Status;
use vllm_proto::{
    CandidateTokens, DecodingParameters, GenerateRequest, KvCacheParameters, RandomSampling, ResponseOptions,
    StoppingCriteria, candidate_tokens::Select, decoding_parameters::StructuredOutput, generate_request::Prompt,
};

use crate::transfer::params;

/// Maximum sequences of a request.
const MAX_SEQUENCES: u32 = 128;
/// The protocol's default of `max_new_tokens`.
const MAX_NEW_TOKENS: usize = 20;

/// A request of the engine, once for each sequence, and the contents of its answers.
#[derive(Debug)]
pub(crate) struct Requests {
    pub prompt: Vec<u32>,
    pub requests: Vec<EngineRequest>,
    pub wanted: Wanted,
    /// Ids that end the text by the client's wish.
    pub stop_ids: Vec<u32>,
    pub stop_strings: Vec<String>,
    /// How the prompt's pages travel.
    pub transfer: Option<TransferParams>,
}

/// The contents of answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub text: bool,
    pub token_ids: bool,
    pub logprobs: bool,
    pub prompt_token_ids: bool,
    pub prompt_logprobs: bool,
}

/// An invalid or unsupported field.
pub(crate) fn invalid(field: &str, reason: impl std::fmt::Display) -> Status {
    Status::invalid_argument(format!("`{field}`: {reason}"))
}

/// The status of a rejected request.
pub(crate) fn rejected(error: &SubmitError) -> Status {
    let message = error.to_string();
    match error {
        SubmitError::Busy { .. } => Status::resource_exhausted(message),
        SubmitError::Draining | SubmitError::Unhealthy { .. } | SubmitError::NoThread { .. } => {
            Status::unavailable(message)
        }
        _ => Status::invalid_argument(message),
    }
}

impl Requests {
    /// Converts a request. Tokenises its text and compiles its grammar, which can take long.
    pub fn new(engine: &Engine, default: &Sampling, mut request: GenerateRequest) -> Result<Requests, Status> {
        check_unsupported(&request)?;
        let transfer = params(request.kv.as_mut().and_then(|kv| kv.kv_transfer_params.take()))?;
        let prompt = prompt(engine, request.prompt, request.truncate_prompt_tokens)?;
        let random = request.sampling.unwrap_or_default();
        let decoding = request.decoding.unwrap_or_default();
        let stopping = request.stopping.unwrap_or_default();
        let response = request.response.unwrap_or_default();
        let grammar = grammar(engine, decoding.structured_output.as_ref())?;
        let sequences = random.num_sequences.max(1);
        if sequences > MAX_SEQUENCES {
            return Err(invalid("sampling.num_sequences", format_args!("at most {MAX_SEQUENCES}, got {sequences}")));
        }
        let sampling = sampling(default, request.temperature, &random, &decoding);
        let mut base = EngineRequest::new(prompt.clone()).cache(scope(request.kv.as_ref()));
        base = stopped(engine, base, &stopping);
        // vLLM runs lower numbers first, the engine higher ones.
        base = base.priority(request.priority.saturating_neg().clamp(i8::MIN.into(), i8::MAX.into()) as i8);
        if response.skip_special_tokens == Some(false) {
            base = base.special_tokens(true);
        }
        if let Some(grammar) = grammar {
            base = base.grammar(grammar);
        }
        let (wanted, base) = wanted(&response, base)?;
        let of_sequence = |index: u32| {
            let seed = sampling.seed.wrapping_add(index.into());
            base.clone().sampling(sampling.clone().seed(seed))
        };
        let requests = (0..sequences).map(of_sequence).collect();
        let StoppingCriteria { stop_token_ids: stop_ids, stop_strings, .. } = stopping;
        Ok(Requests { prompt, requests, wanted, stop_ids, stop_strings, transfer })
    }
}

/// Refuses fields that would change the answer.
fn check_unsupported(request: &GenerateRequest) -> Result<(), Status> {
    let decoding = request.decoding.as_ref();
    let kv = request.kv.as_ref();
    let has_budget = |stopping: &StoppingCriteria| stopping.thinking_token_budget.is_some_and(|budget| budget >= 0);
    let unsupported = [
        ("media", !request.media.is_empty()),
        ("lora_name", !request.lora_name.is_empty()),
        ("decoding.allowed_token_ids", decoding.is_some_and(|decoding| !decoding.allowed_token_ids.is_empty())),
        ("decoding.bad_words_token_ids", decoding.is_some_and(|decoding| !decoding.bad_words_token_ids.is_empty())),
        ("stopping.thinking_token_budget", request.stopping.as_ref().is_some_and(has_budget)),
        ("kv.ec_transfer_params", kv.is_some_and(|kv| kv.ec_transfer_params.is_some())),
    ];
    match unsupported.iter().find(|(_, is_set)| *is_set) {
        Some((field, _)) => Err(invalid(field, "this server does not support the field")),
        None => Ok(()),
    }
}

fn prompt(engine: &Engine, prompt: Option<Prompt>, truncate: u32) -> Result<Vec<u32>, Status> {
    let mut ids = match prompt {
        Some(Prompt::TokenIds(ids)) => ids.ids,
        Some(Prompt::Text(text)) => {
            let (min, limit) = (engine.tokenizer().min_tokens(&text), engine.context());
            if min > limit && truncate == 0 {
                return Err(invalid("text", format_args!("at most {limit} tokens, got at least {min}")));
            }
            engine.tokenizer().encode_prompt(&text).map_err(|error| invalid("text", error))?
        }
        None => return Err(invalid("prompt", "`text` or `token_ids` is needed")),
    };
    // The beginning is removed, as in vLLM.
    if truncate > 0 && ids.len() > truncate as usize {
        ids.drain(..ids.len() - truncate as usize);
    }
    Ok(ids)
}

fn sampling(
    default: &Sampling,
    temperature: Option<f32>,
    random: &RandomSampling,
    decoding: &DecodingParameters,
) -> Sampling {
    // Zero is the protocol's default.
    let repetition = if decoding.repetition_penalty == 0.0 { 1.0 } else { decoding.repetition_penalty };
    let mut sampling = default
        .clone()
        .temperature(temperature.unwrap_or(default.temperature))
        .top_k(random.top_k.map_or(default.top_k, |top_k| top_k as usize))
        .top_p(random.top_p.unwrap_or(default.top_p))
        .min_p(random.min_p.unwrap_or(default.min_p))
        .seed(random.seed.map_or_else(random_number, |seed| seed as u64))
        .presence_penalty(decoding.presence_penalty)
        .frequency_penalty(decoding.frequency_penalty)
        .repetition_penalty(repetition);
    sampling.logit_bias = decoding.logit_bias.iter().map(|(&id, &bias)| (id, bias)).collect();
    sampling
}

pub(crate) fn random_number() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn scope(kv: Option<&KvCacheParameters>) -> CacheScope {
    match kv {
        Some(kv) if kv.bypass_prefix_cache => CacheScope::Private,
        Some(kv) => CacheScope::of_client(&[], &kv.cache_salt),
        None => CacheScope::Shared,
    }
}

fn stopped(engine: &Engine, request: EngineRequest, stopping: &StoppingCriteria) -> EngineRequest {
    let max = if stopping.max_new_tokens == 0 { MAX_NEW_TOKENS } else { stopping.max_new_tokens as usize };
    let eos = if stopping.ignore_eos { &[][..] } else { engine.tokenizer().eos() };
    request
        .max_tokens(max)
        .min_tokens(stopping.min_new_tokens as usize)
        .stop_ids([&stopping.stop_token_ids[..], eos].concat())
        .stop(&stopping.stop_strings)
        .include_stop(stopping.include_stop_strings)
}

/// The contents of answers, and the request with the log probabilities that they need.
fn wanted(response: &ResponseOptions, mut request: EngineRequest) -> Result<(Wanted, EngineRequest), Status> {
    let output = candidates("response.output_candidates", response.output_candidates.as_ref())?;
    let prompt = candidates("response.prompt_candidates", response.prompt_candidates.as_ref())?;
    if response.output_logprobs || output > 0 {
        request = request.logprobs(output);
    }
    if response.prompt_logprobs || prompt > 0 {
        request = request.prompt_logprobs(prompt);
    }
    let wanted = Wanted {
        text: response.output_text.unwrap_or(true),
        token_ids: response.output_token_ids,
        logprobs: response.output_logprobs || output > 0,
        prompt_token_ids: response.prompt_token_ids,
        prompt_logprobs: response.prompt_logprobs || prompt > 0,
    };
    Ok((wanted, request))
}

fn candidates(field: &str, candidates: Option<&CandidateTokens>) -> Result<usize, Status> {
    match candidates.and_then(|candidates| candidates.select.as_ref()) {
        None => Ok(0),
        Some(Select::TopN(top)) => Ok(*top as usize),
        Some(_) => Err(invalid(field, "only `top_n` is supported")),
    }
}

fn grammar(engine: &Engine, output: Option<&StructuredOutput>) -> Result<Option<CompiledGrammar>, Status> {
    let grammar = match output {
        None | Some(StructuredOutput::JsonObject(false)) => return Ok(None),
        Some(StructuredOutput::Json(schema)) => Grammar::JsonSchema(schema.clone()),
        Some(StructuredOutput::Regex(regex)) => Grammar::Regex(regex.clone()),
        Some(StructuredOutput::Grammar(grammar)) => Grammar::Lark(grammar.clone()),
        Some(StructuredOutput::JsonObject(true)) => Grammar::JsonObject,
        Some(StructuredOutput::Choice(choice)) if choice.choices.is_empty() => {
            return Err(invalid("decoding.choice", "at least one choice is needed"));
        }
        Some(StructuredOutput::Choice(choice)) => Grammar::one_of(&choice.choices),
        Some(StructuredOutput::StructuralTag(_)) => {
            return Err(invalid("decoding.structural_tag", "this server does not support the field"));
        }
    };
    engine.compile(&grammar).map(Some).map_err(|error| rejected(&error))
}
