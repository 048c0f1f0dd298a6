"""guidellm and aiperf with a tokenizer from a file: their requests are answered, and their token counts equal the
server's."""

import glob
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile

from .serving import CALLS_TEMPLATE, ROOT, Server

NAME = "rustdoc-11m"
TOKENIZER = os.path.join(ROOT, "crates", "kvant-cli", "model")
REQUESTS, PROMPT, ANSWER = 4, 16, 8


def start(command, folder):
    """Runs a command with its caches in a folder."""
    env = {**os.environ, "HF_HOME": folder}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


def with_guidellm(url, folder):
    for form in ["/v1/chat/completions", "/v1/completions"]:
        report = os.path.join(folder, f"{form.count('/')}.json")
        options = {
            "backend": f"kind=openai_http,target={url},model={NAME},api_key=secret,request_format={form}",
            "profile": "kind=synchronous",
            "constraint": f"kind=max_requests,count={REQUESTS}",
            "tokenizer": f"kind=hf_auto,model={TOKENIZER}",
            "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
            "output": f"kind=json,path={report}",
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        start([sys.executable, "-m", "guidellm", "run", *flags, "--disable-console"], folder)
        with open(report) as file:
            done = json.load(file)["benchmarks"][0]["requests"]
        assert len(done["successful"]) == REQUESTS and not done["errored"], done["errored"]
        assert all(request["output_tokens"] == ANSWER for request in done["successful"])


def with_aiperf(url, folder):
    for streams in [["--streaming"], []]:
        command = [os.path.join(os.path.dirname(sys.executable), "aiperf"), "profile", "--model", NAME, "--url", url, "--api-key", "secret"]
        sizes = ["--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(ANSWER), "--request-count", str(REQUESTS)]
        kinds = ["--endpoint-type", "chat", "--tokenizer", TOKENIZER, "--concurrency", "2", "--ui", "none", *streams]
        artifacts = os.path.join(folder, f"aiperf{len(streams)}")
        start([sys.executable, *command, *sizes, *kinds, "--artifact-dir", artifacts], folder)
        [report] = glob.glob(os.path.join(artifacts, "**", "profile_export_aiperf.json"), recursive=True)
        with open(report) as file:
            done = json.load(file)
        assert done["request_count"]["avg"] == REQUESTS and "error_request_count" not in done, done


def run(kvant):
    with tempfile.TemporaryDirectory() as folder, Server(kvant, "--api-key", "secret", template=CALLS_TEMPLATE) as server:
        with_guidellm(server.url, folder)
        with_aiperf(server.url, folder)
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("guidellm", "aiperf")) + " run"
