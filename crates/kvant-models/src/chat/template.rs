//! Chat templates.

use std::{collections::BTreeMap, sync::Arc, thread};

use minijinja::{
    AutoEscape, Environment, Value,
    machinery::{CompiledTemplate, TemplateConfig, WhitespaceConfig},
    syntax::SyntaxConfig,
};
use serde::Serialize;

pub use super::format_time::Clock;
use super::{
    ChatRole, Content, JsonValue, Message, ReplyFormat, ToolCall, format_time::strftime, jinja, mark::free_mark,
    operators,
};
use crate::{Error, Files, Result, gguf::Metadata, panics};

/// Maximum bytes of a template source.
const SOURCE_LIMIT: u64 = 512 << 10;

/// Stack size for parsing and rendering. This is virtual memory; templates use kilobytes of it.
const STACK_BYTES: usize = 256 << 20;

/// Names of special tokens in templates, and their keys in GGUF metadata. One key is misspelt there.
const TOKEN_KEYS: [(&str, &str); 7] = [
    ("bos_token", "bos"),
    ("eos_token", "eos"),
    ("unk_token", "unknown"),
    ("sep_token", "seperator"),
    ("pad_token", "padding"),
    ("cls_token", "cls"),
    ("mask_token", "mask"),
];

/// The name of the template for conversations without tools.
const DEFAULT: &str = "default";

/// The name of the optional template for conversations with tools.
const TOOL_USE: &str = "tool_use";

/// A checkpoint's chat template: a Jinja template that renders conversations.
///
/// Templates are rendered as by transformers' `apply_chat_template`. They are untrusted: endless loops and unlimited
/// output are errors.
///
/// ```
/// use kvant_models::chat::{ChatTemplate, Conversation, Message, SpecialTokens};
/// let source = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}\
///               {% if add_generation_prompt %}<|assistant|>{% endif %}";
/// let tokens = SpecialTokens::from_iter([("eos_token", "</s>")]);
/// let template = ChatTemplate::new(source, tokens)?;
/// let messages = [Message::user("Hello")];
/// assert_eq!(template.render(&Conversation::new(&messages))?, "<|user|>Hello</s><|assistant|>");
/// # Ok::<(), kvant_models::Error>(())
/// ```
pub struct ChatTemplate {
    env: Environment<'static>,
    /// The sources by name.
    sources: Vec<(String, String)>,
    tokens: SpecialTokens,
}

/// The texts of special tokens by the names that templates use: `bos_token`, `eos_token` and others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct SpecialTokens(Vec<(String, String)>);

impl<N: Into<String>, T: Into<String>> FromIterator<(N, T)> for SpecialTokens {
    fn from_iter<I: IntoIterator<Item = (N, T)>>(tokens: I) -> SpecialTokens {
        SpecialTokens(tokens.into_iter().map(|(name, token)| (name.into(), token.into())).collect())
    }
}

/// A conversation to render.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Conversation<'a> {
    /// The messages.
    pub messages: &'a [Message],
    /// The tools that the model may call, each as `{"type": "function", "function": {…}}` with a JSON schema.
    pub tools: Vec<JsonValue>,
    /// Whether the text ends with the beginning of an answer.
    pub generation_prompt: bool,
    /// Whether the text ends within the last message, which the model continues.
    pub continues_last: bool,
    /// Other variables of the template.
    pub variables: BTreeMap<String, JsonValue>,
    /// The clock for templates that print a date.
    pub clock: Clock,
}

impl<'a> Conversation<'a> {
    /// A conversation whose next message is the model's answer.
    pub fn new(messages: &'a [Message]) -> Conversation<'a> {
        Conversation {
            messages,
            tools: Vec::new(),
            generation_prompt: true,
            continues_last: false,
            variables: BTreeMap::new(),
            clock: Clock::Now,
        }
    }

    /// Sets the tools.
    #[must_use]
    pub fn tools<T: Into<JsonValue>>(self, tools: impl IntoIterator<Item = T>) -> Conversation<'a> {
        Conversation { tools: tools.into_iter().map(Into::into).collect(), ..self }
    }

