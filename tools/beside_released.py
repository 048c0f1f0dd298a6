#!/usr/bin/env python3
"""`kvant serve` beside llama.cpp's server on released models: the same files, requests and threads, in turns.

    cargo build --release
    tools/beside_released.py [--threads N] [--rounds N] [MODEL...]

llama.cpp is that of the package xllamacpp, which is installed into target/released/ unless this Python has it: a build for AVX2,
whatever the machine has. The models come from `released_models.py`.

The servers take turns, one runs at a time; figures are medians of the rounds. Both have a place for 8 clients, and a cache in f16,
or in 8 bits: tq8 and q8_0. First a client alone asks for texts: a prompt of 512 tokens, which the time to the first token gives,
and 128 tokens after it. Then 1, 4 and 8 clients ask for texts of 128 tokens after prompts of 128, and the rate is that of all
tokens after the prompts. Every prompt is another piece of a text, as ids. All is greedy, streamed, and goes on at ends of text.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request

import released_models
from released import texts

CACHES = {"f16": ("f16", "GGML_TYPE_F16"), "8 bit": ("tq8", "GGML_TYPE_Q8_0")}
CLIENTS = [1, 4, 8]
PROMPT, SHORT, TOKENS = 512, 128, 128
CONTEXT = 1024


def host(path, port, threads, cache):
    """Runs llama.cpp's server until the process ends."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.n_parallel, options.n_ctx = path, max(CLIENTS), CONTEXT * max(CLIENTS)
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = int(threads)
    options.cache_type_k = options.cache_type_v = getattr(xllamacpp.ggml_type, cache)
    options.hostnames, options.port, options.verbosity = ["127.0.0.1"], int(port), 0
    server = xllamacpp.Server(options)
    while server:
        time.sleep(3600)


def command(program, args, model, cache):
    if program == "kvant":
        kvant = [args.kvant, "serve", model, "--device", "cpu", "--threads", args.threads, "--kv", CACHES[cache][0]]
        return [*kvant, "--context", CONTEXT, "--max-sequences", max(CLIENTS), "--port", args.port]
    return [sys.executable, os.path.abspath(__file__), "--host", model, args.port, args.threads, CACHES[cache][1]]


class Prompts:
    """Pieces of a text as ids, each another."""

    def __init__(self, server):
        self.ids, self.at = None, 0
        with open(texts.RUSTDOC, encoding="utf-8") as file:
            body = json.dumps({"content": file.read(200000)}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}/tokenize", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            self.ids = json.load(answer)["tokens"]

    def next(self, length):
        if self.at + length > len(self.ids):
            sys.exit("the text has not enough tokens for so many rounds")
        self.at += length
        return self.ids[self.at - length : self.at]


def turn(server, prompts, load, texts_of_one):
    """The figures of a server that has just started: of a prompt and of decode alone, and of clients, in tokens a second."""
    server.text(prompts.next(SHORT), TOKENS)
    alone = [server.text(prompts.next(PROMPT), TOKENS) for _ in range(texts_of_one)]
    figures = {
        f"prompt of {PROMPT}": statistics.median(PROMPT / first for first, _ in alone),
        "decode": statistics.median((TOKENS - 1) / (last - first) for first, last in alone),
    }
    for clients in CLIENTS:
        name = f"{clients} client{'s' if clients > 1 else ''}"
        figures[name] = load(server, [[prompts.next(SHORT)] for _ in range(clients)], TOKENS)[0]
    return figures


def compare(name, args):
    """Prints the rows of a model, and returns its figures."""
    from beside_llama_server import Server, load

    model, results, prompts = released_models.fetch(name), {}, None
    for round in range(args.rounds):
        for cache in args.caches.split(","):
            programs = ["kvant", "llama.cpp"] if round % 2 == 0 else ["llama.cpp", "kvant"]
            for program in programs:
                with Server(program, command(program, args, model, cache), args.port) as server:
                    prompts = prompts or Prompts(server)
                    for what, rate in turn(server, prompts, load, args.texts).items():
                        results.setdefault((cache, what), {}).setdefault(program, []).append(rate)
    for (cache, what), rates in results.items():
        ours, theirs = rates["kvant"], rates["llama.cpp"]
        # Of each round, since both ran in it.
        ratio = statistics.median(our / their for our, their in zip(ours, theirs))
        middle = [statistics.median(column) for column in (ours, theirs)]
        print(f"| {released_models.MODELS[name].title} | {cache} | {what} | {middle[0]:.0f} | {middle[1]:.0f} | {ratio:.2f} |", flush=True)
    return [{"model": name, "cache": cache, "what": what, **rates} for (cache, what), rates in results.items()]


def processor():
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return "an unknown processor"


def main():
    if sys.argv[1:2] == ["--host"]:
        return host(*sys.argv[2:])
    format = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=format)
    parser.add_argument("--kvant", default=os.path.join(released_models.ROOT, "target", "release", "kvant"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=2, help="texts of the client alone in a round")
    parser.add_argument("--caches", default=",".join(CACHES), help=f"of {', '.join(CACHES)}")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--json", help="write the figures of every round")
    parser.add_argument("model", nargs="*", choices=[*released_models.MODELS, []], metavar="MODEL")
    args = parser.parse_args()
    pinned = [line.strip() for line in open(texts.REQUIREMENTS) if line.startswith(("xllamacpp", "gguf"))]
    if not released_models.restart_with(["xllamacpp", "gguf", "numpy"], *pinned):
        sys.exit("beside_released: xllamacpp cannot be installed")
    import xllamacpp

    version = subprocess.run([args.kvant, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    features = " ".join(part.split("=")[0].strip() for part in xllamacpp.get_system_info().split(":", 1)[1].split("|"))
    print(f"{version}; xllamacpp {xllamacpp.__version__} ({features.strip()}); {processor()}, {args.threads} threads;")
    print(f"tokens/s, medians of {args.rounds} rounds; load of the machine before: {os.getloadavg()[0]:.1f}\n")
    print("| model | cache | what | kvant | llama.cpp | ratio |")
    print("|---|---|---|---|---|---|")
    figures = [row for name in args.model or released_models.MODELS for row in compare(name, args)]
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
