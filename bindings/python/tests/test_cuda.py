"""Tensors of an NVIDIA GPU in place, in the order of torch's streams."""

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no NVIDIA GPU", allow_module_level=True)

from kvant import Codec, _arrays, _kvant, attend
from test_codec import ERRORS, OPTIONS, normal, reference

SIZE = 64


def on_gpu(array: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(array).to("cuda", dtype)


def delay() -> None:
    """Keeps the current stream busy for some 10 ms."""
    busy = torch.ones(8192, 8192, device="cuda")
    for _ in range(3):
        busy @ busy


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
def test_attend(options):
    q, k, v = normal(5, 4, SIZE), normal(90, 2, SIZE, seed=1), normal(90, 2, SIZE, seed=2)
    expected = reference(q, k, v, **options)
    options = {key: on_gpu(value) if key == "sinks" else value for key, value in options.items()}
    for kv, dtype, bound in [
        ("f32", torch.float32, 1e-4),
        ("f16", torch.float16, 5e-3),
        ("bf16", torch.bfloat16, 0.03),
        ("tq8", torch.float32, 0.03),
        ("f16:tq4c", torch.bfloat16, 0.3),
    ]:
        out = attend(*(on_gpu(x, dtype) for x in (q, k, v)), kv=kv, **options)
        assert out.is_cuda and out.dtype == dtype
        assert abs(out.float().cpu().numpy() - expected).max() < bound, kv


def test_tensors_may_begin_anywhere():
    q, k, v = normal(5, 4, SIZE), normal(9, 2, SIZE, seed=1), normal(9, 2, SIZE, seed=2)
    expected = reference(q, k, v)
    for shift in 1, 2, 4:
        shifted = []
        for array in (q, k, v):
            memory = torch.zeros(array.size + shift, device="cuda")
            memory[shift:] = on_gpu(array).flatten()
            shifted.append(memory[shift:].view(array.shape))
        assert abs(attend(*shifted).cpu().numpy() - expected).max() < 1e-4


def test_streams():
    """Each stream makes the inputs late, and uses the result at once."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()]
    k, v = (on_gpu(normal(200, 2, SIZE, seed=seed)) for seed in (1, 2))
    queries = normal(12, 3, 4, SIZE)
    torch.cuda.synchronize()
    results = []
    for turn, query in enumerate(queries):
        with torch.cuda.stream(streams[turn % 3]):
            source = torch.from_numpy(query).pin_memory().to("cuda", non_blocking=True)
            delay()
            q = source * 2
            out = attend(q, k + 0, v + 0)
            # The memory of these is used anew, in the order of the stream.
            del q, source
            torch.full((3, 4, SIZE), 1e9, device="cuda")
            results.append(out * 10)
            assert turn < 3 or not torch.cuda.current_stream().query(), "the host does not wait"
    torch.cuda.synchronize()
    k, v = k.cpu().numpy(), v.cpu().numpy()
    for query, result in zip(queries, results):
        assert abs(result.cpu().numpy() / 10 - reference(2 * query, k, v)).max() < 1e-4


def test_caches_in_two_streams():
    pytest.importorskip("transformers")
    from families import model
    from kvant.transformers import KvantCache
    from test_transformers import cache_argument

    tested = model("gemma3").to("cuda")
    tested.set_attn_implementation("kvant")
    text = torch.randint(2, 97, (4, 60), generator=torch.Generator().manual_seed(3)).cuda()

    def run(streams) -> list[torch.Tensor]:
        caches = [KvantCache(tested.config, kv="f32", page_tokens=16) for _ in text]
        logits = []
        for start, end in [(0, 40)] + [(at, at + 1) for at in range(40, 60)]:
            for row, cache in enumerate(caches):
                with torch.cuda.stream(streams[row % len(streams)]), torch.no_grad():
                    out = tested(text[row : row + 1, start:end], **{cache_argument(tested): cache}).logits
                    logits.append(out[:, -1] * 1)
        torch.cuda.synchronize()
        return logits

    expected = run([torch.cuda.default_stream()])
    for ours, theirs in zip(run([torch.cuda.Stream(), torch.cuda.Stream()]), expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("name", ERRORS)
def test_codecs(name):
    x, codec = normal(3, 70, 128), Codec(name)
    encoded = codec.encode(on_gpu(x))
    assert all(plane.is_cuda and plane.dtype == torch.uint8 for plane in encoded.planes.values())
    on_cpu = codec.encode(x)
    assert encoded.nbytes == on_cpu.nbytes and encoded.planes.keys() == on_cpu.planes.keys()
    decoded = codec.decode(encoded)
    assert decoded.is_cuda and decoded.dtype == torch.float32
    for got in decoded.cpu().numpy(), codec.decode(encoded, np.empty_like(x)):
        assert ((got - x) ** 2).mean() <= ERRORS[name]
    out = torch.empty(3, 70, 128, device="cuda", dtype=torch.bfloat16)
    assert codec.decode(on_cpu, out) is out
    assert ((out.float().cpu().numpy() - x) ** 2).mean() <= ERRORS[name] + 1e-4
    empty = codec.encode(torch.empty(0, 128, device="cuda"))
    assert codec.decode(empty, torch.empty(0, 128, device="cuda")).shape == (0, 128)


def test_memory_is_returned():
    pytest.importorskip("transformers")
    from families import model
    from kvant.transformers import KvantCache
    from test_transformers import cache_argument

    tested = model("llama").to("cuda")
    tested.set_attn_implementation("kvant")

    def feed(cache: KvantCache) -> None:
        with torch.no_grad():
            tested(torch.ones(2, 30, dtype=torch.long, device="cuda"), **{cache_argument(tested): cache})

    def cycles(count: int) -> None:
        for _ in range(count):
            feed(KvantCache(tested.config))
        gc.collect()

    cycles(20)
    allocated, before = torch.cuda.memory_allocated(), free()
    cycles(200)
    assert torch.cuda.memory_allocated() <= allocated
    assert before - free() < 16 << 20
    # A cache that may be as large as half of the free memory leaves the rest to torch, and returns all of it.
    tested.config.max_position_embeddings = 1 << 30
    try:
        cache = KvantCache(tested.config)
        feed(cache)
        assert 0.4 * before < free() < 0.6 * before
        del cache
        gc.collect()
        assert before - free() < 64 << 20
    finally:
        tested.config.max_position_embeddings = 512


def test_arrays_of_other_libraries():
    """An array with `__dlpack__` is asked for no synchronisation: passes are ordered with the stream."""

    class Array:
        def __init__(self, tensor: torch.Tensor):
            self.tensor = tensor

        def __dlpack__(self, *, stream: int):
            assert stream == -1
            return _arrays.shared(self.tensor)

    q, k, v = normal(5, 4, SIZE), normal(9, 2, SIZE, seed=1), normal(9, 2, SIZE, seed=2)
    out = torch.empty(5, 4, SIZE, device="cuda")
    gpu = _arrays.gpu(out)
    _kvant.attend("f32", *(Array(x) for x in (on_gpu(q), on_gpu(k), on_gpu(v), out)), None, None, None, None, gpu)
    assert abs(out.cpu().numpy() - reference(q, k, v)).max() < 1e-4


def test_errors():
    q, k = on_gpu(normal(5, 4, SIZE)), on_gpu(normal(9, 2, SIZE))
    with pytest.raises(ValueError, match="`k` must be on GPU 0"):
        attend(q, k.cpu(), k)
    with pytest.raises(ValueError, match="`k` must be on the CPU"):
        attend(q.cpu(), k, k)
    with pytest.raises(ValueError, match="`q` must have at most the 2 positions"):
        attend(q, k[:2], k[:2])
    attend(q, k, k)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            with pytest.raises(NotImplementedError, match="the stream is captured"):
                attend(q, k, k)
        finally:
            graph.capture_end()
    assert attend(q, k, k).isfinite().all()
