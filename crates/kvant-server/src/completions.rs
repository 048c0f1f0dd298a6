//! `/v1/completions`.

use std::sync::Arc;

use axum::{
    Extension,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use kvant_engine::{EngineRequest, Event};
use kvant_models::{
    TextStream, TokenLogprobs, Tokenizer,
    chat::{JsonValue, ReplyFormat},
};
use kvant_transfer::TransferParams;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::{
    app::{App, RequestId},
    body::Json,
    calls::Reasoning,
    error::{ApiError, Result},
    generation::{Generation, Gone, Sender, TokenUsage, channel, event_stream, finish_reason},
    ids::{now, random_id},
    logprobs::number,
    prompts::{PromptText, Prompts, SpecialNames, check_choices},
    sampling::{TokenLimit, sampling_request},
    serving::{Serving, escaped, tokenized},
    stream_options::{StreamOptions, UsageIn},
    structured::{OutputConstraint, StructuredOutputs},
};

/// OpenAI's default token limit of an answer.
const MAX_TOKENS: usize = 16;

sampling_request! {
    struct CompletionRequest {
        model: Option<String>,
        prompt: Prompts,
        max_tokens: Option<TokenLimit>,
        n: Option<usize>,
        best_of: Option<usize>,
        stream: Option<bool>,
        stream_options: Option<StreamOptions>,
        logprobs: Option<usize>,
        echo: Option<bool>,
        suffix: Option<String>,
        response_format: Option<JsonValue>,
        structured_outputs: Option<StructuredOutputs>,
        cache_salt: Option<String>,
        kv_transfer_params: Option<TransferParams>,
        // Has no effect on the answer.
        #[expect(dead_code, reason = "has no effect")]
        user: Option<String>,
    }
}

/// Data shared by all chunks of an answer.
struct Answer {
    id: String,
    created: u64,
    model: String,
    choices: Vec<ChoiceText>,
    /// Choices of each prompt.
    n: usize,
    usage: TokenUsage,
    usage_in: UsageIn,
    /// `kv_transfer_params` for another worker.
    transfer: Option<Value>,
}

pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    Json(mut request): Json<CompletionRequest>,
) -> Result<Response> {
    let sampling = request.sampling_fields();
    let app = Serving::of(&app, request.model.as_deref()).await?;
    let model = app.name.clone();
    let streams = request.stream.unwrap_or(false);
    let usage_in = StreamOptions::usage(&app, request.stream_options, streams)?;
    let n = check_choices(&app, request.n, request.prompt.len())?;
    if request.best_of.is_some_and(|best| best != n) {
        return Err(ApiError::unsupported("best_of", "it must equal `n`"));
    }
    if request.suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::unsupported("suffix", "the model cannot insert text"));
    }
    let (echo, top) = (request.echo.unwrap_or(false), request.logprobs);
    let shape = OutputConstraint::of_format(request.response_format.as_ref(), "response_format", Some("json_schema"))?;
    let shape = shape.and_structured(request.structured_outputs)?;
    let grammar = app.blocking(move |app| shape.compile(app, ReplyFormat::Plain, Reasoning::Never)).await??;
    let prompts = app.encoding(request.prompt.bytes(), move |app| request.prompt.encode(app)).await??;

    let scope = app.scope(&headers, request.cache_salt);
    let max_tokens = app.max_tokens(request.max_tokens.map(|TokenLimit(limit)| limit), MAX_TOKENS);
    let (mut requests, mut choices) = (Vec::new(), Vec::new());
    let prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len()).sum();
    for prompt in prompts {
        let ids = prompt.ids.clone();
        let base = EngineRequest::new(ids).max_tokens(max_tokens).cache(scope.clone());
        let base = sampling.clone().apply(base, &app)?;
        let base = if let Some(top) = top { base.logprobs(top) } else { base };
        let base = if let Some(grammar) = grammar.clone() { base.grammar(grammar) } else { base };
        for choice in 0..n {
            let mut request = base.clone();
            request.sampling.seed = request.sampling.seed.wrapping_add(choice as u64);
            if echo && let Some(top) = top {
                request = request.prompt_logprobs(top);
            }
            requests.push(request);
            choices.push(ChoiceText::new(&app, &prompt, echo, top.is_some(), base.special_tokens)?);
        }
    }
    // Pages travel for one prompt.
    let transfer = request.kv_transfer_params.filter(|_| requests.len() == n);
    app.fetch_prompt(transfer.as_ref(), requests.first()).await;
    let offered = app.offer_prompt(transfer.as_ref(), requests.first());
    let transfer = offered.as_ref().map(|offered| offered.params().clone());
    let generation = Generation::submit(&app, &id, requests)?.offering(offered);
    let (id, usage) = (random_id("cmpl-"), TokenUsage::of_prompts(prompt_tokens));
    let answer = Answer { id, created: now(), model, choices, n, usage, usage_in, transfer };
    if streams {
        let shared = Arc::clone(&app);
        let events = channel(move |sender| answer.stream(shared, generation, sender));
        return Ok(event_stream(&app, events));
    }
    Ok(Json(answer.collect(&app, generation).await?).into_response())
}

