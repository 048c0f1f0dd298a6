#!/usr/bin/env python3
"""Draws the plots and writes the tables of the documentation from docs/benchmarks/data/*.json.

    python3 tools/plot_performance.py            # writes plots, docs/benchmarks/tables/*.txt, and tables between markers
    python3 tools/plot_performance.py --check    # exit code 1 if a plot or a table differs from the data

In PAGES a table is between `<!-- table NAME -->` and `<!-- end -->`. Needs Python 3.9, nothing else.
"""

import json
import math
import pathlib
import re
import sys
from html import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "docs/benchmarks/data"
IMAGES = ROOT / "docs/images"
TABLES = ROOT / "docs/benchmarks/tables"
PAGES = [ROOT / "README.md", ROOT / "docs/performance.md"]
TQ = ["tq8", "tq6", "tq5", "tq4"]


# ---------------------------------------------------------------------------------------------------------------- data

def load():
    records = {}
    for path in sorted(DATA.glob("*.json")):
        for record in json.loads(path.read_text(encoding="utf-8")):
            for key in ("id", "title", "commit", "date", "machine", "command", "in_repository", "unit", "columns", "rows"):
                if key not in record:
                    raise SystemExit(f"{path.name}: {record.get('id')}: no {key}")
            if record["id"] in records:
                raise SystemExit(f"{path.name}: {record['id']} is there twice")
            records[record["id"]] = record
    return records


def rows(record):
    """Each row as a dictionary by column."""
    return [dict(zip(record["columns"], row)) for row in record["rows"]]


def shape(row):
    return (row["D"], row["H"], row["Hk"])


def shape_name(row):
    return f"D = {row['D']}, H = {row['H']}, Hk = {row['Hk']}"


def best(row, names):
    """The minimum of the columns `names` that have a value, with its column."""
    found = [(row[name], name) for name in names if row.get(name) is not None]
    return min(found) if found else (None, None)


def scientific(value):
    if 1 <= value < 10:
        return f"{value:.1f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def number(value):
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and 0 < value < 0.01:
        return scientific(value)
    return f"{value:g}" if value < 1e6 else f"{value:.0f}"


# ----------------------------------------------------------------------------------------------------------------- SVG

# Colours by role: (light, dark). Distinguishable by people with colour-vision deficiencies; labels name every series.
COLOURS = {
    "kvant": ("#0b62c4", "#62a8ff"),
    "one": ("#b45309", "#f0a04b"),
    "two": ("#6b7280", "#a0a8b4"),
    "three": ("#0f8a6a", "#45c9a1"),
    "four": ("#8a4bb0", "#c48ae8"),
}
STYLE = """
  .page { fill: #ffffff }
  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 14px; font-weight: 600 }
  .small { font-size: 11px; fill: #59636e }
  .grid { stroke: #d9dee3; stroke-width: 1 }
  .axis { stroke: #59636e; stroke-width: 1 }
  .limit { stroke: #cf222e; stroke-width: 1.5; stroke-dasharray: 5 3; fill: none }
  .limit-text { font-size: 11px; fill: #cf222e }
"""
DARK = """
    .page { fill: #0d1117 }
    text { fill: #e6edf3 }
    .small { fill: #9198a1 }
    .grid { stroke: #2b323b }
    .axis { stroke: #9198a1 }
    .limit { stroke: #ff7b72 }
    .limit-text { fill: #ff7b72 }
"""


