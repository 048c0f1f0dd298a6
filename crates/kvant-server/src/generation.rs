//! The events of all choices of a request, as one stream.

use std::{convert::Infallible, fmt::Display, pin::Pin, sync::Arc, time::Instant};

use axum::response::{
    IntoResponse, Response,
    sse::{self, Sse},
};
use futures_util::{
    Stream, StreamExt,
    stream::{self, SelectAll},
};
use kvant_engine::{EngineRequest, Event, FinishReason, Responses, Usage};
use serde_json::{Value, json};

use crate::{
    app::{App, RequestId},
    error::{ApiError, Result},
    serving::Serving,
};

/// A stream of the events of one choice, each with the choice's number.
type Choice = Pin<Box<dyn Stream<Item = (usize, Event)> + Send>>;

/// The choices of a request. Dropping it cancels them.
pub(crate) struct Generation {
    choices: SelectAll<Choice>,
    id: RequestId,
    submitted: Instant,
    /// When the first token of each choice came.
    first: Vec<Option<Instant>>,
    /// The model stays loaded until the choices have ended. Dropped after them.
    _serving: Arc<Serving>,
}

impl Generation {
    /// Submits all choices, or none.
    pub fn submit(app: &Arc<Serving>, id: &RequestId, requests: Vec<EngineRequest>) -> Result<Generation> {
        let refused = |error| ApiError::of_submit(error, app.model.engine.context());
        let submit = |request| app.model.engine.submit(request).map_err(refused);
        let responses: Vec<Responses> = requests.into_iter().map(submit).collect::<Result<_>>()?;
        let first = vec![None; responses.len()];
        let choices = responses.into_iter().enumerate().map(|(index, responses)| {
            let events = stream::unfold(responses, |mut responses| async move {
                responses.recv_async().await.map(|event| (event, responses))
            });
            Box::pin(events.map(move |event| (index, event))) as Choice
        });
        let choices = stream::select_all(choices);
        let _serving = Arc::clone(app);
        Ok(Generation { choices, id: id.clone(), submitted: Instant::now(), first, _serving })
    }

    /// The next event, with the number of its choice. `None` after the last event of the last choice. A failure, and
    /// the end of a drain, is an error.
    pub async fn next(&mut self) -> Option<Result<(usize, Event)>> {
        let (index, event) = self.choices.next().await?;
        match &event {
            Event::Token(_) => {
                self.first[index].get_or_insert_with(Instant::now);
            }
            Event::Finished(finished) => {
                let Usage { prompt_tokens, cached_tokens, generated_tokens, .. } = finished.usage;
                let (request_id, reason) = (&*self.id.0, finish_reason(&finished.reason));
                let first = self.first[index].unwrap_or_else(Instant::now);
                let first_ms = (first - self.submitted).as_millis() as u64;
                let seconds = first.elapsed().as_secs_f64();
                // The first token belongs to the prompt.
                let rate = generated_tokens.saturating_sub(1) as f64 / seconds.max(1e-9);
                let tokens_per_second = (rate * 10.0).round() / 10.0;
                tracing::info!(
                    request_id,
                    index,
                    prompt_tokens,
                    cached_tokens,
                    generated_tokens,
                    first_ms,
                    tokens_per_second,
                    reason,
                    "finished"
                );
                if finished.reason == FinishReason::Drained {
                    return Some(Err(ApiError::draining()));
                }
                // An empty text would look like an answer.
                if finished.reason == FinishReason::OutOfPages && generated_tokens == 0 {
                    return Some(Err(ApiError::out_of_pages(prompt_tokens)));
                }
            }
            Event::Failed(failure) => {
                tracing::error!(request_id = &*self.id.0, index, %failure, "failed");
                return Some(Err(failure.clone().into()));
            }
            _ => {}
        }
        Some(Ok((index, event)))
    }
}

/// OpenAI's word for the end of a text.
pub(crate) fn finish_reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::StopId(_) | FinishReason::StopString(_) | FinishReason::Grammar => "stop",
        _ => "length",
    }
}

/// Tokens of a request: its prompts once, and all choices.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TokenUsage {
    pub prompt: usize,
    pub cached: usize,
    pub generated: usize,
    /// Tokens of all prompts, known before the first one has run.
    of_prompts: usize,
    /// Tokens that have come so far.
    seen: usize,
}

