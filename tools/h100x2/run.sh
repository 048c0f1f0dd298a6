#!/usr/bin/env bash
# Runs conformance, endurance, sanitizers and speed of groups of GPUs on a machine with several NVIDIA GPUs, from binaries built
# elsewhere.
#
#   tools/h100x2/run.sh BINARIES OUT [STEP..]
#
# BINARIES is a folder with the test binaries suite of kvant and gpu of kvant-models (cargo test --release --no-run prints their
# paths), the program speed of kvant-bench, and the command kvant. OUT gets a report, DATE-groups.md, and the logs. RANKS is the number of GPUs (default: 2), SUMS
# that of all-reduces in the step endurance (1000000). TOOLS names the sanitizers (memcheck racecheck). BUDGET is the time of all
# steps in seconds (600): a step that has no time left fails. BUILD is the source folder that the binaries were built from: it
# becomes a link to this checkout, unless it exists, because some tests read files there.
#
# Steps, all of them when none is named:
#   conformance  collectives, parts of passes, refusals
#   operations   the operations of a decoder on the group: every rank runs them
#   golden       golden models on the group
#   endurance    a million all-reduces of random sizes, compared bit for bit on every rank
#   sanitizer    collectives under compute-sanitizer
#   speed        all_reduce, all_gather and the norm of a sum in graphs
#   bench        bench_tp.sh without the golden models; it takes its variables and needs PyTorch
#
# The exit status is 1 if anything failed, or ran no test.
set -uo pipefail
if [ $# -lt 2 ] || [ ! -d "$1" ]; then
    sed -n '5p' "$0" >&2
    exit 2
fi
binaries=$(realpath "$1") && out=$(mkdir -p "$2" && realpath "$2") || exit 2
shift 2
steps=("$@")
[ ${#steps[@]} = 0 ] && steps=(conformance operations golden endurance sanitizer speed bench)
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
report=$out/$(date -u +%F)-groups.md
failures=0
ranks=${RANKS:-2}
end=$((SECONDS + ${BUDGET:-600}))
export KVANT_TEST_DEVICE=cuda KVANT_TEST_RANKS=$ranks KVANT_ALL_REDUCES=${SUMS:-1000000} RUST_BACKTRACE=0
export PATH=/usr/local/cuda/bin:$PATH
export LD_LIBRARY_PATH=/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Tests of files look for them beside the sources.
export CARGO_MANIFEST_DIR=$root/crates/kvant
if [ -n "${BUILD:-}" ] && [ ! -e "$BUILD" ]; then
    mkdir -p "$(dirname "$BUILD")" && ln -s "$root" "$BUILD" || exit 2
fi

say() { printf '%s\n' "$*" | tee -a "$report"; }

# Runs a command in a crate within the time that is left; its output becomes the log NAME. Adds a line to the report.
run() {
    local name=$1 crate=$2 start=$SECONDS log=$out/$1.log left=$((end - SECONDS)) status
    shift 2
    if [ "$left" -le 0 ]; then
        failures=$((failures + 1))
        say "| $name | | not run: no time left | |"
        return
    fi
    (cd "$root/crates/$crate" && timeout "$left" "$@") >"$log" 2>&1
    status=$?
    if [ "$status" = 0 ] && [ "$name" != bench ] && [ "$name" != speed ] && ! grep -q 'test result: ok. [1-9]' "$log"; then
        status="0, but no test ran"
    fi
    [ "$status" = 0 ] || failures=$((failures + 1))
    say "| $name | $(grep -o 'test result: .* ignored' "$log" | tail -1) | status $status | $((SECONDS - start)) s |"
    grep -A3 '^---- ' "$log" | head -40
    grep ' FAILED$' "$log"
}
tests() {
    local name=$1
    shift
    run "$name" kvant "$binaries/suite" "$@"
}

: >"$report"
say "# kvant on $ranks of $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | paste -sd';'), $(date -u +%F)"
say ""
say "| step | result | | |"
say "|---|---|---|---|"
nvidia-smi topo -m >"$out/topology.txt" 2>&1
for step in "${steps[@]}"; do
    case $step in
        conformance) tests groups groups:: --test-threads 4 ;;
        operations)
            for name in add_bias gate hadamard softcap sample moe rms_norm norm_rope kv; do
                tests "$name" "conformance::$name::" --test-threads 8
            done
            ;;
        golden) run golden kvant-models "$binaries/gpu" divided --test-threads 1 --nocapture ;;
        endurance) tests endurance groups::collectives::a_million_sums --exact --ignored --nocapture ;;
        sanitizer)
            for tool in ${TOOLS:-memcheck racecheck}; do
                for name in collectives::all_reduce_in_place collectives::all_gather summed_norms::recorded_norms_of_sums merge_attention::merge_attention; do
                    run "$tool-${name#*::}" kvant compute-sanitizer --error-exitcode 99 --tool "$tool" \
                        "$binaries/suite" "groups::$name" --exact --test-threads 1
                done
            done
            ;;
        speed)
            run speed kvant "$binaries/speed" all-reduces all-gathers summed-norms --ranks "$ranks"
            say ""
            grep '^|' "$out/speed.log" | tee -a "$report"
            say ""
            ;;
        bench)
            export GPUS=${GPUS:-1 $ranks}
            run bench kvant "$here/bench_tp.sh" "$binaries/kvant" "$out/bench"
            cat "$out/bench.log"
            ;;
        *)
            echo "no step $step" >&2
            exit 2
            ;;
    esac
done
say ""
say "$failures failures."
exit $((failures > 0))
