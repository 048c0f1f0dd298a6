//! The engine of `kvant serve`, for `kvant.LLM`.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kvant_cli::library::{self, Loaded};
use kvant_engine::{EngineRequest, Event, FinishReason, Grammar, NoEvent, Responses};
use kvant_models::{
    TokenLogprobs,
    chat::{Conversation, JsonValue, Message, ReplyEvent, ReplyParser},
};
use pyo3::{
    conversion::FromPyObjectOwned,
    exceptions::{PyRuntimeError, PyStopIteration},
    prelude::*,
    types::PyDict,
};

use crate::error;

/// Maximum time between two looks for Ctrl-C.
const PATIENCE: Duration = Duration::from_millis(50);

/// A model that runs requests.
#[pyclass(frozen, module = "kvant._kvant")]
pub struct Engine(Loaded);

/// A request, as an iterator over its events.
#[pyclass(frozen, module = "kvant._kvant")]
pub struct Request {
    responses: Mutex<Responses>,
    /// Divides a reply into reasoning and content.
    parser: Mutex<Option<ReplyParser>>,
}

/// A token and its log probability: id, log probability, rank, and the most probable tokens.
type Logprobs = (u32, f32, usize, Vec<(u32, f32)>);

/// Events of a request, for Python.
#[pyclass(frozen, get_all, module = "kvant._kvant")]
pub struct RequestEvent {
    /// Log probabilities of tokens of the prompt.
    prompt_logprobs: Vec<Logprobs>,
    /// The generated token.
    token: Option<u32>,
    logprobs: Option<Logprobs>,
    text: String,
    reasoning: String,
    /// Of the last event.
    finish_reason: Option<&'static str>,
    /// The index of the stop string, or the stop id.
    stop_string: Option<usize>,
    stop_id: Option<u32>,
    cached_tokens: usize,
}

#[pymethods]
impl Engine {
    /// Loads a model with the options of `kvant serve`.
    #[new]
    fn new(py: Python<'_>, options: Vec<OsString>) -> PyResult<Engine> {
        error::run(py, || library::engine(options).map(Engine).map_err(error::command))
    }

    /// Maximum tokens of a text, including the prompt.
    #[getter]
    fn context(&self) -> usize {
        self.0.engine.context()
    }

    /// Maximum requests that run or wait.
    #[getter]
    fn capacity(&self) -> usize {
        let options = self.0.engine.options();
        options.sequences.saturating_add(options.queue)
    }

    /// The ids of a text, after the tokens with which prompts begin.
    fn encode(&self, py: Python<'_>, text: &str) -> PyResult<Vec<u32>> {
        error::run(py, || self.0.engine.tokenizer().encode_prompt(text).map_err(error::models))
    }

