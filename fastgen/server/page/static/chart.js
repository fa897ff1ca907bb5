// Two charts over the last half minute. They glide between snapshots, unless less motion is asked for.

import { number } from "./dom.js";

const SECONDS = 30;
const DELAY = 0.4; // seconds behind the server, so that the right edge is drawn when its snapshot is there
const AXIS = 40; // pixels
const calm = matchMedia("(prefers-reduced-motion: reduce)");

class Chart {
  constructor(canvas) {
    this.canvas = canvas;
    this.running = false;
    this.offset = null; // the server's clock less this one's
    this.alive = false;
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Draws while `yes`. */
  run(yes) {
    const begins = yes && !this.running;
    this.running = yes;
    if (begins) this.glide();
  }

  glide() {
    if (!this.running) return;
    this.draw();
    if (!calm.matches) requestAnimationFrame(() => this.glide());
  }

  arrived(now) {
    const offset = now - performance.now() / 1000;
    // The least delayed snapshot of late tells the clock; it drifts back slowly.
    this.offset = this.offset === null || offset > this.offset ? offset : this.offset * 0.98 + offset * 0.02;
    this.alive = true;
    if (calm.matches && this.running) this.draw();
  }

  lost() {
    this.alive = false;
  }

  now() {
    if (!this.alive && this.stopped) return this.stopped;
    const now = performance.now() / 1000 + (this.offset ?? 0) - DELAY;
    this.stopped = this.alive ? null : now;
    return now;
  }

  draw() {
    const { canvas } = this;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width || !height) return;
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    this.colour = (name) => style.getPropertyValue(name).trim();
    pen.font = `11px ${style.fontFamily}`;
    const now = this.now();
    const area = { left: AXIS, right: width - 2, top: 10, bottom: height - 18 };
    this.x = (time) => area.right - ((now - time) / SECONDS) * (area.right - area.left);
    this.times(pen, area);
    this.paint(pen, area, now);
  }

  times(pen, { left, right, bottom }) {
    pen.fillStyle = this.colour("--muted");
    pen.textBaseline = "top";
    for (const [ago, align] of [[30, "left"], [15, "center"], [0, "right"]]) {
      pen.textAlign = align;
      pen.fillText(ago ? `${ago} s ago` : "now", right - (ago / SECONDS) * (right - left), bottom + 5);
    }
  }

  /** A line across at `value`, with its number. */
  rule(pen, { left, right }, y, value, { dashed = false, colour = "--line" } = {}) {
    pen.strokeStyle = this.colour(colour);
    pen.lineWidth = 1;
    pen.setLineDash(dashed ? [4, 4] : []);
    pen.beginPath();
    pen.moveTo(left, Math.round(y) + 0.5);
    pen.lineTo(right, Math.round(y) + 0.5);
    pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = this.colour("--muted");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText(number(value), left - 6, y);
  }
}

/** A bar for each pass: as wide as it took, as high as its tokens. Each engine has a lane of its own. */
export class Passes extends Chart {
  bars = [];
  budget = 1;
  engines = [0];

  hello({ now, budget, history }) {
    this.budget = budget;
    this.bars = history;
    this.last = history.length ? history.at(-1) : null;
    this.arrived(now);
  }

  frame({ now, passes, replicas }) {
    if (passes.length) this.last = passes.at(-1);
    this.bars.push(...passes);
    const old = now - SECONDS - 5;
    if (this.bars.length && this.bars[0][1] < old) this.bars = this.bars.filter((bar) => bar[1] >= old);
    if (replicas.length !== this.engines.length) this.canvas.style.height = `${Math.min(130 + 100 * replicas.length, 650)}px`;
    this.engines = replicas.map((one) => one.index);
    this.arrived(now);
  }

  note() {
    if (!this.last) return `no pass yet, budget ${number(this.budget)}`;
    return `${number(this.last[4])} of ${number(this.budget)} in the last one`;
  }

