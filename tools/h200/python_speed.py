#!/usr/bin/env python3
"""Speed and memory of KvantCache beside SDPA with a DynamicCache, with a model of the size of Gemma 4 E4B.

    tools/h200/python_speed.py [--small|--host]

The weights are random, in bf16. Prints a table: for each length of context, time of a decode step, prompt speed, and
memory of the cache; and the host's time of the cache, the attention function and the masks for each layer of a step.
`--small` runs a tiny model, on the CPU if there is no GPU, to test the program. `--host` measures the host's time alone,
with narrow layers, whose kernels take little time on a CPU, too.
"""

import inspect
import statistics
import sys
import time

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, Gemma4ForCausalLM, Gemma4TextConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import kvant.transformers
from kvant.transformers import KvantCache
from make_hf import CONFIGS, VOCABULARY, layers, randomise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOST = "--host" in sys.argv
SMALL = "--small" in sys.argv or HOST
LENGTHS = (64, 256) if SMALL else (2048, 32768)
CHUNK = 64 if SMALL else 2048
STEPS = 48 if HOST or not SMALL else 4
#: The attention and the cache type of each row.
ROWS = {"SDPA, DynamicCache": ("sdpa", None), "KvantCache bf16": ("kvant", "bf16"), "KvantCache tq4c": ("kvant", "tq4c")}


E4B = dict(CONFIGS["e4b"], vocab_size=VOCABULARY, max_position_embeddings=131072)
TINY = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1,
            num_kv_shared_layers=2, hidden_size_per_layer_input=16, sliding_window=32, layer_types=layers(6, 3), head_dim=64,
            global_head_dim=128, vocab_size=512, vocab_size_per_layer_input=512, max_position_embeddings=1024)


NARROW = dict(TINY, num_hidden_layers=E4B["num_hidden_layers"], num_kv_shared_layers=E4B["num_kv_shared_layers"],
              layer_types=E4B["layer_types"])
#: The functions of each attention, which the measurement of the host's time wraps.
FUNCTIONS = {"sdpa": (sdpa_attention_forward, sdpa_mask), "kvant": (kvant.transformers.attention, kvant.transformers.mask)}


def synchronise():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def allocated():
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


def random_model():
    torch.manual_seed(0)
    config = Gemma4TextConfig(final_logit_softcapping=30.0, **(NARROW if HOST else TINY if SMALL else E4B))
    # Without a GPU, SDPA is faster in f32.
    dtype = torch.float32 if HOST and DEVICE == "cpu" else torch.bfloat16
    with torch.device(DEVICE):
        model = Gemma4ForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    randomise(model)
    return model


def cache_argument(model):
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def new_cache(model, kv):
    return DynamicCache(config=model.config) if kv is None else KvantCache(model.config, kv=kv)


def measure(model, attention, kv, text):
    """Seconds of the prompt, milliseconds of each step, bytes that torch holds for the cache, bytes of kvant's pages,
    and logits of the last steps."""
    model.set_attn_implementation(attention)
    argument = cache_argument(model)
    before = allocated()
    cache = new_cache(model, kv)
    prompt = text.shape[1] - STEPS
    synchronise()
    start = time.perf_counter()
    for at in range(0, prompt, CHUNK):
        end = min(at + CHUNK, prompt)
        model(text[:, at:end], logits_to_keep=1, **{argument: cache})
    synchronise()
    seconds, times, logits = time.perf_counter() - start, [], []
    held = allocated() - before
    for at in range(prompt, text.shape[1]):
        start = time.perf_counter()
        out = model(text[:, at : at + 1], **{argument: cache}).logits
        synchronise()
        times.append(1000 * (time.perf_counter() - start))
        logits.append(out[0, -1].float().log_softmax(-1))
    return seconds, times, held, 0 if kv is None else cache.nbytes(), torch.stack(logits)


class Timed:
    """A function whose calls are timed."""

    def __init__(self, function):
        self.function, self.seconds = function, 0.0

    def __call__(self, *args, **kwargs):
        start = time.perf_counter()
        result = self.function(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        return result

    def take(self):
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def host_times(model, attention, kv, text):
    """Microseconds of the cache, the attention function and the masks, of each step and layer."""
    functions = [Timed(function) for function in FUNCTIONS[attention]]
    AttentionInterface.register(attention, functions[0])
    AttentionMaskInterface.register(attention, functions[1])
    model.set_attn_implementation(attention)
    cache = new_cache(model, kv)
    cache.update = Timed(cache.update)
    parts, steps = [cache.update, *functions], []
    try:
        prompt = text.shape[1] - STEPS
        model(text[:, :prompt], logits_to_keep=1, **{cache_argument(model): cache})
        for at in range(prompt, text.shape[1]):
            synchronise()
            [part.take() for part in parts]
            model(text[:, at : at + 1], **{cache_argument(model): cache})
            steps.append([1e6 * part.take() / model.config.num_hidden_layers for part in parts])
    finally:
        # The bound method refers to the cache, whose pages would stay until Python collects cycles.
        del cache.update, parts
        AttentionInterface.register(attention, FUNCTIONS[attention][0])
        AttentionMaskInterface.register(attention, FUNCTIONS[attention][1])
    return steps


def print_host_times(model):
    length = LENGTHS[0]
    text = torch.randint(5, model.config.vocab_size, (1, length + STEPS), device=DEVICE)
    steps = {name: [] for name in ROWS}
    for turn in range(6):
        for name, (attention, kv) in ROWS.items():
            times = host_times(model, attention, kv, text)
            # Kernels are compiled in the first turn.
            steps[name] += times if turn else []
    print(f"\nThe host's time of a step at {length} tokens, in microseconds of each layer, medians (fastest):\n")
    print("| cache | update | attention | masks | together |\n|---|---|---|---|---|")
    for name, times in steps.items():
        columns = [*zip(*times), [sum(step) for step in times]]
        cells = (f"{statistics.median(column):.1f} ({min(column):.1f})" for column in columns)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


@torch.no_grad()
def main():
    model = random_model()
    if HOST:
        torch.set_num_threads(1)
        print(f"{torch.__version__}, {DEVICE}")
        print_host_times(model)
        return
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters, {torch.__version__}, {DEVICE}")
    print("| tokens | cache | step, ms: median (fastest) | prompt, tokens/s | torch, MB | pages, MB | KL to SDPA |")
    print("|---|---|---|---|---|---|---|")
    for length in LENGTHS:
        text = torch.randint(5, model.config.vocab_size, (1, length + STEPS), device=DEVICE)
        exact, first = None, {}
        for turn in range(2):
            for name, (attention, kv) in ROWS.items():
                seconds, times, held, pages, logits = measure(model, attention, kv, text)
                if turn == 0:
                    # Kernels are compiled.
                    first[name] = seconds
                    continue
                exact = logits if exact is None else exact
                divergence = (exact.exp() * (exact - logits)).sum(-1).mean().item()
                print(
                    f"| {length} | {name} | {statistics.median(times):.2f} ({min(times):.2f}) | {length / seconds:.0f} | "
                    f"{held / 1e6:.0f} | {pages / 1e6:.0f} | {divergence:.1e} |",
                    flush=True,
                )
        print(f"first prompts, s: {', '.join(f'{name} {seconds:.1f}' for name, seconds in first.items())}")
    print_host_times(model)


if __name__ == "__main__":
    main()
