"""Arrays of numpy and torch, without importing torch."""

import sys
from typing import Any

import numpy as np


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def prepared(array: Any) -> Any:
    """The array, contiguous and writable, as DLPack requires it; a copy only if it is not. Other sequences become numpy
    arrays."""
    if is_torch(array):
        return array.detach().contiguous()
    if np.asarray(array).dtype == np.float64:
        array = np.asarray(array, dtype=np.float32)
    return np.require(array, requirements=["C", "W"])


def empty_like(array: Any, shape: tuple[int, ...] | None = None) -> Any:
    """An array of the library, dtype and device of another one."""
    shape = tuple(array.shape) if shape is None else shape
    if is_torch(array):
        return array.new_empty(shape)
    return np.empty(shape, dtype=array.dtype)
