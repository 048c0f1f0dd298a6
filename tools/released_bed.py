#!/usr/bin/env python3
"""Tests kvant on released models: logits, token ids, chat templates and answers against transformers and llama.cpp.

    tools/released_bed.py [--kvant target/debug/kvant] [--recompute | --write] [--all | MODEL...]

Without arguments it tests SmolLM2 against tools/released/golden/. --recompute computes the references again, compares
them with that folder, and compares all logits; --write writes the folder. The models come from `released_models.py`;
packages are installed into target/released/ unless this Python has them. Without a network it skips with a message.
Requires tmux.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import released_models
from released import compare, programs, texts
from released.compare import Mismatch

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "released", "golden")
MODULES = ["torch", "transformers", "xllamacpp", "gguf", "accelerate"]
# Maximum difference of a logit in f32, and with integer products for prompts, which round activations to 16 bits (the
# table of accuracy in ops/mod.rs).
BOUND = 5e-3
BOUND_OF_INTEGERS = 2e-2
# Tokens of the text, and the positions of recorded logits. Gemma 3's windows have 512 tokens.
LENGTHS = {"smollm2": (300, 2), "gemma3": (640, 4), "qwen2.5": (300, 2)}


def golden_path(name):
    return os.path.join(GOLDEN, name + ".json")


def read_golden(name):
    if not os.path.exists(golden_path(name)):
        raise Mismatch("it has no golden data: --write makes them")
    with open(golden_path(name), encoding="utf-8") as file:
        return json.load(file)


def write_golden(name, golden):
    """One line for each entry, so that a difference in version control is readable."""
    lines = [f" {json.dumps(key)}: {dumped(value)}" for key, value in golden.items()]
    with open(golden_path(name), "w", encoding="utf-8") as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


def dumped(value):
    compact = {"ensure_ascii": True, "separators": (",", ":")}
    if isinstance(value, list):
        return "[\n  " + ",\n  ".join(json.dumps(entry, **compact) for entry in value) + "\n ]"
    if isinstance(value, dict) and value:
        entries = (f"  {json.dumps(key)}: {json.dumps(entry, **compact)}" for key, entry in value.items())
        return "{\n" + ",\n".join(entries) + "\n }"
    return json.dumps(value, **compact)


def check_golden(golden, fresh):
    """Recorded references must equal recomputed ones."""
    for key in ("token_ids", "chats"):
        if golden[key] != fresh[key]:
            raise Mismatch(f"{key} of the golden data are not those of today's references: write them anew")
    old, new = golden["logits"], fresh["logits"]
    if old["tokens"] != new["tokens"]:
        raise Mismatch("the golden data's text is another: write them anew")
    for place, (ids, before, after) in enumerate(zip(old["ids"], old["logits"], new["logits"])):
        if ids == new["ids"][place] and any(abs(a - b) > 1e-3 for a, b in zip(before, after)):
            raise Mismatch(f"the golden data's logits after token {old['at'][place]} are not those of today")


def check_all_logits(right, path):
    """Compares every logit of the text, if the references have been computed."""
    import torch

    file, worst = compare.LogitsFile(path), 0.0
    for at, row in enumerate(right):
        worst = max(worst, (torch.frombuffer(file.row(at), dtype=torch.float32) - row).abs().max().item())
        if not worst <= BOUND:
            raise Mismatch(f"logits: after token {at} one is off by {worst:.3g}, more than {BOUND}")
    return f"all {right.numel()} logits: off by {worst:.1e} at most"


def check_logits(kvant, model, golden, right):
    with tempfile.TemporaryDirectory(dir=released_models.FOLDER) as folder:
        path = os.path.join(folder, "logits.safetensors")
        programs.logits(kvant, model, golden["logits"]["tokens"], path)
        yield compare.check_logits(golden["logits"], path, BOUND)
        if right is not None:
            yield check_all_logits(right, path)
        for answer in golden["answers"]:
            programs.logits(kvant, model, answer["ids"] + answer["llama_cpp"]["tokens"], path)
            yield "after llama.cpp's answer: " + compare.check_teacher_forced(answer, path, BOUND)


def check_served(kvant, model, golden):
    """Token ids, templates and answers by `kvant serve`."""
    with programs.Serving(kvant, model) as server:
        wrong = [(text, ids, server.token_ids(text)) for text, ids in golden["token_ids"]]
        wrong = [f"{text!r}: {ids} expected, got {got}" for text, ids, got in wrong if got != ids]
        if wrong:
            raise Mismatch("token ids of\n" + "\n".join(wrong))
        yield f"{len(golden['token_ids'])} strings have the same token ids"
        for name, *chat in texts.chats() if golden["chats"] else []:
            right, got = golden["chats"][name], server.render(*chat)
            if got != right:
                raise Mismatch(f"rendering of `{name}`:\n{right!r} expected, got\n{got!r}")
        yield f"{len(golden['chats'])} renderings are equal"
        answers = golden["answers"]
        for stream in (False, True):
            how = "serve, streamed" if stream else "serve"
            given = server.answers([answer["question"] for answer in answers], stream)
            for index, (answer, (text, prompt)) in enumerate(zip(answers, given)):
                if prompt != len(answer["ids"]):
                    raise Mismatch(f"{how}: a prompt of {len(answer['ids'])} tokens expected, got {prompt}")
                yield f"answer {index} by {how}: " + compare.check_answer(answer, text, BOUND, how)


def check_commands(kvant, model, golden):
    """Answers by `kvant generate` and `kvant chat`."""
    answer = golden["answers"][1]
    text = programs.generate(kvant, model, answer["question"])
    yield "answer 1 by generate: " + compare.check_answer(answer, text, BOUND, "generate")
    if not golden["chats"]:
        message = programs.refusal([kvant, "chat", model, "--device", "cpu"])
        if "no chat template" not in message:
            raise Mismatch(f"chat must say that the model has no chat template, got {message}")
    programs.type_ahead(kvant, model)
    yield "keys that are typed ahead: they are the next line"
    answer = golden["answers"][-1]
    shown = programs.chat(kvant, model, answer["question"])
    # A terminal wraps lines and does not show trailing spaces.
    plain = answer | {"text": " ".join(answer["text"].split()), "ends": word_ends(answer)}
    yield "answer 2 by chat: " + compare.check_answer(plain, " ".join(shown.split()), BOUND, "chat")


def word_ends(answer):
    return [len(" ".join(answer["text"][:end].split())) for end in answer["ends"]]


def check(kvant, name, model, golden, right):
    for part in (check_logits(kvant, model, golden, right), check_served(kvant, model, golden)):
        for line in part:
            print(f"{name}: {line}", flush=True)
    for line in check_commands(kvant, model, golden):
        print(f"{name}: {line}", flush=True)


def main():
    format = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=format)
    parser.add_argument("--kvant", default=os.path.join(released_models.ROOT, "target", "debug", "kvant"))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("model", nargs="*", choices=[*released_models.MODELS, []], metavar="MODEL")
    args = parser.parse_args()
    levels = subprocess.run([args.kvant, "devices"], stdout=subprocess.PIPE, text=True, check=True).stdout
    if any(level in levels for level in ("VNNI", "VBMI", "AMX")):
        global BOUND
        BOUND = BOUND_OF_INTEGERS
    recompute = args.recompute or args.write
    if recompute and not released_models.restart_with(MODULES, "-r", texts.REQUIREMENTS):
        print("the references cannot be installed: the golden data are used")
        recompute = False
    for name in list(released_models.MODELS) if args.all else args.model or ["smollm2"]:
        started = time.monotonic()
        try:
            model = released_models.fetch(name)
        except released_models.Unavailable as error:
            print(f"{name}: skipped: {error}")
            continue
        fresh, right = None, None
        if recompute:
            from released import references

            fresh, right = references.make(name, model, *LENGTHS[name])
        if args.write:
            released = released_models.MODELS[name]
            write_golden(name, {"file": released.file, "sha256": released.sha256, **fresh})
            continue
        try:
            golden = read_golden(name)
            if fresh:
                check_golden(golden, fresh)
            check(args.kvant, name, model, fresh or golden, right)
        except Mismatch as mismatch:
            sys.exit(f"released_bed: {name}: {mismatch}")
        print(f"{name}: as its references ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
