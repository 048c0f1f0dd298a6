"""Golden data of GGUF's block formats: random blocks and their values by the PyPI package `gguf`.

    python tools/golden_gguf.py [--out crates/kvant-models/tests/golden/gguf]

`blocks.gguf` has three tensors for each type:

        TYPE            random codes, realistic scales: the f16 fields are normal numbers around 0.01
        TYPE.any        random bytes; blocks with a value that is not finite are resampled
    TYPE.values     f32: the values of TYPE, then those of TYPE.any, one block per row
"""

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

ROOT = Path(__file__).resolve().parent.parent
# The byte offsets of the f16 fields of a block.
HALVES = {
    Type.F32: [], Type.F16: [], Type.BF16: [],
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
    Type.IQ4_NL: [0], Type.IQ4_XS: [0], Type.MXFP4: [],
}  # fmt: skip
BLOCKS = 4


def values(blocks, kind):
    if kind in (Type.F32, Type.F16):  # unlike the others, these are views of the bytes
        return np.ascontiguousarray(blocks).view("<f4" if kind == Type.F32 else "<f2").astype(np.float32)
    return gguf.dequantize(blocks, kind)


def draw(rng, kind, any_bits):
    """BLOCKS blocks as bytes, with finite values."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    rows = []
    while len(rows) < BLOCKS:
        block = rng.integers(0, 256, size, dtype=np.uint8)
        if not any_bits:
            for at in HALVES[kind]:
                block[at : at + 2] = np.array([rng.normal() * 0.01], "<f2").view(np.uint8)
            if kind == Type.MXFP4:
                block[0] = rng.integers(110, 130)
        if np.isfinite(values(block[None], kind)).all():
            rows.append(block)
    return np.stack(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "crates/kvant-models/tests/golden/gguf")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    np.seterr(invalid="ignore", over="ignore")
    rng = np.random.default_rng(18)
    writer = gguf.GGUFWriter(out / "blocks.gguf", "none")
    for kind in HALVES:
        expected = []
        for name, any_bits in ((kind.name, False), (f"{kind.name}.any", True)):
            blocks = draw(rng, kind, any_bits)
            writer.add_tensor(name, blocks, raw_dtype=kind)
            expected.append(values(blocks, kind))
        writer.add_tensor(f"{kind.name}.values", np.concatenate(expected))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
