"""Golden data of whole models: small random Gemma 4 checkpoints with logits on which two independent programs agree.

    python tools/golden_models.py [--out crates/kvant-models/tests/golden] [--only dense,moe,...]

Each variant is a folder:

    config.json, model*.safetensors   the checkpoint, as a loader would meet it
    config.per_layer.json             (Hugging Face text layout) the same model described by `per_layer_config`
    logits.safetensors                tokens u32 [T], logits f32 [T,vocab]

A variant's weights are sampled once, rounded to the dtype of its file, and run in f32 by transformers (eager attention)
and by mlx_lm; both read the written file if they can. Golden data are written only if they agree. The recorded logits
are transformers'. For quantised checkpoints it runs on the weights that MLX dequantises.
"""

import argparse
import copy
import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4, gemma4_text
from mlx_lm.utils import load_model, quantize_model
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from safefile import DTYPES, save

AGREE = 1e-4
S, F = "sliding_attention", "full_attention"
VOCAB = 96


def text_config(**changes):
    """Every key is set: the two libraries have different defaults."""
    config = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 128,
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 32,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 64,
        "layer_types": [S, S, F],
        "max_position_embeddings": 1024,
        "num_attention_heads": 2,
        "num_global_key_value_heads": None,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            F: {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
            S: {"rope_theta": 10_000.0, "rope_type": "default"},
        },
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
    }
    assert set(changes) - {"num_experts", "top_k_experts", "moe_intermediate_size"} <= set(config)
    config.update(changes)
    config["num_hidden_layers"] = len(config["layer_types"])
    return config


DENSE = dict(attention_k_eq_v=True, num_key_value_heads=2, num_global_key_value_heads=1)
WIDE = dict(head_dim=256, global_head_dim=512, layer_types=[S, F], sliding_window=16)
# num_global_key_value_heads must have no effect here: it applies only together with attention_k_eq_v.
PLE = dict(
    hidden_size_per_layer_input=16, layer_types=[S, S, F, S, F], num_kv_shared_layers=2, use_double_wide_mlp=True,
    intermediate_size=32, num_global_key_value_heads=2, final_logit_softcapping=12.0,
)
MOE = dict(
    enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=32, attention_k_eq_v=True,
    num_global_key_value_heads=1, final_logit_softcapping=None, tie_word_embeddings=False, intermediate_size=32,
)

# prefix: the part of names before "layers.0…". Multimodal files nest the text configuration in "text_config".
HF_TEXT, HF_MULTI, MLX_TEXT, MLX_MULTI = "model.", "model.language_model.", "model.", "language_model.model."
VARIANTS = {
    "dense": dict(config=text_config(**DENSE), dtype="f32", prefix=HF_TEXT, shards=2, tokens=48, seed=11),
    "wide": dict(config=text_config(**WIDE), dtype="f16", prefix=HF_MULTI, tokens=41, seed=12),
    "ple_shared": dict(config=text_config(**PLE), dtype="bf16", prefix=HF_TEXT, tokens=43, seed=13),
    "moe": dict(config=text_config(**MOE), dtype="bf16", prefix=HF_TEXT, tokens=40, seed=33),
    "dense_mlx": dict(
        config=text_config(**DENSE, **{"hidden_size": 64}), dtype="bf16", prefix=MLX_TEXT, tokens=48, seed=21,
        quantization=dict(group_size=64, bits=4),
        overrides={
            "layers.0.mlp.down_proj": {"group_size": 32, "bits": 8},
            "layers.1.self_attn.v_proj": {"group_size": 64, "bits": 6},
            "layers.2.self_attn.q_proj": False,
        },
    ),
    "ple_shared_mlx": dict(
        config=text_config(**{**PLE, "hidden_size": 64, "hidden_size_per_layer_input": 32}),
        dtype="f16", prefix=MLX_MULTI, tokens=43, seed=22, quantization=dict(group_size=32, bits=6),
        overrides={"embed_tokens": {"group_size": 64, "bits": 8}, "layers.3.self_attn.o_proj": {"group_size": 128, "bits": 4}},
    ),
    "moe_mlx": dict(
        config=text_config(**{**MOE, "hidden_size": 64, "moe_intermediate_size": 64, "layer_types": [S, F]}),
        dtype="f32", prefix=MLX_TEXT, tokens=40, seed=43, quantization=dict(group_size=64, bits=4),
        overrides={
            "layers.0.router.proj": {"group_size": 64, "bits": 8},
            "layers.1.router.proj": {"group_size": 64, "bits": 8},
            "layers.1.experts.switch_glu.down_proj": {"group_size": 64, "bits": 8},
        },
    ),
}


# ------------------------------------------------------------------------------------------------------------ weights


def reference_model(config):
    model = Gemma4ForCausalLM(Gemma4TextConfig(**copy.deepcopy(config)))
    model.config._attn_implementation = "eager"
    model.config._experts_implementation = "eager"
    return model.float().eval()


def reference_with(config, weights):
    model = reference_model(config)
    missing, unexpected = model.load_state_dict(to_torch(weights), strict=False)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    assert not unexpected and set(missing) == tied, (missing, unexpected)
    model.tie_weights()
    return model