    /// Sets whether the text ends with the beginning of an answer.
    #[must_use]
    pub fn generation_prompt(self, generation_prompt: bool) -> Conversation<'a> {
        Conversation { generation_prompt, ..self }
    }

    /// Sets whether the text ends within the last message, an answer that the model continues. No new answer begins
    /// then.
    #[must_use]
    pub fn continue_last(self, continues_last: bool) -> Conversation<'a> {
        Conversation { continues_last, ..self }
    }

    /// Enables or disables reasoning before the answer by the variables `enable_thinking` and `thinking`. Templates
    /// that never or always reason ignore them.
    #[must_use]
    pub fn thinking(self, on: bool) -> Conversation<'a> {
        self.variable("enable_thinking", on).variable("thinking", on)
    }

    /// Sets a variable of the template, such as `reasoning_effort` of gpt-oss.
    #[must_use]
    pub fn variable(mut self, name: impl Into<String>, value: impl Into<JsonValue>) -> Conversation<'a> {
        self.variables.insert(name.into(), value.into());
        self
    }

    /// Sets the time.
    #[must_use]
    pub fn clock(self, clock: Clock) -> Conversation<'a> {
        Conversation { clock, ..self }
    }
}

impl ChatTemplate {
    /// Parses a template.
    ///
    /// # Errors
    /// `Template` with the line and the reason.
    pub fn new(source: &str, tokens: SpecialTokens) -> Result<ChatTemplate> {
        ChatTemplate::named([(DEFAULT.to_string(), source.to_string())], tokens)
    }

    /// Parses named templates. `default` must be one of them; `tool_use` renders conversations with tools.
    ///
    /// # Errors
    /// `Template`.
    pub fn named(templates: impl IntoIterator<Item = (String, String)>, tokens: SpecialTokens) -> Result<ChatTemplate> {
        let mut sources = Vec::new();
        for (name, source) in templates {
            if source.len() as u64 > SOURCE_LIMIT {
                return Err(Error::Template { reason: format!("longer than the limit of {SOURCE_LIMIT} bytes") });
            }
            let source = generation_blocks(&source);
            guarded(|| compile(&source).map(|_| ()))?;
            sources.push((name, source));
        }
        if !sources.iter().any(|(name, _)| name == DEFAULT) {
            return Err(Error::Template { reason: "none of the templates has the name `default`".to_string() });
        }
        Ok(ChatTemplate { env: jinja::environment(), sources, tokens })
    }

    /// Loads the templates of a checkpoint: `chat_template.jinja`, `chat_template.json` or the key of
    /// `tokenizer_config.json`, and the ones in `additional_chat_templates`; or the templates in the metadata of a GGUF
    /// file. Returns `None` if there are none: the model was not trained for conversations.
    ///
    /// # Errors
    /// `File`, `Metadata`, `Template`.
    pub fn load_files(files: &Files) -> Result<Option<ChatTemplate>> {
        if let Some(gguf) = files.as_gguf() {
            return ChatTemplate::of_metadata(gguf.metadata());
        }
        let config = files.read_json_if_there("tokenizer_config.json")?.unwrap_or_default();
        let mut templates = listed(&config["chat_template"]);
        let replace = |templates: &mut Vec<(String, String)>, name: &str, source: String| {
            templates.retain(|(other, _)| other != name);
            templates.push((name.to_string(), source));
        };
        if let Some(json) = files.read_json_if_there("chat_template.json")? {
            templates.extend(listed(&json["chat_template"]));
        }
        let file = |path: &str| {
            let text = files.read(path, SOURCE_LIMIT)?.into_owned();
            String::from_utf8(text).map_err(|_| Error::file(&files.path(path), "not UTF-8"))
        };
        if files.has("chat_template.jinja") {
            replace(&mut templates, DEFAULT, file("chat_template.jinja")?);
        }
        let tool_use = format!("additional_chat_templates/{TOOL_USE}.jinja");
        if files.has(&tool_use) {
            replace(&mut templates, TOOL_USE, file(&tool_use)?);
        }
        if templates.is_empty() {
            return Ok(None);
        }
        ChatTemplate::named(templates, SpecialTokens::of_config(&config)).map(Some)
    }

    fn of_metadata(metadata: &Metadata) -> Result<Option<ChatTemplate>> {
        let Some(source) = metadata.chat_template(None)? else { return Ok(None) };
        let tool_use = metadata.chat_template(Some(TOOL_USE))?.map(|source| (TOOL_USE, source));
        let sources = [(DEFAULT, source)].into_iter().chain(tool_use);
        let sources = sources.map(|(name, source)| (name.to_string(), source.to_string()));
        ChatTemplate::named(sources, SpecialTokens::of_metadata(metadata)?).map(Some)
    }

