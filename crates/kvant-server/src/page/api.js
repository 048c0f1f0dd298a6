/* Requests to the server. */

let key = "";

export function useKey(text) {
  key = text.trim();
}

function headers() {
  return key ? { authorization: "Bearer " + key } : {};
}

/* The models of the server, or null if it rejects the API key. */
export async function models() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.status === 401) return null;
  if (!response.ok) throw new Error(await problem(response));
  return (await response.json()).data;
}

/* Metrics by name, summed over models; or null. Metrics with a label other than the model's are skipped. */
export async function metrics() {
  const response = await fetch("metrics", { headers: headers() });
  if (!response.ok) return null;
  const values = {};
  for (const line of (await response.text()).split("\n")) {
    const match = /^(?:vllm:|kvant:)(\w+)\{([^}]*)\} (\S+)$/.exec(line);
    if (match && !match[2].includes(",")) values[match[1]] = (values[match[1]] ?? 0) + Number(match[3]);
  }
  return values;
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

/* Posts a request, and calls `use` with the JSON of each event of the response. */
export async function stream(path, body, signal, use) {
  const response = await fetch(path, {
    method: "POST", signal, body: JSON.stringify(body), headers: { "content-type": "application/json", ...headers() },
  });
  if (!response.ok) throw new Error(await problem(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server closed the connection before the answer ended");
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      use(event);
    }
  }
}
