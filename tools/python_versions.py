#!/usr/bin/env python3
"""Runs the tests of `kvant.transformers`, and the README's examples, with several versions of transformers: the oldest
supported and the newest.

    tools/python_versions.py [VERSION...]

Run tools/python_package.py first: its environment has the package. Versions (default: 5.20.0 and the newest) are
downloaded into target/. Prints a line for each; the exit status is 1 if a test failed. Half a minute per version.
"""

import os
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.path.abspath(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")))
PYTHON = os.path.join(TARGET, "python", "bin", "python")
OLDEST = "5.20.0"


def folder_of(version):
    """A folder with this version of transformers alone; its dependencies are the environment's."""
    folder = os.path.join(TARGET, "transformers", version or "newest")
    name = f"transformers=={version}" if version else "transformers"
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", folder, name], check=True)
    return folder


def main():
    failures = 0
    for version in sys.argv[1:] or [OLDEST, None]:
        environment = {**os.environ, "PYTHONPATH": folder_of(version)}
        found = "import transformers; print(transformers.__version__)"
        name = subprocess.run([PYTHON, "-c", found], check=True, env=environment, capture_output=True, text=True).stdout.strip()
        start = time.time()
        command = [PYTHON, "-m", "pytest", "-q", "--tb=short", "tests/test_transformers.py", "tests/test_readme.py"]
        done = subprocess.run(command, cwd=os.path.join(ROOT, "bindings", "python"), env=environment, capture_output=True, text=True)
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        print(f"transformers {name}: {last} ({time.time() - start:.0f} s)", flush=True)
        if done.returncode != 0:
            failures += 1
            print(done.stdout + done.stderr, file=sys.stderr)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
