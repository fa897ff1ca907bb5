// The live view: figures, charts and tables from the server's snapshots.

import { Queue, Passes } from "./chart.js";
import { $, duration, el, number, write } from "./dom.js";

const LATENCIES = [
  ["first", "To the first token"],
  ["gap", "Between tokens"],
  ["whole", "Whole answers"],
];
const FIGURES = [
  ["answer", "Tokens out", "a second"],
  ["prompt", "Tokens in", "a second"],
  ["running", "Running", "answers"],
  ["waiting", "Waiting", "in the queue"],
];

let passes;
let queue;
const cells = {};

export function setUp() {
  passes = new Passes($("chart-passes"));
  queue = new Queue($("chart-queue"));
  for (const [name, title, unit] of FIGURES) {
    cells[name] = el("strong", {}, "–");
    $("figures").append(el("article", { class: "card figure" }, el("span", {}, title), cells[name], el("small", {}, unit)));
  }
  for (const [name, title] of LATENCIES) {
    cells[name] = ["p50", "p95", "p99"].map(() => el("td", {}, "–"));
    $("latency").tBodies[0].append(el("tr", {}, el("th", { scope: "row" }, title), ...cells[name]));
  }
  for (const kind of ["used", "cached", "free"]) {
    cells[kind] = el("dd", {}, "–");
    $("cache-legend").append(el("dt", { class: kind }, kind), cells[kind]);
  }
}

export function visible(yes) {
  passes.run(yes);
  queue.run(yes);
}

export function hello(content) {
  passes.hello(content);
  queue.hello(content);
  const quantised = content.quantization ? `, ${content.quantization}` : "";
  write(
    $("about"),
    `fastgen ${content.version} · ${content.architecture} in ${content.dtype}${quantised} on ${content.device} · ` +
      `up to ${number(content.max_model_len)} tokens each, ${number(content.max_sequences)} at once`,
  );
}

export function frame(content) {
  passes.frame(content);
  queue.frame(content);
  figures(content);
  cache(content);
  latency(content.latency);
  replicas(content.replicas);
}

export function lost() {
  passes.lost();
  queue.lost();
}

function figures({ rates, running, waiting }) {
  for (const name of ["answer", "prompt"]) write(cells[name], number(rates[name], rates[name] && rates[name] < 10 ? 1 : 0));
  write(cells.running, number(running));
  write(cells.waiting, number(waiting));
  write($("queue-note"), `${number(running)} running, ${number(waiting)} waiting`);
  $("chart-queue").setAttribute("aria-label", `${running} answers running, ${waiting} waiting`);
  write($("pass-note"), passes.note());
  $("chart-passes").setAttribute("aria-label", `Tokens of each forward pass. ${passes.note()}`);
}

function cache({ used, cached, total }) {
  const free = total - used - cached;
  const [usedBar, cachedBar] = $("cache-bar").children;
  usedBar.style.width = total ? `${(100 * used) / total}%` : "0";
  cachedBar.style.width = total ? `${(100 * cached) / total}%` : "0";
  for (const [kind, count] of Object.entries({ used, cached, free })) write(cells[kind], number(count));
  write($("cache-note"), total ? `${number((100 * used) / total, used && used < total / 100 ? 1 : 0)} % of ${number(total)} in use` : "");
  $("cache-bar").setAttribute("aria-label", `Cache blocks: ${used} used, ${cached} cached, ${free} free`);
}

function latency(latencies) {
  for (const [name] of LATENCIES) {
    const { p50, p95, p99 } = latencies[name];
    for (const [at, value] of [p50, p95, p99].entries()) write(cells[name][at], duration(value));
  }
  write($("latency-note"), latencies.first.count || latencies.gap.count ? `last ${number(latencies.seconds)} s` : "nothing lately");
}

function counts({ running, waiting, passes: done }) {
  return `${number(running)} running, ${number(waiting)} waiting` + (done === null ? "" : `, ${number(done)} passes`);
}

function replicas(rows) {
  const list = $("replicas");
  while (list.children.length > rows.length) list.lastElementChild.remove();
  while (list.children.length < rows.length) {
    const parts = { name: el("b"), state: el("span", { class: "state" }), detail: el("small") };
    const item = el("li", {}, el("i", { "aria-hidden": "true" }), parts.name, parts.state, parts.detail);
    item.parts = parts;
    list.append(item);
  }
  for (const [at, row] of rows.entries()) {
    const { name, state, detail } = list.children[at].parts;
    list.children[at].dataset.state = row.state;
    list.children[at].dataset.colour = at % 6;
    write(name, `Engine ${row.index}`);
    write(state, row.state);
    const restarts = row.restarts ? ` · restarted ${row.restarts === 1 ? "once" : `${number(row.restarts)} times`}` : "";
    write(detail, (row.detail || counts(row)) + restarts);
  }
  const ready = rows.filter((row) => row.state === "ready").length;
  write($("engines-note"), `${ready} of ${rows.length} ready`);
}
