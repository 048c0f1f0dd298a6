"""Makes a Gemma 4 E4B or E2B with random weights by transformers, in bf16, and saves its logits.

    python3 tools/h200/make_hf.py OUT e4b|e2b

Writes OUT/e4b: the checkpoint, tokens.txt (700 random tokens), and ref.pt, transformers' logits of these in bf16 and in
f32. Prints the speed of transformers with a prompt of 6752 tokens on this machine. Needs a GPU, PyTorch and
transformers; 64 GiB of disk are enough.
"""

import os
import sys
import time

import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

VOCABULARY = 262144
PROMPT = 6752


def layers(count, period):
    return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(count)]


CONFIGS = {
    "e4b": dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=42, num_attention_heads=8, num_key_value_heads=2,
                num_kv_shared_layers=18, hidden_size_per_layer_input=256, sliding_window=512, layer_types=layers(42, 6)),
    "e2b": dict(hidden_size=1536, intermediate_size=6144, num_hidden_layers=35, num_attention_heads=8, num_key_value_heads=1,
                num_kv_shared_layers=20, hidden_size_per_layer_input=256, sliding_window=512, use_double_wide_mlp=True,
                layer_types=layers(35, 5)),
}


def randomise(model):
    """Weights whose activations stay near 1 through all layers; every value is exact in bf16."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            weight.normal_(0, weight.shape[1] ** -0.5)
        elif "post_" in name and "norm" in name:
            weight.fill_(0.15)
        elif "norm" in name:
            weight.normal_(1.0, 0.1)
        weight.copy_(weight.bfloat16().float())


def random_model(config):
    with torch.device("cuda"):
        model = Gemma4ForCausalLM(config).eval()
    randomise(model)
    return model


@torch.no_grad()
def main():
    if len(sys.argv) != 3 or sys.argv[2] not in CONFIGS:
        raise SystemExit(__doc__)
    out = os.path.join(sys.argv[1], sys.argv[2])
    os.makedirs(out, exist_ok=True)
    torch.manual_seed(0)
    config = Gemma4TextConfig(final_logit_softcapping=30.0, vocab_size=VOCABULARY, max_position_embeddings=131072, **CONFIGS[sys.argv[2]])
    model = random_model(config)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters")

    ids = torch.randint(5, 262000, (1, 700), device="cuda")
    with open(os.path.join(out, "tokens.txt"), "w") as file:
        file.write(" ".join(map(str, ids[0].tolist())))
    f32 = model(ids).logits[0].float().cpu()
    model = model.to(torch.bfloat16)
    model.save_pretrained(out, max_shard_size="5GB")
    del model
    torch.cuda.empty_cache()
    model = Gemma4ForCausalLM.from_pretrained(out, dtype=torch.bfloat16, device_map="cuda").eval()
    bf16 = model(ids).logits[0].float().cpu()
    torch.save((bf16, f32), os.path.join(out, "ref.pt"))
    print(f"transformers, bf16 against f32: max {(bf16 - f32).abs().max():.4f}, mean {(bf16 - f32).abs().mean():.5f}")

    prompt = torch.randint(5, 262000, (1, PROMPT), device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.time()
        model(prompt, logits_to_keep=1)
        torch.cuda.synchronize()
        print(f"transformers, a prompt of {PROMPT} tokens: {PROMPT / (time.time() - start):.0f} tokens/s")


if __name__ == "__main__":
    main()