class Svg:
    def __init__(self, width, height, title):
        self.width, self.height = width, height
        self.parts = []
        self.title = title

    def add(self, text):
        self.parts.append(text)

    def text(self, x, y, words, kind="", anchor="start", rotate=None):
        turn = f' transform="rotate({rotate} {x:.1f} {y:.1f})"' if rotate else ""
        style = f' class="{kind}"' if kind else ""
        self.add(f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(words)}</text>')

    def line(self, x1, y1, x2, y2, kind):
        self.add(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def path(self, points, colour):
        d = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add(f'<polyline class="s-{colour}" points="{d}"/>')

    def dot(self, x, y, colour, radius=4):
        self.add(f'<circle class="f-{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>')

    def bar(self, x, y, width, height, colour):
        self.add(f'<rect class="f-{colour}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>')

    def render(self):
        light, dark = STYLE, DARK
        for name, (day, night) in COLOURS.items():
            light += f"  .f-{name} {{ fill: {day} }}\n"
            light += f"  .s-{name} {{ stroke: {day}; stroke-width: 2; fill: none }}\n"
            dark += f"    .f-{name} {{ fill: {night} }}\n    .s-{name} {{ stroke: {night} }}\n"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" ' \
               f'width="{self.width}" height="{self.height}">\n<title>{escape(self.title)}</title>\n'
        style = f"<style>{light}  @media (prefers-color-scheme: dark) {{{dark}  }}\n</style>\n"
        page = f'<rect class="page" width="{self.width}" height="{self.height}" rx="6"/>\n'
        return head + style + page + "\n".join(self.parts) + "\n</svg>\n"


class Axes:
    """A rectangle with a scale in each direction, linear or logarithmic."""

    def __init__(self, svg, box, x, y, log_x=False, log_y=False):
        self.svg, self.box, self.log = svg, box, (log_x, log_y)
        self.ranges = (x, y)

    def at(self, x, y):
        left, top, width, height = self.box
        place = []
        for value, (low, high), log in zip((x, y), self.ranges, self.log):
            if log:
                value, low, high = math.log10(value), math.log10(low), math.log10(high)
            place.append((value - low) / (high - low))
        return left + place[0] * width, top + (1 - place[1]) * height

    def grid(self, xs, ys, x_name="", y_name=""):
        """Lines and labels at pairs (value, label)."""
        left, top, width, height = self.box
        for value, label in xs:
            x, _ = self.at(value, self.ranges[1][0])
            self.svg.line(x, top, x, top + height, "grid")
            self.svg.text(x, top + height + 15, label, "small", "middle")
        for value, label in ys:
            _, y = self.at(self.ranges[0][0], value)
            self.svg.line(left, y, left + width, y, "grid")
            self.svg.text(left - 6, y + 4, label, "small", "end")
        self.svg.line(left, top + height, left + width, top + height, "axis")
        if x_name:
            self.svg.text(left + width / 2, top + height + 33, x_name, "small", "middle")
        if y_name:
            self.svg.text(left - 42, top + height / 2, y_name, "small", "middle", -90)


def source(svg, record, y, x=16):
    where = "" if record["in_repository"] else "; by a program that is not in the repository"
    svg.text(x, y, f"commit {record['commit']}, {record['date']}, {short_machine(record)}{where}", "small")


def short_machine(record):
    machine = record["machine"]
    if "H200" in machine:
        return "NVIDIA H200"
    for word, name in (("Zen 3", "AMD EPYC (Zen 3)"), ("EPYC", "AMD EPYC (Zen 4)"), ("Xeon", "Intel Xeon")):
        if word in machine:
            cores = machine.split(" of an ")[0]
            return f"{cores} of an {name}"
    return machine


def legend(svg, x, y, entries):
    for colour, label in entries:
        svg.bar(x, y - 9, 14, 10, colour)
        svg.text(x + 19, y, label, "small")
        x += 34 + 6.3 * len(label)


def bytes_and_kl(records):
    record = records["accuracy-shipped-model"]
    svg = Svg(640, 350, "Bytes per token of each cache type against the divergence it causes")
    svg.text(16, 26, "Bytes and divergence of cache types", "title")
    axes = Axes(svg, (70, 46, 540, 222), (0, 13000), (1e-7, 1), log_y=True)
    axes.grid([(x, f"{x}") for x in range(0, 13000, 2000)], [(10.0 ** e, f"1e{e}") for e in range(-7, 1)],
              "bytes per token, keys and values of all layers", "mean KL from an f32 cache, nats")
    points = [(row["cache"], row["bytes per token"], row["KL mean"], row["same top token, %"]) for row in rows(record)]
    centred = [point for point in points if point[0].endswith("c")]
    points = [point for point in points if point not in centred]
    svg.path([axes.at(x, y) for _, x, y, _ in points], "two")
    svg.path([axes.at(x, y) for _, x, y, _ in centred], "one")
    for _, x, y, _ in centred:
        svg.dot(*axes.at(x, y), "one", 4)
    px, py = axes.at(*centred[0][1:3])
    svg.text(px + 8, py + 14, "with sealed pages: tq8c to tq2c")
    for name, x, y, same in points:
        px, py = axes.at(x, y)
        svg.dot(px, py, "kvant", 5)
        if name == "f16":
            svg.text(px + 4, py + 20, f"f16: {same:.2f} % same top token", anchor="end")
        else:
            svg.text(px + 10, py - 3, f"{name}: {same:.1f} % same top token")
    svg.text(16, 322, "The shipped model, 36540 predictions of held-out text; same top token: as with an f32 cache.", "small")
    source(svg, record, 338)
    return svg.render()


def decode_cpu(records):
    pairs = [
        ("kvant f16", ["f16"], "kvant"), ("ggml f16", ["ggml f16 llama.cpp", "ggml f16 contiguous"], "one"),
        ("candle", ["candle f32", "candle f16"], "two"),
        ("kvant tq8", ["tq8"], "kvant"), ("ggml q8_0", ["ggml q8_0 llama.cpp", "ggml q8_0 contiguous"], "one"),
        ("kvant tq4", ["tq4"], "kvant"), ("ggml q4_0", ["ggml q4_0 llama.cpp", "ggml q4_0 contiguous"], "one"),
    ]
    svg = Svg(860, 650, "Decode attention on two CPUs next to ggml and candle")
    svg.text(16, 26, "Decode attention on a CPU, 32768 tokens, from memory: milliseconds, less is better", "title")
    for column, key in enumerate(("epyc", "xeon")):
        record = records[f"cpu-decode-{key}"]
        long = [row for row in rows(record) if row["tokens"] == 32768]
        for line, row in enumerate(long):
            left, top, height = 90 + column * 430, 72 + line * 182, 138
            axes = Axes(svg, (left, top, 320, height), (0.8, 600), (0, len(pairs)), log_x=True)
            axes.grid([(x, f"{x}") for x in (1, 3, 10, 30, 100, 300)], [])
            name = f", read ceiling {row['read ceiling GB/s']:g} GB/s"
            svg.text(left, top - 8, shape_name(row) + name)
            for floor, label in (("floor f16", "f16"), ("floor tq4", "tq4")):
                x, _ = axes.at(row[floor] / 1e3, 0)
                svg.line(x, top, x, top + height, "limit")
                svg.text(x + 3, top + height - 4, label, "limit-text")
            for i, (label, names, colour) in enumerate(pairs):
                us, _ = best(row, names)
                x, y = axes.at(us / 1e3, len(pairs) - i - 0.5)
                svg.text(left - 8, y + 4, label, "small", "end")
                svg.dot(x, y, colour, 5)
                svg.text(x + 9, y + 4, f"{us / 1e3:.1f}", "small")
        source(svg, record, 46, 90 + column * 430)
    svg.text(16, 622, "Dashed: the time to read the keys and values once at the ceiling of the same run, in f16 and in tq4.", "small")
    svg.text(16, 638, "Logarithmic scale. ggml: the better of two layouts; candle: the better of two types.", "small")
    return svg.render()


def decode_h200(records):
    record = records["h200-decode"]
    series = [("kvant", ["kvant"], "kvant"), ("FlashAttention", ["FlashAttention"], "one"), ("cuDNN", ["cuDNN"], "three"),
              ("FlashInfer", ["FlashInfer", "FlashInfer, tensor cores"], "four")]
    limit = float(re.search(r"reading 8 GiB once: (\d+) GB/s", " ".join(record["notes"]))[1])
    svg = Svg(860, 340, "Decode attention on an H200 next to FlashAttention, cuDNN and FlashInfer")
    svg.text(16, 26, "Decode attention on an H200, bf16: GB/s of keys and values, more is better", "title")
    shapes = [(128, 32, 8), (256, 16, 8), (512, 16, 2)]
    for panel, wanted in enumerate(shapes):
        left = 62 + panel * 270
        axes = Axes(svg, (left, 74, 236, 190), (800, 170000), (0, 5000), log_x=True)
        axes.grid([(1024, "1024"), (4096, "4096"), (32768, "32768"), (131072, "131072")],
                  [(y, f"{y}" if panel == 0 else "") for y in range(0, 5000, 1000)], "keys")
        some = [row for row in rows(record) if shape(row) == wanted]
        svg.text(left, 62, shape_name(some[0]))
        _, y = axes.at(800, limit)
        svg.line(left, y, left + 236, y, "limit")
        if panel == 0:
            svg.text(left + 4, y - 4, f"plain read of 8 GiB: {limit:.0f}", "limit-text")
        for label, names, colour in reversed(series):
            points = []
            for row in some:
                us, _ = best(row, names)
                if us is not None:
                    points.append(axes.at(row["keys"], 4 * row["D"] * row["Hk"] * row["keys"] / us / 1e3))
            svg.path(points, colour)
            for x, y in points:
                svg.dot(x, y, colour, 4)
    legend(svg, 62, 318, [(colour, label) for label, _, colour in series])
    svg.text(845, 318, "FlashAttention and cuDNN do not support D = 512.", "small", "end")
    source(svg, record, 46)
    return svg.render()


def quantised_h200(records):
    some_rows = latest_quantised(records)
    svg = Svg(860, 330, "Decode attention on an H200 over quantised caches, against bf16")
    svg.text(16, 26, "Decode attention on an H200 over quantised caches: times as fast as bf16", "title")
    colours = dict(zip(TQ, ("one", "two", "three", "kvant")))
    for panel, wanted in enumerate([(128, 32, 8), (256, 16, 8), (512, 16, 2)]):
        left = 62 + panel * 270
        axes = Axes(svg, (left, 74, 236, 180), (800, 170000), (0, 3), log_x=True)
        axes.grid([(1024, "1024"), (4096, "4096"), (32768, "32768"), (131072, "131072")],
                  [(y, f"{y:g}" if panel == 0 else "") for y in (0, 1, 2, 3)], "keys")
        some = [row for row, _ in some_rows if shape(row) == wanted]
        svg.text(left, 62, shape_name(some[0]))
        _, y = axes.at(800, 1)
        svg.line(left, y, left + 236, y, "limit")
        for name in TQ:
            points = [axes.at(row["keys"], row["bf16"] / row[name]) for row in some]
            svg.path(points, colours[name])
            for x, y in points:
                svg.dot(x, y, colours[name], 4)
    legend(svg, 62, 312, [(colours[name], name) for name in TQ])
    svg.text(845, 312, "Dashed: as fast as bf16.", "small", "end")
    ends, middle = records["h200-decode-quantised-evening"], records["h200-decode-quantised"]
    svg.text(16, 46, f"commit {ends['commit']} (1024 and 131072 keys) and {middle['commit']} (others), {ends['date']}, "
             f"{short_machine(ends)}", "small")
    return svg.render()


def latest_quantised(records):
    """The rows of both runs, each with its commit. If both have a row, the later one is used."""
    found = {}
    for key in ("h200-decode-quantised", "h200-decode-quantised-evening"):
        for row in rows(records[key]):
            found[shape(row), row["keys"]] = row, records[key]["commit"]
    return list(found.values())


def prompts(records):
    record = records["prompts"]
    series = [("kvant", "kvant"), ("cuDNN", "three"), ("FlashAttention", "one"), ("memory-efficient", "two")]
    groups = []
    for row in rows(record):
        # Pairs of a query and a key that it sees, in a causal prompt.
        tokens, window = row["tokens"], row["window"]
        pairs = tokens * (tokens + 1) / 2 if window is None else window * tokens - window * (window - 1) / 2
        name = shape_name(row) + (f", window {window}" if window else "")
        groups.append((name, [(label, colour, 4 * row["D"] * row["H"] * pairs / row[label] / 1e6)
                              for label, colour in series if row[label] is not None]))
    height = 84 + sum(22 + 18 * len(bars) for _, bars in groups) + 34
    svg = Svg(720, height, "Attention of a prompt of 4096 tokens on an H100")
    svg.text(16, 26, "Attention of a prompt of 4096 tokens on an H100, bf16: TFLOP/s, more is better", "title")
    source(svg, record, 46)
    axes = Axes(svg, (150, 60, 500, height - 110), (0, 700), (0, 1))
    axes.grid([(x, f"{x}") for x in range(0, 701, 100)], [])
    y = 64
    for name, bars in groups:
        svg.text(16, y + 12, name)
        y += 20
        for label, colour, rate in bars:
            x, _ = axes.at(rate, 0)
            svg.text(142, y + 10, label, "small", "end")
            svg.bar(150, y, x - 150, 13, colour)
            svg.text(x + 6, y + 10, f"{rate:.0f}", "small")
            y += 18
        y += 2
    svg.text(16, height - 12, "PyTorch 2.11. cuDNN and FlashAttention have no windows there, and do not support D = 512.", "small")
    return svg.render()


PLOTS = {
    "bytes-and-kl": bytes_and_kl,
    "decode-cpu": decode_cpu,
    "decode-h200": decode_h200,
    "quantised-h200": quantised_h200,
    "prompts": prompts,
}


# -------------------------------------------------------------------------------------------------------------- tables

def markdown(head, body):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(number(cell) for cell in line) + " |" for line in body])


