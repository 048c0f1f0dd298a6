//! Grammars implemented with the crate `llguidance`.

use std::{
    sync::{Arc, Mutex, OnceLock},
    thread,
};

use kvant_models::{TokenPiece, Tokenizer};
use llguidance::{
    JsonCompileOptions, Matcher, ParserFactory,
    api::{ParserLimits, StopReason, TopLevelGrammar},
    earley::SlicedBiasComputer,
    panic_utils::catch_unwind,
    toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie},
};
use serde_json::{Value, json};

use super::{
    schema,
    source::{Allowed, CompileError, Grammar},
    watchdog::{self, Watchdog},
};
use crate::lock::lock;

/// Stack size for the compilation of a grammar, which is recursive.
const STACK: usize = 32 << 20;
/// The keyword before a schema in a grammar.
const SCHEMA: &str = "%json";
/// Maximum characters of an error message about a grammar.
const MAX_MESSAGE: usize = 500;

/// Cost limits of one grammar. The fuel of a mask corresponds to some 15 ms, and a state of the lexer takes 1 to 2 KiB.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 25_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: true,
        // Errors must not quote a user's text.
        verbose_errors: false,
    }
}

pub struct TableCompiler {
    factory: ParserFactory,
    /// Started with the first grammar.
    watchdog: OnceLock<Arc<Watchdog>>,
    /// Serialises compilations, so that slow ones do not occupy all cores.
    compiling: Mutex<()>,
    /// The id that the table uses for the end of a text. All ids of the tokenizer are lower.
    end: u32,
}

impl TableCompiler {
    pub fn new(tokenizer: &Tokenizer) -> Result<TableCompiler, String> {
        let pieces = tokenizer.pieces().map_err(|error| error.to_string())?;
        let special = |name: &str| [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat();
        let mut words: Vec<Vec<u8>> = pieces
            .into_iter()
            .map(|piece| match piece {
                TokenPiece::Text(bytes) => bytes,
                TokenPiece::Special(name) => special(&name),
                TokenPiece::Unused => Vec::new(),
            })
            .collect();
        // Stop ids have no text, even if the tokenizer does not mark them as special.
        for &id in tokenizer.eos() {
            let Some(word) = words.get_mut(id as usize) else { continue };
            if word.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
                *word = special(&String::from_utf8_lossy(word));
            }
        }
        let end = u32::try_from(words.len()).map_err(|error| error.to_string())?;
        words.push(special("<|end of the text|>"));
        // The table panics beyond its own limits, such as the maximum token length.
        let factory = catch_unwind(move || {
            let trie = TokTrie::from(&TokRxInfo::new(end + 1, end), &words);
            let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = SlicedBiasComputer::general_slices();
            ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
        });
        let mut factory = factory.map_err(|error| format!("the tokenizer is not supported: {}", message(&error)))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(TableCompiler { factory, watchdog: OnceLock::new(), compiling: Mutex::default(), end })
    }

    pub fn compile(&self, grammar: &Grammar) -> Result<MatcherState, CompileError> {
        let source = source(grammar)?;
        let _alone = lock(&self.compiling);
        let watchdog = self.watchdog()?;
        let compiled = thread::scope(|scope| {
            let builder = thread::Builder::new().name("kvant-grammar".to_string()).stack_size(STACK);
            let compiling = builder.spawn_scoped(scope, || Matcher::new(self.factory.create_parser(source)));
            compiling.map(|thread| thread.join())
        });
        let matcher = match compiled {
            Ok(Ok(matcher)) => matcher,
            Ok(Err(_)) => return Err("its compilation has panicked".to_string().into()),
            Err(error) => return Err(CompileError::NoThread(error)),
        };
        match matcher.get_error() {
            None => Ok(MatcherState { matcher: matcher.into_cancellable(), watchdog, end: self.end }),
            Some(error) => {
                let reason = message(&error);
                // Positions refer to the Lark text. Authors of other grammars do not know that text.
                let reason = if matches!(grammar, Grammar::Lark(_)) { &reason } else { without_place(&reason) };
                Err(reason.to_string().into())
            }
        }
    }

    fn watchdog(&self) -> Result<Arc<Watchdog>, CompileError> {
        if let Some(watchdog) = self.watchdog.get() {
            return Ok(Arc::clone(watchdog));
        }
        let watchdog = Arc::new(Watchdog::start().map_err(CompileError::NoThread)?);
        Ok(Arc::clone(self.watchdog.get_or_init(|| watchdog)))
    }
}

