"""The `hf` backend of lm-eval with a KvantCache, on a small task in a local file. `tools/released_models.py` downloads the
model."""

import json

import pytest

torch = pytest.importorskip("torch")
lm_eval = pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from test_released import MODEL

from kvant.transformers import KvantCache

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason=f"{MODEL} is missing")

FACTS = [
    ("The capital of France is", ["Paris", "London", "seven"], 0),
    ("Water freezes at a temperature of zero degrees", ["Celsius", "Monday", "green"], 0),
    ("The opposite of hot is", ["blue", "cold", "tree"], 1),
    ("Two plus two equals", ["a horse", "yesterday", "four"], 2),
]


class CachedLM(HFLM):
    """Each batch has a cache of its own; `kv` None is the cache of transformers."""

    kv: str | None = None

    def _cache(self) -> dict:
        return {} if self.kv is None else {"cache": KvantCache(self.model.config, kv=self.kv)}

    def _model_call(self, inps, attn_mask=None, labels=None):
        with torch.no_grad():
            return self.model(inps, **self._cache()).logits

    def _model_generate(self, context, max_length, stop, **options):
        return super()._model_generate(context, max_length, stop, **self._cache(), **options)


@pytest.fixture(scope="module")
def lm():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": MODEL.name}
    model = AutoModelForCausalLM.from_pretrained(MODEL.parent, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(MODEL.parent, **options)
    return CachedLM(pretrained=model, tokenizer=tokenizer, batch_size=4)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "facts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "choices": choices, "label": label}) + "\n" for text, choices, label in FACTS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
    choice = {"task": "facts", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "label"}
    until = {"task": "words", "output_type": "generate_until", "doc_to_target": "{{choices[label]}}"}
    until["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    until["metric_list"] = [{"metric": "exact_match"}]
    return [{"doc_to_text": "{{text}}", **data, **task} for task in (choice, until)]


def evaluate(lm, tasks, implementation: str, kv: str | None):
    """Accuracy, log-likelihoods of all choices, and generated texts."""
    lm.kv = kv
    lm.model.set_attn_implementation(implementation)
    manager = TaskManager(include_defaults=False)
    done = lm_eval.simple_evaluate(lm, tasks=[dict(task) for task in tasks], task_manager=manager, bootstrap_iters=0)
    samples = done["samples"]
    scores = [score for sample in samples["facts"] for score, _ in sample["filtered_resps"]]
    return done["results"]["facts"]["acc,none"], scores, [sample["resps"] for sample in samples["words"]]


def test_a_task(lm, tasks, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    accuracy, scores, texts = evaluate(lm, tasks, "eager", None)
    assert accuracy >= 0.75 and len(scores) == 12
    ours = evaluate(lm, tasks, "kvant", "f32")
    assert (ours[0], ours[2]) == (accuracy, texts)
    assert max(abs(a - b) for a, b in zip(ours[1], scores, strict=True)) < 1e-3
    ours = evaluate(lm, tasks, "kvant", "tq4c")
    assert ours[0] >= accuracy - 0.25
    assert max(abs(a - b) for a, b in zip(ours[1], scores, strict=True)) < 1
