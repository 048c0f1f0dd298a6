"""Downloads Metal kernels that Apple's compiler accepts: the corpus of msl-host's test `foreign`.

    python3 tools/foreign_kernels.py [--out target/foreign-kernels]

`OUT/mlx` has MLX's kernels, from the wheel mlx-metal on PyPI (45 MB), `OUT/ggml` has ggml's, from the crate
llama-cpp-sys-2 on crates.io (6 MB). Both are pinned by their hashes and not part of this repository: MLX is under the
MIT license, copyright Apple Inc., ggml under the MIT license, copyright the ggml authors.
"""

import argparse
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MLX = "mlx-metal==0.32.4"
MLX_HASH = "8019b2db622599267d66cc168b2f0dbf5af929790a6c3b3913e00eabc42a7947"
MLX_ROOT, MLX_KERNELS = "mlx/include/", "mlx/include/mlx/backend/metal/kernels/"
GGML = "llama-cpp-sys-2-0.1.161"
GGML_HASH = "e9bea77fde41bbc15a278891cd5edd2ba07c5260d162614b41080ba1f100b39b"
GGML_ROOT = f"{GGML}/llama.cpp/ggml/src/"


def checked(name, data, expected):
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        sys.exit(f"{name}: SHA-256 is {found}, expected {expected}")
    return io.BytesIO(data)


def mlx(out):
    """The headers of the kernels, by their include paths."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--platform=macosx_14_0_arm64", f"--dest={directory}", MLX]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr.strip() or f"pip does not find {MLX}")
        (path,) = Path(directory).glob("*.whl")
        data = checked(MLX, path.read_bytes(), MLX_HASH)
    with zipfile.ZipFile(data) as wheel:
        for name in wheel.namelist():
            if name.startswith(MLX_KERNELS) and name.endswith(".h"):
                write(out / name.removeprefix(MLX_ROOT), wheel.read(name))


def ggml(out):
    """The kernels, and the headers that they include."""
    url = f"https://static.crates.io/crates/llama-cpp-sys-2/{GGML}.crate"
    with urllib.request.urlopen(url, timeout=60) as response:
        data = checked(GGML, response.read(), GGML_HASH)
    with tarfile.open(fileobj=data) as crate:
        for member in crate:
            name = member.name.removeprefix(GGML_ROOT)
            kernel = name.startswith("ggml-metal/kernels/") or name == "ggml-metal/ggml-metal-impl.h"
            if name != member.name and member.isfile() and (kernel or name == "ggml-common.h"):
                write(out / Path(name).name, crate.extractfile(member).read())


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "target/foreign-kernels")
    out = parser.parse_args().out
    if out.exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    # The directory appears when it is complete.
    part = Path(tempfile.mkdtemp(dir=out.parent))
    try:
        mlx(part / "mlx")
        ggml(part / "ggml")
        os.rename(part, out)
    except OSError as error:
        if not out.exists():  # else another process was faster
            sys.exit(f"cannot download: {error}")
    finally:
        shutil.rmtree(part, ignore_errors=True)


if __name__ == "__main__":
    main()
