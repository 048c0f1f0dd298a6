#!/usr/bin/env python3
"""Tests and measures the Python package on a machine with an NVIDIA GPU, from wheels built elsewhere.

    tools/h200/python.py WHEELS OUT [STEP...]

WHEELS is a folder with the wheel of kvant, and of other packages that the machine lacks in a suitable version. Steps
(default: tests and speed): `tests` runs the Python tests on the GPU; `speed` measures a model of the size of Gemma 4 E4B
with random weights, and SDPA with a DynamicCache; `host` measures only the host's time of each layer, with narrow
layers; `sanitizer` runs caches in two streams, and codecs, under compute-sanitizer; `rust` runs WHEELS/units, the unit
tests of kvant, those of borrowed memory. OUT gets report.md, which is also printed. The exit status is 1 if something
failed. Needs PyTorch, pytest and pytest-xdist.
"""

import argparse
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TESTS = os.path.join(ROOT, "bindings", "python", "tests")
WORKERS = min(12, os.cpu_count() or 1)


class Report:
    def __init__(self, out):
        self.file = open(os.path.join(out, "report.md"), "w")
        self.failures = 0

    def say(self, line):
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()

    def run(self, name, command, limit, environment, lines=15):
        """Runs a command and reports the last lines of its output."""
        start = time.time()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, cwd=TESTS)
            status, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            status, output = "timeout", (error.stdout or b"").decode(errors="replace")
        self.failures += status != 0
        self.say(f"\n## {name}: {'passed' if status == 0 else f'FAILED ({status})'}, {time.time() - start:.0f} s\n")
        for line in output.strip().splitlines()[-(lines if status == 0 else 60) :]:
            self.say("    " + line[:300])


def install(wheels, site):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    subprocess.run([*command, "--target", site, *glob.glob(os.path.join(wheels, "*.whl"))], check=True)
    return {**os.environ, "PYTHONPATH": site, "KVANT_TEST_DEVICE": "cuda", "PYTHONDONTWRITEBYTECODE": "1"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels")
    parser.add_argument("out")
    parser.add_argument("steps", nargs="*")
    args = parser.parse_args()
    steps = args.steps or ["tests", "speed"]
    unknown = set(steps) - {"tests", "speed", "host", "sanitizer", "rust"}
    if unknown:
        parser.error(f"there is no step {unknown.pop()}")
    out = os.path.abspath(args.out)
    os.makedirs(out, exist_ok=True)
    report = Report(out)
    environment = install(args.wheels, tempfile.mkdtemp())
    versions = "import torch, transformers, kvant; print(torch.cuda.get_device_name(), torch.__version__, "
    versions += "transformers.__version__, kvant.__version__)"
    report.run("versions", [sys.executable, "-c", versions], 120, environment)
    pytest = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--durations=5", "-p", "no:cacheprovider"]
    if "rust" in steps:
        units = os.path.join(os.path.abspath(args.wheels), "units")
        os.chmod(units, 0o755)
        folders = [os.path.join(path, "nvidia", "*", "lib") for path in sys.path if path]
        folders = [folder for pattern in folders for folder in glob.glob(pattern)]
        libraries = ":".join(filter(None, [*folders, os.environ.get("LD_LIBRARY_PATH")]))
        report.run("unit tests", [units, "cuda::runtime"], 120, {**environment, "LD_LIBRARY_PATH": libraries})
    if "tests" in steps:
        report.run("tests of CUDA", [*pytest, "test_cuda.py"], 240, environment)
        matrix = [*pytest, "--tb=line", "-n", str(WORKERS), "test_transformers.py"]
        report.run("families", matrix, 400, environment)
    here = os.path.dirname(os.path.abspath(__file__))
    if "host" in steps:
        report.run("host", [sys.executable, os.path.join(here, "python_speed.py"), "--host"], 120, environment)
    if "speed" in steps:
        report.run("speed", [sys.executable, os.path.join(here, "python_speed.py")], 300, environment, lines=60)
    if "sanitizer" in steps:
        program = [sys.executable, os.path.join(here, "python_memcheck.py")]
        # Compiles the kernels, too.
        report.run("caches and codecs", program, 100, environment)
        sanitizer = shutil.which("compute-sanitizer", path=os.environ["PATH"] + ":/usr/local/cuda/bin")
        report.run("memcheck", [sanitizer or "compute-sanitizer", "--error-exitcode=1", *program], 150, environment)
    report.say(f"\n{report.failures} failures")
    sys.exit(report.failures > 0)


if __name__ == "__main__":
    main()
