#!/usr/bin/env bash
# Runs conformance, sanitizers and speed of kvant on a machine with an H200 and CUDA 13, from binaries built elsewhere.
#
#   tools/h200/run.sh BINARIES OUT BUILD [STEP|MODULE..]
#
# BINARIES is a folder with two test binaries, named without the hash (cargo test --no-run prints their paths): suite of
# kvant, gpu of kvant-models; and with the program speed of kvant-bench. OUT gets a report, DATE-h200.md, and the logs. BUILD is the source folder that the
# binaries were built from: some tests read files there, so it becomes a link to this checkout, unless it exists as
# another folder.
#
# Steps (default: all): conformance, sanitizer, speed, peers. The first two run the named modules of the suite
# (conformance::attend, hazards, ...) and gpu (default: all). The last needs a python3 with PyTorch, and FlashInfer for
# its columns of the table (flashinfer-python 0.5.3, apache-tvm-ffi and nvidia-cudnn-frontend from wheels, on
# PYTHONPATH).
#
# Run only one instance per device: one test allocates all of its memory.
#
# LIMIT is the maximum time in seconds for a module (400), or for one test under a sanitizer; TOOLS names the sanitizers
# (memcheck racecheck). The exit status is 1 if anything failed, was missing, or ran no test.
set -uo pipefail
if [ $# -lt 3 ]; then
    sed -n '4p' "$0" >&2
    exit 2
fi
binaries=$(realpath "$1") && out=$(mkdir -p "$2" && realpath "$2") || exit 2
build=$3
shift 3
limit=${LIMIT:-400}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
steps=() names=()
for word in "$@"; do
    case $word in
        conformance | sanitizer | speed | peers) steps+=("$word") ;;
        *) names+=("$word") ;;
    esac
