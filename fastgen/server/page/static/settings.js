// The dialog of settings, and what of them goes into a request.

import { useKey } from "./api.js";
import { $, el } from "./dom.js";
import { NUMBERS, loadKey, loadSettings, saveKey, saveSettings } from "./store.js";

let settings = loadSettings();
let names = [];

export const current = () => settings;

/** Fields of a chat request: only those that were set, so that the model's own defaults hold. */
export function requestFields() {
  const fields = { model: names.includes(settings.model) ? settings.model : names[0] };
  for (const name of NUMBERS) if (name in settings) fields[name] = settings[name];
  return fields;
}

export function knowNames(given) {
  names = given;
  const select = $("set-model");
  select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  select.value = names.includes(settings.model) ? settings.model : names[0];
  $("model-row").hidden = names.length < 2;
}

export function askForKey(needed) {
  $("key-row").hidden = !needed;
}

export function openSettings(focus) {
  fill();
  $("settings").showModal();
  if (focus) $(focus).focus();
}

/** `changed(keyToo)` is called when the dialog closes. */
export function setUp(changed) {
  useTheme();
  $("open-settings").addEventListener("click", () => openSettings());
  $("settings").addEventListener("close", () => {
    const before = loadKey();
    read();
    saveSettings(settings);
    useTheme();
    changed(loadKey() !== before);
  });
  $("settings").addEventListener("click", (event) => {
    if (event.target === $("settings")) $("settings").close(); // outside the form
  });
  $("reset-settings").addEventListener("click", () => {
    settings = {};
    fill();
  });
}

function fill() {
  for (const name of NUMBERS) $(`set-${name}`).value = settings[name] ?? "";
  $("set-system").value = settings.system ?? "";
  $("set-theme").value = settings.theme ?? "";
  $("set-key").value = loadKey();
}

function read() {
  const next = {};
  for (const name of NUMBERS) {
    const field = $(`set-${name}`);
    if (field.value !== "" && field.checkValidity() && Number.isFinite(field.valueAsNumber)) next[name] = field.valueAsNumber;
  }
  const texts = { system: $("set-system").value, theme: $("set-theme").value, model: $("set-model").value };
  for (const [name, text] of Object.entries(texts)) if (text) next[name] = text;
  settings = next;
  saveKey($("set-key").value.trim());
  useKey($("set-key").value.trim());
}

function useTheme() {
  if (settings.theme === "light" || settings.theme === "dark") document.documentElement.dataset.theme = settings.theme;
  else delete document.documentElement.dataset.theme;
}
