"""Downloads the vocabularies with which llama.cpp tests its tokenizers, if they come with expected ids.

    python3 tools/gguf_vocabularies.py [--out target/gguf-vocabularies]

They are in the source package of llama-cpp-python on PyPI: `NAME.gguf`, texts in `NAME.gguf.inp`, and the ids of each
text in `NAME.gguf.out`, by transformers. The tests of kvant-models compare with them if they exist; `./check all`
downloads them. It needs pip and downloads 77 MB.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.3.36"
DIRECTORY = "/vendor/llama.cpp/models/"


def download(directory):
    """The path of the source package."""
    package = f"llama-cpp-python=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=llama-cpp-python", f"--dest={directory}"]
    done = subprocess.run([*command, package], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr.strip() or f"pip does not find {package}")
    (path,) = Path(directory).glob("*.tar.gz")
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "target/gguf-vocabularies")
    out = parser.parse_args().out
    if out.exists():
        return
    files = {}
    with tempfile.TemporaryDirectory() as directory, tarfile.open(download(directory)) as archive:
        for member in archive:
            _, found, name = member.name.partition(DIRECTORY)
            if found and member.isfile() and name.startswith("ggml-vocab-") and "/" not in name:
                files[name.removeprefix("ggml-vocab-")] = archive.extractfile(member).read()
    out.parent.mkdir(parents=True, exist_ok=True)
    # The directory appears when it is complete.
    part = Path(tempfile.mkdtemp(dir=out.parent))
    for name, data in files.items():
        if f"{name.split('.gguf')[0]}.gguf.out" in files:
            (part / name).write_bytes(data)
    os.rename(part, out)


if __name__ == "__main__":
    main()
