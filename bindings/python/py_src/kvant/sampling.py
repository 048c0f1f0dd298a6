"""Parameters of a request, with the names of vLLM."""

import json as _json
import re as _re
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """The language that a text must follow. Exactly one must be given."""

    #: A JSON schema, as a dictionary or as text.
    json: dict[str, Any] | str | None = None
    #: Any JSON object.
    json_object: bool | None = None
    #: A regular expression that matches the whole text.
    regex: str | None = None
    #: One of these texts.
    choice: list[str] | None = None
    #: A context-free grammar in Lark syntax.
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"StructuredOutputsParams: exactly one must be given, got {', '.join(given) or 'none'}")

    def _source(self) -> tuple[str, str]:
        if self.json is not None:
            return "json", self.json if isinstance(self.json, str) else _json.dumps(self.json)
        if self.json_object:
            return "json_object", ""
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            if not self.choice or not all(isinstance(text, str) for text in self.choice):
                raise ValueError("StructuredOutputsParams: `choice` must have at least one text")
            return "regex", "|".join(f"(?:{_re.escape(text)})" for text in self.choice)
        return "grammar", self.grammar or ""


@dataclass(kw_only=True)
class SamplingParams:
    """How texts are sampled and where they end. Fields that are None have the model's values, from
    `generation_config.json`. Unknown fields raise `TypeError`."""

    #: Texts for each prompt.
    n: int = 1
    #: 0 selects the most probable token.
    temperature: float | None = None
    top_p: float | None = None
    #: 0 or -1 for all.
    top_k: int | None = None
    min_p: float | None = None
    #: Equal seeds and prompts give equal texts. None: another one for each text.
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    #: Added to the logits of tokens, by id.
    logit_bias: dict[int, float] | None = None
    #: Strings that end the text.
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    #: None: up to the end of the context.
    max_tokens: int | None = 16
    min_tokens: int = 0
    #: Log probabilities of each token, and of this number of most probable ones.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"SamplingParams: `n` must be at least 1, got {self.n}")

    def _fields(self) -> dict[str, Any]:
        """The values for the engine."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        if isinstance(self.stop, str):
            fields["stop"] = [self.stop]
        if self.logit_bias is not None:
            fields["logit_bias"] = [(int(token), float(bias)) for token, bias in self.logit_bias.items()]
        if self.structured_outputs is not None:
            fields["grammar"] = self.structured_outputs._source()
        return fields
