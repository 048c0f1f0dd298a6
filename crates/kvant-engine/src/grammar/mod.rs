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
#[cfg(feature = "grammar")]
mod references;
#[cfg(feature = "grammar")]
mod schema;
mod source;
#[cfg(feature = "grammar")]
mod watchdog;

use std::{fmt, sync::Arc};

use kvant_models::Tokenizer;

pub use self::source::Allowed;
pub use self::{numbers::InexactNumber, source::Grammar};

#[cfg(not(feature = "grammar"))]
use self::absent::{NoCompiler as TableCompiler, NoState as MatcherState};
#[cfg(feature = "grammar")]
use self::llguidance::{MatcherState, TableCompiler};
use self::source::CompileError;
use crate::SubmitError;

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
pub struct Compiler(TableCompiler);

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

/// The error of an invalid grammar.
pub(crate) fn invalid(reason: impl ToString) -> SubmitError {
    SubmitError::invalid("grammar", "a grammar that can be enforced", reason)
}

/// The state of a text that follows a grammar.
#[derive(Clone)]
pub struct GrammarState(MatcherState);

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

    /// The number of tokens, from the first on, that can follow. 0 if the grammar exceeds its limits.
    pub fn count_valid(&self, tokens: &[u32]) -> usize {
        self.0.count_valid(tokens)
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
