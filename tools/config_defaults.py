"""How transformers interprets configurations: the defaults of each class, and models of configurations that lack keys.

    python tools/config_defaults.py [--check] [--only qwen2,llama]

Writes these files, or with --check compares them:

- crates/kvant-models/src/families/defaults.json: for each model_type the keys with a default, and aliases of keys.
- crates/kvant-models/tests/golden/configs/TYPE.json: configurations with the model that transformers makes of each:
sizes, windows, scales and frequencies. "base" has every key; each case omits keys, or changes their values. Its model is
an index into a list of differences from the base's model. Models are created without memory for their weights.

A new family needs a line in CLASSES.
"""

import argparse
import copy
import dataclasses
import inspect
import json
import re
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel

ROOT = Path(__file__).resolve().parent.parent / "crates/kvant-models"
DEFAULTS, GOLDEN = ROOT / "src/families/defaults.json", ROOT / "tests/golden/configs"
S, F = "sliding_attention", "full_attention"

# model_type: keys that the class reads without declaring them.
CLASSES = {
    "llama": {},
    "mistral": {},
    "ministral3": {},
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "qwen3_moe": {"head_dim": None},
    "gpt_oss": {},
    "gemma3_text": {"rope_local_base_freq": 1e4},
    "gemma4_text": {"global_head_dim": 512},
    "gemma4_unified_text": {"global_head_dim": 512},
    "smollm3": {"head_dim": None},
    "seed_oss": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "granite": {"head_dim": None},
    "olmo2": {"head_dim": None},
    "olmo3": {"head_dim": None},
    "exaone4": {"head_dim": None},
    "phi3": {},
    "granitemoehybrid": {"head_dim": None},
    "qwen2_moe": {"head_dim": None},
    "glm4_moe": {"head_dim": None},
    "ernie4_5_moe": {"head_dim": None},
    "hunyuan_v1_moe": {},
    "minimax_m2": {},
    "muse_glimmer_text": {},
    "qwen3_next": {"partial_rotary_factor": 0.25, "full_attention_interval": 4},
    "qwen3_5_text": {"partial_rotary_factor": 0.25, "full_attention_interval": 4},
    "qwen3_5_moe_text": {"partial_rotary_factor": 0.25, "full_attention_interval": 4},
    "lfm2": {"head_dim": None, "tie_embedding": None, "block_ff_dim": None},
    "lfm2_moe": {"head_dim": None, "tie_embedding": None},
}
# Wrappers, with the type of their text model.
WRAPPERS = {
    "mistral3": "mistral", "gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text",
    "muse_glimmer": "muse_glimmer_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
# Without these keys, kvant does not support the model.
BASES = {
    "granitemoehybrid": dict(layer_types=["attention"] * 7, num_local_experts=0, position_embedding_type="rope"),
    "lfm2_moe": dict(layer_types=["conv", "conv", F, "conv", "conv", F, "conv"]),
}
# These do not change a model's computation, or they belong to the tokenizer.
IGNORED = {
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache", "attention_dropout", "pretraining_tp",
    "output_router_logits", "router_aux_loss_coef", "rope_parameters", "time_step_limit",
}  # fmt: skip
# Values for keys of configurations: different from all defaults, and valid with every default of the other keys.
VALUES = dict(
    vocab_size=96, hidden_size=5120, intermediate_size=160, num_hidden_layers=7, num_attention_heads=64, num_key_value_heads=2,
    head_dim=128, max_position_embeddings=512, rms_norm_eps=3e-4, sliding_window=48, tie_word_embeddings=False,
    query_pre_attn_scalar=100, final_logit_softcapping=20.0, hidden_size_per_layer_input=32, vocab_size_per_layer_input=80,
    global_head_dim=64, moe_intermediate_size=192, num_experts=16, num_local_experts=16, num_experts_per_tok=3,
    norm_topk_prob=True, decoder_sparse_step=2, rope_local_base_freq=3e4, rope_theta=7e5, max_window_layers=3,
)  # fmt: skip


FIXED = {"pad_token_id": 0}


def class_of(model_type):
    return CONFIG_MAPPING[model_type]


def declared(model_type):
    """The keys that a class adds to the common ones of all configurations, with their defaults."""
    cls = class_of(model_type)
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)} - {"tie_word_embeddings"}
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    keys = {name: value for name, value in fields.items() if name not in common | IGNORED and value is not dataclasses.MISSING}
    return {**keys, **CLASSES[model_type]}