def span(values):
    low, high = (f"{value:.1f}" if value >= 0.995 else f"{value:.2f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def table_cost(records):
    some = rows(records["accuracy-shipped-model"])
    f16 = next(row["bytes per token"] for row in some if row["cache"] == "f16")
    return (
        ["cache", "bytes per token", "of f16", "perplexity", "KL, mean", "KL, 99 %", "same top token"],
        [[row["cache"], row["bytes per token"], f"{100 * row['bytes per token'] / f16:.0f} %", f"{row['perplexity']:.3f}",
          scientific(row["KL mean"]), scientific(row["KL 99 %"]), f"{row['same top token, %']:.2f} %"] for row in some])


RELEASED = ("accuracy-released", "accuracy-released-gemma", "accuracy-released-qwen")


def table_released(records):
    some = [row for name in RELEASED for row in rows(records[name])]
    return (
        ["model", "window", "cache", "bytes per token", "KL, mean", "KL, 99 %", "same top token", "perplexity"],
        [[row["model"], row["tokens"], f"`{row['cache']}`", row["bytes per token"], scientific(row["KL mean"]), scientific(row["KL 99 %"]),
          f"{row['same top token, %']:.2f} %", f"{row['perplexity']:.3f}"] for row in some])


def table_released_short(records):
    """A row for each cache type, with all models at 8192 tokens."""
    some = [row for name in RELEASED for row in rows(records[name]) if row["tokens"] == 8192]
    models = list(dict.fromkeys(row["model"] for row in some))
    cells = {(row["cache"], row["model"]): f"{scientific(row['KL mean'])}, {row['same top token, %']:.1f} %" for row in some}
    caches = ["tq4", "iq4_nl-rot", "tq4c", "tq5c:tq4c", "tq3c", "tq8c"]
    body = [[f"`{cache}`"] + [cells.get((cache, model), "") for model in models] for cache in caches]
    return ["cache"] + models, body


def table_released_formats(records):
    return (
        ["model", "cache", "bytes per token", "KL, mean", "KL, 99 %", "same top token", "perplexity"],
        [[row["model"], f"`{row['cache']}`", row["bytes per token"], scientific(row["KL mean"]), scientific(row["KL 99 %"]),
          f"{row['same top token, %']:.2f} %", f"{row['perplexity']:.3f}"] for row in rows(records["accuracy-released-formats"])])


def table_formats(records):
    return (
        ["model", "cache", "bytes per token", "KL, mean", "KL, 99 %", "same top token"],
        [[row["model"], f"`{row['cache']}`", row["bytes per token"], scientific(row["KL mean"]), scientific(row["KL 99 %"]),
          f"{row['same top token, %']:.2f} %"] for row in rows(records["accuracy-formats"])])


def table_speed(records):
    """Times as fast as a 16-bit cache: the range over the three head sizes."""
    body = []
    for key, name in (("epyc", "AMD EPYC, 2 cores, 32768 tokens"), ("xeon", "Intel Xeon, 2 cores, 32768 tokens")):
        some = [row for row in rows(records[f"cpu-decode-{key}"]) if row["tokens"] == 32768]
        body.append([name] + [span([row["f16"] / row[codec] for row in some]) for codec in TQ])
    for keys in (1024, 131072):
        some = [row for row in rows(records["h200-decode-quantised-evening"]) if row["keys"] == keys]
        body.append([f"H200, {keys} tokens"] + [span([row["bf16"] / row[codec] for row in some]) for codec in TQ])
    return ["machine, tokens"] + TQ, body


def table_simd(records):
    """Times as fast as f16 by token, at each SIMD level."""
    body = []
    some = rows(records["cpu-simd-levels"])
    for level in ("AVX2", "AVX-512", "AVX-512 VBMI"):
        per_token = {(row["D"], row["codec"]): row[level] / row["tokens"] for row in some}
        body.append([level] + [span([per_token[d, "f16"] / per_token[d, codec] for d in (128, 256, 512)])
                               for codec in ("tq8", "tq4")])
    return ["SIMD level", "tq8", "tq4"], body


def table_cpu_decode(records):
    body = []
    for key, name in (("epyc", "EPYC"), ("xeon", "Xeon")):
        for row in rows(records[f"cpu-decode-{key}"]):
            line = [name, f"{row['D']}, {row['H']}, {row['Hk']}", row["tokens"]]
            line += [row[c] for c in ["f16"] + TQ]
            # At 1024 tokens, f16 is slower because it is measured first in a round: bf16 runs the same code.
            dense = min(row["f16"], row["bf16"])
            line.append(f"{100 * row['floor f16'] / dense:.0f} %")
            for ours, peers in ((dense, ["ggml f16 llama.cpp", "ggml f16 contiguous"]), (dense, ["candle f32", "candle f16"]),
                                (row["tq8"], ["ggml q8_0 llama.cpp", "ggml q8_0 contiguous"]),
                                (row["tq4"], ["ggml q4_0 llama.cpp", "ggml q4_0 contiguous"])):
                line.append(f"{best(row, peers)[0] / ours:.1f}")
            body.append(line)
    return (["machine", "D, H, Hk", "tokens", "f16, µs"] + [f"{c}, µs" for c in TQ]
                    + ["16 bits, of the ceiling", "16 bits to ggml f16", "to candle", "tq8 to q8_0", "tq4 to q4_0"], body)


def table_h200_decode(records):
    record = records["h200-decode"]
    limit = float(re.search(r"reading 8 GiB once: (\d+) GB/s", " ".join(record["notes"]))[1])
    peers = ["FlashAttention", "cuDNN", "FlashInfer", "FlashInfer, tensor cores"]
    body = []
    for row in rows(record):
        rate = 4 * row["D"] * row["Hk"] * row["keys"] / row["kvant"] / 1e3
        fastest, name = best(row, peers)
        body.append([f"{row['D']}, {row['H']}, {row['Hk']}", row["keys"], f"{row['kvant']:.2f}"]
                    + ["–" if row[p] is None else f"{row[p]:.2f}" for p in peers[:2]]
                    + ["–" if best(row, peers[2:])[0] is None else f"{best(row, peers[2:])[0]:.2f}"]
                    + [f"{100 * rate / limit:.0f} %", f"{fastest / row['kvant']:.2f}"])
    return (["D, H, Hk", "keys", "kvant, µs", "FlashAttention", "cuDNN", "FlashInfer, better kernel", "of the plain read",
                     "best peer's time ÷ kvant's"], body)


def table_h200_quantised(records):
    body = [[f"{row['D']}, {row['H']}, {row['Hk']}", row["keys"], commit, f"{row['bf16']:.2f}"]
            + [f"{row[c]:.2f} ({row['bf16'] / row[c]:.2f})" for c in TQ] for row, commit in latest_quantised(records)]
    return ["D, H, Hk", "keys", "commit", "bf16, µs"] + [f"{c}, µs (times as fast)" for c in TQ], body


def table_prompts(records):
    body = []
    for row in rows(records["prompts"]):
        other, name = best(row, ["cuDNN", "FlashAttention", "memory-efficient"])
        body.append([f"{row['D']}, {row['H']}, {row['Hk']}", row["window"] or "none", row["kvant"],
                     "–" if other is None else f"{name} {other}",
                     "–" if row["ratio"] is None else f"{row['ratio']:.2f}"])
    return ["D, H, Hk", "window", "kvant, µs", "best of PyTorch, µs", "kvant's speed ÷ PyTorch's"], body


def table_prompt_chunks(records):
    codecs = ["tq8", "tq4", "tq4c", "tq2"]
    body = [[f"{row['D']}, {row['H']}, {row['Hk']}", row["tokens"], row["keys"], f"{row['bf16']:.0f}"]
            + [f"{row[codec] / row['bf16']:.2f}" for codec in codecs] for row in rows(records["prompt-chunks"])]
    return ["D, H, Hk", "tokens", "keys", "bf16, µs"] + [f"{codec}, times that" for codec in codecs], body


def table_serve(records):
    body = [[row["cache"], row["clients"], row["tokens/s"], f"{row['kernels']:.0f}",
             f"{row['first token, median']}, {row['first token, p99']}",
             f"{row['between tokens, median']}, {row['between tokens, p99']}"] for row in rows(records["h100-serve"])]
    return (["cache", "clients", "tokens/s", "decode steps alone", "first token, median and p99, ms",
                     "between tokens, median and p99, ms"], body)


def table_cpu_models(records):
    body = []
    for key, name in (("cpu-model-epyc-984", "EPYC, 984"), ("cpu-model-epyc-4375", "EPYC, 4375"), ("cpu-model-xeon-984", "Xeon, 984")):
        some = rows(records[key])
        ours = some[0]
        for row in some:
            body.append([name, records[key]["commit"], row["program"], row["prompt"], row["decode"],
                         f"{ours['prompt'] / row['prompt']:.2f}", f"{ours['decode'] / row['decode']:.2f}"])
    return ["machine, prompt", "commit", "program", "prompt, tokens/s", "decode, tokens/s", "kvant's prompt ÷", "kvant's decode ÷"], body


def table_real_sizes_prompts(records):
    body = []
    for row in rows(records["h200-real-sizes-prompts"]):
        speed = row["prompt tokens/s"]
        body.append([row["model"], row["weights"], row["before"], speed, f"{speed / row['before']:.1f}", row["transformers"],
                     row["first warm-up, s"], row["second, s"]])
    return (["model", "weights", "15d8ceb, tokens/s", "b29f665, tokens/s", "times as fast", "transformers, eager",
                     "first run of a prompt, s", "in the next process, s"], body)


def plain(name):
    def table(records):
        return records[name]["columns"], records[name]["rows"]
    return table


RELEASED_MACHINES = [("cpu-released-xeon", "Xeon, 8"), ("cpu-released-epyc", "EPYC (Zen 4), 2"),
                     ("cpu-released-zen3", "EPYC (Zen 3), 2"), ("cpu-released-xeon-amx", "Xeon, 8, kvant with AMX")]


def table_cpu_released(records):
    """A row for each model and cache. Cells have kvant's rate, llama.cpp's, and the ratio."""
    whats = ["prompt of 512", "decode", "1 client", "4 clients", "8 clients"]
    body = []
    for key, machine in RELEASED_MACHINES:
        cells = {}
        for row in rows(records[key]):
            cell = f"{row['kvant']} / {row['llama.cpp']} ({row['times as fast']:.2f})"
            cells.setdefault((row["model"], row["cache"]), {})[row["what"]] = cell
        body += [[machine, model, cache] + [of[what] for what in whats] for (model, cache), of in cells.items()]
    return ["machine, threads", "model", "cache"] + whats, body


def table_h200_model(records):
    body = [[row["activations"], row["cache"]] + [f"{row[c]:.1f} ({1e6 / row[c]:.0f})" for c in ("128 tokens", "1024", "4096")]
            for row in rows(records["h200-model"])]
    return ["activations", "cache", "128 tokens, µs (tokens/s)", "1024", "4096"], body


def table_linear(records):
    record = records["h200-linear"]
    limit = float(re.search(r"reading 8 GiB once: (\d+) GB/s", " ".join(record["notes"]))[1])
    # Bits of a weight, with bf16 scales and biases for each group of 64.
    bits = {"bf16": 16, "8 bit": 8.5, "6 bit": 6.5, "4 bit": 4.5}
    body = []
    for row in rows(record):
        line = [f"{row['rows']} × {row['outputs']} × {row['inputs']}"]
        for name, size in bits.items():
            share = row["outputs"] * row["inputs"] * size / 8 / row[name] / 1e3 / limit
            line.append(f"{row[name]:.2f} ({100 * share:.0f} %)" if row["rows"] < 100 else f"{row[name]:.2f}")
        body.append(line)
    return ["rows × outputs × inputs"] + list(bits), body


def table_released_8192(records):
    """Like `released-short`, with the bytes of each model's cache."""
    some = [row for name in RELEASED for row in rows(records[name]) if row["tokens"] == 8192]
    models = list(dict.fromkeys(row["model"] for row in some))
    cells = {(row["cache"], row["model"]): f"{row['bytes per token']}; {scientific(row['KL mean'])}; {row['same top token, %']:.1f} %"
             for row in some}
    caches = ["tq8c", "tq5c:tq4c", "tq4c", "tq3c", "iq4_nl-rot", "tq4"]
    return ["cache"] + models, [[f"`{cache}`"] + [cells[cache, model] for model in models] for cache in caches]


# The tables of PAGES.
INLINE = {
    "released-short": table_released_short,
    "released-8192": table_released_8192,
    "speed": table_speed,
    "real-sizes": plain("h200-real-sizes"),
    "sequences": plain("h200-sequences"),
    "serve": table_serve,
}

# The files of docs/benchmarks/tables: a title, and tables made by a function or directly from a record, with their
# records.
FILES = {
    "cache-types": ("Cost of cache types", [
        (table_released, RELEASED),
        (table_cost, ["accuracy-shipped-model"]),
        (None, ["accuracy-h200"]),
        (None, ["accuracy-pages"]),
        (table_released_formats, ["accuracy-released-formats"]),
        (table_formats, ["accuracy-formats"]),
        (None, ["answers-token-by-token"]),
        (None, ["needles"]),
        (None, ["types-by-side"]),
    ]),
    "decode-cpu": ("Decode attention on CPUs", [
        (table_cpu_decode, ["cpu-decode-epyc", "cpu-decode-xeon"]),
        (table_simd, ["cpu-simd-levels"]),
        (None, ["cpu-decode-error-epyc"]),
        (None, ["cpu-decode-error-xeon"]),
        (None, ["cpu-windows-epyc"]),
        (None, ["cpu-windows-xeon"]),
        (None, ["cpu-threads-epyc"]),
    ]),
    "decode-gpu": ("Decode attention on GPUs", [
        (table_h200_decode, ["h200-decode"]),
        (table_h200_quantised, ["h200-decode-quantised", "h200-decode-quantised-evening"]),
        (None, ["h200-verification-and-windows"]),
        (None, ["h200-layer"]),
        (None, ["h100-pages"]),
        (None, ["h200-pages"]),
    ]),
    "prompts": ("Attention of prompts", [
        (table_prompts, ["prompts"]),
        (table_prompt_chunks, ["prompt-chunks"]),
        (None, ["prompt-errors"]),
    ]),
    "operations": ("Products, cache writes and norms", [
        (table_linear, ["h200-linear"]),
        (None, ["h200-kv-write"]),
        (None, ["h200-norm-rope-write"]),
        (None, ["cpu-linear-epyc"]),
        (None, ["cpu-linear-xeon"]),
        (None, ["cpu-linear-many-epyc"]),
        (None, ["cpu-linear-many-xeon"]),
        (None, ["cpu-writing-epyc"]),
        (None, ["cpu-writing-xeon"]),
        (None, ["cpu-norm-rope-xeon"]),
    ]),
    "models-cpu": ("Whole models on CPUs", [
        (table_cpu_released, [key for key, _ in RELEASED_MACHINES]),
        (table_cpu_models, ["cpu-model-epyc-984", "cpu-model-epyc-4375", "cpu-model-xeon-984"]),
        (None, ["cpu-model-prompt-epyc"]),
        (None, ["cpu-model-decode-epyc"]),
        (None, ["cpu-e2b"]),
        (None, ["cpu-server-xeon"]),
        (None, ["cpu-batch-invariant"]),
        (None, ["cpu-eight-bit-activations"]),
    ]),
    "models-gpu": ("Whole models on GPUs", [
        (None, ["h200-real-sizes"]),
        (None, ["h200-sequences"]),
        (None, ["h100-sequences"]),
        (table_serve, ["h100-serve"]),
        (None, ["h200-serve-4bit"]),
        (table_h200_model, ["h200-model"]),
        (table_real_sizes_prompts, ["h200-real-sizes-prompts"]),
        (None, ["e4b-logits"]),
    ]),
}
# Files that show all records of a data file unchanged.
WHOLE = {
    "page-means": "Means of pages",
    "notes-cpu": "Tables of the notes on CPU kernels",
    "notes-cuda": "Tables of the notes on CUDA kernels",
    "groups": "Tables of several GPUs",
    "metal-yardstick": "Counts of Metal kernels by msl-host",
}


def aligned(head, body):
    """A table as plain text: numbers right-aligned, words left-aligned."""
    head = [cell.replace("`", "") for cell in head]
    cells = [[number(cell).replace("`", "") for cell in line] for line in body]
    widths = [max(len(line[i]) for line in [head] + cells) for i in range(len(head))]
    numeric = [all(re.match(r"[\d–±]", line[i]) for line in cells) for i in range(len(head))]

    def line(row):
        padded = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric)]
        return "  ".join(padded).rstrip()
    return "\n".join([line(head), "  ".join("-" * width for width in widths)] + [line(row) for row in cells])


