"""Golden data of families other than Gemma 4: small random checkpoints with the logits of transformers in f32.

    python tools/golden_families.py [--out crates/kvant-models/tests/golden] [--only llama,qwen3_moe_mlx,...]

Each variant is a folder with config.json, model.safetensors, and logits.safetensors (tokens u32 [T], logits f32 [T,vocab]).
Weights are sampled once and rounded to the dtype of the file. A variant with "mlx" is converted by mlx_lm; transformers
then runs on the weights that MLX dequantises, and mlx_lm's own logits must agree.
"""

import argparse
import copy
import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model, _get_classes

from safefile import DTYPES, save

AGREE = 2e-4
VOCAB = 96
COMMON = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_hidden_layers=2,
    vocab_size=VOCAB, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    tie_word_embeddings=False,
)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32,
)
MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, decoder_sparse_step=1)
S, F = "sliding_attention", "full_attention"
# Every second layer has the window, which `layer_types` does not specify. The ends of the rotary embedding's ramp are
# not integers.
GPT_OSS = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=3,
    sliding_window=8, hidden_act="silu", swiglu_limit=7.0, attention_bias=True, rope_theta=150000, max_position_embeddings=512,
    rope_scaling=dict(rope_type="yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=64),
)

GLM = dict(
    rope_theta=1e6, rope_scaling=None, partial_rotary_factor=0.5, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
    n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.5, norm_topk_prob=True, first_k_dense_replace=1,
    use_qk_norm=False, num_nextn_predict_layers=1,
)
QWEN2_MOE = dict(
    rope_theta=1e6, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=96, norm_topk_prob=False,
)
MINIMAX = dict(
    rope_theta=5e6, rotary_dim=32, num_local_experts=6, num_experts_per_tok=2, intermediate_size=32, shared_intermediate_size=0,
    scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True,
)
ERNIE = dict(
    rope_theta=5e5, moe_num_experts=6, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=2, moe_layer_start_index=1,
    moe_layer_interval=1, use_bias=False,
)
GRANITE = dict(embedding_multiplier=6.0, residual_multiplier=0.22, attention_multiplier=0.03125, logits_scaling=2.0)
# Granite 4 with only attention layers.
HYBRID = dict(
    GRANITE, attention_bias=False, rope_theta=1e4, layer_types=["attention", "attention"], num_local_experts=0, num_experts_per_tok=0, position_embedding_type="rope",
    shared_intermediate_size=128, intermediate_size=128, tie_word_embeddings=True, mamba_n_heads=4,
)
# The layers of the default pattern: the last one is full and has no rotary embedding. The embedding differs greatly
# from its norm, so that a missing norm shows.
GLIMMER = dict(
    num_hidden_layers=3, sliding_window=8, hidden_activation="silu", rope_parameters=dict(rope_type="default", rope_theta=5e4), post_norm_eps=0.05,
    qk_scale_factor=1.7, output_multiplier=0.5, final_logit_softcapping=5.0,
)
# Unused: only the text model is in the file.
VISION = dict(
    hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, patch_size=2, pos_emb_height=2, pos_emb_width=2,
)
# Three of four layers, or those that `layer_types` names, are delta nets. Value heads outnumber key heads.
DELTA = dict(
    rope_theta=1e6, partial_rotary_factor=0.25, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
    linear_value_head_dim=48, linear_conv_kernel_dim=4,
)
L, C = "linear_attention", "conv"
LFM2 = dict(
    norm_eps=1e-5, conv_L_cache=3, conv_bias=False, block_multiple_of=16, block_ffn_dim_multiplier=1.1, block_auto_adjust_ff_dim=True,
    rope_theta=1e6, tie_word_embeddings=True, num_hidden_layers=3, layer_types=[C, F, C],
)
HUNYUAN = dict(type="dynamic", alpha=50.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.0)


def factors(count, first, last):
    """Growing factors of LongRoPE."""
    return [round(first + (last - first) * i / (count - 1), 3) for i in range(count)]


