"""The shipped model in llama.cpp and in kvant: equal weights in both formats, equal logits, and both speeds.

    python3 -m venv .venv && .venv/bin/pip install llama-cpp-python gguf numpy
    cargo build --release
    .venv/bin/python tools/beside_llama_cpp.py

llama-cpp-python compiles llama.cpp for the machine it is installed on, which takes some minutes and cmake.
If a processor advertises AMX but does not execute it, as on some virtual machines, llama.cpp crashes:
`CMAKE_ARGS="-DCMAKE_C_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'"`, also for CMAKE_CXX_FLAGS, disables AMX.

Weights: MLX's affine 4 bit in groups of 64 (w = scale * q + bias) corresponds to llama.cpp's q4_1, which has a scale
and a bias for each 32 weights: the codes are equal, every scale and bias is stored twice, and bf16 fits into f16
without loss unless it is tiny (checked). `q4_1` therefore has exactly equal weights, and `f16` the weights rounded to
11 bits; `q8_0` and `q4_0` are requantised by llama.cpp's rules with a small additional loss. The logits of all of them
are compared with kvant's.

Speeds: kvant and llama.cpp run alternately, each with `--threads` threads and an f16 cache; medians. A prompt of
`--context` tokens, then `--decode` tokens one by one, each the most probable. kvant's figure includes sampling and text
output; llama.cpp is called through its C interface, and selecting the next token costs a few microseconds of numpy.
"""

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
GROUP = 64  # of MLX's quantisation
BLOCK = 32  # of llama.cpp's
CHAT = "{{ bos_token }}{% for m in messages %}# {{ m['content'] }}\n\n{% endfor %}"


def read_safetensors(path):
    """name -> numpy array; bfloat16 as float32."""
    data = Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, info in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        start, end = info["data_offsets"]
        raw = data[8 + size + start : 8 + size + end]
        if info["dtype"] == "BF16":
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, {"U32": "<u4", "F32": "<f4"}[info["dtype"]])
        tensors[name] = values.reshape(info["shape"])
    return tensors


