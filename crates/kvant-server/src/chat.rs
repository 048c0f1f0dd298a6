//! `/v1/chat/completions`.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Extension,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use kvant_models::chat::JsonValue;
use kvant_transfer::TransferParams;
use serde_json::{Map, Value, json};

use crate::{
    answer::{Added, AnswerReader, Part},
    app::{App, RequestId},
    body::Json,
    conversation::{ChatMessage, ChatRequest, messages, template_variables, thinking},
    error::{ApiError, Result},
    generation::{Generation, Gone, Sender, TokenUsage, channel, event_stream, finish_reason},
    ids::{now, random_id},
    logprobs,
    prompts::check_choices,
    sampling::{TokenLimit, sampling_request},
    serving::Serving,
    stream_options::{StreamOptions, UsageIn},
    structured::{OutputConstraint, StructuredOutputs},
    tools::chosen_tools,
};

/// Maximum alternatives of a token, as in OpenAI's API.
const MAX_TOP: usize = 20;

sampling_request! {
    struct ChatBody {
        model: Option<String>,
        messages: Vec<ChatMessage>,
        max_tokens: Option<TokenLimit>,
        max_completion_tokens: Option<TokenLimit>,
        n: Option<usize>,
        stream: Option<bool>,
        stream_options: Option<StreamOptions>,
        logprobs: Option<bool>,
        top_logprobs: Option<usize>,
        tools: Option<Vec<JsonValue>>,
        tool_choice: Option<Value>,
        parallel_tool_calls: Option<bool>,
        response_format: Option<JsonValue>,
        structured_outputs: Option<StructuredOutputs>,
        reasoning_effort: Option<String>,
        chat_template_kwargs: Option<BTreeMap<String, JsonValue>>,
        add_generation_prompt: Option<bool>,
        continue_final_message: Option<bool>,
        cache_salt: Option<String>,
        kv_transfer_params: Option<TransferParams>,
        modalities: Option<Vec<String>>,
        service_tier: Option<String>,
        store: Option<bool>,
        // The following fields have no effect on the answer.
        #[expect(dead_code, reason = "has no effect")]
        user: Option<String>,
        #[expect(dead_code, reason = "has no effect")]
        metadata: Option<Map<String, Value>>,
        #[expect(dead_code, reason = "has no effect")]
        safety_identifier: Option<String>,
        #[expect(dead_code, reason = "has no effect")]
        prompt_cache_key: Option<String>,
    }
}

/// Data shared by all chunks of an answer.
struct ChatAnswer {
    id: String,
    created: u64,
    model: String,
    choices: Vec<ChatChoice>,
    usage: TokenUsage,
    usage_in: UsageIn,
    /// `kv_transfer_params` for another worker.
    transfer: Option<Value>,
}

/// The state of a choice.
struct ChatChoice {
    reader: AnswerReader,
    with_logprobs: bool,
    /// Tool calls so far.
    calls: usize,
}

pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    Json(mut request): Json<ChatBody>,
) -> Result<Response> {
    let sampling = request.sampling_fields();
    let app = Serving::of(&app, request.model.as_deref()).await?;
    let model = app.name.clone();
    let streams = request.stream.unwrap_or(false);
    let usage_in = StreamOptions::usage(&app, request.stream_options, streams)?;
    let n = check_choices(&app, request.n, 1)?;
    let top = top_logprobs(request.logprobs, request.top_logprobs)?;
    check_fixed(&app, &request)?;
    let shape = OutputConstraint::of_format(request.response_format.as_ref(), "response_format", Some("json_schema"))?;
    let shape = shape.and_structured(request.structured_outputs)?;
    let (tools, shape) = chosen_tools(&app, request.tools, request.tool_choice.as_ref(), shape)?;
    let max_tokens = match (request.max_completion_tokens, request.max_tokens) {
        (Some(_), Some(_)) => {
            return Err(ApiError::field("max_tokens", "`max_tokens` and `max_completion_tokens` exclude each other"));
        }
        (some, None) | (None, some) => app.max_tokens(some.map(|TokenLimit(limit)| limit), app.model.engine.context()),
    };
    let mut variables = template_variables(request.chat_template_kwargs)?;
    let thinking = thinking(request.reasoning_effort, &mut variables)?;
    let messages = messages(&app, request.messages)?;
    let chat = ChatRequest::new(messages, request.continue_final_message, request.add_generation_prompt)?;
    let one_call = request.parallel_tool_calls == Some(false);
    let chat = ChatRequest { tools, variables, thinking, shape, one_call, ..chat };
    let prompt = app.encoding(chat.bytes(), move |app| chat.prompt(app)).await??;

    let base = prompt.request().max_tokens(max_tokens).cache(app.scope(&headers, request.cache_salt));
    let base = sampling.apply(base, &app)?;
    let base = if let Some(top) = top { base.logprobs(top) } else { base };
    let requests = (0..n as u64).map(|choice| {
        let mut request = base.clone();
        request.sampling.seed = request.sampling.seed.wrapping_add(choice);
        request
    });
    let transfer = request.kv_transfer_params;
    app.fetch_prompt(transfer.as_ref(), Some(&base)).await;
    let offered = app.offer_prompt(transfer.as_ref(), Some(&base));
    let transfer = offered.as_ref().map(|offered| offered.params().clone());
    let generation = Generation::submit(&app, &id, requests.collect()).map_err(|error| error.of_prompt("messages"))?;
    let generation = generation.offering(offered);
    let choice = || ChatChoice { reader: prompt.reader.clone(), with_logprobs: top.is_some(), calls: 0 };
    let choices = (0..n).map(|_| choice()).collect();
    let usage = TokenUsage::of_prompts(prompt.ids.len());
    let id = random_id("chatcmpl-");
    let answer = ChatAnswer { id, created: now(), model, choices, usage, usage_in, transfer };
    if streams {
        let shared = Arc::clone(&app);
        let events = channel(move |sender| answer.stream(shared, generation, sender));
        return Ok(event_stream(&app, events));
    }
    Ok(Json(answer.collect(&app, generation).await?).into_response())
}

