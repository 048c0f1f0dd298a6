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

#: Types of layers with keys and values that the cache stores.
_ATTENTION = ("full_attention", "sliding_attention")


class _Place:
    """Where the keys of a layer's call belong: the tag of a tensor that `Cache.update` returned."""

    __slots__ = ("__weakref__", "cache", "is_written", "layer", "start", "tokens")

    def __init__(self, cache: "KvantCache", layer: int, start: int, tokens: int):
        self.cache, self.layer, self.start, self.tokens = cache, layer, start, tokens
        self.is_written = False


#: The latest tag that no attention has read yet.
_pending = threading.local()


class _Layer(CacheLayerMixin):
    """A layer of the cache, as `transformers` sees it."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: "KvantCache", index: int, window: int | None):
        super().__init__()
        self._cache = weakref.ref(cache)
        self.index, self.window = index, window
        self.is_sliding = window is not None
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        cache = self._cache()
        cache._check_keys(self.index, key_states, value_states)
        place = _Place(cache, self.index, self.length, key_states.shape[-2])
        self.length += place.tokens
        self.is_initialized = True
        # A view, so that the model's tensor does not keep the tag.
        key_states = key_states[:]
        key_states.kvant_place = place
        _pending.place = weakref.ref(place)
        return key_states, value_states

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
        self._dtype, self._device = dtype, device
        return store

    def _forget(self) -> None:
        #: Tokens of each row so far, those of padding included, and which of them are real: [batch, slots].
        self._slots, self._is_real = 0, None
        #: The real tokens of the latest pass, on the device; None if all are.
        self._rows = None

    # Used by the attention function.

    def _check_keys(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        implementation = self._config._attn_implementation
        if implementation != "kvant":
            raise ValueError(
                f'KvantCache requires the model\'s attention "kvant", got "{implementation}": '
                'load it with attn_implementation="kvant", or call model.set_attn_implementation("kvant")'
            )
        heads, size, _ = self._shapes[self._stored[layer]]
        for name, states in ("keys", keys), ("values", values):
            if states.ndim != 4 or states.shape[1] != heads or states.shape[3] != size:
                raise ValueError(
                    f"KvantCache: {name} of layer {layer} must have shape [batch, {heads}, tokens, {size}], "
                    f"got {list(states.shape)}"
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
                f"KvantCache: layer {place.layer} has {place.start} tokens, the cache {self._slots}: "
                "every layer must see all tokens once; after an error, call reset()"
            )
        is_real = self._new_mask(mask, batch, tokens)
        new = is_real[:, self._slots :]
        self._store.extend(new.sum(axis=1).tolist())
        self._rows = None if new.all() else torch.from_numpy(np.flatnonzero(new)).to(self._device)
        self._is_real, self._slots = is_real, self._slots + tokens

    def _new_mask(self, mask: torch.Tensor | None, batch: int, tokens: int) -> np.ndarray:
        past = np.ones((batch, 0), dtype=bool) if self._is_real is None else self._is_real
        if len(past) != batch:
            raise ValueError(f"KvantCache: the cache has {len(past)} sequences, got a batch of {batch}")
        length = self._slots + tokens
        if mask is None:
            given = np.ones((batch, length), dtype=bool)
        else:
            given = mask.numpy(force=True)
            if given.shape[0] not in (1, batch) or given.shape[1] < length:
                raise ValueError(
                    f"KvantCache: `attention_mask` must have shape [{batch}, {length}], got {list(given.shape)}"
                )
            given = np.broadcast_to(given[:, :length], (batch, length))
        if (given[:, : self._slots] != past).any():
            raise ValueError("KvantCache: `attention_mask` must be as before for tokens that are in the cache")
        return given

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
        if self._is_real is not None:
            self._select(torch.arange(len(self._is_real)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        for layer in self._others():
            layer.batch_select_indices(indices)
        if self._is_real is not None:
            # Indices, or a mask.
            self._select(torch.arange(len(self._is_real))[indices.to("cpu")])

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
        if length == self._slots or self._is_real is None:
            return
        is_real = self._is_real[:, :length]
        self._store.truncate(is_real.sum(axis=1).tolist())
        self._is_real, self._slots = is_real, length
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
        rows = 0 if self._is_real is None else len(self._is_real)
        both = tuple(torch.zeros(rows, heads, self._slots, size, device=self._device) for _ in range(2))
        for row in range(rows):
            slots = torch.from_numpy(np.flatnonzero(self._is_real[row])).to(self._device)
            sides = tuple(torch.zeros(heads, len(slots), size, device=self._device) for _ in range(2))
            shared = map(_arrays.shared, sides)
            first = self._store.read(self._stored[layer], row, *shared, _stream(self._device))
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
            layers.append(_Layer(cache, index, window))
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
    _check(module, query, attention_mask, dropout)
    batch, heads, tokens, size = query.shape
    padding = None if attention_mask is None else attention_mask[:, 0, 0]
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    place: _Place | None = getattr(key, "kvant_place", None)
    if place is None:
        _check_untagged(query, key)
        queries = _packed(query, None)
        out = torch.empty_like(queries)
        options = (scaling, softcap, sliding_window, sinks)
        _attend_without_cache(queries, key.detach(), value.detach(), out, padding, options)
        return out.view(batch, tokens, heads, size), None
    _pending.place = None
    cache = place.cache
    cache._begin(place, padding, batch)
    rows = cache._rows
    pair = None if place.is_written else (_shared(_packed(key, rows)), _shared(_packed(value, rows)))
    selected = None
    if tokens != place.tokens:
        # Layers that share keys may run for the last tokens alone.
        is_real = cache._is_real[:, -place.tokens :]
        numbers = (is_real.cumsum() - 1).reshape(is_real.shape)[:, -tokens:]
        is_real = is_real[:, -tokens:]
        rows, selected = torch.from_numpy(np.flatnonzero(is_real)).to(query.device), numbers[is_real].tolist()
    queries = _packed(query, rows)
    out = torch.empty_like(queries)
    sinks = None if sinks is None else _shared(sinks)
    arrays, options = (_shared(queries), _shared(out)), (scaling, softcap, sinks, _stream(query.device))
    # The layer has the window.
    cache._store.forward(cache._stored[place.layer], *arrays, pair, selected, *options)
    place.is_written = True
    if rows is not None:
        all_rows = out.new_zeros(batch * tokens, heads, size)
        all_rows[rows] = out
        out = all_rows
    return out.view(batch, tokens, heads, size), None


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


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


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
