/* The page: the open conversation, and the list of earlier ones. */

import * as api from "./api.js";
import * as history from "./history.js";
import { element, render } from "./markdown.js";
import * as settings from "./settings.js";
import { startStrip } from "./strip.js";

const $ = id => document.getElementById(id);
let models = [];
let chat = history.create("chat");
/* The answer in progress: its abort controller, and the promise of its end. */
let running = null;
/* The screen width at which page.css lays the list of conversations over the page. */
const narrow = matchMedia("(max-width: 899px)");

const EXAMPLES = {
  chat: [
    "Write a Python function that finds the longest word of a text.",
    "Explain what a KV cache does, in three sentences.",
    "Compare a list and a set in a small table.",
    "Suggest names for a sailing boat.",
  ],
  text: [
    "# Vec\n\nA contiguous growable array type",
    "The easiest way to read a file is",
    "# Struct HashMap\n\n",
    "Once upon a time, there was",
  ],
};

function model() {
  return models.find(one => one.id === $("models").value) ?? models[0];
}

/* --- View --- */

function button(text, label, act) {
  const node = element("button", { type: "button", className: "plain", textContent: text });
  if (label) node.setAttribute("aria-label", label);
  node.addEventListener("click", () => act(node));
  return node;
}

function say(text) {
  $("said").textContent = text;
}

async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    /* Without TLS, browsers give pages from another machine no clipboard API; this still works. */
    const field = element("textarea", { value: text, className: "hidden-text" });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    from.focus();
  }
  /* Screen readers read the visible label first. */
  const label = from.getAttribute("aria-label");
  from.textContent = "Copied";
  from.setAttribute("aria-label", "Copied");
  say("Copied");
  setTimeout(() => {
    from.textContent = "Copy";
    from.setAttribute("aria-label", label);
  }, 1200);
}

/* Appends a message to the page. Returns a function that renders it again. */
function show(message) {
  const isUser = message.role === "user";
  const title = element("h2", { textContent: isUser ? (chat.mode === "text" ? "Text" : "You") : message.model ?? "Answer" });
  const thoughts = element("details", { className: "thoughts", hidden: true },
    element("summary", { textContent: "Thoughts" }), element("div"));
  const isPlain = isUser || chat.mode === "text";
  const body = element("div", { className: "body " + (isPlain ? "plain" : "markdown") });
  const error = element("p", { className: "error", hidden: true });
  const actions = element("div", { className: "actions" });
  const article = element("article", { className: message.role }, title, thoughts, body, error, actions);
  $("log").append(article);
  const update = isRunning => {
    thoughts.hidden = !message.reasoning;
    thoughts.lastChild.textContent = message.reasoning ?? "";
    if (isPlain) body.textContent = message.content;
    else render(message.content, body);
    body.classList.toggle("waiting", Boolean(isRunning && !message.content));
    error.hidden = !message.error;
    error.textContent = message.error ?? "";
    actions.hidden = Boolean(isRunning);
    if (isRunning) return;
    const isLast = chat.messages.at(-1) === message;
    const again = button(message.error ? "Try again" : "Regenerate", null, regenerate);
    actions.replaceChildren(
      ...(message.content ? [button("Copy", isUser ? "Copy the message" : "Copy the answer", from => copy(message.content, from))] : []),
      ...(isUser ? [button("Edit", null, () => edit(message, article))] : isLast ? [again] : []),
      ...(message.note ? [element("span", { textContent: message.note })] : []),
    );
  };
  update(false);
  return update;
}

function showChat() {
  $("log").replaceChildren();
  for (const message of chat.messages) show(message);
  $("first").hidden = chat.messages.length > 0;
  showSystem();
  showList();
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

function showSystem() {
  const text = settings.isText() ? "" : settings.system();
  $("system-line").hidden = !text;
  $("system-line").textContent = "System prompt: " + text;
}

function showList() {
  const chats = history.all();
  $("list").replaceChildren(...chats.map(one => {
    const name = history.title(one);
    const title = button(name, null, () => change(() => openChat(one)));
    title.classList.add("title");
    title.title = new Date(one.at).toLocaleString();
    const remove = button("✕", "Delete: " + name, () => deleteChat(one.id));
    remove.classList.add("delete");
    const item = element("li", {}, title, remove);
    if (one.id === chat.id) {
      item.className = "open";
      title.setAttribute("aria-current", "true");
    }
    return item;
  }));
  $("delete-all").hidden = chats.length === 0;
  $("delete-all").textContent = "Delete all";
}

function showModel() {
  const one = model();
  if (!one) return;
  const isChoice = models.length > 1;
  $("models").hidden = !isChoice;
  $("model").hidden = isChoice;
  $("model").textContent = one.id;
  settings.allowChat(one.has_chat_template);
  if (!chat.messages.length) chat.mode = settings.isText() ? "text" : "chat";
  $("first-title").textContent = one.id;
  const facts = {
    context: one.max_model_len && `${one.max_model_len.toLocaleString("en")} tokens`, cache: one.cache_type,
    mode: settings.isText() && (one.has_chat_template ? "continues texts" : "continues texts: the model has no chat template"),
  };
  $("facts").replaceChildren(...Object.entries(facts).filter(([, value]) => value).map(([name, value]) =>
    element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }))));
  const examples = EXAMPLES[settings.isText() ? "text" : "chat"];
  $("examples").replaceChildren(...examples.map(text => {
    const node = element("button", { type: "button", textContent: text.trim() });
    node.addEventListener("click", () => send(text));
    return node;
  }));
  const hint = narrow.matches ? "" : " (Enter sends, Shift+Enter starts a line, Escape stops)";
  $("input").placeholder = (settings.isText() ? "A text to continue" : "Message") + hint;
}

