#!/usr/bin/env bash
# Two `kvant serve` behind NVIDIA Dynamo's KV-aware router on one host, without etcd and NATS:
#
#   deploy/dynamo.sh DIR [NAME]      a model's directory, and its name in requests
#   DIVIDED=1 deploy/dynamo.sh ...   one server computes prompts, the other continues them
#
# It needs these packages; the dependencies of ai-dynamo are gigabytes that are not needed:
#
#   pip install ai-dynamo-runtime==1.6.1 msgspec packaging prometheus-client pyyaml pyzmq zstandard
#   pip install --no-deps ai-dynamo==1.6.1
#
# Then: curl localhost:8000/v1/chat/completions -H 'content-type: application/json' -d '{"model": "NAME", ...}'
set -euo pipefail
model=$1 name=${2:-model}
discovery=$(mktemp -d)
export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=$discovery DYN_EVENT_PLANE=zmq DYN_REQUEST_PLANE=tcp
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$discovery"' EXIT

for worker in 1 2; do
    "${KVANT:-kvant}" serve "$model" --name "$name" --port "808$worker" --grpc "5005$worker" \
        --kv-events "tcp://127.0.0.1:555$worker" --kv-transfer "127.0.0.1:560$worker" --kv-peer 127.0.0.1 &
done
roles=(agg agg)
[ -z "${DIVIDED:-}" ] || roles=(prefill decode)
for worker in 1 2; do
    # The frontend reads tokenizer and template in the model's directory; --custom-jinja-template replaces the template.
    python3 -m dynamo.vllm.sidecar --grpc-endpoint "127.0.0.1:5005$worker" \
        --disaggregation-mode "${roles[$((worker - 1))]}" ${TEMPLATE:+--custom-jinja-template "$TEMPLATE"} &
done
python3 -m dynamo.frontend --router-mode kv --migration-limit 3 &
wait -n
