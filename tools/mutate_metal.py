#!/usr/bin/env python3
"""Breaks the Metal kernels, one small change at a time, and checks that the tests notice.

    tools/mutate_metal.py [--only softcap,attend,attend/keys] [--per-file 8] [--report FILE.md]

Each mutant is a copy of crates/kvant/src/metal with one change in one file; the conformance suites of that file's
operations run with it on the msl-host device (KVANT_METAL_DIR). The changes:

  barrier   one threadgroup_barrier or simdgroup_barrier removed; every one of them is tried
  bound     one comparison off by one: < to <=, <= to <, > to >=, >= to >
  index     one `+ 1` to `+ 2`, or one `- 1` to `- 2`
  sign      one `+=` to `-=`

For each of the last three kinds, `--per-file` are sampled per file, reproducibly for a given text. A mutant that does
not compile is replaced by another. Exit code 1 if a mutant survives that is not listed in EQUIVALENT.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METAL = ROOT / "crates/kvant/src/metal"

# The tests that check a file: parts of their names in the library's suite. The first failure ends the trial, so fast
# tests come first.
SUITES = {
    "add_bias": ["conformance::add_bias::", "conformance::add::"],
    "all_reduce": ["conformance::collectives::"],
    "argmax": ["conformance::sample::argmax", "conformance::sample::signed_zeros"],
    "attend": ["conformance::attend::", "hazards::", "pages::"],
    "block_formats": ["conformance::linear::block_formats", "conformance::linear::embed"],
    "causal_conv": ["conformance::causal_conv::", "hazards::states::"],
    "copy": ["pages::histories::"],
    "delta_rule": ["conformance::delta_rule::", "hazards::states::"],
    "embed": ["conformance::linear::embed", "ids_out_of_range"],
    "gate": ["conformance::gate::"],
    "hadamard": ["conformance::hadamard::", "large_head"],
    "kv_read": ["conformance::kv::", "pages::rows::", "pages::tables::positions", "pages::sealed::"],
    "kv_write": ["conformance::kv::", "conformance::codec::", "pages::"],
    "linear": ["conformance::linear::"],
    "moe": ["conformance::moe::"],
    "norm_rope": ["conformance::norm_rope::", "rope", "rotary"],
    "norm_rope_write": ["conformance::norm_rope::", "pages::rows::", "pages::tables::positions", "pages::sealed::"],
    "pages": ["pages::"],
    "positions": ["position_out_of_range"],
    "rms_norm": ["conformance::rms_norm::", "reduction_race"],
    "sample": ["conformance::sample::"],
    "seal": ["pages::sealed::"],
    "softcap": ["conformance::softcap::"],
}

# Headers belong to the kernels that include them; these suites check them. Files of a folder belong to the operation
# with the folder's name.
HEADERS = {
    "affine": ["linear", "embed"],
    "blocks": ["block_formats"],
    "elements": ["softcap", "kv_write"],
    "ordered": ["argmax", "sample"],
    "planes": ["attend", "kv_read"],
    "reduce": ["rms_norm", "argmax"],
    "rotate": ["hadamard"],
    "rows": ["hadamard", "kv_read", "kv_write", "norm_rope"],
    "slots": ["kv_read", "kv_write", "positions"],
    "turboquant": ["kv_write", "norm_rope_write", "seal"],
    "upper_half": ["norm_rope", "sample"],
    "vectors": ["linear", "gate", "kv_read", "kv_write"],
}

# Equivalent mutants: (file, line of text, reason). The script reports the reason instead of failing.
EQUIVALENT = [
    ("norm_rope_write.metal", "static_assert(", "the compiler asserts it, and both hold"),
    ("blocks.h", "m < 4 ? m :", "at 4 both sides are 4"),
    ("attend/keys.h", "return lo < hi ?", "the range is empty either way"),
    ("attend/tiles.metal", "if (part.x < part.y)", "of no keys zeros are brought, and nothing follows"),
    ("attend/few_rows.metal", "const bool sees = i < end &&", "a part ends with a tile, or where no row sees more"),
    ("attend/keys.h", "const uint held = stored > p.capacity", "where both are equal, the difference is 0"),
    ("attend/lanes.h", "return (dim / 4 + lanes - 1) / lanes;", "the remainder of the quads of a head is never 1"),
    ("attend/merge.metal", "constexpr uint OWN = (D + MERGE_THREADS", "the remainder of a head size is never 1"),
    ("attend/tiles.metal", "if (next < end) {", "of no keys zeros are brought, and nothing follows"),
    ("attend/tiles.metal", "const bool careful =", "values are looked at more often, and found the same"),
    ("attend/softmax.h", "part.m > into.m ?", "where both are equal, either will do"),
    ("blocks.h", "const uint doubled = m < 4 ?", "at 4 both ways give 4"),
    ("copy.metal", "at + 4 <= p.bytes", "the last word is copied byte by byte instead"),
    ("gate.metal", "(up > 7.0f ?", "at the bounds both sides are equal"),
    ("gate.metal", "x = x > 7.0f ?", "at 7 both sides are 7"),
    ("linear.metal", "while (count < TILE_M && cursor < rows) {", "at the end of the rows none is chosen, and the cursor passes it"),
    ("linear.metal", "if (first_output >= p.outputs) {", "outputs that do not exist are computed, and not stored"),
    ("seal.metal", "dim <= MAX_ALONE", "rows of 512 coordinates have all threads, and the same codes"),
    ("sample.metal", "if (f.bin >= shared.from && f.bin <= shared.to)", "the row is read instead of the list"),
    ("turboquant.h", "for (uint b = index; b < blocks", "no thread has a second block"),
    ("norm_rope.h", "total >= 1e-24f", "at that very number both ways are exact enough"),
]


def mutants(text):
    """All (kind, position, old, new) of a kernel's text, except in comments and preprocessor lines."""
    code = re.sub(r"//[^\n]*|^#[^\n]*", lambda m: " " * len(m.group()), text, flags=re.M)
    found = []
    for m in re.finditer(r"\b(?:threadgroup|simdgroup)_barrier\([^;]*\);", code):
        found.append(("barrier", m.start(), m.group(), ";"))
    for m in re.finditer(r" (<=|>=|<|>) ", code):
        line = code[code.rfind("\n", 0, m.start()) + 1 : code.find("\n", m.end())]
        if "template" in line or "_cast<" in line:
            continue
        swap = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}[m.group(1)]
        found.append(("bound", m.start(), m.group(), f" {swap} "))
    for m in re.finditer(r" ([+-]) 1\b(?![.\w])", code):
        found.append(("index", m.start(), m.group(), f" {m.group(1)} 2"))
    for m in re.finditer(r" \+= ", code):
        found.append(("sign", m.start(), m.group(), " -= "))
    return found