def rope_defaults(model_type):
    """`rope_theta`, and `rope_parameters` of a configuration without them, except parts that depend on other keys."""
    cls = class_of(model_type)
    plain = cls().rope_parameters
    if any(isinstance(value, dict) for value in plain.values()):
        moved = cls(rope_theta=12345.0).rope_parameters[F]["rope_theta"] == 12345.0
        return {"rope_theta": plain[F]["rope_theta"]} if moved else {"rope_parameters": plain}
    theta = cls(rope_parameters={"rope_type": "default"}).rope_parameters["rope_theta"]
    parameters = dict(plain)
    if cls(rope_theta=12345.0).rope_parameters["rope_theta"] == 12345.0:
        del parameters["rope_theta"]
    if cls(partial_rotary_factor=0.5).rope_parameters.get("partial_rotary_factor") == 0.5:
        parameters.pop("partial_rotary_factor", None)
    return {"rope_theta": theta, **({} if parameters == {"rope_type": "default"} else {"rope_parameters": parameters})}


def defaults():
    out = {}
    for model_type in CLASSES:
        keys = {name: value for name, value in declared(model_type).items() if value is not None}
        out[model_type] = {"keys": {**keys, **rope_defaults(model_type)}}
        if class_of(model_type).attribute_map:
            out[model_type]["aliases"] = dict(class_of(model_type).attribute_map)
    for wrapper in WRAPPERS:
        out[wrapper] = {"keys": {"tie_word_embeddings": getattr(class_of(wrapper)(), "tie_word_embeddings", False)}}
    return out


def base(model_type):
    """A configuration with every key."""
    keys = {name: value for name, value in declared(model_type).items() if value is not None}
    for name in ("head_dim", "final_logit_softcapping", "num_key_value_heads"):
        if name in declared(model_type):
            keys[name] = VALUES[name]
    # Padding must be in the small vocabulary.
    return {
        **{name: VALUES.get(name, value) for name, value in keys.items()}, **FIXED, **BASES.get(model_type, {}), "model_type": model_type,
    }  # fmt: skip


# Objects of scalings.
LINEAR = dict(rope_type="linear", factor=4.0)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
LONG = dict(rope_type="longrope", factor=4.0, original_max_position_embeddings=64, short_factor=[1.0] * 64, long_factor=[2.0] * 64)


def without(scaling, *keys):
    return {key: value for key, value in scaling.items() if key not in keys}


# Scalings of all layers, by name.
FLAT = {
    "default": dict(rope_type="default"),
    "default_theta": dict(rope_type="default", rope_theta=2e4),
    "linear": LINEAR,
    "linear_theta": dict(LINEAR, rope_theta=2e4),
    "linear_old_name": dict(type="linear", factor=4.0),
    "linear_without_factor": dict(rope_type="linear"),
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "llama3": LLAMA3,
    "llama3_without_original": without(LLAMA3, "original_max_position_embeddings"),
    "llama3_without_low": without(LLAMA3, "low_freq_factor"),
    "yarn": YARN,
    "yarn_theta": dict(YARN, rope_theta=2e4),
    "yarn_without_original": without(YARN, "original_max_position_embeddings"),
    "yarn_without_factor": without(YARN, "factor"),
    "yarn_attention_factor": dict(YARN, attention_factor=1.5),
    "yarn_mscale": dict(YARN, mscale=1.0, mscale_all_dim=0.5),
    "yarn_mscale_alone": dict(YARN, mscale=0.7),
    "yarn_zero_mscale": dict(YARN, mscale=0.0, mscale_all_dim=1.0),
    "yarn_betas": dict(YARN, beta_fast=16.0, beta_slow=2.0),
    "yarn_truncate_false": dict(YARN, truncate=False),
    "yarn_truncate_null": dict(YARN, truncate=None),
    "yarn_small_factor": dict(YARN, factor=0.5),
    "longrope": LONG,
    "proportional": dict(rope_type="proportional", factor=4.0),
    "partial": dict(rope_type="default", partial_rotary_factor=0.5),
    "partial_yarn": dict(YARN, partial_rotary_factor=0.5),
    "partial_whole": dict(LINEAR, partial_rotary_factor=1.0),
    "unknown": dict(rope_type="unheard_of", factor=4.0),
}