impl Answer {
    /// Collects the answer in one response.
    async fn collect(mut self, app: &Arc<Serving>, mut generation: Generation) -> Result<Value> {
        let mut whole: Vec<Piece> = self.choices.iter_mut().map(ChoiceText::start).collect();
        while let Some(event) = generation.next().await {
            let (index, event) = event?;
            if let Some(piece) = self.piece(app, index, event) {
                whole[index].append(piece);
            }
        }
        let choices: Vec<Value> = whole.iter().enumerate().map(|(index, piece)| piece.json(index)).collect();
        let Answer { id, created, model, .. } = &self;
        let mut answer = json!({
            "id": id, "object": "text_completion", "created": created, "model": model, "choices": choices,
            "usage": self.usage.openai(),
        });
        if let Some(transfer) = self.transfer {
            answer["kv_transfer_params"] = transfer;
        }
        Ok(answer)
    }

    /// Sends the answer as events.
    async fn stream(mut self, app: Arc<Serving>, mut generation: Generation, sender: Sender) -> Result<(), Gone> {
        // At once: the other worker fetches pages while the prompt is computed.
        if let Some(transfer) = self.transfer.take() {
            let mut chunk = self.chunk(0, &Piece::default());
            chunk["kv_transfer_params"] = transfer;
            sender.data(&chunk).await?;
        }
        for index in 0..self.choices.len() {
            let piece = self.choices[index].start();
            if !piece.is_empty() {
                sender.data(&self.chunk(index, &piece)).await?;
            }
        }
        while let Some(event) = generation.next().await {
            let (index, event) = match event {
                Ok(event) => event,
                Err(error) => return sender.data(&error.openai_body()).await,
            };
            if let Some(piece) = self.piece(&app, index, event).filter(|piece| !piece.is_empty()) {
                sender.data(&self.chunk(index, &piece)).await?;
            }
        }
        if self.usage_in != UsageIn::None {
            let mut chunk = self.chunk(0, &Piece::default());
            chunk["choices"] = json!([]);
            chunk["usage"] = self.usage.openai();
            sender.data(&chunk).await?;
        }
        sender.send(Ok(axum::response::sse::Event::default().data("[DONE]"))).await
    }

    fn piece(&mut self, app: &Serving, index: usize, event: Event) -> Option<Piece> {
        self.usage.count(&event, index.is_multiple_of(self.n));
        self.choices[index].piece(app, event)
    }

    fn chunk(&self, index: usize, piece: &Piece) -> Value {
        let Answer { id, created, model, .. } = self;
        let choice = piece.json(index);
        let mut chunk = json!({
            "id": id, "object": "text_completion", "created": created, "model": model, "choices": [choice],
        });
        match self.usage_in {
            UsageIn::None => {}
            UsageIn::Last => chunk["usage"] = Value::Null,
            UsageIn::Every => chunk["usage"] = self.usage.so_far(),
        }
        chunk
    }
}

/// A part of a choice: text, log probabilities, and the finish reason.
#[derive(Default)]
struct Piece {
    text: String,
    logprobs: Option<Logprobs>,
    finish: Option<&'static str>,
}

/// Log probabilities in the format of completions: lists of equal length.
#[derive(Default, Serialize)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Value>,
    /// The most probable tokens, and the token itself.
    top_logprobs: Vec<Value>,
    /// The position of each token in the text: the number of whole characters before it. A token that starts within a
    /// character has the position of that character.
    text_offset: Vec<usize>,
}

impl Piece {
    fn is_empty(&self) -> bool {
        let has_tokens = self.logprobs.as_ref().is_some_and(|logprobs| !logprobs.tokens.is_empty());
        self.text.is_empty() && !has_tokens && self.finish.is_none()
    }

    fn append(&mut self, piece: Piece) {
        self.text.push_str(&piece.text);
        self.finish = piece.finish.or(self.finish);
        if let Some(mut more) = piece.logprobs {
            let logprobs = self.logprobs.get_or_insert_default();
            logprobs.tokens.append(&mut more.tokens);
            logprobs.token_logprobs.append(&mut more.token_logprobs);
            logprobs.top_logprobs.append(&mut more.top_logprobs);
            logprobs.text_offset.append(&mut more.text_offset);
        }
    }