# name: (model_type, class, dtype, config, seed, MLX quantisation)
VARIANTS = {
    "llama": ("llama", "Llama", "bf16", dict(rope_theta=5e5, rope_scaling=LLAMA3, mlp_bias=False, attention_bias=False), 51, None),
    "llama_mlx": ("llama", "Llama", "f16", dict(rope_theta=1e4, tie_word_embeddings=True), 52, dict(group_size=64, bits=4)),
    # Like Granite's code models.
    "llama_bias": ("llama", "Llama", "bf16", dict(rope_theta=1e4, mlp_bias=True, attention_bias=True, tie_word_embeddings=True), 68, None),
    "mistral": ("mistral", "Mistral", "f16", dict(sliding_window=8, rope_theta=1e4, num_attention_heads=4), 53, None),
    "qwen2": ("qwen2", "Qwen2", "bf16", dict(rope_theta=1e6, use_sliding_window=False, sliding_window=8, max_window_layers=1), 69, None),
    # The layers from `max_window_layers` on have the window.
    "qwen2_window": ("qwen2", "Qwen2", "f16", dict(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=8, max_window_layers=1, num_attention_heads=4,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    ), 70, None),
    "qwen2_mlx": ("qwen2", "Qwen2", "f16", dict(rope_theta=1e6, num_attention_heads=1), 71, dict(group_size=32, bits=4)),
    "qwen3_bias": ("qwen3", "Qwen3", "bf16", dict(rope_theta=1e6, attention_bias=True, num_hidden_layers=1), 72, None),
    "qwen3": ("qwen3", "Qwen3", "f32", dict(
        tie_word_embeddings=True, rope_theta=1e6, attention_bias=False, use_sliding_window=False,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    ), 54, None),
    # `layer_types` takes precedence over `max_window_layers`.
    "qwen3_window": ("qwen3", "Qwen3", "bf16", dict(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=8, layer_types=[S, F, S], max_window_layers=2,
        num_hidden_layers=3,
    ), 62, None),
    # All layers have the window. The weights of the experts sum to less than 1.
    "qwen3_moe_window": ("qwen3_moe", "Qwen3Moe", "bf16", dict(
        rope_theta=1e4, use_sliding_window=True, sliding_window=8, max_window_layers=2, **dict(MOE, norm_topk_prob=False),
    ), 63, None),
    "qwen3_moe": ("qwen3_moe", "Qwen3Moe", "bf16", dict(rope_theta=1e6, mlp_only_layers=[0], num_hidden_layers=3, **MOE), 55, None),
    "qwen3_moe_mlx": ("qwen3_moe", "Qwen3Moe", "f32", dict(rope_theta=1e6, **MOE, mlp_only_layers=[]), 56, dict(group_size=32, bits=8)),
    # The factor of queries changes at positions 16 and 32.
    "ministral3": ("ministral3", "Ministral3", "bf16", dict(rope_parameters=dict(
        rope_type="yarn", type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0,
        mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5,
    ), num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64), 58, None),
    "gemma3": ("gemma3_text", "Gemma3", "bf16", dict(
        tie_word_embeddings=True, num_hidden_layers=4, layer_types=[S, S, F, S], sliding_window=8, query_pre_attn_scalar=96,
        hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=None, final_logit_softcapping=None,
        rope_parameters={F: dict(rope_type="linear", factor=8.0, rope_theta=1e6), S: dict(rope_type="default", rope_theta=1e4)},
    ), 57, None),
    # Two of four groups are selected; the first layer is dense. With the second shared expert, the MLP is as wide as
    # two experts.
    "glm4_moe": ("glm4_moe", "Glm4Moe", "bf16", dict(
        GLM, num_hidden_layers=3, n_group=4, topk_group=2, n_shared_experts=2, attention_bias=True, use_qk_norm=True, hidden_size=64,
    ), 90, None),
    "glm4_moe_mlx": ("glm4_moe", "Glm4Moe", "f32", dict(GLM, attention_bias=True), 91, dict(group_size=32, bits=8)),
    # Layers 0 and 2 have the window; layer 1 is dense.
    "qwen2_moe": ("qwen2_moe", "Qwen2Moe", "bf16", dict(
        QWEN2_MOE, mlp_only_layers=[1], num_hidden_layers=3, use_sliding_window=True, sliding_window=8, norm_topk_prob=True,
    ), 92, None),
    "qwen2_moe_mlx": ("qwen2_moe", "Qwen2Moe", "f32", dict(QWEN2_MOE, num_attention_heads=1), 93, dict(group_size=32, bits=8)),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_Moe", "bf16", dict(ERNIE, num_hidden_layers=3, moe_layer_end_index=1), 94, None),
    # MLX has no bias of the scores.
    "ernie4_5_moe_mlx": ("ernie4_5_moe", "Ernie4_5_Moe", "f32", dict(ERNIE, tie_word_embeddings=True), 95, dict(group_size=32, bits=8)),
    "hunyuan_moe": ("hunyuan_v1_moe", "HunYuanMoEV1", "bf16", dict(
        rope_theta=1e4, rope_scaling=HUNYUAN, intermediate_size=64, num_experts=6, moe_topk=[2, 2], tie_word_embeddings=True,
        num_shared_expert=[1, 1], moe_intermediate_size=[64, 64], use_cla=False, use_qk_norm=True, use_mixed_mlp_moe=True,
    ), 96, None),
    "minimax_m2": ("minimax_m2", "MiniMaxM2", "bf16", MINIMAX, 97, None),
    "minimax_m2_mlx": ("minimax_m2", "MiniMaxM2", "f32", MINIMAX, 98, dict(group_size=32, bits=8)),
    "gemma3_bias": ("gemma3_text", "Gemma3", "bf16", dict(
        tie_word_embeddings=True, num_hidden_layers=2, layer_types=[S, F], sliding_window=8, query_pre_attn_scalar=64, attention_bias=True,
        hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=None, final_logit_softcapping=None,
        rope_parameters={F: dict(rope_type="default", rope_theta=1e6), S: dict(rope_type="default", rope_theta=1e4)},
    ), 73, None),
    # The second layer of three has no rotary embedding, and therefore the window.
    "smollm3": ("smollm3", "SmolLM3", "bf16", dict(
        rope_theta=1e5, num_hidden_layers=3, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=8, tie_word_embeddings=True,
    ), 74, None),
    "smollm3_mlx": ("smollm3", "SmolLM3", "f16", dict(
        rope_theta=1e5, num_hidden_layers=4, num_attention_heads=1, intermediate_size=64, tie_word_embeddings=True,
    ), 75, dict(group_size=64, bits=4)),
    "seed_oss": ("seed_oss", "SeedOss", "bf16", dict(rope_theta=1e7, attention_bias=True, attention_out_bias=True), 76, None),
    "seed_oss_mlx": ("seed_oss", "SeedOss", "f16", dict(rope_theta=1e7, attention_bias=True), 77, dict(group_size=32, bits=4)),
    "granite": ("granite", "Granite", "bf16", dict(
        rope_theta=1e4, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **GRANITE,
    ), 78, None),
    "granite_mlx": ("granite", "Granite", "f16", dict(
        rope_theta=1e4, attention_bias=False, mlp_bias=False, num_attention_heads=1, intermediate_size=128, tie_word_embeddings=True, **GRANITE,
    ), 79, dict(group_size=32, bits=6)),
    "granite_hybrid": ("granitemoehybrid", "GraniteMoeHybrid", "bf16", HYBRID, 93, None),
    "granite_hybrid_mlx": ("granitemoehybrid", "GraniteMoeHybrid", "f16", dict(HYBRID, num_attention_heads=1), 94, dict(group_size=32, bits=4)),
    # Norms over both KV heads together.
    "olmo2": ("olmo2", "Olmo2", "bf16", dict(rope_theta=5e5, num_attention_heads=4, num_key_value_heads=2), 80, None),
    # For groups of three devices.
    "olmo2_three": ("olmo2", "Olmo2", "bf16", dict(rope_theta=5e5, num_attention_heads=6, num_key_value_heads=3), 130, None),
    "olmo3": ("olmo3", "Olmo3", "bf16", dict(rope_theta=5e5, num_hidden_layers=4, sliding_window=8, rope_scaling=dict(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=32, attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0,
    )), 81, None),
    "olmo2_mlx": ("olmo2", "Olmo2", "f16", dict(rope_theta=5e5), 82, dict(group_size=32, bits=4)),
    "exaone4": ("exaone4", "Exaone4", "bf16", dict(
        rope_theta=1e6, num_hidden_layers=4, sliding_window=8, sliding_window_pattern=4, rope_scaling=LLAMA3,
    ), 83, None),
    "exaone4_mlx": ("exaone4", "Exaone4", "f16", dict(
        rope_theta=1e6, sliding_window=None, sliding_window_pattern=None, layer_types=[F, F], rope_scaling=dict(rope_type="linear", factor=2.0),
    ), 84, dict(group_size=32, bits=4)),
    # Three quarters of a head rotate. The prompt is shorter than the original context.
    "phi3": ("phi3", "Phi3", "bf16", dict(
        num_attention_heads=1, rope_theta=1e4, partial_rotary_factor=0.75, tie_word_embeddings=True, original_max_position_embeddings=64,
        rope_scaling=dict(type="longrope", short_factor=factors(24, 1.0, 1.5), long_factor=factors(24, 1.0, 9.0)),
    ), 85, None),
    # Heads of 96 coordinates, a window, and a prompt longer than the original context.
    "phi3_long": ("phi3", "Phi3", "f16", dict(
        hidden_size=192, head_dim=96, sliding_window=24, original_max_position_embeddings=32, rope_theta=1e4,
        rope_scaling=dict(type="longrope", short_factor=factors(48, 1.0, 1.5), long_factor=factors(48, 1.0, 9.0)),
    ), 86, None),
    "phi3_partial_long": ("phi3", "Phi3", "bf16", dict(
        num_attention_heads=1, rope_theta=1e4, partial_rotary_factor=0.75, tie_word_embeddings=True, original_max_position_embeddings=32, num_hidden_layers=1,
        rope_scaling=dict(type="longrope", short_factor=factors(24, 1.0, 1.5), long_factor=factors(24, 1.0, 9.0)),
    ), 87, None),
    "phi3_mlx": ("phi3", "Phi3", "f16", dict(rope_theta=1e4, num_attention_heads=1, partial_rotary_factor=0.5), 88, dict(group_size=32, bits=4)),
    "ernie4_5": ("ernie4_5", "Ernie4_5", "bf16", dict(rope_theta=5e5, use_bias=True, tie_word_embeddings=True), 89, None),
    "ernie4_5_mlx": ("ernie4_5", "Ernie4_5", "f16", dict(rope_theta=5e5, use_bias=False), 90, dict(group_size=32, bits=4)),
    "hunyuan": ("hunyuan_v1_dense", "HunYuanDenseV1", "bf16", dict(rope_theta=1e4, tie_word_embeddings=True, rope_scaling=HUNYUAN), 91, None),
    "hunyuan_mlx": ("hunyuan_v1_dense", "HunYuanDenseV1", "f16", dict(rope_theta=1e4, rope_scaling=HUNYUAN), 92, dict(group_size=32, bits=4)),
    "muse_glimmer": ("muse_glimmer", "MuseGlimmer", "bf16", dict(GLIMMER, attention_bias=True), 99, None),
    # The first layer has no rotary embedding, but a window.
    "muse_glimmer_mlx": ("muse_glimmer", "MuseGlimmer", "f16", dict(
        GLIMMER, num_hidden_layers=2, layer_types=[S, F], layer_rope_theta=[0, 5e4], num_attention_heads=1,
    ), 100, dict(group_size=32, bits=4)),
    # The factor of cosines and sines multiplies only the scores of full layers.
    "gemma3_yarn": ("gemma3_text", "Gemma3", "bf16", dict(
        tie_word_embeddings=True, num_hidden_layers=3, layer_types=[S, F, S], sliding_window=8, query_pre_attn_scalar=96,
        hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=5.0, final_logit_softcapping=None,
        rope_parameters={
            F: dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.5, rope_theta=1e6),
            S: dict(rope_type="default", rope_theta=1e4),
        },
    ), 68, None),
    "gpt_oss": ("gpt_oss", "GptOss", "bf16", dict(GPT_OSS, num_local_experts=3, num_experts_per_tok=2), 59, None),
    "gpt_oss_mxfp4": ("gpt_oss", "GptOss", "bf16", dict(GPT_OSS, num_hidden_layers=3), 60, "mxfp4"),
    # compressed-tensors: each projection in another format.
    "llama_w4a16": ("llama", "Llama", "bf16", dict(rope_theta=1e4, num_hidden_layers=1), 64, "packed"),
    "llama_fp8": ("llama", "Llama", "bf16", dict(rope_theta=1e4, num_hidden_layers=1), 65, "fp8"),
    "llama_mxfp8": ("llama", "Llama", "bf16", dict(rope_theta=1e4), 66, dict(group_size=32, bits=8, mode="mxfp8")),
    "qwen3_moe_nvfp4": ("qwen3_moe", "Qwen3Moe", "bf16", dict(rope_theta=1e6, mlp_only_layers=[0], **MOE), 67, dict(group_size=16, bits=4, mode="nvfp4")),
    "qwen3_next": ("qwen3_next", "Qwen3Next", "bf16", dict(
        DELTA, **MOE, shared_expert_intermediate_size=32, mlp_only_layers=[0], num_hidden_layers=4, layer_types=None,
    ), 101, None),
    "qwen3_next_mlx": ("qwen3_next", "Qwen3Next", "f32", dict(
        DELTA, **MOE, linear_value_head_dim=64, shared_expert_intermediate_size=32, mlp_only_layers=[], num_hidden_layers=2, layer_types=[L, F],
        full_attention_interval=2,
    ), 102, dict(group_size=32, bits=8)),
    "qwen3_5": ("qwen3_5_text", "Qwen3_5", "bf16", dict(
        DELTA, num_hidden_layers=4, layer_types=[L, F, L, F], num_attention_heads=4, num_key_value_heads=2,
    ), 103, None),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5Moe", "bf16", dict(
        DELTA, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48, linear_num_value_heads=2,
        linear_value_head_dim=64, linear_key_head_dim=64, num_hidden_layers=4, tie_word_embeddings=True,
    ), 104, None),
    "lfm2": ("lfm2", "Lfm2", "bf16", LFM2, 105, None),
    "lfm2_mlx": ("lfm2", "Lfm2", "f32", dict(
        LFM2, block_ffn_dim_multiplier=1.0, block_multiple_of=32, conv_bias=True, num_attention_heads=1, block_dim=64, block_ff_dim=96, layer_types=None, full_attn_idxs=[1],
    ), 106, dict(group_size=32, bits=8)),
    "lfm2_moe": ("lfm2_moe", "Lfm2Moe", "bf16", dict(
        LFM2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1, norm_topk_prob=True, use_expert_bias=True,
        routed_scaling_factor=1.3, conv_L_cache=4,
    ), 107, None),
    # As in mlx-community's files: experts in MXFP4, the rest affine. mlx_lm ignores `truncate`.
    "gpt_oss_mlx": ("gpt_oss", "GptOss", "bf16", dict(GPT_OSS, rope_scaling=dict(GPT_OSS["rope_scaling"], truncate=True)), 61, dict(group_size=32, bits=4, mode="mxfp4")),
}


