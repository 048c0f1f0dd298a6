"""Servers of completions under load, by cheap clients: a process each, plain sockets, responses read as bytes.

Reading a streamed answer of hundreds of tokens a second is cheap, parsing it is expensive. A client looks for the first
event, keeps the end of the answer, and parses only the last events after the answer has arrived.
"""

import http.client
import json
import multiprocessing
import os
import re
import resource
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

# The end of an answer, which has its last events.
TAIL = 1 << 14


class Server:
    """A server on some of the processors, as a context manager."""

    def __init__(self, name, command, port, cpus=None):
        self.name, self.command, self.port, self.cpus = name, [str(word) for word in command], port, cpus

    def __enter__(self):
        limit = self.cpus and (lambda: os.sched_setaffinity(0, self.cpus))
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=limit)
        for _ in range(600):
            time.sleep(0.1)
            try:
                if self.ask("GET", "/health").status == 200:
                    return self
            except OSError:
                if self.process.poll() is not None:
                    break
        sys.exit(f"{self.name} does not start: {' '.join(self.command)}")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse()

    def token_times(self):
        """(seconds between tokens of all texts so far, their number), by kvant's own clock; zeros from other
        servers."""
        text = self.ask("GET", "/metrics").read().decode()
        values = (re.search(rf"^vllm:inter_token_latency_seconds_{name}{{.*}} (.*)$", text, re.M) for name in ("sum", "count"))
        return [float(value[1]) if value else 0.0 for value in values]


@dataclass
class Text:
    """The times of an answer in seconds, by the system's monotonic clock, which processes share."""

    start: float
    first: float
    last: float
    tokens: int
    # Mean time between two tokens, by the server's own clock; None if it does not report it.
    own: float | None

    def prompt_seconds(self):
        return self.first - self.start

    def token_seconds(self):
        return (self.last - self.first) / (self.tokens - 1)


def message(prompt, tokens):
    """The bytes of a request: greedy, streamed, and ignoring ends of text."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def events(tail):
    """The events at the end of an answer. The first one may be incomplete and is dropped."""
    for line in tail.split(b"\n"):
        if line.startswith(b"data: {"):
            try:
                yield json.loads(line[6:])
            except ValueError:
                pass


def ask(port, request, tokens):
    """Sends a request and reads the answer. Raises `OSError` or `ValueError` if it is not one of `tokens` tokens."""
    with socket.create_connection(("127.0.0.1", port), timeout=600) as stream:
        start, first, tail = time.monotonic(), None, b""
        stream.sendall(request)
        while data := stream.recv(1 << 16):
            now = time.monotonic()
            tail = (tail + data)[-TAIL:]
            if first is None:
                # The tail is still complete and may contain the end of the head.
                first = now if b"data: {" in tail else None
            else:
                last = now
    usage, own = {}, None
    for event in events(tail):
        usage = event.get("usage") or usage
        own = event.get("timings", {}).get("predicted_per_token_ms", own)
    if usage.get("completion_tokens") != tokens:
        raise ValueError(f"an answer of {tokens} tokens was expected, got {tail[-1000:]!r}")
    return Text(start, first, last, tokens, own and own / 1000)


def client(port, prompts, tokens, barrier, results, cpus):
    if cpus:
        os.sched_setaffinity(0, cpus)
    requests = [message(prompt, tokens) for prompt in prompts]
    try:
        # Measured before waiting for the others, which would count as work.
        barrier.wait(60)
        texts = [ask(port, request, tokens) for request in requests]
    except Exception as error:
        texts = repr(error)
    used = resource.getrusage(resource.RUSAGE_SELF)
    results.put((texts, used.ru_utime + used.ru_stime))


@dataclass
class Load:
    """The results of concurrent clients."""

    texts: list
    # Processor time of a client in seconds, including its start.
    busy: float

    def seconds(self):
        return max(text.last for text in self.texts) - min(text.start for text in self.texts)

    def rate(self):
        """Tokens a second of all clients, from the first request to the last token."""
        return sum(text.tokens for text in self.texts) / self.seconds()


def run(port, prompts, tokens, cpus=None):
    """Runs a client for each list of prompts, all started at once, on some of the processors. Raises `ValueError`."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(len(prompts)), context.Queue()
    arguments = [(port, own, tokens, barrier, results, cpus) for own in prompts]
    processes = [context.Process(target=client, args=each) for each in arguments]
    [process.start() for process in processes]
    got = [results.get(timeout=900) for _ in processes]
    [process.join() for process in processes]
    for texts, _ in got:
        if isinstance(texts, str):
            raise ValueError(texts)
    return Load([text for texts, _ in got for text in texts], max(busy for _, busy in got))
