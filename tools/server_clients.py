#!/usr/bin/env python3
"""Runs clients that kvant's authors did not write against `kvant serve` with the shipped model.

    tools/server_clients.py [--kvant target/debug/kvant] [--all | PART...]

Without arguments it runs the parts that `./check` runs. The clients are downloaded into target/server-clients. Without a
network it says so and skips what it lacks.
"""

import argparse
import importlib
import os
import subprocess
import sys
import time

from clients.serving import DOWNLOADS, ROOT

# Part, module, what it runs. The first ones run in `./check`, all in `./check all`.
PARTS = {
    "packages": "the packages openai and anthropic",
    "defaults": "clients and frameworks with their default settings",
    "faults": "clients that vanish, stall or send nothing; a shutdown under load",
    "openai_suite": "the test suite of the package openai",
    "lm_eval_suite": "lm-eval's local-completions: the same log likelihoods as `kvant eval`",
    "llama_cpp_suite": "the tests of llama.cpp's server that concern no format of its own",
    "schema": "schemathesis: thousands of requests made from /openapi.json",
    "load": "32 clients for 5 minutes: memory and pages",
    "page": "the page in headless Chromium",
}
SMALL = ["packages", "faults"]
REQUIREMENTS = os.path.join(ROOT, "tools", "clients", "requirements.txt")
ALL_REQUIREMENTS = os.path.join(ROOT, "tools", "clients", "requirements-all.txt")
DEFAULTS_REQUIREMENTS = os.path.join(ROOT, "tools", "clients", "requirements-defaults.txt")


def install(requirements):
    """The Python of an environment with the clients, or None if they cannot be downloaded."""
    venv = os.path.join(DOWNLOADS, "venv-defaults" if requirements == DEFAULTS_REQUIREMENTS else "venv")
    python = os.path.join(venv, "bin", "python")
    done = os.path.join(venv, os.path.basename(requirements) + ".installed")
    with open(requirements) as file:
        wanted = file.read()
    if os.path.exists(done) and open(done).read() == wanted:
        return python
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements])
    if pip.returncode != 0:
        return None
    with open(done, "w") as file:
        file.write(wanted)
    return python


def start(python, kvant, parts):
    """Runs parts with the Python of an environment, and ends with their exit code if they fail."""
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
        if "defaults" in parts:
            start(install(DEFAULTS_REQUIREMENTS), args.kvant, ["defaults"])
            parts.remove("defaults")
        if parts:
            start(install(REQUIREMENTS if set(parts) <= set(SMALL) else ALL_REQUIREMENTS), args.kvant, parts)
        return
    for part in parts:
        started = time.monotonic()
        outcome = importlib.import_module(f"clients.{part}").run(args.kvant)
        print(f"{part}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
