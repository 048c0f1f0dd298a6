#!/usr/bin/env python3
"""Compares a server with several models on a GPU with one on the CPU: embeddings, and answers under load.

    tools/h200/several.py KVANT [--device cuda] MODEL MODEL...

Both servers use f32 caches. Embeddings must agree to a cosine of 0.9999, greedy texts of eight clients, which ask all models in turn,
must be those that one client gets, and each model must be served while the others are. Exits with 1 if something differs. Needs
only Python's standard library.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import threading
import urllib.request

TEXTS = ["Rust is a language", "A vector owns its elements.", "# Modules\n\nA module holds items.", "x"]
PROMPTS = ["# Vectors\n\n", "A trait is", "The borrow checker", "fn main() {"]


class Server:
    def __init__(self, kvant, device, models, pooling):
        command = [kvant, "serve", *models, "--port", "0", "--device", device, "--kv", "f32", "--pooling", pooling]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url, self.log = None, []
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(r"listening on (http://[^ ]*)", line):
                self.url = match[1].rstrip("/\n")
                break
        if self.url is None:
            sys.exit(f"{' '.join(command)}\n{''.join(self.log)}")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def post(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def models(self):
        with urllib.request.urlopen(self.url + "/v1/models") as answer:
            return [model["id"] for model in json.load(answer)["data"]]

    def embeddings(self, model):
        return [row["embedding"] for row in self.post("/v1/embeddings", {"model": model, "input": TEXTS})["data"]]

    def text(self, model, prompt):
        body = {"model": model, "prompt": prompt, "max_tokens": 48, "temperature": 0}
        return self.post("/v1/completions", body)["choices"][0]["text"]

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def crowd(server, models, alone):
    """Eight clients ask every model for every prompt. Returns the texts that differ from `alone`."""
    wrong = []

    def client(shift):
        for turn in range(len(models) * len(PROMPTS)):
            key = (models[(turn + shift) % len(models)], PROMPTS[(turn // len(models) + shift) % len(PROMPTS)])
            if server.text(*key) != alone[key]:
                wrong.append(key)

    clients = [threading.Thread(target=client, args=(shift,)) for shift in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvant")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    failures = 0
    for pooling in ("last", "mean"):
        gpu, cpu = (Server(args.kvant, device, args.models, pooling) for device in (args.device, "cpu"))
        models = gpu.models()
        assert models == cpu.models(), (models, cpu.models())
        for model in models:
            worst = min(map(cosine, gpu.embeddings(model), cpu.embeddings(model)))
            print(f"{model}, {pooling}: cosine at least {worst:.7f}")
            failures += worst < 0.9999
        if pooling == "last":
            alone = {(model, prompt): gpu.text(model, prompt) for model in models for prompt in PROMPTS}
            same = sum(cpu.text(*key) == text for key, text in alone.items())
            wrong = crowd(gpu, models, alone)
            print(f"{same} of {len(alone)} texts as on the CPU; {len(wrong)} of {8 * len(alone)} texts of a crowd differ")
            failures += len(wrong) > 0
        gpu.stop(), cpu.stop()
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
