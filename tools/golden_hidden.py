"""Golden hidden states: the output of the last norm of transformers' models, for random golden checkpoints.

    python tools/golden_hidden.py [--golden crates/kvant-models/tests/golden]

Reads the checkpoint of each folder and the tokens of its `logits.safetensors`, and writes

    hidden.safetensors   hidden f32 [T, hidden_size]

All in f32 with eager attention, on the weights in the file.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

# A norm before each half, norms of outputs with a scaled embedding, and a scaled output.
FOLDERS = ["qwen3", "gemma3", "granite"]
AGREE = 1e-4


def hidden_states(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    golden = load_file(folder / "logits.safetensors")
    tokens = golden["tokens"].to(torch.int64)[None]
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state[0]
        logits = model(tokens).logits[0]
    # The checkpoint and tokens of the logits.
    worst = (logits - golden["logits"]).abs().max().item()
    if worst > AGREE:
        raise SystemExit(f"{folder}: logits differ by {worst}")
    return hidden


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--golden", type=Path, default=Path("crates/kvant-models/tests/golden"))
    args = parser.parse_args()
    for name in FOLDERS:
        hidden = hidden_states(args.golden / name)
        save_file({"hidden": hidden.contiguous()}, args.golden / name / "hidden.safetensors")
        print(f"{name}: {list(hidden.shape)}")


if __name__ == "__main__":
    main()
