//! Parts for the tests of this workspace.

use std::{sync::Arc, time::Duration};

pub use crate::grammar::{Allowed, Compiler, GrammarState};
use crate::{CompiledGrammar, Engine, PageFiles};

/// The state of a grammar before the first token, if it is one of `compiler`.
pub fn start(grammar: CompiledGrammar, compiler: &Arc<Compiler>) -> Option<GrammarState> {
    grammar.start(compiler)
}

/// Makes the engine's thread panic.
pub fn panic(engine: &Engine) {
    engine.panic();
}

/// Delays each background read of a directory.
pub fn delay_reads(files: &PageFiles, delay: Duration) {
    files.delay_reads(delay);
}

/// Lets the drafter fail after the next step.
pub fn fail_drafter(engine: &Engine) {
    engine.fail_drafter();
}

/// Lets a rank of the engine's group fail within the next step with a prompt, while other ranks wait for it.
pub fn fail_rank(engine: &Engine, rank: usize) {
    engine.fail_rank(rank);
}
