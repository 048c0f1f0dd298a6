#!/usr/bin/env python3
"""Tests that caches with sealed pages preserve released models: divergences of cache types from an f32 cache, within
bounds.

    tools/released_caches.py [--kvant target/release/kvant] [--device cpu] [--windows 2048,8192] [--bytes 30000] [MODEL...]

Runs `kvant eval` on the beginning of models/rustdoc-valid.txt with each model of `released_models.py`. Without a
network it skips with a message.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import released_models

TEXT = os.path.join(released_models.ROOT, "models", "rustdoc-valid.txt")
# Maximum mean divergence in nats of tq4c, tq5c:tq4c and tq3c: from docs/performance.md, plus a quarter for other texts.
BOUNDS = {
    "smollm2": {"tq4c": 0.0034, "tq5c:tq4c": 0.00125, "tq3c": 0.014},
    "gemma3": {"tq4c": 0.0116, "tq5c:tq4c": 0.0046, "tq3c": 0.059},
    "qwen2.5": {"tq4c": 0.0048, "tq5c:tq4c": 0.0015, "tq3c": 0.022},
}
# Minimum ratio of plain tq4's divergence: if it is smaller, the model does not show the tested effect.
WORSE = 10


def divergences(kvant, device, model, window, text):
    """Divergences of tq4 and the types with bounds, by name."""
    kinds = ["tq4", *BOUNDS[model]]
    file = os.path.join(released_models.FOLDER, released_models.MODELS[model].file)
    command = [kvant, "eval", "--model", file, "--device", device, "--activations", "f32", "--json", "--text", text,
               "--window-tokens", str(window), "--kv", ",".join(kinds)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return {row["kv"]: row["kl_mean"] for row in rows}


def failures(model, window, found):
    wrong = [f"{kind} diverges by {found[kind]:.3g}, more than {bound}" for kind, bound in BOUNDS[model].items()
             if not found[kind] <= bound]
    if found["tq4"] < WORSE * found["tq4c"]:
        wrong.append(f"tq4 diverges by {found['tq4']:.3g}, tq4c by {found['tq4c']:.3g}: less than {WORSE} times as much")
    return [f"{model}, windows of {window}: {why}" for why in wrong]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvant", default=os.path.join(released_models.ROOT, "target", "release", "kvant"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", default="2048")
    parser.add_argument("--bytes", type=int, default=10000, help="of the text")
    parser.add_argument("models", nargs="*", choices=[[], *BOUNDS], metavar="MODEL")
    args = parser.parse_args()
    wrong = []
    with tempfile.TemporaryDirectory() as folder, open(TEXT, encoding="utf-8") as whole:
        text = os.path.join(folder, "text.txt")
        with open(text, "w", encoding="utf-8") as part:
            part.write(whole.read()[:args.bytes])
        for model in args.models or BOUNDS:
            try:
                released_models.fetch(model)
            except released_models.Unavailable as why:
                print(f"skipped: {why}")
                return 0
            for window in map(int, args.windows.split(",")):
                found = divergences(args.kvant, args.device, model, window, text)
                print(f"{model}, windows of {window}: " + ", ".join(f"{kind} {kl:.3g}" for kind, kl in found.items()), flush=True)
                wrong += failures(model, window, found)
    print("\n".join(wrong) or "all within bounds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
