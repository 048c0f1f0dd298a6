//! `/api/chat`, `/api/generate`, `/api/tags`, `/api/show` and `/api/version`: a subset of Ollama's API, for clients
//! that support no other. Models cannot be pulled, created or deleted.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use axum::{
    Extension,
    body::Body,
    extract::State,
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};
use kvant_engine::{EngineRequest, Finished};
use kvant_models::chat::{JsonValue, Message, ReplyFormat};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    answer::{Added, AnswerReader, Part},
    app::{App, RequestId},
    blocks::parsed,
    body::Json,
    conversation::{ChatMessage, ChatRequest, SentCall, messages},
    error::{ApiError, Result},
    generation::{Generation, Gone, Sender, channel, finish_reason},
    ids::now,
    models::Known,
    sampling::{SamplingFields, Seed, Strings},
    serving::Serving,
    structured::OutputConstraint,
    tools::chosen_tools,
};

#[derive(Debug, Deserialize)]
pub(crate) struct OllamaChat {
    model: Option<String>,
    messages: Option<Vec<OllamaMessage>>,
    tools: Option<Vec<JsonValue>>,
    tool_choice: Option<Value>,
    format: Option<JsonValue>,
    options: Option<OllamaOptions>,
    /// Another name of `options.num_predict`, which some clients use.
    max_output_tokens: Option<i64>,
    stream: Option<bool>,
    think: Option<Value>,
    #[expect(dead_code, reason = "the server decides which models stay")]
    keep_alive: Option<Value>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct OllamaGenerate {
    model: Option<String>,
    prompt: Option<String>,
    system: Option<String>,
    raw: Option<bool>,
    format: Option<JsonValue>,
    options: Option<OllamaOptions>,
    stream: Option<bool>,
    think: Option<Value>,
    images: Option<Vec<Value>>,
    suffix: Option<String>,
    #[expect(dead_code, reason = "the server decides which models stay")]
    keep_alive: Option<Value>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct OllamaShow {
    model: Option<String>,
    name: Option<String>,
    #[expect(dead_code, reason = "has no effect")]
    verbose: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct OllamaMessage {
    role: String,
    content: Option<String>,
    thinking: Option<String>,
    images: Option<Vec<Value>>,
    tool_calls: Option<Vec<SentCall>>,
    tool_call_id: Option<String>,
    tool_name: Option<String>,
}

/// Ollama's sampling options, and options of its engine that are ignored.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct OllamaOptions {
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    seed: Option<Seed>,
    stop: Option<Strings>,
    num_predict: Option<i64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    repeat_penalty: Option<f32>,
    // Options of Ollama's engine.
    #[expect(dead_code, reason = "has no effect")]
    num_ctx: Option<u64>,
    #[expect(dead_code, reason = "has no effect")]
    num_keep: Option<i64>,
    #[expect(dead_code, reason = "has no effect")]
    num_batch: Option<u64>,
    #[expect(dead_code, reason = "has no effect")]
    num_gpu: Option<i64>,
    #[expect(dead_code, reason = "has no effect")]
    main_gpu: Option<u64>,
    #[expect(dead_code, reason = "has no effect")]
    num_thread: Option<u64>,
    #[expect(dead_code, reason = "has no effect")]
    use_mmap: Option<bool>,
}

impl OllamaOptions {
    /// Maximum tokens of the answer. −1 and −2 mean the rest of the context.
    fn max_tokens(&self, app: &Serving) -> Result<usize> {
        match self.num_predict {
            None => Ok(app.max_tokens(None, app.model.engine.context())),
            Some(-2 | -1) => Ok(app.max_tokens(Some(usize::MAX), usize::MAX)),
            Some(limit @ 0..) => Ok(app.max_tokens(usize::try_from(limit).ok(), usize::MAX)),
            Some(other) => {
                let message =
                    format!("`options.num_predict` must be at least 0, or -1 or -2 for no limit, got {other}");
                Err(ApiError::field("options.num_predict", message))
            }
        }
    }

    fn sampling_fields(self) -> SamplingFields {
        SamplingFields {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed,
            stop: self.stop,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repeat_penalty,
            ..SamplingFields::default()
        }
    }
}

/// Removes the tag that Ollama's clients add to the name of a model.
fn untagged(name: &str) -> &str {
    name.strip_suffix(":latest").unwrap_or(name)
}

pub(crate) async fn serving(app: &Arc<App>, asked: Option<&str>) -> Result<Arc<Serving>> {
    Serving::of(app, asked.map(untagged)).await
}

fn shape(format: Option<&JsonValue>) -> Result<OutputConstraint> {
    let format = match format {
        None => return Ok(OutputConstraint::default()),
        Some(JsonValue::String(name)) if name.is_empty() => return Ok(OutputConstraint::default()),
        Some(JsonValue::String(name)) if name == "json" => json!({"type": "json_object"}).into(),
        Some(schema @ JsonValue::Object(_)) => {
            let mut format = JsonValue::from(json!({"type": "json_schema"}));
            format["schema"] = schema.clone();
            format
        }
        Some(_) => return Err(ApiError::field("format", "`format` must be json or a JSON schema")),
    };
    OutputConstraint::of_format(Some(&format), "format", None)
}

/// Whether the model reasons: a boolean or an effort.
fn thinking(think: Option<&Value>) -> Result<Option<bool>> {
    match think {
        None => Ok(None),
        Some(Value::Bool(on)) => Ok(Some(*on)),
        Some(Value::String(effort)) if matches!(effort.as_str(), "low" | "medium" | "high") => Ok(Some(true)),
        Some(_) => Err(ApiError::field("think", "`think` must be true, false, low, medium or high")),
    }
}

fn no_images(images: Option<&Vec<Value>>, path: &str) -> Result<()> {
    match images.is_some_and(|images| !images.is_empty()) {
        true => Err(ApiError::unsupported(path, "the model reads text only")),
        false => Ok(()),
    }
}

impl OllamaMessage {
    fn into_chat(self) -> ChatMessage {
        let content = self.content.map(JsonValue::String);
        let name = self.tool_name;
        ChatMessage {
            tool_calls: self.tool_calls,
            tool_call_id: self.tool_call_id,
            name,
            reasoning_content: self.thinking,
            ..ChatMessage::new(self.role, content)
        }
    }
}

pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    Json(request): Json<OllamaChat>,
) -> Result<Response> {
    let app = serving(&app, request.model.as_deref()).await?;
    let model = app.name.clone();
    let streams = request.stream.unwrap_or(true);
    let sent = request.messages.unwrap_or_default();
    if sent.is_empty() {
        return Ok(Json(loaded(&model, Kind::Chat)).into_response());
    }
    for (index, message) in sent.iter().enumerate() {
        no_images(message.images.as_ref(), &format!("messages[{index}].images"))?;
    }
    let shape = shape(request.format.as_ref())?;
    let (tools, shape) = chosen_tools(&app, request.tools, request.tool_choice.as_ref(), shape)?;
    let messages = messages(&app, sent.into_iter().map(OllamaMessage::into_chat).collect())?;
    let thinking = thinking(request.think.as_ref())?;
    let chat = ChatRequest { tools, thinking, shape, ..ChatRequest::new(messages, None, None)? };
    let answer = OllamaAnswer::new(model, Kind::Chat);
    let options = request.options.unwrap_or_default();
    let options = OllamaOptions { num_predict: options.num_predict.or(request.max_output_tokens), ..options };
    answer.of_chat(app, id, &headers, chat, options, streams).await
}

pub(crate) async fn generate(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    Json(request): Json<OllamaGenerate>,
) -> Result<Response> {
    let app = serving(&app, request.model.as_deref()).await?;
    let model = app.name.clone();
    let (streams, options) = (request.stream.unwrap_or(true), request.options.unwrap_or_default());
    no_images(request.images.as_ref(), "images")?;
    if request.suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::unsupported("suffix", "the model cannot insert text"));
    }
    let Some(prompt) = request.prompt.filter(|prompt| !prompt.is_empty()) else {
        return Ok(Json(loaded(&model, Kind::Generate)).into_response());
    };
    let (shape, thinking) = (shape(request.format.as_ref())?, thinking(request.think.as_ref())?);
    let answer = OllamaAnswer::new(model, Kind::Generate);
    // A model without a template continues the text.
    if app.model.template.is_some() && request.raw != Some(true) {
        let system = request.system.filter(|text| !text.is_empty()).map(Message::system);
        let messages = system.into_iter().chain([Message::user(prompt)]).collect();
        let chat = ChatRequest { thinking, shape, ..ChatRequest::new(messages, None, None)? };
        return answer.of_chat(app, id, &headers, chat, options, streams).await;
    }
    let text = request.system.filter(|text| !text.is_empty()).map_or(prompt.clone(), |text| text + "\n\n" + &prompt);
    let encoded = app.encoding(text.len(), move |app| -> Result<_> {
        let grammar = shape.compile(app, ReplyFormat::Plain, crate::calls::Reasoning::Never)?;
        Ok((app.encode_prompt(&text)?, grammar))
    });
    let (ids, grammar) = encoded.await??;
    let base = EngineRequest::new(ids);
    let base = if let Some(grammar) = grammar { base.grammar(grammar) } else { base };
    let reader = AnswerReader::new(ReplyFormat::Plain, &[], "");
    answer.run(app, id, &headers, (base, reader), options, streams).await
}

