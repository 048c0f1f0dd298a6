#!/usr/bin/env python3
"""Fails when a line of prose is longer than 120 columns.

    tools/check_lines.py [FILE ...]

Reads (default: of all files that git knows) whole-line comments of Rust sources and of kernels, and the text of
Markdown. Code is rustfmt's matter. Tables, code blocks and lines without a space to break at, such as links, may be longer.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120
SOURCES = (".rs", ".cu", ".cuh", ".h", ".metal")
COMMENT = re.compile(r"\s*//[/!]?(?P<text>.*)")
BULLET = re.compile(r"([-*+]|\d+\.)\s+")


def long_lines(text, markdown):
    """The numbers of the lines that are too long, with their lengths."""
    fence = False
    for number, line in enumerate(text.splitlines(), 1):
        match = None if markdown else COMMENT.match(line)
        if not markdown and not match:
            fence = False
            continue
        prose = (line if markdown else match["text"]).strip()
        if prose.startswith(("```", "~~~")):
            fence = not fence
        elif len(line) > LIMIT and not fence and not prose.startswith("|"):
            if " " in BULLET.sub("", prose, count=1):
                yield number, len(line)


def main():
    names = sys.argv[1:]
    if not names:
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    wrong = 0
    for name in names:
        path = ROOT / name
        if path.suffix not in (*SOURCES, ".md") or not path.is_file():
            continue
        for number, length in long_lines(path.read_text(), path.suffix == ".md"):
            print(f"{name}:{number}: {length} columns, at most {LIMIT}")
            wrong += 1
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
