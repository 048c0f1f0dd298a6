import json
import os
import shutil
import subprocess
import sys

import kvant


def run(*args: str, **options) -> subprocess.CompletedProcess:
    command = shutil.which("kvant", path=sys.exec_prefix + "/bin")
    command = [command] if command else [sys.executable, "-m", "kvant"]
    return subprocess.run([*command, *args], capture_output=True, text=True, timeout=120, **options)


def test_the_command_runs():
    assert run("--version").stdout.strip() == f"kvant {kvant.__version__}"
    done = run("generate", "--max-tokens", "5", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["generated_tokens"] == 5


def test_errors_have_exit_codes():
    done = run("generate", "--model", "/nothing")
    assert done.returncode == 1 and done.stderr == "error: /nothing: no such directory or file\n"
    assert run("generate", "--max-tokens", "0").returncode == 1


def test_a_closed_pipe_is_quiet():
    done = subprocess.run(f"{sys.executable} -m kvant --help | head -1", shell=True, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout


def test_nvidia_libraries_are_searched_in_packages(tmp_path):
    for folder in "nvidia/cu13/lib", "nvidia/cublas/lib", "nvidia/cuda_nvrtc/include", "other/lib":
        (tmp_path / folder).mkdir(parents=True)
    code = "import kvant; print(*kvant._cuda_folders(), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    found = [folder for folder in done.stdout.splitlines() if folder.startswith(str(tmp_path))]
    assert found == [str(tmp_path / "nvidia/cublas/lib"), str(tmp_path / "nvidia/cu13/lib")]


def test_eval_returns_a_table():
    text = "Returns the number of elements in the list. " * 20
    table = kvant.eval(None, text, ["f16", "tq4", "tq2"], window_tokens=256)
    assert [row["kv"] for row in table] == ["f16", "tq4", "tq2"]
    assert table[0]["kl_mean"] < table[1]["kl_mean"] < table[2]["kl_mean"]
    assert table[0]["bytes_per_token"] > table[1]["bytes_per_token"]
    lines = str(table).splitlines()
    assert lines[0].split() == ["kv", "bytes_per_token", "kl_mean", "top1_agreement", "perplexity"]
    assert len(lines) == 4


def test_eval_reports_errors():
    for kv, message in (["tq7"], "tq7"), (["f16"], "at least 2 tokens"):
        try:
            kvant.eval(None, "", kv)
        except ValueError as error:
            assert message in str(error) and "tmp" not in str(error)
        else:
            raise AssertionError("no error")
