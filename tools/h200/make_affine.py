"""Makes checkpoints of released sizes with random weights, in MLX's affine form with groups of 64, 4 bits unless named.

    python3 tools/h200/make_affine.py OUT [--tokenizer DIR] 31b 26b qwen27b qwen35b llama70b llama70b-8bit gptoss120b
    python3 tools/h200/make_affine.py OUT 31b-assistant 26b-assistant e4b-assistant

Writes OUT/31b and OUT/26b (Gemma 4, 17.27 and 14.19 GB), OUT/qwen27b and OUT/qwen35b (Qwen 3.5, dense and A3B),
OUT/llama70b and OUT/llama70b-8bit (Llama 3, 40 and 75 GB), OUT/gptoss120b (gpt-oss in its own form: mxfp4 and bf16, 64
GB). qwen27b has a layer of multi-token prediction, in bf16. The assistants, in bf16, draft for Gemma 4; E4B itself is made
by make_hf.py, and the assistants' widths are guesses. Random weights have the size and speed of trained ones; the text is noise. --tokenizer copies tokenizer.json and
tokenizer_config.json of a checkpoint, so that `kvant generate` runs. Needs a GPU and PyTorch.
"""

import argparse
import json
import math
import os
import shutil
import time

import torch
from safetensors.torch import save_file

DEVICE = "cuda"
GROUP = 64
# The standard deviation of codes: uniform ones of 4 and 8 bits, and of mxfp4's numbers.
DEVIATIONS = {4: 4.61, 8: 73.9}
MXFP4_DEVIATION = 3.0


