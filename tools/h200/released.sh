#!/usr/bin/env bash
# Compares released models on a GPU with golden data of transformers (tools/released/golden), on a machine without network.
#
#   tools/h200/released.sh KVANT DIR OUT [MODEL..]
#
# KVANT is the command, built elsewhere. DIR has the models' GGUF files of tools/released_models.py, whole or split into
# files FILE.part00, FILE.part01, ... (split -b 55M -d FILE FILE.part), which are joined in OUT. MODEL is the name of a
# file of golden data (default: all). For each model: logits in f32 and in bf16, and greedy answers. OUT gets
# verdict.txt, which is also printed. The exit status is 1 if something differs. DEVICE selects another device than
# cuda. Requires only Python 3.
set -uo pipefail
if [ $# -lt 3 ] || [ ! -x "$1" ] || [ ! -d "$2" ]; then
    sed -n '4p' "$0" >&2
    exit 2
fi
kvant=$(realpath "$1") models=$(realpath "$2")
mkdir -p "$3" && out=$(realpath "$3") || exit 2
shift 3
tools=$(cd "$(dirname "$0")/.." && pwd)
golden=$tools/released/golden
export LD_LIBRARY_PATH=/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
[ $# -gt 0 ] || set -- $(cd "$golden" && printf '%s\n' *.json | sed 's/\.json$//')
failures=0

compare() { python3 "$tools/released/compare.py" "$@"; }
say() { printf '%s\n' "$*" | tee -a "$out/verdict.txt"; }
# verdict NAME COMMAND..: the last line that the command prints.
verdict() {
    local name=$1 text
    shift
    if text=$("$@" 2>&1); then
        say "$name: $(tail -1 <<<"$text")"
    else
        say "$name: FAILED: $(tail -3 <<<"$text")"
        failures=$((failures + 1))
    fi
}
# The path of a complete file with this checksum.
whole() {
    local file=$1 sum=$2 path=$models/$1
    if [ ! -e "$path" ]; then
        path=$out/$file
        [ -e "$path" ] || cat "$models/$file".part* >"$path" || return 1
    fi
    echo "$sum  $path" | sha256sum --check --quiet >&2 || return 1
    echo "$path"
}
logits() { # GOLDEN MODEL ACTIVATIONS COMPARISON..
    local data=$1 model=$2 type=$3 file=$out/logits.safetensors
    shift 3
    compare tokens "$data" >"$out/tokens.txt" &&
        "$kvant" logits --model "$model" --tokens-file "$out/tokens.txt" --device "${DEVICE:-cuda}" --activations "$type" --kv "$type" --out "$file" >&2 &&
        compare "$1" "$data" "$file" "$2"
    local status=$?
    rm -f "$file"
    return $status
}
answer() { # GOLDEN MODEL ACTIVATIONS NUMBER BOUND
    local options
    mapfile -d '' -t options < <(compare prompt "$1" "$4")
    "$kvant" generate --model "$2" --device "${DEVICE:-cuda}" --activations "$3" --kv "$3" --temperature 0 --max-tokens 64 --json "${options[@]}" \
        >"$out/answer.json" && compare answer "$1" "$4" "$out/answer.json" "$5"
}

: >"$out/verdict.txt"
for name in "$@"; do
    data=$golden/$name.json
    read -r file sum < <(compare file "$data")
    if ! model=$(whole "$file" "$sum"); then
        say "$name: FAILED: $file is not in $models, or not whole"
        failures=$((failures + 1))
        continue
    fi
    verdict "$name, f32" logits "$data" "$model" f32 logits 5e-3
    verdict "$name, bf16" logits "$data" "$model" bf16 rounded 0.9
    for number in 0 1 2; do
        verdict "$name, answer $number, f32" answer "$data" "$model" f32 "$number" 5e-3
        verdict "$name, answer $number, bf16" answer "$data" "$model" bf16 "$number" 0.5
    done
    [ "$model" = "$models/$file" ] || rm -f "$model"
done
say "$failures failures"
[ $failures = 0 ]