def rope_cases(model_type):
    """Changes of the base, by name."""
    extra = {"llama_4_scaling_beta": 0.1} if model_type == "ministral3" else {}
    flat = {name: {**scaling, **extra} for name, scaling in FLAT.items()}
    if model_type == "phi3":
        # Its class checks that each pair has a factor.
        every = base(model_type)
        pairs = every["hidden_size"] // every["num_attention_heads"] // 2
        flat["longrope"] |= {name: flat["longrope"][name][:pairs] for name in ("short_factor", "long_factor")}
    cases = {}
    for name, scaling in flat.items():
        cases[f"scaling/{name}"] = dict(rope_scaling=scaling)
        cases[f"parameters/{name}"] = dict(rope_parameters=scaling)
        if declared(model_type).get("rope_local_base_freq") or model_type.startswith("gemma4"):
            cases[f"full/{name}"] = dict(rope_parameters={F: scaling, S: dict(rope_type="default", rope_theta=3e4)})
            cases[f"both_kinds/{name}"] = dict(rope_parameters={F: dict(scaling), S: dict(scaling)})
    yarn, linear, other = flat["yarn"], flat["linear_theta"], dict(flat["linear_theta"])
    cases |= {
        "neither": dict(),
        "theta": dict(rope_theta=2e4),
        "null": dict(rope_scaling=None, rope_parameters=None),
        "empty_scaling": dict(rope_scaling={}),
        "empty_parameters": dict(rope_parameters={}),
        "empty_scaling_and_parameters": dict(rope_scaling={}, rope_parameters=linear),
        "null_scaling_and_parameters": dict(rope_scaling=None, rope_parameters=linear),
        "scaling_and_empty_parameters": dict(rope_scaling=yarn, rope_parameters={}),
        "scaling_and_parameters": dict(rope_scaling=yarn, rope_parameters=linear),
        "scaling_and_theta": dict(rope_scaling=yarn, rope_theta=2e4),
        "parameters_and_theta": dict(rope_parameters=linear, rope_theta=5e4),
        "parameters_without_theta": dict(rope_parameters=flat["linear"], rope_theta=5e4),
        "partial": dict(partial_rotary_factor=0.5),
        "partial_and_scaling": dict(partial_rotary_factor=0.5, rope_scaling=yarn),
        "partial_whole": dict(partial_rotary_factor=1.0),
        "outer_original": dict(rope_scaling=yarn, original_max_position_embeddings=128),
        "outer_original_alone": dict(rope_scaling=flat["yarn_without_original"], original_max_position_embeddings=128),
        "outer_original_of_llama3": dict(rope_parameters=flat["llama3"], original_max_position_embeddings=128),
        "outer_original_without_scaling": dict(original_max_position_embeddings=128),
    }
    if declared(model_type).get("rope_local_base_freq") or model_type.startswith("gemma4"):
        cases |= {
            "only_full": dict(rope_parameters={F: linear}),
            "only_sliding": dict(rope_parameters={S: linear}),
            "null_sliding": dict(rope_parameters={F: linear, S: None}),
            "full_without_theta": dict(rope_parameters={F: flat["linear"]}, rope_theta=5e4),
            "kinds_and_scaling": dict(rope_parameters={F: linear, S: other}, rope_scaling=without(yarn, "rope_theta")),
            "kinds_and_theta_beside": dict(rope_parameters={F: linear, S: other, "rope_theta": 5e4}),
            "kinds_and_truncate_beside": dict(rope_parameters={F: yarn, S: other, "truncate": False}),
            "kinds_and_outer_original": dict(
                rope_parameters={F: flat["yarn_without_original"], S: other}, original_max_position_embeddings=128),
            "attn_softcap": dict(attn_logit_softcapping=5.0),
        }
    if model_type == "ministral3":
        cases["without_beta"] = dict(rope_scaling=FLAT["yarn"])
        cases["beta_without_original"] = dict(rope_parameters=dict(rope_type="default", llama_4_scaling_beta=0.1))
    return {f"rope/{name}": change for name, change in cases.items()}


def key_cases(model_type):
    """The base without each key, and without all keys that have a default."""
    every = base(model_type)
    cases = {f"without/{name}": {name: ...} for name in every if name not in ("model_type", *FIXED)}
    cases["without/all"] = {name: ... for name in every if name not in ("model_type", "num_hidden_layers", *FIXED)}
    cases |= {f"null/{name}": {name: None} for name in every if name not in ("model_type", "hidden_act", "hidden_activation", *FIXED)}
    for alias, name in class_of(model_type).attribute_map.items():
        written = name if alias in every else alias
        # At most the number of experts.
        cases[f"alias/{written}"] = {alias: ..., name: ..., written: 3 if name == "moe_topk" else 24}
    return cases


def changed(config, change):
    config = {**copy.deepcopy(config), **copy.deepcopy(change)}
    return {name: value for name, value in config.items() if value is not ...}


