//! How the answers of a chat are written: token by token, or with drafts.

use std::{ops::ControlFlow, sync::Arc};

use kvant::Sequence;
use kvant_models::{Files, GenerateStats, Model, PoolOptions, Request, Tokenizer, generate};

use super::ChatArgs;
use crate::Result;
#[cfg(feature = "serve")]
use crate::drafts::Drafting;

/// The model of a chat.
pub enum Writing {
    Plain(Box<Plain>),
    #[cfg(feature = "serve")]
    Drafting {
        drafting: Drafting,
        tokens: usize,
    },
}

/// A sequence that keeps the conversation.
pub struct Plain {
    model: Model,
    sequence: Sequence,
    /// The tokens of the sequence.
    fed: Vec<u32>,
}

impl Writing {
    /// `drafter`: its files.
    pub fn start(
        args: &ChatArgs,
        model: Model,
        tokenizer: &Arc<Tokenizer>,
        options: &PoolOptions,
        drafter: Option<&Files>,
    ) -> Result<Writing> {
        #[cfg(feature = "serve")]
        if args.drafts.count() > 0 {
            let dense_weights = args.activations.options(model.device()).dense_weights;
            let model = args.drafts.attach(model, drafter, dense_weights)?;
            let (tokenizer, count) = (Arc::clone(tokenizer), args.drafts.count());
            let drafting = Drafting::start(model, tokenizer, &options.codecs, options.longest, count)?;
            return Ok(Writing::Drafting { drafting, tokens: 0 });
        }
        let _ = (args, tokenizer, drafter);
        let sequence = model.new_pool(options)?.sequence();
        Ok(Writing::Plain(Box::new(Plain { model, sequence, fed: Vec::new() })))
    }

    /// Continues the text of a request.
    pub fn generate(
        &mut self,
        request: &Request,
        on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<GenerateStats> {
        match self {
            Writing::Plain(plain) => plain.generate(request, on_token),
            #[cfg(feature = "serve")]
            Writing::Drafting { drafting, tokens } => {
                let mut on_token = on_token;
                *tokens = request.prompt.len();
                drafting.generate(request, |token| {
                    *tokens += 1;
                    on_token(token)
                })
            }
        }
    }

    /// Tokens of the conversation, and used and all bytes of the cache.
    pub fn cache(&self) -> (usize, usize, usize) {
        match self {
            Writing::Plain(plain) => {
                let usage = plain.sequence.pool().usage();
                (plain.sequence.len(), usage.used, usage.bytes)
            }
            #[cfg(feature = "serve")]
            Writing::Drafting { drafting, tokens } => {
                let stats = drafting.stats();
                (*tokens, stats.pages_used, stats.pages_bytes)
            }
        }
    }
}

impl Plain {
    fn generate(
        &mut self,
        request: &Request,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<GenerateStats> {
        let rest = self.keep_prefix(request.prompt)?;
        let Plain { model, sequence, fed } = self;
        fed.extend(&request.prompt[rest..]);
        let request = Request { prompt: &request.prompt[rest..], ..request.clone() };
        let generated = generate(model, sequence, &request, |token| {
            fed.push(token);
            on_token(token)
        });
        // The last token is not fed. After an error, even fewer are fed.
        fed.truncate(sequence.len());
        Ok(generated?)
    }

    /// Truncates the sequence to the prefix shared with a prompt, but leaves at least one token of the prompt to feed.
    /// Returns the length.
    fn keep_prefix(&mut self, prompt: &[u32]) -> Result<usize> {
        let same = self.fed.iter().zip(prompt).take_while(|(a, b)| a == b).count().min(prompt.len() - 1);
        // Windows may have passed these positions, and recurrent states can be rolled back only to their last boundary.
        let boundary = self.sequence.boundary().filter(|&boundary| boundary <= same);
        let mut lengths = [Some(same), boundary].into_iter().flatten();
        let kept = lengths.find(|&len| self.sequence.truncate(len).is_ok()).unwrap_or(0);
        self.sequence.truncate(kept)?;
        self.fed.truncate(kept);
        Ok(kept)
    }
}
