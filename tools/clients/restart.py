"""A server that is restarted: first tokens of prompts whose pages are on disk, against those of new prompts.

SmolLM2-135M from PyPI. KVANT_RESTART_PREFIXES sets the number of prompts, of some 1000 tokens each."""

import os
import tempfile
import time

import released_models

from .serving import TEXT, Server
from .transfer import first_token

PREFIXES = int(os.environ.get("KVANT_RESTART_PREFIXES", "1000"))
# Bytes of a prompt.
LENGTH = 3600
# Maximum time to the first tokens after the restart, as a part of the time before.
MAX_PART = 0.10


def prompts():
    with open(TEXT) as file:
        text = file.read()
    step = (len(text) - LENGTH) // PREFIXES
    # The first page of each differs.
    return [f"Document {number}. {text[number * step :][:LENGTH]}" for number in range(PREFIXES)]


def serve(kvant, model, folder, all_prompts):
    """For each prompt the time of the first token and the text; the tokens of all prompts, and how many were cached."""
    options = ["--prefix-dir", folder, "--prefix-disk", "64GiB", "--memory", "1GiB", "--context", "2048"]
    with Server(kvant, *options, model=model) as server:
        answers, tokens, cached = [], 0, 0
        for prompt in all_prompts:
            started = time.monotonic()
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            first, text, prompt_tokens, from_cache = first_token(server, body)
            answers.append((first - started, text))
            tokens, cached = tokens + prompt_tokens, cached + from_cache
    return answers, tokens, cached


def run(kvant):
    try:
        model = released_models.fetch("smollm2")
    except released_models.Unavailable as error:
        return f"skipped: {error}"
    with tempfile.TemporaryDirectory() as folder:
        cold, tokens, _ = serve(kvant, model, folder, prompts())
        size = sum(entry.stat().st_size for entry in os.scandir(folder))
        warm, _, cached = serve(kvant, model, folder, prompts())
    assert [text for _, text in warm] == [text for _, text in cold], "texts differ after the restart"
    seconds = [sum(time for time, _ in answers) for answers in (cold, warm)]
    part = seconds[1] / seconds[0]
    summary = (
        f"{PREFIXES} prompts of {tokens / PREFIXES:.0f} tokens, {size / 2**30:.1f} GiB on disk; first tokens after "
        f"{seconds[0] / PREFIXES * 1000:.0f} ms, after the restart {seconds[1] / PREFIXES * 1000:.0f} ms "
        f"({part:.1%}), {cached / tokens:.1%} of tokens from disk"
    )
    assert cached > 0.9 * tokens and part <= MAX_PART, summary
    return summary