  paint(pen, area, now) {
    const lane = (area.bottom - area.top) / this.engines.length;
    const gap = this.engines.length > 1 ? 14 : 0;
    for (const [at, engine] of this.engines.entries()) {
      const top = area.top + at * lane + (at ? gap : 0);
      this.lane(pen, { ...area, top, bottom: area.top + (at + 1) * lane }, now, engine, at);
    }
  }

  lane(pen, area, now, engine, at) {
    const y = (tokens) => area.bottom - (Math.min(tokens / this.budget, 1.05) * (area.bottom - area.top)) / 1.05;
    this.rule(pen, area, y(0), 0);
    if (area.bottom - area.top > 60) this.rule(pen, area, y(this.budget / 2), this.budget / 2);
    pen.save();
    pen.beginPath();
    pen.rect(area.left, area.top - 4, area.right - area.left, area.bottom - area.top + 4);
    pen.clip();
    pen.fillStyle = this.colour(`--series-${at % 6}`);
    for (const [replica, end, seconds, most, mean] of this.bars) {
      if (replica !== engine || end < now - SECONDS - 1) continue;
      const [left, right] = [this.x(end - seconds), this.x(end)];
      const width = Math.max(right - left - (right - left > 4 ? 1 : 0), 1.2);
      if (most > mean) {
        pen.globalAlpha = 0.35;
        pen.fillRect(left, y(most), width, y(0) - y(most));
      }
      pen.globalAlpha = 0.9;
      pen.fillRect(left, y(mean), width, Math.max(y(0) - y(mean), 1));
    }
    pen.restore();
    this.rule(pen, area, y(this.budget), this.budget, { dashed: true, colour: "--accent" });
    if (this.engines.length > 1) this.name(pen, area, `engine ${engine}`);
  }

  name(pen, { left, top }, text) {
    pen.textAlign = "left";
    pen.textBaseline = "top";
    const { width } = pen.measureText(text);
    pen.fillStyle = this.colour("--card");
    pen.globalAlpha = 0.85;
    pen.fillRect(left + 2, top + 8, width + 8, 16);
    pen.globalAlpha = 1;
    pen.fillStyle = this.colour("--ink");
    pen.fillText(text, left + 6, top + 11);
  }
}

/** How many run, and above them how many wait. */
export class Queue extends Chart {
  points = [];

  hello({ now }) {
    this.points = [];
    this.arrived(now);
  }

  frame({ now, running, waiting }) {
    this.points.push([now, running, waiting]);
    while (this.points.length && this.points[0][0] < now - SECONDS - 2) this.points.shift();
    this.arrived(now);
  }

  paint(pen, area) {
    const top = Math.max(4, ...this.points.map(([, running, waiting]) => running + waiting));
    const y = (count) => area.bottom - (count / top) * (area.bottom - area.top);
    this.rule(pen, area, y(0), 0);
    this.rule(pen, area, y(top), top);
    pen.save();
    pen.beginPath();
    pen.rect(area.left, 0, area.right - area.left, area.bottom);
    pen.clip();
    this.fill(pen, y, ([, running, waiting]) => running + waiting, "--waiting");
    this.fill(pen, y, ([, running]) => running, "--series-0");
    pen.restore();
  }

  /** Steps: a count holds until the next snapshot. */
  fill(pen, y, value, colour) {
    if (!this.points.length) return;
    pen.fillStyle = this.colour(colour);
    pen.beginPath();
    pen.moveTo(this.x(this.points[0][0]), y(0));
    let before = 0;
    for (const point of this.points) {
      pen.lineTo(this.x(point[0]), y(before));
      before = value(point);
      pen.lineTo(this.x(point[0]), y(before));
    }
    const end = this.x(this.points.at(-1)[0] + DELAY);
    pen.lineTo(end, y(before));
    pen.lineTo(end, y(0));
    pen.fill();
  }
}
