"""Trains a small Gemma 4 model on the documentation of the local Rust toolchain: the recipe of rustdoc-11m.

    python tools/train_tiny.py --out DIR            the full run; wants a GPU, some ten minutes on a large one
    python tools/train_tiny.py --out DIR --smoke    every stage in miniature, a minute or two on a CPU

The recipe
    model      Gemma 4 text, dense, 10.9 M parameters: 6 layers (5 sliding with window 128, then 1 full), hidden 256, FFN 1024,
               4 query heads; sliding layers have 2 KV heads of 256, the full layer 1 of 512 whose K is also its V. RoPE base
               1e4, and 1e6 "proportional" (a quarter of the pairs) on the full layer. Tied embeddings, final softcap 30.
    tokenizer  byte-level BPE, 4096 entries, digits one by one; <pad> 0, <eos> 1, <bos> 2; <bos> is put in front when encoding.
    data       the toolchain's HTML documentation as plain text, and the sources that come with it: about 10.5 M tokens (here
               cut to that with --max-tokens). 2 % of the documentation pages are held out, chosen by a hash of their path.
               Documents are joined as <bos> text <eos>; sequences start at random offsets of that stream.
    training   AdamW (0.9, 0.95), weight decay 0.1 on matrices; 2e-3 after 200 warm-up steps, cosine decay to a tenth;
               4600 steps of 24 x 1024 tokens; bf16 autocast; gradients clipped to norm 1.

The result: DIR/hf (Hugging Face layout, bf16), DIR/mlx-4bit (MLX affine, 4 bit, group 64, embedding included),
DIR/valid.txt (held-out text, documents separated by a line "<|doc|>") and DIR/report.json. Weights are not reproducible
bit by bit: the toolchain's documentation differs by version, and GPU sums are not ordered.
"""

import argparse
import hashlib
import json
import math
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from golden_models import dequantised, logits_mlx, logits_transformers, reference_with, write_json
from golden_rustdoc import losses, stream
from safefile import save

SEPARATOR = "<|doc|>"
PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
FULL = dict(
    vocab=4096, hidden=256, ffn=1024, head=256, global_head=512, layers=6, window=128, context=8192,
    steps=4600, warmup=200, batch=24, length=1024, rate=2e-3, max_tokens=10_500_000, pages=None,
)
SMOKE = dict(
    vocab=512, hidden=64, ffn=128, head=64, global_head=128, layers=3, window=16, context=512,
    steps=12, warmup=3, batch=2, length=96, rate=2e-3, max_tokens=60_000, pages=200,
)


# -------------------------------------------------------------------------------------------------------------- corpus


class Text(HTMLParser):
    """The readable part of a page made by mdBook or rustdoc, in a Markdown-like form."""

    VOID = {"br", "img", "hr", "input", "meta", "link", "wbr", "source", "col"}
    SKIP = {"script", "style", "nav", "button", "svg", "noscript", "rustdoc-toolbar", "rustdoc-topbar"}
    # Lists that repeat signatures on every page of the standard library.
    SKIP_ID = {"synthetic-implementations-list", "blanket-implementations-list", "implementors-list"}
    BREAKS = {"p", "div", "section", "tr", "ul", "ol", "table", "details", "dl", "dt", "dd", "blockquote", "main"}

    # Typographic quotes as typed on a keyboard, and no section signs.
    PLAIN = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a7": None})

    def __init__(self):
        super().__init__()
        self.out, self.main, self.skip, self.pre = [], 0, 0, 0

    def handle_starttag(self, tag, attrs):
        if tag in self.VOID:
            if tag == "br":
                self.out.append("\n")
            return
        attrs = dict(attrs)
        if self.skip:
            self.skip += 1
            return
        # rustdoc marks line numbers with data-nosnippet, links next to headings with "anchor", folds with "hideme".
        marker = "data-nosnippet" in attrs or {"anchor", "hideme"} & set((attrs.get("class") or "").split())
        if tag in self.SKIP or attrs.get("id") in self.SKIP_ID or marker:
            self.skip = 1
        elif tag == "main":
            self.main += 1
        elif tag == "pre":
            self.pre += 1
            self.out.append("\n\n```\n")
        elif tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            self.out.append("\n\n" + "#" * int(tag[1]) + " ")
        elif tag == "li":
            self.out.append("\n\n- ")
        elif tag == "code" and not self.pre:
            self.out.append("`")
        elif tag in self.BREAKS and not self.pre:
            self.out.append("\n\n")

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        if self.skip:
            self.skip -= 1
        elif tag == "main":
            self.main -= 1
        elif tag == "pre" and self.pre:
            self.pre -= 1
            self.out.append("\n```\n\n")
        elif tag == "code" and not self.pre:
            self.out.append("`")
        elif tag in self.BREAKS and not self.pre:
            self.out.append("\n\n")

    def handle_data(self, data):
        if self.main and not self.skip:
            self.out.append(data if self.pre else " ".join(data.split("\n")))

    def text(self):
        lines, code = [], False
        for line in "".join(self.out).translate(self.PLAIN).split("\n"):
            if line.strip() == "```":
                code = not code
            line = line.rstrip() if code else " ".join(line.split())
            if not code and line and not line.strip("#- "):
                continue
            if line or (lines and lines[-1]):
                lines.append(line)
        return "\n".join(lines).strip()


