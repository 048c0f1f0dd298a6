"""A small deterministic safetensors writer and the array helpers that the golden scripts share.

Output is deterministic (sorted names, fixed header layout), so that rerunning a script shows a difference in version
control only if a value changed.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np

_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.uint8: "U8",
}
DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def raw_bytes(a: mx.array) -> bytes:
    """Little-endian row-major bytes; numpy has no bfloat16, which is converted by its bit pattern."""
    if a.dtype == mx.bfloat16:
        a = a.view(mx.uint16)
    return np.ascontiguousarray(np.array(a)).tobytes()


def f64(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def save(path, tensors, metadata=None, dtypes=None):
    """Writes `tensors` (name -> mx.array or numpy array) with string `metadata`; returns the file's size. `dtypes`
    gives
    the names of dtypes that arrays do not have."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    header, blobs, at = {}, [], 0
    if metadata:
        header["__metadata__"] = {k: metadata[k] for k in sorted(metadata)}
    for name in sorted(tensors):
        a = tensors[name]
        a = a if isinstance(a, mx.array) else mx.array(a)
        blob = raw_bytes(a)
        header[name] = {"dtype": (dtypes or {}).get(name, _NAMES[a.dtype]), "shape": list(a.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(blobs))
    return path.stat().st_size
