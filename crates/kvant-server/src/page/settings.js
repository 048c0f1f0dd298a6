/* The settings dialog. The browser stores all settings except the API key. */

import { element } from "./markdown.js";

const STORED = "kvant.settings";
const FIELDS = ["mode", "temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "system", "theme"];
const MAX_PRESETS = 50;
const PRESETS = [
  { name: "None", text: "" },
  { name: "Brief", text: "Answer in one or two short sentences." },
  { name: "Programmer", text: "You are an experienced programmer. Answer with short code that works, in a code block with its language, and explain it in a few sentences." },
  { name: "Explain simply", text: "Explain to somebody who knows nothing of the subject: plain words, short sentences, one example." },
  { name: "Proofreader", text: "Correct spelling and grammar of the user's text. Answer with the corrected text, then list the changes." },
  { name: "Translate to English", text: "Translate the user's text to English. Answer with the translation alone." },
];

const $ = id => document.getElementById(id);
/* The user's presets. */
let own = [];

function load() {
  let stored = {};
  try {
    stored = JSON.parse(localStorage.getItem(STORED)) ?? {};
  } catch { /* Nothing is stored, or it is invalid. */ }
  for (const id of FIELDS) if (typeof stored[id] === "string") $(id).value = stored[id];
  if (!$("mode").value) $("mode").value = "chat";
  if (!$("theme").value) $("theme").value = "";
  const isPreset = preset => typeof preset?.name === "string" && typeof preset.text === "string";
  own = Array.isArray(stored.presets) ? stored.presets.filter(isPreset).slice(0, MAX_PRESETS) : [];
}

function save() {
  const values = Object.fromEntries(FIELDS.map(id => [id, $(id).value]));
  try {
    localStorage.setItem(STORED, JSON.stringify({ ...values, presets: own }));
  } catch { /* Not stored, but in effect. */ }
}

/* Selects the preset whose text equals the system prompt. */
function showPresets() {
  const all = [...PRESETS, ...own];
  const custom = element("option", { value: "", textContent: "other", disabled: true });
  $("preset").replaceChildren(...all.map((preset, i) => element("option", { value: i, textContent: preset.name })), custom);
  const index = all.findIndex(preset => preset.text === $("system").value);
  $("preset").value = index < 0 ? "" : index;
  $("preset-delete").disabled = index < PRESETS.length;
}

function savePreset() {
  const name = $("preset-name").value.trim();
  if (!name) return $("preset-name").focus();
  own = [...own.filter(preset => preset.name !== name), { name, text: $("system").value }].slice(-MAX_PRESETS);
  $("preset-name").value = "";
}

/* Prepares the dialog; calls `changed` after every change, and `newKey` when the API key changes. */
export function start(changed, newKey) {
  const update = () => {
    if ($("theme").value) document.documentElement.dataset.theme = $("theme").value;
    else delete document.documentElement.dataset.theme;
    showPresets();
    changed();
  };
  const store = () => { save(); update(); };
  load();
  update();
  for (const id of FIELDS) $(id).addEventListener("change", store);
  $("preset").addEventListener("change", () => {
    $("system").value = [...PRESETS, ...own][$("preset").value].text;
    store();
  });
  $("preset-save").addEventListener("click", () => { savePreset(); store(); });
  $("preset-delete").addEventListener("click", () => { own.splice($("preset").value - PRESETS.length, 1); store(); });
  $("key").addEventListener("change", () => newKey($("key").value));
  $("open-settings").addEventListener("click", () => $("settings").showModal());
  /* Enter closes the dialog, also in a multi-line field, and applies a typed key. */
  $("settings").addEventListener("close", () => { store(); $("input").focus(); });
}

/* Shows whether the server requires an API key. */
export function askKey(needed) {
  $("key-note").hidden = !needed;
  if (needed && !$("settings").open) $("settings").showModal();
  if (needed) $("key").focus();
}

export function isText() {
  return $("mode").value === "text";
}

/* Hides the conversation mode if the model has no chat template. */
export function allowChat(allowed) {
  $("mode").querySelector("[value=chat]").disabled = !allowed;
  if (!allowed) $("mode").value = "text";
}

export function system() {
  return $("system").value.trim();
}

/* The fields of a request. Empty fields are omitted, so the server's defaults apply. `attempt` counts answers to one message. */
export function sampling(attempt) {
  const number = id => $(id).value === "" ? undefined : Number($(id).value);
  const seed = number("seed");
  return {
    temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"), max_tokens: number("max_tokens"),
    /* An unchanged seed would repeat the answer. */
    seed: seed === undefined ? undefined : seed + attempt, stop: $("stop").value || undefined,
  };
}
