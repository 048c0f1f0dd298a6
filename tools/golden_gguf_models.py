"""Golden GGUF models: the small random checkpoints in mixed types, with the logits of transformers in f32.

    python tools/golden_gguf_models.py [--out crates/kvant-models/tests/golden] [--only llama,gemma4_moe]

Each folder has model.gguf and logits.safetensors (tokens u32 [T], logits f32 [T,vocab]). Weights come from the
checkpoint of the family (`golden_families.py`, `golden_models.py`) and are quantised by the package `gguf`;
transformers runs on the weights that this package dequantises. Names are the package's, conventions llama.cpp's: rows
of Q and K in pairs for Llama and Mistral, 1 added to Gemma 3's norms, experts in one tensor. Types that the package
cannot quantise are random blocks.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from golden_gguf import HALVES, values
from safefile import save

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "crates/kvant-models/tests/golden"
SLIDING = "sliding_attention"

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32}

# folder: (checkpoint, architecture, class, changes of the config)
MODELS = {
    "llama_gguf": ("llama", "llama", "LlamaForCausalLM", {}),
    # `attention_factor` has its own key.
    "llama_yarn_gguf": ("llama", "llama", "LlamaForCausalLM", {"num_hidden_layers": 1, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.5,
    }}),
    "mistral_gguf": ("mistral", "llama", "MistralForCausalLM", {}),
    "ministral3_gguf": ("ministral3", "mistral3", "Ministral3ForCausalLM", {}),
    # The biases of Q and K are also in pairs.
    "llama_bias_gguf": ("llama_bias", "llama", "LlamaForCausalLM", {}),
    "qwen2_gguf": ("qwen2", "qwen2", "Qwen2ForCausalLM", {}),
    "qwen3_gguf": ("qwen3", "qwen3", "Qwen3ForCausalLM", {}),
    # No dense layers: this architecture does not support them in GGUF.
    "qwen3_moe_gguf": ("qwen3_moe", "qwen3moe", "Qwen3MoeForCausalLM", {"mlp_only_layers": [], "num_hidden_layers": 2}),
    "qwen2_moe_gguf": ("qwen2_moe", "qwen2moe", "Qwen2MoeForCausalLM", {
        "mlp_only_layers": [], "num_hidden_layers": 2, "use_sliding_window": False, "sliding_window": None, "norm_topk_prob": False,
    }),
    "glm4_moe_gguf": ("glm4_moe", "glm4moe", "Glm4MoeForCausalLM", {}),
    "hunyuan_moe_gguf": ("hunyuan_moe", "hunyuan-moe", "HunYuanMoEV1ForCausalLM", {}),
    "minimax_m2_gguf": ("minimax_m2", "minimax-m2", "MiniMaxM2ForCausalLM", {}),
    # Experts in all layers up to the last.
    "ernie4_5_moe_gguf": ("ernie4_5_moe", "ernie4_5-moe", "Ernie4_5_MoeForCausalLM", {"moe_layer_end_index": -1}),
    # The scale of scores cannot be specified.
    "gemma3_gguf": ("gemma3", "gemma3", "Gemma3ForCausalLM", {"query_pre_attn_scalar": 64}),
    "gemma4_gguf": ("dense", "gemma4", "Gemma4ForCausalLM", {}),
    "gemma4_shared_gguf": ("ple_shared", "gemma4", "Gemma4ForCausalLM", {}),
    "gemma4_moe_gguf": ("moe", "gemma4", "Gemma4ForCausalLM", {}),
    "gpt_oss_gguf": ("gpt_oss", "gpt-oss", "GptOssForCausalLM", {}),
    # The last of four layers has no rotary embedding: files cannot specify another one.
    "smollm3_gguf": ("smollm3", "smollm3", "SmolLM3ForCausalLM", {
        "num_hidden_layers": 4, "no_rope_layers": None, "use_sliding_window": False,
    }),
    "seed_oss_gguf": ("seed_oss", "seed_oss", "SeedOssForCausalLM", {}),
    "granite_gguf": ("granite", "granite", "GraniteForCausalLM", {}),
    "olmo2_gguf": ("olmo2", "olmo2", "Olmo2ForCausalLM", {}),
    "olmo3_gguf": ("olmo3", "olmo2", "Olmo3ForCausalLM", {}),
    "exaone4_gguf": ("exaone4", "exaone4", "Exaone4ForCausalLM", {}),
    "phi3_gguf": ("phi3", "phi3", "Phi3ForCausalLM", {}),
    "ernie4_5_gguf": ("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", {}),
    # Files cannot specify the epsilon of the norms of outputs.
    "muse_glimmer_gguf": ("muse_glimmer", "muse-glimmer", "MuseGlimmerForConditionalGeneration", {
        "attention_bias": False, "post_norm_eps": 1e-8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }),
    "hunyuan_gguf": ("hunyuan", "hunyuan-dense", "HunYuanDenseV1ForCausalLM", {}),
    # Heads of keys and values have equal sizes in llama.cpp. Value heads are three times as many as key heads, so that an
    # order of heads differs from its inverse.
    "qwen3_next_gguf": ("qwen3_next", "qwen3next", "Qwen3NextForCausalLM", {"mlp_only_layers": [], "num_hidden_layers": 3, "layer_types": [
        "linear_attention", "linear_attention", "full_attention"], "full_attention_interval": 3, **DELTA}),
    "qwen3_5_gguf": ("qwen3_5", "qwen35", "Qwen3_5ForCausalLM", DELTA),
    "qwen3_5_moe_gguf": ("qwen3_5_moe", "qwen35moe", "Qwen3_5MoeForCausalLM", {"num_hidden_layers": 2, "layer_types": [
        "linear_attention", "full_attention"], **DELTA}),
    # The heads are as wide as the residual stream in llama.cpp.
    "lfm2_gguf": ("lfm2", "lfm2", "Lfm2ForCausalLM", {"num_attention_heads": 1}),
    # Files cannot specify the factor of experts.
    "lfm2_moe_gguf": ("lfm2_moe", "lfm2moe", "Lfm2MoeForCausalLM", {"routed_scaling_factor": 1.0, "num_attention_heads": 1}),
    # Rows of 256 elements in random K-quants, instead of the checkpoint's weights.
    "k_quants_gguf": ("llama", "llama", "LlamaForCausalLM", {
        "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "rope_scaling": None,
    }),
}  # fmt: skip
TYPES = {
    "attn_q": Type.Q8_0, "attn_k": Type.Q4_0, "attn_v": Type.Q4_1, "attn_output": Type.Q5_0, "ffn_gate": Type.Q5_1,
    "ffn_up": Type.Q8_0, "ffn_down": Type.Q4_1, "token_embd": Type.Q8_0, "output": Type.F16, "ffn_gate_exps": Type.Q8_0,
    "ffn_up_exps": Type.Q4_0, "ffn_down_exps": Type.Q5_0, "ffn_gate_up_exps": Type.Q8_0, "inp_gate": Type.BF16, "proj": Type.F32,
    "ffn_gate_shexp": Type.Q8_0, "ffn_up_shexp": Type.Q4_0, "ffn_down_shexp": Type.Q5_0,
    "in_proj": Type.Q8_0, "out_proj": Type.Q5_1, "ssm_in": Type.Q8_0, "ssm_out": Type.Q5_0, "ssm_beta": Type.Q8_0, "ssm_ba": Type.Q8_0,
    "attn_qkv": Type.Q4_1, "attn_gate": Type.Q5_0, "per_layer_token_embd": Type.Q8_0, "per_layer_model_proj": Type.Q8_0,
}  # fmt: skip
K_TYPES = {
    "attn_q": Type.Q4_K, "attn_k": Type.Q2_K, "attn_v": Type.IQ4_XS, "attn_output": Type.Q5_K, "ffn_gate": Type.Q3_K,
    "ffn_up": Type.IQ4_NL, "ffn_down": Type.Q6_K, "token_embd": Type.Q6_K, "output": Type.MXFP4,
}  # fmt: skip


# Names missing in the package's table.
SPECIAL = {
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
}  # fmt: skip


def random_blocks(rng, kind, shape):
    """Random blocks of small numbers."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // elements, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scale = (rng.normal(size=len(blocks)) * {Type.Q4_K: 1e-4, Type.Q5_K: 1e-4}.get(kind, 5e-5)).astype("<f2")
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if kind == Type.IQ4_NL:
        blocks[:, :2] = np.full(len(blocks), 1e-3, "<f2").view(np.uint8).reshape(-1, 2)
    if kind == Type.MXFP4:
        blocks[:, 0] = rng.integers(121, 124, len(blocks))
    return blocks.reshape(*shape[:-1], -1)


