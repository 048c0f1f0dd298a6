"""Golden data for single operations, computed by MLX: crates/kvant/tests/golden/<op>.safetensors.

    python tools/golden_ops.py [--out crates/kvant/tests/golden]

One file per operation, many cases per file. A case NAME is a metadata entry NAME whose value is a JSON object of scalar
parameters, and tensors called "NAME/TENSOR". A test lists the cases from the metadata and needs no other index.
Common parameters of every case:

    dtype    f32 | f16 | bf16: the type of the activations in the case
    source   "mlx": MLX computed the output in that dtype; "f64": numpy computed it in double precision and it was rounded
             once (for what MLX computes in f32 only, such as the angle of a far position)
    mlx_err  max |output - f64 recomputation from the same rounded inputs|: the error of the golden data itself

The tensors and the remaining parameters of each operation are in README.md beside the data.
"""

import argparse
import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import ProportionalRoPE

from safefile import DTYPES, f64, save


class Cases:
    def __init__(self):
        self.tensors, self.metadata = {}, {}

    def add(self, name, params, tensors, exact, out="out"):
        assert name not in self.metadata, name
        err = float(np.max(np.abs(f64(tensors[out]) - exact)))
        self.metadata[name] = json.dumps({**params, "mlx_err": float(f"{err:.3g}")})
        self.tensors.update({f"{name}/{k}": v for k, v in tensors.items()})
        return err

    def write(self, path):
        size = save(path, self.tensors, self.metadata)
        worst = {}
        for m in map(json.loads, self.metadata.values()):
            worst[m["dtype"]] = max(worst.get(m["dtype"], 0), m["mlx_err"])
        print(f"{path}: {len(self.metadata)} cases, {size} bytes, largest golden error {worst}")
        return size


def rand(rng, shape, dtype="f32", scale=1.0):
    return mx.array((rng.standard_normal(shape) * scale).astype(np.float32)).astype(DTYPES[dtype])


# ---------------------------------------------------------------------------------------------------------- rms_norm


def rms64(x, w, eps):
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return y if w is None else y * w


def rms_norm_cases():
    rng, cases = np.random.default_rng(1), Cases()
    shapes = [(1, 256), (3, 7), (5, 65), (2, 1023), (17, 64)]
    for dtype in DTYPES:
        for t, d in shapes:
            for weighted in (True, False):
                eps = 1e-6 if d != 65 else 1e-5
                x = rand(rng, (t, d), dtype, scale=3.0)
                w = rand(rng, (d,), dtype) * 0.3 + 1.0 if weighted else None
                tensors = {"x": x, "out": mx.fast.rms_norm(x, w, eps)}
                if weighted:
                    tensors["weight"] = w.astype(DTYPES[dtype])
                exact = rms64(f64(x), f64(w) if weighted else None, eps)
                name = f"{dtype}_t{t}_d{d}_{'w' if weighted else 'plain'}"
                cases.add(name, {"dtype": dtype, "source": "mlx", "eps": eps}, tensors, exact)
    # If the input is tiny or zero, eps determines the result.
    x = mx.concatenate([rand(rng, (2, 64), scale=1e-4), mx.zeros((1, 64))])
    exact = rms64(f64(x), None, 1e-6)
    params = {"dtype": "f32", "source": "mlx", "eps": 1e-6}
    cases.add("f32_small_and_zero", params, {"x": x, "out": mx.fast.rms_norm(x, None, 1e-6)}, exact)
    return cases


# -------------------------------------------------------------------------------------------------------------- rope


def rope64(x, positions, layout, theta, pairs, denominator, factors=None):
    """x [T,H,D] in f64. The frequency of pair i is theta^(-2i/denominator) / factors[i]."""
    half = x.shape[-1] // 2
    i = np.arange(pairs)
    angle = positions[:, None].astype(np.float64) * theta ** (-2.0 * i / denominator)
    if factors is not None:
        angle = angle / factors
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    first, second = {
        "halves": (i, i + half),
        "leading_halves": (i, i + pairs),
        "interleaved": (2 * i, 2 * i + 1),
    }[layout]
    a, b, y = x[..., first], x[..., second], x.copy()
    y[..., first] = a * cos - b * sin
    y[..., second] = a * sin + b * cos
    return y


