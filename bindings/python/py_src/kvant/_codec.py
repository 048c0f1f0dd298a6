"""Storage formats of cached vectors, for research."""

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import _arrays, _kvant


@dataclass(frozen=True)
class Encoded:
    """Vectors in the format of a codec: `docs/codec.md` specifies the bytes."""

    #: The bytes of each plane: `low`, and `high`, `norms`, `means` if the codec has them. Of a tensor on a GPU: tensors
    #: of uint8 there.
    planes: dict[str, Any]
    #: The shape of the vectors.
    shape: tuple[int, ...]
    #: Vectors that share a mean, for centred codecs.
    page_tokens: int

    @property
    def nbytes(self) -> int:
        return sum(len(plane) for plane in self.planes.values())


class Codec:
    """A storage format by its name: f32, f16, bf16, or tq8, tq6, tq5, tq4, tq3, tq2, also centred as in tq4c.

    >>> import numpy as np
    >>> from kvant import Codec
    >>> x = np.random.default_rng(0).standard_normal((100, 128), dtype=np.float32)
    >>> encoded = Codec("tq4").encode(x)
    >>> encoded.nbytes
    6800
    >>> error = Codec("tq4").decode(encoded) - x
    >>> bool((error**2).mean() < 0.01)
    True
    """

    def __init__(self, name: str):
        self._codec = _kvant.Codec(name)

    @property
    def name(self) -> str:
        return self._codec.name

    def __repr__(self) -> str:
        return f"Codec({self.name!r})"

    def bytes_per_vector(self, size: int) -> int:
        """Bytes of a vector with `size` coordinates, without means of pages."""
        return self._codec.bytes_per_vector(size)

    def encode(self, x: Any, *, page_tokens: int = _kvant.PAGE_TOKENS) -> Encoded:
        """Encodes vectors `[..., size]` of numpy or torch, on the device of the tensor.

        Centred codecs encode around the mean of each page: `page_tokens` consecutive vectors of the second to last
        dimension. They encode on the CPU, also if the tensor is on a GPU.
        """
        x = _arrays.prepared(x)
        if x.ndim == 0:
            raise ValueError("encode: `x` must have at least one dimension")
        rows = x.reshape(-1, x.shape[-1])
        tokens = x.shape[-2] if x.ndim > 1 else 1
        if page_tokens < 1:
            raise ValueError(f"encode: `page_tokens` must be at least 1, got {page_tokens}")
        gpu = _arrays.gpu(x)
        if gpu is not None:
            return Encoded(self._encode_on_gpu(x, rows, page_tokens, gpu), tuple(x.shape), page_tokens)
        if not self.name.endswith("c") or tokens == len(rows) or tokens % page_tokens == 0:
            return Encoded(dict(self._codec.encode(rows, page_tokens)), tuple(x.shape), page_tokens)
        # A page does not continue in another sequence or head.
        parts = [dict(self._codec.encode(part, page_tokens)) for part in rows.reshape(-1, tokens, x.shape[-1])]
        planes = {name: b"".join(part[name] for part in parts) for name in parts[0]} if parts else {}
        return Encoded(planes, tuple(x.shape), page_tokens)

    def _encode_on_gpu(self, x: Any, rows: Any, page_tokens: int, gpu: tuple[int, int]) -> dict[str, Any]:
        if self.name.endswith("c"):
            return _moved(self.encode(x.cpu(), page_tokens=page_tokens), x.device).planes
        sizes = self._codec.plane_bytes(*rows.shape)
        planes = {name: x.new_empty(size, dtype=_uint8()) for name, size in sizes}
        shared = {name: _arrays.shared(plane) for name, plane in planes.items()}
        self._codec.encode_into(_arrays.shared(rows), shared, gpu)
        return planes

    def _decode_on_gpu(self, encoded: Encoded, out: Any, rows: Any, gpu: tuple[int, int]) -> None:
        if self.name.endswith("c"):
            out.copy_(self.decode(encoded, out.new_empty(out.shape, device="cpu")))
            return
        planes = {name: _arrays.shared(plane) for name, plane in _moved(encoded, out.device).planes.items()}
        self._codec.decode_from(planes, _arrays.shared(rows), gpu)

    def decode(self, encoded: Encoded, out: Any = None) -> Any:
        """Decodes vectors: into `out`, or a new array of float32: of numpy, or of torch if the planes are tensors."""
        if out is None:
            plane = next(iter(encoded.planes.values()), None)
            is_host = isinstance(plane, bytes | None)
            out = np.empty(encoded.shape, dtype=np.float32) if is_host else _float32(plane, encoded.shape)
        if tuple(out.shape) != tuple(encoded.shape):
            raise ValueError(f"decode: `out` must have shape {list(encoded.shape)}, got {list(out.shape)}")
        rows = out.reshape(-1, out.shape[-1])
        gpu = _arrays.gpu(out)
        if gpu is not None:
            self._decode_on_gpu(encoded, out, rows, gpu)
            return out
        encoded = _moved(encoded, "cpu")
        tokens, page = (encoded.shape[-2] if len(encoded.shape) > 1 else 1), encoded.page_tokens
        if not self.name.endswith("c") or tokens == len(rows) or tokens % page == 0:
            self._codec.decode(encoded.planes, page, rows)
            return out
        parts = rows.reshape(-1, tokens, out.shape[-1])
        for index, part in enumerate(parts):
            sizes = {name: len(plane) // len(parts) for name, plane in encoded.planes.items()}
            planes = {n: plane[index * sizes[n] : (index + 1) * sizes[n]] for n, plane in encoded.planes.items()}
            self._codec.decode(planes, page, part)
        return out

    def attend(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """`attend` with keys and values in this codec."""
        return attend(q, k, v, kv=self.name, **options)


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    kv: str = "f32",
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Any = None,
) -> Any:
    """Causal attention of the last `[tokens, heads, size]` positions over keys and values `[positions, KV heads, size]`,
    which are stored in the cache type `kv`. Arrays of numpy or torch, on one device; the result is like `q`. Tensors on
    a GPU are used in place, in the order of torch's current stream.

    `scale` is 1/√size unless given. `window`: positions that a token sees, itself included. `sinks`: float32 `[heads]`.
    """
    q, k, v = (_arrays.prepared(array) for array in (q, k, v))
    out = _arrays.empty_like(q)
    sinks = None if sinks is None else _arrays.prepared(sinks)
    arrays = (_arrays.shared(array) for array in (q, k, v, out))
    shared_sinks = None if sinks is None else _arrays.shared(sinks)
    _kvant.attend(kv, *arrays, scale, softcap, window, shared_sinks, _arrays.gpu(q))
    return out


def _uint8() -> Any:
    return sys.modules["torch"].uint8


def _float32(plane: Any, shape: tuple[int, ...]) -> Any:
    return plane.new_empty(shape, dtype=sys.modules["torch"].float32)


def _moved(encoded: Encoded, device: Any) -> Encoded:
    """The vectors with their planes on a device, or as bytes on the CPU."""
    if str(device) == "cpu":
        planes = {
            name: plane if isinstance(plane, bytes) else plane.cpu().numpy().tobytes()
            for name, plane in encoded.planes.items()
        }
        return replace(encoded, planes=planes)
    torch = sys.modules["torch"]

    def tensor(plane: Any) -> Any:
        return torch.from_numpy(np.frombuffer(bytearray(plane), np.uint8)) if isinstance(plane, bytes) else plane

    return replace(encoded, planes={name: tensor(plane).to(device) for name, plane in encoded.planes.items()})
