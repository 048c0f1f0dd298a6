#!/usr/bin/env python3
"""Compares `kvant serve` with llama.cpp's server on released models: equal files, requests and threads, alternately.

    cargo build --release
    tools/beside_released.py [--threads N] [--rounds N] [MODEL...]

llama.cpp is the one in the package xllamacpp, which is installed into target/released/ unless this Python has it: a
build for AVX2, independent of the machine. --llama-server selects another one, compiled for the machine. --avx2 runs a
copy of kvant that does not detect AVX-512, AVX-VNNI and AMX, as on a machine without them. The models come from
`released_models.py`, or are files with these names in the folder --files.

The servers run alternately; figures are medians of the rounds. Both have a slot for 8 clients, and a cache in f16, or
in 8 bits: tq8 and q8_0. First a single client requests texts: a prompt of 512 tokens, measured by the time to the first
token, and 128 tokens after it. Then 1, 4 and 8 clients request texts of 128 tokens after prompts of 128; the rate
counts all tokens after the prompts. Every prompt is a different part of a text, sent as ids. Generation is greedy,
streamed, and ignores ends of text.

Clients are processes. On machines with spare CPUs they run on the CPUs after the first --server-cpus, which the server
uses. The last lines show whether clients limit the figures: the utilisation of the busiest one, and the delay of its
tokens relative to the server's own clock.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import released_models
import server_load
from released import texts

CACHES = {"f16": ("f16", "GGML_TYPE_F16", "f16"), "8 bit": ("tq8", "GGML_TYPE_Q8_0", "q8_0")}
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


def without_avx512(program, folder):
    """A copy of a Rust program for x86-64 whose standard library detects AVX2, but no later vector extensions."""
    with open(program, "rb") as file:
        code = file.read()
    for old, new in [
        # xgetbv: only the states up to AVX are kept.
        ("31c9 0f01d0 48c1e220 4809d0 c3", "31c9 0f01d0 83e01f c3 90909090"),
        # cpuid of leaf 7, part 1, which reports AVX-VNNI: an empty part instead.
        ("b807000000 b901000000", "b807000000 b9ff000000"),
    ]:
        old, new = bytes.fromhex(old), bytes.fromhex(new)
        if old not in code:
            sys.exit(f"{program} has no {old.hex()}: its features cannot be hidden")
        code = code.replace(old, new)
    path = os.path.join(folder, "kvant")
    with open(path, "wb") as file:
        file.write(code)
    os.chmod(path, 0o755)
    return path


def command(program, args, model, cache):
    kvant_cache, xllamacpp_cache, llama_cache = CACHES[cache]
    if program == "kvant":
        kvant = [args.kvant, "serve", model, "--device", "cpu", "--threads", args.threads, "--kv", kvant_cache]
        return [*kvant, "--context", CONTEXT, "--max-sequences", max(CLIENTS), "--port", args.port]
    if args.llama_server:
        llama = [args.llama_server, "-m", model, "-t", args.threads, "-tb", args.threads, "-np", max(CLIENTS)]
        llama += ["-c", CONTEXT * max(CLIENTS), "-ctk", llama_cache, "-ctv", llama_cache]
        return [*llama, "--host", "127.0.0.1", "--port", args.port]
    return [sys.executable, os.path.abspath(__file__), "--host", model, args.port, args.threads, xllamacpp_cache]


class Prompts:
    """Distinct parts of a text as ids."""

    def __init__(self, server):
        self.at = 0
        with open(texts.RUSTDOC, encoding="utf-8") as file:
            self.ids = json.load(server.ask("POST", "/tokenize", {"content": file.read(400000)}))["tokens"]

    def next(self, length):
        if self.at + length > len(self.ids):
            sys.exit("the text has not enough tokens for so many rounds")
        self.at += length
        return self.ids[self.at - length : self.at]


class Clock:
    """Compares clients' times with the servers'."""

    def __init__(self):
        self.busy, self.late = {}, {}

    def load(self, server, prompts, cpus):
        """Runs clients. Records the utilisation of the busiest one, and the delay of tokens relative to the server's
        clock."""
        before = server.token_times()
        load = server_load.run(server.port, prompts, TOKENS, cpus)
        seconds, tokens = (after - start for after, start in zip(server.token_times(), before))
        own = seconds / tokens if tokens else statistics.mean(text.own or float("nan") for text in load.texts)
        seen = statistics.mean(text.token_seconds() for text in load.texts)
        key = server.name, len(prompts)
        self.busy.setdefault(key, []).append(load.busy / load.seconds())
        self.late.setdefault(key, []).append(seen / own - 1)
        return load

    def lines(self):
        yield "| server | clients | busiest client, of a CPU | a token as seen by clients, beyond the server's time |"
        yield "|---|---|---|---|"
        for key, busy in sorted(self.busy.items()):
            yield f"| {key[0]} | {key[1]} | {max(busy):.1%} | {statistics.median(self.late[key]):+.1%} |"


def turn(server, prompts, clock, args):
    """The figures of a fresh server in tokens a second: a prompt and decode alone, and several clients."""
    ask = lambda prompts: clock.load(server, prompts, args.client_cpus)  # noqa: E731
    ask([[prompts.next(SHORT)]])
    alone = ask([[prompts.next(PROMPT) for _ in range(args.texts)]]).texts
    figures = {
        f"prompt of {PROMPT}": statistics.median(PROMPT / text.prompt_seconds() for text in alone),
        "decode": statistics.median(1 / text.token_seconds() for text in alone),
    }
    for clients in CLIENTS:
        name = f"{clients} client{'s' if clients > 1 else ''}"
        figures[name] = ask([[prompts.next(SHORT)] for _ in range(clients)]).rate()
    return figures


def compare(name, args, clock):
    """Prints the rows of a model, and returns its figures."""
    files = args.files and os.path.join(args.files, released_models.MODELS[name].file)
    model, results, prompts = files or released_models.fetch(name), {}, None
    for round in range(args.rounds):
        for cache in args.caches.split(","):
            programs = ["kvant", "llama.cpp"] if round % 2 == 0 else ["llama.cpp", "kvant"]
            for program in programs:
                server = server_load.Server(program, command(program, args, model, cache), args.port, args.server_cpus)
                with server:
                    prompts = prompts or Prompts(server)
                    for what, rate in turn(server, prompts, clock, args).items():
                        results.setdefault((cache, what), {}).setdefault(program, []).append(rate)
    for (cache, what), rates in results.items():
        ours, theirs = rates["kvant"], rates["llama.cpp"]
        # The ratio of each round, since both ran in it.
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


def llama(args):
    """The name of the compared program, and the instructions that it was compiled for."""
    if args.llama_server:
        version = subprocess.run([args.llama_server, "--version"], capture_output=True, text=True)
        return " ".join((version.stdout + version.stderr).split())
    import xllamacpp

    features = " ".join(part.split("=")[0].strip() for part in xllamacpp.get_system_info().split(":", 1)[1].split("|"))
    return f"xllamacpp {xllamacpp.__version__} ({features.strip()})"


def kvant(program):
    """The version and the CPU device."""
    run = lambda argument: subprocess.run([program, argument], check=True, capture_output=True, text=True).stdout  # noqa: E731
    cpu = next(line for line in run("devices").splitlines() if " cpu " in line)
    return f"{run('--version').strip()} ({cpu.strip('* ').removeprefix('cpu').split(',')[0].strip()})"


def main():
    if sys.argv[1:2] == ["--host"]:
        return host(*sys.argv[2:])
    format = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=format)
    parser.add_argument("--kvant", default=os.path.join(released_models.ROOT, "target", "release", "kvant"))
    parser.add_argument("--avx2", action="store_true", help="hide AVX-512 and later from kvant")
    parser.add_argument("--llama-server", help="instead of xllamacpp")
    parser.add_argument("--files", help="folder of the models' files")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--server-cpus", type=int, default=0, metavar="N", help="CPUs of the server, the first N; 0: all, for all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=2, help="texts of the client alone in a round")
    parser.add_argument("--caches", default=",".join(CACHES), help=f"of {', '.join(CACHES)}")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--json", help="write the figures of every round")
    parser.add_argument("model", nargs="*", choices=[*released_models.MODELS, []], metavar="MODEL")
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    split = args.server_cpus or len(cpus)
    args.server_cpus, args.client_cpus = cpus[:split], cpus[split:] or cpus
    if not args.llama_server:
        pinned = [line.strip() for line in open(texts.REQUIREMENTS) if line.startswith("xllamacpp")]
        if not released_models.restart_with(["xllamacpp"], *pinned):
            sys.exit("beside_released: xllamacpp cannot be installed")
    with tempfile.TemporaryDirectory() as folder:
        args.kvant = without_avx512(args.kvant, folder) if args.avx2 else args.kvant
        print(f"{kvant(args.kvant)}; {llama(args)}; {processor()}, {args.threads} threads, {split} of {len(cpus)} CPUs;")
        print(f"tokens/s, medians of {args.rounds} rounds; load of the machine before: {os.getloadavg()[0]:.1f}\n")
        print("| model | cache | what | kvant | llama.cpp | ratio |")
        print("|---|---|---|---|---|---|")
        clock, figures = Clock(), []
        for name in args.model or released_models.MODELS:
            figures += compare(name, args, clock)
            if args.json:
                with open(args.json, "w") as file:
                    json.dump(figures, file, indent=1)
    print("", *clock.lines(), sep="\n")


if __name__ == "__main__":
    main()
