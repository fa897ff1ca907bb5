// Elements from plain values. Text is always text: nothing here, or anywhere on the page, parses markup.

export const $ = (id) => document.getElementById(id);

/** An element. `attributes` are set as attributes, except `on...`, which are listeners; `false` and `null` are left out. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Sets text only where it differs, so that a live figure does not disturb a selection or a screen reader. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export async function copy(text, button) {
  const was = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = copyByHand(text) ? "Copied" : "Cannot copy";
  }
  setTimeout(() => (button.textContent = was), 1500);
}

/** Where the clipboard's own interface is missing: on plain http from another machine. */
function copyByHand(text) {
  const back = document.activeElement;
  const area = el("textarea", { class: "hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  back?.focus();
  return done;
}

export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

/** Seconds, as people say them. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return `${number(seconds * 1e6)} µs`;
  if (seconds < 0.01) return `${number(seconds * 1e3, 1)} ms`;
  if (seconds < 1) return `${number(seconds * 1e3)} ms`;
  return seconds < 100 ? `${number(seconds, seconds < 10 ? 2 : 1)} s` : `${number(seconds / 60, 1)} min`;
}
