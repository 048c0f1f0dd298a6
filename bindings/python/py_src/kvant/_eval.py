"""Which cache type for a model: its cost in quality and memory."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any


class EvalTable(list[dict[str, Any]]):
    """A row for each cache type, with the keys of `kvant eval --json`."""

    def __str__(self) -> str:
        columns = ["kv", "bytes_per_token", "kl_mean", "top1_agreement", "perplexity"]
        rows = [columns] + [[_text(row[column]) for column in columns] for row in self]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)
        return "\n".join(lines)

    def plot(self, axes: Any = None) -> Any:
        """Divergence against memory, with matplotlib. Returns the axes."""
        if axes is None:
            import matplotlib.pyplot

            axes = matplotlib.pyplot.subplots()[1]
        for row in self:
            axes.scatter(row["bytes_per_token"], max(row["kl_mean"], 1e-9))
            axes.annotate(row["kv"], (row["bytes_per_token"], max(row["kl_mean"], 1e-9)))
        axes.set(xlabel="bytes per token", ylabel="mean KL divergence, nats", yscale="log")
        return axes


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def eval(
    model: str | os.PathLike[str] | None,
    text: str,
    kv: Sequence[str] = ("f16", "tq8c", "tq6c", "tq5c", "tq4c", "tq3c", "tq2c"),
    *,
    device: str = "auto",
    window_tokens: int = 1024,
) -> EvalTable:
    """Compares the predictions of `text` with each cache type to those with an f32 cache, as `kvant eval` does.

    `model` is as in `LLM`. The measurement runs in a process of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "text.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        command = [sys.executable, "-m", "kvant", "eval", "--json", "--text", path, "--kv", ",".join(kv)]
        command += ["--device", device, "--window-tokens", str(window_tokens)]
        command += [] if model is None else ["--model", os.fspath(model)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        message = done.stderr.strip().rsplit("error: ", 1)[-1]
        raise ValueError(f"eval: {message}".replace(path, "text"))
    return EvalTable(json.loads(line) for line in done.stdout.splitlines())
