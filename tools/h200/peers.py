"""Times other kernels on the attention shapes of `speed attention`, on the same machine.

    python3 tools/h200/peers.py [SPEED_LOG]

Decode: PyTorch's FlashAttention and cuDNN, and FlashInfer if it can be imported (it compiles its kernels on first use,
with nvcc and ninja); one token over a full bf16 cache of one sequence. Prompts: PyTorch's FlashAttention, cuDNN and
memory-efficient kernels, causal, without windows; 4096 tokens of one sequence. A time is the median of seven replays of
a CUDA graph of calls over buffers that together exceed the L2 cache several times; GB/s is bytes of keys and values
divided by time. The last table has errors of these prompts. Given the output of kvant-bench's `speed`, the first tables also have
kvant's time and its speed relative to the fastest peer.
"""

import re
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROWS = [
    (128, 32, 8, 1024), (128, 32, 8, 32768), (128, 32, 8, 131072),
    (256, 16, 8, 1024), (256, 16, 8, 4096), (256, 16, 8, 32768), (256, 16, 8, 131072),
    (512, 16, 2, 1024), (512, 16, 2, 32768), (512, 16, 2, 131072), (512, 8, 4, 32768),
]
# Coordinates, query heads, KV heads, tokens.
PROMPTS = [(64, 32, 8, 4096), (128, 32, 8, 4096), (256, 16, 8, 4096), (512, 16, 2, 4096)]
DEVICE = torch.device("cuda")


