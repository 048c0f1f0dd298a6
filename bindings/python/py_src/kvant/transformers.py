"""A small KV cache for models of `transformers`.

Importing this module registers the attention and the masks "kvant" there:

    import kvant.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvant")
    cache = kvant.transformers.KvantCache(model.config, kv="tq4c")
    model.generate(**inputs, cache=cache)  # `past_key_values=cache` in older versions

Keys and values are in kvant's pages. `Cache.update` returns the new ones alone, tagged with their place; the attention
function reads the pages. Models run on the CPU or on one NVIDIA GPU, in float32, float16 or bfloat16. On a GPU, tensors
are used in place, in the order of torch's current stream.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)

from . import _arrays, _kvant

__all__ = ["KvantCache", "attention", "mask"]

#: Tokens that assisted generation can remove from a layer with a window.
_HELD = 128

_shared = torch.utils.dlpack.to_dlpack
#: The stream of a GPU as a number. Without it, an object is made for each call.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

#: Types of layers with keys and values that the cache stores.
_ATTENTION = ("full_attention", "sliding_attention")


class _Place:
    """Where the keys of a layer's call belong: the tag of a tensor that `Cache.update` returned."""

    __slots__ = ("__weakref__", "cache", "is_written", "layer", "start", "tokens")

    def __init__(self, cache: "KvantCache", layer: "_Layer", start: int, tokens: int):
        self.cache, self.layer, self.start, self.tokens = cache, layer, start, tokens
        self.is_written = False


_CHANGED = "KvantCache: `attention_mask` must be as before for tokens that are in the cache"

#: The latest tag that no attention has read yet.
_pending = threading.local()