    fn json(&self, index: usize) -> Value {
        json!({"index": index, "text": self.text, "logprobs": self.logprobs, "finish_reason": self.finish})
    }
}

/// The state of a choice.
struct ChoiceText {
    /// The first piece: the echoed prompt and its first token, which has no log probability.
    start: Piece,
    with_logprobs: bool,
    /// The text of all tokens so far, which offsets refer to.
    stream: TextStream<Arc<Tokenizer>>,
    /// Whole characters in the tokens so far.
    offset: usize,
    /// Whether the names of special tokens are shown in the generated text, and in the prompt.
    special: bool,
    prompt_special: bool,
}

impl ChoiceText {
    fn new(app: &Serving, prompt: &PromptText, echo: bool, with_logprobs: bool, special: bool) -> Result<ChoiceText> {
        let mut choice = ChoiceText {
            start: Piece { logprobs: with_logprobs.then(Logprobs::default), ..Piece::default() },
            with_logprobs,
            stream: TextStream::new(Arc::clone(app.model.engine.tokenizer())),
            offset: 0,
            special,
            prompt_special: prompt.shown != SpecialNames::None,
        };
        if echo {
            choice.echo(app, prompt);
        } else if with_logprobs {
            choice.stream = tokenized("prompt", choice.stream.special(special).after(&prompt.ids))?;
        }
        Ok(choice)
    }

    /// Begins with the text of the prompt and its first token.
    fn echo(&mut self, app: &Serving, prompt: &PromptText) {
        self.start.text = prompt.text.clone();
        if let (Some(logprobs), Some(&first)) = (&mut self.start.logprobs, prompt.ids.first()) {
            logprobs.tokens.push(app.token_text(first));
            logprobs.token_logprobs.push(Value::Null);
            logprobs.top_logprobs.push(Value::Null);
            logprobs.text_offset.push(0);
            self.count(first, prompt.shown == SpecialNames::All);
        }
    }

    fn start(&mut self) -> Piece {
        std::mem::take(&mut self.start)
    }

    fn piece(&mut self, app: &Serving, event: Event) -> Option<Piece> {
        let special = self.special;
        match event {
            Event::Prompt(logprobs) => {
                let logprobs = self.logprobs(app, &logprobs, self.prompt_special);
                Some(Piece { logprobs, ..Piece::default() })
            }
            Event::Token(token) => {
                let logprobs = self.logprobs(app, token.logprobs.as_slice(), special);
                Some(Piece { text: token.text, logprobs, finish: None })
            }
            Event::Finished(finished) => {
                let finish = Some(finish_reason(&finished.reason));
                // The end-of-text token counts as a token although it has no text.
                let logprobs = finished.logprobs.as_ref().map(std::slice::from_ref);
                let logprobs = logprobs.and_then(|logprobs| self.logprobs(app, logprobs, special));
                Some(Piece { text: finished.text, logprobs, finish })
            }
            _ => None,
        }
    }

    /// Converts log probabilities. `special`: the text shows the names of special tokens.
    fn logprobs(&mut self, app: &Serving, tokens: &[TokenLogprobs], special: bool) -> Option<Logprobs> {
        if !self.with_logprobs {
            return None;
        }
        let mut logprobs = Logprobs::default();
        for token in tokens {
            logprobs.tokens.push(app.token_text(token.id));
            logprobs.token_logprobs.push(number(token.logprob));
            logprobs.top_logprobs.push(Value::Object(alternatives(app, token)));
            logprobs.text_offset.push(self.offset);
            self.count(token.id, special);
        }
        Some(logprobs)
    }

    /// Counts the characters that a token completes.
    fn count(&mut self, id: u32, special: bool) {
        self.stream.set_special(special);
        self.offset += self.stream.push(id).map_or(0, |text| text.chars().count());
    }
}

/// The most probable tokens and the token itself, each with a unique key.
fn alternatives(app: &Serving, token: &TokenLogprobs) -> Map<String, Value> {
    let own = app.token_text(token.id);
    let mut all = Map::new();
    for &(id, logprob) in &token.top {
        let text = app.token_text(id);
        // The byte token `<0x0A>` and a line break have equal text.
        let is_taken = all.contains_key(&text) || (id != token.id && text == own);
        let key = if is_taken { escaped(&app.token_bytes(id)) } else { text };
        all.entry(key).or_insert_with(|| number(logprob));
    }
    all.entry(own).or_insert_with(|| number(token.logprob));
    all
}