/* --- Conversations --- */

/* Stops the answer in progress, and then acts. */
async function change(act) {
  running?.controller.abort();
  await running?.end;
  act();
}

function openChat(one) {
  chat = one;
  showHistory(false);
  showModel();
  showChat();
  $("input").focus();
}

function newChat() {
  openChat(history.create(settings.isText() ? "text" : "chat"));
}

function deleteChat(id) {
  const isOpen = id === chat.id;
  const act = () => {
    history.remove(id);
    if (isOpen) newChat();
    else showList();
  };
  if (isOpen) change(act);
  else act();
}

function deleteAll() {
  if ($("delete-all").textContent === "Delete all") {
    $("delete-all").textContent = "Delete all: sure?";
    return;
  }
  change(() => { history.removeAll(); newChat(); });
}

function keep() {
  if (!chat.messages.length) return;
  chat.at = Date.now();
  if (!history.save(chat)) say("This conversation has no room in the browser's storage");
}

function showHistory(isOpen) {
  const wasOpen = document.body.classList.contains("history-open");
  document.body.classList.toggle("history-open", isOpen);
  $("open-history").setAttribute("aria-expanded", String(isOpen));
  $("page").inert = isOpen;
  if (isOpen) $("new").focus();
  else if (wasOpen) $("open-history").focus();
}

/* --- Messages --- */

function send(text) {
  if (running || !text.trim() || !model()) return;
  $("first").hidden = true;
  if (!chat.messages.length) chat.mode = settings.isText() ? "text" : "chat";
  chat.messages.push({ role: "user", content: text });
  /* The previous answer can no longer be regenerated. */
  showChat();
  answer(0);
}

function regenerate() {
  if (running || chat.messages.at(-1)?.role !== "assistant") return;
  const { attempt = 0 } = chat.messages.pop();
  showChat();
  answer(attempt + 1);
}

function edit(message, article) {
  if (running) return;
  const field = element("textarea", { value: message.content, rows: Math.min(12, message.content.split("\n").length + 1) });
  field.setAttribute("aria-label", "Edit the message");
  const submit = () => {
    if (running || !field.value.trim()) return;
    chat.messages.splice(chat.messages.indexOf(message), Infinity, { role: "user", content: field.value });
    showChat();
    answer(0);
  };
  const save = element("button", { type: "button", className: "main", textContent: "Send" });
  save.addEventListener("click", submit);
  const cancel = element("button", { type: "button", textContent: "Cancel" });
  cancel.addEventListener("click", showChat);
  field.addEventListener("keydown", event => {
    if (isEnter(event)) { event.preventDefault(); submit(); }
    if (event.key === "Escape") { event.stopPropagation(); showChat(); }
  });
  article.querySelector(".body").replaceWith(element("div", { className: "edit" }, field, element("div", { className: "row" }, save, cancel)));
  article.querySelector(".actions").remove();
  field.focus();
}

