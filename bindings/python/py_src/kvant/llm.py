"""The engine: many texts at once on one device."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

from . import _kvant
from .outputs import CompletionOutput, Logprob, RequestOutput
from .sampling import SamplingParams

#: A text, token ids, or a dictionary with one of `prompt` and `prompt_token_ids`.
Prompt = str | Sequence[int] | dict[str, Any]
#: `{"role": ..., "content": ...}`.
Message = dict[str, Any]


class LLM:
    """A model, and the engine of `kvant serve`: batches, shared prefixes, grammars.

    `model` is a directory in the layout of Hugging Face or MLX, a GGUF file, or a name on the Hugging Face Hub; None is
    the small model that ships with kvant, which continues Rust documentation.

    `kv` is a cache type such as "tq4c", "f16:tq4" or "@FILE"; "auto" is bf16 on CUDA and f16 elsewhere. `device` is
    "auto", "cpu", "cuda", "cuda:N" or "metal". `memory` is the maximum of bytes for pages of the cache. Unless given,
    it suffices for `max_num_seqs` texts of `max_model_len` tokens, or is most of the memory that the model leaves.

    >>> from kvant import LLM, SamplingParams
    >>> llm = LLM(None, kv="tq4c", max_model_len=512)
    >>> outputs = llm.generate(["# Fearless Concurrency", "# Errors"], SamplingParams(temperature=0, max_tokens=8))
    >>> len(outputs[0].outputs[0].token_ids)
    8
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None,
        *,
        kv: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        memory: int | None = None,
        max_num_seqs: int = 16,
    ):
        options = ["--device", device, "--max-sequences", str(max_num_seqs)]
        options += [] if kv == "auto" else ["--kv", kv]
        options += [] if max_model_len is None else ["--context", str(max_model_len)]
        options += [] if memory is None else ["--memory", str(memory)]
        options += [] if model is None else ["--", os.fspath(model)]
        self._engine = _kvant.Engine(options)
        self._count = 0

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a text, including the prompt."""
        return self._engine.context

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues prompts, all at the same time. The results are in the order of the prompts."""
        prompts = [prompts] if _is_one(prompts) else list(prompts)
        return self._run([self._encoded(prompt) for prompt in prompts], sampling_params, use_tqdm, chat=False)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers conversations by the model's chat template. `use_tqdm` as in `generate`."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        render = (add_generation_prompt, continue_final_message, json.dumps(chat_template_kwargs or {}))
        prompts = [self._engine.render(json.dumps(messages), *render) for messages in conversations]
        return self._run(prompts, sampling_params, use_tqdm, chat=True)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """The text of a prompt or conversation, piece by piece. Dropping the iterator ends the request."""
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"stream: `n` must be 1, got {params.n}")
        is_chat = _is_conversation(prompt)
        text, ids = self._engine.render(json.dumps(prompt), True, False, "{}") if is_chat else self._encoded(prompt)
        request = self._submit(ids, params, 0, text if is_chat else None)
        return (event.text for event in request if event.text)

    def _encoded(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise ValueError(f"a prompt must have `prompt` or `prompt_token_ids`, got {sorted(prompt)}")
            ids = prompt.get("prompt_token_ids")
            return (prompt.get("prompt"), list(ids)) if ids is not None else self._encoded(prompt["prompt"])
        if isinstance(prompt, str):
            return prompt, self._engine.encode(prompt)
        return None, list(prompt)

    def _submit(self, ids: list[int], params: SamplingParams, index: int, chat: str | None) -> _kvant.Request:
        fields = params._fields()
        # The texts of a prompt differ.
        fields["seed"] = random.getrandbits(64) if params.seed is None else (params.seed + index) % 2**64
        return self._engine.submit(ids, fields, chat)

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        chat: bool,
    ) -> list[RequestOutput]:
        params = sampling_params or SamplingParams()
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(params) != len(prompts):
            raise ValueError(f"`sampling_params` must be one, or {len(prompts)}, got {len(params)}")
        outputs, waiting = [], []
        for (text, ids), of_prompt in zip(prompts, params):
            output = RequestOutput(str(self._count), text, ids, [CompletionOutput(index) for index in range(of_prompt.n)])
            self._count += 1
            outputs.append(output)
            waiting += [_Job(output, completion, of_prompt) for completion in output.outputs]
        waiting.reverse()
        progress = _Progress(len(waiting), use_tqdm)
        # Dropping a request ends it, also after Ctrl-C.
        running: list[tuple[_Job, _kvant.Request]] = []
        is_idle = False
        while waiting or running:
            while waiting and len(running) < self._engine.capacity:
                job = waiting.pop()
                prompt = job.output.prompt if chat else None
                ids = job.output.prompt_token_ids
                running.append((job, self._submit(ids, job.params, job.completion.index, prompt)))
            # A request pauses while its events are not read, so all are read; if none has any, the first is waited for.
            counts = [job.add(request.take(is_idle and index == 0)) for index, (job, request) in enumerate(running)]
            is_idle = not any(counts)
            still = [(job, request) for job, request in running if not job.completion.finished()]
            progress.add(len(running) - len(still))
            running = still
        progress.close()
        return outputs


class _Job:
    """A text that is generated, with its place among the results."""

    def __init__(self, output: RequestOutput, completion: CompletionOutput, params: SamplingParams):
        self.output, self.completion, self.params = output, completion, params
        if params.logprobs is not None:
            completion.logprobs = []
        self._has_prompt = params.prompt_logprobs is not None and completion.index == 0
        if self._has_prompt:
            output.prompt_logprobs = [None]

    def add(self, events: list[_kvant.RequestEvent]) -> int:
        """Adds events to the results, and returns their number."""
        output, completion = self.output, self.completion
        for event in events:
            completion.text += event.text
            completion.reasoning += event.reasoning
            if event.token is not None:
                completion.token_ids.append(event.token)
                if completion.logprobs is not None and event.logprobs is not None:
                    completion.logprobs.append(_logprobs(event.logprobs))
            if self._has_prompt:
                output.prompt_logprobs += [_logprobs(token) for token in event.prompt_logprobs]
            if event.finish_reason is not None:
                completion.finish_reason = event.finish_reason
                completion.stop_reason = _stop_reason(event, self.params)
                output.num_cached_tokens = max(output.num_cached_tokens, event.cached_tokens)
        return len(events)


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, (str, dict)) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _is_conversation(prompt: Any) -> bool:
    return not isinstance(prompt, (str, dict)) and len(prompt) > 0 and isinstance(prompt[0], dict)


def _stop_reason(event: _kvant.RequestEvent, params: SamplingParams) -> int | str | None:
    if event.stop_string is not None:
        return params.stop if isinstance(params.stop, str) else (params.stop or [])[event.stop_string]
    # As in vLLM: None for the model's own end of text.
    return event.stop_id if event.stop_id in (params.stop_token_ids or []) else None


def _logprobs(token: tuple[int, float, int, list[tuple[int, float]]]) -> dict[int, Logprob]:
    identifier, logprob, larger, top = token
    table = {other: Logprob(value, rank) for rank, (other, value) in enumerate(top, start=1)}
    table.setdefault(identifier, Logprob(logprob, larger + 1))
    return table


class _Progress:
    """A bar, if tqdm is installed."""

    def __init__(self, total: int, is_wanted: bool):
        self._bar = None
        if is_wanted and total > 1:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, unit="text", dynamic_ncols=True)

    def add(self, count: int) -> None:
        if self._bar is not None and count:
            self._bar.update(count)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
