#!/usr/bin/env bash
# Checks and measures models that are divided among two GPUs, next to one GPU in the same run.
#
#   tools/h100x2/bench_tp.sh KVANT OUT [TESTS]
#
# KVANT is the command, built elsewhere. OUT gets a file for each model and number of GPUs, and verdict.txt. TESTS is the test
# binary `gpu` of kvant-models, whose golden models then run on a group of GPUs. GPUS="1 2" are the numbers of GPUs, MODELS="31b 26b"
# the models of tools/h200/make_affine.py, which are made with random weights in DIR (OUT/models, 32 GB), and KV="bf16" the cache
# types. SECONDS_EACH=1 is the time for each case. Requires two GPUs of 80 GB and PyTorch; ten minutes.
set -uo pipefail
if [ $# -lt 2 ] || [ ! -x "$1" ]; then
    sed -n '4p' "$0" >&2
    exit 2
fi
kvant=$(realpath "$1")
tests=${3:+$(realpath "$3")}
mkdir -p "$2" && out=$(realpath "$2") || exit 2
models=${DIR:-$out/models}
root=$(cd "$(dirname "$0")/../.." && pwd)
export LD_LIBRARY_PATH=/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
failures=0

say() { printf '%s\n' "$*" | tee -a "$out/verdict.txt"; }
check() {
    local name=$1
    shift
    if "$@" >"$out/$name.txt" 2>&1; then
        say "$name: ok"
    else
        say "$name: FAILED: $(tail -3 "$out/$name.txt")"
        failures=$((failures + 1))
    fi
}
divided() { (cd "$root/crates/kvant-models" && "$tests" --test-threads 1 --nocapture divided); }
# The most probable tokens on each number of GPUs, with exact caches.
texts() {
    local gpus text of=()
    for gpus in ${GPUS:-1 2}; do
        "$kvant" generate --device cuda --tensor-parallel "$gpus" --activations f32 --kv f32 --temperature 0 --max-tokens 64 --json \
            >"$out/text-$gpus.json" || return 1
        of+=("$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["text"])' "$out/text-$gpus.json")")
    done
    printf '%s\n' "${of[@]}"
    for text in "${of[@]}"; do
        [ "$text" = "${of[0]}" ] || return 1
    done
}
measure() {
    local model=$1 kv=$2 gpus=$3
    "$kvant" bench model --model "$models/$model" --device cuda --tensor-parallel "$gpus" --kv "$kv" --seconds "${SECONDS_EACH:-1}" \
        --prompts 2048 --decode 2048,32768 --sequences 1,8,64 --context 2048
}

: >"$out/verdict.txt"
"$kvant" devices | tee "$out/devices.txt"
[ -z "$tests" ] || check golden divided
check texts texts
for model in ${MODELS:-31b 26b}; do
    [ -e "$models/$model/config.json" ] || check "make-$model" python3 "$root/tools/h200/make_affine.py" "$models" "$model"
    for kv in ${KV:-bf16}; do
        for gpus in ${GPUS:-1 2}; do
            check "$model-$kv-$gpus" measure "$model" "$kv" "$gpus"
            cat "$out/$model-$kv-$gpus.txt"
        done
    done
done
exit $((failures > 0))