def save_in_shards(tensors, directory, limit=6_000_000_000):
    """Writes pairs (name, tensor) as safetensors files of at most `limit` bytes, with an index."""
    os.makedirs(directory, exist_ok=True)
    index, shard, size, total, count = {}, {}, 0, 0, 0

    def flush():
        nonlocal shard, size, count
        if shard:
            name = f"model-{count:05d}.safetensors"
            save_file(shard, os.path.join(directory, name))
            index.update(dict.fromkeys(shard, name))
            shard, size, count = {}, 0, count + 1

    for name, tensor in tensors:
        tensor = tensor.cpu().contiguous()
        bytes_ = tensor.numel() * tensor.element_size()
        if size + bytes_ > limit:
            flush()
        shard[name] = tensor
        size, total = size + bytes_, total + bytes_
    flush()
    with open(os.path.join(directory, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": index}, file)
    return total


def affine(name, outputs, inputs, lead=(), bits=4):
    """A matrix of random codes; products keep the size of their input."""
    codes = torch.randint(-2**31, 2**31 - 1, (*lead, outputs, inputs * bits // 32), dtype=torch.int32, device=DEVICE)
    scale = 1 / (DEVIATIONS[bits] * math.sqrt(inputs))
    scales = torch.full((*lead, outputs, inputs // GROUP), scale, dtype=torch.bfloat16, device=DEVICE)
    yield name + ".weight", codes.view(torch.uint32)
    yield name + ".scales", scales
    yield name + ".biases", scales * -((2**bits - 1) / 2)


def dense(name, outputs, inputs, bias=False):
    yield name + ".weight", torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE) * inputs**-0.5
    if bias:
        yield name + ".bias", torch.zeros(outputs, dtype=torch.bfloat16, device=DEVICE)


def mxfp4(name, experts, outputs, inputs):
    """Matrices of experts in gpt-oss's form: blocks of 32 codes with a power of two."""
    yield name + "_blocks", torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, device=DEVICE)
    exponent = 127 - round(math.log2(MXFP4_DEVIATION * math.sqrt(inputs)))
    yield name + "_scales", torch.full((experts, outputs, inputs // 32), exponent, dtype=torch.uint8, device=DEVICE)
    yield name + "_bias", torch.zeros(experts, outputs, dtype=torch.bfloat16, device=DEVICE)


def ones(name, size):
    yield name, torch.ones(size, dtype=torch.bfloat16, device=DEVICE)


def gemma(config):
    """All tensors of a model, layer by layer."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    yield from affine("model.embed_tokens", config["vocab_size"], hidden)
    yield from ones("model.norm.weight", hidden)
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}."
        full = kind == "full_attention"
        dim = config["global_head_dim"] if full else config["head_dim"]
        kv_heads = config["num_global_key_value_heads"] if full else config["num_key_value_heads"]
        yield from affine(prefix + "self_attn.q_proj", heads * dim, hidden)
        yield from affine(prefix + "self_attn.k_proj", kv_heads * dim, hidden)
        if not full:
            # In full layers, values are the keys.
            yield from affine(prefix + "self_attn.v_proj", kv_heads * dim, hidden)
        yield from affine(prefix + "self_attn.o_proj", hidden, heads * dim)
        yield from ones(prefix + "self_attn.q_norm.weight", dim)
        yield from ones(prefix + "self_attn.k_norm.weight", dim)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield from ones(f"{prefix}{norm}_layernorm.weight", hidden)
        yield from affine(prefix + "mlp.gate_proj", wide, hidden)
        yield from affine(prefix + "mlp.up_proj", wide, hidden)
        yield from affine(prefix + "mlp.down_proj", hidden, wide)
        yield from ones(prefix + "layer_scalar", 1)
        if config.get("enable_moe_block"):
            experts, width = config["num_experts"], config["moe_intermediate_size"]
            for norm in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
                yield from ones(f"{prefix}{norm}.weight", hidden)
            yield from affine(prefix + "router.proj", experts, hidden)
            yield from ones(prefix + "router.scale", hidden)
            yield from ones(prefix + "router.per_expert_scale", experts)
            yield from affine(prefix + "experts.switch_glu.gate_proj", width, hidden, (experts,))
            yield from affine(prefix + "experts.switch_glu.up_proj", width, hidden, (experts,))
            yield from affine(prefix + "experts.switch_glu.down_proj", hidden, width, (experts,))


def llama(config):
    """All tensors of a Llama 3, layer by layer."""
    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim, kv_heads = hidden // heads, config["num_key_value_heads"]
    bits = config["quantization"]["bits"]
    yield from affine("model.embed_tokens", config["vocab_size"], hidden, bits=bits)
    yield from affine("lm_head", config["vocab_size"], hidden, bits=bits)
    yield from ones("model.norm.weight", hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from ones(prefix + "input_layernorm.weight", hidden)
        yield from ones(prefix + "post_attention_layernorm.weight", hidden)
        for name, outputs, inputs in (
            ("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", kv_heads * dim, hidden),
            ("self_attn.v_proj", kv_heads * dim, hidden), ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", wide, hidden), ("mlp.up_proj", wide, hidden), ("mlp.down_proj", hidden, wide)):
            yield from affine(prefix + name, outputs, inputs, bits=bits)


def gpt_oss(config):
    """All tensors of a gpt-oss, layer by layer."""
    hidden, width, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv_heads = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    yield from dense("model.embed_tokens", config["vocab_size"], hidden)
    yield from dense("lm_head", config["vocab_size"], hidden)
    yield from ones("model.norm.weight", hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from ones(prefix + "input_layernorm.weight", hidden)
        yield from ones(prefix + "post_attention_layernorm.weight", hidden)
        for name, outputs, inputs in (("q", heads, hidden), ("k", kv_heads, hidden), ("v", kv_heads, hidden), ("o", hidden, heads)):
            yield from dense(f"{prefix}self_attn.{name}_proj", outputs, inputs, bias=True)
        yield from ones(prefix + "self_attn.sinks", config["num_attention_heads"])
        yield from dense(prefix + "mlp.router", experts, hidden, bias=True)
        yield from mxfp4(prefix + "mlp.experts.gate_up_proj", experts, 2 * width, hidden)
        yield from mxfp4(prefix + "mlp.experts.down_proj", experts, hidden, width)


def qwen(config):
    """All tensors of a Qwen 3.5, layer by layer."""
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    kv, values = config["num_key_value_heads"] * dim, config["linear_num_value_heads"] * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    value_heads, taps = config["linear_num_value_heads"], config["linear_conv_kernel_dim"]
    yield from affine("model.embed_tokens", config["vocab_size"], hidden)
    yield from affine("lm_head", config["vocab_size"], hidden)
    yield from ones("model.norm.weight", hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from ones(prefix + "input_layernorm.weight", hidden)
        yield from ones(prefix + "post_attention_layernorm.weight", hidden)
        if (layer + 1) % 4 == 0:
            own = prefix + "self_attn."
            yield from affine(own + "q_proj", 2 * heads * dim, hidden)
            yield from affine(own + "k_proj", kv, hidden)
            yield from affine(own + "v_proj", kv, hidden)
            yield from affine(own + "o_proj", hidden, heads * dim)
            yield from ones(own + "q_norm.weight", dim)
            yield from ones(own + "k_norm.weight", dim)
        else:
            own = prefix + "linear_attn."
            yield from affine(own + "in_proj_qkv", channels, hidden)
            yield from affine(own + "in_proj_z", values, hidden)
            yield from affine(own + "in_proj_b", value_heads, hidden)
            yield from affine(own + "in_proj_a", value_heads, hidden)
            yield from affine(own + "out_proj", hidden, values)
            yield own + "conv1d.weight", torch.full((channels, taps, 1), 0.5, dtype=torch.bfloat16, device=DEVICE)
            yield own + "A_log", torch.linspace(-3, 1, value_heads, dtype=torch.float32, device=DEVICE)
            yield own + "dt_bias", torch.linspace(-2, 1, value_heads, dtype=torch.bfloat16, device=DEVICE)
            yield from ones(own + "norm.weight", config["linear_value_head_dim"])
        wide, experts = config.get("intermediate_size"), config.get("num_experts")
        mlps = [(prefix + "mlp.", wide, ())]
        if experts:
            mlps = [(prefix + "mlp.switch_mlp.", config["moe_intermediate_size"], (experts,)),
                    (prefix + "mlp.shared_expert.", config["shared_expert_intermediate_size"], ())]
            yield from affine(prefix + "mlp.gate", experts, hidden)
            yield from affine(prefix + "mlp.shared_expert_gate", 1, hidden)
        for own, width, lead in mlps:
            yield from affine(own + "gate_proj", width, hidden, lead)
            yield from affine(own + "up_proj", width, hidden, lead)
            yield from affine(own + "down_proj", hidden, width, lead)


    if config.get("mtp_num_hidden_layers"):
        yield from dense("mtp.fc", hidden, 2 * hidden)
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield from ones(f"mtp.{norm}.weight", hidden)
        block = "mtp.layers.0."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield from ones(f"{block}{norm}.weight", hidden)
        for norm in ("q_norm", "k_norm"):
            yield from ones(f"{block}self_attn.{norm}.weight", dim)
        for name, outputs, inputs in (
            ("self_attn.q_proj", 2 * heads * dim, hidden), ("self_attn.k_proj", kv, hidden), ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, heads * dim), ("mlp.gate_proj", wide, hidden), ("mlp.up_proj", wide, hidden),
            ("mlp.down_proj", hidden, wide)):
            yield from dense(block + name, outputs, inputs)


def assistant(config):
    """All tensors of an assistant of Gemma 4: queries only, and the target's hidden states as input."""
    text, target = config["text_config"], config["backbone_hidden_size"]
    hidden, wide, heads = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"]
    yield from dense("model.embed_tokens", text["vocab_size"], hidden)
    yield from ones("model.norm.weight", hidden)
    yield from dense("pre_projection", hidden, 2 * target)
    yield from dense("post_projection", target, hidden)
    if config["use_ordered_embeddings"]:
        yield from dense("masked_embedding.centroids", config["num_centroids"], hidden)
        yield "masked_embedding.token_ordering", torch.randperm(text["vocab_size"], device=DEVICE)
    for layer, kind in enumerate(text["layer_types"]):
        prefix = f"model.layers.{layer}."
        dim = text["global_head_dim"] if kind == "full_attention" else text["head_dim"]
        yield from dense(prefix + "self_attn.q_proj", heads * dim, hidden)
        yield from dense(prefix + "self_attn.o_proj", hidden, heads * dim)
        yield from ones(prefix + "self_attn.q_norm.weight", dim)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield from ones(f"{prefix}{norm}_layernorm.weight", hidden)
        yield from dense(prefix + "mlp.gate_proj", wide, hidden)
        yield from dense(prefix + "mlp.up_proj", wide, hidden)
        yield from dense(prefix + "mlp.down_proj", hidden, wide)
        yield from ones(prefix + "layer_scalar", 1)


def layers(count):
    return ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(count)]


SHARED = dict(
    model_type="gemma4_text", vocab_size=262144, rms_norm_eps=1e-6, head_dim=256, global_head_dim=512, sliding_window=1024,
    final_logit_softcapping=30.0, attention_k_eq_v=True, hidden_size_per_layer_input=0, max_position_embeddings=262144,
    tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh", eos_token_id=1, bos_token_id=2,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
    quantization={"group_size": GROUP, "bits": 4})
QWEN = dict(
    vocab_size=248320, rms_norm_eps=1e-6, head_dim=256, max_position_embeddings=262144, tie_word_embeddings=False, hidden_act="silu",
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, full_attention_interval=4,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}, eos_token_id=1, bos_token_id=2,
    quantization={"group_size": GROUP, "bits": 4})
LLAMA = dict(
    model_type="llama", vocab_size=128256, rms_norm_eps=1e-5, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
    num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=131072, rope_theta=500000.0, hidden_act="silu",
    tie_word_embeddings=False, eos_token_id=1, bos_token_id=2)


def assistant_config(target, **text):
    """The configuration of an assistant: three sliding layers and a full one."""
    own = {key: value for key, value in SHARED.items() if key != "quantization"}
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    text = dict(own, num_hidden_layers=4, num_kv_shared_layers=4, layer_types=kinds, final_logit_softcapping=None, **text)
    return dict(model_type="gemma4_assistant", backbone_hidden_size=target, num_centroids=2048, centroid_intermediate_top_k=32,
                tie_word_embeddings=True, use_ordered_embeddings=text["hidden_size"] < 1024, text_config=text)


CONFIGS = {
    "31b-assistant": assistant_config(
        5376, hidden_size=1024, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=16, num_global_key_value_heads=4),
    "26b-assistant": assistant_config(
        2816, hidden_size=1024, intermediate_size=8192, num_attention_heads=16, num_key_value_heads=8, num_global_key_value_heads=2),
    "e4b-assistant": assistant_config(
        2560, hidden_size=256, intermediate_size=2048, num_attention_heads=4, num_key_value_heads=2, sliding_window=512,
        attention_k_eq_v=False),
    "llama70b": dict(LLAMA, quantization={"group_size": GROUP, "bits": 4}),
    "llama70b-8bit": dict(LLAMA, quantization={"group_size": GROUP, "bits": 8}),
    "gptoss120b": dict(
        model_type="gpt_oss", vocab_size=201088, rms_norm_eps=1e-5, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rope_theta=150000.0,
        hidden_act="silu", sliding_window=128, num_local_experts=128, num_experts_per_tok=4, tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention"] * 18, eos_token_id=1, bos_token_id=2,
        quantization_config={"quant_method": "mxfp4"}),
    "qwen27b": dict(QWEN, model_type="qwen3_5_text", hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
                    num_attention_heads=24, num_key_value_heads=4, linear_num_value_heads=48, mtp_num_hidden_layers=1),
    "qwen35b": dict(QWEN, model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16,
                    num_key_value_heads=2, linear_num_value_heads=32, num_experts=256, num_experts_per_tok=8,
                    moe_intermediate_size=512, shared_expert_intermediate_size=512),
    "31b": dict(SHARED, hidden_size=5376, intermediate_size=21504, num_hidden_layers=60, num_attention_heads=32,
                num_key_value_heads=16, num_global_key_value_heads=4, layer_types=layers(60)),
    "26b": dict(SHARED, hidden_size=2816, intermediate_size=2112, num_hidden_layers=30, num_attention_heads=16,
                num_key_value_heads=8, num_global_key_value_heads=2, layer_types=layers(30), enable_moe_block=True, num_experts=128,
                top_k_experts=8, moe_intermediate_size=704),
}
# By the model's type, or by its first word.
TENSORS = {"gemma4_assistant": assistant, "gemma4": gemma, "qwen3": qwen, "llama": llama, "gpt": gpt_oss}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--tokenizer", metavar="DIR")
    parser.add_argument("models", nargs="+", choices=list(CONFIGS))
    args = parser.parse_args()
    torch.manual_seed(1)
    for name in args.models:
        start = time.time()
        directory = os.path.join(args.out, name)
        kind = CONFIGS[name]["model_type"]
        tensors = TENSORS.get(kind) or TENSORS[kind.split("_")[0]]
        total = save_in_shards(tensors(CONFIGS[name]), directory)
        with open(os.path.join(directory, "config.json"), "w") as file:
            json.dump(CONFIGS[name], file)
        if args.tokenizer:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(os.path.join(args.tokenizer, file), directory)
        print(f"{name}: {total / 1e9:.2f} GB in {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