done
if [ ${#steps[@]} = 0 ]; then
    steps=(conformance sanitizer)
    [ ${#names[@]} = 0 ] && steps+=(speed peers)
fi
report=$out/$(date -u +%F)-h200.md
failures=0
export KVANT_TEST_DEVICE=cuda RUST_BACKTRACE=0
export PATH=/usr/local/cuda/bin:$PATH
export LD_LIBRARY_PATH=/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Tests of files look for them next to the sources.
export CARGO_MANIFEST_DIR=$root/crates/kvant
if [ "$build" != "$root" ]; then
    if [ -e "$build" ] && [ ! -L "$build" ]; then
        echo "$build is there, and no link: golden data are read from it, not from $root" >&2
    else
        mkdir -p "$(dirname "$build")" && ln -sfn "$root" "$build" || exit 2
    fi
fi

say() { printf '%s\n' "$*" | tee -a "$report"; }
failed() { failures=$((failures + 1)); }
step() { [[ " ${steps[*]} " == *" $1 "* ]]; }
wanted() { [ ${#names[@]} = 0 ] || [[ " ${names[*]} " == *" $1 "* ]]; }

: >"$report"
say "# kvant on $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader), $(date -u +%F)"
say ""

crate_of() { [ "$1" = gpu ] && echo "$root/crates/kvant-models" || echo "$root/crates/kvant"; }
binary_of() {
    case $1 in
        gpu | speed) echo "$1" ;;
        *) echo suite ;;
    esac
}

# Whether the binary of a module exists; if not, a line of the table reports it.
is_there() {
    [ -x "$binaries/$(binary_of "$1")" ] && return
    say "| $1 | missing | | |"
    failed
    return 1
}

# Runs a module of the suite, or gpu; prints its result line and the names of failed tests.
tests() {
    local name=$1 start=$SECONDS status filter=()
    shift
    [ "$name" = gpu ] || filter=("$name::")
    local log=$out/${name//::/-}.log
    (cd "$(crate_of "$name")" && timeout "$limit" "$binaries/$(binary_of "$name")" "${filter[@]}" "$@") >"$log" 2>&1
    status=$?
    if [ "$status" = 0 ] && grep -q 'test result: .* 0 passed; 0 failed' "$log"; then
        status="0, but no test ran"
    fi
    [ "$status" = 0 ] || failed
    say "| $name | $(grep -o 'test result: .* ignored' "$log" | tail -1) | status $status | $((SECONDS - start)) s |"
    grep -A2 '^---- ' "$log" | head -40
    grep ' FAILED$' "$log"
}

# Runs one test under a tool of compute-sanitizer. Reports of racecheck about cuBLASLt's own kernels (nvjet_*) are
# ignored here; racecheck's own filter for them ends with an internal error.
sanitize() {
    local tool=$1 name=$2 filter=$3 status ran races
    local log=$out/$tool-${name//::/-}-${filter//::/-}.log test=$filter
    [ "$name" = gpu ] || test=$name::$filter
    (cd "$(crate_of "$name")" && timeout "$limit" compute-sanitizer --error-exitcode 99 --tool "$tool" \
        "$binaries/$(binary_of "$name")" "$test" --exact --test-threads 1) >"$log" 2>&1
    status=$?
    ran=$(sed -n 's/^test result: .* \([0-9]*\) passed; \([0-9]*\) failed.*/\1 \2/p' "$log" | tail -1)
    if [ "$status" = 0 ] && { [ -z "$ran" ] || [ "$ran" = "0 0" ]; }; then
        status="0, but no test ran"
    fi
    races=$(grep 'Race reported' "$log")
    if [ "$tool $status $ran" = "racecheck 99 1 0" ] && [ -n "$races" ] && ! grep -qv nvjet <<<"$races"; then
        status=0
    fi
    [ "$status" = 0 ] || failed
    say "| $tool | $name $filter | $(grep 'SUMMARY' "$log" | tail -1 | tr -d '=' | xargs) | status $status |"
}

if step conformance; then
    say "## Conformance"
    say ""
    say "| test | result | | |"
    say "|---|---|---|---|"
    # The last: whole models, kvant-models' tests/gpu.rs.
    for name in conformance::{add,add_bias,causal_conv,collectives,delta_rule,hadamard,gate,moe,rms_norm,sample,softcap,kv,norm_rope,linear,codec,attend} \
        hazards arguments golden pages gpu; do
        wanted "$name" && is_there "$name" && tests "$name" --test-threads 12
    done
    say ""
fi

if step sanitizer; then
    say "## compute-sanitizer"
    say ""
    say "| tool | test | errors | |"
    say "|---|---|---|---|"
    # One small test per kernel: module, test. Conformance has cached the kernels that decode_kernels and similar tests
    # compile.
    missing=
    while read -r name filter; do
        wanted "$name" || continue
        binary=$(binary_of "$name")
        if [ ! -x "$binaries/$binary" ]; then
            [[ $missing == *" $binary "* ]] || is_there "$name"
            missing+=" $binary "
            continue
        fi
        for tool in ${TOOLS:-memcheck racecheck}; do
            sanitize "$tool" "$name" "$filter"
        done
    done <<'LIST'
conformance::hadamard in_place_and_back
conformance::kv a_wrapped_ring_is_read_in_order
conformance::kv odd_vectors_do_not_affect_others
conformance::kv many_rows_are_alike
conformance::norm_rope in_place
conformance::norm_rope fused_equals_its_parts
conformance::rms_norm rms_norm_in_place
conformance::rms_norm rms_norm_of_extreme_rows
conformance::rms_norm rms_norm_of_an_extreme_residual_and_result
conformance::add odd_offsets
conformance::add_bias add_bias
conformance::causal_conv parts_of_a_prompt_give_its_bits
conformance::collectives all_reduce_of_one_device
conformance::delta_rule odd_offsets
conformance::delta_rule parts_of_a_prompt_give_its_results
conformance::gate gate_in_place
conformance::sample samples_of_odd_rows
conformance::sample samples_of_a_large_vocabulary
conformance::softcap softcap
conformance::sample argmax_of_logits_that_are_not_finite
conformance::moe moe_route
conformance::moe moe_route_of_equals_and_nan
conformance::moe moe_route_of_small_sums
conformance::moe moe_route_of_equal_scores_and_nan
conformance::moe moe_combine
conformance::linear block_formats
conformance::linear odd_offsets
conformance::linear ids_out_of_range
conformance::linear no_inputs
conformance::linear many_rows
conformance::linear many_rows_of_halves
conformance::linear one_row_in_equal_parts
conformance::linear an_expert_is_a_matrix
conformance::linear embed
pages histories::random_histories_match_naive_attention
pages means::a_step_with_gaps_opens_pages_in_order
pages means::attention::windows
pages means::many_rows_are_stored_as_the_reference_stores_them
conformance::attend forced_splits
conformance::attend sinks
conformance::attend not_finite_keys_and_values
conformance::attend little_shared_memory
conformance::attend scores_of_minus_infinity
conformance::attend short_contexts
conformance::attend decode_kernels
conformance::attend decode_with_values_that_are_not_finite
conformance::attend prefill_kernels
conformance::attend prefill_with_values_that_are_not_finite
hazards places::positions_near_the_end
hazards states::one_result_in_every_company
gpu the_shipped_model_matches_the_cpu
LIST
    say ""
fi

if step speed; then
    say "## Speed"
    say ""
    if is_there speed; then
        "$binaries/speed" --device cuda 2>"$out/speed.log" | tee "$out/speed.md" | tee -a "$report" || failed
    fi
    say ""
fi

if step peers; then
    say "## Decode attention beside other kernels"
    say ""
    table=()
    [ -f "$out/speed.md" ] && table=("$out/speed.md")
    python3 "$here/peers.py" ${table[@]+"${table[@]}"} 2>"$out/peers.log" | tee -a "$report" || failed
fi

say ""
say "$failures failures."
[ "$failures" = 0 ]