def rounded(values):
    return [float(f"{value:.7g}") for value in values]


def rotary(model, config):
    """Frequencies and the factor of cosines and sines of each layer kind."""
    embedding = first(model, "rotary_emb", "pos_emb")
    if embedding is None:
        return {"": dict(frequencies=[], factor=1.0)}
    rope = type(embedding)(config)
    if not isinstance(rope.rope_type, dict):
        return {"": dict(frequencies=rounded(rope.inv_freq.tolist()), factor=rope.attention_scaling)}
    return {
        kind: dict(
            frequencies=rounded(getattr(rope, f"{kind}_inv_freq").tolist()), factor=getattr(rope, f"{kind}_attention_scaling"))
        for kind in sorted(rope.rope_type)
    }


def layer_facts(layer, index, config, ropes):
    facts = mixer_facts(layer, index, config, ropes)
    mlp = first(layer, "mlp", "feed_forward", "shared_mlp")
    experts = getattr(mlp, "experts", None)
    is_dense = experts is None or hasattr(mlp, "gate_proj")
    dense = mlp if is_dense else first(mlp, "shared_expert", "shared_experts", "shared_mlp")
    if dense is not None:
        both = first(dense, "gate_up_proj", "input_linear")
        facts["width"] = first(dense, "gate_proj", "w1").out_features if both is None else both.out_features // 2
    if experts is not None:
        router = first(mlp, "gate", "router")
        facts["experts"] = dict(count=experts.num_experts, top_k=router.top_k, width=config_width(config))
    return facts