class Affine:
    """A matrix as MLX quantises it."""

    def __init__(self, words, scales, biases):
        shifts = np.arange(8, dtype=np.uint32) * 4
        self.codes = ((words[:, :, None] >> shifts) & 15).reshape(len(words), -1).astype(np.uint8)
        self.scales, self.biases = scales, biases

    def dequantised(self):
        wide = [np.repeat(x, GROUP, axis=1) for x in (self.scales, self.biases)]
        return wide[0] * self.codes + wide[1]

    def q4_1(self):
        """Blocks of 32: scale and bias in f16, then 16 bytes, the first half of the codes in the low nibbles."""
        halves = []
        for x in (self.scales, self.biases):
            half = np.repeat(x, GROUP // BLOCK, axis=1).astype("<f2")
            if not np.array_equal(half.astype(np.float32), np.repeat(x, GROUP // BLOCK, axis=1)):
                print("a scale or bias does not fit into f16: q4_1 is rounded", file=sys.stderr)
            halves.append(half[:, :, None].view(np.uint8))
        blocks = self.codes.reshape(len(self.codes), -1, BLOCK)
        nibbles = blocks[:, :, : BLOCK // 2] | blocks[:, :, BLOCK // 2 :] << 4
        return np.concatenate([*halves, nibbles], axis=2).reshape(len(self.codes), -1)


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale",
}


def gguf_name(name):
    if name == "model.embed_tokens":
        return "token_embd.weight"
    if name == "model.norm":
        return "output_norm.weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def add_tokenizer(writer, model):
    """The tokenizer of the shipped model, and a template of conversations."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())
    ids = {token: id for token, id in vocabulary["model"]["vocab"].items()}
    special = {entry["content"] for entry in vocabulary["added_tokens"]}
    names = sorted(ids, key=ids.get)
    writer.add_tokenizer_model("gpt2")
    # Digits one by one, then GPT-2's words.
    writer.add_tokenizer_pre("starcoder")
    writer.add_token_list(names)
    writer.add_token_types([gguf.TokenType.CONTROL if n in special else gguf.TokenType.NORMAL for n in names])
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["model"]["merges"]])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT)


def convert(model, kind, path, tokenizer=False):
    """Writes the checkpoint at `model` as a GGUF file whose matrices have the type `kind`."""
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "gemma4_text" or config["hidden_size_per_layer_input"] or config["enable_moe_block"]:
        sys.exit(f"{model}: only dense Gemma 4 text models without per-layer inputs are converted")
    if config["quantization"] != {"group_size": GROUP, "bits": 4, "mode": "affine"}:
        sys.exit(f"{model}: only 4-bit affine weights in groups of {GROUP} are converted")
    tensors = read_safetensors(model / "model.safetensors")
    arch, layers = "gemma4", config["num_hidden_layers"]
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    rope = config["rope_parameters"]
    kv_heads = {True: config["num_key_value_heads"], False: config["num_global_key_value_heads"]}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "embedding_length_per_layer_input": 0,
        "block_count": layers,
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "rope.dimension_count": config["global_head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
    }.items():
        writer.add_uint32(f"{arch}.{key}", value)
    for key, value in {
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }.items():
        writer.add_float32(f"{arch}.{key}", value)
    writer.add_array(f"{arch}.attention.head_count_kv", [kv_heads[s] for s in sliding])
    writer.add_array(f"{arch}.attention.sliding_window_pattern", sliding)
    if tokenizer:
        add_tokenizer(writer, model)
    else:
        writer.add_string("tokenizer.ggml.model", "none")  # tokens go in and out as numbers

    # "Proportional" RoPE: the pairs after the rotated ones do not rotate, as if their frequency were divided by 1e30.
    pairs = config["global_head_dim"] // 2
    factors = np.full(pairs, 1e30, np.float32)
    factors[: int(pairs * rope["full_attention"]["partial_rotary_factor"])] = 1
    writer.add_tensor("rope_freqs.weight", factors)

    types = gguf.GGMLQuantizationType
    for name, values in tensors.items():
        stem, _, last = name.rpartition(".")
        if last in ("scales", "biases"):
            continue
        if values.dtype != np.uint32:
            stem = stem if last == "weight" else name
            writer.add_tensor(gguf_name(stem), values)
            continue
        matrix = Affine(values, tensors[f"{stem}.scales"], tensors[f"{stem}.biases"])
        if kind == "f16":
            writer.add_tensor(gguf_name(stem), matrix.dequantised().astype(np.float16))
        elif kind == "q4_1":
            writer.add_tensor(gguf_name(stem), matrix.q4_1(), raw_dtype=types.Q4_1)
        else:
            raw = types[kind.upper()]
            writer.add_tensor(gguf_name(stem), gguf.quants.quantize(matrix.dequantised(), raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Llama:
    """A model in llama.cpp, through its C interface."""

    def __init__(self, path, threads, context):
        import llama_cpp

        self.c = llama_cpp
        llama_cpp.llama_backend_init()
        # Warnings and progress would hide the tables.
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, None)
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp does not take {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, context, 512
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def clear(self):
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def feed(self, tokens, every_logit=False):
        """Logits of the last token, or of all."""
        batch = self.c.llama_batch_init(len(tokens), 0, 1) if every_logit else None
        if batch is None:
            ids = (self.c.llama_token * len(tokens))(*tokens)
            one = self.c.llama_batch_get_one(ids, len(tokens))
            if self.c.llama_decode(self.context, one) != 0:
                raise SystemExit("llama_decode failed")
            return np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, -1), (self.vocabulary,))
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        if self.c.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama_decode failed")
        rows = [
            np.array(np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, i), (self.vocabulary,)))
            for i in range(len(tokens))
        ]
        self.c.llama_batch_free(batch)
        return np.stack(rows)

    def speeds(self, tokens, decode):
        """(prompt, decode) in tokens a second."""
        self.clear()
        start = time.perf_counter()
        logits = self.feed(tokens)
        prompt = time.perf_counter() - start
        token = int(logits.argmax())
        start = time.perf_counter()
        for _ in range(decode):
            token = int(self.feed([token]).argmax())
        return len(tokens) / prompt, decode / (time.perf_counter() - start)

    def close(self):
        self.c.llama_free(self.context)
        self.c.llama_model_free(self.model)


def kvant_logits(binary, model, tokens, directory):
    path = Path(directory) / "logits.safetensors"
    ids = " ".join(map(str, tokens))
    command = [binary, "logits", "--device", "cpu", "--model", model, "--tokens", ids, "--out", path]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return read_safetensors(path)["logits"]


def divergence(p, q):
    """Mean KL divergence of softmax(q) from softmax(p), and the share of equal top tokens."""

    def log_softmax(x):
        x = x.astype(np.float64)
        x = x - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    a, b = log_softmax(p), log_softmax(q)
    kl = (np.exp(a) * (a - b)).sum(axis=1).mean()
    return kl, (p.argmax(axis=1) == q.argmax(axis=1)).mean()


def kvant_speeds(binary, model, prompt, decode, threads):
    """(prompt tokens, prompt, decode) in tokens a second, of one run."""
    command = [binary, "generate", "--device", "cpu", "--threads", str(threads), "--model", model, "--kv", "f16"]
    command += ["--temperature", "0", "--max-tokens", str(decode), "--prompt", "-", "--json"]
    done = subprocess.run(command, check=True, input=prompt, capture_output=True, text=True)
    report = json.loads(done.stdout)
    if report["generated_tokens"] < decode // 2:
        sys.exit(f"kvant ended its text after {report['generated_tokens']} tokens: take another prompt")
    return report["prompt_tokens"], report["prompt_tokens_per_s"], report["decode_tokens_per_s"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "crates/kvant-cli/model")
    parser.add_argument("--text", type=Path, default=ROOT / "models/rustdoc-valid.txt", help="where prompts come from")
    parser.add_argument("--kvant", default=ROOT / "target/release/kvant", help="the command")
    parser.add_argument("--types", default="f16,q8_0,q4_0,q4_1")
    parser.add_argument("--context", default="1024,4096", help="tokens of the prompts, about")
    parser.add_argument("--decode", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="write the GGUF files to this directory")
    args = parser.parse_args()
    contexts = [int(n) for n in args.context.split(",")]
    kinds = args.types.split(",")
    rng = np.random.default_rng(0)
    tokens = [2, *rng.integers(3, 4096, 255).tolist()]
    golden = ROOT / "crates/kvant-models/tests/golden/rustdoc-11m/tokens.txt"
    if golden.exists():
        tokens = [int(id) for id in golden.read_text().split()]
    with tempfile.TemporaryDirectory() as directory:
        keep = args.keep or Path(directory)
        keep.mkdir(parents=True, exist_ok=True)
        right = kvant_logits(args.kvant, args.model, tokens, directory)
        models = {}
        for kind in kinds:
            path = keep / f"{args.model.name}-{kind}.gguf"
            convert(args.model, kind, path)
            models[kind] = Llama(path, args.threads, max(contexts) * 5 // 4 + args.decode)
        print(f"llama-cpp-python {models[kinds[0]].c.__version__}\n")
        print(f"Logits of {len(tokens)} tokens, against kvant's with an f32 cache:\n")
        print("| llama.cpp weights | largest difference | KL, nats | same top token |")
        print("|---|---|---|---|")
        for kind, llama in models.items():
            logits = llama.feed(tokens, every_logit=True)
            kl, same = divergence(right, logits)
            print(f"| {kind} | {np.abs(right - logits).max():.2g} | {kl:.1e} | {100 * same:.1f} % |")
        text = args.text.read_text()
        for context in contexts:
            # Some 3.2 bytes per token in this vocabulary; the first run reports the exact number.
            prompt = text[: int(context * 3.2)]
            results = {name: [] for name in ["kvant", *kinds]}
            for _ in range(args.rounds):
                count, *speeds = kvant_speeds(args.kvant, args.model, prompt, args.decode, args.threads)
                results["kvant"].append(speeds)
                ids = [2, *(int(i) for i in np.resize(tokens[1:], count - 1))]
                for kind, llama in models.items():
                    results[kind].append(llama.speeds(ids, args.decode))
            print(f"\nA prompt of {count} tokens, then {args.decode}; {args.threads} threads, tokens a second:\n")
            print("| | prompt | decode | kvant's prompt | kvant's decode |")
            print("|---|---|---|---|---|")
            ours = [statistics.median(column) for column in zip(*results["kvant"])]
            for name, runs in results.items():
                speed = [statistics.median(column) for column in zip(*runs)]
                ratio = [f"{a / b:.2f} times" for a, b in zip(ours, speed)]
                label = "kvant, affine 4 bit" if name == "kvant" else f"llama.cpp {name}"
                print(f"| {label} | {speed[0]:.0f} | {speed[1]:.0f} | {ratio[0]} | {ratio[1]} |")
        for llama in models.values():
            llama.close()


if __name__ == "__main__":
    main()
