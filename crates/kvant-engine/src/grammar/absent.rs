//! Replaces `llguidance.rs` in builds without the feature `grammar`.

use std::convert::Infallible;

use kvant_models::Tokenizer;

use super::source::{Allowed, CompileError, Grammar};

const ABSENT: &str = "none: this build has no grammars (the feature `grammar` of kvant-engine or kvant-cli)";

pub struct NoCompiler;

impl NoCompiler {
    pub fn new(_: &Tokenizer) -> Result<NoCompiler, String> {
        Err(ABSENT.to_string())
    }

    pub fn compile(&self, _: &Grammar) -> Result<NoState, CompileError> {
        Err(ABSENT.to_string().into())
    }
}

/// Has no values.
#[derive(Clone)]
pub struct NoState(Infallible);

impl NoState {
    pub fn allowed(&mut self) -> Result<Allowed, String> {
        match self.0 {}
    }

    pub fn accept(&mut self, _: u32) -> Result<(), String> {
        match self.0 {}
    }

    pub fn count_valid(&self, _: &[u32]) -> usize {
        match self.0 {}
    }

    pub fn is_complete(&self) -> bool {
        match self.0 {}
    }
}