/// The route that an answer belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Chat,
    Generate,
}

/// The response to a request without a prompt, which only loads the model.
fn loaded(model: &str, kind: Kind) -> Value {
    let mut answer = OllamaAnswer::new(model.to_string(), kind).chunk(json!(""), None, Vec::new());
    answer["done"] = json!(true);
    answer["done_reason"] = json!("load");
    answer
}

/// Data shared by all chunks of an answer.
struct OllamaAnswer {
    model: String,
    kind: Kind,
    started: Instant,
    /// Arrival time of the first token.
    first: Option<Instant>,
    /// A call whose arguments are incomplete.
    call: Option<(String, String)>,
}

impl OllamaAnswer {
    fn new(model: String, kind: Kind) -> OllamaAnswer {
        OllamaAnswer { model, kind, started: Instant::now(), first: None, call: None }
    }

    async fn of_chat(
        self,
        app: Arc<Serving>,
        id: RequestId,
        headers: &HeaderMap,
        chat: ChatRequest,
        options: OllamaOptions,
        streams: bool,
    ) -> Result<Response> {
        let prompt = app.encoding(chat.bytes(), move |app| chat.prompt(app)).await??;
        let request = (prompt.request(), prompt.reader);
        self.run(app, id, headers, request, options, streams).await.map_err(|error| error.of_prompt("messages"))
    }

