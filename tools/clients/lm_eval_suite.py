"""lm-eval's local-completions with the server's tokenizer: its log likelihoods equal `kvant eval`'s."""

import json
import logging
import os
import subprocess
import tempfile

# Silences its progress bars and notes.
os.environ["TQDM_DISABLE"] = "1"
logging.disable(logging.WARNING)

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from .serving import TEXT, Server

# Tokens of a window: the context, and the predicted tokens after it.
WINDOW = 512
# Maximum mean difference of a token's log likelihood.
BOUND = 1e-3


def request(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def score(kvant, ids, window):
    """The sum of the log likelihoods of all tokens except the first of each window, by `kvant eval`."""
    if len(ids) < 2:
        return 0.0
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(map(str, ids)))
        file.flush()
        command = [kvant, "eval", "--tokens", file.name, "--kv", "f16", "--json", "--window-tokens", str(window)]
        output = subprocess.run(command, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    scores = json.loads(output.stdout)
    return -scores["nats_per_token"] * scores["tokens"]


def rolled(kvant, ids, step):
    """The sum over windows of `step` predicted tokens, each after the last token of the previous window. The last
    window is
    filled with preceding tokens, as in lm-eval."""
    whole = (len(ids) - 1) // step
    sum_ = score(kvant, [id for index in range(whole) for id in ids[index * step : (index + 1) * step + 1]], step + 1)
    rest = ids[whole * step + 1 :]
    if rest:
        last = ids[max(0, len(ids) - step - 1) :]
        sum_ += score(kvant, last, len(last)) - score(kvant, last[: -len(rest)], len(last))
    return sum_


def run(kvant):
    with open(TEXT) as file:
        documents = [document.strip("\n") for document in file.read().split("<|doc|>\n")]
    worst = 0.0
    with Server(kvant) as server:
        model = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model="rustdoc-11m",
            max_length=WINDOW,
            num_concurrent=2,
            batch_size=2,
        )
        assert model.tokenizer_backend == "remote", "lm-eval does not use the tokenizer of the server"

        def ids_of(text):
            return [model.prefix_token_id, *model.tok_encode(text)]

        def compare(got, wanted, tokens):
            nonlocal worst
            worst = max(worst, abs(got - wanted) / tokens)
            assert worst < BOUND, f"lm-eval: {got}, kvant eval: {wanted}, of {tokens} tokens"

        # Each text without a context, and after another text.
        for text in documents[:4]:
            first, text = text[:200], text[:400]
            pairs = [request("loglikelihood", "", text), request("loglikelihood", first + "\n\n", text)]
            (alone, _), (after, _) = model.loglikelihood(pairs, disable_tqdm=True)
            compare(alone, score(kvant, ids_of(text), WINDOW), len(ids_of(text)))
            ids = model.tok_encode(first + "\n\n" + text)
            context = ids[: len(ids) - len(model._encode_pair(first + "\n\n", text)[1])]
            wanted = score(kvant, ids, len(ids)) - score(kvant, context, len(ids))
            compare(after, wanted, len(ids) - len(context))
        # Long texts in windows.
        for text in documents[:3]:
            text = text[:3000]
            got = model.loglikelihood_rolling([request("loglikelihood_rolling", text)], disable_tqdm=True)[0]
            compare(got, rolled(kvant, ids_of(text), model.max_length - 1), len(ids_of(text)))
        # The model's own greedy continuation is its most probable text.
        written = model.generate_until([request("generate_until", "# Vec", {"max_gen_toks": 20, "until": ["\n\n\n"]})])[0]
        (_, greedy), = model.loglikelihood([request("loglikelihood", "# Vec", written)], disable_tqdm=True)
        assert greedy, written
    return f"log likelihoods differ by at most {worst:.1e} a token"