    /// The text of ids, without special tokens.
    fn decode(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<String> {
        error::run(py, || self.0.engine.tokenizer().decode(&ids).map_err(error::models))
    }

    /// Text and ids of a conversation, given as JSON, by the model's chat template.
    #[pyo3(signature = (messages, add_generation_prompt, continue_final_message, variables))]
    fn render(
        &self,
        py: Python<'_>,
        messages: &str,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: &str,
    ) -> PyResult<(String, Vec<u32>)> {
        error::run(py, || {
            let template = self.0.template.as_ref();
            let template = template.ok_or_else(|| error::value("the model has no chat template"))?;
            let messages: Vec<Message> = serde_json::from_str(messages).map_err(error::value)?;
            let variables: BTreeMap<String, JsonValue> = serde_json::from_str(variables).map_err(error::value)?;
            let mut conversation = Conversation::new(&messages)
                .generation_prompt(add_generation_prompt)
                .continue_last(continue_final_message);
            for (name, value) in variables {
                conversation = conversation.variable(name, value);
            }
            let text = template.render(&conversation).map_err(error::models)?;
            let ids = template.encode(&conversation, self.0.engine.tokenizer()).map_err(error::models)?;
            Ok((text, ids))
        })
    }

    /// Starts a request. `chat`: the text of the prompt, if the reply is divided into reasoning and content.
    #[pyo3(signature = (prompt, params, chat))]
    fn submit(&self, prompt: Vec<u32>, params: &Bound<'_, PyDict>, chat: Option<String>) -> PyResult<Request> {
        let py = params.py();
        let mut request = self.request(prompt, params)?;
        let parser = match (&chat, &self.0.template) {
            (Some(prompt), Some(template)) => {
                // Special tokens separate the parts of a reply.
                request.special_tokens = true;
                Some(ReplyParser::new(template.reply_format()).after_prompt(prompt))
            }
            _ => None,
        };
        let grammar = grammar(params)?;
        error::run(py, || {
            if let Some(grammar) = grammar {
                request.grammar = Some(self.0.engine.compile(&grammar).map_err(error::submit)?);
            }
            let responses = self.0.engine.submit(request).map_err(error::submit)?;
            Ok(Request { responses: Mutex::new(responses), parser: Mutex::new(parser) })
        })
    }
}

/// A value of a dictionary; `None` if it is absent or None.
fn field<T: for<'py> FromPyObjectOwned<'py>>(params: &Bound<'_, PyDict>, name: &str) -> PyResult<Option<T>> {
    let Some(value) = params.get_item(name)?.filter(|value| !value.is_none()) else { return Ok(None) };
    value.extract::<T>().map(Some).map_err(|reason| {
        let reason: PyErr = reason.into();
        error::value(format!("`{name}`: {}", reason.value(params.py())))
    })
}

impl Engine {
    /// A request with these parameters. Absent ones are the model's.
    fn request(&self, prompt: Vec<u32>, params: &Bound<'_, PyDict>) -> PyResult<EngineRequest> {
        let mut sampling = self.0.sampling.clone();
        let set = |target: &mut f32, name| {
            *target = field(params, name)?.unwrap_or(*target);
            Ok::<_, PyErr>(())
        };
        set(&mut sampling.temperature, "temperature")?;
        set(&mut sampling.top_p, "top_p")?;
        set(&mut sampling.min_p, "min_p")?;
        set(&mut sampling.presence_penalty, "presence_penalty")?;
        set(&mut sampling.frequency_penalty, "frequency_penalty")?;
        set(&mut sampling.repetition_penalty, "repetition_penalty")?;
        if let Some(top_k) = field::<i64>(params, "top_k")? {
            let wrong = |_| error::value(format!("`top_k` must be at least 0, or -1 for all, got {top_k}"));
            sampling.top_k = if top_k == -1 { 0 } else { usize::try_from(top_k).map_err(wrong)? };
        }
        sampling.seed = field::<u64>(params, "seed")?.unwrap_or(sampling.seed);
        sampling.logit_bias = field(params, "logit_bias")?.unwrap_or_default();
        let mut ids: Vec<u32> = field(params, "stop_token_ids")?.unwrap_or_default();
        if !field(params, "ignore_eos")?.unwrap_or(false) {
            ids.extend(self.0.engine.tokenizer().eos());
        }
        let room = self.context().saturating_sub(prompt.len());
        let mut request = EngineRequest::new(prompt)
            .sampling(sampling)
            .max_tokens(field(params, "max_tokens")?.unwrap_or(room))
            .min_tokens(field(params, "min_tokens")?.unwrap_or(0))
            .stop(field::<Vec<String>>(params, "stop")?.unwrap_or_default())
            .stop_ids(ids)
            .include_stop(field(params, "include_stop_str_in_output")?.unwrap_or(false))
            .special_tokens(!field(params, "skip_special_tokens")?.unwrap_or(true))
            .priority(field(params, "priority")?.unwrap_or(0));
        request.logprobs = field(params, "logprobs")?;
        request.prompt_logprobs = field(params, "prompt_logprobs")?;
        Ok(request)
    }
}

/// The grammar of the parameters: a kind and its source.
fn grammar(params: &Bound<'_, PyDict>) -> PyResult<Option<Grammar>> {
    let Some((kind, source)) = field::<(String, String)>(params, "grammar")? else { return Ok(None) };
    match kind.as_str() {
        "json" => Ok(Some(Grammar::JsonSchema(source))),
        "json_object" => Ok(Some(Grammar::JsonObject)),
        "regex" => Ok(Some(Grammar::Regex(source))),
        "grammar" => Ok(Some(Grammar::Lark(source))),
        other => Err(error::value(format!("unknown kind of grammar: {other}"))),
    }
}

#[pymethods]
impl Request {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// Waits for the next event. Ctrl-C raises `KeyboardInterrupt`.
    fn __next__(&self, py: Python<'_>) -> PyResult<RequestEvent> {
        loop {
            match self.receive(py, PATIENCE)? {
                Ok(Some(event)) => return self.event(event),
                Ok(None) => return Err(PyStopIteration::new_err(())),
                Err(NoEvent) => {}
            }
        }
    }