def provenance(records):
    """How the records were measured; records with a common command and machine share the lines."""
    found = {}
    for record in records:
        command = record["command"].replace('RUSTFLAGS="-C target-cpu=native" cargo run --release -p kvant-bench '
                                            "--target-dir target/native --features peers --bin kvant-bench --", "kvant-bench")
        key = (record["commit"], record["date"], record["machine"], command, tuple(record.get("notes", [])))
        found.setdefault(key, []).append(record["id"])
    lines = []
    for (commit, date, machine, command, notes), names in found.items():
        lines.append(f"{', '.join(names)}: commit {commit}, {date}, {machine}")
        lines += [f"    {text}" for text in (command, *notes)]
    return "\n".join(lines)


def text_file(title, entries, records):
    parts = [title, "=" * len(title), "Written by tools/plot_performance.py from docs/benchmarks/data. D, H, Hk: head size, query heads, KV heads."]
    for table, names in entries:
        some = [records[name] for name in names]
        units = list(dict.fromkeys(record["unit"] for record in some))
        unit = "" if units in (["see columns"], ["1"]) else f" ({'; '.join(units)})"
        name = some[0]["title"] + unit
        head, body = table(records) if table else (some[0]["columns"], some[0]["rows"])
        parts.append(f"\n{name}\n{'-' * len(name)}\n\n{aligned(head, body)}\n\n{provenance(some)}")
    return "\n".join(parts) + "\n"


def text_files(records):
    files = {name: text_file(title, entries, records) for name, (title, entries) in FILES.items()}
    for name, title in WHOLE.items():
        entries = [(None, [record["id"]]) for record in json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))]
        files[name] = text_file(title, entries, records)
    return files


def fill(text, records):
    def table(match):
        name = match[1]
        if name not in INLINE:
            raise SystemExit(f"no table is called {name}")
        return f"<!-- table {name} -->\n{markdown(*INLINE[name](records))}\n<!-- end -->"
    return re.sub(r"<!-- table ([\w-]+) -->\n.*?<!-- end -->", table, text, flags=re.S)


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] not in ([], ["--check"]):
        raise SystemExit(__doc__)
    records = load()
    wanted = {IMAGES / f"{name}.svg": plot(records) for name, plot in PLOTS.items()}
    wanted.update({TABLES / f"{name}.txt": text for name, text in text_files(records).items()})
    for page in PAGES:
        if page.exists():
            wanted[page] = fill(page.read_text(encoding="utf-8"), records)
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} differs from the data: run tools/plot_performance.py", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
