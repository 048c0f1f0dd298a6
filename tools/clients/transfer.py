"""Prompts that one server computes and another continues, over a slow link: the time from the end of the prompt to the
first token of the other server, if pages travel afterwards and if they travel while the prompt is computed.

KVANT_TRANSFER_RATE sets the link's bytes per second."""

import concurrent.futures
import json
import os
import secrets
import socket
import statistics
import threading
import time

from .serving import TEXT, Server
from .smg import free_port

RATE = float(os.environ.get("KVANT_TRANSFER_RATE", str(8 << 20)))
ROUNDS = 3
# Bytes of a prompt: some thousand tokens.
LENGTH = 11000
MODEL_OPTIONS = ["--context", "8192", "--max-sequences", "2", "--batch-invariant"]


class Link:
    """Passes connections on to a port, with a limit on the bytes per second towards the receiver."""

    def __init__(self, port):
        self.to, self.bytes = port, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            receiver, _ = self.listener.accept()
            sender = socket.create_connection(("127.0.0.1", self.to))
            threading.Thread(target=self.copy, args=[receiver, sender, None], daemon=True).start()
            threading.Thread(target=self.copy, args=[sender, receiver, RATE], daemon=True).start()

    def copy(self, source, sink, rate):
        while data := source.recv(16384):
            sink.sendall(data)
            if rate:
                self.bytes += len(data)
                time.sleep(len(data) / rate)
        sink.shutdown(socket.SHUT_WR)


def first_token(server, body):
    """The time of the first text of a stream, the text, the tokens of the prompt, and how many of them were cached."""
    connection = server.connect()
    usage = {"include_usage": True}
    data = json.dumps({**body, "stream": True, "stream_options": usage})
    connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
    first, text, tokens, cached = None, "", 0, 0
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                if choice["text"]:
                    first = first or time.monotonic()
                    text += choice["text"]
            if chunk.get("usage"):
                tokens = chunk["usage"]["prompt_tokens"]
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    connection.close()
    return first, text, tokens, cached


def prefill(server, prompt, **params):
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": {"do_remote_decode": True, **params}}
    status, answer = server.request("/v1/completions", body)
    assert status == 200, answer
    return time.monotonic(), answer["kv_transfer_params"]


def after(first, second, link, body):
    """Pages travel when the prompt is computed. Returns the time to the first token, and its stream."""
    end, params = prefill(first, body["prompt"])
    streamed = first_token(second, {**body, "kv_transfer_params": {**params, "remote_port": link.port}})
    return streamed[0] - end, streamed


def meanwhile(first, second, link, body):
    """Both servers are called at once. Returns the time to the first token, and its stream."""
    token = secrets.token_hex(32)
    source = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": link.port, "remote_token": token}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        decoding = pool.submit(first_token, second, {**body, "kv_transfer_params": source})
        end, _ = pool.submit(prefill, first, body["prompt"], remote_token=token).result()
        streamed = decoding.result()
    return streamed[0] - end, streamed


def run(kvant):
    with open(TEXT) as file:
        text = file.read()
    port = free_port()
    pages = ["--kv-transfer", f"127.0.0.1:{port}", "--kv-peer", "127.0.0.1"]
    other = ["--kv-transfer", f"127.0.0.1:{free_port()}", "--kv-peer", "127.0.0.1"]
    times, moved = {after: [], meanwhile: []}, {}
    with Server(kvant, *MODEL_OPTIONS, *pages) as first, Server(kvant, *MODEL_OPTIONS, *other) as second:
        for round in range(ROUNDS):
            for way in times:
                start = (2 * round + (way is after)) * LENGTH
                body = {"prompt": text[start : start + LENGTH], "max_tokens": 8, "temperature": 0}
                link = Link(port)
                seconds, (_, got, _, cached) = way(first, second, link, body)
                times[way].append(seconds)
                moved[way] = link.bytes
                # The text of one server, which has the prompt now.
                want = first.request("/v1/completions", body)[1]
                assert got == want["choices"][0]["text"], (got, want)
                assert cached >= want["usage"]["prompt_tokens"] - 65, (cached, want["usage"])
    late, early = (statistics.median(times[way]) for way in (after, meanwhile))
    assert early < 0.6 * late, f"{early:.2f} s, and {late:.2f} s if pages travel afterwards"
    return (
        f"first token {1000 * early:.0f} ms after the prompt, {1000 * late:.0f} ms if pages travel afterwards: "
        f"{moved[after] / 2**20:.1f} MiB at {RATE / 2**20:.0f} MiB/s take {1000 * moved[after] / RATE:.0f} ms"
    )