/// Converts a grammar to the form of `llguidance`.
fn source(grammar: &Grammar) -> Result<TopLevelGrammar, String> {
    let schema = match grammar {
        Grammar::Regex(regex) => return Ok(TopLevelGrammar::from_regex(regex)),
        Grammar::Lark(lark) => return Ok(TopLevelGrammar::from_lark(with_schemas(lark)?)),
        Grammar::JsonObject => json!({"type": "object"}),
        Grammar::JsonSchema(schema) => schema::prepared(schema)?,
    };
    let mut schema = match schema {
        Value::Object(_) => schema,
        Value::Bool(true) => json!({}),
        other => return Err(format!("a JSON schema is an object, not {}", kind(&other))),
    };
    let whitespace_pattern = Some(Grammar::WHITESPACE.to_string());
    JsonCompileOptions { whitespace_pattern, ..JsonCompileOptions::default() }.apply_to(&mut schema);
    Ok(TopLevelGrammar::from_json_schema(schema))
}

/// Prepares all schemas within a grammar.
fn with_schemas(lark: &str) -> Result<String, String> {
    let (mut out, mut rest) = (String::with_capacity(lark.len()), lark);
    while let Some((before, after)) = rest.split_once(SCHEMA) {
        out.push_str(before);
        out.push_str(SCHEMA);
        rest = after;
        let mut schemas = serde_json::Deserializer::from_str(after).into_iter::<Value>();
        if let Some(Ok(_)) = schemas.next() {
            let (schema, after) = after.split_at(schemas.byte_offset());
            out.push(' ');
            out.push_str(&schema::prepared(schema)?.to_string());
            rest = after;
        }
    }
    Ok(out + rest)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Shortens an error to the part that its reader needs: a few lines, without backtraces and source.
fn message(error: &impl ToString) -> String {
    let text = error.to_string();
    let text = text.split("\n<").next().unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !is_source(line)).map(str::trim).collect();
    lines.join("\n").trim().chars().take(MAX_MESSAGE).collect()
}

/// Whether a line quotes the source of an error: `   3 | start: "a"`, or the marker below it.
fn is_source(line: &str) -> bool {
    let (number, rest) = line.split_once('|').unwrap_or((line, ""));
    let is_numbered =
        !rest.is_empty() && !number.trim().is_empty() && number.trim().bytes().all(|b| b.is_ascii_digit());
    is_numbered || line.trim() == "^"
}

/// Removes `at 1(8): ` from a message.
fn without_place(message: &str) -> &str {
    let Some((place, rest)) = message.strip_prefix("at ").and_then(|rest| rest.split_once(": ")) else {
        return message;
    };
    let is_place = place.bytes().all(|b| b.is_ascii_digit() || b"()".contains(&b));
    if is_place { rest } else { message }
}

/// The state of a text.
#[derive(Clone)]
pub struct MatcherState {
    matcher: Matcher,
    watchdog: Arc<Watchdog>,
    end: u32,
}

impl MatcherState {
    pub fn allowed(&mut self) -> Result<Allowed, String> {
        let handle = self.matcher.cancellation_handle();
        let mask = self.watchdog.run(handle, || self.matcher.compute_mask_or_eos());
        let mut mask = mask.map_err(|error| self.reason(&error))?;
        let may_end = mask.is_allowed(self.end);
        mask.disallow_token(self.end);
        Ok(Allowed { tokens: mask.as_slice().to_vec(), may_end })
    }

    pub fn accept(&mut self, token: u32) -> Result<(), String> {
        let handle = self.matcher.cancellation_handle();
        self.watchdog.run(handle, || self.matcher.consume_token(token)).map_err(|error| self.reason(&error))?;
        match self.matcher.stop_reason() {
            reason if reason.is_ok() => Ok(()),
            reason => Err(self.reason(&reason)),
        }
    }

    pub fn count_valid(&self, tokens: &[u32]) -> usize {
        // An error would end the grammar.
        let mut matcher = self.matcher.clone();
        let handle = matcher.cancellation_handle();
        self.watchdog.run(handle, || matcher.validate_tokens(tokens)).unwrap_or(0)
    }

    pub fn is_complete(&self) -> bool {
        matches!(self.matcher.stop_reason(), StopReason::NoExtension | StopReason::EndOfSentence)
    }

    /// The reason why the grammar stopped.
    fn reason(&self, error: &impl ToString) -> String {
        let error = message(error);
        match self.matcher.stop_reason() {
            StopReason::Cancelled => format!("the mask of a token takes more than {:?}", watchdog::MAX_TIME),
            _ if error.contains("NoExtensionBias") => "the tokenizer has no token that can follow".to_string(),
            _ => error,
        }
    }
}
