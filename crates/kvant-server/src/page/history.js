/* Conversations in the browser's storage. Each has its own entry, so that windows do not overwrite each other. */

const PREFIX = "kvant.conversation.";
const OPEN = "kvant.open";
const MOST = 100;
/* Maximum characters of all conversations. Browsers store 5 million per server. */
const MAX_CHARACTERS = 2_000_000;

export function create(mode) {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, at: Date.now(), mode, messages: [] };
}

export function title(chat) {
  const text = chat.messages[0]?.content.trim().split("\n")[0] ?? "";
  return text.length > 80 ? text.slice(0, 80) + "…" : text || "Conversation";
}

/* Whether a stored value is a conversation. Other pages with the same host name can write to the storage. */
function isChat(chat) {
  const isMessage = message => message && typeof message.content === "string" && ["user", "assistant"].includes(message.role);
  return chat && typeof chat.id === "string" && Array.isArray(chat.messages) && chat.messages.every(isMessage);
}

/* All conversations, the latest first. */
export function all() {
  const found = [];
  for (const key of keys()) {
    try {
      const chat = JSON.parse(localStorage.getItem(key));
      if (isChat(chat) && PREFIX + chat.id === key) found.push(chat);
    } catch { /* Not a conversation. */ }
  }
  return found.sort((a, b) => b.at - a.at);
}

function keys() {
  try {
    return Object.keys(localStorage).filter(key => key.startsWith(PREFIX));
  } catch {
    return [];
  }
}

/* Saves a conversation, and drops the oldest ones to make room. Returns whether it was saved. */
export function save(chat) {
  const text = JSON.stringify(chat);
  if (text.length > MAX_CHARACTERS) return false;
  const others = all().filter(other => other.id !== chat.id).map(other => [other.id, JSON.stringify(other).length]);
  let characters = text.length + others.reduce((sum, [, length]) => sum + length, 0);
  for (;;) {
    while (others.length >= MOST || (others.length && characters > MAX_CHARACTERS)) {
      const [id, length] = others.pop();
      characters -= length;
      remove(id);
    }
    try {
      localStorage.setItem(PREFIX + chat.id, text);
      return true;
    } catch {
      /* The browser stores less than that, or nothing. */
      if (!others.length) return false;
      remove(others.pop()[0]);
    }
  }
}

export function remove(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch { /* Nothing is stored. */ }
}

/* The conversation that is open in this window, which a reload continues. */
export function open() {
  try {
    const id = sessionStorage.getItem(OPEN);
    return all().find(chat => chat.id === id);
  } catch {
    return undefined;
  }
}

export function rememberOpen(id) {
  try {
    sessionStorage.setItem(OPEN, id);
  } catch { /* A reload starts a new conversation. */ }
}

export function removeAll() {
  for (const key of keys()) remove(key.slice(PREFIX.length));
}
