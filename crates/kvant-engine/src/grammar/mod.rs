//! Grammars: the languages that texts can be made to follow.
//!
//! A grammar is compiled once, for the engine's tokenizer. At each token the compiled one gives the set of tokens that
//! keep the text within the language. The crate `llguidance` does the work, with the feature `grammar`; without it
//! every grammar is refused.

#[cfg(not(feature = "grammar"))]
mod absent;
#[cfg(feature = "grammar")]
mod llguidance;
mod numbers;
#[cfg(all(test, feature = "grammar"))]
mod random;
#[cfg(feature = "grammar")]
mod references;
#[cfg(feature = "grammar")]
mod schema;
#[cfg(feature = "grammar")]
mod watchdog;

use std::{fmt, io, sync::Arc};

use kvant_models::Tokenizer;

pub use self::numbers::InexactNumber;

#[cfg(not(feature = "grammar"))]
use self::absent::{NoCompiler as TableCompiler, NoState as MatcherState};
#[cfg(feature = "grammar")]
use self::llguidance::{MatcherState, TableCompiler};
use crate::SubmitError;

/// The longest source of a grammar in bytes.
const LONGEST: usize = 256 << 10;
/// The deepest nesting of brackets in a source.
const MAX_DEPTH: usize = 64;

/// The language of a text.
///
/// ```
/// use kvant_engine::Grammar;
/// let answer = Grammar::JsonSchema(r#"{"enum": ["yes", "no"]}"#.to_string());
/// let date = Grammar::Regex("[0-9]{4}-[0-9]{2}-[0-9]{2}".to_string());
/// let sum = Grammar::Lark("start: NUMBER (\"+\" NUMBER)*\nNUMBER: /[0-9]+/".to_string());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Grammar {
    /// JSON that a JSON schema accepts; the schema as JSON. Properties come in the order of the schema. A keyword or a
    /// number that cannot be enforced is an error. A `format` without a known pattern has no effect.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// A regular expression that matches the whole text, in the syntax of the crate `regex`.
    Regex(String),
    /// A context-free grammar in the syntax of Lark, as `llguidance` defines it.
    Lark(String),
}

impl Grammar {
    /// The white space between two tokens of JSON, as a regular expression: a model that writes nothing else than white
    /// space must come to an end. JSON in a [`Grammar::Lark`] has it with the option `x-guidance`:
    /// `%json {…, "x-guidance": {"whitespace_pattern": …}}`.
    pub const WHITESPACE: &str = r"\x20|\x0A[\x20\x09]{0,64}";

    /// Whether this build has grammars: the feature `grammar`.
    pub const IS_SUPPORTED: bool = cfg!(feature = "grammar");

    /// Checks what costs nothing to check.
    fn check(&self) -> Result<(), String> {
        let (Grammar::JsonSchema(source) | Grammar::Regex(source) | Grammar::Lark(source)) = self else {
            return Ok(());
        };
        if source.len() > LONGEST {
            return Err(format!("it has {} bytes; at most {LONGEST} are allowed", source.len()));
        }
        // Also brackets that a string or a class contains count; a limit needs no more precision.
        let mut depth = 0usize;
        for byte in source.bytes() {
            match byte {
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth > MAX_DEPTH {
                return Err(format!("its brackets nest deeper than {MAX_DEPTH}"));
            }
        }
        Ok(())
    }
}

/// A grammar that requests of one engine can use, from [`Engine::compile`](crate::Engine::compile). Clones are cheap,
/// and several requests can use one.
#[derive(Clone)]
pub struct CompiledGrammar {
    compiler: Arc<Compiler>,
    start: MatcherState,
}

impl CompiledGrammar {
    /// The state before the first token, if the grammar is one of `compiler`.
    pub(crate) fn start(self, compiler: &Arc<Compiler>) -> Option<GrammarState> {
        Arc::ptr_eq(&self.compiler, compiler).then_some(GrammarState(self.start))
    }
}

impl fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CompiledGrammar")
    }
}

/// Compiles grammars for a tokenizer.
pub(crate) struct Compiler(TableCompiler);

impl Compiler {
    /// Builds the table of tokens, which takes a while for large vocabularies.
    pub fn new(tokenizer: &Tokenizer) -> Result<Arc<Compiler>, String> {
        TableCompiler::new(tokenizer).map(|backend| Arc::new(Compiler(backend)))
    }

    /// Compiles a grammar.
    pub fn compile(self: &Arc<Compiler>, grammar: &Grammar) -> Result<CompiledGrammar, SubmitError> {
        let compiled = grammar.check().map_err(CompileError::Invalid).and_then(|()| self.0.compile(grammar));
        match compiled {
            Ok(start) => Ok(CompiledGrammar { compiler: Arc::clone(self), start }),
            Err(CompileError::Invalid(reason)) => Err(invalid(reason)),
            Err(CompileError::NoThread(error)) => Err(SubmitError::NoThread { reason: error.to_string() }),
        }
    }
}

/// Why a grammar is not compiled.
#[derive(Debug)]
pub(crate) enum CompileError {
    Invalid(String),
    #[cfg_attr(not(feature = "grammar"), expect(dead_code, reason = "nothing is compiled"))]
    NoThread(io::Error),
}

impl From<String> for CompileError {
    fn from(reason: String) -> CompileError {
        CompileError::Invalid(reason)
    }
}

/// The error of a grammar that cannot be used.
pub(crate) fn invalid(reason: impl ToString) -> SubmitError {
    SubmitError::invalid("grammar", "a grammar that can be enforced", reason)
}

/// The state of a text that follows a grammar.
#[derive(Clone)]
pub(crate) struct GrammarState(MatcherState);

/// The tokens that can follow.
pub(crate) struct Allowed {
    /// A bit for each token of the tokenizer, the lowest bit of the first word first. Special tokens that end a text
    /// are not among them.
    pub tokens: Vec<u32>,
    /// Whether the text can end here.
    pub may_end: bool,
}

impl GrammarState {
    /// The tokens that can follow. The time is limited.
    ///
    /// # Errors
    /// The reason, if the grammar needs more time or memory than its limits, or has no token that can follow.
    pub fn allowed(&mut self) -> Result<Allowed, String> {
        self.0.allowed()
    }

    /// Moves on by a token that was drawn.
    ///
    /// # Errors
    /// The reason, as for [`GrammarState::allowed`], or if the token cannot follow.
    pub fn accept(&mut self, token: u32) -> Result<(), String> {
        self.0.accept(token)
    }

    /// Whether the text is complete, and nothing can follow.
    pub fn is_complete(&self) -> bool {
        self.0.is_complete()
    }
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GrammarState")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_and_deep_sources_are_refused() {
        assert!(Grammar::Regex("a".repeat(LONGEST)).check().is_ok());
        assert!(Grammar::Regex("a".repeat(LONGEST + 1)).check().is_err());
        assert!(Grammar::Lark(format!("start: {}", "(".repeat(MAX_DEPTH))).check().is_ok());
        assert!(Grammar::Lark(format!("start: {}", "(".repeat(MAX_DEPTH + 1))).check().is_err());
        assert!(Grammar::JsonSchema("{\"items\":".repeat(MAX_DEPTH + 1)).check().is_err());
        assert!(Grammar::JsonSchema("{},".repeat(1000)).check().is_ok());
    }
}
