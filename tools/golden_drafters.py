"""Golden data of Gemma 4's assistants: small random checkpoints, with the logits and hidden states of transformers.

    python tools/golden_drafters.py [--out crates/kvant-models/tests/golden]

Each variant is a folder with config.json, model.safetensors and drafts.safetensors. Its target is a golden checkpoint of
`golden_models.py`. After each of some prefixes of the target's golden tokens, the assistant drafts three tokens:

    lens    u32 [N]          tokens of the prefix; the next golden token is the first one that is fed
    fed     u32 [N, 3]       the tokens that are fed: the golden one, then the assistant's own
    logits  f32 [N, 3, V]    masked ones are -inf
    hidden  f32 [N, 3, H]    the hidden states that are fed back

A query sees `sliding_window` positions, its own included. Its own key does not exist, so a sliding layer sees one key
less. Transformers cuts the keys of sliding layers elsewhere, so this script passes only those that are seen.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from safefile import DTYPES, save
import mlx.core as mx

S, F = "sliding_attention", "full_attention"
DRAFTS = 3
# name: (target, dtype, changes of the assistant's text model, groups of tokens and the number that is selected, seed)
VARIANTS = {
    "assistant": ("dense", "bf16", dict(hidden_size=48, intermediate_size=64, layer_types=[S, S, S, F], num_attention_heads=4), None, 71),
    "assistant_centroids": ("ple_shared", "f32", dict(hidden_size=64, intermediate_size=32, layer_types=[S, F]), (8, 3), 72),
}


def assistant_config(target, changes, groups):
    keys = (
        "attention_bias", "attention_k_eq_v", "bos_token_id", "eos_token_id", "global_head_dim", "head_dim", "hidden_activation",
        "max_position_embeddings", "num_attention_heads", "num_global_key_value_heads", "num_key_value_heads", "pad_token_id",
        "rms_norm_eps", "rope_parameters", "sliding_window", "vocab_size",
    )
    text = {key: target[key] for key in keys} | dict(
        model_type="gemma4_text", enable_moe_block=False, hidden_size_per_layer_input=0, tie_word_embeddings=True,
        use_double_wide_mlp=False, vocab_size_per_layer_input=0, **changes,
    )
    text["num_hidden_layers"] = text["num_kv_shared_layers"] = len(text["layer_types"])
    config = dict(
        architectures=["Gemma4AssistantForCausalLM"], model_type="gemma4_assistant", backbone_hidden_size=target["hidden_size"],
        tie_word_embeddings=True, use_ordered_embeddings=groups is not None, text_config=text,
    )
    if groups:
        config |= dict(num_centroids=groups[0], centroid_intermediate_top_k=groups[1])
    return config


def draw(model, seed, dtype):
    """Random weights that are exact in the file's dtype."""
    rng, weights = np.random.default_rng(seed), {}
    for name, like in sorted(model.state_dict().items()):
        shape = tuple(like.shape)
        if name == "lm_head.weight":
            continue
        if name.endswith("token_ordering"):
            weights[name] = mx.array(rng.permutation(shape[0]).astype(np.int64))
            continue
        if name.endswith("layer_scalar"):
            w = rng.uniform(0.5, 1.2, shape)
        elif name.endswith("q_norm.weight"):
            w = rng.normal(1.0, 0.25, shape) * 1.5 * shape[0] ** -0.25
        elif name.endswith("norm.weight"):
            w = rng.normal(1.0, 0.25, shape)
        elif "embed_tokens" in name:
            w = rng.standard_normal(shape) * 3.0 * shape[-1] ** -0.5
        else:
            w = rng.standard_normal(shape) * 1.2 * shape[-1] ** -0.5
        weights[name] = mx.array(w.astype(np.float32)).astype(DTYPES[dtype])
    return weights


@torch.no_grad()
def drafts(target, assistant, config, tokens, length):
    out = target(
        torch.tensor([tokens[:length]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False,
    )
    seen = config["text_config"]["sliding_window"] - 1
    shared = {kind: tuple(out.shared_kv_states[kind]) for kind in (S, F)}
    shared[S] = tuple(states[:, :, -seen:] for states in shared[S])
    hidden, fed = out.hidden_states[-1][:, -1:], tokens[length]
    rows = []
    for _ in range(DRAFTS):
        embedded = target.get_input_embeddings()(torch.tensor([[fed]]))
        result = assistant(
            inputs_embeds=torch.cat([embedded, hidden], dim=-1), position_ids=torch.tensor([[length]]), shared_kv_states=shared,
        )
        hidden, logits = result.last_hidden_state, result.logits[0, 0].numpy().copy()
        if config["use_ordered_embeddings"]:
            logits[logits <= np.sort(logits[logits > logits.min()])[0] - 1.0 + 1e-6] = -np.inf
        rows.append((fed, logits, hidden[0, 0].numpy().copy()))
        fed = int(np.argmax(logits))
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("crates/kvant-models/tests/golden"))
    out = parser.parse_args().out
    for variant, (of, dtype, changes, groups, seed) in VARIANTS.items():
        target_config = json.loads((out / of / "config.json").read_text())
        config = assistant_config(target_config, changes, groups)
        target = Gemma4ForCausalLM.from_pretrained(out / of, dtype=torch.float32, attn_implementation="eager").eval()
        assistant = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**json.loads(json.dumps(config)))).float().eval()
        assistant.model.config._attn_implementation = assistant.config._attn_implementation = "eager"
        weights = draw(assistant, seed, dtype)
        state = {
            name: torch.from_numpy(np.array(w if w.dtype == mx.int64 else w.astype(mx.float32))) for name, w in weights.items()
        }
        missing, unexpected = assistant.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        assistant.tie_weights()
        tokens = [int(token) for token in load_file(out / of / "logits.safetensors")["tokens"]]
        lens = [3, 9, 26, len(tokens) - 1]
        rows = [drafts(target, assistant, config, tokens, length) for length in lens]
        folder = out / variant
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        save(folder / "model.safetensors", weights)
        stack = lambda i, kind: mx.array(np.array([[row[i] for row in of_len] for of_len in rows], kind))
        save(folder / "drafts.safetensors", {
            "lens": mx.array(np.array(lens, np.uint32)), "fed": stack(0, np.uint32), "logits": stack(1, np.float32), "hidden": stack(2, np.float32),
        })
        finite = np.array([row[1] for of_len in rows for row in of_len])
        finite = finite[np.isfinite(finite)]
        print(f"{variant}: logits have a standard deviation of {finite.std():.2f}, {len(finite)} are finite")


if __name__ == "__main__":
    main()