class _Layer(CacheLayerMixin):
    """A layer of the cache, as `transformers` sees it."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: "KvantCache", index: int, stored: int, shape: tuple[int, int, int | None]):
        super().__init__()
        self._cache = weakref.ref(cache)
        #: Its number, among layers with keys and values of their own, too.
        self.index, self.stored = index, stored
        self.heads, self.size, self.window = shape
        self.is_sliding = self.window is not None
        self.length = 0
        #: The sinks of its attention as the model has them, their version, and in f32.
        self.sinks: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        return self._cache()._append(self, key_states, value_states)

    def sinks_of(self, sinks: torch.Tensor) -> torch.Tensor:
        """Sinks in f32, converted only if they have changed."""
        if self.sinks is None or self.sinks[0] is not sinks or self.sinks[1] != sinks._version:
            self.sinks = sinks, sinks._version, sinks.detach().float().contiguous()
        return self.sinks[2]

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.length = 0


class KvantCache(Cache):
    """Keys and values in a cache type of kvant, for one batch of sequences.

    `kv` is a cache type such as "tq4c", "f16:tq4" (keys:values) or "@FILE" (types per layer), a list of types, or a
    dictionary like the contents of such a file: `{"layers": ["tq8", ...]}`, with a type for each layer that has its own
    keys and values. `memory` is the maximum of bytes for pages of `page_tokens` positions; unless given, half of the
    free memory. The CPU's system provides memory at its first use. A GPU provides all of it with the first keys, so that
    less is taken if it suffices for four sequences of the model's maximum length; memory that torch holds without using
    it counts as free.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        kv: str | Sequence[str] | dict[str, Any] = "tq4c",
        memory: int | None = None,
        page_tokens: int = 64,
    ):
        self._config = config.get_text_config(decoder=True)
        self._kv, self._memory, self._page_tokens = _kv_names(kv), memory, page_tokens
        layers, self._shapes, self._stored = _layers(self, self._config)
        super().__init__(layers=layers)
        dtype = getattr(self._config, "dtype", None)
        dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
        self._held = 0
        # The device is known with the first keys.
        self._store = self._new_store(dtype, torch.device("cpu"))
        self._forget()

    def _new_store(self, dtype: torch.dtype, device: torch.device) -> _kvant.Store:
        name, gpu, idle = str(dtype).removeprefix("torch."), None, 0
        if device.type == "cuda":
            gpu, idle = device.index, torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        room = (getattr(self._config, "max_position_embeddings", None) or 1 << 17, max(idle, 0))
        store = _kvant.Store(self._shapes, self._kv, name, self._memory, self._page_tokens, room, gpu)
        store.hold(self._held)
        self._dtype, self._device, self._gpu = dtype, device, gpu
        return store

    def _forget(self) -> None:
        #: Tokens of each row so far, those of padding included.
        self._slots = 0
        #: Which of them are real: [batch, slots]; None if all are.
        self._is_real: np.ndarray | None = None
        #: The number of rows; 0 until the first tokens.
        self._batch = 0
        #: The real tokens of the latest pass, on the device; None if all are.
        self._rows = None
        #: The result of the check of a mask that was not read, and an event after it.
        self._unread: tuple[torch.Tensor, Any] | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        layer = self.layers[layer_idx]
        if type(layer) is _Layer:
            return self._append(layer, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    # Used by the attention function.

    def _append(self, layer: _Layer, keys: torch.Tensor, values: torch.Tensor):
        """The keys of a layer's call with their tag, and the values."""
        # Shapes and dtypes of the first pass, and the configuration once in each pass.
        if layer.length == 0 or layer.stored == 0:
            self._check_keys(layer, keys, values)
        tokens = keys.shape[-2]
        place = _Place(self, layer, layer.length, tokens)
        layer.length += tokens
        layer.is_initialized = True
        # An alias, so that the model's tensor does not keep the tag.
        keys = keys.detach()
        keys.kvant_place = place
        _pending.place = weakref.ref(place)
        return keys, values

    def _check_keys(self, layer: _Layer, keys: torch.Tensor, values: torch.Tensor) -> None:
        implementation = self._config._attn_implementation
        if implementation != "kvant":
            raise ValueError(
                f'KvantCache requires the model\'s attention "kvant", got "{implementation}": '
                'load it with attn_implementation="kvant", or call model.set_attn_implementation("kvant")'
            )
        for name, states in ("keys", keys), ("values", values):
            if states.ndim != 4 or states.shape[1] != layer.heads or states.shape[3] != layer.size:
                raise ValueError(
                    f"KvantCache: {name} of layer {layer.index} must have shape "
                    f"[batch, {layer.heads}, tokens, {layer.size}], got {list(states.shape)}"
                )
        if (keys.dtype != self._dtype or keys.device != self._device) and self._slots == 0:
            _check_device(keys)
            self._store = self._new_store(keys.dtype, keys.device)
        if keys.device != self._device:
            raise ValueError(f"KvantCache: all layers must be on one device, got {self._device} and {keys.device}")

    def _begin(self, place: _Place, mask: torch.Tensor | None, batch: int) -> None:
        """Appends the tokens of a pass, with the first layer that runs in it."""
        tokens = place.tokens
        if place.start + tokens == self._slots:
            return
        if place.start != self._slots:
            raise RuntimeError(
                f"KvantCache: layer {place.layer.index} has {place.start} tokens, the cache {self._slots}: "
                "every layer must see all tokens once; after an error, call reset()"
            )
        if self._batch not in (0, batch):
            raise ValueError(f"KvantCache: the cache has {self._batch} sequences, got a batch of {batch}")
        self._check_unread()
        is_real = self._new_mask(mask, batch, tokens)
        if is_real is None:
            self._store.extend([tokens] * batch)
            self._rows = None
        else:
            new = is_real[:, self._slots :]
            self._store.extend(new.sum(axis=1).tolist())
            self._rows = None if new.all() else torch.from_numpy(np.flatnonzero(new)).to(self._device)
        self._is_real, self._batch, self._slots = is_real, batch, self._slots + tokens

    def _new_mask(self, mask: torch.Tensor | None, batch: int, tokens: int) -> np.ndarray | None:
        """The real tokens after a pass; None if all are."""
        length = self._slots + tokens
        if mask is None:
            if self._is_real is None:
                return None
            mask = torch.ones(1, length, dtype=torch.bool)
        if mask.shape[0] not in (1, batch) or mask.shape[1] < length:
            raise ValueError(
                f"KvantCache: `attention_mask` must have shape [{batch}, {length}], got {list(mask.shape)}"
            )
        if self._slots > 0 and tokens == 1 and self._is_real is None and mask.is_cuda:
            # Decode without padding so far: reading the mask would wait for the GPU. The next pass reads the result.
            is_real = mask[:, :length].all().to("cpu", non_blocking=True)
            self._unread = is_real, torch.cuda.current_stream(self._device).record_event()
            return None
        given = np.broadcast_to(mask.numpy(force=True)[:, :length], (batch, length))
        past = given[:, : self._slots]
        if not past.all() if self._is_real is None else (past != self._is_real).any():
            raise ValueError(_CHANGED)
        return None if given.all() else given

    def _check_unread(self) -> None:
        if self._unread is not None:
            (is_real, event), self._unread = self._unread, None
            event.synchronize()
            if not is_real:
                raise ValueError(f"{_CHANGED}; the latest token of the previous call must not be padding")

    def _all_real(self) -> np.ndarray:
        return np.ones((self._batch, self._slots), dtype=bool) if self._is_real is None else self._is_real

    # The interface of `Cache`.

    def reset(self) -> None:
        super().reset()
        self._store.clear()
        self._forget()

    def _select(self, indices: torch.Tensor) -> None:
        if self._slots == 0:
            return
        indices = indices.tolist()
        self._store.select(indices)
        self._batch = len(indices)
        if self._is_real is not None:
            self._is_real = self._is_real[indices]

    def _others(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, _Layer)]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        for layer in self._others():
            layer.reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self._others():
            layer.batch_repeat_interleave(repeats)
        self._select(torch.arange(self._batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        for layer in self._others():
            layer.batch_select_indices(indices)
        # Indices, or a mask.
        if self._batch:
            self._select(torch.arange(self._batch)[indices.to("cpu")])

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self._held = _HELD
        self._store.hold(_HELD)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes this number of tokens if it is negative; as in older versions of `transformers`, a positive number is
        the new length."""
        for layer in self._others():
            layer.crop(tokens_to_remove)
        length = self._slots + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self._slots)
        length = max(length, 0)
        if length == self._slots:
            return
        if self._is_real is None:
            self._store.truncate([length] * self._batch)
        else:
            self._is_real = self._is_real[:, :length]
            self._store.truncate(self._is_real.sum(axis=1).tolist())
        self._slots = length
        for layer in self.layers:
            if isinstance(layer, _Layer):
                layer.length = length

    # kvant's.

    def nbytes(self) -> int:
        """Bytes of the pages in use."""
        return self._store.nbytes()

    def dequantized(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, `[batch, KV heads, tokens, size]` in float32, on the cache's device. Tokens of padding, and those that a
        window has passed, are zeros."""
        if layer not in self._stored:
            raise ValueError(f"dequantized: `layer` must have its own keys and values, got {layer}")
        heads, size, _ = self._shapes[self._stored[layer]]
        rows, is_real = self._batch, self._all_real()
        both = tuple(torch.zeros(rows, heads, self._slots, size, device=self._device) for _ in range(2))
        for row in range(rows):
            slots = torch.from_numpy(np.flatnonzero(is_real[row])).to(self._device)
            sides = tuple(torch.zeros(heads, len(slots), size, device=self._device) for _ in range(2))
            shared = map(_arrays.shared, sides)
            first = self._store.read(self._stored[layer], row, *shared, _stream(self._gpu))
            for side, read in zip(both, sides):
                side[row][:, slots[first:]] = read[:, first:]
        return both


def _kv_names(kv: str | Sequence[str] | dict[str, Any]) -> list[str]:
    if isinstance(kv, str):
        return [kv]
    names = kv.get("layers") if isinstance(kv, dict) else kv
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"KvantCache: `kv` must be a cache type, or types of the layers, got {kv!r}")
    if not names:
        raise ValueError("KvantCache: `kv` must have at least one type")
    return list(names)


def _layers(cache: KvantCache, config: PreTrainedConfig):
    """The layers of a cache; the shapes of those with keys and values of their own, and their places among these."""
    layers, shapes, stored = [], [], {}
    types, options = get_layer_types_and_kwargs(config)
    for index, (kind, of_kind, of_layer) in enumerate(zip(types, options, config.per_layer_config)):
        if kind in _ATTENTION:
            window = of_kind.get("sliding_window")
            heads = getattr(of_layer, "num_key_value_heads", None) or of_layer.num_attention_heads
            size = getattr(of_layer, "head_dim", None) or of_layer.hidden_size // of_layer.num_attention_heads
            stored[index] = len(shapes)
            shapes.append((heads, size, window))
            layers.append(_Layer(cache, index, stored[index], shapes[-1]))
        elif kind in ("linear_attention", "conv", "dummy"):
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**of_kind))
        else:
            raise NotImplementedError(f"KvantCache: layer {index} has the type {kind!r}, which kvant does not support")
    return layers, shapes, stored


def mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int | None = None,
    *,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of the attention "kvant": the one of padding, `[batch, 1, 1, tokens]`, because some models cut masks of
    four dimensions. Causality and windows need no mask."""
    if mask_function is not None and not _is_causal(mask_function):
        raise NotImplementedError(
            "kvant's attention supports causal masks with padding and windows; this model asks for another one"
        )
    return None if attention_mask is None else attention_mask[:, None, None, :].to(torch.bool)


def _is_causal(mask_function: Any) -> bool:
    """Whether a token sees only earlier ones, all of them or those of a window."""
    name = mask_function.__qualname__
    if name.startswith("and_masks."):
        parts = [cell.cell_contents for cell in mask_function.__closure__ or ()]
        return all(_is_causal(part) for group in parts for part in (group if isinstance(group, tuple) else (group,)))
    return name == "causal_mask_function" or name.startswith("sliding_window_overlay.")


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention "kvant": `query` is `[batch, heads, tokens, size]`, the result `[batch, tokens, heads, size]`."""
    place: _Place | None = getattr(key, "kvant_place", None)
    if place is not None and place.tokens == 1 and not dropout and not module.training:
        out = _decode(place, module, query, key, value, attention_mask, (scaling, softcap, s_aux))
        if out is not None:
            return out, None
    _check(module, query, attention_mask, dropout)
    padding = None if attention_mask is None else attention_mask[:, 0, 0]
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    if place is not None:
        return _attend(place, query, key, value, padding, (scaling, softcap, sinks)), None
    _check_untagged(query, key)
    queries = _packed(query, None)
    out = torch.empty_like(queries)
    _attend_without_cache(queries, key.detach(), value.detach(), out, padding, (scaling, softcap, sliding_window, sinks))
    batch, heads, tokens, size = query.shape
    return out.view(batch, tokens, heads, size), None


