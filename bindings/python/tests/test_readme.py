import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
SHIPPED = Path(__file__).parents[3] / "crates/kvant-cli/model"


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A random model with a tokenizer, instead of one that must be downloaded."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED / "tokenizer.json"))
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        head_dim=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("index", range(4))
def test_examples_run(index, request, monkeypatch, capsys):
    assert len(EXAMPLES) == 4
    monkeypatch.chdir(README.parent)
    code, name = EXAMPLES[index], "HuggingFaceTB/SmolLM2-135M-Instruct"
    if name in code:
        code = code.replace(name, str(request.getfixturevalue("small_model")))
    exec(compile(code, f"example {index}", "exec"), {})
    assert capsys.readouterr().out.strip()
