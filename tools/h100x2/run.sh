#!/usr/bin/env bash
# Runs conformance, endurance and speed of groups of GPUs on a machine with several NVIDIA GPUs, from a binary built elsewhere.
#
#   tools/h100x2/run.sh SUITE OUT [STEP..]
#
# SUITE is the test binary suite of kvant (cargo test --workspace --release --no-run prints its path). OUT gets a report,
# DATE-groups.md, and the logs. RANKS is the number of GPUs (default: 2), SUMS that of all-reduces in the step endurance
# (1000000).
#
# Steps, all of them when none is named:
#   conformance  collectives, parts of passes, refusals, on the group and on CPU groups
#   operations   the operations of a decoder on the group: every rank runs them
#   endurance    a million all-reduces of random sizes, each checked bit for bit
#   speed        all_reduce and all_gather in graphs
#
# The exit status is 1 if anything failed, or ran no test.
set -uo pipefail
if [ $# -lt 2 ]; then
    sed -n '4p' "$0" >&2
    exit 2
fi
suite=$(realpath "$1") && out=$(mkdir -p "$2" && realpath "$2") || exit 2
shift 2
steps=("$@")
[ ${#steps[@]} = 0 ] && steps=(conformance operations endurance speed)
root=$(cd "$(dirname "$0")/../.." && pwd)
report=$out/$(date -u +%F)-groups.md
failures=0
export KVANT_TEST_DEVICE=cuda KVANT_TEST_RANKS=${RANKS:-2} KVANT_ALL_REDUCES=${SUMS:-1000000} RUST_BACKTRACE=0
export PATH=/usr/local/cuda/bin:$PATH
export LD_LIBRARY_PATH=/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Tests of files look for them beside the sources.
export CARGO_MANIFEST_DIR=$root/crates/kvant

say() { printf '%s\n' "$*" | tee -a "$report"; }

# Runs tests under a name, by their filters.
tests() {
    local name=$1 start=$SECONDS log=$out/$1.log status
    shift
    (cd "$root/crates/kvant" && timeout "${LIMIT:-560}" "$suite" "$@") >"$log" 2>&1
    status=$?
    if [ "$status" = 0 ] && grep -q 'test result: .* 0 passed; 0 failed' "$log"; then
        status="0, but no test ran"
    fi
    [ "$status" = 0 ] || failures=$((failures + 1))
    say "| $name | $(grep -o 'test result: .* ignored' "$log" | tail -1) | status $status | $((SECONDS - start)) s |"
    grep -A3 '^---- ' "$log" | head -40
    grep ' FAILED$' "$log"
}

: >"$report"
say "# kvant on $KVANT_TEST_RANKS of $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | paste -sd';'), $(date -u +%F)"
say ""
nvidia-smi topo -m >"$out/topology.txt" 2>&1
for step in "${steps[@]}"; do
    case $step in
        conformance) tests groups groups:: --test-threads 4 ;;
        operations)
            for name in add_bias causal_conv delta_rule gate hadamard softcap sample moe rms_norm norm_rope kv; do
                tests "$name" "conformance::$name::" --test-threads 8
            done
            ;;
        endurance) tests endurance groups::collectives::a_million_sums --exact --ignored --nocapture ;;
        speed)
            tests speed groups::speed:: --ignored --nocapture --test-threads 1
            say ""
            grep '^|' "$out/speed.log" | tee -a "$report"
            ;;
        *)
            echo "no step $step" >&2
            exit 2
            ;;
    esac
done
exit $((failures > 0))
