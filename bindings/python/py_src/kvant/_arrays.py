"""Arrays of numpy and torch, without importing torch."""

import sys
from typing import Any

import numpy as np


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def gpu(array: Any) -> tuple[int, int] | None:
    """The number of an array's GPU, and the stream that torch uses there now; None on the CPU."""
    if not is_torch(array) or array.device.type == "cpu":
        return None
    torch = sys.modules["torch"]
    if array.device.type != "cuda" or torch.version.cuda is None:
        raise NotImplementedError(f"kvant uses tensors on the CPU and on NVIDIA GPUs in place, got {array.device}")
    return array.device.index, torch.cuda.current_stream(array.device).cuda_stream


def shared(array: Any) -> Any:
    """The array for the extension module. A tensor becomes a capsule of DLPack: `Tensor.__dlpack__` is slower, and refuses
    tensors of a GPU that is not torch's current one."""
    return sys.modules["torch"].utils.dlpack.to_dlpack(array) if is_torch(array) else array


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
