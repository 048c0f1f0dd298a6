"""Results of `LLM`, with the names of vLLM."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """The log probability of a token. The most probable token has rank 1."""

    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    """A generated text."""

    #: Number of the text among those of its prompt.
    index: int
    text: str = ""
    #: With `LLM.chat`, the thoughts of a model that reasons; `text` is then its answer.
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    #: For each token, the log probabilities by id, if requested.
    logprobs: list[dict[int, Logprob]] | None = None
    #: "stop", "length", or None while the text is incomplete.
    finish_reason: str | None = None
    #: The stop string or stop token that ended the text.
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its texts."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    #: None for the first token, then the log probabilities of each by id, if requested.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    #: Tokens of the prompt that were found in the cache.
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finished() for output in self.outputs)