impl TokenUsage {
    /// Before the first token.
    pub fn of_prompts(tokens: usize) -> TokenUsage {
        TokenUsage { of_prompts: tokens, ..TokenUsage::default() }
    }

    /// Counts an event of a choice. `has_prompt`: it is the first one of its prompt.
    pub fn count(&mut self, event: &Event, has_prompt: bool) {
        match event {
            Event::Token(_) => self.seen += 1,
            Event::Finished(finished) => self.add(finished.usage, has_prompt),
            _ => {}
        }
    }

    /// The usage while the text grows, in the form of OpenAI's completions.
    pub fn so_far(&self) -> Value {
        let (prompt, generated) = (self.of_prompts, self.generated.max(self.seen));
        json!({"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated})
    }

    /// Counts a choice. `has_prompt`: it is the first one of its prompt.
    pub fn add(&mut self, usage: Usage, has_prompt: bool) {
        if has_prompt {
            self.prompt += usage.prompt_tokens;
            self.cached += usage.cached_tokens;
        }
        self.generated += usage.generated_tokens;
    }

    /// In the form of OpenAI's completions.
    pub fn openai(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

/// An event of a stream: its name, if any, and its data.
pub(crate) type Sent = Result<sse::Event, Infallible>;

/// An event with JSON as its data.
pub(crate) fn data(value: &impl Display) -> Sent {
    with_data(sse::Event::default(), value)
}

fn with_data(event: sse::Event, value: &impl Display) -> Sent {
    // JSON values print as JSON, which has no line breaks.
    Ok(event.data(value.to_string()))
}

/// Answers with a stream. Pings keep the connection while nothing else comes, for example during a long prompt.
pub(crate) fn event_stream(app: &App, events: impl Stream<Item = Sent> + Send + 'static) -> Response {
    streamed(events, sse::KeepAlive::new().interval(app.options.ping).text("ping"))
}

/// As [`event_stream`], with pings as Anthropic's clients know them.
pub(crate) fn named_stream(app: &App, events: impl Stream<Item = Sent> + Send + 'static) -> Response {
    let ping = sse::Event::default().event("ping").data("{\"type\":\"ping\"}");
    streamed(events, sse::KeepAlive::new().interval(app.options.ping).event(ping))
}

fn streamed(events: impl Stream<Item = Sent> + Send + 'static, pings: sse::KeepAlive) -> Response {
    // Proxies must not hold events back.
    let headers = [("cache-control", "no-store"), ("x-accel-buffering", "no")];
    (headers, Sse::new(events).keep_alive(pings)).into_response()
}

/// A stream whose events come from an async function that writes to a channel of one event: a slow reader slows it
/// down. It ends when nobody reads any more.
pub(crate) fn channel<T, F>(run: impl FnOnce(Sender<T>) -> F) -> impl Stream<Item = Result<T, Infallible>> + Send
where
    T: Send + 'static,
    F: Future<Output = Result<(), Gone>> + Send + 'static,
{
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    // The task is part of the stream: it ends with the stream.
    let task = Box::pin(run(Sender(sender)));
    stream::unfold((Some(task), receiver), |(mut task, mut receiver)| async move {
        loop {
            let Some(running) = task.as_mut() else {
                return receiver.recv().await.map(|event| (event, (None, receiver)));
            };
            tokio::select! {
                biased;
                event = receiver.recv() => return event.map(|event| (event, (task, receiver))),
                _ = running => task = None,
            }
        }
    })
}

/// The reader of a stream has gone.
#[derive(Debug)]
pub(crate) struct Gone;

/// Writes the events of a stream.
pub(crate) struct Sender<T = sse::Event>(tokio::sync::mpsc::Sender<Result<T, Infallible>>);

impl<T> Sender<T> {
    pub async fn send(&self, event: Result<T, Infallible>) -> Result<(), Gone> {
        self.0.send(event).await.map_err(|_| Gone)
    }
}

impl Sender {
    /// Sends JSON without a name.
    pub async fn data(&self, value: &impl Display) -> Result<(), Gone> {
        self.send(data(value)).await
    }

    /// Sends JSON with a name.
    pub async fn named(&self, name: &str, value: &impl Display) -> Result<(), Gone> {
        // The name first, as OpenAI and Anthropic send it: simple clients rely on this order.
        self.send(with_data(sse::Event::default().event(name), value)).await
    }
}
