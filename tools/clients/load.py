"""32 clients for some minutes: memory stays, and no page is leaked."""

import json
import os
import random
import threading
import time

from .serving import Server

CLIENTS = 32
SECONDS = float(os.environ.get("KVANT_LOAD_SECONDS", "300"))
WORDS = "Vec struct trait impl Option Result match while String async".split()


def client(server, seed, deadline, counts):
    draw = random.Random(seed)
    connection = server.connect()
    while time.monotonic() < deadline:
        prompt = " ".join(draw.choices(WORDS, k=draw.choice([2, 20, 200])))
        body = {"prompt": prompt, "max_tokens": draw.choice([1, 16, 64]), "stream": draw.random() < 0.5, "n": draw.choice([1, 1, 2])}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if draw.random() < 0.05:
            # It goes away.
            connection.close()
            connection = server.connect()
            continue
        text = response.read()
        assert response.status == 200 and (not body["stream"] or text.endswith(b"[DONE]\n\n")), text
        counts.append(1)


def run(kvant):
    # The cached prefixes fill these pages within the first third, so that later growth is a leak.
    with Server(kvant, "--max-sequences", "16", "--memory", "96MiB") as server:
        counts, memory, pages = [], [], []
        started = time.monotonic()
        deadline = started + SECONDS
        failures = []

        def guarded(seed):
            try:
                client(server, seed, deadline, counts)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=[seed]) for seed in range(CLIENTS)]
        [thread.start() for thread in threads]
        while time.monotonic() < deadline:
            time.sleep(SECONDS / 60)
            memory.append(server.memory())
            pages.append(server.metrics()["kv_cache_used_bytes"])
        [thread.join() for thread in threads]
        assert not failures, failures[:3]
        metrics = server.settled()
        # The first third warms up.
        warm, last = max(memory[20:40]), max(memory[40:])
        assert last < warm * 1.02 + (8 << 20), f"memory grows: {[m >> 20 for m in memory]} MiB"
        tokens = metrics["generation_tokens_total"] / SECONDS
        return (
            f"{len(counts)} answers in {SECONDS:.0f} s, {tokens:.0f} tokens/s; resident {memory[0] >> 20} MiB at first, "
            f"{warm >> 20} MiB in the second third, {last >> 20} MiB in the last; no page of a request is left"
        )
