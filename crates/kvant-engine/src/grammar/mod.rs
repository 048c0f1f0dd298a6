//! Grammars: languages that texts can be constrained to.
//!
//! A grammar is compiled once, for the engine's tokenizer. At each token, the compiled grammar gives the set of tokens
//! that keep the text within the language. The crate `llguidance` implements this with the feature `grammar`; without
//! the feature, every grammar is rejected.

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

/// Maximum bytes of a grammar's source.
const MAX_SOURCE: usize = 256 << 10;
/// Maximum nesting depth of brackets in a source.
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
    /// JSON that matches a JSON schema, given as JSON text. Properties come in the order of the schema. A keyword or a
    /// number that cannot be enforced is an error. A `format` without a known pattern has no effect.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// A regular expression that matches the whole text, in the syntax of the crate `regex`.
    Regex(String),
    /// A context-free grammar in `llguidance`'s variant of Lark syntax.
    Lark(String),
}

impl Grammar {
    /// The white space between two JSON tokens, as a regular expression. It is bounded, so that a model that writes
    /// only white space terminates. JSON in a [`Grammar::Lark`] gets it with the option `x-guidance`: `%json {…,
    /// "x-guidance": {"whitespace_pattern": …}}`.
    pub const WHITESPACE: &str = r"\x20|\x0A[\x20\x09]{0,64}";

    /// Whether this build supports grammars (feature `grammar`).
    pub const IS_SUPPORTED: bool = cfg!(feature = "grammar");

    /// Checks the size and the nesting depth, without compiling.
    fn check(&self) -> Result<(), String> {
        let (Grammar::JsonSchema(source) | Grammar::Regex(source) | Grammar::Lark(source)) = self else {
            return Ok(());
        };
        if source.len() > MAX_SOURCE {
            return Err(format!("it has {} bytes; at most {MAX_SOURCE} are allowed", source.len()));
        }
        // Brackets within strings and classes count too. The limit needs no more precision.
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

/// A compiled grammar, from [`Engine::compile`](crate::Engine::compile). Requests of that engine can share it. Clones
/// are cheap.
#[derive(Clone)]
pub struct CompiledGrammar {
    compiler: Arc<Compiler>,
    start: MatcherState,
}

impl CompiledGrammar {
    /// The state before the first token. `None` if another compiler made the grammar.
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
    /// Builds the token table, which takes long for large vocabularies.
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

/// The reason why a grammar cannot be compiled.
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

/// The error of an invalid grammar.
pub(crate) fn invalid(reason: impl ToString) -> SubmitError {
    SubmitError::invalid("grammar", "a grammar that can be enforced", reason)
}

/// The state of a text that follows a grammar.
#[derive(Clone)]
pub(crate) struct GrammarState(MatcherState);

/// The tokens that can follow.
pub(crate) struct Allowed {
    /// One bit per token of the tokenizer, starting with the lowest bit of the first word. Special tokens that end a
    /// text are not included.
    pub tokens: Vec<u32>,
    /// Whether the text can end here.
    pub may_end: bool,
}

impl GrammarState {
    /// Returns the tokens that can follow, within a time limit.
    ///
    /// # Errors
    /// The reason, if the grammar exceeds its time or memory limit, or no token can follow.
    pub fn allowed(&mut self) -> Result<Allowed, String> {
        self.0.allowed()
    }

    /// Advances the state by a sampled token.
    ///
    /// # Errors
    /// The reason, as for [`GrammarState::allowed`], or if the token cannot follow.
    pub fn accept(&mut self, token: u32) -> Result<(), String> {
        self.0.accept(token)
    }

    /// Whether the text is complete and no token can follow.
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
        assert!(Grammar::Regex("a".repeat(MAX_SOURCE)).check().is_ok());
        assert!(Grammar::Regex("a".repeat(MAX_SOURCE + 1)).check().is_err());
        assert!(Grammar::Lark(format!("start: {}", "(".repeat(MAX_DEPTH))).check().is_ok());
        assert!(Grammar::Lark(format!("start: {}", "(".repeat(MAX_DEPTH + 1))).check().is_err());
        assert!(Grammar::JsonSchema("{\"items\":".repeat(MAX_DEPTH + 1)).check().is_err());
        assert!(Grammar::JsonSchema("{},".repeat(1000)).check().is_ok());
    }
}
