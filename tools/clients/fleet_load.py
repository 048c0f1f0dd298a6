"""SMG in front of three servers with 200 clients; one server is killed: no failed request but those of the killed
server, and no memory that stays.

KVANT_LOAD_SECONDS sets the duration, KVANT_LOAD_CLIENTS the number of clients."""

import collections
import http.client
import json
import os
import random
import threading
import time

from .load import WORDS, idle
from .serving import Server
from .smg import Gateway

CLIENTS = int(os.environ.get("KVANT_LOAD_CLIENTS", "200"))
SECONDS = float(os.environ.get("KVANT_LOAD_SECONDS", "600"))
# Time in which SMG notices that a server is gone.
NOTICE = 15
# Fraction of requests that clients abandon.
VANISHING = 0.1


class Clients:
    """Threads that chat through a gateway until a deadline."""

    def __init__(self, gateway, deadline):
        self.gateway, self.deadline = gateway, deadline
        self.counts, self.killed = collections.Counter(), None
        self.failures, self.kinds = [], collections.Counter()

    def run(self, seed):
        draw = random.Random(seed)
        while time.monotonic() < self.deadline:
            started = time.monotonic()
            outcome = self.one(draw)
            ended = time.monotonic()
            # Requests of the killed server fail, and those that SMG sends to it before it notices.
            is_excused = self.killed and started < self.killed + NOTICE and ended > self.killed
            if outcome not in ("complete", "vanished") and not is_excused:
                self.failures.append((outcome, started, ended))
            if outcome in ("complete", "vanished"):
                self.counts[outcome] += 1
            else:
                self.counts["failed by the kill"] += 1
                self.kinds[outcome[:80]] += 1
                # As clients do before they try again.
                time.sleep(1)

    def one(self, draw):
        prefix = " ".join(random.Random(draw.randrange(20)).choices(WORDS, k=150))
        messages = [{"role": "user", "content": prefix + " " + " ".join(draw.choices(WORDS, k=draw.choice([2, 50])))}]
        body = {"model": "rustdoc-11m", "messages": messages, "max_tokens": draw.choice([1, 16, 48]), "stream": True}
        try:
            connection, stream = self.gateway.connect("/v1/chat/completions", body, timeout=300)
            if stream.status != 200:
                return f"status {stream.status}: {stream.read()[:200]}"
            if draw.random() < VANISHING:
                stream.read(40)
                stream.close()
                connection.close()
                return "vanished"
            text = stream.read()
            connection.close()
            return "complete" if b"data: [DONE]" in text and b'"finish_reason":"' in text else f"broken: {text[-200:]}"
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"


def under_load(gateway, seconds, first_seed, kill=None):
    """The clients after a period of load. `kill` is called in its middle."""
    clients = Clients(gateway, time.monotonic() + seconds)
    threads = [threading.Thread(target=clients.run, args=[first_seed + seed]) for seed in range(CLIENTS)]
    [thread.start() for thread in threads]
    if kill:
        time.sleep(seconds / 2)
        clients.killed = time.monotonic()
        kill()
    [thread.join() for thread in threads]
    assert not clients.failures, (len(clients.failures), clients.failures[:3], clients.killed, clients.kinds)
    return clients


def run(kvant):
    options = ["--max-sequences", "16", "--queue", "512", "--memory", "64MiB", "--context", "2048"]
    with Server(kvant, *options) as one, Server(kvant, *options) as two, Server(kvant, *options) as victim:
        # With two servers, more requests wait than its protection from overload admits: it would answer 503.
        with Gateway([one, two, victim], "--disable-worker-overload-protection") as gateway:
            # Allocates the memory that servers need only once.
            under_load(gateway, min(30, SECONDS / 4), 10_000)
            before = [idle(server) for server in (one, two)]
            clients = under_load(gateway, SECONDS, 0, victim.process.kill)
            after = [idle(server) for server in (one, two)]
        tokens = sum(server.metrics()["generation_tokens_total"] for server in (one, two))
    counts = ", ".join(f"{count} {name}" for name, count in sorted(clients.counts.items()))
    kinds = collections.Counter(kind[:11] for kind in clients.kinds.elements())
    counts += f" {dict(kinds)}"
    mib = [[f"{bytes / 2**20:.1f}" for bytes, _ in memories] for memories in (before, after)]
    summary = f"{counts} in {SECONDS:.0f} s with {CLIENTS} clients, {tokens / SECONDS:.0f} tokens/s; resident MiB {mib[0]} before, {mib[1]} after"
    for (resident, cached), (later, cached_later) in zip(before, after):
        assert later < (resident - cached + cached_later) * 1.05, f"memory stays: {summary}"
    return summary
