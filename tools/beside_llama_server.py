#!/usr/bin/env python3
"""Compares `kvant serve` with llama.cpp's server: equal weights, requests and cores.

    python3 -m venv .venv && .venv/bin/pip install gguf numpy
    cargo build --release
    .venv/bin/python tools/beside_llama_server.py --llama-server build/bin/llama-server

llama-server comes from llama.cpp's sources, for example those in the sdist of llama-cpp-python, `vendor/llama.cpp`:
`cmake -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DBUILD_SHARED_LIBS=OFF vendor/llama.cpp`, then
`cmake --build build --target llama-server`.

Weights: llama.cpp's q4_1 has exactly the numbers of the shipped model (tools/beside_llama_cpp.py explains why).

Load: N clients, each requests one text after the other: a unique prompt of some 100 tokens, then --tokens tokens, each
the most probable, streamed. Both servers have --threads threads, an f16 cache, and a slot for every client. Both have
their prefix cache enabled, and no prompt occurs twice. The servers run alternately; figures are medians of --rounds
rounds. A single text by `kvant generate` is measured in these rounds too. --json writes the figures.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import server_load
from beside_llama_cpp import ROOT, convert, kvant_speeds

PROMPT = 320  # characters of a prompt, about 100 tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvant", type=Path, default=ROOT / "target/release/kvant")
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=ROOT / "crates/kvant-cli/model")
    parser.add_argument("--text", type=Path, default=ROOT / "models/rustdoc-valid.txt", help="where prompts come from")
    parser.add_argument("--clients", default="1,8,16")
    parser.add_argument("--texts", type=int, default=2, help="texts of a client in a round")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    counts = [int(count) for count in args.clients.split(",")]
    most, text = max(counts), args.text.read_text()
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "q4_1.gguf"
        convert(args.model, "q4_1", weights, tokenizer=True)
        ours = [args.kvant, "serve", args.model, "--device", "cpu", "--threads", args.threads, "--kv", "f16"]
        ours += ["--context", 1024, "--max-sequences", most, "--port", args.port]
        # A context of 1024 tokens per slot.
        theirs = [args.llama_server, "-m", weights, "-t", args.threads, "-tb", args.threads, "-c", 1024 * most, "-np", most]
        theirs += ["--port", args.port, "--host", "127.0.0.1", "--no-webui"]
        servers = [server_load.Server("kvant", ours, args.port), server_load.Server("llama.cpp", theirs, args.port)]
        results = {(server.name, count): [] for server in servers for count in counts}
        alone, at = [], 0
        for round in range(args.rounds):
            alone.append(kvant_speeds(args.kvant, args.model, text[:PROMPT], args.tokens, args.threads)[2])
            for server in servers if round % 2 == 0 else servers[::-1]:
                with server:
                    server_load.run(args.port, [[text[:PROMPT]]], args.tokens)
                    for count in counts:
                        prompts = []
                        for _ in range(count):
                            starts = [at + PROMPT * n for n in range(args.texts)]
                            prompts.append([text[start : start + PROMPT] for start in starts])
                            at = (at + PROMPT * args.texts) % (len(text) - PROMPT * (args.texts + 1))
                        load = server_load.run(args.port, prompts, args.tokens)
                        first = statistics.median(answer.prompt_seconds() for answer in load.texts)
                        results[server.name, count].append((load.rate(), first))
    print(f"{args.threads} threads, prompts of {PROMPT} characters, {args.tokens} tokens each; medians of {args.rounds} rounds")
    print(f"kvant generate, one text, decode alone: {statistics.median(alone):.0f} tokens/s\n")
    print("| clients | kvant, tokens/s | llama.cpp, tokens/s | ratio | kvant, first token | llama.cpp, first token |")
    print("|---|---|---|---|---|---|")
    figures = {"generate": statistics.median(alone)}
    for count in counts:
        pairs = [results[name, count] for name in ("kvant", "llama.cpp")]
        rates, firsts = zip(*([statistics.median(column) for column in zip(*runs)] for runs in pairs))
        # The ratio of each round, since both ran in it.
        ratio = statistics.median(our[0] / their[0] for our, their in zip(*pairs))
        print(
            f"| {count} | {rates[0]:.0f} | {rates[1]:.0f} | {ratio:.2f} | {1000 * firsts[0]:.0f} ms | {1000 * firsts[1]:.0f} ms |"
        )
        figures[str(count)] = {"kvant": [rates[0], firsts[0]], "llama.cpp": [rates[1], firsts[1]], "ratio": ratio}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
