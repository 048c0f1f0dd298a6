#!/usr/bin/env python3
"""Fails on lines of prose longer than 120 columns, and on wording that CONTRIBUTING.md rejects.

    tools/check_text.py [--count] [FILE ...]

Reads comments of Rust sources, kernels, scripts and their docstrings, and the text of Markdown (default: of all files
that git tracks).
rustfmt checks code. Tables, code blocks and lines without a space to break at, such as links, may be longer.
`--count` prints the rejected wordings of each folder instead.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120
SOURCES = (".rs", ".cu", ".cuh", ".h", ".metal")
SCRIPTS = (".py", ".sh")
COMMENT = re.compile(r"\s*//[/!]?(?P<text>.*)")
TRAILING = re.compile(r"[;,{})\]]\s+//\s(?P<text>.*)")
SCRIPT_COMMENT = re.compile(r"\s*#(?!!)\s?(?P<text>.*)")
BULLET = re.compile(r"([-*+]|\d+\.)\s+")
CODE = re.compile(r"`[^`]*`")

# Files that quote rejected wordings.
QUOTES = {"CONTRIBUTING.md", "tools/check_text.py"}

# Openings that refer to an unnamed noun.
OPENINGS = re.compile(r"(?:^|[.:;] )(The same|Those|The others|What|Such|Of which|From which on|So many|As many as there are)\b(?![^.]*\?)")

# Phrases anywhere, and the better word.
PHRASES = [
    (re.compile(rf"\b({phrase})\b", re.IGNORECASE), better)
    for phrase, better in {
        "of which": "whose, or a second sentence",
        "so many|as many as there are": "a number or a noun: `len` bytes",
        "from which on": "the minimum ...",
        "what is (?:left|there)|what was left": "the rest, the remainder",
        "(?:where|that|as) there (?:is|are)": "if it has ..., a noun",
        "but for": "except",
        "the most (?!likely|recent|common|expensive|downloaded|frequent|significant|probable|important|used|precise|accurate|specific|urgent)[a-z]+": "max",
        "at least so|at most so": "a number",
    }.items()
]

# Names of functions, fields and constants.
NAMES = re.compile(r"\b(?:most|least)_[a-z]\w*|\b(?:MOST|LEAST)_[A-Z]\w*|\bfn what_\w+")


def prose(text, suffix):
    """Lines of prose: their numbers, their text, whether each starts a paragraph, and the whole line."""
    fence, docstring, last = False, False, -1
    for number, line in enumerate(text.splitlines(), 1):
        if suffix == ".md":
            words = line.strip()
        elif suffix in SCRIPTS:
            quotes = line.count('"""') if suffix == ".py" else 0
            match = SCRIPT_COMMENT.match(line)
            if docstring or quotes:
                words = line.replace('"""', "").strip()
                docstring ^= quotes % 2 == 1
            elif match:
                words = match["text"].strip()
            else:
                continue
        else:
            match = COMMENT.match(line)
            if not match:
                fence = False
                if match := TRAILING.search(line):
                    yield number, match["text"].strip(), True, None
                continue
            words = match["text"].strip()
        if words.startswith(("```", "~~~")):
            fence = not fence
        elif not fence and words:
            starts = last != number - 1 or words.startswith(("#", "-", "*", "|")) or BULLET.match(words) is not None
            last = number
            yield number, words, starts, line


def long_lines(lines):
    for number, words, _, line in lines:
        if line is not None and len(line) > LIMIT and not words.startswith("|") and " " in BULLET.sub("", words, count=1):
            yield number, f"{len(line)} columns, at most {LIMIT}"


def wordings(lines):
    """Rejected wordings. A phrase is found across the end of a line; it counts for the line on which it ends."""
    before = ""
    for number, words, starts, _ in lines:
        words = CODE.sub("`", BULLET.sub("", words.lstrip("#|*> "), count=1))
        head = "" if starts else before[-60:] + " "
        for match in OPENINGS.finditer(head + words):
            if match.end(1) > len(head) and not (match.start(1) == 0 and head):
                yield number, f"a sentence that opens with {match[1]!r}: name the noun"
        for pattern, better in PHRASES:
            for match in pattern.finditer(head + words):
                if match.end(1) > len(head):
                    yield number, f"{match[1]!r}: {better}"
        before = words


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true")
    parser.add_argument("files", nargs="*")
    args = parser.parse_args()
    names = args.files
    if not names:
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    wrong, counts = 0, Counter()
    for name in names:
        path = ROOT / name
        if path.suffix not in (*SOURCES, *SCRIPTS, ".md") or not path.is_file():
            continue
        text = path.read_text()
        lines = list(prose(text, path.suffix))
        found = [] if path.suffix in SCRIPTS else list(long_lines(lines))
        if str(path.relative_to(ROOT)) not in QUOTES:
            found += wordings(lines)
            if path.suffix != ".md":
                for number, line in enumerate(text.splitlines(), 1):
                    found += [(number, f"{match[0]}: max_, min_, or the claim that a test checks") for match in NAMES.finditer(line)]
        counts[path.relative_to(ROOT).parent] += len(found)
        wrong += len(found)
        if not args.count:
            for number, reason in found:
                print(f"{name}:{number}: {reason}")
    if args.count:
        for folder, count in sorted(counts.items()):
            if count:
                print(f"{count:5} {folder}")
        print(f"{wrong:5} in all")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
