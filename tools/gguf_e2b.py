"""Writes a GGUF file of Gemma 4 E2B's size with random blocks, to measure speed without a download.

    pip install gguf numpy
    python3 tools/gguf_e2b.py OUT.gguf q4_0|q4_k_m

The mixture of types equals llama.cpp's quantisation: the embedding, which is also the output matrix, in Q6_K; in q4_k_m
the values and down projections of half of the layers in Q6_K. The file has no tokenizer: measuring programs use random
tokens.
"""

import sys

import gguf
import numpy as np
from golden_gguf import HALVES

Type = gguf.GGMLQuantizationType
LAYERS, SHARED, HIDDEN, WIDTH, VOCABULARY, PER_LAYER = 35, 20, 1536, 6144, 262144, 256
HEADS, SLIDING_HEAD, FULL_HEAD, PERIOD = 8, 256, 512, 5


def blocks(rng, kind, rows, columns):
    """Random blocks with scales that keep activations near 1. Repeats a megabyte: speed does not depend on the
    values."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    count = rows * columns // elements
    made = rng.integers(0, 256, (min(count, 4096), size), dtype=np.uint8)
    for at in HALVES[kind]:
        scale = {Type.Q4_0: 0.2, Type.Q4_K: 0.004, Type.Q6_K: 0.001}[kind] * columns**-0.5 * rng.normal(size=len(made))
        made[:, at : at + 2] = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    return np.resize(made, (rows, columns // elements * size))


def more_bits(layer):
    """The layers to which llama.cpp gives Q6_K in a Q4_K_M file."""
    return layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2


def main():
    if len(sys.argv) != 3 or sys.argv[2] not in ("q4_0", "q4_k_m"):
        raise SystemExit(__doc__)
    common = Type.Q4_0 if sys.argv[2] == "q4_0" else Type.Q4_K
    writer = gguf.GGUFWriter(sys.argv[1], "gemma4")
    rng = np.random.default_rng(20)
    full = [layer % PERIOD == PERIOD - 1 for layer in range(LAYERS)]
    widths = [WIDTH * (1 if layer < LAYERS - SHARED else 2) for layer in range(LAYERS)]
    writer.add_block_count(LAYERS)
    writer.add_context_length(131072)
    writer.add_embedding_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_shared_kv_layers(SHARED)
    writer.add_embedding_length_per_layer_input(PER_LAYER)
    writer.add_key_length(FULL_HEAD)
    writer.add_value_length(FULL_HEAD)
    writer.add_key_length_swa(SLIDING_HEAD)
    writer.add_value_length_swa(SLIDING_HEAD)
    writer.add_rope_dimension_count(FULL_HEAD)
    writer.add_rope_dimension_count_swa(SLIDING_HEAD)
    writer.add_sliding_window_pattern([not is_full for is_full in full])
    writer.add_sliding_window(512)
    writer.add_final_logit_softcapping(30.0)
    writer.add_feed_forward_length(widths)

    def matrix(name, rows, columns, kind=common):
        writer.add_tensor(f"{name}.weight", blocks(rng, kind, rows, columns), raw_dtype=kind)

    def norm(name, size, value=1.0):
        writer.add_tensor(f"{name}.weight", np.full(size, value, np.float32))

    matrix("token_embd", VOCABULARY, HIDDEN, Type.Q6_K)
    matrix("per_layer_token_embd", VOCABULARY, LAYERS * PER_LAYER)
    matrix("per_layer_model_proj", LAYERS * PER_LAYER, HIDDEN)
    norm("per_layer_proj_norm", PER_LAYER)
    norm("output_norm", HIDDEN)
    rotated = FULL_HEAD // 8
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (FULL_HEAD // 2 - rotated), np.float32))
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        head = FULL_HEAD if full[layer] else SLIDING_HEAD
        larger = Type.Q6_K if common == Type.Q4_K and more_bits(layer) else common
        matrix(f"{name}attn_q", HEADS * head, HIDDEN)
        matrix(f"{name}attn_k", head, HIDDEN)
        matrix(f"{name}attn_v", head, HIDDEN, larger)
        matrix(f"{name}attn_output", HIDDEN, HEADS * head)
        matrix(f"{name}ffn_gate", widths[layer], HIDDEN)
        matrix(f"{name}ffn_up", widths[layer], HIDDEN)
        matrix(f"{name}ffn_down", HIDDEN, widths[layer], larger)
        matrix(f"{name}inp_gate", PER_LAYER, HIDDEN)
        matrix(f"{name}proj", HIDDEN, PER_LAYER)
        for part in ("attn_q_norm", "attn_k_norm"):
            norm(name + part, head)
        for part in ("attn_norm", "ffn_norm"):
            norm(name + part, HIDDEN)
        for part in ("post_attention_norm", "post_ffw_norm", "post_norm"):
            norm(name + part, HIDDEN, 0.15)
        norm(f"{name}layer_output_scale", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()


if __name__ == "__main__":
    main()