def _decode(place: _Place, module, query, key, value, mask, options) -> torch.Tensor | None:
    """One token of each sequence, without padding, in torch's tensors as they are. None for other tensors."""
    cache, layer = place.cache, place.layer
    batch, heads, tokens, size = query.shape
    dtype, device = cache._dtype, cache._device
    if (
        tokens != 1
        or size != layer.size
        or not (query.dtype is dtype and key.dtype is dtype and value.dtype is dtype)
        or not (key.shape == (batch, layer.heads, 1, size) == value.shape)
        or not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous())
        or not (query.device == device and key.device == device and value.device == device)
        or not getattr(module, "is_causal", True)
    ):
        return None
    if place.start + 1 != cache._slots:
        _check(module, query, mask, 0.0)
        cache._begin(place, None if mask is None else mask[:, 0, 0], batch)
    if cache._rows is not None:
        return None
    _pending.place = None
    scaling, softcap, sinks = options
    sinks = None if sinks is None else layer.sinks_of(sinks).data_ptr()
    out = query.new_empty((batch, 1, heads, size))
    pair = None if place.is_written else (key.data_ptr(), value.data_ptr())
    arrays = (query.data_ptr(), out.data_ptr())
    cache._store.decode(layer.stored, heads, *arrays, pair, scaling, softcap, sinks, _stream(cache._gpu))
    place.is_written = True
    return out


