"""Converts rustdoc-11m, the model in this repository, to GGUF files in f16, Q8_0 and Q4_0.

    python tools/rustdoc_gguf.py [--out target/rustdoc-gguf] [--loss 4]

The weights are the dequantised 4-bit ones; the package `gguf` quantises them again. In the Q4_0 file the embedding,
which is also the output matrix, is Q8_0. With --loss N, transformers computes the loss of the first N windows of 1024
tokens of models/rustdoc-valid.txt from the weights in each file, in f32: `kvant eval` must report an equal loss.
"""

import argparse
import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer

from beside_llama_cpp import add_tokenizer
from golden_gguf_models import metadata, write_tensor

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "crates/kvant-cli/model"
TEXT = ROOT / "models/rustdoc-valid.txt"
WINDOW = 1024
ARCH = "gemma4"
FORMATS = {"f16": (Type.F16, Type.F16), "q8_0": (Type.Q8_0, Type.Q8_0), "q4_0": (Type.Q4_0, Type.Q8_0)}


class Types(dict):
    """One type for all matrices except the embedding."""

    def __init__(self, matrices, embedding):
        super().__init__(token_embd=embedding)
        self.matrices = matrices

    def get(self, role, default=None):
        return self[role] if role in self else self.matrices


def weights(config):
    """The checkpoint's tensors in f32."""
    stored = mx.load(str(MODEL / "model.safetensors"))
    scheme = config["quantization"]
    found = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            continue
        if f"{module}.scales" in stored:
            scales, biases = stored[f"{module}.scales"], stored[f"{module}.biases"]
            tensor = mx.dequantize(tensor, scales, biases, group_size=scheme["group_size"], bits=scheme["bits"])
        found[name.removeprefix("language_model.")] = torch.tensor(np.array(tensor.astype(mx.float32)))
    return found


def tokens():
    """The tokens of the text, joined as by `kvant eval`."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    documents = TEXT.read_text().split("\n<|doc|>\n")
    return [id for text in documents for id in [*tokenizer.encode(text.strip()).ids, 1]]


def write(path, config, state, kinds):
    """Writes a file, assigns the values of its weights to the model, and returns the model."""
    hf_config = transformers.Gemma4ForCausalLM.config_class(**config)
    hf_config._attn_implementation = "eager"
    model = transformers.Gemma4ForCausalLM(hf_config).to(torch.float32).eval()
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}, missing
    writer = gguf.GGUFWriter(path, ARCH)
    mapping = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config["num_hidden_layers"])
    metadata(writer, ARCH, config, experts=False)
    add_tokenizer(writer, MODEL)
    for name, parameter in model.state_dict().items():
        if name != "lm_head.weight" and "rotary" not in name and not name.endswith("embed_scale"):
            write_tensor(writer, name, parameter, ARCH, config, mapping, Types(*kinds), None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def loss(model, windows):
    """Nats per token; each window's first token is not predicted."""
    total = count = 0
    with torch.no_grad():
        for window in windows:
            ids = torch.tensor([window])
            logits = model(ids).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += len(window) - 1
    return total / count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "target/rustdoc-gguf")
    parser.add_argument("--loss", type=int, default=0, metavar="N")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = json.loads((MODEL / "config.json").read_text())
    state = weights(config)
    ids = tokens()
    windows = [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(args.loss)]
    (args.out / "tokens.txt").write_text(" ".join(str(id) for window in windows or [ids] for id in window))
    for name, kinds in FORMATS.items():
        path = args.out / f"rustdoc-11m-{name}.gguf"
        model = write(path, config, state, kinds)
        measured = f", {loss(model, windows):.5f} nats per token by transformers" if windows else ""
        print(f"{path}: {path.stat().st_size} bytes{measured}", flush=True)


if __name__ == "__main__":
    main()