def pairs(weight, heads):
    """Reorders the rows of each head from halves to adjacent pairs."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def halves(weight, heads):
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def metadata(writer, arch, config, experts):
    """The keys that llama.cpp's converter writes."""
    c = config
    rope = c.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    scaling = c.get("rope_scaling") or full
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    swa = [kind == SLIDING for kind in c.get("layer_types") or []]
    # The count includes layers for multi-token prediction.
    writer.add_block_count(c["num_hidden_layers"] + c.get("num_nextn_predict_layers", 0))
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_layer_norm_rms_eps(first(c, "norm_eps", "rms_norm_eps"))
    theta = full.get("rope_theta", c.get("rope_theta"))
    if "alpha" in scaling:
        theta *= scaling["alpha"] ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(c["vocab_size"])
    kv_heads, width = c["num_key_value_heads"], c["intermediate_size"]
    if arch == "gemma4":
        first_shared = c["num_hidden_layers"] - c["num_kv_shared_layers"]
        if c.get("use_double_wide_mlp"):
            width = [width * (1 if l < first_shared else 2) for l in range(c["num_hidden_layers"])]
        if c["attention_k_eq_v"] and c["num_global_key_value_heads"]:
            kv_heads = [kv_heads if sliding else c["num_global_key_value_heads"] for sliding in swa]
        writer.add_shared_kv_layers(c["num_kv_shared_layers"])
        writer.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"])
        writer.add_key_length_swa(head_dim)
        writer.add_value_length_swa(head_dim)
        head_dim = c["global_head_dim"]
        writer.add_rope_freq_base_swa(rope[SLIDING]["rope_theta"])
    elif arch == "gemma3":
        writer.add_rope_freq_base_swa(rope[SLIDING]["rope_theta"])
    if SLIDING in (c.get("layer_types") or []):
        writer.add_sliding_window_pattern(swa)
    if c.get("sliding_window"):
        writer.add_sliding_window(c["sliding_window"])
    if c.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(c["final_logit_softcapping"])
    if arch in ("lfm2", "lfm2moe"):
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in c["layer_types"]]
        writer.add_shortconv_l_cache(c["conv_L_cache"])
    if arch == "lfm2":
        # The width that the family derives.
        width = -(-int(c["block_ffn_dim_multiplier"] * (2 * width // 3)) // c["block_multiple_of"]) * c["block_multiple_of"]
    writer.add_head_count_kv(kv_heads)
    writer.add_feed_forward_length(width)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for key, write in (
        ("embedding_multiplier", writer.add_embedding_scale), ("residual_multiplier", writer.add_residual_scale),
        ("attention_multiplier", writer.add_attention_scale), ("logits_scaling", writer.add_logit_scale),
        ("output_multiplier", writer.add_logit_scale),
    ):  # fmt: skip
        if key in c:
            write(c[key])
    kind = scaling.get("rope_type") or scaling.get("type")
    if arch == "phi3":
        original = c["original_max_position_embeddings"]
        writer.add_rope_dimension_count(int(head_dim * c["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(original)
        growth = c["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(growth) / np.log(original))))
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(scaling[f"{length}_factor"], np.float32))
    if kind in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "attention_factor" in scaling:
            writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])
        if "mscale_all_dim" in scaling:
            writer.add_rope_scaling_yarn_log_mul(scaling["mscale_all_dim"])
            writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(scaling, c["rope_theta"], head_dim))
    if arch == "gemma4":
        rotated = int(head_dim * full["partial_rotary_factor"] / 2)
        factors = [1.0] * rotated + [1e30] * (head_dim // 2 - rotated)
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    if experts:
        writer.add_expert_count(experts)
        used = first(c, "num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
        width = c.get("moe_intermediate_size") or c["intermediate_size"]
        writer.add_expert_used_count(used[0] if isinstance(used, list) else used)
        writer.add_expert_feed_forward_length(width[0] if isinstance(width, list) else width)
    if arch in ("qwen3next", "qwen35", "qwen35moe"):
        kinds = c.get("layer_types")
        writer.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(c["linear_key_head_dim"])
        writer.add_ssm_group_count(c["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(c["linear_num_value_heads"])
        writer.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
        writer.add_full_attention_interval(kinds.index("full_attention") + 1 if kinds else 4)
        writer.add_rope_dimension_count(int(head_dim * c["partial_rotary_factor"]))
        if arch != "qwen3next":
            writer.add_rope_dimension_sections([3, 3, 2, 0])
    elif arch == "lfm2moe":
        writer.add_leading_dense_block_count(c["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch in ("qwen2moe", "qwen3next", "qwen35moe"):
        writer.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    elif arch == "hunyuan-moe":
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(c["intermediate_size"])
    elif arch == "minimax-m2":
        writer.add_rope_dimension_count(c["rotary_dim"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif arch == "glm4moe":
        writer.add_nextn_predict_layers(c["num_nextn_predict_layers"])
        writer.add_rope_dimension_count(int(head_dim * c["partial_rotary_factor"]))
        writer.add_leading_dense_block_count(c["first_k_dense_replace"])
        writer.add_expert_shared_count(c["n_shared_experts"])
        writer.add_expert_group_count(c["n_group"])
        writer.add_expert_group_used_count(c["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(c["routed_scaling_factor"])
        writer.add_expert_weights_norm(c["norm_topk_prob"])
    elif arch == "ernie4_5-moe":
        writer.add_leading_dense_block_count(c["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(c["moe_layer_interval"])
        writer.add_expert_shared_count(c["moe_num_shared_experts"])
        writer.add_expert_shared_feed_forward_length(c["moe_intermediate_size"] * c["moe_num_shared_experts"])


def first(config, *keys):
    """The value of the first of several keys that exists."""
    return next(config[key] for key in keys if key in config)


def number_of_experts(config):
    return next((config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") if config.get(key)), 0)


def llama3_factors(scaling, theta, dim):
    """As in llama.cpp's converter."""
    low, high = (scaling["original_max_position_embeddings"] / scaling[f"{k}_freq_factor"] for k in ("low", "high"))
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / dim):
        length = 2 * np.pi / frequency
        smooth = (scaling["original_max_position_embeddings"] / length - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(scaling["factor"])
        else:
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def stored(name, arch, config, mapping):
    """The GGUF name of a parameter of transformers."""
    for suffix, special in SPECIAL.items():
        if name.endswith(suffix):
            return f"blk.{name.split('.')[2]}.{special}"
    if name.endswith("experts.gate_up_proj_bias"):
        return f"blk.{name.split('.')[2]}.ffn_gate_up_exps.bias"
    if name.endswith("experts.down_proj_bias"):
        return f"blk.{name.split('.')[2]}.ffn_down_exps.bias"
    if arch == "minimax-m2":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    name = name.replace("model.language_model.", "model.")
    name = name.replace("mlp.gate.moe_statics", "mlp.moe_statics").replace("e_score_correction_bias", "e_score_correction.bias")
    name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
    found = mapping.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found, f"{arch}: {name}"
    return found


def make(folder, out):
    checkpoint, arch, model_class, changes = MODELS[folder]
    config = json.loads((GOLDEN / checkpoint / "config.json").read_text())
    text = config.get("text_config", config)
    text.update(changes)
    k_quants = folder.startswith("k_")
    types = K_TYPES if k_quants else TYPES
    model_class = getattr(transformers, model_class)
    hf_config = model_class.config_class(**config)
    config = text
    hf_config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = model_class(hf_config).to(torch.float32).eval()
    if not k_quants:
        shards = sorted((GOLDEN / checkpoint).glob("model*.safetensors"))
        weights = {k: v.to(torch.float32) for shard in shards for k, v in load_torch(shard).items()}
        known = model.state_dict()
        fitting = {k: v for k, v in weights.items() if k in known and known[k].shape == v.shape}
        for name in model.load_state_dict(fitting, strict=False).missing_keys:
            # The checkpoint stores each expert separately.
            parts = (".mlp.", "feed_forward.experts", ".layers.3.", "vision", "linear_attn", "self_attn")
            assert name == "lm_head.weight" or any(part in name for part in parts), name
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                known[name].normal_(std=0.3)
            elif "linear_attn" in name:
                draw_delta_net(name, known[name])
            elif name.endswith("proj.weight") or ".experts." in name:
                torch.nn.init.normal_(known[name], std=0.2)
    out.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(out / "model.gguf", arch)
    # The package does not know Muse Glimmer. Its names are the ones of AFMoE without experts.
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = known["afmoe" if arch == "muse-glimmer" else arch]
    mapping = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    metadata(writer, arch, config, number_of_experts(config))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_tokenizer_model("none")
    rng = np.random.default_rng(18)
    state = model.state_dict()
    tied = config["tie_word_embeddings"]
    for name, parameter in state.items():
        if (tied and name == "lm_head.weight") or "rotary" in name or "vision" in name or name.endswith(("embed_scale", "_ids")):
            continue
        write_tensor(writer, name, parameter, arch, config, mapping, types, rng if k_quants else None)
    if arch == "muse-glimmer":
        # Norms without weights, with the factor of the queries.
        for l in range(config["num_hidden_layers"]):
            for role, factor in (("q", config["qk_scale_factor"]), ("k", 1.0)):
                writer.add_tensor(f"blk.{l}.attn_{role}_norm.weight", np.full(config["head_dim"], factor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokens = load_file(GOLDEN / checkpoint / "logits.safetensors")["tokens"]
    with torch.no_grad():
        logits = model(torch.tensor(tokens.astype(np.int64))[None]).logits[0].float().numpy()
    assert np.isfinite(logits).all() and logits.std() > 0.05, logits.std()
    save(out / "logits.safetensors", {"logits": logits, "tokens": tokens})
    print(f"{folder}: {(out / 'model.gguf').stat().st_size} bytes, logits ±{logits.std():.2f}")


def draw_delta_net(name, parameter):
    if name.endswith("A_log"):
        parameter.uniform_(0.05, 4.0).log_()
    elif name.endswith("linear_attn.norm.weight"):
        parameter.normal_(1.0, 0.3)
    else:
        parameter.normal_(std=0.5 if "conv1d" in name else 0.2)


def value_heads(role, c):
    """The order of a tensor's rows, or columns. Value heads that share a key head are adjacent in transformers; GGUF has
    the first value head of each key head, then the second ones."""
    keys, values, key_dim, value_dim = (c[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    heads = np.arange(values).reshape(keys, -1).T.reshape(-1)
    rows = (heads[:, None] * value_dim + np.arange(value_dim)).reshape(-1)
    fixed = 2 * keys * key_dim
    return {
        "attn_qkv": np.concatenate([np.arange(fixed), fixed + rows]), "attn_gate": rows, "ssm_out": rows,
        "ssm_alpha": heads, "ssm_beta": heads, "ssm_a": heads, "ssm_dt": heads,
    }.get("attn_qkv" if role == "ssm_conv1d" else role)  # fmt: skip


def joint_parts(c):
    """The rows of `in_proj_qkvz` in its two tensors."""
    keys, values, key_dim, value_dim = (c[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    widths = np.cumsum([key_dim, key_dim, values // keys * value_dim, values // keys * value_dim])
    q, k, v, z = np.split(np.arange(keys * widths[-1]).reshape(keys, -1), widths[:-1], axis=1)
    return {"attn_qkv": np.concatenate([part.reshape(-1) for part in (q, k, v)]), "attn_gate": z.reshape(-1)}


def write_tensor(writer, name, parameter, arch, config, mapping, types, rng):
    """Quantises a parameter, writes it, and assigns the dequantised values to the model."""
    values_of = parameter.detach().numpy().copy()
    # Old files have the joint matrix; here, the first layer.
    if name.endswith("in_proj_qkvz.weight") and ".layers.0." not in name:
        for part, rows in joint_parts(config).items():
            blocks = gguf.quantize(np.ascontiguousarray(values_of[rows]), types[part])
            writer.add_tensor(f"blk.{name.split('.')[2]}.{part}.weight", blocks, raw_dtype=types[part])
            values_of[rows] = gguf.dequantize(blocks, types[part])
        parameter.data.copy_(torch.tensor(values_of))
        return
    target = stored(name, arch, config, mapping)
    if "conv" in name and values_of.ndim == 3:
        values_of = values_of[:, 0]
    # A matrix of one row is a vector.
    values_of = values_of[0] if values_of.ndim == 2 and len(values_of) == 1 else values_of
    role = target.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    if role == "ssm_a":
        values_of = -np.exp(values_of)
    order = value_heads(role, config) if arch in ("qwen35", "qwen35moe") and "linear_attn" in name else None
    if order is not None:
        values_of = values_of[:, order] if role == "ssm_out" else values_of[order]
    kind = types.get(role, Type.F32) if values_of.ndim > 1 and target.endswith(".weight") else Type.F32
    if values_of.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Type.F16
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(role)
    permuted = heads is not None and arch in ("llama", "mistral3", "smollm3", "granite", "muse-glimmer")
    if permuted:
        values_of = pairs(values_of, heads)
    is_hybrid = arch in ("qwen3next", "qwen35", "qwen35moe") and "linear_attn" not in name
    is_shifted = (arch == "gemma3" or is_hybrid) and target.endswith("norm.weight") or arch == "muse-glimmer" and name.endswith("layernorm.weight")
    shift = np.float32(is_shifted)
    values_of = values_of + shift
    if arch == "gpt-oss" and "_exps" in target:
        write_interleaved(writer, target, parameter)
        return
    # `gate_up_proj` of transformers can contain two matrices that GGUF separates.
    if role == "ffn_gate_up_exps" and arch != "gemma4":
        width = values_of.shape[1] // 2
        halves_of = []
        for part, rows in (("ffn_gate_exps", values_of[:, :width]), ("ffn_up_exps", values_of[:, width:])):
            blocks = gguf.quantize(np.ascontiguousarray(rows), types[part])
            writer.add_tensor(target.replace("ffn_gate_up_exps", part), blocks, raw_dtype=types[part])
            halves_of.append(gguf.dequantize(blocks, types[part]))
        parameter.data.copy_(torch.tensor(np.concatenate(halves_of, axis=1)))
        return
    if rng is not None and kind in HALVES and kind not in (Type.F32, Type.F16, Type.BF16):
        blocks = random_blocks(rng, kind, values_of.shape)
    else:
        blocks = gguf.quantize(np.ascontiguousarray(values_of, np.float32), kind)
    if kind in (Type.F32, Type.F16):
        writer.add_tensor(target, blocks)
        result = blocks.astype(np.float32)
    else:
        writer.add_tensor(target, blocks, raw_dtype=kind)
        result = gguf.dequantize(blocks, kind)
    result = result - shift
    if order is not None:
        columns = [slice(None)] * (role == "ssm_out")
        result[tuple([*columns, order])] = result.copy()
    if role == "ssm_a":
        result = np.log(-result)
    parameter.data.copy_(torch.tensor(halves(result, heads) if permuted else result).reshape(parameter.shape))


def write_interleaved(writer, target, parameter):
    """Experts of gpt-oss: alternating columns of gate and up in transposed matrices; GGUF separates them, not
    transposed."""
    is_bias = target.endswith(".bias")
    result = parameter.detach().numpy().copy()
    parts = {target: slice(None)}
    if "gate_up" in target:
        parts = {target.replace("gate_up", part): slice(i, None, 2) for i, part in enumerate(("gate", "up"))}
    for name, columns in parts.items():
        rows = result[..., columns] if is_bias else result[..., columns].swapaxes(1, 2)
        rows = np.ascontiguousarray(rows, np.float32)
        if is_bias:
            writer.add_tensor(name, rows)
            continue
        blocks = gguf.quantize(rows, Type.MXFP4)
        writer.add_tensor(name, blocks, raw_dtype=Type.MXFP4)
        result[..., columns] = gguf.dequantize(blocks, Type.MXFP4).swapaxes(1, 2)
    parameter.data.copy_(torch.tensor(result))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=GOLDEN)
    parser.add_argument("--only", default=",".join(MODELS))
    args = parser.parse_args()
    for folder in args.only.split(","):
        make(folder, args.out / folder)


if __name__ == "__main__":
    main()
