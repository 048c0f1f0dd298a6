"""Compares kvant's logits with transformers' logits saved by make_hf.py.

    python3 tools/h200/compare.py OUT/e4b/ref.pt LOGITS.safetensors

LOGITS.safetensors is the output of `kvant logits` for the tokens in tokens.txt. Prints the difference from
transformers' f32 logits and, for comparison, the difference of transformers' own bf16 logits.
"""

import sys

import torch
from safetensors.torch import load_file


def kl(p, q):
    """Mean KL divergence of softmax(q) from softmax(p), in nats."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def report(name, logits, f32):
    difference = (logits - f32).abs()
    same = (logits.argmax(-1) == f32.argmax(-1)).float().mean()
    print(f"{name}: max {difference.max():.4f}, mean {difference.mean():.5f}, same top token {same:.4f}, KL {kl(f32, logits):.2e}")


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    bf16, f32 = torch.load(sys.argv[1])
    report(sys.argv[2], load_file(sys.argv[2])["logits"], f32)
    report("transformers bf16", bf16, f32)


if __name__ == "__main__":
    main()
