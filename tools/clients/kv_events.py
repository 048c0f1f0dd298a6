"""KV events of `kvant serve --kv-events`, read by vLLM's event classes and by Dynamo's indexer.

The events are replayed into a model of the cache: at every moment the server finds exactly the prefixes that the model
has.
"""

import ast
import json
import subprocess
import sys
import time
import urllib.request
from typing import Any

import msgspec
import zmq

from . import wheel_file
from .serving import TEXT, Server
from .smg import free_port

VLLM = "0.33.0"
# Positions per page.
PAGE = 64


def event_classes():
    """vLLM's event classes, without the rest of its module, which needs all of vLLM."""
    source = ast.parse(wheel_file.read("vllm", VLLM, "vllm/distributed/kv_events.py"))
    names = ["EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch"]
    classes = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name in names]
    assert [node.name for node in classes] == names, names
    # As vllm/v1/core/kv_cache_utils.py declares it. The module's name resolves the annotations.
    space = {"msgspec": msgspec, "Any": Any, "ExternalBlockHash": bytes | int, "__name__": __name__}
    exec(compile(ast.Module(classes, []), "kv_events.py", "exec"), space)
    globals().update({name: space[name] for name in names} | {"ExternalBlockHash": bytes | int})
    return space


class Cache:
    """The blocks that a subscriber knows."""

    def __init__(self, endpoint, classes):
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        self.decoder = msgspec.msgpack.Decoder(classes["KVEventBatch"])
        self.classes, self.blocks, self.next = classes, {}, None
        self.counts = dict.fromkeys(["BlockStored", "BlockRemoved", "AllBlocksCleared"], 0)

    def read(self, wait_ms):
        """Applies all messages, until none arrives within a time."""
        while self.socket.poll(wait_ms):
            topic, number, payload = self.socket.recv_multipart()
            number = int.from_bytes(number, "big")
            assert topic == b"kv@worker" and self.next in (None, number), (topic, number, self.next)
            self.next = number + 1
            self.apply(payload)

    def apply(self, payload):
        batch = self.decoder.decode(payload)
        assert abs(batch.ts - time.time()) < 600 and batch.data_parallel_rank == 0
        for event in batch.events:
            self.counts[type(event).__name__] += 1
            if isinstance(event, self.classes["BlockStored"]):
                assert event.block_size == PAGE and event.kv_cache_spec_kind == "full_attention", event
                assert len(event.token_ids) == PAGE * len(event.block_hashes)
                parent = event.parent_block_hash
                for index, block in enumerate(event.block_hashes):
                    assert isinstance(block, int) and (block, event.medium) not in self.blocks
                    keys = event.extra_keys and event.extra_keys[index]
                    tokens = tuple(event.token_ids[index * PAGE : (index + 1) * PAGE])
                    self.blocks[block, event.medium] = parent, tokens, tuple(keys or ())
                    parent = block
            elif isinstance(event, self.classes["BlockRemoved"]):
                for block in event.block_hashes:
                    del self.blocks[block, event.medium]
            else:
                self.blocks.clear()

    def cached(self, tokens, keys=()):
        """The cached tokens at the start of a prompt. The server always computes its last token."""
        found = {(parent, page, salt): block for (block, _), (parent, page, salt) in self.blocks.items()}
        parent, count = None, 0
        while count + PAGE < len(tokens):
            page = tuple(tokens[count : count + PAGE])
            parent = found.get((parent, page, keys if count == 0 else ()))
            if parent is None:
                break
            count += PAGE
        return count


def ask(server, prompt, **more):
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    status, answer = server.request("/v1/completions", body)
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def compare(server, cache, prompts, **salt):
    """Asks for prompts, and compares the cached tokens of each with those that the model predicts."""
    total = 0
    for prompt in prompts:
        tokens = server.request("/tokenize", {"prompt": prompt})[1]["tokens"]
        cache.read(200)
        expected, cached = cache.cached(tokens, tuple(salt.values())), ask(server, prompt, **salt)
        assert cached == expected, (cached, expected, prompt[:40])
        total += cached
    return total


class Indexer:
    """`python -m dynamo.indexer`, without the package ai-dynamo; a context manager."""

    def __init__(self):
        self.url = f"http://127.0.0.1:{free_port()}"
        run = "import sys; from dynamo.llm import run_kv_indexer; run_kv_indexer(sys.argv[1:])"
        self.command = [sys.executable, "-c", run, "--port", self.url.rsplit(":", 1)[1]]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health").read()
                return self
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, "the indexer does not start"
                time.sleep(0.2)

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def post(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return json.loads(response.read() or "null")

    def overlap(self, tokens):
        """Cached tokens of worker 1."""
        answer = self.post("/query", {"model_name": "m", "token_ids": tokens})
        return answer["scores"].get("1", {}).get("0", 0)


def indexed(server, cache, endpoint, replay, prompts):
    """Dynamo's indexer knows the blocks of prompts, from before and after its start, and that they were removed."""
    with Indexer() as indexer:
        worker = {"instance_id": 1, "endpoint": endpoint, "replay_endpoint": replay, "model_name": "m", "block_size": PAGE}
        indexer.post("/register", worker)
        time.sleep(1)
        ask(server, "one more text " * 30)
        texts = [server.request("/tokenize", {"prompt": prompt})[1]["tokens"] for prompt in prompts]
        deadline = time.monotonic() + 30
        while True:
            overlaps = [indexer.overlap(tokens) for tokens in texts]
            cache.read(200)
            # All tokens count, also the one that the server would compute.
            if overlaps == [cache.cached([*tokens, 0]) for tokens in texts]:
                break
            assert time.monotonic() < deadline, overlaps
            time.sleep(0.5)
        assert server.request("/flush_cache", {})[0] == 200
        while any(indexer.overlap(tokens) for tokens in texts):
            assert time.monotonic() < deadline + 30, "the indexer still has removed blocks"
            time.sleep(0.5)
    assert overlaps[0] > 0, overlaps
    return sum(overlaps)


def run(kvant):
    classes = event_classes()
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    with open(TEXT) as file:
        text = file.read()
    # Prompts with equal starts, more than the pool holds.
    prompts = [text[:1000] + text[start : start + 1500] for start in range(2000, 20000, 1500)]
    options = ["--kv-events", events, "--kv-events-topic", "kv@worker", "--kv-events-replay", replay]
    with Server(kvant, *options, "--max-sequences", "2", "--context", "1024") as server:
        cache = Cache(events, classes)
        time.sleep(0.5)
        # Once in order, then the latest again, which are still cached, then with another salt.
        hits = compare(server, cache, [*prompts, *prompts[:-4:-1], prompts[0]])
        hits += compare(server, cache, [prompts[0], prompts[0]], cache_salt="tenant")
        assert hits > 0 and cache.counts["BlockRemoved"] > 0, cache.counts
        ask(server, prompts[0])
        found = indexed(server, cache, events, replay, [prompts[0], prompts[-1]])
        cache.read(500)
        assert cache.counts["AllBlocksCleared"] == 1 and not cache.blocks
        compare(server, cache, prompts[:2])
    counts = ", ".join(f"{count} {name}" for name, count in cache.counts.items())
    return f"vLLM {VLLM} decodes {counts}; {hits} cached tokens predicted; Dynamo's indexer found {found} tokens"
