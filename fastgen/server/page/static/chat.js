// The conversation.

import { ServerError, chat } from "./api.js";
import { $, copy, duration, el, number } from "./dom.js";
import { current, openSettings, requestFields } from "./settings.js";
import { loadChat, saveChat } from "./store.js";
import { show } from "./text.js";

const messages = loadChat();
let running = null; // the AbortController of the answer that is coming

export function setUp() {
  const text = $("composer-text");
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  text.addEventListener("input", fit);
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !$("settings").open) stop();
  });
  $("stop").addEventListener("click", stop);
  $("new-chat").addEventListener("click", clear);
  window.addEventListener("pagehide", () => saveChat(messages));
  draw();
}

function send() {
  const text = $("composer-text");
  const content = text.value.trim();
  if (!content || running) return;
  text.value = "";
  fit();
  messages.push({ role: "user", content });
  answer();
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  messages.length = 0;
  complain("");
  saveChat(messages);
  draw();
  $("composer-text").focus();
}

/** Answers the last message of the user, once more if it has been answered. */
function again() {
  if (running) return;
  while (messages.length && messages.at(-1).role === "assistant") messages.pop();
  if (messages.length) answer();
}

async function answer() {
  const message = { role: "assistant", content: "", note: "" };
  const history = messages.map(({ role, content }) => ({ role, content }));
  if (current().system) history.unshift({ role: "system", content: current().system });
  messages.push(message);
  complain("");
  draw();
  const shown = $("messages").lastElementChild;
  shown.classList.add("coming");
  const own = (running = new AbortController());
  busy(true);
  const start = performance.now();
  const seen = { first: null, usage: null, reason: "" };
  try {
    for await (const piece of chat({ ...requestFields(), messages: history }, own.signal)) {
      if (piece.text) {
        seen.first ??= performance.now();
        message.content += piece.text;
        refresh(shown, message);
      }
      if (piece.reason) seen.reason = piece.reason;
      if (piece.usage) seen.usage = piece.usage;
    }
    message.note = summary(start, seen);
  } catch (error) {
    message.note = "stopped";
    if (error.name !== "AbortError") fault(error, message);
  } finally {
    if (running === own) {
      running = null;
      busy(false);
    }
    if (messages.includes(message)) settle(message, shown);
  }
}

/** The answer is over, whatever it was. */
function settle(message, shown) {
  const follow = atEnd();
  if (message.content || message.note !== "stopped") {
    shown.replaceWith(drawOne(message, messages.indexOf(message)));
  } else {
    messages.splice(messages.indexOf(message), 1);
    draw();
  }
  if (follow) toEnd();
  if (!saveChat(messages)) complain("This browser has no room left to keep the conversation.");
  $("said").textContent = message.content ? `Answer: ${message.content.slice(0, 500)}` : "";
}

function fault(error, message) {
  message.note = message.content ? "broke off" : "stopped";
  const known = error instanceof ServerError;
  complain(known ? error.message : `Something is wrong with this page: ${error.message}`, known);
  if (error.status === 401) openSettings("set-key");
}

function summary(start, { first, usage, reason }) {
  const parts = [];
  const tokens = usage?.completion_tokens;
  if (tokens) parts.push(`${number(tokens)} tokens`);
  if (tokens > 1 && first !== null) {
    const rate = ((tokens - 1) * 1000) / Math.max(performance.now() - first, 1);
    parts.push(`${number(rate, rate < 100 ? 1 : 0)} a second`);
  }
  if (first !== null) parts.push(`first after ${duration((first - start) / 1000)}`);
  if (reason === "length") parts.push("cut at the limit of tokens");
  return parts.join(" · ");
}

// ---- drawing --------------------------------------------------------------------------------------------------------

function draw() {
  const list = $("messages");
  list.replaceChildren(...(messages.length ? messages.map(drawOne) : [welcome()]));
  $("new-chat").disabled = messages.length === 0;
  toEnd();
}

function drawOne(message, index) {
  const body = el("div", { class: "body" });
  if (message.role === "user") body.textContent = message.content;
  else show(body, message.content);
  const tools = el("div", { class: "actions" });
  const button = el("button", { type: "button", class: "quiet", onclick: () => copy(message.content, button) }, "Copy");
  tools.append(button);
  if (index === messages.length - 1) {
    const label = message.role === "assistant" ? "Regenerate" : "Answer this";
    tools.append(el("button", { type: "button", class: "quiet", onclick: again }, label));
  }
  if (message.note) tools.append(el("small", {}, message.note));
  const who = message.role === "user" ? "You" : "Model";
  return el("article", { class: `message ${message.role}`, "aria-label": who }, el("h2", { class: "hidden" }, who), body, tools);
}

function welcome() {
  return el(
    "div",
    { class: "welcome" },
    el("p", {}, "Say something to the model."),
    el("small", {}, "The conversation stays in this browser. Sampling and a system prompt are under Settings."),
  );
}

/** At most once a frame, however fast tokens come. */
function refresh(shown, message) {
  if (shown.due) return;
  shown.due = true;
  requestAnimationFrame(() => {
    shown.due = false;
    const follow = atEnd();
    show(shown.querySelector(".body"), message.content);
    if (follow) toEnd();
  });
}

function atEnd() {
  const list = $("messages");
  return list.scrollHeight - list.scrollTop - list.clientHeight < 60;
}

function toEnd() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

function busy(on) {
  const focused = document.activeElement;
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("messages").setAttribute("aria-busy", String(on));
  // Where what had the focus is gone, the next thing of use gets it; a phone's keyboard is not called up for that.
  if (on && (focused === $("send") || focused === document.body)) $("stop").focus();
  if (!on && focused === $("stop") && !matchMedia("(pointer: coarse)").matches) $("composer-text").focus();
  if (on) $("said").textContent = "The model is answering.";
}

function complain(text, retry = false) {
  const notice = $("notice");
  notice.hidden = !text;
  notice.replaceChildren(text);
  if (text && retry && messages.length) {
    notice.append(el("button", { type: "button", class: "quiet", onclick: again }, "Try again"));
  }
}

/** The box grows with its text. */
function fit() {
  const text = $("composer-text");
  text.style.height = "auto";
  text.style.height = `${Math.min(text.scrollHeight, window.innerHeight * 0.35)}px`;
}
