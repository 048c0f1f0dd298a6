#!/usr/bin/env bash
# Everything that is to be known about kvant on a machine with an H200 and CUDA 13, from binaries built elsewhere.
#
#   tools/h200/run.sh BINARIES OUT [STEP..]
#
# BINARIES is a folder with the test binaries of kvant under their names, without the hash (cargo test --no-run says where
# they are): conformance_*, hazards, golden, cache, speed, and gpu of kvant-models. OUT gets a report, DATE-h200.md, and the
# logs. Steps, all of them when none is named: conformance, sanitizer, speed, peers. The last needs a python3 with PyTorch, and
# FlashInfer if it is to be in the table (flashinfer-python 0.5.3 with apache-tvm-ffi and nvidia-cudnn-frontend from wheels
# beside it, on PYTHONPATH).
set -uo pipefail
binaries=$(realpath "$1") out=$(mkdir -p "$2" && realpath "$2")
shift 2
steps=${*:-conformance sanitizer speed peers}
here=$(cd "$(dirname "$0")" && pwd)
report=$out/$(date -u +%F)-h200.md
export KVANT_TEST_DEVICE=cuda RUST_BACKTRACE=0
export LD_LIBRARY_PATH=/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Tests of files look for them beside the sources.
export CARGO_MANIFEST_DIR=$here/../../crates/kvant

say() { printf '%s\n' "$*" | tee -a "$report"; }
wanted() { [[ " $steps " == *" $1 "* ]]; }

: >"$report"
say "# kvant on $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader), $(date -u +%F)"
say ""

crate_of() { [ "$1" = gpu ] && echo "$here/../../crates/kvant-models" || echo "$here/../../crates/kvant"; }

# Runs a binary with a limit of seconds; prints its result line and the names of what failed.
tests() {
    local name=$1 limit=$2
    shift 2
    local log=$out/$name.log start=$SECONDS
    (cd "$(crate_of "$name")" && timeout "$limit" "$binaries/$name" "$@") >"$log" 2>&1
    local status=$?
    say "| $name | $(grep -o 'test result: .* ignored' "$log" | tail -1) | status $status | $((SECONDS - start)) s |"
    grep -A2 '^---- ' "$log" | head -40
    grep ' FAILED$' "$log"
}

if wanted conformance; then
    say "## Conformance"
    say ""
    say "| test | result | | |"
    say "|---|---|---|---|"
    for name in conformance_hadamard conformance_rest conformance_kv conformance_norm_rope conformance_linear conformance_codec \
        conformance_attend hazards golden cache; do
        [ -x "$binaries/$name" ] && tests "$name" 400 --test-threads 12
    done
    # Whole models: kvant-models' tests/gpu.rs.
    [ -x "$binaries/gpu" ] && tests gpu 150
    say ""
fi

if wanted sanitizer; then
    say "## compute-sanitizer"
    say ""
    say "| tool | test | errors | |"
    say "|---|---|---|---|"
    # One small test per kernel: name of the binary, filter.
    while read -r name filter; do
        [ -x "$binaries/$name" ] || continue
        for tool in memcheck racecheck; do
            log=$out/$tool-$name-$filter.log
            (cd "$(crate_of "$name")" && timeout 300 compute-sanitizer --error-exitcode 99 --tool "$tool" \
                "$binaries/$name" "$filter" --exact --test-threads 1) >"$log" 2>&1
            status=$?
            say "| $tool | $name $filter | $(grep 'SUMMARY' "$log" | tail -1 | tr -d '=' | xargs) | status $status |"
        done
    done <<'LIST'
conformance_hadamard in_place_and_back
conformance_kv a_wrapped_ring_is_read_in_order
conformance_kv odd_vectors_stay_by_themselves
conformance_norm_rope in_place
conformance_norm_rope fused_equals_its_parts
conformance_rest rms_norm_in_place
conformance_rest gate_in_place
conformance_rest samples_of_odd_rows
conformance_rest samples_of_a_large_vocabulary
conformance_rest softcap
conformance_rest argmax_of_what_is_not_finite
conformance_rest moe_route
conformance_rest moe_combine
conformance_linear odd_offsets
conformance_linear ids_out_of_range
conformance_linear no_inputs
conformance_linear many_rows_of_halves
conformance_linear an_expert_is_a_matrix
conformance_linear embed
cache forks_hold_the_same
conformance_attend forced_splits
conformance_attend fresh_keys_and_values
conformance_attend not_finite_keys_and_values
gpu the_shipped_model_matches_the_cpu
LIST
    say ""
fi

if wanted speed && [ -x "$binaries/speed" ]; then
    say "## Speed"
    say ""
    "$binaries/speed" --ignored --nocapture --test-threads 1 2>"$out/speed.log" | grep '^|' | tee "$out/speed.md" | tee -a "$report"
    say ""
fi

if wanted peers; then
    say "## Decode attention beside other kernels"
    say ""
    table=$out/speed.md
    [ -f "$table" ] || table=
    python3 "$here/peers.py" $table 2>"$out/peers.log" | tee -a "$report"
fi
