#!/usr/bin/env python3
"""Runs third-party clients against `kvant serve` with the shipped model.

    tools/server_clients.py [--kvant target/debug/kvant] [--all | PART...]

Without arguments it runs the parts that `./check` runs. The clients are downloaded into target/server-clients. Without
a network it skips missing ones with a message.
"""

import argparse
import importlib
import os
import subprocess
import sys
import time

from clients.serving import DOWNLOADS, ROOT

# Part, module, description. The first ones run in `./check`, all in `./check all`.
PARTS = {
    "packages": "the packages openai and anthropic",
    "defaults": "clients and frameworks with their default settings",
    "javascript": "npm's openai, anthropic and ai with four providers, with their default settings",
    "measures": "guidellm and aiperf with a tokenizer from a file",
    "faults": "clients that vanish, stall or send nothing; a shutdown under load",
    "smg": "SGLang's gateway in front of two servers, one of which is killed",
    "dynamo": "NVIDIA Dynamo in front of two servers: prefixes, killed servers, prompts of one for the other",
    "transfer": "prompts of one server for another over a slow link: the time to the first token",
    "restart": "1000 prompts before and after a restart with pages on disk: the times of first tokens",
    "fleet_load": "200 clients for ten minutes through SMG, one server killed: failures and memory",
    "kv_events": "KV events, read by vLLM's event classes and Dynamo's indexer",
    "openai_suite": "the test suite of the package openai",
    "lm_eval_suite": "lm-eval's local-completions: the same log likelihoods as `kvant eval`",
    "llama_cpp_suite": "the tests of llama.cpp's server that concern no format of its own",
    "schema": "schemathesis: thousands of requests made from /openapi.json",
    "load": "32 clients for 2 minutes, a quarter of whose requests are abandoned: memory and pages",
    "page": "the page in headless Chromium",
}
SMALL = ["packages", "faults", "smg"]
# The requirement files of a part. Each file has its own environment, and a part runs in each of its environments.
REQUIREMENTS = {
    "defaults": ["defaults", "openai2"],
    **{part: [part] for part in ["measures", "dynamo", "kv_events", "smg"]},
    **{part: ["smg"] for part in ["fleet_load", "restart", "transfer"]},
    **{part: ["small"] for part in ["packages", "faults"]},
}

# Packages that are installed without their dependencies.
BARE = {"dynamo": "ai-dynamo==1.6.1"}


def install(name):
    """The Python of an environment with the clients, or None if they cannot be downloaded."""
    suffix = "" if name == "small" else f"-{name}"
    requirements = os.path.join(ROOT, "tools", "clients", f"requirements{suffix}.txt")
    venv = os.path.join(DOWNLOADS, "venv" if name in ("small", "all") else f"venv-{name}")
    python = os.path.join(venv, "bin", "python")
    done = os.path.join(venv, os.path.basename(requirements) + ".installed")
    with open(requirements) as file:
        wanted = file.read()
    if os.path.exists(done) and open(done).read() == wanted:
        return python
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [python, "-m", "pip", "install", "-q"]
    for packages in [["-r", requirements], *([["--no-deps", BARE[name]]] if name in BARE else [])]:
        if subprocess.run([*pip, *packages]).returncode != 0:
            return None
    with open(done, "w") as file:
        file.write(wanted)
    return python


def start(name, kvant, parts):
    """Runs parts in an environment, and ends with their exit code if they fail."""
    python = install(name)
    if python is None:
        print(f"skipped: the clients of {', '.join(parts)} cannot be downloaded")
        return
    code = subprocess.run([python, os.path.abspath(__file__), "--installed", "--kvant", kvant, *parts]).returncode
    if code != 0:
        sys.exit(code)


def main():
    listed = "\n".join(f"  {part:16} {what}" for part, what in PARTS.items())
    format = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"parts:\n{listed}", formatter_class=format)
    parser.add_argument("--kvant", default=os.path.join(ROOT, "target", "debug", "kvant"))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--installed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], metavar="PART")
    args = parser.parse_args()
    parts = list(PARTS) if args.all else args.part or SMALL
    if not args.installed:
        by_environment = {}
        for part in parts:
            for name in REQUIREMENTS.get(part, ["all"]):
                by_environment.setdefault("all" if name == "small" and not set(parts) <= set(SMALL) else name, []).append(part)
        for name, parts in by_environment.items():
            start(name, args.kvant, parts)
        return
    for part in parts:
        started = time.monotonic()
        outcome = importlib.import_module(f"clients.{part}").run(args.kvant)
        print(f"{part}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
