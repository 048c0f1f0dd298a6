"""Compares kvant's results with golden data. Requires only Python, so that it runs on a GPU's machine.

    compare.py logits GOLDEN.json LOGITS.safetensors BOUND
    compare.py rounded GOLDEN.json LOGITS.safetensors SHARE
    compare.py answer GOLDEN.json NUMBER GENERATED.json BOUND
    compare.py file|tokens GOLDEN.json
    compare.py prompt GOLDEN.json NUMBER

The first three print a verdict. The exit status is 1 if something differs by more than BOUND, or if less than SHARE of
the most probable tokens equal the reference's. `file` prints name and sha256 of the model's file, `tokens` the token
ids whose logits are compared, `prompt` the options of `kvant generate` for an answer, each terminated by a zero byte.
"""

import array
import json
import math
import mmap
import os
import struct
import sys


class Mismatch(Exception):
    """Something differs from its reference."""


class LogitsFile:
    """The tensor `logits` [T, vocabulary] of a file that `kvant logits` wrote."""

    def __init__(self, path):
        with open(path, "rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (size,) = struct.unpack("<Q", self.bytes[:8])
        tensor = json.loads(self.bytes[8 : 8 + size])["logits"]
        self.rows, self.columns = tensor["shape"]
        self.start = 8 + size

    def row(self, index):
        start = self.start + 4 * self.columns * index
        return array.array("f", self.bytes[start : start + 4 * self.columns])


def top(row):
    return row.index(max(row))


def log_sum(row):
    highest = max(row)
    return highest + math.log(sum(math.exp(x - highest) for x in row))


def check_logits(golden, path, bound):
    """Compares the recorded logits. The sum over all of them, which takes long, is compared at every eighth
    position."""
    file, worst, ties = LogitsFile(path), 0.0, 0
    if file.rows != len(golden["tokens"]):
        raise Mismatch(f"logits: {len(golden['tokens'])} rows expected, got {file.rows}")
    for index, (at, ids, logits) in enumerate(zip(golden["at"], golden["ids"], golden["logits"])):
        row = file.row(at)
        errors = [abs(row[id] - logit) for id, logit in zip(ids, logits)]
        if index % 8 == 0:
            errors.append(abs(log_sum(row) - golden["sums"][index]))
        error = max(errors) if all(map(math.isfinite, row)) else math.inf
        worst = max(worst, error)
        if error > bound:
            raise Mismatch(f"logits: after token {at} one is off by {error:.3g}, more than {bound}")
        if top(row) != ids[0]:
            ties += 1
            if logits[0] - dict(zip(ids, logits)).get(top(row), -math.inf) > 2 * bound:
                raise Mismatch(f"logits: after token {at} the most probable must be {ids[0]}, got {top(row)}")
    return f"logits at {len(golden['at'])} positions: off by {worst:.1e} at most, {ties} ties of the first place"


def check_rounded(golden, path, share):
    """Compares recorded logits with those of a device that rounds to 16 bits."""
    file, errors, same = LogitsFile(path), [], 0
    for at, ids, logits in zip(golden["at"], golden["ids"], golden["logits"]):
        row = file.row(at)
        errors += [abs(row[id] - logit) for id, logit in zip(ids, logits)]
        same += top(row) == ids[0]
    same /= len(golden["at"])
    report = f"off by {max(errors):.2g} at most, {sum(errors) / len(errors):.2g} in the mean, {same:.1%} same top tokens"
    if not (same >= share and math.isfinite(sum(errors))):
        raise Mismatch(f"logits: at least {share:.0%} same top tokens expected, got: {report}")
    return f"logits at {len(golden['at'])} positions: {report}"


def check_teacher_forced(answer, path, bound):
    """Compares the most probable tokens after llama.cpp's own tokens with llama.cpp's."""
    file, theirs = LogitsFile(path), answer["llama_cpp"]
    decided, first = 0, None
    for index, (token, gap, error) in enumerate(zip(theirs["tokens"], theirs["gaps"], theirs["errors"])):
        is_decided, found = gap > 2 * (error + bound), top(file.row(len(answer["ids"]) - 1 + index))
        decided += is_decided
        if found != token and is_decided:
            raise Mismatch(f"token {index} of llama.cpp's answer is {token}, {gap} above the next; got {found}")
        if found != token and first is None:
            first = f", first other at {index}, where the gap is {gap} and llama.cpp's error {error}"
    return f"{decided} of {len(theirs['tokens'])} tokens decided and equal{first or ', the others, too'}"


def difference(answer, text):
    """The index of the first token that a text lacks, and its margin in the reference; or None."""
    # An incomplete character is written in several ways.
    right, text = answer["text"].rstrip("\ufffd"), text.rstrip("\ufffd")
    if text == right:
        return None
    at = len(os.path.commonprefix([right, text]))
    index = next((index for index, end in enumerate(answer["ends"]) if end > at), len(answer["tokens"]) - 1)
    return index, answer["margins"][index]


def check_answer(answer, text, bound, what):
    """A text must equal the reference's up to a token whose margin over the second is less than two errors."""
    found = difference(answer, text)
    if found is None:
        return "equal"
    index, margin = found
    if margin > 2 * bound:
        raise Mismatch(f"{what}: token {index}, {margin} above the next, must give\n{answer['text']!r}, got\n{text!r}")
    return f"equal up to token {index}, which is {margin} above the next"


def main(command, path, *rest):
    with open(path, encoding="utf-8") as file:
        golden = json.load(file)
    if command == "file":
        print(golden["file"], golden["sha256"])
    elif command == "tokens":
        print(*golden["logits"]["tokens"])
    elif command == "prompt":
        question = golden["answers"][int(rest[0])]["question"]
        options = ["--prompt=" + question["text"]] if "text" in question else ["--chat", "--prompt=" + question["user"]]
        options += ["--system=" + question["system"]] if "system" in question else []
        sys.stdout.write("".join(option + "\0" for option in options))
    elif command == "logits":
        print(check_logits(golden["logits"], rest[0], float(rest[1])))
    elif command == "rounded":
        print(check_rounded(golden["logits"], rest[0], float(rest[1])))
    elif command == "answer":
        with open(rest[1], encoding="utf-8") as file:
            text = json.load(file)["text"]
        print(check_answer(golden["answers"][int(rest[0])], text, float(rest[2]), "generate"))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except Mismatch as mismatch:
        sys.exit(f"differs: {mismatch}")