def mlx_rope(x, positions, layout, theta, pairs, denominator, factors=None):
    """As `rope64`, by mx.fast.rope. The tokens are on the batch axis, where every entry has its own offset."""
    x4, offset = x[:, :, None, :], mx.array(positions, dtype=mx.int32)
    d = x.shape[-1]
    if layout == "halves" and 2 * pairs < d:
        assert factors is None and denominator == d
        y = ProportionalRoPE(d, 2 * pairs, False, theta)(x4, offset)
    else:
        assert denominator == 2 * pairs
        kind = {"base": theta, "freqs": None}
        if factors is not None:
            wavelengths = theta ** (np.arange(pairs) * 2.0 / denominator) * factors
            kind = {"base": None, "freqs": mx.array(wavelengths.astype(np.float32))}
        y = mx.fast.rope(x4, 2 * pairs, traditional=layout == "interleaved", scale=1.0, offset=offset, **kind)
    return y[:, :, 0, :]


def rope_cases():
    rng, cases = np.random.default_rng(2), Cases()
    near = np.array([0, 1, 5, 13, 127])
    far = np.array([1_000_003, 1_048_576, 99_999, 524_287])

    def case(name, layout, d, pairs, theta, dtype="f32", heads=2, positions=near, factors=None, source="mlx", norm=False):
        denominator = d if layout == "halves" else 2 * pairs
        x = rand(rng, (len(positions), heads, d), dtype, scale=2.5 if norm else 1.0)
        tensors = {"x": x, "positions": mx.array(positions.astype(np.uint32))}
        params = {
            "dtype": dtype, "source": source, "layout": layout, "theta": theta,
            "rotated_pairs": pairs, "freq_denominator": denominator,
        }
        rotate = (positions, layout, theta, pairs, denominator, factors)
        if factors is not None:
            factors = factors.astype(np.float32)
            rotate = (*rotate[:-1], factors.astype(np.float64))
            tensors["freq_factors"] = mx.array(factors)
        y, exact = x, f64(x)
        if norm:
            params["eps"] = 1e-6
            tensors["weight"] = w = (rand(rng, (d,)) * 0.3 + 1.0).astype(DTYPES[dtype])
            y, exact = mx.fast.rms_norm(x, w, 1e-6), rms64(exact, f64(w), 1e-6)
        exact = rope64(exact, *rotate)
        tensors["out"] = (
            mlx_rope(y, *rotate) if source == "mlx" else mx.array(exact.astype(np.float32)).astype(DTYPES[dtype])
        )
        cases.add(name, params, tensors, exact)

    for d in (64, 128, 256, 512):
        case(f"halves_d{d}", "halves", d, d // 2, 10_000.0)
        case(f"interleaved_d{d}", "interleaved", d, d // 2, 10_000.0, heads=1)
    for dtype in ("f16", "bf16"):
        case(f"halves_d64_{dtype}", "halves", 64, 32, 10_000.0, dtype, heads=3)
        case(f"interleaved_d128_{dtype}", "interleaved", 128, 64, 500_000.0, dtype)
    case("leading_d64_of_16", "leading_halves", 64, 8, 10_000.0, heads=3)
    case("leading_d128_of_96", "leading_halves", 128, 48, 10_000.0)
    case("leading_d256_of_64_bf16", "leading_halves", 256, 32, 10_000.0, "bf16")
    case("interleaved_d128_of_32", "interleaved", 128, 16, 10_000.0)
    case("interleaved_d256_of_192", "interleaved", 256, 96, 10_000.0)
    case("proportional_d128_quarter", "halves", 128, 16, 1e6)
    case("proportional_d512_quarter", "halves", 512, 64, 1e6)
    case("proportional_d512_quarter_f16", "halves", 512, 64, 1e6, "f16", heads=1)
    factors = lambda n: 1.0 + 7.0 * rng.random(n) ** 2
    case("factors_halves_d128", "halves", 128, 64, 500_000.0, factors=factors(64))
    case("factors_interleaved_d64", "interleaved", 64, 32, 10_000.0, factors=factors(32))
    case("factors_leading_d128_of_64", "leading_halves", 128, 32, 10_000.0, factors=factors(32))
    for name, layout, d, pairs, theta in [
        ("far_halves_d64", "halves", 64, 32, 10_000.0),
        ("far_halves_d256", "halves", 256, 128, 10_000.0),
        ("far_proportional_d512", "halves", 512, 64, 1e6),
        ("far_interleaved_d128", "interleaved", 128, 64, 10_000.0),
        ("far_leading_d128_of_64", "leading_halves", 128, 32, 10_000.0),
    ]:
        case(name, layout, d, pairs, theta, heads=1, positions=far, source="f64")
    case("far_factors_halves_d128", "halves", 128, 64, 10_000.0, heads=1, positions=far, source="f64", factors=factors(64))
    # The norm first, as in norm_rope; MLX rounds to the dtype between the two, so f32 is the strict case.
    case("norm_halves_d256", "halves", 256, 128, 10_000.0, norm=True)
    case("norm_proportional_d512", "halves", 512, 64, 1e6, norm=True)
    case("norm_halves_d128_bf16", "halves", 128, 64, 10_000.0, "bf16", norm=True)
    case("norm_interleaved_d64_f16", "interleaved", 64, 32, 10_000.0, "f16", norm=True)
    return cases


# -------------------------------------------------------------------------------------------------------------- sdpa


def visible(t, n, window):
    """[T,N] mask: the queries are the last T of N positions; a window counts the token itself."""
    i, j = np.arange(n - t, n)[:, None], np.arange(n)[None, :]
    m = j <= i
    return m if window is None else m & (j > i - window)


def sdpa64(q, k, v, scale, mask, softcap=None):
    group = q.shape[1] // k.shape[0]
    out = np.empty(q.shape)
    for h in range(q.shape[1]):
        s = scale * (q[:, h] @ k[h // group].T)
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        s = np.where(mask, s, -np.inf)
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        out[:, h] = (p / p.sum(axis=-1, keepdims=True)) @ v[h // group]
    return out


def sdpa_cases():
    rng, cases = np.random.default_rng(3), Cases()

    def case(name, t, h, hk, d, n, window=None, dtype="f32", scale=None, spread=1.0, softcap=None):
        scale = d**-0.5 if scale is None else scale
        q, k, v = (rand(rng, s, dtype, z) for s, z in (((t, h, d), spread), ((hk, n, d), 1.0), ((hk, n, d), 1.0)))
        mask = visible(t, n, window)
        exact = sdpa64(f64(q), f64(k), f64(v), scale, mask, softcap)
        if softcap is None:
            how = "causal" if window is None else mx.array(mask)
            y = mx.fast.scaled_dot_product_attention(q.transpose(1, 0, 2)[None], k[None], v[None], scale=scale, mask=how)
            y = y[0].transpose(1, 0, 2)
        else:
            y = mx.array(exact.astype(np.float32)).astype(DTYPES[dtype])
        params = {
            "dtype": dtype, "source": "mlx" if softcap is None else "f64", "tokens": t, "heads": h, "kv_heads": hk,
            "head_dim": d, "kv_len": n, "window": window, "scale": scale, "softcap": softcap,
        }
        cases.add(name, params, {"q": q, "k": k, "v": v, "out": y}, exact)

    case("decode_d64", 1, 4, 2, 64, 37)
    case("decode_d64_one_slot", 1, 3, 3, 64, 1)
    case("decode_d128", 1, 8, 1, 128, 70)
    case("decode_d256", 1, 4, 2, 256, 21)
    case("decode_d512", 1, 6, 1, 512, 19)
    case("decode_d64_w16", 1, 4, 2, 64, 45, window=16)
    case("decode_d256_w9", 1, 4, 1, 256, 31, window=9)
    case("decode_d64_w1", 1, 2, 1, 64, 12, window=1)
    case("decode_d64_sharp", 1, 4, 2, 64, 29, scale=1.0, spread=300.0)
    case("verify_d64", 4, 4, 2, 64, 31)
    case("verify_d128_w8", 4, 4, 2, 128, 19, window=8)
    case("verify_d256", 4, 4, 1, 256, 19)
    case("verify_d512_w5", 4, 2, 1, 512, 17, window=5)
    case("prefill_d64", 17, 6, 2, 64, 17)
    case("prefill_d64_w16", 17, 3, 1, 64, 70, window=16)
    case("prefill_d128", 17, 2, 1, 128, 29)
    case("prefill_d256_w8", 17, 1, 1, 256, 23, window=8)
    case("prefill_d512", 17, 1, 1, 512, 18)
    for dtype in ("f16", "bf16"):
        case(f"decode_d64_{dtype}", 1, 4, 2, 64, 37, dtype=dtype)
        case(f"decode_d256_{dtype}", 1, 4, 2, 256, 23, dtype=dtype)
        case(f"decode_d512_w11_{dtype}", 1, 4, 1, 512, 19, window=11, dtype=dtype)
        case(f"verify_d128_w8_{dtype}", 4, 4, 2, 128, 19, window=8, dtype=dtype)
        case(f"prefill_d64_w16_{dtype}", 17, 4, 2, 64, 41, window=16, dtype=dtype)
    case("softcap_d64", 1, 4, 2, 64, 23, scale=1.0, softcap=5.0)
    case("softcap_d128_w8", 4, 4, 1, 128, 21, window=8, scale=1.0, softcap=20.0)
    return cases


# --------------------------------------------------------------------------------------------------------- quantized


def quantized_cases():
    rng, cases, k = np.random.default_rng(4), Cases(), 256
    grid = [(bits, group, "f32", t) for bits in (4, 6, 8) for group, t in ((32, 3), (64, 9), (128, 1))]
    grid += [(bits, 64, dtype, t) for bits in (4, 6, 8) for dtype, t in (("f16", 3), ("bf16", 1))]
    # Appended, so that the random numbers of the other cases are unchanged.
    grid += [(bits, group, "f32", t) for bits in (2, 3, 5) for group, t in ((32, 3), (64, 9), (128, 1))]
    for at, (bits, group, dtype, t) in enumerate(grid):
        n = 17 + (at * 5) % 12
        w = rand(rng, (n, k), dtype, 0.2)
        # One row of zeros and one with an offset: corner cases of MLX's choice of scale and bias.
        w = mx.concatenate([w[: n - 2], mx.zeros((1, k), dtype=w.dtype), w[n - 1 :] + 3.0]).astype(w.dtype)
        packed, scales, biases = mx.quantize(w, group_size=group, bits=bits)
        kind = {"group_size": group, "bits": bits}
        x = rand(rng, (t, k), dtype)
        y = mx.quantized_matmul(x, packed, scales, biases, transpose=True, **kind)
        full = mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), **kind)
        tensors = {
            "w": packed, "scales": scales, "biases": biases, "x": x, "out": y,
            "dequantized": mx.dequantize(packed, scales, biases, **kind),
        }
        exact = f64(x) @ f64(full).T
        if dtype != "f32":
            # MLX's CPU path accumulates in the dtype itself, which is no useful reference for a kernel that accumulates
            # in f32.
            tensors["exact"] = mx.array(exact.astype(np.float32))
        params = {"dtype": dtype, "source": "mlx", "bits": bits, "group_size": group, "n": n, "k": k, "tokens": t}
        cases.add(f"b{bits}_g{group}_{dtype}_t{t}", params, tensors, exact)
    return cases


def main():
    parser = argparse.ArgumentParser(description="Golden data of single operations, by MLX.")
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=Path, default=root / "crates/kvant/tests/golden")
    out = parser.parse_args().out
    mx.set_default_device(mx.cpu)
    makers = {"rms_norm": rms_norm_cases, "rope": rope_cases, "sdpa": sdpa_cases, "quantized": quantized_cases}
    total = sum(make().write(out / f"{name}.safetensors") for name, make in makers.items())
    print(f"total {total} bytes")


if __name__ == "__main__":
    main()