    async fn run(
        self,
        app: Arc<Serving>,
        id: RequestId,
        headers: &HeaderMap,
        (request, reader): (EngineRequest, AnswerReader),
        options: OllamaOptions,
        streams: bool,
    ) -> Result<Response> {
        let base = request.max_tokens(options.max_tokens(&app)?).cache(app.scope(headers, None));
        let generation = Generation::submit(&app, &id, vec![options.sampling_fields().apply(base, &app)?])?;
        if !streams {
            return Ok(Json(self.collect(generation, reader).await?).into_response());
        }
        let lines = channel(move |sender| self.stream(generation, reader, sender));
        let headers = [(header::CONTENT_TYPE, "application/x-ndjson"), (header::CACHE_CONTROL, "no-store")];
        Ok((headers, Body::from_stream(lines)).into_response())
    }

    async fn collect(mut self, mut generation: Generation, mut reader: AnswerReader) -> Result<JsonValue> {
        let (mut text, mut reasoning, mut calls, mut end) = (String::new(), String::new(), Vec::new(), None);
        while let Some(event) = generation.next().await {
            let added = self.read(&mut reader, event?.1);
            for part in added.parts {
                match part {
                    Part::Text(more) => text += &more,
                    Part::Reasoning(more) => reasoning += &more,
                    part => calls.extend(self.call(part)),
                }
            }
            end = added.finished.or(end);
        }
        calls.extend(self.last_call());
        let reasoning = Some(reasoning).filter(|reasoning| !reasoning.is_empty());
        let chunk = self.chunk(json!(text), reasoning.map(Value::from), calls);
        Ok(self.finished(chunk, end.as_ref()).into())
    }

    async fn stream(
        mut self,
        mut generation: Generation,
        mut reader: AnswerReader,
        sender: Sender<String>,
    ) -> Result<(), Gone> {
        let mut end = None;
        while let Some(event) = generation.next().await {
            let event = match event {
                Ok((_, event)) => event,
                Err(error) => return sender.send(Ok(format!("{}\n", error.ollama_body()))).await,
            };
            let added = self.read(&mut reader, event);
            for part in added.parts {
                let chunk = match part {
                    Part::Text(text) => self.chunk(json!(text), None, Vec::new()),
                    Part::Reasoning(text) => self.chunk(json!(""), Some(json!(text)), Vec::new()),
                    part => match self.call(part) {
                        Some(call) => self.chunk(json!(""), None, vec![call]),
                        None => continue,
                    },
                };
                sender.send(Ok(format!("{chunk}\n"))).await?;
            }
            end = added.finished.or(end);
        }
        let calls = self.last_call().into_iter().collect();
        let last = self.finished(self.chunk(json!(""), None, calls), end.as_ref());
        sender.send(Ok(format!("{last}\n"))).await
    }

    fn read(&mut self, reader: &mut AnswerReader, event: kvant_engine::Event) -> Added {
        if matches!(event, kvant_engine::Event::Token(_)) {
            self.first.get_or_insert_with(Instant::now);
        }
        reader.read(event)
    }

