import subprocess
import sys

import numpy as np
import pytest

import kvant
from kvant import Codec, attend

#: Mean squared error of normal numbers.
ERRORS = {"f32": 0.0, "bf16": 1e-5, "tq8": 3e-4, "tq4": 0.011, "tq2": 0.13, "tq4c": 0.011, "tq6c": 1e-3}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("name", ERRORS)
def test_round_trip(name):
    x = normal(3, 70, 128)
    codec = Codec(name)
    encoded = codec.encode(x)
    assert ((codec.decode(encoded) - x) ** 2).mean() <= ERRORS[name]
    pages = 3 * 2 * (128 + 4) if name.endswith("c") else 0
    assert encoded.nbytes == 3 * 70 * codec.bytes_per_vector(128) + pages


@pytest.mark.parametrize("name", ERRORS)
def test_round_trip_of_torch(name):
    torch = pytest.importorskip("torch")
    x, codec = normal(3, 70, 128), Codec(name)
    out = torch.empty(3, 70, 128, dtype=torch.bfloat16)
    assert codec.decode(codec.encode(torch.from_numpy(x).bfloat16()), out) is out
    assert ((out.float().numpy() - x) ** 2).mean() <= ERRORS[name] + 1e-4


def test_a_centred_codec_removes_the_mean_of_each_page():
    x = normal(128, 64) + np.repeat([[100.0], [-50.0]], 64, axis=0).astype(np.float32)
    errors = [((Codec(name).decode(Codec(name).encode(x)) - x) ** 2).mean() for name in ("tq4", "tq4c")]
    assert errors[1] < errors[0] / 10


def reference(q, k, v, scale=None, softcap=None, window=None, sinks=None):
    """Attention in float64."""
    tokens, heads, size = q.shape
    positions, kv_heads = k.shape[:2]
    k, v = (np.repeat(x.astype(float), heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q.astype(float), k) * (size**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    at, seen = np.arange(positions - tokens, positions)[:, None], np.arange(positions)
    hidden = (seen > at) | (seen <= at - (positions if window is None else window))
    weights = np.where(hidden, 0, np.exp(scores))
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks.astype(float))[:, None, None])
    return np.einsum("hts,shd->thd", weights / total, v)


OPTIONS = [{}, {"scale": 0.3}, {"softcap": 2.0}, {"window": 9}, {"sinks": np.float32([0.5, -1, 2, 0])}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
def test_attend(options):
    q, k, v = normal(5, 4, 64), normal(90, 2, 64, seed=1), normal(90, 2, 64, seed=2)
    expected = reference(q, k, v, **options)
    for kv, bound in ("f32", 1e-5), ("f16", 2e-3), ("tq8", 0.03), ("f16:tq4c", 0.3):
        assert abs(attend(q, k, v, kv=kv, **options) - expected).max() < bound


def test_attend_in_bfloat16():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(normal(9, 2, 64, seed=seed)).bfloat16() for seed in range(3))
    out = attend(q, k, v)
    assert out.dtype == torch.bfloat16
    expected = reference(*(x.float().numpy() for x in (q, k, v)))
    assert abs(out.float().numpy() - expected).max() < 0.02


def test_arrays_are_used_in_place():
    encoded = Codec("f32").encode(normal(10, 64))
    out = np.zeros((2, 10, 64), dtype=np.float32)
    assert Codec("f32").decode(encoded, out[1]) is not None
    assert (out[1] == normal(10, 64)).all() and (out[0] == 0).all()


def test_errors():
    x = normal(4, 64)
    for call, error, text in [
        (lambda: Codec("tq7"), ValueError, "codec: `name` must be f32"),
        (lambda: Codec("tq4").encode(normal(4, 60)), ValueError, "power of two from 8 to 4096, got 60"),
        (lambda: Codec("tq4").encode(x.astype(np.int32)), ValueError, "`x` must be float32, float16"),
        (lambda: Codec("tq4").encode(np.float32(3)), ValueError, "at least one dimension"),
        (lambda: Codec("tq4").decode(Codec("tq8").encode(x)), ValueError, "256 bytes"),
        (lambda: Codec("tq4").decode(Codec("tq4").encode(x), normal(3, 64)), ValueError, r"shape \[4, 64\]"),
        (lambda: Codec("tq4").decode(Codec("tq4").encode(x), normal(64, 4).T), ValueError, "contiguous"),
        (lambda: Codec("tq4c").encode(x, page_tokens=0), ValueError, "`page_tokens` must be at least 1"),
        (lambda: attend(normal(5, 2, 60), normal(5, 2, 60), normal(5, 2, 60)), ValueError, "attend: `D` must be one of"),
        (lambda: attend(normal(6, 2, 64), normal(5, 2, 64), normal(5, 2, 64)), ValueError, "at most the 5 positions"),
        (lambda: attend(normal(5, 3, 64), normal(5, 2, 64), normal(5, 2, 64)), ValueError, "multiple of the layer's 2"),
    ]:
        with pytest.raises(error, match=text):
            call()


def test_torch_and_transformers_are_optional():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = sys.modules['tqdm'] = None\n"
        "import numpy as np, kvant\n"
        "kvant.Codec('tq4').encode(np.ones((2, 64), dtype=np.float32))\n"
        "llm = kvant.LLM(None, max_model_len=64)\n"
        "print(len(llm.generate(['a', 'b'])))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "2\n"


def test_doctests():
    import doctest

    for module in kvant._codec, kvant.llm:
        assert doctest.testmod(module).failed == 0
