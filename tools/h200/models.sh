#!/usr/bin/env bash
# Measures models of released sizes with random weights, for docs/performance.md: a step of one sequence, steps of many
# sequences, prompts; and transformers' prompts of E4B in the same run. Compares logits of E4B with transformers'.
#
#   tools/h200/models.sh KVANT OUT [MODELS]
#
# KVANT is the command, built elsewhere. OUT gets a file for each model and cache type, which is also printed. MODELS
# (OUT/models) is a folder for the checkpoints, 50 GB; existing ones are not made again. Requires a GPU of 80 GB,
# PyTorch and transformers.
set -euo pipefail
if [ $# -lt 2 ] || [ ! -x "$1" ]; then
    sed -n '5p' "$0" >&2
    exit 2
fi
kvant=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
models=${3:-$out/models}
here=$(cd "$(dirname "$0")" && pwd)
export LD_LIBRARY_PATH=/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

make() {
    local name=$1
    shift
    [ -e "$models/$name/config.json" ] || python3 "$@" "$models" "$name" 2>&1 | tee "$out/make-$name.txt"
}
# Runs twice: the first run compiles.
measure() {
    local name=$1 kv=$2 of=$out/$1-$2.txt
    shift 2
    "$kvant" bench model --model "$models/$name" --kv "$kv" --seconds 0.1 "$@" >"$of"
    "$kvant" bench model --model "$models/$name" --kv "$kv" "$@" | tee "$of"
}

make 31b "$here/make_affine.py"
make 26b "$here/make_affine.py"
make e4b "$here/make_hf.py"
measure 31b bf16 --prompts 6752 --decode 128,32768
measure 31b tq4 --decode 32768 --sequences 2,4,8,16,32,64,128
measure 26b bf16 --prompts 6752 --decode 128,32768 --sequences 8,32,64,128
measure 26b tq4 --sequences 2,4,8,16,32,64,128
measure e4b bf16 --prompts 6752 --decode 128,32768 --sequences 2,8,16,32,64,128
measure e4b tq4 --sequences 8,32,64,128
compare() {
    local activations=$1 kv=$2 logits=$models/logits-e4b-$1-$2.safetensors
    "$kvant" logits --model "$models/e4b" --tokens-file "$models/e4b/tokens.txt" --device cuda --activations "$activations" --kv "$kv" --out "$logits"
    python3 "$here/compare.py" "$models/e4b/ref.pt" "$logits" | tee "$out/logits-e4b-$activations-$kv.txt"
}
compare f32 f32
compare bf16 bf16
compare bf16 tq8
compare bf16 tq4
