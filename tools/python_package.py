#!/usr/bin/env python3
"""Builds the Python package's wheel, installs it into an environment in target/, and runs its tests.

    tools/python_package.py [--release] [--manylinux] [--lm-eval] [PYTEST-ARGUMENT...]

The environment sees the packages of this program's Python: tests of `kvant.transformers` run if it has torch and
transformers, and are skipped otherwise. Without a network to install maturin, everything is skipped with a message.
`--release` builds the wheel as it is published and checks its size. `--manylinux` builds it for glibc 2.17 and later,
with the compiler and the libraries of the package ziglang, and checks its symbols. `--lm-eval` runs lm-eval with a
KvantCache on a released model, which tools/released_models.py downloads.
"""

import argparse
import glob
import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGE = os.path.join(ROOT, "bindings", "python")
TARGET = os.path.abspath(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")))
ENVIRONMENT = os.path.join(TARGET, "python")
MAX_BYTES = 25_000_000
ZIG = "ziglang==0.17.1"
LM_EVAL = "lm-eval[hf]==0.4.13"


def installed(*requirements):
    """The folder of the environment's programs, or None if packages cannot be downloaded."""
    programs = os.path.join(ENVIRONMENT, "bin")
    if not os.path.exists(os.path.join(programs, "python")):
        venv.create(ENVIRONMENT, with_pip=True)
    pip = [os.path.join(programs, "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, "-r", os.path.join(PACKAGE, "tests", "requirements.txt")]).returncode != 0:
        return None
    # After the installation: the caller's packages do not replace those of the environment.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    with open(os.path.join(ENVIRONMENT, "lib", version, "site-packages", "caller.pth"), "w") as file:
        file.write(sysconfig.get_path("purelib") + "\n")
    if requirements and subprocess.run([*pip, *requirements]).returncode != 0:
        return None
    return programs


def build(programs, release, manylinux):
    """The path of a new wheel."""
    wheels = os.path.join(TARGET, "wheels", "release" if release else "dev")
    for old in glob.glob(os.path.join(wheels, "*.whl")):
        os.unlink(old)
    command = [os.path.join(programs, "maturin"), "build", "--quiet", "--locked", "--out", wheels]
    command += ["--profile", "release" if release else "dev", "--manifest-path", os.path.join(PACKAGE, "Cargo.toml")]
    if manylinux:
        # maturin checks the versions of the symbols.
        command += ["--zig", "--compatibility", "manylinux2014"]
    path = os.pathsep.join([programs, os.environ["PATH"]])
    subprocess.run(command, check=True, env={**os.environ, "CARGO_TARGET_DIR": TARGET, "PATH": path})
    [wheel] = glob.glob(os.path.join(wheels, "*.whl"))
    return wheel


def has_released_model():
    """Downloads the model that lm-eval tests."""
    return subprocess.run([sys.executable, os.path.join(ROOT, "tools", "released_models.py"), "smollm2"]).returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", action="store_true")
    parser.add_argument("--manylinux", action="store_true")
    parser.add_argument("--lm-eval", action="store_true")
    args, of_pytest = parser.parse_known_args()
    if args.lm_eval and not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        print("skipped: lm-eval requires torch and transformers")
        return
    programs = installed(*[ZIG] * args.manylinux, *[LM_EVAL] * args.lm_eval)
    if programs is None or (args.lm_eval and not has_released_model()):
        print("skipped: packages cannot be downloaded")
        return
    wheel = build(programs, args.release, args.manylinux)
    size = os.path.getsize(wheel)
    print(f"{os.path.basename(wheel)}: {size / 1e6:.1f} MB")
    if args.release and size > MAX_BYTES:
        sys.exit(f"python_package: the wheel must have at most {MAX_BYTES / 1e6:.0f} MB")
    python = os.path.join(programs, "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--force-reinstall"]
    subprocess.run([*pip, wheel], check=True)
    tests = [python, "-m", "pytest", "-q", *["tests/test_lm_eval.py"] * args.lm_eval, *of_pytest]
    sys.exit(subprocess.run(tests, cwd=PACKAGE).returncode)


if __name__ == "__main__":
    main()