def chosen(name, text, per_file):
    """Every barrier, and a reproducible sample of the rest in the order of trials."""
    found = mutants(text)
    rest = [m for m in found if m[0] != "barrier"]
    random.Random(name).shuffle(rest)
    return [m for m in found if m[0] == "barrier"], rest[: 3 * per_file]


def build():
    """The suite's executable, built."""
    command = ["cargo", "test", "-p", "kvant", "--test", "suite", "--no-run", "--message-format=json", "--quiet"]
    out = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    messages = [json.loads(line) for line in out.splitlines()]
    return next(m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "suite")


def tests_of(suite, names):
    """The tests whose names contain one of `names`, in this order."""
    listed = subprocess.run([suite, "--list"], stdout=subprocess.PIPE, text=True, check=True).stdout
    tests = re.findall(r"^(.*): test$", listed, flags=re.M)
    return list(dict.fromkeys(test for name in names for test in tests if name in test))


def noticed(folder, suite, tests, limit):
    """The first test that fails with the kernels of `folder`; None if all pass; 'compile' if clang rejects them."""
    env = dict(os.environ, KVANT_METAL_DIR=str(folder), KVANT_TEST_DEVICE="metal", RUST_BACKTRACE="0")
    for test in tests:
        try:
            run = subprocess.run(
                [suite, "--exact", test], cwd=ROOT / "crates/kvant", env=env, timeout=limit,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        except subprocess.TimeoutExpired:
            return f"{test} (no end)"
        if "does not compile" in run.stdout:
            return "compile"
        if run.returncode != 0:
            return test
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="files, by path without the ending, or folders")
    parser.add_argument("--per-file", type=int, default=8, help="mutants of a file beside its barriers")
    parser.add_argument("--limit", type=int, default=600, help="seconds for one test")
    parser.add_argument("--report", help="write a table in Markdown")
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name]
    suite = build()
    table, survivors = [], 0
    for path in sorted([*METAL.rglob("*.metal"), *METAL.rglob("*.h")]):
        relative = path.relative_to(METAL)
        name, text = relative.with_suffix("").as_posix(), path.read_text()
        if only and not any(name == one or name.startswith(one + "/") for one in only):
            continue
        owners = [name] if name in SUITES else HEADERS.get(name)
        if owners is None:
            owners = [owner for owner in SUITES if name.startswith(owner + "/")]
        if not owners:
            sys.exit(f"{relative}: no suite is known for it")
        tests = tests_of(suite, [name for owner in owners for name in SUITES[owner]])
        barriers, rest = chosen(name, text, args.per_file)
        tally, drawn = {}, 0
        for kind, at, old, new in [*barriers, *rest]:
            if kind != "barrier" and drawn == args.per_file:
                break
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) / "metal"
                shutil.copytree(METAL, folder)
                (folder / relative).write_text(text[:at] + new + text[at + len(old) :])
                start = time.monotonic()
                by = noticed(folder, suite, tests, args.limit)
            line = text.count("\n", 0, at) + 1
            source = text.splitlines()[line - 1].strip()
            if by == "compile":
                continue
            drawn += kind != "barrier"
            made, seen, same = tally.get(kind, (0, 0, 0))
            why = next((why for file, part, why in EQUIVALENT if file == relative.as_posix() and part in source), None)
            verdict = by or (f"the same: {why}" if why else "SURVIVED")
            survivors += by is None and why is None
            tally[kind] = (made + 1, seen + (by is not None), same + (by is None and why is not None))
            print(f"{relative}:{line}: {kind} `{old.strip()}` -> `{new.strip()}` in `{source}`: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
        for kind, (made, seen, same) in sorted(tally.items()):
            table.append((relative.as_posix(), kind, made, seen, same))
    lines = ["| file | change | mutants | noticed | compute the same |", "|---|---|---|---|---|"]
    lines += [f"| {file} | {kind} | {made} | {seen} | {same} |" for file, kind, made, seen, same in table]
    total = [sum(row[i] for row in table) for i in (2, 3, 4)]
    lines.append(f"| all | | {total[0]} | {total[1]} | {total[2]} |")
    print("\n".join(lines))
    if args.report:
        Path(args.report).write_text("\n".join(lines) + "\n")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
