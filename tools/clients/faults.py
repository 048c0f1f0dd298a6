"""Clients that disconnect, stop reading or send nothing, wrong hosts, deep JSON, and a shutdown under load."""

import http.client
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import threading
import time

from .serving import Server

# The thread limit does not apply to root: a limited server runs as nobody.
UNPRIVILEGED = 65534 if os.geteuid() == 0 else None
# Number of disconnecting clients, and of concurrent ones.
VANISHING, AT_ONCE = 500, 40


def raw(server, path, body):
    """A connection that has sent a request."""
    data = json.dumps(body).encode()
    stream = socket.create_connection((server.host, server.port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nhost: {server.host}\r\ncontent-type: application/json\r\n"
    stream.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return stream


def reset(stream):
    """Closes a connection without a shutdown."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


def vanish(server):
    """Clients that disconnect at random moments: while they send, wait, or read."""
    draw = random.Random(1)
    words = "Vec struct trait impl Option Result match while String async".split()

    def client(seed):
        draw = random.Random(seed)
        prompt = " ".join(draw.choices(words, k=draw.choice([3, 30, 300])))
        body = {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "stream": draw.random() < 0.7, "n": draw.choice([1, 1, 3])}
        stream = raw(server, "/v1/completions", body)
        time.sleep(draw.random() * 0.5)
        if draw.random() < 0.5:
            stream.settimeout(draw.random())
            try:
                stream.recv(draw.choice([1, 100, 10_000]))
            except TimeoutError:
                pass
        reset(stream) if draw.random() < 0.5 else stream.close()

    seeds = [draw.random() for _ in range(VANISHING)]
    for first in range(0, VANISHING, AT_ONCE):
        clients = [threading.Thread(target=client, args=[seed]) for seed in seeds[first : first + AT_ONCE]]
        [thread.start() for thread in clients]
        [thread.join() for thread in clients]
    metrics = server.settled()
    assert metrics["request_success_total.error"] == 0
    assert metrics["request_success_total.abort"] > VANISHING / 4, metrics
    return f"{VANISHING} clients vanished"


def stall(server):
    """A client that does not read pauses only itself; others are served."""
    body = {"prompt": "# Vec", "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 100, "n": 4}
    stalled = raw(server, "/v1/completions", body)
    status, answer = server.request("/v1/completions", {"prompt": "# Vec", "max_tokens": 5, "ignore_eos": True})
    assert status == 200 and answer["usage"]["completion_tokens"] == 5
    reset(stalled)
    server.settled()


def refuse(server):
    """Requests that are rejected without side effects."""
    for body in ['{"prompt": ' + "[" * 5000 + "]" * 5000 + "}", '{"prompt": "a"', "[" * 100_000, '{"a":' * 3000]:
        connection = server.connect()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert connection.getresponse().status == 400
    connection = server.connect()
    connection.request("GET", "/", headers={"host": "evil.example"})
    assert connection.getresponse().status == 403
    status, _ = server.request("/v1/completions", {"prompt": "x" * (9 << 20)})
    assert status == 413
    status, answer = server.request("/v1/completions", {"prompt": [5] * 9000})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer


def terminate(kvant):
    """SIGTERM under load: an answer that has begun is completed; a request without one gets an error."""
    with Server(kvant, "--max-sequences", "8") as server:
        outcomes, lock = [], threading.Lock()

        def client(index):
            body = {"prompt": f"# {index}", "max_tokens": 60, "ignore_eos": True, "stream": index % 2 == 0}
            while True:
                try:
                    connection = server.connect()
                    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
                    response = connection.getresponse()
                except (OSError, http.client.HTTPException):
                    # No response: the server no longer listens.
                    return
                text = response.read().decode()
                if response.status == 200:
                    is_whole = text.endswith("[DONE]\n\n") if body["stream"] else json.loads(text)["usage"]["completion_tokens"] == 60
                else:
                    is_whole = response.status == 503 and "error" in json.loads(text)
                with lock:
                    outcomes.append((response.status, is_whole))
                if response.status != 200:
                    return

        clients = [threading.Thread(target=client, args=[index]) for index in range(24)]
        [thread.start() for thread in clients]
        while len(outcomes) < 30:
            time.sleep(0.01)
        assert server.stop() == 0, "a drain"
        [thread.join(60) for thread in clients]
    assert all(is_whole for _, is_whole in outcomes), outcomes
    received = sum(status == 200 for status, _ in outcomes)
    finished = sum("finished" in line and "length" in line for line in server.lines)
    assert received == finished, f"{received} of {finished} finished answers arrived"
    return f"all {finished} answers that were finished before and during a drain arrived"


def limit_threads(server, limit):
    """Limits the threads of the server's user; runs as that user."""
    subprocess.run(["prlimit", "--pid", str(server.process.pid), f"--nproc={limit}"], user=UNPRIVILEGED, check=True)


def starve(kvant):
    """A system that refuses new threads: chats and grammars get 503, other requests are served, and all are once
    threads are available."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}
    chat = {"messages": [{"role": "user", "content": "Vec"}], "max_tokens": 60}
    forced = {**chat, "tools": [tool], "tool_choice": "required", "reasoning_effort": "none"}
    with Server(kvant, user=UNPRIVILEGED) as server:
        limit_threads(server, "1:")
        for body in [chat, forced, chat]:
            status, answer = server.request("/v1/chat/completions", body, timeout=20)
            assert status == 503 and "cannot start a thread" in answer["error"]["message"], (status, answer)
        assert server.request("/health")[0] == 200
        limit_threads(server, "4096:")
        for body in [chat, forced]:
            status, answer = server.request("/v1/chat/completions", body)
            assert status == 200, answer
    return "without threads 503"


def run(kvant):
    with Server(kvant, "--max-sequences", "8") as server:
        vanished = vanish(server)
        stall(server)
        refuse(server)
    starved = starve(kvant) if shutil.which("prlimit") else "threads cannot be limited"
    return f"{vanished}; {terminate(kvant)}; {starved}"
