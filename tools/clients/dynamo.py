"""NVIDIA Dynamo with its KV-aware router, its sidecars for vLLM, and file discovery, in front of two servers: answers,
cancelled requests, the choice of the server that has a prefix, streams that move when their server is killed or drained,
and prompts that one server computes for the other."""

import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

from .serving import ROOT, TEMPLATE, Server
from .smg import Gateway, chat, free_port, prompts

MODEL = os.path.join(ROOT, "crates", "kvant-cli", "model")
# Prompts, and requests for each of them.
REPEATS = 4
# Streams at the time of a failure.
STREAMS = 6
# Equal prompts have equal texts on all servers.
OPTIONS = ["--name", "rustdoc-11m", "--max-sequences", "16", "--context", "4096", "--batch-invariant"]


class Process:
    """A process whose output is kept; a context manager."""

    def __init__(self, module, arguments, env):
        self.command = [sys.executable, "-m", module, *arguments]
        self.env = {**os.environ, **env}

    def __enter__(self):
        self.process = subprocess.Popen(self.command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines = []
        threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


class Node:
    """A server and its sidecar, as in one pod; a context manager."""

    def __init__(self, kvant, fleet, *sidecar):
        grpc, events, pages = (free_port() for _ in range(3))
        options = ["--grpc", str(grpc), "--kv-events", f"tcp://127.0.0.1:{events}"]
        options += ["--kv-transfer", f"127.0.0.1:{pages}", "--kv-peer", "127.0.0.1"]
        self.template = os.path.join(fleet.directory, "template.jinja")
        with open(self.template, "w") as file:
            # Without reasoning, for which the server would show the names of special tokens.
            file.write(TEMPLATE.split("{% if enable_thinking")[0])
        self.server = Server(kvant, *OPTIONS, *options, "--chat-template", self.template, "--drain", "0", model=MODEL)
        arguments = ["--grpc-endpoint", f"127.0.0.1:{grpc}", "--custom-jinja-template", self.template, *sidecar]
        self.sidecar = Process("dynamo.vllm.sidecar", arguments, fleet.env)

    def __enter__(self):
        self.server.__enter__()
        self.sidecar.__enter__()
        return self

    def __exit__(self, *_):
        self.sidecar.__exit__()
        self.kill()

    def kill(self):
        """Ends both processes, as the end of a pod does."""
        self.sidecar.process.kill()
        self.server.process.kill()
        self.server.process.wait()


class Fleet(Gateway):
    """Dynamo's frontend, and the directory of its discovery; a context manager."""

    def __init__(self, directory, *options):
        self.directory, self.port = directory, free_port()
        planes = {"DYN_DISCOVERY_BACKEND": "file", "DYN_EVENT_PLANE": "zmq", "DYN_REQUEST_PLANE": "tcp"}
        self.env = {**planes, "DYN_FILE_KV": os.path.join(directory, "discovery"), "HF_HUB_OFFLINE": "1", "HOME": directory}
        os.makedirs(self.env["DYN_FILE_KV"])
        arguments = ["--router-mode", "kv", "--http-host", "127.0.0.1", "--http-port", str(self.port)]
        self.frontend = Process("dynamo.frontend", [*arguments, "--migration-limit", "3", *options], self.env)

    def __enter__(self):
        self.frontend.__enter__()
        self.lines = self.frontend.lines
        return self

    def __exit__(self, *_):
        self.frontend.__exit__()

    def wait(self, nodes):
        """Waits until the frontend serves the model with all nodes."""
        deadline = time.monotonic() + 120
        while True:
            logs = re.sub("\x1b\\[[0-9;]*m", "", "".join(self.lines))
            is_ready = f"members={nodes}" in logs or logs.count("Committed discovered model group") >= nodes
            try:
                if is_ready and self.request("/v1/models")[1]["data"]:
                    break
            except OSError:
                pass
            assert self.frontend.process.poll() is None and time.monotonic() < deadline, logs[-3000:]
            time.sleep(0.2)
        # The router subscribes to the events of all nodes.
        time.sleep(2)


def answers(fleet, server):
    """Answers are those of the server, at once and as a stream."""
    whole = fleet.ok("/v1/chat/completions", chat("Vec"))["choices"][0]["message"]["content"]
    assert whole == server.request("/v1/chat/completions", chat("Vec"))[1]["choices"][0]["message"]["content"]
    assert read(fleet.connect("/v1/chat/completions", chat("Vec", stream=True)))[0] == whole
    # A context that is too short is the client's error.
    status, refused = fleet.request("/v1/chat/completions", chat("word " * 6000))
    assert status == 400, (status, refused)


def read(opened):
    """The text of a stream, and its finish reason."""
    connection, stream = opened
    text, finish = "", None
    for line in stream.read().decode().splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            for choice in json.loads(line[6:]).get("choices") or []:
                text += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
    connection.close()
    return text, finish


def cancels(fleet, servers):
    """A client that disconnects ends its request in the server."""
    body = chat("Vec", stream=True, max_tokens=3000, ignore_eos=True)
    for _ in range(4):
        connection, stream = fleet.connect("/v1/chat/completions", body)
        assert stream.read(20)
        stream.close()
        connection.close()
    cancelled = sum(server.settled()["request_success_total.abort"] for server in servers)
    assert cancelled == 4, cancelled


def stickiness(fleet, servers):
    """Repeated prompts reach the server that has their prefix. Returns the share of cached prompt tokens."""
    counts = lambda: [[server.metrics()[f"prefix_cache_{name}_total"] for name in ("queries", "hits")] for server in servers]
    for prompt in prompts():
        fleet.ok("/v1/chat/completions", chat(prompt, max_tokens=1))
    # The router learns of the pages by events.
    time.sleep(1)
    before = counts()
    for _ in range(REPEATS - 1):
        for prompt in prompts():
            fleet.ok("/v1/chat/completions", chat(prompt, max_tokens=1))
    after = counts()
    asked, cached = (sum(new[index] - old[index] for old, new in zip(before, after)) for index in (0, 1))
    assert all(new[0] > old[0] for old, new in zip(before, after)), "one server has done all"
    assert cached > 0.7 * asked, f"{cached} of {asked} tokens"
    return cached / asked


def migrated(fleet, nodes, end, subject):
    """Streams whose server ends continue on the other one with the same text. Returns how many moved."""
    body = lambda n: chat(f"{subject} {n}", max_tokens=1500, ignore_eos=True)
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        opened = [fleet.connect("/v1/chat/completions", {**body(n), "stream": True}) for n in range(STREAMS)]
        # All have begun, and none is near its end.
        assert all(pool.map(lambda stream: stream[1].peek(1), opened))
        victim, other = sorted(nodes, key=lambda node: -node.server.metrics()["num_requests_running"])
        moved = int(victim.server.metrics()["num_requests_running"])
        assert moved > 0, "no stream runs"
        end(victim)
        texts = list(pool.map(read, opened))
    for n, (text, finish) in enumerate(texts):
        want = other.server.request("/v1/chat/completions", body(n))[1]["choices"][0]["message"]["content"]
        assert (finish, text) == ("length", want), (n, finish, len(text), len(want), "".join(fleet.lines[-5:]))
    failed = sum(fleet.request("/v1/chat/completions", chat(f"after {n}"))[0] != 200 for n in range(20))
    assert failed == 0, f"{failed} of 20 requests failed"
    other.server.settled()
    return moved


def divided(kvant, directory):
    """One server computes prompts, the other continues them: the text of one server. Returns the fetched share of prompts
    of several pages."""
    with Fleet(directory, "--enforce-disagg") as fleet:
        with Node(kvant, fleet, "--disaggregation-mode", "prefill") as first:
            with Node(kvant, fleet, "--disaggregation-mode", "decode") as second:
                fleet.wait(2)
                assert fleet.ok("/v1/chat/completions", chat("Vec"))["usage"]["completion_tokens"] == 12
                texts = [fleet.ok("/v1/chat/completions", chat(prompt))["choices"][0]["message"]["content"] for prompt in prompts()]
                computed, continued = first.server.metrics(), second.server.metrics()
                share = continued["prefix_cache_hits_total"] / continued["prefix_cache_queries_total"]
                assert computed["prompt_tokens_total"] > 0 and share > 0.7, (computed["prompt_tokens_total"], share)
    with Server(kvant, *OPTIONS) as alone:
        for prompt, text in zip(prompts(), texts):
            want = alone.request("/v1/chat/completions", chat(prompt))[1]["choices"][0]["message"]["content"]
            assert text == want, (text, want)
    return share


def drain(node):
    """SIGTERM for the server, whose streams then move."""
    node.server.stop()
    node.kill()


def run(kvant):
    with tempfile.TemporaryDirectory() as directory:
        moved = []
        for number, end in enumerate([Node.kill, drain]):
            place = os.path.join(directory, str(number))
            os.makedirs(place)
            with Fleet(place) as fleet, Node(kvant, fleet) as one, Node(kvant, fleet) as two:
                fleet.wait(2)
                servers = [one.server, two.server]
                if number == 0:
                    answers(fleet, one.server)
                    cancels(fleet, servers)
                    share = stickiness(fleet, servers)
                moved.append(migrated(fleet, [one, two], end, "Vec"))
        place = os.path.join(directory, "divided")
        os.makedirs(place)
        fetched = divided(kvant, place)
    return (
        f"{share:.0%} of repeated prompt tokens cached; {moved[0]} streams of a killed server and {moved[1]} of a drained one "
        f"continued with equal texts; {fetched:.0%} of prompts computed by the other server"
    )
