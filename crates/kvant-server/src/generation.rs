//! The events of all choices of a request as one stream.

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
use kvant_transfer::Offered;
use serde_json::{Value, json};

use crate::{
    app::{App, RequestId},
    error::{ApiError, Result},
    serving::Serving,
};

/// A stream of the events of one choice, each with the index of the choice.
type Choice = Pin<Box<dyn Stream<Item = (usize, Event)> + Send>>;

/// The choices of a request. Dropping it cancels them.
pub(crate) struct Generation {
    choices: SelectAll<Choice>,
    id: RequestId,
    submitted: Instant,
    /// Arrival time of the first token of each choice.
    first: Vec<Option<Instant>>,
    /// The offer of the prompt to another worker, until the prompt is computed.
    offered: Option<Offered>,
    /// Keeps the model loaded until the choices have ended. Dropped after them.
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
        Ok(Generation { choices, id: id.clone(), submitted: Instant::now(), first, offered: None, _serving })
    }

    /// Ends an offer of the prompt when the prompt is computed.
    pub fn offering(self, offered: Option<Offered>) -> Generation {
        Generation { offered, ..self }
    }

    /// Returns the next event and the index of its choice, or `None` after the last event of the last choice. Engine
    /// failure and the end of the drain are errors.
    pub async fn next(&mut self) -> Option<Result<(usize, Event)>> {
        let (index, event) = self.choices.next().await?;
        if !matches!(event, Event::Prompt(_)) {
            self.offered = None;
        }
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
                // The first token is not counted: its time is part of the prompt.
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

/// OpenAI's name for the finish reason.
pub(crate) fn finish_reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::StopId(_) | FinishReason::StopString(_) | FinishReason::Grammar => "stop",
        _ => "length",
    }
}

/// Token counts of a request: each prompt once, and all choices.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TokenUsage {
    pub prompt: usize,
    pub cached: usize,
    pub generated: usize,
    /// Accepted and rejected drafts.
    drafts: [usize; 2],
    /// Tokens of all prompts, known before the first one has run.
    of_prompts: usize,
    /// Tokens received so far.
    seen: usize,
}

impl TokenUsage {
    /// The counts before the first token.
    pub fn of_prompts(tokens: usize) -> TokenUsage {
        TokenUsage { of_prompts: tokens, ..TokenUsage::default() }
    }

    /// Counts an event of a choice. `has_prompt`: the choice is the first of its prompt.
    pub fn count(&mut self, event: &Event, has_prompt: bool) {
        match event {
            Event::Token(_) => self.seen += 1,
            Event::Finished(finished) => self.add(finished.usage, has_prompt),
            _ => {}
        }
    }

    /// The usage of an unfinished answer, in the format of OpenAI's completions.
    pub fn so_far(&self) -> Value {
        let (prompt, generated) = (self.of_prompts, self.generated.max(self.seen));
        json!({"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated})
    }

    /// Counts a choice. `has_prompt`: it is the first of its prompt.
    pub fn add(&mut self, usage: Usage, has_prompt: bool) {
        if has_prompt {
            self.prompt += usage.prompt_tokens;
            self.cached += usage.cached_tokens;
        }
        self.generated += usage.generated_tokens;
        self.drafts[0] += usage.accepted_drafts;
        self.drafts[1] += usage.rejected_drafts;
    }

    /// The usage in the format of OpenAI's completions. Rejected drafts are not among the completion tokens.
    pub fn openai(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.drafts[0], "rejected_prediction_tokens": self.drafts[1],
            },
        })
    }
}

/// An event of a stream: an optional name, and data.
pub(crate) type Sent = Result<sse::Event, Infallible>;

/// An event with JSON data.
pub(crate) fn data(value: &impl Display) -> Sent {
    with_data(sse::Event::default(), value)
}

fn with_data(event: sse::Event, value: &impl Display) -> Sent {
    // Compact JSON has no line breaks.
    Ok(event.data(value.to_string()))
}

/// A streaming response. Pings keep the connection alive between events, for example during a long prompt.
pub(crate) fn event_stream(app: &App, events: impl Stream<Item = Sent> + Send + 'static) -> Response {
    streamed(events, sse::KeepAlive::new().interval(app.options.ping).text("ping"))
}

/// Like [`event_stream`], with pings in Anthropic's format.
pub(crate) fn named_stream(app: &App, events: impl Stream<Item = Sent> + Send + 'static) -> Response {
    let ping = sse::Event::default().event("ping").data("{\"type\":\"ping\"}");
    streamed(events, sse::KeepAlive::new().interval(app.options.ping).event(ping))
}

fn streamed(events: impl Stream<Item = Sent> + Send + 'static, pings: sse::KeepAlive) -> Response {
    // Tells proxies not to buffer events.
    let headers = [("cache-control", "no-store"), ("x-accel-buffering", "no")];
    (headers, Sse::new(events).keep_alive(pings)).into_response()
}

/// Creates a stream from an async function that writes to a channel of one event, so that a slow reader slows the
/// function down. The function ends when the reader disconnects.
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

/// The reader of a stream has disconnected.
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
        // OpenAI and Anthropic send the name first, and simple clients rely on this order.
        self.send(with_data(sse::Event::default().event(name), value)).await
    }
}