def draw(config, seed):
    """Random weights under transformers' names, scaled so that nothing saturates and every tensor affects the
    logits."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, like in sorted(reference_model(config).state_dict().items()):
        shape = tuple(like.shape)
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if name.endswith("layer_scalar"):
            w = rng.uniform(0.5, 1.2, shape)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            # The attention scale is 1, so these two determine the spread of the scores: a standard deviation of about
            # 2.
            w = rng.normal(1.0, 0.25, shape) * 1.5 * shape[0] ** -0.25
        elif name.endswith(("norm.weight", "_1.weight", "_2.weight", "layernorm.weight")):
            w = rng.normal(1.0, 0.25, shape)
        elif name.endswith(("router.scale", "per_expert_scale")):
            w = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("router.proj.weight"):
            # The router itself multiplies by hidden^-1/2.
            w = rng.standard_normal(shape) * 1.5
        elif "embed_tokens" in name or name == "lm_head.weight":
            w = rng.standard_normal(shape) * 3.0 * config["hidden_size"] ** -0.5
        else:
            w = rng.standard_normal(shape) * 1.2 * shape[-1] ** -0.5
        weights[name] = mx.array(w.astype(np.float32))
    return weights


def to_torch(weights):
    return {k: torch.from_numpy(np.array(v.astype(mx.float32))) for k, v in weights.items()}


# ------------------------------------------------------------------------------------------------------------- logits


@torch.no_grad()
def logits_transformers(model, tokens):
    return model(torch.tensor([list(map(int, tokens))]), use_cache=False).logits[0].float().numpy()


def logits_mlx(model, tokens):
    return np.array(model(mx.array([list(map(int, tokens))]))[0].astype(mx.float32))


def router_gap(model, tokens):
    """The smallest margin between the last selected expert and the first other one, over layers and tokens."""
    gaps, k = [], model.config.top_k_experts

    def record(module, args, output):
        s = module.proj(module.norm(args[0]) * module.scale * module.scalar_root_size)
        top = s.sort(dim=-1, descending=True).values
        gaps.append(float((top[:, k - 1] - top[:, k]).min()))

    hooks = [layer.router.register_forward_hook(record) for layer in model.model.layers]
    logits_transformers(model, tokens)
    for hook in hooks:
        hook.remove()
    return min(gaps)


def close(what, a, b, limit=AGREE):
    worst = float(np.abs(a - b).max())
    if not worst < limit:
        raise SystemExit(f"{what}: logits differ by {worst:.2e}, limit {limit:.0e}")
    return worst


# ------------------------------------------------------------------------------------------------------------ writing


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def wrapped(config, prefix):
    """The configuration in the form of the file: a multimodal one nests the text model."""
    if prefix in (HF_MULTI, MLX_MULTI):
        return {
            "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": config,
            "tie_word_embeddings": config["tie_word_embeddings"], "vocab_size": config["vocab_size"],
        }
    return config


def write_weights(folder, tensors, tag, shards):
    metadata = {"format": tag}
    if shards == 1:
        save(folder / "model.safetensors", tensors, metadata)
        return
    index, names = {}, sorted(tensors)
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {n: tensors[n] for n in names[i::shards]}
        save(folder / file, part, metadata)
        index.update({n: file for n in part})
    size = sum(t.nbytes for t in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index})


def hf_checkpoint(folder, v, weights):
    """Writes a Hugging Face checkpoint; returns the f32 logits function of each library that read it."""
    config, prefix = copy.deepcopy(v["config"]), v["prefix"]
    config["dtype"] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[v["dtype"]]
    rename = lambda n: prefix + n.removeprefix("model.") if n.startswith("model.") else n
    tensors = {rename(n): w for n, w in weights.items()}
    first_shared = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    if config["num_kv_shared_layers"]:
        # Real files keep the unused projections of layers that share. Loaders must ignore them, so they contain
        # garbage.
        at = f"{prefix}layers.{first_shared}.self_attn."
        for name, shape in (("k_proj", (64, config["hidden_size"])), ("v_proj", (64, config["hidden_size"])), ("k_norm", (64,))):
            tensors[f"{at}{name}.weight"] = mx.full(shape, 1000.0).astype(DTYPES[v["dtype"]])
    if prefix == HF_MULTI:
        tensors["model.vision_tower.patch_embedder.input_proj.weight"] = mx.zeros((2, 3)).astype(DTYPES[v["dtype"]])
        tensors["model.embed_vision.embedding_projection.weight"] = mx.zeros((3, 2)).astype(DTYPES[v["dtype"]])
    write_json(folder / "config.json", wrapped(config, prefix))
    write_weights(folder, tensors, "pt", v.get("shards", 1))

    direct = reference_with(v["config"], weights)
    models = [("transformers, weights in memory", direct)]
    if prefix == HF_TEXT:
        kind = dict(dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
        models.append(("transformers, file", Gemma4ForCausalLM.from_pretrained(folder, **kind)))
        # An equal model with the newer keys, as written by the library.
        parsed = json.loads(Gemma4TextConfig(**copy.deepcopy(config)).to_json_string(use_diff=False))
        drop = ("global_head_dim", "num_global_key_value_heads")
        newer = {k: x for k, x in config.items() if k not in drop}
        newer["per_layer_config"] = parsed["per_layer_config"]
        write_json(folder / "config.per_layer.json", newer)
        again = Gemma4TextConfig(**{k: x for k, x in newer.items() if k not in ("architectures", "model_type")})
        models.append(("transformers, per_layer_config", Gemma4ForCausalLM.from_pretrained(folder, config=again, **kind)))
    mlx_model, _ = load_model(folder)
    mlx_model.set_dtype(mx.float32)
    return [(n, lambda t, m=m: logits_transformers(m.eval(), t)) for n, m in models] + [
        ("mlx_lm, file", lambda t: logits_mlx(mlx_model, t))
    ], direct


def dequantised(model):
    """A loaded mlx_lm model's weights in f32, dense, under the names of transformers."""
    dense, hf = {}, {}
    for path, module in model.named_modules():
        if "scales" in module:
            dense[f"{path}.weight"] = mx.dequantize(
                module.weight, module.scales.astype(mx.float32), module.biases.astype(mx.float32),
                group_size=module.group_size, bits=module.bits,
            )
    for name, w in tree_flatten(model.parameters()):
        if not name.endswith((".scales", ".biases")):
            dense.setdefault(name, w.astype(mx.float32))
    for name, w in dense.items():
        plain = name.removeprefix("language_model.")
        if ".switch_glu." not in name:
            hf[plain] = w
        elif name.endswith(".gate_proj.weight"):
            up = dense[name.replace("gate_proj", "up_proj")]
            hf[plain.replace("switch_glu.gate_proj.weight", "gate_up_proj")] = mx.concatenate([w, up], axis=1)
        elif name.endswith(".down_proj.weight"):
            hf[plain.replace("switch_glu.down_proj.weight", "down_proj")] = w
    return hf


