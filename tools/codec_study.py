#!/usr/bin/env python3
"""Formats of other software for cached vectors, and their squared errors.

Each format is a function from vectors to the numbers that are read back, in f64. `kvant eval` has the same ones in Rust
(`crates/kvant-eval/src/formats`) and measures them with a model:

    kvant eval --text TEXT --kv tq4c,q4_0-rot,iq4_nl-rot,mlx4,nvfp4

    codec_study.py             print the squared error of each format for normal vectors, and for vectors with outliers
    codec_study.py --test      compare the formats with the packages `gguf` and `mlx`, where these have them
    codec_study.py --golden    write formats.json and segments.json of crates/kvant-eval/tests/golden, by these packages where they
                               have a format

Every command requires the packages of tools/requirements.txt.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).resolve().parent.parent / "crates/kvant-eval/tests/golden/formats.json"


def f16(x):
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float16).astype(np.float64)


def small_float(x, mantissa, min_exponent, most):
    """x rounded to a float with this number of mantissa bits, ties to even, and saturated."""
    exponent = np.frexp(np.where(x == 0, 1.0, x))[1] - 1
    step = np.exp2(np.maximum(exponent, min_exponent) - mantissa)
    return np.clip(np.rint(x / step) * step, -most, most)


def e4m3(x):
    return small_float(x, 3, -6, 448.0)


def e2m1(x):
    return small_float(x, 1, 0, 6.0)


def over(x, d):
    return np.divide(x, d, out=np.zeros(np.broadcast(x, d).shape), where=d != 0)


def blocks(size):
    """Converts a function of blocks to a function of vectors."""
    def wrap(function):
        return lambda x: function(x.reshape(-1, size)).reshape(x.shape)
    return wrap


def extreme(x):
    """The number of each block with the largest magnitude."""
    return np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)


@blocks(32)
def q8_0(x):
    d = np.abs(extreme(x)) / 127
    q = over(x, d)
    return np.copysign(np.floor(np.abs(q) + 0.5), q) * f16(d)


@blocks(32)
def q4_0(x):
    d = extreme(x) / -8
    return (np.clip(np.floor(over(x, d) + 8.5), 0, 15) - 8) * f16(d)


IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64)


def iq4_nl_parts(x):
    """Indices and scales, before the scales are rounded to f16."""
    index = np.searchsorted((IQ4[1:] + IQ4[:-1]) / 2, over(x, extreme(x) / IQ4[0]))
    q = IQ4[index]
    d = over((x * x * q * x).sum(-1, keepdims=True), (x * x * q * q).sum(-1, keepdims=True))
    return index, d


@blocks(32)
def iq4_nl(x):
    index, d = iq4_nl_parts(x)
    return IQ4[index] * f16(d)


def affine_parts(x, bits):
    """MLX's codes, scales and biases, before rounding. The end of the range with the larger magnitude is a code."""
    levels = 2**bits - 1
    least, most = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    is_min = np.abs(least) > np.abs(most)
    scale = np.maximum((most - least) / levels, 1e-7) * np.where(is_min, 1, -1)
    edge = np.where(is_min, least, most)
    steps = np.rint(edge / scale)
    scale = np.where(steps != 0, edge / np.where(steps != 0, steps, 1), scale)
    bias = np.where(steps != 0, edge, 0)
    return np.clip(np.rint((x - bias) / scale), 0, levels), scale, bias


@blocks(64)
def mlx4(x):
    code, scale, bias = affine_parts(x, 4)
    return code * f16(scale) + f16(bias)


def fp8(x):
    return e4m3(x)


@blocks(16)
def nvfp4(x):
    scale = e4m3(np.abs(extreme(x)) / 6)
    return e2m1(over(x, scale)) * scale


def rotate(x, size):
    """Rotates blocks of coordinates by a Hadamard matrix, as llama.cpp does. The rotation is its own inverse."""
    dim = x.shape[-1]
    size = min(size, dim & -dim)
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return (x.reshape(-1, size) @ (h / np.sqrt(size))).reshape(x.shape)


def rotated(function, size):
    """`size`: all coordinates for keys, 64 for values."""
    return lambda x: rotate(function(rotate(x, size)), size)


FORMATS = {"q8_0": (q8_0, 8.5), "q4_0": (q4_0, 4.5), "iq4_nl": (iq4_nl, 4.5), "mlx4": (mlx4, 4.5), "fp8": (fp8, 8.0),
           "nvfp4": (nvfp4, 4.5)}
