"""Golden blocks: random blocks of every format that `linear` reads, dequantised by the formats' original packages.

    python tools/golden_blocks.py [--out crates/kvant/tests/golden/blocks.safetensors]

The `gguf` package dequantises the formats of GGUF files, MLX small floats with separate scales. A case FORMAT has the
tensors `data` u8 [rows, bytes] (or `codes` u32 and `scales` u8) and `weights` f32 [rows, inputs].
"""

import argparse
import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np

from safefile import save

FORMATS = ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
# Offsets of f16 numbers in a block.
HALVES = {
    "Q5_0": [0], "Q5_1": [0, 2], "IQ4_NL": [0], "MXFP4": [], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2],
    "Q5_K": [0, 2], "Q6_K": [208], "IQ4_XS": [0],
}
ROWS = 3


def blocks_of(name, rng):
    kind = gguf.GGMLQuantizationType[name]
    inputs, size = gguf.GGML_QUANT_SIZES[kind]
    per_row = 512 // inputs
    data = rng.integers(0, 256, (ROWS * per_row, size), dtype=np.uint8)
    for at in HALVES[name]:
        halves = (rng.standard_normal(len(data)) * 0.1).astype(np.float16)
        # A zero, and a subnormal number.
        halves[:2] = [0.0, 3e-6]
        data[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        data[:, 0] = np.clip(data[:, 0], 0, 250)
        # The smallest scales: the numbers are subnormal or nearly so.
        data[:4, 0] = [1, 2, 3, 127]
    data = data.reshape(ROWS, per_row * size)
    return data, gguf.quants.dequantize(data, kind).astype(np.float32)


def floats_of(mode, rng):
    """Quantised normal numbers, followed by every code that is not NaN, with several scales."""
    dense = mx.array((rng.standard_normal((ROWS, 512)) * 0.1).astype(np.float32))
    codes, scales = mx.quantize(dense, mode=mode)[:2]
    every = np.arange(256, dtype=np.uint8)
    if mode == "mxfp8":
        every[(every & 0x7F) == 0x7F] = 0x38
    every = np.resize(every, ROWS * codes.shape[1] * 4).view(np.uint32).reshape(codes.shape)
    # Scales are powers of two, or numbers of E4M3 up to 0x7E; the first are subnormal.
    some = np.arange(scales.size) * 7 % 127 if mode == "nvfp4" else np.arange(scales.size) * 5 % 240
    some = some.astype(np.uint8).reshape(scales.shape)
    codes = mx.concatenate([codes, mx.array(every)])
    scales = mx.concatenate([scales, mx.array(some)])
    weights = mx.dequantize(codes, scales, mode=mode, dtype=mx.float32)
    assert mx.isfinite(weights).all().item(), mode
    return codes, scales, weights


def main():
    parser = argparse.ArgumentParser(description="Golden blocks by the gguf package and MLX.")
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=Path, default=root / "crates/kvant/tests/golden/blocks.safetensors")
    out, rng = parser.parse_args().out, np.random.default_rng(7)
    tensors, metadata = {}, {}
    for name in FORMATS:
        data, weights = blocks_of(name, rng)
        assert np.isfinite(weights).all(), name
        tensors[f"{name}/data"], tensors[f"{name}/weights"] = mx.array(data), mx.array(weights)
        metadata[name] = json.dumps({"source": f"gguf {getattr(gguf, '__version__', '')}".strip()})
    mx.set_default_device(mx.cpu)
    for name in ["mxfp4", "mxfp8", "nvfp4"]:
        codes, scales, weights = floats_of(name, rng)
        tensors.update({f"{name}/codes": codes, f"{name}/scales": scales, f"{name}/weights": weights})
        metadata[name] = json.dumps({"source": f"mlx {mx.__version__}"})
    print(f"{out}: {len(metadata)} cases, {save(out, tensors, metadata)} bytes")


if __name__ == "__main__":
    main()