def replay(call, copies, calls):
    """Microseconds of call(i), whose argument cycles through the copies."""
    calls = -(-calls // copies) * copies
    stream = torch.cuda.Stream()
    # The buffers were filled on the other stream.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i % copies)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i % copies)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[3]


def attempt(name, time):
    try:
        return time()
    except Exception as error:
        print(f"{name}: {str(error).strip().splitlines()[-1][:160] if str(error).strip() else type(error).__name__}", file=sys.stderr)
        return None


def scaled_dot_product(backend, q, kv, calls, causal=False):
    """q [1, H, T, D], keys and values [1, Hk, N, D]."""
    gqa = q.shape[1] != kv[0][0].shape[1]
    with sdpa_kernel(backend):
        def call(i):
            F.scaled_dot_product_attention(q, *kv[i], is_causal=causal, enable_gqa=gqa)
        return replay(call, len(kv), calls)


def flashinfer_decode(tensor_cores, q, kv, calls):
    """q [H, D], keys and values [Hk, N, D]: FlashInfer's decode of one request over a paged cache, planned once."""
    import flashinfer

    heads, dim = q.shape
    kv_heads, length, _ = kv[0][0].shape
    page = 64
    pages = length // page
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    indptr = torch.tensor([0, pages], dtype=torch.int32, device=DEVICE)
    indices = torch.arange(pages, dtype=torch.int32, device=DEVICE)
    last = torch.tensor([page], dtype=torch.int32, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_cuda_graph=True, use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=indptr, paged_kv_indices_buffer=indices, paged_kv_last_page_len_buffer=last)
    wrapper.plan(indptr, indices, last, heads, kv_heads, dim, page, q_data_type=q.dtype, kv_data_type=q.dtype)
    # The bytes viewed as a cache of pages, [pages, 64, Hk, D].
    paged = [tuple(x.reshape(pages, page, kv_heads, dim) for x in pair) for pair in kv]
    out = torch.empty(1, heads, dim, dtype=q.dtype, device=DEVICE)

    def call(i):
        wrapper.run(q[None], paged[i], out=out)
    return replay(call, len(kv), calls)


def ours(path):
    """Microseconds of kvant by row and number of query tokens, from the output of `speed`."""
    found = {}
    for line in open(path):
        match = re.match(r"\| attend (\d+), (\d+), (\d+), (\d+) bf16, (\d+) tokens, window None \| ([\d.]+) \|", line)
        if match:
            found[tuple(map(int, match.groups()[:5]))] = float(match[6])
    return found


def prompts(kvant):
    """The second table: a prompt's attention, in microseconds."""
    names = ["FlashAttention", "cuDNN", "memory-efficient, keys repeated"]
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    print("\nPrompts, causal, microseconds.\n")
    print("| D, H, Hk, tokens | kvant | " + " | ".join(names) + " | kvant by best |")
    print("|---|---|" + "---|" * (len(names) + 1))
    for row in PROMPTS:
        dim, heads, kv_heads, length = row
        copies = max(1, min(64, 300_000_000 // (2 * 2 * dim * kv_heads * length) + 1))
        kv = [tuple(torch.randn(1, kv_heads, length, dim, device=DEVICE).bfloat16() for _ in "kv") for _ in range(copies)]
        repeated = [tuple(x.repeat_interleave(heads // kv_heads, 1) for x in pair) for pair in kv]
        q = torch.randn(1, heads, length, dim, device=DEVICE).bfloat16()
        times = [
            attempt(name, lambda: scaled_dot_product(backend, q, repeated if "repeated" in name else kv, copies, causal=True))
            for name, backend in zip(names, backends)
        ]
        cells = ["–" if us is None else f"{us:.1f}" for us in [kvant.get((*row, length)), *times]]
        best = min((us for us in times if us is not None), default=None)
        mine = kvant.get((*row, length))
        ratio = "–" if mine is None or best is None else f"{best / mine:.2f}"
        print(f"| {dim}, {heads}, {kv_heads}, {length} | " + " | ".join([*cells, ratio]) + " |", flush=True)
        del kv, repeated
        torch.cuda.empty_cache()


def errors():
    """The normalised error of a prompt of 512 normal tokens in bf16, against f64; kvant's comes from `speed
    prompt-errors`."""
    print("\n| D | FlashAttention | cuDNN | memory-efficient |\n|---|---|---|---|")
    for dim in (64, 128, 256, 512):
        q, k, v = (torch.randn(1, heads, 512, dim, device=DEVICE).bfloat16() for heads in (8, 4, 4))
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        want = F.scaled_dot_product_attention(q.double().cpu(), k.double().cpu(), v.double().cpu(), is_causal=True).to(DEVICE)

        def error(backend):
            with sdpa_kernel(backend):
                got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return ((got.double() - want).square().sum() / want.square().sum()).sqrt().item()

        backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
        found = [attempt(str(dim), lambda: error(backend)) for backend in backends]
        print(f"| {dim} | " + " | ".join("–" if x is None else f"{x:.3e}" for x in found) + " |", flush=True)


def main():
    kvant = ours(sys.argv[1]) if len(sys.argv) > 1 else {}
    print(f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}. Microseconds and GB/s.\n")
    big = torch.randint(0, 255, (8 << 30,), dtype=torch.uint8, device=DEVICE).view(torch.int64)
    rate = big.nbytes / replay(lambda _: big.sum(), 1, 4) / 1e3
    del big
    print(f"Reading 8 GiB once: {rate:.0f} GB/s.\n")
    names = ["FlashAttention", "cuDNN", "FlashInfer", "FlashInfer, tensor cores"]
    print("| D, H, Hk, keys | kvant | " + " | ".join(names) + " | kvant by best |")
    print("|---|---|" + "---|" * (len(names) + 1))
    for row in ROWS:
        dim, heads, kv_heads, length = row
        bytes_ = 2 * 2 * dim * kv_heads * length
        copies = max(1, min(64, 300_000_000 // bytes_ + 1))
        calls = max(copies, min(128, 2_000_000_000 // bytes_ + 4))
        kv = [tuple(torch.randn(kv_heads, length, dim, device=DEVICE).bfloat16() for _ in "kv") for _ in range(copies)]
        q = torch.randn(heads, dim, device=DEVICE).bfloat16()
        batched = [(k[None], v[None]) for k, v in kv]
        query = q[None, :, None]
        times = [
            attempt(names[0], lambda: scaled_dot_product(SDPBackend.FLASH_ATTENTION, query, batched, calls)),
            attempt(names[1], lambda: scaled_dot_product(SDPBackend.CUDNN_ATTENTION, query, batched, calls)),
            attempt(names[2], lambda: flashinfer_decode(False, q, kv, calls)),
            attempt(names[3], lambda: flashinfer_decode(True, q, kv, calls)),
        ]
        def cell(us):
            return "–" if us is None else f"{us:.2f}, {bytes_ / us / 1e3:.0f}"
        best = min((us for us in times if us is not None), default=None)
        mine = kvant.get((*row, 1))
        ratio = "–" if mine is None or best is None else f"{best / mine:.2f}"
        print(f"| {dim}, {heads}, {kv_heads}, {length} | {cell(mine)} | " + " | ".join(map(cell, times)) + f" | {ratio} |", flush=True)
        del kv, batched
        torch.cuda.empty_cache()
    prompts(kvant)
    errors()


if __name__ == "__main__":
    main()
