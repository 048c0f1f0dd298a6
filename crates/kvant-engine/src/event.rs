//! The events of a request.

use kvant_models::TokenLogprobs;

/// An event of a request, from [`Responses`](crate::Responses). [`Event::Finished`] or [`Event::Failed`] is the last
/// one.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// Log probabilities of tokens of the prompt, as asked for: those after the previous event of this kind. The first
    /// token of a prompt has none, so the first event begins with the second token.
    Prompt(Vec<TokenLogprobs>),
    /// The embedding that the request asks for, not normalised: a number for each element of a hidden state.
    Embedding(Vec<f32>),
    /// A generated token.
    Token(TextToken),
    /// The request has ended.
    Finished(Finished),
    /// The request has failed.
    Failed(Failure),
}

/// A generated token.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TextToken {
    /// Its id.
    pub id: u32,
    /// The text that is certain now. It is empty while a character is incomplete or a stop string may have begun; later
    /// events have the text then.
    pub text: String,
    /// Its log probabilities, if the request asks for them.
    pub logprobs: Option<TokenLogprobs>,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Finished {
    /// Text that was held back until the end; often empty.
    pub text: String,
    /// Why it ended.
    pub reason: FinishReason,
    /// Counts of tokens.
    pub usage: Usage,
    /// The log probabilities of the stop id that ended it, if the request asks for those of tokens.
    pub logprobs: Option<TokenLogprobs>,
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model drew a stop id. It is not among the events.
    StopId(u32),
    /// The text had a stop string: the index in the request's list.
    StopString(usize),
    /// The text follows the grammar, which allows no more.
    Grammar,
    /// `max_tokens` tokens were generated, or the context is full.
    Length,
    /// The pool has no page for another token, although nothing else runs.
    OutOfPages,
    /// [`Engine::drain`](crate::Engine::drain) did not wait longer.
    Drained,
}

/// Counts of tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that the prefix cache had when the request first ran.
    pub cached_tokens: usize,
    /// Tokens generated, without a stop id.
    pub generated_tokens: usize,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// This request alone: for example its logits are NaN.
    #[error("{0}")]
    Request(String),
    /// The request's grammar: it needs more time or memory than its limits, or the tokenizer has no token that can
    /// follow.
    #[error("the grammar: {0}")]
    Grammar(String),
    /// The engine has failed, and with it all requests.
    #[error("the engine has failed: {0}")]
    Engine(String),
}