def _attend(place: _Place, query, key, value, padding, options) -> torch.Tensor:
    """Any number of tokens, with padding."""
    _pending.place = None
    batch, heads, tokens, size = query.shape
    cache = place.cache
    cache._begin(place, padding, batch)
    rows = cache._rows
    pair = None if place.is_written else (_shared(_packed(key, rows)), _shared(_packed(value, rows)))
    selected = None
    if tokens != place.tokens:
        # Layers that share keys may run for the last tokens alone.
        is_real = cache._all_real()[:, -place.tokens :]
        numbers = (is_real.cumsum() - 1).reshape(is_real.shape)[:, -tokens:]
        is_real = is_real[:, -tokens:]
        rows, selected = torch.from_numpy(np.flatnonzero(is_real)).to(query.device), numbers[is_real].tolist()
    queries = _packed(query, rows)
    out = torch.empty_like(queries)
    scaling, softcap, sinks = options
    sinks = None if sinks is None else _shared(sinks)
    arrays, options = (_shared(queries), _shared(out)), (scaling, softcap, sinks, _stream(cache._gpu))
    # The layer has the window.
    cache._store.forward(place.layer.stored, *arrays, pair, selected, *options)
    place.is_written = True
    if rows is not None:
        all_rows = out.new_zeros(batch * tokens, heads, size)
        all_rows[rows] = out
        out = all_rows
    return out.view(batch, tokens, heads, size)


def _packed(states: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """States `[batch, heads, tokens, size]` as `[tokens of all sequences, heads, size]`, those of `rows` alone."""
    states = states.detach().transpose(1, 2).flatten(0, 1)
    return (states if rows is None else states[rows]).contiguous()


def _check(module: torch.nn.Module, query: torch.Tensor, mask: torch.Tensor | None, dropout: float) -> None:
    _check_device(query)
    if module.training and torch.is_grad_enabled() and query.requires_grad:
        raise NotImplementedError("kvant's attention has no gradient: call model.eval(), or use another attention")
    if dropout:
        raise NotImplementedError("kvant's attention has no dropout: call model.eval()")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError("kvant's attention is causal; this layer's is not")
    if mask is not None and (mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1)):
        raise NotImplementedError(f"kvant's attention takes a mask of padding, [batch, tokens], got {list(mask.shape)}")


def _check_device(states: torch.Tensor) -> None:
    if states.device.type != "cpu" and (states.device.type != "cuda" or torch.version.cuda is None):
        raise NotImplementedError(
            f"kvant.transformers runs on the CPU and on NVIDIA GPUs, got tensors on {states.device}"
        )


def _stream(gpu: int | None) -> int:
    """torch's current stream of a GPU; 0 for the CPU."""
    if gpu is None:
        return 0
    return torch.cuda.current_stream(gpu).cuda_stream if _raw_stream is None else _raw_stream(gpu)


def _check_untagged(query: torch.Tensor, key: torch.Tensor) -> None:
    pending = getattr(_pending, "place", None)
    if pending is not None and pending() is not None:
        raise NotImplementedError("this model changes keys after Cache.update, which kvant does not support")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"kvant's attention got {key.shape[2]} keys for {query.shape[2]} queries: use a KvantCache, or no cache"
        )


def _attend_without_cache(queries, key, value, out, mask, options) -> None:
    """Attends within the tokens of a pass."""
    batch, tokens = key.shape[0], key.shape[2]
    kv = {torch.float32: "f32", torch.float16: "f16"}.get(key.dtype, "bf16")
    out.zero_()
    for row in range(batch):
        real = slice(None) if mask is None else mask[row if len(mask) > 1 else 0, :tokens]
        q, k, v = queries[row * tokens : (row + 1) * tokens], key[row].transpose(0, 1), value[row].transpose(0, 1)
        q, k, v = (states[real].contiguous() for states in (q, k, v))
        result = torch.empty_like(q)
        if len(q):
            scale, softcap, window, sinks = options
            arrays, sinks = map(_shared, (q, k, v, result)), None if sinks is None else _shared(sinks)
            _kvant.attend(kv, *arrays, scale, softcap, window, sinks, _arrays.gpu(q))
        out[row * tokens : (row + 1) * tokens][real] = result


AttentionInterface.register("kvant", attention)
AttentionMaskInterface.register("kvant", mask)
