#!/usr/bin/env python3
"""Checks that every relative link and anchor in every Markdown file of the repository resolves.

    python3 tools/check_links.py [FILE.md..]

Prints `FILE:LINE: reason` for each broken link and exits with 1. Refuses absolute paths and links that leave the
repository. Does not fetch web addresses. Needs Python 3.9, nothing else.
"""

import pathlib
import re
import subprocess
import sys
from urllib.parse import unquote

ROOT = pathlib.Path(__file__).resolve().parent.parent
INLINE = re.compile(r"!?\[(?:[^\[\]\\]|\\.|\[[^\[\]]*\])*\]"  # the text, which may be an image
                    r"\(\s*(<[^<>]*>|[^()\s]*(?:\([^()\s]*\)[^()\s]*)*)"  # the target
                    r"(?:\s+(?:\"[^\"]*\"|'[^']*'))?\s*\)")  # the title
DEFINITION = re.compile(r"^ {0,3}\[[^\]]+\]:\s*(<[^<>]*>|\S+)")
HTML = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)\s*=\s*[\"']([^\"']+)[\"']", re.I)
ANCHOR = re.compile(r"<[a-z]+\b[^>]*?\b(?:id|name)\s*=\s*[\"']([^\"']+)[\"']", re.I)
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.I)


def repository_files():
    """Files that git tracks or would add, relative to the root; without git, every file outside of build folders."""
    try:
        command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        names = listed.stdout.decode().split("\0")
        files = {name for name in names if name and (ROOT / name).is_file()}
    except (OSError, subprocess.CalledProcessError):
        skipped = {"target", ".git", ".venv", "node_modules"}
        files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*")
                 if path.is_file() and not skipped & set(path.relative_to(ROOT).parts)}
    return files


def text_lines(path):
    """Pairs of number and line, fenced code and comments left empty."""
    fence = None
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)
    prose = []
    for number, line in enumerate(text.split("\n"), 1):
        mark = re.match(r"^\s*(`{3,}|~{3,})", line)
        if mark:
            if fence is None:
                fence = mark[1]
            elif mark[1][0] == fence[0] and len(mark[1]) >= len(fence) and line.strip() == mark[1]:
                fence = None
            prose.append((number, ""))
        elif fence is None:
            prose.append((number, line))
        else:
            prose.append((number, ""))
    return prose


def without_code(line):
    return re.sub(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", lambda m: " " * len(m[0]), line)


def slug(heading):
    """GitHub's anchor of a heading."""
    heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    heading = re.sub(r"<[^>]+>", "", heading).replace("`", "").strip().lower()
    heading = re.sub(r"(?<!\w)[*_]+|[*_]+(?!\w)", "", heading)
    return "".join("-" if c == " " else c for c in heading if c.isalnum() or c in " -_")


def anchors(path, cache={}):
    if path not in cache:
        found, seen = set(), {}
        for _, line in text_lines(path):
            found.update(ANCHOR.findall(line))
            heading = re.match(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$", line)
            if heading:
                name = slug(heading[1])
                count = seen.get(name, 0)
                seen[name] = count + 1
                found.add(name if count == 0 else f"{name}-{count}")
        cache[path] = found
    return cache[path]


def problem(link, page, files, folders):
    """The reason why a link is invalid, or None."""
    link = link.strip("<>").strip()
    if link.startswith("//"):
        return "an address without a scheme"
    if re.match(r"^file:", link, re.I) or link.startswith(("/", "\\", "~")) or re.match(r"^[a-z]:[\\/]", link, re.I):
        return "an absolute path"
    if SCHEME.match(link):
        return None
    target, _, anchor = link.partition("#")
    target = unquote(target.partition("?")[0])
    if target:
        parts = list(page.parent.relative_to(ROOT).parts)
        for part in target.split("/"):
            if part == "..":
                if not parts:
                    return "leaves the repository"
                parts.pop()
            elif part not in ("", "."):
                parts.append(part)
        name = "/".join(parts)
        if name not in files and name not in folders:
            return "no such file in the repository"
        where = ROOT / name
    else:
        where = page
    if anchor and where.suffix == ".md" and unquote(anchor).lower() not in anchors(where):
        return f"no heading #{anchor} in {where.relative_to(ROOT)}"
    return None


def main(names):
    files = repository_files()
    folders = {""}
    for name in files:
        parts = name.split("/")[:-1]
        folders.update("/".join(parts[:i + 1]) for i in range(len(parts)))
    pages = [pathlib.Path(name).resolve() for name in names] or sorted(ROOT / name for name in files if name.endswith(".md"))
    broken = links = 0
    for page in pages:
        lines = text_lines(page)
        # A link's text may begin on the previous line.
        for index, (number, line) in enumerate(lines):
            line = without_code(line)
            found = [m[1] for m in INLINE.finditer(line)] + HTML.findall(line)
            definition = DEFINITION.match(line)
            if definition and not definition[0].lstrip().startswith("[^"):
                found.append(definition[1])
            if index and lines[index - 1][1].strip() and line.strip():
                joined = without_code(lines[index - 1][1]) + " " + line
                start = len(joined) - len(line)
                found += [m[1] for m in INLINE.finditer(joined) if m.start() < start < m.end()]
            for link in found:
                links += 1
                why = problem(link, page, files, folders)
                if why:
                    broken += 1
                    print(f"{page.relative_to(ROOT)}:{number}: {link}: {why}")
    if broken:
        print(f"{broken} broken links", file=sys.stderr)
        return 1
    print(f"{links} links in {len(pages)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