fn top_logprobs(logprobs: Option<bool>, top: Option<usize>) -> Result<Option<usize>> {
    match (logprobs.unwrap_or(false), top) {
        (false, Some(_)) => Err(ApiError::field("top_logprobs", "`top_logprobs` needs `logprobs`")),
        (_, Some(top)) if top > MAX_TOP => {
            let message = format!("`top_logprobs` must be at most {MAX_TOP}, got {top}");
            Err(ApiError::field("top_logprobs", message))
        }
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None) => Ok(None),
    }
}

/// Checks the fields for which the server supports only one value.
fn check_fixed(app: &App, request: &ChatBody) -> Result<()> {
    if request.modalities.as_ref().is_some_and(|kinds| kinds != &["text"]) {
        return Err(ApiError::unsupported("modalities", "the model writes text only"));
    }
    if app.options.strict_fields && !matches!(request.service_tier.as_deref(), None | Some("auto" | "default")) {
        return Err(ApiError::unsupported("service_tier", "only the default tier exists"));
    }
    if app.options.strict_fields && request.store == Some(true) {
        return Err(ApiError::unsupported("store", "this server stores nothing"));
    }
    Ok(())
}

/// A message under construction.
#[derive(Default)]
struct Built {
    content: String,
    reasoning: String,
    calls: Vec<Value>,
    arguments: Vec<String>,
    logprobs: Vec<Value>,
    finish: Option<&'static str>,
}

impl ChatAnswer {
    async fn collect(mut self, app: &Arc<Serving>, mut generation: Generation) -> Result<Value> {
        let mut built: Vec<Built> = self.choices.iter().map(|_| Built::default()).collect();
        while let Some(event) = generation.next().await {
            let (index, event) = event?;
            self.usage.count(&event, index == 0);
            let added = self.choices[index].reader.read(event);
            let finish = self.choices[index].finish(&added);
            built[index].add(app, added, finish);
        }
        let choices: Vec<Value> = built.into_iter().zip(&self.choices).enumerate().map(choice_json).collect();
        let ChatAnswer { id, created, model, .. } = &self;
        let mut answer = json!({
            "id": id, "object": "chat.completion", "created": created, "model": model, "choices": choices,
            "usage": self.usage_json(),
        });
        if let Some(transfer) = self.transfer {
            answer["kv_transfer_params"] = transfer;
        }
        Ok(answer)
    }

    fn usage_json(&self) -> Value {
        let mut usage = self.usage.openai();
        let reasoning: usize = self.choices.iter().map(|choice| choice.reader.reasoning_tokens).sum();
        usage["completion_tokens_details"]["reasoning_tokens"] = json!(reasoning);
        usage
    }