/* The messages of a request. A failed answer and its question are left out. */
function asked() {
  const messages = [];
  for (const { role, content } of chat.messages) {
    if (role === "assistant" && !content) messages.pop();
    else messages.push({ role, content });
  }
  const system = settings.system();
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

function request(attempt) {
  const common = { model: model().id, stream: true, stream_options: { include_usage: true }, ...settings.sampling(attempt) };
  if (chat.mode === "text") return ["v1/completions", { ...common, prompt: chat.messages.at(-1).content }];
  return ["v1/chat/completions", { ...common, messages: asked() }];
}

/* Answers the last message. */
async function answer(attempt) {
  const [path, body] = request(attempt);
  const message = { role: "assistant", model: body.model, content: "", attempt };
  const asking = chat;
  chat.messages.push(message);
  const update = show(message);
  const controller = new AbortController();
  let finish;
  running = { controller, end: new Promise(resolve => { finish = resolve; }) };
  setRunning(true);
  const painter = paint(() => update(true));
  painter.ask();
  try {
    message.note = await receive(path, body, controller.signal, message, painter.ask);
  } catch (error) {
    if (error.name === "AbortError") message.note = "stopped";
    else message.error = error.message;
  }
  if (!message.content && !message.error) message.error = message.note === "stopped" ? "Stopped before the answer began" : "The answer is empty";
  painter.stop();
  update(false);
  scrollDown();
  running = null;
  keep();
  setRunning(false);
  if (chat === asking) showList();
  finish();
}

/* Streams an answer into a message. Returns its finish reason and speed. */
async function receive(path, body, signal, message, changed) {
  const began = performance.now();
  let first = null, usage = null, reason = null;
  await api.stream(path, body, signal, event => {
    usage = event.usage ?? usage;
    const choice = event.choices[0];
    if (!choice) return;
    reason = choice.finish_reason ?? reason;
    const { content, reasoning_content } = choice.delta ?? { content: choice.text };
    if (!content && !reasoning_content) return;
    first ??= performance.now();
    if (reasoning_content) message.reasoning = (message.reasoning ?? "") + reasoning_content;
    message.content += content ?? "";
    changed();
  });
  const parts = reason === "length" ? ["the limit of tokens ended it"] : [];
  if (usage && first) {
    const seconds = (performance.now() - first) / 1000;
    parts.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && seconds > 0.01) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(0)}/s`);
    parts.push(`first after ${((first - began) / 1000).toFixed(1)} s`);
  }
  return parts.join(" · ");
}

/* Throttles calls of `update`: the slower it is, the less often it runs. */
function paint(update) {
  let timer = null, cost = 0;
  const run = () => {
    timer = null;
    const began = performance.now();
    scrollDown(update);
    cost = performance.now() - began;
  };
  return {
    ask() { timer ??= setTimeout(run, Math.max(16, cost * 4)); },
    stop() { clearTimeout(timer); },
  };
}

/* Acts, and scrolls to the end of the conversation if the end was visible before. */
function scrollDown(act = () => {}) {
  const view = $("scroll");
  const isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 60;
  act();
  if (isAtEnd) view.scrollTop = view.scrollHeight;
}

function setRunning(isRunning) {
  $("send").hidden = isRunning;
  $("cancel").hidden = !isRunning;
  $("cancel").disabled = !isRunning;
  $("log").setAttribute("aria-busy", String(isRunning));
  say(isRunning ? "The answer is being written" : "The answer has ended");
  if (!isRunning && !document.activeElement?.closest("nav, dialog, .edit")) $("input").focus();
}

/* --- Start --- */

function isEnter(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

function fit() {
  $("input").style.height = "auto";
  $("input").style.height = $("input").scrollHeight + 2 + "px";
}

async function findModels() {
  try {
    const found = await api.models();
    settings.askKey(found === null);
    if (found === null) return;
    models = found;
    const before = $("models").value;
    $("models").replaceChildren(...models.map(one => element("option", { textContent: one.id })));
    if (models.some(one => one.id === before)) $("models").value = before;
    showModel();
  } catch (error) {
    $("model").textContent = `the server does not answer: ${error.message}`;
  }
}

function submit() {
  const text = $("input").value;
  if (running || !text.trim() || !model()) return;
  $("input").value = "";
  fit();
  send(text);
}

$("form").addEventListener("submit", event => { event.preventDefault(); submit(); });
$("input").addEventListener("keydown", event => { if (isEnter(event)) { event.preventDefault(); submit(); } });
$("input").addEventListener("input", fit);
$("cancel").addEventListener("click", () => running?.controller.abort());
$("new").addEventListener("click", () => change(newChat));
$("open-history").addEventListener("click", () => showHistory(true));
$("close-history").addEventListener("click", () => showHistory(false));
$("delete-all").addEventListener("click", deleteAll);
$("models").addEventListener("change", showModel);
$("log").addEventListener("click", event => {
  const from = event.target.closest(".copy-code");
  if (from) copy(from.closest(".code").querySelector("code").textContent, from);
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || $("settings").open) return;
  if (document.body.classList.contains("history-open")) showHistory(false);
  else running?.controller.abort();
});
document.addEventListener("click", event => {
  const isOver = document.body.classList.contains("history-open");
  if (isOver && !event.target.closest("#history, #open-history")) showHistory(false);
});
narrow.addEventListener("change", () => { showHistory(false); showModel(); });
window.addEventListener("storage", () => { if (!running) showList(); });
/* Keeps an unfinished answer when the page is closed. */
window.addEventListener("pagehide", () => { if (running) keep(); });

settings.start(() => { showSystem(); showModel(); }, key => { api.useKey(key); findModels(); });
chat = history.open() ?? chat;
window.addEventListener("pagehide", () => history.rememberOpen(chat.id));
showChat();
findModels();
startStrip();
$("input").focus();
