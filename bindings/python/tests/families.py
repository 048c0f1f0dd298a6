"""Tiny random models of the families that the tests run."""

import functools
import os

import torch
import transformers

#: Where the models are: "cpu", or "cuda" to test a GPU.
DEVICE = os.environ.get("KVANT_TEST_DEVICE", "cpu")

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
#: Positions that a layer with a window sees.
WINDOW = 24
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

#: The class of a family, and values of its config.
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "phi3": ("Phi3", {}),
    "smollm3": ("SmolLM3", {}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": WINDOW, "layer_types": _MIXED, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64},
    ),
    "gemma3": ("Gemma3", {"sliding_window": WINDOW, "layer_types": _MIXED, "query_pre_attn_scalar": 64}),
    "gemma4": (
        "Gemma4",
        {
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] + _MIXED[:2],
            "sliding_window": WINDOW,
            "global_head_dim": 128,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {"sliding_window": WINDOW, "layer_types": _MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmo3": ("Olmo3", {"sliding_window": WINDOW, "layer_types": _MIXED}),
    "qwen3_5": (
        "Qwen3_5",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}


@functools.cache
def model(family: str, dtype: torch.dtype = torch.float32):
    """A model of a family with eager attention."""
    name, values = FAMILIES[family]
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config(**{**_SIZES, **values})
    torch.manual_seed(7)
    built = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager", dtype=dtype).eval()
    # Sinks and biases begin as zeros.
    with torch.no_grad():
        for parameter_name, parameter in built.named_parameters():
            if "sinks" in parameter_name or "bias" in parameter_name:
                parameter.normal_(std=0.5)
            if family == "gemma4" and "q_norm" in parameter_name:
                # Its scale is 1: without training, scores would be eight times those of the others.
                parameter.mul_(0.125)
    return built.to(DEVICE)
