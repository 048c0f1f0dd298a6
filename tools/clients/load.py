"""A mixed load with disconnecting clients. Afterwards the server uses the memory of an idle server plus its cached
prefixes.

KVANT_LOAD_SECONDS sets the duration, KVANT_LOAD_MODEL another model than the shipped one."""

import json
import os
import random
import socket
import threading
import time

from .faults import reset
from .serving import Server

CLIENTS = 32
SECONDS = float(os.environ.get("KVANT_LOAD_SECONDS", "120"))
MODEL = os.environ.get("KVANT_LOAD_MODEL")
# Duration in seconds, also suitable for busy machines.
PATIENCE = 900
# Fractions: abandoned requests, and answers that are read slowly.
VANISHING, SLOW = 0.25, 0.02
WORDS = "Vec struct trait impl Option Result match while String async".split()
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["struct", "enum"]}, "lines": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["kind", "lines"],
    "additionalProperties": False,
}
FUNCTION = {"name": "count", "description": "Counts.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]


def requests(draw):
    """The kinds of requests: a path, a body, and the expected status."""
    prompt = " ".join(draw.choices(WORDS, k=draw.choice([2, 20, 200])))
    messages = [{"role": "user", "content": prompt}]
    length = draw.choice([1, 16, 64])
    json_schema = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}
    chat = {"messages": messages, "max_tokens": length}
    return [
        ("/v1/completions", {"prompt": prompt, "max_tokens": length, "n": draw.choice([1, 1, 2])}, 200),
        ("/v1/chat/completions", chat, 200),
        ("/v1/chat/completions", {**chat, "tools": TOOLS, "tool_choice": "required"}, 200),
        ("/v1/chat/completions", {**chat, "response_format": json_schema}, 200),
        # Conversations that the server keeps also use memory; separate tests cover their limit.
        ("/v1/responses", {"input": prompt, "max_output_tokens": length, "store": draw.random() < 0.1}, 200),
        ("/v1/messages", {"messages": messages, "max_tokens": length}, 200),
        ("/tokenize", {"content": prompt}, 200),
        ("/v1/chat/completions", {**chat, "unknown": 1}, 400),
        ("/v1/completions", {"prompt": "word " * 200_000}, 400),
    ]


class Clients:
    """Threads that send requests until a deadline."""

    def __init__(self, server, deadline):
        self.server, self.deadline = server, deadline
        self.answered = self.vanished = 0
        self.failures = []

    def run(self, seed):
        draw = random.Random(seed)
        try:
            connection = self.server.connect(PATIENCE)
            while time.monotonic() < self.deadline:
                connection = self.one(draw, connection)
        except Exception as error:
            self.failures.append(error)

    def one(self, draw, connection):
        """Sends a request, and returns the connection for the next one."""
        path, body, status = draw.choice(requests(draw))
        streams = status == 200 and path != "/tokenize" and draw.random() < 0.5
        body = {**body, "stream": True} if streams else body
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        if draw.random() < VANISHING:
            self.vanish(draw, connection.sock)
            return self.server.connect(PATIENCE)
        response = connection.getresponse()
        if streams and draw.random() < SLOW:
            response.read(1)
            time.sleep(2)
        text = response.read()
        assert response.status == status, (path, response.status, text[:300])
        end = {"/v1/messages": b"message_stop", "/v1/responses": b"response."}.get(path, b"[DONE]")
        assert not streams or end in text[text.rfind(b"data: ") :], (path, text[-300:])
        self.answered += 1
        return connection

    def vanish(self, draw, stream):
        """Disconnects while the request waits, or after a part of its answer."""
        time.sleep(draw.random() * draw.choice([0.01, 0.5]))
        if draw.random() < 0.5:
            stream.settimeout(draw.random())
            try:
                stream.recv(draw.choice([1, 100, 10_000]))
            except TimeoutError:
                pass
        reset(stream) if draw.random() < 0.5 else stream.shutdown(socket.SHUT_RDWR)
        stream.close()
        self.vanished += 1


def idle(server):
    """The resident bytes of an idle server, and the bytes of its cached prefixes."""
    metrics = server.settled()
    # The server returns memory to the system when it is idle.
    time.sleep(3)
    return server.memory(), metrics["kv_cache_used_bytes"]


def under_load(server, seconds, first_seed):
    """The clients after a period of load, and the maximum resident memory."""
    clients = Clients(server, time.monotonic() + seconds)
    threads = [threading.Thread(target=clients.run, args=[first_seed + seed]) for seed in range(CLIENTS)]
    [thread.start() for thread in threads]
    peak = 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(seconds / 60)
        peak = max(peak, server.memory())
    assert not clients.failures, clients.failures[:3]
    return clients, peak


def run(kvant):
    with Server(kvant, "--max-sequences", "16", "--memory", "96MiB", model=MODEL) as server:
        fresh, _ = idle(server)
        # A first burst allocates the memory that the server needs only once: buffers of full steps, heaps of threads,
        # tables of grammars.
        under_load(server, min(20, SECONDS / 4), 1000)
        before, cached_before = idle(server)
        clients, peak = under_load(server, SECONDS, 0)
        after, cached = idle(server)
        tokens = server.metrics()["generation_tokens_total"] / SECONDS
    mib = [f"{bytes / 2**20:.1f}" for bytes in (fresh, before, cached_before, peak, after, cached)]
    summary = (
        f"{clients.answered} answers and {clients.vanished} vanished clients in {SECONDS:.0f} s, {tokens:.0f} tokens/s; resident MiB: "
        f"{mib[0]} at first, {mib[1]} after a burst with {mib[2]} of prefixes, at most {mib[3]}, {mib[4]} in the end with {mib[5]} of prefixes"
    )
    limit = (before - cached_before + cached) * 1.05
    assert after < limit, f"memory stays, more than {limit / 2**20:.1f} MiB: {summary}"
    return f"{summary}; no page of a request is left"
