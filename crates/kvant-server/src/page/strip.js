/* The status line of the server. */

import { metrics } from "./api.js";

const $ = id => document.getElementById(id);
let before = null;

function bytes(count) {
  const [size, unit] = count < 2 ** 30 ? [count / 2 ** 20, "MiB"] : [count / 2 ** 30, "GiB"];
  return `${size.toFixed(size < 10 ? 1 : 0)} ${unit}`;
}

async function update() {
  let values;
  try {
    values = await metrics();
  } catch {
    return; /* The server is unreachable; the next call tries again. */
  }
  if (!values) return;
  const now = { time: performance.now(), tokens: values.generation_tokens_total };
  const used = values.kv_cache_bytes ? values.kv_cache_used_bytes / values.kv_cache_bytes : 0;
  $("pages").value = used;
  $("pages-text").textContent = `${(used * 100).toFixed(1)} % of ${bytes(values.kv_cache_bytes)}`;
  const asked = values.prefix_cache_queries_total;
  $("hits").textContent = asked ? (values.prefix_cache_hits_total / asked * 100).toFixed(0) + " %" : "–";
  if (before) $("speed").textContent = ((now.tokens - before.tokens) / (now.time - before.time) * 1000).toFixed(0);
  $("running").textContent = values.num_requests_running;
  $("waiting").textContent = values.num_requests_waiting;
  before = now;
}

export function startStrip() {
  update();
  setInterval(() => { if (!document.hidden) update(); }, 1000);
}
