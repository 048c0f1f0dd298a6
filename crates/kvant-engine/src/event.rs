//! The events of a request.

use kvant_models::TokenLogprobs;

/// An event of a request, from [`Responses`](crate::Responses). The last one is [`Event::Finished`] or
/// [`Event::Failed`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// Log probabilities of prompt tokens since the previous event of this kind, if requested. The first token of a
    /// prompt has none, so the first event begins with the second token.
    Prompt(Vec<TokenLogprobs>),
    /// The requested embedding, not normalised: one number per element of a hidden state.
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
    /// The text that is final now. It is empty while a character is incomplete or a stop string may have begun; a later
    /// event then has the text.
    pub text: String,
    /// Its log probabilities, if requested.
    pub logprobs: Option<TokenLogprobs>,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Finished {
    /// Text that was held back until the end; often empty.
    pub text: String,
    /// The finish reason.
    pub reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
    /// The log probabilities of the stop id that ended the request, if requested.
    pub logprobs: Option<TokenLogprobs>,
}

/// The reason why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model sampled a stop id. No event reports that token.
    StopId(u32),
    /// The text contains a stop string, given by its index in the request's list.
    StopString(usize),
    /// The text is complete: its grammar allows no further token.
    Grammar,
    /// `max_tokens` tokens were generated, or the context is full.
    Length,
    /// The pool has no page for another token, although no other request runs.
    OutOfPages,
    /// [`Engine::drain`](crate::Engine::drain) reached its time limit.
    Drained,
}

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt found in the prefix cache when the request first ran.
    pub cached_tokens: usize,
    /// Tokens generated, without a stop id.
    pub generated_tokens: usize,
    /// Drafts that the model has sampled, too. A stop id and tokens after a stop string may be among them.
    pub accepted_drafts: usize,
    /// Drafts that differ from the tokens that the model has sampled, or follow such a draft.
    pub rejected_drafts: usize,
}

/// The reason why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// An error of this request alone, for example NaN logits.
    #[error("{0}")]
    Request(String),
    /// An error of the request's grammar: it exceeds its time or memory limit, or the tokenizer has no token that can
    /// follow.
    #[error("the grammar: {0}")]
    Grammar(String),
    /// The engine has failed, which ends all requests.
    #[error("the engine has failed: {0}")]
    Engine(String),
}