def mixer_facts(layer, index, config, ropes):
    """The first half of a layer: attention, or one with a state."""
    net, conv = getattr(layer, "linear_attn", None), getattr(layer, "conv", None)
    if net is not None:
        return dict(delta=[net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim, net.conv_kernel_size])
    if conv is not None:
        return dict(conv=[conv.in_proj.in_features, conv.conv_kernel_size, conv.conv.bias is not None])
    attention = layer.self_attn
    kinds = getattr(config, "layer_types", None) if "layer_types" in declared(config.model_type) else None
    window = getattr(config, "sliding_window", None)
    if kinds:
        if window is None and S in kinds:
            raise ValueError("a sliding layer without a window")
        window = window if kinds[index] == S else None
    elif "sliding_window" not in inspect.getsource(type(attention)):
        window = None
    rope = ropes.get("") or ropes[kinds[index]]
    head_dim = attention.head_dim
    if not rotates(attention, config, index):
        rope = dict(frequencies=[0.0] * (head_dim // 2), factor=1.0)
    # Frequencies of the coordinates that do not rotate.
    rope["frequencies"] = rope["frequencies"] + [0.0] * (head_dim // 2 - len(rope["frequencies"]))
    facts = dict(heads=config.num_attention_heads, head_dim=head_dim, window=window, rope=rope)
    facts["scale"] = attention.scaling * rope["factor"] ** 2 * getattr(attention, "qk_scale_factor", 1.0)
    if hasattr(attention, "qkv_proj"):
        facts["kv_heads"] = attention.qkv_proj.out_features // head_dim // 2 - config.num_attention_heads // 2
    elif getattr(attention, "k_proj", None) is not None:
        facts["kv_heads"] = attention.k_proj.out_features // head_dim
    return facts


def first(module, *names):
    """The first of these parts that a module has."""
    return next((part for name in names if (part := getattr(module, name, None)) is not None), None)


def rotates(attention, config, index):
    """Whether a layer has a rotary embedding."""
    if config.model_type == "muse_glimmer_text":
        return bool(config.layer_rope_theta[index])
    if config.model_type == "exaone4":
        return attention.sliding_window is None or attention.is_sliding
    return bool(getattr(attention, "use_rope", True))


def config_width(config):
    return getattr(config, "moe_intermediate_size", None) or config.intermediate_size


def facts(config_json):
    """The properties of the model that transformers makes of a configuration."""
    config_json = copy.deepcopy(config_json)
    config = class_of(config_json.pop("model_type"))(**config_json)
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModel.from_config(text)
    ropes = rotary(model, text)
    layers = [layer_facts(layer, index, text, ropes) for index, layer in enumerate(model.layers)]
    distinct = []
    for layer in layers:
        if layer not in distinct:
            distinct.append(layer)
    norm = first(model, "norm", "embedding_norm")
    out = dict(
        hidden=model.embed_tokens.weight.shape[1], vocab=model.embed_tokens.weight.shape[0], positions=text.max_position_embeddings,
        eps=getattr(norm, "variance_epsilon", None) or norm.eps, tied=getattr(config, "tie_word_embeddings", False),
        softcap=getattr(text, "final_logit_softcapping", None), kinds=distinct, layers=[distinct.index(layer) for layer in layers],
    )  # fmt: skip
    beta = (text.rope_parameters or {}).get("llama_4_scaling_beta")
    if beta:
        period = text.rope_parameters["original_max_position_embeddings"]
        out["query_scaling"] = dict(beta=beta, period=int(period), positions=text.max_position_embeddings)
    elif text.model_type == "ministral3":
        raise ValueError("no llama_4_scaling_beta")
    return out


def judged(config):
    try:
        return facts(config)
    except Exception as error:  # Whatever goes wrong: transformers does not run this configuration.
        # Messages show sets of keys in any order.
        message = re.sub(r"\{([^{}]*)\}", lambda match: "{" + ", ".join(sorted(match[1].split(", "))) + "}", str(error))
        return {"fails": f"{type(error).__name__}: {message}"[:120]}


def wrapper_cases(wrapper, model_type):
    text = without(base(model_type), "model_type", "tie_word_embeddings")
    sparse = {name: text[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers") if name in text}
    sparse["hidden_size"] = 4096
    if model_type == "gemma3_text":
        sparse |= dict(rope_scaling=dict(rope_type="linear", factor=8.0), sliding_window=1024)
    whole = lambda text, **more: {"model_type": wrapper, "text_config": text, **more}
    return {
        "wrapper/full": whole(text, tie_word_embeddings=False),
        "wrapper/sparse": whole(sparse),
        "wrapper/sparse_with_type": whole(sparse | {"model_type": model_type}),
        "wrapper/empty": whole({}),
        "wrapper/untied": whole(sparse, tie_word_embeddings=False),
    }


def golden(model_type):
    every = base(model_type)
    reference = judged(every)
    assert "fails" not in reference, (model_type, reference)
    cases = {}
    for name, change in {**key_cases(model_type), **rope_cases(model_type)}.items():
        start = without(every, "rope_theta", "rope_local_base_freq", "rope_parameters") if name.startswith("rope/") else every
        cases[name] = changed(start, change)
    for wrapper in [wrapper for wrapper, inner in WRAPPERS.items() if inner == model_type]:
        cases |= {f"{name}/{wrapper}": config for name, config in wrapper_cases(wrapper, model_type).items()}
    out = {}
    for name, config in cases.items():
        model = judged(config)
        # Transformers rejects null for most keys. Its meaning is unspecified there.
        if name.startswith("null/") and "fails" in model:
            continue
        if "fails" not in model:
            model = {key: value for key, value in model.items() if value != reference.get(key)}
        out[name] = (differing(config, every), model)
        print(model_type, name, model.get("fails") or list(model), flush=True)
    return every, reference, out


def differing(config, every):
    """A configuration as a change of the base: changed values, and a list of the missing keys."""
    if "text_config" in config:
        return dict(whole=config)
    change = {key: value for key, value in config.items() if key not in every or every[key] != value}
    return dict(change=change, lacks=[key for key in every if key not in config])


def text_of(value):
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"


def compact(every, reference, cases):
    """One line for each case, and for each model and list of frequencies, which cases share."""
    tables, models = {}, {}

    def shared(value):
        if isinstance(value, dict):
            return {key: tables.setdefault(tuple(v), len(tables)) if key == "frequencies" else shared(v) for key, v in value.items()}
        return [shared(v) for v in value] if isinstance(value, list) else value

    line = lambda value: json.dumps(value, sort_keys=True)
    base_model = line(shared(reference))
    lines = [
        f"  {line(name)}: {line([config, models.setdefault(line(shared(model)), len(models))])}"
        for name, (config, model) in cases.items()
    ]
    rows = lambda values: ",\n".join(f"  {value}" for value in values)
    return (
        f'{{"base": {{"config": {line(every)},\n "model": {base_model}}},\n "cases": {{\n' + ",\n".join(lines)
        + f'}},\n "models": [\n{rows(models)}],\n "frequencies": [\n{rows(map(line, tables))}]}}\n'
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default=",".join(CLASSES))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    keep(DEFAULTS, text_of(defaults()), args.check)
    for model_type in args.only.split(","):
        keep(GOLDEN / f"{model_type}.json", compact(*golden(model_type)), args.check)


def keep(path, text, check):
    if check:
        assert path.read_text() == text, f"{path} differs from what transformers {transformers.__version__} says"
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