def text_config(model_type, name, changes):
    config = {**COMMON, **copy.deepcopy(changes), "model_type": model_type}
    if name == "MuseGlimmer":
        tied = config["tie_word_embeddings"]
        text = dict(config, model_type="muse_glimmer_text")
        config = dict(model_type=model_type, text_config=text, vision_config=dict(VISION), out_hidden_size=64, projector_hidden_size=16, tie_word_embeddings=tied)
    config["architectures"] = [class_of(name)[0].__name__]
    return config


def class_of(name):
    """The class of the text model with its output matrix, or of the whole model if no text class exists."""
    causal = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}ForConditionalGeneration")
    return causal, causal.config_class


def reference(name, config):
    causal, config_class = class_of(name)
    keys = {k: v for k, v in config.items() if k not in ("architectures", "model_type", "quantization", "quantization_config", "dtype")}
    model = causal(config_class(**copy.deepcopy(keys)))
    model.config._attn_implementation = "eager"
    model.config._experts_implementation = "eager"
    return model.float().eval()


def draw(model, seed, tied):
    """Random weights under transformers' names, scaled so that nothing saturates and every tensor affects the
    logits."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, like in sorted(model.state_dict().items()):
        if name == "lm_head.weight" and tied or "vision" in name:
            continue
        shape = tuple(like.shape)
        if "norm" in name:
            # Gemma's norms multiply by 1 + w, Muse Glimmer's except the last, and Qwen's except those of delta nets.
            of = type(model).__name__
            is_hybrid = "Qwen3Next" in of or "Qwen3_5" in of
            is_shifted = "Gemma3" in of or "Glimmer" in of and "layernorm" in name or is_hybrid and "linear_attn" not in name
            centre = 0.0 if is_shifted else 1.0
            w = centre + 0.3 * rng.standard_normal(shape)
        elif name.endswith("A_log"):
            w = np.log(rng.uniform(0.05, 4.0, shape))
        elif name.endswith("experts.gate_up_proj") and "GptOss" in type(model).__name__:
            # `[E, inputs, outputs]`. Some gates and ups exceed the range that the activation clamps to.
            w = rng.standard_normal(shape) * 3.5 / np.sqrt(shape[1])
        elif name.endswith("experts.down_proj") and "GptOss" in type(model).__name__:
            w = rng.standard_normal(shape) * 0.2 / np.sqrt(shape[1])
        elif name.endswith(("bias", "sinks")):
            w = rng.standard_normal(shape) * 0.5
        elif "embed" in name:
            # Tied embeddings are also the output matrix: small logits, so that one tolerance fits all variants.
            w = rng.standard_normal(shape) * (0.15 if tied or "Glimmer" in type(model).__name__ else 1.0)
        else:
            w = rng.standard_normal(shape) * 1.2 / np.sqrt(shape[-1])
        weights[name] = mx.array(w.astype(np.float32))
    return weights


def rounded(weights, dtype):
    return {name: w.astype(DTYPES[dtype]) for name, w in weights.items()}


def to_torch(weights):
    return {name: torch.from_numpy(np.array(w.astype(mx.float32))) for name, w in weights.items()}


def released_names(weights):
    """Released files have a matrix per expert; transformers joins them in memory. MiniMax's have other names."""
    is_minimax = any(name.endswith("mlp.e_score_correction_bias") for name in weights)
    is_lfm2 = any("feed_forward.experts" in name for name in weights)
    gate, up, down = ("w1", "w3", "w2") if is_minimax or is_lfm2 else ("gate_proj", "up_proj", "down_proj")
    out = {}
    for name, w in weights.items():
        name = name.replace("mlp.gate.moe_statics", "mlp.moe_statics")
        if is_minimax:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if any("sinks" in other or "in_proj_qkv.weight" in other for other in weights):
            out[name] = w
        elif name.endswith(".experts.gate_up_proj"):
            base, inner = name.removesuffix("gate_up_proj"), w.shape[1] // 2
            for e in range(w.shape[0]):
                out[f"{base}{e}.{gate}.weight"] = w[e, :inner]
                out[f"{base}{e}.{up}.weight"] = w[e, inner:]
        elif name.endswith(".experts.down_proj"):
            for e in range(w.shape[0]):
                out[f"{name.removesuffix('down_proj')}{e}.{down}.weight"] = w[e]
        else:
            out[name] = w
    return out