def mlx_checkpoint(folder, v, weights):
    """Quantises and writes with mlx_lm's layout, then reads it back; transformers runs on the dequantised weights."""
    config, prefix = copy.deepcopy(v["config"]), v["prefix"]
    full = wrapped(config, prefix)
    if prefix == MLX_MULTI:
        model = gemma4.Model(gemma4.ModelArgs.from_dict(copy.deepcopy(full)))
        named = {"language_model." + n: w for n, w in weights.items()}
    else:
        model = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(copy.deepcopy(full)))
        named = weights
    model.load_weights(list(model.sanitize(named).items()))
    model.set_dtype(DTYPES[v["dtype"]])
    overrides = {prefix + name: value for name, value in v["overrides"].items()}
    model, full = quantize_model(
        model, full, mode="affine", **v["quantization"], quant_predicate=lambda path, _: overrides.get(path, True)
    )
    full["quantization"].update({n: x for n, x in overrides.items() if x is False})
    full["quantization_config"] = full["quantization"]
    write_json(folder / "config.json", full)
    write_weights(folder, dict(tree_flatten(model.parameters())), "mlx", 1)

    loaded, _ = load_model(folder)
    loaded.set_dtype(mx.float32)
    hf = dequantised(loaded)
    direct = reference_with(v["config"], hf)
    return [
        ("transformers, dequantised weights", lambda t: logits_transformers(direct, t)),
        ("mlx_lm, file", lambda t: logits_mlx(loaded, t)),
    ], direct


def make(out, name):
    v, folder = VARIANTS[name], out / name
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    # Rounded to the file's dtype first, so that both libraries start from equal numbers.
    weights = {n: w.astype(DTYPES[v["dtype"]]) for n, w in draw(v["config"], v["seed"]).items()}
    tokens = np.random.default_rng(v["seed"] + 1000).integers(0, VOCAB, v["tokens"]).astype(np.uint32)
    runs, direct = (mlx_checkpoint if "quantization" in v else hf_checkpoint)(folder, v, weights)
    golden = runs[0][1](tokens)
    worst = {what: close(f"{name}: {what}", golden, run(tokens)) for what, run in runs[1:]}
    if v["config"]["enable_moe_block"]:
        gap = router_gap(direct, tokens)
        assert gap > 1e-2, f"{name}: experts nearly tie ({gap:.1e}), choose another seed"
        worst["router gap"] = gap
    save(folder / "logits.safetensors", {"tokens": tokens, "logits": golden.astype(np.float32)}, {"dtype": "f32"})
    size = sum(f.stat().st_size for f in folder.iterdir())
    spread = f"std {golden.std():.2f}, |max| {np.abs(golden).max():.1f}"
    print(f"{name}: {size} bytes, logits {spread}; " + ", ".join(f"{k} {x:.1e}" for k, x in worst.items()))


def main():
    parser = argparse.ArgumentParser(description="Small random Gemma 4 checkpoints with their logits.")
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=Path, default=root / "crates/kvant-models/tests/golden")
    parser.add_argument("--only", default=",".join(VARIANTS))
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    torch.set_num_threads(1)
    for name in args.only.split(","):
        make(args.out, name)


if __name__ == "__main__":
    main()
