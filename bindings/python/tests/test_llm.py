import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvant import LLM, SamplingParams, StructuredOutputsParams

SHIPPED = Path(__file__).parents[3] / "crates/kvant-cli/model"
PROMPTS = ["# Fearless Concurrency\n\n", "Returns the number of", "# Errors\n\nThis function"]
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def llm():
    return LLM(None, max_model_len=512)


def greedy(**values):
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, **values})


def test_texts_equal_those_of_the_command(llm):
    command = [sys.executable, "-m", "kvant", "generate", "--temperature", "0", "--max-tokens", "12", "--json"]
    done = subprocess.run([*command, "--prompt", PROMPTS[0]], capture_output=True, text=True, check=True)
    output = llm.generate(PROMPTS[0], greedy())[0]
    assert output.outputs[0].text == json.loads(done.stdout)["text"]
    assert output.prompt == PROMPTS[0] and output.finished
    assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == 12


def test_batches_and_streams_equal_single_texts(llm):
    alone = [llm.generate(prompt, greedy())[0].outputs[0].text for prompt in PROMPTS]
    assert [output.outputs[0].text for output in llm.generate(PROMPTS, greedy(), use_tqdm=False)] == alone
    assert ["".join(llm.stream(prompt, greedy())) for prompt in PROMPTS] == alone
    ids = llm.generate(PROMPTS[1], greedy())[0].prompt_token_ids
    for prompt in ids, {"prompt_token_ids": ids}, {"prompt": PROMPTS[1]}:
        assert llm.generate(prompt, greedy())[0].outputs[0].text == alone[1]
    assert llm.generate([]) == []


def test_long_texts(llm):
    params = SamplingParams(max_tokens=300, ignore_eos=True, seed=3)
    # More than the 256 events after which a request pauses until they are read.
    outputs = llm.generate([PROMPTS[0]] * 2, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [300, 300]


def test_several_texts_of_a_prompt(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20)
    first, second = (llm.generate(PROMPTS[0], params, use_tqdm=False)[0] for _ in range(2))
    texts = [output.text for output in first.outputs]
    assert len(set(texts)) == 3 and texts == [output.text for output in second.outputs]
    other = llm.generate(PROMPTS[0], SamplingParams(n=1, temperature=1.0, max_tokens=20))[0].outputs[0].text
    assert other not in texts


def test_ends_of_texts(llm):
    whole = llm.generate(PROMPTS[0], greedy(max_tokens=40))[0].outputs[0]
    word = whole.text.split()[4]
    cut = llm.generate(PROMPTS[0], greedy(max_tokens=40, stop=["@@", word]))[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index(word)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", word)
    kept = llm.generate(PROMPTS[0], greedy(max_tokens=40, stop=word, include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == whole.text[: whole.text.index(word) + len(word)]
    token = whole.token_ids[3]
    end = llm.generate(PROMPTS[0], greedy(stop_token_ids=[token]))[0].outputs[0]
    assert end.token_ids == whole.token_ids[: whole.token_ids.index(token)] and end.stop_reason == token


def test_log_probabilities(llm):
    output = llm.generate(PROMPTS[0], greedy(max_tokens=4, logprobs=3, prompt_logprobs=1))[0]
    completion = output.outputs[0]
    assert len(completion.logprobs) == 4
    for token, table in zip(completion.token_ids, completion.logprobs):
        assert table[token].rank == 1 and len(table) == 3
        assert table[token].logprob == max(entry.logprob for entry in table.values()) < 0
    assert output.prompt_logprobs[0] is None
    assert [ids in table for ids, table in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])]
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_structured_outputs(llm):
    def text(**kind):
        params = SamplingParams(max_tokens=200, seed=1, structured_outputs=StructuredOutputsParams(**kind))
        return llm.generate("A number: ", params)[0].outputs[0].text

    assert re.fullmatch("[0-9]{3}-[ab]", text(regex="[0-9]{3}-[ab]"))
    assert text(choice=["yes.", "no?"]) in ("yes.", "no?")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 23]}}, "required": ["n"], "additionalProperties": False}
    assert json.loads(text(json=schema))["n"] in (1, 23)
    assert text(grammar='start: "a" | "b"') in ("a", "b")
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputsParams(regex="a", choice=["b"])
    with pytest.raises(ValueError, match="grammar"):
        text(regex="(")


def test_chat(tmp_path):
    shutil.copytree(SHIPPED, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)
    llm = LLM(tmp_path / "model", max_model_len=256)
    conversation = [{"role": "user", "content": PROMPTS[0]}]
    output = llm.chat(conversation, greedy())[0]
    assert output.prompt == PROMPTS[0] + "\n" and output.outputs[0].text
    several = llm.chat([conversation, conversation], greedy(), use_tqdm=False)
    assert [other.outputs[0].text for other in several] == [output.outputs[0].text] * 2
    assert "".join(llm.stream(conversation, greedy())) == output.outputs[0].text


def test_errors(llm, tmp_path):
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)
    for values, text in [
        ({"temperature": -1}, "`temperature` must be finite and not negative, got -1"),
        ({"top_p": 2}, "`top_p` must be above 0, at most 1, got 2"),
        ({"top_k": -2}, "`top_k` must be at least 0, or -1 for all, got -2"),
        ({"max_tokens": "many"}, "`max_tokens`: "),
        ({"logprobs": 1000}, "`logprobs` must be"),
    ]:
        with pytest.raises((ValueError, OverflowError), match=re.escape(text)):
            llm.generate("a", SamplingParams(**values))
    with pytest.raises(ValueError, match="`prompt` must be at most"):
        llm.generate([[5] * 600])
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(ValueError, match="no such directory or file"):
        LLM(tmp_path / "nothing")
    with pytest.raises(ValueError, match="tq7"):
        LLM(None, kv="tq7")
    with pytest.raises(ValueError, match="--max-sequences"):
        LLM(None, max_num_seqs=0)
    with pytest.raises(ValueError, match="`sampling_params` must be one, or 2"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_other_threads_run_meanwhile(llm):
    counts, done = [], threading.Event()

    def count():
        ticks = 0
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)
        counts.append(ticks)

    thread = threading.Thread(target=count)
    thread.start()
    llm.generate(PROMPTS * 4, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    done.set()
    thread.join()
    assert counts[0] > 20


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_generation():
    code = (
        # Shells start background jobs with SIGINT ignored, and Python then installs no handler.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import kvant\n"
        "llm = kvant.LLM(None)\n"
        "print('ready', flush=True)\n"
        "params = kvant.SamplingParams(max_tokens=None, ignore_eos=True)\n"
        "while True:\n"
        "    llm.generate(['a'] * 8, params, use_tqdm=False)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    try:
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors and time.monotonic() - started < 10