    async fn stream(mut self, app: Arc<Serving>, mut generation: Generation, sender: Sender) -> Result<(), Gone> {
        for index in 0..self.choices.len() {
            let delta = json!({"role": "assistant", "content": ""});
            let mut chunk = self.chunk(index, delta, Value::Null, None);
            // At once: the other worker fetches pages while the prompt is computed.
            if let Some(transfer) = self.transfer.take() {
                chunk["kv_transfer_params"] = transfer;
            }
            sender.data(&chunk).await?;
        }
        while let Some(event) = generation.next().await {
            let (index, event) = match event {
                Ok(event) => event,
                Err(error) => return sender.data(&error.openai_body()).await,
            };
            self.usage.count(&event, index == 0);
            let added = self.choices[index].reader.read(event);
            let finish = self.choices[index].finish(&added);
            let mut logprobs = self.choices[index].logprobs(&app, &added);
            for part in added.parts {
                let delta = self.choices[index].delta(part);
                sender.data(&self.chunk(index, delta, logprobs.take(), None)).await?;
            }
            if !logprobs.is_null() {
                sender.data(&self.chunk(index, json!({}), logprobs, None)).await?;
            }
            if finish.is_some() {
                sender.data(&self.chunk(index, json!({}), Value::Null, finish)).await?;
            }
        }
        if self.usage_in != UsageIn::None {
            let mut chunk = self.chunk(0, json!({}), Value::Null, None);
            chunk["choices"] = json!([]);
            chunk["usage"] = self.usage_json();
            sender.data(&chunk).await?;
        }
        sender.send(Ok(axum::response::sse::Event::default().data("[DONE]"))).await
    }

    fn chunk(&self, index: usize, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
        let ChatAnswer { id, created, model, .. } = self;
        let choice = json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish});
        let mut chunk = json!({
            "id": id, "object": "chat.completion.chunk", "created": created, "model": model, "choices": [choice],
        });
        match self.usage_in {
            UsageIn::None => {}
            UsageIn::Last => chunk["usage"] = Value::Null,
            UsageIn::Every => chunk["usage"] = self.usage.so_far(),
        }
        chunk
    }
}

impl ChatChoice {
    /// The finish reason, if the answer has ended.
    fn finish(&self, added: &Added) -> Option<&'static str> {
        let reason = finish_reason(&added.finished.as_ref()?.reason);
        Some(if reason == "stop" && self.reader.has_calls { "tool_calls" } else { reason })
    }

    fn logprobs(&self, app: &Serving, added: &Added) -> Value {
        if added.logprobs.is_empty() {
            return Value::Null;
        }
        let content: Vec<Value> = added.logprobs.iter().map(|token| logprobs::of_token(app, token)).collect();
        json!({"content": content, "refusal": null})
    }

    fn delta(&mut self, part: Part) -> Value {
        match part {
            Part::Text(text) => json!({"content": text}),
            Part::Reasoning(text) => json!({"reasoning_content": text}),
            Part::Call { id, name } => {
                let index = self.calls;
                self.calls += 1;
                let function = json!({"name": name, "arguments": ""});
                json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]})
            }
            Part::Arguments(json) => {
                let index = self.calls.saturating_sub(1);
                json!({"tool_calls": [{"index": index, "function": {"arguments": json}}]})
            }
        }
    }
}

impl Built {
    fn add(&mut self, app: &Serving, added: Added, finish: Option<&'static str>) {
        self.logprobs.extend(added.logprobs.iter().map(|token| logprobs::of_token(app, token)));
        self.finish = finish.or(self.finish);
        for part in added.parts {
            match part {
                Part::Text(text) => self.content.push_str(&text),
                Part::Reasoning(text) => self.reasoning.push_str(&text),
                Part::Call { id, name } => {
                    self.calls.push(json!({"id": id, "type": "function", "function": {"name": name}}));
                    self.arguments.push(String::new());
                }
                Part::Arguments(json) => {
                    if let Some(arguments) = self.arguments.last_mut() {
                        arguments.push_str(&json);
                    }
                }
            }
        }
    }
}

fn choice_json((index, (mut built, choice)): (usize, (Built, &ChatChoice))) -> Value {
    for (call, arguments) in built.calls.iter_mut().zip(built.arguments) {
        call["function"]["arguments"] = Value::String(arguments);
    }
    let content = if built.content.is_empty() && !built.calls.is_empty() { None } else { Some(built.content) };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !built.reasoning.is_empty() {
        message["reasoning_content"] = Value::String(built.reasoning);
    }
    if !built.calls.is_empty() {
        message["tool_calls"] = Value::Array(built.calls);
    }
    let logprobs = choice.with_logprobs.then(|| json!({"content": built.logprobs, "refusal": null}));
    json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": built.finish})
}