ROTATED = ("q8_0", "q4_0", "iq4_nl")


# Formats that store segments of 128 positions of a head, [128, dim].


def ranges(x, bits, least):
    """The integers of x along the last axis between its minimum and maximum, the minimum, and the scale."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = np.maximum((high - low) / (2 ** bits - 1), least)
    return np.clip(np.rint((x - low) / scale), 0, 2 ** bits - 1), low, scale


def kivi(x, bits, keys):
    """KIVI: groups of 32 positions of a channel for keys, of 32 channels of a position for values."""
    groups = (x.T if keys else x).reshape(-1, 32)
    code, low, scale = ranges(groups, bits, 1e-8)
    stored = code * f16(scale) + f16(low)
    return stored.reshape(x.shape[::-1]).T if keys else stored.reshape(x.shape)


def kvarn(x, bits, keys):
    """KVarN: rotated, rows and columns divided by factors that equalise their deviations; rows in integers."""
    turned = rotate(x, x.shape[-1])
    m = turned.T if keys else turned
    rows, columns = np.zeros((len(m), 1)), np.zeros((1, m.shape[1]))

    def imbalance(t):
        return sum(d.max() / max(d.min(), 1e-8) for d in (t.std(0, ddof=1), t.std(1, ddof=1)))

    least, best = imbalance(m), (np.exp(rows), np.exp(columns))
    for _ in range(16):
        now = m / np.exp(columns) / np.exp(rows)
        columns = np.clip(columns + np.log(np.clip(now.std(0, ddof=1, keepdims=True), 1e-3, 1e3)), -0.3, 10)
        now = m / np.exp(columns) / np.exp(rows)
        rows = np.clip(rows + np.log(np.clip(now.std(1, ddof=1, keepdims=True), 1e-3, 1e3)), -0.3, 10)
        now = imbalance(m / np.exp(columns) / np.exp(rows))
        if now <= least:
            least, best = now, (np.exp(rows), np.exp(columns))
    rows, columns = best
    code, low, scale = ranges(m / columns / rows, bits, 1e-10)
    stored = (code * f16(rows * scale) + f16(rows * low)) * f16(columns)
    return rotate(stored.T if keys else stored, x.shape[-1])


TILES = {"kivi4": (kivi, 4), "kivi2": (kivi, 2), "kvarn4": (kvarn, 4), "kvarn2": (kvarn, 2)}


def segment_numbers():
    """[positions, heads, dim], as in the test in `formats/mod.rs`."""
    p, h, i = np.ogrid[:256, :2, :64]
    return np.sin(1 + p * 0.7 + i * i * 0.3 + h) * (1 + i % 5) + (i % 7 - 3) + np.cos(p / 19)


def golden_segments():
    x, data = segment_numbers(), {}
    for name, (function, bits) in TILES.items():
        for side in "KV":
            stored = np.empty_like(x)
            for first in range(0, len(x), 128):
                for head in range(x.shape[1]):
                    stored[first:first + 128, head] = function(x[first:first + 128, head], bits, side == "K")
            data[f"{name} {side}"] = [float(f"{v:.9g}") for v in stored.ravel()[::41]]
    (GOLDEN.parent / "segments.json").write_text(json.dumps(data).replace('], "', '],\n"') + "\n")


# The packages. Their inputs are f32.


def by_gguf(name, x):
    import gguf
    kind = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}[name]
    return gguf.dequantize(gguf.quantize(x.astype(np.float32), kind), kind).astype(np.float64)


def by_mlx(name, x):
    import mlx.core as mx
    mx.set_default_device(mx.cpu)
    if name == "mlx4":
        code, scale, bias = mx.quantize(mx.array(x.astype(np.float32)), group_size=64, bits=4)
        scale, bias = (v.astype(mx.float16).astype(mx.float32) for v in (scale, bias))
        stored = mx.dequantize(code, scale, bias, group_size=64, bits=4)
    elif name == "fp8":
        stored = mx.from_fp8(mx.to_fp8(mx.array(x.astype(np.float32))), mx.float32)
    else:
        code, scale = mx.quantize(mx.array(x.astype(np.float32)), group_size=16, bits=4, mode="nvfp4")
        stored = mx.dequantize(code, scale, group_size=16, bits=4, mode="nvfp4", dtype=mx.float32)
    return np.array(stored, np.float64)


PACKAGES = {"q8_0": by_gguf, "q4_0": by_gguf, "mlx4": by_mlx, "fp8": by_mlx, "nvfp4": by_mlx}


def normal(rows, dim, seed):
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32).astype(np.float64)


def outliers(rows, dim, seed):
    x = normal(rows, dim, seed)
    x[:, ::37] *= 12
    return x


def agree(name, got, want, x, exact=0.999):
    """Equal except for f32 rounding, and for numbers next to a threshold, which may get the adjacent code."""
    same = np.abs(got - want) <= 2e-6 * np.abs(want).max()
    share = same.mean()
    assert share >= exact, f"{name}: only {share:.5f} of the numbers are the package's"
    error, other = (((y - x) ** 2).sum() for y in (got, want))
    assert abs(error / other - 1) < 1e-3, f"{name}: squared error {error}, the package's {other}"
    print(f"{name}: {share:.5%} of {got.size} numbers equal")


def test():
    for make in (normal, outliers):
        x = make(512, 128, 1)
        x[5] = 0
        for name, package in PACKAGES.items():
            agree(f"{name}, {make.__name__}", FORMATS[name][0](x), package(name, x), x)
        # gguf decodes iq4_nl and has no encoder: its bytes, made from our indices and scales, decode to our numbers.
        import gguf
        index, d = iq4_nl_parts(x.reshape(-1, 32))
        low, high = index[:, :16].astype(np.uint8), index[:, 16:].astype(np.uint8)
        data = np.concatenate([d.astype(np.float16).view(np.uint8), low | high << 4], axis=-1)
        decoded = gguf.dequantize(data.reshape(len(x), -1), gguf.GGMLQuantizationType.IQ4_NL)
        agree(f"iq4_nl, {make.__name__}", iq4_nl(x), decoded.astype(np.float64), x, exact=1.0)
        # No f16 scale next to the stored one has a smaller weighted error.
        x32, weight = x.reshape(-1, 32), x.reshape(-1, 32) ** 2
        def cost(d):
            return (weight * (x32 - IQ4[index] * d) ** 2).sum()
        assert cost(f16(d)) <= min(cost(f16(d * 1.002)), cost(f16(d * 0.998)))
    assert np.allclose(rotate(rotate(x, 128), 128), x) and np.allclose(rotate(rotate(x, 64), 64), x)
    # A rotation makes outliers nearly normal.
    error = {name: relative(function, x) for name, (function, _) in formats().items()}
    assert error["q4_0-rot"] < 0.7 * error["q4_0"]
    print("passed")


def formats():
    """All formats; rotated ones in the form for keys."""
    more = {f"{name}-rot": (rotated(FORMATS[name][0], 1 << 30), FORMATS[name][1]) for name in ROTATED}
    return FORMATS | more


def relative(function, x):
    return ((function(x) - x) ** 2).sum() / (x ** 2).sum()


def golden():
    x = outliers(2, 128, 3)
    x[1] /= 300
    stored = {name: PACKAGES.get(name, lambda name, x: FORMATS[name][0](x))(name, x) for name in FORMATS}
    for name in ROTATED:
        for side, size in (("K", 128), ("V", 64)):
            turned = rotate(x, size)
            package = PACKAGES.get(name, lambda name, x: FORMATS[name][0](x))
            stored[f"{name}-rot {side}"] = rotate(package(name, turned), size)
    data = {"head_dim": 128, "x": x, "stored": stored}
    GOLDEN.parent.mkdir(exist_ok=True)
    text = json.dumps(data, default=lambda array: [float(f"{v:.9g}") for v in array.ravel()])
    GOLDEN.write_text(text.replace('], "', '],\n"') + "\n")
    print(f"wrote {GOLDEN}")


def table():
    print("format       bits   normal   outliers")
    for name, (function, bits) in formats().items():
        errors = (relative(function, make(2048, 128, 7)) for make in (normal, outliers))
        print(f"{name:12} {bits:4.1f}  " + "  ".join(f"{error:.2e}" for error in errors))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--golden", action="store_true")
    args = parser.parse_args()
    if args.test:
        test()
    if args.golden:
        golden_segments()
        golden()
    if not (args.test or args.golden):
        table()


if __name__ == "__main__":
    sys.exit(main())