def logits_of(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].float().numpy()


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def hf_variant(folder, name, config, dtype, weights):
    model = reference(name, config)
    model.load_state_dict(to_torch(rounded(weights, dtype)), strict=False)
    model.tie_weights()
    config = dict(config, dtype={"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype])
    write_json(folder / "config.json", config)
    save(folder / "model.safetensors", released_names(rounded(weights, dtype)), {"format": "pt"})
    # transformers reads an equal model from the file.
    causal, _ = class_of(name)
    again = causal.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [lambda t: logits_of(model, t), lambda t: logits_of(again, t)]


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def mxfp4_of(w):
    """Blocks `[..., K/32, 16]` and scales `[..., K/32]` of `[..., K]`, and the weights that they represent."""
    groups = w.reshape(*w.shape[:-1], -1, 32)
    scales = np.floor(np.log2(np.abs(groups).max(-1))).astype(np.int32) + 127 - 2
    scaled = groups / np.exp2(scales - 127.0)[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1).astype(np.uint8)
    values = np.copysign(E2M1[codes], scaled) * np.exp2(scales - 127.0)[..., None]
    codes |= np.signbit(scaled).astype(np.uint8) << 3
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, scales.astype(np.uint8), values.reshape(w.shape).astype(np.float32)


def mxfp4_variant(folder, name, config, dtype, weights):
    """Experts in MXFP4 as released by OpenAI; transformers reads this file too."""
    named = rounded(weights, dtype)
    dense = {n: np.array(w.astype(mx.float32)) for n, w in named.items()}
    for n in [n for n in named if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, values = mxfp4_of(np.swapaxes(dense[n], 1, 2))
        del named[n]
        named[f"{n}_blocks"], named[f"{n}_scales"] = mx.array(blocks), mx.array(scales)
        dense[n] = np.ascontiguousarray(np.swapaxes(values, 1, 2))
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = dict(quant_method="mxfp4", modules_to_not_convert=skipped)
    write_json(folder / "config.json", dict(config, dtype="bfloat16", quantization_config=quantization))
    save(folder / "model.safetensors", named, {"format": "pt"})
    direct = reference(name, config)
    direct.load_state_dict({n: torch.from_numpy(w) for n, w in dense.items()})
    causal, _ = class_of(name)
    again = causal.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).eval()
    return [lambda t: logits_of(direct, t), lambda t: logits_of(again, t)]


def as_bf16(w):
    return np.array(mx.array(w).astype(mx.bfloat16).astype(mx.float32))


def packed_tensors(name, w, bits, groups, symmetric):
    """A matrix in `pack-quantized`, and the weights that it represents. Checked against the package
    compressed_tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    rows, columns = w.shape
    w = w.reshape(rows, groups, -1)
    half, top = 2 ** (bits - 1), 2**bits - 1
    if symmetric:
        scale = as_bf16(np.abs(w).max(-1, keepdims=True) / (half - 0.5))
        zero = np.full_like(scale, half)
    else:
        scale = as_bf16((w.max(-1, keepdims=True) - w.min(-1, keepdims=True)) / top)
        zero = np.clip(np.round(-w.min(-1, keepdims=True) / scale), 0, top)
    codes = np.clip(np.round(w / scale) + zero, 0, top)
    dense = ((codes - zero) * scale).reshape(rows, columns)
    pack = lambda c: (c.reshape(c.shape[0], -1, 32 // bits).astype(np.uint32) << np.arange(0, 32, bits, dtype=np.uint32)).sum(
        -1, dtype=np.uint32).view(np.int32)
    words, module = pack(codes.reshape(rows, columns)), name.removesuffix(".weight")
    out = {
        f"{module}.weight_packed": words,
        f"{module}.weight_scale": mx.array(scale[..., 0]).astype(mx.bfloat16),
        f"{module}.weight_shape": np.array([rows, columns], np.int64),
    }
    again = unpack_from_int32(torch.from_numpy(words), bits, torch.Size([rows, columns])).numpy()
    if not symmetric:
        zeros = np.ascontiguousarray(pack(np.ascontiguousarray(zero[..., 0].T)).T)
        out[f"{module}.weight_zero_point"] = zeros
        z = unpack_from_int32(torch.from_numpy(zeros), bits, torch.Size(zero.shape[:2]), packed_dim=0).numpy()
        again = (again.reshape(rows, groups, -1) - z[..., None]).reshape(rows, columns)
    again = (again.reshape(rows, groups, -1) * scale).reshape(rows, columns)
    assert np.array_equal(again, dense), name
    return out, dense


BLOCK = (32, 48)


def fp8_tensors(name, w, kind):
    """A matrix in E4M3 with scales, and the bf16 weights that it represents."""
    rows, columns = w.shape
    blocks = dict(tensor=(rows, columns), channel=(1, columns), block=BLOCK)[kind]
    spread = lambda s: np.repeat(np.repeat(s, blocks[0], 0)[:rows], blocks[1], 1)[:, :columns]
    padded = np.zeros([-(-n // b) * b for n, b in zip(w.shape, blocks)], np.float32)
    padded[:rows, :columns] = np.abs(w)
    tiles = padded.reshape(padded.shape[0] // blocks[0], blocks[0], -1, blocks[1])
    scale = (tiles.max((1, 3)) / 448).astype(np.float32)
    codes = torch.from_numpy(w / spread(scale)).to(torch.float8_e4m3fn)
    dense = as_bf16(codes.float().numpy() * spread(scale))
    module = name.removesuffix(".weight")
    stored = scale.reshape(1) if kind == "tensor" else scale
    part = "weight_scale_inv" if kind == "block" else "weight_scale"
    return {name: codes.view(torch.uint8).numpy(), f"{module}.{part}": stored}, dense


def compressed_variant(folder, name, config, dtype, weights, how):
    """Formats of compressed-tensors and of 8-bit floats; transformers runs on the weights that they represent."""
    named = rounded(weights, dtype)
    dense = {n: np.array(w.astype(mx.float32)) for n, w in named.items()}
    dtypes = {}
    forms = {
        "packed": dict(q=(4, 2, True), k=(4, 2, True), v=(4, 1, False), o=(4, 1, True), gate=(4, 2, False), up=(4, 2, True), down=(8, 3, True)),
        "fp8": dict(q="tensor", k="channel", v="channel", o="block", gate="block", up="block", down="tensor"),
    }[how]
    for n in [n for n in named if n.endswith("_proj.weight")]:
        form = forms[n.split(".")[-2].removesuffix("_proj")]
        parts, dense[n] = packed_tensors(n, dense[n], *form) if how == "packed" else fp8_tensors(n, dense[n], form)
        del named[n]
        named.update(parts)
        if how == "fp8":
            dtypes[n] = "F8_E4M3"
    quantization = {
        "packed": dict(quant_method="compressed-tensors", format="pack-quantized", ignore=["lm_head"], quantization_status="compressed"),
        "fp8": dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=list(BLOCK)),
    }[how]
    write_json(folder / "config.json", dict(config, dtype="bfloat16", quantization_config=quantization))
    save(folder / "model.safetensors", named, {"format": "pt"}, dtypes)
    direct = reference(name, config)
    direct.load_state_dict({n: torch.from_numpy(np.ascontiguousarray(w)) for n, w in dense.items()})
    return [lambda t: logits_of(direct, t)]


def dequantised(model):
    """The weights of a loaded mlx_lm model in f32 under the names of transformers."""
    dense = {}
    for path, module in model.named_modules():
        if "scales" in module:
            affine = module.mode == "affine"
            scales = module.scales.astype(mx.float32) if affine else module.scales
            biases = module.biases.astype(mx.float32) if affine else None
            w = mx.dequantize(module.weight, scales, biases, group_size=module.group_size, bits=module.bits, mode=module.mode)
            dense[f"{path}.weight"] = w.astype(mx.float32)
    for name, w in tree_flatten(model.parameters()):
        if not name.endswith((".scales", ".biases")):
            dense.setdefault(name, w.astype(mx.float32))
    out = {}
    dense = {name.replace("block_sparse_moe", "mlp"): w for name, w in dense.items()}
    for name, w in dense.items():
        if name.endswith("switch_mlp.gate_proj.weight"):
            up = dense[name.replace("gate_proj", "up_proj")]
            out[name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")] = mx.concatenate([w, up], axis=1)
        elif name.endswith("switch_mlp.down_proj.weight"):
            out[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = w
        elif ".experts." in name:
            # gpt-oss: rows of gate and up alternate; transformers multiplies by the transposed matrix.
            if "gate_proj" in name:
                up = dense[name.replace("gate_proj", "up_proj")]
                w = mx.stack([w, up], axis=2).reshape(w.shape[0], -1, *w.shape[2:])
            if "up_proj" not in name:
                name = name.replace("gate_proj", "gate_up_proj").replace(".bias", "_bias").removesuffix(".weight")
                out[name] = mx.contiguous(w.swapaxes(1, 2)) if w.ndim == 3 else w
        elif "switch_mlp" not in name:
            out[name] = w
    return torch_convolutions(out)


def torch_convolutions(weights):
    """mlx_lm moves a dimension of convolutions, and adds the 1 of 1 + w to the norms of Qwen's hybrids."""
    is_qwen = any("conv1d" in name for name in weights)
    out = {}
    for name, w in weights.items():
        if name.endswith(("conv.weight", "conv1d.weight")):
            w = mx.contiguous(w.swapaxes(1, 2))
        elif is_qwen and name.endswith("norm.weight") and "linear_attn" not in name:
            w = w - 1.0
        out[name] = w
    return out


def shared_mlp(weights):
    """mlx_lm splits the MLP of Granite's hybrid architecture without experts."""
    out = {}
    for name, w in weights.items():
        base, _, part = name.rpartition("mlp.")
        if part == "gate_proj.weight":
            out[f"{base}shared_mlp.input_linear.weight"] = mx.concatenate([w, weights[f"{base}mlp.up_proj.weight"]])
        elif part == "down_proj.weight":
            out[f"{base}shared_mlp.output_linear.weight"] = w
        elif part != "up_proj.weight":
            out[name] = w
    return out


def mlx_names(weights):
    """mlx_lm splits gpt-oss' experts, and multiplies by `[E, outputs, inputs]`."""
    out = {}
    for name, w in weights.items():
        if ".experts." in name and "sinks" in "".join(weights):
            kind = ".bias" if name.endswith("_bias") else ".weight"
            w = w if kind == ".bias" else w.swapaxes(1, 2)
            base = name.removesuffix("_bias")
            if base.endswith("gate_up_proj"):
                for i, side in enumerate(("gate_proj", "up_proj")):
                    out[base.replace("gate_up_proj", side) + kind] = mx.contiguous(w[:, i::2])
            else:
                out[base + kind] = mx.contiguous(w)
        else:
            out[name] = w
    return out


def mlx_variant(folder, name, config, dtype, weights, how):
    model_class, args_class = _get_classes(config)
    mlx_model = model_class(args_class.from_dict(copy.deepcopy(config)))
    named = mlx_names(released_names(weights))
    mlx_model.load_weights(list(mlx_model.sanitize(dict(named)).items()) if hasattr(mlx_model, "sanitize") else list(named.items()))
    mlx_model.set_dtype(DTYPES[dtype])
    if how.get("mode") == "mxfp4":
        eight = dict(group_size=64, bits=8)
        predicate = lambda path, module: "experts" in path or eight
        mlx_model, full = quantize_model(mlx_model, dict(config), quant_predicate=predicate, **how)
    else:
        mlx_model, full = quantize_model(mlx_model, dict(config), **{"mode": "affine", **how})
    full["quantization_config"] = full["quantization"]
    write_json(folder / "config.json", full)
    save(folder / "model.safetensors", dict(tree_flatten(mlx_model.parameters())), {"format": "mlx"})
    loaded, _ = load_model(folder)
    loaded.set_dtype(mx.float32)
    direct = reference(name, config)
    dense = dequantised(loaded)
    dense = shared_mlp(dense) if name == "GraniteMoeHybrid" else dense
    if name == "MuseGlimmer":
        dense = {n.replace("model.", "model.language_model.", 1): w for n, w in dense.items()}
    missing, unexpected = direct.load_state_dict(to_torch(dense), strict=False)
    missing = [n for n in missing if "moe_statics" not in n and "vision" not in n]
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    direct.tie_weights()
    return [lambda t: logits_of(direct, t), lambda t: np.array(loaded(mx.array([t]))[0].astype(mx.float32))]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("crates/kvant-models/tests/golden"))
    parser.add_argument("--only", default=",".join(VARIANTS))
    args = parser.parse_args()
    for variant in args.only.split(","):
        model_type, name, dtype, changes, seed, how = VARIANTS[variant]
        config = text_config(model_type, name, changes)
        folder = args.out / variant
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        torch.manual_seed(seed)
        weights = draw(reference(name, config), seed, config["tie_word_embeddings"])
        if how == "mxfp4":
            programs = mxfp4_variant(folder, name, config, dtype, weights)
        elif how in ("packed", "fp8"):
            programs = compressed_variant(folder, name, config, dtype, weights, how)
        elif how:
            programs = mlx_variant(folder, name, config, dtype, weights, how)
        else:
            programs = hf_variant(folder, name, config, dtype, weights)
        tokens = [int(t) for t in np.random.default_rng(seed + 100).integers(0, VOCAB, 45)]
        results = [program(tokens) for program in programs]
        worst = max((float(np.abs(results[0] - other).max()) for other in results[1:]), default=0.0)
        spread = float(results[0].std())
        print(f"{variant}: programs differ by {worst:.1e}; logits have a standard deviation of {spread:.2f}")
        assert worst < AGREE and 0.3 < spread < 30, variant
        save(folder / "logits.safetensors", {
            "tokens": mx.array(np.array(tokens, np.uint32)), "logits": mx.array(results[0].astype(np.float32)),
        })


if __name__ == "__main__":
    main()
