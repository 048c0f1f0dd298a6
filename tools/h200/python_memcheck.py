#!/usr/bin/env python3
"""Runs the Python package's caches and codecs on a GPU, and compares the results with the CPU's: for compute-sanitizer.

    compute-sanitizer python3 tools/h200/python_memcheck.py

Caches of two streams have padding, removed tokens, reordered and copied rows, and windows. Neither transformers nor a
kernel of torch is used, because compute-sanitizer takes minutes for these.
"""

import torch

from kvant import Codec, _arrays, _kvant, attend

HEADS, KV_HEADS = 8, 2
#: Size of a head and window of each layer.
LAYERS = [(128, None), (64, 40)]
CACHES = ["bf16", "tq8", "tq4c", "f16:tq4"]


class Cache:
    """The calls of a KvantCache, with random states."""

    def __init__(self, kv: str, device: str, stream):
        self.device, self.stream = device, stream
        gpu = 0 if device == "cuda" else None
        shapes = [(KV_HEADS, size, window) for size, window in LAYERS]
        self.store = _kvant.Store(shapes, [kv], "bfloat16", 8 << 20, 16, (512, 0), gpu)
        self.random = torch.Generator().manual_seed(1)
        self.results = []

    def states(self, tokens: int, heads: int, size: int) -> torch.Tensor:
        states = torch.randn(tokens, heads, size, generator=self.random).bfloat16()
        return states.to(self.device)

    def tokens(self, *counts: int) -> None:
        """New tokens of each row, in all layers."""
        self.store.extend(list(counts))
        stream = 0 if self.stream is None else self.stream.cuda_stream
        for layer, (size, _) in enumerate(LAYERS):
            q, k, v = (self.states(sum(counts), heads, size) for heads in (HEADS, KV_HEADS, KV_HEADS))
            out = self.states(sum(counts), HEADS, size)
            if max(counts) == 1:
                pair = (k.data_ptr(), v.data_ptr())
                self.store.decode(layer, HEADS, q.data_ptr(), out.data_ptr(), pair, None, None, None, stream)
            else:
                q, k, v, shared = map(_arrays.shared, (q, k, v, out))
                self.store.forward(layer, q, shared, (k, v), None, None, None, None, stream)
            self.results.append(out)

    def read(self) -> None:
        stream = 0 if self.stream is None else self.stream.cuda_stream
        for layer, (size, _) in enumerate(LAYERS):
            for row, tokens in enumerate(self.store.lengths()):
                sides = [torch.zeros(KV_HEADS, tokens, size).to(self.device) for _ in range(2)]
                self.store.read(layer, row, *map(_arrays.shared, sides), stream)
                self.results += sides


def mean_square(difference: torch.Tensor) -> float:
    """Rounding may select a neighbouring code, so that single numbers may differ much."""
    return (difference**2).mean().item()


def life(cache: Cache):
    """The events of a cache; another cache continues after each."""
    yield cache.tokens(70, 53)
    for _ in range(5):
        yield cache.tokens(1, 1)
    yield cache.store.truncate([length - 3 for length in cache.store.lengths()])
    yield cache.tokens(4, 0)
    yield cache.store.select([1, 0, 1])
    for _ in range(5):
        yield cache.tokens(1, 1, 1)
    yield cache.tokens(30, 1, 17)
    yield cache.read()
    yield cache.store.clear()
    yield cache.tokens(5)


def test_caches() -> None:
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    for kv in CACHES:
        caches = [Cache(kv, "cuda", stream) for stream in streams]
        lives = [life(cache) for cache in caches]
        while lives:
            for cache, events in zip(caches, list(lives)):
                with torch.cuda.stream(cache.stream):
                    if next(events, "over") == "over":
                        lives.remove(events)
        expected = Cache(kv, "cpu", None)
        list(life(expected))
        torch.cuda.synchronize()
        for cache in caches:
            pairs = list(zip(cache.results, expected.results, strict=True))
            difference = max(mean_square(ours.cpu().float() - theirs.float()) for ours, theirs in pairs)
            assert difference < 1e-3, (kv, difference)
            print(kv, f"{difference:.1e}", flush=True)


def test_codecs() -> None:
    random = torch.Generator().manual_seed(2)
    x = torch.randn(3, 70, 128, generator=random)
    for name in "f16", "tq8", "tq5", "tq4", "tq2", "tq4c":
        codec = Codec(name)
        difference = mean_square(codec.decode(codec.encode(x.to("cuda"))).cpu() - codec.decode(codec.encode(x), x * 0))
        assert difference < 1e-4, (name, difference)
    q, k, v = (torch.randn(tokens, heads, 128, generator=random) for tokens, heads in [(5, 4), (90, 2), (90, 2)])
    for name in "f32", "bf16", "tq8", "f16:tq4c":
        ours = attend(*(array.to("cuda") for array in (q, k, v)), kv=name)
        difference = mean_square(ours.cpu() - attend(q, k, v, kv=name))
        assert difference < 1e-4, (name, difference)
        print(name, f"{difference:.1e}", flush=True)


if __name__ == "__main__":
    test_codecs()
    test_caches()
    print("passed")