def read_page(path):
    parser = Text()
    parser.feed(path.read_text(errors="replace"))
    parser.close()
    return parser.text()


def doc_pages(html):
    """Pages with useful text: no redirects, translations, vendor intrinsics, or core's copy of a page of std."""
    for path in sorted(html.rglob("*.html")):
        at = path.relative_to(html).parts
        if at[0] in ("src", "static.files") or "arch" in at[:-1] or at[0] == "std_detect":
            continue
        if at[0] == "rust-by-example" and at[1] in ("es", "ja", "ko", "zh"):
            continue
        if path.name in ("print.html", "all.html", "help.html", "settings.html", "toc.html", "404.html"):
            continue
        if at[0] in ("core", "alloc") and html.joinpath("std", *at[1:]).exists():
            continue
        if path.stat().st_size > 1500:
            yield path


def corpus(sizes, html, sources):
    """Training documents and held-out documents."""
    train, held, seen = [], [], set()

    def fresh(text):
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < 200 or digest in seen:
            return False
        seen.add(digest)
        return True

    pages = list(doc_pages(html))
    if sizes["pages"]:
        pages = pages[:: max(1, len(pages) // sizes["pages"])]
    for path in pages:
        text = read_page(path)
        if not fresh(text):
            continue
        chosen = int(hashlib.sha256(str(path.relative_to(html)).encode()).hexdigest(), 16) % 50 == 0
        (held if chosen else train).append(text)
    documents = len(train)
    if sources.is_dir():
        found = [p.read_text(errors="replace").strip() for p in sorted(sources.rglob("*.rs"))]
    else:
        # Without the source component: the documentation's own source view, as one block of code per file.
        views = sorted((html / "src").rglob("*.rs.html"))
        found = (read_page(p).partition("```")[2].rpartition("```")[0].strip() for p in views[: sizes["pages"]])
    train += [text for text in found if fresh(text)]
    print(f"corpus: {documents} pages, {len(train) - documents} sources, {len(held)} pages held out", flush=True)
    if not held or not train:
        raise SystemExit(f"too little documentation under {html}")
    return train, held


# ----------------------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(sizes, documents):
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=sizes["vocab"], special_tokens=[PAD, EOS, BOS], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    bos = tokenizer.token_to_id(BOS)
    assert [tokenizer.token_to_id(t) for t in (PAD, EOS, BOS)] == [0, 1, 2]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return tokenizer


def save_tokenizer(tokenizer, folder, context):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    rest = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", {**special, **rest})


# ------------------------------------------------------------------------------------------------------------ training


def model_config(sizes):
    """The form that both transformers and mlx_lm read: global_head_dim rather than per_layer_config."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "attention_bias": False,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": sizes["global_head"],
        "head_dim": sizes["head"],
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": sizes["hidden"],
        "hidden_size_per_layer_input": 0,
        "intermediate_size": sizes["ffn"],
        "layer_types": ["sliding_attention"] * (sizes["layers"] - 1) + ["full_attention"],
        "max_position_embeddings": sizes["context"],
        "model_type": "gemma4_text",
        "num_attention_heads": 4,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": sizes["layers"],
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
        "sliding_window": sizes["window"],
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
        "vocab_size": sizes["vocab"],
    }


def batches(ids, sizes, device, seed):
    rng, length = np.random.default_rng(seed), sizes["length"]
    while True:
        starts = rng.integers(0, len(ids) - length - 1, sizes["batch"])
        rows = np.stack([ids[s : s + length + 1] for s in starts]).astype(np.int64)
        yield torch.from_numpy(rows).to(device)


def loss_of(model, rows, device):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model, ids, sizes, device):
    model.eval()
    length = sizes["length"]
    windows = [ids[i : i + length + 1] for i in range(0, len(ids) - length, length)]
    parts = [loss_of(model, torch.from_numpy(w.astype(np.int64))[None].to(device), device).item() for w in windows]
    model.train()
    return float(np.mean(parts))


def rate_at(step, sizes):
    if step < sizes["warmup"]:
        return sizes["rate"] * (step + 1) / sizes["warmup"]
    done = (step - sizes["warmup"]) / max(1, sizes["steps"] - sizes["warmup"])
    return sizes["rate"] * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def train(config, sizes, ids, valid, device, seed):
    torch.manual_seed(seed)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**config)).float().to(device).train()
    count = sum(p.numel() for p in model.parameters())
    print(f"model: {count / 1e6:.1f} M parameters on {device}; {len(ids)} tokens, {len(valid)} held out", flush=True)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=sizes["rate"], betas=(0.9, 0.95))
    source, start, history = batches(ids, sizes, device, seed), time.time(), []
    for step in range(sizes["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, sizes)
        loss = loss_of(model, next(source), device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, sizes["steps"] // 46) == 0 or step + 1 == sizes["steps"]:
            history.append([step, round(loss.item(), 4)])
            print(f"step {step:5}  loss {history[-1][1]:.4f}  {time.time() - start:.0f} s", flush=True)
    return model, history, held_out_loss(model, valid, sizes, device)


# -------------------------------------------------------------------------------------------------------------- saving


def save_hf(model, config, folder):
    weights = {
        name: w.detach().to("cpu", torch.bfloat16).contiguous()
        for name, w in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)


def convert(hf, folder, group_size=64, bits=4):
    model, config = load_model(hf)
    model, config = quantize_model(
        model, config, group_size=group_size, bits=bits, mode="affine", quant_predicate=lambda path, module: True
    )
    config["quantization_config"] = config["quantization"]
    save(folder / "model.safetensors", dict(tree_flatten(model.parameters())), {"format": "mlx"})
    write_json(folder / "config.json", config)


def reload_and_compare(folder, tokens):
    """Nats of `tokens` by mlx_lm in f32, after checking that transformers computes the same logits."""
    model, config = load_model(folder)
    model.set_dtype(mx.float32)
    ours = logits_mlx(model, tokens)
    other = logits_transformers(reference_with(config, dequantised(model)), tokens)
    distance = float(np.abs(ours - other).max())
    if distance > 2e-3:
        raise SystemExit(f"{folder}: mlx_lm and transformers differ by {distance:.1e} in a logit")
    return {"nats": round(float(losses(ours, tokens).mean()), 4), "max_diff": float(f"{distance:.1e}")}


def main():
    parser = argparse.ArgumentParser(description="Train a small Gemma 4 model on the local toolchain's documentation.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, a few steps, every stage")
    parser.add_argument("--html", type=Path, help="documentation (default: share/doc/rust/html of the toolchain)")
    parser.add_argument("--sources", type=Path, help="Rust sources (default: lib/rustlib/src/rust of the toolchain)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-tokens", type=int, help="cut the training stream, whole documents in random order")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sizes = dict(SMOKE if args.smoke else FULL)
    if args.max_tokens is not None:
        sizes["max_tokens"] = args.max_tokens
    device = torch.device(args.device)
    if device.type == "cpu" and not args.smoke:
        parser.error("the full run needs a GPU; --smoke runs on a CPU")
    mx.set_default_device(mx.cpu)
    sysroot = Path(subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True).stdout.strip())
    html = args.html or sysroot / "share/doc/rust/html"
    if not html.is_dir():
        parser.error(f"no documentation in {html}: rustup component add rust-docs, or give --html")

    train_docs, held = corpus(sizes, html, args.sources or sysroot / "lib/rustlib/src/rust")
    np.random.default_rng(args.seed).shuffle(train_docs)
    tokenizer = train_tokenizer(sizes, train_docs)
    hf, quantised = args.out / "hf", args.out / "mlx-4bit"
    for folder in (hf, quantised):
        save_tokenizer(tokenizer, folder, sizes["context"])
    separator = f"\n\n{SEPARATOR}\n\n"
    (args.out / "valid.txt").write_text(separator.join(held) + "\n")
    ids = np.array(stream(tokenizer, SEPARATOR.join(train_docs))[: sizes["max_tokens"]], dtype=np.uint16)
    valid = np.array(stream(tokenizer, (args.out / "valid.txt").read_text()), dtype=np.uint16)

    config = model_config(sizes)
    model, history, held_loss = train(config, sizes, ids, valid, device, args.seed)
    save_hf(model, config, hf)
    convert(hf, quantised)
    slice_ = valid[2048:2228] if len(valid) >= 2228 else valid[:180]
    report = {
        "train_tokens": len(ids), "valid_tokens": len(valid), "history": history, "valid_loss": round(held_loss, 4),
        "hf": reload_and_compare(hf, slice_), "mlx_4bit": reload_and_compare(quantised, slice_),
    }
    write_json(args.out / "report.json", report)
    print(json.dumps({k: v for k, v in report.items() if k != "history"}))


if __name__ == "__main__":
    main()