    /// The special tokens.
    pub fn tokens(&self) -> &SpecialTokens {
        &self.tokens
    }

    /// The format of the model's replies.
    pub fn reply_format(&self) -> ReplyFormat {
        let source: String = self.sources.iter().map(|(_, source)| source.as_str()).collect();
        ReplyFormat::of_template(&source)
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// `Template` if the template rejects the conversation, for example one that starts with an answer, or exceeds its
    /// limits of time or text; `Argument` for an invalid time, or if the last message to continue is not an answer.
    pub fn render(&self, conversation: &Conversation) -> Result<String> {
        if conversation.continues_last { self.render_open(conversation) } else { self.render_whole(conversation) }
    }

    /// Renders up to the end of the last message's content, as transformers' `continue_final_message`.
    fn render_open(&self, conversation: &Conversation) -> Result<String> {
        let mark = free_mark(conversation.messages, &conversation.tools)?;
        let mut messages = conversation.messages.to_vec();
        let last = messages.last_mut().filter(|last| last.role == ChatRole::Assistant);
        let Some(last) = last else { return Err(Error::argument("messages", "an answer at the end", "none")) };
        // A template that trims the content would remove the space.
        let end = format!("{mark} ");
        let content = last.content.as_ref().map(Content::text).unwrap_or_default();
        last.content = Some(Content::Text(content + &end));
        let marked = Conversation { messages: &messages, generation_prompt: false, ..conversation.clone() };
        let text = self.render_whole(&marked)?;
        let Some(place) = text.rfind(mark) else {
            return Err(Error::Template { reason: "it does not print the content of the last message".to_string() });
        };
        let open = text[..place].replace(&end, "").replace(mark, "");
        Ok(if text[place..].starts_with(&end) { open } else { open.trim_end().to_string() })
    }

    fn render_whole(&self, conversation: &Conversation) -> Result<String> {
        let now = conversation.clock.zoned()?;
        let mut context: Vec<(&str, Value)> = Vec::new();
        context.extend(self.tokens.0.iter().map(|(name, token)| (name.as_str(), Value::from(token.as_str()))));
        context.push(("strftime_now", Value::from_function(move |format: &str| strftime(&now, format))));
        let messages = conversation.messages.iter().map(message_value).collect::<Vec<_>>();
        context.push(("messages", Value::from(messages)));
        let tools: Vec<Value> = conversation.tools.iter().map(JsonValue::to_template).collect();
        let has_tools = !tools.is_empty();
        context.push(("tools", if has_tools { Value::from(tools) } else { Value::from(()) }));
        context.push(("documents", Value::from(())));
        context.push(("add_generation_prompt", Value::from(conversation.generation_prompt)));
        context.extend(conversation.variables.iter().map(|(name, value)| (name.as_str(), value.to_template())));
        let context: Value = context.into_iter().collect();

        let source =
            |wanted: &str| self.sources.iter().find(|(name, _)| name == wanted).map(|(_, source)| source.as_str());
        let tool_use = source(TOOL_USE).filter(|_| has_tools);
        let source = tool_use.or_else(|| source(DEFAULT)).unwrap_or_default();
        guarded(|| {
            let template = compile(source)?;
            jinja::render(&self.env, &template, context)
        })
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

impl SpecialTokens {
    /// Reads the special tokens of a checkpoint's `tokenizer_config.json`, or of a GGUF file's metadata.
    ///
    /// # Errors
    /// `File`, `Metadata`.
    pub fn load_files(files: &Files) -> Result<SpecialTokens> {
        if let Some(gguf) = files.as_gguf() {
            return SpecialTokens::of_metadata(gguf.metadata());
        }
        Ok(SpecialTokens::of_config(&files.read_json_if_there("tokenizer_config.json")?.unwrap_or_default()))
    }

    /// The tokens whose ids are in the metadata.
    fn of_metadata(metadata: &Metadata) -> Result<SpecialTokens> {
        let tokens = metadata.texts("tokenizer.ggml.tokens")?;
        let mut found = Vec::new();
        for (name, key) in TOKEN_KEYS {
            let id = metadata.whole(&format!("tokenizer.ggml.{key}_token_id"))?;
            let id = id.and_then(|id| usize::try_from(id).ok());
            let text = id.zip(tokens).and_then(|(id, tokens)| tokens.get(id));
            found.extend(text.map(|text| (name, text)));
        }
        Ok(found.into_iter().collect())
    }

    /// The tokens in a `tokenizer_config.json`.
    fn of_config(config: &serde_json::Value) -> SpecialTokens {
        let token = |&(name, _): &(&'static str, &str)| {
            let token = &config[name];
            Some((name, token.as_str().or_else(|| token["content"].as_str())?))
        };
        TOKEN_KEYS.iter().filter_map(token).collect()
    }
}

/// The templates of a key: a single one, or a list of named ones.
fn listed(templates: &serde_json::Value) -> Vec<(String, String)> {
    if let Some(source) = templates.as_str() {
        return vec![(DEFAULT.to_string(), source.to_string())];
    }
    let named = |entry: &serde_json::Value| {
        Some((entry["name"].as_str()?.to_string(), entry["template"].as_str()?.to_string()))
    };
    templates.as_array().into_iter().flatten().filter_map(named).collect()
}

/// Converts a message for templates. Reasoning has two names: gpt-oss reads `thinking`.
fn message_value(message: &Message) -> Value {
    let value = Value::from_serialize(message);
    let mut entries = Vec::new();
    if let Some(reasoning) = &message.reasoning_content {
        entries.push((Value::from("thinking"), Value::from(reasoning.as_str())));
    }
    for key in value.try_iter().into_iter().flatten() {
        let field = match key.as_str() {
            // Numbers in arguments keep their digits.
            Some("tool_calls") => message.tool_calls.iter().map(call_value).collect(),
            _ => value.get_item(&key).unwrap_or_default(),
        };
        entries.push((key, field));
    }
    entries.into_iter().collect()
}

fn call_value(call: &ToolCall) -> Value {
    let function =
        [("name", Value::from(call.function.name.as_str())), ("arguments", call.function.arguments.to_template())];
    let mut entries = vec![("type", Value::from(call.kind.as_str()))];
    entries.extend(call.id.as_deref().map(|id| ("id", Value::from(id))));
    entries.push(("function", function.into_iter().collect()));
    entries.into_iter().collect()
}

/// Replaces `{% generation %}`, which marks answers for training, by a block that only scopes variables.
fn generation_blocks(source: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        rest = tag;
        let inside = tag.trim_start_matches(['-', '+']).trim_start();
        for (name, with) in [("generation", "with"), ("endgeneration", "endwith")] {
            let Some(end) = inside.strip_prefix(name) else { continue };
            let closing = end.trim_start().trim_start_matches(['-', '+']);
            if closing.starts_with("%}") {
                out.push_str(&tag[..tag.len() - inside.len()]);
                out.push_str(with);
                rest = end;
            }
        }
    }
    out + rest
}

/// Compiles a template, with transformers' rules of whitespace and Python's operators.
pub(super) fn compile(source: &str) -> std::result::Result<CompiledTemplate<'_>, minijinja::Error> {
    #[allow(clippy::default_constructed_unit_structs, reason = "with minijinja's feature `custom_syntax` it is none")]
    let config = TemplateConfig {
        syntax_config: SyntaxConfig::default(),
        ws_config: WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true },
        default_auto_escape: Arc::new(|_| AutoEscape::None),
    };
    let mut template = CompiledTemplate::new("chat template", source, &config)?;
    operators::rewrite(&mut template)?;
    Ok(template)
}

/// Calls minijinja on a thread with a large stack, and converts its errors and panics. minijinja parses some
/// expressions and drops nested values recursively without a depth limit.
fn guarded<T: Send>(call: impl FnOnce() -> std::result::Result<T, minijinja::Error> + Send) -> Result<T> {
    let guarded = || panics::catch(call);
    let result = thread::scope(|scope| {
        let thread = thread::Builder::new().name("chat template".to_string()).stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, guarded)?;
        Ok(thread.join().unwrap_or_else(|_| Err(String::new())))
    });
    let result = result.map_err(|error: std::io::Error| Error::NoThread { reason: error.to_string() })?;
    let reason = match result {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => message(&error),
        Err(message) => format!("it fails in an unforeseen way ({message})"),
    };
    Err(Error::Template { reason })
}

/// The message of an error with its line and causes.
fn message(error: &minijinja::Error) -> String {
    let mut message = error.detail().map_or_else(|| error.kind().to_string(), str::to_string);
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        message = format!("{message}: {inner}");
        cause = inner.source();
    }
    match error.line() {
        Some(line) => format!("{message} (line {line})"),
        None => message,
    }
}