    /// Adds a part of a call. Returns the previous call, which is then complete.
    fn call(&mut self, part: Part) -> Option<Value> {
        match part {
            Part::Call { name, .. } => {
                let before = self.last_call();
                self.call = Some((name, String::new()));
                before
            }
            Part::Arguments(json) => {
                if let Some((_, arguments)) = &mut self.call {
                    arguments.push_str(&json);
                }
                None
            }
            _ => None,
        }
    }

    /// Returns the last call. Its arguments are parsed as an object.
    fn last_call(&mut self) -> Option<Value> {
        let (name, arguments) = self.call.take()?;
        let arguments: Value = serde_json::from_str(&parsed(&arguments).to_string()).unwrap_or_default();
        Some(json!({"function": {"name": name, "arguments": arguments}}))
    }

    fn chunk(&self, text: Value, reasoning: Option<Value>, calls: Vec<Value>) -> Value {
        let created = rfc3339(now());
        match self.kind {
            Kind::Chat => {
                let mut message = json!({"role": "assistant", "content": text});
                if let Some(reasoning) = reasoning {
                    message["thinking"] = reasoning;
                }
                if !calls.is_empty() {
                    message["tool_calls"] = Value::Array(calls);
                }
                json!({"model": self.model, "created_at": created, "message": message, "done": false})
            }
            Kind::Generate => {
                let mut chunk = json!({"model": self.model, "created_at": created, "response": text, "done": false});
                if let Some(reasoning) = reasoning {
                    chunk["thinking"] = reasoning;
                }
                chunk
            }
        }
    }

    /// The last chunk, with the finish reason, counts, and times in nanoseconds.
    fn finished(&self, mut chunk: Value, end: Option<&Finished>) -> Value {
        let nanos = |from: Instant, to: Instant| to.saturating_duration_since(from).as_nanos() as u64;
        let (now, first) = (Instant::now(), self.first.unwrap_or_else(Instant::now));
        let usage = end.map(|end| end.usage).unwrap_or_default();
        let more = json!({
            "done": true, "done_reason": end.map_or("stop", |end| finish_reason(&end.reason)),
            "total_duration": nanos(self.started, now), "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens, "prompt_eval_duration": nanos(self.started, first),
            "eval_count": usage.generated_tokens, "eval_duration": nanos(first, now),
        });
        if let (Some(chunk), Value::Object(more)) = (chunk.as_object_mut(), more) {
            chunk.extend(more);
        }
        chunk
    }
}

pub(crate) async fn tags(State(app): State<Arc<App>>) -> Json<Value> {
    // If the search fails, the list has only the models that are known.
    let _ = app.models.search().await;
    let known = app.models.known();
    let models = known.iter().flat_map(|known| known.listed().map(|name| described(&app, name, known)));
    Json(json!({"models": models.collect::<Vec<_>>()}))
}

/// The loaded models.
pub(crate) async fn running(State(app): State<Arc<App>>) -> Json<Value> {
    let seen = app.models.seen().into_iter().filter(|(_, seen)| seen.stats.is_some());
    let models = seen.map(|(known, _)| {
        let mut model = described(&app, known.name(), &known);
        model["context_length"] = json!(known.facts.context);
        model
    });
    Json(json!({"models": models.collect::<Vec<_>>()}))
}

fn described(app: &App, name: &str, known: &Known) -> Value {
    json!({
        "name": name, "model": name, "modified_at": rfc3339(app.started), "size": known.facts.bytes, "digest": "",
        "details": details(),
    })
}

pub(crate) async fn show(State(app): State<Arc<App>>, Json(request): Json<OllamaShow>) -> Result<Json<Value>> {
    let asked = request.model.or(request.name);
    let (_, known) = app.models.find(asked.as_deref().map(untagged)).await?;
    let facts = &known.facts;
    let mut capabilities = vec!["completion"];
    if facts.has_template {
        capabilities.push("tools");
    }
    let info: BTreeMap<&str, Value> =
        [("general.architecture", json!("kvant")), ("kvant.context_length", json!(facts.context))].into();
    Ok(Json(json!({
        "modified_at": rfc3339(app.started), "details": details(), "model_info": info, "capabilities": capabilities,
    })))
}

fn details() -> Value {
    json!({
        "parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": "",
    })
}

/// Formats seconds since 1970 in UTC.
fn rfc3339(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    time.unwrap_or(jiff::Timestamp::MAX).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_as_text() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
        ] {
            assert_eq!(rfc3339(seconds), text);
        }
    }
}
