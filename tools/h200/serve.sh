#!/usr/bin/env bash
# Measures `kvant serve` under load, with vLLM's load generator, on a machine that needs no network.
#
#   tools/h200/serve.sh KVANT BENCH MODEL OUT [KV..]
#
# KVANT is the command. BENCH is the program vllm-rs of the wheel `vllm` (0.33.0: unzip -j vllm-*.whl vllm/vllm-rs),
# optionally compressed by xz. MODEL is a folder with a checkpoint and its tokenizer.json. For every cache type KV
# (default: bf16 and tq4) a server is started, and 1, 8, 32 and 128 clients request texts; each sends its next request
# as soon as it has the previous answer. OUT gets the results as JSON, the logs, and serve.md, a table. The exit status
# is 1 if a request failed.
#
# INPUT and OUTPUT are the tokens of a prompt and of an answer (512, 128). CLIENTS has the numbers of clients, ROUNDS
# the requests of each (3; at least 6 in total). OPTIONS are additional options of `kvant serve`. LIMIT is the maximum
# time in seconds for a number of clients (120), START the maximum time until the server is ready (400). OTHERS is a
# list of BASE_URLs of running servers, to be measured instead of `kvant serve`.
set -uo pipefail
if [ $# -lt 4 ]; then
    sed -n '4p' "$0" >&2
    exit 2
fi
kvant=$(realpath "$1") bench=$(realpath "$2") model=$(realpath "$3") out=$(mkdir -p "$4" && realpath "$4") || exit 2
shift 4
types=("$@")
[ ${#types[@]} = 0 ] && types=(bf16 tq4)
others=${OTHERS:-}
[ -n "$others" ] && read -ra types <<<"$others"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 NO_COLOR=1
if [[ $bench = *.xz ]]; then
    python3 -c 'import lzma, shutil, sys
with lzma.open(sys.argv[1]) as source, open(sys.argv[2], "wb") as target:
    shutil.copyfileobj(source, target)' "$bench" "$out/../vllm-rs.$$" || exit 2
    bench=$(realpath "$out/../vllm-rs.$$")
    chmod +x "$bench"
    trap 'rm -f "$bench"' EXIT
fi
failures=0
{
    echo "| cache | clients | requests | tokens/s | tokens/s of each | first token, median and p99, ms | between tokens, median and p99, ms |"
    echo "|---|---|---|---|---|---|---|"
} | tee "$out/serve.md"

# The URL of a ready server, from its log.
ready() {
    for _ in $(seq $((10 * ${START:-400}))); do
        url=$(sed -n 's/.*listening on \(http:[^ ]*\).*/\1/p' "$1" | head -1)
        [ -n "$url" ] && return 0
        kill -0 "$2" 2>/dev/null || return 1
        sleep 0.1
    done
    return 1
}

for kv in "${types[@]}"; do
    server=
    if [ -n "$others" ]; then
        url=$kv name=$(tr -c 'a-z0-9\n' - <<<"$kv")
    else
        name=$kv log=$out/$kv.log started=$(date +%s.%N)
        # shellcheck disable=SC2086 # a list of options
        "$kvant" serve "$model" --port 0 --kv "$kv" --max-sequences 128 --name "$model" ${OPTIONS:-} 2>"$log" &
        server=$!
        if ! ready "$log" "$server"; then
            echo "the server is not ready:" && tail -5 "$log"
            failures=1
            kill "$server" 2>/dev/null && wait "$server"
            continue
        fi
        echo "$kv: ready after $(python3 -c "import time; print(f'{time.time() - $started:.1f}')") s" >>"$out/notes.txt"
    fi
    for clients in ${CLIENTS:-1 8 32 128}; do
        requests=$((clients * ${ROUNDS:-3}))
        [ $requests -lt 6 ] && requests=6
        # The warm-up has one request per client, so that the first measured ones meet a busy server.
        timeout "${LIMIT:-120}" "$bench" bench serve --backend openai --base-url "$url" --model "$model" --tokenizer "$model" \
            --dataset-name random --random-input-len "${INPUT:-512}" --random-output-len "${OUTPUT:-128}" --ignore-eos \
            --prompt-token-ids --num-prompts "$requests" --max-concurrency "$clients" --num-warmups "$clients" \
            --no-steady-state --disable-tqdm --temperature 0 --seed "$clients" \
            --save-result --result-dir "$out" --result-filename "$name-$clients.json" >"$out/$name-$clients.log" 2>&1
        python3 - "$out/$name-$clients.json" "$kv" "$clients" "$requests" <<'PY' | tee -a "$out/serve.md"
import json, sys
path, kv, clients, requests = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
try:
    got = json.load(open(path))
except OSError:
    print(f"| {kv} | {clients} | failed: no result |")
    sys.exit(1)
if got["completed"] != requests:
    print(f"| {kv} | {clients} | failed: {got['completed']} of {requests} |")
    sys.exit(1)
rate = got["output_throughput"]
each = 1000 / got["mean_tpot_ms"] if got["mean_tpot_ms"] else 0
times = [f"{got['median_' + what + '_ms']:.1f}, {got['p99_' + what + '_ms']:.1f}" for what in ("ttft", "itl")]
print(f"| {kv} | {clients} | {requests} | {rate:.0f} | {each:.1f} | {times[0]} | {times[1]} |")
PY
        [ "${PIPESTATUS[0]}" = 0 ] || failures=1
    done
    if [ -n "$server" ]; then
        kill "$server" && wait "$server"
    fi
done
cat "$out/notes.txt" 2>/dev/null
exit $failures
