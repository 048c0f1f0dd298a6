import copy
import gc
import inspect
import json
import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache

from families import DEVICE, FAMILIES, WINDOW, model
from kvant.transformers import KvantCache

torch.set_num_threads(1)

LOSSY = {"bf16": 1e-4, "tq8": 1e-3, "tq4c": 0.05}
STEPS = 6


def ids(batch: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 97, (batch, tokens), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def ones(batch: int, tokens: int) -> torch.Tensor:
    return torch.ones(batch, tokens, dtype=torch.long, device=DEVICE)


def padded(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, with padding on the left."""
    inputs, mask = ids(batch, tokens), ones(batch, tokens)
    for row in range(batch):
        mask[row, : 3 * row] = 0
        inputs[row, : 3 * row] = 0
    return {"input_ids": inputs, "attention_mask": mask}


def cache_argument(tested) -> str:
    """The name of the cache in calls: `past_key_values` in older versions."""
    return "cache" if "cache" in inspect.signature(tested.forward).parameters else "past_key_values"


def generate(tested, implementation: str, cache, inputs, **options):
    tested.set_attn_implementation(implementation)
    options = {"max_new_tokens": STEPS, "do_sample": False, "output_logits": True, **options}
    if cache is not None:
        options[cache_argument(tested)] = cache
    return tested.generate(**inputs, return_dict_in_generate=True, **options)


def assert_equal(got, expected) -> None:
    assert got.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        assert (ours - theirs).abs().max() < 1e-4


def single() -> dict[str, torch.Tensor]:
    return {"input_ids": ids(1, 2 * WINDOW), "attention_mask": ones(1, 2 * WINDOW)}


@pytest.fixture(params=FAMILIES)
def tested(request):
    return model(request.param)


def is_linear(tested) -> bool:
    return "linear_attention" in (getattr(tested.config, "layer_types", None) or [])


# f32 equals eager.


def test_padding(tested):
    inputs = padded(3, 20)
    expected = generate(tested, "eager", None, inputs)
    assert_equal(generate(tested, "kvant", KvantCache(tested.config, kv="f32"), inputs), expected)


def test_windows_are_passed(tested):
    inputs = padded(2, 3 * WINDOW)
    expected = generate(tested, "eager", None, inputs)
    cache = KvantCache(tested.config, kv="f32", page_tokens=16)
    assert_equal(generate(tested, "kvant", cache, inputs), expected)


def test_beams(tested):
    inputs, options = padded(2, 20), {"num_beams": 3, "num_return_sequences": 2}
    expected = generate(tested, "eager", None, inputs, **options)
    assert_equal(generate(tested, "kvant", KvantCache(tested.config, kv="f32"), inputs, **options), expected)


def test_assisted_generation(tested):
    if is_linear(tested):
        pytest.skip("transformers cannot roll back recurrent states")
    assistant = copy.deepcopy(model("llama"))
    assistant.set_attn_implementation("eager")
    inputs = single()
    expected = generate(tested, "eager", None, inputs, max_new_tokens=16)
    cache = KvantCache(tested.config, kv="f32", page_tokens=16)
    got = generate(tested, "kvant", cache, inputs, max_new_tokens=16, assistant_model=assistant)
    assert got.sequences.tolist() == expected.sequences.tolist()


def test_prompt_lookup(tested):
    if is_linear(tested):
        pytest.skip("transformers cannot roll back recurrent states")
    inputs = {"input_ids": ids(1, 8).repeat(1, 5), "attention_mask": ones(1, 40)}
    expected = generate(tested, "eager", None, inputs, max_new_tokens=16)
    cache = KvantCache(tested.config, kv="f32", page_tokens=16)
    got = generate(tested, "kvant", cache, inputs, max_new_tokens=16, prompt_lookup_num_tokens=4)
    assert got.sequences.tolist() == expected.sequences.tolist()


def turns(tested, implementation: str, cache) -> list[torch.Tensor]:
    """Two turns of a conversation; the second has the text of the first."""
    first = padded(2, 20)
    answer = generate(tested, implementation, cache, first).sequences
    text = torch.cat([answer, ids(2, 9, seed=2)], dim=1)
    mask = torch.cat([first["attention_mask"], ones(2, text.shape[1] - 20)], dim=1)
    second = generate(tested, implementation, cache, {"input_ids": text, "attention_mask": mask})
    return [answer, second.sequences, *second.logits]


def test_turns(tested):
    argument = DynamicCache(config=tested.config)
    expected = turns(tested, "eager", argument)
    got = turns(tested, "kvant", KvantCache(tested.config, kv="f32"))
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-4


def test_without_a_cache(tested):
    inputs = padded(2, 3 * WINDOW)
    real = inputs["attention_mask"].bool()
    outputs = []
    for implementation in "eager", "kvant":
        tested.set_attn_implementation(implementation)
        with torch.no_grad():
            outputs.append(tested(**inputs, use_cache=False).logits[real])
    assert (outputs[0] - outputs[1]).abs().max() < 1e-4


# Other types are close.


def forced(tested, implementation: str, cache, inputs) -> torch.Tensor:
    """Log probabilities of the next tokens of a text that is fed in three parts."""
    tested.set_attn_implementation(implementation)
    text, mask, parts, start = inputs["input_ids"], inputs["attention_mask"], [], 0
    for end in (text.shape[1] - 9, text.shape[1] - 1, text.shape[1]):
        with torch.no_grad():
            out = tested(text[:, start:end], attention_mask=mask[:, :end], **{cache_argument(tested): cache})
        parts.append(out.logits.log_softmax(-1))
        start = end
    return torch.cat(parts, dim=1)[mask.bool()]


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    return (exact.exp() * (exact - other)).sum(-1).mean().item()


@pytest.mark.parametrize("kv", LOSSY)
def test_divergence(tested, kv):
    inputs = padded(2, 100)
    exact = forced(tested, "eager", DynamicCache(config=tested.config), inputs)
    cache = KvantCache(tested.config, kv=kv, page_tokens=16)
    assert 0 <= divergence(exact, forced(tested, "kvant", cache, inputs)) + 1e-7 < LOSSY[kv]
    dense = KvantCache(tested.config, kv="f32", page_tokens=16)
    forced(tested, "kvant", dense, inputs)
    assert cache.nbytes() < 0.7 * dense.nbytes()


@pytest.mark.parametrize("kv", LOSSY)
def test_generation_in_other_types(tested, kv):
    inputs = padded(2, 2 * WINDOW)
    beams = generate(tested, "kvant", KvantCache(tested.config, kv=kv), inputs, num_beams=2)
    assert beams.sequences.shape[1] == 2 * WINDOW + STEPS
    plain = generate(tested, "kvant", KvantCache(tested.config, kv=kv), single())
    if not is_linear(tested):
        lookup = generate(tested, "kvant", KvantCache(tested.config, kv=kv), single(), prompt_lookup_num_tokens=3)
        assert lookup.sequences.tolist() == plain.sequences.tolist()


@pytest.mark.parametrize("family", ["gemma3"] if DEVICE == "cpu" else FAMILIES)
def test_models_in_16_bits(family):
    for dtype in torch.bfloat16, torch.float16:
        tested = model(family, dtype)
        inputs = padded(2, 60)
        exact = forced(tested, "eager", DynamicCache(config=tested.config), inputs).float()
        for kv in "bf16", "f32", "tq8", "tq4c":
            other = forced(tested, "kvant", KvantCache(tested.config, kv=kv), inputs).float()
            assert divergence(exact, other) < 0.05


# The interface of the cache.


def test_types_by_layer(tmp_path):
    tested = model("llama")
    names = ["f32", "tq8", "f16:tq4"]
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"layers": names}))
    outputs = []
    for kv in names, {"layers": names}, f"@{path}":
        cache = KvantCache(tested.config, kv=kv)
        outputs.append((generate(tested, "kvant", cache, single()).sequences.tolist(), cache.nbytes()))
    assert outputs[0] == outputs[1] == outputs[2]


def test_dequantized():
    tested = model("mistral")
    inputs = padded(2, 40)
    expected = DynamicCache(config=tested.config)
    forced(tested, "eager", expected, inputs)
    cache = KvantCache(tested.config, kv="f32", page_tokens=16)
    forced(tested, "kvant", cache, inputs)
    keys, values = cache.dequantized(1)
    held = WINDOW - 1
    assert keys.shape == (2, 1, 40, 64)
    assert (keys[:, :, -held:] - expected.layers[1].keys).abs().max() < 1e-5
    assert (values[:, :, -held:] - expected.layers[1].values).abs().max() < 1e-5
    assert (keys[1, :, :3] == 0).all()


def test_crop_and_reset():
    tested = model("llama")
    inputs = padded(2, 30)
    cache = KvantCache(tested.config, kv="tq4", page_tokens=16)
    once = forced(tested, "kvant", cache, inputs)
    cache.crop(-10)
    assert cache.get_seq_length() == 20
    with torch.no_grad():
        again = tested(inputs["input_ids"][:, 20:], attention_mask=inputs["attention_mask"], **{cache_argument(tested): cache})
    last = again.logits.log_softmax(-1)
    assert (last[0] - once[:30][20:]).abs().max() < 1e-3
    cache.crop(4)
    assert cache.get_seq_length() == 4
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes() == 0
    assert (forced(tested, "kvant", cache, inputs) - once).abs().max() < 1e-5


def test_rows_are_selected():
    tested = model("qwen3")
    inputs = {"input_ids": ids(3, 20), "attention_mask": ones(3, 20)}
    caches = {"eager": DynamicCache(config=tested.config), "kvant": KvantCache(tested.config, kv="f32")}
    outputs = []
    for implementation, cache in caches.items():
        forced(tested, implementation, cache, inputs)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([5, 0, 0, 2, 4, 1], device=DEVICE))
        cache.batch_select_indices(torch.tensor([0, 1, 3, 5], device=DEVICE))
        with torch.no_grad():
            outputs.append(tested(ids(4, 3), **{cache_argument(tested): cache}).logits)
    assert (outputs[0] - outputs[1]).abs().max() < 1e-4


def test_errors():
    tested = model("llama")
    argument = cache_argument(tested)
    with pytest.raises(ValueError, match="codec: `name` must be f32, .*got \"tq7\""):
        KvantCache(tested.config, kv="tq7")
    with pytest.raises(ValueError, match="types of 3 layers, got 2"):
        KvantCache(tested.config, kv=["f16", "tq4"])
    with pytest.raises(ValueError, match="page_tokens"):
        KvantCache(tested.config, page_tokens=7)
    with pytest.raises(ValueError, match='got "eager"'):
        generate(tested, "eager", KvantCache(tested.config), single())
    with pytest.raises(MemoryError, match="out of pages"):
        generate(tested, "kvant", KvantCache(tested.config, kv="f32", memory=60_000, page_tokens=16), single())
    tested.set_attn_implementation("kvant")
    cache = KvantCache(tested.config, kv="f16")
    with torch.no_grad():
        tested(ids(2, 5), **{argument: cache})
        with pytest.raises(ValueError, match="the cache has 2 sequences, got a batch of 3"):
            tested(ids(3, 1), **{argument: cache})
        cache.reset()
        tested(ids(2, 5), **{argument: cache})
        with pytest.raises(ValueError, match="must be as before"):
            tested(ids(2, 1), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]] * 2, device=DEVICE), **{argument: cache})
            # On a GPU, the mask is read later.
            assert DEVICE == "cuda"
            tested(ids(2, 1), **{argument: cache})
    tested.train()
    with pytest.raises(NotImplementedError, match="gradient"):
        tested(ids(1, 5), use_cache=False)
    tested.eval()


def test_unsupported_layers():
    from transformers import Llama4TextConfig

    config = Llama4TextConfig(num_hidden_layers=4, attention_chunk_size=32)
    with pytest.raises(NotImplementedError, match="chunked_attention"):
        KvantCache(config)


def test_caches_are_freed():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    tested = model("llama")

    def cycles(count: int) -> None:
        for _ in range(count):
            generate(tested, "kvant", KvantCache(tested.config, kv="tq4c"), short, max_new_tokens=2)
        gc.collect()

    short = {"input_ids": ids(1, 5), "attention_mask": ones(1, 5)}
    cycles(30)
    before = resident()
    # KVANT_TEST_CYCLES=1000 for the long form.
    cycles(int(os.environ.get("KVANT_TEST_CYCLES", "150")))
    assert resident() - before < 16 << 20
