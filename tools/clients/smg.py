"""SMG, SGLang's gateway, in front of two servers: answers, streams, cancelled requests, the choice of the server that
has a prefix, loads, a flush, and a killed server."""

import concurrent.futures
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time

from .serving import TEXT, Server

# Prompts, and requests for each of them.
PROMPTS, REPEATS = 8, 4
# Bytes of a prompt: several pages.
LENGTH = 1500


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Gateway:
    """`smg launch` in front of servers; a context manager."""

    def __init__(self, servers, *options):
        self.port = free_port()
        command = [os.path.join(os.path.dirname(sys.executable), "smg"), "launch", "--worker-urls"]
        command += [server.url for server in servers]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--prometheus-port", str(free_port())]
        command += ["--policy", "cache_aware", "--health-check-interval-secs", "1", "--health-failure-threshold", "2"]
        command += ["--load-monitor-interval", "1", "--disable-tokenizer-autoload", "--log-level", "warn", *options]
        self.command, self.workers = command, len(servers)

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines = []
        threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True).start()
        deadline = time.monotonic() + 60
        while not self.is_ready():
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.2)
        return self

    def is_ready(self):
        try:
            status, workers = self.request("/workers")
        except OSError:
            return False
        return status == 200 and sum(worker["is_healthy"] for worker in workers["workers"]) == self.workers

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def connect(self, path, body, timeout=120):
        """A response whose body is not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json"})
        return connection, connection.getresponse()

    def request(self, path, body=None):
        connection, response = self.connect(path, body)
        try:
            text = response.read().decode()
            return response.status, json.loads(text) if "json" in response.headers.get("content-type", "") else text
        finally:
            connection.close()

    def ok(self, path, body=None):
        status, answer = self.request(path, body)
        assert status == 200, (path, status, answer, "".join(self.lines[-20:]))
        return answer


def chat(content, **more):
    messages = [{"role": "user", "content": content}]
    return {"model": "rustdoc-11m", "messages": messages, "max_tokens": 12, "temperature": 0, "seed": 1, **more}


def prompts():
    """Prompts with different starts."""
    with open(TEXT) as file:
        text = file.read()
    return [text[index * LENGTH : (index + 1) * LENGTH] for index in range(PROMPTS)]


def answers(gateway, server):
    """Answers are those of the server, for every route, at once and as a stream."""
    whole = gateway.ok("/v1/chat/completions", chat("Vec"))
    text = whole["choices"][0]["message"]["content"]
    assert text == server.request("/v1/chat/completions", chat("Vec"))[1]["choices"][0]["message"]["content"]
    _, stream = gateway.connect("/v1/chat/completions", chat("Vec", stream=True))
    events = [line[6:] for line in stream.read().decode().splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"] for event in events]
    assert "".join(choices[0]["delta"].get("content") or "" for choices in deltas if choices) == text
    completion = {"model": "rustdoc-11m", "prompt": "# Vec", "max_tokens": 8, "temperature": 0}
    assert gateway.ok("/v1/completions", completion)["usage"]["completion_tokens"] == 8
    response = {"model": "rustdoc-11m", "input": "Vec", "max_output_tokens": 8, "temperature": 0}
    assert gateway.ok("/v1/responses", response)["usage"]["output_tokens"] == 8
    status, refused = gateway.request("/v1/chat/completions", chat("Vec", top_p=0))
    assert status == 400, refused


def cancels(gateway, servers):
    """A client that disconnects ends its request in the server."""
    before = sum(server.metrics()["request_success_total.abort"] for server in servers)
    for _ in range(4):
        connection, stream = gateway.connect("/v1/chat/completions", chat("Vec", stream=True, max_tokens=900, ignore_eos=True))
        assert stream.read(20)
        stream.close()
        connection.close()
    metrics = [server.settled() for server in servers]
    cancelled = sum(metric["request_success_total.abort"] for metric in metrics) - before
    assert cancelled == 4, cancelled


def stickiness(gateway, servers):
    """Repeated prompts reach the server that has their prefix. Returns the share of cached prompt tokens."""
    gateway.ok("/flush_cache", {})
    before = [server.metrics()["prompt_tokens_total"] for server in servers]
    asked = cached = 0
    for round in range(REPEATS):
        for prompt in prompts():
            usage = gateway.ok("/v1/chat/completions", chat(prompt, max_tokens=1))["usage"]
            if round > 0:
                asked += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
    assert all(server.metrics()["prompt_tokens_total"] > start for server, start in zip(servers, before)), "one server has done all"
    assert cached > 0.7 * asked, f"{cached} of {asked} tokens"
    # Cached prefixes are not load.
    for server in servers:
        assert server.request("/v1/loads")[1]["loads"][0]["token_usage"] == 0
    gateway.ok("/flush_cache", {})
    usage = gateway.ok("/v1/chat/completions", chat(prompts()[0], max_tokens=1))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    return cached / asked


def loads(gateway, servers):
    """SMG knows the load of every server."""
    deadline = time.monotonic() + 20
    while True:
        found = gateway.ok("/get_loads")["loads"]
        if len(found) == len(servers) and all(load["max_total_num_tokens"] > 0 for load in found):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


def killed(gateway, servers):
    """After a server was killed, every request is answered by the other one."""
    body = lambda prompt: chat(prompt, stream=True, max_tokens=2500, ignore_eos=True)
    with concurrent.futures.ThreadPoolExecutor(PROMPTS) as pool:
        streams = list(pool.map(lambda prompt: gateway.connect("/v1/chat/completions", body(prompt)), prompts()))
        assert all(pool.map(lambda stream: stream[1].read(20), streams))
    running = [server.metrics()["num_requests_running"] + server.metrics()["num_requests_waiting"] for server in servers]
    assert all(count > 0 for count in running), running
    victim, other = servers
    victim.process.kill()
    whole = broken = 0
    for connection, stream in streams:
        try:
            is_whole = '"finish_reason":"length"' in stream.read().decode()
        except (http.client.HTTPException, OSError):
            is_whole = False
        whole, broken = whole + is_whole, broken + (not is_whole)
        connection.close()
    # Streams of the other server are complete, those of the victim visibly not.
    assert (whole, broken) == (running[1], running[0]), (whole, broken, running)
    failed = 0
    for n in range(30):
        failed += gateway.request("/v1/chat/completions", chat(f"after {n}"))[0] != 200
    assert failed == 0, f"{failed} of 30 requests failed"
    other.settled()
    return whole, broken


def run(kvant):
    options = ["--max-sequences", "16", "--context", "4096"]
    with Server(kvant, *options) as one, Server(kvant, *options) as two:
        servers = [one, two]
        with Gateway(servers) as gateway:
            answers(gateway, one)
            cancels(gateway, servers)
            share = stickiness(gateway, servers)
            loads(gateway, servers)
            whole, broken = killed(gateway, servers)
    return f"{share:.0%} of repeated prompt tokens cached; a server killed: {whole} streams complete, {broken} broken"