    /// The events that have arrived; if there is none and `wait` is set, those of the next moment.
    fn take(&self, py: Python<'_>, wait: bool) -> PyResult<Vec<RequestEvent>> {
        let (mut events, mut limit) = (Vec::new(), if wait { PATIENCE } else { Duration::ZERO });
        while let Ok(Some(event)) = self.receive(py, limit)? {
            events.push(self.event(event)?);
            limit = Duration::ZERO;
        }
        Ok(events)
    }
}

impl Request {
    fn receive(&self, py: Python<'_>, limit: Duration) -> PyResult<Result<Option<Event>, NoEvent>> {
        py.check_signals()?;
        let receive = || self.responses.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(limit);
        error::run(py, || Ok(receive()))
    }

    fn event(&self, event: Event) -> PyResult<RequestEvent> {
        let mut out = RequestEvent {
            prompt_logprobs: Vec::new(),
            token: None,
            logprobs: None,
            text: String::new(),
            reasoning: String::new(),
            finish_reason: None,
            stop_string: None,
            stop_id: None,
            cached_tokens: 0,
        };
        match event {
            Event::Prompt(tokens) => out.prompt_logprobs = tokens.into_iter().map(logprobs).collect(),
            Event::Token(token) => {
                out.token = Some(token.id);
                out.logprobs = token.logprobs.map(logprobs);
                self.divide(token.text, false, &mut out);
            }
            Event::Finished(end) => {
                self.divide(end.text, true, &mut out);
                out.cached_tokens = end.usage.cached_tokens;
                out.finish_reason = Some(match end.reason {
                    FinishReason::StopId(id) => {
                        out.stop_id = Some(id);
                        "stop"
                    }
                    FinishReason::StopString(index) => {
                        out.stop_string = Some(index);
                        "stop"
                    }
                    FinishReason::Grammar => "stop",
                    FinishReason::Length => "length",
                    FinishReason::OutOfPages => {
                        return Err(pyo3::exceptions::PyMemoryError::new_err(
                            "the cache has no page for another token: raise `memory` or lower `max_model_len`",
                        ));
                    }
                    _ => "abort",
                });
            }
            Event::Failed(failure) => return Err(error::failure(&failure)),
            _ => return Err(PyRuntimeError::new_err("kvant has a bug: an unknown event")),
        }
        Ok(out)
    }

    /// Divides text of a reply into content and reasoning.
    fn divide(&self, text: String, is_last: bool, out: &mut RequestEvent) {
        let mut parser = self.parser.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(of_reply) = parser.as_mut() else {
            out.text = text;
            return;
        };
        let mut events = of_reply.push(&text);
        if is_last && let Some(parser) = parser.take() {
            events.extend(parser.finish());
        }
        for event in events {
            match event {
                ReplyEvent::Reasoning(text) => out.reasoning += &text,
                ReplyEvent::Content(text) => out.text += &text,
                _ => {}
            }
        }
    }
}

fn logprobs(token: TokenLogprobs) -> Logprobs {
    (token.id, token.logprob, token.rank, token.top)
}
