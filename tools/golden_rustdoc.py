"""Golden data of the trained model rustdoc-11m: crates/kvant-models/tests/golden/rustdoc-11m/.

    python tools/golden_rustdoc.py --bf16 DIR --quantized DIR --text rustdoc-valid.txt [--out ...]

The held-out stream: the text is divided at its "<|doc|>" lines, each document is stripped of white space and becomes
<bos> ids <eos>; the streams are joined. The golden data are tokens 2048..2228 of it, fed unchanged: 180 tokens in one
window from position 0, without an additional <bos>, so that 179 next tokens are predicted.

mlx_lm and transformers both compute in f32 (scales and biases of the quantised model are first cast to f32) and must
agree. The recorded logits are transformers', which are closer to a run in f64.
"""

import argparse
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from golden_models import close, dequantised, logits_mlx, logits_transformers, reference_with
from safefile import save

START, END = 2048, 2228
# Both ends, both sides of position 128, where the window starts to move, and a sample of others.
ROWS = [0, 1, 2, 3, 7, 15, 31, 47, 63, 79, 95, 111, 126, 127, 128, 129, 135, 143, 151, 159, 167, 175, 178, 179]

TEXTS = [
    "",
    "hello",
    " hello  world\n",
    "# Fearless Concurrency\n\nA `Vec<T>` is",
    "```\nfn main() {\n    println!(\"{}\", 1_000_000u64);\n}\n```\n",
    "\ttabs\tand\r\nline ends\n\n\n",
    "naïve café, Ελληνικά, 日本語, 🦀🦀",
    "<bos>literal special tokens<eos>",
    "a\u0301 combining, zero\u200bwidth, \u0000 nul",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "impl<T: Clone + 'static> Iterator for MyIter<'_, T> where T: Send {}",
]


def stream(tokenizer, text):
    bos, eos = tokenizer.token_to_id("<bos>"), tokenizer.token_to_id("<eos>")
    ids = []
    for document in text.split("<|doc|>"):
        if document := document.strip():
            ids += [bos, *tokenizer.encode(document, add_special_tokens=False).ids, eos]
    return ids


def losses(logits, tokens):
    """Nats of each next token, in f64."""
    x = logits[:-1].astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    lse = np.log(np.exp(x).sum(axis=-1))
    return lse - x[np.arange(len(x)), tokens[1:]]


def golden(folder, tokens):
    model, config = load_model(folder)
    model.set_dtype(mx.float32)
    other = logits_mlx(model, tokens)
    logits = logits_transformers(reference_with(config, dequantised(model)), tokens)
    # Rounding in f32 changes single logits of this model by 2e-4 (MLX) and 8e-5 (transformers) relative to f64.
    distance = close(f"{folder.name}: transformers against mlx", logits, other, 5e-4)
    return logits, float(losses(other, tokens).mean()), distance


def main():
    parser = argparse.ArgumentParser(description="Logits, losses and token ids of the trained model rustdoc-11m.")
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--bf16", type=Path, required=True, help="folder of rustdoc-11m in bf16")
    parser.add_argument("--quantized", type=Path, required=True, help="folder of rustdoc-11m in 4 bits")
    parser.add_argument("--text", type=Path, required=True, help="the held-out text, rustdoc-valid.txt")
    parser.add_argument("--out", type=Path, default=root / "crates/kvant-models/tests/golden/rustdoc-11m")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    torch.set_num_threads(1)

    tokenizer = Tokenizer.from_file(str(args.bf16 / "tokenizer.json"))
    ids = stream(tokenizer, args.text.read_text())
    tokens = np.array(ids[START:END], dtype=np.uint32)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tokens.txt").write_text(" ".join(map(str, tokens)) + "\n")

    expected = {"stream_tokens": len(ids), "start": START, "end": END, "predictions": len(tokens) - 1}
    for name, folder in (("bf16", args.bf16), ("4bit", args.quantized)):
        logits, nats_mlx, distance = golden(folder, tokens)
        nll = losses(logits, tokens)
        tensors = {
            "tokens": tokens,
            "rows": np.array(ROWS, dtype=np.uint32),
            "logits": logits[ROWS],
            "nll": nll.astype(np.float32),
            "argmax": logits.argmax(axis=-1).astype(np.uint32),
        }
        save(args.out / f"{name}.safetensors", tensors, {"dtype": "f32"})
        expected[f"nats_{name}"] = round(float(nll.mean()), 6)
        expected[f"nats_mlx_{name}"] = round(nats_mlx, 6)
        expected[f"max_diff_mlx_{name}"] = float(f"{distance:.1e}")
    (args.out / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")
    print(expected)

    cases = []
    for text in TEXTS:
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        cases.append({
            "text": text,
            "ids": plain,
            "ids_special": tokenizer.encode(text, add_special_tokens=True).ids,
            "decoded": tokenizer.decode(plain, skip_special_tokens=False),
            "decoded_skip_special": tokenizer.decode(plain, skip_special_tokens=True),
        })
    (args.out / "tokenizer_cases.json").write_text(json.dumps({"cases": cases}, indent=1, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
