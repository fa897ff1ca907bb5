// What survives a reload: the conversation and the settings. What is read back is checked, for anyone may have written it.

const CHAT = "fastgen.chat.1";
const SETTINGS = "fastgen.settings.1";
const KEY = "fastgen.key";
const ROLES = new Set(["user", "assistant"]);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];
const TEXTS = ["model", "system", "theme"];

export { NUMBERS };

export function loadChat() {
  const read = parsed(localStorage, CHAT);
  if (!Array.isArray(read)) return [];
  return read
    .filter((one) => one && ROLES.has(one.role) && typeof one.content === "string" && one.content)
    .map((one) => ({ role: one.role, content: one.content, note: typeof one.note === "string" ? one.note : "" }));
}

/** Whether there was room. */
export function saveChat(messages) {
  return written(localStorage, CHAT, messages.map(({ role, content, note }) => ({ role, content, note: note || "" })));
}

export function loadSettings() {
  const read = parsed(localStorage, SETTINGS) ?? {};
  const settings = {};
  for (const name of NUMBERS) if (Number.isFinite(read[name])) settings[name] = read[name];
  for (const name of TEXTS) if (typeof read[name] === "string" && read[name]) settings[name] = read[name];
  return settings;
}

export function saveSettings(settings) {
  return written(localStorage, SETTINGS, settings);
}

/** The API key lives as long as the tab: the next user of this machine does not find it. */
export function loadKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function saveKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // It holds for this page then.
  }
}

function parsed(storage, name) {
  try {
    return JSON.parse(storage.getItem(name) ?? "null");
  } catch {
    return null;
  }
}

function written(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or not allowed
  }
}
