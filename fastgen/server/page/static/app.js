// The frame: views, the server's state in the header, the stream of snapshots.

import { about, live, models } from "./api.js";
import * as chat from "./chat.js";
import { $, number, write } from "./dom.js";
import * as liveView from "./live.js";
import * as settings from "./settings.js";

const VIEWS = ["chat", "live"];
let watching = null;

function open(view, focus = false) {
  for (const one of VIEWS) {
    const tab = $(`tab-${one}`);
    tab.setAttribute("aria-selected", String(one === view));
    tab.tabIndex = one === view ? 0 : -1;
    $(`view-${one}`).hidden = one !== view;
  }
  if (focus) $(`tab-${view}`).focus();
  liveView.visible(view === "live");
  history.replaceState(null, "", view === "chat" ? location.pathname : `#${view}`);
}

function setUpTabs() {
  for (const [at, view] of VIEWS.entries()) {
    $(`tab-${view}`).addEventListener("click", () => open(view));
    $(`tab-${view}`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const target = step ? VIEWS[(at + step + VIEWS.length) % VIEWS.length] : { Home: VIEWS[0], End: VIEWS.at(-1) }[event.key];
      if (target) {
        event.preventDefault();
        open(target, true);
      }
    });
  }
  open(location.hash === "#live" ? "live" : "chat");
}

function pulse(state, text, rate = "") {
  $("pulse").dataset.state = state;
  write($("pulse-text"), text);
  write($("pulse-rate"), rate);
}

function known(names) {
  settings.knowNames(names);
  write($("model-name"), settings.requestFields().model ?? "");
}

/** Also where the live stream is not to be had. */
async function askForNames() {
  try {
    known(await models());
  } catch {
    // the first message will say what is wrong
  }
}

function heard(kind, content) {
  if (kind === "hello") {
    known(content.names);
    liveView.hello(content);
    return;
  }
  const { state, running, waiting } = content;
  const rate = content.rates.answer;
  if (state !== "ready" || !(running + waiting)) pulse(state, state);
  else pulse(state, `${number(running)} running`, ` · ${number(rate, rate < 10 ? 1 : 0)} tok/s`);
  liveView.frame(content);
}

/** Snapshots for as long as somebody looks; begins again when the stream breaks. */
async function watch() {
  watching?.abort();
  const own = (watching = new AbortController());
  for (let wait = 500; !own.signal.aborted; wait = Math.min(wait * 2, 10_000)) {
    try {
      for await (const [kind, content] of live(own.signal)) {
        if (kind === "frame") wait = 500;
        heard(kind, content);
      }
      pulse("away", "reconnecting");
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === 401) {
        pulse("away", "key needed");
        return; // a new key begins it anew
      }
      pulse("away", error.status ? "not ready" : "no connection");
    }
    liveView.lost();
    await new Promise((done) => setTimeout(done, wait));
  }
}

function looking() {
  if (document.hidden) watching?.abort();
  else watch();
}

async function start() {
  settings.setUp((keyToo) => {
    write($("model-name"), settings.requestFields().model ?? "");
    if (keyToo) {
      askForNames();
      watch();
    }
  });
  chat.setUp();
  liveView.setUp();
  setUpTabs();
  document.addEventListener("visibilitychange", looking);
  looking();
  askForNames();
  try {
    settings.askForKey((await about()).needs_key);
  } catch {
    settings.askForKey(true);
  }
}

start();
